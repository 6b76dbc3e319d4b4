"""P(offload="params"): shards, gradients and the optimizer's state rest on the host; values are the same to the last bit."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from depth import each
from hosted import elsewhere
from models import unchanged
from parity import numbers
from peer_models import MLP, Net
from ranks import Pool
from test_offload import BLOCK, HIGHER, STEP, equal, loss_of, noisy, transformer
from torch import Tensor, nn

import funshard as fs
from funshard import P

PARAMS = "params"
HALF = fs.Precision(param=torch.float32, reduce=torch.float64)
NARROW = fs.Precision(param=torch.float32, reduce=torch.float32)
FLOAT8 = fs.Codec(lambda x: (x.float(), x.abs().amax()), lambda x, scale: x.to(scale.dtype) + 0 * scale)
PS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "kept": {"reshard": False},
    "recomputed": {"remat": True},
    "mixed": {"precision": HALF},
    "narrow": {"precision": NARROW},
    "encoded": {"precision": fs.Precision(codec=FLOAT8)},
    "replicated": {"axis": None},
}


def p_of(which: str, **more: Any) -> P:
    return P(**{"axis": "shard", **PS[which], **more})


# --- the same bits ---


def units(rank: int, name: str, which: str, way: str) -> None:
    model = noisy() if name == "noisy" else transformer(name, way in HIGHER)
    blocks = type(model.get_submodule(BLOCK[name]))
    with unchanged(model):
        plain = fs.by_type(blocks, p=p_of(which))(model).bound
        params = fs.shard(model, plain)
        expected = STEP[way](loss_of(model, plain, rank), params)
        with elsewhere() as copies:
            spec = fs.by_type(blocks, p=p_of(which, offload=PARAMS))(model).bound
            shards = fs.shard(model, spec)
            equal(shards, params)
            equal(STEP[way](loss_of(model, spec, rank), shards), expected)
            assert copies.beside + copies.nodes > 6
            assert copies.beside > 6 or way in ("hvp", "grad of grad")
            equal(fs.unshard(shards, spec), fs.unshard(params, plain))
    gc.collect()


@each
@pytest.mark.parametrize("way", [*STEP])
@pytest.mark.parametrize("which", [*PS])
@pytest.mark.parametrize("name", ["noisy", "gpt2"])
def test_units_on_real_ranks(gloo2: Pool, name: str, which: str, way: str) -> None:
    """Two ranks, dropout and buffers included: the bits of the same units without offload."""
    if which in ("mixed", "narrow", "encoded") and name != "noisy":
        pytest.skip("those of transformers are float32 as they are")
    gloo2.run(units, name, which, way)

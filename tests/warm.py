"""What processes forked for tests need and is slow the first time: imported, and used once, where they are forked from.

Of torch and transformers alone: each rank meets funshard for the first time. No thread is started (tests/collectives).
"""

from __future__ import annotations

import contextlib
import importlib
import warnings

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch
import torch._inductor.compile_fx
import torch.distributed.checkpoint
import torch.distributed.optim
import torch.distributed.tensor
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, jvp
from torch.fx.experimental.proxy_tensor import make_fx

import funshard  # noqa: F401

torch.set_num_threads(1)


def _use() -> None:
    """Derivatives and the compiler: of each, the first use takes as long as many others."""
    model = nn.Linear(2, 2)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, Tensor]) -> Tensor:
        return functional_call(model, params, torch.ones(2)).tanh().sum()

    jvp(grad_and_value(loss), (params,), (params,))
    make_fx(grad_and_value(loss))(params)
    torch.compile(grad_and_value(loss), backend="eager")(params)
    torch._dynamo.reset()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    _use()
    with contextlib.suppress(ImportError):  # a test that needs it says so
        importlib.import_module("transformers.models.llama.modeling_llama")

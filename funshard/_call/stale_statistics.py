"""The warning, once for a model, of evaluation with running statistics that training has not updated.

A training call with ``buffers=`` updates those, and leaves the model's own as they were. An evaluation without ``buffers=``
then normalises with the model's own: the initial ones, or those that the model was loaded with before it was trained.
torch.compile traces the values away, so a compiled call is not checked.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from .. import _torch
from .._spec.spec import abridge
from .._spec.tree import join_path
from .buffers import BufferWarning
from .warn_once import is_first_warning, was_warned

__all__ = ["check_statistics"]

_COMPARED: WeakSet[nn.Module] = WeakSet()
"""The models whose statistics have been compared with the initial values: once for each, since that waits for a device."""

_UPDATED_ELSEWHERE: WeakKeyDictionary[nn.Module, dict[str, tuple[int, int]]] = WeakKeyDictionary()
"""For models trained with ``buffers=``: the `_statistics_version` of their own statistics at the first such call, by name."""


def check_statistics(model: nn.Module, layers: Mapping[str, nn.Module], given: Collection[str], stacklevel: int) -> None:
    """Warn, once for a model, where layers in eval mode have read statistics of the model's own that are out of date.

    ``layers`` are the model's normalisation layers by path, ``given`` the names in ``buffers=``.
    """
    if was_warned(model, "stale statistics"):
        return
    if (not given or model in _UPDATED_ELSEWHERE) and all(layer.training for layer in layers.values()):
        return  # as in every training call but the first
    read: dict[str, nn.Module] = {}
    updated: dict[str, nn.Module] = {}
    for path, layer in layers.items():
        for name in _statistics_names(path, layer):
            if layer.training and name in given:
                updated[name] = layer
            elif not layer.training and name not in given:
                read[name] = layer
    if updated and model not in _UPDATED_ELSEWHERE:
        _UPDATED_ELSEWHERE[model] = {name: _statistics_version(name, layer) for name, layer in updated.items()}
    if not read:
        return
    before = _UPDATED_ELSEWHERE.get(model, {})
    stale = [name for name, layer in read.items() if name in before and before[name] == _statistics_version(name, layer)]
    why = "training calls were given others in buffers=, updated those, and left these as they were"
    if not stale and model not in _COMPARED and not _torch.is_traced():
        _COMPARED.add(model)
        stale = [name for name, layer in read.items() if _is_initial(layer)]
        why = "they are those of a new model (mean 0, variance 1), which no training has updated"
    if stale and is_first_warning(model, "stale statistics"):
        warnings.warn(
            f"functional_call: layers in eval mode normalise with the model's own {abridge(dict.fromkeys(stale), 2)}: {why}; "
            "expected the statistics of training in buffers=, or loaded into the model by "
            "model.load_state_dict(buffers, strict=False); filter funshard.BufferWarning if the model's own are meant",
            BufferWarning,
            stacklevel=stacklevel + 1,
        )


def _statistics_names(path: str, layer: nn.Module) -> Iterator[str]:
    """Yield the names of a layer's running mean and variance, if it keeps them."""
    return (join_path(path, attr) for attr in ("running_mean", "running_var") if layer._buffers.get(attr) is not None)


def _statistics_version(name: str, layer: nn.Module) -> tuple[int, int]:
    """Return what changes where the statistics do. Kernels of BatchNorm do not move their version, but the layer counts."""
    tensor, count = layer._buffers[name.rpartition(".")[2]], layer._buffers.get("num_batches_tracked")
    return id(tensor), sum(_torch.version(x) for x in (tensor, count) if x is not None)


def _is_initial(layer: nn.Module) -> bool:
    """Return whether running statistics are still mean 0 and variance 1; False for fake tensors."""
    for attr, value in (("running_mean", 0), ("running_var", 1)):
        if (tensor := layer._buffers.get(attr)) is not None:
            is_equal = torch.all(tensor == value)
            if _torch.is_fake(is_equal) or not is_equal:
                return False
    return True

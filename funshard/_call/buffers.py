"""A model's buffers in a functional_call: lazy copies that are thrown away with a warning, or given ones that are updated.

A training call with ``buffers=`` updates those, and leaves the model's own as they were. A warning, once for a model, says that
an evaluation without ``buffers=`` normalises with initial ones. A compiled call is not checked.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Hashable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from .. import _torch
from .._core.spec import PartitionSpec, abridge
from .._core.tree import join_path
from .._torch.modules import NormWithStatistics
from .casting import buffer_dtype, cast_back, cast_floats
from .module_state import own_tensors

_WARNED: WeakKeyDictionary[Any, set[Hashable]] = WeakKeyDictionary()
"""The kinds of warnings that users have got, by model or class."""


def is_first_warning(subject: Any, kind: Hashable) -> bool:
    """Return whether users have not got a warning of this kind yet about a model or a class, and note that they get it."""
    kinds = _WARNED.setdefault(subject, set())
    is_first = kind not in kinds
    kinds.add(kind)
    return is_first


class BufferWarning(UserWarning):
    """The warning that a call has thrown away what forward changed in buffers, such as BatchNorm's running statistics."""


@_torch.assume_constant
def warn_discarded(names: tuple[str, ...], stacklevel: int) -> None:
    """Warn that forward changed buffers that the call throws away. torch.compile comes here when it traces."""
    shown = ", ".join(f"'{name}'" for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    warnings.warn(
        f"functional_call: forward changed the buffers {shown}{more} in copies that are thrown away now: expected them in "
        "buffers=; give it dict(model.named_buffers()) and keep what is in there afterwards (with grad: return it, by "
        "has_aux=True), call model.eval() if nothing is to change, or ignore this UserWarning by its first words",
        BufferWarning,
        stacklevel=stacklevel + 1,
    )


def copy_buffer(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of a buffer that costs nothing until forward writes to it, but for one that vmap or tracing sees.

    A buffer with an element at several places, as vmap expands them, is copied as well: a lazy copy could not be written to.
    """
    buffer = _torch.unwrap_dead(buffer)  # forward has left it there inside of transforms
    seen = _torch.is_in_graph() or _torch.is_tracing() or _torch.is_batched(buffer)
    if seen or dtype != buffer.dtype or not _torch.is_strided(buffer) or _torch.has_internal_overlap(buffer):
        return buffer.to(dtype, copy=True)
    return _torch.lazy_clone(buffer)


class CallBuffers:
    """The buffers of a call's modules: every module gets its own ``_buffers`` of the given ones, and lazy copies of the rest.

    The precisions of the spec cast floating point buffers. A buffer on the meta device among ``valued`` parameters is a
    ValueError: torch indexes and multiplies matrices by it without a word.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], buffers: Mapping[str, Tensor] | None, spec: PartitionSpec | None, valued: bool
    ) -> None:
        self.given = dict(buffers or {})
        self._placed: list[tuple[str, nn.Module, str, Tensor, Tensor]] = []
        self._copied: list[tuple[str, nn.Module, str, Tensor]] = []
        self.normalized: dict[str, nn.Module] = {}  # the normalisation layers that have buffers, by path
        copies: dict[tuple[Tensor, torch.dtype], Tensor] = {}
        fresh: dict[nn.Module, dict[str, Tensor | None]] = {}
        empty: dict[str, Tensor] = {}
        left = dict(self.given)
        for path, module in modules.items():
            if not module._buffers:  # as most
                continue
            own = own_tensors(module, "_buffers")
            if isinstance(module, NormWithStatistics):
                self.normalized[path] = module
            mine = fresh.setdefault(module, dict(own))
            cast = buffer_dtype(spec, path) if spec else None
            for attr, original in own.items():
                name = join_path(path, attr)
                if name in left:
                    before = left.pop(name)
                    mine[attr] = used = cast_floats(before, cast)
                    self._placed.append((name, module, attr, before, used))
                elif original is not None and mine[attr] is original and not original.is_meta:
                    dtype = cast if cast and original.is_floating_point() else original.dtype
                    if (original, dtype) not in copies:
                        copies[original, dtype] = copy_buffer(original, dtype)
                    mine[attr] = copies[original, dtype]
                    self._copied.append((name, module, attr, copies[original, dtype]))
                elif original is not None and original.is_meta and valued:
                    empty[name] = original
        if empty:
            raise ValueError(
                f"functional_call: buffers are on the meta device, without values: {abridge(empty)}; expected all in buffers=, "
                "as fs.init_buffers(model, spec) makes them; those that no initialiser makes have to be made by hand"
            )
        if left:
            raise ValueError(f"buffer '{next(iter(left))}' is not in the model: expected its buffers' names")
        for module, mine in fresh.items():
            vars(module)["_buffers"] = mine

    def updated(self) -> dict[str, Tensor]:
        """Return the given buffers as they are now, in their own dtypes."""
        found = [(name, _own_buffer(module, attr), before, used) for name, module, attr, before, used in self._placed]
        return {name: cast_back(buffer, before, used) for name, buffer, before, used in found if buffer is not None}

    def changed(self) -> list[str]:
        """Return the names of the copies that forward has changed."""
        moved = {
            (module, attr)
            for _, module, attr, copy in self._copied
            if _own_buffer(module, attr) is not copy or _torch.version(copy)
        }
        # The kernels of BatchNorm do not tell the version of its statistics, but its module counts.
        counted = {module for module, attr in moved if attr == "num_batches_tracked"}
        return [
            name
            for name, module, attr, _ in self._copied
            if (module, attr) in moved or (module in counted and attr in ("running_mean", "running_var"))
        ]

    def registered_again(self) -> dict[str, str]:
        """Return by path a given buffer of each module that forward has registered another tensor for."""
        again = [name for name, module, attr, _, used in self._placed if _own_buffer(module, attr) is not used]
        return {path: attr for path, _, attr in (name.rpartition(".") for name in again)}


def _own_buffer(module: nn.Module, attr: str) -> Tensor | None:
    return own_tensors(module, "_buffers").get(attr)


# --- running statistics that training has not updated ---

_COMPARED: WeakSet[nn.Module] = WeakSet()
"""The models whose statistics have been compared with the initial values: once for each, since that waits for a device."""


def check_statistics(model: nn.Module, layers: Mapping[str, nn.Module], given: Collection[str], stacklevel: int) -> None:
    """Warn, once for a model, where layers in eval mode have read statistics that are still those of a new model.

    ``layers`` are the model's normalisation layers by path, ``given`` the names in ``buffers=``.
    """
    if model in _COMPARED or _torch.is_tracing():
        return
    read = {
        path: layer for path, layer in layers.items() if not layer.training and layer._buffers.get("running_mean") is not None
    }
    read = {path: layer for path, layer in read.items() if join_path(path, "running_mean") not in given}
    if not read:
        return
    _COMPARED.add(model)
    names = [join_path(path, attr) for path, x in read.items() if _is_initial(x) for attr in ("running_mean", "running_var")]
    if names:
        warnings.warn(
            f"functional_call: layers in eval mode normalise with the model's own {abridge(dict.fromkeys(names), 2)}: they are "
            "those of a new model (mean 0, variance 1), which no training has updated; "
            "expected the statistics of training in buffers=, or loaded into the model by "
            "model.load_state_dict(buffers, strict=False); ignore this UserWarning if the model's own are meant",
            BufferWarning,
            stacklevel=stacklevel + 1,
        )


def _is_initial(layer: nn.Module) -> bool:
    """Return whether running statistics are still mean 0 and variance 1; False for fake tensors."""
    is_equal = [torch.all(layer.get_buffer(attr) == value) for attr, value in (("running_mean", 0), ("running_var", 1))]
    return not any(map(_torch.is_fake, is_equal)) and all(is_equal)

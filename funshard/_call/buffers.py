"""A model's buffers in a functional_call: lazy copies that are thrown away with a warning, or given ones that are updated.

A training call with ``buffers=`` updates those, and leaves the model's own as they were. A warning, once for a model, says that
an evaluation without ``buffers=`` normalises with initial ones. A compiled call is not checked.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Hashable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from .. import _torch
from .._core.spec import PartitionSpec, abridge
from .._core.tree import join_path
from .._torch.modules import NormWithStatistics
from .casting import buffer_dtype, cast_back

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
    warnings.warn(
        f"functional_call: forward changed the buffers {abridge(dict.fromkeys(names), 3)} in copies that are thrown away now: "
        "expected them in buffers=; give it dict(model.named_buffers()) and keep what is in there afterwards (with grad: "
        "return it, by has_aux=True), call model.eval() if nothing is to change, or ignore this UserWarning by its first words",
        BufferWarning,
        stacklevel=stacklevel + 1,
    )


def copy_buffer(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of a buffer that costs nothing until forward writes to it, but for one that vmap or tracing sees.

    A buffer with an element at several places, as vmap expands them, is copied as well: a lazy copy could not be written to.
    """
    if _torch.is_in_graph():
        return buffer.to(dtype, copy=True)
    buffer = _torch.unwrap_dead(buffer)  # forward has left it there inside of transforms
    seen = _torch.is_tracing() or _torch.is_batched(buffer)
    if seen or dtype != buffer.dtype or not _torch.is_strided(buffer) or _torch.has_internal_overlap(buffer):
        return buffer.to(dtype, copy=True)
    return _torch.lazy_clone(buffer)


class ReplacedBuffer(NamedTuple):
    """A buffer of a module, the given one or the model's own, and the tensor that a call uses instead."""

    module: nn.Module
    attr: str
    before: Tensor
    used: Tensor
    is_given: bool
    """Whether it is in ``buffers=``, by this or another name of the model's own tensor."""
    moves: bool
    """Whether ``used`` is a copy that a kernel changes in place, inside torch.compile."""

    @property
    def now(self) -> Tensor | None:
        """The module's buffer as forward has left it."""
        return self.module._buffers.get(self.attr)


def replace_buffers(
    modules: Mapping[str, nn.Module], given: Mapping[str, Tensor], spec: PartitionSpec | None
) -> dict[str, ReplacedBuffer]:
    """Return by name what a call uses instead of each buffer: the given one, or else a copy, which is thrown away.

    One that several modules share is given by any of its names. The precisions of the spec cast floating point buffers. Inside
    torch.compile a given buffer that a normalisation layer changes in place is copied as well. Buffers on the meta device stay.
    Dynamo traces this: plain loops.
    """
    copies: dict[tuple[Tensor, torch.dtype], Tensor] = {}
    originals: list[tuple[Tensor, nn.Module, str, Tensor]] = []
    for path, module in modules.items() if given else ():
        for attr, own in module._buffers.items():
            if own is not None and join_path(path, attr) in given:
                originals.append((own, module, attr, given[join_path(path, attr)]))
    seen: set[nn.Module] = set()
    replaced: dict[str, ReplacedBuffer] = {}
    in_graph = _torch.is_in_graph()
    for path, module in modules.items():
        if not module._buffers:  # as most
            continue
        moves = in_graph and isinstance(module, NormWithStatistics) and module.training and module.track_running_stats
        cast = None if spec is None else buffer_dtype(spec, path)
        for attr, own in module._buffers.items():
            name = join_path(path, attr)
            before, is_given = given.get(name, own), name in given
            for original, owner, name_there, x in () if is_given else originals:
                if original is own:  # perhaps at another of the module's paths
                    before, is_given = None if owner is module and name_there == attr else x, True
            if before is None or (not is_given and (before.is_meta or module in seen)):
                continue
            dtype = cast if cast is not None and before.is_floating_point() else before.dtype
            used = before
            if moves or not is_given or dtype != before.dtype:
                if (before, dtype) not in copies:
                    copies[before, dtype] = copy_buffer(before, dtype)
                used = copies[before, dtype]
            replaced[name] = ReplacedBuffer(module, attr, before, used, is_given, moves)
        seen.add(module)
    for name in given:
        if name not in replaced:
            raise ValueError(f"buffer '{name}' is not in the model: expected its buffers' names")
    return replaced


class CallBuffers:
    """The buffers of a call's modules, replaced for its length: every module gets its own ``_buffers``.

    A buffer on the meta device among ``valued`` parameters is a ValueError: torch indexes and multiplies matrices by it without
    a word.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], buffers: Mapping[str, Tensor] | None, spec: PartitionSpec | None, valued: bool
    ) -> None:
        self.given, self._returns = dict(buffers or {}), buffers is not None
        self._replaced = replace_buffers(modules, self.given, spec)
        with_buffers = {path: module for path, module in modules.items() if module._buffers}  # few of them
        own = [(join_path(path, attr), m, attr, x) for path, m in with_buffers.items() for attr, x in m._buffers.items()]
        self._none_before = [(name, module, attr) for name, module, attr, x in own if x is None]
        for module in with_buffers.values():
            vars(module)["_buffers"] = dict(module._buffers)
        for x in self._replaced.values():
            x.module._buffers[x.attr] = x.used
        if empty := {name: x for name, m, attr, x in own if valued and x is not None and m._buffers[attr] is x and x.is_meta}:
            raise ValueError(
                f"functional_call: buffers are on the meta device, without values: {abridge(empty)}; expected all in buffers=, "
                "as fs.init_buffers(model, spec) makes them; those that no initialiser makes have to be made by hand"
            )

    def updated(self) -> dict[str, Tensor]:
        """Return the given buffers as they are now, in their own dtypes, and those that were None and that forward has made."""
        given = {name: x for name, x in self._replaced.items() if name in self.given}
        cast = {name: cast_back(now, x.before, x.used) for name, x in given.items() if (now := x.now) is not None}
        return self._set_from_none() | cast

    def _set_from_none(self) -> dict[str, Tensor]:
        return {name: x for name, module, attr in self._none_before if (x := module._buffers.get(attr)) is not None}

    def changed(self) -> list[str]:
        """Return the names of what is thrown away: copies that forward has changed, and what was None, without ``buffers=``."""
        copied = {name: x for name, x in self._replaced.items() if name not in self.given}
        moved = {
            (x.module, x.attr) for x in copied.values() if x.now is not x.used or (not x.is_given and _torch.version(x.used))
        }
        # The kernels of BatchNorm do not tell the version of its statistics, but its module counts.
        counted = {module for module, attr in moved if attr == "num_batches_tracked"}
        moved |= {(module, attr) for module in counted for attr in ("running_mean", "running_var")}
        names = [name for name, x in copied.items() if (x.module, x.attr) in moved]
        return names if self._returns else [*names, *self._set_from_none()]

    def registered_again(self) -> dict[str, str]:
        """Return by path a given buffer of each module that forward has registered another tensor for."""
        again = [name for name, x in self._replaced.items() if name in self.given and x.now is not x.used]
        return {path: attr for path, _, attr in (name.rpartition(".") for name in again)}


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

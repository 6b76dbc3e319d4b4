"""functional_call: a module on sharded parameters, one unit gathered at a time.

How a unit comes and goes. For the length of the call every module's ``_parameters`` is a mapping that hands out views
of the gathered buffer of the owning unit, and gathers it if nobody has. A unit is gathered when its module is entered
(or, used from outside, when first touched) and let go when the module that was running then is left. Letting go is
dropping a reference: nothing is ever resized or freed by hand, so whatever user code still holds stays readable.

What would hold the buffer until backward is autograd, which saves weights. Saved-tensor hooks put a note in their
place: this view of that unit. When backward asks for it, the unit is gathered again, once, and let go when the
gradient of its buffer is complete, which is also when that gradient is reduce-scattered.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from . import _torch
from .collectives import Reduce
from .layout import unflatten_unit
from .mesh import Mesh
from .sharding import check_shards, gather_unit, unshard
from .spec import PartitionSpec, Unit
from .tree import join

__all__ = ["functional_call"]

FROZEN_ALIVE = 2
"""How many frozen units' buffers stay gathered in backward: no gradient tells when they have been used."""

_CONTAINERS = tuple(
    name
    for name, value in vars(nn.Module()).items()
    if isinstance(value, dict | set) and name not in ("_parameters", "_buffers")
)


def functional_call(
    model: nn.Module,
    params: Mapping[str, Tensor],
    args: object = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    spec: PartitionSpec,
    buffers: dict[str, Tensor] | None = None,
    method: str | None = None,
    reduce: Reduce = "mean",
) -> Any:
    """``model(*args, **kwargs)`` on sharded parameters: torch.func.functional_call where ``params`` are shards.

    Each unit is gathered just before its module runs and freed after it; where the module's gradient is wanted it is
    gathered again in backward (not with ``P(reshard=False)``, nor the unit that ends the forward), and its gradient is
    reduced as soon as it is complete. Equal to calling the module with ``unshard(params, spec)``, at every order and
    under every torch.func transform; with more than one transform around it, or a forward-mode one, what autograd
    saves stays gathered until it is used.

    ``params`` are what `shard` gives, of any floating dtype; parameters that the spec ignores are the model's own, or
    those in ``params`` under their names. ``args`` is a tuple, or the only argument. ``method`` names another method
    than forward. ``buffers`` are used in place of the model's, and updates land in that dict, as in torch; the model's
    own buffers are never changed: without ``buffers`` the call works on copies. After the call, also when it raises,
    every attribute of the model and its submodules is what it was before: what forward stored on ``self`` is gone,
    so return what you want to keep.

    Inside torch.compile the whole tree is gathered by data flow and the compiler decides what lives how long.

    Raises ValueError, naming the path, for params that do not fit the spec, a model that the spec was not made for, or
    unknown buffers, before any communication.
    """
    spec = spec.bound
    check_shards(params, spec)
    _check_supported(spec)
    arguments: tuple[Any, ...] = args if isinstance(args, tuple) else (args,)
    options: dict[str, Any] = dict(kwargs or {})
    if torch.compiler.is_compiling():
        return _by_data_flow(model, params, arguments, options, spec, buffers, method, reduce)
    call = _Call(params, spec, reduce)
    with call.installed(model, buffers):
        try:
            out = getattr(model, method or "__call__")(*arguments, **options)
        except RuntimeError as error:
            if call.hooked and "yet support saved tensor hooks" in str(error):
                raise RuntimeError(
                    "functional_call: forward uses a torch.func transform, which torch refuses where saved tensors are "
                    "replaced: expected P(reshard=False) for every unit, which replaces none"
                ) from error
            raise
    if inspect.isgenerator(out):
        raise TypeError("functional_call: expected results, got a generator, which would run after the call; consume it inside")
    return out


def _check_supported(spec: PartitionSpec) -> None:
    for unit in spec:
        for name in ("precision", "remat", "offload"):
            if getattr(unit.p, name):
                raise NotImplementedError(
                    f"unit '{unit.key}': functional_call does not apply P({name}=...) yet, got {unit.p}; leave it out"
                )


def _by_data_flow(
    model: nn.Module,
    params: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    spec: PartitionSpec,
    buffers: dict[str, Tensor] | None,
    method: str | None,
    reduce: Reduce,
) -> Any:
    full = unshard(params, spec, reduce=reduce)
    tensors = {alias: full[p.name] for unit in spec for p in unit.params for alias in p.names}
    tensors |= {name: full[name] for name in spec.ignored if name in full}
    if buffers is None:
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with _torch.reparametrized(model, tensors | buffers):
        return getattr(model, method)(*args, **kwargs) if method else model(*args, **kwargs)


class _Gathered:
    """One gather of one unit: its parameters while it is alive, and what saved tensors turn into after that."""

    def __init__(self, call: _Call, unit: Unit, shard: Tensor) -> None:
        self.call, self.unit, self.shard = call, unit, shard
        self.version = _torch.base(shard)._version
        self.level = _torch.level()
        full = gather_unit(shard, unit, call.mesh, reduce=call.reduce)
        self.views = unflatten_unit(full, unit)
        self.storage = _torch.storage_id(_torch.base(full))
        self.buffer: Tensor | None = None  # what backward reads, between a regather and the reduction
        self.frees = unit.p.reshard and self.storage != _torch.storage_id(_torch.base(shard))
        self.trained = full.requires_grad
        if self.frees and call.hooked and self.trained:
            this = weakref.ref(self)
            full.register_hook(lambda _: (gathered := this()) and gathered.release())
        self.full = full

    def drop(self, *, keep_for_backward: bool) -> None:
        """Let the forward's views go; the unit that ends the forward leaves its buffer for backward."""
        if keep_for_backward:
            self.buffer = _torch.lower(self.full) if self.level else self.full.detach()  # autograd adds the graph it is in
        del self.views, self.full
        self.call.live.pop(self.storage, None)

    def release(self) -> None:
        """The gradient of the buffer is complete: every use of it has been made."""
        self.buffer = None

    def view(self, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """A saved view of the buffer, gathered again if need be."""
        if self.buffer is None:
            if _torch.base(self.shard)._version != self.version:
                raise RuntimeError(
                    f"the shard of unit '{self.unit.key}' was modified in place between forward and backward: "
                    f"expected version {self.version}, got {_torch.base(self.shard)._version}; update after backward"
                )
            if self.level:  # one level below this graph, where the shard may itself be differentiated
                self.buffer = gather_unit(_torch.lower(self.shard), self.unit, self.call.mesh, reduce=self.call.reduce)
            else:
                with torch.no_grad():
                    self.buffer = gather_unit(self.shard.detach(), self.unit, self.call.mesh, reduce=self.call.reduce)
            if not self.trained:
                self.call.frozen.append(self)
                if len(self.call.frozen) > FROZEN_ALIVE:
                    self.call.frozen.popleft().release()
        return self.buffer.as_strided(shape, stride, offset)


class _Call:
    """The state of one functional_call."""

    def __init__(self, params: Mapping[str, Tensor], spec: PartitionSpec, reduce: Reduce) -> None:
        self.params, self.spec = params, spec
        self.reduce: Reduce = reduce
        self.mesh = spec.mesh or Mesh.of(dict(spec.sizes or ()))
        self.differentiable = torch.is_grad_enabled()
        self.outer = _torch.pack_hook()  # a checkpoint around the call recomputes it whole: leave that alone
        frees = any(unit.p.reshard and spec.size(unit) > 1 for unit in spec)
        self.hooked = self.differentiable and frees and self.outer is None and _torch.savable()
        self.active: dict[str, _Gathered] = {}
        self.live: dict[int, _Gathered] = {}  # by storage: what pack recognises
        self.scopes: list[list[_Gathered]] = [[]]
        self.pending: list[_Gathered] = []  # left, but not freed before the next gather, in case the forward ends here
        self.frozen: deque[_Gathered] = deque()

    def gather(self, unit: Unit) -> _Gathered:
        """The unit, gathered now or still alive."""
        hook = _torch.pack_hook()
        if hook is not self.outer and hook is not None and hook.__module__ == "torch.utils.checkpoint":
            raise RuntimeError(
                f"unit '{unit.key}': torch.utils.checkpoint inside functional_call would recompute with the module's own "
                "parameters, not with these: expected none; checkpoint the functional_call as a whole"
            )
        gathered = self.active.get(unit.key)
        if gathered is not None and gathered.level <= _torch.level():
            if gathered in self.pending:
                self.pending.remove(gathered)
                self.scopes[-1].append(gathered)
            return gathered
        self.free(self.pending)
        with torch.set_grad_enabled(self.differentiable):  # a gather under no_grad must serve uses outside of it
            gathered = _Gathered(self, unit, self.params[unit.key])
        self.active[unit.key] = gathered
        if gathered.frees and self.hooked:
            self.live[gathered.storage] = gathered
        self.scopes[-1].append(gathered)
        return gathered

    def free(self, many: list[_Gathered], *, keep_for_backward: bool = False) -> None:
        for gathered in many:
            if self.active.get(gathered.unit.key) is gathered:
                del self.active[gathered.unit.key]
            gathered.drop(keep_for_backward=keep_for_backward and gathered.frees and self.hooked)
        many.clear()

    @contextlib.contextmanager
    def scope(self, units: list[Unit]) -> Generator[None]:
        """A module's run: its units are gathered at the start, and what was gathered meanwhile is freed at the end."""
        self.scopes.append([])
        try:
            for unit in units:
                self.gather(unit)
            yield
        finally:
            for gathered in self.scopes.pop():
                (self.pending if gathered.unit.p.reshard else self.scopes[0]).append(gathered)

    @contextlib.contextmanager
    def installed(self, model: nn.Module, buffers: dict[str, Tensor] | None) -> Generator[None]:
        """The model with gathered parameters; as it was, to the last attribute, afterwards."""
        modules = dict(model.named_modules(remove_duplicate=False))
        owned = _owners(modules, self.spec)
        saved = [(module, dict(vars(module)), _containers(module)) for module in owned]
        hooks = _torch.saved_tensor_hooks(self.pack, self.unpack) if self.hooked else contextlib.nullcontext()
        placed: list[tuple[str, nn.Module, str]] = []
        try:
            placed = _replace_buffers(modules, buffers)
            roots = self._replace_parameters(modules, owned)
            with hooks:
                for unit in roots:
                    self.gather(unit)
                yield
        finally:
            ended_by_root = bool(self.scopes[0])
            self.free(self.pending, keep_for_backward=not ended_by_root)
            self.free(self.scopes[0], keep_for_backward=True)
            if buffers is not None:
                now = {name: module._buffers.get(attr) for name, module, attr in placed}
                buffers.update({name: buffer for name, buffer in now.items() if buffer is not None})
            for module, attributes, containers in saved:
                vars(module).clear()
                vars(module).update(attributes)
                for container, content in containers:
                    if container != content:
                        container.clear()
                        container.update(content)

    def _replace_parameters(
        self, modules: Mapping[str, nn.Module], owned: Mapping[nn.Module, dict[str, tuple[Unit, int]]]
    ) -> list[Unit]:
        """Put the gathering mappings and the scopes into the modules; the units of the root are left to the caller."""
        for module, attributes in owned.items():
            if attributes or self.spec.ignored:
                vars(module)["_parameters"] = _Parameters(module._parameters, attributes, self.gather)
            else:
                vars(module)["_parameters"] = dict(module._parameters)
        for name in self.spec.ignored:
            if name in self.params:
                path, _, attr = name.rpartition(".")
                modules[path]._parameters[attr] = cast("nn.Parameter", self.params[name])
        roots: list[Unit] = []
        by_path: dict[str, list[Unit]] = {}
        for unit in self.spec:
            by_path.setdefault(unit.path, []).append(unit)
        for path, units in by_path.items():
            if path == "":
                roots = units
            else:
                vars(modules[path])["forward"] = self._scoped(modules[path].forward, units)
        return roots

    def _scoped(self, forward: Callable[..., Any], units: list[Unit]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.scope(units):
                return forward(*args, **kwargs)

        return run

    def pack(self, tensor: Tensor) -> object:
        """What autograd keeps instead of a tensor it saves: a note for a gathered weight, else the tensor itself."""
        inner = _torch.base(tensor)
        if type(inner) is Tensor and inner.layout is torch.strided:
            gathered = self.live.get(_torch.storage_id(inner))
            if gathered is not None and inner.dtype == gathered.shard.dtype and not (inner.is_conj() or inner.is_neg()):
                return gathered, tensor.shape, tensor.stride(), tensor.storage_offset()
        return tensor, tensor._version

    @staticmethod
    def unpack(note: object) -> Tensor:
        """The saved tensor again. The version check is autograd's own, which hooks switch off."""
        what, *rest = cast("tuple[Any, ...]", note)
        if isinstance(what, _Gathered):
            return what.view(*rest)
        if what._version != rest[0]:
            raise RuntimeError(
                f"a tensor of shape {list(what.shape)} needed for gradient computation was modified in place: "
                f"it is at version {what._version}, expected version {rest[0]}"
            )
        return what


class _Parameters(dict[str, Any]):
    """A module's ``_parameters`` for the length of a call: reading one gathers its unit."""

    def __init__(
        self,
        original: Mapping[str, Tensor | None],
        owned: dict[str, tuple[Unit, int]],
        gather: Callable[[Unit], _Gathered],
    ) -> None:
        super().__init__(original)
        self._owned, self._gather = owned, gather

    def __getitem__(self, name: str) -> Any:
        if name in self._owned:
            unit, i = self._owned[name]
            return self._gather(unit).views[i]
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._owned.pop(name, None)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self._owned.pop(name, None)
        super().__delitem__(name)

    def __iter__(self) -> Iterator[str]:  # overriding it keeps dict(self) from copying the originals underneath
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  that would call itself

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        return [self[name] for name in self]

    def copy(self) -> dict[str, Any]:
        return dict(self.items())


def _containers(module: nn.Module) -> list[tuple[Any, Any]]:
    """Where the module keeps hooks and submodules, with copies: forward may change them in place (transformers 5 does)."""
    return [(vars(module)[name], vars(module)[name].copy()) for name in _CONTAINERS if name in vars(module)]


def _owners(modules: Mapping[str, nn.Module], spec: PartitionSpec) -> dict[nn.Module, dict[str, tuple[Unit, int]]]:
    """For each module the unit and position of its own parameters; ValueError unless the spec was made for it."""
    owned: dict[nn.Module, dict[str, tuple[Unit, int]]] = {module: {} for module in modules.values()}
    for unit in spec:
        for i, param in enumerate(unit.params):
            for name in param.names:
                path, _, attr = name.rpartition(".")
                tensor = modules[path]._parameters.get(attr) if path in modules else None
                if tensor is None or tuple(tensor.shape) != param.shape:
                    got = "none" if tensor is None else f"shape {list(tensor.shape)}"
                    raise ValueError(
                        f"parameter '{name}' of unit '{unit.key}': expected shape {list(param.shape)} in the model, "
                        f"got {got}; was the model changed after the spec was made?"
                    )
                owned[modules[path]][attr] = unit, i
    left = {
        id(modules[path]._parameters.get(attr))
        for path, _, attr in (name.rpartition(".") for name in spec.ignored)
        if path in modules
    }
    for path, module in modules.items():
        for attr, tensor in module._parameters.items():
            if tensor is not None and attr not in owned[module] and id(tensor) not in left:
                raise ValueError(
                    f"parameter '{join(path, attr)}' is not in the spec: expected the model that it was made for; "
                    "was the model changed after the spec was made?"
                )
    return owned


def _replace_buffers(modules: Mapping[str, nn.Module], buffers: dict[str, Tensor] | None) -> list[tuple[str, nn.Module, str]]:
    """Give every module its own ``_buffers``: the given ones, copies of the rest. Where the given ones went."""
    given = dict(buffers or {})
    copies: dict[Tensor, Tensor] = {}
    placed: list[tuple[str, nn.Module, str]] = []
    fresh: dict[nn.Module, dict[str, Tensor | None]] = {}
    for path, module in modules.items():
        mine = fresh.setdefault(module, dict(module._buffers))
        for attr, original in module._buffers.items():
            if join(path, attr) in given:
                mine[attr] = given.pop(join(path, attr))
                placed.append((join(path, attr), module, attr))
            elif original is not None and mine[attr] is original:
                mine[attr] = copies.setdefault(original, original) if original.is_meta else copies.get(original)
                if mine[attr] is None:
                    mine[attr] = copies[original] = original.clone()
    if given:
        raise ValueError(f"buffer '{next(iter(given))}' is not in the model: expected its buffers' names")
    for module, mine in fresh.items():
        vars(module)["_buffers"] = mine
    return placed

"""Adapters that read an object's contents and make another object of them: the interface; callables, tuples and views.

pickle's ``__reduce_ex__`` would run ``__getstate__`` and ``__reduce__`` of users' classes, which leave out caches, and it
has no rule for functions, cells, bound methods and views of dicts.
"""

from __future__ import annotations

import array
import functools
import gc
import io
import itertools
import operator
import pickle
import random
import sys
import threading
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..._batchnorm import MESH, WEIGHT
from ..._core.mesh import Mesh, Simulated
from ..._core.spec import PartitionSpec

__all__ = [
    "ADAPTERS",
    "CALL_ATTRIBUTES",
    "PLAIN_TYPES",
    "STATEFUL_ADAPTERS",
    "Contents",
    "ObjectAdapter",
    "Part",
    "find_array_adapter",
    "find_generator_adapter",
    "find_referents",
    "find_simulated_ranks",
    "ordered_elements",
    "read_cell",
    "read_module_state",
    "refill",
    "set_attributes",
    "to_part",
]


Part = tuple[list[Any], list[Any]]
"""Names or keys, and the values in the same order."""

Contents = list[Part]
"""The parts of an object: its items, its slots, its attributes and so on."""


class OpaqueState:
    """The state of a random number generator or the position of an iterator, which can only be compared."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OpaqueState):
            return False
        return torch.equal(self.value, other.value) if isinstance(self.value, Tensor) else bool(self.value == other.value)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


PLAIN_TYPES = frozenset(
    {int, float, bool, str, bytes, complex, type(None), type(...), type, range, slice, torch.dtype, torch.device, torch.Size}
    | {torch.memory_format, torch.layout, types.BuiltinFunctionType, types.ModuleType, OpaqueState}
)
"""The types of constants that are compared by value."""


@dataclass(frozen=True)
class ObjectAdapter:
    """Functions that read the objects of a class, and make one."""

    read: Callable[[Any], Contents]
    fill: Callable[[Any, Contents], Any]
    """``fill(obj, contents)`` replaces what a mutable object contains; ``fill(context, contents)`` makes an immutable one."""
    make_empty: Callable[[Any], Any] | None = None
    """``make_empty(context)`` makes a mutable object; None for an immutable class."""
    get_context: Callable[[Any], Any] = lambda obj: None
    """Return what another object is made from, beside the contents."""

    @property
    def is_mutable(self) -> bool:
        """Whether a run can change an object of the class."""
        return self.make_empty is not None


def to_part(mapping: Mapping[Any, Any]) -> Part:
    """Return the keys and the values of a mapping."""
    return list(mapping), list(mapping.values())


def refill(mapping: MutableMapping[Any, Any], part: Part) -> None:
    """Replace all items of a mapping."""
    mapping.clear()
    mapping.update(zip(*part, strict=True))


def ordered_elements(obj: set[Any] | frozenset[Any]) -> list[Any]:
    """Return the elements of a set; plain values in the same order for equal sets."""
    elements = list(set.__iter__(obj) if isinstance(obj, set) else frozenset.__iter__(obj))
    plain = all(type(element) in PLAIN_TYPES for element in elements)
    return sorted(elements, key=lambda element: (type(element).__name__, repr(element))) if plain else elements


def _immutable_adapter(base: Any, read: Callable[[Any], Part]) -> ObjectAdapter:
    """Return the adapter of tuple or frozenset and its subclasses, which may have attributes and their own ``__new__``."""

    def make(cls: Any, contents: Contents) -> Any:
        is_structseq = hasattr(cls, "n_sequence_fields")  # torch.return_types.max: only its own __new__ is safe
        obj = cls(contents[0][1]) if is_structseq else base.__new__(cls, contents[0][1])
        if len(contents) > 1:
            vars(obj).update(zip(*contents[1], strict=True))
        return obj

    return ObjectAdapter(
        lambda obj: [read(obj), *([to_part(vars(obj))] if type(obj).__dictoffset__ else [])], make, get_context=type
    )


def _view_adapter(make: Callable[[Any], Any]) -> ObjectAdapter:
    """Return the adapter of a view of a dict, which refers to the dict but has no attribute for it."""
    return ObjectAdapter(lambda view: [(["mapping"], gc.get_referents(view)[:1])], lambda _, contents: make(contents[0][1][0]))


_VIEW_METHODS: list[Any] = [getattr(base, name) for base in (dict, OrderedDict) for name in ("keys", "values", "items")]


def _make_partial(cls: Any, contents: Contents) -> Any:
    """Make a functools.partial from its contents."""
    (_, (func, *args)), keywords, attributes = contents
    partial = cls(func, *args, **dict(zip(*keywords, strict=True)))
    vars(partial).update(zip(*attributes, strict=True))
    return partial


def _read_function(f: Any) -> Contents:
    """Read the function's own dicts, not copies: what is written into them is in the function."""
    return [
        (list(f.__code__.co_freevars), list(f.__closure__ or ())),
        (["__defaults__", "__kwdefaults__", "__dict__"], [f.__defaults__, f.__kwdefaults__, vars(f)]),
    ]


def _make_function(context: Any, contents: Contents) -> Any:
    """Make a function with the same code from its contents: cells, defaults and attributes."""
    (_, cells), (_, (defaults, keyword_defaults, attributes)) = contents
    code, variables, name = context
    function = types.FunctionType(code, variables, name, defaults, tuple(cells))
    function.__kwdefaults__, function.__dict__ = keyword_defaults, attributes
    return function


def read_cell(cell: Any) -> Contents:
    """Return what is in the cell of a closure, if it is set."""
    try:
        return [(["cell_contents"], [cell.cell_contents])]
    except ValueError:  # not set yet
        return [([], [])]


def _fill_cell(cell: Any, contents: Contents) -> None:
    for value in contents[0][1]:
        cell.cell_contents = value


ADAPTERS: dict[type, ObjectAdapter] = {
    tuple: _immutable_adapter(tuple, lambda obj: (list(range(len(obj))), list(tuple.__iter__(obj)))),
    frozenset: _immutable_adapter(frozenset, lambda obj: (list(range(len(obj))), ordered_elements(obj))),
    types.MethodType: ObjectAdapter(
        lambda obj: [(["__func__", "__self__"], [obj.__func__, obj.__self__])],
        lambda _, contents: types.MethodType(*contents[0][1]),
    ),
    types.FunctionType: ObjectAdapter(
        _read_function, _make_function, get_context=lambda f: (f.__code__, f.__globals__, f.__name__)
    ),
    types.CellType: ObjectAdapter(read_cell, _fill_cell, lambda _: types.CellType()),
    functools.partial: ObjectAdapter(
        lambda obj: [
            # each argument by itself: a partial copies the containers of its arguments when it is made
            (["func", *(f"args[{i}]" for i in range(len(obj.args)))], [obj.func, *obj.args]),
            to_part(obj.keywords),
            to_part(vars(obj)),
        ],
        _make_partial,
        get_context=type,
    ),
    types.MappingProxyType: _view_adapter(types.MappingProxyType),
    **{type(make(make.__objclass__())): _view_adapter(make) for make in _VIEW_METHODS},
    threading.local: ObjectAdapter(  # a run sees the attributes of its own thread
        lambda obj: [to_part(vars(obj))],
        lambda obj, contents: refill(vars(obj), contents[0]),
        lambda cls: cls.__new__(cls),
        type,
    ),
    WeakKeyDictionary: ObjectAdapter(
        lambda obj: [to_part(obj)],
        lambda obj, contents: refill(obj, contents[0]),
        lambda _: WeakKeyDictionary[Any, Any](),
    ),
}
"""The adapters of these classes; of their subclasses only for tuple, frozenset and threading.local."""


# --- Adapters of bytearray, array.array and NumPy arrays, whose bytes a run may change ---

_MAX_BYTES = 1 << 20
"""The size up to which each run has a NumPy array as the first run found it. Of a larger one a sample is compared."""


def find_array_adapter(cls: type) -> ObjectAdapter | None:
    """Return the adapter of a class of arrays; None for other classes, and for arrays that are files."""
    if cls in _ADAPTERS:
        return _ADAPTERS[cls]
    bases = {base.__name__ for base in cls.__mro__ if base.__module__.partition(".")[0] == "numpy"}
    return _NUMPY_ARRAY_ADAPTER if "ndarray" in bases and "memmap" not in bases else None


def _fill_bytes(obj: bytearray, contents: Contents) -> None:
    obj[:] = contents[0][1][0].value


def _fill_array(obj: array.array[Any], contents: Contents) -> None:
    del obj[:]
    obj.frombytes(contents[0][1][0].value)


def _read_numpy(obj: Any) -> Contents:
    """Return an array's contents: its objects, or a sample of at most ``_MAX_BYTES`` of its bytes; none if it is read-only."""
    if not obj.flags.writeable or type(obj.base).__name__ in ("memmap", "mmap"):
        return []
    if obj.dtype.hasobject:
        return [(list(range(obj.size)), list(obj.flat))]
    step = -(-obj.nbytes // _MAX_BYTES) or 1
    return [(["bytes"], [OpaqueState((obj.shape, str(obj.dtype), obj.flat[::step].tobytes()))])]


def _fill_numpy(obj: Any, contents: Contents) -> None:
    """Write the saved bytes into an array, if all of them were saved."""
    state = contents[0][1][0] if contents and contents[0][1] else None
    if isinstance(state, OpaqueState) and obj.size and obj.nbytes <= _MAX_BYTES:
        obj[...] = sys.modules["numpy"].frombuffer(state.value[2], obj.dtype).reshape(obj.shape)


def _make_numpy(context: Any) -> Any:
    """Return an empty array; raise TypeError for one that cannot be copied."""
    if context is None:
        raise TypeError("a NumPy array is copied up to 1 MiB, and if it is no view and contains no objects")
    return sys.modules["numpy"].empty(*context)


def _numpy_context(obj: Any) -> Any:
    """Return the shape and dtype of an array that can be copied, else None."""
    can_copy = type(obj).__name__ == "ndarray" and obj.base is None and obj.nbytes <= _MAX_BYTES and not obj.dtype.hasobject
    return (obj.shape, obj.dtype) if can_copy else None


_ADAPTERS: dict[type, ObjectAdapter] = {
    bytearray: ObjectAdapter(lambda obj: [(["bytes"], [OpaqueState(bytes(obj))])], _fill_bytes, lambda _: bytearray()),
    array.array: ObjectAdapter(
        lambda obj: [(["bytes"], [OpaqueState(obj.tobytes())])], _fill_array, array.array, lambda obj: obj.typecode
    ),
}
_NUMPY_ARRAY_ADAPTER = ObjectAdapter(_read_numpy, _fill_numpy, _make_numpy, _numpy_context)


# --- Positions of iterators that cannot be copied: comparable values that tell whether a run has advanced one ---

_MAX_VALUES = 1000
"""The number of values that a position has at most; the nearest ones, for a generator that refers to a large structure."""


def read_position(iterator: Any) -> list[Any]:
    """Return a list that changes when the iterator moves on. Where that cannot be seen, it equals no other list."""
    position: list[Any] = []
    queue: deque[Any] = deque(_read_iterator(iterator) or [object()])
    seen: dict[int, Any] = {id(iterator): iterator}  # it keeps temporary objects alive, whose ids would be reused
    while queue and len(position) < _MAX_VALUES:
        value = queue.popleft()
        is_iterator = hasattr(type(value), "__next__")
        if type(value) in PLAIN_TYPES or type(value) is object:
            position.append(value)
            continue
        position.append(type(value) if is_iterator or isinstance(value, _CONTAINERS) else id(value))
        if id(value) not in seen:
            seen[id(value)] = value
            if is_iterator:
                queue.extendleft(_read_iterator(value))
            else:
                queue.extend(_read_state(value))
    return position


_CONTAINERS = (tuple, list, dict, set, deque, types.CellType)


def _read_iterator(iterator: Any) -> Sequence[Any]:
    """Return values that change when an iterator moves on, and objects that do; nothing if none are known."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        if frame is None:
            return ["ended"]
        return [frame.f_lasti, *find_referents(iterator)]
    if isinstance(iterator, io.IOBase):
        try:
            if iterator.closed:
                return [None]
            in_memory = isinstance(iterator, io.StringIO | io.BytesIO)
            return [iterator.tell() if iterator.readable() else None, *([iterator.getvalue()] if in_memory else [])]
        except OSError:  # not seekable, or next() has disabled it
            return []
    if hasattr(iterator, "__length_hint__"):
        return [operator.length_hint(iterator)]
    if isinstance(iterator, itertools.count):
        return [repr(iterator)]
    cls = type(iterator)
    if cls.__module__ in ("builtins", "itertools") and cls.__reduce__ is not object.__reduce__ and cls is not _CALL_ITERATOR:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 deprecates it for itertools
            return iterator.__reduce__()[1:]
    if hasattr(iterator, "__dict__"):
        return [*vars(iterator).values()]
    return [x for x in gc.get_referents(iterator) if hasattr(type(x), "__next__")]


def find_referents(iterator: Any) -> list[Any]:
    """Return what an iterator refers to: of a generator its local variables, and the iterators of its loops."""
    frame = getattr(iterator, "gi_frame", None)
    if frame is None:
        return gc.get_referents(iterator)
    unrelated = {id(x) for x in (frame, frame.f_globals, frame.f_builtins)}
    return [x for x in gc.get_referents(iterator, frame) if id(x) not in unrelated]


_CALL_ITERATOR = type(iter(int, 1))


def _read_state(value: Any) -> Iterable[Any]:
    """Return what a generator may change in a value that it refers to."""
    if isinstance(value, types.FunctionType):
        return value.__closure__ or ()
    if isinstance(value, (*_CONTAINERS, types.MethodType)):
        referents = gc.get_referents(value)
        return referents if len(referents) <= 100 else [len(referents)]
    return () if isinstance(value, Tensor | nn.Module) else getattr(value, "__dict__", {}).values()


# --- Adapters of modules, iterators, generators of random numbers, and meshes with ranks that vmap simulates ---

CALL_ATTRIBUTES = ("_parameters", "_buffers", "forward", MESH, WEIGHT)
"""The attributes of a module that functional_call replaces."""

_HOOK_AND_SUBMODULE_DICTS = {name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)} - {
    *CALL_ATTRIBUTES
}
"""The names of a module's dicts of hooks and submodules, without parameters and buffers; most are empty."""


def _read_module(module: nn.Module, but: tuple[str, ...] = ()) -> Contents:
    """Read the attributes of a module, without internal dicts that are empty.

    `CALL_ATTRIBUTES` are last: a call sets them anew, which changes the order of attributes from run to run.
    """
    own = vars(module)
    names = sorted(own, key=CALL_ATTRIBUTES.__contains__)
    return [to_part({k: own[k] for k in names if k not in but and (k not in _HOOK_AND_SUBMODULE_DICTS or own[k])})]


def read_module_state(module: nn.Module) -> Contents:
    """Read the attributes of a module except `CALL_ATTRIBUTES` and submodules."""
    return _read_module(module, (*CALL_ATTRIBUTES, "_modules"))


def set_attributes(module: nn.Module, new: Mapping[str, Any], but: tuple[str, ...] = CALL_ATTRIBUTES) -> None:
    """Replace all attributes of a module except ``but``; those that it has keep their order."""
    attributes = vars(module)
    for name in [name for name in attributes if name not in new and name not in but and name not in _HOOK_AND_SUBMODULE_DICTS]:
        del attributes[name]
    attributes.update({name: value for name, value in new.items() if name not in but})


def _refuse_copy(_: Any) -> Any:
    """Raise TypeError: an iterator cannot be copied."""
    raise TypeError("an iterator cannot be set back: call next() outside, and pass the value")


def _generator_adapter(
    get_context: Callable[[Any], Any],
    make: Callable[[Any], Any],
    get_state: Callable[[Any], Any],
    set_state: Callable[[Any, Any], object],
) -> ObjectAdapter:
    """Return the adapter of a class of random number generators."""

    def fill(generator: Any, contents: Contents) -> None:
        set_state(generator, contents[0][1][0].value)

    return ObjectAdapter(lambda generator: [(["state"], [OpaqueState(get_state(generator))])], fill, make, get_context)


_TORCH_ADAPTER = _generator_adapter(lambda g: g.device, torch.Generator, torch.Generator.get_state, torch.Generator.set_state)
_PYTHON_ADAPTER = _generator_adapter(
    type, lambda cls: cls.__new__(cls), lambda g: g.getstate(), lambda g, state: g.setstate(state)
)
_NUMPY_ADAPTERS = {
    "Generator": _generator_adapter(
        lambda g: (type(g), type(g.bit_generator)),
        lambda classes: classes[0](classes[1]()),
        lambda g: pickle.dumps(g.bit_generator.state),
        lambda g, state: setattr(g.bit_generator, "state", pickle.loads(state)),
    ),
    "RandomState": _generator_adapter(
        type,
        lambda cls: cls(),
        lambda g: pickle.dumps(g.get_state(legacy=False)),
        lambda g, state: g.set_state(pickle.loads(state)),
    ),
}


@functools.lru_cache(maxsize=4096)
def find_generator_adapter(cls: type) -> ObjectAdapter | None:
    """Return the adapter of a class of random number generators; None for another class, and for one without a state."""
    if issubclass(cls, torch.Generator):
        return _TORCH_ADAPTER
    if issubclass(cls, random.Random):
        return None if issubclass(cls, random.SystemRandom) else _PYTHON_ADAPTER
    bases = (base.__name__ for base in cls.__mro__ if base.__module__.partition(".")[0] == "numpy")
    return next((adapter for name in bases if (adapter := _NUMPY_ADAPTERS.get(name))), None)


def find_simulated_ranks(obj: PartitionSpec | Mesh | Simulated) -> list[Tensor]:
    """Return the ranks in a spec, a mesh or an axis that vmap simulates, each a tensor."""
    if isinstance(obj, Simulated):
        return [obj.rank]
    mesh = obj.mesh if isinstance(obj, PartitionSpec) else obj
    return [axis.rank for _, axis in mesh.axes if isinstance(axis, Simulated)] if mesh else []


def _replace_ranks(obj: Any, contents: Contents) -> Any:
    """Return the same spec, mesh or axis with other tensors as its simulated ranks."""

    def replace_rank(axis: Any, ranks: Iterator[Tensor]) -> Any:
        return replace(axis, rank=next(ranks)) if isinstance(axis, Simulated) else axis

    ranks = iter(contents[0][1])
    if isinstance(obj, Simulated):
        return replace_rank(obj, ranks)
    mesh = obj.bound_mesh if isinstance(obj, PartitionSpec) else obj
    mesh = replace(mesh, axes=tuple((name, replace_rank(axis, ranks)) for name, axis in mesh.axes))
    return obj.on(mesh) if isinstance(obj, PartitionSpec) else mesh


def _read_ranks(obj: Any) -> Contents:
    """Return the simulated ranks that an object holds."""
    ranks = find_simulated_ranks(obj)
    return [(list(range(len(ranks))), ranks)]


STATEFUL_ADAPTERS: dict[type, ObjectAdapter] = {
    # a run gets the caller's module itself, with other attributes for its length
    nn.Module: ObjectAdapter(
        _read_module,
        lambda module, contents: set_attributes(module, dict(zip(*contents[0], strict=True))),
        make_empty=lambda module: module,
        get_context=lambda module: module,
    ),
    Iterator: ObjectAdapter(
        lambda obj: [(["position"], [OpaqueState(read_position(obj))])], lambda obj, contents: None, _refuse_copy
    ),
    Simulated: ObjectAdapter(_read_ranks, _replace_ranks, get_context=lambda obj: obj),
}
"""The adapters of modules, iterators without a copy, and simulated ranks and their containers."""

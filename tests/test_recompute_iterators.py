"""Law R3 for iterators: a function that runs again and advances one is refused; one that only reaches it is not."""

from __future__ import annotations

import csv
import functools
import io
import itertools
import re
import tempfile
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import funshard as fs

VALUES = [2.0, 3.0, 5.0, 5.0, 5.0, 7.0, 11.0, 13.0]
FILES: list[Any] = []


@pytest.fixture(autouse=True)
def _close_files() -> Iterator[None]:
    yield
    while FILES:
        FILES.pop().close()


def in_loop(values: Any) -> Iterator[float]:
    for value in values:  # noqa: UP028 - one yield in a loop is the case
        yield value


def with_nonlocal() -> Iterator[float]:
    i = 0

    def step() -> float:
        nonlocal i
        i += 1
        return VALUES[i]

    while True:
        yield step()


def with_queue(values: deque[float]) -> Iterator[float]:
    while values:
        yield values.popleft()


class Source:
    def __init__(self) -> None:
        self.position = 0

    def read(self) -> float:
        self.position += 1
        return VALUES[self.position]

    def values(self) -> Iterator[float]:
        while True:
            yield self.read()


def with_inner(inner: Iterator[float]) -> Iterator[float]:
    while True:
        yield next(inner)


def open_file(*, text: bool = True) -> Any:
    file = tempfile.TemporaryFile("w+" if text else "w+b")  # noqa: SIM115 - it is the iterator
    FILES.append(file)
    file.writelines(f"{value}\n" if text else f"{value}\n".encode() for value in VALUES)
    file.seek(0)
    return file


def batches() -> Iterator[Any]:
    data = torch.utils.data.TensorDataset(torch.tensor(VALUES))
    return iter(torch.utils.data.DataLoader(data, batch_size=1))  # pyright: ignore


def spent(cycle: Any) -> Any:
    """Go once through a cycle: from there on it reads from its own copy."""
    for _ in VALUES:
        next(cycle)
    return cycle


READABLE: dict[str, Callable[[], Iterator[Any]]] = {
    "list": lambda: iter(VALUES),
    "range": lambda: iter(range(2, 9)),
    "reversed": lambda: reversed(VALUES),
    "dict": lambda: iter(dict.fromkeys(map(str, VALUES))),
    "OrderedDict": lambda: iter(OrderedDict.fromkeys(map(str, VALUES))),
    "generator in a loop": lambda: in_loop(VALUES),
    "generator over a large list": lambda: in_loop([*VALUES, *map(float, range(3000))]),
    "generator over a generator": lambda: in_loop(in_loop(VALUES)),
    "generator expression": lambda: (value for value in VALUES),
    "generator over an iterator": lambda: with_inner(iter(VALUES)),
    "generator over a cycle": lambda: with_inner(spent(itertools.cycle(VALUES))),
    "generator over a file": lambda: in_loop(open_file()),
    "generator with a closure": with_nonlocal,
    "generator of an object": lambda: Source().values(),
    "generator with a queue": lambda: with_queue(deque(VALUES)),
    "enumerate": lambda: enumerate(VALUES),
    "zip": lambda: zip(VALUES, VALUES, strict=True),
    "map": lambda: map(abs, VALUES),
    "filter": lambda: filter(bool, VALUES),
    "map over a generator": lambda: map(abs, in_loop(VALUES)),
    "count": lambda: itertools.count(2),
    "cycle": lambda: itertools.cycle(VALUES),
    "cycle, later": lambda: spent(itertools.cycle(VALUES)),
    "chain": lambda: itertools.chain(VALUES, VALUES),
    "islice": lambda: itertools.islice(itertools.count(2), 90),
    "accumulate": lambda: itertools.accumulate(VALUES),
    "pairwise": lambda: itertools.pairwise(VALUES),
    "product": lambda: itertools.product(VALUES, VALUES),
    "permutations": lambda: itertools.permutations(VALUES),
    "combinations": lambda: itertools.combinations(VALUES, 2),
    "tee": lambda: itertools.tee(VALUES)[0],
    "zip_longest": lambda: itertools.zip_longest(VALUES, VALUES),
    "csv": lambda: csv.reader([str(value) for value in VALUES]),
    "StringIO": lambda: io.StringIO("".join(f"{value}\n" for value in VALUES)),
    "binary file": lambda: open_file(text=False),
    "DataLoader": batches,
}
UNREADABLE: dict[str, Callable[[], Iterator[Any]]] = {
    "callable": lambda: iter(Source().read, None),
    "matches": lambda: re.finditer(r"\d", "23557"),
    "text file": lambda: open_file(),
}
"""Iterators with no visible position: reaching one is enough for an error."""


def number(value: Any) -> float:
    while isinstance(value, tuple | list):
        value = value[-1]
    return float(value.group() if isinstance(value, re.Match) else value)


WAYS: dict[str, Callable[..., Any]] = {
    "fs.grad": fs.grad,
    "torch.func.grad": torch.func.grad,
    "second order": lambda f: torch.func.grad(torch.func.grad(f)),
    "backward": lambda f: lambda x: torch.autograd.grad(f(leaf := x.clone().requires_grad_()), leaf)[0],
}


def advanced(make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Return an iterator that is no longer at its start."""
    iterator = make()
    next(iterator)
    return iterator


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [*READABLE, *UNREADABLE])
def test_an_iterator_that_is_advanced_is_refused(kind: str, way: str) -> None:
    """The second run would read other values."""
    iterator = advanced({**READABLE, **UNREADABLE}[kind])
    f = fs.remat(lambda x: (x * number(next(iterator))).sin())
    with pytest.raises(TypeError, match=r"given a \S+ that it changes, .*call next\(\) or read\(\) outside"):
        WAYS[way](f)(torch.tensor(1.0))


@pytest.mark.parametrize("how", ["closure", "partial"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", READABLE)
def test_an_iterator_that_is_only_held_is_not_refused(kind: str, way: str, how: str) -> None:
    """Its position after the run is the one before it, and so it is afterwards."""
    iterator = advanced(READABLE[kind])
    expected = number(next(advanced(READABLE[kind])))
    x = torch.tensor(0.7)

    def call(x: Tensor, held: Any) -> Tensor:
        return x.sin() * (held is not None)

    f = fs.remat((lambda x: call(x, iterator)) if how == "closure" else functools.partial(call, held=iterator))
    torch.testing.assert_close(WAYS[way](f)(x), WAYS[way](torch.sin)(x))
    assert number(next(iterator)) == expected


@pytest.mark.parametrize("way", WAYS)
def test_an_iterator_that_the_function_makes_is_its_own(way: str) -> None:
    """Each run makes its own, and may not leave it in an object that it was given."""
    state: dict[str, Any] = {}

    def f(x: Tensor) -> Tensor:
        numbers = itertools.cycle([2.0, 3.0])
        if leaves:
            state["numbers"] = numbers
        return (x * next(numbers)).sin() * next(in_loop(VALUES))

    x = torch.tensor(0.7)
    leaves = False
    torch.testing.assert_close(WAYS[way](fs.remat(f))(x), WAYS[way](lambda x: (x * 2).sin() * 2)(x))
    leaves = True
    with pytest.raises(TypeError, match="returns or stores a cycle, which gives tensors after"):
        WAYS[way](fs.remat(f))(x)

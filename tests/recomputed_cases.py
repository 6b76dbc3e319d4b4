"""Modules as people write them, whose state passes by other ways than a tensor in and a tensor out, with P(remat=True)."""

from __future__ import annotations

import copy
import functools
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 3


class Block(nn.Module):
    """What runs again: its ``forward`` is ``body(self, x, state)``."""

    def __init__(self, body: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.lin, self.body = nn.Linear(WIDTH, WIDTH), body
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        return self.body(self, x, state)


class Model(nn.Module):
    """Two blocks with one state, and a head that reads what they have left there."""

    def __init__(
        self,
        body: Callable[..., Any],
        state: Callable[[], Any] = lambda: None,
        read: Callable[[Any, Any], Any] = lambda model, state: 0.0,
        before: Callable[[Any, Tensor, Any], Any] = lambda model, x, state: None,
        **attributes: Any,
    ) -> None:
        super().__init__()
        self.state, self.read, self.before = state, read, before
        self.blocks = nn.ModuleList(Block(body, **copy.deepcopy(attributes)) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = self.state()
        x = torch.tanh(self.head.weight * x)
        self.before(self, x, state)
        for block in self.blocks:
            x = block(x, state)
        return self.head(x) + self.read(self, state)


class Plain:
    """A cache as transformers has: attributes, and a list of layers that grows."""

    def __init__(self) -> None:
        self.layers: list[Plain] = []
        self.seen = 0


class Slots:
    __slots__ = ("count", "held")

    def __init__(self) -> None:
        self.count = 0


@dataclass(frozen=True)
class Frozen:
    held: Tensor | None = None
    log: list[Any] = field(default_factory=list)


def cached(self: Any, x: Tensor, state: Any) -> Tensor:
    layer = Plain()
    layer.keys = torch.tanh(self.lin(x))
    state.layers.append(layer)
    state.seen += len(x)
    return x + torch.cat([past.keys for past in state.layers]).mean(0) * state.seen


def listed(self: Any, x: Tensor, state: Any) -> Tensor:
    state.append(self.lin(x).sin())
    return x + sum(state) * len(state)


def in_dict(self: Any, x: Tensor, state: Any) -> Tensor:
    state["n"] = state.get("n", 0) + 1
    state["h"] = self.lin(x).sin() + state.get("h", 0)
    return x + state["h"] * state["n"]


def in_set(self: Any, x: Tensor, state: Any) -> Tensor:
    state.add(len(state))
    return self.lin(x).sin() * len(state)


def in_slots(self: Any, x: Tensor, state: Any) -> Tensor:
    state.held = self.lin(x).sin() + getattr(state, "held", 0)
    state.count += 1
    return x + state.held * state.count


def in_frozen(self: Any, x: Tensor, state: Any) -> Tensor:
    state.log.append(Frozen(self.lin(x).sin(), [len(state.log)]))
    return x + sum(f.held * (1 + f.log[0]) for f in state.log)


def replaced(self: Any, x: Tensor, state: Any) -> Tensor:
    """What was there is changed to another tensor, or taken away."""
    h = state.pop("h") * 2 if "h" in state else x
    state["again"] = state["h"] = self.lin(h).sin()
    return state["h"] + h


def in_generator(self: Any, x: Tensor, state: Any) -> Tensor:
    return self.lin(x) * torch.rand(x.shape, dtype=x.dtype, generator=state)


def in_python_random(self: Any, x: Tensor, state: Any) -> Tensor:
    return self.lin(x).sin() * (2 if random.random() < 0.5 else random.random())


def aux_attribute(self: Any, x: Tensor, state: Any) -> Tensor:
    h = self.lin(x).sin()
    self.aux = (h**2).mean()
    return x + h


def kept_list(self: Any, x: Tensor, state: Any) -> Tensor:
    self.kept.append(self.lin(x).sin())
    return x + sum(self.kept) * len(self.kept)


def both_ways(self: Any, x: Tensor, state: Any) -> Tensor:
    """The same object as an argument and as an attribute."""
    assert self.shared is state
    self.shared.append(self.lin(x).sin())
    return x + sum(state) * len(self.shared)


def share(model: Any, x: Tensor, state: Any) -> None:
    for block in model.blocks:
        block.shared = state


def give(model: Any, x: Tensor, state: Any) -> None:
    for block in model.blocks:
        block.given = x.cos()


def hooked_model() -> nn.Module:
    """Activations by hooks, in a list that only the hooks and the head know."""
    model: Any = Model(lambda self, x, state: x + self.lin(x).sin(), read=read_taken)
    model.taken = taken = []
    for block in model.blocks:
        block.lin.register_forward_hook(lambda module, args, out: taken.append(out))
    return model


def read_taken(model: Any, state: Any) -> Any:
    total = sum((t**3).mean() * (i + 1) for i, t in enumerate(model.taken))
    model.taken.clear()
    return total


class Stateful(nn.Module):
    """A buffer that forward replaces, or writes to in place."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.lin, self.in_place = nn.Linear(WIDTH, WIDTH), in_place
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.mean.mul_(0.9).add_(x.mean(0).detach(), alpha=0.1)
        else:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return self.lin(x - self.mean).sin()


DOUBLED = functools.partial(torch.mul, other=torch.tensor(2.0).double())
"""Of which keywords that are tensors were lost."""
CASES: dict[str, Callable[[], nn.Module]] = {
    "cache, read": lambda: Model(cached, Plain, lambda model, state: sum((layer.keys**3).mean() for layer in state.layers)),
    "list": lambda: Model(listed, list, lambda model, state: (state[0] * state[1]).sum()),
    "dict": lambda: Model(in_dict, dict, lambda model, state: (state["h"] ** 2).sum() * state["n"]),
    "OrderedDict": lambda: Model(in_dict, OrderedDict, lambda model, state: (state["h"] ** 2).sum() * state["n"]),
    "set": lambda: Model(in_set, set),
    "deque": lambda: Model(listed, lambda: deque(maxlen=2)),
    "slots": lambda: Model(in_slots, Slots, lambda model, state: state.held.sum() * state.count),
    "frozen dataclass": lambda: Model(in_frozen, Frozen, lambda model, state: state.log[0].held.sum()),
    "replaced": lambda: Model(replaced, dict, lambda model, state: (state["again"] ** 2).sum()),
    "generator": lambda: Model(in_generator, lambda: torch.Generator().manual_seed(3)),
    "python's random": lambda: Model(in_python_random),
    "aux loss on itself": lambda: Model(aux_attribute, read=lambda model, state: sum(b.aux for b in model.blocks)),
    "list on itself": lambda: Model(kept_list, read=lambda model, _: sum(b.kept.pop().sum() for b in model.blocks), kept=[]),
    "argument and attribute": lambda: Model(both_ways, list, before=share),
    "given as attribute": lambda: Model(lambda self, x, state: self.lin(x + self.given).sin(), before=give),
    "partial on itself": lambda: Model(lambda self, x, state: self.scale(self.lin(x).sin()), scale=DOUBLED),
    "grad mode": lambda: Model(lambda self, x, state: self.lin(x).sin() * (2 if torch.is_grad_enabled() else 5)),
    "buffer replaced": lambda: nn.Sequential(Stateful(), Stateful(), nn.Linear(WIDTH, 1)),
    "buffer in place": lambda: nn.Sequential(Stateful(in_place=True), Stateful(in_place=True), nn.Linear(WIDTH, 1)),
    "hooks": hooked_model,
}


REMAT = (Block, Stateful)

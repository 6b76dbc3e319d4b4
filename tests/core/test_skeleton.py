"""skeleton: what is left of a model is all that a call needs, and the memory of its parameters is free."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import of_transformers, refused
from parity import shards_of
from ranks import real_ranks
from torch import Tensor, nn

import funshard as fs


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(5)
        self.norm.bias.requires_grad_(False)
        self.register_buffer("shift", torch.arange(8.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(x)) + self.shift)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: of_transformers("llama_tied", 1, tie_word_embeddings=False).model,
    "gpt2": lambda: of_transformers("gpt2", 1).model,  # its head is tied to its embedding
    "tied": Tied,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def call(model: nn.Module, params: fs.Params, spec: fs.PartitionSpec) -> Tensor:
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    out = fs.functional_call(model, params, (torch.arange(10).view(2, 5),), spec=spec, buffers=buffers)
    return (out if isinstance(out, Tensor) else out.logits).square().mean()


def grads(model: nn.Module, params: fs.Params, spec: fs.PartitionSpec) -> tuple[fs.Params, Tensor]:
    return fs.grad_and_value(lambda p: call(model, p, spec))(params)


@pytest.mark.parametrize("name", MODELS)
@real_ranks(2)
def test_a_skeleton_is_all_that_a_call_needs(rank: int, name: str) -> None:
    """Values, gradients, the spec and the way back, as with the model; then the model goes, and its memory."""
    model = build(name)
    policy = fs.by_size(100)
    spec, params = shards_of(policy, model)
    expected = grads(model, params, spec)
    full = {key: p.clone() for key, p in fs.unshard(params, spec).items()}
    before = {key: x.clone() for key, x in model.state_dict().items()}
    bare = fs.skeleton(model)
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    assert policy(bare) == policy(model)
    assert [(n, p.requires_grad) for n, p in bare.named_parameters()] == [
        (n, p.requires_grad) for n, p in model.named_parameters()
    ]
    assert all(b is dict(model.named_buffers())[n] for n, b in bare.named_buffers())
    gone = [weakref.ref(x) for x in (*model.parameters(), *(p.untyped_storage() for p in model.parameters()), *model.modules())]
    del model
    gc.collect()
    assert not [ref for ref in gone if ref() is not None]
    spec = policy(bare).bound
    for got, want in zip(grads(bare, params, spec), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert all(torch.equal(p, full[key]) for key, p in fs.unshard(params, spec).items())
    for key, p in fs.shard(full if rank == 0 else None, spec, src=0).items():
        assert torch.equal(p, params[key])
    refused(ValueError, "the model is a skeleton, whose parameters have no values", lambda: fs.shard(bare, spec))


def closure(model: Any) -> None:
    forward = model.norm.forward
    model.norm.forward = lambda x: forward(x)


def hook(model: Any) -> None:
    model.head.register_forward_hook(lambda module, args, out: out + model.shift)


def view(model: Any) -> None:
    model.register_buffer("row", model.embed.weight.detach()[0])


def attribute(model: Any) -> None:
    model.row = model.embed.weight.detach()[0]


def lock(model: Any) -> None:
    model.running = (i for i in range(3))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (closure, "'forward' of module 'norm' holds a module or a parameter of the model"),
        (hook, "'_forward_hooks' of module 'head' holds a module"),
        (view, "'row' is in the memory of parameter 'embed.weight'"),
        (attribute, "'row' is in the memory of parameter 'embed.weight'"),
        (lock, "Tied cannot be copied: TypeError: cannot pickle"),
        (lambda model: setattr(model, "norm", torch.jit.script(nn.Linear(2, 2))), "module 'norm' is a ScriptModule"),
    ],
)
def test_refused(change: Any, message: str) -> None:
    model = Tied()
    change(model)
    refused((TypeError, ValueError), message, lambda: fs.skeleton(model))


def test_methods_and_hooks_go_with_the_copy() -> None:
    """What is bound to a module is bound to its copy; a hook that takes the module is given the copy."""
    model: Any = Tied()
    model.head.forward = functools.partial(Tied.forward, model.head)
    model.norm.forward = model.norm.__class__.forward.__get__(model.norm)
    model.norm.register_forward_hook(lambda module, args, out: out * module.eps)
    bare: Any = fs.skeleton(model)
    assert bare.norm.forward.__self__ is bare.norm
    assert bare.head.forward.args[0] is bare.head
    assert len(bare.norm._forward_hooks) == 1


def test_a_graph_module() -> None:
    """torch.fx gives each copy a class of its own, and drops hooks and attributes; on its own and inside of another."""
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    for model in (graph, nn.Sequential(graph, nn.Linear(4, 4))):
        with pytest.raises(TypeError, match=r"does not copy as it is: expected a plain.*no torch\.fx\.GraphModule"):
            fs.skeleton(model)


def test_a_call_of_the_skeleton_itself_is_refused() -> None:
    """But on the meta device, where it has shapes; torch itself computes some layers with anything."""
    bare = fs.skeleton(nn.Conv1d(4, 4, 1))
    assert bare(torch.ones(2, 4, 3, device="meta")).shape == (2, 4, 3)
    refused(RuntimeError, "was called and has no values", lambda: bare(torch.ones(2, 4, 3)))

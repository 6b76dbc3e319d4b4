"""On real ranks: disagreements are errors everywhere and never hangs; resharding; uneven, shared and ignored parameters."""

from __future__ import annotations

import itertools
import pickle
import re

import pytest
import torch
from cases import same
from ranks import Pool, real_ranks
from torch import Tensor, nn
from torch.distributed import DeviceMesh, init_device_mesh

import funshard as fs
from funshard import P, Params


def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def layers() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 1))


def values(model: nn.Module) -> Params:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def message(fn: object, *args: object, **kwargs: object) -> str:
    """What the error says that fn raises; empty for none."""
    try:
        fn(*args, **kwargs)  # type: ignore[operator]
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def different(rank: int, odd: int, what: str, flat: bool) -> str:
    model = layers()
    policy = fs.by_type(nn.Linear)
    if rank == odd:
        match what:
            case "shape":
                model[1] = nn.Linear(5, 7, bias=False)
            case "dtype":
                model.bfloat16()
            case "frozen":
                model[2].requires_grad_(False)
            case "policy":
                policy = fs.policies.whole()
            case "ignored":
                policy = fs.policies.ignoring(policy, params=["1.bias"])
    spec = policy(model)
    return message(fs.shard, model, spec if flat else spec.on(square()))


DIFFERENCES = {
    "shape": r"'1\.bias' \[7\].*'1\.weight' \[7, 5\]",
    "dtype": r"'0\.bias' \[5\] torch\.float32.*'0\.bias' \[5\] torch\.bfloat16",
    "frozen": r"'2\.bias' \[1\].*requires_grad=True.*requires_grad=False",
    "policy": r"unit '0' P\('shard'\).*unit '' P\('shard'\)",
    "ignored": r"'1\.bias' \[7\].*'1\.weight'",
}


@pytest.mark.parametrize("what", sorted(DIFFERENCES))
def test_ranks_with_different_models(what: str, gloo2: Pool, gloo4: Pool) -> None:
    """shard raises on *every* rank, with what rank 0 has and what the other has; on two axes nobody waits for the odd one.

    (torch trains with different ignored modules on different ranks; here that is an error as well.)
    """
    runs = [gloo2.run(different, 1, what, True), gloo4.run(different, 3, what, False), gloo4.run(different, 1, what, False)]
    for messages, odd in zip(runs, (1, 3, 1), strict=True):
        assert len(set(messages)) == 1
        pattern = rf"different models: expected, as on its rank 0, .*got on rank {odd} unit .*; build the same"
        assert re.search(pattern, messages[0]), messages[0]
        assert re.search(DIFFERENCES[what], messages[0]), messages[0]


def changed_after(rank: int, odd: int, what: str, flat: bool) -> str:
    model = layers()
    spec = fs.by_type(nn.Linear)(model)
    bound = spec if flat else spec.on(square())
    if rank == odd:
        match what:
            case "shape":
                model[1] = nn.Linear(4, 7)
            case "dtype":
                model[1].bfloat16()
            case "missing":
                model[1] = nn.Linear(5, 7, bias=False)
            case "new":
                model[1].scale = nn.Parameter(torch.ones(7))
    said = message(fs.shard, model, bound)
    same(fs.shard(layers(), bound), fs.shard(values(layers()), bound, rank=rank))  # and nothing is out of step
    return said


CHANGES = {
    "shape": r"'1\.weight' of unit '1': expected shape \[7, 5\], got \[7, 4\]",
    "dtype": r"'1\.bias' of unit '1': expected torch\.float32, got torch\.bfloat16",
    "missing": r"'1\.bias' of unit '1' is not in the model: was it changed after the spec\?",
    "new": r"'1\.scale' is not in the spec: expected names such as",
}


@pytest.mark.parametrize("what", sorted(CHANGES))
def test_shard_of_a_model_changed_on_one_rank(what: str, gloo2: Pool, gloo4: Pool) -> None:
    """A model that one rank alone changed after the spec was made is an error on every rank that names the parameter."""
    runs = [gloo2.run(changed_after, 0, what, True), gloo2.run(changed_after, 1, what, True)]
    for messages in [*runs, gloo4.run(changed_after, 3, what, False), gloo4.run(changed_after, 2, what, False)]:
        for said in messages:
            assert re.search(rf"parameter {CHANGES[what]}", said), said


def bad_source(rank: int, what: str, src: int, p: P, flat: bool) -> str:
    model = layers()
    full: Params | None = values(model)
    match what:
        case "name":
            full["7.weight"] = full.pop("1.weight")
        case "missing":
            del full["1.weight"]
        case "shape":
            full["1.weight"] = full["1.weight"].t()
        case "dtype":
            full = {name: tensor.double() for name, tensor in full.items()}
        case "none":
            full = None
        case "not a tensor":
            full["1.weight"] = [1.0]  # type: ignore[assignment]
        case "meta":
            full = {name: tensor.to("meta") for name, tensor in full.items()}
    spec = fs.by_type(nn.Linear, p=p)(model)
    bound = spec.bound if flat else spec.on(square())
    said = message(fs.shard, full if rank == src else None, bound, src=src)
    good = fs.shard(values(model) if rank == src else None, bound, src=src)  # and nothing is out of step
    same(good, fs.shard(values(model), bound, rank=rank))
    return said


BAD_SOURCES = {
    "name": r"parameter '7\.weight' is not in the spec: expected names",
    "missing": r"parameter '1\.weight' of unit '1' is missing: expected \[7, 5\], got none",
    "shape": r"parameter '1\.weight' of unit '1': expected shape \[7, 5\], got \[5, 7\]",
    "dtype": r"parameter '0\.weight': expected torch\.float32, got torch\.float64",
    "none": r"shard: expected a model or full parameters by name, got None",
    "not a tensor": r"parameter '1\.weight' of unit '1': expected a tensor, got list",
    "meta": r"parameter '0\.weight': expected a tensor with data, got a meta tensor",
}


@pytest.mark.parametrize("what", sorted(BAD_SOURCES))
def test_a_source_that_does_not_fit(what: str, gloo2: Pool, gloo4: Pool) -> None:
    """What is wrong with the source's dict is the same ValueError on every rank, and the next call works."""
    runs = [
        (0, gloo2.run(bad_source, what, 0, P("shard"), True)),
        (1, gloo2.run(bad_source, what, 1, P(), True)),
        (2, gloo4.run(bad_source, what, 2, P("shard"), False)),
    ]
    for _, messages in runs:
        assert all(re.search(BAD_SOURCES[what], said) for said in messages), messages


def test_a_source_that_is_no_rank_of_the_mesh(gloo2: Pool) -> None:
    """An unknown src is an error on every rank before anything is sent."""
    assert all(re.search(r"rank 2 is not on the mesh.*expected 0\.\.1", text) for text in gloo2.run(from_nowhere))


def from_nowhere(rank: int) -> str:
    model = layers()
    return message(fs.shard, values(model), fs.policies.whole()(model).bound, src=2)


def wrong_worlds(rank: int) -> dict[str, str]:
    model = layers()
    spec = fs.policies.whole(P("shard", align=1))(model)
    shards = fs.shard(model, spec)
    x = torch.ones(1, 3)
    calls = {
        "shard": lambda: fs.shard(model, spec.on({"shard": 4})),
        "functional_call": lambda: fs.functional_call(model, shards, x, spec=spec.on({"shard": 4})),
        "sizes alone": lambda: fs.functional_call(model, shards, x, spec=spec.on({"shard": 2})),
        "pickled": lambda: fs.unshard(shards, pickle.loads(pickle.dumps(spec.bound))),
        "not on it": lambda: fs.shard(model, spec.on(DeviceMesh("cpu", [0]))),
    }
    return {name: message(call) for name, call in calls.items()}


WORLDS = {
    "shard": r"the spec is on sizes alone, \{'shard': 4\}: .* bind the spec to process groups by \.on\(init_device_mesh",
    "functional_call": r"unit '': expected a 1-D buffer of 18 elements, got shape \[35\]; .* another mesh than shard=4\?",
    "sizes alone": r"an axis of 2 ranks without a process group cannot communicate: .* bind the spec with \.on\(mesh\)",
    "pickled": r"an axis of 2 ranks without a process group cannot communicate: .* \(a pickled spec must be bound anew\)",
}


def test_a_spec_on_another_world(gloo2: Pool) -> None:
    """On more ranks than there are, on sizes alone, on a mesh of others: each says what the spec is on."""
    for rank, said in enumerate(gloo2.run(wrong_worlds)):
        for name, pattern in WORLDS.items():
            assert re.search(pattern, said[name]), said[name]
        assert bool(rank) == bool(
            re.search(r"rank 1 of the world is not on the mesh of ranks \[0\]: expected", said["not on it"])
        )


def test_rank0_only_needs_process_groups() -> None:
    """Simulated ranks all run the same code, so one of them cannot get more than the others."""
    model = layers()

    def first(mesh: fs.collectives.Mesh, _: Tensor) -> Params:
        spec = fs.policies.whole()(model).on(mesh)
        return fs.unshard(fs.shard(values(model), spec), spec, rank0_only=True)

    with pytest.raises(ValueError, match=r"rank0_only on a simulated mesh: expected process groups"):
        fs.testing.spmd(first, 2)(torch.zeros(2))


@real_ranks(4)
def test_l6_reshard(rank: int) -> None:
    """From any of one, two and four slices, of any policy, to any other, on a real 2 x 2 mesh."""
    model, mesh = layers(), square()
    full = values(model)
    axes = ["shard", "replicate", ("replicate", "shard"), ("shard", "replicate"), None]
    policies = [lambda p: fs.policies.whole(p), lambda p: fs.by_type(nn.Linear, p=p), lambda p: fs.by_path({"1": p}, P())]
    specs = [policies[i % 3](P(axis, align=1 + i % 2))(model).on(mesh) for i, axis in enumerate(axes)]
    shards = {spec: fs.shard(full, spec) for spec in specs}
    for old, new in itertools.permutations(specs, 2):
        same(fs.reshard(shards[old], old, new), fs.shard(full, new, rank=rank))


def sorted_like(full: Params, model: nn.Module, grads: tuple[Tensor, ...]) -> list[Tensor]:
    named = dict(zip([name for name, p in model.named_parameters() if p.requires_grad], grads, strict=True))
    return [named[name] for name in full]


@real_ranks(4)
def test_parts_of_the_tree(rank: int) -> None:
    """What partition gives is gathered and resharded by itself, and differentiated: LoRA's trainable part."""
    model, mesh = layers().double(), square()
    model[1].requires_grad_(False)
    spec = fs.by_type(nn.Linear, p=P(("shard", "replicate")))(model).on(mesh)
    new = fs.policies.override(fs.by_type(nn.Linear), fs.by_path({"1": P()}))(model).on(mesh)
    shards = fs.shard(model, spec)
    for part in fs.partition(shards, spec):
        names = {param.name for key in part for param in spec.by_key[key].params}
        full = {name: value for name, value in values(model).items() if name in names}
        same(fs.unshard(part, spec), full)
        for options in ({}, {"offload_to_cpu": True}, {"rank0_only": True}):
            same(fs.unshard(part, spec, **options), {} if rank and "rank0_only" in options else full)
        same(fs.reshard(part, spec, new), {key: s for key, s in fs.shard(model, new, rank=rank).items() if key in part})
    trained, frozen = fs.partition(shards, spec)
    xs = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))

    def loss(part: Params) -> Tensor:
        full = {**fs.unshard(part, spec), **fs.unshard(frozen, spec)}
        return torch.func.functional_call(model, full, (xs[rank],)).pow(2).sum()

    for grad in (fs.grad, torch.func.grad):
        full = fs.unshard(grad(loss)(trained), spec)
        plain = torch.autograd.grad(model(xs).pow(2).sum() / 4, [p for p in model.parameters() if p.requires_grad])
        torch.testing.assert_close([*full.values()], sorted_like(full, model, plain), rtol=1e-9, atol=1e-9)


@real_ranks(2)
def test_one_iteration(rank: int) -> None:
    """Uneven slices (12 elements and 9 of a weight): one step is W - lr mean(x), in closed form."""
    model = nn.Linear(3, 3)
    spec = fs.policies.whole()(model).bound
    shards = fs.shard(model, spec)
    xs = torch.randn(2, 3, generator=torch.Generator().manual_seed(6))
    call = lambda p: fs.functional_call(model, p, (xs[rank],), spec=spec)  # noqa: E731
    torch.testing.assert_close(call(shards), model(xs[rank]))
    grads = fs.grad(lambda p: call(p).sum())(shards)
    full = fs.unshard({key: shard - 0.1 * grads[key] for key, shard in shards.items()}, spec)
    torch.testing.assert_close(full["weight"], model.weight.detach() - 0.1 * xs.mean(0).expand(3, 3))


@real_ranks(2)
def test_ignored_parameters(rank: int) -> None:
    """They are in no unit and not counted; the model's own are used, or those given under their names."""
    model = layers()
    spec = fs.policies.ignoring(fs.policies.always(), modules=["1"], params=["2.bias"])(model).bound
    shards = fs.shard(model, spec)
    assert sum(unit.numel for unit in spec) == sum(p.numel() for p in model.parameters()) - 42 - 1
    full = fs.unshard(shards, spec)
    same(full, {name: value for name, value in values(model).items() if name in ("0.weight", "0.bias", "2.weight")})
    x = torch.ones(2, 3)
    torch.testing.assert_close(fs.functional_call(model, shards, (x,), spec=spec), model(x))
    given = shards | {"2.bias": torch.full((1,), 100.0)}
    moved = fs.functional_call(model, given, (x,), spec=spec) - model(x)
    torch.testing.assert_close(moved, (100 - model[2].bias.detach()).expand(2, 1))
    assert torch.equal(fs.unshard(given, spec)["2.bias"], given["2.bias"])


DTYPES = [torch.complex64, torch.complex128, torch.int16, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float16]


@real_ranks(2)
def test_l4_every_dtype_travels(rank: int) -> None:
    """What a backend does not reduce or know is moved as bytes."""
    for dtype in DTYPES:
        model = nn.Module()
        values = torch.arange(6).to(dtype).view(2, 3)
        model.register_parameter("w", nn.Parameter(values, requires_grad=False))
        spec = fs.policies.whole()(model)
        shards = fs.shard(model, spec)
        whole = {"w": values}
        same(fs.unshard(shards, spec), whole)
        same(fs.unshard(shards, spec), whole)
        first = fs.unshard(shards, spec, rank0_only=True)
        same(first, whole if rank == 0 else {})
        same(fs.shard(first or None, spec, src=0), shards)

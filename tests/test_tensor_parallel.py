"""Two-dimensional parallelism: shards over one mesh axis of weights that are split by hand over another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from depth import each
from ranks import Pool, real_ranks
from torch import Tensor, nn
from torch.distributed import init_device_mesh

import funshard as fs
from funshard import collectives as c
from funshard.collectives import Mesh


class Parallel(nn.Module):
    """An MLP whose hidden layer is split over an axis: columns of the first weight, rows of the second."""

    def __init__(self, width: int, hidden: int, tp: c.Axis) -> None:
        super().__init__()
        self.tp = tp
        self.up = nn.Linear(width, hidden // tp.size).double()
        self.down = nn.Linear(hidden // tp.size, width, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        x = c.vary(x, self.tp, reduce="sum")  # one value on all, used by each for its part: gradients add up
        return c.sum_shards(self.down(torch.tanh(self.up(x))), self.tp)  # each has a part of the sum


def split(width: int, hidden: int, reshard: bool) -> tuple[nn.Module, nn.Module, fs.PartitionSpec, c.Axis, tuple[int, int]]:
    """A plain MLP, this rank's part of it, the spec of that, the other axis, and where this rank is."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    tp = Mesh.of(grid)["tp"]
    at = grid.get_local_rank("shard"), grid.get_local_rank("tp")
    plain = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width, bias=False)).double()
    model = nn.Sequential(Parallel(width, hidden, tp))
    with torch.no_grad():
        model[0].up.weight.copy_(plain[0].weight.chunk(2)[at[1]])
        model[0].up.bias.copy_(plain[0].bias.chunk(2)[at[1]])
        model[0].down.weight.copy_(plain[2].weight.chunk(2, dim=1)[at[1]])
    return plain, model, fs.by_type(Parallel, p=fs.P("shard", reshard=reshard))(model).on(grid["shard"], submesh=True), tp, at


@each(reshard=[True, False])
@pytest.mark.parametrize(("width", "hidden"), [(3, 10), (5, 34), (17, 6)])
@real_ranks(4)
def test_2d_mlp_with_nd_mesh(rank: int, width: int, hidden: int, reshard: bool) -> None:
    """FSDP x TP: the spec on one axis of the mesh, the model's own collectives over the other, equal plain training."""
    plain, model, spec, _, at = split(width, hidden, reshard)
    params = fs.shard(model, spec)
    xs = torch.randn(2, 4, width, dtype=torch.float64)

    def loss(params: fs.Params) -> Tensor:
        return (fs.functional_call(model, params, (xs[at[0]],), spec=spec) ** 2).mean()

    ours, theirs = torch.optim.Adam(params.values(), lr=1e-2), torch.optim.Adam(plain.parameters(), lr=1e-2)
    for _ in range(5):
        grads, value = fs.grad_and_value(loss)(params)
        for key, p in params.items():
            p.grad = grads[key]
        ours.step()
        theirs.zero_grad()
        losses = [(plain(x) ** 2).mean() for x in xs]
        (sum(losses) / 2).backward()
        theirs.step()
        torch.testing.assert_close(value, losses[at[0]].detach(), rtol=1e-9, atol=1e-12)
    full = fs.unshard(params, spec)
    torch.testing.assert_close(full["0.up.weight"], plain[0].weight.detach().chunk(2)[at[1]], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(full["0.up.bias"], plain[0].bias.detach().chunk(2)[at[1]], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(full["0.down.weight"], plain[2].weight.detach().chunk(2, dim=1)[at[1]], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, float("inf")])
@real_ranks(4)
def test_clip_grad_norm_2d(rank: int, p: float) -> None:
    """The spec's norm is of this rank's part of the model; the norm of those over the other axis is the whole model's."""
    plain, model, spec, tp, at = split(5, 34, reshard=True)
    xs = torch.randn(2, 4, 5, dtype=torch.float64)
    sum((plain(x) ** 2).mean() for x in xs).div(2).backward()
    grads = fs.grad(lambda q: (fs.functional_call(model, q, (xs[at[0]],), spec=spec) ** 2).mean())(fs.shard(model, spec))
    norm = torch.linalg.vector_norm(c.gather_slices(fs.optim.global_norm(grads, spec, p=p)[None], tp), p)
    most = norm.item() / 3
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), most, p), rtol=1e-9, atol=0)
    scaled = {key: g * (most / (norm + 1e-6)).clamp(max=1) for key, g in grads.items()}
    full = fs.unshard(scaled, spec)
    torch.testing.assert_close(full["0.up.weight"], plain[0].weight.grad.chunk(2)[at[1]], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(full["0.down.weight"], plain[2].weight.grad.chunk(2, dim=1)[at[1]], rtol=1e-9, atol=1e-12)


def refuse(rank: int, folder: str) -> list[str]:
    """Norms and checkpoints over one axis of a mesh, whose other axis splits the model: the errors."""
    _, model, spec, _, at = split(5, 34, reshard=True)
    own = spec.on(init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))["shard"])
    params = fs.shard(model, own)
    fs.functional_call(model, params, (torch.ones(2, 5, dtype=torch.float64),), spec=own)  # which says nothing of the others
    said = []
    for call in (
        lambda: fs.optim.global_norm(params, own),
        lambda: fs.optim.clip_by_global_norm(params, own, 1.0),
        lambda: fs.optim.vdot(params, params, own),
        lambda: fs.checkpoint.save(folder + "/1", params, own),
        lambda: fs.checkpoint.load(folder + "/1", own),
        lambda: fs.checkpoint.latest(folder, own),
        lambda: fs.checkpoint.export(folder + "/2", params, own),
    ):
        with pytest.raises(ValueError, match=r"the spec's mesh \{'shard': 2\} has 2 of 4 ranks: expected all of") as error:
            call()
        said.append(str(error.value))
    path = f"{folder}/{at[1]}"
    fs.checkpoint.save(path, params, spec)
    loaded = fs.checkpoint.load(path, spec)
    assert all(loaded[key].equal(params[key]) for key in params)
    alone = fs.policies.whole()(model).on({"shard": 1})  # which talks to nobody
    fs.optim.global_norm(fs.shard(model, alone), alone)
    return said


def test_a_mesh_of_some_ranks_is_refused_by_norms_and_checkpoints(gloo4: Pool, tmp_path: Path) -> None:
    """Clipping would drift and one checkpoint would have the slices of another: unless the spec says ``submesh=True``."""
    for said in gloo4.run(refuse, str(tmp_path)):
        assert all("spec.on(mesh, submesh=True)" in text for text in said)
        assert said[3].startswith("checkpoint.save: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]

"""BatchNorm of the joined batch of all ranks, made of collectives: on every device, under every transform."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._core.mesh import Axes, Mesh
from ._core.ops import apply
from ._torch.modules import BatchNorm

MESH = "_mesh_of_call"
"""The attribute of a `SyncBatchNorm` in which it finds the mesh of the `functional_call` that runs it."""
WEIGHT = "_weight_of_call"
"""The attribute in which it finds the weight of the micro-batch that the call is part of, None if that is not 0."""


class SyncBatchNorm(BatchNorm):
    """BatchNorm over the joined batch of all ranks, whose statistics `gather_values` collects: as torch.nn.SyncBatchNorm.

    In training, the mean and variance of each channel are over the batches of all ranks on the mesh of the `functional_call`
    that runs it (of several axes, those in ``axes``), or, outside of one, over all processes. Ranks may have different
    numbers of samples, or none. In `accumulate` samples of a micro-batch of weight 0 do not count. Values, running statistics
    and gradients of every order are those of BatchNorm on the joined batch; as with everything, gradients are of the mean over
    ranks of their losses. The statistics are gathered by one `gather_values` for each axis; low precisions are summed in
    float32. In eval mode it is BatchNorm and sends nothing.

    Input and output are ``[samples, num_features, ...]``. The running statistics are replaced, not written to: those after
    a call are in its ``buffers``.

    >>> import torch, funshard as fs
    >>> norm = fs.SyncBatchNorm(1, eps=0, affine=False, track_running_stats=False)
    >>> own = lambda mesh, x: fs.functional_call(norm, {}, x, spec=fs.policies.whole()(norm).on(mesh))
    >>> fs.testing.spmd(own, 2)(torch.tensor([[[1.0]], [[3.0]]])).flatten()
    tensor([-1.,  1.])

    Raises ValueError, before anything is sent, for an input of other channels or dimensions, and, as BatchNorm does, for a
    single value per channel where there is one rank.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        axes: Axes = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.axes = axes

    def forward(self, input: Tensor) -> Tensor:
        """Return the input, normalised by channel.

        Args:
            input: ``[samples, num_features, ...]``, this rank's samples, of which there may be none.

        Returns:
            A tensor of the input's shape and dtype.
        """
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm: expected an input [samples, {self.num_features}, ...], got shape {list(input.shape)}"
            )
        if not self.training:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, self.running_mean is None, 0.0, self.eps
            )
        mesh: Mesh = getattr(self, MESH, None) or Mesh.world()
        names = mesh.select(self.axes)
        count = input.numel() // self.num_features
        if count == 1 and all(mesh[name].size == 1 for name in names):
            raise ValueError(
                f"SyncBatchNorm: expected more than 1 value per channel in training, got shape {list(input.shape)}"
            )

        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        dims, shape = (0, *range(2, x.dim())), (1, -1, *(1,) * (x.dim() - 2))
        own = x.sum(dims) / max(count, 1)
        centred = x - own.view(shape)
        rows = torch.cat([own, centred.square().sum(dims), own.new_full((1,), count)]).unsqueeze(0)
        weight = getattr(self, WEIGHT, None)
        rows = rows if weight is None else torch.where(weight == 0, 0, rows)
        for name in reversed(names):
            rows = apply("gather_sum", rows, mesh[name])  # `gather_values` of what has one shape on all ranks
        rows = rows if weight is None else torch.where(weight == 0, rows.detach(), rows)  # no NaN to the other ranks' samples
        means, squares, counts = rows.split([self.num_features, self.num_features, 1], dim=1)  # of each rank
        total = counts.sum(0).clamp(min=1)
        mean = (means * counts).sum(0) / total
        square = (squares + counts * (means - mean).square()).sum(0)
        self._track(mean.detach(), (square / (total - 1).clamp(min=1)).detach(), counts.sum().detach() > 0)

        scale = (square / total + self.eps).rsqrt()
        if self.weight is not None:  # pyright: ignore[reportUnnecessaryComparison]
            scale = scale * self.weight
        shift = (own - mean) * scale
        if self.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
            shift = shift + self.bias
        return (centred * scale.view(shape) + shift.view(shape)).to(input.dtype)

    @staticmethod
    def convert_sync_batchnorm(model: nn.Module, *, axes: Axes = None) -> nn.Module:
        """Return the model with a `SyncBatchNorm` instead of every BatchNorm.

        Args:
            model: Any module. It does not change; the result has modules of its own, and the same parameters and buffers.
            axes: The mesh axes to take statistics over, all by default.

        Raises:
            ValueError: For a BatchNorm with a forward of its own, which would be lost, and for one whose parameters are not
                initialised yet. The error names its path.

        Example:
            >>> import torch, funshard as fs
            >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
            >>> [type(module).__name__ for module in fs.SyncBatchNorm.convert_sync_batchnorm(model)]
            ['Linear', 'SyncBatchNorm']

        Source: ``torch.nn.SyncBatchNorm.convert_sync_batchnorm``.
        """
        tensors = [*model.parameters(), *model.buffers()]
        made: dict[nn.Module, nn.Module] = {}
        converted = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
        for path, module in list(converted.named_modules()):
            if isinstance(module, BatchNorm):
                made[module] = _convert_layer(path, module, axes)
        for module in list(converted.modules()):
            for name, child in module._modules.items():
                if child in made:
                    module._modules[name] = made[child]
        return made.get(converted, converted)

    def _track(self, mean: Tensor, variance: Tensor, counted: Tensor) -> None:
        """Move the running statistics, if any samples counted. Other tensors take their places: vmap lets nobody write."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked = self.num_batches_tracked + counted
        count = self.num_batches_tracked.clamp(min=1).to(mean.dtype)
        share = counted.to(mean.dtype) * (1 / count if self.momentum is None else self.momentum)
        self.running_mean = ((1 - share) * self.running_mean + share * mean).to(self.running_mean.dtype)
        self.running_var = ((1 - share) * self.running_var + share * variance).to(self.running_var.dtype)


def _convert_layer(path: str, module: BatchNorm, axes: Axes) -> SyncBatchNorm:
    if type(module).forward not in (BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward):
        raise ValueError(
            f"module '{path}' of {type(module).__name__} has a forward of its own, which would be lost: expected one of "
            "torch's BatchNorm; use gather_values in it, or build it on SyncBatchNorm"
        )
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():  # pyright: ignore
        raise ValueError(f"module '{path}': expected initialised parameters; run the model once before it is converted")
    new = SyncBatchNorm.__new__(SyncBatchNorm)
    vars(new).update(vars(module))
    new.axes = axes
    return new

"""Fully sharded data parallel training for PyTorch as pure functions, in the style of JAX, on torch.func."""

from . import averaging, collectives, compress, loss_scale, optim, policies, testing
from .batchnorm import SyncBatchNorm, convert_sync_batchnorm
from .buffers import BufferWarning
from .call import functional_call
from .codec import Codec
from .compile import compile
from .full import gather_full, scatter_full
from .grads import reduce_grads, reduce_mean, weight_share
from .layout import Params, flatten, unflatten, views
from .order import trace_order
from .per_sample import per_sample_grads
from .policies import (
    Policy,
    always,
    any_of,
    by_path,
    by_size,
    by_type,
    custom,
    full_precision,
    ignoring,
    mark,
    marked,
    override,
    whole,
)
from .precision import Precision
from .remat import remat
from .sharding import combine, partition, reshard, shard, unshard
from .skeleton import skeleton
from .spec import P, PartitionSpec, Unit
from .transforms import grad, grad_and_value, hvp
from .tree import ModuleTree, Param, module_tree

__all__ = [
    "BufferWarning",
    "Codec",
    "ModuleTree",
    "P",
    "Param",
    "Params",
    "PartitionSpec",
    "Policy",
    "Precision",
    "SyncBatchNorm",
    "Unit",
    "always",
    "any_of",
    "averaging",
    "by_path",
    "by_size",
    "by_type",
    "collectives",
    "combine",
    "compile",
    "compress",
    "convert_sync_batchnorm",
    "custom",
    "flatten",
    "full_precision",
    "functional_call",
    "gather_full",
    "grad",
    "grad_and_value",
    "hvp",
    "ignoring",
    "loss_scale",
    "mark",
    "marked",
    "module_tree",
    "optim",
    "override",
    "partition",
    "per_sample_grads",
    "policies",
    "reduce_grads",
    "reduce_mean",
    "remat",
    "reshard",
    "scatter_full",
    "shard",
    "skeleton",
    "testing",
    "trace_order",
    "unflatten",
    "unshard",
    "views",
    "weight_share",
    "whole",
]

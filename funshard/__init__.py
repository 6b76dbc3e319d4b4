"""Fully sharded data parallel training for PyTorch as pure functions, in the style of JAX, on torch.func.

A policy maps the modules of a model to a `PartitionSpec`; parameters are a dict of flat slices; every function is pure:

>>> import torch, funshard as fs
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
>>> spec = fs.by_type(torch.nn.Linear)(model)
>>> params = fs.shard(model, spec)
>>> def loss(params, x):
...     return fs.functional_call(model, params, (x,), spec=spec).square().mean()
>>> init, update = fs.optim.from_torch(torch.optim.AdamW, lr=1e-3)
>>> grads, value = fs.grad_and_value(loss)(params, torch.ones(3, 4))
>>> params, state = update(grads, init(params), params)
>>> {unit: tuple(shard.shape) for unit, shard in params.items()}
{'0': (40,), '1': (24,)}

The public names by task. README.md is a first page, examples/guide/reference.md lists every name, ``help(fs.shard)`` explains
one of them:

    policies     by_type, by_size, by_path
    specs        P, Precision, Remat, Compile, Codec; PartitionSpec, Unit, module_tree
    sharding     shard, unshard, stream_full, reshard, partition, combine, skeleton, init, random_like
    layout       flatten, unflatten, param_views
    model calls  functional_call, trace_order, SyncBatchNorm
    transforms   grad, grad_and_value, value_and_grad, hvp, per_sample_grads, chunked, transforms_attention
    memory       remat, offload, compile
    steps        accumulate, update_in_backward, pad_microbatches, scan, reduce_grads, weight_share; check
    planning     plan, Hardware
    submodules   policies, optim, curvature, checkpoint, loss_scale, averaging, compress, codecs, collectives, data, testing

For those who change the package, its map: a folder imports only from floors below its own (tests/house), and a name
without an underscore is public.

   11  __main__                         python -m funshard plan
   10  _plan                            plan: memory, communication and time of a step before it runs
       _steps                           accumulate, update_in_backward: how gradients become a step; scan: steps become a run
       _init                            init, init_buffers: a model on the meta device gets its values, a unit at a time
       _compiled                        fs.compile: the step and the passes over its graph
       testing                          laws and exactness for users: assert_exact, spmd
    9  checkpoint                       save, load, latest, clean: on torch.distributed.checkpoint
       data                             sampler: the same global batches on any number of ranks
       _call                            functional_call: its checks, the modes, the running call, schedule
       curvature                        matrices as operators: hessian, ggn, fisher; lanczos, slq, cg, hutchinson
    8  _sharding                        shard, unshard, stream_full, reshard, skeleton, reduce_grads
       _transforms                      grad, hvp, remat, checkpoint_name, chunked, attention, offload, per_sample_grads
       optim, compress, averaging, loss_scale      around the step
    7  _slices                          random_like; slices where they lie: without padding, averaged, finite
    6  _wire                            a unit's way from slice to buffer: stages, and their folds, data flow and chains
    5  policies, _batchnorm             which modules are units; a layer that takes statistics over ranks
       codecs                           int8, NF4, dynamic8 and cast, for what is sent and what is at rest
    4  _spec                            the options of P: Precision and Codec, Remat, Compile; state by unit
    3  collectives                      collectives with their transposes, and ranks that compare what they send
    2  _core                            the whole idea as data flow: policy, spec, shard, gather, functional_call
    1  _torch                           every private part of torch, and the test that pins it
       _gone                            names of earlier versions, and what to write instead
"""

import typing as _typing
from importlib import import_module as _import_module

from . import collectives, policies
from ._batchnorm import SyncBatchNorm
from ._call.call import functional_call, trace_order
from ._core.layout import Params, flatten, unflatten
from ._core.spec import PartitionSpec
from ._core.tree import ModuleTree, Param, module_tree
from ._core.unit import P, Unit
from ._gone import raise_gone as _raise_gone
from ._sharding.full import stream_full
from ._sharding.sharding import combine, partition, reduce_grads, reshard, shard, unshard, weight_share
from ._sharding.skeleton import skeleton
from ._slices.pieces import param_views
from ._spec.codec import Codec
from ._spec.options import Compile, Remat
from ._spec.precision import Precision
from ._steps.accumulate import accumulate, pad_microbatches
from ._transforms._recompute.remat import remat
from ._transforms._recompute.saved_results import checkpoint_name
from ._transforms.offload import offload
from ._transforms.products import grad, grad_and_value, value_and_grad
from .collectives._rank_check import check
from .policies import Policy, by_path, by_size, by_type

if _typing.TYPE_CHECKING:
    from . import averaging, checkpoint, codecs, compress, curvature, data, loss_scale, optim, testing
    from ._compiled.step import compile
    from ._init.init import init, init_buffers
    from ._plan.plan import Hardware, plan
    from ._slices.random_slices import random_like
    from ._steps.in_backward import update_in_backward
    from ._steps.scan import scan
    from ._transforms.per_sample import per_sample_grads
    from ._transforms.products import hvp
    from ._transforms.sliced import chunked, transforms_attention

__all__ = [
    "Codec", "Compile", "Hardware", "ModuleTree", "P", "Param", "Params", "PartitionSpec", "Policy", "Precision", "Remat",
    "SyncBatchNorm", "Unit", "accumulate", "averaging", "by_path", "by_size", "by_type", "check", "checkpoint",
    "checkpoint_name", "chunked", "codecs", "collectives", "combine", "compile", "compress", "curvature", "data", "flatten",
    "functional_call", "grad", "grad_and_value", "hvp", "init", "init_buffers", "loss_scale", "module_tree", "offload", "optim",
    "pad_microbatches", "param_views", "partition", "per_sample_grads", "plan", "policies", "random_like", "reduce_grads",
    "remat", "reshard", "scan", "shard", "skeleton", "stream_full", "testing", "trace_order", "transforms_attention",
    "unflatten", "unshard", "update_in_backward", "value_and_grad", "weight_share",
]  # fmt: skip


_LAZY = {
    "Hardware": "_plan.plan", "chunked": "_transforms.sliced", "compile": "_compiled.step", "hvp": "_transforms.products",
    "init": "_init.init", "init_buffers": "_init.init", "per_sample_grads": "_transforms.per_sample", "plan": "_plan.plan",
    "random_like": "_slices.random_slices", "scan": "_steps.scan", "transforms_attention": "_transforms.sliced",
    "update_in_backward": "_steps.in_backward",
}  # fmt: skip
"""The public names of modules that a step of training may do without, by module."""
_LAZY_MODULES = {"averaging", "checkpoint", "codecs", "compress", "curvature", "data", "loss_scale", "optim", "testing"}
"""The public modules that it does not need."""


def __getattr__(name: str) -> _typing.Any:
    if name in _LAZY_MODULES:
        return _import_module(f".{name}", __name__)
    if name in _LAZY:
        return getattr(_import_module(f".{_LAZY[name]}", __name__), name)
    return _raise_gone(__name__)(name)

"""Public names that are gone, by module, and what to write instead: each is an AttributeError that says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

GONE: dict[str, dict[str, str]] = {
    "funshard": {
        "BufferWarning": "UserWarning: its message begins with 'functional_call: '",
        "CompileWarning": "UserWarning",
        "PaddedMicrobatches": "the fields of what pad_microbatches returns",
        "Plan": "the methods of what plan returns",
        "StepResult": "the fields of what update_in_backward returns",
        "convert_sync_batchnorm": "SyncBatchNorm.convert_sync_batchnorm",
        "fishervp": "curvature.fisher(losses, params, spec) @ v",
        "gather_full": "unshard(shards, spec): under torch.no_grad(), or with rank0_only= or offload_to_cpu=",
        "ggnvp": "curvature.ggn(outputs, loss, params, spec) @ v",
        "named": "checkpoint_name",
        "reduce_mean": "reduce_grads(grads, spec, weight=weight)",
        "scatter_full": "shard(full, spec, src=0)",
        "views": "param_views",
    },
    "funshard.averaging": {
        "choose_reduce_axes": "the axes themselves, by the step: reduce_axes=all_axes if step < start else reduce_axes",
        "ema": "optim.chain(optim.ema(decay), optimizer), or torch.lerp of each parameter",
        "hierarchical": "periodic(spec, [(2, 'gpu'), (8, None)])",
        "init": "init, update = periodic(spec, period)",
    },
    "funshard.checkpoint": {"Saving": "the methods of what save returns"},
    "funshard.codecs": {"NF4": "nf4"},
    "funshard.collectives": {
        "Reduce": "the strings 'mean' and 'sum'",
        "Simulated": "testing.spmd, which makes such axes",
        "all_gather": "gather_slices, or gather_values for values that each rank computes from its own batch",
        "axis_rank": "members(axis).index(global_rank)",
        "global_rank": "members(axis)[rank]",
        "unvary": "all_reduce",
    },
    "funshard.compress": {
        "PowerSGD": "the fields of the state of powersgd",
        "cast": "P(precision=Precision(reduce=dtype)), or another dtype of the gradients before reduce and after it",
        "post_local": "switch(start, exact(), exact(reduce_axes))",
        "unreduced": "exact(())",
    },
    "funshard.curvature": {
        "ConvexLoss": "cross_entropy or squared_error, or any function: hvp differentiates it",
        "Eigenpair": "the fields of what lanczos returns",
        "Solution": "the fields of what cg returns",
        "Spectrum": "the methods of what slq returns",
        "TraceEstimate": "the fields of what hutchinson returns",
        "Tridiagonal": "the fields of what lanczos returns",
        "power_iteration": "lanczos(operator, start, steps, tolerance=1e-3)",
        "sample_labels": "torch.distributions.Categorical(logits=logits).sample()",
    },
    "funshard.data": {"BatchSampler": "sampler, which makes it"},
    "funshard.loss_scale": {
        "init": "init, update = dynamic(spec)",
        "scale": "loss * state.scale",
        "unscale": "grads, state = update(grads, state), and state.finite",
        "update": "init, update = dynamic(spec)",
    },
    "funshard.optim": {
        "AccumulationState": "the fields of what init(params) returns",
        "ComposedOptimizer": "Optimizer, the type of every pair",
        "EmaState": "the fields of what init(params) returns",
        "FiniteState": "the fields of what init(params) returns",
        "GradientTransformation": "Optimizer, the type of every pair",
        "Matrices": "the fields of what matrices returns",
        "MatrixOptimizer": "Optimizer, the type of every pair",
        "MatrixState": "the fields of what init(params) returns",
        "QuantizedSlice": "the fields of what init(params) returns",
        "ScheduleState": "the fields of what init(params) returns",
        "State": "dict[str, dict[str, Tensor]]",
        "UnitState": "the dict by unit key and name that init(params) returns",
        "reshard": "checkpoint.save and checkpoint.load(path, spec, like=...), which give each owner its part",
        "scale": "{key: factor * x for key, x in tree.items()}",
    },
    "funshard.policies": {
        "any_of": "override(first, second)",
        "mark": "an attribute of your own, and custom(lambda module: getattr(module, 'unit', False))",
        "marked": "custom(lambda module: getattr(module, 'unit', False))",
    },
    "funshard.testing": dict.fromkeys(
        ("integers_like", "meshes", "modules", "policies"), "strategies of your own: tests/strategies.py has these"
    )
    | {"ModelCall": "the argument that assert_exact gives to its loss"},
}
"""By module the names, and what to write."""


def raise_gone(module: str) -> Callable[[str], NoReturn]:
    """Return the ``__getattr__`` of a public module: an AttributeError, which says what to write for a name that is gone."""

    def missing(name: str) -> NoReturn:
        if instead := GONE.get(module, {}).get(name):
            raise AttributeError(f"{module} has no '{name}' any more: use {instead}")
        raise AttributeError(f"module '{module}' has no attribute '{name}'")

    return missing

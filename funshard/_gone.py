"""Public names that are gone, by module, and what to write instead: each is an AttributeError that says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

RESULTS = {
    "funshard": "PaddedMicrobatches Plan StepResult",
    "funshard.checkpoint": "Saving",
    "funshard.compress": "PowerSGD",
    "funshard.curvature": "Eigenpair Solution Spectrum TraceEstimate Tridiagonal",
    "funshard.data": "BatchSampler",
    "funshard.optim": "AccumulationState EmaState FiniteState Matrices MatrixState QuantizedSlice ScheduleState",
    "funshard.testing": "ModelCall",
}
"""Classes of results and states, by module."""
GONE: dict[str, dict[str, str]] = {
    "funshard": {
        "BufferWarning": "UserWarning: its message begins with 'functional_call: '",
        "CompileWarning": "UserWarning",
        "convert_sync_batchnorm": "SyncBatchNorm.convert_sync_batchnorm",
        "fishervp": "curvature.fisher(losses, params, spec) @ v",
        "gather_full": "unshard(shards, spec): under torch.no_grad(), or with rank0_only= or offload_to_cpu=",
        "ggnvp": "curvature.ggn(outputs, loss, params, spec) @ v",
        "named": "checkpoint_name",
        "reduce_mean": "reduce_grads(grads, spec, weight=weight)",
        "scatter_full": "shard(full, spec, src=0)",
        "views": "param_views",
        "visualize": "print(spec), which says what each rank holds of each unit; Plan.to_svg draws it",
    },
    "funshard.averaging": {
        "choose_reduce_axes": "the axes themselves, by the step: reduce_axes=all_axes if step < start else reduce_axes",
        "ema": "optim.chain(optim.ema(decay), optimizer), or torch.lerp of each parameter",
        "hierarchical": "periodic(spec, [(2, 'gpu'), (8, None)])",
        "init": "init, update = periodic(spec, period)",
    },
    "funshard.checkpoint": {
        "clean_name": "name.replace('_orig_mod.', '') and the like; load and read_safetensors do it",
        "rekey": "set_optimizer_state_dict and get_optimizer_state_dict of torch.distributed.checkpoint.state_dict",
    },
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
        "cast": "P(precision=Precision(reduce=dtype)), or another dtype of the gradients before reduce and after it",
        "post_local": "switch(start, exact(), exact(reduce_axes))",
        "unreduced": "exact(())",
    },
    "funshard.curvature": {
        "ConvexLoss": "cross_entropy, or any function: hvp differentiates it",
        "power_iteration": "lanczos(operator, start, steps, tolerance=1e-3)",
        "squared_error": "lambda z: (z - targets).square().mean()",
        "sample_labels": "torch.distributions.Categorical(logits=logits).sample()",
    },
    "funshard.loss_scale": {
        "init": "init, update = dynamic(spec)",
        "scale": "loss * state.scale",
        "unscale": "grads, state = update(grads, state), and state.finite",
        "update": "init, update = dynamic(spec)",
    },
    "funshard.optim": dict.fromkeys(("ComposedOptimizer", "GradientTransformation", "MatrixOptimizer"), "Optimizer")
    | {
        "State": "dict[str, dict[str, Tensor]]",
        "reshard": "checkpoint.save and checkpoint.load(path, spec, like=...), which give each owner its part",
        "scale": "{key: factor * x for key, x in tree.items()}",
    },
    "funshard.policies": {
        "any_of": "override(first, second)",
        "mark": "an attribute of your own, and custom(lambda module: getattr(module, 'unit', False))",
        "marked": "custom(lambda module: getattr(module, 'unit', False))",
    },
    "funshard.testing": dict.fromkeys(("integers_like", "meshes", "modules", "policies"), "strategies of your own"),
}
"""What to write instead of other names, by module."""
for _module, _names in RESULTS.items():
    GONE.setdefault(_module, {}).update(dict.fromkeys(_names.split(), "the fields of what its function returns"))


def raise_gone(module: str) -> Callable[[str], NoReturn]:
    """Return the ``__getattr__`` of a public module: an AttributeError, which says what to write for a name that is gone."""

    def missing(name: str) -> NoReturn:
        if instead := GONE.get(module, {}).get(name):
            raise AttributeError(f"{module} has no '{name}' any more: use {instead}")
        raise AttributeError(f"module '{module}' has no attribute '{name}'")

    return missing

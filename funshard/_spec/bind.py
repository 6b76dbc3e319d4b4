"""The first check of every function that takes a spec, which binds an unbound one."""

from __future__ import annotations

import torch

from .spec import PartitionSpec

__all__ = ["bind_spec", "check_spec"]


def bind_spec(spec: object) -> PartitionSpec:
    """Return ``spec.bound``, as every function that takes a spec does first.

    Raises:
        TypeError: For anything else than a spec.
        RuntimeError: If a process group that it was bound to is gone, or this process has another rank in it now.
    """
    found = check_spec(spec).bound
    if found.mesh is not None:
        found.mesh.check_groups()
    return found


def check_spec(spec: object) -> PartitionSpec:
    """Return the spec unchanged; raise TypeError for a policy or any other type."""
    if isinstance(spec, PartitionSpec):
        return spec
    if callable(spec) and not isinstance(spec, torch.nn.Module | type):
        raise TypeError(f"spec: expected a PartitionSpec, got the policy {spec!r}; call it on the model: policy(model)")
    raise TypeError(f"spec: expected a PartitionSpec such as fs.policies.whole()(model), got {type(spec).__name__}")

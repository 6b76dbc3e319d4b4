"""What torch.distributed.fsdp.wrap selects, without FSDP and without a process group: the oracle for policies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import wrap

import funshard as fs
from funshard.policies import Policy


class Wrapper(nn.Module):
    """What FSDP does to the tree of modules, and nothing else."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self._wrapped, self.options = module, options


def wrapped(model: nn.Module, policy: Any, ignored: Iterable[str] = ()) -> nn.Module:
    """A copy of the model in which torch wrapped what its policy selects."""
    root = copy.deepcopy(model)
    gone = {m for path in ignored for m in root.get_submodule(path).modules()}
    if isinstance(policy, wrap._Policy):
        targets = policy._run_policy(root, gone, {})
        wrap._post_order_apply(root, wrap._construct_wrap_fn(root, targets, Wrapper))
    else:
        wrap._recursive_wrap(root, policy, Wrapper, gone, {p for m in gone for p in m.parameters()}, only_wrap_children=True)
    return root


def torch_units(model: nn.Module, policy: Any, ignored: Iterable[str] = ()) -> dict[str, set[str]]:
    """The paths that torch wraps, and the root, with the names of the parameters that each unit owns."""
    root = wrapped(model, policy, ignored)
    units: dict[str, set[str]] = {"": set()}
    units |= {path.replace("._wrapped", ""): set() for path, m in root.named_modules() if isinstance(m, Wrapper)}
    for raw, _ in root.named_parameters():
        name = raw.replace("._wrapped", "")
        if not any(name.startswith(f"{path}.") for path in ignored):
            units[raw.rpartition("._wrapped.")[0].replace("._wrapped", "")].add(name)
    return units


def units_of(spec: fs.PartitionSpec) -> dict[str, set[str]]:
    units: dict[str, set[str]] = {path: set() for path in spec.paths}
    for unit in spec:
        units[unit.path] |= {param.name for param in unit.params}
    return units


def assert_same(model: nn.Module, ours: Policy, theirs: Any, ignored: Iterable[str] = ()) -> None:
    assert units_of(fs.policies.ignoring(ours, modules=ignored)(model)) == torch_units(model, theirs, ignored)


def owning(units: dict[str, set[str]]) -> dict[str, set[str]]:
    return {path: names for path, names in units.items() if names}


def size(min_numel: int, **sets: Any) -> Callable[..., bool]:
    return partial(wrap.size_based_auto_wrap_policy, min_num_params=min_numel, **sets)


def lambdas(fn: Callable[[nn.Module], bool]) -> Callable[..., bool]:
    return partial(wrap.lambda_auto_wrap_policy, lambda_fn=fn)


def wide(module: nn.Module) -> bool:
    return len(module._parameters) >= 2


def sequential(*shape: Any, width: int = 5) -> nn.Sequential:
    """Linear(5, 5) layers, 30 numel each, nested like the tuple."""
    return nn.Sequential(*(nn.Linear(width, width) if x is None else sequential(*x) for x in shape))


NESTED = (None, None, (None, None))

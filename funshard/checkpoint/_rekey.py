"""Keys of state_dicts: names without the prefixes of wrappers, and names for the numbers of torch's optimizers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

__all__ = ["StateDict", "clean_name", "rekey"]

StateDict: TypeAlias = dict[str, Any]
"""``{"state": {parameter: {name: tensor}}, "param_groups": [{"params": [parameter, ...], **options}]}``."""


def rekey(found: Mapping[str, Any], names: Sequence[str]) -> StateDict:
    """Replace the parameters' names in an optimizer's state_dict by their numbers, or the numbers by names.

    The function is its own inverse. Groups, and parameters in groups, come in the order of the numbers, as ``load_state_dict``
    expects them.

    Args:
        found: The state_dict. Its tensors are not copied.
        names: The names of the torch optimizer's parameters in its order, group after group, such as ``[name for name, _ in
            model.named_parameters()]``. The number of a parameter is its index there.

    Returns:
        The state_dict with the other keys.

    Raises:
        ValueError: Naming the parameter, for a name given twice, for one that only the state_dict or ``names`` has, and for
            names and numbers in one state_dict.

    >>> by_name = {"state": {"b": {"step": 1}}, "param_groups": [{"params": ["b", "a"], "lr": 0.1}]}
    >>> rekey(by_name, ["a", "b"])
    {'state': {1: {'step': 1}}, 'param_groups': [{'params': [0, 1], 'lr': 0.1}]}
    """
    numbers = {name: i for i, name in enumerate(names)}
    if len(numbers) < len(names):
        twice = max(names, key=[*names].count)
        raise ValueError(f"parameter '{twice}' is twice in names: expected each once, as named_parameters() gives them")
    listed = [key for group in found["param_groups"] for key in group["params"]]
    keys = [*found["state"], *listed]
    kinds = {type(key) for key in keys}
    if len(kinds) > 1 or not kinds <= {int, str}:
        raise ValueError(f"rekey: expected parameters' names or their numbers, got keys of {sorted(k.__name__ for k in kinds)}")
    new: Mapping[Any, Any] = numbers if kinds == {str} else dict(enumerate(names))
    if len({*listed}) < len(listed):
        raise ValueError(f"parameter '{max(listed, key=listed.count)}' is twice in param_groups: expected each once")
    for key in keys:
        if key not in new:
            raise ValueError(f"parameter '{key}' is not in names: expected one of {len(names)} such as {[*names][:3]}")
    if missing := {*new} - {*listed}:
        raise ValueError(f"parameter '{min(missing)}' of names is in no group: expected the parameters of the optimizer")

    def by_number(key: Any) -> int:
        return new[key] if kinds == {str} else key

    groups = [{**group, "params": sorted(group["params"], key=by_number)} for group in found["param_groups"]]
    groups.sort(key=lambda group: by_number(group["params"][0]) if group["params"] else len(names))
    return {
        "state": {new[key]: found["state"][key] for key in sorted(found["state"], key=by_number)},
        "param_groups": [{**group, "params": [new[key] for key in group["params"]]} for group in groups],
    }


WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def clean_name(key: str) -> str:
    """Return a key of a state_dict without the prefixes of FSDP1, checkpoint_wrapper, torch.compile and DDP.

    Args:
        key: The key.

    Returns:
        The name in the unwrapped model.

    Example:
        >>> from funshard.checkpoint import clean_name
        >>> clean_name("module._fsdp_wrapped_module.0.weight")
        '0.weight'
    """
    for prefix in WRAPPERS:
        key = key.replace(prefix, "")
    return re.sub(r"(^|\.)module\.", r"\1", key, count=1)

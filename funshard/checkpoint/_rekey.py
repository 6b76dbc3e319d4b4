"""Keys of state_dicts: names without what wrappers add, and names for the numbers of torch's optimizers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

__all__ = ["StateDict", "clean_name", "rekey"]

StateDict: TypeAlias = dict[str, Any]
"""``{"state": {parameter: {name: tensor}}, "param_groups": [{"params": [parameter, ...], **options}]}``."""


def rekey(found: Mapping[str, Any], names: Sequence[str]) -> StateDict:
    """A state_dict of an optimizer with numbers in the place of parameters' names, or names in the place of numbers.

    ``names`` are those of the torch optimizer's parameters in its order, group after group, such as ``[name for name, _ in
    model.named_parameters()]``: the number of a parameter is its place there. Groups, and what is in them, come in the
    order of the numbers, which is what ``load_state_dict`` goes by. Tensors are the given ones. Its own inverse.

    >>> by_name = {"state": {"b": {"step": 1}}, "param_groups": [{"params": ["b", "a"], "lr": 0.1}]}
    >>> rekey(by_name, ["a", "b"])
    {'state': {1: {'step': 1}}, 'param_groups': [{'params': [0, 1], 'lr': 0.1}]}

    Raises ValueError, naming the parameter, for a name that is there twice, for one that only one of both has, and for names
    and numbers in one state_dict.
    """
    place = {name: i for i, name in enumerate(names)}
    if len(place) < len(names):
        twice = max(names, key=[*names].count)
        raise ValueError(f"parameter '{twice}' is there twice in names: expected each once, as named_parameters() gives them")
    listed = [key for group in found["param_groups"] for key in group["params"]]
    keys = [*found["state"], *listed]
    kinds = {type(key) for key in keys}
    if len(kinds) > 1 or not kinds <= {int, str}:
        raise ValueError(f"rekey: expected parameters' names or their numbers, got keys of {sorted(k.__name__ for k in kinds)}")
    new: Mapping[Any, Any] = place if kinds == {str} else dict(enumerate(names))
    if len({*listed}) < len(listed):
        raise ValueError(f"parameter '{max(listed, key=listed.count)}' is there twice in param_groups: expected each once")
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
    """A key of a state_dict without what FSDP1, checkpoint_wrapper, torch.compile and DDP put into it.

    Example:
        >>> from funshard.checkpoint import clean_name
        >>> clean_name("module._fsdp_wrapped_module.0.weight")
        '0.weight'
    """
    for prefix in WRAPPERS:
        key = key.replace(prefix, "")
    return re.sub(r"(^|\.)module\.", r"\1", key, count=1)

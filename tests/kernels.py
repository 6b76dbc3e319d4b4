"""A count of what would be kernels on an accelerator: operators that are dispatched and neither look at memory nor send it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

NAMES = "empty new_empty empty_like empty_strided new_empty_strided detach alias _unsafe_view _lazy_clone as_strided_"
QUIET = {*NAMES.split()}
"""They allocate, or give the same memory again, perhaps as another shape; `_lazy_clone` copies only once somebody writes."""


class Kernels(TorchDispatchMode):
    """Of each operator of aten how often it ran while the mode was on. Views and collectives are no kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "aten" and not func.is_view and name not in QUIET:
            self.ops[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def all(self) -> int:
        return self.ops.total()

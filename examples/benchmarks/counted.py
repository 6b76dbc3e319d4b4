"""What a step does: its collectives with their bytes, the operators that are dispatched, and the bytes that they copy."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import Step
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Sent(NamedTuple):
    """One collective: what, the tensor that goes in and the one that comes out, and over which ranks."""

    op: str
    input: Tensor
    output: Tensor
    group: dist.ProcessGroup

    @property
    def input_bytes(self) -> int:
        return self.input.nbytes

    @property
    def output_bytes(self) -> int:
        return self.output.nbytes


GATHER, SCATTER, REDUCE, EXCHANGE = "all_gather", "reduce_scatter", "all_reduce", "all_to_all"
BROADCAST = "broadcast"  # of which gloo's gathers consist between several ranks
COPIES = {"aten::cat", "aten::clone", "aten::copy_", "aten::_to_copy", "aten::_foreach_copy_", "fsdp::split_with_sizes_copy"}

SENDS_NOTHING = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}


def sent(name: str, args: Sequence[Any], out: Any) -> Sent | None:
    """The collective that an operator was, of torch's functional ones and of those that torch.distributed calls."""
    if not name.startswith(("c10d::", "_c10d_functional::")) or name in SENDS_NOTHING:
        return None
    group = group_of(args)
    if name.startswith("_c10d_functional::all_gather_into_tensor"):
        return Sent(GATHER, args[0], out, group)
    if name == "_c10d_functional::reduce_scatter_tensor":
        return Sent(SCATTER, args[0], out, group)
    if name in ("_c10d_functional::all_reduce", "_c10d_functional::all_reduce_"):
        return Sent(REDUCE, args[0], out, group)
    if name == "_c10d_functional::broadcast_":
        return Sent(BROADCAST, args[0], out, group)
    if name == "_c10d_functional::all_to_all_single":
        return Sent(EXCHANGE, args[0], out, group)
    if name == "c10d::_allgather_base_":
        return Sent(GATHER, args[1], args[0], group)
    if name == "c10d::_reduce_scatter_base_":
        return Sent(SCATTER, args[1], args[0], group)
    if name == "c10d::allreduce_":
        (x,) = args[0]
        return Sent(REDUCE, x, x, group)
    raise NotImplementedError(f"{name} is not counted")


def group_of(args: Sequence[Any]) -> dist.ProcessGroup:
    """The process group among a collective's arguments: by its name, or as an object of torch's operators."""
    if isinstance(args[-1], str):
        return dist.distributed_c10d._resolve_process_group(args[-1])
    return dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))


class Work(TorchDispatchMode):
    """A count of the operators that are dispatched (not the profiler's), what they send, and the bytes they copy."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()  # that go in and come out, by collective
        self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # count what it does to its local tensor
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name
        if name.startswith("profiler::"):
            return out
        self.ops[name] += 1
        if (one := sent(name, args, out)) is not None:
            self.send(one)
        elif name == "_c10d_functional::wait_tensor":
            self.wait(args[0])
        elif name == "fsdp::all_gather_copy_in":
            self.copied += sum(x.nbytes for x in args[0])
        elif name in ("aten::_chunk_cat", "fsdp::chunk_cat", "fsdp::chunk_cat_mixed_dtype"):
            self.copied += kwargs["out"].nbytes
        elif name in COPIES:
            written = kwargs.get("out", args[0] if func._schema.is_mutable else out)
            self.copied += sum(x.nbytes for x in pytree.tree_leaves(written))
        return out

    def send(self, one: Sent) -> None:
        """A collective was started."""
        self.ops[one.op] += 1
        self.bytes[f"into {one.op}"] += one.input_bytes
        self.bytes[f"out of {one.op}"] += one.output_bytes

    def wait(self, tensor: Tensor) -> None:
        """A functional collective's result was waited for."""

    @property
    def dispatched(self) -> int:
        """How many operators."""
        return sum(n for name, n in self.ops.items() if "::" in name)

    @property
    def collectives(self) -> int:
        """How many collectives."""
        return sum(self.ops[op] for op in (GATHER, SCATTER, REDUCE, EXCHANGE))


def work_of(step: Step, x: Tensor, y: Tensor) -> Work:
    """What one step does, after another one."""
    step(x, y)
    with Work() as work:
        step(x, y)
    return work

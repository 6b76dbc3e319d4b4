"""The small models of torch's own FSDP tests (torch.testing._internal.common_fsdp), in double precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class MLP(nn.Module):
    def __init__(self, width: int, inner: int | None = None) -> None:
        super().__init__()
        inner = inner or 2 * width + 1
        self.in_proj, self.out_proj = nn.Linear(width, inner).double(), nn.Linear(inner, width).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(torch.tanh(self.in_proj(x)))


class Net(nn.Module):
    """Blocks between layers that the root owns: the root unit ends the forward."""

    def __init__(self, blocks: int = 3, width: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(width, width).double()
        self.blocks = nn.ModuleList([MLP(width) for _ in range(blocks)])
        self.head = nn.Linear(width, width).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def chain(blocks: int = 3, width: int = 5) -> nn.Sequential:
    """Blocks alone: the root owns nothing."""
    return nn.Sequential(*[MLP(width) for _ in range(blocks)])


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, layers: int = 3, vocabulary: int = 19, width: int = 8, heads: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.layers = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.output.weight = self.tokens.weight
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class Chunked(Transformer):
    """One whose loss may be computed in chunks, of what its trunk returns."""

    def trunk(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def project(self, x: Tensor) -> Tensor:
        return self.output(x)


class Outer(MLP):
    """A unit with a unit inside, between its own two layers."""

    def __init__(self) -> None:
        super().__init__(5)
        self.inner = MLP(11)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(self.inner(torch.tanh(self.in_proj(x))))


class Order(nn.Module):
    """Blocks in any order, some more than once, some never."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.a, self.b, self.c = MLP(5), MLP(5, 7), MLP(5, 8)
        self.head = nn.Linear(5, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = getattr(self, name)(x)
        return self.head(x)


def frozen(model: nn.Module, *paths: str) -> nn.Module:
    for path in paths:
        model.get_submodule(path).requires_grad_(False)
    return model


def fsdp1(model: nn.Module, block: type[nn.Module], strategy: ShardingStrategy, **options: Any) -> FullyShardedDataParallel:
    """The model in torch's first FSDP, a unit for each block."""
    options |= {"sharding_strategy": strategy, "auto_wrap_policy": ModuleWrapPolicy({block}), "use_orig_params": True}
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def fsdp2(model: nn.Module, *blocks: Any, of_blocks: Mapping[str, Any] = {}, **options: Any) -> nn.Module:
    """The model in torch's second FSDP, a unit for each block, which may have options of their own."""
    for module in [module for module in model.modules() if isinstance(module, blocks)]:
        fully_shard(module, **options | {**of_blocks})
    return fully_shard(model, **options)

"""Operator: a symmetric matrix over sharded parameters that is known by its products with vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _torch
from .._core.checks import bind_spec, check_mapping
from .._core.layout import Params
from .._core.spec import PartitionSpec
from .._core.unit import global_shape
from .._sharding.full import gather_stored
from .._sharding.sharding import shard
from .._slices.random_slices import random_like
from .._transforms.products import fishervp, ggnvp, hvp
from ..optim._norms import axpy, global_norm, vdots

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator


@dataclass(frozen=True, eq=False)
class Operator:
    """A symmetric linear operator on trees like sharded parameters: ``operator @ v`` is this rank's slice of its product.

    ``operator + 0.1`` adds a multiple of the identity. Every rank takes part in each product.

    Attributes:
        product: The product with a vector without damping: shards from shards. It must be linear and symmetric.
        params: Shards by unit key: vectors have their keys, shapes and dtypes. float32 or float64.
        spec: Their spec; bound here.
        damping: The multiple of the identity that is added.

    Raises:
        TypeError: For params of another dtype, or complex ones.
        ValueError: By ``@``, for a vector that differs from params; the message names the unit.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole(fs.P(align=1))(torch.nn.Linear(2, 1, bias=False))
        >>> params = fs.shard({"weight": torch.tensor([[1.0, 2.0]])}, spec)
        >>> operator = fs.curvature.hessian(lambda p: (p[""] ** 3).sum(), params, spec)
        >>> (operator + 1) @ {"": torch.ones(2)}
        {'': tensor([ 7., 13.])}
    """

    product: Callable[[Params], Params]
    params: Mapping[str, Tensor]
    spec: PartitionSpec
    damping: float = 0.0

    def __post_init__(self) -> None:
        check_mapping(self.params)
        object.__setattr__(self, "spec", bind_spec(self.spec))
        for key, tensor in self.params.items():
            self.spec.owner(key)
            if tensor.dtype not in (torch.float32, torch.float64):
                raise TypeError(
                    f"curvature: '{key}': expected float32 or float64, got {tensor.dtype}; a unit computes in a smaller dtype "
                    "by P(precision=), and partition(params, spec) sets apart what is not differentiated"
                )

    def __matmul__(self, v: Mapping[str, Tensor]) -> Params:
        """Return this rank's slice of the product with a vector."""
        self.check_vector(v)
        out = self.product(dict(v))
        self.check_vector(out, "the product")
        return axpy(self.damping, v, out) if self.damping else out

    def __add__(self, damping: float) -> Operator:
        """Return the operator with a multiple of the identity added."""
        if isinstance(damping, bool) or not isinstance(damping, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        if not math.isfinite(damping):
            raise ValueError(f"curvature: damping: expected a finite number, got {damping}")
        return replace(self, damping=self.damping + damping)

    __radd__ = __add__

    @property
    def numel(self) -> int:
        """The number of rows: elements of the whole parameters, without padding."""
        return sum(map(math.prod, self._shapes().values()))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        sizes = dict(self.spec.bound_mesh.sizes)
        owners: list[Any] = [self.spec.owner(key) for key in self.params]
        return {param.name: global_shape(param, sizes) for x in owners for param in getattr(x, "params", (x,))}

    def check_vector(self, v: Mapping[str, Tensor], what: str = "the vector") -> None:
        """Raise ValueError or TypeError, naming the unit, unless a tree has the keys, shapes and dtypes of params.

        Args:
            v: The tree.
            what: Its name in the message.
        """
        check_mapping(v, what)
        for key in (*self.params, *v):
            got, expected = (f"{[*t[key].shape]} {t[key].dtype}" if key in t else "none" for t in (v, self.params))
            if got != expected:
                raise ValueError(
                    f"curvature: {what}: '{key}': expected {expected} as in the operator's params, got {got}; "
                    "random_like(params, spec, seed) gives such a vector"
                )

    def check_symmetric(self, seed: int = 0, tolerance: float | None = None) -> None:
        """Check <x, A y> = <A x, y> for two random vectors, by two products.

        A loss that mixes shards and gathered values in `ggn` or `fisher` fails here, and so does a random one.

        Args:
            seed: The seed of the vectors.
            tolerance: Relative to |A x| |y|; by default 1e-9 in float64, 1e-4 if a tensor is float32.

        Raises:
            ValueError: The two differ. On every rank.
        """
        if tolerance is None:
            tolerance = 1e-4 if any(t.dtype == torch.float32 for t in self.params.values()) else 1e-9
        x, y = (random_like(self.params, self.spec, probe_seed(seed, i)) for i in range(2))
        ax, ay = self @ x, self @ y
        pairs = [(x, ay), (ax, y), (ax, ax), (y, y)]
        left, right, aa, yy = read_numbers("check_symmetric", pairs, self.spec)
        if abs(left - right) > tolerance * math.sqrt(aa * yy):
            raise ValueError(
                f"check_symmetric: <x, A y> is {left:.10g}, and <A x, y> is {right:.10g}: expected a symmetric operator; is "
                "its function random, or are its outputs a mixture of shards and gathered values?"
            )

    def to_scipy(self) -> LinearOperator:
        """Return the operator as SciPy's: it takes and gives whole vectors, the same on all ranks.

        Elements are in the order of ``unshard(params, spec)``, each parameter row-major. Every rank makes the same calls.

        Raises:
            RuntimeError: On simulated ranks.
        """
        from scipy.sparse.linalg import LinearOperator  # no other part of the package needs it

        _check_host("to_scipy", self.spec)
        names = [*self.spec._to_model_order(self._shapes()).items()]
        dtype = torch.float64 if any(t.dtype == torch.float64 for t in self.params.values()) else torch.float32

        def product(vector: Any) -> Any:
            parts = torch.as_tensor(vector).reshape(-1).split([math.prod(shape) for _, shape in names])
            full = {name: part.reshape(shape) for (name, shape), part in zip(names, parts, strict=True)}
            out = gather_stored(self @ self._shard(full), self.spec)
            return torch.cat([out[name].reshape(-1).to(dtype) for name, _ in names]).cpu().numpy()

        n = self.numel
        return LinearOperator((n, n), matvec=product, rmatvec=product, dtype=str(dtype).removeprefix("torch."))  # pyright: ignore[reportCallIssue]

    def _shard(self, full: Params) -> Params:
        """Return the slices of a vector by parameter name."""
        spec = self.spec._restrict_to_units("", self.params)
        at = {param.name: (self.params[unit.key].device, unit.dtype) for unit in spec for param in unit.params}
        return shard({name: full[name].to(*where) for name, where in at.items()}, spec)


def hessian(f: Callable[[Any], Tensor], params: Mapping[str, Tensor], spec: PartitionSpec) -> Operator:
    """Return the Hessian of a loss, whose products are `hvp`.

    Args:
        f: The loss of this rank's batch, as a function of params.
        params: Shards by unit key, of all units or some.
        spec: Their spec.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole(fs.P(align=1))(torch.nn.Linear(2, 1, bias=False))
        >>> params = fs.shard({"weight": torch.tensor([[1.0, 2.0]])}, spec)
        >>> fs.curvature.hessian(lambda p: (p[""] ** 3).sum(), params, spec) @ {"": torch.ones(2)}
        {'': tensor([ 6., 12.])}
    """
    return Operator(lambda v: hvp(f, params, v), params, spec)


def ggn(
    outputs: Callable[[Any], Any], loss: Callable[[Any], Tensor], params: Mapping[str, Tensor], spec: PartitionSpec
) -> Operator:
    """Return the generalised Gauss-Newton matrix of a loss: the mean over ranks of J' H J.

    J is the Jacobian of a rank's outputs, H the Hessian of its loss at them: positive semi-definite for a convex loss
    (Schraudolph, Fast Curvature Matrix-Vector Products for Second-Order Gradient Descent, 2002). A product runs ``outputs``
    twice, with the same random numbers: RuntimeError if the second run gives others, as with a cache that the first one fills.

    Args:
        outputs: A function of params that returns this rank's outputs, such as logits: a tensor or a tree of tensors.
        loss: A convex function of the outputs alone, without reductions over ranks. With `cross_entropy` its
            Hessian is in closed form; another function is differentiated by `hvp`.
        params: Shards by unit key, of all units or some.
        spec: Their spec.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole(fs.P(align=1))(torch.nn.Linear(2, 1, bias=False))
        >>> params = fs.shard({"weight": torch.tensor([[1.0, 2.0]])}, spec)
        >>> fs.curvature.ggn(lambda p: p[""] ** 2, lambda z: z.square().sum(), params, spec) @ {"": torch.ones(2)}
        {'': tensor([ 8., 32.])}
    """
    return Operator(lambda v: ggnvp(outputs, loss, params, v), params, spec)


def fisher(losses: Callable[[Any], Tensor], params: Mapping[str, Tensor], spec: PartitionSpec) -> Operator:
    """Return the empirical Fisher matrix: the mean, over ranks and samples, of g g', where g is a sample's gradient.

    With labels that the model itself draws, ``torch.distributions.Categorical(logits=logits).sample()``, it estimates the true
    one.

    Args:
        losses: A function of params that returns the losses of this rank's samples, [samples]. It runs twice, as in `ggn`.
        params: Shards by unit key, of all units or some.
        spec: Their spec.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole(fs.P(align=1))(torch.nn.Linear(2, 1, bias=False))
        >>> params = fs.shard({"weight": torch.tensor([[1.0, 2.0]])}, spec)
        >>> fs.curvature.fisher(lambda p: p[""] ** 2, params, spec) @ {"": torch.ones(2)}
        {'': tensor([2., 8.])}
    """
    return Operator(lambda v: fishervp(losses, params, v), params, spec)


def probe_seed(seed: int, i: int) -> int:
    """Return the seed of the i-th random vector, distinct for all seeds below 2**32."""
    return seed + (i << 32)


def read_numbers(function: str, pairs: list[tuple[Params, Params]], spec: PartitionSpec) -> list[float]:
    """Return inner products of pairs of vectors, the same on all ranks; raise ValueError if one is not finite.

    It takes one small reduction. Raises RuntimeError where the host cannot read values.
    """
    _check_host(function, spec)
    numbers: list[float] = vdots(pairs, spec).tolist()
    if not all(map(math.isfinite, numbers)):
        raise ValueError(
            f"{function}: an inner product of vectors is not finite, {numbers[:4]}: expected a finite vector and products; "
            "look at the loss and at the params"
        )
    return numbers


def find_largest(function: str, v: Mapping[str, Tensor], spec: PartitionSpec) -> float:
    """Return the largest magnitude of a vector's elements, the same on all ranks; raise ValueError unless it is finite."""
    _check_host(function, spec)
    largest = float(global_norm(v, spec, p=math.inf))
    if not math.isfinite(largest):
        raise ValueError(
            f"{function}: expected a vector of finite values, got {largest} in it; look at the loss and the params"
        )
    return largest


def _check_host(function: str, spec: PartitionSpec) -> None:
    """Raise RuntimeError where the host cannot read values: on simulated ranks, in transforms and in compilation."""
    if spec.bound_mesh.is_simulated or not _torch.is_eager():
        raise RuntimeError(
            f"{function}: the host reads values, which it cannot on simulated ranks, in transforms or in compilation: expected "
            "real ranks, outside of them; products (operator @ v) and hutchinson run everywhere"
        )

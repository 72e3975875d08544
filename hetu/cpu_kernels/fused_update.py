"""Gradient descent that never stores its gradient: the product or the sum that makes it adds into the parameter.

Made by the pass `fuse_updates` only, after autodiff. Where the executor donates the parameter's memory, one BLAS call
with alpha = -lr and beta = 1 is the whole update. Momentum, clipping and decay need the gradient itself, so they are
left out.

Gain: see `fuse_updates.py`. Off by leaving `fuse_updates` out of `passes=` or `HETU_PASSES`.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ..core.kernels import Call
from ..core.op import Role, op
from ..core.types import TensorType
from . import blas
from .update import copied, is_fixed


def _parameter(p: TensorType, *_: TensorType) -> TensorType:
    return p


@op(role=Role.UPDATE, infer=_parameter, inplace={0: (0,)}, differentiable=False)
def sgd_product(xp: ModuleType, p: Any, a: Any, b: Any, lr: Any) -> Any:
    """p - lr (a @ b): gradient descent on a matrix (m, n) whose gradient is the product of (m, k) and (k, n).

    >>> import hetu as ht
    >>> ht.evaluate(sgd_product([[1.0]], [[2.0, 3.0]], [[1.0], [1.0]], 0.1)).tolist()
    [[0.5]]
    """
    return p - xp.asarray(lr, dtype=p.dtype) * xp.matmul(a, b)


@sgd_product.bind
def sgd_product_bind(xp: ModuleType, out: Any, p: Any, a: Any, b: Any, lr: Any) -> list[Call] | None:
    calls = copied((out,), (p,))
    minus, negate = negated(lr, p.dtype)
    fused = blas.gemm(a, b, out, minus, 1.0)
    if fused is not None:
        return [*calls, *negate, fused]
    gradient = np.empty_like(out)
    return [*calls, *negate, partial(np.matmul, a, b, gradient), *add_scaled(out, gradient, minus, gradient)]


@op(role=Role.UPDATE, infer=_parameter, inplace={0: (0,)}, differentiable=False)
def sgd_sum(xp: ModuleType, p: Any, g: Any, lr: Any) -> Any:
    """p - lr sum(g): gradient descent on a vector (n,) whose gradient is the sum over the rows of (..., n).

    >>> import hetu as ht
    >>> ht.evaluate(sgd_sum([1.0, 2.0], [[1.0, 0.0], [3.0, 4.0]], 0.5)).tolist()
    [-1.0, 0.0]
    """
    return p - xp.asarray(lr, dtype=p.dtype) * xp.sum(g, axis=tuple(range(g.ndim - 1)), dtype=g.dtype)


@sgd_sum.bind
def sgd_sum_bind(xp: ModuleType, out: Any, p: Any, g: Any, lr: Any) -> list[Call] | None:
    if not g.flags.c_contiguous or not g.size:
        return None
    calls = copied((out,), (p,))
    minus, negate = negated(lr, p.dtype)
    rows = g.reshape(-1, g.shape[-1])
    fused = blas.gemv(rows.T, np.ones(len(rows), g.dtype), out, minus, 1.0) if min(rows.shape) > 1 else None
    if fused is not None:
        return [*calls, *negate, fused]
    gradient = np.empty_like(out)
    return [*calls, *negate, partial(np.sum, rows, 0, None, gradient), *add_scaled(out, gradient, minus, gradient)]


def negated(lr: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, list[Call]]:
    """A 0-d array that holds -lr once the instructions have run; for a constant that is so from the start."""
    minus = np.empty((), dtype)
    negate = partial(np.negative, lr, minus, casting="same_kind")
    if is_fixed(lr):
        negate()
        return minus, []
    return minus, [negate]


def add_scaled(p: np.ndarray, x: np.ndarray, minus: np.ndarray, scratch: np.ndarray) -> list[Call]:
    """p = p + minus x, with `minus` a 0-d array read on every call; `scratch` may be `x`."""
    call = blas.axpy(x, p, minus)
    if call is not None:
        return [call]
    return [partial(np.multiply, x, minus, scratch), partial(np.add, p, scratch, p)]

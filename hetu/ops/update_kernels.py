"""What the update rules share: their type rule and the in-place steps that their bound forms are made of.

Ignored on purpose: devices other than the CPU, where the forward functions run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..errors import DTypeError, ShapeError
from ..kernels import kernels
from ..op import Instruction
from ..types import TensorType, compatible, is_float

BLOCK = 1 << 18  # elements a block: the scratch of a rule stays in the cache however large the parameter


def update_type(tables: int) -> Callable[..., TensorType | tuple[TensorType, ...]]:
    """Type rule of a rule with `tables` outputs: parameter, states and gradient agree; the rest are scalars."""

    def infer(*types: TensorType, **_: Any) -> TensorType | tuple[TensorType, ...]:
        check_tables(types[:tables])
        check_alike(types[0], types[tables], "the gradient")
        check_scalars(types[tables + 1 :])
        return types[0] if tables == 1 else types[:tables]

    return infer


def check_tables(types: Sequence[TensorType]) -> None:
    if not is_float(types[0].dtype):
        raise DTypeError(f"the parameter is {types[0]}", fix="only floating variables can be trained")
    for state in types[1:]:
        check_alike(types[0], state, "the optimizer state")


def check_alike(wanted: TensorType, got: TensorType, what: str) -> None:
    fits = wanted.ndim == got.ndim and all(map(compatible, wanted.shape, got.shape))
    if not fits or wanted.dtype != got.dtype:
        raise ShapeError(f"{what} is {got}, wanted {wanted}", fix="give it the shape and dtype of the parameter")


def check_scalars(types: Sequence[TensorType]) -> None:
    for type_ in types:
        if type_.shape != ():
            raise ShapeError(f"the learning rate and the step are scalars, got {type_}", fix="pass one number")


# -- writing in place ------------------------------------------------------------------------------------------


def outputs_in_place(out: Any, tables: Sequence[np.ndarray]) -> tuple[tuple[np.ndarray, ...], list[Instruction]]:
    """The outputs, and the copies that fill those which do not lie on their inputs already."""
    outs = out if isinstance(out, tuple) else (out,)
    copies = [partial(np.copyto, o, x) for o, x in zip(outs, tables) if o.ctypes.data != x.ctypes.data]
    return outs, copies


def blocks(*arrays: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """Arrays of one shape cut along their first axis, together with a scratch array, into about `BLOCK` elements."""
    arrays = np.atleast_1d(*arrays)  # views: BLAS takes no scalars
    first = arrays[0]
    if first.size <= BLOCK:
        return [(*arrays, np.empty_like(first, order="C"))]
    rows = max(1, BLOCK * len(first) // first.size)
    scratch = np.empty((rows, *first.shape[1:]), first.dtype)
    starts = range(0, len(first), rows)
    return [(*(a[i : i + rows] for a in arrays), scratch[: min(rows, len(first) - i)]) for i in starts]


def decay(mean: np.ndarray, x: np.ndarray, rate: float, scale: float, scratch: np.ndarray) -> list[Instruction]:
    """mean = rate mean + scale x; `scratch` may be `x`."""
    call = kernels("cpu").blas.axpby(x, mean, scale, rate)
    if call is not None:
        return [call]
    return [
        partial(np.multiply, mean, mean.dtype.type(rate), mean),
        partial(np.multiply, x, x.dtype.type(scale), scratch),
        partial(np.add, mean, scratch, mean),
    ]


def add_scaled(p: np.ndarray, x: np.ndarray, minus: np.ndarray, scratch: np.ndarray) -> list[Instruction]:
    """p = p + minus x, with `minus` a 0-d array read on every call; `scratch` may be `x`."""
    call = kernels("cpu").blas.axpy(x, p, minus)
    if call is not None:
        return [call]
    return [partial(np.multiply, x, minus, scratch), partial(np.add, p, scratch, p)]


def negated(lr: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, list[Instruction]]:
    """A 0-d array that holds -lr once the instructions have run; for a constant that is so from the start."""
    minus = np.empty((), dtype)
    negate = partial(np.negative, lr, minus, casting="same_kind")
    if lr.base is None and not lr.flags.writeable:  # a read-only view may yet change with what it is a view of
        negate()
        return minus, []
    return minus, [negate]


def scaled_step(
    p: np.ndarray, x: np.ndarray, square: np.ndarray, minus: np.ndarray, epsilon: Any, s: np.ndarray
) -> list[Instruction]:
    """p = p + minus x / (sqrt(square) + epsilon), with scratch `s`."""
    root = [partial(np.sqrt, square, s), partial(np.add, s, epsilon, s), partial(np.divide, x, s, s)]
    return root + add_scaled(p, s, minus, s)

"""Initial values of variables: each initializer is a function `(shape, dtype, rng) -> array`.

`uniform`, `normal`, `truncated_normal`, `constant` and `orthogonal` take their parameters first and return such a
function; the others are such functions themselves. The variance of the Xavier, He and LeCun families follows from the
numbers of inputs and outputs of one unit, see `fans`. NumPy makes all values on the host, from a seeded generator;
devices get copies.
"""

from __future__ import annotations

import math

import numpy as np

from .answers import answer_names
from .core.errors import ShapeError
from .core.leaf import Initializer
from .core.types import show_shape

__all__ = [
    "constant", "fans", "he_normal", "he_uniform", "lecun_normal", "lecun_uniform", "normal", "ones", "orthogonal",
    "truncated_normal", "uniform", "xavier_normal", "xavier_uniform", "zeros",
]  # fmt: skip
answer_names(__name__)

KnownShape = tuple[int, ...]

# Standard deviation of a standard normal cut off at two: dividing by it restores the variance that was asked for.
TRUNCATED_STD = 0.87962566103423978


def fans(shape: KnownShape) -> tuple[int, int]:
    """(fan in, fan out): how many values one unit of the layer reads, and how many units read one input.

    A matrix is a linear weight (in, out). More axes are a convolution weight (out, in, height, width, ...), whose
    fans are multiplied by the size of the kernel. Fewer axes have no fans: ShapeError.

    >>> fans((784, 256)), fans((16, 6, 5, 5))
    ((784, 256), (150, 400))
    """
    if len(shape) < 2:
        raise ShapeError(
            f"a variable of shape {show_shape(shape)} has no fan in and fan out",
            fix="use zeros, ones, constant, uniform or normal for vectors and scalars",
        )
    if len(shape) == 2:
        return shape[0], shape[1]
    kernel = math.prod(shape[2:])
    return shape[1] * kernel, shape[0] * kernel


def zeros(shape: KnownShape, dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    """All 0.

    >>> zeros((2,), np.dtype("float32"), np.random.default_rng(0)).tolist()
    [0.0, 0.0]
    """
    return np.zeros(shape, dtype)


def ones(shape: KnownShape, dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    """All 1.

    >>> ones((2,), np.dtype("float32"), np.random.default_rng(0)).tolist()
    [1.0, 1.0]
    """
    return np.ones(shape, dtype)


def constant(value: float) -> Initializer:
    """All `value`.

    >>> constant(0.5)((2,), np.dtype("float32"), np.random.default_rng(0)).tolist()
    [0.5, 0.5]
    """
    return lambda shape, dtype, rng: np.full(shape, value, dtype)


def uniform(low: float = -0.05, high: float = 0.05) -> Initializer:
    """Evenly distributed in [low, high).

    >>> values = uniform(-1, 1)((100,), np.dtype("float32"), np.random.default_rng(0))
    >>> bool((abs(values) <= 1).all()), values.dtype.name
    (True, 'float32')
    """
    return lambda shape, dtype, rng: rng.uniform(low, high, shape).astype(dtype)


def normal(std: float = 0.05, mean: float = 0.0) -> Initializer:
    """Normally distributed.

    >>> values = normal(0.1)((1000,), np.dtype("float64"), np.random.default_rng(0))
    >>> round(float(values.std()), 2)
    0.1
    """
    return lambda shape, dtype, rng: rng.normal(mean, std, shape).astype(dtype)


def truncated_normal(std: float = 0.05, mean: float = 0.0) -> Initializer:
    """Normally distributed, values beyond two standard deviations of the parent drawn again; the result has `std`.

    >>> values = truncated_normal(0.1)((1000,), np.dtype("float64"), np.random.default_rng(0))
    >>> round(float(values.std()), 2), bool(abs(values).max() < 0.1 * 2 / TRUNCATED_STD)
    (0.1, True)
    """

    def make(shape: KnownShape, dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
        values = rng.normal(size=shape)
        while (beyond := np.abs(values) > 2).any():
            values[beyond] = rng.normal(size=int(beyond.sum()))
        return np.asarray(mean + values * (std / TRUNCATED_STD), dtype)

    return make


def xavier_uniform(shape: KnownShape, dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    """Variance 2 / (fan in + fan out), for tanh and sigmoid. X. Glorot, Y. Bengio, AISTATS 2010, eq. 16.

    >>> bool(abs(xavier_uniform((30, 20), np.dtype("float32"), np.random.default_rng(0))).max() <= (6 / 50) ** 0.5)
    True
    """
    return _uniform_of(2 / sum(fans(shape)), shape, dtype, rng)


def xavier_normal(shape: KnownShape, dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    """Variance 2 / (fan in + fan out), for tanh and sigmoid. X. Glorot, Y. Bengio, AISTATS 2010, eq. 12.

    >>> xavier_normal((3, 2), np.dtype("float32"), np.random.default_rng(0)).shape
    (3, 2)
    """
    return _normal_of(2 / sum(fans(shape)), shape, dtype, rng)


def he_uniform(shape: KnownShape, dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    """Variance 2 / fan in, for relu. K. He et al., ICCV 2015, eq. 10.

    >>> bool(abs(he_uniform((24, 8), np.dtype("float32"), np.random.default_rng(0))).max() <= 0.5)
    True
    """
    return _uniform_of(2 / fans(shape)[0], shape, dtype, rng)


def he_normal(shape: KnownShape, dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    """Variance 2 / fan in, for relu. K. He et al., ICCV 2015, eq. 10.

    >>> he_normal((3, 2), np.dtype("float32"), np.random.default_rng(0)).shape
    (3, 2)
    """
    return _normal_of(2 / fans(shape)[0], shape, dtype, rng)


def lecun_uniform(shape: KnownShape, dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    """Variance 1 / fan in, for selu and linear units. Y. LeCun et al., "Efficient BackProp", 1998, eq. 16.

    >>> bool(abs(lecun_uniform((12, 8), np.dtype("float32"), np.random.default_rng(0))).max() <= 0.5)
    True
    """
    return _uniform_of(1 / fans(shape)[0], shape, dtype, rng)


def lecun_normal(shape: KnownShape, dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    """Variance 1 / fan in, for selu and linear units. Y. LeCun et al., "Efficient BackProp", 1998, eq. 16.

    >>> lecun_normal((3, 2), np.dtype("float32"), np.random.default_rng(0)).shape
    (3, 2)
    """
    return _normal_of(1 / fans(shape)[0], shape, dtype, rng)


def orthogonal(gain: float = 1.0) -> Initializer:
    """Orthonormal rows or columns times `gain`, whichever are fewer; axes after the first count as one.

    A. Saxe et al., "Exact solutions to the nonlinear dynamics of learning in deep linear networks", ICLR 2014.

    >>> w = orthogonal()((4, 3), np.dtype("float64"), np.random.default_rng(0))
    >>> bool(np.allclose(w.T @ w, np.eye(3)))
    True
    """

    def make(shape: KnownShape, dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
        fans(shape)  # vectors have no orthogonal form
        rows, columns = shape[0], math.prod(shape[1:])
        q, r = np.linalg.qr(rng.normal(size=(max(rows, columns), min(rows, columns))))
        q *= np.sign(np.diagonal(r))  # makes the result uniform over all orthogonal matrices
        return (gain * (q if rows >= columns else q.T)).reshape(shape).astype(dtype)

    return make


def _uniform_of(variance: float, shape: KnownShape, dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    bound = math.sqrt(3 * variance)
    return uniform(-bound, bound)(shape, dtype, rng)


def _normal_of(variance: float, shape: KnownShape, dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    return normal(math.sqrt(variance))(shape, dtype, rng)

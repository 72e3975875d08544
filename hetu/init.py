"""Initial values of variables: each initializer is a function `(shape, dtype, rng) -> array`.

`uniform`, `normal`, `truncated_normal`, `constant` and `orthogonal` take their parameters first and return such a
function; the others are such functions themselves. The variance of the Xavier, He and LeCun families follows from the
numbers of inputs and outputs of one unit, see `fans`. NumPy makes all values on the host, from a seeded generator;
devices get copies. All but `orthogonal` draw each element alone, by a `Law`: any rows of a large variable can be made
anywhere, on ranks and on parameter servers, and no process that keeps other rows has these in memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .answers import answer_calls
from .core.errors import ArgumentError, ShapeError, did_you_mean
from .core.leaf import Initializer
from .core.types import show_shape
from .growth import UNBOUNDED
from .ranges import AnyFloat, AtLeast0, Finite

__all__ = [
    "Law", "constant", "elementwise", "fans", "he_normal", "he_uniform", "law_of", "lecun_normal", "lecun_uniform",
    "normal", "ones", "orthogonal", "truncated_normal", "uniform", "xavier_normal", "xavier_uniform", "zeros",
]  # fmt: skip


KnownShape = tuple[int, ...]
Draw = Callable[..., np.ndarray]  # (shape, dtype, rng, *numbers) -> array

# Standard deviation of a standard normal cut off at two: dividing by it restores the variance that was asked for.
TRUNCATED_STD = 0.87962566103423978
AT_ONCE = 1 << 20  # elements: larger arrays are made in blocks
TURNS = 60  # has many divisors


@dataclass(frozen=True)
class Law:
    """How elements are drawn, each alone, so that any rows of an array can be made anywhere, of the same bits.

    `draw` makes an array of `AT_ONCE` elements or fewer from the generator that it is given. Of a larger one it makes
    blocks, each from a generator of its own: a window of rows is dealt to `TURNS` generators in turn, so that a server
    that keeps every second row (or third, fourth, fifth, sixth, ...) has no others made.
    """

    draw: Draw
    numbers: tuple[Any, ...] = ()  # what cannot be written as data is not

    def whole(self, shape: KnownShape, dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
        """The array."""
        if math.prod(shape) <= AT_ONCE or self.draw is _constant:  # which needs no generators
            return self.draw(shape, dtype, rng, *self.numbers)
        made = np.empty(shape, dtype)
        for places, values in self.blocks(shape, dtype, rng, range(shape[0])):
            made[places] = values
        return made

    def blocks(
        self, shape: KnownShape, dtype: np.dtype, rng: np.random.Generator, rows: range
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Some rows of it: their places in `rows`, increasing within a block, and their values."""
        count, *rest = shape
        if math.prod(shape) <= AT_ONCE:
            yield np.arange(len(rows)), self.draw(shape, dtype, rng, *self.numbers)[rows.start : rows.stop : rows.step]
            return
        each = max(1, AT_ONCE // TURNS // math.prod(rest))
        for first in range(0, len(rows), each) if self.draw is _constant else ():
            places = np.arange(first, min(first + each, len(rows)))
            yield places, self.draw((len(places), *rest), dtype, rng, *self.numbers)
        if self.draw is _constant:
            return
        key, most = rng.integers(1 << 63, size=2).tolist(), TURNS * each
        for window in range(0, count, most):
            for first in range(window, min(window + TURNS, count)):
                numbers = np.arange(first, min(window + most, count), TURNS)
                places, beside = np.divmod(numbers - rows.start, rows.step)
                mine = (beside == 0) & (places >= 0) & (places < len(rows))
                if mine.any():
                    own = np.random.default_rng([*key, first])
                    found = self.draw((len(numbers), *rest), dtype, own, *self.numbers)
                    yield (places, found) if mine.all() else (places[mine], found[mine])

    def at(self, p: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Elements by numbers that are evenly distributed inside (0, 1), of a law that has a name.

        >>> Law(_uniform, (0.0, 4.0)).at(np.array([[0.25, 0.5]]), np.dtype("float32")).tolist()
        [[1.0, 2.0]]
        """
        name = next(name for name, draw in LAWS.items() if draw is self.draw)
        return QUANTILES[name](p, *self.numbers).astype(dtype)

    def data(self) -> dict[str, Any] | None:
        """The law as plain data, if other processes know it too."""
        name = next((name for name, draw in LAWS.items() if draw is self.draw), None)
        numbers = [number.item() if isinstance(number, np.generic) else number for number in self.numbers]
        plain = all(type(number) in (int, float) and abs(number) < 1e300 for number in numbers)
        return {"law": name, "numbers": numbers} if name and plain else None

    @classmethod
    def parse(cls, law: Any, numbers: Any, dtype: np.dtype) -> Law:
        """A law from plain data; ArgumentError unless it can draw."""
        if not isinstance(law, str) or law not in LAWS:
            raise ArgumentError(f"no law {law!r:.80}", fix=did_you_mean(str(law)[:80], LAWS))
        if type(numbers) is not list or not all(type(n) in (int, float) and abs(n) < 1e300 for n in numbers):
            raise ArgumentError(f"a law of {numbers!r:.80}", fix="its numbers must be finite")
        made = cls(LAWS[law], tuple(numbers))
        try:
            with np.errstate(all="ignore"):
                made.draw((1,), dtype, np.random.default_rng(0), *numbers)
        except (ValueError, TypeError, OverflowError) as error:
            raise ArgumentError(f"{law} of {numbers!r:.80}: {error}", fix="pass numbers that it can draw by") from error
        return made


def law_of(init: Any, shape: KnownShape) -> Law | None:
    """The law by which an initializer makes a variable of this shape, if it has declared one. Rows without a bound have
    none that follows from their number.

    >>> law_of(he_normal, (50, 4)).data()
    {'law': 'normal', 'numbers': [0.0, 0.2]}
    """
    choose = getattr(init, "law", None)
    if choose is None or (shape[:1] == (UNBOUNDED,) and choose(shape) != choose((1, *shape[1:]))):
        return None
    return choose(shape)


def _by_law(choose: Callable[[KnownShape], Law]) -> Initializer:
    """An initializer that draws by the law that `choose` gives for a shape."""

    def initializer(shape: KnownShape, dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
        return choose(shape).whole(shape, dtype, rng)

    functools.update_wrapper(initializer, choose, functools.WRAPPER_ASSIGNMENTS[:4])
    vars(initializer).pop("__wrapped__")  # so that it shows its own parameters
    vars(initializer)["law"] = choose
    return initializer


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


@_by_law
def zeros(shape: KnownShape) -> Law:
    """All 0.

    >>> zeros((2,), np.dtype("float32"), np.random.default_rng(0)).tolist()
    [0.0, 0.0]
    """
    return Law(_constant, (0,))


@_by_law
def ones(shape: KnownShape) -> Law:
    """All 1.

    >>> ones((2,), np.dtype("float32"), np.random.default_rng(0)).tolist()
    [1.0, 1.0]
    """
    return Law(_constant, (1,))


def constant(value: AnyFloat) -> Initializer:
    """All `value`.

    >>> constant(0.5)((2,), np.dtype("float32"), np.random.default_rng(0)).tolist()
    [0.5, 0.5]
    """
    return _by_law(lambda shape: Law(_constant, (value,)))


def uniform(low: Finite = -0.05, high: Finite = 0.05) -> Initializer:
    """Evenly distributed in [low, high).

    >>> values = uniform(-1, 1)((100,), np.dtype("float32"), np.random.default_rng(0))
    >>> bool((abs(values) <= 1).all()), values.dtype.name
    (True, 'float32')
    """
    return _by_law(lambda shape: Law(_uniform, (low, high)))


def normal(std: AtLeast0 = 0.05, mean: Finite = 0.0) -> Initializer:
    """Normally distributed.

    >>> values = normal(0.1)((1000,), np.dtype("float64"), np.random.default_rng(0))
    >>> round(float(values.std()), 2)
    0.1
    """
    return _by_law(lambda shape: Law(_normal, (mean, std)))


def truncated_normal(std: AtLeast0 = 0.05, mean: Finite = 0.0) -> Initializer:
    """Normally distributed, values beyond two standard deviations of the parent drawn again; the result has `std`.

    >>> values = truncated_normal(0.1)((1000,), np.dtype("float64"), np.random.default_rng(0))
    >>> round(float(values.std()), 2), bool(abs(values).max() < 0.1 * 2 / TRUNCATED_STD)
    (0.1, True)
    """
    return _by_law(lambda shape: Law(_truncated_normal, (mean, std)))


@_by_law
def xavier_uniform(shape: KnownShape) -> Law:
    """Variance 2 / (fan in + fan out), for tanh and sigmoid. X. Glorot, Y. Bengio, AISTATS 2010, eq. 16.

    >>> bool(abs(xavier_uniform((30, 20), np.dtype("float32"), np.random.default_rng(0))).max() <= (6 / 50) ** 0.5)
    True
    """
    return _uniform_of(2 / sum(fans(shape)))


@_by_law
def xavier_normal(shape: KnownShape) -> Law:
    """Variance 2 / (fan in + fan out), for tanh and sigmoid. X. Glorot, Y. Bengio, AISTATS 2010, eq. 12.

    >>> xavier_normal((3, 2), np.dtype("float32"), np.random.default_rng(0)).shape
    (3, 2)
    """
    return _normal_of(2 / sum(fans(shape)))


@_by_law
def he_uniform(shape: KnownShape) -> Law:
    """Variance 2 / fan in, for relu. K. He et al., ICCV 2015, eq. 10.

    >>> bool(abs(he_uniform((24, 8), np.dtype("float32"), np.random.default_rng(0))).max() <= 0.5)
    True
    """
    return _uniform_of(2 / fans(shape)[0])


@_by_law
def he_normal(shape: KnownShape) -> Law:
    """Variance 2 / fan in, for relu. K. He et al., ICCV 2015, eq. 10.

    >>> he_normal((3, 2), np.dtype("float32"), np.random.default_rng(0)).shape
    (3, 2)
    """
    return _normal_of(2 / fans(shape)[0])


@_by_law
def lecun_uniform(shape: KnownShape) -> Law:
    """Variance 1 / fan in, for selu and linear units. Y. LeCun et al., "Efficient BackProp", 1998, eq. 16.

    >>> bool(abs(lecun_uniform((12, 8), np.dtype("float32"), np.random.default_rng(0))).max() <= 0.5)
    True
    """
    return _uniform_of(1 / fans(shape)[0])


@_by_law
def lecun_normal(shape: KnownShape) -> Law:
    """Variance 1 / fan in, for selu and linear units. Y. LeCun et al., "Efficient BackProp", 1998, eq. 16.

    >>> lecun_normal((3, 2), np.dtype("float32"), np.random.default_rng(0)).shape
    (3, 2)
    """
    return _normal_of(1 / fans(shape)[0])


def orthogonal(gain: Finite = 1.0) -> Initializer:
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


def elementwise(draw: Initializer) -> Initializer:
    """Declare that an initializer of your own draws each element alone, whatever rows it is asked for.

    A large variable is then made block by block, and if servers keep it, no worker has it in memory.

    >>> @elementwise
    ... def laplace(shape, dtype, rng):
    ...     return rng.laplace(0.0, 0.1, shape).astype(dtype)
    >>> laplace((5000, 300), np.dtype("float32"), np.random.default_rng(0)).shape
    (5000, 300)
    """
    return functools.wraps(draw)(_by_law(lambda shape: Law(draw)))


# -- laws ----------------------------------------------------------------------------------------------------------


def _constant(shape: KnownShape, dtype: np.dtype, rng: np.random.Generator, value: float) -> np.ndarray:
    return np.full(shape, value, dtype)


def _uniform(shape: KnownShape, dtype: np.dtype, rng: np.random.Generator, low: float, high: float) -> np.ndarray:
    return rng.uniform(low, high, shape).astype(dtype)


def _normal(shape: KnownShape, dtype: np.dtype, rng: np.random.Generator, mean: float, std: float) -> np.ndarray:
    return rng.normal(mean, std, shape).astype(dtype)


def _truncated_normal(
    shape: KnownShape, dtype: np.dtype, rng: np.random.Generator, mean: float, std: float
) -> np.ndarray:
    values = rng.normal(size=shape)
    while (beyond := np.abs(values) > 2).any():
        values[beyond] = rng.normal(size=int(beyond.sum()))
    return np.asarray(mean + values * (std / TRUNCATED_STD), dtype)


def _from_normal(p: np.ndarray) -> np.ndarray:
    """The quantiles of a standard normal, to 1e-6. M. Giles, "Approximating the erfinv Function", GPU Computing Gems,
    2011, table 5."""
    x = 2 * p - 1
    w = -np.log((1 - x) * (1 + x))
    near, far = np.polyval(_NEAR, w - 2.5), np.polyval(_FAR, np.sqrt(np.maximum(w, 5)) - 3)
    return math.sqrt(2) * x * np.where(w < 5, near, far)


_NEAR = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
_FAR = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
    1.00167406, 2.83297682,
)  # fmt: skip
BELOW = 0.5 * math.erfc(math.sqrt(2))  # how much of a standard normal is below -2


def _uniform_of(variance: float) -> Law:
    bound = math.sqrt(3 * variance)
    return Law(_uniform, (-bound, bound))


def _normal_of(variance: float) -> Law:
    return Law(_normal, (0.0, math.sqrt(variance)))


# Those that any process knows by name.
LAWS: dict[str, Draw] = {
    "constant": _constant, "uniform": _uniform, "normal": _normal, "truncated_normal": _truncated_normal
}  # fmt: skip
# The values below which a law draws with probabilities `p`, inside (0, 1).
QUANTILES: dict[str, Callable[..., np.ndarray]] = {
    "constant": lambda p, value: np.full(p.shape, value),
    "uniform": lambda p, low, high: low + (high - low) * p,
    "normal": lambda p, mean, std: mean + std * _from_normal(p),
    "truncated_normal": lambda p, mean, std: mean + std / TRUNCATED_STD * _from_normal(BELOW + (1 - 2 * BELOW) * p),
}

answer_calls(__name__)

"""Random numbers that are a function of (seed, node, step, position), so that any run can be replayed.

Every random operator reads the variable `random_state` = (seed, step). The executor seeds it and raises the step by one
after each run that contains it. J. K. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011 (Philox).
Numbers are drawn by NumPy on every device, so a CPU and a GPU see the same ones.
"""

from __future__ import annotations

import math
import zlib
from types import ModuleType
from typing import Any

import numpy as np

from ..core.errors import ArgumentError, DTypeError, public
from ..core.graph import Node
from ..core.leaf import random_state, scope_now, unique_name
from ..core.op import as_node, op
from ..core.operators import if_training
from ..core.types import Shape, Size, TensorType, as_dtype, axis_letters, broadcast_shapes, require_float
from .creation import require_held
from .index import require_indices
from .window import check_images

__all__ = ["bernoulli", "dropout", "dropout2d", "gumbel", "normal", "randint", "truncated_normal", "uniform"]

AxisWindows = (
    tuple[tuple[int, int, int], ...] | None
)  # (low, high, size) of every axis, where an array is part of a larger one
LEVELS = 1 << 16  # a dropout mask compares 16 random bits per element with the rate


def stream_of(name: str) -> int:
    """The number of a new random node: the same for the same place in a model that is built again."""
    return zlib.crc32((scope_now().path + unique_name(name)).encode())


class Stream:
    """The random numbers of one node. `at(state)` is the generator at the beginning of a step's numbers.

    >>> numbers, state = Stream(7), np.array([1, 0], np.uint64)
    >>> bool(numbers.at(state).random() == numbers.at(state).random())
    True
    """

    def __init__(self, number: int) -> None:
        self.bits = np.random.Philox(key=[0, number])
        self.generator = np.random.Generator(self.bits)
        self.start = self.bits.state
        self.key, self.counter = self.start["state"]["key"], self.start["state"]["counter"]

    def at(self, state: np.ndarray, block: int = 0) -> np.random.Generator:
        """The generator at the beginning of a step's numbers, or `block` times 256 bits behind it."""
        self.key[0], self.counter[3] = state
        self.counter[0] = block
        self.bits.state = self.start  # moving one generator takes 2 us, making one 14
        return self.generator


# -- distributions ---------------------------------------------------------------------------------------------
# Each is `(generator, shape, dtype, a, b) -> array`.


def _uniform(generator: np.random.Generator, shape: Shape, dtype: np.dtype, low: float, high: float) -> np.ndarray:
    draw = generator.random(shape, dtype=_drawn(dtype))
    return draw if (low, high) == (0, 1) else draw * draw.dtype.type(high - low) + draw.dtype.type(low)


def _normal(generator: np.random.Generator, shape: Shape, dtype: np.dtype, mean: float, std: float) -> np.ndarray:
    """Two of two: a radius and an angle, of which 16 bytes each make 32 bytes of numbers (G. Box, M. Muller, 1958)."""
    drawn, count = _drawn(dtype), math.prod(shape)
    words = generator.bit_generator.random_raw(-(-count * drawn.itemsize // 32) * 4)
    radii, angles = words.view(f"i{drawn.itemsize}").reshape(-1, 2, 16 // drawn.itemsize).swapaxes(0, 1)
    unit = drawn.type(0.5 ** (8 * drawn.itemsize))
    far = np.sqrt(-2 * np.log((radii.view(f"u{drawn.itemsize}") >> 1).astype(drawn) * (2 * unit) + unit))
    angle = angles.astype(drawn) * drawn.type(2 * math.pi * unit)
    draw = np.stack([far * np.cos(angle), far * np.sin(angle)], axis=1).reshape(-1)[:count].reshape(shape)
    made: np.ndarray = draw * drawn.type(std) + drawn.type(mean)
    return made


def _truncated(generator: np.random.Generator, shape: Shape, dtype: np.dtype, mean: float, std: float) -> np.ndarray:
    draw = generator.standard_normal(shape, dtype=_drawn(dtype))
    while (outside := np.abs(draw) > 2).any():
        draw[outside] = generator.standard_normal(np.count_nonzero(outside), dtype=draw.dtype)
    moved: np.ndarray = draw * draw.dtype.type(std) + draw.dtype.type(mean)
    return moved


def _bernoulli(generator: np.random.Generator, shape: Shape, dtype: np.dtype, p: float, _: float) -> np.ndarray:
    return generator.random(shape, dtype=np.float32) < np.float32(p)


def _randint(generator: np.random.Generator, shape: Shape, dtype: np.dtype, low: int, high: int) -> np.ndarray:
    return generator.integers(low, high, shape, dtype=dtype)


def _gumbel(generator: np.random.Generator, shape: Shape, dtype: np.dtype, mean: float, scale: float) -> np.ndarray:
    draw = generator.standard_exponential(shape, dtype=_drawn(dtype))
    logs: np.ndarray = np.log(np.maximum(draw, np.finfo(draw.dtype).tiny))
    moved: np.ndarray = draw.dtype.type(mean) - draw.dtype.type(scale) * logs
    return moved


def _drawn(dtype: np.dtype) -> np.dtype:
    """The floating dtype in which numbers are drawn: NumPy draws none of 16 bits."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


KINDS = {
    "uniform": _uniform,
    "normal": _normal,
    "truncated_normal": _truncated,
    "bernoulli": _bernoulli,
    "randint": _randint,
    "gumbel": _gumbel,
}


def _random_dims(state: TensorType, *, shape: Shape, **_: Any) -> str:
    """Made whole on every rank, because a part cannot be drawn alone."""
    return f"z!->{''.join(f'{c}!' for c in axis_letters(len(shape)))}"


@op(infer=lambda _, *, shape, dtype, **__: TensorType(shape, as_dtype(dtype)), dims=_random_dims, differentiable=False)
def random(xp: ModuleType, state: Any, *, kind: str, shape: Shape, dtype: str, a: float, b: float, stream: int) -> Any:
    """Numbers of one distribution: `kind` is a key of `KINDS`, `a` and `b` are its parameters.

    >>> random([1, 0], kind="randint", shape=(2,), dtype="int64", a=0, b=10, stream=3).shape
    (2,)
    """
    return xp.asarray(_values(Stream(stream), _on_host(state), kind, shape, np.dtype(dtype), a, b))


def _values(numbers: Stream, state: np.ndarray, kind: str, shape: Shape, dtype: np.dtype, a: Any, b: Any) -> np.ndarray:
    return KINDS[kind](numbers.at(state), shape, dtype, a, b).astype(dtype, copy=False)


def _on_host(state: Any) -> np.ndarray:
    return state.get() if hasattr(state, "get") else np.asarray(state, dtype=np.uint64)


def _make(kind: str, shape: Size | Shape, dtype: Any, a: float, b: float) -> Node:
    shape = tuple(shape) if isinstance(shape, list | tuple) else (shape,)
    wanted = {"bernoulli": "biuf", "randint": "iu"}.get(kind, "f")
    if as_dtype(dtype).kind not in wanted:
        raise DTypeError(f"{kind} cannot draw {as_dtype(dtype).name}", fix=f"use {_WANTED[wanted]}")
    return random(random_state, kind=kind, shape=shape, dtype=dtype, a=a, b=b, stream=stream_of(kind))


_WANTED = {"biuf": "any number", "iu": "an integer dtype such as int64", "f": "a floating dtype such as float32"}


@public
def uniform(shape: Size | Shape, low: float = 0.0, high: float = 1.0, dtype: Any = "float32") -> Node:
    """Numbers spread evenly over [low, high). New ones at every run; sizes may be those of another node.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (None, 3))
    >>> uniform(x.shape).shape == x.shape
    True
    """
    _check(low < high, f"uniform: low={low!r} and high={high!r}", "pass low below high")
    return _make("uniform", shape, dtype, low, high)


@public
def normal(shape: Size | Shape, mean: float = 0.0, std: float = 1.0, dtype: Any = "float32") -> Node:
    """Normally distributed numbers.

    >>> normal((2, 3)).shape
    (2, 3)
    """
    _check(std >= 0, f"normal: std={std!r}", "pass a standard deviation of at least 0")
    return _make("normal", shape, dtype, mean, std)


@public
def truncated_normal(shape: Size | Shape, mean: float = 0.0, std: float = 1.0, dtype: Any = "float32") -> Node:
    """Normally distributed numbers, drawn again while further than two `std` from `mean`.

    >>> truncated_normal((2, 3), std=0.02).shape
    (2, 3)
    """
    _check(std >= 0, f"truncated_normal: std={std!r}", "pass a standard deviation of at least 0")
    return _make("truncated_normal", shape, dtype, mean, std)


@public
def bernoulli(p: float, shape: Size | Shape, dtype: Any = "bool") -> Node:
    """True (or 1) with probability `p`.

    >>> bernoulli(0.5, (2, 3)).dtype.name
    'bool'
    """
    _check(0 <= p <= 1, f"bernoulli: p={p!r}", "pass a probability, 0 to 1")
    return _make("bernoulli", shape, dtype, p, 0.0)


@public
def randint(low: int, high: int, shape: Size | Shape, dtype: Any = "int64") -> Node:
    """Integers spread evenly over low, ..., high - 1.

    >>> randint(0, 10, (4,)).dtype.name
    'int64'
    """
    _check(low < high, f"randint: low={low!r} and high={high!r}", "pass low below high")
    require_held(as_dtype(dtype), low, high - 1)
    return _make("randint", shape, dtype, low, high)


@public
def gumbel(shape: Size | Shape, mean: float = 0.0, scale: float = 1.0, dtype: Any = "float32") -> Node:
    """Gumbel distributed numbers, -log(-log u): argmax(logits + gumbel) draws a class.

    >>> gumbel((2, 3)).shape
    (2, 3)
    """
    _check(scale > 0, f"gumbel: scale={scale!r}", "pass a scale above 0")
    return _make("gumbel", shape, dtype, mean, scale)


def _check(ok: bool, message: str, fix: str) -> None:
    if not ok:
        raise ArgumentError(message, fix=fix)


# -- dropout ---------------------------------------------------------------------------------------------------


def _dropout_type(x: TensorType, state: TensorType, *, rate: float, **_: Any) -> TensorType:
    require_float(x)
    _check(isinstance(rate, int | float) and 0 <= rate < 1, f"rate is {rate!r}, wanted a share", "pass 0 <= rate < 1")
    return x


def _dropout_dims(x: TensorType, state: TensorType, *, channels: bool, **_: Any) -> str:
    axes = "".join(f"{chr(ord('a') + i)}@" for i in range(x.ndim))
    return f"{axes},z!->{axes}"


@op(precision="follow", name="dropout", infer=_dropout_type, dims=_dropout_dims, linear=(0,), inplace={0: (0,)})
def _dropout(
    xp: ModuleType, x: Any, state: Any, *, rate: float, stream: int, channels: bool = False, window: AxisWindows = None
) -> Any:
    """`x` with a share `rate` of its elements, or of its channels, set to 0 and the rest scaled up; see `dropout`.

    >>> import hetu as ht
    >>> ht.evaluate(_dropout([1.0, 2.0], [7, 0], rate=0.0, stream=1)).tolist()
    [1.0, 2.0]
    """
    kept = xp.asarray(_kept(Stream(stream), _on_host(state), x.shape, rate, channels, window))
    return xp.where(kept, x * _scale(rate), xp.zeros_like(x))


def _threshold(rate: float) -> int:
    return min(round(rate * LEVELS), LEVELS - 1)


def _scale(rate: float) -> float:
    """1 / the share that is kept, exactly as the 16 bits make it, so that the mean stays."""
    return LEVELS / (LEVELS - _threshold(rate))


def _kept(
    numbers: Stream, state: np.ndarray, shape: tuple[int, ...], rate: float, channels: bool, window: AxisWindows
) -> np.ndarray:
    """The mask: each element is kept if its 16 random bits reach the rate. Its value depends on its position only."""
    spans = [(0, size, size) for size in shape] if window is None else [*window]
    spans[2:] = [(0, 1, 1) for _ in spans[2:]] if channels else spans[2:]
    # A part draws the rows that it crosses: blocks of 16 numbers, from the block that holds its first.
    (low, high, _), inner = spans[0] if spans else (0, 1, 1), spans[1:]
    width = math.prod(size for _, _, size in inner)
    skipped, count = low * width % 16, (high - low) * width
    numbers.at(state, low * width // 16)
    bits = numbers.bits.random_raw(-(-(skipped + count) // 4)).view(np.uint16)[skipped : skipped + count]
    rows = (bits >= _threshold(rate)).reshape(-1 if width else 0, *(size for _, _, size in inner))
    part = rows[(slice(None), *(slice(low, high) for low, high, _ in inner))]
    return part.reshape([high - low for low, high, _ in spans])


_dropout.grad(lambda g, y, x, state, **attrs: (_dropout(g, state, **attrs), None))


@public
def dropout(x: Any, rate: float) -> Node:
    """In training each element becomes 0 with probability `rate`, the others x / (1 - rate); `x` in evaluation.

    N. Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", 2014. The mask of a step
    is the same wherever it is computed, in the gradient and in recomputation too. The rate is rounded to 1 / 65536.

    >>> import hetu as ht
    >>> dropout(ht.placeholder("x", (None, 8)), 0.1).op.name
    'if_training'
    """
    return if_training(_dropout(x, random_state, rate=rate, stream=stream_of("dropout")), x)


@public
def dropout2d(x: Any, rate: float) -> Node:
    """As `dropout`, but whole channels of images (n, c, h, w) become 0.

    J. Tompson et al., "Efficient Object Localization Using Convolutional Networks", 2015.

    >>> import hetu as ht
    >>> dropout2d(ht.placeholder("x", (None, 8, 4, 4)), 0.1).op.name
    'if_training'
    """
    x = as_node(x)
    check_images(x.tensor)
    masked = _dropout(x, random_state, rate=rate, stream=stream_of("dropout2d"), channels=True)
    return if_training(masked, x)


GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the step of SplitMix64: neighbors in its sequence are this far apart


def mixed_words(x: np.ndarray) -> np.ndarray:
    """uint64 in which every bit follows from all bits of their own, in place: the last step of SplitMix64.

    G. Steele et al., "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.

    >>> hex(mixed_words(np.array([GOLDEN]))[0])
    '0xe220a8397b1dcdaf'
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x


def words_of(x: np.ndarray, salt: Any) -> np.ndarray:
    """uint64 of which each bit follows from all bits of a whole number, and of its salt."""
    return mixed_words(x.astype("u8") * GOLDEN + salt)


def _hash_type(ids: TensorType, salts: TensorType) -> TensorType:
    require_indices(ids)
    require_indices(salts)
    return TensorType(broadcast_shapes(ids.shape, salts.shape), np.dtype("int64"))


@op(infer=_hash_type, dims="...,...->...", differentiable=False)
def id_hashes(xp: ModuleType, ids: Any, salts: Any) -> Any:
    """Whole numbers from 0 to below 2 ** 63, of which each bit follows from all bits of an id; others for other salts.

    >>> import hetu as ht
    >>> ht.evaluate(id_hashes([0, 1], [7, 7])).tolist()
    [673033133788753802, 3595544800446187243]
    """
    return (words_of(ids, salts.astype("u8")) >> np.uint64(1)).astype("i8")

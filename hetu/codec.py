"""How numbers travel in fewer bytes than they have: each row by itself, in as many bytes as follow from its length.

| name | bytes of n numbers | what is lost |
|---|---|---|
| float16 | 2 n | all but 11 bits |
| int8 | n + 4 | what is below the largest / 254 |
| topk:0.01 | 8 for each that is sent | all but this share of the numbers, the largest |
| 1bit | n / 8 + 8 | all but the sign: a number is the mean of those of its sign |

What a push loses is added to the next one of the same parameter (error feedback), as the last two need: F. Seide et
al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; A. Aji, K. Heafield, "Sparse Communication for Distributed
Gradient Descent", EMNLP 2017. NaN and infinities stay what they are, or make NaN of their row; finite numbers stay
finite, as those beyond the largest that fits become that one.
`ps/store/packing.py` has rows that also lie on servers in fewer bytes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .answers import answer_calls
from .core.errors import ArgumentError, UnknownNameError, ValueRangeError, did_you_mean

__all__ = ["Compress"]

LARGEST_HALF, LARGEST_SINGLE = 65504.0, float(np.finfo(np.float32).max)
LARGEST_SCALE = np.float32((LARGEST_SINGLE / 127) // 2.0**104 * 2.0**104)  # of 17 bits, whose 127 is finite
NAMES = ("float16", "int8", "topk:0.01", "1bit")
EXACT_ENOUGH = ("float16", "int8")  # without error feedback


class Codec(ABC):
    """Rows of floats as rows of bytes, and back.

    >>> half = codec("float16")
    >>> coded = half.encode(np.array([[1.0, 70_000.0]], "float32"))
    >>> coded.nbytes, half.decode(coded, 2).tolist()
    (4, [[1.0, 65504.0]])
    """

    beside: int = 12  # bytes for each number while it is coded

    @abstractmethod
    def width(self, cols: int) -> int:
        """Bytes of a row of so many numbers."""

    @abstractmethod
    def encode(self, rows: np.ndarray) -> np.ndarray:
        """(rows, cols) as uint8 (rows, width)."""

    @abstractmethod
    def decode(self, coded: np.ndarray, cols: int) -> np.ndarray:
        """The float32 (rows, cols) that these bytes stand for."""

    def check(self, coded: np.ndarray, cols: int) -> None:  # noqa: B027 - most bytes mean something
        """ValueRangeError for bytes that stand for nothing."""


class Rounding(Codec):
    """A codec of single numbers, which are rounded to the nearest, or up or down by `chance` (rows, cols)."""

    @abstractmethod
    def encode(self, rows: np.ndarray, chance: np.ndarray | None = None) -> np.ndarray: ...


def _within(rows: np.ndarray, most: float) -> np.ndarray:
    """Rows whose finite numbers are at most so large; infinities stay."""
    return np.where(np.isinf(rows), rows, np.clip(rows, -most, most))


def _singles(rows: np.ndarray) -> np.ndarray:
    """Rows as float32."""
    return (_within(rows, LARGEST_SINGLE) if rows.dtype.itemsize > 4 else rows).astype("<f4", copy=False)


def _whole(x: np.ndarray, chance: np.ndarray | None) -> np.ndarray:
    """Whole numbers: the nearest, or those above where what is left is above chance."""
    whole: np.ndarray = np.rint(x) if chance is None else np.floor(x)
    if chance is not None:
        whole += x - whole > chance
    return whole


class Half(Rounding):
    beside = 9

    def width(self, cols: int) -> int:
        return 2 * cols

    def encode(self, rows: np.ndarray, chance: np.ndarray | None = None) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            rows = _within(rows, LARGEST_HALF)
            if chance is not None:
                rows = rows.astype("<f4", copy=False)
                power = np.maximum(rows.view("<u4") & 0x7F800000, 113 << 23)  # of two, not above each number
                step = (power - (10 << 23)).view("<f4")  # from one float16 to the next there
                rows = _whole(rows / step, chance) * step
            return np.ascontiguousarray(rows, "<f2").view(np.uint8)

    def decode(self, coded: np.ndarray, cols: int) -> np.ndarray:
        return np.ascontiguousarray(coded).view("<f2").astype(np.float32)


class Byte(Rounding):
    """A scale has 17 bits, so that its multiples are floats, and of a decoded row the bytes are the same again."""

    beside = 14

    def width(self, cols: int) -> int:
        return 4 + cols

    def encode(self, rows: np.ndarray, chance: np.ndarray | None = None) -> np.ndarray:
        rows = _singles(rows)
        least = np.abs(rows).max(axis=1, keepdims=True, initial=0) / np.float32(127)
        rounded = ((least.view("<u4") + 127) & ~np.uint32(127)).view("<f4")
        scale = np.where(np.isfinite(least), np.minimum(rounded, LARGEST_SCALE), least)
        with np.errstate(invalid="ignore", divide="ignore"):
            whole = np.nan_to_num(_whole(rows / scale, chance), nan=0, posinf=0, neginf=0)
        return np.concatenate([scale.view(np.uint8), np.clip(whole, -127, 127).astype(np.int8).view(np.uint8)], axis=1)

    def decode(self, coded: np.ndarray, cols: int) -> np.ndarray:
        scale = np.ascontiguousarray(coded[:, :4]).view("<f4")
        with np.errstate(invalid="ignore", over="ignore"):
            found: np.ndarray = coded[:, 4:].view(np.int8) * scale
        return found


class TopK(Codec):
    def __init__(self, share: float) -> None:
        self.share = share

    def count(self, cols: int) -> int:
        return min(cols, math.ceil(self.share * cols))

    def width(self, cols: int) -> int:
        return 8 * self.count(cols)

    def encode(self, rows: np.ndarray) -> np.ndarray:
        rows, count, cols = _singles(rows), self.count(rows.shape[1]), rows.shape[1]
        largest = np.argpartition(np.abs(rows), cols - count, axis=1)[:, cols - count :]  # NaN above all
        places = np.sort(largest, axis=1)
        values = np.take_along_axis(rows, places, axis=1)
        return np.concatenate([places.astype("<u4").view(np.uint8), values.view(np.uint8)], axis=1)

    def decode(self, coded: np.ndarray, cols: int) -> np.ndarray:
        found = np.zeros((len(coded), cols), np.float32)
        values = np.ascontiguousarray(coded[:, 4 * self.count(cols) :]).view("<f4")
        np.put_along_axis(found, self._places(coded, cols), values, axis=1)
        return found

    def check(self, coded: np.ndarray, cols: int) -> None:
        if coded.size and (most := int(self._places(coded, cols).max())) >= cols:
            raise ValueRangeError(f"number {most} of a row of {cols}")

    def _places(self, coded: np.ndarray, cols: int) -> np.ndarray:
        return np.ascontiguousarray(coded[:, : 4 * self.count(cols)]).view("<u4").astype(np.int64)


class Sign(Codec):
    beside = 9

    def width(self, cols: int) -> int:
        return 8 + -(-cols // 8)

    def encode(self, rows: np.ndarray) -> np.ndarray:
        negative, means = (rows := _singles(rows)) < 0, []
        for some in (~negative, negative):
            sums = np.where(some, rows, 0).sum(axis=1, keepdims=True, dtype=np.float64)
            means.append(sums / np.maximum(1, some.sum(axis=1, keepdims=True)))
        both = np.concatenate(means, axis=1).astype("<f4")
        return np.concatenate([both.view(np.uint8), np.packbits(negative, axis=1)], axis=1)

    def decode(self, coded: np.ndarray, cols: int) -> np.ndarray:
        means = np.ascontiguousarray(coded[:, :8]).view("<f4")
        negative = np.unpackbits(coded[:, 8:], axis=1, count=cols).astype(bool)
        return np.where(negative, means[:, 1:], means[:, :1])


@lru_cache(256)
def codec(name: str) -> Codec | None:
    """The codec of a name, none for ""; UnknownNameError or ArgumentError for any other.

    >>> codec("topk:0.5").width(6), codec("") is None
    (24, True)
    """
    kind, _, share = name.partition(":")
    made: dict[str, Codec] = {"float16": Half(), "int8": Byte(), "1bit": Sign()}
    if name in made or not name:
        return made.get(name)
    if kind != "topk":
        raise UnknownNameError(f"no way {name!r:.40} for numbers to travel", fix=did_you_mean(name, NAMES))
    try:
        number = float(share)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise ArgumentError(f"{name!r:.40}", fix="send a share of the numbers above 0, at most 1: topk:0.01")
    return TopK(number)


def rounding(name: str, what: str = "at_rest") -> Rounding | None:
    """The same of codecs that need no error feedback; ArgumentError for any other as `what`."""
    found = codec(name)
    if found is None or isinstance(found, Rounding):
        return found
    fix = f"use {' or '.join(EXACT_ENOUGH)}: only what gradients lose can be sent later"
    raise ArgumentError(f"{what}={name!r}", fix=fix)


class Feedback:
    """A code whose losses are added to what it is given next.

    >>> feedback, gradient = Feedback(TopK(0.3)), np.array([[1.0, 3.0, 2.0]], "f4")
    >>> [feedback.code.decode(feedback.encode(gradient), 3).tolist() for _ in range(2)]
    [[[0.0, 3.0, 0.0]], [[0.0, 0.0, 4.0]]]
    """

    def __init__(self, code: Codec) -> None:
        self.code = code
        self.forget()

    def forget(self) -> None:
        """Nothing has been lost yet."""
        self.lost = np.zeros((1, 1), np.float32)

    def encode(self, rows: np.ndarray) -> np.ndarray:
        """What travels of these rows, which have one shape each time."""
        rows = rows + self.lost
        coded = self.code.encode(rows)
        with np.errstate(invalid="ignore"):
            lost = rows - self.code.decode(coded, rows.shape[1])
        self.lost = np.where(np.isfinite(lost), lost, 0)  # a NaN would be in all that follow
        return coded


@dataclass(frozen=True)
class Compress:
    """How variables on servers travel, and lie: `ParameterServer(compress=Compress(...))`, and for `Hybrid`.

    `rows` are those of tables, both ways: "float16" or "int8". `gradients` and `values` are those of all other
    variables: gradients go as "float16", "int8", "topk:0.01" (this share of them, the largest) or "1bit", and what is
    lost is added to the next; new values come as "float16" or "int8". `at_rest` is how rows of tables lie on servers,
    "float16" or "int8": they are rounded by chance, the same on any number of servers, and the state of the optimizer
    stays as it is, as do rows that would not become smaller. What is "" travels, or lies, as it is. Training is then no
    longer that of one process; `examples/benchmarks/compression.py` shows what it costs.

    >>> Compress(rows="int8").of(sparse=True)["pull"], Compress(gradients="1bit").of(sparse=False)["push"]
    ('int8', '1bit')
    """

    rows: str = ""
    gradients: str = ""
    values: str = ""
    at_rest: str = ""

    def __post_init__(self) -> None:
        codec(self.gradients)
        for what in ("rows", "values", "at_rest"):
            rounding(getattr(self, what), what)

    def part(self, *, sparse: bool) -> Compress | None:
        """What it says of tables, or of other variables, if anything."""
        said = Compress(rows=self.rows, at_rest=self.at_rest) if sparse else Compress("", self.gradients, self.values)
        return None if said == Compress() else said

    def of(self, *, sparse: bool) -> dict[str, str]:
        """The fields of a `Parameter` that say so, of a table or of another variable."""
        if sparse:
            return {"push": self.rows, "pull": self.rows, "at_rest": self.at_rest}
        return {"push": self.gradients, "pull": self.values}


answer_calls(__name__)

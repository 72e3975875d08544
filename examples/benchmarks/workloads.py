"""What the CPU benchmark runs: one row per workload, and its data and initial weights from fixed seeds, in numpy alone.

A row names a model of `networks.py`, a batch, what is done (an optimizer, or inference) and the sizes. Every peer
builds the same model from the same arrays, so that first losses, or outputs in inference, agree to 5 digits. Matrices
are stored as (in, out), convolutions as (out, in, height, width). The data is random: speed is measured, not accuracy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
F32 = np.float32
BATCHES = 4
SMALL = {"rows": 520, "nodes": 60, "edges": 200, "depth": 1, "length": 8, "vocabulary": 50, "words": 5}
SMALL["widths"] = (16, 24)


@dataclass(frozen=True)
class Family:
    """A model, what makes the data of a batch from a generator, its size and the sizes of the row, and the loss."""

    model: Callable[..., Any]
    data: Callable[[np.random.Generator, int, Any], Arrays]
    loss: str = "cross_entropy"
    rate: float = 1e-3  # of SGD: small, so that rounding errors grow little in the first steps
    fixed: Callable[[np.random.Generator, Any], Arrays] | None = None  # data that is the same in all steps


@dataclass(frozen=True)
class Workload:
    """One row. Steps go round the batches, which are dicts of inputs; `batch` is one size, or one for each of them.

    `does` is "SGD" or "Adam", or "inference".
    """

    family: str
    name: str
    title: str
    kind: Family
    batch: int | tuple[int, ...]
    does: str
    sizes: dict[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        batch = "" if self.kind.fixed else f", batch {self.batch if isinstance(self.batch, int) else 'of any size'}"
        return f"{self.title}{batch}, {self.does}"

    @property
    def s(self) -> SimpleNamespace:
        return SimpleNamespace(**self.sizes)

    @property
    def trains(self) -> bool:
        return self.does != "inference"

    @property
    def rate(self) -> float:
        return self.kind.rate if self.does == "SGD" else 1e-4

    def sized(self, batch: int | tuple[int, ...] | None = None, **sizes: Any) -> Workload:
        """The same with other sizes."""
        return replace(self, batch=batch or self.batch, sizes=self.sizes | sizes)

    def shrunk(self) -> Workload:
        """So small that it takes no time, with every part of the model that has a name of its own."""
        small = {name: min(size, SMALL[name]) for name, size in self.sizes.items() if name in SMALL}
        return self.sized(2 if isinstance(self.batch, int) else (1, 2, 3), **small)

    def weights(self) -> Arrays:
        """The initial weights by name."""
        initial = Initial()
        self.kind.model(initial, self.s, **dict.fromkeys(self.inputs() - {"t"} | self.fixed().keys(), NOTHING))
        return initial.weights

    def fixed(self) -> Arrays:
        return self.kind.fixed(np.random.default_rng(6), self.s) if self.kind.fixed else {}

    def batches(self) -> list[Arrays]:
        """The inputs of one step after the other; "t" is the target, which inference has not."""
        rng = np.random.default_rng(1)
        sizes = [self.batch] * (1 if self.kind.fixed else BATCHES) if isinstance(self.batch, int) else self.batch
        made = [self.kind.data(rng, size, self.s) for size in sizes]
        return made if self.trains else [{k: v for k, v in batch.items() if k != "t"} for batch in made]

    def inputs(self) -> set[str]:
        return set(self.kind.data(np.random.default_rng(1), 1, self.s))


class Nothing:
    """What the words of `Initial` return: it takes part in any arithmetic, and stays nothing."""

    def __call__(self, *arguments: Any, **options: Any) -> Nothing:
        return self

    def __getattr__(self, name: str) -> Nothing:
        return self

    __add__ = __mul__ = __sub__ = __call__


NOTHING = Nothing()


class Initial:
    """A vocabulary that computes nothing, and notes the initial weights behind every name."""

    def __init__(self) -> None:
        self.rng, self.weights = np.random.default_rng(0), {}

    def linear(self, x: Any, name: str, inputs: int, outputs: int, bias: bool = True) -> Nothing:
        """He initialization, zero bias."""
        return self._made(name, (inputs, outputs), (2 / inputs) ** 0.5, outputs if bias else 0)

    def conv(self, x: Any, name: str, inputs: int, outputs: int, size: int, *, groups: int = 1, bias: bool = True,
             **options: Any) -> Nothing:  # fmt: skip
        fan_in = inputs // groups * size * size
        shape = (outputs, inputs // groups, size, size)
        return self._made(name, shape, (2 / fan_in) ** 0.5, outputs if bias else 0)

    def conv_transpose(self, x: Any, name: str, inputs: int, outputs: int, size: int, *options: Any) -> Nothing:
        return self._made(name, (inputs, outputs, size, size), (2 / inputs) ** 0.5 / size, outputs)

    def layer_norm(self, x: Any, name: str, size: int, *options: Any) -> Nothing:
        self.weights |= {f"{name}.weight": np.ones(size, F32), f"{name}.bias": np.zeros(size, F32)}
        return NOTHING

    batch_norm = group_norm = layer_norm

    def weight(self, name: str, *shape: int) -> Nothing:
        self.weights[name] = self._normal(shape, 0.02)
        return NOTHING

    def embedding(self, ids: Any, name: str, rows: int, size: int) -> Nothing:
        return self.weight(name, rows, size)

    bag = embedding

    def lstm(self, x: Any, name: str, inputs: int, hidden: int, both: bool, gates: int = 4) -> tuple[Nothing, Nothing]:
        """One pair of biases for each direction; LSTM uses the first alone, as its two are added."""
        for way in ("forward", "backward") if both else ("forward",):
            parts = (f"{name}.{way}.{part}" for part in ("inputs", "recurrent", "bias", "recurrent_bias"))
            shapes = ((inputs, gates * hidden), (hidden, gates * hidden), (gates * hidden,), (gates * hidden,))
            self.weights |= {part: self._normal(shape, hidden**-0.5) for part, shape in zip(parts, shapes)}
            if gates == 4:
                del self.weights[f"{name}.{way}.recurrent_bias"]
        return NOTHING, NOTHING

    def gru(self, x: Any, name: str, inputs: int, hidden: int, both: bool) -> tuple[Nothing, Nothing]:
        return self.lstm(x, name, inputs, hidden, both, gates=3)

    def __getattr__(self, word: str) -> Nothing:
        return NOTHING

    def _made(self, name: str, shape: tuple[int, ...], scale: float, biases: int) -> Nothing:
        self.weights[f"{name}.weight"] = self._normal(shape, scale)
        if biases:
            self.weights[f"{name}.bias"] = np.zeros(biases, F32)
        return NOTHING

    def _normal(self, shape: tuple[int, ...], scale: float) -> np.ndarray:
        return self.rng.standard_normal(shape, F32) * F32(scale)


def vectors(rng: np.random.Generator, batch: int, s: Any) -> Arrays:
    return {"x": rng.standard_normal((batch, s.sizes[0]), F32), "t": rng.integers(0, s.sizes[-1], batch)}


def images(rng: np.random.Generator, batch: int, s: Any) -> Arrays:
    return {"x": rng.standard_normal((batch, s.channels, s.side, s.side), F32), "t": rng.integers(0, 10, batch)}


def pixels(rng: np.random.Generator, batch: int, s: Any) -> Arrays:
    """Images, and a number for each pixel."""
    made = images(rng, batch, s)
    return made | {"t": rng.integers(0, 2, (batch, s.side**2)).astype(F32)}


def noise(rng: np.random.Generator, batch: int, s: Any) -> Arrays:
    side = 4 * 2 ** (len(s.widths) - 1)
    x = rng.standard_normal((batch, s.sizes[0]), F32)
    return {"x": x, "t": rng.standard_normal((batch, s.widths[-1] * side * side), F32)}


def next_tokens(rng: np.random.Generator, batch: int, s: Any) -> Arrays:
    text = rng.integers(0, s.vocabulary, (batch, s.length + 1))
    return {"x": text[:, :-1].copy(), "t": text[:, 1:].copy()}


def texts(rng: np.random.Generator, batch: int, s: Any) -> Arrays:
    return {"x": rng.integers(0, s.vocabulary, (batch, s.length)), "t": rng.integers(0, s.classes, batch)}


def padded_texts(rng: np.random.Generator, batch: int, s: Any) -> Arrays:
    """Texts of different lengths, padded to the longest."""
    lengths = rng.integers(s.length // 2, s.length + 1, batch)
    return texts(rng, batch, s) | {"mask": np.arange(s.length) < lengths[:, None]}


def sequences(rng: np.random.Generator, batch: int, s: Any) -> Arrays:
    """Features or tokens at each step, and a class for each sequence or for each step."""
    x = rng.integers(0, s.vocabulary, (batch, s.length)) if s.vocabulary else None
    x = rng.standard_normal((batch, s.length, s.inputs), F32) if x is None else x
    return {"x": x, "t": rng.integers(0, s.classes, (batch, s.length) if s.every else batch)}


def clicks(rng: np.random.Generator, batch: int, s: Any) -> Arrays:
    """All fields share one table, each field its own range of it.

    Ids follow a Pareto distribution, as in click logs, so that a few rows are in every batch.
    """
    per_field = s.rows // s.fields
    skewed = np.minimum(10 * rng.pareto(1.0, (batch, s.fields)), per_field - 1).astype(np.int64)
    made = {"ids": skewed + per_field * np.arange(s.fields), "t": rng.integers(0, 2, (batch, 1)).astype(F32)}
    return made | ({"x": rng.standard_normal((batch, s.numbers), F32)} if s.numbers else {})


def words(rng: np.random.Generator, batch: int, s: Any) -> Arrays:
    return {"ids": rng.integers(0, s.rows, (batch, s.words)), "t": rng.integers(0, s.classes, batch)}


def nodes(rng: np.random.Generator, batch: int, s: Any) -> Arrays:
    return {"x": rng.standard_normal((s.nodes, s.sizes[0]), F32), "t": rng.integers(0, s.sizes[-1], s.nodes)}


def graph(rng: np.random.Generator, s: Any) -> Arrays:
    """The matrix of a graph whose edges prefer some nodes, normalized symmetrically, with a loop at each node."""
    ends = (s.nodes * rng.random(s.edges) ** 2).astype(np.int64), rng.integers(0, s.nodes, s.edges)
    both = (ends[0] * s.nodes + ends[1], ends[1] * s.nodes + ends[0], np.arange(s.nodes) * (s.nodes + 1))
    rows, columns = np.divmod(np.unique(np.concatenate(both)), s.nodes)
    degree = np.bincount(rows).astype(F32)
    return {"rows": rows, "columns": columns, "values": (degree[rows] * degree[columns]) ** F32(-0.5)}

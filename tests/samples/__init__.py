"""The table of operator cases. A new operator is a new row here and inherits every check of `test_ops.py`.

A row names an operator, builds it on nodes, and computes the same thing independently in plain NumPy.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Sample:
    """One operator case.

    `build(*nodes)` returns a node or a tuple of nodes; `reference(*arrays)` the same values in plain NumPy, not through
    hetu. `inputs` are makers `rng -> array` in float64 (see `real`, `positive`, `ints`, `bools`). `order` is how
    many orders of gradient are checked (0 for operators without one). `strict` says why the forward functions
    cannot run under array_api_strict, when they cannot. `fixed` forbids the variant in which sizes are unknown.
    """

    op: str
    build: Callable[..., Any]
    inputs: tuple[Callable[[np.random.Generator], np.ndarray], ...]
    reference: Callable[..., Any]
    label: str = ""
    order: int = 2
    strict: str = ""
    fixed: bool = False
    tolerance: float = 1e-5
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.op}-{self.label}" if self.label else self.op

    def arrays(self) -> list[np.ndarray]:
        """The same arrays on every call."""
        rng = np.random.default_rng(zlib.crc32(self.id.encode()))
        return [make(rng) for make in self.inputs]

    @cached_property
    def wanted(self) -> tuple[np.ndarray, ...]:
        """What the reference makes of these arrays; loops over unit vectors take seconds."""
        made = self.reference(*self.arrays())
        return tuple(map(np.asarray, made if isinstance(made, tuple | list) else (made,)))


def real(*shape: int, low: float = -2.0, high: float = 2.0) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: rng.uniform(low, high, shape)


def positive(*shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    return real(*shape, low=0.3, high=2.0)


def distinct(*shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    """Values at least 0.1 apart and 0.05 away from 0, so that no kink or tie lies within a difference step."""
    return lambda rng: (rng.permutation(int(np.prod(shape))).reshape(shape) - np.prod(shape) // 2 + 0.5) * 0.1


def ints(*shape: int, high: int = 5, low: int = 0) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: rng.integers(low, high, shape)


def bools(*shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: rng.random(shape) < 0.5


def given(array: Any) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: np.asarray(array)


def _modules() -> list[str]:
    """The files of rows; those of a room of kernels where the package has it."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    return [n for n in names if not n.endswith("_kernels") or importlib.util.find_spec(f"hetu.{n}")]


SAMPLES: list[Sample] = [
    sample for name in _modules() for sample in importlib.import_module(f"{__name__}.{name}").SAMPLES
]


def lines_of(nodes: Iterable[Any]) -> list[str]:
    """The names of the operators of some nodes; those of a group are its lines."""
    forms = [(node, node.attrs.get("form")) for node in nodes]
    return [name for node, form in forms for name in ([l.op.name for l in form.lines] if form else [node.op.name])]

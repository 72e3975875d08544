"""Update rules of optimizers: a composition of operators as calls in place, block by block.

Anybody's rule is a composition, so its operators are known by being of a rule (`Op.update`); on rows of a table see
`touched.py`. Blocks keep scratch in the cache however large the parameter. Gain: 2.5 times the speed of Adam's forward
function. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from threading import Lock
from typing import Any

import numpy as np

from ..core.backend import Scratch
from ..core.graph import Node
from ..core.kernels import Call
from ..ops.composition import WIDE, Composition
from . import blas
from .recipes import kernel
from .tape import Apply, Factor, Mix, tape_of

BLOCK = 1 << 18  # elements of a block


@kernel("update")
def on_arrays(rule: Any, xp: Any, out: Any, *arrays: Any, scratch: Scratch, **attrs: Any) -> list[Call] | None:
    """Binds the operator of a rule on whole parameters."""
    tables, gradient, scalars = rule.split(arrays)
    outs = out if isinstance(out, tuple) else (out,)
    return in_place(rule.composition(arrays[0].shape, attrs), outs, (*tables, gradient), scalars, scratch)


def in_place(
    composition: Composition,
    outs: Sequence[np.ndarray],
    arrays: Sequence[np.ndarray],
    scalars: Sequence[np.ndarray],
    scratch: Scratch | None = None,
) -> list[Call] | None:
    """Calls that compute the results into `outs`, each of which may lie on its own array; None where there is no tape.

    The last of the arrays is only read. Scalars are read anew on every call.
    """
    tape = tape_of(composition)
    if tape is None:
        return None
    numbers = _Numbers(composition, scalars, outs[0].dtype)
    calls: list[Call] = []
    for registers in _blocks((*outs, arrays[-1]), tape.scratch, scratch or Scratch()):
        for step in tape.steps:
            if isinstance(step, Apply):
                calls += _apply(step, registers, numbers)
            else:
                calls += _mix(step, registers, numbers)
        calls += [partial(np.copyto, registers[k], registers[register]) for k, register in tape.copies]
    return [*copied(outs, arrays), *numbers.calls, *calls]


def copied(outs: Sequence[np.ndarray], arrays: Sequence[np.ndarray]) -> list[Call]:
    """The copies that fill those outputs which do not lie on their arrays already."""
    return [partial(np.copyto, o, x) for o, x in zip(outs, arrays) if o.ctypes.data != x.ctypes.data]


def _blocks(arrays: Sequence[np.ndarray], truths: Sequence[bool], scratch: Scratch) -> list[tuple[np.ndarray, ...]]:
    """Arrays of one shape cut along their first axis into about `BLOCK` elements, and scratch that blocks share."""
    arrays = np.atleast_1d(*arrays)  # views: BLAS takes no scalars
    first = arrays[0]
    length = len(first) if first.size <= BLOCK else max(1, BLOCK * len(first) // first.size)
    spare = [scratch.empty((length, *first.shape[1:]), np.dtype(bool) if t else first.dtype) for t in truths]
    starts = range(0, len(first), max(1, length))
    return [(*(a[i : i + length] for a in arrays), *(s[: len(first) - i] for s in spare)) for i in starts]


def _apply(step: Apply, registers: Sequence[np.ndarray], numbers: _Numbers) -> list[Call]:
    pairs = zip(step.node.inputs, step.places)
    operands = [numbers.factor((1, i)) if place is None else registers[place] for i, place in pairs]
    return step.node.op.bound(np, registers[step.out], operands, step.node.attrs)


def _mix(step: Mix, registers: Sequence[np.ndarray], numbers: _Numbers) -> list[Call]:
    out, other, spare = registers[step.out], registers[step.other], registers[step.spare]
    keeps, factor, scale = step.scale == (1, None), numbers.factor(step.factor), numbers.factor(step.scale)
    call = blas.axpy(other, out, factor) if keeps else blas.axpby(other, out, factor, scale)
    if call is not None:
        return [call]
    before = [] if keeps else [partial(np.multiply, out, scale, out)]
    return [*before, partial(np.multiply, other, factor, spare), partial(np.add, out, spare, out)]


class _Prologue:
    """What a composition computes from its scalars alone, remembered for the last ones: parameters share them."""

    def __init__(self, composition: Composition) -> None:
        self.lock, self.calls = Lock(), []
        self.scalars = [np.empty((), WIDE) for _ in composition.inputs[composition.arrays :]]
        self.places = dict(zip(composition.inputs[composition.arrays :], self.scalars))
        self.constants: dict[Node, float] = {}
        self.last: tuple[Sequence[float], dict[Node, float]] = (), {}
        for node in composition.nodes:
            if node in composition.full:
                continue
            place = self.places[node] = np.empty((), node.dtype)
            calls = node.op.bound(np, place, [self.places[i] for i in node.inputs], node.attrs)
            if not self.constants.keys() >= {*node.inputs}:
                self.calls += calls
                continue
            for call in calls:
                call()
            self.constants[node] = place.item()

    def __call__(self, scalars: Sequence[float]) -> dict[Node, float]:
        key, found = self.last
        if key != scalars:
            with self.lock:  # ranks may be threads
                for place, value in zip(self.scalars, scalars):
                    place[()] = value
                for call in self.calls:
                    call()
                found = {node: place.item() for node, place in self.places.items()}
            self.last = scalars, found
        return found


_prologue_of = lru_cache(1024)(_Prologue)


class _Numbers:
    """The scalars of a composition in 0-d arrays, which hold their values once `calls` have run."""

    def __init__(self, composition: Composition, scalars: Sequence[np.ndarray], dtype: np.dtype) -> None:
        self.dtype, self.scalars, self.prologue = dtype, scalars, _prologue_of(composition)
        self.known = self._values() if all(map(is_fixed, scalars)) else self.prologue.constants
        self.made: dict[Factor, np.ndarray] = {}
        self.changing: list[tuple[np.ndarray, int, Node]] = []

    def factor(self, factor: Factor) -> np.ndarray:
        """A scalar with its sign, in the dtype of the arrays; or a truth value."""
        sign, node = factor
        if factor not in self.made:
            truth = node is not None and node.dtype == np.bool_
            made = self.made[factor] = np.array(sign, bool if truth else self.dtype)
            if node in self.known:
                made[()] = sign * self.known[node]
            elif node is not None:
                self.changing.append((made, sign, node))
        return self.made[factor]

    @property
    def calls(self) -> list[Call]:
        return [self._fill] if self.changing else []

    def _values(self) -> dict[Node, float]:
        return self.prologue([value.item() for value in self.scalars])

    def _fill(self) -> None:
        values = self._values()
        for array, sign, node in self.changing:
            array[()] = sign * values[node]


def is_fixed(value: np.ndarray) -> bool:
    """Whether an array never changes: a read-only view may yet change with what it is a view of."""
    return value.base is None and not value.flags.writeable

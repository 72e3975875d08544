"""A tape: a composition of operators as steps that compute in place, in as few passes over memory as may be.

It says once which array every operator writes: a table that it may overwrite, or scratch. One pattern is worth a step
of its own: `a x + b y` in the place of x or y is one call of BLAS and one pass over memory. `update.py` binds tapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..core.graph import OPS, Node
from ..ops.composition import WIDE, Composition

Factor = tuple[int, Node | None]  # a sign and a scalar, None for 1


class Apply(NamedTuple):
    """One operator; `places` are registers, None for a scalar."""

    node: Node
    out: int
    places: tuple[int | None, ...]


class Mix(NamedTuple):
    """out = scale out + factor other; without BLAS by way of the register `spare`, which may be `other`."""

    out: int
    scale: Factor
    other: int
    factor: Factor
    spare: int


class Tape(NamedTuple):
    """What to do with registers: the arrays of a composition first, the last of them to be read only, then scratch."""

    steps: tuple[Apply | Mix, ...]
    scratch: tuple[bool, ...]  # whether each holds truth values
    copies: tuple[tuple[int, int], ...]  # (array, register) of results that do not lie where they belong


@lru_cache(1024)
def tape_of(composition: Composition) -> Tape | None:
    """The tape of a composition that acts on elements; None for one that computes in other dtypes."""
    if composition.whole or any(n.dtype not in (WIDE, np.bool_) for n in composition.full):
        return None
    return _Writer(composition).tape()


class _Writer:
    """Writes a tape: `place` says in which register a value lies, `left` how often it will still be read."""

    def __init__(self, composition: Composition) -> None:
        self.c = composition
        self.steps: list[Apply | Mix] = []
        self.scratch: list[bool] = []
        self.left = composition.readers()
        self.place = {node: k for k, node in enumerate(composition.inputs[: composition.arrays])}
        self.home = {node: k for k, node in enumerate(composition.outputs)}
        self.free: list[int] = []
        sums = (OPS["add"], OPS["subtract"])
        inside = {i for n in composition.nodes if n.op in sums for i in n.inputs}
        self.products = {n: found for n in inside if self.left[n] == 1 and (found := composition.scaled(n))}

    def tape(self) -> Tape:
        for node in self.c.nodes:
            if node in self.c.full and node not in self.products:
                (self._mix if not self.products.keys().isdisjoint(node.inputs) else self._apply)(node)
        copies = [(k, self.place[n]) for k, n in enumerate(self.c.outputs) if self.place[n] != k]
        return Tape(tuple(self.steps), tuple(self.scratch), tuple(copies))

    def _dying(self, values: Sequence[Node]) -> list[Node]:
        """Those of the arrays read now that nobody reads later and whose register may be written."""
        last = self.c.arrays - 1  # which is only read
        return [v for v in values if self.place.get(v, last) != last and self.left[v] == values.count(v)]

    def _read(self, values: Sequence[Node], out: int) -> None:
        """Count these values as read; scratch that nobody needs any more is free, but for `out`."""
        for value in values:
            self.left[value] -= 1
            place = self.place.get(value, 0)
            if not self.left[value] and place >= self.c.arrays and place != out:
                self.free.append(place)

    def _register(self, node: Node, reusable: Sequence[Node]) -> int:
        """Where a result goes: home if that is free or free in this step, onto what dies here, or to scratch."""
        home = self.home.get(node)
        if home is not None:
            holder = next((v for v, place in self.place.items() if place == home and self.left[v]), None)
            return home if holder is None or holder in reusable else self._new(node)
        places = [self.place[v] for v in reusable if v.dtype == node.dtype]
        return max(places) if places else self._new(node)

    def _new(self, node: Node) -> int:
        truth = node.dtype == np.bool_
        found = next((r for r in self.free if self.scratch[r - self.c.arrays] == truth), None)
        if found is not None:
            self.free.remove(found)
            return found
        self.scratch.append(truth)
        return self.c.arrays + len(self.scratch) - 1

    def _apply(self, node: Node) -> None:
        allowed = {node.inputs[k] for k in node.op.inplace.get(0, ())}
        dying = [v for v in self._dying(node.inputs) if v in allowed]
        out = self._register(node, dying)
        self.steps.append(Apply(node, out, tuple(self.place.get(i) for i in node.inputs)))
        self._read([i for i in node.inputs if i in self.c.full], out)
        self.place[node] = out

    def _mix(self, node: Node) -> None:
        """A sum or difference with products by scalars in it."""
        signs = (1, -1 if node.op is OPS["subtract"] else 1)
        terms = [(*self.products.get(i, (None, i)), sign) for i, sign in zip(node.inputs, signs)]
        if any(value not in self.c.full or value.dtype != WIDE for _, value, _ in terms):
            self._materialize(next(i for i in node.inputs if i in self.products))
            return self._apply(node)
        values, home = [value for _, value, _ in terms], self.home.get(node)
        onto = [v for v in self._dying(values) if home in (None, self.place[v]) and values.count(v) == 1]
        if not onto:  # make one product first, and add to it
            self._materialize(next(i for i in node.inputs if i in self.products))
            apart = self.products.keys().isdisjoint(node.inputs)
            return self._apply(node) if apart else self._mix(node)
        target = max(onto, key=self.place.__getitem__)
        (scale, _, sign), (factor, other, other_sign) = sorted(terms, key=lambda t: t[1] is not target)
        out, free = self.place[target], other in self._dying(values)
        spare = self.place[other] if free and self.place[other] >= self.c.arrays else self._new(node)
        self.steps.append(Mix(out, (sign, scale), self.place[other], (other_sign, factor), spare))
        self._read(values, out)
        if spare not in self.free:
            self.free.append(spare)
        self.place[node] = out

    def _materialize(self, product: Node) -> None:
        del self.products[product]
        self._apply(product)

"""Update rules on a CPU: a composition of operators as calls in place, block by block, and the rows of a table.

A tape says once which array every operator writes: a table that it may overwrite, or scratch. One pattern is worth a
call of its own: `a x + b y` in the place of x or y is one call of BLAS and one pass over memory. Blocks keep scratch
in the cache however large the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from ..core.backend import Scratch
from ..core.graph import OPS, Node
from ..core.kernels import Call, kernels
from .composition import WIDE, Composition
from .index import RowWindow, add_rows, own_rows

BLOCK = 1 << 18  # elements of a block

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


# -- bound to arrays -------------------------------------------------------------------------------------------


def bind(rule: Any, xp: Any, out: Any, *arrays: Any, scratch: Scratch, **attrs: Any) -> list[Call] | None:
    """The `bind` of an update operator on whole parameters."""
    if xp is not np:
        return None
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
            calls += _apply(step, registers, numbers) if isinstance(step, Apply) else _mix(step, registers, numbers)
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
    blas = kernels("cpu").blas
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


# -- single steps, for what adds where it computes -------------------------------------------------------------


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
    call = kernels("cpu").blas.axpy(x, p, minus)
    if call is not None:
        return [call]
    return [partial(np.multiply, x, minus, scratch), partial(np.add, p, scratch, p)]


# -- the rows of a table ---------------------------------------------------------------------------------------


def rows_bind(rule: Any, xp: Any, out: Any, *arrays: Any, window: RowWindow = None, **attrs: Any) -> Any:
    """The `bind` of an update operator on rows."""
    if xp is not np or not arrays[0].size:
        return None
    tables, (ids, rows, *scalars) = arrays[: rule.tables], arrays[rule.tables :]
    composition, outs = rule.composition(arrays[0].shape, attrs), out if isinstance(out, tuple) else (out,)
    copies = copied(outs, tables)
    if window is None and composition.descent is not None:
        return [*copies, *_subtract_rows(composition, out, ids, rows, scalars)]
    if window is None and tape_of(composition) is not None:
        return [*copies, *_change_rows(composition, outs, ids, rows, scalars)]

    def update() -> None:
        touched, sums = _SumRows(outs[0], *own_rows(ids, rows, window))()
        for o, n in zip(outs, composition.run(np, [*(o[touched] for o in outs), sums, *scalars])):
            o[touched] = n

    return [*copies, update]


def _change_rows(
    composition: Composition,
    outs: Sequence[np.ndarray],
    ids: np.ndarray,
    rows: np.ndarray,
    scalars: Sequence[np.ndarray],
) -> list[Call]:
    """A rule in place on copies of the touched rows, as many as there are ids: the first row stands in for the rest."""
    if not ids.size:
        return []
    gather, places = _SumRows(outs[0], ids, rows), np.empty(ids.size, np.intp)
    copies = [np.empty((ids.size, *o.shape[1:]), o.dtype) for o in outs]
    calls = in_place(composition, copies, (*copies, gather.sums), scalars)

    def update() -> None:
        touched, _ = gather()
        count = len(touched)
        places[:count], places[count:], gather.sums[count:] = touched, touched[0], gather.sums[0]
        for table, copy in zip(outs, copies):
            np.take(table, places, axis=0, out=copy, mode="clip")
        for call in calls:
            call()
        for table, copy in zip(outs, copies):
            table[touched] = copy[:count]

    return [update]


def _subtract_rows(
    composition: Composition, out: np.ndarray, ids: np.ndarray, rows: np.ndarray, scalars: Sequence[np.ndarray]
) -> list[Call]:
    """Plain gradient descent on rows: no sums of duplicates, each is subtracted where it belongs."""
    numbers = _Numbers(composition, scalars, out.dtype)
    minus, steps = numbers.factor((-1, composition.descent)), np.empty(rows.shape, out.dtype)
    return [*numbers.calls, partial(np.multiply, rows, minus, steps), *add_rows(np, out, ids, steps)]


class _SumRows:
    """The distinct ids and the sum of the gradient rows of each, without sorting.

    A table of places (one integer per row of the parameter) takes the position of every id; the last one to write wins
    and stands for all equal ones.
    """

    def __init__(self, table: np.ndarray, ids: np.ndarray, rows: np.ndarray) -> None:
        self.ids, self.order = ids, np.arange(ids.size)
        self.place, self.slots = np.empty(len(table), np.intp), np.empty(ids.shape, np.intp)
        self.sums = np.empty((ids.size, *table.shape[1:]), table.dtype)
        self.add = [partial(self.sums.fill, 0), *add_rows(np, self.sums, self.slots, rows)]

    def __call__(self) -> tuple[np.ndarray, np.ndarray]:
        ids = self.ids.reshape(-1)
        self.place[ids] = self.order
        touched = ids[self.place[ids] == self.order]
        self.place[touched] = self.order[: len(touched)]
        np.take(self.place, self.ids, out=self.slots, mode="clip")
        for call in self.add:
            call()
        return touched, self.sums[: len(touched)]

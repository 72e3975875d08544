"""Variables that servers keep as one parameter: a request takes as long as tens of KB of values do.

A bundle holds variables of one dtype that the same sub-graphs update by one rule at one rate, so that a step pushes all
of it or nothing. Rules work on each element alone, so training is the same. Small dense variables become one flat
parameter; tables whose rows have one shape become one table, whose rows are those of the first, then of the second, ...

What servers keep goes with the last state of all workers. A worker frees what belonged to a state that nobody has any
more as it makes its next executor, in whatever order other workers do: a name is never given twice, so that no worker's
garbage decides what another calls its parameters. Checkpoints hold variables as on one process, and of tables without a
bound the rows that they have.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint import Checkpoint, ids_name, whole, write_part
from ..core.errors import CheckpointError
from ..core.graph import Node
from ..core.state import State
from ..core.types import Box
from ..ops.shape import reshape
from ..ps.saved import export_rows, restore, restore_rows, state_of
from ..ps.store.messages import INLINE
from ..ps.store.partition import CHUNK
from ..ps.wire.client import Client
from .servable import known_shape

AT_ONCE = 1 << 20  # elements of a table that are loaded at once


@dataclass(frozen=True)
class Bundle:
    """Variables that servers keep together, or one that they keep as it is.

    >>> import hetu as ht
    >>> both = Bundle((ht.variable("w", np.zeros((2, 2))), ht.variable("b", np.ones(2))))
    >>> both.name, both.joined([np.zeros((2, 2)), np.ones(2)]).tolist()
    ('w and 1 more', [0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    """

    variables: tuple[Node, ...]
    sparse: bool = False  # tables, joined along their rows

    @property
    def name(self) -> str:
        first, more = self.variables[0].name, len(self.variables) - 1
        return f"{first} and {more} more" if more else first

    @property
    def shape(self) -> tuple[int, ...]:
        (place, shape), *more = self.places[::-1]
        return (place.stop, *(shape[1:] if self.sparse else ())) if more else shape

    @property
    def places(self) -> list[tuple[slice, tuple[int, ...]]]:
        """Where each variable lies along the first axis of the bundle, of a table its rows, and its shape."""
        shapes = [known_shape(v) for v in self.variables]
        lengths = [shape[0] if self.sparse else math.prod(shape) for shape in shapes]
        return [(slice(*ends), shape) for ends, shape in zip(pairwise(accumulate(lengths, initial=0)), shapes)]

    @property
    def joined_rows(self) -> tuple[tuple[str, int], ...]:
        """The name of each of several tables, and its rows."""
        several = self.sparse and len(self.variables) > 1
        return tuple((v.name[:100], known_shape(v)[0]) for v in self.variables) if several else ()

    def joined(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Arrays of the variables as one of the bundle."""
        return arrays[0] if len(arrays) == 1 else np.concatenate([a if self.sparse else np.ravel(a) for a in arrays])

    def parts(self, whole: np.ndarray) -> list[np.ndarray]:
        """The inverse; there may be axes before those of the bundle."""
        if len(self.variables) == 1:
            return [whole]
        before = whole.shape[: whole.ndim - len(self.shape)]
        each = (slice(None),) * len(before)
        return [whole[(*each, place)].reshape((*before, *shape)) for place, shape in self.places]

    @property
    def pieces(self) -> list[tuple[slice | None, Bundle]]:
        """What is saved at once: each of the tables, which may be large, and its rows; or all."""
        if not self.sparse:
            return [(None, self)]
        return [(place, Bundle((v,), sparse=True)) for v, (place, _) in zip(self.variables, self.places)]

    @property
    def slices(self) -> Iterator[tuple[slice | None, tuple[Bundle, Box]]]:
        """What is loaded at once: some rows of a table, where they lie in the bundle and in the table; or all."""
        for place, piece in self.pieces:
            if place is None:
                yield None, (piece, ())
                continue
            most = max(1, AT_ONCE // max(1, math.prod(piece.shape[1:])))
            for first in range(place.start, place.stop, most):
                last = min(first + most, place.stop)
                yield slice(first, last), (piece, ((first - place.start, last - place.start),))

    def part_nodes(self, whole: Node) -> list[Node]:
        """The same in a graph."""
        if len(self.variables) == 1:
            return [whole]
        return [reshape(whole[place], shape) for place, shape in self.places]


def bundled(variables: Iterable[Node], kind: Callable[[Node], Hashable], tables: Collection[Node] = ()) -> list[Bundle]:
    """Bundles of the `tables` of each kind, and of its small variables, of at most one chunk; others are alone."""
    bundles, last = list[list[Node]](), dict[Hashable, tuple[list[Node], int]]()
    for v in variables:
        size = 0 if v in tables else int(v.tensor.nbytes)
        if size > INLINE:
            bundles.append([v])
            continue
        key = kind(v)
        mine, filled = last.get(key, ([], 0))
        if not mine or filled + size > CHUNK:
            bundles.append(mine := [])
            filled = 0
        mine.append(v)
        last[key] = mine, filled + size
    return [Bundle(tuple(some), some[0] in tables) for some in bundles]


USED: weakref.WeakKeyDictionary[Client, set[str]] = weakref.WeakKeyDictionary()
GONE: weakref.WeakKeyDictionary[Client, deque[str]] = weakref.WeakKeyDictionary()  # not freed yet


def new_name(name: str, client: Client) -> str:
    """The name of a new parameter: another executor may have one that is called alike."""
    used = USED.setdefault(client, set())
    numbered = (f"{name} ({number})" for number in itertools.count(2))
    found = next(free for free in itertools.chain([name], numbered) if free not in used | client.parameters.keys())
    used.add(found)
    return found


def free_after(state: State, names: Iterable[str], client: Client) -> None:
    """Have these parameters freed when nobody has the state any more; from a thread that collects garbage nothing is
    sent."""
    weakref.finalize(state, GONE.setdefault(client, deque()).extend, [*names]).atexit = False


def free_gone(client: Client) -> None:
    """Free what belonged to states that are gone."""
    gone = GONE.setdefault(client, deque())
    names = [gone.popleft() for _ in range(len(gone))]
    for name in names:
        client.asked.pop(name, None)
    client.free(names).wait()


@dataclass(frozen=True)
class KeptBundle:
    """Variables that servers keep together under a name, each with the variables of its rule's state."""

    client: Client
    name: str
    bundle: Bundle
    each: Mapping[Node, list[Node]]

    @property
    def grows(self) -> bool:
        """Whether it is a table without a bound."""
        return self.client.parameters[self.name].grows is not None

    def write(self, folder: Path, number: int, sizes: list[int], table: dict[str, Any]) -> None:
        """Add a part for each piece, or for some rows of a table without a bound: only one is in memory at a time."""
        if self.grows:
            [(variable, nodes)], first = self.each.items(), len(sizes)
            for ids, rows in export_rows(self.client, self.name):
                tensors = {ids_name(variable.name): ids, **{n.name: array for n, array in zip(nodes, rows)}}
                sizes.append(write_part(folder, number, len(sizes), tensors))
            where = {"pieces": [], "parts": [*range(first, len(sizes))], "ids": variable.name}
            table |= {n.name: {"shape": n.shape, "dtype": n.dtype.name, **where} for n in nodes}
            return
        for some, piece in self.bundle.pieces:
            parts = piece.parts(state_of(self.client, self.name, some))
            tensors = {n.name: np.asarray(a) for v, of in zip(piece.variables, parts) for n, a in zip(self.each[v], of)}
            for n in (n for v in piece.variables for n in self.each[v]):
                pieces = [(len(sizes), whole(known_shape(n)))]
                table[n.name] = {"shape": n.shape, "dtype": n.dtype.name, "pieces": pieces}
            sizes.append(write_part(folder, number, len(sizes), tensors))

    def check(self, taken: Collection[str]) -> None:
        """CheckpointError if that is the state of rows without the rows: a table without a bound is loaded by rows."""
        for variable, held in self.each.items() if self.grows else ():
            if variable.name not in taken and (states := [n.name for n in held if n.name in taken]):
                raise CheckpointError(
                    f"{states[0]}, of which the rows are those of {variable.name}, and not all of these are loaded",
                    fix=f"load {variable.name} as well; without the states, these begin at 0",
                )

    def read(self, checkpoint: Checkpoint, taken: Collection[str], step: int) -> None:
        """Have the servers go on from what is `taken` of a checkpoint, at this step of the rule.

        What is not taken of the state of a table without a bound begins at 0; of others it stays.
        """
        held = [n.name for nodes in self.each.values() for n in nodes]
        there = [name for name in held if name in taken]

        def rows() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for ids, arrays in checkpoint.rows(there):
                found = dict(zip(there, arrays))
                yield ids, np.stack([found.get(name, np.zeros_like(arrays[0])) for name in held])

        if there and self.grows:
            checkpoint.check_rows(there)  # before the rows there are go
            restore_rows(self.client, self.name, rows, step)
        elif there:
            parts = []
            for some, where in self.bundle.slices:
                kept = None if there == held else state_of(self.client, self.name, some)
                parts.append((some, partial(self._read, checkpoint, taken, kept, *where)))
            restore(self.client, self.name, parts, step)

    def _read(
        self, checkpoint: Checkpoint, taken: Collection[str], kept: np.ndarray | None, piece: Bundle, some: Box
    ) -> np.ndarray:
        """The values of a bundle, or of `some` rows of its table, then each of the states: `taken`, or as `kept`."""
        joined = []
        for k, nodes in enumerate(zip(*[self.each[v] for v in piece.variables])):
            parts = [None] * len(nodes) if kept is None else piece.parts(kept[k])
            boxes = [(n.name, (*some, *whole(known_shape(n)[len(some) :]))) for n in nodes]
            read = [checkpoint.read(*box) if box[0] in taken else part for box, part in zip(boxes, parts)]
            joined.append(piece.joined([np.asarray(part) for part in read]))
        return np.stack(joined)

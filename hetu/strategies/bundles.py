"""Variables that servers keep as one parameter: a request takes as long as tens of KB of values do.

A bundle holds variables of one dtype that the same sub-graphs update by one rule at one rate, so that a step pushes all
of it or nothing. Rules work on each element alone, so training is the same. Small dense variables become one flat
parameter; tables whose rows have one shape become one table, whose rows are those of the first, then of the second, ...

What servers keep goes with the last state of all workers. A worker frees what belonged to a state that nobody has any
more as it makes its next executor, in whatever order other workers do: a name is never given twice, so that no worker's
garbage decides what another calls its parameters.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from ..core.graph import Node
from ..core.state import State
from ..core.types import Box
from ..ops.shape import reshape
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

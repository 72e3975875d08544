"""Small variables that servers keep as one flat parameter: a request takes as long as tens of KB of values do.

A bundle holds dense variables of one dtype that the same sub-graphs update by one rule at one rate, so that a step
pushes and pulls all of it or nothing. Rules work on each element alone, so training is the same. Left out: tables, and
variables of ranks that also talk to each other, of which only few are on servers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from ..core.graph import Node
from ..ops.shape import reshape
from ..ps.store.messages import INLINE
from ..ps.store.partition import CHUNK
from .servable import known_shape


@dataclass(frozen=True)
class Bundle:
    """Variables that servers keep together, or one that they keep as it is.

    >>> import hetu as ht
    >>> both = Bundle((ht.variable("w", np.zeros((2, 2))), ht.variable("b", np.ones(2))))
    >>> both.name, both.joined([np.zeros((2, 2)), np.ones(2)]).tolist()
    ('w and 1 more', [0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    """

    variables: tuple[Node, ...]

    @property
    def name(self) -> str:
        first, more = self.variables[0].name, len(self.variables) - 1
        return f"{first} and {more} more" if more else first

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [known_shape(v) for v in self.variables]
        return shapes[0] if len(shapes) == 1 else (sum(map(math.prod, shapes)),)

    @property
    def places(self) -> list[tuple[slice, tuple[int, ...]]]:
        """Where each variable lies in the bundle, and its shape."""
        shapes = [known_shape(v) for v in self.variables]
        return [
            (slice(*ends), shape)
            for ends, shape in zip(pairwise(accumulate(map(math.prod, shapes), initial=0)), shapes)
        ]

    def joined(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Arrays of the variables as one of the bundle."""
        return arrays[0] if len(arrays) == 1 else np.concatenate([np.ravel(a) for a in arrays])

    def parts(self, whole: np.ndarray) -> list[np.ndarray]:
        """The inverse; the bundle's axis is the last one."""
        if len(self.variables) == 1:
            return [whole]
        return [whole[..., place].reshape((*whole.shape[:-1], *shape)) for place, shape in self.places]

    def part_nodes(self, whole: Node) -> list[Node]:
        """The same in a graph."""
        if len(self.variables) == 1:
            return [whole]
        return [reshape(whole[place], shape) for place, shape in self.places]


def bundled(variables: Iterable[Node], kind: Callable[[Node], Hashable]) -> list[Bundle]:
    """Bundles of the small variables of each kind, of at most one chunk, in their order; others are alone."""
    bundles, last = list[list[Node]](), dict[Hashable, tuple[list[Node], int]]()
    for v in variables:
        size = int(v.tensor.nbytes)
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
    return [Bundle(tuple(some)) for some in bundles]

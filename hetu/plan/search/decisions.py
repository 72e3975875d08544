"""The decision tree of parallel strategies: which ways there are to spread a layer over the ranks of a stage.

After Galvatron (X. Miao et al., VLDB 2023, section 3): first the pipeline degree is chosen, which cuts the ranks at the
slowest links; then the ranks of a stage are factored, in order, into data, sharded data and tensor parallelism. Data
and sharded data parallelism are never mixed: sharding over all of them moves no more and keeps less. `fit.py` decides
value by value which activations are computed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ...core.errors import ArgumentError

DATA, SHARDED, TENSOR = "data", "sharded", "tensor"
SHORT = {DATA: "dp", SHARDED: "sdp", TENSOR: "tp"}


@dataclass(frozen=True)
class Way:
    """How one layer is spread: (kind, degree) from the outermost, slowest axis of the ranks to the innermost.

    >>> print(Way((("data", 2), ("tensor", 4))))
    dp2 x tp4
    """

    axes: tuple[tuple[str, int], ...]

    def degree(self, *kinds: str) -> int:
        """How many parts these kinds make together."""
        return math.prod(n for kind, n in self.axes if kind in kinds)

    def __str__(self) -> str:
        return " x ".join(f"{SHORT[kind]}{n}" for kind, n in self.axes) or "alone"


def ways(ranks: int) -> list[Way]:
    """Every way to spread a layer over the ranks of one stage.

    >>> [str(way) for way in ways(2)], len(ways(8))
    (['dp2', 'sdp2', 'tp2'], 11)
    """
    if ranks < 1:
        raise ArgumentError(f"{ranks} ranks", fix="give at least one")
    return [Way(axes) for axes in _factored(ranks, (DATA, SHARDED, TENSOR))]


def tree(ranks: int) -> dict[int, list[Way]]:
    """Pipeline degree -> the ways of a layer on the ranks of a stage.

    >>> {stages: len(found) for stages, found in tree(8).items()}  # the 22 of the paper
    {1: 11, 2: 7, 4: 3, 8: 1}
    """
    return {stages: ways(ranks // stages) for stages in divisors(ranks)}


def divisors(number: int) -> list[int]:
    """
    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [d for d in range(1, number + 1) if number % d == 0]


def _factored(ranks: int, kinds: tuple[str, ...]) -> Iterator[tuple[tuple[str, int], ...]]:
    """Ordered factorizations of `ranks` in which each kind stands once at most, and not both kinds of data."""
    if ranks == 1:
        yield ()
        return
    for degree in reversed(divisors(ranks)[1:]):
        for kind in kinds:
            left = tuple(k for k in kinds if k != kind and {k, kind} != {DATA, SHARDED})
            if degree == ranks or left:
                for rest in _factored(ranks // degree, left):
                    yield ((kind, degree), *rest)

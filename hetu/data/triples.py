"""Batches of the true triples of a knowledge graph, in groups that share false heads and false tails.

A true triple is learned beside false ones, in which another entity stands for its head or its tail. A group of triples
shares these entities, so that a batch needs few rows of a large table (D. Zheng et al., "DGL-KE", SIGIR 2020, section
3.3). They are drawn here and not in the graph, so that what coming batches look up is known. Left out: to look whether
a triple that is taken for false is true.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..answers import AnswersCalls
from ..core.errors import DataError
from .loader import DataLoader


class TripleLoader(AnswersCalls):
    """The batches (head, relation, tail) of `loader` as int64 (groups, `group`) each, then false heads and false tails.

    Both are int64 (groups, `others`), drawn among `entities` with probabilities as `weights` (entities,), by default
    all alike. They follow from the seed and the position of the loader, so all ranks draw the same, and a resumed run
    sees what an unbroken one does.

    Raises DataError for batches that do not divide into groups, and for weights of which none can be drawn.

    >>> from hetu.data import ArrayDataset, DataLoader
    >>> triples = ArrayDataset([0, 1, 2, 3], [0, 0, 1, 1], [1, 2, 3, 0])
    >>> loader = TripleLoader(DataLoader(triples, batch_size=4), entities=4, group=2, others=3)
    >>> [part.shape for part in next(iter(loader))]
    [(2, 2), (2, 2), (2, 2), (2, 3), (2, 3)]
    """

    def __init__(
        self,
        loader: DataLoader,
        entities: int,
        *,
        group: int = 16,
        others: int = 16,
        weights: ArrayLike | None = None,
    ) -> None:
        last = 0 if loader.drop_last else len(loader.dataset) % loader.batch_size
        if group < 1 or others < 1 or loader.batch_size % group or last % group:
            sizes = f"{loader.batch_size}" if not last else f"{loader.batch_size}, the last of {last},"
            raise DataError(
                f"batches of {sizes} triples in groups of {group} with {others} others",
                fix="pass a group that divides batch_size, drop_last=True, and one other at least",
            )
        odds = np.ones(entities) if weights is None else np.asarray(weights, np.float64)
        if odds.shape != (entities,) or not (np.isfinite(odds).all() and odds.min(initial=0) >= 0 and odds.sum() > 0):
            raise DataError(
                f"weights {list(odds.shape)} of {entities} entities, with the sum {odds.sum()}",
                fix="pass one for each entity, none below 0, and not all 0",
            )
        self.loader, self.group, self.others = loader, group, others
        self.edges = np.cumsum(odds)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[NDArray[np.int64], ...]]:
        for batch in self.loader:
            at = self.loader.state()
            rng = np.random.default_rng((at["seed"], at["epoch"], at["cursor"]))
            true = [np.reshape(part, (-1, self.group)) for part in batch]
            drawn = rng.random((2, len(true[0]), self.others)) * self.edges[-1]
            heads, tails = np.searchsorted(self.edges[:-1], drawn, side="right")
            yield *true, heads, tails

    def state(self) -> dict[str, int]:
        """The position in the data."""
        return self.loader.state()

    def load_state(self, state: Mapping[str, int]) -> None:
        """Go on from a position."""
        self.loader.load_state(state)

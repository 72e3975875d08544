"""Whether ranks or servers keep a variable: by the bytes that a step moves in both cases.

A dense gradient moves fewer bytes in an all-reduce. The gradient of a few looked-up rows only goes to a server and
back; without servers every rank gathers the rows of all others, or adds up whole gradients where those are fewer bytes,
and keeps the whole table and its optimizer state (S. Kim et al., "Parallax: Sparsity-aware Data Parallel Training of
Deep Neural Networks", EuroSys 2019, section 3.1).
Left out: the bytes of activations, and the savings of a cache, which only a run shows.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from ..core.graph import Node
from ..core.types import Dim, show_shape
from ..ranges import AtLeast1, Count
from .servable import Servable, is_lookup, known_shape

ID_BYTES = 8
HEADER = ("variable", "shape", "ids per step", "bytes by ranks", "bytes by servers", "kept by")


@dataclass(frozen=True)
class Choice:
    """The bytes that all processes together send per step for a variable on ranks, and for one on servers.

    `lookups` is the number of ids per step on all ranks; None for a variable that every rank needs whole. Servers get a
    `named` variable in any case.

    >>> choice = Choice("table", (100_000, 16), 4, lookups=2048, ranks=4)
    >>> choice.by_ranks, choice.by_servers
    (442368, 294336)
    """

    name: str
    shape: tuple[int, ...]
    itemsize: AtLeast1
    lookups: Count | None
    ranks: AtLeast1
    named: bool = False

    @property
    def row_bytes(self) -> int:
        """A looked-up row and its id."""
        return ID_BYTES + math.prod(self.shape[1:]) * self.itemsize

    @property
    def by_ranks(self) -> int:
        """A ring sends every element of a sum 2 (n - 1) times, and gathered elements, such as rows, n - 1 times.

        Of a small table the sum and a count for each row are fewer bytes than the rows.
        """
        whole = 2 * (self.ranks - 1) * math.prod(self.shape) * self.itemsize
        if self.lookups is None:
            return whole
        counts = 2 * (self.ranks - 1) * self.shape[0] * self.itemsize
        return min(whole + counts, (self.ranks - 1) * self.lookups * self.row_bytes)

    @property
    def by_servers(self) -> int:
        """Each rank pushes and pulls all, or the distinct rows of its lookups and their ids.

        Of k ids at most n (1 - (1 - 1/n)^k) are distinct on average, which is the number for equally likely ids.
        """
        if self.lookups is None:
            return 2 * self.ranks * math.prod(self.shape) * self.itemsize
        count = self.shape[0]
        rows = round(-count * math.expm1(self.lookups / self.ranks * math.log1p(-1 / count))) if count > 1 else 1
        return 2 * self.ranks * rows * self.row_bytes

    @property
    def on_servers(self) -> bool:
        return self.named or (self.lookups is not None and self.by_servers < self.by_ranks)

    def row(self, on_servers: bool) -> tuple[str, ...]:
        """The row in the table of a placement, whose strategy may have decided otherwise."""
        lookups, kept = "all" if self.lookups is None else f"{self.lookups:,}", "servers" if on_servers else "ranks"
        return self.name, show_shape(self.shape), lookups, f"{self.by_ranks:,}", f"{self.by_servers:,}", kept


def choices(servable: Servable, batch_size: int, ranks: int, named: Collection[Node] = ()) -> dict[Node, Choice]:
    """The choice for each variable that servers could keep; they get those that are `named`."""

    def made(variable: Node) -> Choice:
        lookups = None
        if variable in servable.tables:
            ids = [n.inputs[1] for n in servable.nodes if is_lookup(n, (variable,))]
            lookups = sum(_size(i, batch_size) for i in ids)
        must = variable in named or "grows" in variable.tags
        return Choice(variable.name, known_shape(variable), variable.dtype.itemsize, lookups, ranks, must)

    return {v: made(v) for v in servable.steps}


def _size(node: Node, batch_size: int) -> int:
    """The elements of a node when every open size is that of the batch."""
    return math.prod(batch_size * s.coef if isinstance(s, Dim) else s for s in node.shape)

"""Whether ranks or servers keep a variable: by the bytes that a step moves, one way and the other.

A gradient that is dense moves fewer bytes in an all-reduce. That of a few looked-up rows need only go to a server and
back, while without one every rank has to gather the rows of all others, and to keep the whole table and its optimizer
state (S. Kim et al., "Parallax: Sparsity-aware Data Parallel Training of Deep Neural Networks", EuroSys 2019, section
3.1). Left out: the bytes of activations, and the savings of a cache, which only a run can tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..core.graph import Node
from ..core.types import Dim, product, show_shape
from .servable import Servable, is_lookup

ID_BYTES = 8
HEADER = ("variable", "shape", "ids a step", "bytes by ranks", "bytes by servers", "kept by")


@dataclass(frozen=True)
class Choice:
    """Bytes that all processes together send in a step to keep a variable, one way and the other.

    `lookups` are the ids of one step on all ranks; None for a variable of which every rank needs all. One that is
    `named` is given to the servers, however many bytes move.

    >>> choice = Choice("table", (100_000, 16), 4, lookups=2048, ranks=4)
    >>> choice.by_ranks, choice.by_servers
    (442368, 294336)
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    lookups: int | None
    ranks: int
    named: bool = False

    @property
    def row_bytes(self) -> int:
        """A looked-up row and its id."""
        return ID_BYTES + product(self.shape[1:]) * self.itemsize

    @property
    def by_ranks(self) -> int:
        """A ring sends every element of a sum 2 (n - 1) times, and what it gathers, such as looked-up rows, n - 1."""
        if self.lookups is None:
            return 2 * (self.ranks - 1) * product(self.shape) * self.itemsize
        return (self.ranks - 1) * self.lookups * self.row_bytes

    @property
    def by_servers(self) -> int:
        """Each rank pushes and pulls all, or the distinct rows of its lookups and their ids.

        Of k ids there are at most n (1 - (1 - 1/n)^k) distinct ones on average: equally likely ones differ most.
        """
        if self.lookups is None:
            return 2 * self.ranks * product(self.shape) * self.itemsize
        count = self.shape[0]
        rows = round(count * (1 - (1 - 1 / count) ** (self.lookups / self.ranks)))
        return 2 * self.ranks * rows * self.row_bytes

    @property
    def on_servers(self) -> bool:
        return self.named or (self.lookups is not None and self.by_servers < self.by_ranks)

    def row(self, on_servers: bool) -> tuple[str, ...]:
        """As the table of a placement shows it, which may have been told otherwise."""
        lookups, kept = "all" if self.lookups is None else f"{self.lookups:,}", "servers" if on_servers else "ranks"
        return self.name, show_shape(self.shape), lookups, f"{self.by_ranks:,}", f"{self.by_servers:,}", kept


def choices(
    servable: Servable, batch_size: int, ranks: int, named: Callable[[Node], bool] = lambda _: False
) -> dict[Node, Choice]:
    """For each variable that servers could keep what decides about it; those of which `named` is true are theirs."""

    def made(variable: Node) -> Choice:
        lookups = None
        if variable in servable.tables:
            ids = [n.inputs[1] for n in servable.nodes if is_lookup(n, (variable,))]
            lookups = sum(_size(i, batch_size) for i in ids)
        return Choice(variable.name, variable.shape, variable.dtype.itemsize, lookups, ranks, named(variable))

    return {v: made(v) for v in servable.steps}


def _size(node: Node, batch_size: int) -> int:
    """How many elements a node has when every size that is not known is that of the batch."""
    return product(batch_size * s.coef if isinstance(s, Dim) else s for s in node.shape)

"""Hybrid training: dense parameters by all-reduce among the ranks, embedding tables on parameter servers.

A gradient that is dense moves fewer bytes in an all-reduce; one of a few looked-up rows moves fewer to a server and
back, and no rank needs the whole table or its optimizer state (S. Kim et al., "Parallax: Sparsity-aware Data Parallel
Training of Deep Neural Networks", EuroSys 2019, section 3.1). Under BSP training equals that of one process. Ignored
on purpose: pipelines, the bytes of activations, and checkpoints of what the servers hold.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..dist.comm import Comm
from ..dist.mpi import world
from ..dist.partition import Local
from ..dist.pipeline import Staged
from ..dist.placement import Placement
from ..dist.strategy import DataParallel, Parallel, Strategy
from ..errors import ArgumentError
from ..graph import Node, origin_of
from ..passes import Pass, simplify, sparsify_updates
from ..ps.client import Client
from ..ps.environment import connect
from ..ps.served import Calls, Served, create, is_lookup
from ..state import State
from ..types import Dim, product, show_shape

ID_BYTES = 8
HEADER = ("variable", "shape", "ids a step", "bytes by all-reduce", "bytes by servers", "kept by")


class Hybrid:
    """A strategy: tables that are only looked up live on the servers, the rest is as `parallel` says.

    A table is given to the servers where a step then moves fewer bytes than an all-reduce of its gradient;
    `batch_size`, of all ranks together, is what that is reckoned for. Tables whose names fit one of the patterns
    `served` go there in any case. `print(executor.placement)` shows the choice.
    """

    def __init__(
        self, client: Client, parallel: Parallel | None = None, *, batch_size: int = 256, served: Sequence[str] = ()
    ) -> None:
        self.client, self.parallel = client, parallel or DataParallel()
        self.batch_size, self.served = batch_size, tuple(served)

    @classmethod
    def from_environment(
        cls, parallel: Parallel | None = None, *, batch_size: int = 256, served: Sequence[str] = ()
    ) -> Hybrid:
        """The strategy for a rank that `heturun -w N -s M` started."""
        return cls(connect(), parallel, batch_size=batch_size, served=served)

    def attach(self, outputs: Sequence[Node], comm: Comm | None = None) -> HybridPlacement:
        """What an executor works with."""
        comm = world() if comm is None else comm
        strategy = self.parallel.build(outputs, comm.world_size)
        if isinstance(strategy, Staged):
            raise ArgumentError("a hybrid of servers and a pipeline", fix="use DataParallel() or Parallel(...)")
        strategy.check(outputs, comm.world_size)
        served = Served(outputs)
        choices = {v: self._choice(v, served, comm.world_size) for v in served.steps}
        return HybridPlacement(strategy, Connected(comm, self.client), outputs, served, choices)

    def _choice(self, variable: Node, served: Served, ranks: int) -> Choice:
        named, lookups = any(fnmatch.fnmatch(variable.name, pattern) for pattern in self.served), None
        if variable in served.tables:
            ids = [n.inputs[1] for n in served.nodes if is_lookup(n, (variable,))]
            lookups = sum(_size(i, self.batch_size) for i in ids)
        return Choice(variable.name, variable.shape, variable.dtype.itemsize, lookups, ranks, named)


class Connected:
    """A communicator with a connection to the servers: what the operators of both are bound to."""

    def __init__(self, comm: Comm, client: Client) -> None:
        self.comm, self.client = comm, client

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)


@dataclass(frozen=True)
class Choice:
    """Bytes that all processes together send in a step to keep a variable, one way and the other.

    `lookups` are the ids of one step on all ranks; None for a variable of which every rank needs all. A `named` table
    is given to the servers whatever the bytes.

    >>> Choice("table", (100_000, 16), 4, lookups=2048, ranks=4).by_servers
    294336
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    lookups: int | None
    ranks: int
    named: bool = False

    @property
    def by_all_reduce(self) -> int:
        """A ring sends every element 2 (n - 1) times."""
        return 2 * (self.ranks - 1) * product(self.shape) * self.itemsize

    @property
    def by_servers(self) -> int:
        """Each rank pushes and pulls all, or the distinct rows of its lookups and their ids.

        Of k ids there are at most n (1 - (1 - 1/n)^k) distinct ones on average: equally likely ones differ most.
        """
        if self.lookups is None:
            return 2 * self.ranks * product(self.shape) * self.itemsize
        count = self.shape[0]
        rows = round(count * (1 - (1 - 1 / count) ** (self.lookups / self.ranks)))
        return 2 * self.ranks * rows * (ID_BYTES + product(self.shape[1:]) * self.itemsize)

    @property
    def on_servers(self) -> bool:
        return self.lookups is not None and (self.named or self.by_servers < self.by_all_reduce)

    @property
    def row(self) -> tuple[str, ...]:
        """As the table of a placement shows it."""
        lookups = "all" if self.lookups is None else f"{self.lookups:,}"
        kept = "servers" if self.on_servers else "ranks"
        return self.name, show_shape(self.shape), lookups, f"{self.by_all_reduce:,}", f"{self.by_servers:,}", kept


class HybridPlacement(Placement):
    """A hybrid strategy for one graph on real ranks; `print(placement)` shows what is kept where, and why."""

    def __init__(
        self, strategy: Strategy, comm: Any, outputs: Sequence[Node], served: Served, choices: Mapping[Node, Choice]
    ) -> None:
        super().__init__(strategy, comm, outputs)
        self.served, self.choices = served, choices
        self.tables = {v for v, choice in choices.items() if choice.on_servers}
        self.slots = served.slots(self.tables)

    def __str__(self) -> str:
        rows = [HEADER, *(choice.row for choice in self.choices.values())]
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)

    @property
    def passes(self) -> list[Pass]:
        """What is applied before the updates are cut out."""
        return [simplify]

    def variable(self, node: Node) -> Node | None:
        """The variable that holds this rank's part of `node`; None for what lives on the servers."""
        return None if node in self.tables or node in self.slots else super().variable(node)

    def start(self, state: State) -> None:
        """Create the tables on the servers. Gradients are those of the loss of all ranks, so pushes are summed."""
        kept = {v: self.served.parameter(v, sparse=True, reduce="sum") for v in self.choices if v in self.tables}
        create(self.comm.client, kept, state.seed)

    def partition(self, fetches: Sequence[Node], updates: Mapping[Node, Node]) -> Local:
        """This rank's graph: lookups pull rows, their gradients are pushed, and all else is as without servers."""
        calls, sent = Calls(), []
        outputs = calls.look_up((*fetches, *updates.values()), self.tables)
        for variable, new in zip(updates, outputs[len(fetches) :]):
            if variable in self.tables:
                with origin_of(new):
                    sent += calls.push(variable, new, sparse=True)
        kept = {v: k for k, v in enumerate(updates, len(fetches)) if v not in self.tables and v not in self.slots}
        outputs = sparsify_updates((*outputs[: len(fetches)], *(outputs[k] for k in kept.values()), *sent))
        acting = len(fetches) + len(kept)
        local = super().partition(
            outputs[: len(fetches)], dict(zip(kept, outputs[len(fetches) : acting])), outputs[acting:]
        )
        if not sent:
            return local
        others, pushes = local.tokens[: -len(sent)], local.tokens[-len(sent) :]
        return replace(local, tokens=(*others, calls.tick(pushes, order=len(local.steps))))

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, *_: Any) -> None:
        """Not there: tables and their optimizer state are on the servers."""
        raise ArgumentError("what the servers hold cannot be saved yet", fix="fetch tables with client.pull_rows")

    load = save


def _size(node: Node, batch_size: int) -> int:
    """How many elements a node has when every size that is not known is that of the batch."""
    return product(batch_size * s.coef if isinstance(s, Dim) else s for s in node.shape)

"""Hybrid training: dense parameters by all-reduce among the ranks, embedding tables on parameter servers.

A gradient that is dense moves fewer bytes in an all-reduce. That of a few looked-up rows need only go to a server and
back, while without one every rank has to gather the rows of all others, and to keep the whole table and its optimizer
state (S. Kim et al., "Parallax: Sparsity-aware Data Parallel Training of Deep Neural Networks", EuroSys 2019, section
3.1). Under BSP without a cache training equals that of one process. Ignored on purpose: pipelines, the bytes of
activations, and what a cache saves, which only a run can tell.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..core.checkpoint import Box, Checkpoint
from ..core.errors import ArgumentError
from ..core.graph import Node, origin_of
from ..core.program import Program
from ..core.state import State
from ..core.types import Dim, product, show_shape
from ..dist.comm.comm import Comm
from ..dist.comm.mpi import world
from ..dist.cut.builders import DataParallel, Parallel
from ..dist.cut.partition import Local
from ..dist.cut.pipeline import Staged
from ..dist.cut.placement import Placement
from ..dist.cut.strategy import Strategy
from ..look.table import rows_html
from ..passes import Pass, simplify, sparsify_updates
from ..ps.saved import Saved
from ..ps.served import Calls, Served, create, expected, is_lookup
from ..ps.store.cache import Cache
from ..ps.store.consistency import Consistency
from ..ps.wire.client import Client
from ..ps.wire.environment import connect
from ..ps.wire.rows import Rows

ID_BYTES = 8
HEADER = ("variable", "shape", "ids a step", "bytes by ranks", "bytes by servers", "kept by")


class Hybrid:
    """A strategy: tables that are only looked up live on the servers, the rest is as `parallel` says.

    A table is given to the servers where a step then moves fewer bytes than among the ranks; `batch_size`, of all ranks
    together, is what that is reckoned for. With two or three ranks it seldom does, so name what is too large for a
    rank, or is to be cached: tables whose names fit one of the patterns `served` go to the servers in any case.
    `print(executor.placement)` shows the choice. `client` is by default a connection to the servers of the job that
    `heturun` started; `consistency` and `cache` are those of `hetu.ps.ParameterServer`.
    """

    def __init__(
        self,
        parallel: Parallel | None = None,
        *,
        batch_size: int = 256,
        served: Sequence[str] = (),
        consistency: Consistency | None = None,
        cache: Cache | None = None,
        client: Client | None = None,
    ) -> None:
        self.client, self.parallel = client or connect(), parallel or DataParallel()
        self.batch_size, self.served, self.cache = batch_size, tuple(served), cache
        if consistency is not None:
            self.client.agree(consistency)

    def attach(self, outputs: Sequence[Node], comm: Comm | None = None) -> HybridPlacement:
        """What an executor works with."""
        comm = world() if comm is None else comm
        strategy = self.parallel.build(outputs, comm.world_size)
        if isinstance(strategy, Staged):
            raise ArgumentError("a hybrid of servers and a pipeline", fix="use DataParallel() or Parallel(...)")
        strategy.check(outputs, comm.world_size)
        served = Served(outputs)
        choices = self.choices(served, comm.world_size)
        connected = Connected(comm, self.client, Rows(self.client, self.cache))
        return HybridPlacement(strategy, connected, outputs, served, choices)

    def choices(self, served: Served, ranks: int) -> dict[Node, Choice]:
        """Where each variable that servers could keep is kept, and the bytes that decide it."""
        return {v: self._choice(v, served, ranks) for v in served.steps}

    def _choice(self, variable: Node, served: Served, ranks: int) -> Choice:
        named, lookups = any(fnmatch.fnmatch(variable.name, pattern) for pattern in self.served), None
        if variable in served.tables:
            ids = [n.inputs[1] for n in served.nodes if is_lookup(n, (variable,))]
            lookups = sum(_size(i, self.batch_size) for i in ids)
        return Choice(variable.name, variable.shape, variable.dtype.itemsize, lookups, ranks, named)


class Connected:
    """A communicator with a connection to the servers: what the operators of both are bound to."""

    def __init__(self, comm: Comm, client: Client, rows: Rows) -> None:
        self.comm, self.client, self.rows = comm, client, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)


@dataclass(frozen=True)
class Choice:
    """Bytes that all processes together send in a step to keep a variable, one way and the other.

    `lookups` are the ids of one step on all ranks; None for a variable of which every rank needs all. A `named` table
    is given to the servers whatever the bytes.

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
        return self.lookups is not None and (self.named or self.by_servers < self.by_ranks)

    @property
    def row(self) -> tuple[str, ...]:
        """As the table of a placement shows it."""
        lookups = "all" if self.lookups is None else f"{self.lookups:,}"
        kept = "servers" if self.on_servers else "ranks"
        return self.name, show_shape(self.shape), lookups, f"{self.by_ranks:,}", f"{self.by_servers:,}", kept


class HybridPlacement(Placement):
    """A hybrid strategy for one graph on real ranks; `print(placement)` shows what is kept where, and why."""

    def __init__(
        self, strategy: Strategy, comm: Any, outputs: Sequence[Node], served: Served, choices: Mapping[Node, Choice]
    ) -> None:
        super().__init__(strategy, comm, outputs)
        self.served, self.choices = served, choices
        self.tables = {v for v, choice in choices.items() if choice.on_servers}
        self.slots = {*served.slots(self.tables)}
        self.cached = self.tables if comm.rows.cache else set()

    def __str__(self) -> str:
        rows = [HEADER, *(choice.row for choice in self.choices.values())]
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        return rows_html([HEADER, *(choice.row for choice in self.choices.values())])

    @property
    def passes(self) -> list[Pass]:
        """What is applied before the updates are cut out."""
        return [simplify]

    def variable(self, node: Node) -> Node | None:
        """The variable that holds this rank's part of `node`; None for what lives on the servers."""
        return None if node in self.tables or node in self.slots else super().variable(node)

    def start(self, state: State) -> None:
        """Create the tables on the servers. Gradients are those of the loss of all ranks, so pushes are summed."""
        tables = [v for v in self.choices if v in self.tables]
        kept = {v: self.served.parameter(v, sparse=True, reduce="sum", cached=v in self.cached) for v in tables}
        create(self.comm.client, kept, state.seed)
        self.comm.rows.hold(v.name for v in self.cached)

    def expect(self, program: Program, values: Mapping[str, np.ndarray]) -> None:
        """The next step will run this program on these feeds: its rows are asked for when this one has pushed."""
        self.comm.rows.expected = expected(program, values)

    def partition(self, fetches: Sequence[Node], updates: Mapping[Node, Node]) -> Local:
        """This rank's graph: lookups pull rows, their gradients are pushed, and all else is as without servers."""
        calls, sent = Calls(), []
        outputs = calls.look_up((*fetches, *updates.values()), self.tables)
        for variable, new in zip(updates, outputs[len(fetches) :]):
            if variable in self.tables:
                with origin_of(new):
                    sent += calls.push(variable, new, sparse=True, cached=variable in self.cached)
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

    def save(
        self, state: State, variables: Iterable[Node], path: str | os.PathLike[str], extra: Mapping[str, Any] | None
    ) -> None:
        """Write all variables to a folder: each rank its part of those kept on ranks, rank 0 those of the servers."""
        self.comm.rows.flush()
        self.comm.barrier()  # so that all has arrived, also where the servers wait for nobody
        mine = [v for v in variables if v not in self.tables and v not in self.slots]
        self.save_parts(state, mine, path, extra)

    def finish(
        self, folder: Path, number: int, sizes: list[int], table: dict[str, Any], extra: Mapping[str, Any] | None
    ) -> None:
        self._saved().write(folder, number, sizes, table)
        super().finish(folder, number, sizes, table, extra)

    def load(self, state: State, variables: Iterable[Node], path: str | os.PathLike[str]) -> dict[str, Any]:
        """Continue from what any executor saved."""
        extra = super().load(state, variables, path)
        self._saved().restore(Checkpoint(Path(path)))
        self.comm.rows.forget()
        return extra

    def box(self, node: Node) -> Box | None:
        return None if node in self.tables or node in self.slots else super().box(node)

    def _saved(self) -> Saved:
        return Saved(self.comm.client, self.served, self.tables)


def _size(node: Node, batch_size: int) -> int:
    """How many elements a node has when every size that is not known is that of the batch."""
    return product(batch_size * s.coef if isinstance(s, Dim) else s for s in node.shape)

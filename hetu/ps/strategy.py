"""Training with a parameter server from one-device code: optimizer steps become pushes, a tick and pulls.

Each worker runs the whole model on its part of the batch. For every variable that an optimizer updates, the update is
cut out of the graph: its gradient is pushed, the servers apply the same rule, and the new value is pulled straight into
the variable. A table that is only looked up lives on the servers alone: lookups pull the rows of the batch, gradients
push them (M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014). Ignored on purpose:
combining it with all-reduce (`hetu.plan.Hybrid`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core import checkpoint
from ..core.errors import ArgumentError, ShapeError
from ..core.graph import Node, origin_of, topological
from ..core.op import Role
from ..core.program import Program
from ..core.source import Site
from ..core.state import State, Wanted, fitting
from ..core.types import Atom, Dim
from ..passes import Pass, simplify
from .saved import Saved
from .served import Calls, Served, create, expected
from .store.cache import Cache
from .store.consistency import Consistency
from .store.partition import Parameter
from .wire.client import Client
from .wire.environment import connect, place
from .wire.rows import Rows

AGREEMENT = "agreement"  # begins the names of what workers agree on
FilePath = str | os.PathLike[str]
Part = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Worker:
    """One worker of a job: what the operators in `ops.py` are bound to."""

    client: Client
    rank: int
    world_size: int
    rows: Rows

    def progress(self) -> None:
        """Sockets move by themselves."""

    def at(self, site: Site | None) -> None:
        """A server that does not answer is named by the client; lines are not."""


@dataclass(frozen=True)
class Local:
    """One worker's graph, in the form that an executor takes; compare `hetu.dist.cut.partition.Local`."""

    fetches: tuple[Node, ...]
    tokens: tuple[Node, ...]
    updates: dict[Node, Node]
    feeds: dict[str, tuple[str, Part]]


class ParameterServer:
    """A strategy: `ht.Executor(..., strategy=ParameterServer(consistency=SSP(3)))` under `heturun -w 2 -s 1`.

    Args:
        client, rank, workers: a connection and this worker's place; by default those of the job that `heturun` started.
        consistency: what the servers are to run under, BSP(), SSP(3) or ASP(), alike on all workers; by default what
            they were started with.
        cache: how much of the tables that are only looked up each worker keeps, and how stale; see `Cache`.

    Batches are split along the first axis and must divide by `workers`; a fetched loss is that of the worker's own
    part. Under BSP without a cache the parameters equal those of one process that trains on whole batches.
    ArgumentError where there are no servers and for a cache of tables that are not trained by plain gradient descent,
    RefusedError where workers ask for different modes.
    """

    def __init__(
        self,
        client: Client | None = None,
        rank: int = 0,
        workers: int = 1,
        *,
        consistency: Consistency | None = None,
        cache: Cache | None = None,
    ) -> None:
        if client is None:
            client, (rank, workers) = connect(), place()
        if not 0 <= rank < workers:
            raise ArgumentError(f"rank {rank} of {workers} workers", fix="ranks count from 0")
        if consistency is not None:
            client.agree(consistency)
        self.client, self.rank, self.workers, self.cache = client, rank, workers, cache

    def attach(self, outputs: Sequence[Node], comm: Any = None) -> Placement:
        """What an executor works with."""
        # The servers take the mean of what is pushed, except through a cache, whose steps they add.
        rows = Rows(self.client, self.cache, weight=1 / self.workers)
        return Placement(Worker(self.client, self.rank, self.workers, rows), outputs)


class Placement:
    """What the servers keep of a graph, and one worker's part of it."""

    last = None  # nothing is done to the graph after all passes

    def __init__(self, worker: Worker, outputs: Sequence[Node]) -> None:
        self.comm, self.served = worker, Served(outputs)
        self.slots = {*self.served.slots(self.served.steps)}
        self.cached = self.served.tables if worker.rows.cache else set()
        placeholders = [n for n in self.served.nodes if n.role is Role.PLACEHOLDER and n.ndim]
        self.batches = {n.name for n in placeholders if isinstance(n.shape[0], Dim)}

    # -- what an executor asks ------------------------------------------------------------------------------------

    @property
    def passes(self) -> list[Pass]:
        """What is applied before the updates are cut out."""
        return [simplify]

    def variable(self, node: Node) -> Node | None:
        """The worker's own copy; None for what lives on the servers alone."""
        return None if node in self.served.tables or node in self.slots else node

    def start(self, state: State) -> None:
        """Create the parameters on the servers, with the values that one process would start from, and fetch them."""
        served = self.served
        kept = {
            v: served.parameter(v, sparse=v in served.tables, reduce="mean", cached=v in self.cached)
            for v in served.steps
        }
        create(self.comm.client, kept, state.seed)
        self.comm.rows.hold(v.name for v in self.cached)
        self._pull(state)

    def _pull(self, state: State) -> None:
        for v in self.served.steps.keys() - self.served.tables:
            self.comm.client.pull(v.name, state.arrays[v.name]).wait()

    def expect(self, program: Program, values: Mapping[str, np.ndarray]) -> None:
        """The next step will run this program on these feeds: its rows are asked for when this one has pushed."""
        self.comm.rows.expected = expected(program, values)

    def sizes(self, sizes: Mapping[Atom, int], training: bool) -> Mapping[Atom, int]:
        """The sizes of a worker's part of what is fed; evaluation is not split."""
        found = dict(sizes)
        for (name, axis), size in sizes.items() if training else ():
            if name in self.batches and axis == 0:
                if size % self.comm.world_size:
                    raise ShapeError(
                        f"a batch of {size} in {name!r} does not divide among {self.comm.world_size} workers",
                        fix="feed batches of a multiple of the workers (drop_last=True)",
                    )
                found[name, axis] = size // self.comm.world_size
        return found

    def partition(self, fetches: Sequence[Node], updates: Mapping[Node, Node]) -> Local:
        """The worker's graph: lookups pull rows, updates push, tick and pull."""
        calls, tables = Calls(), self.served.tables
        outputs = calls.look_up((*fetches, *updates.values()), tables)
        fetches, updates = outputs[: len(fetches)], dict(zip(updates, outputs[len(fetches) :]))
        mine = {n.name: n for n in topological(outputs) if n.role is Role.PLACEHOLDER}
        kept = {v: value for v, value in updates.items() if v not in self.served.steps and v not in self.slots}
        sent: list[Node] = []
        for variable, value in reversed(updates.items()):
            if variable in self.served.steps:
                with origin_of(value):
                    sent += calls.push(variable, value, sparse=variable in tables, cached=variable in self.cached)
        tokens: tuple[Node, ...] = ()
        if sent:
            tokens = (calls.tick(sent),)
            whole = [v for v in updates if v in self.served.steps and v not in tables]
            kept |= {v: calls.pull(tokens[0], v) for v in whole}
        return Local(fetches, tokens, kept, self._feeds(mine, training=bool(updates)))

    def _feeds(self, mine: Mapping[str, Node], training: bool) -> dict[str, tuple[str, Part]]:
        """The rows of each fed batch that this worker takes."""
        found = {}
        for name in self.batches & mine.keys() if training else ():
            rows = int(mine[name].shape[0])
            first = self.comm.rank * rows
            found[name] = (name, ((first, first + rows), *((0, int(s)) for s in mine[name].shape[1:])))
        return found

    def agree(self, values: Mapping[str, float]) -> Mapping[str, float]:
        """The numbers that all workers are to go by. All call this alike: it ends a clock.

        They are the first values of a parameter that nobody trains, made anew each time. Under BSP and SSP(0) they are
        those of worker 0 as long as it takes part, because the others offer theirs only once it has ended the clock
        before which it offered its own; under SSP(s) and ASP nobody waits, and they are those of whoever came first.
        A server that is killed meanwhile may forget them before all have asked.
        """
        if self.comm.world_size == 1:
            return values
        client, mine = self.comm.client, np.array([*values.values()], np.float64)
        name = f"{AGREEMENT} {client.step}"  # a new life of a worker must not find what was agreed on before it
        parameter = {name: Parameter(mine.shape, "float64", rule="add", reduce="sum")}
        if self.comm.rank == 0:
            client.create(parameter, {name: mine})
        client.clock().wait()
        if self.comm.rank:
            client.create(parameter, {name: mine})
        return dict(zip(values, client.pull(name).wait().tolist()))

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save(self, state: State, variables: Iterable[Node], path: FilePath, extra: Mapping[str, Any] | None) -> None:
        """Write all variables to a folder, which worker 0 does; all workers call this alike.

        Under BSP it is the state at this clock. Under SSP and ASP others may train on meanwhile, so that each
        parameter is one that the mode lets a reader see.
        """
        self.comm.rows.flush()
        if self.comm.rank:
            return
        folder, mine = Path(path), [n for n in variables if n.name in state and n not in self.served.steps]
        number, sizes = checkpoint.begin(folder), []
        sizes.append(checkpoint.write_part(folder, number, 0, {n.name: state.contiguous(n.name) for n in mine}))
        table = {
            n.name: {"shape": n.shape, "dtype": n.dtype.name, "pieces": [(0, checkpoint.whole(n.shape))]} for n in mine
        }
        self._saved().write(folder, number, sizes, table)
        checkpoint.finish(folder, number, sizes, table, extra)

    def load(self, state: State, variables: Iterable[Node], path: FilePath) -> dict[str, Any]:
        """Continue from what any executor saved; all workers call this alike."""
        saved = checkpoint.Checkpoint(Path(path))
        wanted = {
            n.name: Wanted(n.shape, n.dtype.name, checkpoint.whole(n.shape) if n.name in state else None)
            for n in variables
        }
        state.assign(fitting(saved, wanted))
        self._saved().restore(saved)
        self.comm.rows.forget()
        self._pull(state)
        return saved.extra

    def _saved(self) -> Saved:
        return Saved(self.comm.client, self.served, {*self.served.steps})

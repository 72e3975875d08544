"""Training with a parameter server from one-device code: optimizer steps become pushes, a tick and pulls.

Each worker runs the whole model on its part of the batch. For every variable that an optimizer updates, the update is
cut out of the graph: its gradient is pushed, the servers apply the same rule, and the new value is pulled straight into
the variable. A table that is only looked up lives on the servers alone: lookups pull the rows of the batch, gradients
push them (M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014). Ignored on purpose:
combining it with all-reduce (`hetu.plan.Hybrid`), and checkpoints of what the servers hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError, ShapeError
from ..graph import Node, origin_of, topological
from ..passes import Pass, simplify
from ..source import Site
from ..state import State
from ..types import Atom, Dim
from .client import Client
from .environment import connect, place
from .served import Calls, Served, create

Part = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Worker:
    """One worker of a job: what the operators in `ops.py` are bound to."""

    client: Client
    rank: int
    world_size: int

    def progress(self) -> None:
        """Sockets move by themselves."""

    def at(self, site: Site | None) -> None:
        """A server that does not answer is named by the client; lines are not."""


@dataclass(frozen=True)
class Local:
    """One worker's graph, in the form that an executor takes; compare `hetu.dist.partition.Local`."""

    fetches: tuple[Node, ...]
    tokens: tuple[Node, ...]
    updates: dict[Node, Node]
    feeds: dict[str, tuple[str, Part]]


class ParameterServer:
    """A strategy: `ht.Executor(..., strategy=ParameterServer(client, rank, workers))`.

    The consistency (BSP, SSP, ASP) is the servers' (`Options(consistency=...)`). Batches are split along the first axis
    and must divide by `workers`; a fetched loss is that of the worker's own part. Under BSP the parameters equal those
    of one process that trains on whole batches.
    """

    def __init__(self, client: Client, rank: int, workers: int) -> None:
        if not 0 <= rank < workers:
            raise ArgumentError(f"rank {rank} of {workers} workers", fix="ranks count from 0")
        self.worker = Worker(client, rank, workers)

    @classmethod
    def from_environment(cls) -> ParameterServer:
        """The strategy for a rank that `heturun -w N -s M` started."""
        return cls(connect(), *place())

    def attach(self, outputs: Sequence[Node], comm: Any = None) -> Placement:
        """What an executor works with."""
        return Placement(self.worker, outputs)


class Placement:
    """What the servers keep of a graph, and one worker's part of it."""

    def __init__(self, worker: Worker, outputs: Sequence[Node]) -> None:
        self.comm, self.served = worker, Served(outputs)
        self.slots = self.served.slots(self.served.steps)
        placeholders = [n for n in self.served.nodes if n.op.name == "placeholder" and n.ndim]
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
        served, client = self.served, self.comm.client
        kept = {v: served.parameter(v, sparse=v in served.tables, reduce="mean") for v in served.steps}
        create(client, kept, state.seed)
        for v in kept.keys() - served.tables:
            client.pull(v.name, state.arrays[v.name]).wait()

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
        mine = {n.name: n for n in topological(outputs) if n.op.name == "placeholder"}
        kept = {v: value for v, value in updates.items() if v not in self.served.steps and v not in self.slots}
        sent: list[Node] = []
        for variable, value in reversed(updates.items()):
            if variable in self.served.steps:
                with origin_of(value):
                    sent += calls.push(variable, value, sparse=variable in tables)
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

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save(self, *_: Any) -> None:
        """Not there: optimizer state and tables are on the servers."""
        raise ArgumentError("what the servers hold cannot be saved yet", fix="fetch parameters with client.pull")

    load = save

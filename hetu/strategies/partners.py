"""Partial reduce as a strategy: each rank steps by itself, then averages its model with those who are ready, too.

A controller on the first server makes the groups (`ps/store/partial_reduce.py`); their members average over MPI. X.
Miao et al., "Heterogeneity-Aware Distributed Machine Learning Training via Partial Reduce", SIGMOD 2021. Left out:
tensor, pipeline and expert parallelism; GPUs.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ..core.errors import ArgumentError
from ..core.graph import Graph, Node
from ..core.op import Role, op
from ..core.placement import Local, attaches
from ..core.state import FilePath, State
from ..core.types import Atom, is_float
from ..dist.comm.comm import Comm, SerialComm
from ..dist.comm.world import world
from ..dist.cut.agreement import gathered, of_first, unlike
from ..dist.cut.builders import DataParallel
from ..dist.cut.kept import Home, owners_of
from ..dist.cut.strategy import Builder, Strategy
from ..look.svg import Svg
from ..look.timeline import Panel, TimelineRow, timeline_svg
from ..ops.join import concat
from ..ops.shape import flatten
from ..ps.store.messages import RefusedError
from ..ps.store.partial_reduce import GroupSize
from ..ps.wire.client import Client
from ..ps.wire.environment import connect
from ..ranges import Endless, Share
from ..saving import Writing, begin
from .apart import Apart
from .bundles import Bundle
from .on_servers import Connected

ALONE = "leave it out, so that it stays each rank's own, or use a strategy without partners for all variables"
REMEMBERED = 10_000  # groups that a rank has been in
MODELS: WeakKeyDictionary[Client, itertools.count[int]] = WeakKeyDictionary()  # numbers for what a worker averages


@dataclass(frozen=True)
class Averaged(Home):
    """A variable of which each rank has values of its own, and takes the mean of them with those who are ready.

    >>> print(Averaged())
    whole, kept as each rank's own, averaged with partners
    """

    called: ClassVar = "a variable that partners average", ALONE

    @property
    def words(self) -> tuple[str, str, str]:
        return "whole", "each rank's own", "averaged with partners"


@dataclass
class Partial(Strategy):
    """What `PartialReduce` writes: the layouts of one rank, and how partners find each other.

    Of its variables those are averaged that are `Averaged`, statistics and optimizer states too if it says so of them;
    all others stay each rank's own. How many partners there are, and how long one waits, is the same for all, as a rank
    and no variable waits. No other home goes with it: who sums one gradient over all ranks waits for the slowest.
    """

    group: int = 2
    wait: float = math.inf
    decay: float = 0.5
    kind: ClassVar[str] = "partial reduce"
    alone = True
    lives: ClassVar[Any] = dict[str, Averaged]

    def check(self, outputs: Sequence[Node], world_size: int) -> None:
        """The checks of any strategy; ArgumentError also for a variable with another home, or of integers."""
        super().check(outputs, world_size)
        for v in (v for v in Graph(tuple(outputs)).leaves("variable") if v.name in self.variables):
            if not isinstance(home := self.variables[v.name], Averaged):
                said = f"{v.name!r} is {home}, for which all ranks would wait, beside partners, who wait for no other"
                raise ArgumentError(said, fix=ALONE, site=v.site)
            if not is_float(v.dtype):
                raise ArgumentError(f"partners average {v.name!r}, which is {v.type}", fix=ALONE, site=v.site)

    def overview(self) -> list[tuple[str, ...]]:
        """How each variable and each feed lies."""
        head, (name, *lies, _), *rows = super().overview()
        return [head, (name, *lies, "each rank's own"), *rows]

    def __str__(self) -> str:
        late = "" if math.isinf(self.wait) else f", or fewer after {self.wait:g} s"
        said = f"each rank alone, averaged in groups of {self.group}{late}; who is behind counts {self.decay:g} a step"
        return f"{said}\n{super().__str__()}"


class PartialReduce(Builder):
    """Data parallelism in which nobody waits for the slowest rank, under `heturun -w 4 -s 1`.

    Each rank takes its part of a batch, steps, and averages its variables with the first `min_ranks` that are ready,
    itself included; a smaller group goes on when its first member has waited for `wait` seconds. A member that is k
    steps behind the foremost of its group weighs `decay` ** k and is then as far as the foremost, so that it may leave
    out k batches (`fit` does). Recent groups connect all ranks. Batches must divide by the ranks, which may go through
    the data as each likes; a fetched loss is that of a rank's part. Between two averages models differ: `save` and
    `placement.average()` average them all.

    Optimizers see the gradients of one part and their states are not averaged, so training is not that of one process.
    The strategy says of each variable whether it is averaged; see `Partial`.

    >>> PartialReduce(min_ranks=3)
    PartialReduce(min_ranks=3)
    """

    def __init__(self, min_ranks: GroupSize = 2, *, wait: Endless | None = None, decay: Share = 0.5) -> None:
        if type(min_ranks) is not int or min_ranks < 2:
            raise ArgumentError(f"min_ranks={min_ranks!r}", fix="average at least 2 ranks")
        if wait is not None and not wait > 0:
            raise ArgumentError(f"wait={wait!r}", fix="give seconds, or None to wait until they are there")
        if not 0 < decay <= 1:
            raise ArgumentError(f"decay={decay!r}", fix="give a factor above 0, at most 1")
        self.min_ranks, self.wait, self.decay = min_ranks, wait, decay

    def build(self, outputs: Sequence[Node], world_size: int) -> Partial:
        """The strategy for a graph on `world_size` ranks, fewer than `min_ranks` being all."""
        plain = DataParallel().build(outputs, 1)
        same, owners = {f.name: getattr(plain, f.name) for f in fields(Strategy)}, owners_of(outputs)
        model = (v for v in Graph(tuple(outputs)).leaves("variable") if owners.get(v, v) is v and is_float(v.dtype))
        same["variables"] = {v.name: Averaged() for v in model}
        wait = math.inf if self.wait is None else self.wait
        return Partial(**same, group=max(2, min(self.min_ranks, world_size)), wait=wait, decay=self.decay)


@attaches(PartialReduce)
@attaches(Partial)
def on_partners(
    builder: PartialReduce | Partial, outputs: Sequence[Node], comm: Comm | Connected | None = None
) -> OnPartners:
    """The strategy that `builder` writes for this graph, on the ranks of `comm` (those of the job by default)."""
    ranks, client = (comm.comm, comm.client) if isinstance(comm, Connected) else (comm or world(), None)
    if not isinstance(ranks, Comm):
        fix = "pass a communicator, comm=Connected(comm, client)"
        raise ArgumentError(f"partners average over MPI, and {ranks} cannot talk to each other", fix=fix)
    strategy = builder.build(outputs, ranks.world_size)
    strategy.check(outputs, 1)
    return OnPartners(strategy, ranks, client, outputs)


class Meeting(NamedTuple):
    """A group that this rank was in: when it was ready, when they had found each other, when it went on."""

    number: int
    members: tuple[int, ...]
    weights: tuple[float, ...]
    behind: int  # steps of this rank
    ready: float
    met: float
    ended: float


class Partners:
    """What the operator that averages is bound to: the ranks, the controller, and how far this one is."""

    rank, world_size = 0, 1  # of the part of the graph that is a rank's own

    def __init__(self, comm: Comm, client: Client, placement: OnPartners) -> None:
        self.comm, self.client, self.placement, self.alone = comm, client, placement, SerialComm()
        strategy = placement.strategy
        self.model = next(MODELS.setdefault(client, itertools.count()))
        self.settings = {"group": strategy.group, "decay": strategy.decay}
        self.settings |= {} if math.isinf(strategy.wait) else {"wait": strategy.wait}
        self.iteration = 0
        self.meetings = deque[Meeting](maxlen=REMEMBERED)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.alone, name)

    def average(self, values: np.ndarray, first: bool) -> None:
        """Put the weighted mean of a group's values in the place of this rank's. Of a step only the `first` call finds
        partners, the others are with the same."""
        if first:
            self._meet()
        group = self.meetings[-1]
        self.comm.recorder.absent.pop(self.client, None)  # these members do not wait elsewhere
        if len(group.members) > 1:
            np.multiply(values, values.dtype.type(group.weights[group.members.index(self.comm.rank)]), values)
            self.comm.at("what partners average")  # who meets may be at another line
            self.comm.split(group.members).all_reduce(values, values)
            self.comm.at(None)
        self.meetings[-1] = group._replace(ended=time.monotonic())
        self.comm.recorder.absent[self.client] = self._absent

    def _meet(self) -> None:
        ready = time.monotonic()
        group = self.client.ready(self.iteration, self.model, **self.settings).wait()
        behind, now = group.iteration - self.iteration, time.monotonic()
        self.meetings.append(Meeting(group.number, group.members, group.weights, behind, ready, now, now))
        self.iteration = group.iteration + 1
        self.placement.late += behind

    def away(self) -> None:
        """Have nobody wait for this rank until its next step."""
        self.comm.recorder.absent.pop(self.client, None)
        self.client.away().wait()

    def _absent(self) -> None:
        """`away`, as this rank waits for all others in a collective of the user's; it may have left its servers."""
        with suppress(RefusedError):
            if not self.client.context.closed:
                self.client.away().wait()


@op(
    name="average_with_partners",
    role=Role.COMMUNICATION,
    collective="served",
    infer=lambda values, **_: values,
    differentiable=False,
    inplace={0: (0,)},
)
def average_with_partners(xp: Any, values: Any, *, order: int, first: bool, comm: Any) -> Any:
    """The weighted mean of the values of those who are ready with this rank."""
    out = xp.array(values)
    comm.average(out, first)
    return out


@average_with_partners.into
def average_into(xp: Any, out: Any, values: Any, *, order: int, first: bool, comm: Any) -> None:
    if out is not values:
        xp.copyto(out, values)
    comm.average(out, first)


class OnPartners(Apart):
    """A strategy by which ranks step alone and average in groups; `meetings` are those of this rank."""

    strategy: Partial
    comm: Any  # `Partners`, once it has started

    def __init__(self, strategy: Partial, ranks: Comm, client: Client | None, outputs: Sequence[Node]) -> None:
        super().__init__(strategy, SerialComm(), outputs)
        self.ranks, self.client = ranks, client
        self.in_parts = False
        leaves = Graph(tuple(outputs)).leaves("variable")
        self.averaged = [v for v in leaves if v.name in strategy.variables and v.attrs["trainable"]]

    @property
    def meetings(self) -> list[Meeting]:
        """The last groups that this rank has been in, in order."""
        return [*self.comm.meetings]

    @property
    def iteration(self) -> int:
        """How many steps the model of this rank has seen: its own, or those of the foremost it has met."""
        return int(self.comm.iteration)

    def start(self, state: State, asked: Mapping[str, Any]) -> None:
        """Compare what all were asked for, and begin with the values of rank 0."""
        if state.device.kind != "cpu":
            fix = "use device='cpu', or ht.dist.DataParallel()"
            raise ArgumentError(f"partners average on CPUs, not on {state.device}", fix=fix)
        self.ranks.compile_alike()
        self.agree_on(asked, partial(unlike, self.ranks))
        for node in Graph(self.outputs).leaves("variable"):
            value = state.contiguous(node.name)
            self.ranks.broadcast(value)
            state.assign({node.name: value})
        updated = {name for names in asked["updated"].values() for name in names} & self.strategy.variables.keys()
        self.averaged = [v for name, v in sorted(state.variables.items()) if name in updated]
        self.comm = Partners(self.ranks, self.client or connect(), self)

    def sizes(self, sizes: Mapping[Atom, int], name: str, training: bool, fed: Mapping[str, Any]) -> Mapping[Atom, int]:
        """The sizes of this rank's part of the feeds; evaluation is not split."""
        found = super().sizes(sizes, name, training, fed)
        return self.part_sizes(found) if training else found

    def cut(self, fetches: Sequence[Node], updates: Mapping[Node, Node], effects: Sequence[Node] = ()) -> Local:
        """This rank's graph, in which the model is averaged before new values are kept: all that any sub-graph updates,
        as those who meet may have trained different ones."""
        local = super().cut(fetches, updates, effects)
        if not updates:
            return local
        kinds: dict[Any, list[Node]] = {}
        for v in self.averaged:
            kinds.setdefault(v.dtype, []).append(v)
        averaged = dict(local.updates)
        for order, some in enumerate(kinds.values(), 1):
            bundle = Bundle(tuple(some))
            new = [local.updates.get(v, v) for v in some]
            whole = new[0] if len(new) == 1 else concat([flatten(value) for value in new])
            mean = average_with_partners.make((whole,), {"order": order, "first": order == 1})
            averaged |= zip(some, bundle.part_nodes(mean))
        return self.part_fed(replace(local, updates=averaged))

    def average(self, state: State) -> None:
        """All ranks take the mean of all their models; each calls this, at any step of its own."""
        self.comm.away()
        for node in self.averaged:  # what no step updates is alike, and would lose last digits
            value = state.contiguous(node.name) / node.dtype.type(self.world_size)
            self.ranks.all_reduce(value, value)
            state.assign({node.name: value})

    def agree(self, values: Mapping[str, float]) -> Mapping[str, float]:
        """The numbers that rank 0 has; all ranks call this, at any step of their own."""
        self.comm.away()
        return of_first(self.ranks, values)

    def save(self, state: State, variables: Iterable[Node], path: FilePath, extra: Mapping[str, Any] | None) -> Writing:
        """Average all models; rank 0 writes it, with what of its own is not averaged, to one file."""
        self.average(state)
        writing = begin(state, path, extra) if self.rank == 0 else Writing()

        def together(act: Callable[[], object]) -> None:
            act()
            self.comm.away()
            self.ranks.barrier()

        return replace(writing, together=together)

    def load(self, state: State, variables: Iterable[Node], path: FilePath, **of: Any) -> dict[str, Any]:
        """Continue on all ranks from what any executor saved."""
        self.comm.away()
        return state.load(path, **of)

    # -- seen ------------------------------------------------------------------------------------------------------

    def timeline(self) -> Svg:
        """A picture of all ranks' steps and groups, with the weights and steps behind; all ranks call this."""
        self.comm.away()
        mine = [(*m[:1], *m[3:], m.weights[m.members.index(self.rank)]) for m in self.meetings]
        found = gathered(self.ranks, np.array(mine, np.float64).reshape(-1))
        return meetings_svg([rows.reshape(-1, 6) for rows in found])


def meetings_svg(ranks: Sequence[np.ndarray]) -> Svg:
    """Draw each rank's steps and groups: rows of (group, steps behind, ready, met, ended, weight), in seconds."""
    origin = min((rows[0, 2] for rows in ranks if len(rows)), default=0.0)
    shown, notes = list[TimelineRow](), dict[int, str]()
    for rank, rows in enumerate(ranks):
        since = origin
        for number, behind, ready, _, ended, weight in rows.tolist():
            told = f"group {number:.0f}, weight {weight:.2f}" + (f", {behind:.0f} behind" if behind else "")
            shown.append((rank, "compute", "step", since - origin, ready - origin))
            shown.append((rank, "communication", told, ready - origin, ended - origin))
            since = ended
        notes[rank] = f"waits {(rows[:, 3] - rows[:, 2]).sum():.2g} s"
    return timeline_svg(Panel(shown, notes))

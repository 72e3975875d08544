"""How long a step takes under a strategy, and what it needs: the ranks' own instruction lists, played on a clock.

Computing takes the time that the profile says. A collective starts when all its ranks have arrived and the one before
it in their group has ended. A message arrives after those that its sender sent before it. `hetu.dist.VirtualClock`
charges the same. Left out: contention between groups, between ranks that share a link, and at the servers.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.errors import GraphError
from ...core.op import Role
from ...look.timeline import Held
from ...ranges import AtLeast1, Count
from ...strategies.partners import Partial
from ...strategies.room import asks_for_rows
from ..costs.links import Channel
from ..costs.profile import MachineProfile
from .instructions import (
    AT_ONCE,
    Communication,
    Exchange,
    RankProgram,
    Serve,
    Shapes,
    SimulatedCollective,
    SimulatedJob,
    Wait,
)
from .partners import played_of, sent_by, timeline_of
from .timeline import COMMUNICATION, COMPUTE, Event, Timeline
from .traffic import SENDS

SERVERS = -1  # stands for the servers in `Cost.sent`
AT_MOST = "bytes are at most so many, as rows of servers are counted as if no id came twice and caches were full"


@dataclass(frozen=True)
class Cost:
    """One step: seconds; for each rank its peak of bytes; bytes over each directed link (source, target).

    `peak` counts the arena, the feeds' buffers, what a step returns, the variables with optimizer state, and of those
    on servers caches and the rows and ids on their way, as many as if no id came twice. Left out is what does not grow
    with the model, such as the memory by which ranks of one host talk. The timeline has the first ranks only.
    Collectives send along a ring, all-to-alls to everybody. `note` says more of what a step is.
    """

    time: float
    peak: tuple[int, ...]
    sent: Mapping[tuple[int, int], int]
    timeline: Timeline
    note: str = ""

    def __str__(self) -> str:
        return (
            f"{1e3 * self.time:.3f} ms per step, at most {max(self.peak):,} bytes per rank, "
            f"{sum(self.sent.values()):,} bytes sent on {len(self.sent)} links"
        )


def simulate(
    entries: Sequence[Any],
    strategy: Any,
    profile: MachineProfile,
    *,
    world_size: AtLeast1,
    shapes: Shapes | None = None,
    traced: Count = 16,
    precision: str = "float32",
) -> Cost:
    """The cost of one step of `entries` (what an executor is given: nodes and updates) on `world_size` ranks.

    `shapes`, by placeholder or name, are those of the whole batch, or its arrays, for every placeholder of unknown
    size. The timeline has the first `traced` ranks; `precision` is that of an executor. Errors are those that it would
    raise, UnknownNameError for a shape of what is not fed, and ShapeError for one that is missing.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (None, 64))
    >>> loss = ht.mean(ht.nn.Linear(64, 64)(x) ** 2)
    >>> entries = [loss, ht.optim.SGD(0.1).minimize(loss)]
    >>> cost = simulate(entries, ht.dist.DataParallel(), MachineProfile(), world_size=4, shapes={x: (32, 64)})
    >>> len(cost.peak), sorted(cost.sent)
    (4, [(0, 1), (1, 2), (2, 3), (3, 0)])
    """
    job = SimulatedJob(entries, strategy, world_size, shapes or {}, precision, profile)
    if isinstance(job.strategy, Partial):
        return _partners(job, job.strategy, profile, traced)
    return _Play(job, profile, traced).run()


def _partners(job: SimulatedJob, strategy: Partial, profile: MachineProfile, traced: int) -> Cost:
    """The cost of as much training as one step of all ranks together would be."""
    played, nbytes = played_of(job, strategy, profile)
    peak = {rank: program.peak for program in job.programs for rank in program.ranks}
    note = (
        f"models come as far as by one step of all ranks in {1e3 * played.seconds:.3f} ms, with {played.noise:.2f} "
        "times the noise: as a noisy quadratic would, and both together make the time of a step"
    )
    time, peaks = played.seconds * played.noise, tuple(peak[rank] for rank in range(job.world_size))
    return Cost(time, peaks, sent_by(played, nbytes), timeline_of(played, traced), note)


@dataclass
class _Rendezvous:
    """One collective of a group: who has come, until when, and who waits for its end."""

    came: int = 0
    latest: float = 0.0
    nbytes: int = 0
    start: float = 0.0
    end: float | None = None
    asleep: list[_Rank] = field(default_factory=list)
    noted: list[_Rank] = field(default_factory=list)


class _Rank:
    """One rank at work: `steps` are (seconds of computing, name, bytes in the arena), and actions."""

    __slots__ = ("actions", "held", "meetings", "now", "place", "rank", "steps", "traced", "waits", "wire")

    def __init__(self, rank: int, traced: bool, steps: Sequence[Any]) -> None:
        self.rank, self.traced, self.steps = rank, traced, steps
        self.now, self.place, self.wire = 0.0, 0, 0.0
        self.meetings: dict[tuple[int, ...], int] = defaultdict(int)
        self.waits: dict[int, tuple[tuple[int, ...], int]] = {}
        self.actions: deque[Any] = deque()
        self.held: list[tuple[float, int]] = []


class _Play:
    def __init__(self, job: SimulatedJob, profile: MachineProfile, traced: int) -> None:
        self.job, self.profile = job, profile
        self.ranks: dict[int, _Rank] = {}
        self.peak = [0] * job.world_size
        for program in job.programs:
            costs = map(profile.seconds, program.order)  # communication without its wire
            plain = [*zip(costs, program.live, program.order, strict=True)]
            for rank in program.ranks:
                self.peak[rank] = program.peak
                self.ranks[rank] = _Rank(rank, rank < traced, self._of_rank(program, plain, rank, rank < traced))
        self.meetings: dict[tuple[int, ...], list[_Rendezvous]] = defaultdict(list)
        self.messages: dict[tuple[int, int], deque[tuple[float, float]]] = defaultdict(deque)
        self.awaited: dict[tuple[int, int], _Rank] = {}
        self.sent: dict[tuple[int, int], int] = defaultdict(int)
        self.events: list[Event] = []
        self.channels: dict[tuple[int, ...], Channel] = {}

    def _of_rank(self, program: RankProgram, steps: Sequence[Any], rank: int, traced: bool) -> list[Any]:
        """The steps of one rank; computing between two communications is one step unless it is traced."""
        slow = self.profile.speeds.get(rank, 1.0)
        found: list[Any] = [(slow * self.profile.overhead(program.fed), "feed and fetch", 0)]
        for seconds, live, node in steps:
            if traced or node.role is Role.COMMUNICATION or not isinstance(found[-1], tuple):
                found.append((slow * seconds, node.op.name, live))
            else:
                found[-1] = found[-1][0] + slow * seconds, "", 0
            if node.role is Role.COMMUNICATION:
                found.append([(node.op.name, action) for action in self.job.action(node, program, rank)])
        return found

    # -- playing -----------------------------------------------------------------------------------------------------

    def run(self) -> Cost:
        self.awake = deque(self.ranks.values())
        while self.awake:
            self._advance(self.awake.popleft())
        if stuck := [r for r in self.ranks.values() if r.place < len(r.steps) or r.actions]:
            raise GraphError(f"ranks {[r.rank for r in stuck[:8]]} wait for each other", fix="report this strategy")
        sent = dict(sorted(self.sent.items()))
        time = max(r.now for r in self.ranks.values())
        timeline = Timeline(tuple(sorted(self.events)), self._held())
        note = AT_MOST if any(asks_for_rows(program.order) for program in self.job.programs) else ""
        return Cost(time, tuple(self.peak), sent, timeline, note)

    def _held(self) -> dict[int, Held]:
        """What the traced ranks hold, in the order of time."""
        kept = {rank: p.fed + p.kept for p in self.job.programs for rank in p.ranks}
        return {r.rank: Held(kept[r.rank], tuple(r.held)) for r in self.ranks.values() if r.traced}

    def _advance(self, rank: _Rank) -> None:
        """Go on until the rank has to wait for another."""
        while True:
            while rank.actions:
                if not self._act(rank, *rank.actions[0]):
                    return
                rank.actions.popleft()
            if rank.place == len(rank.steps):
                return
            step = rank.steps[rank.place]
            rank.place += 1
            if isinstance(step, list):
                rank.actions.extend(step)
            else:
                seconds, name, live = step
                if rank.traced:
                    if not rank.held or rank.held[-1][1] != live:
                        rank.held.append((rank.now, live))
                    if seconds:
                        self.events.append(Event(rank.rank, COMPUTE, name, rank.now, rank.now + seconds))
                rank.now += seconds

    def _act(self, rank: _Rank, name: str, action: Communication) -> bool:
        """Whether the action is done; if not, the rank is woken when it can be."""
        if isinstance(action, SimulatedCollective):
            self._come(rank, action)
            if action.token != AT_ONCE:
                return True
            action = Wait(AT_ONCE)
            rank.actions[0] = name, action
        if isinstance(action, Wait):
            return self._wait(rank, action)
        if isinstance(action, Exchange):
            return self._exchange(rank, name, action)
        self._serve(rank, name, action)
        return True

    def _come(self, rank: _Rank, action: SimulatedCollective) -> None:
        """Join the collective; the last to come settles when it starts and ends."""
        group, meetings = action.group, self.meetings[action.group]
        number = rank.meetings[group]
        rank.meetings[group] += 1
        rank.waits[action.token] = group, number
        if number == len(meetings):
            meetings.append(_Rendezvous())
        meeting = meetings[number]
        meeting.came += 1
        meeting.latest, meeting.nbytes = max(meeting.latest, rank.now), max(meeting.nbytes, action.nbytes)
        if rank.traced:
            meeting.noted.append(rank)
        if meeting.came < len(group):
            return
        before = meetings[number - 1].end if number else 0.0
        meeting.start = max(meeting.latest, before or 0.0)
        meeting.end = meeting.start + self._channel(group).seconds(action.kind, len(group), meeting.nbytes)
        self._count(action.kind, group, meeting.nbytes)
        for other in meeting.noted:
            self.events.append(Event(other.rank, COMMUNICATION, action.kind, meeting.start, meeting.end))
        self.awake.extend(meeting.asleep)
        meeting.asleep.clear()
        meeting.noted.clear()

    def _wait(self, rank: _Rank, action: Wait) -> bool:
        group, number = rank.waits[action.token]
        meeting = self.meetings[group][number]
        if meeting.end is None:
            meeting.asleep.append(rank)
            return False
        rank.now = max(rank.now, meeting.end)
        return True

    def _exchange(self, rank: _Rank, name: str, action: Exchange) -> bool:
        """Send, then wait for what comes; the messages of one exchange leave one after the other."""
        arrival = rank.now
        for k, (to, nbytes) in enumerate(action.sends):
            link = self._channel((rank.rank, to))
            arrival += link.message(nbytes) - (link.message(0) if k else 0.0)
            key = rank.rank, to
            self.sent[key] += nbytes
            self.messages[key].append((rank.now, arrival))
            if (waiting := self.awaited.pop(key, None)) is not None:
                self.awake.append(waiting)
        for k, source in enumerate(action.recvs):
            key = source, rank.rank
            if not self.messages[key]:
                self.awaited[key] = rank
                rank.actions[0] = name, Exchange((), action.recvs[k:])
                return False
            left, came = self.messages[key].popleft()
            if rank.traced:
                self.events.append(Event(rank.rank, COMMUNICATION, f"{name} from {source}", left, came))
            rank.now = max(rank.now, came)
        return True

    def _serve(self, rank: _Rank, name: str, action: Serve) -> None:
        """Pushes leave without waiting, one after the other; what is pulled comes behind them."""
        link = self.profile.cluster.outer
        start = max(rank.now, rank.wire)
        rank.wire = start + link.message(action.sent + action.received) + (link.message(0) if action.received else 0.0)
        self.sent[rank.rank, SERVERS] += action.sent
        self.sent[SERVERS, rank.rank] += action.received
        if rank.traced and action.sent + action.received:
            self.events.append(Event(rank.rank, COMMUNICATION, name, start, rank.wire))
        if action.received:
            rank.now = rank.wire

    def _channel(self, ranks: tuple[int, ...]) -> Channel:
        if ranks not in self.channels:
            self.channels[ranks] = self.profile.cluster.link(ranks)
        return self.channels[ranks]

    def _count(self, kind: str, group: tuple[int, ...], nbytes: int) -> None:
        """Bytes of one collective by link; those of a ring go to the next in the group."""
        n = len(group)
        if kind == "all_to_all":
            for a, b in itertools.permutations(group, 2):
                self.sent[a, b] += nbytes // n
            return
        for a, b in zip(group, (*group[1:], group[0])):
            self.sent[a, b] += SENDS[kind](n, nbytes)

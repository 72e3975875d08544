"""How long a step takes under a strategy, and what it needs: the ranks' own instruction lists, played on a clock.

Computing takes the time that the profile says. A collective starts when all its ranks have arrived and the one before
it in their group has ended. A message arrives after those that its sender sent before it. `hetu.dist.VirtualClock`
charges the same. Left out: contention between groups, between ranks that share a link, and at the servers.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.errors import GraphError
from ...core.graph import Node
from ...core.op import Role
from ...look.timeline import Held
from ...ranges import AtLeast1, Count
from ...strategies.partners import Partial
from ...strategies.room import asks_for_rows
from ..costs.links import Channel, Cluster
from ..costs.profile import MachineProfile
from .instructions import (
    AT_ONCE,
    SENDS,
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

SERVERS = -1  # stands for the servers in `Cost.sent`
AT_MOST = "bytes are at most so many, as rows of servers are counted as if no id came twice and caches were full"
ENDED = object()


@dataclass(frozen=True)
class Cost:
    """One step: seconds; for each rank its peak of bytes; bytes over each directed link (source, target).

    `peak` counts the arena, the feeds' buffers, what a step returns, the variables with optimizer state, what calls of
    a CPU are bound to, on average of all calls, and of variables on servers caches and the rows and ids on their way,
    as many as if no id came twice. Left out is what does not grow with the model, such as the memory by which ranks of
    one host talk. The timeline has the first ranks only.
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
    play, peak = Play(profile.cluster), dict[int, int]()
    for program in job.programs:
        costs = map(profile.seconds, program.order)  # communication without its wire
        steps = [*zip(costs, program.live, program.order, strict=True)]
        for rank in program.ranks:
            peak[rank] = program.peak
            player = Player(rank, rank < traced, program.fed + program.kept)
            play.add(player, _steps(play, player, job, program, steps))
    time = play.run()
    peaks = tuple(peak[rank] for rank in range(world_size))
    note = AT_MOST if any(asks_for_rows(program.order) for program in job.programs) else ""
    return Cost(time, peaks, dict(sorted(play.sent.items())), play.timeline, note)


def _steps(
    play: Play, player: Player, job: SimulatedJob, program: RankProgram, steps: Sequence[tuple[float, int, Node]]
) -> Iterator[None]:
    """What one rank does in a step: it computes, with so many bytes in the arena, and communicates."""
    slow = job.profile.speeds.get(player.rank, 1.0)
    player.compute(slow * job.profile.overhead(program.fed), "feed and fetch", 0)
    for seconds, live, node in steps:
        player.compute(slow * seconds, node.op.name, live)
        for action in job.action(node, program, player.rank) if node.role is Role.COMMUNICATION else ():
            yield from play.act(player, node.op.name, action)


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
    """One collective of a group: who has come, until when, and when it ends."""

    came: list[Player] = field(default_factory=list)
    latest: float = 0.0
    nbytes: int = 0
    end: float | None = None
    asleep: list[Player] = field(default_factory=list)


class Player:
    """One rank at work: what time it is there, and if it is traced what it did and what it held beside `kept` bytes."""

    def __init__(self, rank: int, traced: bool, kept: int) -> None:
        self.rank, self.traced, self.kept = rank, traced, kept
        self.now = self.wire = 0.0
        self.meetings: dict[tuple[int, ...], int] = defaultdict(int)
        self.waits: dict[int, _Rendezvous] = {}
        self.events, self.held = list[Event](), list[tuple[float, int]]()

    def compute(self, seconds: float, name: str, live: int, lane: str = COMPUTE) -> None:
        """Take so long, with so many bytes in the arena."""
        if self.traced:
            if not self.held or self.held[-1][1] != live:
                self.held.append((self.now, live))
            self.note(lane, name, self.now, self.now + seconds)
        self.now += seconds

    def note(self, lane: str, name: str, start: float, end: float) -> None:
        if self.traced and end > start:
            self.events.append(Event(self.rank, lane, name, start, end))


class Play:
    """Players on one clock: each is a coroutine, which computes, and waits for others in `act`.

    `link` is what ranks communicate over, by default that of the cluster.
    """

    def __init__(self, cluster: Cluster, link: Callable[[tuple[int, ...]], Channel] | None = None) -> None:
        self.outer, self.channel = cluster.outer, functools.cache(link or cluster.link)
        self.work: dict[Player, Iterator[None]] = {}
        self.meetings: dict[tuple[int, ...], list[_Rendezvous]] = defaultdict(list)
        self.messages: dict[tuple[int, int], deque[tuple[float, float]]] = defaultdict(deque)
        self.awaited: dict[tuple[int, int], Player] = {}
        self.sent: dict[tuple[int, int], int] = defaultdict(int)

    def add(self, player: Player, work: Iterator[None]) -> None:
        self.work[player] = work

    def run(self) -> float:
        """Seconds until all have done their work."""
        at_work, self.awake = {*self.work}, deque(self.work)
        while self.awake:
            player = self.awake.popleft()
            if next(self.work[player], ENDED) is ENDED:
                at_work.remove(player)
        if stuck := sorted(player.rank for player in at_work):
            raise GraphError(f"ranks {stuck[:8]} wait for each other", fix="report this strategy")
        return max(player.now for player in self.work)

    @property
    def timeline(self) -> Timeline:
        """What the traced players did and held, in the order of time."""
        traced = [player for player in self.work if player.traced]
        events = sorted(event for player in traced for event in player.events)
        return Timeline(tuple(events), {p.rank: Held(p.kept, tuple(p.held)) for p in traced})

    def act(self, player: Player, name: str, action: Communication) -> Iterator[None]:
        """Communicate; yields whenever the player has to wait for another."""
        if isinstance(action, SimulatedCollective):
            self._come(player, action)
        if isinstance(action, Wait) or (isinstance(action, SimulatedCollective) and action.token == AT_ONCE):
            meeting = player.waits[action.token]
            while meeting.end is None:
                meeting.asleep.append(player)
                yield
            player.now = max(player.now, meeting.end)
        elif isinstance(action, Exchange):
            self._send(player, action)
            for source in action.recvs:
                key = source, player.rank
                while not self.messages[key]:
                    self.awaited[key] = player
                    yield
                left, came = self.messages[key].popleft()
                player.note(COMMUNICATION, f"{name} from {source}", left, came)
                player.now = max(player.now, came)
        elif isinstance(action, Serve):
            self._serve(player, name, action)

    def _come(self, player: Player, action: SimulatedCollective) -> None:
        """Join the collective; the last to come settles when it starts and ends."""
        group, meetings = action.group, self.meetings[action.group]
        number = player.meetings[group]
        player.meetings[group] += 1
        if number == len(meetings):
            meetings.append(_Rendezvous())
        meeting = player.waits[action.token] = meetings[number]
        meeting.came.append(player)
        meeting.latest, meeting.nbytes = max(meeting.latest, player.now), max(meeting.nbytes, action.nbytes)
        if len(meeting.came) < len(group):
            return
        before = meetings[number - 1].end if number else 0.0
        start = max(meeting.latest, before or 0.0)
        meeting.end = start + self.channel(group).seconds(action.kind, len(group), meeting.nbytes)
        self._count(action.kind, group, meeting.nbytes)
        for other in meeting.came:
            other.note(COMMUNICATION, action.kind, start, meeting.end)
        self.awake.extend(meeting.asleep)

    def _send(self, player: Player, action: Exchange) -> None:
        """The messages of one exchange leave one after the other."""
        arrival = player.now
        for k, (to, nbytes) in enumerate(action.sends):
            key = player.rank, to
            link = self.channel(key)
            arrival += link.message(nbytes) - (link.message(0) if k else 0.0)
            self.sent[key] += nbytes
            self.messages[key].append((player.now, arrival))
            if (waiting := self.awaited.pop(key, None)) is not None:
                self.awake.append(waiting)

    def _serve(self, player: Player, name: str, action: Serve) -> None:
        """Pushes leave without waiting, one after the other; what is pulled comes behind them."""
        start, link, nbytes = max(player.now, player.wire), self.outer, action.sent + action.received
        player.wire = start + link.message(nbytes) + (link.message(0) if action.received else 0.0)
        self.sent[player.rank, SERVERS] += action.sent
        self.sent[SERVERS, player.rank] += action.received
        player.note(COMMUNICATION, name, start, player.wire if nbytes else start)
        if action.received:
            player.now = player.wire

    def _count(self, kind: str, group: tuple[int, ...], nbytes: int) -> None:
        """Bytes of one collective by link; those of a ring go to the next in the group."""
        n = len(group)
        if kind == "all_to_all":
            for a, b in itertools.permutations(group, 2):
                self.sent[a, b] += nbytes // n
            return
        for a, b in zip(group, (*group[1:], group[0])):
            self.sent[a, b] += SENDS[kind](n, nbytes)

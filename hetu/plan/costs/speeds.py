"""How fast each rank of a job computes: measured before it runs, or seen in single steps that it makes anyway.

Before, all ranks make steps of the model at once. Slow machines and other programs on them count, so it is wall time. A
rank counts as slow only if it is so in each round: what is slow now and then is noise here. A timed step of a
running job does what any other does, in the same order, but reads the clock around each instruction that computes, so
neither waiting nor what a script does between steps counts. How much of that is the speed of a rank, and how much its
part of the work, is told by work that is equal on all ranks, behind the first timed steps of each division of the work.
Left out: GPUs, whose instructions end later than their calls.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ...core.errors import HetuError
from ...core.executor import Executor
from ...core.graph import Node, topological
from ...core.kernels import Call, Calls
from ...core.op import Role
from ...core.program import Program
from ...dist.comm.comm import Comm
from ...dist.comm.seat import Seat
from ...dist.cut.agreement import gathered, texts
from ...dist.cut.builders import DataParallel
from ...dist.cut.strategy import Strategy
from ...dist.layout.layout import Mesh
from ...ops import placeholder
from .profile import MachineProfile, Timing

BEFORE, ROUND = 7, 0.05  # rounds before a job runs, and seconds of one at least, on the fastest rank
EVEN = 1.5  # a rank that takes no longer than so many times the fastest is as fast
ROUNDS = 5  # timed steps in all of which a rank has to be slower, or faster, than was thought
CHANGED = 1.2  # by at least so many times
TINY = 4  # a rank that has less to do than another by so many times tells little of its speed by that


def measured_seconds(
    comm: Comm, entries: Sequence[Any], feeds: Mapping[str, Node], shapes: Mapping[str, Sequence[int]]
) -> list[float]:
    """Seconds in which each rank computes its part of a step; none for a model that cannot be split so.

    All ranks call this. Each trains for a while, on numbers that mean nothing, with values of its own.
    """
    seat = Seat(comm.rank, comm.world_size)
    feed = {name: ordinary(shapes[name], feeds[name].dtype) for name in feeds}
    try:
        executor = Executor(entries, strategy=DataParallel(), comm=seat)
        took = min(_seconds(executor, feed, 1) for _ in range(3))  # the first one compiles
    except HetuError:
        took = math.inf
    first = _of_all(comm, took)
    if not np.isfinite(first).all():
        return []
    steps = math.ceil(ROUND / float(first.min()))
    rounds = np.array([_of_all(comm, _seconds(executor, feed, steps)) for _ in range(BEFORE)])
    fastest = rounds.min(axis=1)
    factors = (rounds / fastest[:, None]).min(axis=0)
    return [float(np.median(fastest)) / steps * (float(f) if f > EVEN else 1.0) for f in factors]


def ordinary(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Numbers that are no ids out of range, and that do not underflow, which would take many times as long."""
    rng = np.random.default_rng(0)
    return rng.standard_normal(shape).astype(dtype) if dtype.kind == "f" else np.zeros(shape, dtype)


def _seconds(executor: Executor, feed: Any, steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        executor.run(feed)
    return time.perf_counter() - began


def _of_all(comm: Comm, seconds: float) -> np.ndarray:
    """What each rank has, once all are here."""
    return np.concatenate(gathered(comm, np.array([seconds])))


class EqualWork:
    """What all ranks compute alike: the instruction that takes most of this graph, which has the sizes of a rank's part
    of a batch, as often as all of it takes. All ranks make one."""

    def __init__(self, outputs: Sequence[Node], profile: MachineProfile, comm: Comm) -> None:
        nodes = [
            n for n in topological(outputs) if n.role is Role.COMPUTE and n.inputs and not isinstance(n.type, tuple)
        ]
        costs = {node: profile.seconds(node) for node in nodes}
        node = max(costs, key=lambda node: costs[node])
        self.times, self.comm = math.ceil(sum(costs.values()) / costs[node]), comm
        feed: Any = {f"x{k}": ordinary([int(n) for n in i.shape], i.dtype) for k, i in enumerate(node.inputs)}
        inputs = tuple(placeholder(name, value.shape, value.dtype) for name, value in feed.items())
        everywhere = Strategy(Mesh((comm.world_size,), ("ranks",)).layout())
        executor = Executor([node.op.make(inputs, node.attrs)], strategy=everywhere, comm=comm)
        executor.run(feed)
        self.calls, self.quiet = executor.program(feed).calls, executor.quiet

    def seconds(self) -> float:
        """Those that this rank takes for it."""
        began = self.comm.clock()
        for call in [*self.calls] * self.times:
            self.quiet.run(call)  # of numbers that no user has fed: nobody is to hear of their logarithms
        return self.comm.clock() - began


class TimedSteps:
    """Reads the clock of `comm` in the steps between `begin` and `end`, and teaches `profile` what they take.

    `kept` has the seconds of each instruction in the last of these steps.
    """

    def __init__(self, comm: Comm, profile: MachineProfile) -> None:
        self.comm, self.profile = comm, profile
        self.plain: dict[Program, Calls] = {}
        self.took, self.kept = dict[Node, float](), deque[dict[Node, float]](maxlen=ROUNDS)
        self.ran: Program | None = None

    def begin(self, programs: Iterable[Program]) -> None:
        """Time the next step that one of these programs runs."""
        self.took, self.ran = {}, None
        for program in programs:
            self.plain[program] = program.calls
            of = {id(call): s.node for s in program.steps if s.node.role is not Role.COMMUNICATION for call in s.calls}
            program.calls = [_Timed(call, of.get(id(call)), self, program) for call in program._flat_calls()]

    def end(self) -> float:
        """Seconds that this rank has computed since in the program that `ran`; it is None if nothing was timed."""
        for program, calls in self.plain.items():
            program.calls = calls
        self.plain.clear()
        self.kept.append(self.took)
        return sum(self.took.values())

    def learn(self, factors: Sequence[float]) -> None:
        """Have the profile know what instructions take by the last timed steps of all ranks, which take so many times
        as long as a fast one; a collective."""
        mine = MachineProfile(self.profile.device)
        of = [took for took in self.kept if took.keys() == self.took.keys()]
        usual = {node: median(took[node] for took in of) for node in self.took}  # few are interrupted, but for long:
        scale = median(sum(took.values()) for took in of) / (sum(usual.values()) or 1.0)
        for node, seconds in usual.items():
            mine.add(node, scale * seconds / factors[self.comm.rank])
        seen = defaultdict[str, list[Timing]](list)
        for text in texts(self.comm, mine.to_json()):
            for name, timing in MachineProfile.from_json(text).timings.items():
                seen[name].append(timing)
        found = {name: all_[0]._replace(seconds=median(t.seconds for t in all_)) for name, all_ in seen.items()}
        self.profile = replace(self.profile, timings=self.profile.timings | found, speeds=dict(enumerate(factors)))


class _Timed:
    """A call of a program, timed if it computes a node; `call` is what an error is looked up by."""

    __slots__ = ("call", "node", "program", "steps")

    def __init__(self, call: Call, node: Node | None, steps: TimedSteps, program: Program) -> None:
        self.call, self.node, self.steps, self.program = call, node, steps, program

    def __call__(self) -> None:
        steps, clock = self.steps, self.steps.comm.clock
        began = clock()
        self.call()
        if self.node is not None:
            steps.took[self.node] = steps.took.get(self.node, 0.0) + clock() - began
        steps.ran = self.program


class Speeds:
    """What is thought of the speed of each rank: `factors` on the time of the fastest one, by what is seen.

    In the first timed steps of a program ranks are compared at equal work. So it is known how much of that a step has
    for each rank, and later steps need nothing beside them. Factors change where each of `ROUNDS` steps shows two ranks
    of which one has become slower than the other.
    """

    def __init__(self, ranks: int) -> None:
        self.factors = np.ones(ranks)
        self.work = WeakKeyDictionary[Program, deque[np.ndarray]]()  # of steps, on the work that is equal
        self.begin()

    def begin(self) -> None:
        """Count nothing that was seen so far: the ranks do other work from now on."""
        self.seen = deque[np.ndarray](maxlen=ROUNDS)

    def unsure(self, program: Program) -> bool:
        """Whether the speed of ranks has to be seen at equal work: for lack of steps, or as one has little else."""
        found = self.work.get(program, ())
        usual = np.median(found, axis=0) if found else np.zeros(1)
        return len(found) < ROUNDS or bool(usual.max() > TINY * usual.min())

    def add(self, program: Program, seconds: np.ndarray, equal: np.ndarray) -> bool:
        """Another timed step, of each rank its seconds and, if `unsure`, those at equal work; whether that changes
        factors."""
        if self.unsure(program):
            self.work.setdefault(program, deque(maxlen=ROUNDS)).append(seconds / equal)
            pace = equal
        else:
            pace = seconds / np.median(self.work[program], axis=0)
        self.seen.append(pace / pace.min())
        later = np.array(self.seen) / self.factors
        if len(later) < ROUNDS or (later[:, :, None] / later[:, None]).min(axis=0).max() < CHANGED:
            return False
        found = np.median(self.seen, axis=0)
        before, self.factors = self.factors, np.where(found < CHANGED * found.min(), 1.0, found / found.min())
        return bool((before != self.factors).any())

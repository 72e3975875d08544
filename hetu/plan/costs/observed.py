"""How fast each rank of a running job computes: seen in single steps that it makes anyway, instruction by instruction.

A timed step does what any other does, in the same order, but reads the clock around each instruction that computes, so
neither waiting nor what a script does between steps counts. Left out: GPUs, whose instructions end later than their
calls; `speeds.py` has ranks compute what they else would not.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from weakref import WeakKeyDictionary

import numpy as np

from ...core.graph import Node
from ...core.kernels import Call, Calls
from ...core.op import Role
from ...core.program import Program
from ...dist.comm.comm import Comm
from ...dist.cut.agreement import texts
from .profile import MachineProfile, Timing
from .speeds import EVEN

ROUNDS = 5  # timed steps in all of which a rank has to be slower, or faster, than was thought
CHANGED = 1.2  # by at least so many times


class TimedSteps:
    """Reads the clock of `comm` in the steps between `begin` and `end`; `profile` tells what they ought to take.

    `kept` has the seconds of each instruction in the last of these steps.
    """

    def __init__(self, comm: Comm, profile: MachineProfile) -> None:
        self.comm, self.profile = comm, profile
        self.plain: dict[Program, Calls] = {}
        self.took, self.kept = dict[Node, float](), deque[dict[Node, float]](maxlen=ROUNDS)
        self.ought = WeakKeyDictionary[Program, float]()
        self.ran: Program | None = None

    def begin(self, programs: Iterable[Program]) -> None:
        """Time the next step that one of these programs runs."""
        self.took, self.ran = {}, None
        for program in programs:
            self.plain[program] = program.calls
            of = {id(call): s.node for s in program.steps if s.node.role is not Role.COMMUNICATION for call in s.calls}
            calls = program._flat_calls()
            program.calls = [_Timed(c, of[id(c)], self, program) if id(c) in of else c for c in calls]

    def end(self) -> tuple[float, float]:
        """Seconds that this rank has computed since, and how many it ought to have; both 0 if nothing was timed."""
        for program, calls in self.plain.items():
            program.calls = calls
        self.plain.clear()
        if self.ran is None:
            return 0.0, 0.0
        self.kept.append(self.took)
        if self.ran not in self.ought:
            self.ought[self.ran] = sum(map(self.profile.seconds, self.took))
        return sum(self.took.values()), self.ought[self.ran]

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
        self.ought.clear()


class _Timed:
    """A call of a program that is timed; `call` is what an error is looked up by."""

    __slots__ = ("call", "node", "program", "steps")

    def __init__(self, call: Call, node: Node, steps: TimedSteps, program: Program) -> None:
        self.call, self.node, self.steps, self.program = call, node, steps, program

    def __call__(self) -> None:
        steps, clock = self.steps, self.steps.comm.clock
        began = clock()
        self.call()
        steps.took[self.node] = steps.took.get(self.node, 0.0) + clock() - began
        steps.ran = self.program


class Speeds:
    """What is thought of the speed of each rank: `factors` on the time of the fastest one, by what is seen.

    Ranks that do equal work are compared with each other. For others a profile says how much more each has to do; it
    may be wrong by `EVEN` times, so a smaller difference that was there from the beginning, or has come with a new
    division of the work, is taken for its mistake. From then on each rank is compared with itself. Where ranks were
    slow, and none is by `EVEN` times any more, all are taken for healthy, until they do equal work again.

    >>> speeds = Speeds(3)
    >>> [speeds.add([1.0, 1.0, 2.0], [1.0, 1.0, 1.0]) for _ in range(5)], speeds.factors.tolist()
    ([False, False, False, False, True], [1.0, 1.0, 2.0])
    """

    def __init__(self, ranks: int) -> None:
        self.factors = np.ones(ranks)
        self.begin()

    def begin(self) -> None:
        """From now on the ranks do other work than before, or it is known better what they ought to take."""
        self.seen: list[np.ndarray] = []
        self.usual: np.ndarray | None = None  # what each rank would take if it were fast, by what it ought to

    def add(self, seconds: Sequence[float] | np.ndarray, ought: Sequence[float] | np.ndarray) -> bool:
        """Another timed step, of each rank its seconds and those it ought to take; whether the factors change."""
        self.seen = [*self.seen[1 - ROUNDS :], np.asarray(seconds) / ought]
        if len(self.seen) < ROUNDS:
            return False
        if self.usual is None:
            self.usual = self._usual(np.median(self.seen, axis=0), np.asarray(ought))
        relative = np.array([row / self.usual for row in self.seen])
        relative /= relative.min(axis=1, keepdims=True)
        slower, faster = relative > CHANGED * self.factors, relative * CHANGED < self.factors
        if not (slower.all(axis=0) | faster.all(axis=0)).any():
            return False
        found = np.median(relative, axis=0)
        found = np.where(found < CHANGED * found.min(), 1.0, found / found.min())
        if self.factors.max() > 1 and found.max() < EVEN and len({*ought}) > 1:
            found = np.ones_like(found)
        before, self.factors = self.factors, found
        return bool((before != found).any())

    def _usual(self, seen: np.ndarray, ought: np.ndarray) -> np.ndarray:
        off = seen / self.factors
        usual = np.where(off <= EVEN * off.min(), off, off.min())
        return np.array([usual[ought == mine].min() for mine in ought])

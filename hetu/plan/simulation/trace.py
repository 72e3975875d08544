"""A step as ranks really ran it, on a virtual clock: it measures what `simulate` predicts.

The ranks are threads that take turns, so computing takes what it would on a machine of a rank's own, and only the wire
is a model. Left out: parameter servers, which the clock does not know.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from ...core.executor import Executor
from ...core.graph import Node
from ...core.kernels import kernels
from ...core.op import Role
from ...core.program import Program
from ...dist.comm.clock import Link, Network, Sent, VirtualClock
from ...dist.comm.comm import Comm
from ...dist.comm.threads import run_ranks
from ...dist.cut.on_ranks import spread
from ...dist.cut.strategy import Strategy
from ...ranges import AtLeast1
from .timeline import COMMUNICATION, COMPUTE, Event, Timeline


def trace(
    entries: Sequence[Any],
    strategy: Any,
    feed: Mapping[Any, Any],
    *,
    world_size: AtLeast1,
    link: Link | Network | None = None,
    repeat: AtLeast1 = 5,
) -> Timeline:
    """The quickest of `repeat` steps of `entries` (what an executor is given), after one that compiles.

    A pass of a pipeline is one event, such as F0 or B0 for micro-batch 0; elsewhere equal operators in a row are.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (None, 4))
    >>> loss = ht.mean(ht.nn.Linear(4, 4)(x) ** 2)
    >>> entries = [loss, ht.optim.SGD(0.1).minimize(loss)]
    >>> step = trace(entries, ht.dist.DataParallel(), {x: [[1.0] * 4] * 2}, world_size=2)
    >>> sorted({(event.rank, event.lane) for event in step.events})
    [(0, 'communication'), (0, 'compute'), (1, 'communication'), (1, 'compute')]
    """

    turn = threading.Semaphore()

    def run(comm: Comm) -> list[list[Event]]:
        clock = VirtualClock(comm, link, turn=turn)
        try:
            executor = Executor(entries, strategy=strategy, comm=clock)
            executor.run(feed)
            program = executor.program(feed)
            name = _names(spread(executor.placement).strategy)
            return [_step(program, clock, name) for _ in range(repeat)]
        finally:
            clock.rest()

    with kernels("cpu").at_most(1):  # the clock sees only what a rank's own thread computes
        steps = [Timeline(tuple(sorted(chain.from_iterable(step)))) for step in zip(*run_ranks(world_size, run))]
    return min(steps, key=lambda step: step.seconds)


def _step(program: Program, clock: VirtualClock, name: Callable[[Node], str]) -> list[Event]:
    """One step on what lies in the feed buffers; times count from the barrier before it."""
    clock.barrier()
    began, rank = clock.now, clock.ranks[clock.rank]
    events, wire = list[Event](), list[Sent]()
    clock.note(wire)
    last = None
    for step in program.steps:
        start = clock.now - began
        clock.skip()
        for call in step.calls:
            call()
        end = clock.now - began
        if step.node.role is Role.COMMUNICATION:
            clock.progress()
            last = None
        elif last == name(step.node):
            events[-1] = events[-1]._replace(end=end)
        else:
            last = name(step.node)
            events.append(Event(rank, COMPUTE, last, start, end))
        clock.skip()
    clock.note(None)
    program.commit()
    return [*events, *(Event(rank, COMMUNICATION, what, a - began, b - began) for what, a, b in wire)]


def _names(strategy: Strategy) -> Callable[[Node], str]:
    """What the events of a step are called: passes in a pipeline, operators elsewhere."""
    moments = strategy.moments()
    return lambda node: moments.get(node.tags.get("event", 0), node.op.name)

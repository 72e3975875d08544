"""Ranks of which some compute slowly, on a virtual clock that counts operations: the same in every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import hetu as ht
from hetu.core import executor as core_executor
from hetu.core.op import Role
from hetu.core.program import Program, Step
from hetu.dist import Link, VirtualClock, run_ranks
from hetu.look.profiler import flops
from hetu.plan import Rebalance

FLOPS = 1e9  # operations that a healthy rank computes in a virtual second
WIRE = Link(latency=1e-9, bandwidth=1e12)  # hardly any time: the optimum is the sum of all speeds
Slow = Callable[[int], Sequence[float]]  # step -> how many times as long each rank takes


class SlowedClock(VirtualClock):
    """A clock that a rank sets by what it has to compute."""

    def __init__(self, comm: Any, slow: Slow) -> None:
        self.spent, self.step, self.slow = 0.0, 0, slow
        super().__init__(comm, WIRE, timer=lambda: self.spent)

    def compute(self, seconds: float) -> None:
        self.spent += seconds * self.slow(self.step)[self.rank]


class SlowedProgram(Program):
    """Each instruction sets the clock first."""

    def _bind(self, node: ht.Node) -> Step | None:
        step = super()._bind(node)
        if step is None or node.role is Role.COMMUNICATION or not isinstance(self.comm, SlowedClock):
            return step
        return replace(step, calls=(partial(self.comm.compute, flops(node) / FLOPS), *step.calls))


def steps_of(
    patch: Any, model: Callable[[], Any], strategy: Any, ranks: int, slow: Slow, steps: int, **options: Any
) -> tuple[list[float], list[float], Rebalance | None]:
    """The virtual seconds and the losses of so many steps, and who has rebalanced; with every=None nobody."""
    patch.setattr(core_executor, "Program", SlowedProgram)

    def run(comm: Any) -> tuple[list[float], list[float], Rebalance | None]:
        clock, (graph, feeds) = SlowedClock(comm, slow), model()
        executor = ht.Executor(graph, strategy=strategy, comm=clock)
        asked = {"every": 1} | options
        look = ht.plan.rebalance(executor, **asked) if asked["every"] else None
        seconds, losses = [], []
        for clock.step in range(steps):
            began = clock.now
            losses.append(float(executor.run("train", feeds[clock.step % len(feeds)])[0]))
            clock.barrier()
            seconds.append(clock.now - began)
            if look is not None:
                look(clock.step, losses[-1])
        return seconds, losses, look

    found = run_ranks(ranks, run)
    for _, losses, _ in found[1:]:
        assert losses == found[0][1]
    return found[0]

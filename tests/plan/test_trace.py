"""Steps that ranks really ran on a virtual clock, event by event."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import hetu as ht
from hetu.core.op import Role
from hetu.dist import DataParallel, Link, Pipeline, Schedule
from hetu.plan import Cluster, MachineProfile, simulate, trace
from hetu.plan.simulation.timeline import COMMUNICATION, COMPUTE

from ..dist.models import mlp

WIRE = Link(latency=1.0, bandwidth=math.inf)  # so long that computing does not count


def traced(strategy, world_size):
    graph, feeds = mlp()
    return (
        graph["train"],
        feeds[0],
        trace(graph["train"], strategy, feeds[0], world_size=world_size, link=WIRE, repeat=2),
    )


@pytest.mark.parametrize(("strategy", "ranks"), [(DataParallel(), 3), (Pipeline(2, 3), 2)])
def test_it_communicates_what_the_simulation_foretells(strategy, ranks):
    entries, feeds, timeline = traced(strategy, ranks)
    profile = MachineProfile(cluster=Cluster(inner=WIRE, outer=WIRE))
    cost = simulate(entries, strategy, profile, world_size=ranks, shapes=feeds)
    for rank in range(ranks):
        found, wanted = ([e for e in t.events if e[:2] == (rank, COMMUNICATION)] for t in (timeline, cost.timeline))
        assert len(found) == len(wanted) > 0
    assert timeline.seconds == pytest.approx(cost.time, abs=0.2)


def test_the_passes_of_a_pipeline_are_events_in_the_order_of_the_schedule():
    _, _, timeline = traced(Pipeline(2, 3), 2)
    for rank, passes in enumerate(Schedule.of("1f1b", 2, 3).lists):
        mine = sorted((e for e in timeline.events if e[:2] == (rank, COMPUTE)), key=lambda e: e.start)
        names = [e.name for e in mine if e.name[1:].isdigit()]
        assert list(dict.fromkeys(names)) == [f"{phase}{m}" for phase, m in passes]


def test_of_its_ranks_one_computes_at_a_time(monkeypatch):
    """Where all computed at once, each had what the others left it of cores and caches, and was timed so."""
    found = []

    def noted(program, clock, name):
        def look():
            found.append(clock._clock.turn.acquire(blocking=False))

        steps = [
            step if step.node.role is Role.COMMUNICATION else replace(step, calls=(look,)) for step in program.steps
        ]
        return timed(SimpleNamespace(steps=steps, commit=program.commit), clock, name)

    tracing = sys.modules[trace.__module__]
    timed = tracing._step
    monkeypatch.setattr(tracing, "_step", noted)
    traced(Pipeline(2, 3), 2)
    assert found and not any(found)


def test_a_rank_that_fails_leaves_its_turn_to_the_others():
    x = ht.placeholder("x", (None, 3))
    with pytest.raises(ht.errors.FeedError):
        trace([ht.mean(x)], DataParallel(), {"x": np.ones((4, 5))}, world_size=2)

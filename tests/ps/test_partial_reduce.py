"""The controller of partial reduce: sizes, deadlines, weights, and groups that keep all workers connected."""

from __future__ import annotations

import heapq
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu.core.errors import ArgumentError
from hetu.ps import ASP, Controller, Group
from hetu.ps.store.messages import Kind, Message
from hetu.ps.store.partial_reduce import connected

from .simulation import new_store


def simulate(speeds: list[float], group: int, until: int, jitter=()) -> tuple[list, float, list[int]]:
    """Workers that compute for `speeds` each, then wait for their group: (groups, time, iterations by worker)."""
    controller, jitter = Controller(len(speeds), group), list(jitter)
    events = [(speed, worker) for worker, speed in enumerate(speeds)]
    heapq.heapify(events)
    iterations, groups, now = [0] * len(speeds), [], 0.0
    while len(groups) < until:
        now, worker = heapq.heappop(events)
        made = controller.add(worker, iterations[worker], now)
        if made:
            groups.append(made)
            for member in made.members:
                iterations[member] += 1
                extra = jitter.pop() if jitter else 0
                heapq.heappush(events, (now + speeds[member] * (1 + extra), member))
    return groups, now, iterations


workers_and_group = st.integers(2, 8).flatmap(lambda w: st.tuples(st.just(w), st.integers(2, w)))


@settings(max_examples=150)
@given(workers_and_group, st.data())
def test_groups_keep_all_workers_connected(sizes, data):
    """Whoever is fast or slow, any (W - 1) / (P - 1) + 2 groups in a row connect everybody, and nobody starves."""
    workers, group = sizes
    speeds = data.draw(st.lists(st.sampled_from([1.0, 1.1, 3.0, 20.0]), min_size=workers, max_size=workers))
    jitter = data.draw(st.lists(st.floats(0, 2), max_size=100))
    groups, _, iterations = simulate(speeds, group, 40, jitter)
    span = -(-(workers - 1) // (group - 1)) + 2
    for i in range(len(groups) - span + 1):
        assert len(connected(set(range(workers)), [g.members for g in groups[i : i + span]])) == 1
    assert all(len(g.members) == group for g in groups)
    assert [g.number for g in groups] == list(range(1, 41)) and min(iterations) >= 1


def plain_bridge(self: Controller) -> list[int]:
    """The definition: who shares no part with any of the chosen, in most windows."""
    windows, chosen = [parts for _, parts in self._windows()], [next(iter(self.waiting))]
    while len(chosen) < min(self.group, len(self.waiting)):
        rest = [w for w in self.waiting if w not in chosen]
        new = [sum(not any({w, c} <= p for p in parts for c in chosen) for parts in windows) for w in rest]
        chosen.append(rest[new.index(max(new))])
    return chosen


@settings(max_examples=40)
@given(st.integers(2, 9), st.data())
def test_bridges_are_those_of_the_definition(workers, data):
    controller = Controller(workers, data.draw(st.integers(2, workers)))
    for step, worker in enumerate(data.draw(st.lists(st.integers(0, workers - 1), max_size=80))):
        if worker not in controller.waiting:
            controller.waiting[worker] = step, float(step)
            assert controller._bridge() == plain_bridge(controller)
            if len(controller.waiting) == controller.group:
                controller._decide(controller._bridge())


def test_sixty_four_workers_are_grouped_in_no_time():
    """A second for a few groups, while nobody else is answered, was what it took."""
    controller, begun = Controller(64, 16), time.process_time()
    for turn in range(20):
        for worker in range(64 - 16 * (turn % 2)):
            controller.add(worker, turn, 0.0)
    assert controller.formed > 50 and time.process_time() - begun < 3


def test_a_straggler_delays_only_itself():
    """A worker that takes 3x as long: over the same number of updates, all-reduce takes 3 time units a round."""
    _, time, iterations = simulate([1, 1, 1, 3], 2, 200)
    assert sum(iterations) * 3 / 4 / time >= 1.5
    _, time, iterations = simulate([1, 1, 1, 1], 2, 200)
    assert sum(iterations) / 4 / time >= 0.9


def test_stale_members_weigh_less_and_take_over_the_foremost_iteration():
    controller = Controller(3, 3, decay=0.5)
    assert controller.add(0, 10, 0.0) is controller.add(2, 8, 0.0) is None
    made = controller.add(1, 9, 0.0)
    assert made.members == (0, 1, 2) and made.iteration == 10
    assert made.weights == pytest.approx((4 / 7, 2 / 7, 1 / 7))


def test_the_deadline_lets_a_smaller_group_go():
    controller = Controller(4, 3, wait=1.0)
    controller.add(0, 0, 0.0)
    assert controller.overdue(5.0) is None  # one worker alone is no group
    controller.add(1, 0, 0.5)
    assert controller.overdue(0.9) is None
    assert controller.overdue(1.0).members == (0, 1)
    assert not controller.waiting


def test_groups_shrink_with_the_workers_that_are_left():
    controller = Controller(3, 3)
    controller.remove(2)
    controller.add(0, 0, 0.0)
    assert controller.add(1, 0, 0.0).members == (0, 1)
    controller.add(0, 1, 0.0)
    assert controller.remove(1).members == (0,)  # whoever waited for it goes on


def test_a_lost_worker_frees_its_partner():
    store = new_store(2, ASP(), lease=1.0)
    assert store.handle(Message(Kind.READY, worker=0, seq=3, epoch=1), 0.9) == []
    [answer] = store.tick(1.5)
    assert answer.worker == 0 and answer.ids.tolist() == [0]


def test_iterations_of_partial_reduce_are_not_clocks():
    store = new_store(2, ASP())
    assert store.handle(Message(Kind.READY, worker=0, seq=3, step=50, epoch=1), 0.0) == []
    answers = store.handle(Message(Kind.READY, worker=1, seq=1, step=49, epoch=1), 0.0)
    assert [(a.kind, a.step) for a in answers] == [(Kind.OK, 50)] * 2


def test_a_request_that_comes_again_gets_the_same_group():
    controller = Controller(2, 2)
    first, second = (Message(Kind.READY, worker=w, seq=4, step=w) for w in range(2))
    assert controller.ready(first, 0.0) == controller.ready(first, 0.0) == []
    answers = controller.ready(second, 0.0)
    assert [a.worker for a in answers] == [0, 1]
    [again] = controller.ready(first, 0.0)
    assert (again.seq, Group.of(again)) == (4, Group.of(answers[0]))
    assert controller.ready(Message(Kind.READY, worker=0, seq=5, step=2), 0.0) == []


def test_impossible_groups_are_refused():
    for group in (0, 1, 5):
        with pytest.raises(ArgumentError, match="groups"):
            Controller(4, group)

"""Ranks that are lost: what those that are left see, agree on and go on with, at every point at which one can die."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError
from hetu.dist import CommError, RankLostError, SerialComm, VirtualClock, run_ranks
from hetu.dist.comm.thread_world import Killed

from .losing import CHECKS, steps, summed


def die():
    raise Killed


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_threads(check):
    found = [made for made in run_ranks(4, lambda comm: check(comm, die)) if made is not None]
    assert found and all(made == found[0] for made in found)


STEPS = 3


def train(comm):
    """Steps that count only if all that are left have made them; what each gave, and who was there."""
    kept, pair = [], None
    while len(kept) < STEPS:
        made = -1
        try:
            pair = comm.split((0, 1)) if comm.rank < 2 < comm.world_size else None
            x = np.full(2, 1 << comm.ranks[comm.rank], np.int64)
            if pair is not None:
                pair.barrier()
            handle = comm.all_reduce_async(x, x)
            around = [(comm.rank + 1) % comm.world_size], [(comm.rank - 1) % comm.world_size]
            out = np.empty(1)
            if comm.world_size > 1:
                comm.exchange([(to, np.ones(1)) for to in around[0]], [(source, out) for source in around[1]])
            handle.wait()
            made = int(x[0])
        except RankLostError:
            comm.revoke()
        if comm.vote(made >= 0):
            assert made == sum(1 << rank for rank in comm.ranks)
            kept.append(comm.ranks)
        else:
            comm = comm.shrink()
    return kept


def deaths(n):
    """Every point of each rank, until the rank has none."""
    for rank in range(n):
        for point in range(1000):
            found = run_ranks(n, train, die_at={rank: point})
            if found[rank] is not None:
                break
            yield rank, point, [made for made in found if made is not None]
        assert point > 3 * STEPS


@pytest.mark.parametrize("n", [2, 3, 4])
def test_wherever_one_dies_the_others_have_made_the_same_steps(n):
    lost_in_a_step = set()
    for rank, point, kept in deaths(n):
        assert len(kept) == n - 1 and all(made == kept[0] for made in kept), (rank, point)
        full = sum(rank in ranks for ranks in kept[0])
        assert kept[0] == [tuple(range(n))] * full + [tuple(r for r in range(n) if r != rank)] * (STEPS - full)
        lost_in_a_step.add(full)
    assert lost_in_a_step == {*range(STEPS + 1)}


@pytest.mark.parametrize("first", range(0, 30, 7))
def test_two_deaths_at_any_distance(first):
    for second in range(0, 40, 3):
        found = run_ranks(4, train, die_at={1: first, 2: second})
        kept = [made for made in found if made is not None]
        assert kept and all(made == kept[0] for made in kept), (first, second)


def test_the_same_plan_gives_the_same_run():
    runs = [run_ranks(3, train, die_at={1: 8, 2: 17}) for _ in range(5)]
    assert all(run == runs[0] for run in runs)


COMMUNICATIONS = {
    "a collective": lambda comm: comm.barrier(),
    "messages": lambda comm: comm.exchange([(0, np.ones(1))], []),
}


@pytest.mark.parametrize("point", range(3))
@pytest.mark.parametrize("call", COMMUNICATIONS.values(), ids=COMMUNICATIONS)
def test_who_dies_by_plan_dies_there_also_where_the_others_have_left_by_then(call, point):
    revoked = threading.Event()

    def body(comm):
        if comm.rank == 2:
            assert revoked.wait(30)
            call(comm)
        comm.revoke()
        revoked.set()
        return comm.shrink().ranks

    assert run_ranks(3, body, die_at={2: point}) == [(0, 1), (0, 1), None]


def test_who_waits_joins_at_the_next_meeting():
    first, *others = run_ranks(2, lambda comm: steps(comm, 5), most=4)
    assert first == [((0, 1), ())] + [((0, 1, 2, 3), (2, 3))] * 4
    assert others == [first, [(), *first[1:]], [(), *first[1:]]]


def test_a_lost_rank_is_replaced_under_a_new_number():
    replaced = 0
    for point in range(120):
        found = run_ranks(3, lambda comm: steps(comm, 5), die_at={1: point}, most=3)
        assert found[0] == found[2] and len(found[0]) == 5
        if found[1] is not None:
            break
        if len(found) == 4:  # it was lost before the last meeting
            replaced += 1
            assert found[0][-1][0] == (0, 2, 3) and [s for s in found[3] if s] == [s for s in found[0] if 3 in s[0]]
    assert 20 < replaced < point < 120


def test_a_newcomer_may_be_lost_too():
    found = run_ranks(2, lambda comm: steps(comm, 5), die_at={2: 12}, most=3)
    assert found[0] == found[1] and found[2] is None
    assert found[0][1][0] == (0, 1, 2) and found[0][-1] == ((0, 1, 3), (3,))


def test_what_cannot_go_on_says_what_can():
    for comm in (SerialComm(), VirtualClock(SerialComm())):
        for call, args in ((comm.revoke, ()), (comm.shrink, ()), (comm.grow, ()), (comm.vote, (True,))):
            with pytest.raises(CommError, match=r"cannot go on when one is lost") as caught:
                call(*args)
            assert "heturun --elastic MIN:MAX" in str(caught.value)


def test_only_the_whole_group_shrinks():
    def body(comm):
        with pytest.raises(ArgumentError, match="shrink of 1 ranks split off from 2"):
            comm.split([comm.rank]).shrink()
        assert comm.split([comm.rank]).whole is comm

    run_ranks(2, body)


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("strategy", ["dp", "zero1", "zero3", None])
def test_a_rank_dies_in_the_step_that_is_said(strategy, step):
    begun = {rank: [] for rank in range(4)}

    def body(comm):
        x, w = ht.placeholder("x", (None, 4)), ht.variable("w", ht.init.ones, (4, 8))
        executor = ht.Executor([ht.optim.SGD(0.1).minimize(ht.mean((x @ w) ** 2))], strategy=strategy, comm=comm)
        for number in range(4):
            begun[comm.ranks[comm.rank]].append(number)
            executor.run({x: np.ones((12, 4), "float32")})
        return True

    found = run_ranks(4, body, die_in={2: step}, deadline=30)
    lost = strategy is not None  # without one no step communicates
    assert found == [True, True, None if lost else True, True]
    assert begun[2] == [*range(step + 1 if lost else 4)]
    assert all(begun[rank] == [0, 1, 2, 3] for rank in (0, 1, 3))


def test_a_loss_that_nobody_takes_up_is_the_error_of_the_run():
    with pytest.raises(RankLostError, match=r"(?s)barrier: rank \d waits for ranks .*: rank 1 is lost") as caught:
        run_ranks(3, lambda comm: comm.barrier(), die_at={1: 0})
    assert "comm.shrink()" in str(caught.value) and caught.value.lost == (1,)
    with pytest.raises(RankLostError, match="2 ranks as threads: ranks 0, 1 are lost"):
        run_ranks(2, lambda comm: die())


def test_what_was_told_to_who_is_lost_is_forgotten():
    def body(comm):
        if comm.rank == 1:
            die()
        comm.tell("here")
        return summed(comm.shrink())

    assert run_ranks(3, body, die_at={1: 1000}) == [[2, 2], None, [2, 2]]


def test_a_loss_that_nobody_meets_is_none():
    assert run_ranks(3, lambda comm: die() if comm.rank == 1 else comm.rank) == [0, None, 2]

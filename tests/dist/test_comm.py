"""One contract for all communicators, and what is particular to threads: deadlock, mismatch and failure are named."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hetu.core.errors import ArgumentError
from hetu.dist import CommError, DeadlineError, Link, SerialComm, VirtualClock, run_ranks
from hetu.dist.comm import agreement, line
from hetu.dist.comm.agreement import TOGETHER

from .contract import CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
class TestContract:
    def test_serial(self, check):
        check(SerialComm())

    @pytest.mark.sampled(4)
    @pytest.mark.parametrize("n", [2, 3, *(pytest.param(n, marks=pytest.mark.nightly) for n in (4, 8))])
    def test_threads(self, check, n):
        run_ranks(n, check)

    @pytest.mark.sampled(4)
    def test_virtual_clock(self, check):
        run_ranks(3, lambda comm: check(VirtualClock(comm)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("check", [check for check in CHECKS if check.__name__ != "send_and_recv_in_order"])
def test_rendezvous(check):
    run_ranks(4, check, rendezvous=True)


def swap(comm):
    """Both ranks send first: it works only as long as somebody buffers."""
    x, out = np.full(2, comm.rank), np.empty(2, int)
    comm.send(x, 1 - comm.rank)
    comm.recv(out, 1 - comm.rank)
    return out[0]


def test_rendezvous_finds_the_deadlock_that_buffers_hide():
    assert run_ranks(2, swap) == [1, 0]
    with pytest.raises(DeadlineError, match=r"waits for rank . to receive i64"):
        run_ranks(2, swap, rendezvous=True, deadline=0.1)


def test_reduction_is_added_in_the_order_of_the_ranks():
    values = np.array([1e8, 1.0, -1e8, 1.0], np.float32)  # another order gives another sum

    def body(comm):
        x = values[comm.rank : comm.rank + 1].copy()
        comm.all_reduce(x, x)
        return x[0]

    assert run_ranks(4, body) == [((values[0] + values[1]) + values[2]) + values[3]] * 4


def kept_after(calls: int) -> int:
    """How many texts, calls and messages three threads keep for each other, who have made so many."""

    def body(comm):
        x, groups = np.ones(2, np.float32), [comm, *([comm.split((0, 1))] if comm.rank < 2 else [])]
        for _ in range(calls):
            for group in groups:
                group.all_reduce(x, x, "max")
            comm.exchange([((comm.rank + 1) % 3, x)], [((comm.rank - 1) % 3, x.copy())])
        return sum(len(kept) for kept in vars(comm._world).values() if isinstance(kept, dict))

    return max(run_ranks(3, body))


def test_what_threads_keep_for_each_other_does_not_grow():
    few = kept_after(TOGETHER)
    assert kept_after(6 * TOGETHER) <= few + 3  # those that are under way


def test_a_rank_that_never_comes_is_named():
    def body(comm):
        if comm.rank != 2:
            comm.barrier()

    with pytest.raises(DeadlineError, match=r"barrier: rank . waits for ranks \[2\]"):
        run_ranks(3, body, deadline=0.1)


def test_different_collectives_are_named():
    def body(comm):
        x = np.zeros(3)
        if comm.rank == 0:
            comm.all_reduce(x, x)
        else:
            comm.broadcast(x)

    with pytest.raises(
        CommError, match=r"(?s)all_reduce sum f64.*broadcast from 0 f64|broadcast from 0 f64.*all_reduce sum f64"
    ) as caught:
        run_ranks(2, body, deadline=5.0)
    assert not isinstance(caught.value, DeadlineError)


def test_different_sizes_are_named():
    with pytest.raises(CommError, match=r"(?s)f64\[2\].*f64\[3\]|f64\[3\].*f64\[2\]"):
        run_ranks(2, lambda comm: comm.broadcast(np.zeros(2 + comm.rank)), deadline=5.0)

    def body(comm):
        if comm.rank:
            comm.recv(np.empty(3), 0)
        else:
            comm.send(np.empty(2), 1)

    with pytest.raises(CommError, match=r"sent f64\[2\], rank 1 receives f64\[3\]"):
        run_ranks(2, body, deadline=5.0)


def test_first_failure_ends_the_others_and_names_its_rank():
    waited = []

    def body(comm):
        if comm.rank == 1:
            raise ZeroDivisionError("mine")
        try:
            comm.barrier()
        except CommError as error:
            waited.append(str(error))
            raise

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        run_ranks(3, body)
    assert caught.value.__notes__ == ["raised on rank 1 of 3"]
    assert len(waited) == 2 and all("rank 1 has failed" in text for text in waited)


def test_a_rank_that_never_ends_is_named():
    stop = threading.Event()
    with pytest.raises(DeadlineError, match=r"ranks \[1\] of 2 still ran"):
        run_ranks(2, lambda comm: comm.rank and stop.wait(), deadline=0.05)
    stop.set()


@pytest.mark.parametrize("n", [0, 9])
def test_number_of_ranks(n):
    with pytest.raises(ArgumentError):
        run_ranks(n, lambda comm: None)


class Work:
    """A source of compute time that the test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


LINK = Link(latency=1.0, bandwidth=8.0)


def clocked(n, body):
    """`body(comm, work)` on n ranks; the virtual time of each at the end."""

    def rank_main(comm):
        work = Work()
        clock = VirtualClock(comm, LINK, timer=work)
        body(clock, work)
        return clock.now

    return run_ranks(n, rank_main)


def test_collective_costs_what_the_link_takes_after_the_slowest():
    def body(comm, work):
        work.seconds += comm.rank * 10
        x = np.zeros(8)
        comm.all_reduce(x, x)

    assert clocked(4, body) == [30 + 2 * 3 * (1.0 + 64 / 4 / 8)] * 4


def test_polling_a_library_is_no_work():
    class Polled(SerialComm):
        def progress(self):
            work.seconds += 3

    work = Work()
    clock = VirtualClock(Polled(), LINK, timer=work)
    work.seconds += 2
    clock.progress()
    work.seconds += 4
    assert clock.now == 6


def test_message_arrives_after_its_sender():
    def body(comm, work):
        if comm.rank == 0:
            work.seconds += 5
            comm.send(np.zeros(2), 1)
        else:
            comm.recv(np.empty(2), 0)

    assert clocked(2, body) == [5.0, 5 + 1 + 16 / 8]


def test_computing_hides_an_asynchronous_all_reduce():
    cost = 2 * (1.0 + 32 / 2 / 8)

    def body(comm, work):
        x, y = np.zeros(4), np.zeros(4)
        handles = [comm.all_reduce_async(x, x), comm.all_reduce_async(y, y)]
        work.seconds += 7
        for handle in handles:
            handle.wait()

    assert clocked(2, body) == [max(7, 2 * cost)] * 2  # the two follow each other on the link


def test_sub_groups_share_the_clock():
    def body(comm, work):
        work.seconds += 1
        if comm.rank < 2:
            comm.split((0, 1)).barrier()

    assert clocked(3, body) == [2.0, 2.0, 1.0]


def test_counts_are_compared_by_their_value_whatever_they_are():
    """What they add up to was remembered by value and made of their text, which is another for a number of NumPy."""

    def balance(kind):
        agreement._balance.cache_clear()
        line.mixed.cache_clear()
        return agreement._balance(0, (kind(1), kind(0)), (kind(0), kind(1)))

    assert balance(int) == balance(np.int64) == balance(bool)

"""Tables of compiled calls: their jobs divided among threads, at once from several threads, and after a fork."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time

import numpy as np
import pytest

import hetu as ht
from hetu.cpu_kernels import c_calls, openblas
from hetu.cpu_kernels.c_calls import CCall, CTable, joined
from hetu.cpu_kernels.compiled import build, source

DEADLINE = 60
pytestmark = pytest.mark.compiled

# Counts how often each job is done, by whom, and that scratch is the doer's own.
COUNT = """
#include <pthread.h>
void count(const Word* a, long long first, long long last, char* scratch) {
    long long *done = a[0].p, *doer = a[1].p;
    for (long long k = first; k < last; k++) {
        *(pthread_t*)scratch = pthread_self();
        for (volatile int i = 0; i < a[2].n; i++) {}
        done[k]++;
        doer[k] = *(long long*)scratch;
        if (*(pthread_t*)scratch != pthread_self()) done[k] += 1000;
    }
}
"""


@pytest.fixture(params=(4, 1, 2))  # fewer than there once were, too
def threads(request):
    before = openblas.get_threads()
    if before is None:
        pytest.skip("NumPy's OpenBLAS, which says how many threads there may be, is not there")
    openblas.set_threads(request.param)
    yield request.param
    openblas.set_threads(before)


def counting(jobs: int, grain: int, work: int = 0) -> tuple[CCall, np.ndarray, np.ndarray]:
    done, doer = np.zeros(jobs, np.int64), np.zeros(jobs, np.int64)
    made = source(COUNT)
    assert made is not None and build([made])
    return CCall(made, "count", (done, doer, work), jobs, grain, 64), done, doer


@pytest.mark.sampled(4)
@pytest.mark.parametrize("jobs, grain", [(0, 1), (1, 1), (7, 1), (7, 4), (7, 100), (1000, 1), (1003, 50)])
def test_every_job_is_done_once(threads, jobs, grain):
    calls = [counting(jobs, grain) for _ in range(5)]
    walk = CTable([call for call, _, _ in calls])
    for _ in range(20):
        walk()
    for _, done, _ in calls:
        assert (done == 20).all()
    assert openblas.get_threads() == threads


def test_work_is_divided_only_where_it_pays(threads):
    (whole, _, one), (cut, _, several) = counting(8, 8), counting(4000, 1, work=20000)
    walk = CTable([whole, cut])
    walk()
    assert len({*one.tolist()}) == 1 and one[0] in several
    assert threads == 1 or len({*several.tolist()}) > 1
    assert len({*several.tolist()}) <= threads


def test_without_functions_of_blas_there_are_as_many_threads_as_wanted(monkeypatch):
    """And a walk gives them back, as to BLAS."""
    monkeypatch.setattr(openblas, "function_of", lambda name: None)
    monkeypatch.setattr(openblas, "wanted", lambda: 2)
    c_calls._own_threads.cache_clear()
    try:
        call, done, doer = counting(4000, 1, work=20000)
        walk = CTable([call])
        walk()
        assert (done == 1).all() and len({*doer.tolist()}) == 2
        get, _ = c_calls._own_threads()
        assert ctypes.CFUNCTYPE(ctypes.c_int)(get)() == 2
    finally:
        c_calls._own_threads.cache_clear()


PARTS = """
void parts(const Word* a, long long first, long long last, char* scratch) {
    __atomic_fetch_add((long long*)a[0].p, 1, 0);
}
"""


@pytest.mark.parametrize("jobs, grain", [(3, 1), (5, 1), (7, 2), (23, 1), (1000, 1), (1000, 200)])
def test_each_thread_has_as_many_parts(threads, jobs, grain):
    """With one more, all but one of them would wait."""
    made, parts = source(PARTS), np.zeros(1, np.int64)
    assert made is not None and build([made])
    CTable([CCall(made, "parts", (parts,), jobs, grain)])()
    worth = min(jobs // grain, 4 * threads)
    assert parts[0] == (1 if threads == 1 else worth - (worth % threads if worth > threads else 0))


def test_several_callers_at_once(threads):
    calls = [counting(500, 1, work=100) for _ in range(6)]
    walks = [CTable([call]) for call, _, _ in calls]
    workers = [threading.Thread(target=lambda w=w: [w() for _ in range(50)]) for w in walks]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(DEADLINE)
    assert all((done == 50).all() for _, done, _ in calls)


THREADS_OF_BLAS = """
void most_threads(const Word* a, long long first, long long last, char* scratch) {
    for (volatile int i = 0; i < 100000; i++) {}
    const int now = ((int (*)(void))a[1].p)();
    if (*(long long*)a[0].p < now) *(long long*)a[0].p = now;
}
"""


def test_blas_has_one_thread_while_anybody_walks(threads):
    """Else a product has other bits where another walk has just ended."""
    made, most = source(THREADS_OF_BLAS), np.zeros((6, 1), np.int64)
    assert made is not None and build([made])
    get = openblas.address_of("openblas_get_num_threads")
    walks = [CTable([CCall(made, "most_threads", (one, get))] * 3) for one in most]
    workers = [threading.Thread(target=lambda w=w: [w() for _ in range(50)]) for w in walks]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(DEADLINE)
    assert (most == 1).all() and openblas.get_threads() == threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_threads_do_not_survive_a_fork_and_come_back():
    call, done, _ = counting(100, 1, work=1000)
    walk = CTable([call])
    walk()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            walk()
            os.write(write, b"done" if (done == 2).all() else b"wrong")
        finally:
            os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], DEADLINE)
    said = os.read(read, 100) if ready else b"nothing"
    os.close(read)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert said == b"done"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_in_the_middle_of_a_walk_has_as_many_threads_as_before(threads):
    """While the walk of another thread is under way BLAS has one, which nobody in the child gives back."""
    long, stop = CTable([counting(1, 1, work=1_000_000)[0]]), threading.Event()
    walker = threading.Thread(target=lambda: [long() for _ in iter(stop.is_set, True)])
    walker.start()
    until = time.monotonic() + DEADLINE
    while openblas.get_threads() > 1 and time.monotonic() < until:
        pass
    child = os.fork()
    if child == 0:
        signal.alarm(DEADLINE)
        long()
        os._exit(openblas.get_threads())
    stop.set()
    walker.join(DEADLINE)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == threads == openblas.get_threads()


IN_RANGE = """
void in_range(const Word* a, long long first, long long last, char* scratch) {
    *(long long*)a[1].p = *(long long*)a[0].p < 0;
}
"""


@pytest.mark.parametrize("wrong", [(), (0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_a_walk_stops_at_a_doubt_and_goes_on_where_a_check_finds_nothing(wrong):
    """Three checks, each before a call that counts; a check may raise or let the walk go on."""
    made, seen, calls, dones, values = source(IN_RANGE), [], [], [], [np.zeros(1, np.int64) for _ in range(3)]
    assert made is not None and build([made])
    for k, value in enumerate(values):
        doubt, (call, done, _) = np.zeros(1, np.int64), counting(1, 1)
        check = CCall(made, "in_range", (value, doubt), doubt=doubt, check=lambda k=k: seen.append(k))
        calls += [check, call]
        dones.append(done)
    walk = CTable(calls)
    for k in wrong:
        values[k][0] = -1
    walk()
    assert seen == [*wrong] and [int(done[0]) for done in dones] == [1, 1, 1]
    if wrong:
        calls[2 * wrong[0]].check = lambda: 1 // 0
        with pytest.raises(ZeroDivisionError):
            walk()
        assert walk.call is calls[2 * wrong[0]]
        assert [int(done[0]) for done in dones] == [2 if k < wrong[0] else 1 for k in range(3)]


def test_an_error_in_a_table_names_the_operator_and_the_line():
    ids, table = ht.placeholder("ids", (3,), "int64"), ht.variable("table", np.ones((4, 2), np.float32))
    executor = ht.Executor({"go": [ht.exp(ht.take(table, ids)) @ np.ones((2, 2), np.float32)]})
    executor.run("go", {ids: np.array([0, 1, 3])})
    with pytest.raises(ht.errors.ValueRangeError, match=r"index 4 at position \[2\]") as caught:
        executor.run("go", {ids: np.array([0, 1, 4])})
    assert "take" in str(caught.value) and "test_walk.py" in str(caught.value)


def test_neighbors_become_one_call():
    (a, _, _), (b, _, _), (c, _, _) = (counting(1, 1) for _ in range(3))
    seen: list[int] = []
    calls = joined([a, b, lambda: seen.append(1), c])
    assert calls is not None and len(calls) == 3


def test_what_cannot_be_compiled_is_said_and_not_joined():
    made = source("not C")
    assert made is not None
    call = CCall(made, "none", (), 1, 1, 0)
    with pytest.warns(RuntimeWarning, match="HETU_CC=0"):
        assert joined([call]) is None
    assert source("not C") is None
    with pytest.raises(OSError, match="could not be compiled"):
        call()


def test_a_block_has_addresses_integers_and_numbers():
    array = np.ones(3)
    made = source(COUNT)
    assert made is not None
    block = c_calls.CCall(made, "count", (array, 7, 0.5, np.float32(0.25)), 1, 1, 0).block()
    assert [*block[:2]] == [array.ctypes.data, 7] and [*block[2:].view(float)] == [0.5, 0.25]


def test_scratch_that_no_memory_is_large_enough_for_is_said_and_the_next_walk_goes_on(threads):
    small, done, _ = counting(7, 1)
    large, never, _ = counting(7, 1)
    large.scratch = 1 << 60
    with pytest.raises(MemoryError, match="1,152,921,504,606,846,976 bytes for each thread to work in, for count"):
        CTable([small, large])()
    CTable([small])()
    assert done.tolist() == [1] * 7 and not never.any()

"""Lives of workers that begin, end and follow each other, and requests that are refused: nobody waits in vain."""

from __future__ import annotations

import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hetu.ps import ASP, BSP, Parameter, ParameterStore, RefusedError, ServerProcess, server_function
from hetu.ps.store import messages
from hetu.ps.store.member import new_life
from hetu.ps.store.messages import Kind, Message

from .network import DEADLINE, ServerThread, connect, options
from .simulation import hello, new_store

ADD = {"rule": "add", "reduce": "sum"}
WORD = {"w": Parameter((2,), **ADD)}
ZEROS = {"w": np.zeros(2)}
ONES = np.ones(2, "f")


def test_a_restarted_worker_that_had_ended_a_clock_waits_for_its_turn():
    with ServerThread(options("bsp", 2)) as server, connect([server.address], 0) as slow:
        slow.create(WORD, ZEROS)
        with connect([server.address], 1) as first:
            first.create(WORD, ZEROS)
            first.push("w", ONES)
            first.clock()
            first.ping()
        with connect([server.address], 1) as second, ThreadPoolExecutor(1) as pool:
            second.create(WORD, ZEROS)
            assert second.step == 1
            pushed = pool.submit(lambda: second.push("w", 2 * ONES).wait())
            slow.ping()
            assert not pushed.done()
            slow.clock()
            pushed.result(timeout=DEADLINE)
            ends = [second.clock(), slow.clock()]
            for end in ends:
                end.wait()
            assert slow.pull("w").wait().tolist() == [3, 3]


def test_an_earlier_life_is_told_that_another_process_has_taken_its_place():
    with ServerThread(options("asp", 1)) as server, connect([server.address], retry=0.05) as first:
        first.create(WORD, ZEROS)
        with connect([server.address]) as second:
            for call in (first.ping, lambda: first.push("w", ONES).wait()):
                with pytest.raises(RefusedError, match=r"an earlier life of worker 0[\s\S]*one process"):
                    call()
            second.create(WORD, ZEROS)
            assert second.pull("w").wait().tolist() == [0, 0]


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_processes_that_are_one_worker_the_later_one_wins_whichever_comes_first(first):
    """At each of two servers: there was a time when both were refused."""
    store, lives = ParameterStore(1, ASP()), (100, 101)
    for life in (lives[first], lives[1 - first], *lives):
        answer = hello(store, 0, incarnation=life)
        assert answer.facts.get("code", "") == ("hello" if life == 100 and store.members[0].incarnation == 101 else "")
    assert store.members[0].incarnation == 101 and 100 < new_life() < messages.LARGEST


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGSTOP")
def test_a_worker_that_joins_while_another_server_is_slow_keeps_its_place():
    lease = 0.6
    with (
        ServerThread(options("bsp", 2, lease=lease)) as server,
        ServerProcess(options("bsp", 2, lease=lease)) as frozen,
        connect([server.address], 0) as looker,
        ThreadPoolExecutor(1) as pool,
    ):
        frozen.process.send_signal(signal.SIGSTOP)
        joined = pool.submit(connect, [server.address, frozen.address], 1)
        try:
            store = server.server.sessions.store
            while store.members[1].incarnation is None:
                looker.ping()
            begin = looker.status()[0]["seconds"]
            while (status := looker.status()[0])["seconds"] < begin + 2 * lease:
                assert "1" in status["clocks"]
                time.sleep(0.01)
        finally:
            frozen.process.send_signal(signal.SIGCONT)
        with joined.result(timeout=DEADLINE) as client:
            client.ping()


@pytest.mark.parametrize("on_loss", ["evict", "fail"])
def test_a_worker_that_never_comes_is_waited_for_as_long_as_stated(on_loss):
    store = ParameterStore(3, BSP(), lease=1.0, arrive=20.0, on_loss=on_loss)
    assert store.tick(90.0) == []  # nobody waits
    hello(store, 0, now=100.0), hello(store, 2, now=110.0)
    end = [Message(Kind.CLOCK, worker=worker, seq=1, epoch=1) for worker in (0, 2)]
    for now in (110.0, 119.0, 120.0):
        assert [*store.handle(end[0], now), *store.handle(end[1], now), *store.tick(now)] == []
    answers = store.tick(120.5)
    if on_loss == "fail":
        assert [answer.meta["message"] for answer in answers] == ["worker 1 did not come in 20 s and the job ends"] * 2
        return
    assert [(answer.kind, answer.worker) for answer in answers] == [(Kind.OK, 0), (Kind.OK, 2)]
    assert hello(store, 1, now=130.0).meta["clock"] == 1 and store.clocks.of == {0: 1, 1: 1, 2: 1}


def test_no_answer_to_an_earlier_life_reaches_the_next():
    store = new_store(1, ASP())
    store.moments.keep = lambda clock: None
    assert store.handle(Message(Kind.SNAPSHOT, seq=3, step=1, epoch=1), 0.0) == []
    hello(store, 0, incarnation=101)
    assert not store.moments.awaited


def test_a_refused_push_is_told_once_and_the_job_goes_on():
    with ServerThread(options("bsp", 1, memory_limit=80_000)) as server, connect([server.address]) as client:
        client.create({"w": Parameter((5000,), **ADD)}, {"w": np.zeros(5000)})
        ones = np.ones(5000, "f")
        pushes = [client.push("w", ones) for _ in range(4)]
        pushes[0].wait()
        for push in pushes[1:]:
            for _ in range(2):
                with pytest.raises(RefusedError, match="the limit is 80000"):
                    push.wait()
        client.clock().wait()
        pushes = [client.push("w", ones) for _ in range(4)]
        with pytest.raises(RefusedError, match="the limit is 80000"):
            client.clock()
        client.clock().wait()
        assert client.pull("w").wait()[0] == 2
        client.leave()


def test_a_refused_create_leaves_nothing_behind():
    """Neither names nor the blocks that one of the servers has made; tables go with the last that frees them."""
    with (
        ServerThread(options("asp", 2, memory_limit=4 << 20)) as small,
        ServerThread(options("asp", 2)) as large,
        connect([small.address, large.address], 0) as client,
        connect([small.address, large.address], 1) as other,
    ):
        for each in (client, other):
            each.create(WORD, ZEROS)
        before = [status["bytes"] for status in client.status()]
        much = 3 << 18
        for each in (client, other):
            with pytest.raises(RefusedError, match="the limit is"):
                each.create({"v": Parameter((much,)), "x": Parameter((much,))}, {n: np.zeros(much) for n in "vx"})
        assert [status["bytes"] for status in client.status()] == before
        for each in (client, other):
            each.create({"v": Parameter((3,), **ADD)}, {"v": np.ones(3)})
        client.push("v", np.ones(3)).wait()
        assert other.pull("v").wait().tolist() == [2, 2, 2]
        client.free(["v"]).wait()
        assert other.pull("v").wait().tolist() == [2, 2, 2]
        other.free(["v"]).wait()
        assert [status["bytes"] for status in client.status()] == before
        for each in (client, other):
            each.create({"u": Parameter((2,), **ADD)}, {"u": np.ones(2)})
        assert client.pull("u").wait().tolist() == [1, 1] and client.pull("w").wait().tolist() == [0, 0]


@server_function
def as_large_as_asked(table, ids=1, cols=1):
    return np.arange(ids) << 32, np.zeros((ids, cols), "u1")


def test_an_answer_beyond_the_limit_of_a_frame_is_refused():
    with ServerThread(options("asp", 1)) as server, connect([server.address]) as client:
        client.create(WORD, ZEROS)
        for asked in ({"ids": messages.FRAME_LIMIT // 8}, {"cols": messages.FRAME_LIMIT + 1}):
            with pytest.raises(RefusedError, match="an answer of .* bytes in one part, the limit is 67108864"):
                client.call("w", "as_large_as_asked", **asked).wait()
        assert client.call("w", "as_large_as_asked", cols=messages.FRAME_LIMIT).wait()[1].nbytes == messages.FRAME_LIMIT
        assert client.pull("w").wait().tolist() == [0, 0]

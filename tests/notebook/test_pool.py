"""Cells on real ranks: values there and back, failures, interrupts, and that nothing outlives the kernel."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hetu.teach.notebook.pool import Pool, RankError
from hetu.teach.notebook.wire import CannotTravel, pack, receive, send, travels, unpack

ROOT = Path(__file__).parents[2]
DEADLINE = 60.0


class Said(dict):
    """What each rank printed."""

    def __call__(self, rank, text):
        self[rank] = self.get(rank, "") + text


@pytest.fixture(scope="module")
def pool():
    """Two ranks; a test that ends them gives none back."""
    pools = [Pool(2)]

    def alive():
        if not pools[-1].is_alive:
            pools.append(Pool(2))
        return pools[-1]

    yield alive
    for each in pools:
        each.close()


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 0.1, "a\nb", [1, (2, "x")], {"a": [1.5], 3: None}, np.arange(6.0).reshape(2, 3), np.float32(2), np],
    ids=lambda value: type(value).__name__,
)
def test_values_travel(value):
    here, there = multiprocessing.Pipe()
    send(here, "cell", {"x": value}, number=1)
    message = receive(there)
    assert (message["kind"], message["number"]) == ("cell", 1)
    np.testing.assert_equal(message["values"]["x"], value)
    assert type(message["values"]["x"]) is type(value)


@pytest.mark.parametrize(
    "value", [lambda: 1, object(), [object()], np.array([object()]), {(1, 2): 3}], ids=lambda v: type(v).__name__
)
def test_other_values_stay(value):
    assert not travels(value)
    with pytest.raises(CannotTravel):
        pack(value, [])


def test_packed_dictionaries_are_not_taken_for_others():
    assert unpack(pack({"array": 0}, []), []) == {"array": 0}


def test_ranks_compute_together_and_rank_0_s_names_come_back(pool):
    said = Said()
    text = "from hetu.dist import world\nout = np.empty(1)\nworld().all_reduce(x + world().rank, out)\nout"
    outcome = pool().run(text, {"np": np, "x": np.ones(1), "unread": open}, said)
    assert not outcome.failures and outcome.values["out"] == 3.0
    assert said == {0: "array([3.])\n", 1: "array([3.])\n"}


def test_names_last_and_are_sent_again_only_when_changed(pool):
    names = {"start": np.zeros(2)}
    first = pool().run("count = start + 1", names, Said())
    names |= first.values
    again = pool().run("count[0] += 5; start[0] = 7; seen = count, start", names, Said())
    np.testing.assert_equal(again.values["seen"], (np.array([6.0, 1.0]), np.array([7.0, 0.0])))
    kept = pool().run("seen = start", names, Said())  # the same object here: what the ranks have is newer
    np.testing.assert_equal(kept.values["seen"], np.array([7.0, 0.0]))
    changed = pool().run("seen = start", {"start": np.full(2, 9.0)}, Said())
    np.testing.assert_equal(changed.values["seen"], np.full(2, 9.0))


def test_a_mistake_on_all_ranks_keeps_the_pool(pool):
    ranks = pool()
    outcome = ranks.run("a = 1\nb = nothing", {}, Said())
    assert set(outcome.failures) == {0, 1} and not outcome.waiting and ranks.is_alive
    text, line = outcome.failures[0]
    assert (
        line == 2
        and "rank.py" not in text
        and "b = nothing" in text
        and text.endswith("NameError: name 'nothing' is not defined\n")
    )
    assert ranks.run("a(", {}, Said()).failures[1][1] == 1


def test_a_failing_rank_is_named_with_the_lines_where_others_wait(pool):
    ranks = pool()
    outcome = ranks.run(
        "from hetu.dist import world\nif world().rank:\n    raise ValueError('mine')\nworld().barrier()", {}, Said()
    )
    assert list(outcome.failures) == [1] and outcome.failures[1][1] == 3
    assert outcome.waiting[0].endswith(":4: world().barrier()")
    assert not ranks.is_alive and pool() is not ranks
    assert not pool().run("1", {}, Said()).failures


def test_a_rank_that_ends_is_noticed(pool):
    outcome = pool().run("import os\nfrom hetu.dist import world\nif world().rank:\n    os._exit(3)", {}, Said())
    assert outcome.failures and "has ended" in next(iter(outcome.failures.values()))[0]


def test_an_interrupt_stops_all_ranks_and_keeps_them(pool):
    ranks = pool()

    pressed = []

    def interrupt(rank, text):
        if not pressed:
            pressed.append(rank)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ranks.run("import time\nprint('begun')\ntime.sleep(60)", {}, interrupt)
    assert ranks.is_alive
    said = Said()
    assert not ranks.run("'after'", {}, said).failures and set(said.values()) == {"'after'\n"}


def test_ranks_that_do_not_come_are_an_error(monkeypatch):
    monkeypatch.setenv("HETU_MPIEXEC", sys.executable)
    broken = Pool(2)
    with pytest.raises(RankError, match=r"0 of 2 ranks came"):
        broken.gather()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="watches foreign processes through Linux' pidfd")
def test_nothing_outlives_a_killed_kernel():
    script = (
        "from hetu.teach.notebook.pool import Pool\n"
        "pool = Pool(2, servers=1)\n"
        "def say(rank, text): print(text, end='', flush=True)\n"
        "print(pool.job.pid, flush=True)\n"
        "pool.run('import os\\nos.getpid()', {}, say)\n"
        "pool.run('while True: pass', {}, say)\n"
    )
    kernel = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        alive = {os.pidfd_open(int(kernel.stdout.readline())) for _ in range(3)}
        kernel.send_signal(signal.SIGKILL)
        until = time.monotonic() + DEADLINE
        while alive:
            ended, _, _ = select.select(alive, [], [], max(0.0, until - time.monotonic()))
            assert ended, "a process outlived the kernel"
            for process in ended:
                os.close(process)
            alive -= set(ended)
    finally:
        kernel.kill()
        kernel.stdout.close()
        kernel.wait()

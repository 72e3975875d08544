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

import hetu as ht
from hetu.teach.notebook.pool import Pool, RankError
from hetu.teach.notebook.wire import packed, receive, send, unpacked

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
    send(here, "cell", packed({"x": value})[0], number=1)
    message = receive(there)
    assert (message["kind"], message["number"]) == ("cell", 1)
    found = unpacked(message["values"], {})["x"]
    np.testing.assert_equal(found, value)
    assert type(found) is type(value)


def test_what_has_its_life_here_stays_and_the_rest_goes():
    data, stayed = packed({"ex": ht.Executor([ht.constant([1.0])]), "x": 1})
    assert unpacked(data, {}) == {"x": 1} and list(stayed) == ["ex"]


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


DEFINED = """
from dataclasses import dataclass
import hetu as ht

width = 3

@dataclass
class Sizes:
    rows: int
    columns: int = width

    def total(self):
        return self.rows * self.columns + bonus()

def bonus():
    return width

@ht.op
def shifted(xp, x, *, by=1.0):
    return x + by

@shifted.grad
def shifted_grad(g, out, x, *, by):
    return (g,)

class Scale(ht.nn.Layer):
    def __init__(self):
        super().__init__()
        with self.naming():
            self.weight = ht.variable("weight", 2.0, ())

    def forward(self, x):
        return shifted(x * self.weight, by=0.5)

sizes, table, layer = Sizes(4), {"bonus": bonus, "double": lambda x: 2 * x}, Scale()
x = ht.placeholder("x", (None,))
y = layer(x)
data = ht.data.ArrayDataset(np.arange(4.0), names=("a",))
"""


def test_what_cells_have_defined_goes_to_the_ranks_and_what_they_make_comes_back(pool):
    names = {"np": np, "__name__": "__main__"}
    exec(compile(DEFINED, "a cell", "exec"), names)
    cell = """
found = sizes.total(), table["bonus"](), table["double"](4), len(data), type(layer).__name__
ex = ht.Executor({"train": [ht.sum(y), ht.optim.SGD(1.0).minimize(ht.sum(y))], "eval": [y]})
before = ex.run("eval", {x: [1.0, 2.0]})[0]
history = ht.fit(ex, [(np.ones(2),)], epochs=1, inputs=[x])
z = y * 2
picture = ht.Graph((z,))._repr_svg_()
"""
    outcome = pool().run(cell, names, Said())
    assert not outcome.failures, outcome.failures
    assert outcome.values["found"] == (15, 3, 8, 4, "Scale") and outcome.values["before"].tolist() == [2.5, 4.5]
    assert (
        outcome.values["history"]["loss"] == [5.0]
        and "<svg" in outcome.values["picture"]
        and "ex" not in outcome.values
    )
    assert outcome.values["z"].inputs[0] is names["y"]  # the same node
    names |= outcome.values
    names["width"] = 5  # what a function reads goes again, too
    more = pool().run("again = sizes.total(), ex.run('eval', {x: [1.0]})[0], z.inputs[0] is y", names, Said())
    assert not more.failures, more.failures
    total, value, same = more.values["again"]
    assert total == 17 and value.tolist() == [0.5] and same


def test_pictures_of_rank_0_are_shown_as_pictures(pool):
    said = Said()
    outcome = pool().run("import hetu as ht\nht.History({'loss': [2.0, 1.0]})", {}, said)
    assert [data["image/svg+xml"][:4] for data in outcome.shown] == ["<svg"]
    assert said == {1: "<History of 2 epochs: loss 1.0000>\n"}


def test_what_cannot_go_is_told_with_the_reason(pool):
    outcome = pool().run("engine.run()", {"engine": ht.Executor([ht.constant([1.0])])}, Said())
    assert "name 'engine' is not defined" in outcome.failures[0][0] and "cannot pickle" in outcome.stayed["engine"]


def test_a_rank_that_waits_for_one_that_is_done_is_told_in_seconds(pool):
    """And not after the deadline of 300."""
    begun = time.monotonic()
    ranks = pool()
    outcome = ranks.run("from hetu.dist import world\nif world().rank:\n    world().barrier()", {}, Said())
    assert "waiting for others: rank 1; done with the cell: rank 0" in outcome.failures[0][0]
    assert outcome.waiting[1].endswith(":3: world().barrier()")
    assert not ranks.is_alive and time.monotonic() - begun < DEADLINE


def test_a_rank_that_computes_alone_is_waited_for(pool):
    text = """
import time
from hetu.dist import world
until = time.monotonic() + 7
while world().rank and time.monotonic() < until:
    pass
"""
    assert not pool().run(text, {}, Said()).failures


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

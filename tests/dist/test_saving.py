"""Checkpoints that the threads of several ranks write: whole under another strategy, on all ranks or on none."""

from __future__ import annotations

import sys
import threading
from concurrent import futures
from pathlib import Path

import numpy as np
import pytest

import hetu as ht
from hetu import checkpoint
from hetu.checkpoint import generations
from hetu.core.errors import CheckpointError
from hetu.dist import ZeRO, run_ranks, world

from ..killed import die_at
from ..pairs import nightly
from .test_checkpoint import on, parts, whole
from .test_fit import Job, measured
from .test_launch import heturun

DEADLINE = 60.0  # seconds


def saves(path, keep=2, steps=4):
    """Saves after each step, and goes on; what this rank then had of the step that is found."""

    def act(ex, feeds):
        checkpoints = ht.Checkpoints(ex, path, keep=keep)
        for step in range(steps):
            ex.run("train", feeds[step % len(feeds)])
            checkpoints.save({"step": step})
            had = parts(ex)
        ex.run("train", feeds[0])
        checkpoints.wait()
        return had

    return act


def loads(path, step=3):
    def act(ex, feeds):
        assert ex.load(path) == {"step": step}
        return parts(ex)

    return act


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


@pytest.mark.parametrize(
    ("written", "read"),
    [("zero3", "tensor"), ("zero x tensor", "alone"), ("alone", "zero3"), ("unequal", "data"), ("pipeline", "zero1")],
)
@pytest.mark.sampled(5)
def test_another_strategy_reads_the_newest(tmp_path, written, read):
    path = tmp_path / "run"
    before = whole(on(written, saves(path), model="mlp"))
    same(before, whole(on(read, loads(path), model="mlp")))
    on(read, loads(path / "3", step=2), model="mlp")
    on(read, saves(path), model="mlp")
    assert generations(path) == [7, 8] and len([*path.iterdir()]) == 2


def test_one_rank_that_cannot_write_is_told_on_all_and_the_saves_before_stay(tmp_path, monkeypatch):
    path, write = tmp_path / "run", checkpoint.write_part

    def write_part(folder, number, part, tensors):
        assert folder.name != "3" or part or not (path / "2").exists()  # its part would take the room
        if (folder.name, part) == ("2", 1):
            raise CheckpointError(f"{folder} is full", fix="make room")
        return write(folder, number, part, tensors)

    monkeypatch.setattr(checkpoint, "write_part", write_part)

    def act(ex, feeds):
        checkpoints = ht.Checkpoints(ex, path)
        for step in (1, 2):
            ex.run("train", feeds[0])
            checkpoints.save({"step": step})
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save({"step": 3})
        assert generations(path) == [1]
        checkpoints.save({"step": 4})
        checkpoints.wait()
        return str(caught.value)

    first, second = on("data", act, model="mlp")
    assert first.startswith(f"rank 1: {path / '2'} is full") and "test_saving.py" in second
    assert sorted(p.name for p in path.iterdir()) == ["1", "3"]  # what there was of the second is gone
    on("alone", loads(path, step=4), model="mlp")


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_save_that_a_lost_rank_has_not_written_is_told_and_the_next_one_is_whole(tmp_path, monkeypatch, lost):
    path, write = tmp_path / "run", checkpoint.write_one

    def write_one(folder, number, nbytes, part, *given):  # a thread of a process that is gone writes nothing
        return (folder.name, part) != ("2", lost) and write(folder, number, nbytes, part, *given)

    monkeypatch.setattr(checkpoint, "write_one", write_one)

    def act(comm):
        x, w = ht.placeholder("x", (None, 4)), ht.variable("w", ht.init.ones, (4, 6))
        ex = ht.Executor([ht.optim.Momentum(0.1).minimize(ht.mean((x @ w) ** 2))], strategy=ZeRO(3), comm=comm)
        checkpoints = ht.Checkpoints(ex, path)
        for step in range(1, 5):
            ex.run({x: np.full((6, 4), step, "float32")})
            checkpoints.save({"step": step})  # the second is under way as a rank dies in the third step
        checkpoints.wait()

    with pytest.warns(
        RuntimeWarning, match=r"run/2' was given up: a rank was lost before its part was written"
    ) as told:
        run_ranks(3, act, die_in={lost: 2})
    assert len(told) == 1 and generations(path) == [1, 3, 4]


@pytest.mark.parametrize("late", [0, 1, None])
def test_who_writes_last_makes_the_parts_a_checkpoint(tmp_path, monkeypatch, late):
    """No rank asks another; None: neither sees what the other has written, as may be on hosts that share a disk."""
    others, write, finish = threading.Event(), checkpoint.write_one, checkpoint.finish

    def write_one(folder, number, nbytes, part, *given):
        assert part != late or others.wait(DEADLINE)
        write(folder, number, nbytes, part, *given)
        if part != late:
            assert late is None or not checkpoint.exists(folder)
            others.set()

    def unseen(folder, number):
        if not threading.current_thread().name.startswith("writes"):
            finish(folder, number)

    monkeypatch.setattr(checkpoint, "write_one", write_one)
    if late is None:
        monkeypatch.setattr(checkpoint, "finish", unseen)

    def act(ex, feeds):
        checkpoints = ht.Checkpoints(ex, tmp_path)
        checkpoints.save({"step": 3})
        futures.wait([checkpoints.written], DEADLINE)
        ex.placement.comm.barrier()
        assert checkpoint.exists(tmp_path / "1") == (late is not None)
        checkpoints.wait()

    on("data", act, model="mlp")
    on("alone", loads(tmp_path), model="mlp")


def test_ranks_that_see_other_saves_load_that_of_rank_0(tmp_path, monkeypatch):
    on("data", saves(tmp_path), model="mlp")
    seen, of = checkpoint.newest_number, {}
    of_rank = lambda path: of[threading.get_ident()] if path == tmp_path else seen(path)  # noqa: E731
    monkeypatch.setattr(checkpoint, "newest_number", of_rank)

    def act(ex, feeds):
        of[threading.get_ident()] = 4 - ex.placement.rank
        return loads(tmp_path)(ex, feeds)

    on("data", act, model="mlp")


KILLS = [(2, 0, 1), (2, 0, 5), (2, 0, 13), (2, 1, 2), (2, 1, 3), (2, 1, 11), (4, 0, 16), (4, 3, 8)]


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "victim", "point"), [(2, 1, 9), *nightly(KILLS)])
def test_a_job_of_which_a_rank_is_killed_goes_on_from_a_whole_save(tmp_path, ranks, victim, point):
    script = ["python", "-m", "tests.dist.test_saving", tmp_path]
    killed = heturun("-w", ranks, *script, victim, point)
    assert killed.returncode == 137 and f"[rank {victim}] killed by SIGKILL" in killed.stderr, killed.stderr
    for number in generations(tmp_path):
        Job().executor.load(tmp_path / str(number))
    again = heturun("-w", ranks, *script, -1, 0)
    assert (again.returncode, again.stdout.count("equal to an unbroken run")) == (0, ranks), again.stderr
    assert len(generations(tmp_path)) == 2 == len([*tmp_path.iterdir()])


if __name__ == "__main__":
    folder, victim, point = Path(sys.argv[1]), *map(int, sys.argv[2:])
    job = Job(ZeRO(1))
    if world().rank == victim:
        die_at(point, folder)
    history = job.fit(4, checkpoint=folder, keep=2, resume=True)
    unbroken = Job(ZeRO(1))
    assert measured(unbroken.fit(4)) == measured(history) and unbroken.values() == job.values()
    print("equal to an unbroken run")

"""Checkpoints that are written while training goes on: what they hold, what stays, what is told, what a kill leaves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import hetu as ht
from hetu import checkpoint, files, job, saving
from hetu.core.errors import ArgumentError, CheckpointError

from . import killed
from .test_files import ROOM, full_disk

ROOT = Path(__file__).parent.parent
DEADLINE = 60.0  # seconds


def counting(size: int = 1) -> ht.Executor:
    """Each step adds 1."""
    w = ht.variable("w", np.zeros(size, "float32"))
    return ht.Executor({"train": [{w: w + 1.0}]})


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Files are written only once the event is set."""
    may, write = threading.Event(), files.replace_atomically

    def replace(*given: object) -> None:
        assert threading.current_thread() is not threading.main_thread(), "training writes files itself"
        assert may.wait(DEADLINE)
        write(*given)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "replace_atomically", replace)
        yield may
        may.set()


def names(folder: Path) -> list[str]:
    return sorted((path.name for path in folder.iterdir()), key=lambda name: (len(name), name))


def test_what_is_saved_is_of_the_step_at_which_it_was_asked_for(tmp_path, monkeypatch):
    ex = counting(1000)
    checkpoints = ht.Checkpoints(ex, tmp_path / "run")
    ex.run("train")
    cursor = {"step": 1}
    with held(monkeypatch) as may:
        checkpoints.save(cursor)
        cursor["step"] = 9
        for _ in range(5):
            ex.run("train")
        with pytest.raises(CheckpointError, match=r"run' has no manifest.json"):
            ex.load(tmp_path / "run")
        may.set()
        checkpoints.wait()
    assert ex.state["w"].max() == 6
    assert ex.load(tmp_path / "run") == {"step": 1}
    assert ex.state["w"].tolist() == [1.0] * 1000
    assert not job.endings or job.endings[-1] != checkpoints._join


def test_the_last_stay_and_the_next_run_counts_on(tmp_path):
    folder = tmp_path / "run"
    for first in (0, 5):
        ex = counting()
        checkpoints = ht.Checkpoints(ex, folder, keep=2)
        for step in range(first, first + 5):
            ex.state["w"] = np.full(1, step, "float32")
            checkpoints.save({"step": step})
        checkpoints.wait()
        checkpoints.wait()  # there is nothing to wait for
        assert names(folder) == [str(first + 4), str(first + 5)]
        for path, wanted in ((folder, first + 4), (folder / str(first + 4), first + 3)):
            assert ex.load(path) == {"step": wanted} and ex.state["w"] == wanted
    assert ht.load_weights(counting(), folder).taken == ("w",)


def test_a_save_waits_for_the_one_before_whose_copy_it_overwrites(tmp_path, monkeypatch):
    ex, at_work, write = counting(1 << 16), list[int](), files.replace_atomically
    checkpoints = ht.Checkpoints(ex, tmp_path, keep=9)

    def replace(*given: object) -> None:
        at_work.append(+1)
        write(*given)
        at_work.append(-1)

    monkeypatch.setattr(checkpoint, "replace_atomically", replace)
    for _ in range(9):
        ex.run("train")
        checkpoints.save()
    checkpoints.wait()
    assert at_work == [+1, -1] * 9
    for number in range(1, 10):
        ex.load(tmp_path / str(number))
        assert (ex.state["w"] == number).all()


def test_one_copy_is_in_memory_and_the_next_save_takes_its_place(tmp_path):
    ex = counting(1 << 20)
    size = ex.state.arrays["w"].nbytes
    checkpoints = ht.Checkpoints(ex, tmp_path / "run")
    tracemalloc.start()
    checkpoints.save()
    checkpoints.wait()
    first = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    checkpoints.save()
    checkpoints.wait()
    second = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert size < first < 1.2 * size and second < 0.2 * size


def test_a_plain_save_makes_no_copy(tmp_path):
    ex = counting(1 << 20)
    tracemalloc.start()
    ex.save(tmp_path / "run")
    assert tracemalloc.get_traced_memory()[1] < 0.2 * ex.state.arrays["w"].nbytes
    tracemalloc.stop()


@pytest.mark.parametrize("told_by", ["save", "wait"])
def test_what_the_thread_could_not_write_is_told_with_the_line_that_asked_for_it(tmp_path, told_by):
    ex = counting(ROOM)
    checkpoints = ht.Checkpoints(ex, tmp_path / "run")
    checkpoints.save({"step": 0})
    checkpoints.wait()
    ex.run("train")
    with full_disk():
        checkpoints.save({"step": 1})  # this line
        futures.wait([checkpoints.written], DEADLINE)
    text = r"run/2' cannot be written: File too large[\s\S]*test_saving.py[\s\S]*this line[\s\S]*fix: make room"
    with pytest.raises(CheckpointError, match=text):
        getattr(checkpoints, told_by)()
    checkpoints.wait()  # it is told once
    assert names(tmp_path / "run") == ["1"] and ex.load(tmp_path / "run") == {"step": 0}
    checkpoints.save({"step": 2})
    checkpoints.wait()
    assert ex.load(tmp_path / "run") == {"step": 2}


def test_whatever_the_thread_raises_is_told(tmp_path, monkeypatch):
    checkpoints = ht.Checkpoints(counting(), tmp_path / "run")
    monkeypatch.setattr(saving, "remove", lambda path: 1 / 0)
    for _ in range(4):
        checkpoints.save()
    with pytest.raises(CheckpointError, match=r"run/4' was not written: division by zero") as caught:
        checkpoints.wait()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


ENDS = """
import sys, numpy as np, hetu as ht
from tests.test_files import full_disk
ex = ht.Executor([ht.variable("w", np.ones(1 << 20, "float32"))])
checkpoints = ht.Checkpoints(ex, sys.argv[1])
if sys.argv[2] == "full":
    with full_disk():
        checkpoints.save({"step": 1})
        checkpoints.written.exception()
else:
    checkpoints.save({"step": 1})
if sys.argv[2] == "raises":
    raise RuntimeError("the user's")
"""


@pytest.mark.parametrize(("how", "code", "said"), [
    ("well", 0, "^$"), ("raises", 1, "RuntimeError: the user's\n$"),
    ("full", 1, r"CheckpointError: .*/1' cannot be written: File too large[\s\S]*fix: make room"),
])  # fmt: skip
def test_a_process_that_ends_finishes_its_save_or_tells_why_not(tmp_path, how, code, said):
    line = [sys.executable, "-c", ENDS, str(tmp_path / "run"), how]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=DEADLINE, cwd=ROOT)
    assert done.returncode == code and re.search(said, done.stderr), done.stderr
    assert ("1" in names(tmp_path / "run")) == (how != "full")


FORKS = """
import os, sys, threading
from hetu import checkpoint, files
import numpy as np, hetu as ht
w, may, write = ht.variable("w", np.zeros(1)), threading.Event(), files.replace_atomically
checkpoint.replace_atomically = lambda *given: (may.wait(), write(*given))
ex = ht.Executor({"train": [{w: w + 1.0}]})
checkpoints = ht.Checkpoints(ex, sys.argv[1])
checkpoints.save()
if sys.argv[2] == "written":
    may.set()
    checkpoints.wait()
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    may.set()
    checkpoints.wait()
else:
    may.set()
    ex.run("train")
    checkpoints.save()
    checkpoints.wait()
    assert ex.load(sys.argv[1] + "/2") == {} and ex.state["w"] == 1.0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("first", ["written", "under way"])
def test_a_forked_process_waits_for_no_thread_of_its_parent_and_saves_by_its_own(tmp_path, first):
    line = [sys.executable, "-W", "error", "-c", FORKS, str(tmp_path / "run"), first]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=DEADLINE, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2" in names(tmp_path / "run")


def at(path: Path) -> Callable[[], object]:
    return lambda: ht.Checkpoints(counting(), path)


@pytest.mark.parametrize(("make", "said"), [
    (lambda p: at(p / "none" / "run"), "none' does not exist"),
    (lambda p: (counting().save(p / "run"), at(p / "run"))[1], "run' is a checkpoint or another file"),
    (lambda p: ((p / "run").mkdir(), counting().save(p / "run"), at(p / "run"))[2], "run' is a checkpoint or another"),
    (lambda p: (at(p / "run")().save(), lambda: counting().save(p / "run"))[1], "run' holds numbered checkpoints"),
    (lambda p: (at(p / "run")(), lambda: counting().load(p / "run"))[1], "run' has no manifest.json, so no save was"),
])  # fmt: skip
def test_a_place_for_one_kind_is_none_for_the_other(tmp_path, make, said):
    act = make(tmp_path)
    while job.endings:  # what is being written
        job.endings.pop()()
    with pytest.raises(CheckpointError, match=said):
        act()


@pytest.mark.parametrize("inside", ["image.png", "notes/1.txt", ""])
def test_numbers_that_are_no_checkpoints_are_never_removed(tmp_path, inside):
    """As folders of images are, one of each class: all below the next number had gone."""
    mine = tmp_path / "7" / inside
    mine.parent.mkdir(exist_ok=True, parents=True)
    mine.write_text("mine")
    with pytest.raises(CheckpointError, match=f"'7' in {str(tmp_path)!r} is no checkpoint, where older numbers are"):
        at(tmp_path)()
    assert mine.read_text() == "mine"


# -- fit --------------------------------------------------------------------------------------------------------------


def fitted(epochs: int, **options: object) -> tuple[dict[str, list[float]], np.ndarray]:
    x, w = ht.placeholder("x", (None,)), ht.variable("w", np.ones(8, "float32"))
    loss = ht.mean(x) * ht.mean(w * w)
    with ht.scope("optimizer"):
        ex = ht.Executor({"train": [loss, ht.optim.Adam(0.1).minimize(loss)]})
    loader = ht.data.DataLoader(ht.data.ArrayDataset(np.arange(12, dtype="float32")), batch_size=4, shuffle=True)
    history = ht.fit(ex, loader, epochs=epochs, inputs=[x], progress=False, **options)
    return {name: row for name, row in history.items() if name != "seconds"}, ex.state["w"]


def test_fit_keeps_the_last_and_a_resumed_run_is_bit_for_bit_an_unbroken_one(tmp_path):
    folder, whole = tmp_path / "run", fitted(7)
    fitted(4, checkpoint=folder, keep=2, resume=True)
    assert names(folder) == ["3", "4"]
    history, w = fitted(7, checkpoint=folder, keep=2, resume=True)
    assert history == whole[0] and (w == whole[1]).all()
    assert names(folder) == ["6", "7"]


def test_fit_needs_a_folder_to_keep_some(tmp_path):
    with pytest.raises(ArgumentError, match=r"nothing to resume from, or to keep[\s\S]*fix: pass checkpoint=path"):
        fitted(1, keep=2)
    (tmp_path / "run").write_text("")
    with pytest.raises(CheckpointError, match="is a checkpoint or another file"):
        fitted(1, checkpoint=tmp_path / "run", keep=2)


# -- kills ------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
@pytest.mark.parametrize("way", killed.WAYS)
def test_a_kill_at_any_point_leaves_a_whole_save_and_the_next_one_no_litter(tmp_path, way):
    line = [sys.executable, "-m", "tests.killed", str(tmp_path), way]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "HETU_KERNELS": "0"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    points = [int(row.split()[2]) for row in done.stdout.splitlines()]
    assert len(points) == (killed.RANKS if way == "in_parts" else 1) and min(points) >= 4, done.stdout

"""A disk that is full while something is saved: the old file stays, none is half-written, and the error is ours."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import HetuError
from hetu.look.timeline import write_trace

ROOM = 1 << 17  # bytes that a file may have: as on a full disk, a write ends with an error in the middle


@contextmanager
def full_disk() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def executor(value: float) -> ht.Executor:
    return ht.Executor([ht.variable("w", np.full(ROOM, value, "float32"))])


def pairs(value: float) -> ht.data.BytePairs:
    return ht.data.BytePairs(
        {bytes([b]): b for b in range(256)} | {b"x" * k: 254 + k for k in range(2, 600 + int(value))}, []
    )


WRITERS: dict[str, Callable[[Path, float], object]] = {
    "a checkpoint": lambda folder, value: executor(value).save(folder / "run"),
    "a folder of ranks": lambda folder, value: (
        (folder / "run").mkdir(exist_ok=True),
        executor(value).save(folder / "run"),
    ),
    "a state": lambda folder, value: executor(value).state.save(folder / "run"),
    "a history in JSON": lambda folder, value: ht.History({"loss": [value] * ROOM}).save(folder / "run.json"),
    "a history in CSV": lambda folder, value: ht.History({"loss": [value] * ROOM}).save(folder / "run.csv"),
    "a trace": lambda folder, value: write_trace(folder / "run.json", [{"at": value}] * ROOM),
    "byte pairs": lambda folder, value: pairs(value).save(folder),
    "word pieces": lambda folder, value: ht.data.WordPieces({"[UNK]": 0} | {f"{k}": k for k in range(1, ROOM)}).save(
        folder
    ),
}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("what", WRITERS)
def test_a_full_disk_leaves_the_old_file_and_is_told(what: str, tmp_path: Path) -> None:
    WRITERS[what](tmp_path, 1.0)
    before = files(tmp_path)
    assert before
    with (
        full_disk(),
        pytest.raises(HetuError, match=r"cannot be written: File too large[\s\S]*test_files.py[\s\S]*fix: make room"),
    ):
        WRITERS[what](tmp_path, 2.0)
    assert files(tmp_path) == before  # and no litter
    WRITERS[what](tmp_path, 3.0)
    assert len(files(tmp_path)) == len(before)


def test_what_was_saved_before_the_disk_was_full_is_loaded(tmp_path: Path) -> None:
    ex = executor(1.0)
    ex.save(tmp_path / "run")
    ex.state["w"] = np.full(ROOM, 2.0, "float32")
    with full_disk(), pytest.raises(ht.errors.CheckpointError):
        ex.save(tmp_path / "run")
    ex.load(tmp_path / "run")
    assert float(ex.state["w"].max()) == 1.0


def test_a_run_that_finds_the_disk_full_can_be_resumed(tmp_path: Path) -> None:
    x, w = ht.placeholder("x", (None,)), ht.variable("w", np.zeros(ROOM, "float32"))
    loader = ht.data.DataLoader(ht.data.ArrayDataset(np.ones(4, "float32")), batch_size=2)

    def run(epochs: int, **options: object) -> ht.History:
        loss = ht.mean(x) * ht.mean(w)
        ex = ht.Executor({"train": [loss, {w: w + 1.0}]})
        history = ht.fit(ex, loader, epochs=epochs, inputs=[x], checkpoint=tmp_path / "run", progress=False, **options)
        assert float(ex.state["w"].max()) == 2 * epochs
        return history

    run(1)
    with full_disk(), pytest.raises(ht.errors.CheckpointError):
        run(2, resume=True)
    assert run(3, resume=True).epochs == 3


def test_what_is_no_file_is_not_replaced(tmp_path):
    """A device, or a pipe as here, would be a file afterwards for whoever else writes to it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(HetuError, match="is no file"):
        executor(1.0).save(pipe)
    assert pipe.is_fifo()

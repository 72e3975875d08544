"""`fit` on several ranks: it measures what one process does, decides as rank 0, shows one bar, and resumes."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import hetu as ht
from hetu import training
from hetu.core.errors import CheckpointError
from hetu.data import ArrayDataset, DataLoader
from hetu.dist import DataParallel, TensorParallel, ZeRO, run_ranks, world
from hetu.metrics import Accuracy, Mean

from .test_launch import heturun

RNG = np.random.default_rng(0)
X = RNG.standard_normal((50, 6)).astype("float32")
Y = np.argmax(X @ RNG.standard_normal((6, 3)), axis=1)
WAYS = {"data": DataParallel, "zero1": lambda: ZeRO(1), "zero3": lambda: ZeRO(3)}
WAYS["tensor"] = lambda: TensorParallel({"*/up/weight": 1, "*/up/bias": 0, "*/down/weight": 0})


class Job:
    """A classifier with dropout, its data in uneven batches, and what a rank of it does."""

    def __init__(self, strategy=None, comm=None, *, seed=0):
        x, t = ht.placeholder("x", (None, 6)), ht.placeholder("t", (None,), "int64")
        with ht.scope("model"):
            h = ht.dropout(ht.nn.Linear(6, 8, activation=ht.relu, name="up")(x), 0.2)
            y = ht.nn.Linear(8, 3, name="down")(h)
            loss = ht.mean(ht.softmax_cross_entropy(y, t))
            graphs = {"train": [loss, ht.optim.Adam(0.05).minimize(loss)], "eval": [loss, y]}
        self.inputs = x, t
        self.executor = ht.Executor(graphs, seed=seed, strategy=strategy, comm=comm)
        self.loader = DataLoader(ArrayDataset(X, Y), batch_size=12, shuffle=True, seed=3, prefetch=0)
        self.test = DataLoader(ArrayDataset(X[:20], Y[:20]), batch_size=8)

    def fit(self, epochs, **options):
        options = {"validate": ("eval", self.test), "metrics": {"accuracy": Accuracy()}} | options
        return ht.fit(self.executor, self.loader, epochs=epochs, inputs=self.inputs, **options)

    def values(self):
        """This rank's part of every variable, as bytes."""
        return {name: array.tobytes() for name, array in self.executor.state.items()}


def on(ranks, act, way="data"):
    return run_ranks(ranks, lambda comm: act(Job(WAYS[way](), comm)))


def measured(history):
    return {name: values for name, values in history.items() if name != "seconds"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_it_measures_what_one_process_measures(way):
    alone = measured(Job().fit(3))
    first, second = (measured(history) for history in on(2, lambda job: job.fit(3), way))
    assert first == second  # bit for bit
    assert first["val_accuracy"] == alone["val_accuracy"]
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(first[name], alone[name], atol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["data", "zero3"])
def test_a_resumed_run_is_bit_for_bit_an_unbroken_one(tmp_path, way):
    path = tmp_path / "run"

    def broken(comm):
        first = Job(WAYS[way](), comm)
        first.fit(2, checkpoint=path, resume=True)  # there is none yet
        assert {f.name for f in path.iterdir()} >= {"manifest.json", f"save2-part{comm.rank}.safetensors"}
        second = Job(WAYS[way](), comm, seed=9)
        return measured(second.fit(4, checkpoint=path, resume=True)), second.values()

    whole = on(2, lambda job: (measured(job.fit(4)), job.values()), way)
    assert run_ranks(2, broken) == whole
    assert Job().fit(4, checkpoint=path, resume=True).epochs == 4  # one process sees the end of it too


@pytest.mark.parametrize("named", ["checkpoint", "best"])
def test_where_a_file_is_ranks_are_told_before_the_first_step(tmp_path, named):
    """They save to a folder; it was told when all that the epoch had learned was lost."""
    (tmp_path / "run").write_bytes(b"")
    steps = []
    options = {named: tmp_path / "run", "after_step": lambda step, loss: steps.append(step)}
    with pytest.raises(CheckpointError, match="is a file, ranks save to a folder"):
        on(2, lambda job: job.fit(1, **options))
    assert not steps


def test_a_save_that_was_never_finished_is_not_resumed(tmp_path):
    (tmp_path / "run").mkdir()
    assert on(2, lambda job: job.fit(1, checkpoint=tmp_path / "run", resume=True).epochs) == [1, 1]


class Diverging(Mean):
    """A metric of which every rank has another opinion: on rank 0 the second epoch is best, elsewhere the last."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.epoch = rank, 0

    def update(self, *_):
        self.count = 1

    def result(self):
        self.epoch += 1
        return [1.0, 5.0, 4.0, 3.0, 2.0][self.epoch - 1] if self.rank == 0 else float(self.epoch)


def test_all_ranks_decide_as_rank_0(tmp_path):
    def act(comm):
        job, seen = Job(DataParallel(), comm), []
        options = {"metrics": {"own": Diverging(comm.rank)}, "monitor": "val_own", "maximize": True, "patience": 2}
        history = job.fit(
            5, **options, best=tmp_path / "best", after_epoch=lambda h: seen.append((h.epochs, h["val_own"][-1]))
        )
        return history["val_own"], history["seconds"], seen

    first, second = run_ranks(2, act)
    assert first == second and first[0] == [1.0, 5.0, 4.0, 3.0]
    assert json.loads((tmp_path / "best" / "manifest.json").read_text())["save"] == 2


def test_one_bar(capsys, monkeypatch):
    monkeypatch.setattr("hetu.progress.crowd", lambda: 0.0)  # else the bar may tell of one
    on(2, lambda job: job.fit(1, progress=True))
    lines = capsys.readouterr().err.replace("\r", "\n").split("\n")
    assert len([line for line in lines if line.startswith("epoch 1/1   0%")]) == 1
    assert "val_accuracy" in lines[-2]


def test_ctrl_c_on_one_of_several_ranks_is_not_put_off():
    """The main thread is a rank of two here, with nobody else there, so it gets no further than its first wait."""
    job = Job()
    assert job.executor.placement.world_size == 1
    job.executor.placement.world_size = 2
    before = signal.getsignal(signal.SIGINT)
    with training._deferred_interrupt(alone=job.executor.placement.world_size == 1) as interrupted:
        assert signal.getsignal(signal.SIGINT) is before and not interrupted()


def test_under_heturun(tmp_path):
    """Resumes after a rank was killed in the second epoch."""
    script = ["python", "-m", "tests.dist.test_fit", tmp_path / "run"]
    job = heturun("-w", 2, *script, "killed")
    assert job.returncode == 137 and "[rank 1] killed by SIGKILL" in job.stderr
    job = heturun("-w", 2, *script, "resumed")
    assert (job.returncode, job.stdout.count("equal to an unbroken run")) == (0, 2)
    assert "[rank 0] epoch 3/3 [" in job.stderr and "[rank 1]" not in job.stderr


if __name__ == "__main__":
    path, way = sys.argv[1:]
    job = Job(ZeRO(1))

    def kill_rank_1(history):
        if way == "killed" and history.epochs == 2 and world().rank == 1:
            signal.raise_signal(signal.SIGKILL)

    history = job.fit(3, checkpoint=Path(path), resume=True, progress=True, after_epoch=kill_rank_1)
    whole = Job(ZeRO(1))
    assert measured(whole.fit(3)) == measured(history) and whole.values() == job.values()
    print("equal to an unbroken run")

"""`fit`: what it measures, when it stops, and that a resumed run is bit for bit an unbroken one."""

from __future__ import annotations

import csv
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import hetu as ht
from hetu import metrics, optim, schedules
from hetu.core import errors
from hetu.data import ArrayDataset, DataLoader
from hetu.look.history import History
from hetu.training import fit

Batch = tuple[np.ndarray, ...]
RNG = np.random.default_rng(0)
X = RNG.standard_normal((50, 4)).astype("float32")
Y = X @ RNG.standard_normal((4, 1)).astype("float32")


class Regression:
    """A small network with dropout and Adam, and its data: 5 batches an epoch."""

    def __init__(self, data: ArrayDataset | None = None, *, seed: int = 0) -> None:
        with ht.scope("model"):
            self.inputs = ht.placeholder("x", (None, 4)), ht.placeholder("t", (None, 1))
            x, t = self.inputs
            first = ht.variable("first", ht.init.he_normal, (4, 8))
            second = ht.variable("second", ht.init.he_normal, (8, 1))
            y = ht.dropout(ht.relu(x @ first), 0.3) @ second
            loss = ht.mean(ht.square(y - t))
            noisy = loss + ht.mean(ht.normal((3,)))  # validation may use random numbers too
            updates = optim.Adam(schedules.cosine(0.05, steps=30)).minimize(loss)
        self.executor = ht.Executor({"train": [loss, updates], "eval": [noisy, y]}, seed=seed)
        self.data = ArrayDataset(X, Y) if data is None else data
        self.loader = DataLoader(self.data, batch_size=10, shuffle=True, seed=3, prefetch=0)
        self.test = DataLoader(ArrayDataset(X[:15], Y[:15]), batch_size=10)

    def fit(self, epochs: int, **options: object) -> History:
        options = {"validate": ("eval", self.test)} | options
        return fit(self.executor, self.loader, epochs=epochs, inputs=self.inputs, **options)


class Interrupting(ArrayDataset):
    """Presses Ctrl-C while batch number `at` is gathered, and as many more times as `times` says."""

    __slots__ = ("at", "calls", "times")

    def __init__(self, at: int, times: int = 1) -> None:
        super().__init__(X, Y)
        for name, value in (("at", at), ("times", times), ("calls", 0)):
            object.__setattr__(self, name, value)

    def __getitem__(self, rows: object) -> Batch:
        object.__setattr__(self, "calls", self.calls + 1)
        if self.calls == self.at:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)
        return super().__getitem__(rows)


class Interrupted(DataLoader):
    """Presses Ctrl-C after its first batch, once."""

    pressed = False

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            yield batch
            if not self.pressed:
                self.pressed = True
                signal.raise_signal(signal.SIGINT)


class Error(metrics.Mean):
    """The mean absolute error."""

    def update(self, prediction: np.ndarray, target: np.ndarray) -> None:
        assert prediction.shape == target.shape
        super().update(np.abs(prediction - target))


def same(a: Regression, b: Regression) -> None:
    assert list(a.executor.state) == list(b.executor.state)
    for name, value in a.executor.state.items():
        assert value.tobytes() == b.executor.state[name].tobytes(), name
    assert a.loader.state() == b.loader.state()


def measured(history: History) -> dict[str, list[float]]:
    return {name: values for name, values in history.items() if name != "seconds"}


# -- learning and measuring ------------------------------------------------------------------------------------------


def test_it_learns_and_measures() -> None:
    model = Regression()
    history = model.fit(20, metrics={"error": Error()})
    assert list(history) == ["loss", "val_loss", "val_error", "seconds"]
    assert history.epochs == 20 and all(len(values) == 20 for values in history.values())
    assert history["loss"][-1] < 0.5 * history["loss"][0] and history["val_error"][-1] < history["val_error"][0]


def test_losses_are_means_over_rows_not_over_batches() -> None:
    x = ht.placeholder("x", (None,))
    w = ht.variable("w", 0.0, ())
    executor = ht.Executor({"train": [ht.mean(x), {w: w + 0.0}], "eval": [ht.mean(x)]})
    batches = [([1.0, 2.0, 3.0],), ([10.0],)]
    history = fit(executor, batches, epochs=1, inputs=["x"], validate=("eval", batches))
    assert history["loss"] == history["val_loss"] == [4.0]


def test_two_runs_with_one_seed_are_equal() -> None:
    a, b, c = Regression(), Regression(), Regression(seed=1)
    assert measured(a.fit(2)) == measured(b.fit(2)) != measured(c.fit(2))
    same(a, b)


# -- stopping early --------------------------------------------------------------------------------------------------


def scripted(losses: list[float]) -> tuple[ht.Executor, list[Batch], tuple[str, list[Batch]]]:
    """An executor whose `val_loss` in epoch i is losses[i]."""
    w, table = ht.variable("w", 0, (), "int64"), ht.constant(value=np.array([*losses, np.nan]))
    x = ht.placeholder("x", (None,))
    now = ht.sum(ht.take(table, w))
    executor = ht.Executor({"train": [ht.sum(x), {w: w + 1}], "eval": [ht.take(table, w - 1) + 0 * ht.sum(x), now]})
    batch = [(np.zeros(1, "float32"),)]
    return executor, batch, ("eval", batch)


@pytest.mark.parametrize(
    ("losses", "patience", "epochs"),
    [([3, 2, 2, 2, 1], 2, 4), ([3, 2, 2, 1, 2, 2], 2, 6), ([5, 4, 3, 2, 1], 1, 5), ([np.nan, np.nan, 1], 1, 2)],
)
def test_patience(losses: list[float], patience: int, epochs: int) -> None:
    executor, train, validate = scripted(losses)
    history = fit(executor, train, epochs=len(losses), inputs=["x"], validate=validate, patience=patience)
    assert history.epochs == epochs


def test_maximize_and_monitor() -> None:
    executor, train, validate = scripted([1, 2, 3, 2, 1, 0])
    history = fit(executor, train, epochs=6, inputs=["x"], validate=validate, patience=2, maximize=True)
    assert history["val_loss"] == [1, 2, 3, 2, 1]
    executor, train, validate = scripted([1, 2, 3])
    history = fit(executor, train, epochs=3, inputs=["x"], validate=validate, patience=1, monitor="loss")
    assert history.epochs == 2  # its loss is always 0


def test_best_checkpoint(tmp_path: Path) -> None:
    losses = [3.0, 1.0, 2.0]
    executor, train, validate = scripted(losses)
    best, last = tmp_path / "best", tmp_path / "last"
    fit(executor, [*train], epochs=3, inputs=["x"], validate=validate, best=best)
    executor.load(best)
    assert executor.state["w"] == 2 and not last.exists()


def test_validation_may_have_inputs_of_its_own() -> None:
    a, y = Regression(), ht.placeholder("apart", (None, 4))
    graphs = {name: sub.entries for name, sub in a.executor.subgraphs.items()}
    a.executor = ht.Executor({**graphs, "apart": [ht.mean(y)]})
    history = a.fit(2, validate=("apart", [(X[:10],)], [y]))
    assert history["val_loss"] == pytest.approx([float(X[:10].mean())] * 2)


def test_after_epoch_changes_what_is_saved(tmp_path: Path) -> None:
    a = Regression()
    a.fit(
        1,
        checkpoint=tmp_path / "a",
        after_epoch=lambda history: a.executor.state.__setitem__("model/second", np.ones((8, 1))),
    )
    b = Regression()
    b.fit(1, checkpoint=tmp_path / "a", resume=True)
    assert (b.executor.state["model/second"] == 1).all()


@pytest.mark.parametrize("name", ["run.csv", "run.json"])
def test_the_history_is_written_after_each_epoch(tmp_path: Path, name: str) -> None:
    a, seen = Regression(), []
    path = tmp_path / name
    history = a.fit(3, log=path, after_epoch=lambda h: seen.append(path.exists() and path.read_text()))
    history.save(tmp_path / f"wanted{path.suffix}")
    assert path.read_text() == (tmp_path / f"wanted{path.suffix}").read_text()
    assert not seen[0] and seen[1] and seen[2] != seen[1]


@pytest.mark.parametrize("name", ["run.csv", "run.json"])
def test_a_log_in_no_folder_is_told_before_the_first_epoch(tmp_path: Path, name: str) -> None:
    with pytest.raises(errors.ArgumentError, match=r"folder '.*missing' does not exist"):
        Regression().fit(1, log=tmp_path / "missing" / name, after_epoch=lambda history: pytest.fail("an epoch ran"))


def test_events_for_tensorboard_are_written_by_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[tuple[object, ...]] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            rows.append((folder,))

        def add_scalar(self, *row: object) -> None:
            rows.append(row)

        def flush(self) -> None: ...

    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=SummaryWriter))
    history = Regression().fit(2, log=tmp_path / "events")
    assert rows[0] == (str(tmp_path / "events"),)
    wanted = [(name, values[epoch], epoch + 1) for epoch in range(2) for name, values in history.items()]
    assert [row for row in rows[1:] if row[0] != "seconds"] == [row for row in wanted if row[0] != "seconds"]
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(errors.MissingDependencyError, match=r"needs tensorboardX[\s\S]*or name a .csv"):
        Regression().fit(1, log=tmp_path / "events")


@pytest.mark.parametrize("every", [1, 3])
def test_losses_of_steps_are_written_to_a_file_and_by_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    rows: list[tuple[object, ...]] = []
    writer = SimpleNamespace(add_scalar=lambda *row: rows.append(row), flush=lambda: rows.append(()), close=bool)
    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=lambda folder: writer))
    monkeypatch.setattr("hetu.look.logs.SHOWN_EVERY", -1.0)
    wanted: list[tuple[int, float]] = []
    calls = [ht.look.log_steps(tmp_path / name, every=every) for name in ("steps.csv", "events")]
    for call in (*calls, lambda step, loss: wanted.append((step, loss))):
        Regression().fit(2, after_step=call)
    wanted = [row for row in wanted if row[0] % every == 0]
    assert len(wanted) > 2
    assert rows == [row for step, loss in wanted for row in (("step/loss", loss, step), ())]
    lines = (tmp_path / "steps.csv").read_text().splitlines()
    assert lines == ["step,loss", *(f"{step},{loss!r}" for step, loss in wanted)]
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(errors.MissingDependencyError, match=r"needs tensorboardX[\s\S]*or name a .csv"):
        ht.look.log_steps(tmp_path / "events")
    with pytest.raises(errors.ArgumentError, match="folder '.*missing' does not exist"):
        ht.look.log_steps(tmp_path / "missing" / "steps.csv")
    with pytest.raises(errors.ArgumentError, match=r"log_steps got every=0"):
        ht.look.log_steps(tmp_path / "steps.csv", every=0)


# -- resuming --------------------------------------------------------------------------------------------------------


def test_resume_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    whole, first, second = Regression(), Regression(), Regression(seed=9)
    expected = whole.fit(5)
    first.fit(2, checkpoint=tmp_path / "run")
    history = second.fit(5, checkpoint=tmp_path / "run", resume=True)
    same(whole, second)
    assert measured(history) == measured(expected)


@pytest.mark.parametrize("at", [1, 3, 5, 6, 8])
def test_ctrl_c_in_an_epoch_and_resume(tmp_path: Path, at: int) -> None:
    whole, first, second = Regression(), Regression(Interrupting(at)), Regression(seed=9)
    expected = whole.fit(3)
    with pytest.raises(KeyboardInterrupt):
        first.fit(3, checkpoint=tmp_path / "run")
    assert first.executor.state["model/optimizer/step"] == at  # the step under way was finished
    history = second.fit(3, checkpoint=tmp_path / "run", resume=True)
    same(whole, second)
    assert measured(history) == measured(expected)


def test_ctrl_c_in_validation_and_resume(tmp_path: Path) -> None:
    whole, first, second = Regression(), Regression(), Regression(seed=9)
    expected = whole.fit(3)
    first.test = Interrupted(first.test.dataset, batch_size=10)
    with pytest.raises(KeyboardInterrupt):
        first.fit(3, checkpoint=tmp_path / "run")
    assert first.executor.state["model/optimizer/step"] == 5
    history = second.fit(3, checkpoint=tmp_path / "run", resume=True)
    same(whole, second)
    assert measured(history) == measured(expected)


def test_ctrl_c_does_not_get_lost() -> None:
    model = Regression()
    with pytest.raises(KeyboardInterrupt) as raised:
        model.fit(1, after_epoch=lambda history: signal.raise_signal(signal.SIGINT))
    assert raised.type is KeyboardInterrupt
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_where_somebody_types_ctrl_c_ends_the_training_and_what_was_measured_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    whole, cut = Regression(), Regression(Interrupting(8))  # five batches an epoch
    history, expected = cut.fit(3), whole.fit(1)
    assert measured(history) == measured(expected)
    assert cut.executor.state["model/optimizer/step"] in (7, 8)
    assert "interrupted: what was measured is returned" in capsys.readouterr().err


def test_each_step_is_told_with_its_loss() -> None:
    told: list[tuple[int, float]] = []
    model = Regression()
    history = model.fit(2, after_step=lambda step, loss: told.append((step, loss)))
    assert [step for step, _ in told] == list(range(1, 2 * len(model.loader) + 1))
    assert np.mean([loss for _, loss in told[: len(model.loader)]]) == pytest.approx(history["loss"][0], rel=1e-5)


def test_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert Regression(Interrupting(2)).fit(1).epochs == 1
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    model = Regression(Interrupting(2, times=2))
    with pytest.raises(KeyboardInterrupt):
        model.fit(3, checkpoint=tmp_path / "run")
    assert model.executor.state["model/optimizer/step"] == 1


def test_resume_of_a_finished_run_and_without_a_file(tmp_path: Path) -> None:
    model, again = Regression(), Regression()
    first = model.fit(2, checkpoint=tmp_path / "run", resume=True)
    assert again.fit(2, checkpoint=tmp_path / "run", resume=True) == first
    same(model, again)


def test_patience_counts_epochs_before_the_checkpoint(tmp_path: Path) -> None:
    data = DataLoader(ArrayDataset(np.zeros(1, "float32")), batch_size=1)
    executor, _, validate = scripted([1, 2, 3, 4])
    options = {"inputs": ["x"], "validate": validate, "patience": 2, "checkpoint": tmp_path / "run", "resume": True}
    fit(executor, data, epochs=2, **options)
    assert fit(executor, data, epochs=4, **options).epochs == 3


# -- the history and the bar -----------------------------------------------------------------------------------------


def test_history_is_saved(tmp_path: Path) -> None:
    large = str(History({"loss": [1743.95, 96860.92, 1.5e5, 2e7]}))
    assert large.split()[3::2] == ["1744.0", "96860.9", "150000.0", "2e+07"]
    history = History({"loss": [0.5, 1e-5], "val_loss": [1.0, float("nan")]})
    history.save(tmp_path / "h.json")
    history.save(tmp_path / "h.csv")
    assert json.loads((tmp_path / "h.json").read_text())["loss"] == [0.5, 1e-5]
    with (tmp_path / "h.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows == [["epoch", "loss", "val_loss"], ["1", "0.5", "1.0"], ["2", "1e-05", "nan"]]
    assert str(history).splitlines()[2] == "    2   1e-05       nan"
    assert repr(history) == "<History of 2 epochs: loss 1e-05, val_loss nan>"
    with pytest.raises(errors.UnknownNameError, match="did you mean 'val_loss'"):
        history["valloss"]


@pytest.mark.parametrize("crowd", [0.0, 1.5, 12.3])
@pytest.mark.parametrize(("progress", "shown"), [(None, False), (False, False), (True, True)])
def test_bar(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    progress: bool | None,
    shown: bool,
    crowd: float,
) -> None:
    monkeypatch.setattr("hetu.progress.crowd", lambda: crowd)
    Regression().fit(2, progress=progress, metrics={"error": Error()})
    out, err = capsys.readouterr()
    assert out == "" and bool(err) is shown
    assert ("(crowded)" in err) is (shown and crowd > 1.5)
    if shown:
        last = err.replace("\r", "\n").strip().splitlines()[-1]
        assert max(map(len, err.replace("\r", "\n").splitlines())) <= 71  # 80 with the number of a rank
        assert last.startswith("epoch 2/2 [") and len(f"[rank 0] {last}") <= 80
        assert all(name in last for name in ("loss", "val_loss", "val_error"))


# -- mistakes --------------------------------------------------------------------------------------------------------


def test_mistakes(tmp_path: Path) -> None:
    model = Regression()
    cases: list[tuple[dict[str, object], type[Exception], str]] = [
        ({"train": "trian"}, errors.UnknownNameError, "did you mean 'train'"),
        ({"train": "eval"}, errors.ArgumentError, "nothing would be learned"),
        ({"validate": None, "metrics": {"error": Error()}}, errors.ArgumentError, "pass validate"),
        ({"validate": ("train", model.test), "metrics": {"error": Error()}}, errors.ArgumentError, "prediction"),
        ({"monitor": "val_los"}, errors.UnknownNameError, "did you mean 'val_loss'"),
        ({"patience": 0}, errors.ArgumentError, "patience=0"),
        ({"resume": True}, errors.ArgumentError, "checkpoint=path"),
        ({"validate": "eval"}, errors.ArgumentError, r"fit got validate='eval'[\s\S]*pass validate as"),
        ({"validate": ("eval", iter([]))}, errors.ArgumentError, "fit got validate=.*list_iterat"),
        ({"metrics": [Error()]}, errors.ArgumentError, r"fit got metrics=[\s\S]*pass metrics as \{str: Metric\}"),
        ({"validate": ("eval", [])}, errors.DataError, "no batch"),
        ({"validate": ("eval", [(X,)])}, errors.DataError, "1 arrays for the inputs x, t"),
    ]
    for options, kind, text in cases:
        with pytest.raises(kind, match=text):
            model.fit(1, **options)
    with pytest.raises(errors.ArgumentError, match="fit got epochs=.3."):
        model.fit("3")


def test_empty_data_and_loaders_without_a_position(tmp_path: Path) -> None:
    model = Regression()
    with pytest.raises(errors.DataError, match="no batch"):
        fit(model.executor, [], epochs=1, inputs=model.inputs)
    with pytest.raises(errors.ArgumentError, match="list cannot tell its position"):
        fit(model.executor, [(X, Y)], epochs=1, inputs=model.inputs, checkpoint=tmp_path / "run")


class Strange:
    """A loader that knows no `DataLoader`: the next batch is `at`."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Batch]:
        for k in range(self.at, 3):
            self.at = (k + 1) % 3
            yield X[10 * k : 10 * k + 10], Y[10 * k : 10 * k + 10]

    def state(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_loader_of_another_kind_can_be_resumed(tmp_path: Path) -> None:
    whole, first, second = Regression(), Regression(), Regression(seed=1)
    whole.loader, first.loader, second.loader = Strange(), Strange(), Strange()
    whole.fit(3)

    def stop(history: History) -> None:
        raise InterruptedError

    first.fit(1, checkpoint=tmp_path / "run")
    with pytest.raises(InterruptedError):  # before the second epoch is saved
        first.fit(2, checkpoint=tmp_path / "run", resume=True, after_epoch=stop)
    second.fit(3, checkpoint=tmp_path / "run", resume=True)
    same(whole, second)


def test_resume_from_a_file_of_another_kind(tmp_path: Path) -> None:
    model = Regression()
    model.executor.save(tmp_path / "plain")
    with pytest.raises(errors.CheckpointError, match="not written by fit"):
        model.fit(1, checkpoint=tmp_path / "plain", resume=True)


def test_a_nan_loss_stops_before_it_is_saved(tmp_path: Path) -> None:
    x, w = ht.placeholder("x", (None,)), ht.variable("w", 1.0, ())
    executor = ht.Executor({"train": [ht.mean(ht.log(x)), {w: w + 1}]})
    loader = DataLoader(ArrayDataset(np.array([1, 1, -1, 1], "float32")), batch_size=1)
    with pytest.raises(errors.NumericError, match="NaN in epoch 1, step 3"):
        fit(executor, loader, epochs=1, inputs=[x], checkpoint=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinite_loss_is_told_like_nan(sign: int, tmp_path: Path) -> None:
    x, w = ht.placeholder("x", (None,)), ht.variable("w", 1.0, ())
    executor = ht.Executor({"train": [ht.mean(x) * w, {w: w * 1.0}]})
    loader = DataLoader(ArrayDataset(np.array([1, sign * np.inf], "float32")), batch_size=1)
    with pytest.raises(
        errors.NumericError, match="loss is infinite in epoch 1, step 2[\\s\\S]*fix: lower the learning rate"
    ):
        fit(executor, loader, epochs=1, inputs=[x], checkpoint=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ["checkpoint", "best"])
@pytest.mark.parametrize(
    ("place", "said"),
    [("nowhere/run", "does not exist[\\s\\S]*create it"), ("file/run", "does not exist"), ("shut/run", "denied")],
)
def test_a_path_that_cannot_work_is_told_before_the_first_step(
    option: str, place: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, steps = Regression(), []
    (tmp_path / "file").write_text("")
    (tmp_path / "shut").mkdir()
    monkeypatch.setattr("os.access", lambda path, how: Path(path).name != "shut")  # root may write anywhere
    with pytest.raises(errors.CheckpointError, match=said):
        model.fit(1, **{option: tmp_path / place}, after_step=lambda *at: steps.append(at))
    assert not steps


def test_best_of_a_list_cannot_be_resumed(tmp_path: Path) -> None:
    model = Regression()
    fit(model.executor, [(X, Y)], epochs=1, inputs=model.inputs, best=tmp_path / "best")
    with pytest.raises(errors.CheckpointError, match="no position"):
        model.fit(2, checkpoint=tmp_path / "best", resume=True)

"""The training loop: epochs over a loader, validation, early stopping, checkpoints that resume bit for bit.

`fit` only calls what a user would call: `run` for each batch, `save` after each epoch. On several ranks all run the
same loop, and rank 0 decides about it (is there a checkpoint, is this the best epoch). With a parameter server under
SSP or ASP, where nobody waits, the first rank to get there decides. Another loop takes ten lines around `Executor.run`.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from .checkpoint import check_paths, exists, newest
from .core.backend import array_from
from .core.errors import ArgumentError, CheckpointError, DataError, UnknownNameError, did_you_mean, public
from .core.executor import Executor
from .core.graph import Node
from .core.leaf import random_state
from .core.placement import Placement
from .core.state import FilePath
from .core.subgraph import SubGraph
from .look.history import History, show_number
from .look.logs import log_to
from .look.nans import no_number
from .metrics import Mean, Metric
from .progress import DONE, bar
from .ranges import AtLeast1, Count
from .saving import Checkpoints, WentBack, rewinding

ADD = "add"  # the sub-graph that adds up gradients
_Feed = dict[Node | str, Any]


@runtime_checkable
class Batches(Protocol):
    """What `fit` needs of a loader, be it a `DataLoader` or a list: batches that are tuples of arrays, and how many."""

    def __iter__(self) -> Iterator[Sequence[Any]]: ...

    def __len__(self) -> int: ...


@runtime_checkable
class ResumableBatches(Batches, Protocol):
    """What checkpoints need of a loader besides: its position in the data."""

    def state(self) -> dict[str, int]: ...

    def load_state(self, state: dict[str, int]) -> None: ...


@public
def fit(
    executor: Executor,
    loader: Batches,
    *,
    epochs: Count,
    inputs: Sequence[Node | str],
    train: str = "train",
    accumulate: AtLeast1 = 1,
    validate: tuple[str, Batches] | tuple[str, Batches, Sequence[Node | str]] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    monitor: str | None = None,
    maximize: bool = False,
    patience: AtLeast1 | None = None,
    checkpoint: FilePath | None = None,
    keep: AtLeast1 | None = None,
    best: FilePath | None = None,
    resume: bool = False,
    after_step: Callable[[int, float], object] | None = None,
    after_epoch: Callable[[History], object] | None = None,
    log: FilePath | None = None,
    progress: bool | None = None,
) -> History:
    """Train for `epochs` passes over `loader`; returns what was measured, an entry per epoch.

    Args:
        executor: holds the sub-graphs. The first value of each is its loss, a scalar that is a mean over rows.
        inputs: the placeholders, or their names, that the arrays of a batch are fed to, in order.
        train: name of the sub-graph to train.
        accumulate: update after so many batches, and at the end of an epoch; the others run the sub-graph "add", whose
            updates, and those of `train`, are what `ht.optim.accumulated` makes.
        validate: sub-graph and loader to measure after each epoch, and its inputs if they are others: its loss is
            `val_loss`.
        metrics: such as `{"accuracy": ht.metrics.Accuracy()}`, measured in validation as `val_accuracy`, on the second
            value of the sub-graph (the prediction) and the last array of each batch (the target).
        monitor, maximize: the column that decides what is best, by default (validation) loss, and if more is better.
        patience: stop after so many epochs without a new best.
        checkpoint: file (on several ranks a folder) written after each epoch, and by one process when Ctrl-C ends it,
            which a notebook goes on from with the history so far.
        keep: have `checkpoint` be a folder of the last so many, written while training goes on: `ht.Checkpoints`.
        best: file written after each epoch that is the best so far.
        resume: continue from `checkpoint` if it exists; the result is bit for bit that of an unbroken run.
        after_step: called on every rank with the step, counted from 1 over all epochs, and its loss: `look.log_steps`.
        after_epoch: called on every rank with the history before the checkpoint is written, say to update a `Plateau`.
        log: a `.csv` or `.json`, or a folder for TensorBoard, that rank 0 writes after each epoch.
        progress: show a bar, on rank 0; by default in a terminal and in a notebook.

    ArgumentError for arguments that contradict each other, DataError for data without a batch, NumericError when the
    loss becomes NaN or infinite, before that can reach a checkpoint.

    >>> import hetu as ht
    >>> x, w = ht.placeholder("x", (None,)), ht.variable("w", 0.0, ())
    >>> loss = ht.mean((x - w) * (x - w))
    >>> step = {w: w - 0.25 * ht.gradients(loss, [w])[0]}
    >>> fit(ht.Executor({"train": [loss, step]}), [([1.0, 3.0],)], epochs=3, inputs=[x])["loss"]
    [5.0, 2.0, 1.25]
    """
    judge = _Judge(monitor or ("val_loss" if validate else "loss"), maximize, patience)
    each = after_step or (lambda step, loss: None)
    run = _Run(executor, loader, tuple(inputs), train, accumulate, validate, metrics or {}, checkpoint, progress, each)
    run.check(judge, resume or keep is not None)
    check_paths((checkpoint if keep is None else None, best), executor.placement.in_parts)
    if keep is not None and checkpoint is not None:
        run.checkpoints = Checkpoints(executor, checkpoint, keep=keep)
    writers = [log_to(log)] if log is not None and executor.placement.rank == 0 else []

    def write(history: History) -> None:
        if log is not None and executor.placement.rank == 0:  # which this one is once those before it are lost
            writers[:] = writers or [log_to(log)]
            writers[0](history)

    return run.loop(epochs, judge, resume, best, [after_epoch or (lambda history: None), write])


@dataclass(frozen=True)
class _Judge:
    """Which epoch is the best, and after how many worse ones to stop."""

    column: str
    maximize: bool
    patience: int | None

    def worse_since(self, history: History) -> int:
        """The number of epochs since the best one, at least one epoch being over."""
        return history.epochs - 1 - history.best(self.column, self.maximize)

    def ends(self, history: History) -> bool:
        return self.patience is not None and bool(history) and self.worse_since(history) >= self.patience


@dataclass
class _Position:
    """Where a run stands, in plain data: what a checkpoint holds beside the variables."""

    history: History = field(default_factory=History)
    data: dict[str, int] | None = None  # the loader's state after the last finished step
    steps: int = 0  # of the current epoch, as are the following
    rows: int = 0
    total_loss: float = 0.0
    seconds: float = 0.0


@dataclass
class _Run:
    """The fixed arguments of one `fit`, and its position."""

    executor: Executor
    loader: Batches
    inputs: tuple[Node | str, ...]
    train: str
    accumulate: int
    validation: tuple[str, Batches] | tuple[str, Batches, Sequence[Node | str]] | None
    metrics: Mapping[str, Metric]
    checkpoint: FilePath | None
    progress: bool | None
    after_step: Callable[[int, float], object]
    position: _Position = field(default_factory=_Position)
    interrupted: Callable[[], bool] = lambda: False
    checkpoints: Checkpoints | None = None  # if some are kept

    def check(self, judge: _Judge, needs_checkpoint: bool) -> None:
        """Find mistakes before hours are spent on training."""
        if not _subgraph(self.executor, self.train, values=1).updates:
            said = f"sub-graph {self.train!r} updates nothing, so nothing would be learned"
            raise ArgumentError(said, fix="list what minimize(...) returned: Executor({'train': [loss, updates]})")
        if self.accumulate > 1 and ADD not in self.executor.subgraphs:
            fix = "add, update = ht.optim.accumulated(updates); Executor({'add': [loss, add], 'train': [loss, update]})"
            raise UnknownNameError(f"accumulate={self.accumulate} runs sub-graph {ADD!r}, and there is none", fix=fix)
        columns = ["loss"]
        if self.validation:
            _subgraph(self.executor, self.validation[0], values=2 if self.metrics else 1)
            columns += ["val_loss", *(f"val_{name}" for name in self.metrics)]
        elif self.metrics:
            raise ArgumentError("metrics are measured in validation", fix='pass validate=("eval", loader)')
        if judge.column not in columns:
            fix = did_you_mean(judge.column, columns)
            raise UnknownNameError(f"monitor={judge.column!r} is not measured", fix=fix)
        if needs_checkpoint and self.checkpoint is None:
            raise ArgumentError("there is nothing to resume from, or to keep", fix="pass checkpoint=path too")
        if self.checkpoint is not None and not isinstance(self.loader, ResumableBatches):
            said = f"a {type(self.loader).__name__} cannot tell its position, which a checkpoint needs"
            raise ArgumentError(said, fix="pass a DataLoader, or a loader with state() and load_state(state)")

    @property
    def placement(self) -> Placement:
        return self.executor.placement

    def stop_if_interrupted(self) -> None:
        if self.interrupted():
            raise _Interrupted

    def loop(
        self,
        epochs: int,
        judge: _Judge,
        resume: bool,
        best: FilePath | None,
        after_epoch: Sequence[Callable[[History], object]],
    ) -> History:
        """The loop of `fit`."""
        if resume:
            self.resume()
        with _deferred_interrupt(self.placement.world_size == 1) as self.interrupted, rewinding(self.is_own):
            while self.position.history.epochs < epochs and not judge.ends(self.position.history):
                try:
                    self.epoch(epochs)
                    history = self.position.history
                    for call in after_epoch:
                        call(history)
                    if judge.worse_since(history) == 0:
                        self.save(best)
                    self.save(self.checkpoint)
                except WentBack as back:
                    self.go_on_from(back.extra)
                self.stop_if_interrupted()
        if self.checkpoints is not None:
            self.checkpoints.wait()
        return self.position.history

    # -- an epoch ---------------------------------------------------------------------------------------------------

    def epoch(self, epochs: int) -> None:
        """Train on the rest of the current epoch, validate, and append to the history."""
        at = self.position
        started = time.perf_counter() - at.seconds
        what = f"epoch {at.history.epochs + 1:>{len(str(epochs))}}/{epochs}"
        with bar(what, len(self.loader), self.progress, rank=self.placement.rank, initial=at.steps) as shown:
            try:
                for loss in self._steps():
                    at.seconds = time.perf_counter() - started
                    shown.set_postfix_str(f"loss {show_number(loss)}", refresh=False)
                    shown.update()
                    self.stop_if_interrupted()
                row = {"loss": at.total_loss / at.rows} | self._validate()
            except _Interrupted:
                self.save(self.checkpoint)
                raise
            shown.bar_format = DONE
            shown.set_postfix_str(", ".join(f"{name} {show_number(value)}" for name, value in row.items()))
        at.history.append(self.placement.agree(row | {"seconds": round(time.perf_counter() - started, 2)}))
        self.position = _Position(at.history, at.data)

    def _steps(self) -> Iterator[float]:
        """Train on each batch left in the epoch; yields the mean loss of the epoch so far."""
        at = self.position
        if at.steps == len(self.loader) > 0:  # interrupted in validation
            return
        for feed, data, following in self._with_next():
            if at.rows and self.placement.late > 0:
                self.placement.late -= 1
                at.steps, at.data = at.steps + 1, data
                yield at.total_loss / at.rows
                continue
            last = (at.steps + 1) % self.accumulate == 0 or at.steps + 1 == len(self.loader)
            loss = self.executor.run(self.train if last else ADD, feed, ahead=following)[0]
            if not math.isfinite(loss):
                raise no_number(float(loss), at.history.epochs + 1, at.steps + 1)
            rows = len(feed[self.inputs[0]])
            at.steps, at.rows, at.total_loss = at.steps + 1, at.rows + rows, at.total_loss + rows * float(loss)
            at.data = data
            self.after_step(at.history.epochs * len(self.loader) + at.steps, float(loss))
            yield at.total_loss / at.rows
        if at.rows == 0:
            raise DataError("the training data has no batch", fix="check the data set that the loader reads")

    def _with_next(self) -> Iterator[tuple[_Feed, dict[str, int] | None, deque[_Feed]]]:
        """Each batch as a feed, the position in the data behind it, and the next feeds of this epoch that matter."""
        resumable = self.loader if isinstance(self.loader, ResumableBatches) else None
        coming, positions = deque[_Feed](), deque[dict[str, int] | None]()
        for batch in self.loader:
            feed = self._feed(batch, self.inputs)  # a loader may fill the same arrays for the batch after it
            coming.append({key: array.copy() for key, array in feed.items()} if self.placement.ahead else feed)
            positions.append(resumable.state() if resumable is not None else None)
            if len(coming) > self.placement.ahead:
                yield coming.popleft(), positions.popleft(), coming
        while coming:
            yield coming.popleft(), positions.popleft(), coming

    def _validate(self) -> dict[str, float]:
        """`val_loss` and the metrics, each of the whole validation set."""
        if self.validation is None:
            return {}
        name, loader, inputs = (*self.validation, self.inputs)[:3]
        measures: dict[str, Metric] = {"loss": (mean := Mean()), **self.metrics}
        for metric in self.metrics.values():
            metric.reset()
        numbers = self.executor.state.get(random_state.name)
        for batch in loader:
            feed = self._feed(batch, inputs)
            loss, *others = self.executor.run(name, feed)
            mean.update(loss, weight=len(feed[inputs[0]]))
            for metric in self.metrics.values():
                metric.update(others[0], feed[inputs[-1]])
            if self.interrupted() and numbers is not None:  # a resumed run validates again, from the same numbers
                self.executor.state[random_state.name] = numbers
            self.stop_if_interrupted()
        if not len(measures["loss"]):
            raise DataError("the validation data has no batch", fix="check the data set that its loader reads")
        return {f"val_{name}": float(metric.result()) for name, metric in measures.items()}

    def _feed(self, batch: Sequence[Any], inputs: Sequence[Node | str]) -> _Feed:
        if len(batch) != len(inputs):
            names = ", ".join(i.name if isinstance(i, Node) else i for i in inputs)
            raise DataError(f"a batch has {len(batch)} arrays for the inputs {names}", fix="name one input an array")
        return dict(zip(inputs, map(array_from, batch)))

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, path: FilePath | None) -> None:
        """Write a checkpoint, if a path says where."""
        extra = {"fit": asdict(self.position) | {"history": self.position.history.columns}}
        if path is not None and path is self.checkpoint and self.checkpoints is not None:
            self.checkpoints.save(extra)
        elif path is not None:
            self.executor.save(path, extra)

    def resume(self) -> None:
        """Continue from the checkpoint, if rank 0 finds it."""
        if (path := self.checkpoint) is not None and self.placement.agree({"found": exists(newest(path))})["found"]:
            self.go_on_from(self.executor.load(path))

    def is_own(self, extra: Mapping[str, Any]) -> bool:
        """Whether this training was at a save that has this beside the variables: its history begins like that."""
        saved, now = extra.get("fit"), self.position.history.columns
        past = saved.get("history", {}) if isinstance(saved, dict) and saved.get("data") is not None else {}
        return bool(past) and all(str(now.get(name, [])[: len(of)]) == str(of) for name, of in past.items())

    def go_on_from(self, extra: Mapping[str, Any]) -> None:
        """Continue where a checkpoint was made that has this beside the variables, which are loaded."""
        saved, name = extra.get("fit"), Path(self.checkpoint or "").name
        if saved is None or saved["data"] is None or not isinstance(self.loader, ResumableBatches):
            said = f"{name} was not written by fit with a DataLoader, so it has no position to continue from"
            raise CheckpointError(said, fix="load it with Executor.load and call fit without resume")
        self.position = _Position(**saved | {"history": History(saved["history"])})
        self.loader.load_state(saved["data"])


def _subgraph(executor: Executor, name: str, *, values: int) -> SubGraph:
    """The sub-graph called `name`, whose first value must be a scalar and which needs `values` values."""
    if name not in executor.subgraphs:
        raise UnknownNameError(f"there is no sub-graph {name!r}", fix=did_you_mean(name, executor.subgraphs))
    sub = executor.subgraphs[name]
    entries = [e for e in sub.entries[:values] if isinstance(e, Node)]
    if not entries or entries[0].shape != ():
        raise ArgumentError(f"the first value of sub-graph {name!r} is not a loss", fix="list the scalar loss first")
    if len(entries) < values:
        raise ArgumentError(f"metrics need a prediction from sub-graph {name!r}", fix="list it second: [loss, y]")
    return sub


class _Interrupted(KeyboardInterrupt):
    """Ctrl-C was pressed a while ago, and now all variables belong together."""


@contextlib.contextmanager
def _deferred_interrupt(alone: bool) -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C only sets what the yielded function tells, so that no step is cut in half; a second one raises.

    Not where it would reach one of several ranks only: the others would wait for it. Where somebody types, it ends the
    training alone, so that what was measured is not lost.
    """
    asked = False

    def note(*_: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not (alone and in_main and callable(before)):  # another thread gets no Ctrl-C, and who ignores it wants none
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: asked
    except _Interrupted:
        if not hasattr(sys, "ps1"):
            raise KeyboardInterrupt from None
        print("interrupted: what was measured is returned, the weights are those of the last step", file=sys.stderr)
    finally:
        signal.signal(signal.SIGINT, before)

"""A training as it goes on, in a file or for TensorBoard: an epoch at a time, or the loss of each step.

Left out: pictures.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..core.errors import ArgumentError, MissingDependencyError
from ..core.state import FilePath
from ..files import check_place
from ..ranges import AtLeast1
from .history import History

SHOWN_EVERY = 1.0  # seconds


def log_to(path: FilePath) -> Callable[[History], None]:
    """What writes a history after each epoch: whole, to a `.csv` or `.json`, or its last row to the events of a folder.

    A folder is for `tensorboard --logdir`; it needs the extra `[logs]`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log_to(f"{folder}/run.csv")(History({"loss": [0.5, 0.25]}))
    ...     Path(folder, "run.csv").read_text().split()
    ['epoch,loss', '1,0.5', '2,0.25']
    """
    if Path(path).suffix in (".csv", ".json"):
        check_place(Path(path))
        return lambda history: history.save(path)
    writer = _events(path)

    def write(history: History) -> None:
        for name, values in history.items():
            writer.add_scalar(name, values[-1], history.epochs)
        writer.flush()

    return write


def log_steps(path: FilePath, *, every: AtLeast1 = 1) -> Callable[[int, float], None]:
    """What writes the loss of each step, or of one in `every`: to a new `.csv`, or to the events of a folder.

    For `ht.fit(..., after_step=ht.look.log_steps("runs/first"))`; on several ranks for rank 0 alone, since each would
    write. Others can read it a second later, and all of it when the process ends. A folder needs the extra `[logs]`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     note = log_steps(f"{folder}/steps.csv", every=2)
    ...     for step, loss in enumerate([1.0, 0.5, 0.25, 0.125], 1):
    ...         note(step, loss)
    ...     Path(folder, "steps.csv").read_text().split()
    ['step,loss', '2,0.5', '4,0.125']
    """
    if Path(path).suffix == ".csv":
        check_place(Path(path))
        Path(path).write_text("step,loss\n", "utf-8")
        add: Callable[[int, float], None] = partial(_append, path)
    else:
        add = _scalars(_events(path))
    return lambda step, loss: None if step % every else add(step, float(loss))


def _append(path: FilePath, step: int, loss: float) -> None:
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{step},{loss!r}\n")
    except OSError as error:
        fix = "make room, or log to a file of yours elsewhere"
        raise ArgumentError(f"{str(path)!r} cannot be written: {error.strerror}", fix=fix) from None


def _scalars(writer: Any) -> Callable[[int, float], None]:
    """What adds a loss, shows it to others at most once in a second, and the rest at the end of the process."""
    shown = time.monotonic()
    atexit.register(writer.close)

    def add(step: int, loss: float) -> None:
        nonlocal shown
        writer.add_scalar("step/loss", loss, step)
        if time.monotonic() > shown + SHOWN_EVERY:
            writer.flush()
            shown = time.monotonic()

    return add


def _events(path: FilePath) -> Any:
    """The library's writer of events. MissingDependencyError without the library."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise MissingDependencyError(
            f"the event log {str(path)!r} needs tensorboardX", fix="pip install 'hetu-dl[logs]', or name a .csv"
        ) from None
    return SummaryWriter(str(path))

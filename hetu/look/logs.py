"""A training as it goes on, in a file or for TensorBoard, an epoch at a time.

Left out: single steps, and pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..core.errors import ArgumentError, MissingDependencyError
from ..core.state import FilePath
from .history import History


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
        if not (folder := Path(path).parent).is_dir():
            raise ArgumentError(f"folder {str(folder)!r} does not exist", fix="create it, or write the log elsewhere")
        return lambda history: history.save(path)
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise MissingDependencyError(
            f"the event log {str(path)!r} needs tensorboardX", fix="pip install 'hetu-dl[logs]', or name a .csv"
        ) from None
    writer = SummaryWriter(str(path))

    def write(history: History) -> None:
        for name, values in history.items():
            writer.add_scalar(name, values[-1], history.epochs)
        writer.flush()

    return write

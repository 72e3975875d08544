"""What a training measured, as a table, as curves, and as a file."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..core.errors import UnknownNameError, did_you_mean
from ..core.state import FilePath
from ..files import write_text
from ..ranges import AnyFloat
from .columns import in_columns
from .curves import curves_svg


class History(Mapping[str, list[float]]):
    """What `fit` measured: a list per column, an entry per epoch. `print(history)` shows a table.

    >>> history = History({"loss": [0.5, 0.25], "val_loss": [0.4, 0.45]})
    >>> history["loss"], history.best("val_loss")
    ([0.5, 0.25], 0)
    >>> print(history)
    epoch    loss  val_loss
        1  0.5000    0.4000
        2  0.2500    0.4500
    """

    def __init__(self, columns: Mapping[str, Sequence[AnyFloat]] | None = None) -> None:
        self.columns = {name: list(values) for name, values in (columns or {}).items()}

    def append(self, row: Mapping[str, AnyFloat]) -> None:
        """Add an epoch."""
        for name, value in row.items():
            self.columns.setdefault(name, []).append(value)

    @property
    def epochs(self) -> int:
        return max(map(len, self.columns.values()), default=0)

    def best(self, name: str, maximize: bool = False) -> int:
        """The first epoch, counted from 0, with the smallest (or largest) value of a column; NaN is never best."""
        sign = -1 if maximize else 1
        keys = [math.inf if math.isnan(v) else sign * v for v in self[name]]
        return keys.index(min(keys))

    def save(self, path: FilePath) -> None:
        """Write as CSV where the name ends in `.csv`, else as JSON."""
        if Path(path).suffix != ".csv":
            write_text(path, json.dumps(self.columns, indent=1) + "\n")
            return
        text = io.StringIO(newline="")
        rows = csv.writer(text)
        rows.writerow(["epoch", *self.columns])
        rows.writerows([i, *values] for i, values in enumerate(zip(*self.columns.values()), 1))
        write_text(path, text.getvalue())

    def __getitem__(self, name: str) -> list[float]:
        if name not in self.columns:
            raise UnknownNameError(f"the history has no column {name!r}", fix=did_you_mean(name, self.columns))
        return self.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    def __str__(self) -> str:
        table = [["epoch", *self.columns]]
        for i, values in enumerate(zip(*self.columns.values()), 1):
            table.append(
                [str(i), *(f"{v:.1f}" if name == "seconds" else show_number(v) for name, v in zip(self, values))]
            )
        return "\n".join(in_columns(table, right=range(len(table[0]))))

    def _repr_svg_(self) -> str:
        """The losses as curves, for notebooks."""
        return curves_svg({name: c for name, c in self.columns.items() if name in ("loss", "val_loss")}, label="epoch")

    def __repr__(self) -> str:
        last = ", ".join(f"{name} {show_number(values[-1])}" for name, values in self.columns.items() if values)
        return f"<History of {self.epochs} epochs{': ' if last else ''}{last}>"


def show_number(value: float) -> str:
    """A measured value in few digits.

    >>> show_number(0.25), show_number(96860.9219), show_number(1e-5)
    ('0.2500', '96860.9', '1e-05')
    """
    if value == 0 or 1e-3 <= abs(value) < 1e3:
        return f"{value:.4f}"
    return f"{value:.1f}" if 1e3 <= abs(value) < 1e7 else f"{value:.3g}"

"""The bar of what takes long: on rank 0, in a terminal, in a notebook, and below a cell of many ranks."""

from __future__ import annotations

import sys
from typing import Any

from .system import crowd

FORMAT = "{desc} {percentage:3.0f}% |{bar:12}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
CROWDED = FORMAT.replace("{desc}", "{desc} (crowded)").replace("bar:12", "bar:3")  # no longer than the other
CROWD = 1.5  # processes that want a core, above which it is said: a job with a rank for each core is none
DONE = "{desc} [{elapsed}{postfix}]"  # what stays fits in 80 columns, with three numbers behind the number of a rank


def in_notebook() -> bool:
    """Whether what is shown goes below a cell."""
    return type(sys.stderr).__module__.startswith("ipykernel")


def bar(what: str, total: int, progress: bool | None = None, *, rank: int = 0, initial: int = 0) -> Any:
    """A bar of `tqdm` on standard error, shown if `progress` says so, by default where a line can be written over.

    In a notebook it goes when it is done. It says "(crowded)" where more processes want the cores than there are, by
    the load of the last minute: then times mean little, and threads that wait for each other take many times as long.

    >>> with bar("rows", 100, progress=False) as shown:
    ...     shown.update(100)
    """
    from tqdm import tqdm  # here, because `import hetu` should be quick

    cell = in_notebook()
    show = rank == 0 and (cell or sys.stderr.isatty() if progress is None else progress)
    shape = CROWDED if show and crowd() > CROWD else FORMAT
    return tqdm(desc=what, total=total, initial=initial, disable=not show, leave=not cell, bar_format=shape)

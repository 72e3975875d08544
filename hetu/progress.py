"""The bar of what takes long: on rank 0, in a terminal, in a notebook, and below a cell of many ranks."""

from __future__ import annotations

import sys
from typing import Any

FORMAT = "{desc} {percentage:3.0f}% |{bar:12}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
DONE = "{desc} [{elapsed}{postfix}]"  # what stays fits in 80 columns, with three numbers behind the number of a rank


def bar(what: str, total: int, progress: bool | None = None, *, rank: int = 0, initial: int = 0) -> Any:
    """A bar of `tqdm` on standard error, shown if `progress` says so, by default where a line can be written over.

    In a notebook it goes when it is done.

    >>> with bar("rows", 100, progress=False) as shown:
    ...     shown.update(100)
    """
    from tqdm import tqdm  # here, because `import hetu` should be quick

    in_notebook = type(sys.stderr).__module__.startswith("ipykernel")
    show = rank == 0 and (in_notebook or sys.stderr.isatty() if progress is None else progress)
    return tqdm(desc=what, total=total, initial=initial, disable=not show, leave=not in_notebook, bar_format=FORMAT)

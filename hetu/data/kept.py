"""Columns larger than memory: written to files once, a block of rows after the other, and then read where they lie.

What a loader asks for is then fetched from these files by the system, which keeps in memory what there is room for.
Left out: files that another machine reads, as numbers have the byte order of this one.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import DataError
from .dataset import Batch

Kinds = Mapping[str, tuple[str, tuple[int, ...]]]  # of each column its dtype, and the shape of a row
TOLD = "told.json"


def kept(folder: Path, kinds: Kinds, told: Mapping[str, Any], blocks: Iterable[Batch]) -> tuple[NDArray[Any], ...]:
    """The columns `blocks` one after the other, each a file in `folder`; as it lies there if it was `told` the same.

    `told` is plain data that says what the columns are made of. Several processes may write the same at once: each file
    takes its place when it is whole, and that which tells comes last. DataError for a folder that cannot be written.

    >>> blocks = [(np.ones((3, 2), "float32"),), (np.zeros((1, 2), "float32"),)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     (x,) = kept(Path(folder), {"x": ("float32", (2,))}, {"of": "this"}, blocks)
    ...     x.shape, float(x.sum())
    ((4, 2), 6.0)
    """
    try:
        if _told(folder) != dict(told) or not _fit(folder, kinds):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as beside:
                _write(Path(beside), kinds, told, blocks)
                (folder / TOLD).unlink(missing_ok=True)  # of what is half replaced nothing is told
                for name in (*kinds, TOLD):
                    os.replace(Path(beside, name), folder / name)
        return tuple(_column(folder / name, *kind) for name, kind in kinds.items())
    except OSError as error:
        fix = "pass a folder of yours with room for the columns"
        raise DataError(f"{folder} cannot keep columns: {error.strerror}", fix=fix) from error


def _write(folder: Path, kinds: Kinds, told: Mapping[str, Any], blocks: Iterable[Batch]) -> None:
    with ExitStack() as stack:
        files = [stack.enter_context(open(folder / name, "wb")) for name in kinds]
        for block in blocks:
            for file, part, (dtype, _) in zip(files, block, kinds.values()):
                file.write(np.ascontiguousarray(part, dtype).data)
    (folder / TOLD).write_text(json.dumps(dict(told)), "utf-8")


def _told(folder: Path) -> Any:
    """What the files in `folder` say that they are, or None."""
    try:
        return json.loads((folder / TOLD).read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def _column(path: Path, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    return np.asarray(np.memmap(path, dtype, "r")).reshape(-1, *shape)


def _fit(folder: Path, kinds: Kinds) -> bool:
    """Whether all files are there, of whole rows, and of as many."""
    sizes = [(folder / name).stat().st_size if (folder / name).is_file() else 0 for name in kinds]
    widths = [int(np.prod(shape)) * np.dtype(dtype).itemsize for dtype, shape in kinds.values()]
    counts = {size / width for size, width in zip(sizes, widths)}
    return len(counts) == 1 and counts.pop() in range(1, max(sizes) + 1)

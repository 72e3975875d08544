"""Where a data set's files are: a folder of the user's, an installed package, or the small files that ship with hetu.

The source is printed once, so that a small set is never mistaken for the full one. Nothing is downloaded, and packages
that carry data are located but not imported.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..core.errors import DataError
from ..job import RANK_VARIABLES

MINI_FOLDER = Path(__file__).parent / "files"


class Source(NamedTuple):
    """The files that were found, in the order asked for; `kind` is "root" (the public format), "package" or "mini"."""

    kind: str
    files: tuple[Path, ...]


def find(
    name: str,
    standard: Sequence[str],
    *,
    root: str | os.PathLike[str] | None = None,
    package: tuple[str, str] | None = None,
    mini: str | None = None,
) -> Source:
    """The first that exists of: `root`, `$HETU_DATA/name`, the installed package, the shipped file.

    Args:
        name: the name of the data set, and of its folder under `$HETU_DATA`.
        standard: file names of the public format, all needed; each may also end in `.gz`.
        root: the folder that holds them; with it, nothing else is tried.
        package: a distribution, and the path inside it.
        mini: the name of a shipped file.

    Raises DataError if nothing is found; its fix says what to install or where to put which files.

    >>> find("mnist", ["train-images-idx3-ubyte"], mini="mnist5k.npz").kind
    'mini'
    """
    home = os.environ.get("HETU_DATA")
    folder = Path(root) if root is not None else Path(home, name) if home else None
    missing = [] if folder is None else [file for file in standard if _plain_or_gz(folder, file) is None]
    if folder is not None and not missing:
        return _announced(name, "root", tuple(path for file in standard if (path := _plain_or_gz(folder, file))))
    if root is not None:
        raise DataError(
            f"{name}: {folder} lacks {', '.join(missing)}", fix=f"put {', '.join(standard)} (or .gz) into that folder"
        )
    if package is not None and (path := package_file(*package)) is not None:
        return _announced(name, "package", (path,))
    if mini is not None:
        return _announced(name, "mini", (MINI_FOLDER / mini,))
    install = f'run: python -m pip install --no-deps "{package[0]}"; or ' if package else ""
    raise DataError(
        f"{name}: no file of it is on this machine",
        fix=f"{install}put {', '.join(standard)} into a folder and pass root=, or into $HETU_DATA/{name}",
    )


def package_file(dist: str, relative: str) -> Path | None:
    """The file at `relative` in the installed distribution `dist`, without importing it; None where there is none."""
    from importlib import metadata  # slow to import, and rarely needed

    try:
        path = Path(str(metadata.distribution(dist).locate_file(relative)))
    except metadata.PackageNotFoundError:
        return None
    return path if path.is_file() else None


def _plain_or_gz(folder: Path, file: str) -> Path | None:
    candidates = (folder / file, folder / f"{file}.gz")
    return next((path for path in candidates if path.is_file()), None)


@functools.cache
def _announced(name: str, kind: str, files: tuple[Path, ...]) -> Source:
    if all(os.environ.get(rank, "0") == "0" for rank in RANK_VARIABLES):
        print(f"hetu.data: {name}: {kind} data from {', '.join(map(str, files))}", file=sys.stderr)
    return Source(kind, files)

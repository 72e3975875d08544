"""Files that are written as a whole or not at all, whatever ends the writing: a full disk, a limit, a kill."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .core.errors import ArgumentError, HetuError


def check_place(path: Path, kind: type[HetuError] = ArgumentError) -> None:
    """An error of this kind unless a file can be written at `path`, as far as can be told before."""
    if not path.parent.is_dir():
        raise kind(f"folder {str(path.parent)!r} does not exist", fix="create it first, or save elsewhere")
    if not os.access(path if path.is_dir() else path.parent, os.W_OK | os.X_OK):
        raise kind(f"{str(path)!r} cannot be written: permission denied", fix="save to a folder of yours elsewhere")


def check_file(path: Path, kind: type[HetuError] = ArgumentError) -> None:
    """The same for a path that has to be that of a file."""
    try:
        if path.exists() and not path.is_file():  # a device, say, which would be replaced
            said = f"{str(path)!r} is {'a folder' if path.is_dir() else 'no file'}"
            raise kind(said, fix="name a file in a folder of yours")
        check_place(path, kind)
    except OSError as error:
        raise kind(f"{str(path)!r:.60} cannot be a file: {error.strerror}", fix="give it another name") from error


def replace_atomically(path: Path, content: Iterable[Any], kind: type[HetuError] = ArgumentError) -> None:
    """Write buffers beside the target, flush, rename over it: a reader sees the old file or the new one, no part."""
    check_file(path, kind)
    part = path.with_name(f".{path.name}.part")  # one fixed name: what a killed save has left, the next one takes
    try:
        with open(part, "wb") as file:
            file.writelines(content)
        flush(part)
        os.replace(part, path)
    except OSError as error:
        fix = "make room, or save to a file of yours elsewhere"
        raise kind(f"{str(path)!r} cannot be written: {error.strerror}", fix=fix) from error
    finally:
        with suppress(OSError):
            part.unlink()
    if os.name == "posix":
        flush(path.parent)  # makes the rename itself durable


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text as it is, in UTF-8."""
    replace_atomically(Path(path), [text.encode()])


def flush(path: Path) -> None:
    """Let what lies in the memory of the system reach the disk."""
    handle = os.open(path, os.O_RDONLY if path.is_dir() or os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

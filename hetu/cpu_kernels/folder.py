"""The folder that keeps what a compiler has made, and in which processes tell each other of it.

To load a library is to execute it; therefore this user alone may write to the folder and move it or one above it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from .. import system

STALE = 3600  # seconds after which what is being built belongs to a process that was killed
QUIET = 5.0  # seconds for which a process that builds shows no life, if it has been stopped


@cache
def folder() -> Path:
    """The user's cache, or a folder of this process where others could write there or nothing can be written."""
    try:
        kept = _cache() / "hetu" / "compiled"
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept.mkdir(mode=0o700, exist_ok=True)
        kept = kept.resolve(strict=True)
        reason = _danger(kept) or _use(kept)
        if not reason:
            return kept
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        reason = str(error)
    fix = "change its rights, or set XDG_CACHE_HOME to a folder that runs code and that you alone can write and move"
    warnings.warn(f"compiled code lasts for this process only: {reason} (fix: {fix})", RuntimeWarning, stacklevel=2)
    own = tempfile.mkdtemp(prefix="hetu-compiled-")
    atexit.register(_remove, own, os.getpid())
    return Path(own)


def _remove(own: str, process: int) -> None:
    """Remove the folder of a process at its end; a process that it has forked inherits this, too."""
    if os.getpid() == process:
        shutil.rmtree(own, ignore_errors=True)


def _cache() -> Path:
    """The folder of the user's caches; a relative path is none."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return given if given.is_absolute() else Path.home() / ".cache"


def _danger(path: Path) -> str:
    """Why others could put code there, or another folder in the place of one above it, if they could.

    A folder is safe in one where all may write but each may move only what is his own, such as /tmp. A group that has
    the number of its user is his alone, and who owns the root may do everything.
    """
    if not hasattr(os, "getuid"):  # Windows keeps others out of a user's folders
        return ""
    trusted = {os.getuid(), 0, Path(path.anchor).stat().st_uid}
    for place in (path, *path.parents):
        about = place.stat()
        others = stat.S_IWOTH | (0 if about.st_gid == about.st_uid else stat.S_IWGRP)
        if about.st_uid not in trusted:
            return f"{place}: it belongs to somebody else"
        if about.st_mode & others and (place == path or not about.st_mode & stat.S_ISVTX):
            return f"{place}: others can write there"
    return ""


def _use(path: Path) -> str:
    """Why nothing could be kept there, or what is kept could not be loaded, if so."""
    if not os.access(path, os.W_OK):
        return f"{path}: nothing can be written there"
    runs_code = not hasattr(os, "ST_NOEXEC") or not os.statvfs(path).f_flag & os.ST_NOEXEC
    return "" if runs_code else f"{path}: its disk is mounted so that it runs no code (noexec)"


def show_life() -> None:
    """Let others wait on for what this process builds."""
    with suppress(OSError):
        os.utime(folder() / "lock")


@contextmanager
def lock(look: Callable[[], object] = bool) -> Iterator[None]:
    """Inside, no other process builds, unless it shows no life, as one that has been stopped.

    The end of a process frees it. Who waits calls `look` again and again, which may raise what ends the wait.
    """
    folder().mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have emptied the cache meanwhile
    with open(folder() / "lock", "a") as lock:  # which is no sign of life, as "w" would be
        alive = time.monotonic()
        while time.monotonic() - alive < QUIET and not system.lock(lock):
            look()
            if abs(time.time() - os.stat(lock.fileno()).st_mtime) < QUIET:
                alive = time.monotonic()
            time.sleep(0.01)
        try:
            yield
        finally:
            system.unlock(lock)


def private() -> tempfile.TemporaryDirectory[str]:
    """A folder to build in, on the same disk as the folder."""
    return tempfile.TemporaryDirectory(dir=folder(), prefix="building-", ignore_cleanup_errors=True)


def entries() -> list[tuple[float, int, Path]]:
    """Libraries, digests and what was left half done: when each was last used, its bytes, its path."""
    found = []
    for path in folder().iterdir():
        with suppress(OSError):  # another process may remove it
            about = path.stat()
            found.append((about.st_mtime, about.st_size, path))
    return sorted(entry for entry in found if entry[2].name != "lock")


def tidy(most: int) -> None:
    """Remove what was left by processes that were killed, and libraries until the rest is within bounds."""
    found = entries()
    size = sum(nbytes for _, nbytes, path in found if path.is_file())
    for used, nbytes, path in found:
        if path.is_dir():
            if time.time() - used > STALE:
                shutil.rmtree(path, ignore_errors=True)
        elif size > most:
            with suppress(OSError):  # Windows keeps what is in use, and no digest may go before its library
                path.with_suffix(".so").unlink(missing_ok=True)
                path.unlink(missing_ok=True)
                size -= nbytes

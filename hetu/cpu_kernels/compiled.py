"""C text in, functions out: a compiler where one is found, and a folder that keeps what it has made.

A `Source` is a text with functions. It is built at the first need of one of them, together with all others that are
wanted by then, and kept by a key of everything that its code depends on: the text, the prelude, the flags, the compiler
and the CPU, as homes are shared between machines. A library is built in a folder of its own and moved into place whole,
under a lock, so that ranks which start together compile it once. To load a library is to execute it; therefore the
folder must be writable by this user alone.

Nothing needs a compiler. Without one, or with `HETU_CC=0`, everything runs as NumPy calls; a compiler that fails is a
warning beside that.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

try:
    import fcntl
except ImportError:  # Windows, where processes that start together compile the same thing
    fcntl = None  # type: ignore[assignment]  # there is no stub for its absence

SETTING = "HETU_CC"  # the command of a C compiler, or 0 for none
NAMES = ("cc", "gcc", "clang")
DEADLINE = 120  # seconds for one library, most of which take half a second
CONTRACT = "#pragma STDC FP_CONTRACT ON"  # which gcc takes from its command line only
# A loop with a square root or a comparison is not vectorized without the first two; no result depends on them.
FLAGS = ("-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-std=gnu11", "-O3", "-fPIC", "-shared", "-w")


class Compiler(NamedTuple):
    """A C compiler: its command, and what tells it from another version."""

    command: tuple[str, ...]
    identity: str

    def start(self, source: Path, library: Path, flags: Sequence[str]) -> subprocess.Popen[str]:
        """Begin to compile a file."""
        line = [*self.command, *FLAGS, *flags, native(), str(source), "-o", str(library), "-lm", "-lpthread"]
        return subprocess.Popen(
            line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )


@cache
def compiler() -> Compiler | None:
    """The compiler that `HETU_CC` names; else the first of `NAMES` on the path, or that of the extra [cc]."""
    setting = os.environ.get(SETTING, "")
    if setting == "0":
        return None
    candidates = [shlex.split(setting)] if setting else [*([name] for name in NAMES), _wheel()]
    for command in candidates:
        if command and (found := shutil.which(command[0])) is not None:
            real = Path(found).resolve()
            about = real.stat()
            return Compiler((found, *command[1:]), f"{real} {about.st_size} {about.st_mtime_ns}")
    if setting:
        warnings.warn(f"{SETTING}={setting!r} is no command; hetu computes by NumPy", RuntimeWarning, stacklevel=2)
    return None


def _wheel() -> list[str]:
    """The command of the compiler that came as a package."""
    return [sys.executable, "-m", "ziglang", "cc"] if find_spec("ziglang") is not None else []


def native() -> str:
    """The flag for code of this very CPU."""
    return "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"


@cache
def cpu() -> str:
    """What this CPU can execute, as far as the system says."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return f"{platform.machine()} {line}"
    return f"{platform.machine()} {platform.processor()}"


@cache
def text_of(file: str) -> str:
    """A file of C text of this folder, with the text of others where it includes them."""
    text = files(__package__).joinpath(file).read_text("utf-8")
    return re.sub(r'^#include "(.+)"$', lambda found: text_of(found[1]), text, flags=re.M)


# -- the folder --------------------------------------------------------------------------------------------------------


@cache
def folder() -> Path:
    """The user's cache, or a folder of this process where others could write there or nothing can be written."""
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetu" / "compiled"
    with suppress(OSError):
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _ours_alone(kept) and os.access(kept, os.W_OK):
            return kept
    _own.append(tempfile.TemporaryDirectory(prefix="hetu-compiled-"))
    return Path(_own[0].name)


_own: list[tempfile.TemporaryDirectory[str]] = []  # removed at the end of the process


def _ours_alone(path: Path) -> bool:
    if not hasattr(os, "getuid"):  # Windows keeps others out of a user's folders
        return True
    about = path.stat()
    return about.st_uid == os.getuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@contextmanager
def _lock() -> Iterator[None]:
    """Inside, no other process builds. The end of a process frees it."""
    with open(folder() / "lock", "w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# -- sources -----------------------------------------------------------------------------------------------------------


class Source:
    """A text with functions, each a `void f(const Word* a, long long first, long long last, char* scratch)`.

    Where the text says `CONTRACT`, a product and a sum may become one fused multiply-add, which tiles need for their
    speed. The bits of others are those of NumPy and of any compiler.
    """

    def __init__(self, text: str, key: str) -> None:
        self.text, self.key = text, key
        self.library: ctypes.CDLL | None = None
        self.wrong = ""  # why there will be no library

    def loaded(self) -> bool:
        """Whether the library is at hand; loads it from the folder."""
        if self.library is None and not self.wrong:
            with suppress(OSError):
                self.library = ctypes.CDLL(str(folder() / f"{self.key}.so"))
        return self.library is not None

    def function(self, name: str) -> Any:
        """One of its functions, once it is built."""
        return getattr(self.library, name)


_sources: dict[str, Source] = {}  # by key


def source(text: str) -> Source | None:
    """What is to be built of a text, or None where there is no compiler or it failed at this text before."""
    made_by = compiler()
    if made_by is None:
        return None
    parts = (text, text_of("prelude.h"), *FLAGS, *made_by.command, made_by.identity, cpu(), sys.platform)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    found = _sources.setdefault(key, Source(text, key))
    return None if found.wrong else found


def build(wanted: Sequence[Source]) -> bool:
    """Make all of these ready, at once where the folder lacks several; whether that went well."""
    made_by = compiler()
    if not all([s.loaded() for s in wanted]) and made_by is not None:
        with _lock():  # meanwhile another process may have built them
            lacking = list(dict.fromkeys(s for s in wanted if not s.loaded() and not s.wrong))
            with tempfile.TemporaryDirectory(dir=folder(), prefix="building-") as private:
                _compile(made_by, lacking, Path(private))
    return all(s.library is not None for s in wanted)


def _compile(made_by: Compiler, lacking: Sequence[Source], private: Path) -> None:
    """Compile sources side by side and move what was made into the folder."""
    running = []
    for s in lacking:
        text, library = private / f"{s.key}.c", private / f"{s.key}.so"
        text.write_text(f"{text_of('prelude.h')}\n{s.text}", "utf-8")
        flags = ["-ffp-contract=fast" if CONTRACT in s.text else "-ffp-contract=off"]
        try:
            running.append((s, library, made_by.start(text, library, flags)))
        except OSError as error:
            s.wrong = str(error)
    for s, library, process in running:
        try:
            _, said = process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            said = f"it did not end within {DEADLINE} s"
        if process.returncode == 0 and library.exists():
            os.replace(library, folder() / library.name)
        s.wrong = "" if s.loaded() else said.strip() or f"status {process.returncode}"
    wrong = next((s.wrong for s in lacking if s.wrong), "")
    if wrong:
        said = f"{shlex.join(made_by.command)} failed, so hetu computes by NumPy: {wrong:.400}"
        warnings.warn(f"{said} (fix: another compiler as {SETTING}, or {SETTING}=0)", RuntimeWarning, stacklevel=2)

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
LEAST = 8  # functions of a unit: several are compiled side by side
# A loop with a square root or a comparison is not vectorized without the first two; no result depends on them.
FLAGS = ("-fno-math-errno", "-fno-trapping-math", "-std=gnu11", "-O3", "-fPIC", "-shared", "-w")


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
    """A file of C text of this folder."""
    return files(__package__).joinpath(file).read_text("utf-8")


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

    With `contract`, a product and a sum may become one fused multiply-add, which tiles need for their speed. The bits
    of others are those of NumPy and of any compiler. `shared` is the name of the one function of a text that may stand
    in a unit with others of that name.
    """

    def __init__(self, text: str, key: str, contract: bool, shared: str) -> None:
        self.text, self.key, self.contract, self.shared = text, key, contract, shared
        self.library: ctypes.CDLL | None = None
        self.obstacle = ""  # why it cannot be loaded now
        self.wrong = ""  # why there will be no library

    def loaded(self) -> bool:
        """Whether the library is at hand; loads it from the folder."""
        if self.library is None and not self.wrong:
            try:
                self.library = ctypes.CDLL(str(folder() / f"{self.key}.so"))
            except OSError as error:
                self.obstacle = str(error)
        return self.library is not None

    def function(self, name: str) -> Any:
        """One of its functions, once it is built."""
        return getattr(self.library, f"{name}_{self.key}" if self.shared else name)

    def part(self) -> str:
        """What stands for it in a unit."""
        named = f"#define {self.shared} {self.shared}_{self.key}\n{self.text}#undef {self.shared}\n"
        return named if self.shared else self.text


_sources: dict[str, Source] = {}  # by key


def source(text: str, contract: bool = False, shared: str = "") -> Source | None:
    """What is to be built of a text, or None where there is no compiler or it failed at this text before."""
    made_by = compiler()
    if made_by is None:
        return None
    made_for = (*FLAGS, *made_by.command, made_by.identity, cpu(), sys.platform)
    parts = (text, text_of("prelude.h"), str(contract), shared, *made_for)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    found = _sources.setdefault(key, Source(text, key, contract, shared))
    return None if found.wrong else found


def build(wanted: Sequence[Source]) -> bool:
    """Make all of these ready, at once where the folder lacks several; whether that went well."""
    made_by = compiler()
    if not all([s.loaded() for s in wanted]) and made_by is not None:
        with _lock():  # meanwhile another process may have built them
            lacking = list(dict.fromkeys(s for s in wanted if not s.loaded() and not s.wrong))
            shared = [s for s in lacking if s.shared]
            side_by_side = min(os.cpu_count() or 1, -(-len(shared) // LEAST))
            units = [[s] for s in lacking if not s.shared] + [shared[k::side_by_side] for k in range(side_by_side)]
            wrong = _compile(made_by, units)
            wrong += _compile(made_by, [[s] for unit in wrong if len(unit) > 1 for s in unit])
            _warn(made_by, [unit[0] for unit in wrong if len(unit) == 1])
    return all(s.library is not None for s in wanted)


def _compile(made_by: Compiler, units: Sequence[Sequence[Source]]) -> list[Sequence[Source]]:
    """Compile units side by side and move what was made into the folder; those that failed, and why."""
    failed = []
    with tempfile.TemporaryDirectory(dir=folder(), prefix="building-") as private:
        running = [_started(made_by, unit, Path(private)) for unit in units]
        for unit, (process, library) in zip(units, running):
            said = process if isinstance(process, str) else _ended(process)
            for s in unit if library.exists() else ():
                whole = Path(private, f"{s.key}.whole")
                os.link(library, whole)
                os.replace(whole, folder() / f"{s.key}.so")
            if not all([s.loaded() for s in unit]):
                failed.append(unit)
                unit[0].wrong = (said or unit[0].obstacle or "it made nothing") if len(unit) == 1 else ""
    return failed


def _started(made_by: Compiler, unit: Sequence[Source], private: Path) -> tuple[subprocess.Popen[str] | str, Path]:
    """The compiler at work on a unit, or why it is not; and the library that is to come."""
    text, library = private / f"{unit[0].key}.c", private / f"{unit[0].key}.so"
    text.write_text("\n".join((text_of("prelude.h"), *(s.part() for s in unit))), "utf-8")
    contract = f"-ffp-contract={'fast' if unit[0].contract else 'off'}"
    try:
        return made_by.start(text, library, [contract]), library
    except OSError as error:
        return str(error), library


def _ended(process: subprocess.Popen[str]) -> str:
    """What a compiler said, once it has ended."""
    try:
        _, said = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        said = f"it did not end within {DEADLINE} s"
    return said.strip() or (f"status {process.returncode}" if process.returncode else "")


def _warn(made_by: Compiler, wrong: Sequence[Source]) -> None:
    for s in wrong:
        said = f"{shlex.join(made_by.command)} failed, so hetu computes by NumPy: {s.wrong:.400}"
        warnings.warn(f"{said} (fix: another compiler as {SETTING}, or {SETTING}=0)", RuntimeWarning, stacklevel=3)

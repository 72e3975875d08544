"""The C compiler of this machine: which one, what tells its code from other code, and runs of it that always end.

Importing hetu asks for none. It is found when the first C text is to be compiled, and found means that it has read a
header of C: one that can't, such as a driver without its headers, is as good as none. Who has waited for one in vain
leaves word of it, so that processes which meet a compiler that hangs wait once for all of them.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from ..system import kill_group
from .folder import folder

SETTING = "HETU_CC"  # the command of a C compiler, whose last options count more than those below, or 0 for none
NAMES = ("cc", "gcc", "clang")
DEADLINE = 120.0  # seconds for one library, most of which take half a second; the first use of the wheel takes up to 45
BANNED = 600.0  # seconds for which nobody waits again for a compiler that hung: it may only have been slow
LOOK = 0.2  # seconds after which a process looks for word of another
# A loop with a square root or a comparison is not vectorized without the first two; no result depends on them. Integers
# wrap as NumPy's do.
FLAGS = ("-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-fwrapv", "-std=gnu11", "-O3", "-w")
# For the functions of a program, of which there are many: half the time of -O3, and as fast, given that loops of few
# steps are taken apart. Written kernels would be slower. Both gcc and clang know each of them.
QUICKLY = ("-O2", "-ftree-vectorize", "-fvect-cost-model", "-fpeel-loops")
TEMPORARY = ("TMPDIR", "TMP", "TEMP")  # where compilers put what they make on the way; Windows asks for the others
LIBRARY = ("-fPIC", "-shared") if os.name == "posix" else ("-shared",)
ASKED = ("-include", "math.h", "-dM", "-E", "-x", "c", os.devnull)  # a text of all macros


class Notice:
    """Where the processes of a user on this machine leave word that a compiler hangs."""

    def __init__(self, *compiler: str) -> None:
        key = hashlib.sha256("\0".join((platform.node(), *compiler)).encode()).hexdigest()[:24]
        self.path = folder() / f"{key}.hangs"

    def check(self) -> None:
        """TimeoutError if another process has waited in vain, and not long ago."""
        try:
            left = BANNED - abs(time.time() - self.path.stat().st_mtime)
        except OSError:
            return
        if left > 0:
            again = f"it is tried again in {left:.0f} s, or once {self.path} is removed"
            raise TimeoutError(f"it did not end in another process; {again}")

    def leave(self) -> None:
        with suppress(OSError):  # then every process waits for itself
            self.path.write_text("A compiler hangs. Without this file it is tried again.\n")


class Run:
    """A command under way, in a group of its own, so that what it has started ends with it.

    What it says goes to a file, as a pipe would be open for as long as any of them lives. TimeoutError if there is word
    that it hangs.
    """

    def __init__(
        self, command: Sequence[str], notice: Notice, seconds: float, env: Mapping[str, str] | None = None
    ) -> None:
        notice.check()
        self.notice, self.seconds, self.until = notice, seconds, time.monotonic() + seconds
        with ExitStack() as held:
            self.said = held.enter_context(tempfile.TemporaryFile())
            with _uninterrupted():
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=self.said,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                    env=env,
                )
                held.callback(kill_group, self.process)
            self.held = held.pop_all()

    def __enter__(self) -> Run:
        return self

    def end(self, look: Callable[[], object] = bool) -> tuple[bool, str]:
        """Wait for it and `look` meanwhile: whether it succeeded, and what it said.

        TimeoutError if it does not end in time, or another.
        """
        while not self._ended(min(LOOK, max(0.0, self.until - time.monotonic()))):
            if time.monotonic() >= self.until:
                self.notice.leave()
                raise TimeoutError(f"it did not end within {self.seconds:.3g} s")
            self.notice.check()
            look()
        self.said.seek(0)
        said = self.said.read().decode("utf-8", "replace").strip()
        return self.process.returncode == 0, said or f"status {self.process.returncode}"

    def _ended(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is not None

    def __exit__(self, *_: object) -> None:
        self.held.close()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let an interrupt wait, where the system can: a command that has begun must be known to whoever stops it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Compiler(NamedTuple):
    """A C compiler: its command, and the macros by which it describes its version and the CPU that it compiles for."""

    command: tuple[str, ...]
    macros: str
    options: tuple[str, ...] = ()  # the user's own, which come last: the last of several that say otherwise counts

    @property
    def version(self) -> str:
        """What it calls itself, in a few words."""
        found = re.search(r'#define __VERSION__ "(.*)"', self.macros)
        return f"{Path(self.command[0]).name} {found[1] if found else ''}".strip()

    @property
    def notice(self) -> Notice:
        """Where there would be word that it hangs."""
        return Notice(*self.command, *self.options, self.macros)

    def start(self, source: Path, library: Path, flags: Sequence[str]) -> Run:
        """Begin to compile a file; what is made on the way lies beside it."""
        line = [*self.command, *LIBRARY, *flags, *self.options, str(source), "-o", str(library), "-lm", "-lpthread"]
        beside = dict.fromkeys(TEMPORARY, str(source.parent))
        return Run(line, self.notice, DEADLINE, {**os.environ, **beside})


def compiler() -> Compiler | None:
    """The compiler that `HETU_CC` names; else the first of `NAMES` that works, or that of the extra [cc]."""
    found = _found(os.environ.get(SETTING, ""))
    return found if isinstance(found, Compiler) else None


def why_none() -> str:
    """Why there is no compiler, and what to do."""
    found = _found(os.environ.get(SETTING, ""))
    return "" if isinstance(found, Compiler) else found


def switch_off() -> None:
    """Compile nothing from now on, in this process and those that it starts."""
    os.environ[SETTING] = "0"


@cache
def _found(setting: str) -> Compiler | str:
    if setting == "0":
        return f"{SETTING}=0 in the environment"
    wrong, commands, until = [], _candidates(setting), time.monotonic() + DEADLINE
    for left, command in zip(range(len(commands), 0, -1), commands):  # each has an equal part of what is left of it
        try:
            made = _asked(command, (until - time.monotonic()) / left)
        except OSError as error:  # TimeoutError is one
            made = str(error)
        if isinstance(made, Compiler):
            return made
        wrong.append(f"{shlex.join(command)}: {made:.400}")
    if setting:
        wrong = wrong or [f"{SETTING}={setting!r} is no command"]
    if wrong:
        warn(f"{'; '.join(wrong)} (fix: name a C compiler that works as {SETTING}, or set {SETTING}=0)")
        return "; ".join(wrong)
    return f"there is no {', '.join(NAMES)} on the path; install one, or the extra [cc]"


def warn(reason: str) -> None:
    """Say that NumPy stands in, and why."""
    warnings.warn(f"hetu computes by NumPy: {reason}", RuntimeWarning, stacklevel=2)


def _candidates(setting: str) -> list[list[str]]:
    """The commands that exist, best first."""
    commands: list[list[str]] = []
    if shutil.which(setting):  # a path may have spaces
        commands = [[setting]]
    elif setting:
        with suppress(ValueError):  # a quotation mark without its sister
            commands = [shlex.split(setting, posix=os.name == "posix")]
    else:
        wheel = [[sys.executable, "-m", "ziglang", "cc"]] if find_spec("ziglang") is not None else []
        commands = [*([name] for name in NAMES if not _is_stub(name)), *wheel]
    found = [(shutil.which(command[0]), command[1:]) for command in commands if command]
    return [[os.path.abspath(path), *rest] for path, rest in found if path is not None]


def _is_stub(name: str) -> bool:
    """Whether this is the command of macOS that opens a window and offers to install a compiler."""
    if sys.platform != "darwin" or shutil.which(name) != f"/usr/bin/{name}":
        return False
    return subprocess.run(["/usr/bin/xcode-select", "-p"], capture_output=True).returncode != 0


def _asked(command: Sequence[str], seconds: float) -> Compiler | str:
    """The compiler, by what it says of itself, or what went wrong. It compiles for this very CPU where it can."""
    # Compilers take vectors of 256 bits on many a CPU that has 512: longer ones once made it slower.
    tuned: tuple[str, ...] = ("-march=native", "-mprefer-vector-width=512")
    if platform.machine() in ("arm64", "aarch64", "ppc64le"):
        tuned = ("-mcpu=native",)
    options = tuple(reversed([*takewhile(lambda word: word.startswith("-"), reversed(command))]))
    first = command[: len(command) - len(options)]
    named = any(word.startswith(("-march=", "-mcpu=")) for word in command)
    for flags in ((),) if named else (tuned, ()):
        made = (*first, *FLAGS, *flags)
        with Run([*made, *QUICKLY, *options, *ASKED], Notice(*made, *options), seconds) as run:
            well, said = run.end()
        macros = "\n".join(line for line in said.splitlines() if line.startswith("#define "))  # not what varies
        if well and "#define _MSC_VER" in macros:  # such libraries show none of their functions
            return "it makes code for MSVC; take gcc or clang of MinGW, or the extra [cc]"
        if well and macros:
            return Compiler(made, macros, options)
    return said

"""A student's code in a process of its own: started, asked, waited for, and ended, all with deadlines.

Nothing that the process says is believed but as an answer to be compared. It is late by a clock that stands while the
machine has no core for it (`inside/clock.py`). Requests and answers are frames of plain data
(`inside/codec.py`) over its standard input and output; what the code prints is kept in part (`notes`). Left out:
systems without POSIX limits have the deadline alone.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from .inside import codec
from .inside.clock import Clock
from .submission import Code

HERE = Path(__file__).parent
GARBLED = "the process wrote what is no answer"
CROWDED = 10.0  # times as long, at most, may pass on the wall
BEGIN = 60.0  # seconds to start Python and import NumPy or hetu on a busy machine; no student's code runs meanwhile
KEPT = 8_000  # bytes of what the code prints
# What a student's process inherits of the environment. One thread for BLAS: a class is graded side by side.
INHERITED = ("LANG", "LC_ALL", "SYSTEMROOT")
GIVEN = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HETU_CC": "0", "PYTHONHASHSEED": "0"}
START = "import sys; sys.path[:] = sys.argv[1:]; from inside.main import main; del sys.path[0]; main()"


class Ended(Exception):
    """The process is gone or was ended; the text says why."""


@dataclass(frozen=True)
class Allowance:
    """What a submission may take: `seconds` for a call and for loading, `total` for all together, bytes of memory."""

    seconds: float = 5.0
    total: float = 20.0
    memory: int = 3 << 30


@dataclass
class Process:
    """One process. `start` loads the code; `ask` and `read` raise Ended when it is late or gone."""

    code: Code
    limits: Allowance = field(default_factory=Allowance)
    walls: list[str] = field(default_factory=list)  # which of `inside/walls.py` stand

    def __post_init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lab-"))
        self.frames: queue.Queue[Any] = queue.Queue(maxsize=1)  # the reader waits, and so does who floods it
        self.notes = b""
        self.late = ""
        self.loading = 0.0  # seconds
        self.readers: list[threading.Thread] = []
        self.running: subprocess.Popen[bytes] | None = None
        self.clock = Clock()

    def start(self) -> Any:
        """Start the process and load the code: what loading it came to, as an answer. Ended when it does not answer."""
        work, packages = self.folder / "work", self.folder / "packages"
        work.mkdir()
        packages.mkdir()
        for name, text in self.code.files.items():
            (work / name).write_text(text, "utf-8")
        if self.code.driver:
            (work / "_driver.py").write_text(self.code.driver, "utf-8")
        paths, readable = importable(packages, self.code.with_hetu)
        environment = {k: os.environ[k] for k in INHERITED if k in os.environ} | GIVEN
        pipe = subprocess.PIPE
        self.running = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START, str(HERE), *paths],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=environment,
            cwd=work,
            start_new_session=True,
        )
        self.clock.close()
        self.clock = Clock(self.running.pid)
        self.readers = [threading.Thread(target=t, daemon=True) for t in (self._read_frames, self._read_notes)]
        for reader in self.readers:
            reader.start()
        self.send(
            {
                "first": ["numpy", *(["hetu"] if self.code.with_hetu else [])],
                "folder": str(work),
                "readable": [*readable, str(work)],
                "listed": [p for p in paths if Path(p).is_dir()],
                "seconds": 0.8 * self.limits.seconds,
                "memory": self.limits.memory,
                "processor_seconds": int(self.limits.total) + 1,
                "driver": "_driver.py" if self.code.driver else "",
                "file": self.code.main,
            }
        )
        kind, *walls = self.read(BEGIN)
        self.walls = walls[0] if kind == "walls" else []
        began = self.clock.now()
        try:
            return self.read()
        finally:
            self.loading = self.clock.now() - began

    def send(self, request: Any) -> None:
        """Hand a request over; Ended if the process is gone, or does not take it in time."""
        assert self.running is not None and self.running.stdin is not None
        taken = threading.Event()

        def watch() -> None:
            if not self.in_time(taken.wait, self.limits.seconds):
                self.end(self.unanswered())

        threading.Thread(target=watch, daemon=True).start()
        try:
            codec.send(self.running.stdin, request)
        except OSError:
            raise self.ended() from None
        finally:
            taken.set()

    def in_time(self, wait: Callable[[float], Any], seconds: float) -> Any:
        """What `wait(seconds)` comes to, by the clock of the process; nothing if it is late."""
        until, most, found = self.clock.now() + seconds, monotonic() + CROWDED * seconds, None
        while not found and self.clock.now() < until and monotonic() < most:
            found = wait(max(0.01, until - self.clock.now()))
        return found

    def read(self, seconds: float | None = None) -> Any:
        """The next answer. Ended if there is none in time, or none any more."""

        def get(seconds: float) -> Any:
            with contextlib.suppress(queue.Empty):
                return self.frames.get(timeout=seconds)

        frame = self.in_time(get, self.limits.seconds if seconds is None else seconds)
        if frame is None:
            self.end(self.unanswered())
            raise self.ended()
        if isinstance(frame, Exception):
            if not isinstance(frame, EOFError):
                self.end(GARBLED)
            raise self.ended()
        return frame

    def unanswered(self) -> str:
        return f"no answer within {self.limits.seconds:g} s: does a loop never end?"

    def ended(self) -> Ended:
        """Why the process is no more, in words."""
        if self.late:
            return Ended(self.late)
        assert self.running is not None
        try:
            code = self.running.wait(5)
        except subprocess.TimeoutExpired:
            self.end(GARBLED)
            return Ended(GARBLED)
        if code < 0 and -code == getattr(signal, "SIGXCPU", 0):
            return Ended(f"the code took more than {self.limits.total:g} s of the processor: does a loop never end?")
        told = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        return Ended(f"the process ended {told} before it answered")

    def end(self, why: str = "") -> None:
        """End the process and its group, and remove its folder; `why` is what later reads say."""
        self.late = self.late or why
        running = self.running
        if running is not None and running.poll() is None:
            try:
                os.killpg(running.pid, signal.SIGKILL)
            except (AttributeError, OSError):
                running.kill()
            running.wait()
        self.clock.close()
        for reader in self.readers:
            if reader is not threading.current_thread():
                reader.join(2)
        for pipe in (running.stdin, running.stdout, running.stderr) if running is not None else ():
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not sent yet has nobody who takes it
                    pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read_frames(self) -> None:
        assert self.running is not None and self.running.stdout is not None
        while True:
            try:
                frame = codec.receive(self.running.stdout)
                if not (isinstance(frame, list) and frame and isinstance(frame[0], str)):
                    raise ValueError("no answer")
            except Exception as error:
                self._put(error)
                return
            if not self._put(frame):
                return

    def _put(self, frame: Any) -> bool:
        """Hand a frame to whoever reads, unless the process has been ended meanwhile."""
        while True:
            try:
                self.frames.put(frame, timeout=0.1)
                return True
            except queue.Full:
                if self.running is None or self.running.returncode is not None:
                    return False

    def _read_notes(self) -> None:
        assert self.running is not None and self.running.stderr is not None
        while piece := os.read(self.running.stderr.fileno(), 1 << 16):
            self.notes += piece[: max(0, KEPT - len(self.notes))]


def elapsed(processes: Sequence[Process]) -> float:
    """The clock of ranks: that of the one which waits for a core the longest."""
    return min(process.clock.now() for process in processes)


def importable(packages: Path, with_hetu: bool) -> tuple[list[str], list[str]]:
    """Where the process may import from, and what it may read: Python, NumPy, and hetu only where the lab needs it."""
    python = [p for p in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")) if p]
    libraries = [p for p in sys.path if Path(p).name == "lib-dynload"]
    paths = [*python, *libraries, str(packages)]
    # The folder of other packages may stand in that of the standard library, and hetu in it.
    readable = [str(p) for folder in python for p in Path(folder).iterdir() if not p.name.endswith("-packages")]
    readable += [*libraries, str(packages), str(HERE / "inside")]
    site = Path(np.__file__).parent.parent
    wanted = [site / "numpy", site / "numpy.libs"]
    if with_hetu:
        wanted += [HERE.parent.parent]
        paths, readable = [*paths, str(site)], [*readable, str(site)]
    for folder in wanted:
        if folder.is_dir():
            readable.append(str(folder))
            try:
                (packages / folder.name).symlink_to(folder, target_is_directory=True)
            except OSError:  # Windows, without the right to make links
                paths.append(str(folder.parent))
    return list(dict.fromkeys(paths)), readable

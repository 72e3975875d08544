"""Trials, and the log that all who try share: the log is the search, so that what is lost with a process is little.

Each line is a fact in JSON: a trial begins, lives, ends. A process that wants to begin one takes the lock of the file,
reads what is new, decides, and writes; so any number of processes work on one log, and one that starts anew goes on
from it. A trial whose process gives no sign of life for `LEASE` seconds is lost, and its configuration is tried again.
Left out: disks that several hosts share without locks.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError
from ..files import check_place
from ..ranges import AnyFloat, AtLeast0, AtLeast1, Count, Positive
from ..system import lock, unlock
from .space import Config, Space

LEASE = 30.0  # seconds
LIVES = 3  # how often a trial is begun: it may be what ends its processes
PAUSE = 0.01
VERSION = 1


@dataclass
class Trial:
    """One run of what is searched: its configuration, how long it may learn, and what came out.

    `loss` is what is to be small: where scores are to be large, their negative. It is infinite for a trial that failed.
    `budget` is the epochs, or the like, that it had learned for at its end, which may go on from trial `parent`.
    `notes` are those of whoever proposed it.

    >>> Trial(0, {"x": 1.0}).cost, Trial(1, {"x": 2.0}, loss=0.5).ok
    (inf, True)
    """

    number: Count
    config: Config
    budget: Positive = 1.0
    parent: Count | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    loss: AnyFloat | None = None
    error: str = ""
    seconds: AtLeast0 = 0.0
    seen: AtLeast0 = 0.0
    worker: str = ""
    begun: AtLeast1 = 1

    @property
    def ended(self) -> bool:
        return self.loss is not None

    @property
    def cost(self) -> float:
        """The loss, infinite before the end."""
        return math.inf if self.loss is None else self.loss

    @property
    def ok(self) -> bool:
        """Whether it ended with a number."""
        return math.isfinite(self.cost)


def worker_name() -> str:
    """Who tries: this thread of this process of this host."""
    return f"{socket.gethostname()}:{os.getpid()}:{threading.get_ident()}"


def _is_gone(worker: str) -> bool:
    """Whether who tried is known to try no more: a process that has ended, or this very thread."""
    host, process, _ = worker.rsplit(":", 2)
    if worker == worker_name() or os.name != "posix" or host != socket.gethostname():
        return worker == worker_name()
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


class Log:
    """The trials of a search in a file of lines, or in memory alone without a path.

    CheckpointError for a file that is no such log, or one of another search: `facts` are compared.
    """

    @classmethod
    def opened(cls, path: Path) -> Log:
        """A log that is there, as it is now, of whatever search; CheckpointError if it is none."""
        try:
            with open(path, encoding="utf-8") as file:
                facts = json.loads(file.readline())["search"]
            Space.parse(facts["space"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is no log of a search", fix="pass the log= of one") from error
        return cls(path, facts)

    def __init__(self, path: Path | None, facts: Mapping[str, Any]) -> None:
        self.path, self.trials, self.read = path, list[Trial](), 0
        self.facts = json.loads(json.dumps({"version": VERSION, **facts}))
        if path is not None:
            check_place(path, CheckpointError)
            with self.held():
                if not self.read:
                    self._head(path)

    def _head(self, path: Path) -> None:
        """Write the first line, also where a kill has cut it off; what is anything else stays as it is."""
        fact = {"search": self.facts}
        if not json.dumps(fact).encode().startswith(path.read_bytes()):
            raise CheckpointError(f"{path} is no log of a search", fix="use another file")
        self._write(fact)
        self.update()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else decides inside."""
        if self.path is None:
            yield
            return
        with open(self.path, "a", encoding="utf-8") as file:
            while not lock(file):
                time.sleep(PAUSE)
            try:
                self.update()
                yield
            finally:
                unlock(file)

    def update(self) -> Sequence[Trial]:
        """Read what has been written since; a line that a kill cut off is left out."""
        if self.path is not None:
            with open(self.path, "rb") as file:
                file.seek(self.read)
                text = file.read()
            whole = text.rfind(b"\n") + 1
            for line in text[:whole].splitlines():
                self._take(line)
            self.read += whole
        return self.trials

    def _take(self, line: bytes) -> None:
        try:
            fact = json.loads(line)
            if "search" in fact:
                if fact["search"] != self.facts:
                    told = ", ".join(n for n in self.facts if fact["search"].get(n) != self.facts[n])
                    raise CheckpointError(f"{self.path} is the log of another search: {told}", fix="use another file")
            elif "begin" in fact:
                self.trials.append(Trial(**fact["begin"]))
            else:
                trial = self.trials[fact.pop("trial")]
                fact |= {"loss": math.inf} if fact.get("loss", 0.0) is None else {}
                vars(trial).update(vars(Trial(**vars(trial) | fact)))  # which answers what is no fact of a trial
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{self.path}: {line[:60]!r} is no line of a search", fix="use another file"
            ) from error

    def _write(self, fact: Mapping[str, Any]) -> None:
        if self.path is None:
            self._take(json.dumps(fact).encode())
            return
        with open(self.path, "r+b") as file:
            file.truncate(self.read)  # of what a kill cut off, if there is any
            file.seek(self.read)
            file.write(json.dumps(fact).encode() + b"\n")

    def begin(self, trial: Trial) -> None:
        """Write that a trial begins; where the log is `held`."""
        self._write({"begin": {k: v for k, v in vars(trial).items() if k not in ("loss", "error", "seconds")}})
        self.update()

    def tell(self, trial: Trial, **facts: Any) -> None:
        """Write what is known of a trial since: a sign of life, or its end."""
        if facts.get("loss") is not None and not math.isfinite(facts["loss"]):
            facts["loss"] = None  # JSON has no infinity
        with self.held():
            self._write({"trial": trial.number, **facts})
            self.update()

    def lost(self, now: float) -> list[Trial]:
        """Trials whose process has ended, or has given no sign of life for too long; where the log is `held`."""
        return [t for t in self.trials if not t.ended and (now - t.seen > LEASE or _is_gone(t.worker))]

    def take_over(self, trial: Trial, now: float) -> Trial:
        """Write that this process begins a trial anew, or that it failed if that were too often; where it is `held`."""
        if trial.begun == LIVES:
            facts: dict[str, Any] = {"loss": None, "error": f"its process was lost {LIVES} times"}
        else:
            facts = {"worker": worker_name(), "seen": now, "begun": trial.begun + 1}
        self._write({"trial": trial.number, **facts})
        self.update()
        return trial

"""The kernel's side of a notebook's ranks: start them, send a cell, gather what they say, never leave one behind.

`heturun` starts the ranks; each connects to the kernel by a socket that only its user can open. A cell that fails, or
is done, on one rank while others wait for it ends the pool, and the next cell finds a new one.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, wait
from typing import Any

from ...core.errors import HetuError
from ...core.leaf import scope_now
from ...system import apart
from .wire import ADDRESS, TOKEN, mentioned, packed, receive, send, unpacked

READY_WITHIN, GRACE, INTERRUPTED_WITHIN, ANSWER_WITHIN = 30.0, 0.3, 2.0, 1.0  # seconds
LOOK_EVERY, WAITED_IN_VAIN = 1.0, 4.0  # seconds, for ranks that are done with the cell
Say = Callable[[int, str], None]


class RankError(HetuError, RuntimeError):
    """A cell failed on a rank."""


@dataclass
class CellOutcome:
    """How a cell ended: the tracebacks and lines of ranks that failed, where the others were, and rank 0's names.

    `stayed` has the names that the cell reads and that could not go, and why.
    """

    failures: dict[int, tuple[str, int]] = field(default_factory=dict)
    waiting: dict[int, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    stayed: dict[str, str] = field(default_factory=dict)
    shown: list[dict[str, str]] = field(default_factory=list)  # what a notebook displays, in several forms
    packed: bytes = b""


class Pool:
    """`workers` ranks and `servers` parameter servers, running until `close`."""

    def __init__(self, workers: int, servers: int = 0, options: tuple[str, ...] = ()) -> None:
        self.workers, self.servers, self.options = workers, servers, options
        self.cells, self.known = 0, dict[str, Any]()
        self.ranks: dict[Connection, int] = {}
        self.output = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - what the launcher says
        token = secrets.token_hex(16)
        self.listener = Listener(authkey=token.encode(), backlog=workers)  # a socket file, or a pipe, of this user
        self.came: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        threading.Thread(target=self._accept, name="ranks", daemon=True).start()
        self.job = subprocess.Popen(
            [sys.executable, "-m", "hetu.dist.launch.heturun", "-w", str(workers), "-s", str(servers), *options]
            + [sys.executable, "-m", "hetu.teach.notebook.rank"],
            env={**os.environ, ADDRESS: str(self.listener.address), TOKEN: token},
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.output,
            **apart(),
        )

    # -- life ----------------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return self.job.poll() is None and not any(self._has_left(c) for c in self.ranks)

    def _has_left(self, connection: Connection) -> bool:
        """Whether a rank has gone: between cells ranks say nothing, so all that can be read is the end."""
        return connection.closed or connection.poll()

    def _accept(self) -> None:
        for _ in range(self.workers):
            with contextlib.suppress(OSError, EOFError, AuthenticationError):  # the pool ends, or a stranger came
                self.came.put(self.listener.accept())

    def gather(self) -> None:
        """Wait until all ranks have started. RankError, which quotes the launcher, if they do not."""
        until = time.monotonic() + READY_WITHIN
        while len(self.ranks) < self.workers:
            with contextlib.suppress(queue.Empty):
                connection = self.came.get(timeout=0.05)
                self.ranks[connection] = receive(connection)["rank"]
                continue
            if self.job.poll() is not None or time.monotonic() > until:
                said = self._launcher_said()
                self.close()
                raise RankError(f"{len(self.ranks)} of {self.workers} ranks came\n{said}", fix="see `hetu doctor`")

    def close(self) -> None:
        """End all ranks and servers, and wait until they have gone."""
        for connection in self.ranks:
            connection.close()
        self.listener.close()
        self.job.terminate()
        try:
            self.job.wait(2.0)
        except subprocess.TimeoutExpired:
            self.job.kill()
            self.job.wait()
        self.output.close()

    def _launcher_said(self) -> str:
        self.output.seek(0)
        return self.output.read().strip()

    # -- cells ---------------------------------------------------------------------------------------------------

    def run(self, text: str, names: dict[str, Any], say: Say) -> CellOutcome:
        """Run a cell on all ranks, with the names that it reads and that have changed here since the ranks got them."""
        self.gather()
        self.cells += 1
        wanted = {n: names[n] for n in needed(text, names) if self.known.get(n, self) is not names[n]}
        values, stayed = packed(wanted)
        for connection in self.ranks:
            send(connection, "cell", values, text=text, number=self.cells, cell=scope_now().cell)
        outcome = CellOutcome(stayed=stayed)
        try:
            left = self._listen(outcome, set(self.ranks), say, None)
            outcome.values = unpacked(outcome.packed, names)
        except KeyboardInterrupt:
            self._interrupt(outcome, say)
            raise
        if left:
            outcome.waiting = self._where(left, say)
            self.close()
        self.known |= {n: v for n, v in wanted.items() if n not in stayed} | outcome.values
        return outcome

    def _listen(self, outcome: CellOutcome, busy: set[Connection], say: Say, until: float | None) -> set[Connection]:
        """Listen until all of `busy` are done, the time is over, one fails, or the rest can only wait in vain.

        Returns those that are not done.
        """
        waits = dict.fromkeys(busy, 0.0)
        while busy:
            some_are_done = len(busy) < self.workers and until is None
            ready = _readable(busy, time.monotonic() + LOOK_EVERY if some_are_done else until)
            for connection in ready:
                rank = self.ranks[connection]
                try:
                    message = receive(connection)
                except (EOFError, OSError):
                    self.job.wait(GRACE + 2.0)
                    outcome.failures[rank] = (f"rank {rank} has ended\n{self._launcher_said()}", 0)
                    return busy - {connection}
                if message["kind"] == "text":
                    say(rank, message["text"])
                elif message["kind"] == "shown":
                    outcome.shown.append(message["data"])
                elif message["kind"] == "done":
                    busy = busy - {connection}
                    outcome.packed = outcome.packed or message["values"]
                    if message["failure"]:
                        outcome.failures[rank] = (message["failure"], message["line"])
                        until = until or time.monotonic() + GRACE
                elif message["kind"] == "where":
                    waits[connection] = message["waits"]
            if ready:
                continue
            if not some_are_done:
                break
            if min(waits[c] for c in busy) > WAITED_IN_VAIN:
                self._explain(outcome, busy)
                break
            for connection in busy:
                send(connection, "where")
        return busy

    def _explain(self, outcome: CellOutcome, busy: set[Connection]) -> None:
        """Say that ranks wait for others which are done with the cell."""
        done = sorted(self.ranks[c] for c in self.ranks.keys() - busy)
        said = f"waiting for others: {numbered(self.ranks[c] for c in busy)}; done with the cell: {numbered(done)}"
        error = RankError(said, fix="what one rank communicates, all must, in the same order; see where they wait")
        outcome.failures[done[0]] = (f"RankError: {error}", 0)

    def _where(self, waiting: set[Connection], say: Say) -> dict[int, str]:
        """The line at which each of these ranks is."""
        found, until = dict[int, str](), time.monotonic() + ANSWER_WITHIN
        with contextlib.suppress(OSError, EOFError):
            for connection in waiting:
                send(connection, "where")
            while (missing := [c for c in waiting if self.ranks[c] not in found]) and time.monotonic() < until:
                for connection in _readable(missing, until):
                    message = receive(connection)
                    if message["kind"] == "where":
                        found[self.ranks[connection]] = message["line"]
                    elif message["kind"] == "text":
                        say(self.ranks[connection], message["text"])
        return found

    def _interrupt(self, outcome: CellOutcome, say: Say) -> None:
        """Stop the cell on all ranks; a pool in which one does not stop is ended."""
        left = set(self.ranks)
        try:
            for connection in self.ranks:
                send(connection, "interrupt")
            left = self._listen(outcome, left, say, time.monotonic() + INTERRUPTED_WITHIN)
        finally:  # a second interrupt comes here too
            if left:
                self.close()


def numbered(ranks: Iterable[int]) -> str:
    """
    >>> numbered([2, 1]), numbered([0])
    ('ranks 1, 2', 'rank 0')
    """
    found = sorted(ranks)
    return f"rank{'s' * (len(found) > 1)} {', '.join(map(str, found))}"


def _readable(connections: Collection[Connection], until: float | None) -> list[Connection]:
    """Those that say something, or end, before the clock shows `until`."""
    ready = wait(connections, None if until is None else max(0.0, until - time.monotonic()))
    return [connection for connection in connections if connection in ready]


def needed(text: str, names: Mapping[str, Any]) -> list[str]:
    """The `names` that a cell reads, and those that what cells have defined reads in turn.

    >>> needed("y = np.sum(x)", {"x": 1, "y": 2, "z": 3})
    ['x']
    """
    try:
        found = dict.fromkeys(mentioned(compile(text, "cell", "exec")))
    except SyntaxError:
        return []  # the ranks say so
    coming = list(found)
    while coming:
        name = coming.pop()
        new = dict.fromkeys(mentioned(names[name])) if name in names else {}
        coming += new.keys() - found.keys()
        found |= new
    return [name for name in found if name in names]

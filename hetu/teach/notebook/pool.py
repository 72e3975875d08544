"""The kernel's side of a notebook's ranks: start them, send a cell, gather what they say, never leave one behind.

`heturun` starts the ranks; each connects to the kernel over the loopback, with a secret of its job. A cell that fails
on one rank while others wait for it ends the pool, and the next cell finds a new one.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import secrets
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from typing import Any

from ...core.errors import HetuError
from ...core.leaf import NAMES
from .wire import ADDRESS, TOKEN, receive, send, travels

READY_WITHIN, GRACE, INTERRUPTED_WITHIN, ANSWER_WITHIN = 30.0, 0.3, 1.0, 0.5  # seconds
Say = Callable[[int, str], None]


class RankError(HetuError, RuntimeError):
    """A cell failed on a rank."""


@dataclass
class CellOutcome:
    """How a cell ended: the tracebacks and lines of ranks that failed, where the others were, and rank 0's names."""

    failures: dict[int, tuple[str, int]] = field(default_factory=dict)
    waiting: dict[int, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class Pool:
    """`workers` ranks and `servers` parameter servers, running until `close`."""

    def __init__(self, workers: int, servers: int = 0, options: tuple[str, ...] = ()) -> None:
        self.workers, self.servers, self.options = workers, servers, options
        self.cells, self.known = 0, dict[str, Any]()
        self.ranks: dict[Connection, int] = {}
        self.output = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - what the launcher says
        token = secrets.token_hex(16)
        self.listener = Listener(("127.0.0.1", 0), authkey=token.encode(), backlog=workers)
        host, port = self.listener.address
        self.job = subprocess.Popen(
            [sys.executable, "-m", "hetu.dist.launch.heturun", "-w", str(workers), "-s", str(servers), *options]
            + [sys.executable, "-m", "hetu.teach.notebook.rank"],
            env={**os.environ, ADDRESS: f"{host}:{port}", TOKEN: token},
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.output,
            start_new_session=True,
        )

    # -- life ----------------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return self.job.poll() is None and not any(self._has_left(c) for c in self.ranks)

    def _has_left(self, connection: Connection) -> bool:
        """Whether a rank has gone: between cells ranks say nothing, so all that can be read is the end."""
        return connection.closed or connection.poll()

    def gather(self) -> None:
        """Wait until all ranks have started. RankError, which quotes the launcher, if they do not."""
        until = time.monotonic() + READY_WITHIN
        while len(self.ranks) < self.workers:
            ready = wait([self.listener._listener._socket], 0.05)  # type: ignore[attr-defined] # accept has no timeout
            if ready:
                with contextlib.suppress(OSError, EOFError):
                    connection = self.listener.accept()
                    self.ranks[connection] = receive(connection)["rank"]
            elif self.job.poll() is not None or time.monotonic() > until:
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

    def run(self, text: str, names: Mapping[str, Any], say: Say) -> CellOutcome:
        """Run a cell on all ranks, with the names that it reads and that have changed here since the ranks got them."""
        self.gather()
        self.cells += 1
        wanted = {n: names[n] for n in needed(text, names) if self.known.get(n, self) is not names[n]}
        values = {n: v for n, v in wanted.items() if travels(v)}
        functions = {n: source_of(v) for n, v in wanted.items() if source_of(v)}
        for connection in self.ranks:
            send(connection, "cell", values, text=text, number=self.cells, cell=NAMES.get().cell, functions=functions)
        outcome = CellOutcome()
        try:
            left = self._listen(outcome, set(self.ranks), say, None)
        except KeyboardInterrupt:
            self._interrupt(outcome, say)
            raise
        if left:
            outcome.waiting = self._where(left, say)
            self.close()
        self.known |= {n: names[n] for n in functions} | values | outcome.values
        return outcome

    def _listen(self, outcome: CellOutcome, busy: set[Connection], say: Say, until: float | None) -> set[Connection]:
        """Listen until all of `busy` are done, the time is over, or one fails; returns those that are not done."""
        while busy:
            ready = _readable(busy, until)
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
                elif message["kind"] == "done":
                    busy = busy - {connection}
                    outcome.values |= message["values"]
                    if message["failure"]:
                        outcome.failures[rank] = (message["failure"], message["line"])
                        until = until or time.monotonic() + GRACE
            if not ready:
                break
        return busy

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


def _readable(connections: Collection[Connection], until: float | None) -> list[Connection]:
    """Those that say something, or end, before the clock shows `until`."""
    ready = wait(connections, None if until is None else max(0.0, until - time.monotonic()))
    return [connection for connection in connections if connection in ready]


def needed(text: str, names: Mapping[str, Any]) -> list[str]:
    """The `names` that a cell reads; what a function of the notebook needs comes before it.

    >>> needed("y = np.sum(x)", {"x": 1, "y": 2, "z": 3})
    ['x', 'y']
    """
    found: dict[str, None] = {}

    def visit(text: str, above: frozenset[str]) -> None:
        for name in sorted(reads(text) & names.keys() - above - found.keys()):
            visit(source_of(names[name]), above | {name})
            found[name] = None

    visit(text, frozenset())
    return list(found)


def source_of(value: Any) -> str:
    """The text of a function that a cell has defined; empty for all else."""
    if not inspect.isfunction(value) or value.__module__ != "__main__" or value.__name__ == "<lambda>":
        return ""
    try:
        return textwrap.dedent(inspect.getsource(value))
    except OSError:  # typed where no text is kept
        return ""


def reads(text: str) -> set[str]:
    """The names that a cell mentions.

    >>> sorted(reads("y = np.sum(x)"))
    ['np', 'x', 'y']
    """
    try:
        return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    except SyntaxError:
        return set()  # the ranks say so

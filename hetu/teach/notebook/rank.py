"""One rank of a notebook's pool: runs the cells that the kernel sends, in one namespace that lasts.

The main thread runs cells. Another reads the connection, so that a rank can be interrupted, can say where it is, and
ends when the kernel ends for any reason.
"""

from __future__ import annotations

import ast
import io
import linecache
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from types import FrameType
from typing import Any

from ...core.errors import PACKAGE
from ...dist.comm.guard import own_rank
from ...dist.comm.recorder import place
from ...dist.launch.boot import user_traceback
from ...system import interrupt
from .cells import begin_cell
from .wire import ADDRESS, KNOWN, TOKEN, packed, receive, send, unpacked

RICH = {"svg": "image/svg+xml", "html": "text/html"}
COMMUNICATION = tuple(os.path.join(PACKAGE, *folder) for folder in (("dist", "comm"), ("ps", "wire")))


class OutputStream(io.TextIOBase):
    """Sends what is written to the kernel at each end of a line, and at each carriage return."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.held = rank, ""

    def write(self, text: str) -> int:
        self.held += text
        if "\n" in text or "\r" in text:
            self.flush()
        return len(text)

    def isatty(self) -> bool:
        """A line can be written over, as in a terminal."""
        return True

    def flush(self) -> None:
        held, self.held = self.held, ""
        if held:
            self.rank.send("text", text=held)


class Rank:
    """The namespace, and the two threads around it."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.lock = connection, threading.Lock()
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.cells: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.main, self.is_running, self.is_interrupted, self.is_sending = threading.get_ident(), False, False, False
        self.call: FrameType | None = None
        self.since = 0.0  # when the call was first seen that communicates
        signal.signal(signal.SIGINT, self.interrupt)

    def interrupt(self, *_: object) -> None:
        """A late interrupt must not end the rank, nor one that comes in the middle of a message cut it in two."""
        if self.is_running and not self.is_sending:
            raise KeyboardInterrupt

    def send(self, kind: str, values: bytes = b"", **fields: Any) -> None:
        with self.lock:
            self.is_sending = True
            try:
                send(self.connection, kind, values, **fields)
            finally:
                self.is_sending = False
        if self.is_interrupted and self.is_running and threading.get_ident() == self.main:
            raise KeyboardInterrupt

    def read(self) -> None:
        """The other thread: orders from the kernel. Without a kernel there is nothing left to do."""
        try:
            while True:
                message = receive(self.connection)
                if message["kind"] == "cell":
                    self.is_interrupted = False
                    self.cells.put(message)
                elif message["kind"] == "where":
                    self.send("where", line=place(sys._current_frames().get(self.main)), waits=self.waits())
                elif message["kind"] == "interrupt":
                    self.is_interrupted = True  # even if the cell has not begun here
                    interrupt(self.main)
        except (EOFError, OSError):
            os._exit(1)

    def show(self, value: Any) -> None:
        """The value of a last expression: as a picture or a table below the cell, if rank 0 has one, else as text."""
        forms = {f: getattr(value, f"_repr_{name}_", None) for name, f in RICH.items() if not isinstance(value, type)}
        made = {form: make() for form, make in forms.items() if make is not None} if own_rank() == 0 else {}
        if any(made.values()):
            sys.stdout.flush()
            self.send("shown", data={"text/plain": repr(value), **{form: text for form, text in made.items() if text}})
        elif value is not None:
            print(repr(value))

    def waits(self) -> float:
        """For how many seconds the main thread has been seen in one and the same call that communicates."""
        frame, call = sys._current_frames().get(self.main), None
        while frame is not None and not is_cell(frame):
            call = frame if frame.f_code.co_filename.startswith(COMMUNICATION) else call
            frame = frame.f_back
        if call is not self.call:
            self.call, self.since = call, time.monotonic()
        return 0.0 if call is None else time.monotonic() - self.since

    def run(self) -> None:
        """The main thread: cells, one after the other."""
        sys.stdout = sys.stderr = OutputStream(self)
        sys.displayhook = self.show
        while True:
            cell = self.cells.get()
            begin_cell(cell["cell"])
            failure, line = self.attempt(self.take, cell["values"])
            before = dict(self.names)
            if not failure:
                failure, line = self.attempt(self.execute, cell["text"], f"cell-{cell['number']}")
            new = {n: v for n, v in self.names.items() if not n.startswith("_") and before.get(n, self) is not v}
            going, _ = packed(new)  # on all ranks, so that all know the same nodes by the same keys
            self.send("done", going if own_rank() == 0 else b"", failure=failure, line=line)

    def take(self, values: bytes) -> None:
        self.names |= unpacked(values, self.names)

    def execute(self, text: str, name: str) -> None:
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        for code in compiled(text, name):
            exec(code, self.names)

    def attempt(self, act: Callable[..., None], *given: Any) -> tuple[str, int]:
        """Do something for a cell; the traceback and line of its failure, or an empty text and 0."""
        try:
            self.is_running = True
            if self.is_interrupted:
                raise KeyboardInterrupt
            act(*given)
        except BaseException as error:
            traceback = error.__traceback__
            while traceback is not None and not is_cell(traceback.tb_frame):
                traceback = traceback.tb_next
            line = error.lineno or 0 if isinstance(error, SyntaxError) else 0
            return user_traceback(error), line if traceback is None else traceback.tb_lineno
        finally:
            self.is_running = False
            sys.stdout.flush()
        return "", 0


def is_cell(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith("cell-")


def compiled(text: str, name: str) -> list[Any]:
    """A cell as code: the value of a last expression is shown, as a notebook does."""
    body = ast.parse(text, name).body
    last = [body.pop()] if body and isinstance(body[-1], ast.Expr) and not text.rstrip().endswith(";") else []
    return [
        compile(ast.Module(body, []), name, "exec"),
        *(compile(ast.Interactive([node]), name, "single") for node in last),
    ]


def main() -> None:
    """Connect to the kernel whose address is in the environment, and work for it."""
    os.environ.pop("TQDM_DISABLE", None)  # here each rank has a place for its bar
    connection = Client(os.environ[ADDRESS], authkey=os.environ.pop(TOKEN).encode())
    KNOWN.side = "ranks"
    rank = Rank(connection)
    rank.send("hello", rank=own_rank())
    threading.Thread(target=rank.read, name="kernel", daemon=True).start()
    rank.run()


if __name__ == "__main__":
    main()

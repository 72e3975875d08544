"""What the connections of a server may take before it sees a message of them: how many there are, and their bytes.

ZeroMQ hands over a message when all of its frames are there, and bounds a frame, not their sum. So a thread looks at
the connections themselves: Linux tells how many bytes each has received (TCP_INFO, RFC 4898). One that has received
more than a message may have, and from which the server has heard nothing meanwhile, is shut down, and ZeroMQ gives up
its memory. On other systems only the number of connections is bounded.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ..store.messages import FRAME_LIMIT, Buffer
from .transport import CREDIT

LOOK = 0.02  # seconds between two looks
UNKNOWN = 1 << 20  # bytes of a connection before its first message, which is a greeting
UNHEARD = CREDIT * FRAME_LIMIT  # and after it since the last one: of all that a worker may have in flight
SPARE = 64  # connections, besides `EACH` for each worker: while one that is cut off comes again there are more
EACH = 8
# What is under way goes when ZeroMQ closes the connection, and its sender is told.
AT_ONCE = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)
_RECEIVED = struct.Struct("<Q"), 128  # where Linux says it in a TCP_INFO


class Connection:
    """One connection of this process that ZeroMQ owns, by the number of its file; it must be `left` before it goes."""

    def __init__(self, file: int) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=file)
        self.heard, self.base = False, 0  # whether there was a message, and the bytes when there was the last

    @property
    def received(self) -> int:
        if sys.platform != "linux":
            return 0
        form, place = _RECEIVED
        told = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, place + form.size)
        return int(form.unpack_from(told, place)[0]) if len(told) == place + form.size else 0

    def left(self) -> None:
        self.socket.detach()


class Watch:
    """Looks at the connections of a server's socket, which is not bound yet, from a thread of its own, until `stop`."""

    def __init__(self, zmq: ModuleType, server: Any, workers: int, worker_of: Mapping[bytes, int]) -> None:
        self.zmq, self.most, self.worker_of = zmq, SPARE + EACH * workers, worker_of
        self.files: dict[bytes, int] = {}  # of peers that have said something
        self.heard: set[int] = set()  # the files of those that did so since the last look
        self.open: dict[int, Connection] = {}  # by file, the oldest first
        self.stopping = threading.Event()
        self.server, self.monitor = server, server.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.thread = threading.Thread(target=self._run, name="hetu watch", daemon=True)
        self.thread.start()

    def hear(self, peer: bytes, frame: Buffer) -> None:
        """Note a message, which begins with this frame."""
        file = self.files.get(peer)
        if file is None:
            file = self.files[peer] = int(frame.obj.get("__fd"))
        self.heard.add(file)

    def stop(self) -> None:
        """For the thread that has the server's socket, before it closes this."""
        self.stopping.set()
        self.thread.join()
        self.server.disable_monitor()  # or ZeroMQ would wait for somebody to read what it tells
        self.monitor.close()

    def _run(self) -> None:
        from zmq.utils.monitor import recv_monitor_message

        while not self.stopping.is_set():
            look = time.monotonic() + LOOK  # in time, however many come and go
            while (pause := look - time.monotonic()) > 0 and self.monitor.poll(1000 * pause):
                told = recv_monitor_message(self.monitor)
                self._leave(file := int(told["value"]))  # a file that is accepted has been closed before
                with contextlib.suppress(OSError):  # it has been closed since
                    if told["event"] == self.zmq.EVENT_ACCEPTED:
                        self.open[file] = Connection(file)
                self._bound()  # at once: who opens them without end leaves no time for a look
            self._look()
        for file in [*self.open]:
            self._leave(file)

    def _leave(self, file: int) -> None:
        if file in self.open:
            self.open.pop(file).left()
            self.heard.discard(file)
            for peer in [peer for peer, its in [*self.files.items()] if its == file]:
                del self.files[peer]

    def _look(self) -> None:
        heard, self.heard = self.heard, set()
        for file, connection in [*self.open.items()]:
            with contextlib.suppress(OSError):  # it has just been closed
                received = connection.received
                if file in heard:
                    connection.heard, connection.base = True, received
                elif received - connection.base > (UNHEARD if connection.heard else UNKNOWN):
                    self._cut(file, f"has sent {received - connection.base >> 20} MB of a message without an end")

    def _bound(self) -> None:
        while len(self.open) > self.most:
            unheard = [file for file, its in self.open.items() if not its.heard and file not in self.heard]
            self._cut((unheard or [*self.open][::-1])[0], f"is one of {len(self.open)} connections")

    def _cut(self, file: int, why: str) -> None:
        """Say so of one of a worker, and shut the connection down."""
        for peer, its in [*self.files.items()]:
            if its == file and (worker := self.worker_of.get(peer)) is not None:
                print(f"hetu server: a connection of worker {worker} {why}, and is cut off", file=sys.stderr)
        with contextlib.suppress(OSError):
            gone = self.open[file].socket
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
            gone.shutdown(socket.SHUT_RDWR)
        self._leave(file)

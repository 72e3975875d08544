"""Signs of life from a thread of their own, so that a worker may compute for longer than its lease.

A ZeroMQ socket belongs to one thread, so the heartbeat has sockets of its own. Its messages name the worker's life and
get no answer; a lost message is followed by another. A process that is frozen or killed falls
silent. A process whose training thread hangs does not: a heartbeat shows no progress, and other workers give up after
their `timeout`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ..store.messages import Buffer

BEATS = 4  # per lease
FIRST_PAUSE = 0.1  # seconds between two, before the lease is known


class Heartbeat:
    """Sends `frames` over each of the `sockets`, now its own, until `stop`: `BEATS` times per lease, once it is known.

    It begins before that, because the lease at one server runs while the worker waits for another to greet it.
    """

    def __init__(self, zmq: ModuleType, sockets: Sequence[Any], frames: Sequence[Buffer]) -> None:
        self.zmq, self.sockets, self.frames = zmq, sockets, frames
        self.pause, self.stopping = FIRST_PAUSE, threading.Event()
        self.thread = threading.Thread(target=self._beat, name="hetu heartbeat", daemon=True)
        self.thread.start()

    def keep(self, lease: float) -> None:
        """Beat as often as this lease needs."""
        self.pause = lease / BEATS

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join()

    def _beat(self) -> None:
        pause = self.pause
        while not self.stopping.wait(pause):
            due, pause = pause == self.pause, self.pause  # or the worker has just greeted all
            for socket in self.sockets if due else ():
                try:
                    socket.send_multipart(self.frames, self.zmq.NOBLOCK)
                except self.zmq.Again:
                    continue  # there is no connection, and the queue is full of beats
        for socket in self.sockets:
            socket.close()

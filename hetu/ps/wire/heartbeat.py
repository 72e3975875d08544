"""Signs of life from a thread of their own, so that a worker may compute for longer than its lease.

A ZeroMQ socket belongs to one thread, so the heart has sockets of its own. Its messages name the worker by token and
incarnation and get no answer: one that is lost is followed by another. A process that is frozen or killed falls silent;
one whose training thread hangs does not, and those who wait for it give up after their `timeout`. A heartbeat does not
show progress; the worker's clock does.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ..store.messages import Buffer

BEATS = 4  # in a lease


class Heartbeat:
    """Sends `frames` over each of the `sockets`, which it takes over, `BEATS` times in `lease` seconds until `stop`."""

    def __init__(self, zmq: ModuleType, sockets: Sequence[Any], frames: Sequence[Buffer], lease: float) -> None:
        self.stopping = threading.Event()
        arguments = (zmq, sockets, frames, lease / BEATS, self.stopping)
        self.thread = threading.Thread(target=_beat, args=arguments, name="hetu heartbeat", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join()


def _beat(
    zmq: ModuleType, sockets: Sequence[Any], frames: Sequence[Buffer], pause: float, stopping: threading.Event
) -> None:
    while not stopping.wait(pause):
        for socket in sockets:
            try:
                socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                continue  # no connection, and many beats wait for one
    for socket in sockets:
        socket.close()

"""Signs of life from a thread of their own, so that a worker may compute for longer than its lease.

A ZeroMQ socket belongs to one thread, so the heartbeat has sockets of its own. Its messages name the worker by token
and incarnation and get no answer; a lost message is followed by another. A process that is frozen or killed falls
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


class Heartbeat:
    """Sends `frames` over each of the `sockets`, now its own, `BEATS` times per `lease` seconds until `stop`."""

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
                continue  # there is no connection, and the queue is full of beats
    for socket in sockets:
        socket.close()

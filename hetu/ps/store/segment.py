"""Memory that a worker and a server on one host share, so that only the headers of large messages use the socket.

Each of `SLOTS` requests in flight has a room for its values and one for those of its answer. A room is stamped with the
number of the request that it was last filled for, and no number is used twice: bytes whose stamp does not fit the
message belong to another request and are refused, and an answer is repeated over the socket. So a late copy of a
message neither reads newer bytes nor writes over any. The memory has no name in any folder: the server opens it through
the worker's process (Linux), and it disappears with the last process that holds it. Its size is sealed, because a
process that touches memory which the other side cut off is killed. On systems without memfd everything goes over the
socket.
"""

from __future__ import annotations

import mmap
import os
import stat
from typing import Any

import numpy as np

SLOTS = 4
ROOM_BYTES = 1 << 20
_PAGE = 4096
SEGMENT_BYTES = _PAGE + 2 * SLOTS * ROOM_BYTES


class Segment:
    """One side of the memory: it fills the `outgoing` rooms and reads the incoming ones.

    >>> worker = Segment.create(number=7)
    >>> server = Segment.open(worker.offer, number=7)
    >>> worker.fill(slot=2, seq=1, values=np.arange(3.0))
    >>> server.read(slot=2, seq=1, nbytes=24).view("f8").tolist()
    [0.0, 1.0, 2.0]
    >>> server.read(slot=2, seq=9, nbytes=24) is None
    True
    >>> worker.close()
    """

    def __init__(self, file: int, side: int) -> None:
        memory = np.frombuffer(mmap.mmap(file, SEGMENT_BYTES), np.uint8)
        stamps = memory[: 2 * SLOTS * 8].view("<i8").reshape(2, SLOTS)
        rooms = memory[_PAGE:].reshape(2, SLOTS, ROOM_BYTES)
        self.number = memory[_PAGE - 8 : _PAGE].view("<i8")
        self.file, self.outgoing, self.sent = file, list(rooms[side]), stamps[side]
        rooms.flags.writeable = False
        self.incoming, self.received = list(rooms[1 - side]), stamps[1 - side]

    @classmethod
    def create(cls, number: int) -> Segment | None:
        """A worker's side of new memory that is marked with `number`; None where the system has no such memory."""
        try:
            import fcntl

            file = os.memfd_create("hetu", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (AttributeError, ImportError, OSError):
            return None
        os.ftruncate(file, SEGMENT_BYTES)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        segment = cls(file, side=0)
        segment.number[0] = number
        return segment

    @classmethod
    def open(cls, offer: Any, number: int) -> Segment | None:
        """The server's side of what a worker offers; None unless it is memory of this host, user and `number`."""
        if type(offer) is not list or [type(n) for n in offer] != [int, int] or min(offer) < 0:
            return None
        path = f"/proc/{offer[0]}/fd/{offer[1]}"
        try:
            import fcntl

            found = os.stat(path)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != SEGMENT_BYTES:
                return None
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                    return None
                segment = cls(file, side=1)
            finally:
                os.close(file)
        except (AttributeError, ImportError, OSError):
            return None
        return segment if segment.number[0] == number else None

    @property
    def offer(self) -> list[int]:
        """What the server needs to find the memory."""
        return [os.getpid(), self.file]

    def close(self) -> None:
        """Close a worker's side: no process can open the memory any more; it lives as long as one maps it."""
        os.close(self.file)

    def fill(self, slot: int, seq: int, values: np.ndarray | None) -> None:
        """Give the slot to request `seq`, and copy its values, if any, there."""
        self.sent[slot] = seq
        if values is not None:
            room = self.outgoing[slot][: values.nbytes]
            np.copyto(room.view(values.dtype).reshape(values.shape), values)

    def read(self, slot: int, seq: int, nbytes: int) -> np.ndarray | None:
        """The bytes that the other side put there for request `seq`; None if they are not there."""
        fits = 0 <= slot < SLOTS and nbytes <= ROOM_BYTES and self.received[slot] == seq
        return self.incoming[slot][:nbytes] if fits else None

    def room(self, slot: int, seq: int) -> np.ndarray | None:
        """The room for the answer to request `seq`; None if it was answered before."""
        return self.outgoing[slot] if 0 <= slot < SLOTS and self.sent[slot] != seq else None

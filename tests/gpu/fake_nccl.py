"""A stand-in for `cupy.cuda.nccl` between ranks that are threads, on the streams of `fake_cupy.py`.

It keeps NCCL's own rules: the collectives of a communicator meet in the order in which they were called, a message
waits on its stream for its receiver, and only the messages of a group go out together. What NCCL would answer with a
hang or wrong numbers (collectives that differ, memory of the host) is an error here. Ignored on purpose: speed.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict

import numpy as np

from hetu.core.types import as_dtype

from .fake_cupy import holding, nccl
from .fake_streams import HERE, LOCK, Item, finish, force, stream_at, wait_for_others


class NcclError(RuntimeError):
    """What NCCL refuses."""


NUMBERS = ("INT8", "UINT8", "INT32", "UINT32", "INT64", "UINT64", "FLOAT16", "BFLOAT16", "FLOAT32", "FLOAT64")
OPERATIONS = {"SUM": np.add, "MAX": np.maximum, "MIN": np.minimum}


def memory(pointer: int, count: int, dtype: str) -> np.ndarray:
    dtype = as_dtype(dtype)
    nbytes = count * dtype.itemsize
    if not holding(pointer, nbytes):
        raise NcclError(f"ncclInvalidArgument: {pointer:#x} is no memory of a device")
    return np.ctypeslib.as_array((ctypes.c_char * nbytes).from_address(pointer)).view(dtype)[:count]


class Group:
    """What all communicators of one identifier share."""

    def __init__(self) -> None:
        self.calls: dict[int, dict[int, Meeting]] = defaultdict(dict)
        self.messages: dict[tuple[int, int, str], list[Message]] = defaultdict(list)
        self.ranks: set[int] = set()
        self.aborted = False


GROUPS: dict[bytes, Group] = defaultdict(Group)


class Meeting(Item):
    """One rank's part in a collective: it runs when the parts of all ranks are at the heads of their queues."""

    def __init__(self, nccl: NcclCommunicator, index: int, kind: tuple, send: np.ndarray, recv: np.ndarray) -> None:
        super().__init__(self.run)
        self.nccl, self.index, self.kind, self.send, self.recv = nccl, index, kind, send, recv

    def ready(self) -> None:
        group, size = self.nccl.group, self.nccl.size
        while len(group.calls[self.index]) < size and not group.aborted:
            wait_for_others()
        for other in group.calls[self.index].values():
            while not (other.done or group.aborted or other.stream.queue[0] is other):
                force(other.stream.queue[0])

    def run(self) -> None:
        if self.nccl.group.aborted:
            return
        parts = [self.nccl.group.calls[self.index][r] for r in range(self.nccl.size)]
        if len({p.kind for p in parts}) > 1:
            raise NcclError(f"ranks call different collectives: {[p.kind for p in parts]}")
        sent, (kind, operation, root) = [p.send.copy() for p in parts], self.kind[:3]
        if kind in ("allReduce", "reduceScatter"):
            total = sent[0]
            with np.errstate(invalid="ignore"):  # which a NaN in bfloat16 is
                for x in sent[1:]:
                    OPERATIONS[operation](total, x, out=total)
            results = [total] * len(parts) if kind == "allReduce" else np.split(total, len(parts))
        else:
            results = [np.concatenate(sent) if kind == "allGather" else sent[root]] * len(parts)
        for part, result in zip(parts, results):
            np.copyto(part.recv, result)
            if part is not self:
                finish(part)


class Message:
    def __init__(self, item: Messages, array: np.ndarray) -> None:
        self.item, self.array, self.done = item, array, False


class Messages(Item):
    """Messages of one group: all under way together, done when all have arrived."""

    def __init__(self, parts: list[tuple[NcclCommunicator, str, int, np.ndarray]]) -> None:
        super().__init__(lambda: None)
        self.group, self.parts = parts[0][0].group, []
        with LOCK:
            for nccl, kind, peer, array in parts:
                pair = (nccl.rank, peer) if kind == "send" else (peer, nccl.rank)
                queue = nccl.group.messages[(*pair, kind)]
                message = Message(self, array)
                other = nccl.group.messages[(*pair, "recv" if kind == "send" else "send")]
                queue.append(message)
                self.parts.append((message, len(queue) - 1, other, kind))

    def ready(self) -> None:
        for message, index, others, kind in self.parts:
            while not message.done and not self.group.aborted:
                if len(others) <= index or others[index].item.stream is None:
                    wait_for_others()
                    continue
                other = others[index]
                while other.item is not self and other.item.stream.queue[0] is not other.item and not message.done:
                    force(other.item.stream.queue[0])
                if not message.done:
                    source, target = (message, other) if kind == "send" else (other, message)
                    np.copyto(target.array, source.array)
                    message.done = other.done = True
                    LOCK.notify_all()


class NcclCommunicator:
    def __init__(self, size: int, identifier: bytes, rank: int) -> None:
        assert len(identifier) == 128
        self.group, self.size, self.rank, self.count = GROUPS[bytes(identifier)], size, rank, 0
        with LOCK:
            assert rank not in self.group.ranks, "two ranks with one number"
            self.group.ranks.add(rank)
            LOCK.notify_all()
            assert LOCK.wait_for(lambda: len(self.group.ranks) == size, 20.0), "not all ranks came"

    def _meet(self, stream: int, kind: tuple, send: tuple, recv: tuple) -> None:
        with LOCK:
            item = Meeting(self, self.count, kind, memory(*send), memory(*recv))
            self.group.calls[self.count][self.rank] = item
            self.count += 1
            stream_at(stream).add(item)

    def allReduce(self, send, recv, count, dtype, op, stream):
        self._meet(stream, ("allReduce", op, 0, count, dtype), (send, count, dtype), (recv, count, dtype))

    def reduceScatter(self, send, recv, count, dtype, op, stream):
        whole = count * self.size
        self._meet(stream, ("reduceScatter", op, 0, count, dtype), (send, whole, dtype), (recv, count, dtype))

    def allGather(self, send, recv, count, dtype, stream):
        whole = count * self.size
        self._meet(stream, ("allGather", "", 0, count, dtype), (send, count, dtype), (recv, whole, dtype))

    def broadcast(self, send, recv, count, dtype, root, stream):
        self._meet(stream, ("broadcast", "", root, count, dtype), (send, count, dtype), (recv, count, dtype))

    def send(self, pointer, count, dtype, peer, stream):
        _message((self, "send", peer, memory(pointer, count, dtype)), stream)

    def recv(self, pointer, count, dtype, peer, stream):
        _message((self, "recv", peer, memory(pointer, count, dtype)), stream)

    def check_async_error(self) -> None:
        if self.group.aborted:
            raise NcclError("ncclRemoteError")

    def abort(self) -> None:
        with LOCK:
            self.group.aborted = True
            LOCK.notify_all()


def _message(part: tuple, stream: int) -> None:
    group = HERE.__dict__.get("group")
    if group is not None:
        group.append((part, stream))
    else:
        stream_at(stream).add(Messages([part]))


def groupStart() -> None:
    HERE.group = []


def groupEnd() -> None:
    parts, HERE.group = HERE.group, None
    if parts:
        stream_at(parts[0][1]).add(Messages([p for p, _ in parts]))


def get_unique_id() -> bytes:
    return np.random.default_rng().bytes(128)


vars(nccl).update(
    available=True, NcclCommunicator=NcclCommunicator, NcclError=NcclError, groupStart=groupStart, groupEnd=groupEnd,
    get_unique_id=get_unique_id, get_version=lambda: 23000,
    **{f"NCCL_{name}": name.lower() for name in NUMBERS}, **{f"NCCL_{name}": name for name in OPERATIONS},
)  # fmt: skip

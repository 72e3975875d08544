"""Communication of fixed arrays as persistent requests of MPI, which then has nothing left to look up.

MPI matches requests in the order in which ranks make them. That is here the order of their first runs, which all ranks
share; a program may be bound once more on one rank. Whether the arrays share memory, which differs between ranks too,
decides nothing but a copy. Small calls on arrays that nobody has bound go through arrays of their own, which all calls
that are alike share.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from .call import REDUCE, CollectiveCall, PeerMessage, is_half
from .line import calling_line
from .recorder import Raw

SMALL = 8 << 10  # bytes that are copied rather than looked up
MOST = 64  # kinds of small calls that a group prepares
FORMS = {  # kind -> the call that starts it once, and the one that prepares it
    "all_reduce": ("Iallreduce", "Allreduce_init"),
    "reduce_scatter": ("Ireduce_scatter_block", "Reduce_scatter_block_init"),
    "all_gather": ("Iallgather", "Allgather_init"),
    "broadcast": ("Ibcast", "Bcast_init"),
    "all_to_all": ("Ialltoall", "Alltoall_init"),
    "all_to_all by counts": ("Ialltoallv", "Alltoallv_init"),
    "barrier": ("Ibarrier", "Barrier_init"),
}
_made: weakref.WeakSet[Prepared | BoundMessages] = weakref.WeakSet()


def begun(MPI: Any, comm: Any, call: CollectiveCall, x: np.ndarray, out: np.ndarray, fixed: bool = False) -> Any:
    """What MPI makes of a call on `x` and `out`; `comm` is mpi4py's. A `fixed` one waits for its `Start`."""
    begin = getattr(comm, FORMS[f"{call.kind} by counts" if call.counts else call.kind][fixed])
    if call.op:
        combined = number(out)
        return begin(MPI.IN_PLACE if x is out else alike(x, out), combined, operation(MPI, call.op, combined.dtype))
    if call.kind == "barrier":
        return begin()
    if call.kind == "broadcast":
        return begin([number(out), MPI.BYTE], call.root)
    given, made = [number(x), MPI.BYTE], [number(out), MPI.BYTE]
    if call.counts is not None:
        sent, received = ([n * x.itemsize for n in counts] for counts in call.counts)
        given.insert(1, sent)
        made.insert(1, received)
    return begin(given, made)


@functools.cache
def operation(MPI: Any, op: str, dtype: np.dtype) -> Any:
    """How MPI combines two arrays. Its own extremes of floats may lose a NaN, which elsewhere wins."""
    if op == "sum" or dtype.kind != "f":
        return getattr(MPI, op.upper())

    def combine(x: Any, total: Any, _: Any) -> None:
        here = np.frombuffer(total, dtype)
        REDUCE[op](np.frombuffer(x, dtype), here, out=here)

    return MPI.Op.Create(combine, commute=True)


class Prepared:
    """A collective of `comm`, an MPIComm, on the arrays of `call`; `MPI` is `mpi4py.MPI`."""

    def __init__(self, MPI: Any, comm: Any, call: CollectiveCall) -> None:
        x, out = call.x, call.out
        self.MPI, self.comm, self.call, self.given = MPI, comm, call, x
        self.patient = call.kind == "barrier"
        self.copies = False
        if x is not out and np.may_share_memory(x, out):
            self.copies = (x.ctypes.data, x.nbytes) != (out.ctypes.data, out.nbytes) or call.kind != "all_reduce"
            self.given = out if call.kind == "all_reduce" else np.empty_like(x)
        self.request: Any = None

    def run(self, entry: Raw) -> None:
        """Do it, and wait for it."""
        if self.request is None:
            self.request = begun(self.MPI, self.comm.transport, self.call, self.given, self.call.out, fixed=True)
            self.free = weakref.finalize(self, _free, self.MPI, self.request)
            _made.add(self)
        if self.copies:
            self.given.reshape(-1)[:] = self.call.x.reshape(-1)
        self.request.Start()
        self.comm.finish(self.request, entry, self, self.patient)


class BoundCollective:
    """One that a program runs again and again, for the line that it was bound for."""

    def __init__(self, MPI: Any, comm: Any, call: CollectiveCall) -> None:
        self.comm, self.call, self.site = comm, call, comm.recorder.site or calling_line()
        self.what, self.size = call.what, call.size
        self.prepared, self.kind = Prepared(MPI, comm, call), None

    def run(self) -> None:
        """Do it, and wait for it."""
        comm, call = self.comm, self.call
        call.noted = entry = comm.made.add(self.what, call.x, self.size, self.site)
        if self.kind is not None:
            comm.history.add(self.kind, call)
        else:
            if agreement := comm.agree(call):
                agreement.wait()
            self.kind = comm.history.kinds[call.signature]
        self.prepared.run(entry)


class BoundMessages:
    """Messages of fixed arrays that a program sends and receives again and again. Nobody else need bind them."""

    def __init__(self, MPI: Any, comm: Any, sends: Sequence[PeerMessage], recvs: Sequence[PeerMessage]) -> None:
        self.MPI, self.comm, self.sends, self.recvs = MPI, comm, sends, recvs
        self.line, self.messages = comm.recorder.site or calling_line(), [*sends, *recvs]
        self.requests = message_requests(MPI, comm.transport, sends, recvs, fixed=True)
        self.free = weakref.finalize(self, _free, MPI, *self.requests)
        _made.add(self)

    def run(self) -> None:
        """Send and receive all, and wait for them."""
        noted = self.comm.note_messages(self.sends, self.recvs, self.line)
        self.MPI.Prequest.Startall(self.requests)
        self.comm.finish_messages(self.requests, self.messages, noted, len(self.sends))


def message_requests(
    MPI: Any, comm: Any, sends: Sequence[PeerMessage], recvs: Sequence[PeerMessage], fixed: bool = False
) -> list[Any]:
    """What MPI makes of messages. It takes a shorter one, or other numbers, without a word: tags tell them apart."""
    send, receive = (comm.Send_init, comm.Recv_init) if fixed else (comm.Isend, comm.Irecv)
    requests = [send([number(x), MPI.BYTE], to, message_tag(x.dtype, x.size)) for to, x in sends]
    return requests + [receive([number(out), MPI.BYTE], source, MPI.ANY_TAG) for source, out in recvs]


@functools.cache
def message_tag(dtype: np.dtype, size: int) -> int:
    """What tells messages of different arrays apart, in 15 bits: no library has fewer."""
    return zlib.crc32(f"{dtype.name}{size}".encode()) % 32768


class SmallCalls:
    """What a group has prepared for small calls of one kind: arrays to copy through, and their request."""

    def __init__(self, MPI: Any, comm: Any, call: CollectiveCall) -> None:
        x = np.empty(call.x.size, call.x.dtype)
        out = x if call.kind in ("all_reduce", "broadcast") else np.empty(call.out.size, call.out.dtype)
        self.x, self.out = x, out
        self.gives = call.kind != "barrier" and (call.kind != "broadcast" or call.root == comm.rank)
        self.takes = call.kind != "barrier" and (call.kind != "broadcast" or not self.gives)
        self.prepared = Prepared(MPI, comm, CollectiveCall(call.kind, x, out, call.op, call.root))

    def run(self, call: CollectiveCall) -> None:
        """Do a call of this kind, and wait for it."""
        if self.gives:
            self.x[...] = call.x if call.x.ndim == 1 else call.x.reshape(-1)
        self.prepared.run(call.noted)
        if self.takes:
            out = call.out if call.out.ndim == 1 else call.out.reshape(-1)
            out[...] = self.out


def is_small(call: CollectiveCall) -> bool:
    """Whether a call, as all ranks see it, is worth to be copied."""
    if call.counts is not None or (call.op and is_half(call.x.dtype)):
        return False
    return call.kind == "barrier" or (0 < call.x.nbytes <= SMALL and 0 < call.out.nbytes <= SMALL)


def _free(MPI: Any, *requests: Any) -> None:
    if not MPI.Is_finalized():
        for request in requests:
            request.Free()


def keep_all() -> None:
    """Give none of them back: their group has lost a rank, and what is prepared for it never runs again."""
    for prepared in [*_made]:
        prepared.free.detach()
    _made.clear()


def free_all() -> None:
    """Give all requests back, before MPI ends."""
    for prepared in [*_made]:
        prepared.free()


def number(x: np.ndarray) -> np.ndarray:
    """`x` in a dtype that MPI knows: a bool as a byte, which has the same extremes, a bfloat16 as a word to move."""
    kind = x.dtype.kind
    return x.view(np.uint16) if kind == "V" else x.view(np.uint8) if kind == "b" else x


def alike(x: np.ndarray, out: np.ndarray) -> np.ndarray:
    """`number(x)` in the dtype of `out`: long and long long, which are equal for NumPy, are two types for MPI."""
    return number(x if x.dtype.char == out.dtype.char else x.view(out.dtype))

"""All-reduces on fixed arrays as persistent requests of MPI, which then has nothing left to look up.

MPI matches requests in the order in which ranks make them. That is here the order of their first runs, which all ranks
share; a program may be bound once more on one rank. Whether the arrays share memory, which differs between ranks too,
decides nothing but a copy.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from .comm import CollectiveCall

_made: weakref.WeakSet[BoundAllReduce] = weakref.WeakSet()


class BoundAllReduce:
    """One of `comm`, an MPIComm; `MPI` is `mpi4py.MPI`."""

    def __init__(self, MPI: Any, comm: Any, call: CollectiveCall) -> None:
        x, out = call.x, call.out
        self.MPI, self.comm, self.call, self.site = MPI, comm, call, comm.recorder.site
        self.in_place = x is out or np.may_share_memory(x, out)
        self.copies = self.in_place and (x.ctypes.data, x.nbytes) != (out.ctypes.data, out.nbytes)
        self.request: Any = None

    def run(self) -> None:
        """Reduce, and wait for it."""
        call, comm = self.call, self.comm
        entry = comm.recorder.note(comm.ranks, call.what, call.x, self.site, size=call.size)
        call.noted = entry
        if agreement := comm.agree(call):
            agreement.wait()
        if self.request is None:
            self._make()
        if self.copies:
            call.out.reshape(-1)[:] = call.x.reshape(-1)
        self.request.Start()
        comm.finish(self.request, entry, self)

    def _make(self) -> None:
        MPI, call = self.MPI, self.call
        given = MPI.IN_PLACE if self.in_place else alike(call.x, call.out)
        self.request = self.comm.transport.Allreduce_init(given, number(call.out), getattr(MPI, call.op.upper()))
        self.free = weakref.finalize(self, _free, MPI, self.request)
        _made.add(self)


def _free(MPI: Any, request: Any) -> None:
    if not MPI.Is_finalized():
        request.Free()


def free_all() -> None:
    """Give all requests back, before MPI ends."""
    for bound in [*_made]:
        bound.free()


def number(x: np.ndarray) -> np.ndarray:
    """`x` in a dtype that MPI knows: a bool as a byte, which has the same extremes, a bfloat16 as a word to move."""
    if x.dtype.kind == "V":
        return x.view(np.uint16)
    return x.view(np.uint8) if x.dtype == bool else x


def alike(x: np.ndarray, out: np.ndarray) -> np.ndarray:
    """`number(x)` in the dtype of `out`: long and long long, which are equal for NumPy, are two types for MPI."""
    return number(x if x.dtype.char == out.dtype.char else x.view(out.dtype))

"""Ranks as processes over MPI. One of the two files that name mpi4py, which is imported on first use.

All calls take buffers (never pickled objects). Every operation is started without blocking and then polled: this costs
no more than a blocking call, ends the wait at its deadline, and gives the core away meanwhile. The ranks compare what
they call on a second communicator (`agreement.py`), because MPI takes what does not fit without a word. The death of a
rank ends the job. Left out: GPU buffers.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.backend import Device
from ...core.errors import MissingDependencyError
from .agreement import Agreement, CallHistory, pack, unpack
from .bound import BoundAllReduce, alike, free_all, number
from .comm import CollectiveCall, Comm, CommError, Handle, PeerMessage, SerialComm, is_half, of_thread
from .guard import RUN_DIRECTORY, forget_shared_files, job_size, noting_shared_files, own_rank
from .nccl import on_device
from .patience import DEADLINE, LEAVE, Patience, seconds
from .recorder import Entry, RankState, Raw, Recorder, answer, ask, explain, readable, write
from .shared import FROM_BYTES, SharedMemory

LOOK = 0.5  # seconds between checks whether a rank that others wait for has ended

_yield_core = getattr(os, "sched_yield", lambda: time.sleep(0))
process = Recorder()  # of this rank; `boot` has it answer before MPI is up


@functools.cache
def start() -> Any:
    """The module `mpi4py.MPI`, initialized. MissingDependencyError if it or its library is not installed."""
    try:
        import mpi4py

        mpi4py.rc.initialize, mpi4py.rc.finalize = False, False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, but no MPI library
        raise MissingDependencyError(f"MPI cannot be used ({error})", fix='pip install "mpi4py>=4.1" mpich') from None
    if not MPI.Is_initialized():
        if directory := os.environ.get(RUN_DIRECTORY):
            write(Path(directory) / f"arrived.{own_rank()}", "")
        with noting_shared_files():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    sys.excepthook = functools.partial(_print_and_abort, sys.excepthook)
    atexit.register(_leave_or_abort)
    return MPI


def _print_and_abort(print_it: Callable[..., None], *error: Any) -> None:
    """Under a bare mpiexec an uncaught exception would leave the other ranks waiting forever."""
    print_it(*error)
    sys.stderr.flush()
    time.sleep(0.2)  # on an abort, mpiexec drops the output that it has not passed on yet
    abort(1)


def _running() -> Any:
    """`mpi4py.MPI` between its start and its end, else None."""
    MPI = sys.modules.get("mpi4py.MPI")
    return MPI if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized() else None


def abort(code: int) -> None:
    """End all ranks of the job at once, if MPI is running: others may be waiting for this one."""
    if MPI := _running():
        MPI.COMM_WORLD.Abort(code)


def leave() -> None:
    """End this rank's part in MPI when all ranks have come here; DeadlineError, as everywhere, if one does not.

    Without it mpiexec may take a rank that ends first for a lost one, and kill the others.
    """
    if MPI := _running():
        if _job.cache_info().currsize:
            _job().leave()
        free_all()
        MPI.Finalize()
        forget_shared_files()


def _leave_or_abort() -> None:
    """At the end of a script under a bare mpiexec: an error there must not end in exit code 0."""
    try:
        leave()
    except BaseException:
        _print_and_abort(sys.__excepthook__, *sys.exc_info())


def world(deadline: float | None = None, device: str = "cpu") -> Comm:
    """The group of all ranks of this job: over MPI when `heturun` or mpiexec started several, else one rank.

    There is one per process, or per thread of `run_ranks`. `deadline` (seconds, at first $HETU_DEADLINE or 300) is that
    of its waits and of groups made later: how long it waits for ranks that do not get on; see `patience.py`. With a GPU
    as `device` it takes GPU arrays, too; see `nccl.on_device`.

    >>> world().world_size
    1
    """
    host = of_thread.get()
    if host is None and job_size() == 1:
        return SerialComm()
    if host is None:
        host = _job()
        host.deadline = deadline or host.deadline
    return on_device(host, Device.parse(device))


@functools.cache
def _job() -> MPIComm:
    MPI = start()
    if MPI.COMM_WORLD.size != job_size():
        raise MissingDependencyError(
            f"this is one of {job_size()} processes, but MPI sees {MPI.COMM_WORLD.size}: its own mpiexec "
            "did not start them",
            fix="use heturun, which finds the right one; under Slurm srun --mpi=pmi2 or --mpi=pmix",
        )
    comm = MPIComm(MPI.COMM_WORLD, range(MPI.COMM_WORLD.size), seconds(DEADLINE, 300.0), process)
    if RUN_DIRECTORY not in os.environ:  # a bare mpiexec: boot has not made this rank answer
        name = pack(tempfile.mkdtemp(prefix="hetu-") if comm.rank == 0 else "")
        comm.broadcast(name)
        os.environ[RUN_DIRECTORY] = directory = unpack(name)
        os.makedirs(directory, exist_ok=True)  # on another host it is another directory
        answer(directory, comm.rank, process)
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return comm


class MPIComm(Comm):
    """A group of processes. `deadline` is in seconds, for each wait."""

    def __init__(self, comm: Any, ranks: Sequence[int], deadline: float, recorder: Recorder) -> None:
        super().__init__(comm.rank, ranks, deadline, recorder)
        self.transport = comm  # mpi4py's; `control` is a second one, for what ranks tell each other about their calls
        self._open: list[_Request] = []
        # A yield gives a core away that nobody needs, unless there are more ranks than cores.
        self._spins = 10 if start().COMM_WORLD.size > (os.cpu_count() or 1) else 200
        self._memory: list[SharedMemory | None] = []  # empty until it is first wanted
        self.control, request = comm.Idup()
        self.finish(request, (), "a group to form")
        self._history = CallHistory(self)

    def progress(self) -> None:
        """Let MPI work on open operations: without calls into it, most of a transfer stands still."""
        if self._open:
            start().Request.Testall([handle.request for handle in self._open])

    def bind_all_reduce(self, x: np.ndarray, out: np.ndarray, op: str = "sum") -> Callable[[], None]:
        call = CollectiveCall("all_reduce", x, out, op=op)
        call.check(self.world_size)
        if _is_large(call):
            return functools.partial(self.all_reduce, x, out, op)
        if is_half(out.dtype):
            return super().bind_all_reduce(x, out, op)
        return BoundAllReduce(start(), self, call).run

    def all_reduce(self, x: np.ndarray, out: np.ndarray, op: str = "sum") -> None:
        call = CollectiveCall("all_reduce", x, out, op=op)
        call.check(self.world_size)
        entry = self._noted(call).noted
        if not _is_large(call):
            return self._start(call).wait()
        if agreement := self.agree(call):
            agreement.wait()
        if not self._memory:
            with noting_shared_files():
                self._memory = [self._in_time(lambda: SharedMemory.over(start(), self.transport), entry)]
        if (shared := self._memory[0]) is None:
            return self._start(call).wait()
        shared.all_reduce(x, out, op, lambda: self.finish(self.control.Ibarrier(), entry, ()))

    def _start(self, call: CollectiveCall) -> Handle:
        x, out = call.x, call.out
        if call.op and is_half(out.dtype):  # MPI has no sum of these
            x, out = x.astype(np.float32), np.empty(out.shape, np.float32)
        if x is not out and np.may_share_memory(x, out):
            x = x.copy()
        agreement = self.agree(call)
        handle = _Request(self, self._request(call, x, out), call, (x, out), agreement)
        self._open.append(handle)
        return handle

    def agree(self, call: CollectiveCall) -> Agreement | None:
        return self._history.note(call)

    def _request(self, call: CollectiveCall, x: np.ndarray, out: np.ndarray) -> Any:
        MPI, comm = start(), self.transport
        if call.op:
            start_it = comm.Iallreduce if call.kind == "all_reduce" else comm.Ireduce_scatter_block
            return start_it(MPI.IN_PLACE if x is out else alike(x, out), number(out), getattr(MPI, call.op.upper()))
        if call.kind == "all_gather":
            return comm.Iallgather([number(x), MPI.BYTE], [number(out), MPI.BYTE])
        if call.kind == "broadcast":
            return comm.Ibcast([number(out), MPI.BYTE], call.root)
        if call.kind == "barrier":
            return comm.Ibarrier()
        if call.counts is None:
            return comm.Ialltoall([number(x), MPI.BYTE], [number(out), MPI.BYTE])
        sent, received = ([n * x.itemsize for n in counts] for counts in call.counts)
        return comm.Ialltoallv([number(x), sent, MPI.BYTE], [number(out), received, MPI.BYTE])

    def _exchange(self, sends: Sequence[PeerMessage], recvs: Sequence[PeerMessage], noted: Sequence[Raw]) -> None:
        MPI, comm = start(), self.transport
        # MPI takes a shorter message, and one of other numbers, without a word: what is sent is told by its tag.
        requests = [comm.Isend([number(x), MPI.BYTE], to, _tag(x.dtype, x.size)) for to, x in sends]
        requests += [comm.Irecv([number(out), MPI.BYTE], source, MPI.ANY_TAG) for source, out in recvs]
        statuses = [MPI.Status() for _ in requests]
        for request, entry, status in zip(requests, noted, statuses):
            self.finish(request, entry, (requests, recvs, sends), status=status)
        for (_, out), status, entry in zip(recvs, statuses[len(sends) :], noted[len(sends) :]):
            if status.Get_tag() != _tag(out.dtype, out.size):
                raise self._mistaken(entry, f"another array, of {status.Get_count(MPI.BYTE)} bytes")

    def _split(self, group: tuple[int, ...]) -> Comm:
        # Only members call this. The tag keeps groups apart that are made at the same time.
        tag = zlib.crc32(repr(group).encode()) % 32768
        members = [self.ranks[r] for r in group]
        entry = self.recorder.note(tuple(members), "split", np.empty(0), series="split")
        made = self._in_time(lambda: self.transport.Create_group(self.transport.group.Incl(group), tag), entry)
        return MPIComm(made, members, self.deadline, self.recorder)

    def _in_time(self, blocking: Callable[[], Any], entry: Raw) -> Any:
        """The result of a call for which MPI has no form that can be polled: it blocks a thread instead."""
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(blocking()), daemon=True)
        self.recorder.waiting = entry
        thread.start()
        begin, waited, patience = time.monotonic(), 0.0, self._patience()
        while thread.is_alive() and not patience.is_over(waited := time.monotonic() - begin):
            thread.join(min(LOOK, self.deadline / 4))
        if not results:
            raise self.late(entry, waited)
        self.recorder.waiting = ()
        return results[0]

    def leave(self) -> None:
        """Wait until all ranks leave. A file tells the others that this one has, so that they do not wait in vain."""
        self.recorder.ended = "the end of its script"
        if (directory := Path(os.environ.get(RUN_DIRECTORY, ""))).is_dir():
            write(directory / f"ended.{self.ranks[self.rank]}", "")
        script = os.path.basename(sys.argv[0])
        # By itself it is longer: ranks that wait inside the script speak first, as they have a line to show.
        self.deadline = seconds(LEAVE, 2 * self.deadline)
        entry = self.recorder.note(self.ranks, "end of the script", np.empty(0), script, series="end")
        Agreement(self, entry).wait()
        for _, comm in sorted(self._groups.items()):  # this waits for the members: one order for all
            comm.end(entry)

    def end(self, entry: Raw) -> None:
        """Compare what has been called, and give the memory back that the ranks of this group share."""
        self._history.end(entry)
        for shared in self._memory:
            if shared is not None:
                shared.free()

    def finish(self, request: Any, entry: Raw, buffers: Any, patient: bool = False, status: Any = None) -> None:
        """Poll `request` until it is done. After 50 tries a `patient` wait sleeps up to 1 ms between two."""
        try:
            self._poll(request, entry, buffers, patient, status)
        except start().Exception as error:  # more has arrived than there is room for
            raise self._mistaken(entry, f"something else (MPI: {error})") from None

    def _poll(self, request: Any, entry: Raw, buffers: Any, patient: bool, status: Any) -> None:
        if request.Test(status):
            return
        begin, tries, delay, looked, patience = time.monotonic(), 1, 20e-6, 0.0, None
        self.recorder.waiting = entry
        while not request.Test(status):
            tries += 1
            if patient and tries > 50:
                time.sleep(delay)
                delay = min(delay * 1.5, 1e-3)
            elif tries > self._spins:
                _yield_core()
            if tries % 64 == 0 and (waited := time.monotonic() - begin) > looked + min(LOOK, self.deadline / 4):
                looked, patience = waited, patience or self._patience()
                if patience.is_over(waited) or self._in_vain(entry):
                    _abandoned.append((request, buffers))
                    raise self.late(entry, waited)
        self.recorder.waiting = ()

    def _patience(self) -> Patience:
        return Patience(self.deadline, lambda: self._asked(range(start().COMM_WORLD.size)))

    def _in_vain(self, entry: Raw) -> bool:
        """Whether a rank that others wait for has ended its script without taking part in this."""
        directory = os.environ.get(RUN_DIRECTORY, "")
        ended = [r for r in self.ranks if os.path.exists(os.path.join(directory, f"ended.{r}"))]
        if not entry or not ended or self.recorder.ended:
            return False
        wanted = readable(entry)
        return any(not any(e[:3] == wanted[:3] for e in state.entries) for state in ask(directory, ended).values())

    def remembered(self, first: int) -> dict[int, dict[int, Entry]]:
        """The collectives of this group behind number `first` by rank, as far as the ranks remember and answer."""
        made = {r: state.made(self.ranks, "") for r, state in self._asked(self.ranks).items()}
        return {r: {n: e for n, e in entries.items() if n > first} for r, entries in sorted(made.items())}

    def _asked(self, ranks: Sequence[int]) -> dict[int, RankState]:
        directory = os.environ.get(RUN_DIRECTORY, "")
        return ask(directory, ranks) if os.path.isdir(directory) else {}

    def _mistaken(self, entry: Raw, got: str) -> CommError:
        """The error for an operation in which another rank did something else."""
        mine = readable(entry)
        made = {r: s.made(mine.group, mine.series) for r, s in self._asked(mine.group).items()}
        others = [f"  rank {r}: {es[mine.number]}" for r, es in sorted(made.items()) if mine.number in es]
        return CommError(
            "\n".join([f"rank {self.ranks[self.rank]} met {got} in {mine}", *others]),
            fix="all ranks must communicate in the same order, with the same size and dtype",
        )

    def report(self) -> str:
        return explain(self._asked(range(start().COMM_WORLD.size)), self.ranks[self.rank])


def _is_large(call: CollectiveCall) -> bool:
    return call.x.nbytes >= FROM_BYTES and not is_half(call.x.dtype)


@functools.cache
def _tag(dtype: np.dtype, size: int) -> int:
    """What tells messages of different arrays apart, in 15 bits: no library has fewer."""
    return zlib.crc32(f"{dtype.name}{size}".encode()) % 32768


_abandoned: list[Any] = []  # MPI may still write into the buffers of an operation that was given up


class _Request(Handle):
    """A collective that MPI works on."""

    def __init__(
        self,
        comm: MPIComm,
        request: Any,
        call: CollectiveCall,
        buffers: tuple[np.ndarray, np.ndarray],
        agreement: Agreement | None,
    ) -> None:
        self.comm, self.request, self.call, self.buffers = comm, request, call, buffers
        self.agreement, self.finished = agreement, False

    def wait(self) -> None:
        if self.finished:
            return
        if self.agreement:
            self.agreement.wait()
        self.comm.finish(self.request, self.call.noted, self.buffers, patient=self.call.kind == "barrier")
        if self.buffers[1] is not self.call.out:
            self.call.out[...] = self.buffers[1]
        self.comm._open.remove(self)
        self.finished = True

"""Arrays on GPUs between ranks: over NCCL, or through the host where it is missing. One of the files that name CuPy.

A communicator for the memory of the host (MPI) stays underneath: it carries everything else (hashes, checkpoints,
barriers), spreads NCCL's identifier and tells who keeps whom waiting. All groups of a rank share one stream, so that
NCCL calls keep the one order of all ranks. The host never waits: `wait` orders the current stream after the operation.
A watchdog looks after open operations. When a deadline passes it aborts NCCL, so that streams end instead of hanging;
the next call here, or the end of the step, then raises the report. NCCL adds 16-bit floats by itself, and may round
more than once. Left out: several GPUs in one process, registered buffers, and graph capture of communication.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import socket
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core.backend import Device
from ...core.errors import DTypeError
from ...job import job_size
from .alike import WeighedFeed
from .call import CollectiveCall, PeerMessage, is_device
from .comm import Comm, CommError, Handle, of_thread
from .process import local_rank
from .recorder import Raw

REDUCED = {"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64"}
LOOK = 0.05  # seconds between two looks of the watchdog
SHARED_GPU = 23000  # the first NCCL that lets two ranks share a GPU, if NCCL_MULTI_RANK_GPU_ENABLE=1


def own_gpu() -> int:
    """The GPU of this rank where none is named: ranks of a host take them in turn. Ranks that are threads share one."""
    count = 1
    if of_thread.get() is None and job_size() > 1:
        with contextlib.suppress(ImportError):  # `Device.xp` says what is missing
            count = importlib.import_module("cupy").cuda.runtime.getDeviceCount()
    return local_rank() % max(1, count)


def on_device(host: Comm, device: Device) -> Comm:
    """The communicator for a job whose arrays lie on `device`: NCCL where all ranks have it, else through the host.
    One that is for devices already stays, as `SerialComm`, which copies within any memory.

    The fall-back and its reason are printed once, by rank 0.

    >>> from hetu.dist import SerialComm
    >>> on_device(SerialComm(), Device("cpu"))
    <SerialComm rank 0 of 1>
    """
    if device.kind == "cpu" or host.world_size == 1 or isinstance(host, NCCLComm | ThroughHost):
        return host
    reason = _obstacle(host, device)
    if not reason:
        return NCCLComm(host, device)
    if host.rank == 0:
        print(f"hetu: GPU arrays travel through the host: {reason}", file=sys.stderr)
    return ThroughHost(host)


def _obstacle(host: Comm, device: Device) -> str:
    """Why the ranks cannot use NCCL, on all of them alike; "" if they can."""
    xp, version = device.xp, 0
    with contextlib.suppress(ImportError, AttributeError):  # without the library CuPy has an empty module
        version = importlib.import_module("cupy.cuda.nccl").get_version()
    card = f"{socket.gethostname()} {xp.cuda.Device(device.index).pci_bus_id}"
    mine, all_ = np.array([version, zlib.crc32(card.encode())], np.int64), np.empty((host.world_size, 2), np.int64)
    host.all_gather(mine, all_)
    if not all_[:, 0].all():
        return 'NCCL is not installed on every rank (pip install "nvidia-nccl-cu13>=2.30")'
    shares = all_[:, 0].min() >= SHARED_GPU and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if len(set(all_[:, 1])) < host.world_size and not shares:
        return "ranks share a GPU (NCCL 2.30 allows it with NCCL_MULTI_RANK_GPU_ENABLE=1)"
    return ""


class Watchdog:
    """The open operations of a rank on its stream, over all groups, and what happens if one takes too long."""

    def __init__(self, host: Comm, device: Device) -> None:
        self.host, self.device = host, device
        self.open: list[_Transfer] = []
        self.communicators: list[Any] = []
        self.failure: CommError | None = None
        self.changed = threading.Condition()
        weak = weakref.ref(self)
        threading.Thread(target=_watch, args=(weak, self.changed), name="NCCL watchdog", daemon=True).start()

    def add(self, transfer: _Transfer) -> None:
        """Look after an operation."""
        with self.changed:
            self.open.append(transfer)
            self.changed.notify()

    def look(self) -> None:
        """Abort everything if NCCL has failed, or once the oldest transfer has passed its deadline."""
        if self.open and self.failure is None and (error := self._error()):
            self.failure = error
            for communicator in self.communicators:
                communicator.abort()  # kernels that wait for a peer end, and with them the streams behind
            self.open = []

    def _error(self) -> CommError | None:
        try:
            for communicator in self.communicators:
                communicator.check_async_error()
        except RuntimeError as error:
            return CommError(f"NCCL failed during {self.open[0].what}: {error}")
        self.open = [t for t in self.open if not t.event.done]
        if not self.open or (waited := time.monotonic() - self.open[0].begin) <= self.open[0].deadline:
            return None
        self.host.recorder.waiting = self.open[0].noted
        return self.host.late(self.open[0].noted, waited)

    def check(self) -> None:
        """Raise the failure that `look` has found."""
        if self.failure is not None:
            raise self.failure


def _watch(weak: weakref.ref[Watchdog], changed: threading.Condition) -> None:
    """The watchdog's thread; it ends with its owner."""
    ready = False
    while (watchdog := weak()) is not None:
        if not ready:
            watchdog.device.xp  # noqa: B018 - makes the device this thread's
            ready = True
        busy = bool(watchdog.open)
        if busy:
            watchdog.look()
        del watchdog
        with changed:
            changed.wait(LOOK if busy else 1.0)


class _Transfer(Handle):
    """An operation on the communication stream. It keeps its arrays alive until it has ended."""

    def __init__(self, comm: NCCLComm, noted: Raw, what: str, arrays: Any) -> None:
        self.comm, self.noted, self.what, self.arrays = comm, noted, what, arrays
        self.begin, self.deadline = time.monotonic(), comm.deadline
        self.event = comm.stream.record(comm.xp.cuda.Event(disable_timing=True))
        comm.watchdog.add(self)

    def wait(self) -> None:
        """Have what follows on the current stream come after this. The host goes on."""
        self.comm.watchdog.check()
        self.comm.xp.cuda.get_current_stream().wait_event(self.event)


class NCCLComm(Comm):
    """A group of processes with a GPU each; arrays in the memory of the host go over `host`."""

    def __init__(self, host: Comm, device: Device, stream: Any = None, watchdog: Watchdog | None = None) -> None:
        super().__init__(host.rank, host.ranks, host.deadline or math.inf, host.recorder)
        self.host, self.device, self.xp = host, device, device.xp
        self.nccl: Any = importlib.import_module("cupy.cuda.nccl")
        self.stream = stream or self.xp.cuda.Stream(non_blocking=True)
        self.watchdog = watchdog or Watchdog(host, device)
        identifier = np.zeros(128, np.uint8)
        if host.rank == 0:
            identifier[:] = np.frombuffer(bytes(self.nccl.get_unique_id()), np.uint8)
        host.broadcast(identifier)
        host.barrier()  # a rank that never comes is named here; NCCL would wait for it without end
        self._nccl = self.nccl.NcclCommunicator(host.world_size, identifier.tobytes(), host.rank)
        self.watchdog.communicators.append(self._nccl)

    def progress(self) -> None:
        """Raise what the watchdog has found."""
        self.watchdog.check()
        self.host.progress()

    def compare_feeds(self, noted: Sequence[WeighedFeed]) -> None:
        self.host.compare_feeds(noted)

    def _start(self, call: CollectiveCall) -> Handle:
        if not is_device(call.x):
            return self.host._start(call)
        if call.op and call.x.dtype.name not in REDUCED | {"bool"}:
            raise DTypeError(f"NCCL does not reduce {call.x.dtype}", fix="cast to float32 or int32 first")
        self.watchdog.check()
        if agreement := self.host.agree(call):
            agreement.wait()
        x = call.x
        if x is not call.out and self.xp.may_share_memory(x, call.out):
            x = x.copy()
        self.stream.wait_event(self.xp.cuda.get_current_stream().record())
        if x.size or call.out.size:
            self._enqueue(call, x, call.out)
        return _Transfer(self, call.noted, call.what, (x, call.out))

    def _enqueue(self, call: CollectiveCall, x: Any, out: Any) -> None:
        number, op, stream = self._type(x), getattr(self.nccl, f"NCCL_{call.op.upper()}", None), self.stream.ptr
        source, target = x.data.ptr, out.data.ptr
        if call.kind == "all_reduce":
            self._nccl.allReduce(source, target, x.size, number, op, stream)
        elif call.kind == "reduce_scatter":
            self._nccl.reduceScatter(source, target, out.size, number, op, stream)
        elif call.kind == "all_gather":
            self._nccl.allGather(source, target, x.nbytes, self.nccl.NCCL_UINT8, stream)
        elif call.kind == "broadcast":
            self._nccl.broadcast(source, target, x.nbytes, self.nccl.NCCL_UINT8, call.root, stream)
        else:
            sent, received = call.counts or ((x.size // self.world_size,) * self.world_size,) * 2
            self._messages(_cut(x, sent), _cut(out, received))

    def _type(self, x: Any) -> int:
        """NCCL's number of a dtype: a bool is a byte (its maximum and minimum are the same)."""
        name = "uint8" if x.dtype == bool else x.dtype.name
        number: int = getattr(self.nccl, f"NCCL_{name.upper()}", self.nccl.NCCL_UINT8)
        return number

    def _exchange(self, sends: Sequence[PeerMessage], recvs: Sequence[PeerMessage], noted: Sequence[Raw]) -> None:
        if not all(is_device(array) for _, array in (*sends, *recvs)):
            return self.host._exchange(sends, recvs, noted)
        self.watchdog.check()
        self.stream.wait_event(self.xp.cuda.get_current_stream().record())
        self._messages(sends, recvs)
        if noted:
            _Transfer(self, noted[0], "an exchange of messages", (sends, recvs)).wait()
        return None

    def _messages(self, sends: Sequence[PeerMessage], recvs: Sequence[PeerMessage]) -> None:
        """All in one group: NCCL then works on them together, and no order among them can deadlock."""
        calls: list[tuple[Callable[..., None], int, Any]] = [(self._nccl.send, peer, x) for peer, x in sends]
        calls += [(self._nccl.recv, peer, x) for peer, x in recvs]
        self.nccl.groupStart()
        for call, peer, x in calls:
            if x.nbytes:
                call(x.data.ptr, x.nbytes, self.nccl.NCCL_UINT8, peer, self.stream.ptr)
        self.nccl.groupEnd()

    def _split(self, group: tuple[int, ...]) -> Comm:
        return NCCLComm(self.host.split(group), self.device, self.stream, self.watchdog)


def on_host(x: Any) -> np.ndarray:
    """The array in the memory of the host."""
    found: np.ndarray = x.get() if is_device(x) else x
    return found


def _cut(x: Any, counts: Sequence[int]) -> list[PeerMessage]:
    flat, ends = x.reshape(-1), np.cumsum(counts).tolist()
    return [(peer, flat[end - count : end]) for peer, (end, count) in enumerate(zip(ends, counts))]


class ThroughHost(Comm):
    """GPU arrays over a communicator of the host: copied there, sent, and copied back. The host waits."""

    def __init__(self, host: Comm) -> None:
        super().__init__(host.rank, host.ranks, host.deadline, host.recorder)
        self.host = host

    def progress(self) -> None:
        self.host.progress()

    def compare_feeds(self, noted: Sequence[WeighedFeed]) -> None:
        self.host.compare_feeds(noted)

    def _start(self, call: CollectiveCall) -> Handle:
        if not is_device(call.x):
            return self.host._start(call)
        x = on_host(call.x)
        out = x if call.out is call.x else np.empty(call.out.shape, call.out.dtype)
        staged = CollectiveCall(call.kind, x, out, call.op, call.root, call.counts, call.noted)
        return _Staged(self.host._start(staged), out, call.out)

    def _exchange(self, sends: Sequence[PeerMessage], recvs: Sequence[PeerMessage], noted: Sequence[Raw]) -> None:
        given = [(to, on_host(x)) for to, x in sends]
        arrived = [(source, np.empty(x.shape, x.dtype) if is_device(x) else x) for source, x in recvs]
        self.host._exchange(given, arrived, noted)
        out: Any
        for (_, x), (_, out) in zip(arrived, recvs):
            if x is not out:
                out.set(x)

    def _split(self, group: tuple[int, ...]) -> Comm:
        return ThroughHost(self.host.split(group))


class _Staged(Handle):
    """A collective of the host whose result goes to a GPU in the end."""

    def __init__(self, handle: Handle, result: np.ndarray, out: Any) -> None:
        self.handle, self.result, self.out = handle, result, out

    def wait(self) -> None:
        self.handle.wait()
        if self.out is not None:
            self.out.set(self.result)
            self.out = None

"""The NCCL communicator on a stand-in for CuPy and NCCL: no GPU has run this file, see `tests/gpu/fake_cupy.py`."""

from __future__ import annotations

import numpy as np
import pytest

from hetu.core.backend import Device
from hetu.core.errors import DTypeError
from hetu.dist import CommError, DeadlineError, SerialComm, run_ranks
from hetu.dist.comm import nccl
from hetu.dist.comm.call import CollectiveCall
from hetu.dist.comm.comm import Comm, Handle
from hetu.dist.comm.nccl import NCCLComm, ThroughHost, on_device

from ..gpu import fake_cupy, fake_streams
from .contract import CHECKS

GPU = Device("gpu")
NOT_HERE = ("all_reduce_large", "halves_are_rounded_once")  # NCCL adds 16-bit floats as it likes


@pytest.fixture(autouse=True)
def cupy():
    with fake_cupy.installed() as module:
        yield module


class OnDevice(Comm):
    """Runs the checks, which use NumPy arrays, on arrays of a device: copies them there and the results back."""

    def __init__(self, inner: Comm, xp) -> None:
        super().__init__(inner.rank, inner.ranks, inner.deadline, inner.recorder)
        self.inner, self.xp = inner, xp

    def progress(self) -> None:
        self.inner.progress()

    def _start(self, call: CollectiveCall) -> Handle:
        if call.kind == "barrier":
            return self.inner._start(call)
        x, out = self._copied(call.x, call.out)
        return Copied(
            self,
            self.inner._start(CollectiveCall(call.kind, x, out, call.op, call.root, call.counts, call.noted)),
            [(call.out, out)],
        )

    def _copied(self, *arrays):
        """Written by work of the current stream: whoever reads too early reads 77."""
        made = {}
        for array in arrays:
            if id(array) not in made:
                made[id(array)] = self.xp.full(array.shape, 77, array.dtype)
                self.xp.copyto(made[id(array)], self.xp.asarray(array))
        return [made[id(array)] for array in arrays]

    def _exchange(self, sends, recvs, noted) -> None:
        arrays = self._copied(*(x for _, x in (*sends, *recvs)))
        peers = [peer for peer, _ in (*sends, *recvs)]
        pairs = list(zip(peers, arrays))
        self.inner._exchange(pairs[: len(sends)], pairs[len(sends) :], noted)
        for (_, x), (_, device) in zip(recvs, pairs[len(sends) :]):
            x[...] = device.get()
        self.inner.progress()

    def _split(self, group):
        return OnDevice(self.inner.split(group), self.xp)


class Copied(Handle):
    def __init__(self, comm, handle, pairs) -> None:
        self.comm, self.handle, self.pairs = comm, handle, pairs

    def wait(self) -> None:
        self.handle.wait()
        for host, device in self.pairs:
            host[...] = device.get()
        self.pairs = []
        self.comm.inner.progress()


def on_a_stream(check, cupy, make=NCCLComm):
    """The body of a rank: the check inside a stream of its own, as an executor runs its programs."""

    def body(comm):
        with cupy.cuda.Stream():
            check(OnDevice(make(comm, GPU), cupy))

    return body


@pytest.mark.parametrize(
    "check", [check for check in CHECKS if check.__name__ not in NOT_HERE], ids=lambda check: check.__name__
)
class TestContract:
    @pytest.mark.sampled(4)
    @pytest.mark.parametrize("early", [False, True])
    def test_nccl(self, check, early, cupy, monkeypatch):
        monkeypatch.setattr(fake_streams, "EARLY", [early])
        for n in (2, 3):
            run_ranks(n, on_a_stream(check, cupy))

    def test_one_rank(self, check, cupy):
        on_a_stream(check, cupy)(SerialComm())

    @pytest.mark.sampled(4)
    def test_through_the_host(self, check, cupy):
        run_ranks(3, on_a_stream(check, cupy, lambda comm, _: ThroughHost(comm)))


def check_named(name):
    return next(check for check in CHECKS if check.__name__ == name)


class Planted:
    """The mistakes that the stand-in must catch, each in one method of the communicator."""

    class NoWaitForTheInput(NCCLComm):
        """The collective does not wait for the kernels that make its input."""

        def _start(self, call):
            stream, self.stream = self.stream, Deaf(self.stream)
            try:
                return super()._start(call)
            finally:
                self.stream = stream

    class NoWaitForTheResult(NCCLComm):
        """What follows does not wait for the collective."""

        def _start(self, call):
            handle = super()._start(call)
            handle.wait = lambda: None
            return handle

    class NoGroup(NCCLComm):
        """Messages go out one by one."""

        def _messages(self, sends, recvs):
            for message in sends:
                super()._messages([message], [])
            for message in recvs:
                super()._messages([], [message])


class Deaf:
    def __init__(self, stream) -> None:
        self.stream, self.ptr, self.record = stream, stream.ptr, stream.record

    def wait_event(self, event) -> None:
        pass


@pytest.mark.parametrize(
    ("mistake", "early", "check", "error"),
    [
        (Planted.NoWaitForTheInput, True, "all_reduce", AssertionError),
        (Planted.NoWaitForTheResult, False, "all_gather", AssertionError),
        (Planted.NoGroup, False, "ring", fake_streams.StuckError),
    ],
)
def test_the_stand_in_catches(mistake, early, check, error, cupy, monkeypatch):
    monkeypatch.setattr(fake_streams, "EARLY", [early])
    with pytest.raises(error):
        run_ranks(2, on_a_stream(check_named(check), cupy, mistake))


def test_the_host_never_waits(cupy):
    """Between the start of a collective and the reading of its result nothing synchronizes."""

    def body(comm):
        with cupy.cuda.Stream():
            nccl_ = NCCLComm(comm, GPU)
            x = cupy.full((4,), 1.0, "float32")
            comm.barrier()
            fake_streams.LOG.clear()
            comm.barrier()
            handles = [nccl_.all_reduce_async(x, x) for _ in range(3)]
            for handle in handles:
                handle.wait()
            x += 1
            comm.barrier()
            log = list(fake_streams.LOG)
            comm.barrier()
            return log, x.get().tolist()

    for log, x in run_ranks(2, body):
        assert log == []
        assert x == [9.0] * 4  # doubled three times, then one more


def test_an_absent_rank_is_reported_and_the_stream_ends(cupy):
    def body(comm):
        with cupy.cuda.Stream():
            nccl_ = NCCLComm(comm, GPU)
            x = cupy.ones((4,), "float32")
            nccl_.all_reduce(x, x)
            nccl_.deadline = 0.2
            if comm.rank == 0:
                try:
                    nccl_.all_reduce(x, x)
                    x.get()  # returns because the watchdog has aborted NCCL
                    nccl_.progress()
                finally:
                    comm.send(np.zeros(1), 1)
            else:
                comm.recv(np.zeros(1), 0)

    with pytest.raises(DeadlineError, match=r"(?s)rank 0 waited 0.\d+ s for all_reduce sum f32\[4\].*missing: rank 1"):
        run_ranks(2, body)


def test_a_failure_of_nccl_is_an_error(cupy):
    def body(comm):
        nccl_ = NCCLComm(comm, GPU)
        x = cupy.ones((4,), "float32")
        if comm.rank == 0:
            nccl_.all_reduce_async(x, x)
            nccl_._nccl.abort()
            nccl_.watchdog.look()
            nccl_.progress()

    with pytest.raises(CommError, match="NCCL failed during all_reduce sum"):
        run_ranks(2, body)


def test_dtypes_that_nccl_does_not_add(cupy):
    x = cupy.zeros((3,), "int16")
    comm = NCCLComm(SerialComm(), GPU)
    with pytest.raises(DTypeError, match="NCCL does not reduce int16"):
        comm.all_reduce(x, x)


def test_arrays_of_the_host_go_over_the_host():
    def body(comm):
        both = NCCLComm(comm, GPU)
        x = np.array([comm.rank + 1.0])
        both.all_reduce(x, x)
        return x[0]

    assert run_ranks(2, body) == [3.0, 3.0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda cupy, put: put(cupy.cuda.nccl, "get_version", lambda: 0), "NCCL is not installed on every rank"),
        (
            lambda cupy, put: put(
                cupy.cuda, "Device", lambda i: fake_cupy.types.SimpleNamespace(use=lambda: None, pci_bus_id="0")
            ),
            "ranks share a GPU",
        ),
    ],
)
def test_the_fall_back_is_said(change, reason, cupy, monkeypatch, capfd):
    change(cupy, monkeypatch.setattr)
    assert run_ranks(2, lambda comm: type(on_device(comm, GPU))) == [ThroughHost] * 2
    error = capfd.readouterr().err
    assert error.startswith(f"hetu: GPU arrays travel through the host: {reason}") and error.count("\n") == 1


def test_it_is_chosen_for_ranks_with_a_gpu_each():
    assert run_ranks(2, lambda comm: type(on_device(comm, GPU))) == [NCCLComm] * 2
    assert run_ranks(2, lambda comm: on_device(comm, Device("cpu")) is comm) == [True] * 2
    assert type(on_device(SerialComm(), GPU)) is SerialComm
    assert nccl.SHARED_GPU == 23000

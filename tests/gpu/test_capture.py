"""Training on a "GPU" that is a stand-in: graph capture, asynchronous feeds, and data parallelism over NCCL.

The kernels are the real texts in the emulator; streams, capture and NCCL are those of `fake_cupy.py`, so that what is
proven is hetu's own part. No device has run this file.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import hetu as ht
from hetu import nn
from hetu.core import backend
from hetu.core.errors import GraphError
from hetu.core.program import Program
from hetu.dist import DataParallel, DeadlineError, SerialComm, run_ranks
from hetu.gpu_kernels import emulator
from hetu.gpu_kernels.capture import Captured
from hetu.plan import MachineProfile, Within
from hetu.plan.costs.links import DeviceFigures

from . import fake_cupy, fake_streams
from .fake_streams import LOG
from .proofs import STEPS, T, X, assert_equal, model, trained

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")
REPLAYED = ["copy pinned", "copy pinned", "launch graph", "get", "synchronize"]


@pytest.fixture
def cupy():
    with fake_cupy.installed() as module:
        yield module


def test_a_replay_is_a_new_step(cupy, capsys):
    """New feeds, dropout masks and learning rates in each: all of them lie in the memory of the device."""
    entries = model()
    there = trained(entries, "gpu", explain=True)
    assert_equal(trained(entries, "cpu"), there)
    assert LOG.count("kernel update_all") == 2  # one for all parameters, in the first run and when captured
    assert "capture: one CUDA graph from its second run on" in capsys.readouterr().out
    LOG.clear()
    there[2].run({"x": X[0], "t": T[0]})
    assert LOG == REPLAYED


def test_nans_are_found_on_the_device(cupy):
    x = ht.placeholder("x", (2,))
    w = ht.variable("w", np.ones(2, np.float32))
    loss = ht.sum(ht.log(x) * w)
    executor = ht.Executor([loss, ht.optim.SGD(0.1).minimize(loss)], device="gpu")
    with ht.debug_nans():
        executor.run({x: np.ones(2, np.float32)})
        with pytest.raises(ht.errors.NumericError, match="log"):
            executor.run({x: -np.ones(2, np.float32)})


def test_mixed_precision_does_not_make_the_host_wait(cupy):
    entries = model()
    losses, state, executor = trained(entries, "gpu", precision="float16")
    np.testing.assert_allclose(losses, trained(entries, "cpu")[0], rtol=2e-2)
    assert state["loss_scale/good_steps"] == STEPS
    LOG.clear()
    executor.run({"x": X[0], "t": T[0]})
    assert LOG == REPLAYED


def test_captured_once_for_each_program(cupy):
    _, _, executor = trained(model(), "gpu")
    for x, t in zip(X, T):
        executor.run({"x": x[:3], "t": t[:3]})
    assert LOG.count("begin_capture") == 2
    assert LOG.count("launch graph") == 2 * (STEPS - 1)


def test_without_fetches_the_host_waits_for_nothing_but_its_own_buffers(cupy):
    entries = model()
    assert_equal(trained(entries, "cpu", fetch=False), trained(entries, "gpu", fetch=False))


def test_a_feed_that_is_overwritten_too_soon_is_seen(cupy, monkeypatch):
    monkeypatch.setattr(fake_streams.Event, "synchronize", lambda self: None)
    entries = model()
    with pytest.raises(AssertionError):
        assert_equal(trained(entries, "cpu", fetch=False), trained(entries, "gpu", fetch=False))


def test_a_counter_baked_into_the_graph_is_seen(cupy, monkeypatch):
    """Were the rate a number of the launch, as a host loop would have it, replays would repeat the step."""
    original = Captured._run_calls
    frozen = []

    def bake(self):
        original(self)
        frozen.append(fake_cupy.plain(self.state).copy())
        self.state[...] = frozen[0]

    monkeypatch.setattr(Captured, "_run_calls", bake)
    make = Program._captured

    def with_state(self):
        captured = make(self)
        if captured is not None:
            captured.state = self.state.arrays["model/optimizer/step"]
        return captured

    monkeypatch.setattr(Program, "_captured", with_state)
    entries = model()
    with pytest.raises(AssertionError):
        assert_equal(trained(entries, "cpu"), trained(entries, "gpu"))


@ht.op(infer=lambda x: x, differentiable=False)
def table_of_the_host(xp, x):
    """Adds numbers that lie in the memory of the host.

    >>> table_of_the_host.name
    'table_of_the_host'
    """
    return x + xp.asarray(np.arange(x.size, dtype="float32").reshape(x.shape))


@ht.op(infer=lambda x: x, differentiable=False)
def with_temporaries(xp, x):
    """Takes memory for intermediate results whenever it runs.

    >>> with_temporaries.name
    'with_temporaries'
    """
    return xp.sin(x) * xp.cos(x) + x


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("noise", "reason"),
    [
        (lambda h: ht.normal(h.shape), "<random f32[8, 5] at test_capture.py"),
        (table_of_the_host, "it copies an array of the host"),
    ],
)
def test_what_cannot_be_captured_is_said_once_and_runs_call_by_call(noise, reason, cupy, capfd):
    entries = model(lambda h: ht.stop_gradient(noise(h)))
    there = trained(entries, "gpu")
    assert_equal(trained(entries, "cpu"), there)
    said = capfd.readouterr().err
    assert said.count("hetu: a program runs call by call, not as one CUDA graph: ") == 1 and reason in said
    assert "launch graph" not in LOG
    assert "runs call by call" in str(there[2].program({"x": X[0], "t": T[0]}))


def test_temporaries_lie_in_a_pool_of_the_graph(cupy):
    entries = model(lambda h: ht.stop_gradient(with_temporaries(h)))
    assert_equal(trained(entries, "cpu"), trained(entries, "gpu"))
    assert "launch graph" in LOG


def test_memory_of_the_default_pool_in_a_graph_is_seen(cupy, monkeypatch, capfd):
    monkeypatch.setattr(cupy.cuda, "using_allocator", lambda _: contextlib.nullcontext())
    trained(model(lambda h: ht.stop_gradient(with_temporaries(h))), "gpu")
    assert "memory that the default pool will give to others" in capfd.readouterr().err


def test_an_error_in_a_call_names_the_users_line(cupy, monkeypatch):
    monkeypatch.setattr(fake_cupy.RawModule, "get_function", lambda self, name: lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        trained(model(), "gpu")
    assert "proofs.py" in caught.value.__notes__[0]  # where the model is written


def test_two_gpus_train_as_one_cpu(cupy):
    entries = model()
    alone = trained(entries, "cpu")

    def rank(comm):
        return trained(entries, "gpu", strategy=DataParallel(), comm=comm)[:2]

    for found in run_ranks(2, rank, deadline=60.0):
        assert_equal(alone, found)
    assert "launch graph" not in LOG  # communication is not captured


def test_a_rank_that_stays_away_ends_the_step_and_marks_the_state(cupy):
    """What the watchdog finds while the host waits for the loss is raised by `run`, and no further step is made."""
    entries = model()

    def rank(comm):
        executor = ht.Executor(list(entries), device="gpu", strategy=DataParallel(), comm=comm)
        feed = {"x": X[0], "t": T[0]}
        executor.run(feed)
        comm.barrier()
        if comm.rank:
            comm.recv(np.zeros(1), 0)
            return None
        executor.placement.comm.deadline = 0.2
        try:
            executor.run(feed)
        except DeadlineError:
            with pytest.raises(GraphError, match="load a checkpoint"):
                executor.run(feed)
            raise
        finally:
            comm.send(np.zeros(1), 1)

    with pytest.raises(DeadlineError, match="missing: rank 1 waits for rank 0 in message from 0 to 1"):
        run_ranks(2, rank, deadline=60.0)


def test_pinned_feeds_convert_within_a_kind(cupy):
    buffer = cupy.zeros((2, 0), "float32")
    backend.filler(cupy, buffer)(np.zeros((2, 0)))
    buffer = cupy.zeros((3,), "float32")
    fill = backend.filler(cupy, buffer)
    fill(np.array([1.0, 2.0, 3.0]))
    assert buffer.get().tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(TypeError):
        fill(np.array([1j, 2, 3]))


def swapping():
    """Layers whose activations wait for the backward pass, and a step in a smaller arena than it takes."""
    with ht.scope("swapping"):
        h, t = ht.placeholder("x", (None, 6)), ht.placeholder("t", (None,), "int64")
        for k in range(4):
            h = nn.Linear(6, 6, activation=ht.tanh, name=f"layer_{k}")(h)
        loss = ht.mean(ht.softmax_cross_entropy(h, t))
        entries = [loss, ht.optim.SGD(0.1).minimize(loss)]
    feed = {"x": X[0], "t": T[0]}
    whole = ht.Executor(entries).program(feed).plan.arena_bytes
    outside = sum(v.nbytes for v in feed.values()) + sum(int(v.tensor.nbytes) for v in entries[1])
    profile = MachineProfile(DeviceFigures(flops=1e6, bandwidth=1e6, launch=0.0, host_bandwidth=1e12))
    return entries, feed, {"strategy": Within(DataParallel(), whole * 9 // 10 + outside, profile), "comm": SerialComm()}


@pytest.mark.compiled
def test_swapped_values_leave_the_device_and_come_back(cupy):
    entries, feed, options = swapping()
    there = trained(entries, "gpu", **options)
    assert_equal(trained(entries, "cpu"), there)
    program = there[2].program(feed)
    away = [step.out for step in program.steps if step.node.op.name == "to_host"]
    assert away and all(fake_cupy.is_pinned(array) and not isinstance(array, fake_cupy.Array) for array in away)
    assert LOG.count("copy out") == LOG.count("copy in") == 2 * len(away)  # in the first run and when captured
    assert program.captured.graph is not None
    assert not any(np.shares_memory(np.asarray(a), program.block.view(np.ndarray)) for a in away)


@pytest.mark.compiled
def test_a_value_that_does_not_come_back_is_seen(cupy, monkeypatch):
    copy = cupy.cuda.runtime.memcpyAsync
    monkeypatch.setattr(cupy.cuda.runtime, "memcpyAsync", lambda *a: copy(*a) if a[3] == "out" else None)
    entries, _, options = swapping()
    with pytest.raises(AssertionError):
        assert_equal(trained(entries, "cpu"), trained(entries, "gpu", **options))

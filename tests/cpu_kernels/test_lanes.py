"""Lanes: the same bits as in one thread, errors, forks, callers at once, and which instructions of a graph are cut."""

from __future__ import annotations

import os
import select
import signal
import threading
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import OPS
from hetu.cpu_kernels import lanes, openblas, phases
from hetu.look.nans import find_nan
from hetu.look.profiler import profile_program

pytestmark = pytest.mark.skipif(openblas.get_threads() is None, reason="NumPy without OpenBLAS has no lanes")
DEADLINE = 60.0


@pytest.fixture(autouse=True)
def two_threads():
    before = openblas.get_threads()
    openblas.set_threads(2)
    if openblas.get_threads() != 2:
        openblas.set_threads(before)
        pytest.skip("BLAS has one core")
    yield
    openblas.set_threads(before)


def run(calls):
    for call in calls:
        call()


def names(size=2):
    """The thread of each piece."""
    ran = [""] * size

    def note(part):
        ran[part.start] = threading.current_thread().name

    run(lanes.over(size, lambda part: [partial(note, part)]))
    return ran


def test_pieces_run_in_threads_of_their_own_with_one_blas_thread():
    threads = []
    run(lanes.over(2, lambda part: [lambda: threads.append(openblas.get_threads())]))
    assert threads == [1, 1] and openblas.get_threads() == 2
    assert names() == [threading.current_thread().name, "hetu lane 1"]


def note(parts, part):
    parts.append(part)
    return []


def test_the_parts_cover_everything_once():
    for size in range(2, 9):
        parts = list[slice]()
        lanes.over(size, partial(note, parts))
        assert [i for part in parts for i in range(size)[part]] == list(range(size)) and len(parts) == 2


def test_what_is_not_cut_stays_as_it_is(monkeypatch):
    calls = [partial(int)]
    assert lanes.over(9, lambda part: calls, least=5) == calls, "too little for two"
    assert lanes.over(0, lambda part: calls) == calls
    assert lanes.over(4, lambda part: None if part.start else calls) is None
    nested = lanes.over(8, lambda part: lanes.over(4, lambda inner: [inner] * 3))
    assert nested[0].args[0] == ((slice(0, 4),) * 3,) * 2, "no lanes within a lane"
    monkeypatch.setenv("HETU_LANES", "0")
    assert lanes.count() == 1 and lanes.over(9, lambda part: calls) == calls
    monkeypatch.undo()
    monkeypatch.setattr(lanes, "MOST", 1)
    assert lanes.count() == 1, "BLAS keeps many threads to itself"
    monkeypatch.undo()
    assert lanes.count() == 2
    openblas.set_threads(1)
    assert lanes.count() == 1


def test_the_error_of_a_lane_reaches_the_caller_and_the_next_call_works():
    def fail(part):
        raise ValueError(f"piece {part.start}")

    for piece in (0, 1):
        calls = lanes.over(2, lambda part: [partial(fail, part)] if part.start == piece else [])  # noqa: B023
        with pytest.raises(ValueError, match=f"piece {piece}"):
            run(calls)
        assert openblas.get_threads() == 2 and names()[1] == "hetu lane 1"


def test_a_warning_of_numpy_is_none_in_a_lane():
    x, y = np.full(8, 1000.0), np.empty(8)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("error")
        run(lanes.over(8, lambda part: [partial(np.exp, x[part], y[part])]))
    assert np.isinf(y).all()


def network():
    """A graph whose convolutions are large enough to be cut, beside calls that C divides."""
    rng = np.random.default_rng(1)
    images = ht.placeholder("images", (16, 32, 32, 32))
    kernel = ht.variable("kernel", rng.standard_normal((64, 32, 3, 3)).astype(np.float32) / 20)
    h = ht.relu(ht.conv2d(images, kernel, padding=1))
    w = ht.variable("w", rng.standard_normal((64, 64)).astype(np.float32) / 8)
    nodes = ht.reshape(ht.permute_dims(h, (0, 2, 3, 1)), (-1, 64)) @ w
    rows, columns = rng.integers(0, 16384, (2, 80000))
    values = ht.tanh(ht.sampled_matmul(rows, columns, nodes, nodes))
    gathered = ht.sparse_matmul(rows, columns, values, nodes, size=16384)
    loss = ht.mean(ht.square(gathered)) + ht.mean(ht.exp(-ht.square(h)))
    executor = ht.Executor({"train": [loss, ht.optim.SGD(0.1).minimize(loss)]})
    return executor, {images: rng.standard_normal((16, 32, 32, 32)).astype(np.float32)}


WINDOW = {"kernel": (5, 4), "padding": ((2, 1), (0, 2))}


def batch_last(images):
    return np.ascontiguousarray(np.moveaxis(images, -1, 0)).transpose(1, 2, 3, 0)


@pytest.mark.parametrize(
    "name, shape, attrs, made",
    [
        ("phase_columns", (2, 11, 12, 20), WINDOW, batch_last),
        ("phase_columns", (2, 11, 12, 20), {**WINDOW, "padding": ((0, 0), (0, 0))}, np.asarray),
        ("phase_columns_dx", (3 * 30, 5 * 5 * 20), {**WINDOW, "size": (11, 11)}, np.asarray),
        ("phase_pool", (12, 500), {}, np.round),
    ],
)
def test_the_parts_of_a_fused_convolution(name, shape, attrs, made, monkeypatch):
    monkeypatch.setattr(phases, "LEAST", 1)
    operator, x = OPS[name], made(np.random.default_rng(0).standard_normal(shape, np.float32))
    wanted = operator.forward(np, x, **attrs)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    outs = tuple(np.full_like(w, 7) for w in wanted)
    calls = operator.bound(np, outs if len(outs) > 1 else outs[0], [x], attrs)
    assert any(map(lanes.is_divided, calls))
    for _ in range(2):
        run(calls)
    for out, w in zip(outs, wanted):
        np.testing.assert_allclose(out, w, rtol=1e-5, atol=1e-6)


def trained(steps=2):
    executor, feed = network()
    losses = [executor.run(feed)[0] for _ in range(steps)]
    return losses, [executor.state.arrays[name].copy() for name in ("kernel", "w")], executor.program(feed)


def cut(program):
    return {s.node.op.name for s in program.steps if any(map(lanes.is_divided, s.calls))}


def test_a_program_gives_the_same_bits_whoever_runs_the_pieces(monkeypatch):
    losses, weights, program = trained()
    assert "conv2d_last" in cut(program)
    executor, feed = network()
    executor.program(feed)
    openblas.set_threads(1)  # bound for two lanes, run by one thread
    assert [executor.run(feed)[0] for _ in range(2)] == losses
    for name, array in zip(("kernel", "w"), weights):
        np.testing.assert_array_equal(executor.state.arrays[name], array)
    openblas.set_threads(2)
    monkeypatch.setenv("HETU_LANES", "0")
    plain, others, program = trained()
    assert not cut(program)
    np.testing.assert_allclose(plain, losses, rtol=1e-5)
    for other, array in zip(others, weights):
        np.testing.assert_allclose(other, array, rtol=1e-4, atol=1e-6)


def test_a_program_without_large_pieces_keeps_the_threads_of_blas():
    x = ht.placeholder("x", (256, 512))
    w = ht.variable("w", np.ones((512, 256), np.float32))
    executor = ht.Executor([ht.relu(x @ w)])
    assert not cut(executor.program({x: np.ones((256, 512))}))


def test_two_executors_at_once():
    expected, results = trained()[0], [None, None]

    def work(i):
        results[i] = trained()[0]

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    for losses in results:
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert openblas.get_threads() == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_has_lanes_of_its_own():
    assert names()[1] == "hetu lane 1"
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, names()[1].encode())
        finally:
            os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], DEADLINE)
    said = os.read(read, 100) if ready else b"nothing"
    os.close(read)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert said == b"hetu lane 1"


def test_a_profile_and_a_search_for_nan_run_instructions_as_the_program_does():
    executor, feed = network()
    executor.run(feed)
    program = executor.program(feed)
    threads, buffers = list[int](), list[int]()

    def look():
        threads.append(openblas.get_threads())
        buffers.append(np.getbufsize())

    program.steps = [replace(step, calls=(*step.calls, look)) for step in program.steps]
    profile_program(program, repeat=1)
    assert threads == [1] * 2 * len(program.steps) and {*buffers} == {2048} and openblas.get_threads() == 2
    threads.clear()
    with np.errstate(all="ignore"):
        find_nan(program)
    assert threads == [1] * len(program.steps) and openblas.get_threads() == 2

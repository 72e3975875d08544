"""What is fed gives the same wherever it lies, and is copied where it must be: buffers are spoiled to see that."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np
import pytest

import hetu as ht
from hetu.core import executor
from hetu.cpu_kernels import fed

from ..samples import SAMPLES
from ..test_ops import built

pytestmark = pytest.mark.compiled
ROWS = np.random.default_rng(3).normal(size=(130, 96)).astype(np.float32)  # more bytes than what is always copied
WEIGHTS = np.random.default_rng(4).normal(size=(96, 3)).astype(np.float32)


def spoiled(ex, feed):
    """The results of two steps on the same numbers, between which others were put into the buffers."""
    first, last = ex.run(feed), ex.subgraphs["default"].last
    for buffer in last.program.feeds.values() if last else ():
        buffer[...] = 1
    return first, ex.run({node: at_an_end(array) for node, array in feed.items()})


def at_an_end(array):
    """A copy with no memory behind it, where this can be had: who reads beyond it ends the process."""
    if os.name != "posix" or not array.size:
        return array.copy()
    size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), np.uint8)
    behind = ctypes.c_void_p(memory.ctypes.data + size)
    assert ctypes.CDLL(None).mprotect(behind, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    made = memory[size - array.nbytes : size].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


def are_lent(ex):
    return [
        isinstance(getattr(take, "__self__", None), fed.Lent) for _, _, take, _ in ex.subgraphs["default"].last.takes
    ]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.id)
def test_operators_read_what_is_fed_where_it_lies(sample, monkeypatch):
    monkeypatch.setattr(fed, "LEAST", 0)
    outputs, feed = built(sample, "float32")
    for got, wanted in zip(*spoiled(ht.Executor(list(outputs)), feed), strict=True):
        np.testing.assert_array_equal(got, wanted)


def placed(array, how):
    """The same numbers in another place."""
    if how == "odd":  # no address of a number
        block = np.zeros(array.nbytes + 1, np.uint8)
        block[1:] = np.frombuffer(array.tobytes(), np.uint8)
        return block[1:].view(array.dtype).reshape(array.shape)
    if how == "gaps":
        block = np.zeros((len(array), 2 * array.shape[1]), array.dtype)
        block[:, ::2] = array
        return block[:, ::2]
    made = np.array(array, order="F" if how == "columns" else "C")
    made.flags.writeable = how != "constant"
    return made


@pytest.mark.parametrize("how", ["straight", "constant", "columns", "gaps", "odd"])
def test_arrays_that_lie_otherwise_are_copied(how):
    x = ht.placeholder("x", (None, 96))
    ex = ht.Executor([x[3:] @ ht.constant(WEIGHTS), ht.sum(ht.exp(x), axis=0)])
    for k in range(4):
        array = placed(ROWS + k, how if k % 2 else "straight")
        product, sums = ex.run({x: array})
        np.testing.assert_allclose(product, (ROWS + k)[3:] @ WEIGHTS, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(sums, np.exp(ROWS + k).sum(0), rtol=1e-4)
        (buffer,) = ex.subgraphs["default"].last.program.feeds.values()
        assert are_lent(ex) == [True]
        copied = k % 2 == 1 and how not in ("straight", "constant")
        assert (buffer == array).all() == copied


def test_one_array_may_be_fed_twice():
    x, y = (ht.placeholder(name, ROWS.shape) for name in "xy")
    ex = ht.Executor([x * y + x])
    assert spoiled(ex, {x: ROWS, y: ROWS})[1][0].tolist() == ex.run({x: ROWS, y: ROWS})[0].tolist()
    np.testing.assert_array_equal(ex.run({x: ROWS, y: ROWS})[0], ROWS * ROWS + ROWS)
    assert are_lent(ex) == [True, True]


@pytest.mark.parametrize("other", [ROWS, ROWS[:100]], ids=["alike", "of another size"])
def test_what_was_fed_last_lives_until_something_else_is_fed(other):
    x = ht.placeholder("x", (None, 96))
    ex = ht.Executor([ht.sum(x)])
    copied, _ = ex.run({x: ROWS}), ex.run({x: ROWS + 1})
    seen = weakref.ref(array := ROWS + 5)
    wanted = ex.run({x: array})
    program = ex.subgraphs["default"].last.program
    del array
    assert seen() is not None
    assert program.run() == wanted
    program.feeds["x"][...] = ROWS
    ex.run({x: other})
    assert seen() is None
    assert program.run() == copied  # in memory that nobody has taken back


@ht.op
def in_python(xp, x):
    """A stranger's, which C knows nothing of."""
    return xp.flip(x + 1)


@pytest.mark.parametrize(
    ("build", "wanted"),
    [
        (lambda x: [x], lambda x: [x]),
        (lambda x: [x[::-2, 3:], x + 1], lambda x: [x[::-2, 3:], x + 1]),
        (lambda x: [in_python(x), x + 1], lambda x: [np.flip(x + 1), x + 1]),
        (
            lambda x: [ht.exp(x)[0], {ht.variable("kept", np.zeros(x.shape, np.float32)): x}],
            lambda x: [np.exp(x)[0], None],
        ),
    ],
    ids=["fetched", "view fetched", "read by Python", "kept in a variable"],
)
def test_what_others_look_at_is_copied(build, wanted):
    x = ht.placeholder("x", ROWS.shape)
    ex = ht.Executor(build(x))
    for k in range(3):
        for got, right in zip(ex.run({x: ROWS + k}), wanted(ROWS + k), strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-6) if right is not None else None
    assert are_lent(ex) == [False]


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_ids_out_of_range_are_told_of_whatever_was_fed_before(steps_before):
    ids, few = ht.placeholder("ids", (20_000,), "int32"), ht.constant(WEIGHTS[:90])
    ex = ht.Executor([ht.sum(ht.embedding(ht.constant(WEIGHTS), ids)) + ht.sum(ht.embedding(few, ids))])
    good, wrong = np.zeros(20_000, np.int32), (np.arange(20_000) == 7).astype(np.int32)
    before = [ex.run({ids: good}) for _ in range(steps_before)]
    for id_ in 96, 93:
        with pytest.raises(ht.errors.HetuError, match=f"index {id_} at position .7"):
            ex.run({ids: id_ * wrong})
    assert are_lent(ex) == [True]
    assert all(ex.run({ids: good}) == got for got in before)


def test_who_looks_closer_sees_what_was_fed(tmp_path):
    """`debug_nans`, the profiler and an exported program make single calls, which read buffers."""
    x = ht.placeholder("x", ROWS.shape)
    ex = ht.Executor([ht.sum(ht.log(x))])
    for k in range(3):
        ex.run({x: np.full_like(ROWS, k + 1)})
    (buffer,) = ex.subgraphs["default"].last.program.feeds.values()
    with ht.debug_nans(), pytest.raises(ht.errors.HetuError, match="log"):
        ex.run({x: np.full_like(ROWS, -1)})
    ht.profile(ex, {x: np.full_like(ROWS, 5)})
    assert (buffer == 5).all()
    ex.export_c("default", tmp_path, {x: np.full_like(ROWS, 6)})
    assert np.fromfile(next(tmp_path.glob("*.inputs")), np.float32)[: ROWS.size].tolist() == [6] * ROWS.size
    assert ex.run({x: np.full_like(ROWS, 1)})[0] == 0


def test_who_begins_to_look_during_a_step_sees_the_next_one(monkeypatch):
    """`debug_nans` of another thread, whose single calls would read buffers of another step."""
    x, take = ht.placeholder("x", ROWS.shape), fed.Lent.take

    def took(lent, array):
        take(lent, array)
        monkeypatch.setattr(executor, "_stepper", lambda *_: [np.zeros(())])

    monkeypatch.setattr(fed.Lent, "take", took)
    ex = ht.Executor([ht.sum(x)])
    assert [ex.run({x: np.full_like(ROWS, k)})[0] for k in (1, 2)] == [ROWS.size, 0]

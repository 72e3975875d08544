"""The kernels of the sparse products: fixed entries of very unequal rows, fed ones, every split of a warp."""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager

import numpy as np
import pytest

import hetu as ht
from hetu.core import backend
from hetu.core.graph import OPS
from hetu.gpu_kernels import emulator, source, sparse
from hetu.gpu_kernels.emulator import Emulator
from hetu.gpu_kernels.launchers import bound
from hetu.gpu_kernels.machine import RecordingMachine

from ..at_once import chosen
from . import fake_cupy
from .cases import recorded

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3}
FEATURES = (1, 6, 16, 150)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All kernels at once, which takes far less time than one by one."""
    recorder = RecordingMachine()
    for dtype in TOLERANCE:
        rows, columns, values = entries(dtype=dtype)
        for features in FEATURES:
            x, out = np.ones((30, features), dtype), np.ones((40, features), dtype)
            bound(recorder, OPS["sparse_matmul"], out, (rows, columns, values, x), {"size": 40})
            bound(recorder, OPS["sparse_matmul"], out, (*fixed(rows.copy(), columns.copy()), values, x), {"size": 40})
            bound(recorder, OPS["sampled_matmul"], values, (rows, columns, out, x), {})
    emulator.prepare(recorder.texts)


def entries(count=900, size=40, nodes=30, dtype="float32", index="int64"):
    """Half of the entries lie in one row; every second row is empty; places repeat."""
    rng = np.random.default_rng(count)
    rows = np.where(rng.random(count) < 0.5, 6, (size * rng.random(count) ** 3).astype(int) // 2 * 2).astype(index)
    return rows, rng.integers(0, nodes, count).astype(index), rng.standard_normal(count).astype(dtype)


def fixed(*arrays):
    for array in arrays:
        array.setflags(write=False)
    return arrays


def product(rows, columns, values, x, size=40, calls=None):
    """What the kernels give, and the dense product in float64."""
    inside = (rows >= 0) & (rows < size) & (columns >= 0) & (columns < len(x))
    matrix = np.zeros((size, len(x)))
    np.add.at(matrix, (rows[inside], columns[inside]), values[inside].astype(float))
    out = np.full((size, x.shape[1]), 77, x.dtype)
    made = bound(Emulator(), OPS["sparse_matmul"], out, (rows, columns, values, x), {"size": size})
    assert calls is None or len(made) == calls
    for call in made:
        call()
    return out, matrix @ x.astype(float)


def check(got, wanted):
    tolerance = TOLERANCE[got.dtype.name]
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.sampled(8)
def test_fixed_entries(features, dtype):
    rows, columns, values = entries(dtype=dtype, index="int32" if features == 6 else "int64")
    x = np.random.default_rng(0).standard_normal((30, features)).astype(dtype)
    fixed(rows, columns)
    check(*product(rows, columns, values, x, calls=3))  # values brought in order, segments, the cut row
    fixed(values)
    check(*product(rows, columns, values, x, calls=2))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("features", FEATURES[::2])
def test_fed_entries(features, dtype):
    x = np.random.default_rng(0).standard_normal((30, features)).astype(dtype)
    check(*product(*entries(300, dtype=dtype), x, calls=6))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("is_fixed", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_entries_outside_the_matrix_count_for_nothing(dtype, is_fixed):
    rows, columns, values = np.array([-1, 0, 40, 7, 7, 7]), np.array([0, 1, 2, -1, 30, 5]), np.ones(6, dtype)
    if is_fixed:
        fixed(rows, columns)
    check(*product(rows, columns, values, np.ones((30, 4), dtype)))


def sampled(rows, columns, a, b):
    """What the kernel gives, and the dense product at the entries inside of it in float64."""
    out = np.full(len(rows), 77, a.dtype)
    (call,) = bound(Emulator(), OPS["sampled_matmul"], out, (rows, columns, a, b), {})
    call()
    inside = (rows >= 0) & (rows < len(a)) & (columns >= 0) & (columns < len(b))
    whole = a.astype(float) @ b.astype(float).T
    return out, np.where(inside, whole[np.where(inside, rows, 0), np.where(inside, columns, 0)], 0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("features", FEATURES)
def test_products_sampled_at_entries(features, dtype):
    rows, columns, _ = entries(101, size=43, nodes=33, index="int32" if features == 6 else "int64")
    rows[:2] = -1, 40
    columns[5:7] = -1, 30
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((n, features)).astype(dtype) for n in (40, 30))
    check(*sampled(rows, columns, a, b))


def test_segments_are_short_and_few():
    starts = np.cumsum([0, 5, 0, 1_000_000, 300])
    cuts = sparse._Cuts(starts)
    lengths = np.diff(cuts.starts)
    assert lengths.max() == 1000 and lengths.sum() == 1_000_305 and (lengths >= 0).all()
    assert cuts.parts == 1000 and cuts.rows.tolist() == [2] and cuts.first.tolist() == [0, 1000]
    assert cuts.target[:2].tolist() == [0, 1] and cuts.target[2:1002].tolist() == list(range(-1, -1001, -1))
    assert cuts.target[1002:].tolist() == [3]


MISTAKES = [
    ("e += 32 / LANES", "e += 32"),
    ("group > 0 || k >= features", "group > 0"),
    ("step >= LANES", "step > LANES"),
    ("p < first[i + 1]", "p <= first[i + 1]"),
    ("row < size && column", "column"),
    ("step = LANES / 2", "step = LANES / 4"),
    ("(EACH * 32 / LANES)", "(EACH * 32)"),
]


@contextmanager
def mistaken(right, wrong):
    original = source.file_text
    assert right in original("sparse")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "file_text", lambda name: original(name).replace(right, wrong))
        yield


def probe():
    rows, columns, values = fixed(*entries())
    check(*product(rows, columns, values, np.ones((30, 36), np.float32)))
    check(*product(rows, columns, values, np.ones((30, 3), np.float32)))
    outside = np.append(rows, 40), np.append(columns, 0)
    check(*sampled(*outside, np.ones((40, 36), np.float32), np.ones((30, 36), np.float32)))


@pytest.fixture(scope="module")
def prepared(request):
    texts = []
    for case in chosen(request, test_a_changed_kernel_is_noticed):
        with mistaken(*case["mistake"]):
            texts += recorded(sys.modules[__name__], probe)
    emulator.prepare(texts)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m[0])
@pytest.mark.sampled(8)
def test_a_changed_kernel_is_noticed(prepared, mistake):
    with mistaken(*mistake), pytest.raises((AssertionError, source.KernelError)):
        probe()


def test_on_a_device_constants_are_sorted_when_they_are_bound():
    rows, columns, values = entries()
    x, g = ht.placeholder("x", (30, 8)), np.random.default_rng(1).standard_normal((40, 8)).astype(np.float32)
    y = ht.sparse_matmul(rows, columns, values, x, size=40)
    entries_of = [y, ht.gradients(ht.sum(y * g), [x])[0]]
    feed = {x: np.random.default_rng(0).standard_normal((30, 8)).astype(np.float32)}
    wanted = ht.Executor(entries_of).run(feed)
    with fake_cupy.installed():
        executor = ht.Executor(entries_of, device="gpu")
        for _ in range(3):
            for got, right in zip(executor.run(feed), wanted, strict=True):
                np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-4)
        assert "kernel segments_product" in fake_cupy.LOG
        assert executor.program(feed).captured.graph is not None and backend._values
        del executor, got
        gc.collect()
        assert not backend._values  # nothing is kept for a program that is gone

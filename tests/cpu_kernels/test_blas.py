"""BLAS calls, bound once, against `np.matmul` over random memory layouts, and everything that they must refuse."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import platform
import subprocess
import sys
import types
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu.core.errors import ArgumentError
from hetu.cpu_kernels import blas, openblas
from hetu.cpu_kernels.c_calls import CCall
from hetu.cpu_kernels.compiler import compiler
from hetu.job import cores

from .divided import in_parts

needs_blas = pytest.mark.skipif(
    blas.gemm(np.ones((1, 1)), np.ones((1, 1)), np.ones((1, 1))) is None, reason="numpy's OpenBLAS is not there"
)


@pytest.fixture(autouse=True, params=["a table", "Python"])
def made_by(request, monkeypatch):
    """Calls are those of a table that C walks, where there is a compiler, or of Python."""
    if request.param == "Python":
        monkeypatch.setattr(blas, "c_call", lambda *_, **__: None)
    return request.param


LAYOUTS = ["C", "F", "columns", "rows", "columns of F", "offset"]
dims, wide = st.integers(1, 9), st.integers(20, 800)
layouts = st.sampled_from(LAYOUTS)
dtypes = st.sampled_from([np.float32, np.float64])


def matrix(rng: np.random.Generator, shape: tuple[int, int], layout: str, dtype: type) -> np.ndarray:
    """A random matrix of `shape` whose memory lies as `layout` says."""
    rows, columns = shape
    wide = rng.normal(size=(2 * rows + 3, 2 * columns + 5)).astype(dtype)
    match layout:
        case "C":
            return np.ascontiguousarray(wide[:rows, :columns])
        case "F":
            return np.asfortranarray(wide[:rows, :columns])
        case "columns":
            return wide[:rows, 2 : 2 + columns]
        case "rows":
            return wide[1 : 1 + 2 * rows : 2, :columns]
        case "columns of F":
            return np.asfortranarray(wide)[1 : 1 + rows, 1 : 1 + columns]
        case _:
            return wide.ravel()[3 : 3 + rows * columns].reshape(shape)


def surroundings(view: np.ndarray) -> np.ndarray:
    """A copy of the memory around a view, with the view's own elements set to zero."""
    owner = view if view.base is None else view.base
    while owner.base is not None:
        owner = owner.base
    kept = view.copy()
    view[...] = 0
    around = owner.copy()
    view[...] = kept
    return around


def tolerance(dtype: type) -> float:
    return 1e-5 if dtype is np.float32 else 1e-12


@pytest.mark.sampled(2)
@needs_blas
@settings(max_examples=300)
@given(dims, dims, dims, layouts, layouts, layouts, dtypes, st.integers(0, 2**32 - 1))
def test_gemm_equals_matmul_for_every_layout(m, n, k, of_a, of_b, of_out, dtype, seed):
    rng = np.random.default_rng(seed)
    a, b = matrix(rng, (m, k), of_a, dtype), matrix(rng, (k, n), of_b, dtype)
    out = matrix(rng, (m, n), of_out, dtype)
    want, around = a @ b, surroundings(out)
    call = blas.gemm(a, b, out)
    assert call is not None
    call()
    np.testing.assert_allclose(out, want, rtol=tolerance(dtype), atol=tolerance(dtype) * 10)
    np.testing.assert_array_equal(surroundings(out), around)


@needs_blas
@settings(max_examples=150)
@given(dims, dims, layouts, dtypes, st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_gemv_equals_matmul_for_every_layout(m, n, layout, dtype, step_x, step_out, seed):
    rng = np.random.default_rng(seed)
    a = matrix(rng, (m, n), layout, dtype)
    x = rng.normal(size=n * step_x).astype(dtype)[::step_x]
    out = rng.normal(size=m * step_out).astype(dtype)[::step_out]
    want, around = a @ x, surroundings(out)
    blas.gemv(a, x, out)()
    np.testing.assert_allclose(out, want, rtol=tolerance(dtype), atol=tolerance(dtype) * 10)
    np.testing.assert_array_equal(surroundings(out), around)


@needs_blas
@settings(max_examples=100)
@given(dims, dims, st.sampled_from(["C", "columns", "rows"]), dtypes, st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_ger_adds_an_outer_product(m, n, layout, dtype, step, seed):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=m * step).astype(dtype)[::step], rng.normal(size=n).astype(dtype)
    out = matrix(rng, (m, n), layout, dtype)
    want, around = out + np.outer(x, y), surroundings(out)
    blas.ger(x, y, out)()
    np.testing.assert_allclose(out, want, rtol=tolerance(dtype), atol=tolerance(dtype))
    np.testing.assert_array_equal(surroundings(out), around)
    if out.shape != out.T.shape:
        assert blas.ger(x, y, out.T) is None


BATCHES = [((3,), (3,)), ((2, 3), (2, 3)), ((2, 1), (1, 3)), ((), (4,)), ((2, 1, 3), (2, 5, 1)), ((1,), (1,))]


@needs_blas
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("of_a, of_b", [("C", "C"), ("F", "C"), ("C", "F"), ("turned", "C"), ("C", "turned")])
@pytest.mark.parametrize("batch_a, batch_b", BATCHES, ids=str)
def test_products_of_a_batch(batch_a, batch_b, of_a, of_b, dtype, made_by):
    rng = np.random.default_rng(0)

    def made(batch, shape, layout):
        if layout == "turned":  # the batch within the rows, as heads lie within features
            return np.moveaxis(rng.normal(size=(shape[0], *batch, shape[1])).astype(dtype), 0, -2)
        if layout == "F":
            return np.swapaxes(rng.normal(size=(*batch, *shape[::-1])).astype(dtype), -1, -2)
        return rng.normal(size=(*batch, *shape)).astype(dtype)

    a, b = made(batch_a, (5, 4), of_a), made(batch_b, (4, 6), of_b)
    out = np.full((*np.broadcast_shapes(batch_a, batch_b), 5, 6), np.nan, dtype)
    call = blas.gemms(a, b, out)
    assert isinstance(call, CCall) == (made_by != "Python" and compiler() is not None)
    if call is not None:
        call()
        np.testing.assert_allclose(out, a @ b, rtol=1e-5 if dtype is np.float32 else 1e-12)


@needs_blas
def test_large_products_run_the_threaded_kernels():
    rng = np.random.default_rng(0)
    a, b, out = (rng.normal(size=(300, 300)).astype(np.float32) for _ in range(3))
    blas.gemm(a.T, b.T, out.T)()
    np.testing.assert_allclose(out, b @ a, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(2)
@needs_blas
@pytest.mark.compiled
@settings(max_examples=60)
@given(wide, wide, wide, layouts, layouts, layouts, dtypes, st.integers(2, 9), st.integers(0, 2**32 - 1))
def test_the_bits_of_a_product_do_not_depend_on_its_division(m, n, k, of_a, of_b, of_out, dtype, threads, seed):
    rng, before = np.random.default_rng(seed), openblas.get_threads()
    a, b, out = matrix(rng, (m, k), of_a, dtype), matrix(rng, (k, n), of_b, dtype), matrix(rng, (m, n), of_out, dtype)
    call = blas.gemm(a, b, out)
    if not isinstance(call, CCall):  # made by Python, which divides nothing
        return
    openblas.set_threads(1)
    call()
    whole = out.copy()
    in_parts(call, max(1, min(threads, call.jobs // call.grain)))
    openblas.set_threads(before)
    np.testing.assert_array_equal(out, whole)


def parts_of(rows: int, grain: int, threads: int) -> list[int]:
    """The rows of each part, as the walk divides jobs."""
    jobs, least = blas._division(rows, grain)
    parts = max(1, min(jobs // least, 4 * threads))
    ends = [jobs * part // parts * blas.BLOCK for part in range(parts)] + [rows]
    return [end - begin for begin, end in itertools.pairwise(ends)]


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_parts_of_a_product_have_whole_blocks_and_are_alike(monkeypatch, threads):
    monkeypatch.setattr(blas, "get_threads", lambda: threads)
    for rows, grain in itertools.product(range(blas.BLOCK, 700), (1, 2, 3, 7)):
        sizes = parts_of(rows, grain, threads)
        assert sum(sizes) == rows and min(sizes) >= blas.BLOCK
        assert max(sizes) - min(sizes) < 2 * blas.BLOCK


def test_what_is_left_behind_whole_blocks_does_not_go_to_the_larger_part(monkeypatch):
    monkeypatch.setattr(blas, "get_threads", lambda: 2)
    assert parts_of(128, 3, 2) == [72, 56]


@needs_blas
@pytest.mark.parametrize("size", [1, 3, 17, 64])
def test_the_old_content_is_not_read(size):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, size, size))
    out, vector = np.full((size, size), np.nan), np.full(size, np.nan)
    blas.gemm(a, b, out)()
    blas.gemv(a, b[0], vector)()
    np.testing.assert_allclose(out, a @ b)
    np.testing.assert_allclose(vector, a @ b[0])


@needs_blas
def test_column_slices_of_one_buffer_are_allowed():
    buffer = np.random.default_rng(0).normal(size=(4, 12))
    q, k, scores = buffer[:, :4], buffer[:, 4:8], buffer[:, 8:]
    want = q @ k.T
    blas.gemm(q, k.T, scores)()
    np.testing.assert_allclose(scores, want)


@needs_blas
def test_a_call_keeps_its_memory_alive():
    a = np.ones((2, 2))
    view, died = a[:, :1], weakref.ref(a)
    out = np.zeros((2, 2))
    call = blas.gemm(view, view.T, out)
    del a, view
    gc.collect()
    assert died() is not None
    call()
    assert out.tolist() == [[1, 1], [1, 1]]
    del call
    gc.collect()
    assert died() is None


def strided(shape: tuple[int, int], strides: tuple[int, int]) -> np.ndarray:
    """A float64 view with the given strides, counted in elements, in the middle of enough memory."""
    return np.lib.stride_tricks.as_strided(np.ones(200)[100:], shape, tuple(8 * stride for stride in strides))


REFUSED_INPUTS = {
    "broadcast rows": np.broadcast_to(np.ones(3), (3, 3)),
    "broadcast columns": np.broadcast_to(np.ones((3, 1)), (3, 3)),
    "broadcast scalar": np.broadcast_to(np.ones(()), (3, 3)),
    "reversed rows": np.ones((3, 3))[::-1],
    "reversed columns": np.ones((3, 3))[:, ::-1],
    "overlapping rows": strided((3, 3), (1, 1)),
    "rows that overlap by one element": strided((3, 3), (2, 1)),
    "every second column": np.ones((3, 6))[:, ::2],
    "float32": np.ones((3, 3), np.float32),
    "int64": np.ones((3, 3), np.int64),
    "swapped bytes": np.ones((3, 3), np.dtype(float).newbyteorder()),
    "three axes": np.ones((1, 3, 3)),
    "another shape": np.ones((3, 4)),
    "unaligned": np.ones(80, np.uint8)[1:73].view(np.float64).reshape(3, 3),
    "half-element strides": np.zeros((3, 3), np.dtype({"names": ["x"], "formats": ["f8"], "itemsize": 12}))["x"],
}


@pytest.mark.parametrize("name", REFUSED_INPUTS)
def test_inputs_that_blas_cannot_read_are_refused(name):
    bad, good, out = REFUSED_INPUTS[name], np.ones((3, 3)), np.zeros((3, 3))
    assert blas.gemm(bad, good, out) is None
    assert blas.gemv(bad, good[0], out[0]) is None
    if name != "another shape":
        assert blas.gemm(good, bad, out) is None
        assert blas.gemm(good, good, bad) is None
        assert blas.gemm(bad.T, good, out) is None


@pytest.mark.parametrize("columns", [1, 3])
def test_a_broadcast_row_is_refused_at_every_width(columns):
    """`max(stride, columns)` as the leading dimension would read past a stride-0 array."""
    broadcast = np.broadcast_to(np.ones((1, columns)), (4, columns))
    assert blas.gemm(broadcast, np.ones((columns, 2)), np.zeros((4, 2))) is None


def test_other_refusals():
    a, out, vector = np.ones((3, 3)), np.zeros((3, 3)), np.ones(3)
    read_only = np.zeros((3, 3))
    read_only.flags.writeable = False
    assert blas.gemm(a, a, read_only) is None
    assert blas.gemm(a, a, a) is None, "out is an input"
    assert blas.gemm(a[:2, :2], a[1:, 1:], a[:2, 1:]) is None, "out overlaps an input"
    assert blas.gemm(np.ones((3, 0)), np.ones((0, 3)), out) is None, "nothing to sum"
    assert blas.gemv(a, vector[::-1], np.ones(3)) is None
    assert blas.gemv(a, np.broadcast_to(np.ones(1), 3), np.ones(3)) is None
    assert blas.gemv(a, vector, np.ones(4)) is None


def test_the_environment_switches_it_off(monkeypatch):
    monkeypatch.setenv("HETU_BLAS", "0")
    a = np.ones((2, 2))
    assert blas.gemm(a, a, np.zeros((2, 2))) is None
    assert blas.gemv(a, a[0], np.zeros(2)) is None
    assert openblas.get_threads() is None and openblas.kernels() is None
    openblas.set_threads(1)


CACHES = (openblas._library, openblas._symbol, openblas._address, openblas._has_long_integers)


def forget() -> None:
    for cached in CACHES:
        cached.cache_clear()


@pytest.fixture
def another(monkeypatch, tmp_path):
    """A NumPy whose wheel brings no library that can be loaded; after the test all is as before."""
    monkeypatch.setattr(np, "__file__", str(tmp_path / "numpy" / "__init__.py"))
    (tmp_path / "numpy.libs").mkdir()
    (tmp_path / "numpy.libs" / "libscipy_openblas64_.so").write_text("not a library")
    forget()
    yield tmp_path
    forget()


def test_a_numpy_without_any_library_is_no_error(another, monkeypatch):
    monkeypatch.setattr(openblas, "EXTENSION", "numpy.none_such")
    assert blas.gemm(np.ones((2, 2)), np.ones((2, 2)), np.zeros((2, 2))) is None
    assert openblas.get_threads() is None


@needs_blas
@pytest.mark.skipif(os.name != "posix", reason="Windows finds only what a library itself has")
def test_the_library_is_found_by_what_numpy_is_linked_with(another):
    assert openblas.get_threads() and openblas.kernels()


OTHER = """
void NAME(int order, int left, int right, INT m, INT n, INT k, float alpha, const float* x, INT px, const float* y,
          INT py, float beta, float* z, INT pz) {
    for (INT i = 0; i < m; i++)
        for (INT j = 0; j < n; j++) {
            float sum = 0;
            for (INT l = 0; l < k; l++)
                sum += (left == 111 ? x[i * px + l] : x[l * px + i]) * (right == 111 ? y[l * py + j] : y[j * py + l]);
            z[i * pz + j] = alpha * sum + (beta ? beta * z[i * pz + j] : 0);
        }
}
MORE
"""
LONG = 'char* openblas_get_config(void) { return "OpenBLAS 0.3 USE64BITINT"; }'
MKL = "static int n = 3; int MKL_Get_Max_Threads(void) { return n; } void MKL_Set_Num_Threads(int k) { n = k; }"


@pytest.mark.sampled(4)
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("name", "integer", "more", "threads"),
    [
        ("scipy_cblas_sgemm64_", "long long", "", None),
        ("scipy_cblas_sgemm", "int", "", None),
        ("cblas_sgemm64_", "long long", "", None),
        ("cblas_sgemm_64", "long long", "", None),
        ("cblas_sgemm$NEWLAPACK$ILP64", "long long", "", None),
        ("cblas_sgemm", "int", MKL, 3),
        ("cblas_sgemm", "long long", LONG, None),
    ],
)
def test_blas_of_another_name(another, monkeypatch, name, integer, more, threads):
    """As Linux distributions, MKL and macOS have it; without functions for its threads they are as many as wanted."""
    text, library = another / "other.c", another / "other.so"
    text.write_text(OTHER.replace("NAME", name).replace("INT", integer).replace("MORE", more))
    subprocess.run([compiler().command[0], "-shared", "-fPIC", str(text), "-o", str(library)], check=True, timeout=60)
    monkeypatch.setattr(openblas, "EXTENSION", "other")
    monkeypatch.setitem(sys.modules, "other", types.SimpleNamespace(__file__=str(library)))
    assert openblas.get_threads() == threads
    rng = np.random.default_rng(0)
    a, b, out = (rng.normal(size=s).astype("f") for s in ((300, 200), (70, 200), (300, 70)))
    call = blas.gemm(a, b.T, out)
    call()
    np.testing.assert_allclose(out, a @ b.T, rtol=1e-3, atol=1e-3)
    assert openblas.get_threads() == threads  # a walk gives back what it takes
    assert blas.gemm(*(np.ones((2, 2)) for _ in range(3))) is None  # it has none for doubles


@pytest.mark.parametrize(
    ("told", "wanted"),
    [({}, None), ({"OMP_NUM_THREADS": "3"}, 3), ({"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "3"}, 2),
     ({"OPENBLAS_NUM_THREADS": "all"}, None), ({"OMP_NUM_THREADS": "0"}, None)],
)  # fmt: skip
def test_how_many_threads_are_wanted(monkeypatch, told, wanted):
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert openblas.wanted() == (wanted or cores())


@needs_blas
def test_threads():
    before = openblas.get_threads()
    try:
        openblas.set_threads(1)
        assert openblas.get_threads() == 1
    finally:
        openblas.set_threads(before)
    for wrong in (0, -1, 2.0, "2"):
        with pytest.raises(ArgumentError, match="number of threads"):
            openblas.set_threads(wrong)


SMALL, LARGE = openblas.WORTH - 1, openblas.WORTH


@pytest.mark.parametrize(
    ("threads", "work", "set_to"),
    [(2, SMALL, [1, 2]), (2, 1 << 18, [1, 2]), (2, (1 << 18) - 1, []), (2, LARGE, []), (1, SMALL, [])],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_small_product_has_one_thread_of_blas(monkeypatch, threads, work, set_to, fails):
    """And gives the others back, whatever becomes of it."""
    now, seen, were = [threads], [], []

    def set_(number):
        now[0] = number
        seen.append(number)

    def call():
        were.append(now[0])
        if fails:
            raise KeyboardInterrupt

    stubs = {"openblas_get_num_threads": lambda: now[0], "openblas_set_num_threads": set_}
    monkeypatch.setattr(openblas, "function_of", lambda name: (stubs[name], None))
    with pytest.raises(KeyboardInterrupt) if fails else contextlib.nullcontext():
        openblas.alone(call, work, 1 << 18)()
    assert (seen, were, now) == (set_to, [1 if set_to else threads], [threads])


@needs_blas
@pytest.mark.parametrize(
    ("shape", "name", "arguments"),
    [
        ((32, 784, 64), "gemm", [(32, 784), (784, 64), (32, 64)]),
        ((3, 100, 100, 50), "gemms", [(3, 100, 100), (100, 50), (3, 100, 50)]),
        ((128, 128), "gemv", [(128, 128), (128,), (128,)]),
        ((256, 256), "ger", [(256,), (256,), (256, 256)]),
    ],
)
def test_small_products_that_python_calls_are_made_by_one_thread(monkeypatch, made_by, shape, name, arguments):
    asked = []
    monkeypatch.setattr(blas, "alone", lambda call, work, least: asked.append((work, work >= least)) or call)
    getattr(blas, name)(*(np.ones(shape, "f") for shape in arguments))
    assert asked == ([(np.prod(shape[-3:]), True)] if made_by == "Python" or compiler() is None else [])


@needs_blas
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the family is one of x86")
def test_kernels_are_those_the_environment_forces():
    environment = os.environ | {"OPENBLAS_CORETYPE": "Nehalem"}
    command = [sys.executable, "-c", "from hetu.cpu_kernels import openblas; print(openblas.kernels())"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "Nehalem"

"""Paths that only larger arrays take: rows of a whole block, chunks, several tensors, packs and 64-bit positions."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import OPS
from hetu.gpu_kernels import emulator, rows, source, tables
from hetu.gpu_kernels.emulator import ORDERS, Emulator
from hetu.gpu_kernels.launchers import bound
from hetu.gpu_kernels.machine import RecordingMachine
from hetu.gpu_kernels.passes.fuse_kernels import fuse_kernels

from ..at_once import chosen
from . import fake_cupy
from .cases import TOLERANCE, recorded, shifted

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def run(name: str, *arrays: np.ndarray, **attrs):
    """What the kernel of an operator gives, and what its forward function gives."""
    op = OPS[name]
    wanted = op.forward(np, *arrays, **attrs)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    made = tuple(np.full(w.shape, 77, w.dtype) for w in map(np.asarray, wanted))
    calls = bound(Emulator(), OPS[name], made if len(made) > 1 else made[0], arrays, attrs)
    for call in calls:
        call()
    return made, wanted


def check(made, wanted, tolerance=2e-5):
    for got, right in zip(made, wanted, strict=True):
        np.testing.assert_allclose(got, right, rtol=tolerance, atol=tolerance)


ROWS = [(33, 0), (40, 1), (1028, 2), (1025, 0), (9000, 0), (9001, 0)]


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize(("width", "shift"), ROWS)
@pytest.mark.sampled(8)
def test_rows_of_a_warp_and_of_a_block(width, shift):
    """Of whole packs or ragged, of packs of 4, 2 and 1."""
    x, labels = shifted(normal(5, width), shift), np.array([0, width - 1, 7, 3, 3])
    check(*run("softmax_cross_entropy", x, labels, ignore_index=7, label_smoothing=0.1))


REDUCTIONS = [((20003,), (0,)), ((3, 9001), (1,)), ((9001, 3), (0,)), ((2, 4100, 2, 40), (1, 3))]
REDUCTIONS += [((4, 1, 50, 60), (0, 2, 3))]


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize(("shape", "axis"), REDUCTIONS)
@pytest.mark.parametrize("name", ["sum", "max"])
@pytest.mark.sampled(8)
def test_reductions_in_stages(name, shape, axis):
    x = normal(*shape, dtype="float64")
    x.reshape(-1)[3] += 9
    check(*run(name, x, axis=axis, keepdims=False), tolerance=1e-9)


def test_a_maximum_of_nan():
    x = np.zeros((3, 100))
    x[1, 70], x[2, 5] = np.nan, 1
    check(*run("max", x, axis=(1,), keepdims=False))


RUNS_OF = [(1, 1), (64, 3), (65, 65), (300, 40), (300, 250)]  # rows, and how many of them have one id
UPDATED = ["sgd", "adagrad", "adam"]
ROWS_ADDED = [(1, "float64"), (6, "float64"), (37, "float64"), (296, "float16"), (132, "float32")]


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize(("count", "frequent"), RUNS_OF)
@pytest.mark.parametrize(("width", "dtype"), ROWS_ADDED)
@pytest.mark.sampled(8)
def test_rows_are_added_by_their_ids(width, dtype, count, frequent):
    """Runs shorter and longer than a piece and than what is under way at once; ids that name nothing; rows narrower and
    wider than a warp. The digits are the same for packs and for single elements."""
    rng = np.random.default_rng(count)
    ids, rows_ = rng.integers(-3, 23, count), normal(count, width, dtype=dtype)
    ids[rng.permutation(count)[:frequent]] = 7
    inside, wanted = (ids >= 0) & (ids < 20), np.ones((20, width))
    np.add.at(wanted, ids[inside], rows_[inside])
    outs = [shifted(np.ones((20, width), dtype), start) for start in (0, 0, 1)]
    for out, start in zip(outs, (0, 1, 0)):
        for call in tables.added_rows(Emulator(), out, ids, shifted(rows_, start)):
            call()
        np.testing.assert_array_equal(out, outs[0])
    np.testing.assert_allclose(outs[0], wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_frequent_id_is_cut_into_pieces():
    """No thread adds more rows than a piece has, and one sum a piece."""
    ids, rows_ = np.ones(1000, np.int64), normal(1000, 4, dtype="float64")
    text = tables.scatter_text(2, S="float64", I="int64", Index="int32")
    (*_, parts), calls = tables.summed(Emulator(), text, ids, rows_, 4, 2)
    for call in calls:
        call()
    pieces = np.add.reduceat(rows_, np.arange(0, 1000, tables.PIECE))
    np.testing.assert_allclose(parts[1:], pieces[1:], rtol=1e-12)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("name", UPDATED)
def test_rows_are_updated_in_packs_and_one_by_one(name):
    """Wider than a warp, and with a run of several pieces."""
    update, rng = OPS[name].update, np.random.default_rng(0)
    ids, rows_ = np.where(rng.random(200) < 0.7, 3, rng.integers(0, 9, 200)), normal(200, 132)
    old = [np.abs(normal(9, 132, seed=k)) for k in range(1, 1 + update.tables)]
    attrs, scalars = update.rows.defaults, (np.array(0.1, np.float32), *([np.array(3)] if update.timed else []))
    wanted = update.rows.forward(np, *old, ids, rows_, *scalars, **attrs)
    for late in range(len(old) + 2):  # which array begins where packs do not; the last number is none of them
        *made, rows_of = (shifted(a, k == late) for k, a in enumerate((*old, rows_)))
        made = tuple(made)
        out = made if len(made) > 1 else made[0]
        for call in bound(Emulator(), update.rows, out, (*made, ids, rows_of, *scalars), attrs):
            call()
        check(made, wanted if len(made) > 1 else (wanted,), 2e-4)


@pytest.mark.parametrize("name", ["scatter_rows", "scatter_add", "sgd_rows", "adagrad_rows", "put_along_axis_add"])
def test_sums_by_id_do_not_depend_on_the_order_of_threads(name):
    """From end to end; each launch alone is held to that by the emulator."""
    ids, rows_ = np.random.default_rng(0).integers(0, 9, 400), normal(400, 5)
    found = []
    for order in ORDERS:
        table, state = np.ones((9, 5), np.float32), np.ones((9, 5), np.float32)
        arrays, attrs = (table, ids, rows_), {}
        if name.endswith("_rows") and name != "scatter_rows":
            states = (state,) * (name == "adagrad_rows")
            arrays, attrs = (table, *states, ids, rows_, np.array(0.1, np.float32)), OPS[name].defaults
        elif name == "put_along_axis_add":
            arrays, attrs = (table, np.repeat(ids[:, None], 5, 1), rows_), {"axis": 0}
        out = (table, state) if name == "adagrad_rows" else table
        for call in bound(Emulator([order]), OPS[name], out, arrays, attrs):
            call()
        found.append(table)
    assert (found[0] == found[1]).all() and (found[0] == found[2]).all() and (found[0] != 1).any()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize(("shape", "count", "axis"), [((3, 5, 7), 4, 1), ((2, 40), 300, 1), ((200, 6), 9, 0)])
def test_elements_gathered_and_added_along_an_axis(shape, count, axis, dtype):
    """In turn where columns are many or short, else by sorting."""
    rng = np.random.default_rng(count)
    taken = tuple(count if i == axis else n for i, n in enumerate(shape))
    ids, x, values = rng.integers(0, shape[axis], taken), normal(*shape, dtype=dtype), normal(*taken, dtype=dtype)
    check(*run("take_along_axis", x, ids, axis=axis))
    wide = x.astype(np.float64), ids, values.astype(np.float64)
    (wanted,) = (OPS["put_along_axis_add"].forward(np, *wide, axis=axis),)
    made = np.full(shape, 77, dtype)
    calls = bound(Emulator(), OPS["put_along_axis_add"], made, (x, ids, values), {"axis": axis})
    for call in calls:
        call()
    check((made,), (wanted,), 2e-2 if dtype == "float16" else 2e-5)


def test_dropout_of_any_size_and_alignment():
    state = np.array([11, 3], np.uint64)
    for size in (1, 15, 16, 17, 1000):
        check(*run("dropout", normal(size + 1)[1:], state, rate=0.3, stream=5, channels=False))
        check(*run("dropout", normal(size), state, rate=0.3, stream=5, channels=False))
    check(*run("dropout", normal(3, 20, 5, 7), state, rate=0.3, stream=5, channels=True))


def test_operands_with_strides_are_copied_for_a_kernel_that_takes_none():
    table, ids, rows_ = normal(9, 4), np.array([3, 1, 3]), normal(3, 11, seed=1)[:, 2:6]
    rate, made = np.array(0.5, np.float32), table.copy()
    calls = bound(Emulator(), OPS["sgd_rows"], made, (made, ids, rows_, rate), {})
    assert len(calls) == 4  # the copy, the sort, the ids in order and the kernel
    for call in calls:
        call()
    np.subtract.at(table, ids, 0.5 * rows_)
    check((made,), (table,))


def test_a_batch_of_rows_is_one_product_of_cublas():
    with fake_cupy.installed() as xp:
        a, b, out = xp.asarray(normal(2, 3, 4)), xp.asarray(normal(5, 4)).T, xp.zeros((2, 3, 5), "float32")
        (call,) = OPS["matmul"].bound(xp, out, (a, b), {})
        call()
        assert [x.shape for x in call.args] == [(6, 4), (4, 5)]
        check((out.get(),), (normal(2, 3, 4) @ normal(5, 4).T,))


# -- generated kernels -----------------------------------------------------------------------------------------------


def test_a_chain_rounds_half_precision_after_every_step():
    a, b = normal(1000, dtype="float16"), normal(1000, dtype="float16", seed=1)
    x, y = (ht.placeholder(name, (1000,), "float16") for name in "ab")
    (node,), out = fuse_kernels([x * y - x]), np.empty(1000, np.float16)
    for call in bound(Emulator(), node.op, out, [a, b], node.attrs):
        call()
    assert (out == a * b - a).all()


@pytest.mark.parametrize(
    ("shape", "cut"),
    [((64,), 4), ((63,), 1), ((8, 6), 4), ((), 1)],
)
def test_what_lies_flat_moves_in_packs(shape, cut):
    recorder, x = RecordingMachine(), np.zeros(shape, np.float32)
    bound(recorder, OPS["negative"], np.empty_like(x), [x], {})
    assert f"Pack<float, {cut}>" in next(iter(recorder.texts))


def test_any_strides_and_broadcasting():
    base = normal(6, 10, 8)
    for x, y in [
        (base[::2, ::-1, 1::3], normal(3, 1, 3)),
        (base.transpose(2, 0, 1), normal(10)),
        (base[:, :, 0], normal(6, 1)),
        (base[:, 1:2, :], normal(1, 7, 1)),
        (base[0, 0, ::2], np.float32([3.0])),
        (base.reshape(-1)[:476].reshape(68, 7)[:, :4], normal(68, 1)),  # not every row begins with a pack
    ]:
        check(*run("subtract", x, y))


def test_positions_beyond_32_bits_take_64():
    far = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (2, 1 << 20), (1 << 33, 4))
    recorder = RecordingMachine()
    bound(recorder, OPS["negative"], np.empty(far.shape, np.float32), [far], {})
    assert "typedef long long Index;" in next(iter(recorder.texts))


def test_reduction_of_what_needs_none_is_declined():
    assert bound(Emulator(), OPS["sum"], np.zeros(3), (np.zeros((1, 3)),), {"axis": (0,)}) is None


def test_selection_of_ties_and_nan():
    x = np.random.default_rng(0).integers(0, 9, (20, 70)).astype(np.float64)
    check(*run("topk", x, k=6, axis=1))
    x[3, 50] = np.nan
    check(*run("topk", -1 - x[:, :7], k=3, axis=1))  # narrower than a warp, and all below 0
    (values, places), _ = run("topk", x, k=2, axis=1)
    assert places[3, 0] == 50 and np.isnan(values[3, 0]) and values[3, 1] == 8


def test_bfloat16_is_stored_and_float32_computed():
    """NumPy has no bfloat16: its bits travel as 16-bit integers."""
    x = normal(5, 100) * 3
    bits = (x.view(np.uint32) + 0x7FFF + (x.view(np.uint32) >> 16 & 1)) >> 16
    rounded = (bits << 16).astype(np.uint32).view(np.float32)
    loss, total = np.zeros((2, 5), np.float32)
    team = rows.team(100, bits.astype(np.uint16))
    kernel = Emulator().kernel(rows.text("bfloat16", team=team), "softmax_cross_entropy")
    labels = np.arange(5)
    kernel(*team.shape(5), (bits.astype(np.uint16), labels, loss, total, 5, 100, np.False_, 0, 0.0))
    wanted = np.log(np.exp(rounded).sum(1))
    np.testing.assert_allclose(total, wanted, rtol=1e-5)
    np.testing.assert_allclose(loss, wanted - rounded[labels, labels], rtol=1e-5, atol=1e-5)


# -- mutations: the checks above can fail ----------------------------------------------------------------------------


ENTROPIES = [
    ("rows", "sum *= weight(most - shift);", ""),
    ("rows", "own[k] = load<PACK>(x + first", "own[k] = load<PACK>(x + PACK + first"),
    ("rows", "first += TOGETHER * TEAM * PACK", "first += 2 * TOGETHER * TEAM * PACK"),
    ("rows", "if (span.edge >= 0) visit(load<1>(x + span.edge));", ""),
    ("rows", "misses < width ? misses : (int)width", "0"),
    ("prelude", "    __syncthreads();\n    return warp_fold(", "    return warp_fold("),
    (
        "prelude",
        "threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : neutral",
        "partial[threadIdx.x % 32]",
    ),
]
RUNS = [
    ("runs", "sorted[place - 1] != id)", "true)"),
    ("runs", "return place + 1;", "return place;"),
    ("runs", "while (step /= 2)", "if (step /= 2)"),
    ("runs", "p = piece;", "p = piece + 1;"),
    ("runs", "place + PIECE < count ? place + PIECE : count", "count"),
]


@contextmanager
def mistaken(file, right, wrong):
    original = source.file_text
    assert right in original(file)
    changed = original(file).replace(right, wrong)
    with pytest.MonkeyPatch.context() as patch:
        for module in (source, rows, tables):
            patch.setattr(module, "file_text", lambda name: changed if name == file else original(name))
        yield


def entropies(x):
    check(*run("softmax_cross_entropy", x, np.arange(len(x)), ignore_index=None, label_smoothing=0.0))


def probe(file):
    if file == "runs":
        test_rows_are_added_by_their_ids(37, "float64", 300, 250)
    else:
        x = normal(3, 9001) * 5
        x[:, [0, -1]] = 20  # what is left beside the packs has a say
        entropies(x)


@pytest.fixture(scope="module")
def prepared(request):
    """The texts of the chosen cases of many tests, compiled together."""
    here, texts = sys.modules[__name__], []
    for test in (
        test_rows_of_a_warp_and_of_a_block,
        test_rows_are_updated_in_packs_and_one_by_one,
        test_rows_are_added_by_their_ids,
        test_reductions_in_stages,
    ):
        for case in chosen(request, test):
            texts += recorded(here, partial(test, **case))
    for case in chosen(request, test_a_changed_entropy_or_sum_by_id_is_noticed):
        with mistaken(*case["mistake"]):
            texts += recorded(here, partial(probe, case["mistake"][0]))
    emulator.prepare(texts)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mistake", ENTROPIES + RUNS, ids=lambda m: m[1].strip()[:40])
def test_a_changed_entropy_or_sum_by_id_is_noticed(prepared, mistake):
    with mistaken(*mistake), pytest.raises((AssertionError, source.KernelError)):
        probe(mistake[0])


def test_a_pack_that_is_not_aligned_is_noticed(monkeypatch):
    monkeypatch.setattr(rows, "widest_pack", lambda width, *arrays, **_: 4)
    with pytest.raises(source.KernelError, match="not aligned"):
        entropies(shifted(normal(5, 40), 1))

"""Arrays of more than 2^31 elements, of which only the ends are touched, and grids as large as a device takes.

The arrays are zeros of which few pages are written, and pages are small. The first and the last blocks of a grid
run: they see the least and the greatest positions.
"""

from __future__ import annotations

from math import prod
from mmap import MADV_NOHUGEPAGE, mmap
from typing import Any

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import OPS
from hetu.gpu_kernels import attention, channels, emulator, tables
from hetu.gpu_kernels.emulator import Emulator
from hetu.gpu_kernels.launchers import bound
from hetu.gpu_kernels.source import kernel_file

from .test_groups import group

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")
WIDTH = 2054  # of rows
ROWS = (1 << 31) // WIDTH + 9
LAST = 1  # rows that are not 0
ELEMENTS = 33 << 26  # as many for each thread of a grid that loops over elements, so that its last block has the last


def far(*shape: int, dtype: str = "float16") -> np.ndarray:
    room = mmap(-1, prod(shape) * np.dtype(dtype).itemsize)
    room.madvise(MADV_NOHUGEPAGE)
    return np.frombuffer(room, dtype).reshape(shape)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float16)


def last_rows() -> np.ndarray:
    x = far(ROWS, WIDTH)
    x[-LAST:] = normal(LAST, WIDTH)
    return x


def launch(name: str, out: Any, *arrays: np.ndarray, calls: int | None = None, blocks: int = 2, **attrs: Any) -> None:
    """The first calls of an operator, or all, on some blocks."""
    made = bound(Emulator(blocks=blocks), OPS[name], out, arrays, attrs)
    assert made
    for call in made[:calls]:
        call()


def wanted(name: str, *arrays: np.ndarray, **attrs: Any) -> tuple[np.ndarray, ...]:
    made = OPS[name].forward(np, *(a.astype("float64") if a.dtype.kind == "f" else a for a in arrays), **attrs)
    return made if isinstance(made, tuple) else (made,)


def close(got: np.ndarray, right: np.ndarray) -> None:
    np.testing.assert_allclose(got, right, rtol=4e-3, atol=4e-3)


# What operators of rows are given: rows, and ids of each.
GIVEN = {"x": last_rows, "i": lambda: np.arange(ROWS) % WIDTH}
LABELS = {"ignore_index": None, "label_smoothing": 0.1}
OF_ROWS = {
    "softmax_cross_entropy": ("xi", LABELS),
    "max": ("x", {"axis": (1,), "keepdims": False}),
    "topk": ("x", {"axis": 1, "k": 2}),
}


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.sampled(8)
def test_the_last_rows(name):
    """What is summed up along columns is left in parts by blocks that do not run, so no more than two launches are."""
    given, attrs = OF_ROWS[name]
    arrays = [GIVEN[kind]() for kind in given]
    right = wanted(name, *(a[-LAST:] if len(a) == ROWS else a for a in arrays), **attrs)
    shapes = [(ROWS, *r.shape[1:]) if len(r) == LAST else r.shape for r in right]
    outs = tuple(far(*s, dtype="int64" if r.dtype.kind == "i" else "float16") for s, r in zip(shapes, right))
    launch(name, outs if len(outs) > 1 else outs[0], *arrays, calls=2, **attrs)
    for out, r in zip(outs, right):
        if len(out) == ROWS:
            close(out[-LAST:], r)


def test_columns():
    """Elements of a column lie apart. Their sum is left in parts, most of which other blocks write."""
    x = far(ROWS, WIDTH)
    x[-WIDTH:, -1] = normal(WIDTH)
    launch("sum", far(WIDTH), x, calls=1, axis=(0,), keepdims=False)


def test_rows_of_another_length():
    x, y, kernel = last_rows(), far(ROWS, WIDTH - 2), Emulator(blocks=2).kernel(kernel_file("fit", S="float16"), "fit")
    kernel((ROWS, 2), (256,), (x, y, *x.shape, WIDTH, WIDTH - 2))
    np.testing.assert_array_equal(y[-1, 2048:], x[-1, 2048:-2])  # what the last block writes


def test_few_elements_that_lie_far_apart():
    x, y = far(ELEMENTS), far(3)
    x[1 << 31] = 3
    node = group(ht.square(ht.placeholder("x", y.shape, "float16")) * 2)
    launch(node.op.name, y, x[:: 1 << 30], **node.attrs)
    assert y.tolist() == [0, 0, 18]


def test_elements():
    """Of a group, dropout and pooling."""
    x, y = far(ELEMENTS), far(ELEMENTS)
    x[-1] = 3
    node = group(ht.square(ht.placeholder("x", x.shape, "float16")) * 2)
    launch(node.op.name, y, x, **node.attrs)
    assert y[-1] == 18
    launch("dropout", y, x, np.array([11, 3], np.uint64), rate=0.0, stream=5, channels=False)
    assert y[-1] == 3
    images, pooled = x.reshape(-1, 1, 8, 8), y[: ELEMENTS // 4].reshape(-1, 1, 4, 4)
    attrs, taps = {"kernel": (2, 2), "stride": (2, 2), "padding": ((0, 0), (0, 0))}, far(*pooled.shape, dtype="uint8")
    launch("max_pool2d", (pooled, taps), images, **attrs)
    assert pooled[-1, 0, -1, -1] == 3 and taps[-1, 0, -1, -1] == 3
    pooled[-1, 0, -1, -1] = 5
    launch("max_pool2d_dx", images, pooled, taps, size=(8, 8), **attrs)
    assert x[-1] == 5


def test_images_whose_channels_come_last():
    x, y, taps = (far(8, 8, ELEMENTS // 64, 1, dtype=d).transpose(2, 3, 0, 1) for d in ("float16", "float16", "uint8"))
    attrs = {"kernel": (1, 1), "stride": (1, 1), "padding": ((0, 0), (0, 0))}
    x[-1, 0, -1, -1] = 3
    launch("max_pool2d", (y, taps), x, **attrs)
    assert y[-1, 0, -1, -1] == 3
    y[-1, 0, -1, -1] = 5
    launch("max_pool2d_dx", x, y, taps, size=(8, 8), **attrs)
    assert x[-1, 0, -1, -1] == 5


@pytest.mark.parametrize(("shape", "axis"), [((33, 1, ELEMENTS // 33), 1), ((ELEMENTS // 8, 8), 1)])
def test_batch_normalization(shape, axis):
    """Blocks that do not run leave statistics at NaN, which the last element then shows."""
    x, y, vectors = far(*shape), far(*shape), [np.ones(shape[axis], np.float16) for _ in range(4)]
    launch("batch_norm_train", (y, *vectors[:2]), x, *vectors[2:], axis=axis, epsilon=1e-3)
    assert np.isnan(y.reshape(-1)[-1])
    y.reshape(-1)[-1] = 0
    launch("batch_norm_dx", (y, *vectors[:2]), x, x, *vectors[1:], axis=axis, epsilon=1e-3)
    assert np.isnan(y.reshape(-1)[-1])


@pytest.mark.parametrize("name", ["take", "take_along_axis"])
def test_rows_that_ids_name(name):
    x, ids = far(1 << 30, 3), np.array([0, (1 << 30) - 1])
    x[-1] = 1, 2, 3
    out = far(2, 3)
    launch(name, out, x, ids if name == "take" else np.repeat(ids[:, None], 3, 1), axis=0)
    assert out.tolist() == [[0, 0, 0], [1, 2, 3]]


@pytest.mark.parametrize("name", ["take", "take_along_axis"])
def test_many_ids(name):
    """More results than positions of 32 bits, of a small table."""
    x, out = normal(3, 2), far(ELEMENTS // 2, 2)
    ids = far(*out.shape[: 1 + (name == "take_along_axis")], dtype="int8")
    ids[-1] = 2
    launch(name, out, x, ids, axis=0)
    np.testing.assert_array_equal(out[-1], x[2])


def test_elements_that_are_added_in_turn():
    x, ids, out = far(ROWS, WIDTH), far(ROWS, WIDTH, dtype="int8"), far(ROWS, 2)
    x[-1, -8:], ids[-1, -3:] = 1, 1
    launch("put_along_axis_add", out, out, ids, x, axis=1)
    assert out[-1].tolist() == [5, 3]


def test_rows_that_are_added_by_ids():
    table, rows, ids = far(ROWS, WIDTH), last_rows(), np.arange(ROWS)
    for call in tables.added_rows(Emulator(blocks=2), table, ids, rows):
        call()
    np.testing.assert_array_equal(table[-LAST:, 2048:], rows[-LAST:, 2048:])  # what the last block writes
    launch("sgd_rows", table, table, ids, rows, np.array(1, np.float16))
    assert not table[-LAST:].any()


def test_sparse():
    x, y, places = last_rows(), far(2, WIDTH), (np.array([0, 1]), np.array([0, ROWS - 1]))
    launch("sparse_matmul", y, *places, np.ones(2, np.float16), x, size=2, blocks=99)
    np.testing.assert_array_equal(y, x[[0, -1]])
    sampled = far(2)
    launch("sampled_matmul", sampled, *places, y, x, blocks=99)
    close(sampled[1], np.square(x[-1], dtype="float64").sum())


def test_routing():
    """A token that is sent to the last slot, and what comes back."""
    x, y, out, slots = normal(1, WIDTH), far(1, ROWS, WIDTH), far(1, WIDTH), np.array([[0, ROWS - 1]])
    weights, products = np.array([[1, 2]], np.float16), far(1, 2)
    launch("moe_dispatch", y, x, slots, weights, experts=1, capacity=ROWS)
    np.testing.assert_array_equal(y[0, -1], 2 * x[0])
    launch("moe_combine", out, y, slots, weights)
    close(out, 5 * x)
    launch("moe_products", products, x, y, slots)
    close(products / products[0, 0], np.array([[1, 2]]))


@pytest.mark.parametrize("features", [16, 12])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.sampled(8)
def test_attention(features, axis):
    """On tensor cores and not, of batches, positions or heads that lie far apart, as in views."""
    whole = far(33, 1 << 26)
    parts = whole[:, : 2 * 2 * 8 * features].reshape(33, 2, 2, 8, features)
    assert np.may_share_memory(whole, parts)  # not `shares_memory`, which thinks for seconds
    q, k, v, g, y, *slopes = (np.moveaxis(parts[:, :, :, n], 0, axis) for n in range(8))
    for n, a in enumerate((q, k, v, g)):
        a[...] = np.random.default_rng(n).standard_normal(a.shape)
    total, attrs = far(q.shape[0], q.shape[2], q.shape[1], dtype="float32"), {"scale": 0.5, "causal": True}
    for call in attention.tiled(Emulator(), (y, total), q, k, v, **attrs):
        call()
    right = wanted("flash_attention", q, k, v, **attrs)
    close(y, right[0])
    for call in attention.tiled_dx(Emulator(), tuple(slopes), g, q, k, v, y, total, **attrs):
        call()
    (packed,) = wanted("flash_attention_dx", g, q, k, v, *right, **attrs)
    for n, got in enumerate(slopes):
        close(got, packed[:, :, n])


# -- grids -------------------------------------------------------------------------------------------------------------


def test_a_block_may_have_several_results():
    """Where there are more than a grid has blocks along its second axis."""
    x, y = np.random.default_rng(0).standard_normal((70000, 9, 2)), np.zeros((70000, 2))
    for call in bound(Emulator(blocks=4), OPS["sum"], y, [x], {"axis": (1,), "keepdims": False}):
        call()
    places = [0, 1, 65533, 65534, 65535, 65536]
    np.testing.assert_allclose(y[places], x[places].sum(1))


def test_rows_that_are_added_may_be_wider_than_a_grid():
    """The first block goes on behind what the last one has."""
    width = 65535 * 32 + 5
    table, rows = far(2, width), far(1, width)
    rows[0, :3], rows[0, -5:] = 1, 2
    for call in tables.added_rows(Emulator(blocks=2), table, np.array([1]), rows):
        call()
    np.testing.assert_array_equal(table[1], rows[0])


def test_a_row_as_wide_as_a_vocabulary_takes_no_more_threads_than_a_block_has():
    x, made = normal(1, 60000), (far(1), far(1))
    launch("softmax_cross_entropy", made, x, np.array([3]), **LABELS)
    for got, right in zip(made, wanted("softmax_cross_entropy", x, np.array([3]), **LABELS)):
        close(got, right)


MANY = 70000  # more than a grid has blocks along its second and third axis


@pytest.mark.parametrize("shape", [(1, 2, MANY, 16), (MANY, 2, 1, 16)])
def test_attention_of_more_heads_than_a_grid_has_blocks(shape):
    q, total = far(*shape), far(shape[0], shape[2], 2, dtype="float32")
    assert attention.tiled(Emulator(), (q, total), q, q, q, scale=1.0, causal=False) is None


def test_batch_normalization_of_more_channels_than_a_grid_has_blocks():
    x, vector = far(2, MANY, 3), far(MANY)
    assert channels.norm(Emulator(), (x, vector, vector), x, vector, vector, axis=1, epsilon=1e-3) is None

"""Attention in tiles: the pass that chooses it, the kernels of both kinds, and mistakes in them that have to show."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import OPS, Graph, topological
from hetu.core.memory import plan
from hetu.core.simplify import interpret
from hetu.gpu_kernels import attention, emulator, source
from hetu.gpu_kernels.emulator import Emulator
from hetu.gpu_kernels.machine import RecordingMachine
from hetu.gpu_kernels.passes.tile_attention import tile_attention
from hetu.passes import PASSES, chosen_passes

from ..at_once import chosen
from . import fake_cupy, proofs
from .fake_streams import LOG

SKIP = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")
KINDS = {"float64": 1e-9, "float32": 2e-5, "float16": 4e-3}


def compiled(test):
    """A test that runs kernels."""
    return SKIP(pytest.mark.usefixtures("prepared")(test))


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def names(outputs) -> list[str]:
    return [n.op.name for n in topological(outputs)]


# -- the pass ----------------------------------------------------------------------------------------------------------


def heads(dtype, *, keys=9, packed=False, features=(4, 4)):
    """q, k, v (n, heads, positions, features) as a layer makes them, and what they are made of."""
    if packed:
        x = ht.placeholder("x", (2, 9, 3, 3, 4), dtype)
        return [ht.permute_dims(x, (2, 0, 3, 1, 4))[i] for i in range(3)], [x]
    shapes = [(2, 9, 3, features[0]), (2, keys, 3, features[0]), (2, keys, 3, features[1])]
    parts = [ht.placeholder(name, shape, dtype) for name, shape in zip("qkv", shapes)]
    return [ht.permute_dims(p, (0, 2, 1, 3)) for p in parts], parts


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"keys": 5}, {"features": (4, 6)}, {"packed": True}],
    ids=["self", "cross", "wider", "packed"],
)
@pytest.mark.parametrize("causal", [False, True])
def test_values_and_gradients_stay(dtype, options, causal):
    if causal and "keys" in options:
        return
    (q, k, v), parts = heads(dtype, **options)
    y = ht.permute_dims(ht.scaled_dot_product_attention(q, k, v, causal=causal), (0, 2, 1, 3))
    weights = ht.constant(normal(*y.shape, dtype=dtype))
    outputs = [y, *ht.gradients(ht.sum(y * weights), parts)]
    made = tile_attention(outputs)
    Graph(made).verify()
    assert "attention" not in names(made) and "attention_dx" not in names(made)
    assert {"flash_attention", "flash_attention_dx"} <= set(names(made))
    feed = {p: normal(*p.shape, dtype=dtype, seed=i) for i, p in enumerate(parts)}
    for old, new, before, after in zip(outputs, made, interpret(outputs, feed), interpret(made, feed), strict=True):
        assert old.type == new.type
        np.testing.assert_allclose(after, before, rtol=KINDS[dtype], atol=4 * KINDS[dtype])


def test_transposes_and_the_sum_of_packed_gradients_fall_away():
    (q, k, v), parts = heads("float32", packed=True)
    y = ht.permute_dims(ht.scaled_dot_product_attention(q, k, v), (0, 2, 1, 3))
    made = tile_attention([y, *ht.gradients(ht.sum(y), parts)])
    assert not {"slice_scatter", "add"} & set(names(made))
    assert made[0].inputs[0].op.name == "flash_attention"


def test_no_matrix_of_scores_is_in_memory():
    shape, count = (1, 256, 2, 16), 2 * 256 * 256 * 4
    x = ht.placeholder("x", shape)
    q = ht.permute_dims(x, (0, 2, 1, 3))
    y = ht.scaled_dot_product_attention(q, q, q)
    outputs = [*ht.gradients(ht.sum(y * y), [x])]
    for made in (outputs, tile_attention(outputs)):
        assert plan(made, {}).arena_bytes < count // 3


def test_it_leaves_alone_what_the_kernels_do_not_take():
    q = ht.placeholder("q", (2, 3, 9, 4))
    wide, flat = ht.placeholder("wide", (2, 3, 9, 256)), ht.placeholder("flat", (3, 9, 4))
    mask = ht.placeholder("mask", (9, 9), "bool")
    outputs = [
        ht.scaled_dot_product_attention(q, q, q, mask),
        ht.scaled_dot_product_attention(wide, wide, wide),
        ht.scaled_dot_product_attention(flat, flat, flat),
        ht.scaled_dot_product_attention(ht.placeholder("any", (None, 3, 9, 4)), q, q),
    ]
    assert tile_attention(outputs) == tuple(outputs)


def test_sums_that_somebody_else_reads_are_kept():
    q = ht.placeholder("q", (2, 3, 9, 4))
    y, total = OPS["attention"](q, q, q, scale=0.5)
    for other in (total, ht.exp(total)):
        assert tile_attention([y, other]) == (y, other)
    assert "flash_attention" in names(tile_attention([y]))


def test_it_is_for_gpus_and_has_a_name(cupy):
    assert PASSES["tile_attention"] not in chosen_passes(None) and PASSES["tile_attention"] in chosen_passes(
        None, "gpu"
    )
    q = ht.placeholder("q", (1, 2, 5, 4))
    y = ht.scaled_dot_product_attention(q, q, q)
    for passes, wanted in ((None, "flash_attention"), (["simplify"], "attention")):
        program = ht.Executor([y], device="gpu", passes=passes).program({q: normal(1, 2, 5, 4)})
        assert wanted in [step.node.op.name for step in program.steps]


# -- training on the stand-in for CuPy ---------------------------------------------------------------------------------


@pytest.fixture
def cupy():
    with fake_cupy.installed() as module:
        yield module


@compiled
@pytest.mark.parametrize("precision", [pytest.param("float32", marks=pytest.mark.nightly), "float16"])
def test_training_runs_the_kernels(cupy, precision):
    LOG.clear()
    proofs.attention(precision)
    assert {"kernel attention", "kernel attention_dq", "kernel attention_dkv"} <= set(LOG)


# -- the kernels -------------------------------------------------------------------------------------------------------


def rows(n, count, heads, features, dtype, seed, form="plain"):
    """(n, positions, heads, features): in order, as views of a packed projection, with heads outside, or each so."""
    if form == "mixed":
        form = ("plain", "packed", "heads first")[seed % 3]
    if form == "packed":
        return normal(n, count, 3, heads, features, dtype=dtype, seed=seed)[:, :, 1]
    if form == "heads first":
        return normal(n, heads, count, features, dtype=dtype, seed=seed).transpose(0, 2, 1, 3)
    return normal(n, count, heads, features, dtype=dtype, seed=seed)


def case(shape, dtype, causal, form="plain"):
    """Inputs, the gradient of y, and what forward and backward give in float64."""
    n, queries, keys, count, d, e = shape
    sizes = [(queries, d), (keys, d), (keys, e), (queries, e)]
    q, k, v, g = (rows(n, p, count, f, dtype, i, form) for i, (p, f) in enumerate(sizes))
    attrs = {"scale": 1.3 / np.sqrt(d), "causal": causal}
    wide = [a.astype(np.float64) for a in (q, k, v, g)]
    y, total = OPS["flash_attention"].forward(np, *wide[:3], **attrs)
    slopes = OPS["flash_attention_dx"].forward(np, wide[3], *wide[:3], y, total, **attrs)
    return (q, k, v, g), attrs, (y, total), slopes


def computed(machine, inputs, attrs):
    """(y, total, gradients) of the kernels."""
    q, k, v, g = inputs
    xp, wide = machine.xp, "float64" if g.dtype == np.float64 else "float32"
    y, total = xp.full(g.shape, 77, g.dtype), xp.full((g.shape[0], g.shape[2], g.shape[1]), 77, wide)
    packed = q.shape == k.shape == v.shape
    slopes = xp.full((*q.shape[:2], 3, *q.shape[2:]), 77, q.dtype) if packed else tuple(map(xp.empty_like, (q, k, v)))
    calls = attention.tiled(machine, (y, total), q, k, v, **attrs)
    for call in [*calls, *attention.tiled_dx(machine, slopes, g, q, k, v, y, total, **attrs)]:
        call()
    return y, total, slopes


@pytest.fixture(scope="module")
def prepared(request):
    """The texts of the chosen cases, compiled together, which takes far less time than one by one."""
    if emulator.compiler() is None:
        return
    texts = [text_of(case["shape"]) for case in chosen(request, test_tensor_kernels)]
    texts += [text_of(case["shape"], case["dtype"]) for case in chosen(request, test_plain_kernels)]
    mistakes = [case["mistake"] for case in chosen(request, test_a_mistake_shows)]
    texts += [attention.text("attention", dtype, 16, 16, 4) for dtype in KINDS]
    texts += [attention.text("attention_tensor", dtype, n, n, 2) for dtype, n in (("bfloat16", 32), ("float16", 16))]
    emulator.prepare([*texts, *(changed(*m, "float16", 16, 16, 2 if "tensor" in m[0] else 4) for m in mistakes)])


def compare(shape, dtype, causal, form="plain"):
    inputs, attrs, (y, total), slopes = case(shape, dtype, causal, form)
    got = computed(Emulator(), inputs, attrs)
    np.testing.assert_allclose(got[0], y, rtol=KINDS[dtype], atol=KINDS[dtype])
    np.testing.assert_allclose(got[1], total, rtol=1e-5, atol=1e-5)
    for one, other in zip(got[2], slopes, strict=True):
        np.testing.assert_allclose(one, other, rtol=KINDS[dtype], atol=KINDS[dtype])


# Batch, queries, keys, heads, features of queries and of values. Tiles hold 64 or 32 rows, blocks 128 or 64 queries.
SHAPES = [
    ((1, 70, 150, 2, 16, 32), False),
    ((1, 135, 135, 1, 48, 48), True),
    ((2, 33, 33, 2, 128, 128), False),
    ((1, 90, 90, 1, 80, 96), True),
    ((1, 1, 1, 1, 64, 64), True),
]


@compiled
@pytest.mark.parametrize(("shape", "causal"), SHAPES)
@pytest.mark.sampled(8)
def test_tensor_kernels(shape, causal):
    assert "mma.sync" in text_of(shape)
    compare(shape, "float16", causal)


@compiled
@pytest.mark.parametrize("form", ["packed", "heads first", "mixed"])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.sampled(16)
def test_views_are_taken_as_they_lie(dtype, form):
    compare((2, 40, 40, 2, 16, 16), dtype, True, form)


PLAIN = [((1, 41, 41, 2, 33, 40), True), ((2, 21, 70, 1, 40, 33), False), ((1, 20, 37, 1, 5, 64), False)]


@compiled
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("shape", "causal"), PLAIN)
@pytest.mark.sampled(8)
def test_plain_kernels(shape, causal, dtype):
    assert "mma.sync" not in text_of(shape, dtype)
    compare(shape, dtype, causal)


@compiled
def test_plain_kernels_of_wide_heads():
    compare((1, 30, 40, 1, 100, 128), "float32", False)


def text_of(shape, dtype="float16", capability=90, offset=0):
    """The text that a launch of this shape uses."""
    machine = RecordingMachine()
    machine.capability = capability
    n, queries, keys, count, d, e = shape
    sizes = [(queries, d), (keys, d), (keys, e), (queries, e)]
    whole = [n * p * count * f for p, f in sizes]
    arrays = [np.zeros(w + 8, dtype)[offset:][:w].reshape(n, p, count, f) for w, (p, f) in zip(whole, sizes)]
    attention.tiled(machine, (arrays[3], None), *arrays[:3], scale=1.0, causal=False)
    return next(iter(machine.texts))


def test_tensor_cores_where_there_are_some_and_rows_lie_in_chunks():
    shape = (1, 40, 40, 2, 64, 64)
    assert "mma.sync" in text_of(shape)
    for options in ({"capability": 75}, {"offset": 1}, {"dtype": "float32"}):
        assert "mma.sync" not in text_of(shape, **options), options
    assert "mma.sync" not in text_of((1, 40, 40, 2, 24, 64))


@compiled
def test_bfloat16_on_tensor_cores():
    """NumPy has no bfloat16: its bits travel as 16-bit integers."""
    q = normal(1, 40, 1, 32)
    bits = ((q.view(np.uint32) + 0x7FFF + (q.view(np.uint32) >> 16 & 1)) >> 16).astype(np.uint16)
    rounded = (bits.astype(np.uint32) << 16).view(np.float32)
    wanted, total = OPS["flash_attention"].forward(np, rounded, rounded, rounded, scale=0.3, causal=True)
    y, sums = np.zeros_like(bits), np.zeros_like(total)
    kernel = Emulator().kernel(attention.text("attention_tensor", "bfloat16", 32, 32, 2), "attention")
    strides = (40 * 32, 32, 32)
    arrays = (x for a in (bits, bits, bits, y) for x in (a, *strides))
    kernel((1, 1, 1), (128,), (*arrays, sums, 40, 40, 0.3, np.bool_(True)))
    np.testing.assert_allclose((y.astype(np.uint32) << 16).view(np.float32), wanted, rtol=2**-6, atol=2**-6)
    np.testing.assert_allclose(sums, total, rtol=1e-5)


@compiled
@pytest.mark.parametrize("scale", [2.0, -2.0])
def test_scores_far_apart_and_a_negative_scale(scale):
    """No weight overflows, and the last tile of a row may hold the only one that counts."""
    inputs, *_ = case((1, 20, 100, 1, 16, 16), "float16", False)
    q, k, v, g = inputs
    k[:, -1] *= 20
    attrs = {"scale": scale, "causal": False}
    wide = [a.astype(np.float64) for a in (q, k, v, g)]
    y, total = OPS["flash_attention"].forward(np, *wide[:3], **attrs)
    got = computed(Emulator(), inputs, attrs)
    np.testing.assert_allclose(got[0], y, rtol=4e-3, atol=4e-3)
    np.testing.assert_allclose(got[1], total, rtol=1e-5, atol=1e-4)
    assert all(np.isfinite(s).all() for s in got[2])


# -- mistakes ----------------------------------------------------------------------------------------------------------

KERNELS = {"attention": 0, "attention_dq": 1, "attention_dkv": 2}  # the place of what each of them says once
TENSOR_MISTAKES = [
    *((kernel, "        __syncthreads();", "") for kernel in KERNELS),
    *((kernel, "        wait_for_copies();", "") for kernel in KERNELS),
    *((kernel, "load(1 - now, start + ROWS)", "load(now, start + ROWS)") for kernel in KERNELS),
    *((kernel, "if (!sees_all(first, start, keys, causal))", "if (false)") for kernel in ("attention", "attention_dq")),
    ("attention", "first < keys ? first + 1", "first < keys ? first + 64"),
    ("attention", "n % 2 > seen)", "n % 2 > seen + 1)"),
    ("attention", "if (diagonal)", "if (false)"),
    ("attention", "start < first + 15", "start < first"),
    ("attention", "result[m][f][2 * h + i] *= shrink", ""),
    ("attention", "const bool exists = first + row < count;", "const bool exists = true;"),
    ("attention", "if (row >= count) continue;", ""),
    ("attention", "right + 2 * n", "right + n"),
]
PLAIN_MISTAKES = [
    *((kernel, barrier, "") for kernel in KERNELS for barrier in ("        __syncwarp();\n",)),
    *((kernel, "        __syncthreads();\n        load", "        load") for kernel in KERNELS),
    *((kernel, "        __syncthreads();\n        const", "        const") for kernel in KERNELS),
    ("attention", "result[r][slot] *= shrink", ""),
]
MISTAKES = [("attention_tensor", *m) for m in TENSOR_MISTAKES] + [("attention", *m) for m in PLAIN_MISTAKES]


def changed(file, kernel, right, wrong, *sizes):
    """The text of a file with one change in one of its kernels."""
    before, *after = source.file_text(file).split(right)
    place = KERNELS[kernel]
    assert len(after) > place
    whole = right.join([before, *after[:place]]) + wrong + right.join(after[place:])
    dtype, d, e, rows = sizes
    before = source.file_text("matrices") if file == "attention_tensor" else ""
    return source.assemble(f"{before}const int D = {d}, E = {e}, R = {rows};\n{whole}", "changed.cu", S=dtype)


@compiled
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: f"{m[0]}, {m[1]}: {m[2].strip()}")
@pytest.mark.sampled(8)
def test_a_mistake_shows(mistake, monkeypatch):
    monkeypatch.setattr(attention, "text", lambda _, *sizes: changed(*mistake, *sizes))
    if mistake[0] == "attention":
        monkeypatch.setattr(attention, "TENSOR", 1000)
    with pytest.raises((AssertionError, source.KernelError)):
        compare((1, 126, 126, 1, 16, 16), "float16", True)  # the guards cover what lies beyond
        compare((1, 126, 190, 1, 16, 16), "float16", False)

"""Norms and cross entropies of several dtypes: 16 bits read and written as they are, the rest in float32."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu import nn, optim
from hetu.core.graph import OPS, topological
from hetu.core.simplify import interpret
from hetu.gpu_kernels import emulator, rows
from hetu.gpu_kernels.emulator import Emulator
from hetu.gpu_kernels.launchers import bound
from hetu.gpu_kernels.machine import RecordingMachine
from hetu.gpu_kernels.passes.absorb_casts import absorb_casts
from hetu.gpu_kernels.source import KernelError
from hetu.passes import chosen_passes

from ..at_once import chosen
from . import fake_cupy

compiled = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")
NORMS = ("layer_norm", "layer_norm_dx", "rms_norm", "rms_norm_dx")
DTYPES = [  # of x, of the gradient that comes in, of what is written
    ("float32", "float16", "float16"),
    ("float16", "float32", "float16"),
    ("float16", "float16", "float32"),
    ("float32", "bfloat16", "bfloat16"),
]
SHAPES = [(21, 33), (2, 3, 1100)]  # rows of a warp and of a block


def dtype(name: str):
    return pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else np.dtype(name)


def inputs(name: str, shape: tuple[int, ...], x_dtype: str, g_dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(len(shape))
    x, g = (rng.standard_normal((2, *shape)) + 3).astype("float32")
    scale, bias = rng.standard_normal((2, shape[-1]), np.float32)
    arrays = [x.astype(dtype(x_dtype)), scale, *([bias] if name == "layer_norm" else [])]
    return [g.astype(dtype(g_dtype)), *arrays] if name.endswith("dx") else arrays


def made(machine, name: str, arrays: list[np.ndarray], stored) -> list[np.ndarray]:
    """What the kernels write: the first result in `stored`, gradients of vectors in float32."""
    x, width = arrays[name.endswith("dx")], arrays[-1].shape
    vectors = {"layer_norm_dx": 2, "rms_norm_dx": 1}.get(name, 0)
    outs = [np.full(x.shape, 77, stored), *(np.full(width, 77, np.float32) for _ in range(vectors))]
    attrs = {"epsilon": 1e-5, "dtype": np.dtype(stored).name}
    calls = bound(machine, OPS[name], tuple(outs) if vectors else outs[0], arrays, attrs)
    assert len(calls) == (3 if vectors else 1)
    for call in calls:
        call()
    return outs


@pytest.fixture(scope="module")
def prepared(request) -> None:
    """The chosen cases at once, as the compiler takes longer to start than to compile a kernel."""
    recorder = RecordingMachine()
    for case in chosen(request, test_kernels_widen_what_they_read_and_round_what_they_write):
        name, (x, g, y) = case["name"], case["dtypes"]
        made(recorder, name, inputs(name, SHAPES[0], "float32", "float32"), "float32")
        if "bfloat16" not in (x, g, y):  # which needs a package
            made(recorder, name, inputs(name, SHAPES[0], x, g), y)
    emulator.prepare(recorder.texts)


@compiled
@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
@pytest.mark.sampled(16)
def test_kernels_widen_what_they_read_and_round_what_they_write(dtypes, name):
    """What float32 gives between casts, but for the order of sums, in three orders of threads; and what NumPy gives."""
    x, g, y = dtypes
    stored = dtype(y)
    for shape in SHAPES:
        arrays = inputs(name, shape, x, g)
        outs = made(Emulator(), name, arrays, stored)
        between = made(Emulator(["ascending"]), name, [a.astype("float32") for a in arrays], np.float32)
        assert_rounded(outs, between)
        exact = OPS[name].forward(np, *(a.astype("float64") for a in arrays), epsilon=1e-5)
        for got, wanted in zip(between, exact if len(outs) > 1 else [exact], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-4)


def assert_rounded(outs, exact):
    """Equal but for the last digits of sums in float32, whose order follows from the packs, and one of a result."""
    for got, wide in zip(outs, exact, strict=True):
        digits = 4e-6 if got.dtype == np.float32 else 2.0**-7 if got.dtype.name == "bfloat16" else 2.0**-10
        np.testing.assert_allclose(got.astype("float32"), wide, rtol=digits, atol=4e-6)


def test_sums_of_different_precision_and_vectors_of_two_dtypes_are_declined():
    x, vector = np.ones((4, 3)), np.ones(3, "float32")
    attrs = {"epsilon": 1.0, "dtype": None}
    assert bound(RecordingMachine(), OPS["layer_norm"], np.empty_like(x), (x, vector, vector), attrs) is None
    y, half = x.astype("float32"), vector.astype("float16")
    assert bound(RecordingMachine(), OPS["layer_norm"], np.empty_like(y), (y, vector, half), attrs) is None


# -- cross entropy -----------------------------------------------------------------------------------------------------

LOSSES = [("float16", "float16"), ("float16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]  # x, dx
OPTIONS = {"ignore_index": 2, "label_smoothing": 0.1}


def entropy(machine, x: np.ndarray, labels: np.ndarray, g: np.ndarray, stored) -> list[np.ndarray]:
    """(loss, total, dx): the first two in float32, dx in `stored`."""
    loss, total = np.full((2, *labels.shape), 77, np.float32)
    dx = np.full(x.shape, 77, stored)
    attrs = {**OPTIONS, "dtype": "float32"}
    (call,) = bound(machine, OPS["softmax_cross_entropy"], (loss, total), (x, labels), attrs)
    call()
    attrs = {**OPTIONS, "dtype": np.dtype(stored).name}
    (call,) = bound(machine, OPS["softmax_cross_entropy_dx"], dx, (g, x, labels, total), attrs)
    call()
    return [loss, total, dx]


@pytest.mark.sampled(4)
@compiled
@pytest.mark.parametrize("dtypes", LOSSES, ids="-".join)
def test_cross_entropy_widens_logits_and_rounds_their_gradient(dtypes):
    """What float32 gives between casts, but for the order of sums, in three orders of threads; and what NumPy gives."""
    x_dtype, stored = map(dtype, dtypes)
    rng = np.random.default_rng(1)
    for shape in SHAPES:
        x = (3 * rng.standard_normal(shape)).astype(x_dtype)
        labels, g = rng.integers(0, 5, shape[:-1]), rng.standard_normal(shape[:-1]).astype("float32")
        assert 0 < (labels == OPTIONS["ignore_index"]).sum() < labels.size
        outs = entropy(Emulator(), x, labels, g, stored)
        between = entropy(Emulator(["ascending"]), x.astype("float32"), labels, g, np.float32)
        assert_rounded(outs, between)
        wide = x.astype("float64")
        exact = OPS["softmax_cross_entropy"].forward(np, wide, labels, **OPTIONS)
        exact = (*exact, OPS["softmax_cross_entropy_dx"].forward(np, g, wide, labels, exact[1], **OPTIONS))
        for got, wanted in zip(between, exact, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


def test_losses_of_another_precision_or_of_two_dtypes_are_declined():
    x, labels, row = np.ones((4, 3)), np.zeros(4, "int64"), np.ones(4, "float32")
    attrs = {"ignore_index": None, "label_smoothing": 0.0, "dtype": None}
    assert bound(RecordingMachine(), OPS["softmax_cross_entropy"], (row, row), (x, labels), attrs) is None
    half, x = row.astype("float16"), x.astype("float32")
    assert bound(RecordingMachine(), OPS["softmax_cross_entropy_dx"], x, (row, x, labels, half), attrs) is None


def test_gradients_of_a_gradient_in_16_bits():
    """By the values that the operator's composition in float32 gives."""
    x, g = ht.placeholder("x", (4, 5), "float16"), ht.placeholder("g", (4,))
    labels, rng = ht.constant(np.array([0, 4, 2, 1])), np.random.default_rng(2)
    wide = cast(x, "float32")
    feed = {x: rng.standard_normal((4, 5)).astype("float16"), g: rng.standard_normal(4).astype("float32")}
    found = []
    for logits in (x, wide):
        _, total = OPS["softmax_cross_entropy"](logits, labels, **OPTIONS, dtype="float32")
        dx = OPS["softmax_cross_entropy_dx"](g, logits, labels, total, **OPTIONS, dtype="float16")
        found.append(interpret(ht.gradients(ht.sum(cast(dx, "float32") * wide), [g, x]), feed))
    for got, wanted in zip(*found, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=4e-3, atol=4e-3)


@pytest.mark.sampled(2)
@compiled
@pytest.mark.parametrize(
    ("right", "wrong"), [("V* total,", "Y* total,"), ("V* g, const S* logits", "Y* g, const S* logits")]
)
def test_a_changed_cross_entropy_is_noticed(right, wrong, monkeypatch):
    original = rows.text
    monkeypatch.setattr(rows, "text", lambda *a, **dtypes: original(*a, **dtypes).replace(right, wrong))
    assert right in original("float32")
    with pytest.raises((AssertionError, KernelError)):
        test_cross_entropy_widens_logits_and_rounds_their_gradient(LOSSES[0])


@pytest.mark.sampled(2)
@compiled
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("Row<G> slopes(g + row * width", "Row<S> slopes((const S*)g + row * width"), ("V* first", "Y* first")],
)
def test_a_changed_kernel_is_noticed(right, wrong, monkeypatch):
    original = rows.text
    monkeypatch.setattr(rows, "text", lambda *a, **dtypes: original(*a, **dtypes).replace(right, wrong))
    assert right in original("float32")
    with pytest.raises((AssertionError, KernelError)):
        test_kernels_widen_what_they_read_and_round_what_they_write(DTYPES[0], "layer_norm_dx")


# -- the pass ----------------------------------------------------------------------------------------------------------


def cast(x, to: str = "float16"):
    return ht.astype(x, dtype=to)


def operators(outputs) -> list[str]:
    return [n.op.name for n in topological(outputs) if n.inputs and n.op.name != "item"]


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_casts_around_a_norm_become_part_of_it(norm):
    x, g = (ht.placeholder(n, (5, 6), "float16") for n in "xg")
    vectors = [ht.placeholder(n, (6,)) for n in ("scale", "bias")][: 2 if norm == "layer_norm" else 1]
    wide = cast(x, "float32")
    dx, *sums = OPS[f"{norm}_dx"](cast(g, "float32"), wide, vectors[0])
    before = [cast(OPS[norm](wide, *vectors)), cast(dx), *sums]
    after = absorb_casts(before)
    assert operators(after) == [norm, f"{norm}_dx"] and [n.type for n in after] == [n.type for n in before]
    rng = np.random.default_rng(0)
    feed = {n: rng.standard_normal(n.shape).astype(n.dtype) for n in (x, g, *vectors)}
    for old, new in zip(interpret(before, feed), interpret(list(after), feed), strict=True):
        np.testing.assert_array_equal(old, new)


def test_casts_around_a_cross_entropy_become_part_of_it():
    x, g = ht.placeholder("x", (5, 6), "float16"), ht.placeholder("g", (5,))
    labels = ht.placeholder("t", (5,), "int64")
    wide = cast(x, "float32")
    loss, total = OPS["softmax_cross_entropy"](wide, labels)
    dx = OPS["softmax_cross_entropy_dx"](g, wide, labels, total)
    rng = np.random.default_rng(0)
    feed = {n: rng.standard_normal(n.shape).astype(n.dtype) for n in (x, g)} | {labels: np.arange(5)}
    for gradients, few in (([cast(dx)], 0), ([cast(dx), dx], 1)):
        before = [loss, *gradients]
        after = absorb_casts(before)
        assert [n.type for n in after] == [n.type for n in before] and operators(after).count("astype") == few
        for old, new in zip(interpret(before, feed), interpret(list(after), feed), strict=True):
            np.testing.assert_array_equal(old, new)
    parts = OPS["softmax_cross_entropy"].decompose_rule(x, labels, **OPTIONS, dtype="float32")
    whole = OPS["softmax_cross_entropy"](wide, labels, **OPTIONS)
    for old, new in zip(interpret(whole, feed), interpret(parts, feed), strict=True):
        assert old.dtype == new.dtype
        np.testing.assert_allclose(old, new, rtol=1e-5, atol=1e-6)
    half = OPS["softmax_cross_entropy"](x, labels)  # a loss in 16 bits has nothing to spare
    outputs = [cast(half[0], "float32"), cast(loss)]
    assert [n.op.name for n in absorb_casts(outputs)] == ["astype", "astype"]


def test_what_is_read_in_float32_stays():
    x, vector = ht.placeholder("x", (5, 6)), ht.placeholder("v", (6,))
    y = ht.layer_norm(x, vector, vector)
    for outputs in ([cast(y), y], [cast(y), ht.exp(y)], [cast(y, "float64")], [cast(y, "int32")]):
        assert absorb_casts(outputs) == tuple(outputs)
    (wide,) = absorb_casts([ht.layer_norm(cast(cast(x), "float32"), vector, vector)])
    assert wide.inputs[0].dtype == np.float16 and wide.dtype == np.float32
    half = cast(vector)  # two dtypes of vectors have no kernel
    outputs = [cast(ht.layer_norm(x, vector, half)), ht.layer_norm(cast(cast(x), "float32"), half, half)]
    assert absorb_casts(outputs) == tuple(outputs)


@pytest.mark.sampled(2)
@compiled
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_block_trains_to_the_last_digit_as_with_casts(precision):
    """The residual stream is in float32, and the numbers are the same without casts at norms and at the loss."""
    if precision == "bfloat16":
        pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(0)
    feed = {"x": rng.standard_normal((2, 5, 16), np.float32), "t": rng.integers(0, 16, (2, 5))}
    states = []
    with fake_cupy.installed(), ht.scope("model"):
        x, t = ht.placeholder("x", (2, 5, 16)), ht.placeholder("t", (2, 5), "int64")
        h = nn.Linear(16, 16, bias=False)(nn.RMSNorm(16)(nn.TransformerBlock(16, 1)(x)))
        loss = ht.mean(ht.softmax_cross_entropy(h, t))
        entries = [loss, optim.Adam(1e-2).minimize(loss)]
        names = [run.__name__ for run in chosen_passes(None, "gpu")]
        for passes in (names, [n for n in names if n != "absorb_casts"]):
            run = ht.Executor(entries, device="gpu", precision=precision, passes=passes)
            losses = [float(run.run(feed)[0]) for _ in range(2)]
            states.append((losses, {name: np.array(value) for name, value in run.state.items()}))
            nodes = {s.node.op.name: s.node for s in run.program(feed).steps}
            if "absorb_casts" in passes:
                dx = nodes["softmax_cross_entropy_dx"]
                ends = [nodes["softmax_cross_entropy"].inputs[0], dx.inputs[1], dx]
            casts = [s.node for s in run.program(feed).steps if s.node.op.name == "astype"]
            states[-1] += (len(casts),)
    (losses, state, few), (others, other, many) = states
    assert losses == others and losses[1] < losses[0] and few <= many - 4
    assert [n.dtype.name for n in ends] == [precision] * 3
    for name, value in state.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)

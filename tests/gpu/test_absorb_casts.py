"""Kernels that read 16 bits in the place of float32, above all the cross entropy, and the pass that lets them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import hetu as ht
from hetu import nn, optim
from hetu.core.graph import OPS
from hetu.core.op import Op
from hetu.core.simplify import interpret
from hetu.gpu_kernels import emulator, rows
from hetu.gpu_kernels.emulator import Emulator
from hetu.gpu_kernels.launchers import KERNELS, bound
from hetu.gpu_kernels.machine import RecordingMachine
from hetu.gpu_kernels.passes.absorb_casts import absorb_casts
from hetu.gpu_kernels.source import KernelError, assemble
from hetu.passes import chosen_passes

from . import fake_cupy

compiled = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")
SHAPES = [(21, 33), (2, 3, 1100)]  # rows of a warp and of a block
OPTIONS = {"ignore_index": 2, "label_smoothing": 0.1}


def dtype(name: str):
    return pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else np.dtype(name)


def entropy(machine, x: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
    """(loss, total), in float32."""
    loss, total = np.full((2, *labels.shape), 77, np.float32)
    (call,) = bound(machine, OPS["softmax_cross_entropy"], (loss, total), (x, labels), OPTIONS)
    call()
    return [loss, total]


@compiled
@pytest.mark.parametrize("logits", ["float16", "bfloat16"])
def test_cross_entropy_widens_logits(logits):
    """What float32 gives behind a cast, but for the order of sums, in three orders of threads; and what NumPy gives."""
    rng = np.random.default_rng(1)
    for shape in SHAPES:
        x, labels = (3 * rng.standard_normal(shape)).astype(dtype(logits)), rng.integers(0, 5, shape[:-1])
        assert 0 < (labels == OPTIONS["ignore_index"]).sum() < labels.size
        outs = entropy(Emulator(), x, labels)
        between = entropy(Emulator(["ascending"]), x.astype("float32"), labels)
        exact = OPS["softmax_cross_entropy"].forward(np, x.astype("float64"), labels, **OPTIONS)
        for got, wide, right in zip(outs, between, exact, strict=True):
            np.testing.assert_allclose(got, wide, rtol=4e-6, atol=4e-6)
            np.testing.assert_allclose(wide, right, rtol=2e-5, atol=2e-5)


def test_losses_of_another_precision_are_declined():
    x, labels, row = np.ones((4, 3)), np.zeros(4, "int64"), np.ones(4, "float32")
    attrs = {"ignore_index": None, "label_smoothing": 0.0}
    assert bound(RecordingMachine(), OPS["softmax_cross_entropy"], (row, row), (x, labels), attrs) is None


@compiled
def test_a_changed_cross_entropy_is_noticed(monkeypatch):
    original, (right, wrong) = rows.text, ("V* total,", "S* total,")
    monkeypatch.setattr(rows, "text", lambda *a, **more: original(*a, **more).replace(right, wrong))
    assert right in original("float32")
    with pytest.raises((AssertionError, KernelError)):
        test_cross_entropy_widens_logits("float16")


# -- the pass ----------------------------------------------------------------------------------------------------------


def cast(x, to: str = "float16"):
    return ht.astype(x, dtype=to)


def test_a_cast_before_a_cross_entropy_becomes_part_of_it():
    x, labels = ht.placeholder("x", (5, 6), "float16"), ht.placeholder("t", (5,), "int64")
    wide = cast(x, "float32")
    loss, total = OPS["softmax_cross_entropy"](wide, labels)
    feed = {x: np.random.default_rng(0).standard_normal(x.shape).astype(x.dtype), labels: np.arange(5)}
    before = [loss, total, wide + 1.0]  # who else reads the cast still does
    after = absorb_casts(before)
    assert [n.type for n in after] == [n.type for n in before] and after[0].inputs[0].inputs[0] is x
    for old, new in zip(interpret(before, feed), interpret(list(after), feed), strict=True):
        np.testing.assert_array_equal(old, new)
    feed[labels] = np.arange(5) + 2  # ids are still looked at
    with pytest.raises(ht.errors.ValueRangeError, match="class id 6 at position .4. does not name one of 6 classes"):
        ht.Executor(list(after)).run({n.name: value for n, value in feed.items()})


OPERANDS = {"x": range(5), "scale": [0.5] * 5}


def cubed(**declared):
    """A stranger's operator, and its kernel."""
    cube = Op(lambda xp, x, scale, *, power: x**power * scale, name="cube", infer=lambda x, scale, **_: x)

    @KERNELS.kernel(cube, **declared)
    def launch(machine, out, x, scale, *, power):
        body = 'extern "C" __global__ void cube(const S* x, const T* scale, T* y, T power) { y[threadIdx.x] = '
        text = assemble(body + "pow((T)x[threadIdx.x], power) * scale[threadIdx.x]; }", "cube.cu", S=x.dtype.name)
        arguments = x, scale, out, np.float32(power)
        return [partial(machine.kernel(text, "cube"), (1,), (x.size,), arguments)]

    return cube


@compiled
@pytest.mark.parametrize("narrow", ["float16", "bfloat16"])
def test_a_strangers_kernel_that_says_so_reads_16_bits(narrow):
    """Casts of its other inputs stay, and all where it says nothing."""
    kind = dtype(narrow)
    feed = {ht.placeholder(name, (5,), kind): np.array(values, kind) for name, values in OPERANDS.items()}
    x, scale = feed
    before = [op(cast(x, "float32"), cast(scale, "float32"), power=3) for op in (cubed(widens=[0]), cubed())]
    after, same = absorb_casts(before)
    assert same is before[1] and after.inputs == (x, before[0].inputs[1]) and after.type == before[0].type
    out = np.empty(5, np.float32)
    (call,) = bound(Emulator(), after.op, out, (feed[x], np.full(5, 0.5, "f")), after.attrs)
    call()
    for found in (out, *interpret([after, *before], feed)):
        np.testing.assert_array_equal(found, [0, 0.5, 4, 13.5, 32])


def test_what_has_nothing_to_spare_stays():
    x, single, labels = ht.placeholder("x", (5, 6), "float16"), ht.placeholder("s", (5, 6)), ht.constant(np.arange(5))
    entropies = [OPS["softmax_cross_entropy"](logits, labels)[0] for logits in (x, single, cast(single, "float64"))]
    outputs = [cast(n, "float32") for n in entropies]
    assert absorb_casts(outputs) == tuple(outputs)


@pytest.mark.sampled(2)
@compiled
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_block_trains_to_the_last_digit_as_with_casts(precision):
    """The numbers are the same without a cast before the loss."""
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
            states[-1] += (nodes["softmax_cross_entropy"].inputs[0].dtype.name,)
    (losses, state, read), (others, other, wide) = states
    assert losses == others and losses[1] < losses[0] and (read, wide) == (precision, "float32")
    for name, value in state.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)

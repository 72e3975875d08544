"""Batch normalization on a GPU: channels that come last and others, packs, chunks, dtypes, and the relu behind it."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

from hetu.core.graph import OPS
from hetu.fuse.line_text import compute_dtype
from hetu.gpu_kernels import channels, emulator
from hetu.gpu_kernels.emulator import Emulator
from hetu.gpu_kernels.launchers import bound
from hetu.gpu_kernels.machine import RecordingMachine
from hetu.gpu_kernels.passes import fuse_norm_relu  # noqa: F401 - it defines two of the operators
from hetu.gpu_kernels.source import KernelError

from ..at_once import chosen
from . import fake_cupy, proofs
from .cases import recorded

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")
EPSILON = 1e-3
CASES = {  # dtypes of images and vectors, shape and axis of the channels, elements of a pack
    "planes": ("float64", "float64", (7, 3, 3000), 1, 2),
    "first": ("float32", "float32", (3, 5, 7), 0, 1),
    "halves in planes": ("float16", "float32", (5, 3, 40), 1, 8),
    "odd": ("float32", "float32", (5, 7, 3, 33), 3, 1),
    "chunks": ("float32", "float32", (2100, 64), 1, 4),
    "wide": ("float16", "float16", (70, 264), 1, 8),
    "narrow": ("float16", "float32", (40, 3, 24), 2, 8),
    "brain floats": ("bfloat16", "float32", (301, 4), 1, 4),
    "one": ("float64", "float64", (9, 1), 1, 1),
}
LAST = [name for name, (_, _, shape, axis, _) in CASES.items() if axis == len(shape) - 1]
TOLERANCE = {"float64": 1e-9, "float32": 2e-4, "float16": 8e-3, "bfloat16": 6e-2}


def made(name, *arrays, machine=None, like, **attrs):
    """What the kernels of an operator write into arrays like those given."""
    outs = tuple(np.full_like(a, 77) for a in like)
    calls = bound(machine or Emulator(), OPS[name], outs, arrays, {**attrs, "epsilon": EPSILON})
    for call in calls:
        call()
    return outs


def wanted(name, *arrays, **attrs):
    """What the forward function of the operator gives in float64."""
    return OPS[name].forward(np, *(a.astype("float64") for a in arrays), **attrs, epsilon=EPSILON)


def check(name, *arrays, like, **attrs):
    outs = made(name, *arrays, like=like, **attrs)
    for got, right in zip(outs, wanted(name, *arrays, **attrs), strict=True):
        tolerance = TOLERANCE[got.dtype.name] * max(1, abs(right).max())
        np.testing.assert_allclose(got.astype("float64"), right, rtol=TOLERANCE[got.dtype.name], atol=tolerance)
    return outs


def statistics(x, scale):
    """Arrays like the mean and the variance."""
    return [np.empty(scale.shape, compute_dtype(x.dtype.name)) for _ in range(2)]


def inputs(case):
    """x, scale, bias, what is added, g, and the axis. The mean of x is far from 0 where digits allow it."""
    images, vectors, shape, axis, _ = CASES[case]
    if images == "bfloat16":
        images = pytest.importorskip("ml_dtypes").bfloat16
    rng = np.random.default_rng(len(case))
    x, added, g = rng.standard_normal((3, *shape)) + np.reshape(
        [50 if images == "float64" else 3, 0, -1], (3, *(1 for _ in shape))
    )
    scale, bias = rng.standard_normal((2, shape[axis]))
    return *(a.astype(images) for a in (x, added, g)), *(a.astype(vectors) for a in (scale, bias)), axis


@pytest.fixture(scope="module")
def compiled(request) -> None:
    """The kernels of the chosen cases together, as the compiler takes longer to start than to compile one."""
    recorder, tests = RecordingMachine(), (test_a_normalization_and_its_gradient, test_a_relu_behind_it)
    cases = {case["case"] for test in tests for case in chosen(request, test)}
    for case in sorted(cases - {"brain floats"}):  # which need a package
        x, added, _, scale, bias, axis = inputs(case)
        out, flags = (x, *statistics(x, scale)), {"epsilon": EPSILON}
        bound(recorder, OPS["batch_norm_train"], out, (x, scale, bias), flags | {"axis": axis})
        if case in LAST:
            bound(recorder, OPS["batch_norm_relu"], out, (x, scale, bias), flags)
            bound(recorder, OPS["batch_norm_relu"], out, (x, scale, bias, added), flags)
    emulator.prepare(recorder.texts)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(8)
def test_a_normalization_and_its_gradient(case):
    x, _, g, scale, bias, axis = inputs(case)
    _, mean, var = check("batch_norm_train", x, scale, bias, like=(x, *statistics(x, scale)), axis=axis)
    check("batch_norm_dx", g, x, scale, mean, var, like=(x, scale, scale), axis=axis)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("case", LAST)
@pytest.mark.sampled(8)
def test_a_relu_behind_it(case):
    x, _, g, scale, bias, _ = inputs(case)
    y, mean, var = check("batch_norm_relu", x, scale, bias, like=(x, *statistics(x, scale)))
    assert 0 < np.count_nonzero(y) < y.size
    check("batch_norm_relu_dx", g, y, x, scale, mean, var, bias, like=(x, scale, scale))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("case", LAST)
@pytest.mark.sampled(8)
def test_a_sum_and_a_relu_behind_it(case):
    x, added, g, scale, bias, _ = inputs(case)
    y, mean, var = check("batch_norm_relu", x, scale, bias, added, like=(x, *statistics(x, scale)))
    check("batch_norm_relu_dx", g, y, x, scale, mean, var, like=(x, scale, scale))


@pytest.mark.parametrize("case", CASES)
def test_neighbors_move_in_packs_by_three_launches(case):
    _, _, shape, axis, pack = CASES[case]
    x, _, _, scale, bias, _ = inputs(case)
    recorder = RecordingMachine()
    attrs = {"axis": axis, "epsilon": 1.0}
    out = x, *statistics(x, scale)
    assert len(bound(recorder, OPS["batch_norm_train"], out, (x, scale, bias), attrs)) == 3
    (text,) = recorder.texts
    assert f"PACK = {pack};" in text and f"LAST = {axis == len(shape) - 1:d}," in text


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("shape", "axis"), [((4096, 32), 1), ((2, 3, 40, 50), 1)])
def test_the_variance_is_exact_far_from_zero(shape, axis):
    x = np.random.default_rng(2).standard_normal(shape).astype("float32") + np.float32(1000)
    vector = np.ones(shape[axis], "float32")
    _, mean, var = made("batch_norm_train", x, vector, vector, like=(x, vector, vector), axis=axis)
    axes = tuple(a for a in range(x.ndim) if a != axis)
    np.testing.assert_allclose(mean, x.astype("float64").mean(axes), rtol=1e-6)
    np.testing.assert_allclose(var, x.astype("float64").var(axes), rtol=1e-5)


def test_sums_of_different_precision_are_declined():
    x, scale = np.ones((4, 3)), np.ones(3, "float32")
    arrays, attrs = (x, scale, scale), {"axis": 1, "epsilon": 1.0}
    assert bound(RecordingMachine(), OPS["batch_norm_train"], arrays, arrays, attrs) is None


@pytest.mark.sampled(7)
@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_a_block_learns_as_on_the_cpu(precision):
    """Each relu is inside of a normalization, and nothing is transposed."""
    if precision == "bfloat16":
        pytest.importorskip("ml_dtypes")
    with fake_cupy.installed():
        ops = proofs.normalization(precision)
    assert ops["batch_norm_relu"] == 2 and ops["relu"] == ops["batch_norm_train"] == ops["permute_dims"] == 0


# -- mutations: the checks above can fail ----------------------------------------------------------------------------


MISTAKES = [
    (" + shift * shift * count * share", ""),
    ("    parts[own] = a;\n    __syncthreads();", "    parts[own] = a;"),
    ("blockIdx.x * each", "blockIdx.x * (each - 1)"),
    ("channel + (LAST ? j : 0)", "channel"),
    ("distance * factor + bias", "distance * factor"),
    ("if (threadIdx.y == 0 && part.end)", "if (part.end)"),
]
PROBES = ("chunks", "narrow")


@contextmanager
def mistaken(right, wrong):
    original = channels.file_text("channels")
    assert right in original
    channels.text.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels, "file_text", lambda name: original.replace(right, wrong))
        try:
            yield
        finally:
            channels.text.cache_clear()


@pytest.fixture(scope="module")
def prepared(request):
    texts = []
    for chosen_case in chosen(request, test_a_changed_kernel_is_noticed):
        with mistaken(*chosen_case["mistake"]):
            for case in PROBES:
                texts += recorded(sys.modules[__name__], partial(test_a_relu_behind_it, case))
    emulator.prepare(texts)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m[0].strip())
@pytest.mark.sampled(16)
def test_a_changed_kernel_is_noticed(prepared, mistake):
    with mistaken(*mistake), pytest.raises((AssertionError, KernelError)):
        for case in PROBES:
            test_a_relu_behind_it(case)

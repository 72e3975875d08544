"""Convolution in C against the forward functions and against its own plain loops, job by job too."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.backend import Scratch
from hetu.core.graph import OPS
from hetu.cpu_kernels import c_calls
from hetu.cpu_kernels.c_calls import CCall
from hetu.cpu_kernels.compiler import SETTING
from hetu.cpu_kernels.convolution import FEW

from .divided import job_by_job
from .every_compiler import others as every_other

pytestmark = pytest.mark.compiled
NONE, ONE, TWO = ((0, 0), (0, 0)), ((1, 1), (1, 1)), ((2, 2), (2, 2))
# images, input and output channels, size, kernel, stride, padding, dilation, groups
CASES = {
    "plain": (2, 3, 5, (9, 11), (3, 3), (1, 1), ONE, (1, 1), 1),
    "several panels": (1, 5, 70, (4, 5), (3, 3), (1, 1), ONE, (1, 1), 1),
    "strided": (1, 16, 32, (10, 10), (3, 3), (2, 2), ONE, (1, 1), 1),
    "unequal": (2, 8, 40, (13, 7), (5, 3), (2, 3), ((2, 1), (0, 2)), (1, 1), 1),
    "dilated groups": (1, 4, 8, (12, 12), (3, 3), (1, 1), TWO, (2, 2), 2),
    "depthwise": (2, 6, 6, (9, 9), (3, 3), (1, 1), ONE, (1, 1), 6),
    "depthwise, wide": (1, 3, 3, (5, 150), (3, 3), (1, 2), ONE, (1, 1), 3),
    "depthwise, many channels": (2, 75, 75, (8, 7), (3, 3), (1, 1), ONE, (1, 1), 75),
    "depthwise, strided": (3, 20, 20, (11, 13), (5, 3), (2, 3), ((2, 1), (0, 1)), (1, 2), 20),
    "depthwise, bands": (1, 130, 130, (40, 90), (3, 2), (2, 1), ONE, (1, 1), 130),
    "two of each channel": (2, 6, 12, (9, 9), (3, 3), (2, 2), ONE, (1, 1), 6),
    "three of each channel, dilated": (2, 6, 18, (9, 11), (3, 5), (2, 1), ((1, 1), (2, 1)), (2, 1), 6),
    "depthwise, many": (3, 37, 37, (7, 9), (3, 3), (1, 1), ONE, (1, 1), 37),
    "depthwise, many, unequal": (2, 20, 20, (13, 7), (5, 3), (2, 3), ((2, 1), (0, 2)), (1, 1), 20),
    "depthwise, many, dilated": (1, 16, 16, (12, 23), (3, 5), (1, 2), TWO, (2, 2), 16),
    "depthwise, many, mostly frame": (2, 17, 17, (2, 1), (3, 3), (1, 1), ONE, (1, 1), 17),
    "depthwise, many, gaps": (2, 16, 16, (5, 5), (2, 2), (3, 3), NONE, (1, 1), 16),
    "groups of four": (2, 12, 12, (9, 10), (3, 3), (1, 1), ONE, (1, 1), 3),
    "seven outputs of many channels": (2, 20, 7, (11, 40), (5, 3), (2, 2), TWO, (1, 1), 1),
    "eight outputs, planes of a power of two": (2, 18, 8, (16, 16), (3, 3), (1, 1), ONE, (1, 1), 1),
    "more images than parts": (19, 2, 3, (6, 7), (2, 3), (1, 1), ONE, (1, 1), 1),
    "bands of planes": (1, 40, 5, (90, 50), (3, 3), (2, 1), ONE, (1, 1), 1),
    "one pixel": (3, 20, 70, (6, 6), (1, 1), (1, 1), NONE, (1, 1), 1),
    "one pixel, bands": (5, 40, 24, (11, 9), (1, 1), (1, 1), NONE, (1, 1), 2),
    "one pixel, strided": (3, 20, 7, (7, 6), (1, 1), (2, 3), NONE, (1, 1), 1),
    "stem": (1, 3, 4, (20, 20), (7, 7), (4, 4), ((3, 3), (3, 3)), (1, 1), 1),
    "one channel": (3, 1, 6, (28, 28), (5, 5), (1, 1), NONE, (1, 1), 1),
    "gaps": (2, 4, 4, (5, 5), (2, 2), (3, 3), NONE, (1, 1), 1),
    "mostly frame": (1, 2, 3, (1, 1), (3, 3), (1, 1), ONE, (1, 1), 1),
    "Winograd": (4, 64, 64, (12, 10), (3, 3), (1, 1), ONE, (1, 1), 1),
    "Winograd, cut tiles": (3, 61, 63, (12, 11), (3, 3), (1, 1), ((2, 1), (2, 3)), (1, 1), 1),
    "slopes in parts": (5, 12, 20, (20, 18), (3, 3), (1, 1), ONE, (1, 1), 1),
    "slopes of groups in parts": (4, 6, 22, (30, 23), (3, 2), (1, 1), ONE, (1, 1), 2),
    "Winograd, slopes in parts": (3, 32, 32, (38, 40), (3, 3), (1, 1), ONE, (1, 1), 1),
    "few pixels": (2, 67, 250, (3, 5), (3, 3), (1, 1), ONE, (1, 1), 1),
    "few pixels, unequal": (3, 130, 101, (5, 7), (5, 3), (3, 2), ((2, 1), (0, 2)), (1, 2), 1),
    "small images": (40, 9, 11, (2, 2), (2, 2), (1, 1), ((1, 0), (1, 0)), (1, 1), 1),
}


def laid(x: np.ndarray, layout: str) -> np.ndarray:
    """The same numbers in another order of memory."""
    axes = {"nchw": (0, 1, 2, 3), "nhwc": (0, 2, 3, 1), "hwnc": (2, 3, 0, 1)}.get(layout)
    if axes is None:
        wide = np.full((*x.shape[:3], 2 * x.shape[3]), np.nan, x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    return x.transpose(axes).copy().transpose(np.argsort(axes))


def check(name: str, arrays, layout: str = "nchw", **attrs) -> np.ndarray:
    want = OPS[name].forward(np, *arrays, **attrs)
    out = laid(np.empty_like(want, order="C"), layout)
    calls = OPS[name].bound(np, out, arrays, attrs, Scratch())
    assert calls and all(isinstance(call, CCall) for call in calls)
    made = []
    for run in (lambda call: call(), job_by_job):
        out.fill(np.nan)
        for call in calls:
            run(call)
        most = np.abs(want).max(initial=1e-30)
        np.testing.assert_allclose(out / most, want / most, atol=3e-6 if out.dtype == np.float32 else 1e-14)
        made.append(out.tobytes())
    assert made[0] == made[1]
    return want


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc", "hwnc", "cut"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(40)
def test_convolution(case, layout, dtype):
    n, c, o, size, kernel, stride, padding, dilation, groups = CASES[case]
    rng = np.random.default_rng(0)
    x = laid(rng.standard_normal((n, c, *size)).astype(dtype), layout)
    w = laid(rng.standard_normal((o, c // groups, *kernel)).astype(dtype), "cut" if layout == "cut" else "nchw")
    attrs = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    y = check("conv2d", [x, w], layout, **attrs)
    g = laid(rng.standard_normal(y.shape).astype(dtype), layout)
    check("conv2d_dx", [g, w], layout, size=size, **attrs)
    check("conv2d_dw", [x, g], kernel=kernel, **attrs)


def bits(op: str, out: np.ndarray, arrays, **attrs) -> bytes:
    for call in OPS[op].bound(np, out, arrays, attrs, Scratch()):
        call()
    return out.tobytes()


def bits_of_cases():
    """Of the outputs and of both gradients."""
    found = {}
    for case, (n, c, o, size, kernel, stride, padding, dilation, groups) in CASES.items():
        rng = np.random.default_rng(0)
        x, w = (rng.standard_normal(shape, np.float32) for shape in ((n, c, *size), (o, c // groups, *kernel)))
        attrs = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        y = OPS["conv2d"].forward(np, x, w, **attrs)
        made = (
            bits("conv2d", np.empty_like(y), [x, w], **attrs),
            bits("conv2d_dx", np.empty_like(x), [y, w], size=size, **attrs),
            bits("conv2d_dw", np.empty_like(w), [x, y], kernel=kernel, **attrs),
        )
        found |= zip(((case, name) for name in ("y", "dx", "dw")), made)
    return found


@pytest.mark.nightly
@every_other
def test_any_vectors_give_the_same_bits(monkeypatch, others):
    """Where they multiply and add at once."""
    wanted = bits_of_cases()
    for command in (c for c in others() if not c.endswith("=x86-64")):
        monkeypatch.setenv(SETTING, command)
        c_calls._written.cache_clear()
        found = bits_of_cases()
        assert [at for at in wanted if found[at] != wanted[at]] == [], command
    monkeypatch.undo()
    c_calls._written.cache_clear()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_images_with_their_channels_last(case):
    n, c, o, size, kernel, stride, padding, dilation, groups = CASES[case]
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((*size, n, c)), rng.standard_normal((o, c // groups, *kernel))
    attrs = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    y = check("conv2d_last", [x, w], **attrs)
    g = rng.standard_normal(y.shape)
    check("conv2d_last_dx", [g, w], size=size, **attrs)
    check("conv2d_last_dw", [x, g], kernel=kernel, **attrs)


PLAIN = [
    c for c, row in CASES.items() if row[-1] == 1 and row[2] > FEW and not c.startswith(("Winograd", "few pixels"))
]


@pytest.mark.parametrize("case", PLAIN)
def test_the_plain_loops_say_the_same(case):
    """What `convolution.c` begins with, on weights in the order of the taps."""
    n, c, o, size, kernel, stride, padding, dilation, groups = CASES[case]
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((n, c, *size)), rng.standard_normal((o, c, *kernel))
    attrs = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    want = OPS["conv2d"].forward(np, x, w, **attrs)
    out = np.empty_like(want)
    call = OPS["conv2d"].bound(np, out, [x, w], attrs, Scratch())[1]
    words = [*call.words]
    words[10] = np.ascontiguousarray(w.transpose(0, 2, 3, 1))
    CCall(call.source, "convolve_plainly", words, jobs=n)()
    np.testing.assert_allclose(out, want, atol=1e-12)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("Winograd")])
def test_winograd_and_its_plain_loops(case):
    n, c, o, size, kernel, stride, padding, dilation, groups = CASES[case]
    rng = np.random.default_rng(0)
    x, w = laid(rng.standard_normal((n, c, *size)), "hwnc"), rng.standard_normal((o, c // groups, *kernel))
    attrs = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    want = OPS["conv2d"].forward(np, x, w, **attrs)
    out = laid(np.empty_like(want, order="C"), "hwnc")
    call = OPS["conv2d"].bound(np, out, [x, w], attrs, Scratch())[-1]
    assert call.function == "winograd"
    words = [*call.words]
    words[10] = w
    CCall(call.source, f"{call.function}_plainly", words)()
    np.testing.assert_allclose(out, want, atol=1e-12)


@pytest.mark.parametrize("case", [c for c, row in CASES.items() if row[1] == row[2] == row[-1] > 8])
def test_the_plain_loops_of_depthwise_say_the_same(case):
    n, c, _, size, kernel, stride, padding, dilation, groups = CASES[case]
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((*size, n, c)), rng.standard_normal((c, 1, *kernel))
    attrs = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    want = OPS["conv2d_last"].forward(np, x, w, **attrs)
    out = np.empty(want.shape)
    (call,) = OPS["conv2d_last"].bound(np, out, [x, w], attrs, Scratch())
    assert call.function == "convolve_channels"
    CCall(call.source, "convolve_channels_plainly", call.words, jobs=call.jobs)()
    np.testing.assert_allclose(out, want, atol=1e-12)


@pytest.mark.parametrize("passes", [None, []], ids=["kernels", "plain"])
def test_without_images_nothing_is_computed(passes):
    x, w = ht.placeholder("x", (None, 4, 5, 5)), ht.variable("w", np.ones((6, 2, 3, 3), np.float32))
    y = ht.conv2d(x, w, groups=2)
    y, *gradients = ht.Executor([y, *ht.gradients(ht.sum(y), [x, w])], passes=passes).run({x: np.ones((0, 4, 5, 5))})
    assert y.shape == (0, 6, 3, 3) and gradients[0].shape == (0, 4, 5, 5)
    assert gradients[1].shape == (6, 2, 3, 3) and not gradients[1].any()

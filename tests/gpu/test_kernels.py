"""Every kernel, hand-written or generated, equals the forward function of its operator on the table of samples."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from hetu.core.graph import OPS
from hetu.core.op import Op
from hetu.gpu_kernels import emulator
from hetu.gpu_kernels.emulator import Emulator
from hetu.gpu_kernels.launchers import KERNELS
from hetu.gpu_kernels.machine import RecordingMachine, widest_pack
from hetu.gpu_kernels.source import assemble

from ..at_once import chosen
from ..samples import SAMPLES
from .cases import DTYPES, assert_close, uncompiled_cases

# How rows begin whose kernel does not apply: a sum over nothing is a view, NumPy draws these numbers by rejection, the
# largest along an axis that is not the last are left to a sort, LAMB to groups, and images of few channels, groups or a
# dilation to CuPy (`test_convolution.py` has others).
DECLINED = ("sum_to_like-equal", "topk-ties", "lamb", "update_all-lamb", "conv2d_last")
DECLINED += tuple(f"random-{kind}" for kind in ("normal", "truncated_normal", "randint", "gumbel"))


def rows_and_dtypes():
    """Each row at one dtype, in turn, and nightly at the others; `test_dtypes.py` has those of expressions."""
    for k, sample in enumerate(SAMPLES):
        dtypes = [d for d in DTYPES if d != "float16" or not sample.extra.get("no_float16")]
        for dtype in dtypes:
            marks = () if dtype == dtypes[k % len(dtypes)] else pytest.mark.nightly
            yield pytest.param(sample.id, dtype, marks=marks)


@pytest.fixture(scope="module")
def prepared(request):
    """The kernels of the chosen rows, compiled together."""
    recorder = RecordingMachine()
    for params in chosen(request, test_kernels_equal_forward_functions):
        for case in uncompiled_cases().get((params["row"], params["dtype"]), ()):
            case.calls(recorder)
    for params in chosen(request, test_every_array_may_begin_anywhere):
        for case, late in late_arrays(params["row"]):
            case.calls(recorder, late=late)
    emulator.prepare(recorder.texts)


@pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")
@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize(("row", "dtype"), [*rows_and_dtypes()])
@pytest.mark.sampled(30)
def test_kernels_equal_forward_functions(row, dtype):
    for case in uncompiled_cases().get((row, dtype), ()):
        calls, outs = case.calls(Emulator())
        declined = row.startswith(DECLINED) and case.node.op.code is None
        assert (calls is None) == declined, f"{case.node!r}: {calls}"
        for call in calls or ():
            call()
        if calls is not None:
            assert_close(outs, case)


def late_arrays(row):
    """Each case of a row in float32, with the number of each of its arrays."""
    for case in uncompiled_cases().get((row, "float32"), ()):
        yield from ((case, late) for late in range(len(case.arrays) + len(case.types)))


@pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")
@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("row", [s.id for s in SAMPLES])
@pytest.mark.sampled(60)
def test_every_array_may_begin_anywhere(row):
    """One after the other: a launcher that looks at all but one of them moves packs that are not aligned."""
    for case, late in late_arrays(row):
        calls, outs = case.calls(Emulator(["ascending"]), late=late)
        for call in calls or ():
            call()
        if calls is not None:
            assert_close(outs, case)


def test_packs_form_in_some_row_where_a_launcher_asks_for_them(monkeypatch):
    """Else no row shows whether it looks at all addresses."""
    widest = dict[str, int]()
    KERNELS.function(OPS["add"])  # which imports all of them
    for name, module in [*sys.modules.items()]:
        if (
            name.startswith("hetu.gpu_kernels.")
            and name != "hetu.gpu_kernels.machine"
            and hasattr(module, "widest_pack")
        ):
            monkeypatch.setattr(module, "widest_pack", lambda *a, **k: packs.append(widest_pack(*a, **k)) or packs[-1])
    for (_, dtype), cases in uncompiled_cases().items():
        for case in cases if dtype == "float64" else ():
            packs: list[int] = []
            case.calls(RecordingMachine())
            if packs and KERNELS.function(case.node.op) is not None:
                widest[case.node.op.name] = max(*packs, widest.get(case.node.op.name, 1))
    assert len(widest) > 20 and sorted(name for name, pack in widest.items() if pack == 1) == []


def test_every_hand_written_kernel_has_a_row():
    met = {case.node.op.name for cases in uncompiled_cases().values() for case in cases}
    entered = {op.name for op in KERNELS.functions if isinstance(op, Op)} - {"fused"}  # see `test_groups.py`
    assert len(entered) > 30 and sorted(entered - met) == []


@pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")
def test_brain_floats_are_rounded_to_the_nearest_or_even_ones():
    body = """extern "C" __global__ void both(const float* f, unsigned short* bits, float* back, long long n) {
        for (long long i = threadIdx.x; i < n; i += blockDim.x) {
            const bfloat16 b = f[i];
            bits[i] = b.bits, back[i] = b;
        }
    }"""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    whole = np.concatenate(
        [high | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    )  # below, at and above the half
    floats, bits, back = whole.view(np.float32), np.zeros(whole.size, np.uint16), np.zeros(whole.size, np.float32)
    Emulator().kernel(assemble(body, "both.cu"), "both")((1,), (256,), (floats, bits, back, whole.size))
    up = (whole & 0xFFFF) + (whole >> 16 & 1) > 0x8000
    there = ~np.isnan(floats)
    np.testing.assert_array_equal(bits[there], (whole >> 16)[there] + up[there])
    np.testing.assert_array_equal(back.view(np.uint32) >> 16, bits)
    assert np.isnan(back[~there]).all()


@pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")
def test_half_precision_converts_as_numpy_does():
    text = """
    struct half16 { unsigned short bits; };
    extern "C" __global__ void both(const half16* h, float* f, const float* g, half16* out, long long n) {
        for (long long i = threadIdx.x; i < n; i += blockDim.x)
            f[i] = half_to_float(h[i].bits), out[i].bits = float_to_half(g[i]);
    }"""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    rng = np.random.default_rng(0)
    floats = (rng.standard_normal(1 << 16) * 10.0 ** rng.integers(-9, 6, 1 << 16)).astype(np.float32)
    floats[:4] = 65519.9, 65520, 2.0**-25, 2.0**-24
    widened, rounded = np.zeros(1 << 16, np.float32), np.zeros(1 << 16, np.float16)
    Emulator().kernel(text, "both")((1,), (256,), (halves, widened, floats, rounded, 1 << 16))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(widened, halves.astype(np.float32))
        np.testing.assert_array_equal(rounded, floats.astype(np.float16))

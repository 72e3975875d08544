"""On a real GPU: operators, kernels, whole training steps as one CUDA graph, 16-bit training and NCCL.

`python -m hetu.gpu_kernels.check` runs these and prints a table. `test_check.py` runs the checks themselves, those of
`proofs.py`, on the stand-in for CuPy.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from hetu.gpu_kernels.emulator import Emulator
from hetu.gpu_kernels.table import bound
from hetu.graph import OPS

from ..dist.contract import CHECKS
from ..samples import SAMPLES
from . import proofs
from .cases import DTYPES, assert_close, ids, uncompiled_cases
from .test_kernels import DECLINED


def gpus() -> int:
    if importlib.util.find_spec("cupy") is None:
        return 0
    cupy = importlib.import_module("cupy")
    return cupy.cuda.runtime.getDeviceCount() if cupy.is_available() else 0


# In float64, as most rows are too small for the rounding of float32 to say much; kernels have a test for each dtype.
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.id)
def test_operator_contract(sample):
    proofs.operator(sample)


def test_a_training_step_is_captured():
    proofs.captured_training()


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_mixed_precision(precision):
    if precision == "bfloat16":
        pytest.importorskip("ml_dtypes")
    proofs.precision(precision)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_nccl_with_one_rank(check):
    pytest.importorskip("cupy.cuda.nccl")
    proofs.nccl(check)


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpus() == 0, reason="no GPU")]


@pytest.mark.parametrize("row", ids())
def test_kernels_equal_forward_functions(row):
    from hetu.gpu_kernels.device import gpu

    machine = gpu()
    for dtype in DTYPES:
        for case in uncompiled_cases().get((row, dtype), ()):
            calls, outs = case.calls(machine, machine.xp)
            assert (calls is None) == (row in DECLINED), f"{case.node!r}: {calls}"
            for call in calls or ():
                call()
            if calls is not None:
                assert_close([o.get() for o in outs], case)


@pytest.mark.parametrize("size", [16, 1000, 1 << 22])
def test_dropout_has_the_mask_of_the_cpu(size):
    from hetu.gpu_kernels.device import gpu

    machine, op = gpu(), OPS["dropout"]
    x, state = np.ones(size, np.float32), np.array([11, 3], np.uint64)
    attrs = {"rate": 0.3, "stream": 5, "channels": False}
    out = machine.xp.empty(size, np.float32)
    for call in bound(machine, "dropout", out, [machine.xp.asarray(x), machine.xp.asarray(state)], attrs):
        call()
    np.testing.assert_array_equal(out.get(), op.forward(np, x, state, **attrs))


def test_a_wide_softmax_equals_the_emulated_one():
    from hetu.gpu_kernels.device import gpu

    machine = gpu()
    x = np.random.default_rng(0).standard_normal((7, 50257)).astype(np.float32)
    here, there = np.empty_like(x), machine.xp.empty(x.shape, x.dtype)
    for device, out, array in ((Emulator(), here, x), (machine, there, machine.xp.asarray(x))):
        for call in bound(device, "softmax", out, [array], {"axis": 1}):
            call()
    np.testing.assert_allclose(there.get(), here, rtol=1e-5)

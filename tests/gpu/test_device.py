"""On a real GPU: operators, kernels, whole training steps as one CUDA graph, 16-bit training and NCCL.

`python -m hetu.gpu_kernels.check` runs these and prints a table. `test_check.py` runs the checks themselves, those of
`proofs.py`, on the stand-in for CuPy.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import OPS
from hetu.dist.comm.nccl import SHARED_GPU
from hetu.gpu_kernels.emulator import Emulator
from hetu.gpu_kernels.launchers import bound
from hetu.optim import SGD, Adam

from ..dist.contract import CHECKS
from ..dist.test_launch import ROOT, heturun
from ..samples import SAMPLES
from . import proofs
from .cases import DTYPES, assert_close, ids, uncompiled_cases
from .test_attention import KINDS
from .test_attention import case as attention_case
from .test_attention import computed as attention_computed
from .test_convolution import NAMES, NONE, ONE, arrays
from .test_convolution import computed as convolution_computed
from .test_kernels import DECLINED


def gpus() -> int:
    if importlib.util.find_spec("cupy") is None:
        return 0
    cupy = importlib.import_module("cupy")
    return cupy.cuda.runtime.getDeviceCount() if cupy.is_available() else 0


ON_DEVICE = SAMPLES if gpus() else SAMPLES[:1]  # where all are skipped, one is enough


def nccl_or_skip():
    with warnings.catch_warnings(action="ignore"):  # without the library CuPy warns, and has an empty module
        nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        pytest.skip("NCCL is not installed")
    return nccl


# In float64, as most rows are too small for the rounding of float32 to say much; kernels have a test for each dtype.
@pytest.mark.parametrize("sample", ON_DEVICE, ids=lambda s: s.id)
def test_operator_contract(sample):
    proofs.operator(sample)


@pytest.mark.parametrize("sample", ON_DEVICE, ids=lambda s: s.id)
def test_captured_as_a_graph(sample):
    proofs.captured_operator(sample)


def test_a_training_step_is_captured():
    proofs.captured_training()


def test_the_kernels_of_a_program_are_shown():
    proofs.shown_kernels()


@pytest.mark.parametrize("optimizer", [SGD(0.5), Adam(0.1)], ids=["sgd", "adam"])
def test_a_captured_step_updates_rows_the_same_in_every_run(optimizer):
    proofs.captured_rows(optimizer)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_mixed_precision(precision):
    if precision == "bfloat16":
        pytest.importorskip("ml_dtypes")
    proofs.precision(precision)


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_batch_norm_kernels_in_training(precision):
    if precision == "bfloat16":
        pytest.importorskip("ml_dtypes")
    proofs.normalization(precision)


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_attention_kernels_in_training(precision):
    if precision == "bfloat16":
        pytest.importorskip("ml_dtypes")
    proofs.attention(precision)


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_convolution_kernels_in_training(precision):
    if precision == "bfloat16":
        pytest.importorskip("ml_dtypes")
    ops = proofs.convolution(precision)
    assert ops["conv2d_last"] == 4 and "conv2d" not in ops


LAYERS = [
    (32, 32, 16, 64, 64, (3, 3), (1, 1), ONE),
    (16, 16, 128, 128, 128, (3, 3), (1, 1), ONE),
    (16, 16, 32, 64, 128, (3, 3), (2, 2), ONE),
    (8, 8, 32, 64, 128, (1, 1), (2, 2), NONE),
    (16, 16, 32, 3, 64, (7, 7), (2, 2), ((3, 3), (3, 3))),
]


@pytest.mark.parametrize(("dtype", "digits"), [("float32", 2e-6), ("float16", 1e-3)])  # TF32 would be off by 1e-4
@pytest.mark.parametrize("layer", LAYERS)
def test_convolution_kernels_of_many_tiles(layer, dtype, digits):
    from hetu.gpu_kernels.device import gpu

    for name in NAMES:
        made, wanted = convolution_computed(gpu(), name, *arrays(layer, dtype)[name])
        np.testing.assert_allclose(made.get(), wanted, rtol=0, atol=digits * np.abs(wanted).max(), err_msg=name)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("features", [16, 64, 80, 128])
def test_attention_kernels_of_many_tiles(features, causal, dtype):
    from hetu.gpu_kernels.device import gpu

    if dtype == "float64" and features > 64:
        return
    inputs, attrs, (y, total), slopes = attention_case((2, 300, 300, 3, features, features), dtype, causal)
    machine = gpu()
    got = attention_computed(machine, tuple(map(machine.xp.asarray, inputs)), attrs)
    for one, other in zip(got, (y, total, slopes), strict=True):
        np.testing.assert_allclose(one.get(), other, rtol=KINDS[dtype], atol=4 * KINDS[dtype])


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_nccl_with_one_rank(check):
    nccl_or_skip()
    proofs.nccl(check)


def test_two_ranks_share_the_gpu():
    """In processes of their own, under a deadline: where a GPU has too little room for both, NCCL hangs."""
    nccl = nccl_or_skip()
    pytest.importorskip("mpi4py")
    if (found := nccl.get_version()) < SHARED_GPU:
        pytest.skip(f"NCCL {found} lets no two ranks share a GPU, {SHARED_GPU} does")
    setting = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "PYTHONPATH": str(ROOT)}
    job = heturun("-w", 2, "python", "-m", "tests.gpu.proofs", env=os.environ | setting)
    assert job.returncode == 0, job.stderr
    assert f"{len(CHECKS)} checks on 2 ranks of NCCLComm" in job.stdout


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpus() == 0, reason="no GPU")]


@pytest.mark.parametrize("row", ids() if gpus() else ids()[:1])
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


@pytest.mark.parametrize(
    "build",
    [lambda x: ht.astype(x, "bfloat16"), lambda x: ht.cumsum(ht.astype(x, "bfloat16"))],
    ids=["rounded", "added up"],
)
def test_operators_of_bfloat16(build):
    """Ties, subnormal numbers, infinities and NaN are rounded as on a CPU."""
    pytest.importorskip("ml_dtypes")
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x00008000, 0x00018000, 0x7F7FFFFF, 0x7FFFFFFF], np.uint32)
    x, given = ht.placeholder("x", (None,)), bits.view(np.float32)
    results = {device: ht.Executor([build(x)], device=device).run({x: given})[0] for device in ("cpu", "gpu")}
    np.testing.assert_array_equal(results["gpu"].astype("float32"), results["cpu"].astype("float32"))


@pytest.mark.parametrize("size", [16, 1000, 1 << 22])
def test_dropout_has_the_mask_of_the_cpu(size):
    from hetu.gpu_kernels.device import gpu

    machine, op = gpu(), OPS["dropout"]
    x, state = np.ones(size, np.float32), np.array([11, 3], np.uint64)
    attrs = {"rate": 0.3, "stream": 5, "channels": False}
    out = machine.xp.empty(size, np.float32)
    for call in bound(machine, OPS["dropout"], out, [machine.xp.asarray(x), machine.xp.asarray(state)], attrs):
        call()
    np.testing.assert_array_equal(out.get(), op.forward(np, x, state, **attrs))


def test_a_wide_softmax_equals_the_emulated_one():
    from hetu.gpu_kernels.device import gpu

    machine = gpu()
    x = np.random.default_rng(0).standard_normal((7, 50257)).astype(np.float32)
    here, there = np.empty_like(x), machine.xp.empty(x.shape, x.dtype)
    for device, out, array in ((Emulator(), here, x), (machine, there, machine.xp.asarray(x))):
        for call in bound(device, OPS["softmax"], out, [array], {"axis": 1}):
            call()
    np.testing.assert_allclose(there.get(), here, rtol=1e-5)

"""The kernels of the layout transform: all packs and dtypes, slots that name nothing, and a layer on a device."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import OPS
from hetu.gpu_kernels import emulator, routing, source
from hetu.gpu_kernels.emulator import Emulator
from hetu.gpu_kernels.launchers import bound
from hetu.gpu_kernels.machine import RecordingMachine

from ..test_routing import layer, weights
from . import fake_cupy

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3}
WIDTHS = (3, 40, 300)
SHAPE = {"experts": 3, "capacity": 7}


def arrays(dtype, width, index="int64"):
    """Tokens, what lies in slots, which 13 tokens choose two of (21 rooms, of which some stay empty), and weights."""
    rng = np.random.default_rng(width)
    slots = rng.permutation(21)[: 13 * 2 - 9]
    slots = rng.permutation(np.append(slots, [-1] * 9)).reshape(13, 2).astype(index)
    x, y, w = (rng.standard_normal(shape).astype(dtype) for shape in ((13, width), (3, 7, width), (13, 2)))
    return x, y, slots, w


def cases(dtype, width, index="int64"):
    x, y, slots, w = arrays(dtype, width, index)
    return {
        "moe_dispatch": (np.full_like(y, 77), (x, slots, w), SHAPE),
        "moe_combine": (np.full_like(x, 77), (y, slots, w), {}),
        "moe_products": (np.full_like(w, 77), (x, y, slots), {}),
    }


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All kernels at once, which takes far less time than one by one."""
    recorder = RecordingMachine()
    for dtype in TOLERANCE:
        for width in WIDTHS:
            for name, (out, given, attrs) in cases(dtype, width, "int32" if width == 40 else "int64").items():
                bound(recorder, OPS[name], out, given, attrs)
    emulator.prepare(recorder.texts)


def check(name, out, given, attrs):
    wide = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in given]
    wanted = OPS[name].forward(np, *wide, **attrs)
    for call in bound(Emulator(), OPS[name], out, given, attrs):
        call()
    tolerance = TOLERANCE[out.dtype.name]
    np.testing.assert_allclose(out, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.sampled(8)
def test_kernels_equal_forward_functions(width, dtype):
    for name, case in cases(dtype, width, "int32" if width == 40 else "int64").items():
        check(name, *case)


def test_slots_that_do_not_exist_count_for_nothing():
    for name, (out, given, attrs) in cases("float32", 3).items():
        slots = next(a for a in given if a.dtype.kind == "i")
        slots[0], slots[1] = (21, -5), (1 << 40, -1)
        for call in bound(Emulator(), OPS[name], out, given, attrs):
            call()
        slots[:2] = -1
        wanted = OPS[name].forward(np, *given, **attrs)
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("moe_dispatch", "e / k * features", "e * features"),
        ("moe_dispatch", "slots[e] >= 0 && ", ""),
        ("moe_combine", "if (slot < 0 || slot >= count) continue;", ""),
        (
            "moe_combine",
            "f < features; f += 32 * PACK) {\n        T sum",
            "f <= features; f += 32 * PACK) {\n        T sum",
        ),
        ("moe_products", "sum = warp_sum(sum);", ""),
    ],
)
@pytest.mark.sampled(8)
def test_a_changed_kernel_is_noticed(name, right, wrong, monkeypatch):
    original = source.file_text
    assert right in original("routing")
    monkeypatch.setattr(routing, "file_text", lambda file: original(file).replace(right, wrong))
    with pytest.raises((AssertionError, source.KernelError)):
        check(name, *cases("float32", 40)[name])


def test_a_layer_on_a_device():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((12, 6)).astype(np.float32)
    parameters = [ht.variable(name, value) for name, value in weights(rng).items()]
    loss = ht.mean(layer(ht.placeholder("x", (None, 6)), *parameters, capacity=4) ** 2)
    entries = [loss, ht.optim.SGD(0.1).minimize(loss)]

    def losses(device):
        executor = ht.Executor(entries, device=device)
        return [float(executor.run({"x": x})[0]) for _ in range(3)]

    wanted = losses("cpu")
    with fake_cupy.installed():
        np.testing.assert_allclose(losses("gpu"), wanted, rtol=1e-5)
        assert {"kernel moe_dispatch", "kernel moe_combine", "kernel moe_products"} <= set(fake_cupy.LOG)

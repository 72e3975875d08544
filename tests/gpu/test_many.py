"""Kernels of many tensors, and the training steps in mixed precision that consist of less for them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import hetu as ht
from hetu import nn, optim, schedules
from hetu.core.graph import OPS, Node
from hetu.core.types import as_dtype
from hetu.gpu_kernels import emulator, many, update
from hetu.gpu_kernels.emulator import Emulator
from hetu.gpu_kernels.launchers import bound
from hetu.gpu_kernels.passes.group_checks import ALL_FINITE

from . import fake_cupy
from .test_groups import MODELS, cost, passes_without, program, resnet_block

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")
RNG = np.random.default_rng(0)


def normal(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype("float32")


def check(made, wanted):
    for got, right in zip(made, wanted, strict=True):
        np.testing.assert_allclose(got, right, rtol=2e-5, atol=2e-5)


def low(name: str) -> np.dtype:
    if name == "bfloat16":
        pytest.importorskip("ml_dtypes")
    return as_dtype(name)


def positive(size: int, seed: int, dtype: str = "float32") -> np.ndarray:
    return np.abs(normal(size, seed)).astype(dtype)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adagrad", "adam"])
@pytest.mark.parametrize("gradients", ["float32", "float16", "bfloat16"])
@pytest.mark.sampled(16)
def test_one_launch_updates_all_tensors(name, gradients):
    """With gradients of 16 bits the same, to the last digit, as with those in float32 that are equal and unscaled."""
    op, dtype = OPS[name], low(gradients)
    states = len(op.update.states)
    rate, step, scale = np.array(0.1, np.float32), np.array(3), np.array(3, np.float32)
    attrs = {k: v for k, v in op.defaults.items() if k != "window"}
    scaled, plain, wanted = [], [], []
    for k, size in enumerate((1, 257, update.CHUNK + 5)):
        *old, gradient = (positive(size, n) for n in range(states + 2))
        gradient = positive(size, states + 1, dtype) if k else gradient  # one of them in float32 at all events
        alone = gradient.astype("float32") / scale
        new = op.forward(np, *old, alone, *((rate, step) if "step" in op.inputs else (rate,)), **attrs)
        wanted.append(new if isinstance(new, tuple) else (new,))
        plain.append(update.Tensor([a.copy() for a in old], [a.copy() for a in old], alone))
        scaled.append(update.Tensor(old, old, gradient))
    for tensors, by in ((scaled, scale), (plain, None)):
        calls = update.update_all(Emulator(), OPS[name].update, tensors, rate, step, attrs, scale=by)
        assert len(calls) == 1
        for call in calls:
            call()
    for tensor, other, new in zip(scaled, plain, wanted):
        check(tensor.new, new)
        for made, same in zip(tensor.new, other.new, strict=True):
            np.testing.assert_array_equal(made, same)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_finite_looks_at_every_element(dtype):
    sizes, scale = (1, 257, many.CHUNK + 5), np.array(2.0**-3, np.float32)
    gradients = [positive(size, k, low(dtype) if k else "float32") for k, size in enumerate(sizes)]

    def finite() -> bool:
        out = np.array(False)
        for call in bound(Emulator(), ALL_FINITE, out, [*gradients, scale], {}):
            call()
        return bool(out)

    assert finite()
    for k, place, bad in ((0, 0, 1e38), (1, 0, np.inf), (2, 256, np.nan), (2, -1, -np.inf)):
        kept, gradients[k][place] = gradients[k][place].copy(), bad
        assert not finite()
        gradients[k][place] = kept
    assert finite()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["sgd", "amsgrad"])
@pytest.mark.parametrize("apart", [False, True])
def test_nothing_moves_where_the_condition_is_false(name, apart):
    """Gradients that overflowed leave no trace, whether new values lie on old ones or not."""
    attrs, tensors, before = dict(OPS[name].defaults), [], []
    for size in (3, update.CHUNK + 5):
        old = [np.abs(normal(size, seed=k)) for k in range(OPS[name].update.tables)]
        new = [np.full_like(a, 77) for a in old] if apart else old
        tensors.append(update.Tensor(new, old, np.full(size, np.inf, np.float32)))
        before.append([a.copy() for a in old])
    rate, step = np.array(0.1, np.float32), np.array(3)
    for call in update.update_all(Emulator(), OPS[name].update, tensors, rate, step, attrs, np.array(False)):
        call()
    for tensor, values in zip(tensors, before):
        for a, b in zip(tensor.new, values, strict=True):
            np.testing.assert_array_equal(a, b)


# -- whole training steps ----------------------------------------------------------------------------------------------


MIXED = ("group_updates", "group_checks")
WITHOUT = {  # what these passes save in launches and bytes, at least
    ("mlp", "float16"): (18, 28_128_000),
    ("mlp", "bfloat16"): (7, 5_349_000),
    ("gpt block", "float16"): (40, 8_190_000),
    ("gpt block", "bfloat16"): (17, 1_438_000),
    ("resnet block", "float16"): (16, 145_000),
    ("resnet block", "bfloat16"): (9, 38_000),
}


def small_gpt() -> tuple[Node, dict]:
    """A block with a rate that follows a schedule."""
    x, t = ht.placeholder("x", (2, 8, 16)), ht.placeholder("t", (2, 8), "int64")
    loss = ht.mean(ht.softmax_cross_entropy(nn.TransformerBlock(16, 2, dropout=0.1)(x), t))
    return loss, optim.AdamW(schedules.warmup(0.01, 2))


def test_a_step_that_overflows_on_the_stand_in_changes_nothing():
    """The operator of all updates reads the condition from the memory of the device."""
    feed = {"x": np.ones((4, 6), np.float32), "t": np.arange(4)}
    with fake_cupy.installed(), ht.scope("model"):
        x, t = ht.placeholder("x", (4, 6)), ht.placeholder("t", (4,), "int64")
        loss = ht.mean(ht.softmax_cross_entropy(nn.Linear(6, 4)(x), t))
        entries = [loss, optim.Adam(0.1).minimize(loss)]
        here, there = (ht.Executor(entries, device=device, precision="float16") for device in ("cpu", "gpu"))
        for scale, moves in ((2.0**24, False), (2.0**24, False), (2.0**10, True)):  # call by call, captured, replayed
            before = {name: np.array(value) for name, value in there.state.items()}
            for executor in (here, there):
                executor.state["loss_scale"] = scale
                executor.run(feed)
            assert {"update_all", "all_finite"} <= {s.node.op.name for s in there.program(feed).steps}
            for name, value in here.state.items():
                np.testing.assert_allclose(there.state[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
                if "loss_scale" not in name and "random" not in name:
                    assert np.array_equal(value, before[name]) != moves, name


@pytest.mark.parametrize(("model", "precision"), WITHOUT)
@pytest.mark.sampled(8)
def test_what_mixed_precision_costs_besides(model, precision):
    """No gradient is cast or unscaled in memory, and one operator looks at gradients."""
    low(precision)
    made, without = program(MODELS[model], precision), program(MODELS[model], precision, *MIXED)
    ops = [s.node.op.name for s in made.steps]
    assert ops.count("all_finite") == (precision == "float16")
    fewer, less = WITHOUT[model, precision]
    assert cost(without)[0] - cost(made)[0] >= fewer and cost(without)[1] - cost(made)[1] >= less


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model", [small_gpt, partial(resnet_block, 4, 6)], ids=["gpt", "resnet"])
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_gradients_of_16_bits_change_no_number(model, precision):
    """Training with the passes that read them as they were made, and without, but for sums, whose order follows from
    what is in a group with them."""
    low(precision)
    with fake_cupy.installed(), ht.scope("model"):
        loss, optimizer = model()
        entries = [loss, optimizer.minimize(loss)]
        made = [
            ht.Executor(entries, device="gpu", precision=precision, passes=passes_without(*left_out))
            for left_out in ((), MIXED)
        ]
        x, t = (made[0].subgraphs["default"].placeholders[name] for name in ("x", "t"))
        for _ in range(3):
            feed = {x: RNG.standard_normal(x.shape, np.float32), t: RNG.integers(0, 4, t.shape)}
            values = [executor.run(feed)[0] for executor in made]
            np.testing.assert_allclose(*values, rtol=1e-6)
        for name, value in made[0].state.items():
            np.testing.assert_allclose(value, made[1].state[name], rtol=2e-5, atol=1e-7, err_msg=name)

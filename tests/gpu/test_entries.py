"""Wide models whose entries are computed where they are summed, and whose rows are updated there, in the emulator."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.gpu_kernels import emulator
from hetu.gpu_kernels.emulator import Emulator
from hetu.gpu_kernels.launchers import bound
from hetu.gpu_kernels.machine import RecordingMachine

from ..cpu_kernels.test_entries import BAGS, OPTIMIZERS, deep, ffm, fm, graph, lacking, lr, of_stranger, same, two_lists
from . import fake_cupy
from .test_groups import passes_without

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")
MODELS = lr, fm, ffm, deep, of_stranger, two_lists, lacking
WAYS = [(model, "sgd") for model in MODELS] + [(fm, name) for name in OPTIMIZERS if name != "sgd"]


def learned(fetches, feed, *left_out, device="gpu", **options):
    """(losses, variables, names of operators) after three steps."""
    passes = passes_without(*left_out) if device == "gpu" else None
    executor = ht.Executor(fetches, device=device, passes=passes, seed=0, **options)
    losses = [float(executor.run(feed)[0]) for _ in range(3)]
    state = {v.name: np.asarray(executor.state[v]) for v in executor.variables}
    return losses, state, [step.node.op.name for step in executor.program(feed).steps]


def program(model, data, optimizer, dtype="float64"):
    """As the pass of GPUs leaves it."""
    fetches, feed = graph(model, dtype, data, OPTIMIZERS[optimizer]())
    return ht.Executor(fetches, passes=["simplify", "sparsify_updates", "fuse_entries"]).program(feed)


def texts(capability):
    """What a device of this capability compiles for some models."""
    machine = RecordingMachine()
    machine.capability = capability
    for model, optimizer, dtype in ((deep, "adam", "float32"), (ffm, "stranger", "float64")):
        for step in program(model, BAGS["many"], optimizer, dtype).steps:
            node = step.node
            if "_entries" in node.op.name:
                bound(machine, node.op, step.out, [np.zeros(i.shape, i.dtype) for i in node.inputs], node.attrs)
    return [*machine.texts]


@pytest.mark.parametrize(("model", "optimizer"), WAYS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.sampled(2)
def test_training_is_the_same(model, optimizer, dtype):
    """As without the pass, and as on a CPU; no update takes rows that lie in memory."""
    fetches, feed = graph(model, dtype, BAGS["hot"], OPTIMIZERS[optimizer]())
    with fake_cupy.installed():
        made, plain = learned(fetches, feed), learned(fetches, feed, "fuse_entries")
    near = 1e-6 if dtype == "float32" else 1e-13
    same(made, plain, near)
    same(made, learned(fetches, feed, device="cpu"), near)
    sums = plain[2].count("scatter_rows") + plain[2].count("scatter_add")
    updates = sum(name.endswith("_rows") and name != "scatter_rows" for name in plain[2])
    left = model in (of_stranger, two_lists, lacking)  # sums over the columns of an entry, rows of two lists in one
    assert made[2].count("summed_entries") == sums > 0 and made[2].count("update_entries") == updates - left


def test_under_a_condition():
    """Of a loss scale, with rows in 16 bits; a step whose gradients are not finite changes nothing."""
    fetches, feed = graph(fm, "float32", BAGS["hot"], OPTIMIZERS["adam"]())
    with fake_cupy.installed():
        ways = [learned(fetches, feed, *out, precision="float16") for out in ((), ["fuse_entries"])]
    same(*ways, 2e-3)
    assert ways[0][2].count("update_entries") == 2


@pytest.mark.parametrize("frequent", [0, 400, 1000])
def test_a_row_is_read_and_written_once(frequent):
    """In place, where entries read the row that they change, and beside; runs of no, several and many pieces."""
    rng = np.random.default_rng(frequent)
    ids = rng.integers(0, 9, 1000)
    ids[rng.permutation(1000)[:frequent]] = 4
    data = ids, np.arange(0, 1000, 10), rng.standard_normal(1000), ids % 3
    nodes = [step.node for step in program(fm, data, "adam").steps if step.node.op.name == "update_entries"]
    assert len(nodes) == 2 and {len(over) for node in nodes for over in node.op.inplace.values()} == {1, 2}
    for node in nodes:
        given = {i: np.asarray(1 + rng.random(i.shape), i.dtype) for i in node.inputs}
        given |= {i: rng.integers(0, 9, i.shape) for i in node.inputs if i.ndim and i.dtype.kind == "i"}
        want = node.op.forward(np, *(given[i] for i in node.inputs), **node.attrs)
        for beside in (True, False):
            outs = tuple(np.full_like(w, np.nan) if beside else given[i].copy() for w, i in zip(want, node.inputs))
            known = given if beside else given | dict(zip(node.inputs, outs))
            for call in bound(Emulator(), node.op, outs, [known[i] for i in node.inputs], node.attrs):
                call()
            for got, wanted in zip(outs, want, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-12)

"""Fused chains give what their operators give: in NumPy on the graph, bit for bit between kernels in the emulator."""

from __future__ import annotations

from operator import add, mul, neg, sub

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import Graph, topological
from hetu.core.op import Op
from hetu.core.simplify import interpret
from hetu.core.types import same_type
from hetu.gpu_kernels import emulator
from hetu.gpu_kernels.emulator import Emulator
from hetu.gpu_kernels.launchers import bound
from hetu.gpu_kernels.machine import RecordingMachine
from hetu.gpu_kernels.passes.fuse_kernels import LIMITS, fuse_kernels
from hetu.passes import simplify

compiled = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")
UNARY = [ht.exp, ht.tanh, ht.sigmoid, ht.square, ht.abs, ht.relu, neg, ht.silu, lambda x: ht.clip(x, -1.0, 2.0)]
BINARY = [add, sub, mul, ht.maximum, ht.minimum, lambda a, b: ht.where(a > b, a, b * 0.5)]


def names(outputs) -> list[str]:
    return [n.op.name for n in topological(outputs) if n.inputs]


REDUCTIONS = [ht.sum, ht.max, ht.min, lambda x, axis: ht.astype(ht.all(ht.isfinite(x), axis=axis), dtype=x.dtype)]


def random_graph(seed: int, dtype: str, reducing: float = 0.0):
    """Outputs and a feed; with the probability `reducing`, a step also reduces its matrix."""
    rng = np.random.default_rng(seed)
    shapes = [(4, 5), (5,), (4, 1), ()]
    nodes = [ht.placeholder(f"x{k}", s, dtype) for k, s in enumerate(shapes)]
    feed = {n: np.asarray(rng.uniform(-2, 2, n.shape), dtype) for n in nodes}
    reduced: list[ht.Node] = []
    for _ in range(12):
        if rng.random() < 0.4:
            made = UNARY[rng.integers(len(UNARY))](nodes[rng.integers(len(nodes))])
        else:
            a, b = (nodes[k] for k in rng.integers(len(nodes), size=2))
            made = BINARY[rng.integers(len(BINARY))](a, b)
        if rng.random() < 0.15:
            made = ht.astype(made, dtype="float32" if made.dtype != np.float32 else "float64")
        if made.shape and rng.random() < 0.1:
            made = ht.cumsum(made, axis=-1)  # which stays whole
        if made.ndim == 2 and reducing and rng.random() < reducing:
            axis = [0, 1, (0, 1)][rng.integers(3)]
            reduced.append(REDUCTIONS[rng.integers(len(REDUCTIONS))](made, axis=axis))
            if rng.random() < 0.3:
                nodes.append(reduced[-1][:, None] if axis == 1 else reduced[-1])
        nodes.append(made)
    return [nodes[-1], nodes[-4], *reduced], feed


@pytest.mark.parametrize("reducing", [0.0, 0.4])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sampled(8)
def test_random_graphs_keep_their_values(seed, dtype, reducing):
    outputs, feed = random_graph(seed, dtype, reducing)
    with np.errstate(all="ignore"):
        fused = fuse_kernels(outputs)
        Graph(fused).verify()
        for before, after, old, new in zip(outputs, fused, interpret(outputs, feed), interpret(fused, feed)):
            assert before.type == after.type
            np.testing.assert_array_equal(old, new)


@compiled
def test_a_fused_kernel_equals_its_single_kernels_bit_for_bit():
    """Unfused kernels round every value to memory; fused ones must round alike. Sums are added in another order."""
    graphs = [
        random_graph(seed, dtype, reducing)
        for seed in range(4)
        for dtype, reducing in (("float64", 0.0), ("float16", 0.0), ("float64", 0.4))
    ]
    both = [(graph, feed) for outputs, feed in graphs for graph in (outputs, fuse_kernels(outputs))]
    recorder = RecordingMachine()
    with np.errstate(all="ignore"):
        for graph, feed in both:
            launched(recorder, graph, feed)
        emulator.prepare(recorder.texts)
        results = [launched(Emulator(), graph, feed) for graph, feed in both]
    for (outputs, _), old, new in zip(graphs, results[::2], results[1::2]):
        tolerance = 1e-12 if any(n.op.name == "sum" for n in topological(outputs)) else 0
        for a, b in zip(old, new):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def launched(machine, outputs, feed):
    """The outputs, computed by kernels wherever there is one."""
    values = dict(feed)
    for node in topological(outputs):
        if node in values:
            continue
        if node.op.name == "item":
            values[node] = values[node.inputs[0]][node.attrs["index"]]
            continue
        arrays, types = [values[i] for i in node.inputs], node.type if isinstance(node.type, tuple) else (node.type,)
        outs = tuple(np.full(t.shape, 77, t.dtype) for t in types)
        out = outs if isinstance(node.type, tuple) else outs[0]
        calls = bound(machine, node.op, out, arrays, node.attrs)
        assert calls is not None or node.op.name != "fused"
        for call in calls or ():
            call()
        values[node] = out if calls is not None else interpret([node], values)[0]
    return [values[o] for o in outputs]


def test_one_kernel_for_an_activation_and_its_gradient():
    x = ht.placeholder("x", (100, 8))
    (dx,) = ht.gradients(ht.sum(ht.silu(x + 1.0)), [x])
    fused = fuse_kernels(simplify([dx]))
    assert names(fused).count("fused") == 1
    assert len(names(fused)) <= 3


def test_an_operator_of_the_same_name_is_fused_as_it_says():
    ours, x = ht.exp, ht.placeholder("x", (100,))
    other = Op(lambda xp, x: x * 3, name="exp", infer=same_type, code="y = x * 3", inplace={0: (0,)})
    fused = fuse_kernels([ours(other(x) + 1.0)])
    assert names(fused) == ["fused"]
    value = np.linspace(-1, 1, 100, dtype=np.float32)
    for found in (launched(Emulator(), fused, {x: value}), interpret(fused, {x: value})):
        np.testing.assert_allclose(found[0], np.exp(value * 3 + 1), rtol=1e-6)


def test_a_value_with_another_reader_reaches_memory():
    x = ht.placeholder("x", (3,))
    y = ht.exp(x * 2.0)
    fused = fuse_kernels([ht.tanh(y + 1.0), y])
    assert names(fused) == ["fused", "item", "item"]
    assert [len(n.type) for n in topological(fused) if n.op.name == "fused"] == [2]


def test_a_smaller_operand_is_computed_once_not_for_every_row():
    x, b = ht.placeholder("x", (100, 8)), ht.placeholder("b", (8,))
    assert names(fuse_kernels([ht.relu(x + ht.exp(b))])) == ["exp", "fused"]


def test_numbers_are_compiled_in_and_single_operators_stay():
    x = ht.placeholder("x", (3,))
    (fused,) = fuse_kernels([ht.maximum(x * 0.5, 0.0)])
    assert len(fused.inputs) == 1
    assert names(fuse_kernels([x * 0.5])) == ["multiply"]


def test_groups_are_bounded():
    x = ht.placeholder("x", (3,))
    y = x
    for _ in range(3 * LIMITS.lines):
        y = ht.tanh(y)
    groups = [n for n in topological(fuse_kernels([y])) if n.op.name == "fused"]
    assert [len(n.attrs["form"].lines) for n in groups] == [LIMITS.lines] * 3
    many = [ht.placeholder(f"p{k}", (3,)) for k in range(3 * LIMITS.arrays)]
    total = many[0]
    for p in many[1:]:
        total = total * p
    for node in topological(fuse_kernels([total])):
        assert len(node.inputs) <= LIMITS.arrays


def test_it_runs_in_a_program_on_a_cpu():
    x = ht.placeholder("x", (2, 4))
    y = ht.tanh(x * 2.0 + 1.0)
    (fused,) = fuse_kernels([y])
    value = np.arange(8, dtype=np.float32).reshape(2, 4) / 8
    np.testing.assert_allclose(ht.Executor([fused]).run({x: value})[0], ht.Executor([y]).run({x: value})[0], rtol=1e-6)

"""Fused chains give what their operators give: in NumPy on the graph, bit for bit between kernels in the emulator."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.gpu_kernels import emulator
from hetu.gpu_kernels.elementwise import elementwise
from hetu.gpu_kernels.emulator import Emulator
from hetu.gpu_kernels.machine import Recorder
from hetu.gpu_kernels.table import bound
from hetu.graph import Graph, topological
from hetu.interpret import interpret
from hetu.passes import simplify
from hetu.passes.fuse_elementwise import MOST_INPUTS, MOST_STEPS, fuse_elementwise, steps_of

compiled = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")
UNARY = [ht.exp, ht.tanh, ht.sigmoid, ht.square, ht.abs, ht.relu, ht.negative, ht.silu, lambda x: ht.clip(x, -1.0, 2.0)]
BINARY = [ht.add, ht.subtract, ht.multiply, ht.maximum, ht.minimum, lambda a, b: ht.where(ht.greater(a, b), a, b * 0.5)]


def names(outputs) -> list[str]:
    return [n.op.name for n in topological(outputs) if n.inputs]


def random_graph(seed: int, dtype: str):
    rng = np.random.default_rng(seed)
    shapes = [(4, 5), (5,), (4, 1), ()]
    nodes = [ht.placeholder(f"x{k}", s, dtype) for k, s in enumerate(shapes)]
    feed = {n: np.asarray(rng.uniform(-2, 2, n.shape), dtype) for n in nodes}
    for _ in range(12):
        if rng.random() < 0.4:
            made = UNARY[rng.integers(len(UNARY))](nodes[rng.integers(len(nodes))])
        else:
            a, b = (nodes[k] for k in rng.integers(len(nodes), size=2))
            made = BINARY[rng.integers(len(BINARY))](a, b)
        if rng.random() < 0.15:
            made = ht.astype(made, dtype="float32" if made.dtype != np.float32 else "float64")
        if made.shape and rng.random() < 0.1:
            made = ht.softmax(made)
        nodes.append(made)
    return [nodes[-1], nodes[-4]], feed


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_keep_their_values(seed, dtype):
    outputs, feed = random_graph(seed, dtype)
    with np.errstate(all="ignore"):
        fused = fuse_elementwise(outputs)
        Graph(fused).verify()
        for before, after, old, new in zip(outputs, fused, interpret(outputs, feed), interpret(fused, feed)):
            assert before.type == after.type
            np.testing.assert_array_equal(old, new)


@compiled
def test_a_fused_kernel_equals_its_single_kernels_bit_for_bit():
    """Unfused kernels round every value to memory; fused ones must round alike."""
    graphs = [random_graph(seed, dtype) for seed in range(4) for dtype in ("float64", "float16")]
    both = [(graph, feed) for outputs, feed in graphs for graph in (outputs, fuse_elementwise(outputs))]
    recorder = Recorder()
    with np.errstate(all="ignore"):
        for graph, feed in both:
            launched(recorder, graph, feed)
        emulator.prepare(recorder.texts)
        results = [launched(Emulator(), graph, feed) for graph, feed in both]
    for old, new in zip(results[::2], results[1::2]):
        for a, b in zip(old, new):
            np.testing.assert_array_equal(a, b)


def launched(machine, outputs, feed):
    """The outputs, computed by kernels wherever there is one."""
    values = dict(feed)
    for node in topological(outputs):
        if node in values:
            continue
        arrays, out = [values[i] for i in node.inputs], np.zeros(node.shape, node.dtype)
        if node.op.name == "fused_elementwise":
            calls = elementwise(machine, steps_of(node.attrs["lines"], [a.dtype for a in arrays]), out, arrays)
        else:
            calls = bound(machine, node.op.name, out, arrays, node.attrs, cuda=node.op.cuda, inputs=node.op.inputs)
        for call in calls or ():
            call()
        values[node] = out if calls is not None else np.asarray(interpret([node], values)[0])
    return [values[o] for o in outputs]


def test_one_kernel_for_an_activation_and_its_gradient():
    x = ht.placeholder("x", (None, 8))
    (dx,) = ht.gradients(ht.sum(ht.silu(x + 1.0)), [x])
    fused = fuse_elementwise(simplify([dx]))
    assert names(fused).count("fused_elementwise") == 1
    assert len(names(fused)) <= 3


def test_a_value_with_another_reader_reaches_memory():
    x = ht.placeholder("x", (3,))
    y = ht.exp(x * 2.0)
    fused = fuse_elementwise([ht.tanh(y + 1.0), y])
    assert names(fused) == ["fused_elementwise", "fused_elementwise"]
    assert names(fuse_elementwise([ht.tanh(y), y])) == ["fused_elementwise", "tanh"]


def test_a_smaller_operand_is_computed_once_not_for_every_row():
    x, b = ht.placeholder("x", (100, 8)), ht.placeholder("b", (8,))
    assert names(fuse_elementwise([ht.relu(x + ht.exp(b))])) == ["exp", "fused_elementwise"]


def test_numbers_are_compiled_in_and_single_operators_stay():
    x = ht.placeholder("x", (3,))
    (fused,) = fuse_elementwise([ht.maximum(x * 0.5, 0.0)])
    assert len(fused.inputs) == 1
    assert names(fuse_elementwise([x * 0.5])) == ["multiply"]


def test_groups_are_bounded():
    x = ht.placeholder("x", (3,))
    y = x
    for _ in range(3 * MOST_STEPS):
        y = ht.tanh(y)
    groups = [n for n in topological(fuse_elementwise([y])) if n.op.name == "fused_elementwise"]
    assert [len(n.attrs["lines"]) for n in groups] == [MOST_STEPS] * 3
    many = [ht.placeholder(f"p{k}", (3,)) for k in range(3 * MOST_INPUTS)]
    total = many[0]
    for p in many[1:]:
        total = total * p
    for node in topological(fuse_elementwise([total])):
        assert len(node.inputs) <= MOST_INPUTS


def test_it_runs_in_a_program_on_a_cpu():
    x = ht.placeholder("x", (None, 4))
    y = ht.tanh(x * 2.0 + 1.0)
    (fused,) = fuse_elementwise([y])
    value = np.arange(8, dtype=np.float32).reshape(2, 4) / 8
    np.testing.assert_array_equal(ht.Executor([fused]).run({x: value})[0], ht.Executor([y]).run({x: value})[0])

"""A stranger's operator that has the name of one of hetu's is another operator: no pass takes it for hetu's.

In each graph the operators of one name become twins that are twice as large, as a student's own `linear` may differ.
"""

from __future__ import annotations

import functools
import inspect

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError
from hetu.core.graph import OPS, Graph, rewrite
from hetu.core.op import LEAVES, TAKEN, Role
from hetu.core.passes import PASSES, applied
from hetu.core.simplify import interpret
from hetu.passes.mixed_precision import mixed_precision

from .samples import SAMPLES
from .test_lowering import MODELS
from .test_ops import as_tuple

BARE = {*LEAVES, Role.ITEM, Role.COMMUNICATION, Role.HINT}  # are no functions of arrays


@functools.cache
def twin(of):
    """An operator of the same name and types, twice as large; the opposite of booleans."""

    def forward(xp, *arrays, **attrs):
        made = of.forward(xp, *arrays, **attrs)
        large = [~m if m.dtype.kind == "b" else m + m for m in map(np.asarray, as_tuple(made))]
        return tuple(large) if isinstance(made, tuple) else large[0]

    forward.__signature__ = inspect.signature(of.forward)
    forward.__doc__ = "A twin."
    made = ht.op(forward, name=of.name, infer=of.infer_rule, dims=of.dims, differentiable=False)
    made.normalize_rule = of.normalize_rule
    assert OPS[of.name] is of
    return made


def with_twins(outputs, name):
    """The graph with twins of the operators of a name."""
    own = OPS[name]

    def rule(node, inputs):
        return twin(own).make(inputs, node.attrs) if node.op is own else None

    return rewrite(outputs, rule)


def check(outputs, feed):
    wanted = interpret(outputs, feed)
    found = interpret(applied(PASSES.values(), outputs), feed)
    for got, right in zip(found, wanted, strict=True):
        if np.asarray(right).dtype.kind in "fV":
            scale = np.abs(right[np.isfinite(right)]).max(initial=1e-3)
            np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5 * scale)
        else:
            np.testing.assert_array_equal(got, right)


NAMES = sorted({sample.op for sample in SAMPLES if sample.op in TAKEN})


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_the_table(name):
    for sample in (s for s in SAMPLES if s.op == name):
        arrays = sample.arrays()
        nodes = [ht.placeholder(f"x{k}", a.shape, a.dtype) for k, a in enumerate(arrays)]
        outputs = as_tuple(sample.build(*nodes))
        if any(n.op is OPS[name] and n.role not in BARE for n in Graph(tuple(outputs)).nodes):
            check(with_twins(outputs, name), dict(zip(nodes, arrays)))


@functools.cache
def training(model):
    """The loss and gradients of a model that patterns of passes are found in, and a feed."""
    (loss, *_), feed = MODELS[model](np.random.default_rng(0))
    variables = [v for v in Graph((loss,)).leaves("variable") if v.attrs["trainable"]]
    return [loss, *ht.gradients(loss, variables)], feed


PATTERNS = ("written", "unmasked", "residual")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", PATTERNS)
def test_patterns_of_a_model(model):
    outputs, feed = training(model)
    sizes = {(n.name, axis): size for n, a in feed.items() for axis, size in enumerate(a.shape)}
    outputs = ht.core.passes.specialize(outputs, sizes)
    graph = Graph(outputs)
    values = {n: feed[next(k for k in feed if k.name == n.name)] for n in graph.leaves("placeholder")}
    values |= {v: ht.core.state.initial_value(v, 0) for v in graph.leaves("variable")}
    names = {n.op.name for n in graph.nodes if n.role not in BARE and n.inputs and n.op.name in TAKEN}
    assert len(names) > 10
    for name in sorted(names):
        check(with_twins(outputs, name), values)


def test_the_condition_of_an_update():
    table, ids = ht.variable("table", np.ones((9, 4), np.float32)), ht.placeholder("ids", (3,), "int32")
    updates = ht.optim.SGD(0.5).minimize(ht.sum(ht.embedding(table, ids)))
    guarded = [ht.where(ids[0] > 0, updates[table], table)]
    check(with_twins(guarded, "where"), {ids: np.arange(3, dtype=np.int32), table: table.attrs["init"]})


@pytest.mark.parametrize(("name", "attrs"), [("matrix_transpose", {}), ("permute_dims", {"axes": (1, 0)})])
def test_what_a_product_in_16_bits_reads(name, attrs):
    y = OPS[name](ht.placeholder("x", (4, 3)), **attrs) @ ht.constant(np.ones((4, 2), np.float32))
    (made,), _ = mixed_precision(with_twins([y], name), {}, [], "float16")
    (own,) = (n for n in Graph((made,)).nodes if n.op is twin(OPS[name]))
    assert own.inputs[0].dtype == np.float32


def test_servers_know_a_rule_by_names_that_are_its_operators():
    own = twin(OPS["sqrt"])
    composition = ht.ops.composition.Composition
    x = ht.placeholder("x0", (1,), "float64")
    with pytest.raises(ArgumentError, match=r"sqrt at .* is another operator than that known by this name"):
        composition((x,), 1, [own(x)]).data()

"""Each simplification on the smallest graph that shows it, and the row form of sparse updates."""

from __future__ import annotations

from collections import Counter
from operator import neg

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import OPS, topological
from hetu.core.op import Op, Role
from hetu.core.passes import SOUGHT, enter
from hetu.core.simplify import interpret
from hetu.core.types import same_type
from hetu.gpu_kernels.passes.fuse_norm_relu import fuse_norm_relu
from hetu.passes import PASSES, resolve_training, simplify, specialize

from .apart import APART
from .samples import SAMPLES

X = (3, 4)


def ops_after(build, *passes):
    """Names of the operators that are left, leaves excluded."""
    outputs = (build(ht.placeholder("x", X), ht.placeholder("y", X)),)
    for run in passes or (simplify,):
        outputs = run(outputs)
    return Counter(n.op.name for n in topological(outputs) if n.op.name not in ("placeholder", "constant", "variable"))


@pytest.mark.parametrize(
    ("build", "left"),
    [
        (lambda x, y: x + 0.0, {}),
        (lambda x, y: 0.0 + x, {}),
        (lambda x, y: x - ht.zeros_like(x), {}),
        (lambda x, y: x * 1.0, {}),
        (lambda x, y: x / 1.0, {}),
        (lambda x, y: x * 0.0 + y, {}),
        (lambda x, y: neg(neg(x)), {}),
        (lambda x, y: ht.matrix_transpose(ht.matrix_transpose(x)), {}),
        (lambda x, y: ht.reshape(ht.reshape(x, (12,)), X), {}),
        (lambda x, y: ht.reshape(ht.reshape(x, (12,)), (4, 3)), {"reshape": 1}),
        (lambda x, y: ht.astype(x, "float32"), {}),
        (lambda x, y: ht.astype(ht.astype(x, "float64"), "float32"), {}),
        (lambda x, y: ht.astype(ht.astype(x, "float16"), "float32"), {"astype": 2}),
        (lambda x, y: ht.sum_to_like(x, y), {}),
        (lambda x, y: ht.broadcast_like(x, y), {}),
        (lambda x, y: ht.where(True, x, y), {}),
        (lambda x, y: ht.permute_dims(x, (0, 1)), {}),
        (lambda x, y: ht.permute_dims(x, (1, 0)), {"permute_dims": 1}),
        (lambda x, y: ht.exp(x) + ht.exp(x), {"exp": 1, "add": 1}),
        (lambda x, y: x + ht.exp(ht.constant([[1.0]])) * 2.0, {"add": 1}),
        (lambda x, y: ht.sum(x * 0.0), {}),
    ],
)
def test_what_is_left(build, left):
    assert ops_after(build) == left


def test_simplifying_keeps_a_negative_of_a_difference_from_zero():
    assert ops_after(lambda x, y: 0.0 - x) == {"negative": 1}


def test_random_numbers_are_never_merged():
    left = ops_after(lambda x, y: ht.uniform(X) + ht.uniform(X))
    assert left["add"] == 1 and sum(left.values()) == 3


def test_unknown_sizes_fold_once_they_are_known():
    x = ht.placeholder("x", (None, 4))
    outputs = specialize([ht.mean(x)], {("x", 0): 8})
    (mean,) = simplify(outputs)
    assert mean.op.name == "divide" and mean.inputs[1].attrs["value"] == 32


def test_sizes_that_do_not_fit_name_both():
    x, y = ht.placeholder("x", (None,)), ht.placeholder("y", (None,))
    with pytest.raises(ht.errors.ShapeError, match=r"\(2,\) and \(3,\)"):
        specialize([x + y], {("x", 0): 2, ("y", 0): 3})


def test_the_training_flag_follows_from_the_updates():
    x, w = ht.placeholder("x", X), ht.variable("w", np.zeros(X))
    y = ht.with_updates(ht.if_training(x * 2, x), {w: w + x})
    fetches, updates = resolve_training([y], {})
    assert fetches == (x,) and not updates
    step = ht.variable("step", 0.0, ())
    fetches, updates = resolve_training([y], {step: step + 1})
    assert fetches[0].op.name == "multiply" and set(updates) == {step, w}


def test_an_optimizer_and_a_layer_must_not_update_one_variable():
    x, w = ht.placeholder("x", X), ht.variable("w", np.zeros(X))
    y = ht.with_updates(x * w, {w: w + x})
    with pytest.raises(ht.errors.GraphError, match="by an optimizer and by its layer"):
        resolve_training([y], {w: w - x})


@pytest.mark.parametrize("lookups", [["int64"], ["int64", "int64"], ["int32", "int64"]], ids=str)
def test_updates_of_embedding_tables_become_row_updates(lookups):
    table, ids = ht.variable("table", np.ones((50, 3))), ht.placeholder("ids", (4,), "int64")
    loss = ht.sum(sum(ht.square(ht.embedding(table, ht.astype(ids + k, kind))) for k, kind in enumerate(lookups)))
    executors = {
        kept: ht.Executor([loss, ht.optim.SGD(0.1).minimize(loss)], passes=[p for p in APART if p != dropped])
        for kept, dropped in (("dense", "sparsify_updates"), ("rows", None))
    }
    names = {name: {s.node.op.name for s in ex.program({ids: [1, 2, 2, 7]}).steps} for name, ex in executors.items()}
    assert "sgd_rows" in names["rows"] and "scatter_rows" not in names["rows"]
    assert "scatter_rows" in names["dense"]
    for ex in executors.values():
        ex.run({ids: [1, 2, 2, 7]})
    np.testing.assert_allclose(executors["rows"].state["table"], executors["dense"].state["table"], rtol=1e-6)


def test_an_operator_brings_its_own_identity():
    mirror = Op(lambda xp, x: xp.flip(x, axis=0), name="mirror", infer=same_type)
    mirror.simplify(lambda node, x: x.inputs[0] if x.op is mirror else x[0])  # the second has another type, so no
    assert ops_after(lambda x, y: mirror(mirror(x))) == {}
    assert ops_after(lambda x, y: mirror(x)) == {"mirror": 1}


@pytest.mark.parametrize(
    ("seeks", "runs"),
    [((), 1), (["log"], 0), (["log", "exp"], 1), ([Role.SCATTER], 0), ([Role.PLACEHOLDER], 1)],
)
def test_a_pass_runs_where_something_is_that_it_seeks(seeks, runs):
    def added(outputs):
        seen.append(outputs)
        return tuple(outputs)

    seen = []
    x = ht.placeholder("x", X)
    enter(added, seeks=seeks)
    try:
        ht.Executor([ht.exp(x)], passes=["simplify", "added"]).run({x: np.ones(X)})
    finally:
        del PASSES["added"], SOUGHT[added]
    assert len(seen) == runs


@pytest.mark.parametrize(
    ("relued", "inputs"),
    [
        (lambda y, h: ht.relu(y), 7),  # the last is the bias, from which the mask follows
        (lambda y, h: ht.relu(y + h), 6),
        (lambda y, h: ht.relu(h), 6),
    ],
)
def test_a_gradient_knows_the_relu_behind_its_normalization(relued, inputs):
    rng = np.random.default_rng(0)
    x, h, g, scale, bias = (ht.placeholder(n, (5, 3) if n in "xhg" else (3,)) for n in ("x", "h", "g", "scale", "bias"))
    normal, *statistics = OPS["batch_norm_train"](x, scale, bias, axis=1)
    y = relued(normal, h)
    dx, *_ = OPS["batch_norm_dx"](g * (y > 0.0), x, scale, *statistics, axis=1)
    made = fuse_norm_relu((y, dx))
    (slope,) = (n for n in topological(made) if n.op.name == "batch_norm_relu_dx")
    assert len(slope.inputs) == inputs
    feed = {n: rng.standard_normal(n.shape).astype("float32") for n in (x, h, g, scale, bias)}
    for got, wanted in zip(interpret(made, feed), interpret((y, dx), feed)):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_an_unknown_pass_is_refused():
    with pytest.raises(ht.errors.UnknownNameError, match="did you mean 'simplify'"):
        ht.Executor([ht.placeholder("x", ())], passes=["simplfy"])


OPEN = [lambda x: ht.exp(x) * 0 + x, lambda x: ht.zeros_like(ht.exp(x)) + x, lambda x: ht.ones_like(x) * x,
        lambda x: 0 / ht.exp(x) + x, lambda x: ht.matmul(x, ht.matrix_transpose(x) * 0),
        lambda x: ht.sum(x * 0, axis=0), lambda x: ht.broadcast_like(1.0, x) * x,
        lambda x: ht.cumsum(x * 0, axis=0) + 0.0 * x]  # fmt: skip


@pytest.mark.parametrize("build", OPEN)
def test_a_graph_of_open_sizes_can_be_simplified_by_hand(build):
    x = ht.placeholder("x", (None, 3))
    whole = build(x)
    (less,) = simplify([whole])
    value = np.arange(6, dtype="float32").reshape(2, 3)
    assert np.array_equal(ht.evaluate(less, {x: value}), ht.evaluate(whole, {x: value}))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("sample", SAMPLES, ids=[f"{sample.op}-{k}" for k, sample in enumerate(SAMPLES)])
def test_every_operator_can_be_simplified_at_open_sizes(sample):
    """All that sizes which are not known yet do is that less is simplified."""
    arrays = [a.astype("float32") if a.dtype.kind == "f" else a for a in sample.arrays()]
    nodes = [ht.placeholder(f"x{k}", (None,) * a.ndim, str(a.dtype)) for k, a in enumerate(arrays)]
    try:
        made = sample.build(*nodes)
    except ht.errors.HetuError:
        return  # its sizes must be known
    outputs = [made] if isinstance(made, ht.Node) else [*made]
    assert [n.type for n in simplify([*outputs, *[o * 0 for o in outputs if o.dtype.kind == "f"]])][: len(outputs)] == [
        o.type for o in outputs
    ]

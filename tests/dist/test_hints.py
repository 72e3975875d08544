"""Strategies from a few hints: sequence and expert parallelism, groups of unequal size; hints that push backward."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import topological
from hetu.core.op import Role
from hetu.dist import SUM, Mesh, run_ranks, shard
from hetu.dist.cut.builders import TensorParallel
from hetu.dist.cut.heterogeneous import Heterogeneous
from hetu.dist.cut.rewrites import push_hints
from hetu.dist.cut.strategy import Kept, Strategy

from .models import MODELS, communication, losses
from .test_strategies import SPLIT, alone


def updates(loss):
    return ht.optim.SGD(0.1).minimize(loss)


# -- the collectives that a hint stands for ----------------------------------------------------------------------------

GROUP = Mesh((2,), ("group",))
KINDS = {  # layouts of x and of what follows from it
    "all_gather": (GROUP.layout(group=0), GROUP.layout()),
    "all_reduce": (GROUP.layout(group=SUM), GROUP.layout()),
    "reduce_scatter": (GROUP.layout(group=SUM), GROUP.layout(group=1)),
    "all_to_all": (GROUP.layout(group=0), GROUP.layout(group=1)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_hint_is_a_collective_and_so_is_its_gradient(kind):
    before, after = KINDS[kind]
    x, weight = ht.placeholder("x", (4, 6)), np.arange(24.0, dtype=np.float32).reshape(4, 6)
    given = shard(x, layout=before)
    y = shard(2.0 * given, layout=after)
    (gradient,) = ht.gradients(ht.sum(y * y * weight), [x])

    def run(comm):
        ex = ht.Executor([y, gradient], strategy=Strategy(GROUP.layout()), comm=comm)
        kinds = [step.node.op.name for step in ex.program({"x": weight}).steps if step.node.role is Role.COMMUNICATION]
        return kinds, *ex.run({"x": weight})

    for kinds, value, slope in run_ranks(2, run):
        assert kind in kinds
        np.testing.assert_array_equal(value, 2 * weight)
        np.testing.assert_array_equal(slope, 8 * weight * weight)


# -- sequence parallelism: between the tensor-parallel layers the residual stream is split along the sequence ---------


def sequence_block(ranks, hinted=True):
    mesh = Mesh((1, ranks), ("data", "tensor"))
    place = (lambda node: shard(node, layout=mesh.layout(tensor=1))) if hinted else lambda node: node
    x = ht.placeholder("x", (None, 8, 16))
    with ht.scope("block"):
        attention = ht.nn.MultiHeadAttention(16, 4, causal=True, name="attention")
        up, down = ht.nn.Linear(16, 64, activation=ht.gelu, name="up"), ht.nn.Linear(64, 16, name="down")
        h = place(x)
        h = place(h + ht.dropout(attention(ht.nn.LayerNorm(16)(h)), 0.1))
        y = place(h + down(up(ht.nn.LayerNorm(16)(h))))
    loss = ht.mean(y * y)
    feeds = [{"x": np.random.default_rng(0).normal(size=(3, 8, 16)).astype(np.float32)}] * 5
    return {"train": [loss, updates(loss)], "eval": [loss]}, feeds


def test_sequence_parallelism_gathers_and_scatters_instead_of_reducing():
    found = communication(lambda: sequence_block(2), TensorParallel(), 2, "eval")
    assert found == {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 1}  # the last is the loss


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, 4])
def test_sequence_parallelism_equals_one_process(ranks):
    wanted = losses(lambda: sequence_block(ranks, hinted=False), steps=5)
    for rank in run_ranks(ranks, lambda comm: losses(lambda: sequence_block(ranks), TensorParallel(), comm, steps=5)):
        np.testing.assert_allclose(rank, wanted, atol=1e-5, rtol=0)


def test_hints_hold_before_elementwise_operators():
    x = ht.placeholder("x", (4, 8))
    b = ht.variable("b", np.zeros(8, np.float32))
    hint = Mesh((2,), ("a",)).layout(a=0)
    product = ht.matmul(x, ht.variable("w", np.zeros((8, 8), np.float32)))
    (out,) = push_hints([shard(ht.relu(product + b), layout=hint)])
    names = [node.op.name for node in topological([out]) if node.inputs]
    assert names == ["matmul", "shard", "add", "shard", "relu", "shard"]
    assert push_hints([out]) == (out,)


@pytest.mark.parametrize(("ranks", "moved"), [((0,), False), ((0, 1), True), ((1, 0), True), ((0, 1, 2), False)])
def test_hints_stop_at_the_border_of_a_place(ranks, moved):
    """A value that is computed elsewhere lies there first."""
    x, hint = ht.placeholder("x", (4, 8)), Mesh((2,), ("a",)).layout(a=0)
    with ht.dist.place(ranks):
        h = ht.tanh(ht.exp(x))
    (out,) = push_hints([shard(h, layout=hint)])
    assert [node.op.name for node in topological([out])].count("shard") == (2 if moved else 1)


@pytest.mark.parametrize(
    ("dtype", "narrow", "copies"), [("float32", False, 1), ("float32", True, 3), ("float16", False, 3)]
)
def test_hints_stop_at_casts_that_widen(dtype, narrow, copies):
    """So sums are taken behind them."""
    x, hint = ht.placeholder("x", (4, 8), "float16"), Mesh((2,), ("a",)).layout(a=0)
    h = ht.exp(x)
    h = ht.astype(ht.tanh(h), dtype) if dtype == "float32" else ht.tanh(h) * np.float16(2)
    (out,) = push_hints([shard(h, layout=hint)], narrow=narrow)
    assert [node.op.name for node in topological([out])].count("shard") == copies


# -- expert parallelism: experts on ranks, tokens travel to them and back ----------------------------------------------


def mixture(ranks, hinted=True, experts=4, tokens=6, width=8, capacity=3):
    """Each group of tokens sends its tokens to experts by a fixed one-hot mask (GShard, Lepikhin 2020, fig. 3)."""
    mesh = Mesh((ranks,), ("expert",))
    place = (lambda node, axis: shard(node, layout=mesh.layout(expert=axis))) if hinted else lambda node, axis: node
    x, mask = ht.placeholder("x", (4, tokens, width)), ht.placeholder("mask", (4, tokens, experts, capacity))
    init = ht.init.normal(0.3)
    with ht.scope("mixture"):
        gate = ht.variable("gate", init, (width, experts))
        up, down = ht.variable("up", init, (experts, width, 16)), ht.variable("down", init, (experts, 16, width))
    weight = ht.softmax(ht.einsum("gtd,de->gte", x, gate))
    sent = place(ht.einsum("gtec,gtd->egcd", mask, x), 0)  # all to all
    done = ht.einsum("egcf,efd->egcd", ht.relu(ht.einsum("egcd,edf->egcf", sent, up)), down)
    combine = mask * ht.expand_dims(weight, axis=-1)
    y = ht.einsum("gtec,egcd->gtd", combine, place(done, 1))  # and back
    loss = ht.mean(ht.square(y - x))
    return {"train": [loss, updates(loss)], "eval": [loss]}


def expert_feeds(steps=5):
    rng = np.random.default_rng(3)
    made = []
    for _ in range(steps):
        x, mask = rng.normal(size=(4, 6, 8)).astype(np.float32), np.zeros((4, 6, 4, 3), np.float32)
        for group in mask:
            used = [0] * 4
            for token in group:
                expert = rng.integers(4)
                if used[expert] < 3:
                    token[expert, used[expert]] = 1
                    used[expert] += 1
        made.append({"x": x, "mask": mask})
    return made


def expert_strategy(ranks):
    mesh = Mesh((ranks,), ("expert",))
    kept = mesh.layout(expert=0)
    variables = {f"mixture/{name}": Kept(kept, kept) for name in ("up", "down")}
    return Strategy(mesh.layout(), variables, {"x": kept, "mask": kept})


@pytest.mark.parametrize("ranks", [2, 4])
def test_expert_parallelism_equals_one_process(ranks):
    feeds = expert_feeds()
    wanted = losses(lambda: (mixture(ranks, hinted=False), feeds), steps=5)
    run = lambda comm: losses(lambda: (mixture(ranks), feeds), expert_strategy(ranks), comm, steps=5)  # noqa: E731
    for rank in run_ranks(ranks, run):
        np.testing.assert_allclose(rank, wanted, atol=1e-5, rtol=0)


def test_tokens_travel_to_their_experts_and_back():
    found = communication(lambda: (mixture(2), expert_feeds(1)), expert_strategy(2), 2)
    # there and back, and the gradient of what came back; the tokens are data, so theirs stops at the experts
    assert found == {"all_to_all": 3, "all_reduce": 2}  # the gate's gradient and the loss


# -- groups of unequal size -----------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", MODELS)
def test_a_pair_and_a_single_rank_with_twice_and_once_the_batch(model):
    strategy = lambda: Heterogeneous([(0, 1), (2,)], shares=(2, 1), split=SPLIT)  # noqa: E731
    for rank in run_ranks(3, lambda comm: losses(MODELS[model], strategy(), comm)):
        np.testing.assert_allclose(rank, alone(model), atol=1e-5, rtol=0)

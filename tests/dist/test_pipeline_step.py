"""What a pipelined step communicates: shared and gathered weights once a step; hints hold inside stages."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import GraphError
from hetu.core.op import Role
from hetu.dist import Mesh, Pipeline, run_ranks, shard

from ..pairs import in_turn
from .models import communicating, communication, losses
from .test_pipeline import shared, staged_feed, staged_mlp

RANKS = {"shared": (shared, 2, {}), "zero3": (lambda: staged_mlp(2), 4, {"data": 2, "zero": 3})}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", RANKS)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_weights_and_their_gradients_move_once_a_step_however_many_microbatches(case, schedule):
    model, ranks, options = RANKS[case]

    def moved(microbatches):
        def run(comm):
            loss, updates = model()
            strategy = Pipeline(2, microbatches, schedule, **options).build([loss, *updates.values()], ranks)
            strategy.bucket_bytes = 0
            ex = ht.Executor([loss, updates], strategy=strategy, comm=comm)
            nodes = [s.node for s in ex.program(staged_feed()).steps if s.node.role is Role.COMMUNICATION]
            return Counter((n.op.name, n.attrs["shape"]) for n in nodes if n.attrs["shape"] in ((6, 6), (6,)))

        return run_ranks(ranks, run)

    few = moved(2)
    assert few == moved(8)
    if case == "shared":  # the weight there, its gradient back; the weight's gradient is formed where it is kept
        assert few[0] == {("send_recv", (6, 6)): 3}
    else:
        assert few[0] == {("all_gather", (6, 6)): 1, ("all_gather", (6,)): 1} | {
            ("reduce_scatter", shape): 1 for shape in ((6, 6), (6,))
        }


def deep(rate):
    """Four blocks, whose last operators are a residual sum of what is dropped out."""
    h = ht.placeholder("x", (None, 6, 8))
    with ht.scope("deep"):
        h = ht.nn.Linear(8, 8, name="first")(h)
        for k in range(4):
            h = ht.nn.TransformerBlock(8, 2, causal=True, dropout=rate, name=f"block_{k}")(h)
        loss = ht.mean(h * h)
    return {"train": [loss, ht.optim.SGD(0.1).minimize(loss)]}, [{"x": np.ones((4, 6, 8), np.float32)}]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("stages", "rate"), in_turn(2, [2, 4], [0.0, 0.1]))
def test_a_gradient_and_what_dropout_makes_of_it_cross_a_border_once(stages, rate):
    nodes = communicating(lambda: deep(rate), Pipeline(stages, 1), stages)
    assert sum(n.op.name == "send_recv" and n.attrs["shape"] != () for n in nodes) == 2  # h there, its gradient back


# -- hints -----------------------------------------------------------------------------------------------------------


def sequences(hinted=True, axis=1, ranks=(0, 1)):
    """Two stages of a block each, between whose tensor-parallel layers the sequence is split."""
    mesh = Mesh((1, 2), ("data", "tensor"), ranks)
    place = (lambda node: shard(node, layout=mesh.layout(tensor=axis))) if hinted else lambda node: node
    h = ht.placeholder("x", (None, 8, 16))
    with ht.scope("sequences"):
        for stage in range(2):
            with ht.dist.stage(stage):
                attention = ht.nn.MultiHeadAttention(16, 4, causal=True, name="attention")
                up, down = ht.nn.Linear(16, 64, activation=ht.gelu, name="up"), ht.nn.Linear(64, 16, name="down")
                h = place(h)
                h = place(h + ht.dropout(attention(ht.nn.LayerNorm(16)(h)), 0.1))
                h = place(h + down(up(ht.nn.LayerNorm(16)(h))))
        loss = ht.mean(h * h)
    feeds = [{"x": np.random.default_rng(0).normal(size=(4, 8, 16)).astype(np.float32)}] * 5
    return {"train": [loss, ht.optim.SGD(0.1).minimize(loss)], "eval": [loss]}, feeds


SPLIT = ht.dist.MEGATRON | {"*up*/weight": 1, "*up*/bias": 0, "*down*/weight": 0}  # the second is called up_1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.nightly), "pipedream"])
def test_sequence_parallelism_inside_stages(schedule):
    build = lambda: Pipeline(2, 2, schedule, tensor=2, split=SPLIT)  # noqa: E731
    plain = lambda: sequences(hinted=False)  # noqa: E731
    if schedule == "pipedream":  # its updates come sooner than those of one process
        wanted = run_ranks(4, lambda comm: losses(plain, build(), comm, steps=5))[0]
    else:
        wanted = losses(plain, steps=5)
    for found in run_ranks(4, lambda comm: losses(sequences, build(), comm, steps=5), rendezvous=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)


def test_hints_in_a_stage_gather_and_scatter_instead_of_reducing():
    found = communication(sequences, Pipeline(2, 2, tensor=2, split=SPLIT), 4, "eval")
    # two of each in a block, once a micro-batch; the border, and the loss for all
    assert found == {"all_gather": 4, "reduce_scatter": 4, "send_recv": 2, "batched": 1}


def test_a_hint_for_more_ranks_than_a_stage_has():
    model = lambda: sequences(ranks=(2, 3))  # noqa: E731
    with pytest.raises(GraphError, match=r"<shard .* uses rank 3 of a stage of 2[\s\S]*number the ranks of its stage"):
        run_ranks(4, lambda comm: losses(model, Pipeline(2, 2, tensor=2), comm, steps=1))

"""Every strategy trains as one process does: equal losses, and exactly the communication it should need."""

from __future__ import annotations

import functools
from collections import Counter
from itertools import product

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import GraphError
from hetu.core.graph import rewrite, tagged
from hetu.core.memory import in_line
from hetu.core.op import Role
from hetu.core.passes import PASSES
from hetu.dist import Mesh, Pipeline, plan, run_ranks
from hetu.dist.cut import partition
from hetu.dist.cut.builders import MEGATRON, DataParallel, Parallel, RuleBook, TensorParallel, ZeRO
from hetu.dist.cut.strategy import Builder, Kept, Strategy
from hetu.dist.layout.deduce import deduce

from ..pairs import in_turn, nightly, pairwise
from .models import MODELS, batches, communicating, communication, losses, mlp, transformer, uniform
from .test_launch import heturun

CHANNELS = RuleBook({"cnn/conv2d/weight": 0, "cnn/conv2d/bias": 0, "cnn/batch_norm/*": 0, "cnn/linear/weight": 0})
SPLIT = MEGATRON | CHANNELS
STRATEGIES = uniform(SPLIT)
CHOICES = (STRATEGIES, MODELS, (2, 4))
MORE = [
    ("data", "mlp", 3),
    ("zero1", "mlp", 3),
    ("tensor", "mlp", 8),
    ("data x tensor", "transformer", 8),
    ("zero3", "mlp", 5),
]
EIGHT = [("data", "cnn", 8), ("zero3", "transformer", 8)]
CASES = [*product(*CHOICES), *MORE, *EIGHT]


@functools.cache
def alone(model: str) -> list[float]:
    return losses(MODELS[model])


@pytest.mark.parametrize(("strategy", "model", "ranks"), [*pairwise(*CHOICES), *MORE, *nightly(EIGHT)])
@pytest.mark.sampled(8)
def test_losses_equal_those_of_one_process(strategy, model, ranks):
    found = run_ranks(ranks, lambda comm: losses(MODELS[model], STRATEGIES[strategy](), comm))
    for rank in found:
        np.testing.assert_allclose(rank, alone(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize("strategy", [*STRATEGIES, "pipeline"])
def test_values_of_nodes_that_read_a_part_of_the_graph(strategy):
    def values(comm):
        given = None if comm.world_size == 1 else Pipeline(2, 2) if strategy == "pipeline" else STRATEGIES[strategy]()
        x, first, last = ht.placeholder("x", (None, 4)), ht.nn.Linear(4, 4), ht.nn.Linear(4, 2)
        h = last(ht.relu(first(x)))
        w, v = first.variables[0], last.variables[0]
        ex = ht.Executor([ht.optim.Adam(0.1).minimize(ht.mean(h * h))], strategy=given, comm=comm)
        fed = {"x": np.arange(16.0).reshape(4, 4)}
        ex.run(fed)
        return [float(ex.value(node, fed if node is h else None).sum()) for node in (v * 3.0, w, ht.sum(w) + v, h)]

    for rank in run_ranks(2, values):
        np.testing.assert_allclose(rank, run_ranks(1, values)[0], atol=1e-4, rtol=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", ["data", "zero3", "data x tensor"])
def test_batches_of_other_sizes_even_fewer_than_ranks(strategy):
    def values(comm=None):
        graph, feeds = mlp()
        ex = ht.Executor(graph, strategy=STRATEGIES[strategy]() if comm else None, comm=comm)
        cut = [{name: value[:size] for name, value in feeds[0].items()} for size in (12, 7, 2, 1, 12)]
        return [float(ex.run("train", feed)[0]) for feed in cut]

    for rank in run_ranks(4, values):
        np.testing.assert_allclose(rank, values(), atol=1e-5, rtol=0)


def test_explaining_passes_does_not_change_when_they_run(capsys):
    """One that simplifies must not see a rank's own graph, where it could drop what the other ranks wait for."""

    def ops(comm, **options):
        fetches, feeds = mlp()
        program = ht.Executor(fetches, strategy=DataParallel(), comm=comm, **options).program("train", feeds[0])
        return [step.node.op.name for step in program.steps]

    plain, told = (run_ranks(2, functools.partial(ops, **options)) for options in ({}, {"explain": True}))
    assert plain == told
    assert "simplify: " in capsys.readouterr().out


# -- what passes join must not cross the one order of communication ----------------------------------------------------


def watched():
    """What fetches a new value, such as its norm, communicates between one update and the gradient of another."""
    graph, feeds = mlp()
    loss, updates = graph["train"]
    norms = [ht.sqrt(ht.sum(updates[v] * updates[v])) for v in updates.gradients]
    return {"train": [loss, *norms, updates]}, feeds


JOINED = {**MODELS, "watched": watched}


@pytest.mark.parametrize(("strategy", "model"), in_turn(3, STRATEGIES, JOINED))
@pytest.mark.sampled(8)
def test_passes_of_every_device_at_once_leave_the_losses_alone(strategy, model):
    wanted = losses(JOINED[model], steps=3)
    passes = [*PASSES]
    for found in run_ranks(4, lambda c: losses(JOINED[model], STRATEGIES[strategy](), c, 3, passes=passes)):
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)


def test_a_pass_that_crosses_the_order_of_communication_is_an_error(monkeypatch):
    def crossed(outputs):
        first, *_, last = [n for n in in_line(outputs) if n.op.collective == "all_reduce" and n.ndim]
        found = rewrite(
            (last, *outputs), lambda n, inputs: n.op.make((inputs[0] + ht.sum(last),), n.attrs) if n is first else None
        )
        return found[1:]

    monkeypatch.setitem(PASSES, "crossed", crossed)
    graph, _ = mlp()
    strategy = DataParallel().build([graph["train"][0], *graph["train"][1].values()], 2)
    strategy.bucket_bytes = 0
    with pytest.raises(
        GraphError, match=r"<all_reduce .* waits for communication that all ranks do after it"
    ) as caught:
        run_ranks(2, lambda comm: losses(mlp, strategy, comm, passes=["crossed"]))
    assert "leave out the pass" in caught.value.fix


def test_data_parallelism_reduces_every_gradient_once():
    assert communication(mlp, DataParallel(), 4) == {"all_reduce": 4 + 1}  # and the loss
    # the table of the embedding is smaller than the looked-up rows together: it is added up with counts of the lookups
    assert communication(transformer, DataParallel(), 2) == {"all_reduce": 18 + 1 + 2}
    # of a larger one the gradients of the rows are gathered instead, and every rank has all ids
    large = functools.partial(transformer, vocabulary=200)
    assert communication(large, DataParallel(), 2) == {"all_reduce": 18 + 1, "all_gather": 1}


def normalized(depth: int):
    """A chain of layers with batch normalization, each of which is split only once the one before it is."""
    x, t = ht.placeholder("x", (None, 6)), ht.placeholder("t", (None,), "int64")
    with ht.scope("deep"):
        for _ in range(depth):
            x = ht.relu(ht.nn.BatchNorm(6)(ht.nn.Linear(6, 6)(x)))
        loss = ht.mean(ht.softmax_cross_entropy(x, t))
        return {"train": [loss, ht.optim.Momentum(0.05).minimize(loss)]}, batches((6,), 6)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("strategy", ["data", "zero3"])
@pytest.mark.parametrize("depth", [3, 20])
def test_any_number_of_layers_one_behind_the_other_is_split(strategy, depth, monkeypatch):
    """All at once: to take each apart once the one before it was made the time to compile quadratic in their number."""
    model, walks = functools.partial(normalized, depth), list[int]()
    monkeypatch.setattr(partition, "deduce", lambda *a, **k: walks.append(0) or deduce(*a, **k))
    wanted = losses(model, steps=2)
    for found in run_ranks(2, lambda comm: losses(model, STRATEGIES[strategy](), comm, steps=2)):
        np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)
    assert len(walks) == 2 * 2  # of each rank, and once more to see that nothing is left


def moved(move):
    """A value that is moved many times; the loss reads the moved ones as a whole and in parts."""
    x = ht.placeholder("x", (8, 8))
    with ht.scope("moved"):
        y = ht.nn.Linear(8, 8)(x)
    for _ in range(1200):
        y = move(y)
    loss = ht.mean((y - x) ** 2)
    return {"train": [loss, ht.optim.SGD(0.1).minimize(loss)]}, [{"x": np.ones((8, 8), np.float32)}]


MOVES = {
    "rolled": lambda y: ht.roll(y, 1, axis=1),
    "turned": lambda y: ht.reshape(ht.permute_dims(ht.reshape(y, (2, 4, 8)), (1, 0, 2)), (8, 8)),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("strategy", ["data", "rows"])
def test_any_number_of_moves_one_behind_the_other_is_laid_out(strategy, move):
    model = functools.partial(moved, MOVES[move])
    strategy = {"data": DataParallel(), "rows": Parallel(data=1, tensor=2, split={"*weight": 0})}[strategy]
    wanted = losses(model, steps=1)
    for found in run_ranks(2, lambda comm: losses(model, strategy, comm, steps=1)):
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)


def test_batch_norm_over_ranks_adds_two_reductions_forward_and_none_backward():
    assert communication(MODELS["cnn"], DataParallel(), 2) == {"all_reduce": 6 + 2 + 1}


def block():
    x = ht.placeholder("x", (None, 6, 16))
    scale = ht.variable("scale", ht.init.ones, (16,))  # so that a gradient flows back through the whole block
    y = ht.nn.TransformerBlock(16, 4, causal=True, name="block")(x * scale)
    loss = ht.mean(y * y)
    return {"train": [loss, ht.optim.SGD(0.1).minimize(loss)], "eval": [y]}, [{"x": np.ones((4, 6, 16), np.float32)}]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_megatron_block_has_two_reductions_forward_and_two_backward(ranks):
    assert communication(block, TensorParallel(), ranks, "eval") == {"all_reduce": 2}
    assert communication(block, TensorParallel(), ranks) == {"all_reduce": 4}


def test_a_vocabulary_over_ranks_adds_one_reduction_for_the_table_and_three_for_the_cross_entropy():
    nodes = communicating(transformer, TensorParallel(), 2)
    rows, features = 12 * 6, 12 * 6 * 16
    assert [node.op.name for node in nodes] == ["all_reduce"] * 9
    # table, attention, feed-forward; maximum, sum and own class of the loss; back through head, feed-forward, attention
    assert [int(node.tensor.size) for node in nodes] == [features] * 3 + [rows] * 3 + [features] * 3


def tied(vocabulary=20):
    """The table of tokens is the matrix of the last layer too."""
    ids, t = ht.placeholder("x", (None, 6), "int64"), ht.placeholder("t", (None, 6), "int64")
    with ht.scope("gpt"):
        embedding = ht.nn.Embedding(vocabulary, 16)
        h = ht.nn.TransformerBlock(16, 4, causal=True, name="block")(embedding(ids))
        y = ht.matmul(h, ht.matrix_transpose(embedding.weight))
        loss = ht.mean(ht.softmax_cross_entropy(y, t))
        updates = ht.optim.Adam(0.01, clip_norm=0.5).minimize(loss)
    return {"train": [loss, updates], "eval": [y]}, batches((6,), vocabulary, ids=True)


TIED = [("tensor", 2), ("zero1", 2), ("zero3 x tensor", 4), ("data", 3)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("strategy", "ranks"), TIED)
def test_tied_weights_and_clipped_gradients(strategy, ranks):
    wanted = losses(tied, steps=6)
    for rank in run_ranks(ranks, lambda comm: losses(tied, STRATEGIES[strategy](), comm, steps=6)):
        np.testing.assert_allclose(rank, wanted, atol=1e-5, rtol=0)


def test_bytes_of_a_vocabulary_over_ranks_do_not_grow_with_it():
    def moved(vocabulary):
        nodes = communicating(lambda: transformer(vocabulary=vocabulary), TensorParallel(), 2)
        return sum(plan(n.attrs["src"], n.attrs["dst"], n.attrs["shape"]).moved for n in nodes)

    assert moved(20) == moved(2000)


def test_channels_over_ranks_need_one_reduction_of_the_logits_and_the_running_statistics():
    found = communication(MODELS["cnn"], STRATEGIES["tensor"](), 2)
    assert found == {"all_reduce": 1, "all_gather": 2}  # each channel is normalized where it is


def test_data_x_tensor_parallelism_adds_up():
    assert communication(transformer, Parallel(tensor=2), 4) == {"all_reduce": 9 + 18 + 1 + 2}
    large = functools.partial(transformer, vocabulary=200)
    assert communication(large, Parallel(tensor=2), 4) == {"all_reduce": 9 + 18 + 1, "all_gather": 1}


# -- 16 bits -----------------------------------------------------------------------------------------------------------


def half_sums(model, strategy, ranks):
    """How many numbers the gradients have whose sums between ranks are taken in float16, and in float32."""
    nodes = communicating(model, strategy, ranks, precision="float16")
    found = Counter()
    for node in nodes:
        if node.op.name in ("all_reduce", "reduce_scatter") and node.ndim:
            found[node.dtype.name] += plan(node.attrs["src"], node.attrs["dst"], node.attrs["shape"]).moved
    return found


class Narrow(Builder):
    """Another builder's strategy, with sums in 16 bits where numbers have 16."""

    def __init__(self, builder):
        self.builder = builder

    def build(self, outputs, world_size):
        strategy = self.builder.build(outputs, world_size)
        strategy.narrow_sums = True
        return strategy


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("strategy", "model"), in_turn(2, ["data", "zero1", "zero2", "zero3"], MODELS))
def test_gradients_are_summed_in_32_bits_unless_a_strategy_says_narrow(strategy, model):
    wide, narrow = (half_sums(MODELS[model], w(STRATEGIES[strategy]()), 2) for w in (lambda built: built, Narrow))
    assert "float16" not in wide and narrow["float16"] > 0
    assert wide.total() == narrow.total()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("strategy", "way"), in_turn(2, ["data", "zero3"], [lambda built: built, Narrow]))
def test_either_way_trains_as_one_process_does(strategy, way):
    wanted = losses(transformer, steps=5, precision="float16")
    half = functools.partial(losses, transformer, way(STRATEGIES[strategy]()), steps=5, precision="float16")
    for found in run_ranks(2, lambda comm: half(comm=comm)):
        np.testing.assert_allclose(found, wanted, atol=1e-2, rtol=0)


@pytest.mark.parametrize(("way", "total"), [(lambda built: built, 2049), (Narrow, 2048)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_sum_that_16_bits_cannot_hold(way, total, accumulate):
    """The terms of two ranks, or of two micro-batches, are 2048 and 1."""
    x = ht.placeholder("x", (None, 1))
    product = ht.matmul(ht.matrix_transpose(ht.astype(x, "float16")), ht.astype(ht.ones_like(x), "float16"))
    w = ht.variable("w", 0.0, (1, 1))
    updates = ht.optim.SGD(1.0).apply({w: ht.astype(product, "float32")})
    ranks = 2 // accumulate

    def step(comm):
        ex = ht.Executor([updates], strategy=way(DataParallel(accumulate=accumulate)), comm=comm)
        ex.run({x: [[2048.0], [1.0]]})
        return float(ex.state[w][0, 0])

    assert run_ranks(ranks, step) == [-total] * ranks


ONE = Mesh((2,), ("d",))
READERS = {"wide": ("float32",), "narrow": ("float16",), "both": ("float16", "float32")}


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("name", READERS)
def test_a_sum_is_taken_in_16_bits_if_anything_reads_it_so(name, grads):
    """Once for all readers: in both widths it would be three times the bytes, in 32 twice."""
    x, w = ht.placeholder("x", (4, 6), "float16"), ht.variable("w", np.ones((6, 2), "float16"), (6, 2), "float16")
    with tagged(gradient=grads):
        product = x @ w
        read = [ht.exp(product) if d == "float16" else ht.exp(ht.astype(product, d)) for d in READERS[name]]
    strategy = Strategy(ONE.layout(), {"w": Kept(ONE.layout(d=0), ONE.layout(d=0))})

    def sums(comm):
        ex = ht.Executor(read, strategy=strategy, comm=comm)
        program = ex.program({"x": np.ones((4, 6), "float16")})
        return [s.node.dtype.name for s in program.steps if s.node.role is Role.COMMUNICATION]

    assert run_ranks(2, sums) == [[READERS[name][0]]] * 2


def test_activations_of_tensor_parallelism_that_layers_read_in_16_bits_are_summed_in_16():
    nodes = communicating(transformer, TensorParallel(), 2, precision="float16")
    features = [n.dtype.name for n in nodes if n.ndim == 3 and n.shape[-1] == 16]
    # the table; attention and feed-forward, to which biases are added; back through the head, read by dropout as well,
    # and through feed-forward and attention, read by norms alone
    assert features == ["float32", "float16", "float16", "float16", "float32", "float32"]


def even_mlp(clip_norm=None):
    x, t = ht.placeholder("x", (None, 8)), ht.placeholder("t", (None,), "int64")
    h = ht.nn.Linear(8, 16, activation=ht.relu, name="a")(x)
    h = ht.nn.Linear(16, 16, activation=ht.relu, name="b")(h)
    loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(16, 4, name="c")(h), t))
    feeds = [{"x": np.zeros((12, 8), np.float32), "t": np.zeros(12, np.int64)}]
    optimizer = ht.optim.Momentum(0.1, clip_norm=clip_norm)
    return {"train": [loss, optimizer.minimize(loss)], "eval": [loss]}, feeds


def test_zero_1_scatters_gradients_and_gathers_variables():
    assert communication(even_mlp, ZeRO(1), 4) == {"reduce_scatter": 6, "all_gather": 6, "all_reduce": 1}


def test_zero_3_gathers_each_variable_forward_and_again_where_backward_reads_it():
    # weights b and c are read by the gradient of their inputs; a's input needs none, and no gradient reads a bias
    assert communication(even_mlp, ZeRO(3), 4) == {"reduce_scatter": 6, "all_gather": 6 + 2, "all_reduce": 1}


def test_clipping_by_the_norm_of_all_gradients_adds_one_number():
    found = communication(lambda: even_mlp(clip_norm=1.0), ZeRO(1), 4)
    assert found == {"reduce_scatter": 6, "all_gather": 6, "all_reduce": 1 + 1}


@pytest.mark.parametrize(("stage", "share"), [(0, 1.0), (1, 0.625), (3, 0.25)])
def test_zero_divides_what_a_rank_keeps(stage, share):
    """Variables are half of it, momentum the other half."""

    def kept(comm):
        graph, _ = even_mlp()
        strategy = ZeRO(stage) if stage else DataParallel()
        state = ht.Executor({"train": graph["train"]}, strategy=strategy, comm=comm).state
        return sum(state[name].nbytes for name in state if state[name].ndim)

    graph, _ = even_mlp()
    state = ht.Executor({"train": graph["train"]}).state
    assert run_ranks(4, kept) == [share * sum(state[name].nbytes for name in state if state[name].ndim)] * 4


@pytest.mark.parametrize(
    ("ranks", "strategy", "model"),
    [(2, "zero3", "mlp"), pytest.param(4, "data x tensor", "transformer", marks=pytest.mark.nightly)],
)
def test_processes_give_the_same_as_threads(ranks, strategy, model):
    job = heturun("-w", ranks, "python", "-m", "tests.dist.train", strategy, model)
    assert job.returncode == 0, job.stderr
    for rank in range(ranks):
        assert f"rank {rank}: 8 losses equal those of one process" in job.stdout

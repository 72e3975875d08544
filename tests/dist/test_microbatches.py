"""Micro-batches as batches of their own: every model trains as one process does that takes them one after the other.

That process is NumPy around plain programs: it asks for the gradients of each micro-batch, averages them, and updates.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, GraphError, ShapeError
from hetu.core.graph import topological
from hetu.core.op import Role
from hetu.dist import ExpertParallel, Pipeline, Strategy, run_ranks, stage
from hetu.dist.cut.builders import DataParallel, Parallel, TensorParallel, ZeRO

from ..pairs import in_turn
from . import models
from .models import batches, communication, losses
from .test_strategies import SPLIT

RATE, LIMIT, STEPS = 0.2, 0.5, 4
RUN = 40  # bits between the random numbers of two micro-batches


class Descent(ht.optim.SGD):
    """Plain descent, so that its step is a line of NumPy."""

    def __init__(self, clip_norm: float | None = None) -> None:
        super().__init__(RATE, clip_norm=clip_norm)


def small(loss_of, shape=(10,), classes=5):
    """A model of two layers; `loss_of(h, y, t)` makes its loss of hidden values, logits and classes."""

    def model(optimizer):
        x, t = ht.placeholder("x", (None, *shape)), ht.placeholder("t", (None,), "int64")
        with ht.scope("small"):
            h = ht.tanh(ht.nn.Linear(10, 16, name="up")(x))
            y = ht.nn.Linear(16, 5, name="down")(h)
            loss = loss_of(h, y, t)
            return {"train": [loss, optimizer.minimize(loss)], "eval": [y]}, batches(shape, classes)

    return model


def entropy(y, t):
    return ht.mean(ht.softmax_cross_entropy(y, t))


def with_penalty(h, y, t):
    """The squared norm of the gradient of all weights, itself differentiated: of a batch, no sum over its examples."""
    loss = entropy(y, t)
    weights = [n for n in topological([loss]) if n.role is Role.VARIABLE]
    return loss + 0.1 * sum(ht.sum(g * g) for g in ht.gradients(loss, weights))


def weight(h):
    """The first of the trained values that `h` is made of."""
    return next(n for n in topological([h]) if n.role is Role.VARIABLE and n.ndim == 2)


def routed(optimizer, trained_well=False):
    """Top-2 experts, whose room for tokens is that of a batch.

    To train them well, gates see jitter, room follows from the batch, experts drop out, and loads are balanced.
    """
    x, t = ht.placeholder("x", (None, 10)), ht.placeholder("t", (None,), "int64")
    with ht.scope("routed"):
        seen = x * ht.uniform(x.shape, 0.9, 1.1) if trained_well else x
        scores = ht.softmax(ht.nn.Linear(10, 4, name="gate")(seen))
        values, experts = ht.topk(scores, k=2)
        room = x.shape[0] // 2 if trained_well else 2
        slots = ht.moe_slots(experts, count=4, capacity=room)
        rooms = ht.moe_dispatch(x, slots, ht.ones_like(values), experts=4, capacity=room)
        up = ht.variable("experts/up", ht.init.xavier_uniform, (4, 10, 8))
        down = ht.variable("experts/down", ht.init.xavier_uniform, (4, 8, 10))
        hidden = ht.dropout(ht.relu(rooms @ up), 0.2 * trained_well)
        h = x + ht.moe_combine(hidden @ down, slots, values)
        y = ht.nn.Linear(10, 5, name="head")(h)
        loss = entropy(y, t)
        if trained_well:  # W. Fedus et al., "Switch Transformers", 2021
            loads = ht.mean(ht.one_hot(experts[:, 0], depth=4), axis=0)
            loss = loss + 0.5 * ht.sum(loads * ht.mean(scores, axis=0))
        return {"train": [loss, optimizer.minimize(loss)], "eval": [y]}, batches((10,), 5)


def noisy(optimizer):
    """Numbers drawn for a batch, beside those of dropout."""
    return small(lambda h, y, t: entropy(ht.dropout(y, 0.2) + 0.5 * ht.normal(y.shape), t))(optimizer)


MODELS = {
    "mlp": models.mlp,
    "cnn": models.cnn,
    "transformer": models.transformer,
    "mean of the batch": small(lambda h, y, t: entropy(y, t) + ht.mean((h - ht.mean(h, axis=0)) ** 2)),
    "largest of the batch": small(lambda h, y, t: entropy(y, t) + ht.sum(ht.max(h, axis=0) ** 2)),
    "alike in the batch": small(lambda h, y, t: entropy(y, t) + 0.1 * ht.mean(ht.square(h @ ht.matrix_transpose(h)))),
    "penalty": small(with_penalty),
    "experts": routed,
    "experts, trained well": functools.partial(routed, trained_well=True),
    "noise": noisy,
    "l2": small(lambda h, y, t: entropy(y, t) + 0.01 * ht.sum(weight(h) ** 2)),
}


def by_hand(model: str, parts: int, clip_norm: float | None = None):
    """The losses of some steps, and what the trained model answers, of one process that runs micro-batches in turn."""
    graph, feeds = MODELS[model](Descent(clip_norm))
    loss, updates = graph["train"]
    trained = [*updates.gradients]
    counted = ht.variable("counted", 0, (), "int64", trainable=False)  # what updates anything trains
    gradients = ht.Executor(
        {"train": [loss, *updates.gradients.values(), {counted: counted + 1}], "eval": graph["eval"]}
    )
    state, means = gradients.state, []
    kept = [
        name for name in state if name not in {"counted", *(v.name for v in trained)} and state[name].dtype.kind == "f"
    ]
    for step, feed in enumerate(feeds[:STEPS]):
        before = {name: np.array(state[name]) for name in kept}
        found, after = [], []
        for m in range(parts):
            for name, value in before.items():
                state[name] = value
            if "random_state" in state:
                state["random_state"] = np.array([state["random_state"][0], step + (m << RUN)], np.uint64)
            size = len(feed["x"]) // parts
            found.append(gradients.run("train", {k: v[m * size : (m + 1) * size] for k, v in feed.items()})[:-1])
            after.append({name: np.array(state[name]) for name in kept})
        means.append(float(np.mean([float(loss) for loss, *_ in found])))
        descents = [np.mean(g, axis=0) for g in list(zip(*found))[1:]]
        norm = np.sqrt(sum(np.sum(g.astype(float) ** 2) for g in descents))
        share = 1.0 if clip_norm is None else clip_norm / max(norm, clip_norm)
        for variable, g in zip(trained, descents):
            state[variable] = state[variable] - np.float32(RATE * share) * g
        for name in kept:
            state[name] = np.mean([values[name] for values in after], axis=0)
    if "random_state" in state:
        state["random_state"] = np.array([state["random_state"][0], STEPS], np.uint64)
    return means, gradients.run("eval", {"x": feeds[0]["x"]})[0]


@functools.cache
def wanted(model: str, parts: int, clip_norm: float | None):
    return by_hand(model, parts, clip_norm)


def train(model: str, strategy, comm, clip_norm: float | None = None):
    graph, feeds = MODELS[model](Descent(clip_norm))
    ex = ht.Executor(graph, strategy=strategy, comm=comm)
    found = [float(ex.run("train", feed)[0]) for feed in feeds[:STEPS]]
    return found, ex.run("eval", {"x": feeds[0]["x"]})[0]


OWN = {"statistics": "microbatch"}
WAYS = {  # ranks, micro-batches, strategy
    "alone": (1, 3, lambda: DataParallel(accumulate=3, **OWN)),
    "data": (2, 3, lambda: DataParallel(accumulate=3, **OWN)),
    "zero1": (2, 2, lambda: ZeRO(1, accumulate=2, **OWN)),
    "zero3": (4, 3, lambda: ZeRO(3, accumulate=3, **OWN)),
    "tensor": (2, 3, lambda: TensorParallel(SPLIT, accumulate=3, **OWN)),
    "data x tensor": (4, 2, lambda: Parallel(tensor=2, split=SPLIT, accumulate=2, **OWN)),
    "2 stages": (2, 3, lambda: Pipeline(2, 3, **OWN)),
    "2 stages, gpipe": (2, 4, lambda: Pipeline(2, 4, "gpipe", **OWN)),
    "2 stages x data": (4, 2, lambda: Pipeline(2, 2, data=2, **OWN)),
    "2 stages x zero3": (4, 3, lambda: Pipeline(2, 3, data=2, zero=3, **OWN)),
    "2 stages x tensor": (4, 3, lambda: Pipeline(2, 3, tensor=2, split=SPLIT, **OWN)),
}
WHOLE_TABLES = ("cnn", "penalty", "noise")  # clipped by a global norm, which others are not: rows are updated alone


@pytest.mark.parametrize(("way", "model"), in_turn(5, WAYS, MODELS))
@pytest.mark.sampled(16)
def test_micro_batches_of_their_own_train_as_one_process_does_that_takes_them_in_turn(way, model):
    compared(*WAYS[way], model)


EXPERTS, WITHIN = {"*experts/*": 0}, {"*experts/up": 2, "*experts/down": 1}
AMONG_RANKS = {
    "data": (2, 3, lambda: ExpertParallel(EXPERTS, accumulate=3, **OWN)),
    "data x tensor": (4, 2, lambda: Parallel(experts=EXPERTS, tensor=2, split=WITHIN, accumulate=2, **OWN)),
    "2 stages x data": (4, 3, lambda: Pipeline(2, 3, data=2, experts=EXPERTS, hosts=((0, 1), (2, 3)), **OWN)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("way", "model"), in_turn(2, AMONG_RANKS, ["experts, trained well", "experts"]))
def test_so_do_experts_that_ranks_share(way, model):
    compared(*AMONG_RANKS[way], model)


def compared(ranks, parts, strategy, model):
    clip_norm = LIMIT if model in WHOLE_TABLES else None
    means, y = wanted(model, parts, clip_norm)
    for found, answer in run_ranks(ranks, lambda comm: train(model, strategy(), comm, clip_norm), rendezvous=True):
        np.testing.assert_allclose(found, means, atol=2e-5, rtol=0)
        np.testing.assert_allclose(answer, y, atol=1e-4, rtol=0)


# -- what the word does not change -------------------------------------------------------------------------------------

ACCUMULATING = {
    "data": lambda **more: DataParallel(**more),
    "zero3": lambda **more: ZeRO(3, **more),
    "tensor": lambda **more: TensorParallel(SPLIT, **more),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", ACCUMULATING)
@pytest.mark.parametrize("model", ["mlp", "transformer"])
def test_gradients_of_micro_batches_add_up_to_those_of_the_batch(strategy, model):
    """Random numbers too are those of the whole batch."""
    alone = losses(models.MODELS[model], steps=5)
    for found in run_ranks(2, lambda c: losses(models.MODELS[model], ACCUMULATING[strategy](accumulate=3), c, 5)):
        np.testing.assert_allclose(found, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("statistics", ["batch", "microbatch"])
def test_gradients_move_once_a_step_however_many_micro_batches(statistics):
    def moved(parts):
        return communication(models.mlp, DataParallel(accumulate=parts, statistics=statistics), 2)

    assert moved(2) == moved(6) == communication(models.mlp, DataParallel(), 2)


def fetching(comm, fetch):
    """What a step of two micro-batches of 4 fetches of the values 0, 1, ... of a batch."""
    x = ht.placeholder("x", (None, 2))
    w = ht.variable("w", 1.0, (2,))
    updates = ht.optim.SGD(0.5).minimize(ht.mean(x * w))
    ex = ht.Executor([fetch(x, w, updates), updates], strategy=DataParallel(accumulate=2, **OWN), comm=comm)
    return ex.run({"x": np.arange(16, dtype=np.float32).reshape(8, 2)})[0]


FEED = np.arange(16, dtype=np.float32).reshape(8, 2)
FETCHED = {  # of one value of each micro-batch the average, of values of examples all
    "examples": (lambda x, w, _: x * w, FEED),
    "axis 1": (lambda x, w, _: ht.matrix_transpose(x), FEED.T),
    "the feed": (lambda x, w, _: x, FEED),
    "sorted": (lambda x, w, _: ht.sort(x, axis=0), FEED),
    "normalized": (lambda x, w, _: ht.sign(ht.nn.BatchNorm(2)(x)), np.tile([[-1.0], [-1], [1], [1]], (2, 2))),
    "an integer of each": (lambda x, w, _: ht.argmax(x, axis=1), np.ones(8)),
    "sum": (lambda x, w, _: ht.sum(x), FEED.sum() / 2),
    "largest": (lambda x, w, _: ht.max(x, axis=0), (FEED[3] + FEED[7]) / 2),
    "gradient": (lambda x, w, updates: updates.gradients[w], FEED.mean(0) / 2),
    "a constant": (lambda x, w, _: w * 3.0, np.full(2, 3.0)),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fetched", FETCHED)
def test_what_is_fetched_is_averaged_or_joined(fetched, ranks):
    fetch, value = FETCHED[fetched]
    for found in run_ranks(ranks, lambda comm: fetching(comm, fetch)):
        np.testing.assert_allclose(found, value, rtol=1e-6)


def row_norms(p, m, g, lr):
    """A rule that ranks with parts of rows have to take apart; its first number is one of the gradient of sqrt, too."""
    m = 0.5 * m + g
    return p - lr * m / (0.1 + ht.sqrt(ht.sum(m * m, axis=-1, keepdims=True))), m


def test_a_number_of_the_optimizer_may_be_one_of_the_model():
    class RowNorms(ht.optim.Optimizer):
        rule = ht.optim.update_rule(row_norms)

    def rooted(h, y, t):
        loss = entropy(y, t)
        return loss + ht.sqrt(ht.sum(ht.square(ht.gradients(loss, [weight(h)])[0])))

    def steps(strategy, comm):
        graph, feeds = small(rooted)(RowNorms(RATE))
        ex = ht.Executor(graph, strategy=strategy, comm=comm)
        return [float(ex.run("train", feed)[0]) for feed in feeds[:3]]

    wanted = steps(DataParallel(accumulate=3, **OWN), None)
    split = {"*up/weight": 1}
    for found in run_ranks(2, lambda comm: steps(TensorParallel(split, accumulate=3, **OWN), comm)):
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)


SPREAD = {  # values that are made from no batch, of the shape of one
    "drawn": lambda h: h + ht.normal(h.shape),
    "gates": lambda h: ht.where(ht.bernoulli(0.5, h.shape), h, 0.1 * h),
    "of examples": lambda h: h * ht.uniform((h.shape[0], 1)),
    "repeated": lambda h: h + ht.broadcast_to(ht.variable("b", 0.5, (16,)), shape=h.shape),
}


@pytest.mark.parametrize("made", SPREAD)
def test_what_is_drawn_or_repeated_for_a_batch_is_cut_as_the_batch_is(made):
    def model(optimizer=None):
        return small(lambda h, y, t: entropy(y, t) + ht.mean(ht.square(SPREAD[made](h))))(optimizer or Descent())

    wanted = losses(model, steps=3)
    for found in run_ranks(2, lambda c: losses(model, DataParallel(accumulate=3), c, 3)):
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)
    assert communication(model, DataParallel(), 2).keys() == {"all_reduce"}


def test_evaluation_takes_what_needs_the_batch_in_one_piece():
    def answers(strategy, comm):
        x = ht.placeholder("x", (None, 2))
        w = ht.variable("w", 1.0, (2,))
        updates = ht.optim.SGD(0.5).minimize(ht.mean(x * w))
        entries = {"train": [updates], "eval": [x * w - ht.max(x * w, axis=0), ht.sort(x, axis=0)]}
        return ht.Executor(entries, strategy=strategy, comm=comm).run("eval", {x: FEED[::-1]})

    for found in run_ranks(2, lambda comm: answers(DataParallel(accumulate=2), comm)):
        for value, wanted in zip(found, (FEED[::-1] - FEED[-1], FEED), strict=True):
            np.testing.assert_array_equal(value, wanted)


def test_of_one_micro_batch_alone_integers_need_no_average():
    def counted(comm):
        x, w = ht.placeholder("x", (4, 2)), ht.variable("w", 1.0, (2,))
        with stage(0):
            h = x * w
        with stage(1):
            loss = ht.mean(h)
        entries = [ht.argmax(ht.sum(x, axis=0)), ht.optim.SGD(0.5).minimize(loss)]
        return ht.Executor(entries, strategy=Pipeline(2, 1, **OWN), comm=comm).run({x: FEED[:4]})[0]

    assert run_ranks(2, counted) == [1, 1]


# -- mistakes ----------------------------------------------------------------------------------------------------------


BLAMED = {"cnn": "sum", "penalty": "matmul", "experts": "reshape", "largest of the batch": "max"}
BLAMED |= {"alike in the batch": "matmul", "mean of the batch": "sum", "of a stranger": "centered"}


@pytest.mark.filterwarnings("ignore:operator 'centered' has no dims rule")
def test_without_the_word_what_needs_the_batch_is_refused_and_the_word_is_named(monkeypatch):
    """The error names what combines samples, and not who reads it."""

    @ht.op(infer=lambda x: x)
    def centered(xp, x):
        return x - xp.mean(x)

    centered.grad(lambda g, out, x: (g,))
    monkeypatch.setitem(MODELS, "of a stranger", small(lambda h, y, t: entropy(y, t) + ht.mean(centered(h) ** 2)))
    for model, op in BLAMED.items():
        said = f"<{op} .* needs the whole batch at once, but is fed in 3 micro-batches"
        with pytest.raises(GraphError, match=said) as caught:
            train(model, DataParallel(accumulate=3), None)
        assert caught.value.fix.startswith('make each a batch of its own by statistics="microbatch"')


def test_an_integer_of_each_micro_batch_has_no_average():
    with pytest.raises(GraphError, match=r"is one of each of 2 micro-batches, and int64 has no average") as caught:
        fetching(None, lambda x, w, _: ht.argmax(ht.sum(x, axis=0)))
    assert "make it a float" in caught.value.fix


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("value", ["examples", "a column", "mean"])
def test_what_micro_batches_of_one_row_have_for_each_example_cannot_be_told(value, rows):
    """Its axis of 1 is like one that is broadcast: the values of all examples became their mean."""
    of = {"examples": ht.tanh, "a column": lambda x: ht.sum(x, axis=1, keepdims=True), "mean": ht.mean}[value]
    x = ht.placeholder("x", (None, 2))
    w = ht.variable("w", np.ones(2, np.float32))
    fetched = of(x * w)
    entry = {"train": [fetched, ht.optim.SGD(0.1).minimize(ht.mean(x * w))]}
    ex = ht.Executor(entry, strategy=DataParallel(accumulate=4 // rows, **OWN))
    if rows == 1 and value != "mean":
        with pytest.raises(GraphError, match="of micro-batches of one row has no axis that is known") as caught:
            ex.run("train", {x: FEED[:4]})
        assert caught.value.fix == "make micro-batches of two rows at least, or fetch a mean"
    else:
        found = ht.Executor([of(x * 1.0)]).run({x: FEED[:4]})
        np.testing.assert_allclose(ex.run("train", {x: FEED[:4]})[0], found[0], rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 2])
def test_statistics_of_one_channel_are_known_to_have_no_axis_of_the_batch(rows):
    x = ht.placeholder("x", (None, 1, 2))
    loss = ht.mean(ht.square(ht.nn.BatchNorm(1, name="norm")(x)))
    ex = ht.Executor([loss, ht.optim.SGD(0.1).minimize(loss)], strategy=DataParallel(accumulate=4 // rows, **OWN))
    ex.run({x: FEED[:4].reshape(4, 1, 2)})
    [mean] = [ex.state[name] for name in ex.state if name.endswith("mean")]
    np.testing.assert_allclose(mean, [0.1 * FEED[:4].mean()], rtol=1e-6)


def test_words_and_numbers_that_do_not_exist():
    with pytest.raises(ArgumentError, match="statistics='micro'") as caught:
        ZeRO(1, accumulate=2, statistics="micro")
    assert caught.value.fix == "use one of 'batch', 'microbatch'"
    for number in (0, 2.0, True):
        with pytest.raises(ArgumentError, match=f"accumulate={number!r}"):
            DataParallel(accumulate=number)


def test_batches_that_micro_batches_do_not_divide_or_of_a_fixed_size():
    graph, feeds = models.cnn(Descent())
    ex = ht.Executor(graph, strategy=DataParallel(accumulate=5, **OWN))
    with pytest.raises(ShapeError, match="a batch of 12 in '.' does not divide into 5 micro-batches"):
        ex.run("train", feeds[0])
    x = ht.placeholder("x", (8, 2))
    loss = ht.mean(ht.nn.Linear(2, 2)(x) ** 2)
    with pytest.raises(ArgumentError, match=r"has batches of 8, but statistics=\"microbatch\" makes a batch of each"):
        ht.Executor([loss, ht.optim.SGD(0.1).minimize(loss)], strategy=DataParallel(accumulate=2, **OWN))


@pytest.mark.parametrize("entries", [12, 13])
@pytest.mark.parametrize("way", [DataParallel(accumulate=2), Pipeline(1, 2)])
def test_who_feeds_bags_of_unequal_length_in_micro_batches_is_told_what_works(way, entries):
    ids, starts = (ht.placeholder(name, (None,), "int64") for name in ("ids", "starts"))
    table = ht.variable("table", np.ones((5, 2), "float32"))
    loss = ht.mean(ht.nn.Linear(2, 1, name="last")(ht.embedding_bag(table, ids, starts)))
    ex = ht.Executor([loss, ht.optim.SGD(0.1).minimize(loss)], strategy=way)
    said = r"<bag_ids i64\[\d+\] .*> reads all of 'starts' at once.* 2 micro-batches[\s\S]*fix: .*ht.nn.EmbeddingBag"
    with pytest.raises(GraphError, match=said):
        ex.run({ids: np.zeros(entries, "int64"), starts: np.array([0, 1, 6, 7])})


def test_accumulation_is_plain_data():
    graph, _ = models.mlp()
    strategy = ZeRO(3, accumulate=4, **OWN).build([graph["train"][0], *graph["train"][1].values()], 2)
    assert Strategy.from_json(strategy.to_json()) == strategy
    assert (strategy.microbatches, strategy.statistics) == (4, "microbatch")


def test_who_accumulates_refuses_places():
    with ht.dist.place(0):
        x = ht.placeholder("x", (None, 2))
        loss = ht.mean(ht.nn.Linear(2, 2)(x) ** 2)
    with pytest.raises(ArgumentError, match="is placed on rank 0, but who accumulates places nodes by their stages"):
        ht.Executor([loss], strategy=DataParallel(accumulate=2))

"""Pipelines train as one process does, in every schedule and with data and tensor parallelism inside."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, GraphError, ShapeError
from hetu.core.passes import PASSES
from hetu.dist import Link, Pipeline, Schedule, Staged, Strategy, VirtualClock, run_ranks

from ..apart import APART
from ..pairs import in_turn, nightly
from .test_launch import heturun

BATCH, STEPS = 8, 8
RUN = 40  # bits between the random numbers of two micro-batches


def mlp():
    x, t = ht.placeholder("x", (None, 10)), ht.placeholder("t", (None,), "int64")
    with ht.scope("mlp"):
        h = x
        for k in range(3):
            h = h + ht.nn.Linear(10, 10, activation=ht.tanh, name=f"hidden_{k}")(h)
        y = ht.nn.Linear(10, 5, name="head")(h)
        return with_loss(y, t, ht.optim.Adam(0.01)), batches((10,), 5)


def cnn():
    x, t = ht.placeholder("x", (None, 2, 8, 8)), ht.placeholder("t", (None,), "int64")
    with ht.scope("cnn"):
        h = ht.relu(ht.nn.GroupNorm(2, 4)(ht.nn.Conv2d(2, 4, 3, padding=1)(x)))
        h = ht.relu(ht.nn.Conv2d(4, 4, 3, padding=1)(ht.dropout(ht.max_pool2d(h, 2), 0.2)))
        y = ht.nn.Linear(16, 5)(ht.nn.Linear(64, 16, activation=ht.relu)(ht.flatten(h, 1)))
        return with_loss(y, t, ht.optim.Momentum(0.05, clip_norm=1.0)), batches((2, 8, 8), 5)


def transformer():
    ids, t = ht.placeholder("x", (None, 6), "int64"), ht.placeholder("t", (None, 6), "int64")
    with ht.scope("gpt"):
        h = ht.nn.Embedding(12, 8)(ids)
        for k in range(2):
            h = ht.nn.TransformerBlock(8, 2, causal=True, dropout=0.1, name=f"block_{k}")(h)
        y = ht.nn.Linear(8, 12, name="head")(ht.nn.LayerNorm(8)(h))
        return with_loss(y, t, ht.optim.AdamW(0.01)), batches((6,), 12, ids=True)


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


def with_loss(y: ht.Node, t: ht.Node, optimizer: Any):
    loss = ht.mean(ht.softmax_cross_entropy(y, t))
    return {"train": [loss, optimizer.minimize(loss)], "eval": [loss, y]}


def batches(shape: tuple[int, ...], classes: int, *, ids: bool = False) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    made = []
    for _ in range(STEPS):
        size = (BATCH, *shape)
        x = rng.integers(0, classes, size) if ids else rng.normal(size=size).astype("float32")
        made.append({"x": x, "t": rng.integers(0, classes, size if ids else BATCH)})
    return made


def train(model: str, strategy: Any = None, comm: Any = None) -> tuple[list[float], np.ndarray]:
    """The losses of all steps, and the output of the trained model."""
    graph, feeds = MODELS[model]()
    ex = ht.Executor(graph, strategy=strategy, comm=comm)
    return [float(ex.run("train", feed)[0]) for feed in feeds], ex.run("eval", feeds[0])[1]


@functools.cache
def alone(model: str) -> tuple[list[float], np.ndarray]:
    return train(model)


CASES = [
    ("mlp", 2, {"schedule": "gpipe"}),
    ("mlp", 4, {"microbatches": 2}),
    ("mlp", 8, {"stages": 2, "data": 2, "tensor": 2, "zero": 1}),
    pytest.param("mlp", 8, {"stages": 4, "tensor": 2, "microbatches": 8}, marks=pytest.mark.nightly),
    ("mlp", 4, {"microbatches": 8}),
    ("cnn", 2, {}),
    ("cnn", 4, {"schedule": "gpipe"}),
    ("cnn", 4, {"stages": 2, "data": 2}),
    ("cnn", 4, {"stages": 2, "data": 2, "zero": 3}),
    pytest.param("cnn", 8, {"stages": 4, "data": 2}, marks=pytest.mark.nightly),
    ("transformer", 2, {}),
    pytest.param("transformer", 4, {"microbatches": 8}, marks=pytest.mark.nightly),
    ("transformer", 4, {"stages": 2, "data": 2}),
    ("transformer", 4, {"stages": 2, "tensor": 2}),
    pytest.param("transformer", 8, {"stages": 2, "data": 2, "tensor": 2, "zero": 1}, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("model", "ranks", "options"), CASES, ids=str)
@pytest.mark.sampled(24)
def test_losses_equal_those_of_one_process(model, ranks, options):
    wanted, output = alone(model)
    for losses, y in run_ranks(ranks, lambda comm: train(model, Pipeline(**options), comm), rendezvous=True):
        np.testing.assert_allclose(losses, wanted, atol=1e-5, rtol=0)
        np.testing.assert_allclose(y, output, atol=1e-3, rtol=0)


def test_layers_are_found_below_the_casts_of_mixed_precision():
    def losses(strategy=None, comm=None):
        graph, feeds = mlp()
        executor = ht.Executor(graph, strategy=strategy, comm=comm, precision="float16")
        return [float(executor.run("train", feed)[0]) for feed in feeds[:4]]

    for made in run_ranks(2, lambda comm: losses(Pipeline(2, microbatches=2), comm), rendezvous=True):
        np.testing.assert_allclose(made, losses(), atol=5e-3)


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        *[("mlp", "1f1b"), ("mlp", "pipedream")],
        *nightly([("mlp", "gpipe"), *[("transformer", schedule) for schedule in ("gpipe", "1f1b", "pipedream")]]),
    ],
)
def test_passes_of_every_device_at_once_leave_the_losses_alone(model, schedule):
    """Those that join nodes keep to the order of communication and of the schedule."""

    def run(comm, **options):
        graph, feeds = MODELS[model]()
        ex = ht.Executor(graph, strategy=Pipeline(2, data=2, zero=3, schedule=schedule), comm=comm, **options)
        return [float(ex.run("train", feed)[0]) for feed in feeds[:3]]

    plain, joined = run_ranks(4, run), run_ranks(4, functools.partial(run, passes=[*PASSES]))
    np.testing.assert_allclose(joined, plain, atol=1e-5, rtol=0)


@pytest.mark.nightly
def test_processes_train_as_threads_do():
    job = heturun("-w", 2, "python", "-m", "tests.dist.test_pipeline")
    assert (job.returncode, job.stderr, job.stdout.count("equal")) == (0, "", 2)


def winding():
    """Values of the first stage are used in the last, also one drawn there, and the middle stages compute theirs again
    in backward."""
    x, t = ht.placeholder("x", (None, 6)), ht.placeholder("t", (None, 6))
    with ht.scope("winding"):
        with ht.dist.stage(0):
            h = ht.tanh(ht.nn.Linear(6, 6)(x / 2))
            noise = ht.uniform(h.shape)
            first = h = h * noise
        for k in (1, 2):
            with ht.dist.stage(k):
                h = ht.recompute(lambda v: ht.tanh(ht.nn.Linear(6, 6)(ht.sin(v))))(h)
        with ht.dist.stage(3):
            h = ht.nn.Linear(6, 6)(h * first + noise)
            loss = ht.mean((h - t) ** 2) + 0.01 * ht.sum(first.inputs[0].inputs[0].inputs[0].inputs[1] ** 2)
        return loss, ht.optim.Momentum(0.1, weight_decay=0.01).minimize(loss)


def test_values_that_skip_stages_and_values_that_are_computed_again():
    feeds = [staged_feed(seed) for seed in range(5)]

    def run(strategy=None, comm=None):
        ex = ht.Executor(list(winding()), strategy=strategy, comm=comm)
        return [float(ex.run(feed)[0]) for feed in feeds]

    for found in run_ranks(4, lambda comm: run(Pipeline(4, 8), comm), rendezvous=True):
        np.testing.assert_allclose(found, run(), atol=1e-5, rtol=0)


# -- what is held ---------------------------------------------------------------------------------------------------


def staged_mlp(stages: int, width: int = 6, drawn: bool = False):
    """One tanh a stage, marked by the user, times what is `drawn` on the first for all."""
    x, t = ht.placeholder("x", (None, width)), ht.placeholder("t", (None, width))
    with ht.scope("staged"):
        h = x
        with ht.dist.stage(0):
            noise = ht.uniform(x.shape) if drawn else 1.0
        for k in range(stages):
            with ht.dist.stage(k):
                h = ht.tanh(ht.nn.Linear(width, width, name=f"part_{k}")(h)) * noise
        with ht.dist.stage(stages - 1):
            loss = ht.mean((h - t) * (h - t))
        updates = ht.optim.SGD(0.5).minimize(loss)
    return loss, updates


def staged_feed(seed: int = 0, batch: int = 16, width: int = 6) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(batch, width)).astype("float32") for name in ("x", "t")}


def program(stages: int, options: dict[str, Any], comm: Any):
    ex = ht.Executor(list(staged_mlp(stages)), strategy=Pipeline(stages, **options), comm=comm, passes=APART)
    return ex.program(staged_feed())


def held(program: Any) -> int:
    """The most activations, one a micro-batch, that are between their forward and their backward pass at once."""
    lives = [program.plan.storage(step.node) for step in program.steps if step.node.op.name == "tanh"]
    return max(sum(s.first <= at <= s.last for s in lives) for at in range(len(program.steps)))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_stage_keeps_activations_of_no_more_microbatches_than_its_schedule_says(schedule):
    programs = run_ranks(4, lambda comm: program(4, {"microbatches": 8, "schedule": schedule}, comm))
    wanted = [4, 3, 2, 1] if schedule == "1f1b" else [8] * 4
    assert [held(p) for p in programs] == wanted


def test_1f1b_takes_less_memory_than_gpipe():
    def peak(schedule: str) -> list[int]:
        options = {"microbatches": 8, "schedule": schedule}
        return run_ranks(2, lambda comm: program(2, options, comm).plan.arena_bytes)

    assert all(a < b for a, b in zip(peak("1f1b"), peak("gpipe")))


def test_gradients_are_reduced_once_a_step_however_many_microbatches():
    def reductions(comm):
        loss, updates = staged_mlp(2)
        strategy = Pipeline(2, microbatches=4, data=2).build([loss, *updates.values()], 4)
        strategy.bucket_bytes = 0
        steps = ht.Executor([loss, updates], strategy=strategy, comm=comm).program(staged_feed()).steps
        return sum(s.node.attrs["shape"] != () for s in steps if s.node.op.name == "all_reduce")

    assert run_ranks(4, reductions) == [2] * 4  # weight and bias


def test_neighbors_exchange_one_tensor_each_way_a_microbatch():
    def messages(comm):
        steps = program(4, {"microbatches": 8}, comm).steps
        return sum(s.node.op.name == "send_recv" and s.node.attrs["shape"] != () for s in steps)

    assert run_ranks(4, messages) == [16, 32, 32, 16]


# -- time ------------------------------------------------------------------------------------------------------------

WORKED = threading.local()


@ht.op(infer=lambda x, **_: x, dims="...->...", differentiable=True)
def labor(xp, x, *, hours: float):
    """`x`, after so many hours on the clock of this thread."""
    WORKED.hours = getattr(WORKED, "hours", 0.0) + hours
    return x + 0


@labor.grad
def labor_grad(g, y, x, *, hours):
    return labor(g, hours=2 * hours)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 4), (4, 8)])
def test_the_bubble_on_the_virtual_clock(schedule, stages, microbatches):
    def run(comm):
        WORKED.hours = 0.0
        clock = VirtualClock(comm, Link(0.0, float("inf")), timer=lambda: getattr(WORKED, "hours", 0.0))
        x = h = ht.placeholder("x", (None, 3))
        with ht.scope("work"):
            w = ht.variable("w", ht.init.ones, (3,))
            h = h * w
            for k in range(stages):
                with ht.dist.stage(k):
                    h = labor(h, hours=1.0)
            loss = ht.mean(h * h)
            updates = ht.optim.SGD(0.1).minimize(loss)
        strategy = Pipeline(stages, microbatches, schedule)
        ex = ht.Executor([loss, updates], strategy=strategy, comm=clock)
        feed = {x: np.ones((microbatches, 3), np.float32)}
        ex.run(feed)
        clock.barrier()
        before, worked = clock.now, WORKED.hours
        ex.run(feed)
        clock.barrier()
        return clock.now - before, WORKED.hours - worked

    for length, busy in run_ranks(stages, run):
        assert busy == 3 * microbatches
        assert 1 - busy / length == pytest.approx((stages - 1) / (microbatches + stages - 1))


# -- PipeDream -------------------------------------------------------------------------------------------------------


def weights_of(ex: ht.Executor, stage: int) -> dict[str, np.ndarray]:
    return {name: ex.state[name] for name in ex.state if name.startswith(f"staged/part_{stage}/")}


def by_hand(stages: int, microbatches: int, drawn: bool, feeds: list[dict[str, np.ndarray]]):
    """PipeDream in one process: every micro-batch with the weights that its stages have when they first see it."""
    loss, updates = staged_mlp(stages, drawn=drawn)
    ex = ht.Executor([loss, *updates.gradients.values()])
    names = [v.name for v in updates.gradients]
    order, losses = Schedule.of("pipedream", stages, microbatches), []
    history = [[weights_of(ex, stage)] for stage in range(stages)]
    for step, feed in enumerate(feeds):
        begun = [len(versions) - 1 for versions in history]
        of_feed = []
        for m in range(microbatches):
            for stage, versions in enumerate(history):
                for name, value in versions[begun[stage] + order.version(stage, m)].items():
                    ex.state[name] = value
            if drawn:
                ex.state["random_state"] = np.array([ex.state["random_state"][0], step + (m << RUN)], np.uint64)
            size = len(feed["x"]) // microbatches
            found, *gradients = ex.run({name: value[m * size : (m + 1) * size] for name, value in feed.items()})
            of_feed.append(found)
            for versions in history:
                versions.append({n: w - 0.5 * gradients[names.index(n)] for n, w in versions[-1].items()})
        losses.append(float(np.mean(of_feed)))
    return losses, [versions[-1] for versions in history]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("stages", "microbatches", "drawn"), [(1, 4, 0), (2, 4, 1), (4, 8, 0), (4, 2, 1)])
def test_pipedream_uses_one_version_of_the_weights_for_both_passes_of_a_microbatch(stages, microbatches, drawn):
    """And of what is drawn, which is drawn for each."""
    feeds = [staged_feed(seed) for seed in range(3)]

    def run(comm):
        model, strategy = staged_mlp(stages, drawn=bool(drawn)), Pipeline(stages, microbatches, "pipedream")
        ex = ht.Executor(list(model), strategy=strategy, comm=comm)
        return [float(ex.run(feed)[0]) for feed in feeds], weights_of(ex, comm.rank)

    losses, weights = by_hand(stages, microbatches, bool(drawn), feeds)
    for rank, (found, mine) in enumerate(run_ranks(stages, run, rendezvous=True)):
        np.testing.assert_allclose(found, losses, atol=1e-6, rtol=0)
        for name, value in mine.items():
            np.testing.assert_allclose(value, weights[rank][name], atol=1e-6, rtol=0)


def test_pipedream_on_one_stage_is_training_on_smaller_batches():
    """With Adam, momentum and all: what differs between schedules is only which weights are read."""
    graph, feeds = mlp()
    ex = ht.Executor(graph)
    small = [{name: value[m * 2 : m * 2 + 2] for name, value in feed.items()} for feed in feeds for m in range(4)]
    alone = [float(ex.run("train", feed)[0]) for feed in small]
    for data in (1, 2):
        found = run_ranks(data, lambda comm: train("mlp", Pipeline(1, 4, "pipedream"), comm))[0][0]
        np.testing.assert_allclose(found, np.reshape(alone, (-1, 4)).mean(1), atol=1e-5, rtol=0)


def test_pipedream_learns_with_dropout():
    def losses(comm):
        graph, feeds = transformer()
        ex = ht.Executor(graph, strategy=Pipeline(2, 4, "pipedream"), comm=comm)
        return [float(ex.run("train", feeds[0])[0]) for _ in range(8)]

    first, *_, last = run_ranks(2, losses)[0]
    assert last < 0.8 * first


# -- mistakes --------------------------------------------------------------------------------------------------------


BETWEEN = {  # a table and the next layer; nothing that a gradient meets there is computed with on the table's stage
    "a shape": lambda e: ht.reshape(e, (-1, 12)),
    "a sum": lambda e: ht.sum(e, axis=1),
    "a mean": lambda e: ht.mean(e, axis=1),
    "an order": lambda e: ht.reshape(ht.permute_dims(e, axes=(0, 2, 1)), (-1, 12)),
    "a factor": lambda e: ht.sum(e * 2.0, axis=1),
    "a value of the next stage": lambda e: ht.sum(e * ht.variable("scale", np.arange(1, 5, dtype="f4")), axis=1),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("between", "data"), in_turn(2, BETWEEN, [1, 2]))
def test_pipedream_updates_rows_of_a_table_as_it_does_the_whole_table(between, data):
    def act(comm, passes):
        ids, t = ht.placeholder("ids", (None, 3), "int64"), ht.placeholder("t", (None,), "int64")
        found = BETWEEN[between](ht.nn.Embedding(20, 4, name="table")(ids))
        loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(found.shape[1], 5, name="out")(found), t))
        strategy, rng = Pipeline(2, 4 // data, "pipedream", data=data), np.random.default_rng(0)
        ex = ht.Executor([loss, ht.optim.SGD(0.3).minimize(loss)], strategy=strategy, comm=comm, passes=passes)
        feeds = [{"ids": rng.integers(0, 20, (8, 3)), "t": rng.integers(0, 5, 8)} for _ in range(4)]
        return [float(ex.run(feed)[0]) for feed in feeds]

    whole = [name for name in PASSES if name != "sparsify_updates"]
    rows, dense = (run_ranks(2 * data, lambda comm, p=p: act(comm, p), rendezvous=True) for p in (None, whole))
    np.testing.assert_allclose(rows, dense, atol=1e-5, rtol=0)


def attempt(model: Callable[[], Any], strategy: Any, ranks: int = 2, batch: int = 16) -> Any:
    def run(comm):
        loss, updates = model()
        ex = ht.Executor([loss, updates], strategy=strategy, comm=comm)
        return ex.run({"x": np.zeros((batch, 6), np.float32), "t": np.zeros((batch, 6), np.float32)})

    return run_ranks(ranks, run)


def test_a_batch_that_does_not_divide_is_named():
    for schedule in ("1f1b", "pipedream"):
        with pytest.raises(ShapeError, match=r"a batch of 10 in '.' does not divide into 4 micro-batches"):
            attempt(lambda: staged_mlp(2), Pipeline(2, 4, schedule), batch=10)


def test_pipedream_names_a_batch_of_a_fixed_size_before_it_runs():
    def model(size=16):
        x = ht.placeholder("x", (size, 6))
        with ht.scope("fixed"):
            loss = ht.mean(ht.nn.Linear(6, 6)(ht.nn.Linear(6, 6)(x)) ** 2)
            return {"train": [loss, ht.optim.SGD(0.1).minimize(loss)], "eval": [loss]}

    def build(graph, schedule="pipedream"):
        run_ranks(2, lambda comm: ht.Executor(graph, strategy=Pipeline(2, 4, schedule), comm=comm))

    wanted = r"<placeholder 'x' f32\[16, 6\] .*> has batches of 16, but PipeDream makes a batch of each micro-batch"
    with pytest.raises(ArgumentError, match=wanted) as caught:
        build(model())
    assert caught.value.fix == "leave that size open: shape (None, 6)" and caught.value.site is not None
    build(model(), "1f1b")
    build(model(None))
    build({"eval": model()["eval"]})  # nothing is updated


def test_evaluation_takes_any_batch():
    def run(comm):
        loss, updates = staged_mlp(2)
        ex = ht.Executor({"train": [loss, updates], "eval": [loss]}, strategy=Pipeline(2, 4), comm=comm)
        return float(ex.run("eval", staged_feed(batch=7))[0])

    loss, _ = staged_mlp(2)
    assert run_ranks(2, run) == pytest.approx([float(ht.Executor([loss]).run(staged_feed(batch=7))[0])] * 2)


def test_stages_and_ranks_must_agree():
    with pytest.raises(ArgumentError, match="4 stages, the graph marks 2"):
        attempt(lambda: staged_mlp(2), Pipeline(4))
    with pytest.raises(ArgumentError, match=re.escape("2 x 1 x 2 (stages x data x tensor) ranks, the job has 2")):
        attempt(lambda: staged_mlp(2), Pipeline(2, tensor=2))


def normalized():
    x, t = ht.placeholder("x", (None, 6)), ht.placeholder("t", (None, 6))
    with ht.scope("normalized"):
        h = ht.nn.Linear(6, 6)(ht.nn.BatchNorm(6)(ht.nn.Linear(6, 6)(x)))
        loss = ht.mean((h - t) * (h - t))
        return loss, ht.optim.SGD(0.1).minimize(loss)


def test_batch_norm_needs_the_whole_batch_and_says_so():
    with pytest.raises(GraphError, match="needs the whole batch at once, but is fed in 4 micro-batches"):
        attempt(normalized, Pipeline(2, 4))
    attempt(normalized, Pipeline(2, 1))
    attempt(normalized, Pipeline(2, 4, "pipedream"))  # there a micro-batch is a batch of its own


def shared():
    """The first stage's weight is used again in the second, and gradients are clipped by their global norm."""
    x, t = ht.placeholder("x", (None, 6)), ht.placeholder("t", (None, 6))
    with ht.scope("shared"):
        w = ht.variable("w", ht.init.normal(), (6, 6))
        with ht.dist.stage(0):
            h = ht.tanh(x @ w)
        with ht.dist.stage(1):
            loss = ht.mean((h @ ht.matrix_transpose(w) - t) ** 2)
        return loss, ht.optim.Adam(0.1, clip_norm=0.5).minimize(loss)


def test_shared_variables_and_clipping_by_the_global_norm():
    feeds = [staged_feed(seed) for seed in range(5)]

    def run(strategy=None, comm=None):
        ex = ht.Executor(list(shared()), strategy=strategy, comm=comm)
        return [float(ex.run(feed)[0]) for feed in feeds]

    for found in run_ranks(2, lambda comm: run(Pipeline(2), comm), rendezvous=True):
        np.testing.assert_allclose(found, run(), atol=1e-5, rtol=0)
    with pytest.raises(GraphError, match="PipeDream updates each on its own"):
        attempt(shared, Pipeline(2, 4, "pipedream"))


def test_a_strategy_with_stages_is_plain_data():
    loss, updates = staged_mlp(2)
    strategy = Pipeline(2, tensor=2, split={"*/weight": 1}).build([loss, *updates.values()], 4)
    assert isinstance(strategy, Staged)
    assert Strategy.from_json(strategy.to_json()) == strategy
    assert "staged/part_1/weight" in strategy.table([loss, *updates.values()])
    assert strategy.homes["staged/part_1/weight"] == 1


if __name__ == "__main__":
    np.testing.assert_allclose(train("mlp", Pipeline(2))[0], alone("mlp")[0], atol=1e-5, rtol=0)
    print("equal")

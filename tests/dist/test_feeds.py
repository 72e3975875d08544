"""Ranks that feed their own parts train as one process fed all of them; ranks that must feed alike are held to it."""

from __future__ import annotations

import functools
import random
import re

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, DataError, FeedError, ShapeError
from hetu.data import ArrayDataset, DataLoader
from hetu.dist import DataParallel, Mesh, Parallel, SerialComm, Strategy, TensorParallel, ZeRO, run_ranks, world
from hetu.dist.comm.agreement import STEPS
from hetu.dist.comm.alike import FedAlike

from .. import pairs
from .models import MODELS, communication
from .test_launch import heturun
from .test_strategies import SPLIT

LOCAL = {  # and how many ranks share a part
    "data": (DataParallel, 1),
    "zero1": (lambda **given: ZeRO(1, **given), 1),
    "zero3": (lambda **given: ZeRO(3, **given), 1),
    "data x tensor": (lambda **given: Parallel(tensor=2, split=SPLIT, **given), 2),
    "zero3 x tensor": (lambda **given: Parallel(tensor=2, zero=3, split=SPLIT, **given), 2),
}
SIZES = (12, 4, 8, 12, 12)


def parts(feed, size, part, count):
    first, last = size * part // count, size * (part + 1) // count
    return {name: value[first:last] for name, value in feed.items()}


def trained(model, strategy=None, comm=None, share=1):
    """Losses, and what evaluation fetches: of the whole batch."""
    graph, feeds = MODELS[model]()
    ex = ht.Executor(graph, strategy=strategy, comm=comm)
    part, count = (0, 1) if comm is None else (comm.rank // share, comm.world_size // share)
    found = [float(ex.run("train", parts(f, n, part, count))[0]) for n, f in zip(SIZES, feeds)]
    return found, ex.run("eval", {"x": parts(feeds[0], 8, part, count)["x"]})[0]


@functools.cache
def alone(model):
    return trained(model)


@pytest.mark.parametrize(("name", "ranks", "model"), pairs.in_turn(3, LOCAL, [2, 4], MODELS))
@pytest.mark.sampled(8)
def test_parts_train_as_one_process_fed_all_of_them(name, ranks, model):
    make, share = LOCAL[name]
    for found, fetched in run_ranks(ranks, lambda comm: trained(model, make(local_feeds=True), comm, share)):
        np.testing.assert_allclose(found, alone(model)[0], atol=1e-5, rtol=0)
        np.testing.assert_allclose(fetched, alone(model)[1], atol=1e-4, rtol=0)


def loaded(comm=None):
    """With a loader that knows its rank, two epochs; among 4 ranks the last batch of 6 rows is filled up to 8."""
    rng = np.random.default_rng(0)
    data = ArrayDataset(rng.normal(size=(22, 10)).astype("f4"), rng.integers(0, 5, 22))
    graph, _ = MODELS["mlp"]()
    ex = ht.Executor(graph, strategy=DataParallel(local_feeds=True) if comm else None, comm=comm)
    loader = DataLoader(data, 8, shuffle=True, shard=True if comm else (0, 1))
    found = [float(ex.run("train", {"x": x, "t": t})[0]) for _ in range(2) for x, t in loader]
    return found, [len(x) for x, _ in loader]


def test_a_loader_hands_out_parts_of_one_size():
    wanted, _ = loaded()
    for found, sizes in run_ranks(2, loaded):
        np.testing.assert_allclose(found[:3], wanted[:3], atol=1e-5)  # 22 rows divide by 2: nothing is filled
        assert sizes == [4, 4, 3]
    for _, sizes in run_ranks(4, loaded):
        assert sizes == [2, 2, 2]


def test_a_loader_refuses_a_batch_that_has_no_parts_of_one_size():
    def act(comm):
        with pytest.raises(DataError, match="a batch of 7 rows does not divide among 2 ranks"):
            DataLoader(ArrayDataset(range(20)), 7, shard=True)

    run_ranks(2, act)
    assert DataLoader(ArrayDataset(range(20)), 7, shard=True).shard == (0, 1)


def fed(strategy, feeds, ranks):
    """What the error says where rank r is fed the r-th; no variable has changed by then."""

    def act(comm):
        graph, _ = MODELS["mlp"]()
        ex = ht.Executor(graph, strategy=strategy, comm=comm)
        before = {name: ex.state[name] for name in ex.state}
        with pytest.raises(FeedError) as caught:
            ex.run("train", feeds[comm.rank])
        assert all((ex.state[name] == value).all() for name, value in before.items())
        return str(caught.value)

    told = run_ranks(ranks, act)
    assert len(set(told)) == 1
    return told[0]


def batch(seed=0, rows=4):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(rows, 10)).astype("f4"), "t": np.zeros(rows, "i8")}


PAIR = r"rank {} has f32\[4, 10\] of .* with CRC .{{8}},\n  rank {} has f32\[4, 10\] of "
REFUSED = {  # the strategy, what each rank is fed, and what is said
    "own batches": (DataParallel(), [batch(0), batch(1)], r"'x' on ranks 0-1\n  " + PAIR.format(0, 1)),
    "own batches, tensor": (TensorParallel(SPLIT), [batch(0), batch(1)], r"'x' on ranks 0-1\n  " + PAIR.format(0, 1)),
    "own batches, zero3": (ZeRO(3), [batch(0)] * 2 + [batch(1)], r"'x' on ranks 0-2\n  " + PAIR.format(0, 2)),
    "other sizes": (DataParallel(), [batch(), batch(0, 5)], r"'t' on ranks 0-1\n  rank 0 has i64\[4\]"),
    "parts of other sizes": (
        DataParallel(local_feeds=True),
        [batch(), batch(0, 5)],
        r"the shape of 't' on ranks 0-1\n  rank 0 has i64\[4\],\n  rank 1 has i64\[5\]",
    ),
    "one part, fed differently": (
        Parallel(tensor=2, split=SPLIT, local_feeds=True),
        [batch(0), batch(0), batch(1), batch(2)],
        r"'x' on ranks 2-3\n  " + PAIR.format(2, 3),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_ranks_that_must_be_fed_alike(name):
    strategy, feeds, said = REFUSED[name]
    told = fed(strategy, feeds, len(feeds))
    assert re.search(f"the ranks are fed differently: {said}", told), told
    assert "local_feeds=True and DataLoader(shard=True)" in told


DRIFTS = {  # the strategy, how many ranks, what the last of them does to a later batch, and what is said
    "data": (DataParallel(), 2, lambda x, t: (x[::-1], t), r"batch 3 of 'x', for ranks 0, 1\n  rank . has f32\[8, 10"),
    "tensor": (TensorParallel(SPLIT), 3, lambda x, t: (x, 1 - t), r"batch 3 of 't', for ranks 0, 1, 2\n  rank . has i"),
    "one number": (ZeRO(1), 2, lambda x, t: (x + 9 * (np.arange(80).reshape(x.shape) == 37), t), r"batch \d+ of 'x', "),
    "parts of other sizes": (
        DataParallel(local_feeds=True),
        2,
        lambda x, t: (x[:4], t[:4]),
        r"batch 3 of the shape of 'x', for ranks 0, 1\n  rank [01] has f32\[8, 10\] .*\n  rank [01] has f32\[4, 10\]",
    ),
    "one part, fed differently": (
        Parallel(tensor=2, split=SPLIT, local_feeds=True), 4, lambda x, t: (-x, t), r"batch 3 of 'x', for ranks 2, 3\n"
    ),
    "none": (DataParallel(local_feeds=True), 2, lambda x, t: (-x, 1 - t), None),
    "other dtypes": (DataParallel(), 2, lambda x, t: (x.astype("f8"), t.astype("i4")), None),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DRIFTS)
def test_ranks_that_begin_alike_and_are_fed_differently_later(name):
    """From the third batch on, of sizes that all ranks have seen. Of small batches all numbers are compared in turn."""
    strategy, ranks, changed, said = DRIFTS[name]
    rng = np.random.default_rng(0)
    x, t = rng.normal(size=(8, 10)).astype("f4"), rng.integers(0, 2, 8)

    def act(comm):
        ex = ht.Executor(MODELS["mlp"]()[0], strategy=strategy, comm=comm)
        late = changed if comm.rank == ranks - 1 else lambda *fed: fed
        for size in (8, 4):
            ex.run("train", {"x": x[:size], "t": t[:size]})
        for _ in range(6):
            ex.run("train", dict(zip("xt", late(x, t))))

    if said is None:
        run_ranks(ranks, act)
        return
    with pytest.raises(FeedError, match=f"the ranks are fed differently: {said}") as caught:
        run_ranks(ranks, act)
    assert "local_feeds=True and DataLoader(shard=True)" in caught.value.fix


def test_what_was_fed_long_ago_is_told_to_nobody():
    """Whoever asks a rank for its state gets all of it."""
    comm = SerialComm()
    alike = FedAlike(comm, "'x'", (0,), np.dtype("float32"))
    for _ in range(1000):
        alike.note(np.ones(3, "float32"), "train")
    entries = comm.recorder.state().entries
    assert 3 * STEPS < len(entries) < 100 and entries[-1].number == 1000


def test_a_rank_may_look_alone_at_what_talks_to_nobody():
    def act(comm):
        x = ht.placeholder("x", (None, 3))
        y = ht.nn.Linear(3, 2, name="y")(x)
        entries = {"train": [ht.mean(y * y), ht.optim.SGD(0.1).minimize(ht.mean(y * y))], "eval": [y]}
        everywhere = Strategy(Mesh((2,), ("data",)).layout(), {}, {})
        ex = ht.Executor(entries, strategy=everywhere, comm=comm)
        ex.run("eval", {x: np.ones((4, 3))})
        for step in range(3):
            ex.run("train", {x: np.full((4, 3), step)})
            for _ in range(step if comm.rank else 0):
                ex.run("eval", {x: np.ones((4, 3))})

    run_ranks(2, act)


def test_a_rank_may_look_alone_though_another_sub_graph_is_fed_alike_and_talks():
    asked = []

    def act(comm):
        x, w, v = ht.placeholder("x", (2, 3)), *(ht.variable(name, np.ones((4, 4))) for name in "wv")
        entries = {"look": [x * ht.sum(w)], "meet": [x * ht.sum(v)]}
        ex = ht.Executor(entries, strategy=TensorParallel({"v": 1}), comm=comm)
        for name in (*entries, *["look"] * comm.rank, *entries):
            ex.run(name, {x: np.ones((2, 3))})
        asked.append({*ex.placement.shared})

    run_ranks(2, act)
    assert asked == [{("meet", (2, 3))}] * 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
def test_ranks_keep_the_same_programs_though_each_looks_alone_as_often_as_it_likes(seed, monkeypatch):
    """Or one would make a program alone, and wait for others that have it."""
    monkeypatch.setattr("hetu.core.executor.KEPT_PROGRAMS", 3)

    def act(comm):
        together, mine, known = random.Random(seed), random.Random(f"{seed} {comm.rank}"), []
        x = ht.placeholder("x", (None, 3))
        y = ht.nn.Linear(3, 2, name="y")(x)
        entries = {"train": [ht.mean(y * y), ht.optim.SGD(0.1).minimize(ht.mean(y * y))], "eval": [y]}
        ex = ht.Executor(entries, strategy=Strategy(Mesh((2,), ("data",)).layout(), {}, {}), comm=comm)
        for _ in range(30):
            name, feed = together.choice(["eval", "train"]), {x: np.ones((together.randrange(1, 7), 3))}
            ex.run(name, feed)
            known.append((name, feed))
            for looked, fed in mine.choices(known, k=mine.randrange(4)):
                if (True, fed[x].shape) in ex.subgraphs[looked].programs:
                    (mine.choice([ex.run, ex.program]) if looked == "eval" else ex.program)(looked, fed)
        return {name: list(sub.programs) for name, sub in ex.subgraphs.items()}

    one, other = run_ranks(2, act, deadline=20.0)
    assert one == other


def test_equal_numbers_of_another_dtype_are_fed_alike():
    def act(comm):
        ex = ht.Executor(MODELS["mlp"]()[0], strategy=DataParallel(), comm=comm)
        feed = batch()
        return float(ex.run("train", feed if comm.rank else {**feed, "x": feed["x"].astype("f8")})[0])

    assert len(set(run_ranks(2, act))) == 1


def test_a_batch_of_a_known_size_has_no_parts():
    x = ht.placeholder("x", (4, 3))
    with pytest.raises(ArgumentError, match=r"(?s)has 4 rows, and local_feeds=True .*placeholder\('x', \(None"):
        DataParallel(local_feeds=True).build([x * 2], 2)


# -- micro-batches, each a slice of every part -------------------------------------------------------------------------

MICROBATCHES = 3


def in_turn(feed, count):
    """A batch of `count` parts with its rows in the order of micro-batches: of each the slices of all parts."""
    order = np.arange(len(feed["x"])).reshape(count, MICROBATCHES, -1).swapaxes(0, 1).reshape(-1)
    return {name: value[order] for name, value in feed.items()}


def accumulated(model, strategy, comm, batch_of, x):
    """Losses and outputs of steps that are fed `batch_of(feed)`; at their end, what the model makes of `x(feed)`."""
    graph, feeds = MODELS[model]()
    loss, updates = graph["train"]
    ex = ht.Executor({"train": [loss, *graph["eval"], updates], "eval": graph["eval"]}, strategy=strategy, comm=comm)
    losses, outputs = zip(*(ex.run("train", batch_of(feed))[:2] for feed in feeds[:3]))
    return np.array(losses), np.array(outputs), ex.run("eval", {"x": x(feeds[0])})[0]


@functools.cache
def by_one_process(model, count, statistics):
    """Which is fed all parts, in the order of micro-batches; it accumulates only if each is a batch of its own."""
    strategy = DataParallel(accumulate=MICROBATCHES, statistics=statistics) if statistics == "microbatch" else None
    return accumulated(model, strategy, None, lambda feed: in_turn(feed, count), lambda feed: feed["x"])


ACCUMULATED = [("batch", "mlp"), ("batch", "transformer"), *(("microbatch", model) for model in MODELS)]


@pytest.mark.parametrize(("name", "ranks", "kind"), pairs.in_turn(4, LOCAL, [2, 4], ACCUMULATED))
@pytest.mark.sampled(8)
def test_micro_batches_are_slices_of_all_parts(name, ranks, kind):
    (make, share), (statistics, model) = LOCAL[name], kind
    strategy, count = make(local_feeds=True, accumulate=MICROBATCHES, statistics=statistics), ranks // share

    def act(comm):
        part = functools.partial(parts, size=12, part=comm.rank // share, count=count)
        return accumulated(model, strategy, comm, part, lambda feed: part(feed)["x"])

    for found in run_ranks(ranks, act, rendezvous=True):
        for mine, wanted, atol in zip(found, by_one_process(model, count, statistics), (1e-5, 1e-4, 1e-4)):
            np.testing.assert_allclose(mine, wanted, atol=atol, rtol=0)


@pytest.mark.parametrize("statistics", ["batch", "microbatch"])
def test_parts_that_micro_batches_do_not_divide(statistics):
    """Though 2 x 3 rows divide into 2 micro-batches."""

    def act(comm):
        strategy = DataParallel(accumulate=2, statistics=statistics, local_feeds=True)
        ex = ht.Executor(MODELS["mlp"]()[0], strategy=strategy, comm=comm)
        with pytest.raises(ShapeError, match="a part of 3 in '.' does not divide into 2 micro-batches") as caught:
            ex.run("train", batch(rows=3))
        assert "feed a multiple of 2 rows, or drop the last batch" in caught.value.fix

    run_ranks(2, act)


def test_micro_batches_of_parts_move_no_more_than_those_of_the_batch():
    def moved(**given):
        return communication(MODELS["mlp"], ZeRO(3, accumulate=3, **given), 2)

    assert moved(local_feeds=True) == moved()


def test_a_strategy_says_in_json_which_feeds_are_local():
    graph, _ = MODELS["mlp"]()
    for accumulate in (1, 2):
        strategy = DataParallel(local_feeds=True, accumulate=accumulate).build(graph["train"][:1], 2)
        assert sorted(strategy.local) == ["t", "x"]
        assert Strategy.from_json(strategy.to_json()) == strategy


def test_real_ranks_feed_their_parts():
    found = heturun("-w", 2, "python", "-m", "tests.dist.test_feeds")
    assert found.returncode == 0 and found.stdout.count("equal those of one process") == 2, found.stderr
    assert found.stdout.count("the ranks are fed differently: 'x' on ranks 0-1") == 2, found.stdout


if __name__ == "__main__":
    job = world(deadline=60.0)
    try:
        ht.Executor(MODELS["mlp"]()[0], strategy=DataParallel()).run("train", batch(job.rank))
    except FeedError as error:
        print(error)
    found, _ = trained("mlp", DataParallel(local_feeds=True), job)
    wanted, _ = trained("mlp")
    np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)
    print(f"rank {job.rank}: {len(wanted)} losses equal those of one process")

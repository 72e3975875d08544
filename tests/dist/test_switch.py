"""Going over to another strategy in mid-training: the losses are those of one process, at the fewest bytes."""

from __future__ import annotations

import functools
import random
import sys
from collections import Counter

import numpy as np
import pytest

import hetu as ht
from hetu.core import executor as core_executor
from hetu.core.errors import ArgumentError, GraphError, UnknownNameError
from hetu.core.program import Program
from hetu.data import ArrayDataset, DataLoader
from hetu.dist import (
    DUP,
    CommError,
    DataParallel,
    Heterogeneous,
    Kept,
    Layout,
    Parallel,
    Pipeline,
    Pipelines,
    SerialComm,
    Shard,
    Strategy,
    ZeRO,
    run_ranks,
    stage,
    world,
)
from hetu.dist.cut import switch
from hetu.plan import Within
from hetu.strategies import ParameterServer, PartialReduce

from ..gpu import fake_cupy
from . import drawn
from .models import MODELS, mlp
from .models import losses as trained
from .test_launch import heturun
from .test_strategies import SPLIT, STRATEGIES

RANKS, TOLERANCE = 4, {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
WAYS = {
    **STRATEGIES,
    "none": lambda: None,
    "by name": lambda: "zero2",
    "unequal": lambda: Heterogeneous([(2, 0), (1, 3)], (2, 1), split=SPLIT),
    "unequal x zero": lambda: Heterogeneous([(2, 0), (1, 3)], (2, 1), split=SPLIT, zero=3),
    "unequal, accumulated": lambda: Heterogeneous([(0, 1), (2, 3)], (3, 1), split=SPLIT, accumulate=3),
    "less memory": lambda: Within(ZeRO(1), 1 << 18),
    "accumulated": lambda: ZeRO(1, accumulate=3),
    "2 stages": lambda: Pipeline(2, 3, data=2),
    "2 stages x tensor": lambda: Pipeline(2, 3, tensor=2, split=SPLIT),
    "2 stages x zero": lambda: Pipeline(2, 2, "gpipe", data=2, zero=3),
    "unequal stages x zero": lambda: Pipelines([[(0,), (3,)], [(1,), (2,)]], (3, 1), 3, split={}, zero=3),
}
CUT = {
    way for way in WAYS if "stages" in way or "accumulated" in way
}  # in micro-batches, so batch norm and dropout differ


@functools.cache
def alone(model, precision="float32"):
    return trained(MODELS[model], precision=precision)


def walk(ways, comm, model="mlp", keep=True, **options):
    """The losses where each step is made under the next of these strategies."""
    graph, feeds = MODELS[model]()
    ex = ht.Executor(graph, strategy=WAYS[ways[0]](), comm=comm, **options)
    found = []
    for feed, way in zip(feeds, ways):
        ex.switch(WAYS[way](), keep=keep)
        found.append(float(ex.run("train", feed)[0]))
    return found


def long_walk(number):
    """Eight strategies, and what else the executor is asked for."""
    draw = random.Random(number)
    model = draw.choice(["mlp", "cnn", "transformer"])
    ways = draw.choices([w for w in WAYS if model == "mlp" or w not in CUT], k=8)
    precision = draw.choice(["float32", "float32", "float16", "bfloat16"])
    return ways, {"model": model, "precision": precision, "keep": draw.random() < 0.7, "donate": draw.random() < 0.8}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("number", range(40))
def test_random_walks_over_strategies_equal_one_process(number):
    ways, options = long_walk(number)
    pytest.importorskip("ml_dtypes") if options["precision"] == "bfloat16" else None
    for found in run_ranks(RANKS, lambda comm: walk(ways, comm, **options)):
        wanted = alone(options["model"], options["precision"])
        np.testing.assert_allclose(found, wanted, atol=TOLERANCE[options["precision"]], rtol=0, err_msg=f"{ways}")


def walk_of(training, ways, comm):
    """The losses of a drawn training, and what it gives in the end, each step under the next of these strategies."""
    ex = ht.Executor(training.graph(), strategy=ways[-1], comm=comm, precision=training.precision, passes=[])
    found = []
    for feed, way in zip(training.feeds(), ways):
        ex.switch(way)
        loss, _, fetched = ex.run("train", feed)
        found.append(float(loss))
    ex.switch(ways[0])
    looks = training.number % 3 == 1
    return found, ex.run("eval", {"x": training.feeds()[0]["x"]})[0] if looks else fetched


@pytest.mark.sampled(12)
@pytest.mark.parametrize("number", [n for n in range(56) if drawn.training(n).kind != "local" and n % 32])
def test_drawn_trainings_equal_one_process(number):
    training, draw = drawn.training(number), random.Random(number)
    pytest.importorskip("ml_dtypes") if training.precision == "bfloat16" else None
    tensor = [Parallel(tensor=2, zero=3, split=drawn.split(draw))] * (training.ranks % 2 == 0)
    ways = draw.choices([training.builder, DataParallel(), ZeRO(1), ZeRO(3), None, *tensor], k=2)
    ways.insert(draw.randrange(3), training.builder)
    (wanted, last), (near, far) = drawn.trained(training), drawn.TOLERANCE[training.precision]
    for found, fetched in run_ranks(training.ranks, lambda comm: walk_of(training, ways, comm)):
        np.testing.assert_allclose(found, wanted, atol=near, rtol=0, err_msg=f"{ways}")
        np.testing.assert_allclose(fetched.astype("float32"), last, atol=far, rtol=0, err_msg=f"{ways}")


def test_gpus(monkeypatch):
    """On stand-ins for CuPy and NCCL; the second time all goes through the host."""
    ways = ["zero3", "data", "tensor", "zero3"]
    with fake_cupy.installed() as cupy:
        for number in (21805, 0):
            monkeypatch.setattr(cupy.cuda.nccl, "get_version", lambda number=number: number)
            for found in run_ranks(2, lambda comm: walk(ways, comm, device="gpu"), deadline=60.0):
                np.testing.assert_allclose(found, alone("mlp")[:4], atol=1e-5, rtol=0)


def test_one_process_needs_no_ranks():
    assert walk(["none", "data", "zero3", "none"] * 2, None) == alone("mlp")


def test_a_rank_that_has_no_variable_for_a_while_comes_back():
    def alternated(comm):
        x, t = ht.placeholder("x", (None, 4)), ht.placeholder("t", (None,), "int64")
        with stage(0):
            h = x @ (w := ht.variable("w", ht.init.normal(1.0), (4, 3)))
        with stage(1):
            loss = ht.mean(ht.softmax_cross_entropy(h, t))
        step = {w: w - 0.1 * ht.gradients(loss, [w])[0]}
        ex = ht.Executor([loss, step], strategy="dp" if comm else None, comm=comm)
        found, feed = [], {"x": X[:4, :4], "t": T[:4] % 3}
        for number in range(5):
            if comm:
                ex.switch("dp" if number % 2 else Pipeline(2, 2))
            found.append(float(ex.run(feed)[0]))
        return found, len(ex.state)

    wanted, _ = alternated(None)
    for (found, count), variables in zip(run_ranks(2, alternated), (1, 0)):
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)
        assert count == variables


# -- what it costs ----------------------------------------------------------------------------------------------------


def executor(comm, way="data", **options):
    graph, feeds = mlp()
    return ht.Executor(graph, strategy=WAYS[way](), comm=comm, **options), feeds


def test_what_is_moved_is_what_ranks_lack_in_one_message_between_two(monkeypatch):
    def moved(comm):
        ex, feeds = executor(comm)
        ex.run("train", feeds[0])
        messages, held, exchange = [], [], comm.exchange
        note = lambda sends, recvs: (messages.extend(x.nbytes for _, x in sends), exchange(sends, recvs))  # noqa: E731
        monkeypatch.setattr(comm, "exchange", note)
        for way in ("2 stages x tensor", "zero3", "data"):
            held.append((ex.switch(WAYS[way]()), [*messages], sum(a.nbytes for a in ex.state.arrays.values())))
            messages.clear()
        return held

    first, second, third = zip(*run_ranks(RANKS, moved))
    for ranks in (first, second, third):
        way = ranks[0][0]
        assert way.messages == sum(len(messages) for _, messages, _ in ranks) <= RANKS * (RANKS - 1)
        assert way.nbytes == sum(sum(messages) for _, messages, _ in ranks)
    assert first[0][0].nbytes == 0  # each has everything
    # From parts, of which none is held where another is, to all of everything; but what cannot be divided all have.
    assert third[0][0].nbytes == sum(nbytes for *_, nbytes in third) - sum(nbytes for *_, nbytes in second)


def test_who_comes_back_compiles_nothing_and_memory_is_for_each_part_once(monkeypatch):
    made = Counter()

    class Counted(Program):
        def __init__(self, *args, **options):
            made[id(args[2])] += 1  # the state of the executor
            super().__init__(*args, **options)

    monkeypatch.setattr(core_executor, "Program", Counted)

    def counts(comm, keep):
        ex, feeds = executor(comm)
        found, parts = [], {}
        for feed, way in zip(feeds, ["data", "zero3", "data", "zero3", "tensor", "zero3", "data", "data"]):
            ex.switch(WAYS[way](), keep=keep)
            ex.run("train", feed)
            boxes = {v.name: ex.placement.box(v) for v in ex.variables}
            parts |= {(name, boxes[name]): array.nbytes for name, array in ex.state.arrays.items()}
            found.append(made[id(ex.state)])
        kept = {id(a): a for had in ex.settings for a in had.arrays.values()}
        held, now = (sum(a.nbytes for a in arrays) for arrays in (kept.values(), ex.state.arrays.values()))
        return found, held, sum(parts.values()), now

    for found, held, parts, now in run_ranks(RANKS, lambda comm: counts(comm, True)):
        assert found == [1, 2, 2, 2, 3, 3, 3, 3] and now < held == parts
    for found, held, _, now in run_ranks(RANKS, lambda comm: counts(comm, False)):
        assert found == [1, 2, 3, 4, 5, 6, 7, 7] and held == now


def test_parts_that_stay_keep_their_arrays():
    def same(comm):
        ex, _ = executor(comm, "zero1")
        before = dict(ex.state.arrays)
        ex.switch(WAYS["data"]())
        return {name for name, array in ex.state.arrays.items() if before[name] is array}

    weights = {v.name for v in executor(None, "none")[0].variables if v.attrs["trainable"]}
    assert weights <= run_ranks(2, same)[0] < {v.name for v in executor(None, "none")[0].variables}


# -- all or nothing ---------------------------------------------------------------------------------------------------


def refused(act, match, ranks=2, error=(ArgumentError, GraphError), fix=""):
    """`act(executor, comm)` fails on all ranks, and training goes on as if nobody had tried."""

    def tried(comm):
        ex, feeds = executor(comm)
        found = [float(ex.run("train", feeds[0])[0])]
        with pytest.raises(error, match=match) as caught:
            act(ex, comm)
        assert fix in getattr(caught.value, "fix", fix)
        ex.state.dirty = False
        return [*found, *(float(ex.run("train", feed)[0]) for feed in feeds[1:3])]

    for found in run_ranks(ranks, tried):
        np.testing.assert_allclose(found, alone("mlp")[:3], atol=1e-5, rtol=0)


def dirty_on_one(ex, comm):
    ex.state.dirty = comm.rank == 1
    ex.switch(ZeRO(3))


REFUSED = [
    (lambda ex, comm: ex.switch("zero4"), "no strategy 'zero4'", UnknownNameError, "did you mean 'zero"),
    (lambda ex, comm: ex.switch(3), "3 is no strategy", ArgumentError, "pass one of hetu.dist"),
    (lambda ex, comm: ex.switch(["dp", "zero3"][comm.rank]), "dp on rank 0", ArgumentError, "switch together"),
    (lambda ex, comm: ex.switch(ZeRO(2 + comm.rank)), "given different things", ArgumentError, "alike"),
    (lambda ex, comm: ex.switch([ZeRO(1), ex.strategy][comm.rank]), "is\n  ZeRO on", ArgumentError, "switch together"),
    (lambda ex, comm: ex.switch("zero3", keep=comm.rank == 0), "keep is", ArgumentError, "switch together"),
    (lambda ex, comm: ex.switch(Pipeline(5 + comm.rank)), "stages", (ArgumentError, GraphError), ""),
    (lambda ex, comm: ex.switch(PartialReduce()), "keep values, or a connection", ArgumentError, "save, and load"),
    (lambda ex, comm: ex.switch(ParameterServer()), "or a connection, of their own", ArgumentError, "save, and load"),
    (dirty_on_one, "failed after it had changed some", GraphError, ""),
]


@pytest.mark.parametrize(("act", "match", "error", "fix"), REFUSED, ids=[match for _, match, *_ in REFUSED])
def test_what_fails_on_one_rank_changes_nothing_on_any(act, match, error, fix):
    refused(act, match, error=error, fix=fix)


def test_ranks_that_lack_memory_leave_all_as_they_were(monkeypatch):
    room = switch.room

    def lacking(executor, after, settings):
        if executor.placement.rank == 1:
            raise MemoryError("no room for 3 arrays")
        return room(executor, after, settings)

    monkeypatch.setattr(switch, "room", lacking)
    refused(lambda ex, comm: ex.switch("zero3"), "no room for 3 arrays", error=(GraphError, MemoryError))


def test_a_message_that_does_not_come_leaves_all_as_they_were():
    def cut(sends, recvs):
        assert sends and recvs
        raise CommError("a wire is cut")

    def tried(comm):
        ex, feeds = executor(comm, "zero3")
        found = [float(ex.run("train", feeds[0])[0])]
        before = {name: array.copy() for name, array in ex.state.arrays.items()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(comm, "exchange", cut)
            with pytest.raises(CommError, match="a wire is cut"):
                ex.switch("dp")
        assert all((before[name] == array).all() for name, array in ex.state.arrays.items())
        found.append(float(ex.run("train", feeds[1])[0]))
        ex.switch("dp")
        return [*found, float(ex.run("train", feeds[2])[0])]

    for found in run_ranks(2, tried):
        np.testing.assert_allclose(found, alone("mlp")[:3], atol=1e-5, rtol=0)


def test_values_that_ranks_do_not_share_are_told():
    def act(ex, comm):
        ex.state["mlp/up/bias"] = np.full(16, comm.rank)
        try:
            ex.switch("zero3")
        finally:
            ex.state["mlp/up/bias"] = before[comm.rank]

    before = [run_ranks(2, lambda comm: stepped(comm))[rank] for rank in range(2)]
    refused(act, "different values of 'mlp/up/bias'", error=GraphError)


def stepped(comm):
    ex, feeds = executor(comm)
    ex.run("train", feeds[0])
    return ex.state["mlp/up/bias"]


def test_shared_variables_stay():
    def act(ex, comm):
        other = ht.Executor([ex.subgraphs["eval"].entries[0]], state=ex.state, strategy=ex.strategy, comm=comm)
        try:
            ex.switch("zero3")
        finally:
            del other

    refused(act, "2 executors share these variables", error=ArgumentError, fix="make one executor")

    def looked(comm):
        ex, feeds = executor(comm)
        ex.value(ex.subgraphs["train"].entries[0], feeds[0])  # an executor of its own, which is gone
        return ex.switch("zero3").messages

    assert run_ranks(2, looked) == [0, 0]


def test_not_in_the_middle_of_a_step():
    ex, _ = executor(None, "none")
    with ex.busy, pytest.raises(GraphError, match="in the middle of a step"):
        ex.switch("dp")


def test_ranks_that_trained_apart_are_not_joined():
    def joined(comm):
        ex, feeds = executor(None, "none")
        if comm.rank:
            ex.run("train", feeds[0])
        with pytest.raises(GraphError, match="different values of"):
            ex.switch("dp")
        return float(ex.run("train", feeds[1])[0])

    first, second = run_ranks(2, joined)
    assert first != second


# -- what else a job keeps --------------------------------------------------------------------------------------------


def test_sums_of_gradients_move_between_two_updates():
    def accumulated(comm=None):
        graph, feeds = mlp()
        add, update = ht.optim.accumulated(graph["train"][1])
        loss = graph["train"][0]
        entries = {"add": [loss, add], "train": [loss, update]}
        ex = ht.Executor(entries, strategy=STRATEGIES["data"]() if comm else None, comm=comm)
        found, ways = [], ["zero3", "2 stages x tensor", "tensor", "unequal", "zero1", "none", "data"]
        for number, feed in enumerate(feeds[:7]):
            found.append(float(ex.run("train" if number in (2, 5) else "add", feed)[0]))
            if comm:
                ex.switch(WAYS[ways[number]]())
        return found

    for found in run_ranks(RANKS, accumulated):
        np.testing.assert_allclose(found, accumulated(), atol=1e-5, rtol=0)


def test_gradients_in_fewer_bytes_go_on():
    def coded(comm):
        ex, feeds = executor(comm)
        base = Layout(Shard((0, 1), ((DUP, 2),)))
        narrow = {v.name: Kept(base, base, wire="int8") for v in ex.variables if v.attrs["trainable"] and v.ndim == 2}
        strategy = Strategy(
            base, narrow, {"x": Layout(Shard((0, 1), ((0, 2),))), "t": Layout(Shard((0, 1), ((0, 2),)))}
        )
        found = []
        for number, feed in enumerate(feeds):
            ex.switch(strategy if number % 4 < 2 else "zero1")
            found.append(float(ex.run("train", feed)[0]))
        return found

    for found in run_ranks(2, coded):
        np.testing.assert_allclose(found, alone("mlp"), atol=0.05, rtol=0)


RNG = np.random.default_rng(0)
X, T = RNG.normal(size=(50, 10)).astype("float32"), RNG.integers(0, 5, 50)


def fitted(comm=None, epochs=4, way="data", switches=(), **options):
    """What `fit` measures, where the strategy changes after steps of these numbers."""
    graph, _ = mlp()
    ex = ht.Executor(graph, strategy=WAYS[way]() if comm else None, comm=comm)
    loader = DataLoader(ArrayDataset(X, T), batch_size=12, shuffle=True, seed=3, prefetch=0)
    asked = dict(switches)

    def after(step, loss):
        if step in asked:
            ex.switch(WAYS[asked[step]]())

    history = ht.fit(ex, loader, epochs=epochs, inputs=["x", "t"], after_step=after, **options)
    return history["loss"], {v.name: ex.state.get(v.name) for v in ex.variables}


def test_fit_goes_on_and_its_checkpoints_load_under_any_strategy(tmp_path):
    switches, path = [(2, "zero3"), (5, "2 stages x tensor"), (7, "unequal")], tmp_path / "run"
    wanted, _ = fitted()
    run_ranks(RANKS, lambda comm: fitted(comm, 2, switches=switches, checkpoint=path))
    for way in ("tensor", "2 stages"):
        for found, _ in run_ranks(RANKS, lambda comm, way=way: fitted(comm, way=way, checkpoint=path, resume=True)):
            np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)
    for found, _ in run_ranks(RANKS, lambda comm: fitted(comm, switches=switches)):
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)


def test_real_ranks():
    job = heturun("-w", RANKS, sys.executable, "-m", "tests.dist.test_switch")
    assert (job.returncode, job.stderr) == (0, "")
    assert job.stdout.count("8 losses equal those of one process") == RANKS


def main() -> None:
    """Four data-parallel ranks become two stages of two, then each keeps a quarter of everything, and back."""
    graph, feeds = mlp()
    ex, job = ht.Executor(graph, strategy="dp"), world(deadline=120.0)
    ways = [Pipeline(2, 3, tensor=2, split=SPLIT), "zero3", "dp"]
    found = []
    for number, feed in enumerate(feeds):
        if number and number % 2 == 0:
            moved = ex.switch(ways[number // 2 - 1])
            assert moved.messages <= job.world_size * (job.world_size - 1)
        found.append(float(ex.run("train", feed)[0]))
    np.testing.assert_allclose(found, trained(mlp, comm=SerialComm()), atol=1e-5, rtol=0)
    print(f"rank {job.rank}: {len(found)} losses equal those of one process")


if __name__ == "__main__":
    main()

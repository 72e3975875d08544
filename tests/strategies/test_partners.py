"""Partial reduce on ranks with a real server: groups average, nobody waits for the slowest, models do not mix."""

from __future__ import annotations

import functools
import threading
import time

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, ShapeError
from hetu.dist import DataParallel, run_ranks
from hetu.dist.cut.kept import Kept, owners_of
from hetu.dist.cut.strategy import Strategy
from hetu.plan import MachineProfile, simulate
from hetu.ps import ASP, BSP, RefusedError
from hetu.ps.store.messages import Kind, Message
from hetu.ps.store.partial_reduce import MOST_MODELS
from hetu.ps.wire.environment import Place
from hetu.ps.wire.view import as_text, looks_at
from hetu.strategies import Connected, PartialReduce
from hetu.strategies.partners import Averaged, meetings_svg

from ..dist.links import CountingComm
from ..ps.network import ServerThread, connect, options
from ..ps.simulation import new_store

RATE = 0.5
X = np.random.default_rng(0).standard_normal((24, 6)).astype("f")
T = np.random.default_rng(1).integers(0, 3, 24)


def graph(optimizer=None, norm: bool = False):
    x, t = ht.placeholder("x", (None, 6)), ht.placeholder("t", (None,), "int64")
    with ht.scope("model"):
        h = ht.nn.Linear(6, 5, activation=ht.tanh)(x)
        y = ht.nn.Linear(5, 3)(ht.nn.BatchNorm(5)(h) if norm else h)
        loss = ht.mean(ht.softmax_cross_entropy(y, t))
    return {"train": [loss, (optimizer or ht.optim.SGD(RATE)).minimize(loss)], "eval": [loss]}


def on_ranks(ranks: int, body, **settings):
    """`body(executor, rank)` on each rank, with a server."""
    settings = {"min_ranks": 2, **settings}

    def work(comm):
        with connect([server.address], comm.rank) as client:
            made = functools.partial(ht.Executor, strategy=PartialReduce(**settings), comm=Connected(comm, client))
            result = body(made, comm.rank)
            client.leave()
            return result

    with ServerThread(options("asp", ranks)) as server:
        return run_ranks(ranks, work)


def weights(executor) -> np.ndarray:
    return np.concatenate([executor.state[v].ravel() for v in executor.state if v.startswith("model/")])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_groups_of_all_are_one_process_under_sgd(ranks):
    """The mean of models that each took a step from one model is that model after the mean of their steps."""

    def body(made, rank):
        executor = made(graph())
        losses = [executor.run("train", {"x": X, "t": T})[0] for _ in range(4)]
        return weights(executor), losses, [(m.members, m.behind) for m in executor.placement.meetings]

    alone = ht.Executor(graph())
    losses = [alone.run("train", {"x": X, "t": T})[0] for _ in range(4)]
    found = on_ranks(ranks, body, min_ranks=3)
    for values, _, meetings in found:
        np.testing.assert_allclose(values, weights(alone), rtol=2e-5, atol=1e-6)
        assert meetings == [((*range(ranks),), 0)] * 4
    np.testing.assert_allclose(np.mean([each for _, each, _ in found], axis=0), losses, rtol=1e-5)


@pytest.mark.parametrize("optimizer", [ht.optim.Adam(0.05), ht.optim.Momentum(0.1)])
def test_states_of_optimizers_stay_a_ranks_own_and_statistics_are_averaged(optimizer):
    def body(made, rank):
        executor = made(graph(optimizer, norm=True))
        executor.run("train", {"x": X, "t": T})
        states = {v.name for v, owner in owners_of(executor.placement.outputs).items() if owner is not v}
        return states, {name: executor.state[name] for name in executor.state}

    (states, first), (_, second) = on_ranks(2, body)
    differs = {name for name in first if not np.array_equal(first[name], second[name])}
    assert differs and differs <= states
    assert sum("norm" in name for name in first.keys() - states) == 4  # scale and shift, mean and variance


def test_others_go_on_without_a_rank_that_does_not_come_and_who_is_behind_takes_over():
    """Rank 2 takes its first step when both others have taken two."""
    ahead = threading.Barrier(3)

    def body(made, rank):
        executor = made(graph())
        placement = executor.placement
        for step in range(4):
            if step == (0 if rank == 2 else 2):
                ahead.wait(60)
            executor.run("train", {"x": X, "t": T})
        placement.agree({})  # from here on nobody waits for this rank
        return placement.iteration, placement.late, placement.meetings

    found = on_ranks(3, body)
    groups = {m.number: m for _, _, meetings in found for m in meetings}
    assert all(len(m.members) <= 2 and abs(sum(m.weights) - 1) < 1e-9 for m in groups.values())
    _, late, (first, *_) = found[2]
    assert first.behind >= 2 and late >= 2
    assert first.weights[first.members.index(2)] == 0.5**first.behind / (1 + 0.5**first.behind)
    assert [len(meetings) for _, _, meetings in found] == [4] * 3


def test_fit_leaves_out_what_partners_have_gone_ahead():
    """All ranks count the same steps of an epoch; one that is three times as slow computes fewer."""
    counts, placements, changed = [0, 0, 0], {}, threading.Condition()

    def body(made, rank):
        executor = made(graph())
        placements[rank], run = executor.placement, executor.run

        def slowly(name, feed, **more):
            with changed:
                counts[rank] += 1
                changed.notify_all()
                if rank == 2:
                    changed.wait_for(lambda: 0 in placements and placements[0].iteration >= min(30, 3 * counts[2]), 60)
            return run(name, feed, **more)

        executor.run = slowly
        history = ht.fit(executor, [(X, T)] * 32, epochs=1, inputs=["x", "t"], progress=False)
        executor.placement.average(executor.state)
        return history["loss"], weights(executor)

    found = on_ranks(3, body)
    assert counts[2] <= 16 < counts[0]
    assert found[0][0] == found[1][0] == found[2][0]  # that of rank 0
    for _, values in found:
        np.testing.assert_array_equal(values, found[0][1])


def test_models_of_two_executors_do_not_mix():
    """Rank 0 trains the second model while rank 1 still trains the first: neither waits for, nor averages with, the
    other's."""

    def body(made, rank):
        first, second = made(graph()), made({"train": graph()["train"]})
        order = [first, first, second, second]
        for executor in order:
            executor.run("train", {"x": X * (1 + rank), "t": T})
        return [[m.members for m in executor.placement.meetings] for executor in (first, second)]

    for rank, meetings in enumerate(on_ranks(2, body)):
        assert meetings == [[(0, 1)] * 2] * 2, rank


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_ranks_do_between_their_steps_nobody_waits_for_who_waits_elsewhere(seed):
    """Steps of two executors and of parts of a model, which are odd in number, and collectives between and after."""
    acts = [*np.random.default_rng(seed).permutation(["first", "lower", "upper", "barrier", "agree", "send", "other"])]

    def body(made, rank):
        (loss, _), first = graph()["train"], graph()
        x = ht.placeholder("x", (None, 6))
        with ht.scope("parts"):
            lower, upper = ht.nn.Linear(6, 4), ht.nn.Linear(4, 3)
        loss = ht.mean(upper(lower(x)) ** 2)
        parts = {
            name: [loss, ht.optim.SGD(0.1).minimize(loss, [v for v in layer.__dict__.values() if hasattr(v, "role")])]
            for name, layer in (("lower", lower), ("upper", upper))
        }
        first, second = made(first), made(parts)
        other, comm = ht.Executor({"train": graph()["train"]}, strategy=DataParallel()), first.placement.ranks
        for act in [*acts, *acts, "barrier"]:
            time.sleep(0.01 * ((7 * rank + len(act)) % 5))  # each is the slowest somewhere
            for _ in range(3):
                if act == "barrier":
                    comm.barrier()
                elif act == "agree":
                    second.placement.agree({"a": 1.0})
                elif act == "send":
                    comm.exchange([((rank + 1) % 3, X)], [((rank - 1) % 3, np.empty_like(X))])
                else:
                    of = {"first": first, "other": other}.get(act, second)
                    of.run(act if of is second else "train", {"x": X} if of is second else {"x": X, "t": T})
        second.placement.average(second.state)
        return np.concatenate([second.state[v].ravel() for v in second.state]).tobytes()

    assert len({*on_ranks(3, body)}) == 1


def test_checkpoints_hold_the_mean_and_load_on_any_number_of_ranks(tmp_path):
    def body(made, rank):
        executor = made(graph())
        for _ in range(1 + rank):  # not all take as many
            executor.run("train", {"x": X, "t": T})
        executor.save(tmp_path / "saved.npz", {"rank": 0})
        saved = weights(executor)
        executor.run("train", {"x": X, "t": T})
        assert executor.load(tmp_path / "saved.npz") == {"rank": 0}
        assert executor.placement.agree({"a": rank + 1.0}) == {"a": 1.0}
        np.testing.assert_array_equal(weights(executor), saved)
        return saved

    found = on_ranks(3, body)
    alone = ht.Executor(graph())
    alone.load(tmp_path / "saved.npz")
    for values in found:
        np.testing.assert_array_equal(values, weights(alone))


def test_numbered_checkpoints_hold_the_mean_while_training_goes_on(tmp_path):
    def body(made, rank):
        executor, saved = made(graph()), []
        checkpoints = ht.Checkpoints(executor, tmp_path, keep=2)
        for step in range(3):
            for _ in range(1 + rank):
                executor.run("train", {"x": X, "t": T})
            checkpoints.save({"step": step})
            saved.append(weights(executor))
        executor.run("train", {"x": X, "t": T})
        checkpoints.wait()
        assert executor.load(tmp_path) == {"step": 2}
        np.testing.assert_array_equal(weights(executor), saved[-1])
        return saved[-2]

    found = on_ranks(3, body)
    alone = ht.Executor(graph())
    assert alone.load(tmp_path / "2") == {"step": 1} and len([*tmp_path.iterdir()]) == 2
    for values in found:
        np.testing.assert_array_equal(values, weights(alone))


def test_all_begin_with_the_values_of_the_first():
    def body(made, rank):
        mine = ht.Executor(graph())
        mine.state["model/linear/bias"] = np.full(5, rank + 1.0)
        return made(graph(), state=mine.state).state["model/linear/bias"].tolist()

    assert on_ranks(2, body) == [[1.0] * 5] * 2


def test_what_no_step_updates_keeps_its_bits():
    """The sum of three thirds of a number is not always that number."""
    fixed = np.linspace(0.1, 0.9, 6, dtype="f")

    def body(made, rank):
        entries = graph()
        x = ht.placeholder("x", (None, 6))
        executor = made({**entries, "fixed": [ht.sum(x * ht.variable("fixed", fixed, trainable=False))]})
        executor.run("train", {"x": X, "t": T})
        executor.placement.average(executor.state)
        return executor.state["fixed"]

    for found in on_ranks(3, body):
        np.testing.assert_array_equal(found, fixed)


def test_a_picture_of_all_ranks():
    def body(made, rank):
        executor = made(graph())
        executor.run("train", {"x": X, "t": T})
        return executor.placement.timeline()

    first, second = on_ranks(2, body)
    assert first == second and first.count("<title>group 1, weight 0.50") == 2 and "rank 1" in first
    behind = meetings_svg([np.array([[7, 3, 10.0, 11.0, 12.0, 0.25]]), np.empty((0, 6))])
    assert "group 7, weight 0.25, 3 behind" in behind and "waits 1 s" in behind


def test_a_batch_that_does_not_divide_is_refused():
    def body(made, rank):
        with pytest.raises(ShapeError, match="a batch of 23 in 'x' does not divide among 2 workers"):
            made(graph()).run("train", {"x": X[:23], "t": T[:23]})

    on_ranks(2, body)


def test_mistakes_are_named():
    for wrong in ({"min_ranks": 1}, {"min_ranks": 2.5}, {"wait": 0}, {"decay": 0}, {"decay": 2}):
        with pytest.raises(ArgumentError, match=str(next(iter(wrong)))):
            PartialReduce(**wrong)
    with pytest.raises(ArgumentError, match="cannot talk to each other"):
        ht.Executor(graph(), strategy=PartialReduce(), comm=Connected(Place(0, 2), None))
    strategy = PartialReduce(3, wait=2.0).build(graph()["eval"], 4)
    assert Strategy.from_json(strategy.to_json()) == strategy
    first, *rows = str(strategy).splitlines()
    assert first == "each rank alone, averaged in groups of 3, or fewer after 2 s; who is behind counts 0.5 a step"
    assert [row.split("  ")[0] for row in rows if row.endswith("averaged with partners")] == [*strategy.variables]


def test_the_strategy_says_of_each_variable_whether_it_is_averaged():
    """Two processes by hand: each steps on its half, then both get the mean of what is `Averaged`."""
    each, mean, halves = [ht.Executor(graph()) for _ in range(2)], "model/linear/weight", np.split(np.arange(24), 2)
    for _ in range(3):
        for ex, half in zip(each, halves):
            ex.run("train", {"x": X[half], "t": T[half]})
        shared = (each[0].state[mean] + each[1].state[mean]) / 2
        for ex in each:
            ex.state[mean] = shared
    wanted = [{v: ex.state[v] for v in ex.state if v.startswith("model/")} for ex in each]

    def work(comm):
        g, counting = graph(), CountingComm(comm)
        plain = PartialReduce().build([g["train"][0], *g["train"][1].values()], 2)
        plain.variables = {mean: plain.variables[mean]}
        strategy = Strategy.from_json(plain.to_json())
        assert strategy == plain and f"{mean}  whole" in str(strategy)
        with connect([server.address], comm.rank) as client:
            ex = ht.Executor(g, strategy=strategy, comm=Connected(counting, client))
            sent = []
            for _ in range(3):
                before = counting.sent.copy()
                ex.run("train", {"x": X, "t": T})
                sent.append(counting.sent - before)
            found = {v: ex.state[v].copy() for v in wanted[0]}
            client.leave()
        cost = simulate(g["train"], strategy, MachineProfile(), world_size=2, shapes={"x": X.shape, "t": T.shape})
        return found, sent, cost.sent

    with ServerThread(options("asp", 2)) as server:
        for rank, (found, sent, simulated) in enumerate(run_ranks(2, work)):
            for v, value in wanted[rank].items():
                np.testing.assert_allclose(found[v], value, rtol=2e-5, atol=1e-6, err_msg=v)
            assert sent == [{(rank, 1 - rank): 4 * 6 * 5}] * 3
            assert simulated == {(0, 1): 4 * 6 * 5, (1, 0): 4 * 6 * 5}


def test_partners_keep_no_variable_that_others_would_wait_for_and_none_of_integers():
    strategy, (loss,) = PartialReduce().build(graph()["eval"], 2), graph()["eval"]
    for name, home in (("model/linear/weight", Kept(strategy.base, strategy.base)), ("n", Averaged())):
        strategy.variables = {name: home}
        count = ht.variable("n", np.zeros(2, "int64"), trainable=False)
        said = "for which all ranks would wait" if name != "n" else "partners average 'n', which is i64"
        with pytest.raises(ArgumentError, match=rf"{said}[\s\S]*fix: leave it out, so that it stays each rank's own"):
            strategy.check([loss, count], 1)
    with pytest.raises(
        ArgumentError, match="not a variable that partners average: wanted nothing; wrong or missing: copied"
    ):
        Averaged.from_json({"copied": True})


# -- the controllers ------------------------------------------------------------------------------------------------


def ready(store, worker, seq, model=0, step=0, **facts):
    message = Message(Kind.READY, worker=worker, seq=seq, key=model, step=step, epoch=1, meta=facts or None)
    return store.handle(message, 0.0)


def members(answers):
    return [(answer.worker, answer.ids.tolist()) for answer in answers]


def test_each_model_has_groups_of_its_own_and_who_waits_in_one_is_not_waited_for_in_another():
    store = new_store(4, ASP())
    assert ready(store, 0, 3, model=1) == ready(store, 1, 3, model=2) == []
    assert members(ready(store, 2, 3, model=1)) == [(0, [0, 2]), (2, [0, 2])]  # the other one may meet worker 3
    assert ready(store, 2, 4, model=3) == ready(store, 3, 3, model=4) == []
    assert members(ready(store, 0, 4, model=5)) == [(1, [1])]  # all wait: the first goes on


def test_a_look_tells_who_waits_for_whom():
    store = new_store(4, ASP())
    for worker in range(2):
        ready(store, worker, 3, model=worker)
    store.now = 2.0
    look = store.status()
    assert look["partners"] == [{"waiting": {str(worker): 2.0}, "for": [2, 3]} for worker in range(2)]
    assert "  worker 1 waits 2 s for partners: worker 2 or 3\n" in as_text(looks_at(("tcp://a:1",), [look], [look]))


def test_who_waits_for_the_end_of_a_clock_is_not_waited_for():
    store = new_store(2, BSP())
    assert ready(store, 0, 3) == []
    [told] = store.handle(Message(Kind.CLOCK, worker=1, seq=3, epoch=1), 0.0)
    assert members([told]) == [(0, [0])]


def test_a_ready_that_comes_again_after_later_ones_does_not_count():
    """Whoever was grouped with one that is not there waited for it forever."""
    store = new_store(2, ASP())
    ready(store, 0, 3)
    assert len(ready(store, 1, 3)) == 2
    assert len(ready(store, 1, 4, away=True)) == 1
    again = ready(store, 1, 3)
    assert again == [] and members(ready(store, 0, 4)) == [(0, [0])]
    assert ready(store, 1, 5) == [] and len(ready(store, 1, 4, away=True)) == 1
    assert members(ready(store, 0, 5)) == [(0, [0, 1]), (1, [0, 1])]
    assert ready(store, 0, 4) == [] and ready(store, 1, 6) == []


def test_who_is_away_is_not_waited_for_and_comes_back():
    store = new_store(3, ASP())
    assert ready(store, 0, 3, group=3) == []
    assert [answer.worker for answer in ready(store, 1, 3, group=3)] == []
    told = ready(store, 2, 3, away=True)
    assert [(answer.worker, None if answer.ids is None else answer.ids.tolist()) for answer in told] == [
        (2, None), (0, [0, 1]), (1, [0, 1]),
    ]  # fmt: skip
    assert ready(store, 0, 4, group=3) == ready(store, 2, 4, group=3) == []
    assert len(ready(store, 1, 4, group=3)) == 3


def test_what_controllers_refuse():
    store = new_store(2, ASP())
    ready(store, 0, 3, group=2, decay=0.25)
    [told] = ready(store, 1, 3, group=2, decay=0.5)
    assert (told.meta["code"], told.meta["message"]) == ("partners", "decay=0.5, another worker has asked for 0.25")
    [told] = ready(store, 1, 4, model=9, group=5)
    assert told.meta["message"] == "groups of 5 among 2 workers" and len(store.partial.of) == 1
    for model in range(1, MOST_MODELS):
        ready(store, 0, 3 + model, model=model)
    [told] = ready(store, 0, 5000, model=MOST_MODELS)
    assert told.meta["code"] == "partners"


def test_workers_that_ask_for_other_groups_are_told():
    with ServerThread(options("asp", 2)) as server, connect([server.address]) as first:
        first.ready(0, group=2, decay=0.5)
        with connect([server.address], 1) as second, pytest.raises(RefusedError, match="let all workers ask alike"):
            second.ready(0, group=2, decay=0.25).wait()

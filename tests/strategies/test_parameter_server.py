"""A one-device model trained by workers and real servers: BSP equals one process, the others learn."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import re
import threading

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, CheckpointError
from hetu.core.graph import OPS
from hetu.core.op import Role
from hetu.core.types import same_type
from hetu.dist.comm.threads import count_names_apart
from hetu.ps import BSP, SSP, Cache, Client, Parameter, RefusedError, ServerProcess
from hetu.ps.saved import restore
from hetu.ps.wire.environment import Place
from hetu.strategies import Connected, ParameterServer, on_servers

from ..dist.test_alike import GIVEN, X, made
from ..pairs import in_turn
from ..ps import network
from ..ps.network import TOKEN, ServerThread, connect, options
from ..samples.update import stranger

ROWS, WORKERS = 8, 2

job = functools.partial(network.job, kind=ServerThread)  # those in processes are told where a test needs one


def served(model: str, optimizer: str, client: Client, rank: int = 0, workers: int = 1, **options) -> ht.Executor:
    """The executor of one worker, under `ParameterServer(**options)`."""
    comm = Connected(Place(rank, workers), client)
    return ht.Executor(build(model, optimizer), strategy=ParameterServer(**options), comm=comm)


def dense(optimizer):
    x, t = ht.placeholder("x", (None, 6)), ht.placeholder("t", (None,), "int64")
    with ht.scope("model"):
        y = ht.nn.Linear(5, 3)(ht.nn.Linear(6, 5, activation=ht.tanh)(x))
        loss = ht.mean(ht.softmax_cross_entropy(y, t))
        return loss, optimizer.minimize(loss), y


def embedded(optimizer):
    ids, t = ht.placeholder("x", (None, 4), "int64"), ht.placeholder("t", (None,), "int64")
    with ht.scope("model"):
        y = ht.nn.Linear(12, 3)(ht.flatten(ht.nn.Embedding(50, 3)(ids), 1))
        loss = ht.mean(ht.softmax_cross_entropy(y, t))
        return loss, optimizer.minimize(loss), y


def batch(step: int, sparse: bool):
    rng = np.random.default_rng(step)
    x = rng.integers(0, 50, (ROWS, 4)) if sparse else rng.normal(size=(ROWS, 6)).astype("f4")
    return {"x": x, "t": rng.integers(0, 3, ROWS)}


class Stranger(ht.optim.Optimizer):
    rule = stranger


OPTIMIZERS = {
    "sgd": lambda: ht.optim.SGD(0.3),
    "adam": lambda: ht.optim.Adam(0.05),
    "lion": lambda: ht.optim.Lion(0.01),
    "ftrl": lambda: ht.optim.FTRL(0.01, l1=0.01),
    "stranger": lambda: Stranger(0.05, blend=0.6),
    "sgd-cosine": lambda: ht.optim.SGD(ht.schedules.cosine(0.5, 40)),
    "momentum-cosine": lambda: ht.optim.Momentum(ht.schedules.cosine(0.1, 10)),
}


def build(model, optimizer):
    with ht.scope("optimizer"):  # counts its name afresh
        rule = OPTIMIZERS[optimizer]()
    loss, updates, y = (embedded if model == "embedded" else dense)(rule)
    return {"train": [loss, updates], "eval": [loss, y]}


def work(client: Client, rank: int, model: str, optimizer: str, steps: int = 6):
    count_names_apart()
    ex = served(model, optimizer, client, rank, WORKERS)
    sparse = model == "embedded"
    losses = [float(ex.run("train", batch(s, sparse))[0]) for s in range(steps)]
    return losses, ex.run("eval", batch(99, sparse)), ex


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("optimizer", "model"),
    in_turn(2, ["sgd", "adam", "momentum-cosine", "lion", "ftrl", "stranger"], ["embedded", "dense"]),
)
def test_bsp_equals_one_process_on_whole_batches(model, optimizer):
    one = ht.Executor(build(model, optimizer))
    wanted = [float(one.run("train", batch(s, model == "embedded"))[0]) for s in range(6)]
    loss, y = one.run("eval", batch(99, model == "embedded"))
    kind = ServerProcess if optimizer == "stranger" else ServerThread  # a process has not heard of that rule
    results = job("bsp", WORKERS, lambda client, rank: work(client, rank, model, optimizer), kind=kind)
    np.testing.assert_allclose(np.mean([r[0] for r in results], axis=0), wanted, rtol=1e-5)
    for _, (own_loss, own_y), _ in results:
        np.testing.assert_allclose(own_y, y, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(own_loss, loss, rtol=1e-5)


@pytest.mark.parametrize(
    ("mode", "batches"),
    [("bsp", ([0, 2], [0, 0], [1, 2], [3, 5])), ("asp", [range(0, 300_000, 2), range(2)])],
    ids=["no rows", "more than a message"],
)
def test_a_step_counts_once_on_each_server_of_a_table(mode, batches):
    """The bias correction of Adam lagged behind where no row was changed, and ran ahead by one for each message."""

    def body(client: Client | None = None, rank: int = 0):
        where = {} if client is None else {"strategy": ParameterServer(), "comm": Connected(Place(0, 1), client)}
        ids, rows = ht.placeholder("ids", (None,), "int64"), np.ones((300_000, 1), "float32")  # too many for one server
        found = ht.embedding(ht.variable("table", rows), ids)
        loss = ht.mean(ht.square(found))
        ex = ht.Executor({"train": [loss, ht.optim.Adam(0.1).minimize(loss)], "all": [found]}, **where)
        for some in batches:
            ex.run("train", {"ids": np.array(some)})
        return ex.run("all", {"ids": np.arange(6)})[0]

    np.testing.assert_allclose(job(mode, 1, body, servers=2)[0], body(), rtol=1e-5)


# Precision is left out, as servers refuse float16 by itself.
LEFT_OUT = ("initial values", "precision")
UNLIKE = {what: row for what, row in GIVEN.items() if "strategy" not in row[0] | row[1] and what not in LEFT_OUT}


@pytest.mark.parametrize(
    "what", [pytest.param(w, marks=() if w in ("a rate", "seed") else pytest.mark.nightly) for w in UNLIKE]
)
def test_workers_that_know_only_the_servers_are_told_what_differs_from_the_first_of_them(what):
    """They would train two models in one set of tables."""
    *given, kind, _ = UNLIKE[what]
    first = threading.Event()

    def body(client: Client, rank: int):
        worker = Connected(Place(rank, 2), client)
        if not rank:
            made(worker, strategy=ParameterServer, **given[rank])
            first.set()
            return ""
        assert first.wait(60)
        with pytest.raises(kind) as caught:
            made(worker, strategy=ParameterServer, **given[rank])
        return str(caught.value)

    one, other = job("asp", 2, body)[1].split(" is\n  ")[1].split("\n")[:2]
    assert one.endswith(" on the first rank to come,") and other.endswith(" on rank 1")
    assert one.split(" on ")[0] != other.strip().split(" on ")[0]


@pytest.mark.parametrize(("mode", "from_step"), [("bsp", 1), ("bsp", 5), ("bsp", 9), ("ssp:2", 1), ("asp", 1)])
def test_workers_that_know_only_the_servers_are_fed_alike_later_on(mode, from_step):
    """Under BSP, which equals one process; otherwise each worker may go through the data as it likes."""

    def body(client: Client, rank: int):
        ex, told = made(Connected(Place(rank, 2), client), strategy=ParameterServer), ""
        try:
            for step in range(9):
                x = np.random.default_rng(step if not rank or step < from_step else -step & 99).normal(size=(4, 6))
                ex.run("train", {"x": x})
                ex.run("eval", {"x": x[: 1 + rank]})  # which no step waits for
            client.clock().wait()
        except RefusedError as error:
            told = str(error)
            client.leave()  # or the other would wait; nobody is told twice
        return told

    told = "".join(job(mode, 2, body))
    other = from_step < 9 and mode == "bsp"
    pattern = (
        rf"worker ([01]) had other feeds, or another step, than worker (?!\1)[01] at the end of clock {from_step}; e"
    )
    assert re.search(pattern, told) if other else not told, told


LATER = {  # what worker 0 is fed as x and t, then worker 1; and whether all agree on a number before
    "one array twice": (lambda x, t, other: (x, x), lambda x, t, other: (other, other), False),
    "in each other's place": (lambda x, t, other: (x, t), lambda x, t, other: (t, x), False),
    "after numbers that were agreed on": (lambda x, t, other: (x, t), lambda x, t, other: (other, t), True),
}


@pytest.mark.parametrize("how", LATER)
def test_all_that_workers_are_fed_counts(how):
    one, another, agreed = LATER[how]

    def body(client: Client, rank: int):
        count_names_apart()
        x, t = (ht.placeholder(name, (None, 3)) for name in "xt")
        loss = ht.mean(ht.square(ht.nn.Linear(3, 3)(x) - t))
        entries = [loss, ht.optim.SGD(0.1).minimize(loss)]
        ex = ht.Executor(entries, strategy=ParameterServer(), comm=Connected(Place(rank, 2), client))
        if agreed:
            ex.placement.agree({"found": 0.0})
        with contextlib.suppress(RefusedError):
            for step in range(3):
                given = np.random.default_rng(step).normal(size=(3, 4, 3)).astype("f4")
                ex.run(dict(zip("xt", (another if rank and step else one)(*given))))
            client.clock().wait()
            return False
        with contextlib.suppress(RefusedError):
            client.leave()
        return True

    assert any(job("bsp", 2, body))


def test_workers_that_know_only_the_servers_are_fed_the_same_first_batch():
    def body(client: Client, rank: int):
        ex, told = made(Connected(Place(rank, 2), client), strategy=ParameterServer), ""
        try:
            ex.run("train", {"x": X["x"] * rank})
        except ArgumentError as error:  # on the second to come
            told = str(error)
            ex.run("train", {"x": X["x"]})
        return told

    told = "".join(job("bsp", 2, body))
    assert re.search(
        r"what 'x' is fed is\n  f32\[4, 6\] of .*, .* to come,\n  f32\[4, 6\] of .*, .* on rank [01]", told
    )
    assert told.count("feed all ranks the whole batch") == 1


def test_a_value_for_what_servers_keep_is_refused():
    """The next pull would replace it without a word."""

    def body(client: Client, rank: int):
        ex = served("dense", "sgd", client)
        with pytest.raises(ArgumentError, match="is a copy, which the next step replaces(\n.*)+fix: load a checkpoint"):
            ex.state["model/linear/bias"] = np.zeros(5)
        return [*ex.state]

    job("bsp", 1, body)


class ByHand(ht.optim.Optimizer):
    def new_values(self, p, g, rate, step):
        return {p: p - rate * g}


OTHERS = [
    ht.optim.SGD(0.2),
    ht.optim.Adam(0.1),
    pytest.param(ht.optim.Momentum(0.1, 0.5), marks=pytest.mark.nightly, id="Momentum"),
]


@pytest.mark.parametrize("other", OTHERS, ids=repr)
def test_executors_of_one_state_train_a_variable_alike(other):
    """A server keeps one rule for each parameter: by another one it would train by that of the first executor."""

    def body(client: Client, rank: int):
        w, state = ht.variable("w", np.ones(3, "float32")), None
        for optimizer in (ht.optim.SGD(0.1), other):
            updates = optimizer.minimize(ht.sum(ht.square(w)))
            worker = Connected(Place(rank, 1), client)
            state = ht.Executor([updates], strategy=ParameterServer(), comm=worker, state=state).state

    with pytest.raises(ArgumentError, match=r"servers train 'w' for another executor by sgd at"):
        job("bsp", 1, body)


def three_steps(ex: ht.Executor, model: str) -> list[float]:
    return [float(ex.run("train", batch(step, model == "embedded"))[0]) for step in range(3)]


@pytest.mark.parametrize(("optimizer", "model"), in_turn(2, ["adam", "momentum-cosine"], ["embedded", "dense"]))
def test_a_table_belongs_to_the_state_of_an_executor(model, optimizer):
    """A second executor begins anew, as it does on one process; with the state of another it goes on from that."""

    def trained(**where):
        count_names_apart()
        ex = ht.Executor(build(model, optimizer), **where)
        return ex.state, three_steps(ex, model)

    def body(client: Client, rank: int):
        where = {"strategy": ParameterServer(), "comm": Connected(Place(rank, WORKERS), client)}
        state, first = trained(**where)
        return first, trained(**where)[1], trained(**where, state=state)[1], trained(**where)[1]

    state, anew = trained()
    wanted = anew, anew, trained(state=state)[1], anew
    np.testing.assert_allclose(np.mean(job("bsp", WORKERS, body), axis=0), wanted, rtol=1e-5)


def tables(client: Client) -> list[str]:
    """What servers keep for executors, but for what ranks have agreed on."""
    kept = [table["name"] for status in client.status() for table in status["largest"]]
    return sorted(name for name in kept if "by ranks, " not in name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("keeps", [None, 0, 1])
def test_what_belongs_to_a_state_that_is_gone_goes_with_the_last_worker_that_had_it(keeps):
    """A cell that is run again leaves nothing behind, whichever worker's garbage is collected first."""
    turn = threading.Barrier(WORKERS)

    def body(client: Client, rank: int):
        where = {"strategy": ParameterServer(), "comm": Connected(Place(rank, WORKERS), client)}
        found, kept = [], []
        for _ in range(3):
            count_names_apart()
            executor = ht.Executor(build("embedded", "sgd"), **where)
            found.append((three_steps(executor, "embedded"), tables(client)))
            kept += [executor.state] if rank == keeps else []
            del executor
            gc.collect()
            turn.wait(30)
        return found

    for found in job("bsp", WORKERS, body):
        first, *later = (names for _, names in found)
        assert len(first) == 2
        for number, names in enumerate(later, 2):
            mine = [f"{name} ({number})" for name in first]
            assert names == sorted(mine) if keeps is None else {*mine, *first} <= {*names}
        assert all(losses == found[0][0] for losses, _ in found)  # each cell begins anew


def test_an_executor_leaves_alone_what_its_script_has_made_by_a_like_name():
    name = "model/embedding/weight"

    def body(client, rank):
        client.create({name: Parameter((4,))}, {name: np.ones(4)})
        count_names_apart()
        where = {"strategy": ParameterServer(), "comm": Connected(Place(0, 1), client)}
        executor = ht.Executor(build("embedded", "sgd"), **where)
        three_steps(executor, "embedded")
        return executor.state.copies[name], client.pull(name).wait().tolist()

    assert job("bsp", 1, body) == [(f"{name} (2)", [1.0] * 4)]


def test_servers_take_over_what_a_state_holds():
    """Their first values were those of the initializer, which were then pulled over trained ones."""

    def body(client: Client, rank: int):
        count_names_apart()
        alone = ht.Executor(build("dense", "sgd"))
        three_steps(alone, "dense")
        worker = Connected(Place(rank, 1), client)
        ex = ht.Executor(build("dense", "sgd"), strategy=ParameterServer(), comm=worker, state=alone.state)
        return [x.tolist() for x in (alone.state["model/linear/bias"], ex.state["model/linear/bias"])]

    before, after = job("bsp", 1, body)[0]
    assert before == after and any(before)


@pytest.mark.parametrize(("optimizer", "reason"), [(ht.optim.LAMB, "sum at .* single elements"), (ByHand, "no update")])
def test_what_servers_cannot_train_is_refused(optimizer, reason):
    """Else each worker would train a copy of its own."""

    def body(client: Client, rank: int):
        worker = Connected(Place(rank, 1), client)
        ex = ht.Executor({"train": dense(optimizer(0.1))[:2]}, strategy=ParameterServer(), comm=worker)
        ex.run("train", batch(0, False))

    with pytest.raises(ArgumentError, match=f"servers cannot apply .* to 'model/.*{reason}"):
        job("bsp", 1, body)


def by_turns(first, second):
    """Two sub-graphs that train a variable each."""
    x = ht.placeholder("x", (None, 3))
    a, b = (ht.variable(name, np.ones((3, 1), "f")) for name in "ab")
    losses = [ht.mean((x @ w) ** 2) for w in (a, b)]
    steps = [by.minimize(loss, [w]) for by, loss, w in zip((first, second), losses, (a, b))]
    return {"first": [losses[0], steps[0]], "second": [losses[1], steps[1]]}


def test_an_optimizer_that_counts_steps_of_variables_by_turns_is_refused():
    """One process counts all its steps, servers those of each variable: Adam would correct its bias otherwise."""
    feed = {"x": np.ones((2, 3), "f")}

    def body(client, rank):
        comm, adam = Connected(Place(0, 1), client), ht.optim.Adam(0.1)
        with pytest.raises(ArgumentError, match="the sub-graph 'second' counts a step of the adam(.|\n)*of its own"):
            ht.Executor(by_turns(adam, adam), strategy=ParameterServer(), comm=comm)
        with ht.scope("own"):
            own = by_turns(ht.optim.Adam(0.1), ht.optim.Adam(0.1))
        executor, alone = ht.Executor(own, strategy=ParameterServer(), comm=comm), ht.Executor(own)
        for name in ("first", "second", "second", "first"):
            np.testing.assert_array_equal(executor.run(name, feed)[0], alone.run(name, feed)[0])

    job("bsp", 1, body)


def test_a_server_without_an_operator_of_the_rule_says_so_at_once():
    @ht.op(infer=same_type, dims="...->...")
    def unheard(xp, x):
        return xp.sign(x)

    @ht.optim.update_rule
    def unheard_descent(p, g, lr):
        return p - lr * unheard(g)

    class Unheard(ht.optim.Optimizer):
        rule = unheard_descent

    def body(client: Client, rank: int):
        worker = Connected(Place(rank, 1), client)
        ex = ht.Executor({"train": dense(Unheard(0.1))[:2]}, strategy=ParameterServer(), comm=worker)
        ex.run("train", batch(0, False))

    try:
        with pytest.raises(RefusedError, match="no operator 'unheard' here"):
            job("bsp", 1, body, kind=ServerProcess)
    finally:
        for name in ("unheard", "unheard_descent", "unheard_descent_rows"):
            OPS.pop(name)


@pytest.mark.parametrize("mode", ["asp", "ssp:2"])
def test_other_modes_learn(mode):
    def body(client: Client, rank: int):
        count_names_apart()
        ex = served("dense", "sgd", client, rank, WORKERS)
        return [float(ex.run("train", batch(0, False))[0]) for _ in range(40)]

    for losses in job(mode, WORKERS, body):
        assert losses[-1] < 0.5 * losses[0]


def test_a_table_that_is_only_looked_up_lives_on_the_servers():
    def body(client: Client, rank: int):
        _, _, ex = work(client, rank, "embedded", "sgd", steps=1)
        steps = [s.node for s in ex.program("train", batch(0, True)).steps if s.node.role is Role.COMMUNICATION]
        return sorted(ex.state), [n.op.name for n in steps]

    for names, steps in job("bsp", WORKERS, body):
        assert not any("embedding" in name for name in names)
        assert steps.count("pull_rows") == steps.count("push_rows") == 1
        assert steps.count("push") == steps.count("pull") == steps.count("tick") == 1


def test_a_batch_that_does_not_divide_is_refused():
    def body(client: Client, rank: int):
        count_names_apart()
        ex = served("dense", "sgd", client, rank, WORKERS)
        with pytest.raises(ht.errors.ShapeError, match="does not divide among 2 workers") as error:
            ex.run("train", {name: value[:7] for name, value in batch(0, False).items()})
        assert "each worker its own, as bags need: ParameterServer(local_feeds=True)" in error.value.fix

    job("bsp", WORKERS, body)


# -- consistency --------------------------------------------------------------------------------------------------


def test_a_strategy_decides_on_the_consistency_unless_another_worker_has():
    def body(client: Client, rank: int):
        count_names_apart()
        served("dense", "sgd", client, consistency=SSP(2))
        assert client.status()[0]["consistency"] == "ssp:2"
        served("dense", "sgd", client, consistency=SSP(2))
        with pytest.raises(RefusedError, match="the job runs under ssp:2, worker 0 asks for bsp"):
            served("dense", "sgd", client, consistency=BSP())

    job("asp", 1, body, servers=2)


def test_each_variable_may_have_a_mode_of_its_own_and_the_loosest_bounds_the_clocks():
    modes = {"*embedding*": SSP(3), "*": BSP()}

    def body(client: Client, rank: int):
        count_names_apart()
        ex = served("embedded", "sgd", client, rank, WORKERS, consistency=modes)
        assert client.status()[0]["consistency"] == "ssp:3"
        assert sorted(p.consistency for p in client.parameters.values() if p.rule != "add") == ["bsp", "ssp:3"]
        return [float(ex.run("train", batch(0, True))[0]) for _ in range(40)]

    for losses in job("bsp", WORKERS, body, servers=2):
        assert losses[-1] < 0.5 * losses[0]
    with pytest.raises(ArgumentError, match="consistency is asked for 'model/embedding/weight', and none for") as told:
        job("bsp", 1, lambda client, _: served("embedded", "sgd", client, consistency={"*embedding*": SSP(3)}))
    assert told.value.fix == 'say it of all that servers keep: consistency={..., "*": BSP()}'


# -- the cache ----------------------------------------------------------------------------------------------------


def in_turns(cache: Cache | None, steps: int = 12):
    """Two workers, one step each in turn, in one thread: what they saw, the table in the end, and rows fetched."""
    with ServerThread(options("asp", 2)) as server, connect([server.address]) as a, connect([server.address], 1) as b:
        workers = [served("embedded", "sgd-cosine", c, rank, 2, cache=cache) for rank, c in enumerate((a, b))]
        losses = [float(workers[s % 2].run("train", batch(s, True))[0]) for s in range(steps)]
        for executor in workers:
            executor.placement.comm.rows.flush()
        table = next(name for name, parameter in a.parameters.items() if parameter.sparse)
        return losses, a.pull(table).wait(), workers[0].placement.comm.rows.counters


def test_a_cache_with_bounds_of_zero_is_no_cache_bit_for_bit():
    losses, table, _ = in_turns(None)
    for policy in ("lru", "lfuopt", "auto"):
        own_losses, own_table, seen = in_turns(Cache(policy, 20, pull_bound=0, push_bound=0))
        assert own_losses == losses and seen.lookups == 6 * 16
        np.testing.assert_array_equal(own_table, table)


def test_bounds_save_rows_and_lead_to_about_the_same_table():
    tight, loose = (in_turns(Cache("lfu", 50, bound, bound), steps=40) for bound in (0, 10))
    assert loose[2].lookups == tight[2].lookups and loose[2].fetched < 0.7 * tight[2].fetched
    assert loose[2].pushed < 0.5 * tight[2].pushed
    np.testing.assert_allclose(loose[1], tight[1], atol=0.2)


def test_a_cache_for_adam_is_refused():
    def body(client: Client, rank: int):
        with pytest.raises(ArgumentError, match="whose update is adam: a cache sends sums of finished steps"):
            served("embedded", "adam", client, cache=Cache())

    job("bsp", 1, body)


# -- rows asked for a step ahead ----------------------------------------------------------------------------------


def run_ahead(mode: str, cache: Cache | None, announce):
    """What two workers saw in six steps, and how many answers were on their way after each."""

    def body(client: Client, rank: int):
        count_names_apart()
        ex = served("embedded", "sgd", client, rank, WORKERS, cache=cache)
        losses, waiting = [], []
        for s in range(6):
            losses.append(float(ex.run("train", batch(s, True), ahead=announce(s))[0]))
            waiting.append(sum(map(len, ex.placement.comm.rows.asked.values())))
        return losses, ex.run("eval", batch(99, True))[1].tolist(), waiting

    return job(mode, WORKERS, body)


@pytest.mark.parametrize("cache", [None, Cache("lfu", 20, 2, 2)], ids=["no cache", "cache"])
def test_asking_ahead_changes_when_rows_travel_and_nothing_else(cache):
    plain = run_ahead("bsp", cache, lambda s: None)
    early = run_ahead("bsp", cache, lambda s: batch(s + 1, True) if s < 5 else None)
    assert [worker[:2] for worker in early] == [worker[:2] for worker in plain]
    assert {tuple(worker[2]) for worker in plain} == {(0,) * 6} and early[0][2] == [1, 1, 1, 1, 1, 0]
    if cache is None:  # what was announced need not come
        wrong = run_ahead("bsp", cache, lambda s: batch(s + 70, True))
        assert [worker[:2] for worker in wrong] == [worker[:2] for worker in plain]


def test_the_training_loop_announces_the_next_batch():
    def body(client: Client, rank: int):
        ex = served("embedded", "sgd", client)
        batches = [(b["x"], b["t"]) for b in (batch(s, True) for s in range(4))]
        rows, answered = ex.placement.comm.rows, []
        pull = rows.pull
        rows.pull = lambda *given: (answered.append(sum(map(len, rows.asked.values()))), pull(*given))
        ht.fit(ex, batches, epochs=2, inputs=["x", "t"], progress=False)
        assert answered == [0, 1, 1, 1] * 2

    job("bsp", 1, body)


# -- checkpoints --------------------------------------------------------------------------------------------------


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


DENSE = [pytest.param("dense", "adam", None, marks=pytest.mark.nightly)]  # as the other, whose layer is dense


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "optimizer", "cache"),
    [*DENSE, ("embedded", "adam", None), ("embedded", "sgd-cosine", Cache("lru", 20, 3, 3))],
)
def test_checkpoints_pass_between_one_process_and_servers_and_training_goes_on(model, optimizer, cache, tmp_path):
    sparse = model == "embedded"
    one = ht.Executor(build(model, optimizer))
    for s in range(3):
        one.run("train", batch(s, sparse))
    one.save(tmp_path / "one", {"note": 7})

    def body(client: Client, rank: int, load: str, steps: range, save: str):
        count_names_apart()
        ex = served(model, optimizer, client, rank, WORKERS, cache=cache)
        extra = ex.load(tmp_path / load)
        ex.save(tmp_path / "again", extra)
        losses = [float(ex.run("train", batch(s, sparse))[0]) for s in steps]
        ex.save(tmp_path / save)
        losses += [float(ex.run("train", batch(s, sparse))[0]) for s in range(6, 8)]
        return extra, losses

    first = job("bsp", WORKERS, lambda c, r: body(c, r, "one", range(3, 6), "six"), servers=2)
    assert [extra for extra, _ in first] == [{"note": 7}] * WORKERS
    count_names_apart()
    other = ht.Executor(build(model, optimizer), seed=1)
    assert other.load(tmp_path / "again") == {"note": 7}
    same(dict(other.state), dict(one.state))
    second = job("bsp", WORKERS, lambda c, r: body(c, r, "six", range(0), "other"))  # also on fewer servers
    if cache is None:  # after a restart a cache begins with fresh rows
        assert [losses for _, losses in second] == [losses[3:] for _, losses in first]


def test_a_checkpoint_of_another_model_changes_nothing_on_the_servers(tmp_path):
    ht.Executor(build("embedded", "sgd")).save(tmp_path / "one")

    def body(client: Client, rank: int):
        count_names_apart()
        ex = served("embedded", "adam", client)
        before = {name: client.pull(name).wait() for name in client.parameters}
        with pytest.raises(CheckpointError, match="belongs to another model"):
            ex.load(tmp_path / "one")
        same({name: client.pull(name).wait() for name in client.parameters}, before)

    job("bsp", 1, body)


def test_a_worker_that_comes_back_does_not_undo_what_others_have_done_since_the_checkpoint():
    with ServerThread(options("asp", 2)) as server, connect([server.address]) as a, connect([server.address], 1) as b:
        first = {"w": Parameter((2,), "float64", options={"learning_rate": 1.0})}, {"w": np.zeros(2)}
        a.create(*first)

        late = threading.Thread(target=b.create, args=first)

        def read():  # the other worker starts while this one is at it, and waits
            late.start()
            return np.array([[5.0, 5.0]])

        restore(a, "w", [(None, read)], step=0)
        late.join()
        a.push("w", np.ones(2)).wait()
        restore(b, "w", [(None, lambda: pytest.fail("nothing is missing"))], step=0)
        assert b.pull("w").wait().tolist() == [4.5, 4.5]


# -- in a job -----------------------------------------------------------------------------------------------------


def test_workers_know_the_servers_only_and_executors_share_one_connection(monkeypatch):
    """No MPI is asked for: rank and servers are in the environment."""
    monkeypatch.setattr(on_servers, "world", lambda: pytest.fail("communication was started"))
    with ServerProcess(options("asp", 2)) as server:
        for name, value in {"SERVERS": server.address, "SERVER_TOKEN": TOKEN}.items():
            monkeypatch.setenv(f"HETU_{name}", value)
        monkeypatch.setenv("PMI_RANK", "1")
        monkeypatch.setenv("PMI_SIZE", "2")
        one, other = (ht.Executor(build("dense", "sgd"), strategy=ParameterServer()) for _ in range(2))
        client = one.placement.comm.client
        assert other.placement.comm.client is client and client.worker == one.placement.rank == 1
        before = dict(one.state)
        assert other.run("train", batch(0, False))[0] > 0
        assert all(np.array_equal(one.state[name], value) for name, value in before.items())
        client.leave()
        atexit.unregister(client.leave)
        client.close()


def test_servers_make_no_value_that_a_worker_still_decides_about():
    """As under a loss scale, whose step is not taken where a gradient overflowed."""

    def body(client: Client, rank: int):
        with pytest.raises(ArgumentError, match=r"servers make the new value of 'model/.*', but where reads it on a"):
            ht.Executor(
                build("embedded", "adam"),
                strategy=ParameterServer(),
                comm=Connected(Place(rank, 1), client),
                precision="float16",
            )

    job("bsp", 1, body)

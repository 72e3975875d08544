"""Small variables that servers keep as one: which go together, and that training is that of one process."""

from __future__ import annotations

import contextlib
import functools
import operator

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError
from hetu.dist.comm.threads import count_names_apart
from hetu.ps import Cache, Client, RefusedError
from hetu.ps.store.messages import INLINE
from hetu.ps.wire.environment import Place
from hetu.strategies import Connected, ParameterServer
from hetu.strategies.bundles import bundled

from ..ps import network
from ..ps.network import ServerThread

job = functools.partial(network.job, kind=ServerThread)
WORKERS = 2
SIZES = {"a": (3,), "b": (2, 2), "large": (INLINE // 4 + 1,), "c": (), "none": (0, 3), "half": (5, 3)}


def test_small_variables_of_a_kind_go_together_up_to_a_chunk():
    made = {name: ht.variable(name, np.zeros(shape, "float32")) for name, shape in SIZES.items()}
    names = [[v.name for v in b.variables] for b in bundled(made.values(), lambda v: v.name == "half")]
    assert names == [["a", "b", "c", "none"], ["large"], ["half"]]
    full = [ht.variable(f"v{k}", np.zeros(INLINE // 4, "float32")) for k in range(40)]
    assert [len(b.variables) for b in bundled(full, lambda v: 0)] == [16, 16, 8]


@pytest.mark.parametrize("count", [1, 2, 60])
def test_parts_are_what_was_joined(count):
    variables = [ht.variable(f"w{k}", np.zeros((k % 3, 2) if k % 2 else (), "float32")) for k in range(count)]
    (bundle,) = bundled(variables, lambda v: 0)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(v.shape).astype("float32") for v in variables]
    whole = bundle.joined(arrays)
    assert whole.shape == bundle.shape
    for array, part in zip(arrays, bundle.parts(whole)):
        np.testing.assert_array_equal(part, array)
    if count > 1:
        nodes = bundle.part_nodes(ht.constant(whole))
        for array, part in zip(arrays, ht.Executor({"e": nodes}).run("e")):
            np.testing.assert_array_equal(part, array)


def model() -> dict[str, list]:
    """Two networks by turns, one under two optimizers, with a variable too large to go with others."""
    count_names_apart()
    x = ht.placeholder("x", (None, 6))
    with ht.scope("left"):
        left = ht.nn.Linear(4, 3)(ht.tanh(ht.nn.Linear(6, 4)(x)))
        large = ht.variable("large", np.linspace(0, 1, INLINE // 4 + 7, dtype="float32"))
        scale = ht.variable("scale", np.float32(1.5))
    with ht.scope("right"):
        other = ht.nn.Linear(6, 3)(x)
    loss = ht.mean(ht.square(left * scale - other)) + ht.mean(ht.square(large))
    of = {
        side: [v for v in ht.Graph((loss,)).leaves("variable") if v.name.startswith(side)] for side in ("left", "right")
    }
    groups = [[v for v in of["left"] if (v.ndim > 1) is matrix] for matrix in (False, True)]
    with ht.scope("rules"):  # counts their names afresh
        rules = ht.optim.SGD(ht.schedules.cosine(0.5, 9)), ht.optim.Adam(0.05), ht.optim.Adam(0.02)
    biases, weights, right = (r.minimize(loss, some) for r, some in zip(rules, (*groups, of["right"])))
    return {"left": [loss, biases | weights], "right": [loss, right]}


TURNS, NAMES = "llrlr", {"l": "left", "r": "right"}


def feeds(turns: str) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    return [{"x": rng.standard_normal((8, 6)).astype("float32")} for _ in turns]


def trained(turns: str, **where) -> tuple[ht.Executor, list[float]]:
    ex = ht.Executor(model(), **where)
    return ex, [float(ex.run(NAMES[turn], feed)[0]) for turn, feed in zip(turns, feeds(turns))]


def test_sub_graphs_update_bundles_of_their_own():
    def body(client: Client, rank: int):
        where = {"strategy": ParameterServer(), "comm": Connected(Place(rank, WORKERS), client)}
        ex, losses = trained(TURNS, **where)
        values = {name: value for name, value in ex.state.items() if name.startswith(("left", "right"))}
        return losses, [name for name in client.parameters if "more" in name], values

    one, wanted = trained(TURNS)
    results = job("bsp", WORKERS, body)
    for _, bundles, values in results:
        assert len(bundles) == 3, bundles  # weights, biases, and the other network
        for name, value in values.items():
            np.testing.assert_allclose(value, one.state[name], rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(np.mean([losses for losses, *_ in results], axis=0), wanted, rtol=1e-5)


@pytest.mark.parametrize("begins", ["served", "alone"])
def test_checkpoints_hold_each_variable_by_itself(begins, tmp_path):
    """Saved on servers and loaded on one process, or the other way round, a training goes on."""
    path = tmp_path / "saved"

    def body(client: Client, rank: int):
        where = {"strategy": ParameterServer(), "comm": Connected(Place(0, 1), client)}
        first, second = ({}, where) if begins == "alone" else (where, {})
        trained(TURNS, **first)[0].save(path)
        ex = ht.Executor(model(), **second)
        ex.load(path)
        return [float(ex.run(NAMES[turn], feed)[0]) for turn, feed in zip(TURNS, feeds(TURNS))]

    one = trained(TURNS)[0]
    wanted = [float(one.run(NAMES[turn], feed)[0]) for turn, feed in zip(TURNS, feeds(TURNS))]
    np.testing.assert_allclose(job("bsp", 1, body)[0], wanted, rtol=1e-5)


def squares(v: ht.Node) -> ht.Node:
    """Their sum; those of a table, of two axes, are looked up."""
    return ht.sum(ht.square(ht.embedding(v, ht.constant(np.arange(3))) if v.ndim == 2 else v))


@pytest.mark.parametrize("shape", [(3,), (3, 2)], ids=["dense", "tables"])
def test_part_of_a_bundle_is_refused_and_says_so(shape):
    def body(client: Client, rank: int):
        worker = Connected(Place(rank, 1), client)
        v, w = (ht.variable(name, np.ones(shape, "float32")) for name in "vw")
        state = None
        for some in ([v, w], [v]):
            updates = ht.optim.SGD(0.1).minimize(functools.reduce(operator.add, map(squares, some)))
            state = ht.Executor([updates], strategy=ParameterServer(), comm=worker, state=state).state

    with pytest.raises(ArgumentError, match="servers keep v for another executor together with other variables"):
        job("bsp", 1, body)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(3,), (3, 2)], ids=["dense", "tables"])
@pytest.mark.parametrize(("first", "second"), [("vw", "wv"), ("w", "vw"), ("v", "wvu"), ("vw", "uwv")])
def test_another_executor_may_name_what_servers_keep_in_another_order_and_train_more_beside_it(first, second, shape):
    """Bundles of one size whose members lie in another order would swap values without a word."""

    def body(client: Client | None = None, rank: int = 0):
        where = {} if client is None else {"strategy": ParameterServer(), "comm": Connected(Place(0, 1), client)}
        made = {name: ht.variable(name, np.full(shape, size, "float32")) for size, name in enumerate("uvw", 1)}
        executors, state = [], None
        for some in (first, second):
            loss = functools.reduce(operator.add, [v.attrs["init"].flat[0] * squares(v) for v in map(made.get, some)])
            updates = ht.optim.SGD(0.01).minimize(loss, [made[name] for name in some])
            seen = [ht.embedding(made[name], ht.constant(np.arange(3))) for name in some if len(shape) == 2]
            executors.append(ht.Executor({"train": [updates], "seen": seen}, state=state, **where))
            executors[-1].run("train")
            state = executors[-1].state
        executors[0].run("train")
        executors[1].run("train")
        if len(shape) == 2:
            return dict(zip(some, executors[1].run("seen")))
        return {name: state[name] for name in {*first, *second}}

    wanted, (found,) = body(), job("bsp", 1, body)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


def test_a_table_that_sub_graphs_train_by_turns_is_a_table():
    """As the update of another sub-graph reads it, servers moved all rows, whose momentum moved those not looked up."""

    def body(client: Client | None = None, rank: int = 0):
        count_names_apart()
        where = {} if client is None else {"strategy": ParameterServer(), "comm": Connected(Place(0, 1), client)}
        ids, table = ht.placeholder("ids", (None,), "int64"), ht.variable("table", np.ones((5, 3), "float32"))
        loss, rule = ht.mean(ht.square(ht.embedding(table, ids))), ht.optim.Adam(0.1)
        turns = {name: [loss * factor, rule.minimize(loss * factor)] for name, factor in (("a", 1), ("b", -2))}
        ex = ht.Executor(turns | {"all": [ht.embedding(table, ids)]}, **where)
        for name, some in zip("abba", ([0, 1], [1, 1], [2, 3], [0, 0])):
            ex.run(name, {"ids": some})
        return ex.run("all", {"ids": np.arange(5)})[0]

    np.testing.assert_allclose(job("bsp", 1, body)[0], body(), rtol=1e-5)


OTHERS = {
    "another rate": lambda: (ht.optim.SGD(0.1), ht.optim.SGD(0.2)),
    "another rule": lambda: (ht.optim.SGD(0.1), ht.optim.Momentum(0.1)),
    "a rate that changes": lambda: (ht.optim.SGD(0.1), ht.optim.SGD(ht.schedules.cosine(0.1, 9))),
}


@pytest.mark.parametrize("where", ["sub-graphs", "executors"])
@pytest.mark.parametrize("what", OTHERS)
def test_a_variable_has_one_optimizer_on_servers(what, where):
    """The last of them trained it in all sub-graphs."""

    def body(client: Client, rank: int):
        options = {"strategy": ParameterServer(), "comm": Connected(Place(0, 1), client)}
        v = ht.variable("v", np.ones(3, "float32"))
        loss = ht.sum(ht.square(v))
        first, second = (rule.minimize(loss) for rule in OTHERS[what]())
        if where == "sub-graphs":
            ht.Executor({"first": [first], "second": [second]}, **options)
        else:
            ht.Executor([second], state=ht.Executor([first], **options).state, **options)

    with pytest.raises(ArgumentError, match=r"sub-graphs train 'v' by different|servers train 'v' for another"):
        job("bsp", 1, body)


def test_a_table_on_servers_is_not_made_anew_for_another_executor_that_only_reads_it():
    """It was evaluated with its first values."""

    def body(client: Client, rank: int):
        options = {"strategy": ParameterServer(), "comm": Connected(Place(0, 1), client)}
        ids, table = ht.placeholder("ids", (None,), "int64"), ht.variable("table", np.ones((5, 3), "float32"))
        loss = ht.mean(ht.square(ht.embedding(table, ids)))
        state = ht.Executor([ht.optim.SGD(0.1).minimize(loss)], **options).state
        ht.Executor([loss], state=state, **options)

    with pytest.raises(ArgumentError, match="the values of 'table' are kept elsewhere"):
        job("bsp", 1, body)


def _another_state(made, rank):
    first, second = made(), made()
    made((first if rank else second).state).run()


def _other_steps(made, rank):
    first, second = made(), made()
    for ex in (first, second) if rank else (second, first):
        ex.run()


@pytest.mark.parametrize(
    ("unlike", "said"),
    [
        (_another_state, "what goes on from another executor is"),
        (lambda made, rank: made((None, made().state)[rank]), "shared state is"),
        (_other_steps, "had other feeds, or another step, than"),
    ],
    ids=["another state", "no state", "steps of another executor"],
)
def test_workers_that_train_other_tables_are_told(unlike, said):
    """They trained two models, each by half of the gradients."""

    def body(client: Client, rank: int):
        v = ht.variable("v", np.ones(3, "float32"))
        updates = ht.optim.SGD(0.1).minimize(ht.sum(ht.square(v)))
        options = {"strategy": ParameterServer(), "comm": Connected(Place(rank, WORKERS), client)}
        try:
            unlike(lambda state=None: ht.Executor([updates], state=state, **options), rank)
        except (ArgumentError, RefusedError) as error:
            with contextlib.suppress(RefusedError):
                client.leave()  # nobody waits for it
            return str(error)

    found = job("bsp", WORKERS, body)
    assert any(text and said in text for text in found), found


@pytest.mark.parametrize("cache", [None, Cache("lru", rows=10, pull_bound=5, push_bound=5)], ids=["none", "lru"])
def test_executors_of_one_state_have_one_cache_and_one_look_ahead(cache):
    """Each held back updates that the other did not see, and took rows asked for before the other's step."""

    def body(client: Client | None = None, rank: int = 0):
        where = {}
        if client is not None:
            where = {"strategy": ParameterServer(cache=cache), "comm": Connected(Place(0, 1), client)}
        ids, table = ht.placeholder("ids", (None,), "int64"), ht.variable("table", np.ones((10, 2), "float32"))
        loss, next_ids = ht.mean(ht.square(ht.embedding(table, ids))), {"ids": [1, 2]}
        entries = {"train": [loss, ht.optim.SGD(0.1).minimize(loss)]}
        first = ht.Executor(entries, **where)
        second = ht.Executor(entries, state=first.state, **where)
        return [float(ex.run("train", next_ids, ahead=next_ids)[0]) for ex in (first, second, first, second)]

    np.testing.assert_allclose(job("bsp", 1, body)[0], body(), rtol=1e-5)


def test_what_servers_keep_is_not_trained_beside_them():
    """The next step on the servers replaced what an executor of one process had made of the copies."""

    def body(client: Client, rank: int):
        w = ht.variable("w", np.ones(3, "float32"))
        loss = ht.sum(ht.square(w))
        updates = ht.optim.SGD(0.1).minimize(loss)
        worker = Connected(Place(rank, 1), client)
        served = ht.Executor([updates], strategy=ParameterServer(), comm=worker)
        assert float(ht.Executor([loss], state=served.state).run()[0]) == 3
        ht.Executor([updates], state=served.state)

    with pytest.raises(ArgumentError, match="this executor would train w, kept elsewhere"):
        job("bsp", 1, body)

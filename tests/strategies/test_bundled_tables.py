"""Tables that servers keep as one: which go together, how few requests a step makes, and that each stays itself."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hetu as ht
from hetu.checkpoint import Checkpoint
from hetu.core.errors import ValueRangeError
from hetu.core.op import Role
from hetu.core.types import Box
from hetu.dist import Comm, DataParallel
from hetu.ps import Cache, Client
from hetu.ps.wire.environment import Place
from hetu.ps.wire.view import looks_at, table_rows
from hetu.strategies import Connected, Hybrid, ParameterServer, bundles, on_servers
from hetu.strategies.bundles import Bundle, bundled

from ..ps import network
from ..ps.network import ServerThread
from .test_hybrid import job as hybrid_job

job = functools.partial(network.job, kind=ServerThread)
BATCH = 8


def tables(*shapes: tuple[int, ...]) -> list[ht.Node]:
    return [ht.variable(f"t{k}", np.full(shape, k, "float32")) for k, shape in enumerate(shapes)]


def test_tables_of_one_row_go_together_however_large():
    made = tables((5, 2), (3,), (1, 2), (900_000, 2), (7, 3))
    found = bundled(made, lambda v: v.shape[1:], made)
    assert [[v.name for v in b.variables] for b in found] == [["t0", "t2", "t3"], ["t1"], ["t4"]]
    assert (found[0].shape, found[0].places[1]) == ((900_006, 2), (slice(5, 6), (1, 2)))


@pytest.mark.parametrize("row", [(), (3,), (2, 0), (2, 3)], ids=str)
def test_the_rows_of_a_bundle_are_those_of_its_tables(row):
    bundle = Bundle(tuple(tables((4, *row), (1, *row), (0, *row))), sparse=True)
    arrays = [np.random.default_rng(k).normal(size=v.shape) for k, v in enumerate(bundle.variables)]
    whole = bundle.joined(arrays)
    assert whole.shape == bundle.shape == (5, *row)
    states = np.stack([whole, -whole])
    for array, part, both in zip(arrays, bundle.parts(whole), bundle.parts(states), strict=True):
        np.testing.assert_array_equal(part, array)
        np.testing.assert_array_equal(both, [array, -array])


# -- messages -----------------------------------------------------------------------------------------------------


def clicks(fields: int, optimizer: Any, *, one: bool = False, rows: int = 40) -> dict[str, list[Any]]:
    """One column of ids for each table, or a single table of all rows."""
    columns = [ht.placeholder(f"ids{k}", (None,), "int64") for k in range(fields)]
    with ht.scope("model"):
        if one:
            found = [ht.nn.Embedding(rows * fields, 4)(ht.stack([c + rows * k for k, c in enumerate(columns)], axis=1))]
        else:
            found = [ht.expand_dims(ht.nn.Embedding(rows, 4)(c), 1) for c in columns]
        loss = ht.mean(ht.square(ht.sum(ht.concat(found, axis=1), axis=(1, 2)) - 1))
        return {"train": [loss, optimizer.minimize(loss)]}


def columns(fields: int, step: int, rows: int = 40) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {f"ids{k}": rng.integers(0, rows, BATCH) for k in range(fields)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(("optimizer", "cache"), [("SGD", None), ("Adam", None), ("SGD", Cache("lru", rows=20))])
def test_a_step_of_many_tables_makes_the_requests_of_one(servers, optimizer, cache):
    """Each table was asked for and pushed by itself, so that 26 took 4 times as long as one of all rows."""

    def body(client: Client, rank: int, one: bool):
        where = {"strategy": ParameterServer(cache=cache), "comm": Connected(Place(0, 1), client)}
        ex = ht.Executor(clicks(26, getattr(ht.optim, optimizer)(0.1), one=one), **where)
        ex.run("train", columns(26, 0))
        before = sum(sum(s["requests"].values()) for s in client.status())
        for step in range(1, 4):
            ex.run("train", columns(26, step), ahead=columns(26, step + 1))
        client.clock().wait()
        return sum(sum(s["requests"].values()) for s in client.status()) - before

    many, single = (job("bsp", 1, functools.partial(body, one=one), servers=servers)[0] for one in (False, True))
    assert many <= single + servers * (cache is None)  # one is asked for rows a step ahead, as nothing computes its ids


@pytest.mark.parametrize("ranks", [1, 2])
def test_tables_of_ranks_that_talk_to_each_other_travel_together(ranks):
    one = ht.Executor(clicks(5, ht.optim.Adam(0.1)))
    wanted = [float(one.run("train", columns(5, step))[0]) for step in range(4)]

    def body(client: Client, comm: Comm):
        ex = ht.Executor(clicks(5, ht.optim.Adam(0.1)), strategy=Hybrid(served="*weight"), comm=Connected(comm, client))
        program = ex.program("train", columns(5, 0))
        steps = [s.node for s in program.steps if s.node.role is Role.COMMUNICATION]
        assert [len(s.inputs) for s in steps if s.op.name in ("pull_rows", "push_rows")] == [5, 10]
        assert {s.inputs[0].shape for s in steps if s.op.name == "pull_rows"} == {(BATCH // ranks,)}
        return [float(ex.run("train", columns(5, step))[0]) for step in range(4)]

    for losses in hybrid_job(ranks, body):
        np.testing.assert_allclose(losses, wanted, rtol=1e-5)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_id_that_a_table_lacks_is_refused_and_named_though_the_next_table_has_such_a_row(ahead):
    def body(client: Client, rank: int):
        ex = ht.Executor(clicks(3, ht.optim.SGD(0.1)), strategy=ParameterServer(), comm=Connected(Place(0, 1), client))
        wrong = columns(3, 0) | {"ids1": np.arange(33, 33 + BATCH)}
        with pytest.raises(ValueRangeError, match=r"ids 33..40 of model/embedding_1/weight, which has 40 rows"):
            ex.run("train", *((columns(3, 0),) if ahead else (wrong,)), ahead=wrong if ahead else None)

    job("bsp", 1, body)


def test_a_table_that_is_looked_up_several_times_travels_by_rows():
    """All of it was pulled and pushed, and Adam moved the rows that were not looked up."""

    def body(client: Client | None = None, rank: int = 0):
        where = {} if client is None else {"strategy": ParameterServer(), "comm": Connected(Place(0, 1), client)}
        ids = [ht.placeholder(name, (None,), "int64") for name in "abc"]
        table = ht.variable("table", np.ones((40, 2), "float32"))
        loss = ht.mean(functools.reduce(operator.mul, [ht.embedding(table, i) for i in ids]))
        all_rows = ht.embedding(table, ht.constant(np.arange(40)))
        ex = ht.Executor({"train": [loss, ht.optim.Adam(0.1).minimize(loss)], "all": [all_rows]}, **where)
        for some in ([3, 4, 5], [3, 3, 3], [5, 6, 3]):
            ex.run("train", dict(zip("abc", np.array(some)[:, None])))
        assert client is None or client.parameters["table"].sparse
        return ex.run("all")[0]

    np.testing.assert_allclose(job("bsp", 1, body)[0], body(), rtol=1e-5)


# -- training is that of one process ------------------------------------------------------------------------------


class Drawn:
    """A model of a few tables, drawn: rows of two widths, ties, ids that follow from rows, two optimizers, parts."""

    def __init__(self, seed: int, *, plain: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.rows = [int(n) for n in rng.choice([1, 2, 7, 30], size=rng.integers(3, 7))]
        self.widths = [int(n) for n in rng.choice([2, 3], size=len(self.rows), p=[0.75, 0.25])]
        self.looked = [k for k in range(len(self.rows)) for _ in range(rng.choice([1, 1, 2]))]  # some twice
        self.ids = rng.choice(["fed", "fed", "column", "bag", "flat", "from rows"], size=len(self.looked))
        self.second = rng.random(len(self.rows)) < 0.4  # trained by the other optimizer
        rules = [lambda: ht.optim.SGD(0.2), lambda: ht.optim.SGD(ht.schedules.cosine(0.2, 9))]
        rules += [] if plain else [lambda: ht.optim.Momentum(0.1), lambda: ht.optim.Adam(0.1)]
        # Adam counts all of its steps, servers those of a table: it trains in no sub-graph but one.
        self.rules = rules[rng.integers(len(rules) - (not plain))], rules[rng.integers(len(rules))]

    def _means(self, tables: list[ht.Node]) -> list[ht.Node]:
        """The means of rows, one for each lookup."""
        found = list[ht.Node]()
        for number, (k, kind) in enumerate(zip(self.looked, self.ids)):
            if kind in ("column", "bag", "flat"):
                ids = ht.placeholder(f"ids{number}", (None, 2), "int64")
                ids = {"column": ids[:, 1], "bag": ids, "flat": ht.reshape(ids, (-1,))}[kind]
            elif kind == "fed" or not found:
                ids = ht.placeholder(f"ids{number}", (None,), "int64")
            else:
                ids = ht.astype(found[-1] > 0, "int64") * 5 % self.rows[k]
            rows = ht.embedding(tables[k], ids)
            rows = ht.reshape(rows, (-1, 2, self.widths[k])) if kind == "flat" else rows
            found.append(ht.mean(rows, axis=tuple(range(1, rows.ndim))))
        return found

    def build(self) -> dict[str, list[Any]]:
        """All are trained, some of them also by turns; some are looked at, and then each table."""
        with ht.scope("model"):
            shapes = zip(self.rows, self.widths)
            tables = [ht.variable(f"t{k}", ht.init.normal(1.0), shape) for k, shape in enumerate(shapes)]
            means = self._means(tables)
            loss = ht.mean(ht.square(ht.tanh(functools.reduce(lambda a, b: a * 0.5 + b, means)) - 0.1))
            mine, others = ([t for t, of in zip(tables, self.second) if of == which] for which in (False, True))
            with ht.scope("rules"):
                first, second = (make() for make in self.rules)
            updates = (first.minimize(loss, mine) if mine else {}) | (second.minimize(loss, others) if others else {})
            turn = first.minimize(loss * 2, mine[:1]) if mine else second.minimize(loss * 2, others)
            whole = [ht.embedding(t, ht.constant(np.arange(t.shape[0]))) for t in tables]
        return {"all": [loss, updates], "turn": [loss, turn], "some": means[:2], "whole": whole}

    def seen(self, between: Callable[[ht.Executor], Any] = lambda _: None, **where: Any) -> list[np.ndarray]:
        """What steps and evaluations show, and all tables; `between` is done when half of the steps are over."""
        ex, found = ht.Executor(self.build(), **where), list[np.ndarray]()
        shapes = {kind: (BATCH,) if kind in ("fed", "from rows") else (BATCH, 2) for kind in self.ids}
        for step, name in enumerate(["all", "all", "turn", "some", "all", "turn", "all"]):
            if step == 4:
                between(ex)
            rng = np.random.default_rng(step)
            drawn = zip(self.looked, self.ids)
            feed = {f"ids{n}": rng.integers(0, self.rows[k], shapes[kind]) for n, (k, kind) in enumerate(drawn)}
            found.append(ex.run(name, {k: v for k, v in feed.items() if k in ex.subgraphs[name].placeholders})[0])
        return [*found, *ex.run("whole")]


def alike(found: list[np.ndarray], wanted: list[np.ndarray], **given: float) -> None:
    for mine, one in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, one, **given)


def draws(usual: int) -> list[Any]:
    return [pytest.param(seed, marks=() if seed < usual else pytest.mark.nightly) for seed in range(usual + 30)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", draws(4))
def test_what_is_drawn_trains_as_on_one_process_and_bit_for_bit_as_each_table_by_itself(seed, monkeypatch):
    drawn = Drawn(seed)

    def body(client: Client, rank: int):
        return drawn.seen(strategy=ParameterServer(), comm=Connected(Place(0, 1), client))

    together = job("bsp", 1, body, servers=1 + seed % 3)[0]
    alike(together, drawn.seen(), rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(on_servers, "bundled", lambda kept, _, tables: [Bundle((v,), v in tables) for v in kept])
    alike(together, job("bsp", 1, body, servers=1 + seed % 3)[0], rtol=0)


TALKING = {"talking": DataParallel(), "accumulating": DataParallel(accumulate=2)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", draws(2))
@pytest.mark.parametrize("kind", ["apart", "talking", "accumulating", "cached"])
def test_what_is_drawn_trains_as_on_one_process_by_two_workers(kind, seed):
    drawn = Drawn(100 + seed, plain=kind == "cached")

    def body(client: Client, rank: int | Comm):
        strategy = ParameterServer(cache=Cache("lru", 3, 0, 0) if kind == "cached" else None)
        if kind in TALKING:
            return drawn.seen(strategy=Hybrid(TALKING[kind], served="model/*"), comm=Connected(rank, client))
        return drawn.seen(strategy=strategy, comm=Connected(Place(rank, 2), client))

    found = hybrid_job(2, body, servers=2) if kind in TALKING else job("bsp", 2, body, servers=2)
    alike(list(map(np.add, *found)), [2 * value for value in drawn.seen()], rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("begins", ["served", "alone"])
def test_checkpoints_hold_each_table_by_itself(begins, tmp_path, monkeypatch):
    """Saved on servers and loaded on one process, or the other way round, a training goes on. Servers get some rows of
    a table after the other, so that a worker never has all of it."""
    drawn, path, read, sizes = Drawn(5), tmp_path / "saved", Checkpoint.read, list[int]()
    monkeypatch.setattr(bundles, "AT_ONCE", 7)

    def seen(self: Checkpoint, name: str, box: Box) -> np.ndarray:
        sizes.append(math.prod(high - low for low, high in box))
        return read(self, name, box)

    monkeypatch.setattr(Checkpoint, "read", seen)

    def body(client: Client, rank: int):
        where = {"strategy": ParameterServer(), "comm": Connected(Place(0, 1), client)}
        first, second = ({}, where) if begins == "alone" else (where, {})
        drawn.seen(lambda ex: ex.save(path), **first)
        return drawn.seen(lambda ex: ex.load(path), seed=1, **second)

    alike(job("bsp", 1, body, servers=2)[0][4:], drawn.seen()[4:], rtol=1e-4, atol=1e-5)
    assert (max(sizes) <= 7) == (begins == "alone")


def test_a_look_names_the_table_of_each_row_and_its_own_number():
    def body(client: Client, rank: int):
        ex = ht.Executor(clicks(3, ht.optim.SGD(0.1)), strategy=ParameterServer(), comm=Connected(Place(0, 1), client))
        ex.run("train", {"ids0": np.arange(8), "ids1": np.arange(8), "ids2": np.full(8, 7)})
        ex.run("train", {"ids0": np.full(8, 3), "ids1": np.full(8, 5), "ids2": np.full(8, 7)})
        client.clock().wait()
        look = client.status()
        rows = table_rows(looks_at(("tcp://a:1", "tcp://b:2"), look, look))
        return next(row[-1] for row in rows[1:] if " and 2 more" in row[0])

    [hot] = job("bsp", 1, body, servers=2)
    tables = ("model/embedding", "model/embedding_1", "model/embedding_2")
    wanted = {f"{name}/weight {row} (2)" for name, row in zip(tables, (3, 5, 7))}
    assert {*hot.split(", ")} == wanted

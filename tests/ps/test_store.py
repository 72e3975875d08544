"""The server's promises, over interleavings that Hypothesis draws: consistency, exactly once, leases, rules."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hetu as ht
from hetu.ps import ASP, BSP, SSP, ParameterStore, consistency
from hetu.ps.store.functions import top_k
from hetu.ps.store.messages import DTYPES, Kind, Message
from hetu.ps.store.rules import ServerRule
from hetu.ps.store.server_table import ServerTable
from hetu.ps.store.table_spec import OVERHEAD, TableSpec

from ..samples.update import ON_ELEMENTS
from .simulation import COLS, DENSE, SPARSE, Worker, contents, gradient, hello, new_store, row_ids, run

schedules = st.lists(st.integers(0, 11), max_size=120)
modes = st.sampled_from([BSP(), SSP(0), SSP(1), SSP(3), ASP()])
quick = settings(max_examples=40)


def simulate(workers, clocks, mode, schedule, echoes=(), rule="sgd"):
    store = new_store(workers, mode, rule)
    crew = [Worker(rank, clocks) for rank in range(workers)]
    leads = run(store, crew, schedule, echoes)
    return store, crew, leads


# -- consistency -----------------------------------------------------------------------------------------------


@quick
@given(schedules, st.sampled_from(["sgd", "momentum", "adagrad", "adam"]))
def test_bsp_has_one_result_over_all_interleavings(schedule, rule):
    store, crew, _ = simulate(3, 3, BSP(), schedule, rule=rule)
    reference, serial, _ = simulate(3, 3, BSP(), [], rule=rule)
    assert contents(store) == contents(reference)
    for worker, other in zip(crew, serial):
        assert [(c, x.tobytes()) for c, x in worker.pulls] == [(c, x.tobytes()) for c, x in other.pulls]


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adagrad", "adam"])
def test_bsp_is_large_batch_training(rule):
    workers, clocks = 3, 4
    store, _, _ = simulate(workers, clocks, BSP(), [], rule=rule)
    dense, sparse = np.zeros((1, 8), "float32"), np.zeros((6, COLS), "float32")
    dense_rule, sparse_rule = ServerRule(rule, dense, {}), ServerRule(rule, sparse, {})
    for clock in range(clocks):
        mean = sum(gradient(w, clock) for w in range(workers)) * np.float32(1 / workers)
        dense_rule.apply(mean)
        total = np.zeros_like(sparse)
        for w in range(workers):
            total[row_ids(w, clock)] += gradient(w, clock, 3, COLS)
        ids = np.unique([row_ids(w, clock) for w in range(workers)])
        sparse_rule.apply_rows(ids, total[ids] * np.float32(1 / workers))
    np.testing.assert_array_equal(store.tables[DENSE].values, dense)
    np.testing.assert_array_equal(store.tables[SPARSE].values, sparse)


@quick
@given(schedules, modes, st.integers(1, 4))
def test_every_request_is_answered_and_the_lead_stays_bounded(schedule, mode, workers):
    store, crew, leads = simulate(workers, 5, mode, schedule)
    assert [w.clock for w in crew] == [5] * workers and not store.parked
    assert max(leads) <= mode.staleness + 1


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_bound_is_reached(bound):
    _, _, leads = simulate(3, 8, SSP(bound), [])  # always the first worker that can go on
    assert max(leads) == bound + 1


def test_asp_never_waits():
    store, crew = new_store(2, ASP()), [Worker(0, 20)]
    run(store, crew, [])
    assert crew[0].clock == 20 and store.clocks.lead == 20


@quick
@given(schedules, modes, st.booleans())
def test_a_read_is_as_fresh_as_promised_and_has_the_readers_own_writes(schedule, mode, own):
    """Every worker adds 1 to its own column in each clock, so a read shows whose clocks it has seen.

    It is one whether the mode is that of the job, or the table's own."""
    workers, clocks = 3, 4
    store = ParameterStore(workers, ASP() if own else mode)
    for worker in range(workers):
        hello(store, worker)
    meta = {"name": "t", "start": 0, "rows": 1, "cols": workers, "rule": "add", "reduce": "sum"}
    its = {"consistency": str(mode)} if own else {}
    store.handle(Message(Kind.CREATE, key=DENSE, seq=1, epoch=1, meta=meta | its), 0.0)
    store.handle(Message(Kind.CREATE, key=SPARSE, seq=2, epoch=1, meta={**meta, "rows": 6, "cols": COLS}), 0.0)

    class Counter(Worker):
        def next(self):
            message = super().next()
            if message.kind is Kind.PUSH and message.key == DENSE:
                one = np.eye(1, workers, self.rank, dtype="float32")
                fields = {"worker": self.rank, "seq": self.seq, "step": self.clock, "epoch": 1}
                message = Message(Kind.PUSH, key=DENSE, values=one, **fields)
            return message

    crew = [Counter(rank, clocks) for rank in range(workers)]
    run(store, crew, schedule)
    for worker in crew:
        for clock, seen in worker.pulls:
            assert seen[0, worker.rank] == clock
            oldest = 0 if mode.staleness == math.inf else max(0, clock - mode.staleness)
            assert (seen[0] >= oldest).all()
            assert not mode.buffered or (seen[0] == clock).all()


@quick
@given(schedules, st.sampled_from(["sgd", "momentum", "adagrad", "adam"]), st.lists(st.integers(0, 1000), max_size=20))
def test_clocks_close_one_after_the_other_however_far_workers_are_apart(schedule, rule, echoes):
    """A table under BSP in a job under ASP: nobody reads it, so pushes of many clocks are held back."""
    store, crew = new_store(3, ASP(), rule, own=("asp", "bsp")), [Worker(rank, 4) for rank in range(3)]
    run(store, crew, schedule, echoes)
    reference, _, _ = simulate(3, 4, BSP(), [], rule=rule)
    np.testing.assert_array_equal(store.tables[SPARSE].values, reference.tables[SPARSE].values)
    assert not store.tables[SPARSE].pending and store.bytes_used == reference.bytes_used


def test_of_a_worker_that_dies_only_the_clock_that_it_did_not_end_is_forgotten():
    store, reference = (new_store(2, ASP(), own=("asp", "bsp")) for _ in range(2))
    for made in (store, reference):
        ahead, slow = Worker(0, 3), Worker(1, 3)
        run(made, [ahead], [])
        if made is store:  # its next life pushes again what the first had pushed of the clock that it did not end
            row = {"ids": row_ids(0, 3), "values": gradient(0, 3, 3, COLS)}
            made.handle(Message(Kind.PUSH, key=SPARSE, worker=0, seq=ahead.seq + 1, step=3, epoch=1, **row), 0.0)
            hello(made, 0, incarnation=101)
        assert len(made.tables[SPARSE].pending) == 3
        run(made, [ahead, slow], [])
    assert store.bytes_used == reference.bytes_used and not store.tables[SPARSE].pending
    np.testing.assert_array_equal(store.tables[SPARSE].values, reference.tables[SPARSE].values)


def test_a_table_is_under_no_looser_mode_than_its_job():
    store = ParameterStore(1, SSP(1))
    hello(store, 0)
    meta = {"name": "t", "start": 0, "rows": 1, "cols": 1}
    for seq, (its, code) in enumerate({"bsp": "", "ssp:1": "", "ssp:2": "consistency", "bps": "value"}.items(), 1):
        [reply] = store.handle(Message(Kind.CREATE, key=seq, seq=seq, epoch=1, meta={**meta, "consistency": its}), 0.0)
        assert (reply.meta or {}).get("code", "") == code, reply.meta


# -- exactly once ----------------------------------------------------------------------------------------------


@quick
@given(schedules, modes, st.lists(st.integers(0, 1000), max_size=60))
def test_messages_that_come_again_change_nothing(schedule, mode, echoes):
    once, _, _ = simulate(3, 3, mode, schedule)
    again, _, _ = simulate(3, 3, mode, schedule, echoes)
    assert contents(again) == contents(once)


@quick
@given(st.permutations(range(6)), st.lists(st.integers(0, 5), max_size=6), st.booleans())
def test_requests_in_flight_together_may_overtake_each_other(order, echoes, buffered):
    """Chunks of one push are not answered one by one: they may arrive in any order, and again before the last."""
    add = [
        Message(Kind.PUSH, key=SPARSE, seq=3 + i, epoch=1, ids=np.array([i]), values=np.full((1, COLS), i + 1, "<f4"))
        for i in range(6)
    ]
    store = new_store(1, BSP() if buffered else ASP(), "add")
    for i in [*order, *echoes]:
        assert [reply.seq for reply in store.handle(add[i], 0.0)] == [3 + i]
    store.handle(Message(Kind.CLOCK, seq=9, epoch=1), 0.0)
    assert store.tables[SPARSE].values[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert store.members[0].done == 9 and not store.members[0].ahead


def test_pushes_held_back_are_bounded_in_memory():
    store = new_store(1, BSP(), memory_limit=2 * OVERHEAD + 4000)
    codes = []
    for seq in range(3, 200):
        push = Message(Kind.PUSH, key=DENSE, seq=seq, epoch=1, values=np.ones((1, 8), "<f4"))
        [reply] = store.handle(push, 0.0)
        codes.append(reply.meta and reply.meta["code"])
    held = codes.count(None)
    assert 0 < held < 197 and codes[held:] == ["memory"] * (197 - held)
    store.handle(Message(Kind.CLOCK, seq=200, epoch=1), 0.0)
    [reply] = store.handle(Message(Kind.PUSH, key=DENSE, seq=201, step=1, epoch=1, values=np.ones((1, 8), "<f4")), 0.0)
    assert reply.kind is Kind.OK


def test_a_parked_request_that_comes_again_is_answered_once():
    store = new_store(2, BSP())
    clock = Message(Kind.CLOCK, worker=0, seq=3, epoch=1)
    assert store.handle(clock, 0.0) == store.handle(clock, 0.0) == []
    assert len(store.handle(Message(Kind.CLOCK, worker=1, seq=1, epoch=1), 0.0)) == 2


def test_a_refused_request_is_refused_again_and_the_next_is_served():
    store = new_store(1, ASP())
    bad = Message(Kind.PULL, key=99, seq=3, epoch=1)
    for _ in range(2):
        [reply] = store.handle(bad, 0.0)
        assert reply.meta["code"] == "key"
    [reply] = store.handle(Message(Kind.PULL, key=DENSE, seq=4, epoch=1), 0.0)
    assert reply.kind is Kind.OK


FED = {  # what each worker is fed, and what all are told
    (5, 6, 6): "worker 0 had other feeds, or another step, than workers 1, 2 at the end of clock 0",
    (6, 6, 5): "worker 2 had other feeds, or another step, than workers 0, 1 at the end of clock 0",
    (7, 6, 7, 5, 7): "workers 1, 3 had other feeds, or another step, than workers 0, 2, 4 at the end of clock 0",
    (5, None, 6): " at the end of clock 0; either may be wrong",
    (5, 5, None): "",
    (5, 5, 5): "",
}


@pytest.mark.parametrize("fed", FED)
def test_whoever_comes_first_the_odd_one_is_named_to_all(fed):
    """A worker that has left is compared too, and who asks again is told the same."""
    for order in itertools.islice(itertools.permutations(range(len(fed))), 0, None, 7 if len(fed) > 3 else 1):
        store, told = new_store(len(fed), BSP()), []
        ends = [
            Message(Kind.CLOCK, worker=w, seq=3, epoch=1, meta=None if given is None else {"fed": given})
            for w, given in enumerate(fed)
        ]
        for worker in order:
            told += store.handle(ends[worker], 0.0)
        assert len(told) == len(fed)
        told += [reply for end in ends for reply in store.handle(end, 0.0)]
        assert {r.kind for r in told} == {Kind.ERROR if FED[fed] else Kind.OK}
        assert all(FED[fed] in str(reply.facts.get("message", "")) for reply in told)
        store, first = new_store(len(fed), BSP()), order[0]
        store.handle(ends[first], 0.0)
        store.handle(Message(Kind.LEAVE, worker=first, seq=4, epoch=1), 0.0)
        told = [reply for worker in order[1:] for reply in store.handle(ends[worker], 0.0)]
        assert {r.kind for r in told} == {Kind.ERROR if FED[fed] else Kind.OK}


BAD = {
    "unknown table": (Message(Kind.PUSH, key=9, values=np.ones((1, 8), "<f4")), "key"),
    "wrong width": (Message(Kind.PUSH, key=DENSE, values=np.ones((1, 7), "<f4")), "value"),
    "wrong dtype": (Message(Kind.PUSH, key=DENSE, values=np.ones((1, 8), "<f8")), "value"),
    "row beyond": (Message(Kind.PULL, key=SPARSE, ids=np.array([6])), "value"),
    "negative row": (Message(Kind.PULL, key=SPARSE, ids=np.array([-1])), "value"),
    "row twice": (Message(Kind.PUSH, key=SPARSE, ids=np.array([1, 1]), values=np.ones((2, COLS), "<f4")), "value"),
    "future clock": (Message(Kind.CLOCK, step=5), "clock"),
    "a reply": (Message(Kind.OK), "kind"),
    "far ahead": (Message(Kind.PING, seq=1 << 40), "seq"),
    "other epoch": (Message(Kind.PING, epoch=2), "epoch"),
    "no such worker": (Message(Kind.PING, worker=7), "worker"),
    "unknown rule": (Message(Kind.CREATE, key=5, meta={"name": "t", "start": 0, "rows": 1, "cols": 1,
                                                       "rule": "sgdd"}), "value"),
    "too large": (Message(Kind.CREATE, key=5, meta={"name": "t", "start": 0, "rows": 1 << 40, "cols": 0}), "memory"),
    "not a description": (Message(Kind.CREATE, key=5, meta={"rows": "many"}), "value"),
    "other description": (Message(Kind.CREATE, key=DENSE, meta={"name": "t1", "start": 0, "rows": 1, "cols": 9}),
                          "spec"),
    "counts without end": (Message(Kind.PUSH, key=SPARSE, ids=np.array([1]), counts=np.array([1 << 40]),
                                   values=np.ones((1, COLS), "<f4")), "value"),
    "no array": (Message(Kind.CREATE, key=5, meta={"name": "t", "start": 0, "rows": 0, "cols": 1 << 62}), "value"),
    "a rule for floats": (Message(Kind.CREATE, key=5, meta={"name": "t", "start": 0, "rows": 1, "cols": 1,
                                                            "dtype": "int64", "reduce": "sum"}), "value"),
    "a rule with a number beyond floats": (Message(Kind.CREATE, key=5, meta={
        "name": "t", "start": 0, "rows": 1, "cols": 1,
        "rule": {"arrays": 2, "scalars": 1, "lines": [["clip", [0], {"min": 10**400, "max": None}]], "outputs": [3]}}),
        "value"),
    "too stale": (Message(Kind.MODE, meta={"consistency": "ssp:" + "9" * 12}), "value"),
    "a step before the first": (Message(Kind.RESTORE, key=DENSE, values=np.ones((1, 8), "<f4"), meta={"step": -1}),
                                "value"),
    "a rate below zero": (Message(Kind.RATE, key=DENSE, meta={"rate": -1.0}), "value"),
    "no rate": (Message(Kind.RATE, key=DENSE, meta={"speed": 1.0}), "value"),
    "unknown function": (Message(Kind.CALL, key=DENSE, meta={"function": "nope"}), "value"),
    "failing function": (Message(Kind.CALL, key=DENSE, meta={"function": "top_k", "arguments": {"q": 1}}), "function"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_a_store_refuses_changes_nothing(name):
    message, code = BAD[name]
    store = new_store(1, ASP())
    before = contents(store), store.bytes_used
    fields = {f: getattr(message, f) for f in ("key", "worker", "step", "ids", "counts", "values", "meta")}
    sent = Message(message.kind, seq=message.seq or 3, epoch=message.epoch or 1, **fields)
    [reply] = store.handle(sent, 0.0)
    assert (reply.kind, reply.meta["code"]) == (Kind.ERROR, code)
    assert (contents(store), store.bytes_used) == before and len(store.tables) == 2
    assert code != "spec" or reply.meta["message"] == "table 1 has cols=8, not cols=9"


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_pushes_of_what_is_no_number_are_refused_where_that_is_asked_for(number, finite):
    store, values = new_store(1, ASP(), finite=finite), np.ones((1, 8), "<f4")
    values[0, 3] = number
    rows = Message(Kind.PUSH, key=SPARSE, seq=4, epoch=1, ids=np.array([2]), values=values[:, 2 : 2 + COLS].copy())
    told = [store.handle(m, 0.0)[0] for m in (Message(Kind.PUSH, key=DENSE, seq=3, epoch=1, values=values), rows)]
    if finite:
        assert [reply.meta["code"] for reply in told] == ["finite"] * 2
        said = "worker 0 pushes 1 numbers of 8 to t1 that are not finite"
        assert told[0].meta["message"] == said and "debug_nans" in told[0].meta["fix"]
    assert all(np.isfinite(table.values).all() for table in store.tables.values()) == finite


# -- workers that come and go ----------------------------------------------------------------------------------


def test_a_silent_worker_is_taken_out_and_the_others_go_on():
    store = new_store(2, BSP(), lease=10.0)
    lost = Message(Kind.PUSH, key=DENSE, worker=1, seq=1, epoch=1, values=np.full((1, 8), 100, "<f4"))
    kept = Message(Kind.PUSH, key=DENSE, worker=0, seq=3, epoch=1, values=np.ones((1, 8), "<f4"))
    store.handle(lost, 0.0), store.handle(kept, 9.0)
    assert store.handle(Message(Kind.CLOCK, worker=0, seq=4, epoch=1), 9.0) == []
    assert store.tick(10.0) == []
    [reply] = store.tick(10.5)
    assert (reply.worker, reply.seq, reply.kind) == (0, 4, Kind.OK)
    np.testing.assert_array_equal(store.tables[DENSE].values, np.full((1, 8), -0.01, "f"))
    [refusal] = store.handle(lost, 11.0)
    assert refusal.meta["code"] == "evicted"


def test_a_lost_worker_ends_the_job_when_so_configured():
    store = new_store(2, BSP(), lease=10.0, on_loss="fail")
    store.handle(Message(Kind.CLOCK, worker=0, seq=3, epoch=1), 9.0)
    [refusal] = store.tick(11.0)
    assert refusal.meta["code"] == "lost" and "worker 1" in refusal.meta["message"]
    [refusal] = store.handle(Message(Kind.PING, worker=0, seq=4, epoch=1), 11.0)
    assert refusal.meta["code"] == "lost"


def test_an_evicted_worker_comes_back_with_its_next_life_at_the_clock_of_the_slowest():
    store = new_store(2, BSP(), lease=10.0)
    for seq, clock in ((3, 0), (4, 1)):
        store.handle(Message(Kind.CLOCK, worker=0, seq=seq, step=clock, epoch=1), 11.0)
        store.tick(11.0)
    hello(store, 1, now=12.0)  # the same life, over another connection
    assert store.clocks.of == {0: 2}
    assert hello(store, 1, incarnation=101, now=12.0).meta["clock"] == 2
    assert store.clocks.of == {0: 2, 1: 2}


def test_a_worker_that_restarts_numbers_its_requests_anew():
    store = new_store(2, BSP())
    push = Message(Kind.PUSH, key=DENSE, worker=1, seq=1, epoch=1, values=np.ones((1, 8), "<f4"))
    store.handle(push, 0.0)
    assert hello(store, 1, incarnation=101).meta["clock"] == 0
    assert not store.tables[DENSE].pending  # what the first life left unfinished
    store.handle(push, 0.0)
    assert len(store.tables[DENSE].pending) == 1
    assert hello(store, 1, incarnation=100).meta["code"] == "hello"  # a replay from the first life


def test_a_worker_that_leaves_is_not_waited_for():
    store = new_store(2, BSP())
    store.handle(Message(Kind.CLOCK, worker=0, seq=3, epoch=1), 0.0)
    replies = store.handle(Message(Kind.LEAVE, worker=1, seq=1, epoch=1), 0.0)
    assert sorted((r.worker, r.seq) for r in replies) == [(0, 3), (1, 1)]


# -- tables ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rule", ["add", *ON_ELEMENTS])
def test_rows_and_whole_tables_update_alike(rule):
    rng = np.random.default_rng(0)
    first = rng.standard_normal((4, 3)).astype("float32")
    whole, by_rows = first.copy(), first.copy()
    a, b = ServerRule(rule, whole, {}), ServerRule(rule, by_rows, {})
    for _ in range(3):
        g = rng.standard_normal((4, 3)).astype("float32")
        a.apply(g)
        b.apply_rows(np.arange(4), g)
    np.testing.assert_allclose(whole, by_rows, rtol=1e-5, atol=1e-7)
    assert (whole != first).all()


@pytest.mark.parametrize("rule", ON_ELEMENTS)
def test_an_update_knows_nothing_of_its_caller(rule):
    """Neither a scope, which would change the names of its variables, nor NumPy's warnings, which are errors here."""
    tables = [np.zeros((2, 9), "float16") for _ in range(2)]
    with ht.scope("model"), ht.tagged(event="a caller"):
        under = ServerRule(rule, tables[0], {})
        under.apply(np.full_like(under.table, 1e-4))
    beside = ServerRule(rule, tables[1], {})
    beside.apply(np.full_like(beside.table, 1e-4))
    under.apply_rows(np.array([0]), np.full((1, 9), 6e4, "float16"))
    beside.apply_rows(np.array([0]), np.full((1, 9), 6e4, "float16"))
    np.testing.assert_array_equal(*tables)


@pytest.mark.parametrize("workers", [1, 2])  # pushes that weigh 1, and 1/2
def test_a_push_of_a_whole_table_is_an_update_of_every_row(workers):
    store = new_store(workers, ASP(), rule="add")
    push = Message(Kind.PUSH, key=SPARSE, seq=3, epoch=1, values=np.full((6, COLS), 4, "<f4"))
    store.handle(push, 0.0)
    assert store.tables[SPARSE].versions.tolist() == [1] * 6
    assert (store.tables[SPARSE].values == 4 / workers).all() and (push.values == 4).all()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<f2"])
@pytest.mark.parametrize("rule", ["sgd", "add", "momentum"])
@pytest.mark.parametrize("size", [100, 40_000])  # copied first, and added where it lies if it can be
@pytest.mark.parametrize("shift", [0, 1])  # in bytes: the wire promises no alignment
def test_a_gradient_counts_the_same_wherever_it_lies(dtype, rule, size, shift):
    rng = np.random.default_rng(0)
    first, gradient = (rng.standard_normal((1, size)).astype(dtype) for _ in range(2))
    table = ServerTable(TableSpec("w", 0, 1, size, np.dtype(dtype).name, rule))
    table.assign(Message(Kind.ASSIGN, values=first))
    values = np.ndarray((1, size), dtype, bytearray(gradient.nbytes + 8), shift)
    for step, rate in enumerate((0.5, 0.25), 1):
        values[...] = gradient * step
        table.rule.rate[...] = rate
        table.apply([Message(Kind.PUSH, values=values)], 1.0)
        assert (values == gradient * step).all(), "it may be sent again"
    assert not table.rule.gradients, "nothing was to be summed"
    wanted = {"sgd": -0.5 - 2 * 0.25, "add": 1 + 2, "momentum": -0.5 - 0.25 * (0.9 + 2)}[rule]
    tolerance = 4 * np.finfo(dtype).eps
    np.testing.assert_allclose(table.values, first + wanted * gradient.astype("f8"), rtol=tolerance, atol=4 * tolerance)


def test_first_values_are_kept():
    store = new_store(2, ASP())
    for worker, seq, value in ((0, 3, 1.0), (1, 1, 2.0)):
        values = np.full((1, 8), value, "<f4")
        store.handle(Message(Kind.ASSIGN, key=DENSE, worker=worker, seq=seq, epoch=1, values=values), 0.0)
    assert (store.tables[DENSE].values == 1).all()


@pytest.mark.parametrize("rule", ["sgd", "adam", "add"])
def test_a_new_rate_holds_from_the_next_update_on(rule):
    store = new_store(1, ASP(), rule)
    push = {"key": DENSE, "epoch": 1, "values": np.ones((1, 8), "<f4")}
    store.handle(Message(Kind.PUSH, seq=3, **push), 0.0)
    before = store.tables[DENSE].values.copy()
    store.handle(Message(Kind.RATE, key=DENSE, seq=4, epoch=1, meta={"rate": 0.0}), 0.0)
    store.handle(Message(Kind.PUSH, seq=5, **push), 0.0)
    assert (store.tables[DENSE].values == before).all() == (rule != "add") and (before != 0).all()


def test_sync_returns_only_rows_above_their_limit():
    store = new_store(1, ASP())
    push = {"ids": np.array([1, 4]), "counts": np.array([1, 5]), "values": np.ones((2, COLS), "<f4")}
    store.handle(Message(Kind.PUSH, key=SPARSE, seq=3, epoch=1, **push), 0.0)
    limits = {"ids": np.array([0, 1, 4]), "counts": np.array([-1, 1, 4])}
    [reply] = store.handle(Message(Kind.SYNC, key=SPARSE, seq=4, epoch=1, **limits), 0.0)
    assert (reply.ids.tolist(), reply.counts.tolist(), reply.values.shape) == ([0, 4], [0, 5], (2, COLS))


@pytest.mark.parametrize("dtype", [dtype.name for dtype in DTYPES])
def test_the_largest_are_found_of_numbers_of_any_dtype(dtype):
    """Of bytes the negative of 1 is 255, and that of the least integer is itself."""
    rng, kind = np.random.default_rng(0), np.dtype(dtype)
    told = np.finfo(kind) if kind.kind == "f" else np.iinfo(kind)
    low, high = (-50, 50) if kind.kind != "u" else (0, 200)
    values = np.concatenate([rng.integers(low, high, 20).astype(kind), np.array([told.min, told.max, 0], kind)])
    ids, rows = top_k(values.reshape(-1, 1), k=len(values))
    assert rows[:, 0].tolist() == sorted(values.tolist(), reverse=True) == values[ids].tolist()
    assert all(a < b for a, b in itertools.pairwise(ids) if values[a] == values[b])


def test_top_k_is_found_where_the_table_lives():
    store = new_store(1, ASP())
    values = np.array([[3, 0], [9, 0], [1, 0], [7, 0], [8, 0], [2, 0]], "<f4")
    store.handle(Message(Kind.ASSIGN, key=SPARSE, seq=3, epoch=1, values=values), 0.0)
    meta = {"function": "top_k", "arguments": {"k": 3}}
    [reply] = store.handle(Message(Kind.CALL, key=SPARSE, seq=4, epoch=1, meta=meta), 0.0)
    assert reply.ids.tolist() == [1, 4, 3] and reply.nbytes == 3 * (8 + COLS * 4)


def test_modes_print_and_parse():
    for mode in (BSP(), ASP(), SSP(0), SSP(3)):
        assert consistency(str(mode)) == mode
    for text in ("ssp", "ssp:-1", "bsp:3", "BSP", ""):
        with pytest.raises(ValueError, match="consistency"):
            consistency(text)

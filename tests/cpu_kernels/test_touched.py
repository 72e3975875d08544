"""Updates of some rows in C: any rule, all rows or a rank's, ids that occur often, or none."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import hetu as ht
from hetu.core.backend import Scratch
from hetu.cpu_kernels.c_calls import CCall, CTable, c_call
from hetu.cpu_kernels.compiler import compiler

from ..samples.update import ON_ELEMENTS, RULES
from .divided import job_by_job

WINDOWS = [None, ((3, 10, 20),)]  # all of 7 rows, or this rank has 3 to 9 of 20
IDS = {"often": (4, 6), "none": (0,), "one": (1,)}


def ids_of(case, window):
    return np.random.default_rng(2).integers(0, 7 if window is None else 20, IDS[case])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", IDS)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("name", ON_ELEMENTS)
@pytest.mark.parametrize("width", [(), (3,), (2, 5)])
def test_rules_on_rows(name, window, case, width):
    rng, ids = np.random.default_rng(0), ids_of(case, window)
    rule = RULES[name].op.update
    arrays = [rng.random((7, *width)).astype("float32") for _ in range(rule.tables)]
    arrays += [ids, rng.standard_normal((*ids.shape, *width)).astype("float32"), np.array(0.1), np.array(3.0)]
    arrays = arrays[: rule.tables + 3 + rule.timed]
    wanted = rule.rows.forward(np, *arrays, window=window, **RULES[name].op.defaults)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    inputs = [ht.placeholder(f"x{k}", a.shape, a.dtype) for k, a in enumerate(arrays)]
    made = rule.rows.make(tuple(inputs), {**RULES[name].op.defaults, "window": window})
    outputs = [ht.core.graph.OPS["item"](made, index=k) for k in range(rule.tables)] if rule.states else [made]
    executor = ht.Executor({"step": outputs})
    feed = dict(zip(inputs, arrays))
    for got, want in zip(executor.run("step", feed), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    if compiler() is not None:
        assert all(isinstance(call, CTable) for call in executor.program("step", feed).calls)


SPECIAL = (np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0, -1.0, 1e30, -1e30)


@pytest.mark.parametrize("name", ON_ELEMENTS)
def test_rules_on_rows_of_special_numbers(name):
    """Sums of pairs of them, with all of them in the tables, by each of them as the rate."""
    rule = RULES[name].op.update
    pairs = [*itertools.combinations_with_replacement(SPECIAL, 2)]
    ids = np.repeat(np.arange(len(pairs) * len(SPECIAL)), 2)[::-1].copy()
    slopes, old = np.tile(pairs, (len(SPECIAL), 1)).ravel()[::-1], np.repeat(SPECIAL, len(pairs))
    table, rows = (np.tile(a.astype("float32")[:, None], 3) for a in (old, slopes))
    tables = [table, *(abs(table[::-1]).copy() for _ in rule.states)]
    large = abs(rows[::-2]) + abs(rows[-2::-2]) > 1e29  # and so are their errors, where a small rate is times each
    nodes = [ht.placeholder(f"x{k}", a.shape, a.dtype) for k, a in enumerate((*tables, ids, rows))]
    rate, step = ht.placeholder("rate", (), "float64"), ht.placeholder("step", (), "float64")
    scalars = (rate, step)[: 1 + rule.timed]
    made = rule.rows.make((*nodes, *scalars), {**RULES[name].op.defaults, "window": None})
    outputs = [ht.core.graph.OPS["item"](made, index=k) for k in range(rule.tables)] if rule.states else [made]
    executor = ht.Executor(outputs)
    for given in SPECIAL:
        numbers = (np.array(given), np.array(3.0))[: len(scalars)]
        with np.errstate(all="ignore"):
            wanted = rule.rows.forward(np, *tables, ids, rows, *numbers, window=None, **RULES[name].op.defaults)
        feed = dict(zip((*nodes, *scalars), (*tables, ids, rows, *numbers)))
        with np.errstate(all="ignore"):
            found = executor.run(feed)
        near = 1e-6 + 1e24 * (large & (name == "sgd" and abs(given) <= 1))
        for got, want in zip(found, wanted if rule.states else (wanted,), strict=True):
            assert np.allclose(got, want, 1e-5, near, equal_nan=True), f"by {given}"


@pytest.mark.compiled
@pytest.mark.parametrize("case", IDS)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_what_is_touched(case, window):
    ids, low = ids_of(case, window), 0 if window is None else 3
    room, here = min(ids.size, 7), (ids >= low) & (ids < low + 7)
    for way in ("touched_rows", "touched_rows_plainly"):
        places, slots, seats = np.full(room, 77), np.full(ids.shape, 77), np.empty(7, np.int32)
        c_call("rows.c", way, "float32", places, slots, ids, seats, ids.size, 7, low, room)()
        count = len(np.unique(ids[here]))
        assert sorted(places[:count]) == np.unique(ids[here] - low).tolist() and (places[count:] == 7).all()
        assert (places[slots[here]] == ids[here] - low).all() and (slots[~here] == room).all()


@ht.optim.update_rule
def both_alike(p, a, b, g, lr):
    """Of three tables two get the same value, and one stays as it is."""
    both = p + lr * g
    return both, both, b


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("width", [(), (0,), (1,), (3, 5)])
def test_rows_go_back(width, dtype):
    rng = np.random.default_rng(0)
    old = [rng.random((7, *width)).astype(dtype) for _ in range(3)]
    given = [*old, np.array([5, 0, 5]), rng.random((3, *width)).astype(dtype), np.array(0.5)]
    op, attrs = both_alike.update.rows, {"window": None}
    want = op.forward(np, *given, **attrs)
    for over in (False, True):
        arrays = [a.copy() for a in given]
        outs = tuple(arrays[:3]) if over else tuple(np.full_like(a, np.nan) for a in old)
        calls = op.bound(np, outs, arrays, attrs, Scratch())
        assert len(calls) == (6 - 3 * over if old[0].size else 0) and all(isinstance(call, CCall) for call in calls)
        for call in calls:
            job_by_job(call)
        for got, wanted in zip(outs, want, strict=True):
            np.testing.assert_array_equal(got, wanted)

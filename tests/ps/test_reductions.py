"""Rounds in which all workers give a part: every interleaving has one answer, and none has an answer without a part."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu.core.errors import HetuError
from hetu.ps import ASP, BSP, ParameterStore
from hetu.ps.store.functions import reduced
from hetu.ps.store.member import UNANSWERED
from hetu.ps.store.messages import Kind, Message, RefusedError

from .simulation import hello


def part(worker: int, number: int, seq: int = 0, function: str = "total", cols: int = 3) -> Message:
    values = np.full((1, cols), 10.0**worker * number)
    fields = {"key": number, "seq": seq or number, "worker": worker, "epoch": 1}
    return Message(Kind.REDUCE, values=values, meta={"function": function}, **fields)


def store_of(workers: int) -> ParameterStore:
    store = ParameterStore(workers, BSP())
    for worker in range(workers):
        hello(store, worker)
    return store


def said(replies: list[Message]) -> dict[tuple[int, int], object]:
    """By worker and request, what was answered: the first number, or why not."""
    return {(r.worker, r.seq): r.facts["code"] if r.kind is Kind.ERROR else r.values[0, 0] for r in replies}


@settings(max_examples=60)
@given(st.lists(st.integers(0, 11), max_size=60), st.sampled_from([BSP(), ASP()]))
def test_every_interleaving_has_one_answer(schedule, mode):
    """Worker k % 3 goes on, or, if k is above 5, repeats its last request."""
    store, at, found = ParameterStore(3, mode), [0] * 3, {}
    for worker in range(3):
        hello(store, worker)
    for turn in itertools.chain(schedule, range(6), itertools.cycle(range(3))):
        worker = turn % 3
        if min(at) == 5 and len(found) == 15:
            break
        if turn < 6 and at[worker] < 5 and at[worker] < min(at) + 4:
            at[worker] += 1
        if at[worker]:
            for name, answer in said(store.handle(part(worker, at[worker]), 0.0)).items():
                assert found.setdefault(name, answer) == answer
    assert found == {(w, k): 111.0 * k for w in range(3) for k in range(1, 6)}
    assert not store.parked and len(store.reductions.rounds) <= UNANSWERED and not store.reductions.nbytes


def test_a_part_that_was_given_counts_when_its_worker_leaves():
    store = store_of(2)
    assert said(store.handle(part(1, 1), 0.0)) == {}
    store.handle(Message(Kind.LEAVE, worker=1, seq=2, epoch=1), 0.0)
    assert said(store.handle(part(0, 1), 0.0)) == {(0, 1): 11.0}
    assert said(store.handle(part(0, 2), 0.0)) == {(0, 2): "lost"}


def test_who_waits_hears_that_a_worker_left():
    store = store_of(3)
    assert said(store.handle(part(0, 1), 0.0) + store.handle(part(2, 1), 0.0)) == {}
    found = store.handle(Message(Kind.LEAVE, worker=1, seq=1, epoch=1), 0.0)
    assert said([r for r in found if r.kind is Kind.ERROR]) == {(0, 1): "lost", (2, 1): "lost"}


def test_who_waits_hears_that_a_worker_left_its_part_out():
    """As after a restart of the server, which one worker had answered and another not."""
    store = store_of(2)
    assert said(store.handle(part(0, 1), 0.0)) == {}
    assert said(store.handle(part(1, 2, seq=1), 0.0)) == {(0, 1): "lost"}


def test_parts_of_requests_that_overtake_each_other_come_together():
    store = store_of(2)
    replies = [*store.handle(part(0, 1), 0.0), *store.handle(part(1, 2), 0.0), *store.handle(part(1, 1), 0.0)]
    assert said([*replies, *store.handle(part(0, 2), 0.0)]) == {(w, k): 11.0 * k for w in range(2) for k in (1, 2)}


def test_a_worker_that_begins_anew_ends_the_rounds_of_others_and_all_may_begin_anew():
    store = store_of(2)
    store.handle(part(0, 1), 0.0), store.handle(part(1, 1), 0.0)
    assert said(store.handle(part(0, 2), 0.0)) == {}
    store.reductions.kept[7] = np.ones(3)
    hello(store, 1, 200)
    assert not store.reductions.kept
    assert said(store.handle(part(1, 1), 0.0)) == {(0, 2): "lost"}  # the new life waits for one of the other
    assert said(store.handle(part(0, 3), 0.0)) == {(0, 3): "lost"}
    hello(store, 0, 200)
    assert said(store.handle(part(0, 1), 0.0)) == {(0, 1): 11.0, (1, 1): 11.0}


@pytest.mark.parametrize(
    ("others", "code", "words"),
    [
        ({"function": "most"}, "reduce", "workers 0 and 1 ask for other reductions"),
        ({"cols": 2}, "reduce", "arrays of other shapes"),
        ({}, "value", "no reduction 'totl' (did you mean 'total'?)"),
    ],
)
def test_all_hear_what_is_wrong_with_a_round(others, code, words):
    store, mine = store_of(2), {} if others else {"function": "totl"}
    replies = [*store.handle(part(0, 1, **mine), 0.0), *store.handle(part(1, 1, **mine | others), 0.0)]
    assert said(replies) == {(0, 1): code, (1, 1): code}
    for reply in replies:
        assert words.split(" (")[0] in reply.facts["message"]


def test_what_waits_is_bounded():
    store = store_of(2)
    store.memory_limit = 100
    assert said(store.handle(part(0, 1, cols=13), 0.0)) == {(0, 1): "memory"}


NODES = {"size": 3, "nodes": [8, 9], "at": [0, 0], "less": [-1, 7], "least": [0.0, 1.0], "l2": [0.5, 0.5], "drop": [6]}
HISTOGRAMS = np.array([[3, 1, 4, 1, -5, 1], [2, 3, 0, 0, 0, 0]])
WRONG_CUTS = [  # what differs, and what the worker is told
    ({"at": [0]}, "1 of at for 2 nodes"),
    ({"nodes": [], "at": [], "less": [], "least": [], "l2": []}, "0 of nodes for 0 nodes"),
    ({"l2": [0.5] * 3}, "3 of l2 for 2 nodes"),
    ({"at": [0, -1]}, "got at=[0, -1]"),
    ({"at": [0, 1.0]}, "got at=[0, 1.0]"),
    ({"at": "ab"}, "got at='ab'"),
    ({"at": [0, True]}, "got at=[0, True]"),
    ({"least": [0.0, None]}, "got least=[0.0, None]"),
    ({"drop": [[6]]}, "got drop=[[6]]"),
    ({"nodes": [1, 2, 3], "at": [0] * 3, "less": [-1] * 3, "least": [0.0] * 3, "l2": [0.0] * 3}, "got at=[0, 0, 0]"),
    ({"at": [0, 1 << 60]}, "for 1152921504606846977 histograms of 3 bins"),
    ({"size": 0}, "histograms of 0 bins"),
    ({"size": 4}, "int64 (2, 6) for 1 histograms of 4 bins"),
    ({"size": "3"}, "got size=['3']"),
    ({"less": [-1, 5]}, "of node 5 no histogram (2, 3, 2) is kept"),
    ({"less": [-1, 6]}, "of node 6 no histogram"),
    ({"less": [-1, 4]}, "of node 4 no histogram (2, 3, 2) is kept"),
]


def kept_histograms():
    return {7: np.full((2, 3, 2), 9), 6: np.zeros((2, 3, 2), np.int64), 4: np.zeros((2, 3, 1), np.int64)}


@pytest.mark.parametrize(("others", "words"), WRONG_CUTS, ids=[words for _, words in WRONG_CUTS])
def test_cuts_that_do_not_fit_are_refused_before_anything_is_kept(others, words):
    kept = kept_histograms()
    with pytest.raises(HetuError) as told:
        reduced("best_cut", kept, [HISTOGRAMS, HISTOGRAMS], NODES | others)
    assert words in str(told.value) and not isinstance(told.value, RefusedError) and [*kept] == [7, 6, 4]


NUMBERS = st.integers(-(1 << 64), 1 << 64) | st.integers(-2, 9) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = NUMBERS | st.none() | st.booleans() | st.text(max_size=3) | st.lists(st.integers(-2, 9), max_size=2)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from([*NODES]), VALUES | st.lists(VALUES, max_size=4), max_size=3), st.data())
def test_whatever_workers_ask_of_cuts_is_answered_or_told(others, data):
    dtype, columns = data.draw(st.sampled_from(["int64", "int32", "float64"])), data.draw(st.integers(1, 3))
    parts = [np.ones((columns, data.draw(st.sampled_from([0, 1, 6, 12, 13]))), dtype)] * 2
    kept = kept_histograms()
    try:
        found = reduced("best_cut", kept, parts, NODES | others)
    except HetuError as error:
        assert [*kept] == [7, 6, 4] and getattr(error, "code", "") != "function", error
    else:
        assert len(found) <= 2 * parts[0].size

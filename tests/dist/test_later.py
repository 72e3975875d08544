"""Calls that MPI takes for one are found to differ, in a later call or at the end, and named with their lines."""

from __future__ import annotations

import contextlib
import functools
import re

import numpy as np
import pytest

from hetu.core.errors import FeedError
from hetu.dist import CommError, SerialComm, run_ranks
from hetu.dist.comm.agreement import TOGETHER
from hetu.dist.comm.line import mixed, numbers

from ..pairs import nightly
from . import later
from .test_launch import heturun


def lines(mark: str) -> str:
    with open(later.__file__, encoding="utf-8") as file:
        return next(f"later.py:{i}" for i, line in enumerate(file, 1) if line.rstrip().endswith(f"# {mark}"))


def job(*arguments, ranks=2):
    return heturun("-w", ranks, "python", "-m", "tests.dist.later", *arguments)


ALIKE = ("dtypes", "ops", "roots", "reductions", "longer")  # words of a call that are compared as others are
CASES = [
    pytest.param(name, 2 + i % 2, (0, 3 * TOGETHER)[i // 2 % 2], marks=pytest.mark.nightly if name in ALIKE else ())
    for i, name in enumerate(later.PAIRS | later.MESSAGES)
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "ranks", "more"), CASES)
def test_calls_that_differ_over_mpi(name, ranks, more):
    found = job(name, more, ranks=ranks)
    assert found.returncode != 0, found.stdout
    usual, odd = (later.PAIRS | later.MESSAGES)[name][2:]
    assert usual in found.stderr and odd in found.stderr and "later.py:" in found.stderr, found.stderr
    if more:
        assert "rank 0 is done" not in found.stdout


@pytest.mark.parametrize("name", later.PAIRS | later.MESSAGES)
def test_calls_that_differ_on_threads(name):
    later.kept.clear()
    with pytest.raises(CommError):
        run_ranks(2, lambda comm: later.run(comm, name, 0), deadline=5.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("before", [0, TOGETHER - 1])
def test_lines_in_another_order_even_where_two_comparisons_meet(before):
    found = job("swapped", 3 * TOGETHER, before)
    assert found.returncode == 1 and "is done" not in found.stdout, found.stdout
    assert "like collectives from lines in another order" in found.stderr
    assert lines("first") in found.stderr and lines("second") in found.stderr
    assert "two calls are swapped" in found.stderr
    assert "if ranks take turns, call in one place of the source" in found.stderr


ORDERS = {  # what a rank is given, and whether it is refused
    "swapped": (0, 0, True),
    "swapped to the end": (3 * TOGETHER, TOGETHER - 1, True),
    "swapped_in_line": (0, True),
    "spread_in_turn": (3 * TOGETHER, TOGETHER - 1, True),
    "in_turn": (0, TOGETHER - 1, True),
    "looped": (0, True),
    "roots_in_turn": (TOGETHER, False),
}


@pytest.mark.filterwarnings("ignore:ranks reduce arrays from different lines")
@pytest.mark.parametrize("name", ORDERS)
def test_lines_in_another_order_on_threads(name):
    *given, refused = ORDERS[name]
    made = getattr(later, name.split()[0])
    with pytest.raises(CommError, match="in another order") if refused else contextlib.nullcontext():
        run_ranks(2, lambda comm: made(comm, *given), deadline=20.0)


def test_calls_of_one_line_in_another_order_are_shown_with_their_columns():
    found = job("swapped_in_line", 0)
    assert found.returncode == 1 and "like collectives from lines in another order" in found.stderr, found.stdout
    line = lines("first and second")
    ends = re.findall(rf"rank ([01]): all_reduce sum f64\[4\] at {line}:(\d+)", found.stderr)
    assert {rank for rank, _ in ends} == {"0", "1"} and len({column for _, column in ends}) == 2


# Two calls on arrays of one kind, and whether they are told apart.
FORMS = {
    "comm.barrier(); comm.all_reduce(a, a); comm.all_reduce(b, b)": True,
    "for turn in (0, 1): comm.all_reduce(a, a) if turn else comm.all_reduce(b, b)": True,
    "for call in (lambda: comm.all_reduce(a, a)), (lambda: comm.all_reduce(b, b)): call()": True,
    "for call in (lambda x=a: comm.all_reduce(x, x)), (lambda x=b: comm.all_reduce(x, x)): call()": True,
    "helper(a); helper(b)": True,
    "comm.all_reduce_async(a, a).wait(), comm.all_reduce_async(b, b).wait()": True,
    "for x in (a, b): comm.all_reduce(x, x)": False,
    "for call in [lambda x=x: comm.all_reduce(x, x) for x in (a, b)]: call()": False,
    "for call in partial(comm.all_reduce, a, a), partial(comm.all_reduce, b, b): call()": False,
    "list(map(comm.all_reduce, (a, b), (a, b)))": False,
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_told_apart_of_calls_in_one_line(form):
    """Also when the line is compiled again, as on another rank; not what one expression makes of two arrays."""

    def told():
        comm, a, b = SerialComm(), np.ones(4), np.ones(4)
        names = {"comm": comm, "a": a, "b": b, "partial": functools.partial}
        exec(compile(f"def helper(x): comm.all_reduce(x, x)\ndef act():\n  {form}\nact()", "line.py", "exec"), names)
        return [numbers(line) for _, _, _, what, _, _, line, _ in comm.made if what == "all_reduce sum"]

    one, other = told()
    assert [one, other] == told() and (one != other) == FORMS[form]


@pytest.mark.nightly
def test_broadcasts_in_another_order():
    found = job("spread_in_turn", 3 * TOGETHER, TOGETHER - 1)
    assert found.returncode == 1 and "is done" not in found.stdout, found.stdout
    assert lines("first broadcast") in found.stderr and lines("second broadcast") in found.stderr
    found = job("roots_in_turn", 3 * TOGETHER)
    assert found.returncode == 0 and "order" not in found.stderr, found.stderr


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("more", "number"), [(0, 3), (3 * TOGETHER, 30_000)])
def test_counts_that_do_not_fit(more, number):
    """MPI may take fewer than there is room for, or more, without a word."""
    found = job("counted", more, number)
    assert found.returncode == 1 and lines("counted") in found.stderr, found.stdout
    if "all_to_all with counts that differ" not in found.stderr:  # but it may speak itself
        assert "MPI: " in found.stderr
    if more:
        found = job("counted", more, 4)
        assert found.returncode == 0, found.stderr


# What the error says of a rank that makes a step more, though nobody waits for it.
STEPS = {
    "fed": "batch {} of 'x', by rank 1 alone",
    "unfed": "batch {} of steps without a feed, by rank 1 alone",
    "others": "in 'fed'",
    "sent": "not received f64[4] of rank 1",
    "begun": "nobody has waited for all_reduce sum f64[4]",
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize(("ranks", "steps"), [(2, 1), (3, 16), (4, 17), (2, 40)])
def test_a_step_more_on_threads(kind, ranks, steps):
    with pytest.raises((CommError, FeedError)) as caught:
        run_ranks(ranks, lambda comm: later.one_too_many(comm, kind, steps), deadline=20.0)
    assert STEPS[kind].format(steps + 1) in str(caught.value)


CASES_OF_STEPS = [("unfed", 17, 3), ("others", 16, 2), *nightly((k, n, r) for k in STEPS for n, r in ((1, 4), (33, 2)))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "steps", "ranks"), CASES_OF_STEPS)
def test_a_step_more_over_mpi(kind, steps, ranks):
    found = job("one_too_many", kind, steps, ranks=ranks)
    assert found.returncode == 1, found.stdout
    if steps != 1 and kind != "sent":  # else another comparison may come first
        assert STEPS[kind].format(steps + 1) in found.stderr


def test_lines_that_swap_their_calls_do_not_add_up_to_the_same():
    """Or ranks that branch would be told of another order, every other time."""
    for a, b, x, y in np.random.default_rng(0).integers(0, 1 << 32, (300, 4)).tolist():
        assert mixed((a, (x, 1))) + mixed((b, (y, 1))) != mixed((a, (y, 1))) + mixed((b, (x, 1)))


def test_the_end_of_the_script_tells_what_was_not_received_or_not_awaited():
    found = job("unreceived")
    assert found.returncode == 1 and "rank 0 has received 2 of 3 messages" in found.stderr
    assert f"rank 1: message from 1 to 0 f32[4] at {lines('one too many')}" in found.stderr
    found = job("unawaited", ranks=3)
    assert found.returncode == 1 and "nobody has waited for all_reduce sum f32[4]" in found.stderr
    assert lines("and that is all") in found.stderr


@pytest.mark.parametrize("before", [pytest.param(0, marks=pytest.mark.nightly), TOGETHER - 1])
def test_calls_of_one_helper_in_another_order(before):
    found = job("in_turn", 3 * TOGETHER, before)
    assert found.returncode == 1 and "is done" not in found.stdout, found.stdout
    assert "like collectives from lines through one helper in another order" in found.stderr
    for mark in ("first by helper", "second by helper"):
        assert f"{lines('helper')} < {lines(mark)}" in found.stderr
    assert "two calls are swapped" in found.stderr


@pytest.mark.parametrize("more", [0, pytest.param(TOGETHER, marks=pytest.mark.nightly)])
def test_operators_of_one_line_in_another_order(more):
    found = job("looped", more)
    assert found.returncode == 1 and "in another order" in found.stderr, found.stdout
    for rank in (0, 1):
        assert re.search(
            rf"rank {rank}: all_reduce .* at {lines('reductions')} < \w+ of later.py:\d+ \(graph ", found.stderr
        )


def test_operators_of_one_line_are_told_apart_by_what_they_are_computed_from():
    comm = SerialComm()
    one, same, other = (
        [numbers(comm.line_of(node)) for node in later.reductions(order)] for order in ([0, 1, 2], [0, 1, 2], [2, 1, 0])
    )
    assert one == same == other[::-1]
    assert len({line for line, _ in one}) == 1 and len({way for _, way in one}) == 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("what", "steps"), [("by_ways", 3 * TOGETHER), ("of_own_sizes", 12)])
def test_ranks_may_come_to_one_line_on_ways_and_with_batches_of_their_own(what, steps):
    found = job(what, steps)
    assert found.returncode == 0 and found.stdout.count("is done") == 2, found.stderr
    assert not found.stderr.strip(), found.stderr


@pytest.mark.nightly
@pytest.mark.sampled(2)
@pytest.mark.parametrize("more", [0, 3 * TOGETHER])
def test_a_branch_may_reduce_from_a_line_of_its_own_but_is_told_once(more):
    found = job("branches", more)
    assert found.returncode == 0 and found.stdout.count("is done") == 2, found.stderr
    assert found.stderr.count("ranks reduce arrays from different lines, which must mean the same") == 1
    assert lines("branch of rank 0") in found.stderr and lines("branch of others") in found.stderr


def test_ranks_as_threads_that_have_ended_do_not_wait_for_who_has_not_split_off_their_group():
    with pytest.raises(CommError, match=r"rank 1 has not split off the group \(0, 1\), as others have") as caught:
        run_ranks(3, lambda comm: comm.split((0, 1)) if comm.rank == 0 else None, deadline=5)
    assert "all members of a group call split" in str(caught.value)


def test_a_message_tells_its_array_by_a_tag_that_every_library_has():
    from hetu.dist.comm.bound import message_tag

    tags = {(name, n): message_tag(np.dtype(name), n) for name in ("f4", "f8", "i4", "u1") for n in range(100)}
    assert all(0 <= tag < 1 << 15 for tag in tags.values()) and len(set(tags.values())) > 390

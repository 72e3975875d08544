"""The explanation of deadlocks: seeded mistakes are found with their rank and line, on threads and over MPI."""

from __future__ import annotations

import runpy
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest

from hetu.dist import CommError, run_ranks
from hetu.dist.comm.recorder import KEPT, Entry, RankState, Recorder, answer, ask, explain, readable

from ..pairs import in_turn
from . import mistakes

# What the report says of the culprit besides its line.
FOUND = {
    "skip": "rank 1: all_gather f32[4]",
    "order": "rank 1: all_gather f32[4]",
    "shape": "rank 1: all_reduce sum f32[5]",
    "dtype": "rank 1: all_reduce sum i32[4]",
    "early_exit": "missing: rank 1 is at the end of its",
    "exception": "ZeroDivisionError: mine",
    "endless_loop": "missing: rank 1 is at",
    "wrong_world_size": "rank 1 exchanges with rank 3 in a group of {}",
    "duplicate_rank": "rank 1 of {} splits off the group (0, 1, 1)",
    "slow_rank": "missing: rank 1 is at",
    "drift": "the ranks are fed differently: batch 3 of 'x', for ranks ",
}
assert FOUND.keys() == mistakes.MISTAKES.keys()


WAITING = ("early_exit", "endless_loop", "slow_rank")  # found as time runs out


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "ranks"), in_turn(2, FOUND, [3, 2]))  # over MPI with the other number
def test_mistake_on_threads(name, ranks):
    mistakes.never.clear()
    try:
        with pytest.raises((CommError, ZeroDivisionError, ValueError)) as caught:
            run_ranks(ranks, mistakes.MISTAKES[name], deadline=0.5 if name in WAITING else 5)
    finally:
        mistakes.never.set()
    text = "".join(traceback.format_exception(caught.value))
    check(name, text, ranks)
    assert "threads.py" not in str(caught.value) and "threading.py" not in str(caught.value)  # nobody's own lines


def check(name, text, ranks):
    """The culprit and its line; where two ranks differ nobody can tell which one it is, so both are there."""
    assert FOUND[name].format(ranks) in text or "rank 1: end of the script" in text
    assert mistakes.line_of(name) in text or f", line {mistakes.line_of(name).split(':')[1]}," in text
    if ranks == 2 and "differs: " in text:
        assert "; either side may be wrong\n" in text and "  rank 0: " in text and "  rank 1: " in text


ALONE = ("order", "dtype", "exception", "duplicate_rank")  # found as another is, or by the culprit itself


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, 2 + number % 2, marks=pytest.mark.nightly if name in ALONE else ())
        for number, name in enumerate(FOUND)
    ],
)
def test_mistake_over_mpi(name, ranks):
    line = [
        sys.executable,
        "-m",
        "hetu.dist.launch.heturun",
        "-w",
        str(ranks),
        "python",
        "-m",
        "tests.dist.mistakes",
        name,
    ]
    root = Path(__file__).parents[2]
    job = subprocess.run(line, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert job.returncode == 1
    check(name, "\n".join(job.stderr.splitlines()[-15:]), ranks)


def entry(index, what="all_reduce sum", type_="f32[4]", line="a.py:1", group=(0, 1, 2)):
    return Entry(group, "", index, what, type_, line)


def states(*sequences, group=(0, 1, 2)):
    """The states of ranks that wait in the last of the calls they made, given as lines of a script."""
    made = [[entry(i, line=f"a.py:{n}", group=group) for i, n in enumerate(lines)] for lines in sequences]
    return {rank: RankState(tuple(entries), entries[-1], "a.py:99: x") for rank, entries in enumerate(made)}


@pytest.mark.parametrize(
    ("culprit", "cause"),
    [
        ((1, 3, 4), "a.py:2 was left out"),
        ((1, 2, 2, 3), "a.py:2 is one call too many"),
        ((1, 3, 2, 4), "two calls are swapped"),
        ((1, 9), "the line"),
    ],
)
def test_what_happened_is_read_from_the_lines_that_follow(culprit, cause):
    """All calls are alike here, so only their lines tell."""
    report = explain(states((1, 2, 3, 4), culprit, (1, 2, 3, 4)), 0)
    assert f"differs: {cause}\n  rank 1: " in report


def test_a_rank_that_waits_elsewhere_is_missing():
    others = RankState((), entry(7, "broadcast from 1", line="b.py:5", group=(1, 2)), "")
    report = explain({0: states((1,))[0], 1: others, 2: others}, 0)
    assert "missing: rank 1 waits for rank 2 in broadcast from 1 f32[4] at b.py:5" in report
    assert report.endswith("waiting: rank 0 in all_reduce sum f32[4] at a.py:1")


def test_a_rank_without_an_answer_is_named():
    assert "missing: rank 2 does not answer" in explain({r: s for r, s in states((1,), (1,), (1,)).items() if r < 2}, 0)
    assert explain({}, 0) == ""


def test_the_ring_keeps_the_last_and_counts_all():
    recorder = Recorder()
    for i in range(KEPT + 5):
        recorder.note((0, 1), "all_reduce sum", np.empty(i))
    entries = recorder.state().entries
    assert [e.number for e in entries] == list(range(6, KEPT + 6))
    assert entries[-1].type == f"f64[{KEPT + 4}]" and entries[-1].line.startswith("test_recorder.py:")


def test_a_program_says_which_line_communicates():
    recorder = Recorder()
    recorder.site = "model.py:3"
    recorder.note((0,), "barrier", np.empty(0))
    recorder.site = None
    recorder.note((0,), "barrier", np.empty(0))
    first, second = recorder.state().entries
    assert str(first) == "barrier at model.py:3" and second.line.startswith("test_recorder.py:")


def test_questions_are_answered_through_files(tmp_path):
    recorder = Recorder()
    recorder.waiting = recorder.note((0, 1), "all_reduce sum", np.empty((2, 3), "f4"))
    answer(tmp_path, 1, recorder)
    found = ask(tmp_path, [0, 1], seconds=0.3)
    assert list(found) == [1]  # nobody answers for rank 0
    assert found[1].entries == (found[1].waiting,) and found[1].waiting.type == "f32[2, 3]"
    assert found[1].where.startswith("test_recorder.py:")


def test_the_way_to_a_line_is_that_through_the_script_not_to_it(tmp_path):
    (script := tmp_path / "train.py").write_text(
        "def helper():\n    return note((0, 1), 'barrier', x)\nentry = helper()\n"
    )
    note = Recorder().note
    entry = readable(runpy.run_path(str(script), {"note": note, "x": np.zeros(2)})["entry"])
    assert (entry.line, entry.way) == ("train.py:2:12", "train.py:3:9")  # where they do not begin their lines


def test_what_a_group_of_threads_communicates_is_noted_by_its_own_ranks():
    def act(comm):
        if comm.rank:
            comm.split((1, 2)).barrier()
        return {entry[0] for ring in comm.recorder.rings.values() for entry in ring}

    assert run_ranks(3, act) == [set(), {(1, 2)}, {(1, 2)}]

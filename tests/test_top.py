"""`hetu top`: what ranks say of themselves, as a page."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest

import hetu as ht
from hetu.dist import DataParallel
from hetu.dist.comm.recorder import RankState, Recorder, answer
from hetu.teach import top

from .dist.test_launch import heturun
from .dist.test_survivors import real


def look(at, states, ranks=(0, 1), over=(), lost=()):
    """What `top.JobView` finds."""
    return argparse.Namespace(
        since=5 + at, ranks=[*ranks], over={*over}, lost={*lost}, at=at, states=states, servers=[], addresses=()
    )


def test_a_page_tells_what_happened_between_two_looks():
    before = look(0.0, {0: RankState(runs=10, given=0, cpu=1.0), 1: RankState(runs=10)}, ranks=range(4))
    states = {
        0: RankState(runs=30, given=4_000_000, cpu=2.0, waited=0.5, where="train.py:7: run()"),
        1: RankState(runs=30, event="switched to Pipeline(2)"),
        2: RankState(runs=3),
    }
    title, head, *rows, event = top.page(before, look(2.0, states, range(4), over={3})).splitlines()
    assert title == "4 ranks, up 7 s, 10 steps a second"
    assert head.split("  ")[0] == "rank" and [row.split()[0] for row in rows] == ["0", "1", "2", "3"]
    assert rows[0].split() == "0 30 100 ms 2 MB/s 25% 50% train.py:7: run()".split()
    assert rows[2].endswith("has just come") and rows[3].endswith("has ended")
    assert event == "switched to Pipeline(2)"
    gone = look(3.0, {0: states[0]}, ranks=range(2))
    assert "does not answer: stopped" in top.page(before, gone)
    assert "<td" in top.page_html(before, look(2.0, states, range(4))) and "&lt;" not in top.page_html(before, gone)


def test_who_is_lost_is_counted_and_not_asked(tmp_path, monkeypatch):
    for name in ("started.0", "started.1", "started.2", "lost.1"):
        (tmp_path / name).write_text("1")
    asked = []
    monkeypatch.setattr(top, "ask", lambda job, ranks: asked.append(ranks) or {})
    found = top.JobView(tmp_path)
    assert asked == [[0, 2]] and found.lost == {1} and found.ranks == [0, 2]
    states = {rank: RankState(runs=rank + 5, event="rank 1 lost: ranks 0, 2 go on") for rank in (0, 2)}
    title, _, *rows, event = top.page(look(0.0, states), look(1.0, states, (0, 2), lost={1})).splitlines()
    assert title == "2 ranks, 1 lost, up 6 s, 0 steps a second" and len(rows) == 2
    assert event == "rank 1 lost: ranks 0, 2 go on"


def test_bytes_are_those_of_all_calls_though_only_some_are_kept():
    ring = Recorder().ring((0, 1), kept=4)
    for size in (2, 2, 4):
        ring.add("all_reduce sum", np.zeros(size, np.float32), size, None)
    assert ring.weigh() == 32 == ring.weigh()
    for _ in range(10):
        ring.add("all_reduce sum", np.zeros(3, np.float64), 3, None)
    assert ring.weigh() == 32 + 10 * 24


def test_a_rank_answers_the_page_and_no_question_stays(tmp_path):
    (tmp_path / "started.0").write_text("1")
    recorder = Recorder()
    recorder.runs = 7
    answer(tmp_path, 0, recorder)
    found = top.JobView(tmp_path)
    assert found.states[0].runs == 7 and sorted(path.name for path in tmp_path.iterdir()) == ["started.0"]


def test_jobs_of_other_users_are_passed_over(tmp_path, monkeypatch):
    """Who looks whether there is a file in their directories is refused."""
    for name in ("mine", "theirs"):
        (tmp_path / f"heturun-{name}").mkdir()
        (tmp_path / f"heturun-{name}" / "started.0").write_text("1")
    is_file = top.Path.is_file

    def refused(path):
        if "theirs" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(top.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(top.os, "access", lambda path, mode: "theirs" not in str(path))
    monkeypatch.setattr(top.Path, "is_file", refused)
    assert top.find_job(None) == tmp_path / "heturun-mine"


def test_steps_are_counted():
    def act(comm):
        x, w = ht.placeholder("x", (None, 2)), ht.variable("w", np.ones((2, 1), np.float32))
        executor = ht.Executor([ht.sum(x @ w)], strategy=DataParallel(), comm=comm)
        for _ in range(3):
            executor.run({x: np.ones((4, 2), np.float32)})
        return comm.recorder.state()

    for state in ht.dist.run_ranks(2, act):
        assert state.runs == 3 and state.given > 0
        assert RankState.from_json(json.dumps(state)) == state


@pytest.mark.parametrize("options", [("-w", 2), pytest.param(("--elastic", "2:2"), marks=real)], ids=str)
def test_a_real_job(tmp_path, options):
    """All are listed that are ranks, and nobody else: neither what keeps mpirun."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\nfrom hetu.cli import main\nfrom hetu.dist import world\nworld().barrier()\n"
        "code = main(['top', '--once', '--every', '0.1', '--job', os.environ['HETU_RUN_DIRECTORY']])"
        " if world().rank == 0 else 0\nworld().barrier()\nsys.exit(code)\n"
    )
    done = heturun(*options, "python", script)
    assert done.returncode == 0 and "2 ranks, up" in done.stdout and "train.py:" in done.stdout, done


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--every", "0"], "--every 0"),
        (["--job", "/nowhere"], "'/nowhere' is no job's directory"),
    ],
)
def test_bad_arguments(words, said, capsys):
    from hetu.cli import main

    assert main(["top", *words]) == 2
    assert said in (told := capsys.readouterr().err) and "fix:" in told

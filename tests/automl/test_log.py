"""Searches by several processes on one log: killed ones lose nothing, and what was broken off goes on."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

import hetu as ht
from hetu.automl import ASHA, Float, RandomSampler, search

SCRIPT = """
    import os, signal, sys, time
    from hetu.automl import ASHA, Float, RandomSampler, search

    def objective(run):
        open(sys.argv[2], "a").write(f"{run.number}\\n")
        if run.number == 3 and open(sys.argv[2]).read().split().count("3") <= int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
        return (run["x"] - 0.3) ** 2 + 1 / run.budget

    found = search(objective, {"x": Float(0.0, 1.0)}, trials=25, schedule=ASHA(1, 9), log=sys.argv[1],
                   sampler=RandomSampler())
    print(len(found.trials), found.best.number)
"""


def start(folder, *, dies=0):
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, script, folder / "log.jsonl", folder / "runs", str(dies)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills a process as POSIX does")
def test_processes_share_a_search_and_a_killed_one_loses_no_trial(tmp_path):
    killed = start(tmp_path, dies=1)
    killed.communicate(timeout=240)
    assert killed.returncode == -signal.SIGKILL
    others = [start(tmp_path) for _ in range(2)]
    told, errors = zip(*(each.communicate(timeout=240) for each in others))
    assert told[0] == told[1] and told[0].startswith("25 "), ([each.returncode for each in others], errors)
    runs = [int(line) for line in (tmp_path / "runs").read_text().split()]
    assert sorted(runs) == sorted([*range(25), 3])  # the killed one's trial twice, all others once
    assert start(tmp_path).communicate(timeout=240)[0] == told[0]  # all is done: it returns at once
    assert len((tmp_path / "runs").read_text().split()) == 26


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills a process as POSIX does")
def test_a_trial_that_kills_its_processes_fails(tmp_path):
    for _ in range(3):
        start(tmp_path, dies=3).communicate(timeout=240)
    assert start(tmp_path, dies=3).communicate(timeout=240)[0].startswith("25 ")
    facts = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {"trial": 3, "loss": None, "error": "its process was lost 3 times"} in facts


def objective(run):
    return (run["x"] - 0.3) ** 2


def test_a_search_goes_on_as_if_it_had_not_been_broken_off(tmp_path):
    space = {"x": Float(0.0, 1.0)}
    whole = search(objective, space, trials=20, log=tmp_path / "a")
    part = tmp_path / "b"
    search(objective, space, trials=9, log=part)
    with open(part, "ab") as file:
        file.write(b'{"begin": {"number": 9, "con')  # what a kill cut off
    again = search(objective, space, trials=20, log=part)
    assert [t.config for t in again.trials] == [t.config for t in whole.trials]
    assert all(json.loads(line) for line in part.read_text().splitlines())


def test_signs_of_life_keep_a_trial(tmp_path, monkeypatch):
    """A trial whose process says nothing for too long is lost; one that speaks is not."""
    log = ht.automl.trials.Log(tmp_path / "log", {"space": {}})
    with log.held():
        log.begin(ht.automl.Trial(0, {"x": 0.5}, seen=100.0, worker="elsewhere:1:1"))
    assert log.lost(110.0) == [] and [trial.number for trial in log.lost(131.0)] == [0]
    log.tell(log.trials[0], seen=125.0)
    assert log.lost(131.0) == []


BEGUN = '{"begin": {"number": 0, "config": {"x": 0.5}}}\n'


@pytest.mark.parametrize(
    "text, told",
    [
        ("hello\n", "is no line of a search"),
        (BEGUN + '{"trial": 0, "loss": "small"}\n', "is no line"),
        (BEGUN + '{"trial": 0, "ok": 1}\n', "is no line"),
        ("hello", "is no log of a search"),
        ('{"trial": 3}\n', "is no line"),
        ('{"search": {}}\n', "of another"),
    ],
)
def test_other_files_are_refused(tmp_path, text, told):
    (tmp_path / "log").write_text(text)
    with pytest.raises(ht.errors.CheckpointError, match=told):
        search(objective, {"x": Float(0.0, 1.0)}, log=tmp_path / "log")
    assert (tmp_path / "log").read_text() == text


def test_a_first_line_that_a_kill_cut_off_is_written_anew(tmp_path):
    search(objective, {"x": Float(0.0, 1.0)}, trials=1, log=tmp_path / "whole")
    first = (tmp_path / "whole").read_text().splitlines()[0]
    (tmp_path / "log").write_text(first[:40])
    search(objective, {"x": Float(0.0, 1.0)}, trials=1, log=tmp_path / "log")
    assert (tmp_path / "log").read_text().splitlines()[0] == first


def test_another_search_is_refused(tmp_path):
    search(objective, {"x": Float(0.0, 1.0)}, trials=2, log=tmp_path / "log")
    for space, options in [
        ({"x": Float(0.0, 2.0)}, {}),
        ({"x": Float(0.0, 1.0)}, {"seed": 1}),
        ({"x": Float(0.0, 1.0)}, {"maximize": True}),
    ]:
        with pytest.raises(ht.errors.CheckpointError, match="of another search"):
            search(objective, space, log=tmp_path / "log", **options)
    with pytest.raises(ht.errors.CheckpointError, match="does not exist"):
        search(objective, {"x": Float(0.0, 1.0)}, log=tmp_path / "no" / "log")


def test_ranks_must_share_a_log(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(ht.errors.ArgumentError, match="without a log"):
        search(objective, {"x": Float(0.0, 1.0)})
    assert os.environ["PMI_SIZE"] == "2"
    assert ASHA() and RandomSampler()


def hetu_search(*words, cwd):
    command = [sys.executable, "-m", "hetu", "search", *map(str, words)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=120, env=os.environ | {"COLUMNS": "200"}
    )


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills a process as POSIX does")
def test_the_command_starts_processes_and_tells_who_died(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = hetu_search("run", "-w", 3, script, tmp_path / "log.jsonl", tmp_path / "runs", 1, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("25 "), done.stderr
    assert len([line for line in done.stderr.splitlines() if "was ended by signal 9" in line]) == 1
    shown = hetu_search("show", tmp_path / "log.jsonl", "--why", "--svg", tmp_path / "best.svg", cwd=tmp_path)
    assert shown.stdout.splitlines()[0].split()[:3] == ["trial", "value", "budget"] and "25 trials" in shown.stdout
    assert shown.stdout.splitlines()[-1].split() == ["100.0%", "x"] or "%  x" in shown.stdout
    assert (tmp_path / "best.svg").read_text().startswith("<svg")


def test_the_command_tells_what_is_missing(tmp_path):
    assert "no script 'none.py'" in hetu_search("run", "none.py", cwd=tmp_path).stderr
    (tmp_path / "log").write_text("hello")
    for name in ("none", "log"):
        done = hetu_search("show", name, cwd=tmp_path)
        assert done.returncode == 2 and f"{name} is no log of a search" in done.stderr

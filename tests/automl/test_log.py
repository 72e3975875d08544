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
        if sys.argv[3] == "dies" and run.number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
        return (run["x"] - 0.3) ** 2 + 1 / run.budget

    found = search(objective, {"x": Float(0.0, 1.0)}, trials=25, schedule=ASHA(1, 9), log=sys.argv[1],
                   sampler=RandomSampler())
    print(len(found.trials), found.best.number)
"""


def start(folder, *, dies=False):
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, script, folder / "log.jsonl", folder / "runs", "dies" if dies else "lives"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills a process as POSIX does")
def test_processes_share_a_search_and_a_killed_one_loses_no_trial(tmp_path):
    killed = start(tmp_path, dies=True)
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    others = [start(tmp_path) for _ in range(2)]
    told = [each.communicate(timeout=60)[0] for each in others]
    assert told[0] == told[1] and told[0].startswith("25 ")
    runs = [int(line) for line in (tmp_path / "runs").read_text().split()]
    assert sorted(runs) == sorted([*range(25), 3])  # the killed one's trial twice, all others once
    assert start(tmp_path).communicate(timeout=60)[0] == told[0]  # all is done: it returns at once
    assert len((tmp_path / "runs").read_text().split()) == 26


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


@pytest.mark.parametrize(
    "text, told",
    [("hello\n", "is no line of a search"), ('{"trial": 3}\n', "is no line"), ('{"search": {}}\n', "of another")],
)
def test_other_files_are_refused(tmp_path, text, told):
    (tmp_path / "log").write_text(text)
    with pytest.raises(ht.errors.CheckpointError, match=told):
        search(objective, {"x": Float(0.0, 1.0)}, log=tmp_path / "log")
    assert (tmp_path / "log").read_text() == text


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

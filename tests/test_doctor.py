"""`hetu doctor`: its tables, its JSON, what it says of a missing part, and the job it runs."""

from __future__ import annotations

import importlib.metadata
import json
import sys

import pytest

from hetu.cli import main
from hetu.teach import doctor


def test_all_needed_parts_are_here_and_a_job_runs(capsys):
    assert main(["doctor", "--json"]) == 0
    findings = {f["part"]: f for f in json.loads(capsys.readouterr().out)}
    assert findings["2 ranks, 1 server"]["found"].startswith("work together")
    assert findings["MPI binding"]["found"] == f"mpi4py {importlib.metadata.version('mpi4py')}"
    assert all(f["enables"] for f in findings.values())


def test_the_table(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "job", lambda: doctor.Finding("2 ranks, 1 server", True, "work together", "ranks"))
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "needed" and "optional" in lines
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (("HETU_MPIEXEC", "no-such-mpiexec"), "MPI launcher"),
        (("HETU_MPIEXEC", sys.executable), "2 ranks, 1 server"),
    ],
)
def test_a_broken_part_is_named(capsys, monkeypatch, broken, said):
    monkeypatch.setenv(*broken)
    assert main(["doctor"]) == 1
    assert f"--  {said}" in capsys.readouterr().out


def test_a_missing_package_comes_with_its_command():
    found = doctor._package("Parts", "no-such-distribution", "nothing", "pip install parts")
    assert not found.ok
    assert doctor.report([found], "needed")[-1].endswith("needed for nothing: pip install parts")

"""`hetu doctor`: its tables, its JSON, what it says of a missing part, and the job it runs."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys

import pytest

from hetu.cli import main
from hetu.core.kernels import kernels
from hetu.cpu_kernels import compiler, folder
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


def c_rows(capsys, *options):
    """What the doctor finds out about compiled code; jobs are not started."""
    assert main(["doctor", "--json", *options]) == 0
    return {f["part"]: f for f in json.loads(capsys.readouterr().out) if f["part"] in ("C compiler", "Compiled code")}


@pytest.mark.parametrize(
    ("setting", "found", "fix"),
    [
        ("", r"\w.* \d.*; a small library takes \d+\.\d\d s", ""),
        ("0", "HETU_CC=0 in the environment", "leave HETU_CC out"),
        ("no-such-cc", "HETU_CC='no-such-cc' is no command", "leave HETU_CC out"),
    ],
)
def test_the_c_compiler(capsys, monkeypatch, setting, found, fix):
    monkeypatch.setattr(doctor, "job", lambda: doctor.Finding("2 ranks, 1 server", True, "work together", "ranks"))
    monkeypatch.setenv("HETU_CC", setting)
    row = c_rows(capsys)["C compiler"]
    if not setting and not row["ok"]:
        pytest.skip(row["found"])
    assert re.fullmatch(found, row["found"]) and row["ok"] == (not fix)
    assert fix in row["fix"]


def test_compiled_code_is_counted_and_cleared(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "job", lambda: doctor.Finding("2 ranks, 1 server", True, "work together", "ranks"))
    for module in (kernels("cpu").compiled, compiler, folder):
        monkeypatch.setattr(module, "folder", lambda: tmp_path)
    (tmp_path / "one.so").write_bytes(bytes(100_000))
    (tmp_path / "one.sha256").write_text("a digest")
    compiler.Notice("a command").leave()
    assert c_rows(capsys)["Compiled code"]["found"] == f"libraries: 1, 0.1 of at most 256 MB, in {tmp_path}"
    assert c_rows(capsys, "--clear-compiled")["Compiled code"]["found"].startswith("libraries: 0,")
    assert [*tmp_path.iterdir()] == [tmp_path / "lock"]


def test_a_machine_without_any_folder_to_write(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "job", lambda: doctor.Finding("2 ranks, 1 server", True, "work together", "ranks"))

    def no_folder():
        raise FileNotFoundError("no usable temporary directory")

    for module in (kernels("cpu").compiled, compiler, folder):
        monkeypatch.setattr(module, "folder", no_folder)
    rows = c_rows(capsys)
    assert not rows["C compiler"]["ok"] and "no usable" in rows["C compiler"]["found"]
    assert rows["Compiled code"]["found"] == "nothing can be kept: no usable temporary directory"


@pytest.mark.sampled(2)
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


@pytest.mark.parametrize(
    ("share", "ok", "found"),
    [
        (0.0, True, "the system does not say"),
        (1.5, True, "6.0 processes want 4 cores"),
        (2.0, False, "8.0 processes want 4 cores"),
    ],
)
def test_a_crowded_machine_is_told(monkeypatch, share, ok, found):
    monkeypatch.setattr(doctor, "crowd", lambda: share)
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 4)
    told = doctor.load()
    assert (told.ok, told.found) == (ok, found)
    assert ok or doctor.report([told], "optional")[-1].endswith("several threads: OPENBLAS_NUM_THREADS=1, or end some")

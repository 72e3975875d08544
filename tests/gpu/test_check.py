"""The command that checks a GPU: without one it says so; with the stand-in for CuPy its proofs can pass and fail."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import MissingDependencyError
from hetu.core.graph import OPS
from hetu.dist import run_ranks
from hetu.gpu_kernels import check, emulator, products

from ..dist.contract import CHECKS
from ..samples import SAMPLES
from . import fake_cupy, proofs, test_device

JUNIT = '<testsuites><testsuite tests="7" failures="{}" errors="0" skipped="2" time="1.5"/></testsuites>'


def test_without_a_gpu_it_says_so_and_succeeds(monkeypatch, capsys, tmp_path):
    def none():
        raise MissingDependencyError("device 'gpu:0' needs CuPy and an NVIDIA driver")

    monkeypatch.setattr(check, "machine", none)
    assert check.main(["--json", str(tmp_path / "out.json")]) == 0
    assert capsys.readouterr().out == "no GPU: device 'gpu:0' needs CuPy and an NVIDIA driver\n"
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(("broken", "code"), [(False, 0), (True, 1)])
def test_table_and_file(broken, code, monkeypatch, capsys, tmp_path):
    commands = []

    def run(command, **options):
        assert options["env"]["PYTHONPATH"].startswith(str(check.ROOT))
        commands.append(command)
        report = next(c for c in command if c.startswith("--junitxml=")).removeprefix("--junitxml=")
        with open(report, "w") as file:
            file.write(JUNIT.format(1 if broken else 0))
        return subprocess.CompletedProcess(command, 0, "what pytest said", "")

    monkeypatch.setattr(check, "machine", lambda: {"device": "a GPU"})
    monkeypatch.setattr(subprocess, "run", run)
    assert check.main(["--quick", "--json", str(tmp_path / "out.json")]) == code
    written = json.loads((tmp_path / "out.json").read_text())
    assert [row["part"] for row in written["checks"]] == list(check.PARTS) and len(commands) == len(check.PARTS)
    assert written["machine"] == {"device": "a GPU"}
    shown = capsys.readouterr()
    assert "graph capture" in shown.out and ("what pytest said" in shown.err) == broken


def test_a_part_without_an_end_has_failed_and_the_others_are_kept(monkeypatch, capsys, tmp_path):
    def run(command, **options):
        if "captured" not in command:
            return subprocess.CompletedProcess(command, 2, "no tests", "")
        raise subprocess.TimeoutExpired(command, options["timeout"], output=b"what it printed")

    monkeypatch.setattr(check, "machine", lambda: {"device": "a GPU"})
    monkeypatch.setattr(subprocess, "run", run)
    assert check.main(["--quick", "--json", str(tmp_path / "out.json")]) == 1
    assert len(json.loads((tmp_path / "out.json").read_text())["checks"]) == len(check.PARTS)
    shown = capsys.readouterr().err
    assert f"ended after {check.PART_SECONDS} seconds: " in shown and "what it printed" in shown


def test_the_benchmark_without_a_gpu_says_so():
    script = check.ROOT / "examples" / "benchmarks" / "gpu.py"
    blocked = (
        f"import runpy, sys; sys.modules['cupy'] = None; sys.path.insert(0, {str(script.parent)!r});"
        f"sys.argv = ['gpu.py']; runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", blocked], cwd=check.ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("no GPU: device 'gpu:0' needs CuPy and an NVIDIA driver")


def test_a_part_of_which_nothing_ran_has_failed_unless_it_may_be_skipped(tmp_path, capsys):
    report = tmp_path / "report.xml"
    mark = '<testcase><skipped message="NCCL is too old"/></testcase>'
    report.write_text(f'<testsuites><testsuite tests="1" skipped="1" time="1">{mark}</testsuite></testsuites>')
    assert check.counted(report, "all skipped")["failed"] == 1
    row = check.counted(report, "all skipped", may_be_skipped=True)
    assert row["failed"] == 0 and row["note"] == "skipped: NCCL is too old"
    assert check.table([{"part": "NCCL, two ranks on one GPU", **row}]).endswith("skipped: NCCL is too old")
    assert check.counted(tmp_path / "missing.xml", "no module pytest")["failed"] == 1
    assert "no module pytest" in capsys.readouterr().err


def test_every_part_has_tests_and_every_test_a_part():
    tests = [name for name in vars(test_device) if name.startswith("test_")]
    chosen = {
        part: [t for t in tests if any(w in t for w in words.split(" or "))] for part, words in check.PARTS.items()
    }
    assert all(chosen.values()), chosen
    assert sorted({t for names in chosen.values() for t in names}) == sorted(tests)


@pytest.fixture
def cupy():
    with fake_cupy.installed() as module:
        yield module


@pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")
class TestProofs:
    @pytest.mark.parametrize("name", ["matmul", "reshape", "cumsum", "concat", "einsum-three"])
    def test_operators(self, name, cupy):
        proofs.operator(next(s for s in SAMPLES if name in (s.op, s.id)))

    @pytest.mark.parametrize("name", ["matmul", "sort", "einsum", "einsum-three", "to_host", "attention"])
    def test_operators_are_captured(self, name, cupy):
        proofs.captured_operator(next(s for s in SAMPLES if name in (s.op, s.id)))

    def test_an_operator_that_is_not_captured_is_seen(self, cupy, monkeypatch):
        monkeypatch.setattr(products.CuPy, "matmul", lambda self, *a, **k: self.cupy.matmul(*a, **k))
        with pytest.raises(AssertionError, match="calling cuBLAS API during stream capture"):
            proofs.captured_operator(next(s for s in SAMPLES if s.op == "matmul"))

    def test_a_wrong_operator_is_seen(self, cupy, monkeypatch):
        row = next(s for s in SAMPLES if s.op == "cumsum")
        monkeypatch.setattr(OPS["cumsum"], "ufunc", None)
        wrong = OPS["cumsum"].forward
        monkeypatch.setattr(
            OPS["cumsum"], "forward", lambda xp, x, **attrs: wrong(xp, x, **attrs) + (0 if xp is np else 1)
        )
        monkeypatch.setattr(OPS["cumsum"], "into_rule", None)
        monkeypatch.setattr(OPS["cumsum"], "bind_rule", None)
        with pytest.raises(AssertionError):
            proofs.operator(row)

    def test_training(self, cupy):
        proofs.captured_training()
        proofs.captured_rows(ht.optim.SGD(0.5))
        proofs.precision("float16")

    def test_nccl(self, cupy):
        check = next(c for c in CHECKS if c.__name__ == "reduce_scatter")
        proofs.nccl(check)
        run_ranks(2, lambda host: proofs.nccl(check, host=host))

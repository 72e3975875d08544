"""The command that checks a GPU: without one it says so; with the stand-in for CuPy its proofs can pass and fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

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


def test_without_a_gpu_it_says_so_and_succeeds(monkeypatch, capsys, tmp_path):
    def none():
        raise MissingDependencyError("device 'gpu:0' needs CuPy and an NVIDIA driver")

    monkeypatch.setattr(check, "machine", none)
    assert check.main([str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == "no GPU: device 'gpu:0' needs CuPy and an NVIDIA driver\n"
    assert not (tmp_path / "out").exists()


def line(test: str, outcome: str = "passed", message: str = "") -> str:
    whole = f"tests/gpu/test_device.py::{test}"
    return json.dumps({"test": whole, "outcome": outcome, "seconds": 0.5, "message": message}) + "\n"


MACHINE = {"device": "a GPU", "bytes": 4 << 30}
ALL = "".join(
    line(f"test_{word}_x[1]")
    for word in ("operator", "kernel", "captured", "precision", "nccl", "two_ranks")  # one of each part
)


@pytest.fixture
def checked(monkeypatch, tmp_path):
    """Runs the check with tests that leave the given lines; the commands that it would start."""
    commands = []

    def main(lines, *arguments):
        def run(command, deadline):
            commands.append(command)
            if command[1:3] == ["-m", "pytest"]:
                with open(tmp_path / "tests.jsonl", "a") as file:
                    file.write(lines)
            else:
                seen.append(json.loads((tmp_path / "results.json").read_text()))
                (tmp_path / "benchmark.json").write_text('{"rows": {}}')

        monkeypatch.setattr(check, "machine", lambda: MACHINE)
        monkeypatch.setattr(check, "run", run)
        code = check.main([str(tmp_path), *(arguments or ["--quick"])])
        return code, json.loads((tmp_path / "results.json").read_text()), commands

    seen = main.seen = []  # the results that lie there while the benchmark runs

    return main


def test_table_and_file(checked, capsys):
    code, written, _ = checked(ALL)
    assert code == 0 and written["machine"] == MACHINE
    assert [(row["part"], row["passed"], row["failed"]) for row in written["checks"]] == [
        (p, 1, 0) for p in check.PARTS
    ]
    assert "graph capture" in capsys.readouterr().out


def test_what_failed_is_told_by_its_cause(checked, capsys):
    failed = "".join(line(f"test_kernel_x[{k}]", "failed", "def f\nE   KeyError: 7\nfile:3") for k in "abc")
    code, written, _ = checked(ALL + failed)
    assert code == 1 and written["checks"][1]["failed"] == 3
    assert written["causes"] == "3 x KeyError: 7   (test_kernel_x[a])" and written["causes"] in capsys.readouterr().out


def test_a_part_of_which_nothing_passed_has_failed_unless_it_may_be_skipped(checked):
    skipped = line("test_nccl_x", "skipped", "Skipped: NCCL is not installed")
    skipped += line("test_two_ranks_x", "skipped", "Skipped: NCCL is too old")
    code, written, _ = checked(skipped + line("test_captured_x")[:-9])  # the process was killed while it wrote
    rows = {row["part"]: row for row in written["checks"]}
    assert code == 1 and rows["graph capture"]["failed"] == rows["NCCL, one rank"]["failed"] == 1
    assert rows["graph capture"]["note"] == "no test ran"
    assert rows["NCCL, two ranks on one GPU"]["failed"] == 0
    assert check.table([rows["NCCL, two ranks on one GPU"]]).endswith("skipped: Skipped: NCCL is too old")


def test_what_has_passed_is_left_out_of_another_run(checked):
    checked(line("test_kernel_x[1]") + line("test_kernel_x[2]", "failed", "E  no"))
    code, written, (first, second) = checked(ALL + line("test_kernel_x[2]"))
    assert (code, written["checks"][1]["passed"]) == (0, 2)
    left_out = [c for c in second if c.startswith("--deselect=")]
    assert left_out == ["--deselect=tests/gpu/test_device.py::test_kernel_x[1]"] and not set(left_out) & set(first)
    assert not any(c.startswith("--deselect=") for c in checked("", "--anew", "--quick")[2][-1])


def test_the_benchmark_goes_on_in_the_same_folder_and_tests_are_kept_before(checked, tmp_path):
    _, written, (_, benchmark) = checked(ALL, "--minutes", "1")
    assert benchmark[2:] == ["--all", "--json", str(tmp_path / "benchmark.json")]
    assert written["benchmark"] == {"rows": {}}
    assert [row["passed"] for row in checked.seen[0]["checks"]] == [1] * len(check.PARTS)


def test_a_small_device_has_room_for_few_processes(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert [check.most_processes(n << 30) for n in (0, 4, 80)] == [1, 4, 14]
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert check.most_processes(80 << 30) == 1


def test_a_command_ends_at_the_deadline(capfd):
    """With what it has started, which would keep the pipe open."""
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(900)'])"
    check.run([sys.executable, "-c", child], deadline=0.0)
    assert "ended at the limit of time: " in capfd.readouterr().err


def test_the_tests_of_a_device_are_found_by_any_pytest(tmp_path):
    """Here they are skipped."""
    lines = tmp_path / "out.jsonl"
    check.prove(lines, 1, "two_ranks or mixed", time.monotonic() + 100)
    assert {r["test"].rpartition("::")[2].partition("[")[0]: r["outcome"] for r in check.read(lines)} == {
        "test_two_ranks_share_the_gpu": "skipped",
        "test_mixed_precision": "skipped",
    }


CUPY = """
from types import SimpleNamespace
class CUDARuntimeError(RuntimeError): ...
def synchronize():
    if state.broken: raise CUDARuntimeError("cudaErrorIllegalAddress")
state = SimpleNamespace(broken=False)
cuda = SimpleNamespace(runtime=SimpleNamespace(deviceSynchronize=synchronize, CUDARuntimeError=CUDARuntimeError))
"""
SPOILED = """
import cupy, pytest
pytestmark = pytest.mark.gpu
def test_illegal():
    cupy.state.broken = True
    cupy.cuda.runtime.deviceSynchronize()
def test_wrong():
    assert not cupy.state.broken and False
@pytest.mark.parametrize("k", range(4))
def test_right(k):
    cupy.cuda.runtime.deviceSynchronize()
"""


def test_a_broken_context_spoils_one_test(tmp_path):
    (tmp_path / "cupy.py").write_text(CUPY)
    (tmp_path / "test_spoiled.py").write_text(SPOILED)
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    options = ["-c", os.devnull, f"--rootdir={tmp_path}", "-q", "-p", "no:cacheprovider", "-n", "1"]
    command = [sys.executable, "-m", "pytest", *options, "--maxschedchunk=1", "--outcomes", str(tmp_path / "lines")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*command, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=100)
    outcomes = {r["test"].rpartition("::")[2]: r["outcome"] for r in check.read(tmp_path / "lines")}
    right = {f"test_right[{k}]": "passed" for k in range(4)}
    assert outcomes == {"test_illegal": "failed", "test_wrong": "failed", **right}, done.stdout
    assert "worker 'gw0' crashed" in done.stdout and "worker 'gw1' crashed" not in done.stdout


def test_the_benchmark_without_a_gpu_says_so():
    script = check.ROOT / "examples" / "benchmarks" / "gpu.py"
    blocked = (
        f"import runpy, sys; sys.modules['cupy'] = None; sys.path.insert(0, {str(script.parent)!r});"
        f"sys.argv = ['gpu.py']; runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", blocked], cwd=check.ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("no GPU: device 'gpu:0' needs CuPy and an NVIDIA driver")


def test_every_part_has_tests_and_every_test_a_part():
    tests = [name for name in vars(test_device) if name.startswith("test_")]
    chosen = {part: [t for t in tests if any(w in t for w in words.split())] for part, words in check.PARTS.items()}
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

"""The GPU benchmark on the stand-in for CuPy: every row builds, runs and prints. Times mean nothing here."""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path

import pytest

from hetu.gpu_kernels import KERNELS, emulator
from hetu.passes import chosen_passes

from . import fake_cupy

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")
BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    """The script, without PyTorch, which may be installed or not."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("gpu")
    monkeypatch.setattr(script, "has_torch", lambda quick: False)
    timed, steps = script.timed, []

    def timed_once(step, *others):
        """Only the first is timed; the others take one step."""
        steps.append(step)
        return timed(step, *others) if len(steps) == 1 else float(len(step()))

    monkeypatch.setattr(script, "timed", timed_once)
    with fake_cupy.installed():
        yield script


@pytest.mark.nightly
def test_every_row_runs_and_is_printed(gpu, tmp_path, capsys):
    rows = ["mlp", "wide_deep_1e6"]
    gpu.main(
        [
            "--quick",
            "--rounds",
            "1",
            "--rows",
            *rows,
            "host",
            "kernels",
            "convolutions",
            "mlp passes",
            "--json",
            str(tmp_path / "out.json"),
        ]
    )
    written, shown = json.loads((tmp_path / "out.json").read_text()), capsys.readouterr().out
    made = written["rows"]
    assert [made[name][0]["row"] for name in rows] == rows
    (host,) = made["host"]
    assert host["capture"].startswith("one CUDA graph") and host["wanted"] == 50
    shares = {row["kernel"]: row["wanted"] for row in made["kernels"]}
    assert (
        shares["copy"] is None
        and shares["adam"] == 0.85
        and {"rms_norm", "sparse_matmul (CSR)", "sampled_matmul"} <= shares.keys()
    )
    times = made["convolutions"]
    assert [row["precision"] for row in times] == ["float32", "float16"]
    assert all({"hetu", "hetu dx", "hetu dw"} < row.keys() for row in times)
    (gains,) = made["mlp passes"]
    assert {run.__name__ for run in KERNELS.passes} < gains.keys()
    for name in (*rows, *shares, *gains):
        assert name in shown


def test_a_row_that_fails_leaves_the_others_and_what_was_measured(gpu, tmp_path, capsys, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(importlib.import_module("gpu_kernels"), "adam", broken)
    monkeypatch.setattr(gpu, "steps", broken)
    gpu.main(["--quick", "--rows", "mlp", "kernels", "--json", str(tmp_path / "out.json")])
    written = json.loads((tmp_path / "out.json").read_text())
    failed = "RuntimeError: an illegal memory access was encountered"
    assert written["rows"]["mlp"] == [{"row": "mlp", "failed": failed}]
    kernels = {row["kernel"]: row for row in written["rows"]["kernels"]}
    assert kernels["adam"]["failed"] == failed and kernels["embedding"]["GB/s"] > 0
    assert failed in capsys.readouterr().out


def test_another_run_measures_what_failed_or_was_left(gpu, tmp_path, monkeypatch):
    path, run, fails = tmp_path / "out.json", [], ["host"]

    def rows_of(name, *others):
        run.append(name)
        return [{"row": name} | ({"failed": "no"} if name in fails else {})]

    monkeypatch.setattr(gpu, "rows_of", rows_of)
    gpu.main(["--quick", "--json", str(path), "--rows", "mlp", "host"])
    fails.clear()
    gpu.main(["--quick", "--json", str(path), "--rows", "mlp", "host", "kernels"])
    assert run == ["mlp", "host", "host", "kernels"]
    assert json.loads(path.read_text())["rows"] == {name: [{"row": name}] for name in ("mlp", "host", "kernels")}
    machine = gpu.machine()
    monkeypatch.setattr(gpu, "machine", lambda: machine | {"bytes": 1})
    gpu.main(["--quick", "--json", str(path), "--rows", "mlp"])
    assert len(run) == 4, "a device of the same kind"
    monkeypatch.setattr(gpu, "machine", lambda: machine | {"driver": 1})
    gpu.main(["--quick", "--json", str(path), "--rows", "mlp"])
    assert run[4:] == ["mlp"] and [*json.loads(path.read_text())["rows"]] == ["mlp"]
    assert len(json.loads((tmp_path / "out.before.json").read_text())["rows"]) == 3


def test_what_was_measured_before_an_illegal_access_stays(gpu, monkeypatch):
    module, xp, broken = importlib.import_module("gpu_kernels"), fake_cupy.MODULE, []

    def synchronize():
        if broken:
            raise xp.cuda.runtime.CUDARuntimeError("cudaErrorIllegalAddress")

    def illegal():
        broken.append(True)
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(xp.cuda.runtime, "deviceSynchronize", synchronize)
    makes = {"copy": lambda: ([], 1), "adam": illegal, "gelu": lambda: ([], 1)}
    first, second = module.bandwidths(makes, xp, None)
    assert (first["kernel"], second["kernel"], "failed" in first, "failed" in second) == ("copy", "adam", False, True)


def test_waves_have_every_row_once(gpu):
    assert sorted(gpu.ROWS) == sorted({*gpu.CASES, *gpu.PASSES_OF, "host", "kernels", "convolutions"})


def test_rows_are_processes_of_their_own_and_few_at_once(gpu, monkeypatch):
    pools, pool = [], gpu.ThreadPoolExecutor
    monkeypatch.setattr(gpu, "ThreadPoolExecutor", lambda most: pools.append(most) or pool(most))
    monkeypatch.setattr(gpu, "apart", lambda name, *others: [{"row": name}])
    done = [name for name, _ in gpu.measured(gpu.ROWS, 1, False, 2)]
    assert pools == [2] * len(gpu.WAVES) and sorted(done) == sorted(gpu.ROWS)
    assert set(done[: len(gpu.WAVES[0])]) == set(gpu.WAVES[0])


def test_ratios_stand_beside_what_is_wanted(gpu):
    text = gpu.table([{"row": "a", "/eager": 0.25, "eager wanted": None}, {"row": "b", "losses agree": False}])
    assert text.splitlines() == [
        "row  /eager  eager wanted  losses agree",
        "  a    0.25             -             -",
        "  b       -             -            NO",
    ]


def test_launches_and_bytes_are_counted_without_a_gpu(monkeypatch, capsys):
    """Beside what a step of this network says of itself: 8 products, and Adam on 269,322 numbers, 28 bytes each."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("gpu_counts")
    made = script.counted(script.step_of("mlp", chosen_passes(None, "gpu")))
    assert made["matmul"].launches == 8 and made["update_all"] == (1, 28 * 269_322)
    batch, sizes = 128, (784, 256, 256, 10)
    products = [a * b + batch * (a + b) for a, b in itertools.pairwise(sizes)]  # forward, of weights, of inputs
    assert made["matmul"].nbytes == 4 * (3 * sum(products) - products[0])
    script.main(["--models", "mlp"])
    first, *rows = capsys.readouterr().out.splitlines()
    assert first == "mlp: 22 launches, 13.6 MB"
    assert "  without pass group_updates              +4 launches    -0.00 %" in rows

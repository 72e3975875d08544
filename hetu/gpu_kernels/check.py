"""`python -m hetu.gpu_kernels.check`: proves and measures everything about GPUs on a machine that has one.

Runs the tests marked `gpu` (operators on CuPy, kernels, graph capture, mixed precision, NCCL) and the benchmark, each
part in a process of its own, as an illegal access spoils a process for everything after it. Prints every result at
once, and writes all so far as JSON, with the device and the versions. Without a GPU it says so and exits with 0, so
that it can stand in any script. It needs a checkout, as the tests are not shipped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..core.backend import Device
from ..core.errors import MissingDependencyError

ROOT = Path(__file__).parents[2]
PARTS = {  # what is proven: words that select its tests
    "operators on CuPy": "operator",
    "kernels against references": "kernel or mask or emulated",
    "graph capture": "captured",
    "mixed precision": "precision",
    "NCCL, one rank": "nccl",
    "NCCL, two ranks on one GPU": "two_ranks",
}
MAY_BE_SKIPPED = {"NCCL, two ranks on one GPU"}  # not every version of NCCL allows it
PACKAGES = ("numpy", "cupy-cuda13x", "cupy-cuda12x", "nvidia-nccl-cu13", "nvidia-cuda-nvrtc", "torch", "ml_dtypes")
PART_SECONDS = 300
COLUMNS = ("part", "passed", "failed", "skipped", "seconds", "note")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hetu.gpu_kernels.check", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), help="where the results go")
    parser.add_argument("--quick", action="store_true", help="leave the benchmark out")
    chosen = parser.parse_args(arguments)
    try:
        found = machine()
    except MissingDependencyError as error:
        print(f"no GPU: {error.message}")
        return 0
    if not (ROOT / "tests" / "gpu").is_dir():
        print("the checks are tests of a checkout: run this where hetu was cloned", file=sys.stderr)
        return 2
    print(found, flush=True)
    results: dict[str, Any] = {"machine": found, "checks": [], "benchmark": {}}
    for part, words in PARTS.items():
        results["checks"].append(prove(part, words))
        print(table(results["checks"][-1:]), flush=True)
        chosen.json.write_text(json.dumps(results, indent=1))
    if not chosen.quick:
        results["benchmark"] = benchmark()
        chosen.json.write_text(json.dumps(results, indent=1))
    print(f"{table(results['checks'])}\nwritten to {chosen.json}")
    return 1 if any(row["failed"] for row in results["checks"]) else 0


def machine() -> dict[str, Any]:
    """The device and the versions. MissingDependencyError without a GPU."""
    cuda = Device("gpu").xp.cuda
    properties = cuda.runtime.getDeviceProperties(0)
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    driver = cuda.runtime.driverGetVersion()
    return {"device": properties["name"].decode(), "driver": driver, "python": sys.version.split()[0], **versions}


def prove(part: str, words: str) -> dict[str, Any]:
    """Run the tests that `words` select; what does not even start counts as failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", "gpu", "-k", words, f"--junitxml={report}"]
        print(f"... {part}", flush=True)
        output = run([*command, "-W", "default", "tests/gpu"], PART_SECONDS, subprocess.PIPE)
        return {"part": part, **counted(report, output, may_be_skipped=part in MAY_BE_SKIPPED)}


def run(command: Sequence[str], seconds: float, stdout: int | None = None) -> str:
    """What a command prints, if `stdout` is a pipe. A command that exceeds its time is killed, and the text says so."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # a script finds the checkout
    options = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": path}, "stdout": stdout, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run(command, **options, text=True, timeout=seconds)
        return done.stdout or ""
    except subprocess.TimeoutExpired as error:
        print(f"ended after {seconds:.0f} seconds: {' '.join(command)}", file=sys.stderr)
        printed = error.stdout or ""
        return printed if isinstance(printed, str) else printed.decode()


def counted(report: Path, output: str, *, may_be_skipped: bool = False) -> dict[str, Any]:
    """The counts of a JUnit report, and why tests were skipped; if all were that may not be, the part has failed."""
    suite = xml.parse(report).getroot().find("testsuite") if report.exists() else None
    if suite is None:
        print(output, file=sys.stderr)
        return {"passed": 0, "failed": 1, "skipped": 0, "seconds": 0.0, "note": "no test ran"}
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    missing = int(total == skipped and not may_be_skipped)
    if failed or missing:
        print(output, file=sys.stderr)
    reasons = dict.fromkeys(mark.get("message", "") for mark in suite.iter("skipped"))
    return {
        "passed": total - skipped - failed,
        "failed": failed or missing,
        "skipped": skipped,
        "seconds": float(suite.get("time", 0)),
        "note": f"skipped: {'; '.join(reasons)}" if reasons else "",
    }


def benchmark() -> dict[str, Any]:
    """What `examples/benchmarks/gpu.py` measures; it prints its own table."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "benchmark.json"
        script = ROOT / "examples" / "benchmarks" / "gpu.py"
        run([sys.executable, str(script), "--json", str(out)], 4 * PART_SECONDS)
        return json.loads(out.read_text()) if out.exists() else {}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The counts, one part per line.

    >>> print(table([{"part": "NCCL", "passed": 19, "failed": 0, "skipped": 1, "seconds": 2.5, "note": "old"}]))
    part  passed  failed  skipped  seconds  note
    NCCL      19       0        1      2.5  old
    """
    text = [COLUMNS, *([str(row[c]) for c in COLUMNS] for row in rows)]
    widths = [max(len(line[k]) for line in text) for k in range(len(COLUMNS))]
    align = (str.ljust, *(str.rjust,) * (len(COLUMNS) - 2), str.ljust)
    return "\n".join("  ".join(f(cell, w) for f, cell, w in zip(align, line, widths)).rstrip() for line in text)


if __name__ == "__main__":
    sys.exit(main())

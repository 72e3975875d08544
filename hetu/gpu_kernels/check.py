"""`python -m hetu.gpu_kernels.check FOLDER`: proves and measures everything about GPUs on a machine that has one.

First the tests marked `gpu` (operators on CuPy, kernels, graph capture, mixed precision, NCCL) run on many processes at
once, as most of their time goes into compiling; then the benchmark, on a device that has nothing else to do. An illegal
access spoils a process for everything after it: that process ends, and another takes its place. All results go into the
folder as they come: `tests.jsonl`, a line for each test; `benchmark.json`, written anew after each row; and
`results.json`, both together. A run leaves out what a folder already holds, so a limit of time loses nothing: give the
folder of the first run, wherever it was carried, to the next one. Needs a checkout, as the tests are not shipped, but
neither MPI nor pyzmq. Without a GPU it says so and exits with 0, so that it can stand in any script.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..core.backend import Device
from ..core.errors import MissingDependencyError
from ..system import apart, kill_group

ROOT = Path(__file__).parents[2]
PARTS = {  # what is proven: words that tell its tests
    "operators on CuPy": "operator",
    "kernels against references": "kernel mask emulated",
    "graph capture": "captured",
    "mixed precision": "precision",
    "NCCL, one rank": "nccl",
    "NCCL, two ranks on one GPU": "two_ranks",
}
MAY_BE_SKIPPED = {"NCCL, two ranks on one GPU"}  # not every version of NCCL allows it
PACKAGES = ("numpy", "cupy-cuda13x", "cupy-cuda12x", "nvidia-nccl-cu13", "nvidia-cuda-nvrtc", "torch", "ml_dtypes")
TEST_SECONDS = 120
BYTES_OF_PROCESS = 1 << 30  # of the device: a context, libraries and the arrays of a test
COLUMNS = ("part", "passed", "failed", "skipped", "seconds", "note")
Result = dict[str, Any]  # of a test: its name, outcome, seconds, and a message if it did not pass


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hetu.gpu_kernels.check", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("gpu-check"), help="where the results go, and lie")
    parser.add_argument("--jobs", type=int, help="processes that test; as many as processors and memory allow, if none")
    parser.add_argument("--minutes", type=float, default=9.0, help="what is not done by then is left for another run")
    parser.add_argument("--cache", type=Path, help="a folder for what CuPy compiles, instead of its own")
    parser.add_argument("--only", default="", help="as pytest's -k: words in the names of tests")
    parser.add_argument("--anew", action="store_true", help="test and measure again what the folder already holds")
    parser.add_argument("--quick", action="store_true", help="leave the benchmark out")
    chosen = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * chosen.minutes
    try:
        found = machine()
    except MissingDependencyError as error:
        print(f"no GPU: {error.message}")
        return 0
    if not (ROOT / "tests" / "gpu").is_dir():
        print("the checks are tests of a checkout: run this where hetu was cloned", file=sys.stderr)
        return 2
    print(found, flush=True)
    if chosen.cache:
        os.environ["CUPY_CACHE_DIR"] = str(chosen.cache.absolute())
    folder = chosen.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    lines, measured = folder / "tests.jsonl", folder / "benchmark.json"
    for path in (lines, measured) if chosen.anew else ():
        path.unlink(missing_ok=True)
    prove(lines, chosen.jobs or most_processes(found["bytes"]), chosen.only, deadline)
    outcomes = read(lines)
    results: dict[str, Any] = {"machine": found, "checks": parts(outcomes), "causes": causes(outcomes)}
    kept = folder / "results.json"
    kept.write_text(json.dumps(results, indent=1), "utf-8")
    print(f"{results['causes']}\n{table(results['checks'])}", flush=True)
    results["benchmark"] = {} if chosen.quick else benchmark(measured, deadline)
    kept.write_text(json.dumps(results, indent=1), "utf-8")
    print(f"written to {chosen.folder}")
    return 1 if any(row["failed"] for row in results["checks"]) else 0


def machine() -> dict[str, Any]:
    """The device, the bytes of its memory and the versions. MissingDependencyError without a GPU."""
    cuda = Device("gpu").xp.cuda
    properties = cuda.runtime.getDeviceProperties(0)
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    device = {"device": properties["name"].decode(), "bytes": properties["totalGlobalMem"]}
    return device | {"driver": cuda.runtime.driverGetVersion(), "python": sys.version.split()[0], **versions}


def most_processes(memory: int, each: int = BYTES_OF_PROCESS) -> int:
    """How many processes a device of so many bytes has room for, if each takes so many, and the processors time.

    >>> most_processes(4 << 30, each=4 << 30)
    1
    """
    return max(min((os.cpu_count() or 2) - 2, memory // each), 1)


# -- tests -----------------------------------------------------------------------------------------------------------


def prove(lines: Path, jobs: int, only: str, deadline: float) -> None:
    """Run the tests of a device that have not passed yet; `tests/gpu/conftest.py` adds each outcome to `lines`.

    The project's settings stay out (`-c`): they ask for a newer pytest than such a machine may have.
    """
    options = ["-c", os.devnull, f"--rootdir={ROOT}", "-p", "no:cacheprovider", "-q", "--tb=line", "--disable-warnings"]
    options += ["-o", f"faulthandler_timeout={TEST_SECONDS}", "-o", "faulthandler_exit_on_timeout=true"]
    options += ["-m", "gpu", "-k", only, "-n", str(jobs), "--maxschedchunk=1", "--max-worker-restart=1000"]
    done = [f"--deselect={r['test']}" for r in read(lines) if r["outcome"] == "passed"]
    tests = ROOT / "tests" / "gpu" / "test_device.py"
    run([sys.executable, "-m", "pytest", *options, *done, f"--outcomes={lines}", str(tests)], deadline)


def run(command: Sequence[str], deadline: float) -> None:
    """A command and all processes it starts, which end at the deadline, with a word about it."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # a script finds the checkout
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, **apart())
    try:
        process.wait(max(deadline - time.monotonic(), 1.0))
    except subprocess.TimeoutExpired:
        print(f"ended at the limit of time: {' '.join(command[:4])} ...", file=sys.stderr)
    finally:
        if process.poll() is None:
            kill_group(process)


def read(lines: Path) -> list[Result]:
    """The last outcome of each test; a line that a crash left unfinished is none."""
    found: dict[str, Result] = {}
    for line in lines.read_text("utf-8").splitlines() if lines.exists() else ():
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[result["test"]] = result
    return list(found.values())


def parts(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The counts of each part; one of which nothing ran that may not be skipped has failed."""
    rows = []
    for part, words in PARTS.items():
        own = [r for r in results if any(w in r["test"].rpartition("::")[2].partition("[")[0] for w in words.split())]
        count = Counter(r["outcome"] for r in own)
        missing = int(len(own) == count["skipped"] and part not in MAY_BE_SKIPPED)
        notes = dict.fromkeys(r["message"].splitlines()[-1] for r in own if r["outcome"] == "skipped" and r["message"])
        note = f"skipped: {'; '.join(notes)}" if notes else "" if own else "no test ran"
        row = {"part": part, "passed": count["passed"], "failed": count["failed"] or missing}
        rows.append(row | {"skipped": count["skipped"], "seconds": sum(r["seconds"] for r in own), "note": note})
    return rows


def causes(results: Iterable[Result]) -> str:
    """What failed, by the line that names the error: how many tests, it, and the first of them.

    >>> print(causes([{"test": f"tests/a.py::test[{k}]", "outcome": "failed", "message": "no"} for k in range(2)]))
    2 x no   (test[0])
    """
    found: dict[str, list[str]] = {}
    for result in results:
        if result["outcome"] == "failed":
            error = [line for line in result["message"].splitlines() if line.startswith("E ")] or [result["message"]]
            found.setdefault(error[0].removeprefix("E").strip()[:300], []).append(result["test"].rpartition("::")[2])
    return "\n".join(f"{len(t)} x {e}   ({t[0]})" for e, t in sorted(found.items(), key=lambda item: -len(item[1])))


def benchmark(path: Path, deadline: float) -> dict[str, Any]:
    """What `examples/benchmarks/gpu.py` measures and adds to the file; it prints its own table."""
    run([sys.executable, str(ROOT / "examples/benchmarks/gpu.py"), "--all", "--json", str(path)], deadline)
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The counts, one part per line.

    >>> print(table([{"part": "NCCL", "passed": 19, "failed": 0, "skipped": 1, "seconds": 2.5, "note": "old"}]))
    part  passed  failed  skipped  seconds  note
    NCCL      19       0        1      2.5  old
    """
    shown = [[f"{row[c]:.1f}" if c == "seconds" else str(row[c]) for c in COLUMNS] for row in rows]
    text = [COLUMNS, *shown]
    widths = [max(len(line[k]) for line in text) for k in range(len(COLUMNS))]
    align = (str.ljust, *(str.rjust,) * (len(COLUMNS) - 2), str.ljust)
    return "\n".join("  ".join(f(cell, w) for f, cell, w in zip(align, line, widths)).rstrip() for line in text)


if __name__ == "__main__":
    sys.exit(main())

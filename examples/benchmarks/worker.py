"""One peer of the benchmark in a process of its own: answers requests for steps, a JSON line each.

Started by train_step.py as `python worker.py PEER WORKLOAD VARIANT` with the thread counts in its environment. First
it writes what the first steps give (the loss, or a number for all outputs of inference), the CPU time until the first
of them, and the most memory that they held beside the data; then every `{"steps": n}` is answered with the time that n
steps took.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rows import WORKLOADS

FIRST_STEPS = 4  # at least, and every batch once


def main(peer: str, workload: str, variant: str) -> None:
    # What a library prints must not get between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        module, made = importlib.import_module(f"peer_{peer}"), WORKLOADS[workload]
        before, begin = memory("VmRSS"), time.process_time()
        step = module.make(made, variant)
        results, start = [digest(step())], time.process_time() - begin
        forget_peak()
        results += [digest(step()) for _ in range(max(FIRST_STEPS, len(made.batches())) - 1)]
        peak = None if before is None else memory("VmHWM") - before
        first = {"results": results, "start": start, "peak": peak, "versions": module.versions()}
    except Exception as error:  # whatever it is, the parent reports it
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers)
        return
    print(json.dumps(first), file=answers)
    gc.collect()
    gc.freeze()
    gc.disable()
    for line in sys.stdin:
        print(json.dumps(timed(step, json.loads(line)["steps"])), file=answers)


def digest(result: Any) -> float:
    """A loss itself; of many numbers a mean of their sizes, in which each place has a weight of its own."""
    sizes = np.abs(np.asarray(result, np.float64)).ravel()
    return float(np.average(sizes, weights=1 + 0.5 * np.cos(np.arange(sizes.size))))


def timed(step: Callable[[], Any], steps: int) -> dict[str, float | None]:
    """Seconds of wall time, CPU time of the process and delay in the run queue (None if unknown) for `steps` steps."""
    delay, cpu, wall = run_queue_delay(), time.process_time(), time.perf_counter()
    for _ in range(steps):
        step()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    waited = None if delay is None else run_queue_delay() - delay
    return {"wall": wall, "cpu": cpu, "delay": waited}


def memory(field: str) -> int | None:
    """Bytes of the process in memory: now (VmRSS) or at most since the last `forget_peak` (VmHWM) (Linux)."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith(field)), None)
    return None


def forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def run_queue_delay() -> float | None:
    """Seconds that the threads of this process have been ready to run while others held the cores (Linux)."""
    try:
        return sum(int(task.read_text().split()[1]) for task in Path("/proc/self/task").glob("*/schedstat")) * 1e-9
    except (OSError, IndexError):
        return None


if __name__ == "__main__":
    main(*sys.argv[1:])

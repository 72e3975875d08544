"""What checkpoints cost training: written by a thread meanwhile, or by the step that saves.

    python examples/benchmarks/checkpoints.py --json result.json
    heturun -w 2 python examples/benchmarks/checkpoints.py --folder FOLDER

A model with Adam trains in blocks of steps that take turns: without a save; with one at the beginning that a thread
writes (`ht.Checkpoints`); with one that ends before the first step (`Executor.save`). Libraries have one thread, so
"steps" is the processor time of the thread that trains, its part of the save included, without what waits for a core or
the disk; "process" has the writer's, too; "stands still" is how long the save keeps training waiting. Ratios are to the
block without a save of the same turn. Left out: GPUs, and servers, which write what they keep themselves.
"""

from __future__ import annotations

import os

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")  # before NumPy is loaded

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from report import Row, add_arguments, report

import hetu as ht

Times = dict[str, float]


def training(options: argparse.Namespace) -> tuple[ht.Executor, Callable[[], object]]:
    """An executor of a perceptron, and a step of it."""
    y = ht.placeholder("x", (None, options.width))
    with ht.scope("model"):
        for number in range(options.layers):
            y = ht.nn.Linear(options.width, options.width, activation=ht.relu, name=f"layer{number}")(y)
    loss = ht.mean(y * y)
    strategy = "dp" if ht.dist.world().world_size > 1 else None
    ex = ht.Executor({"train": [loss, ht.optim.Adam(1e-4).minimize(loss)]}, strategy=strategy)
    rows = np.random.default_rng(0).standard_normal((options.batch, options.width)).astype("float32")
    return ex, partial(ex.run, "train", {"x": rows})


def block(steps: int, step: Callable[[], object], save: Callable[[], object], wait: Callable[[], object]) -> Times:
    """Seconds that a save and then so many steps take, of each clock."""
    thread, process, began = time.thread_time(), time.process_time(), time.perf_counter()
    save()
    stood = time.perf_counter() - began
    for _ in range(steps):
        step()
    thread, ended = time.thread_time() - thread, time.perf_counter() - began
    wait()
    whole = time.perf_counter() - began
    return {"steps": thread, "process": time.process_time() - process, "clock": ended, "save": stood, "whole": whole}


def compared(options: argparse.Namespace) -> list[Row]:
    """A row for each way to save: quartiles of ratios, and of milliseconds."""
    ex, step = training(options)
    with contextlib.nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory() as folder:
        checkpoints = ht.Checkpoints(ex, Path(folder, "run"), keep=2)
        ways = {"none": int, "meanwhile": checkpoints.save, "before": partial(ex.save, Path(folder, "one"))}
        turns = [
            {way: block(options.steps, step, save, checkpoints.wait) for way, save in ways.items()}
            for _ in range(options.rounds + 1)
        ][1:]  # the first makes the room for copies
    held = sum(value.nbytes for value in ex.state.values()) / 1e6
    if ht.dist.world().rank == 0:
        print(f"{held:.0f} MB, a save every {options.steps} steps, which take {1e3 * turns[0]['none']['clock']:.0f} ms")
    return [
        {"written": way}
        | {f"{clock} x": quartiles([turn[way][clock] / turn["none"][clock] for turn in turns]) for clock in CLOCKS}
        | {f"{what} ms": quartiles([1e3 * turn[way][key] for turn in turns]) for what, key in MOMENTS.items()}
        for way in ways
    ]


CLOCKS = ("steps", "process", "clock")
MOMENTS = {"stands still": "save", "save and steps": "whole"}


def quartiles(values: list[float]) -> list[float]:
    return [float(value) for value in np.quantile(values, (0.25, 0.5, 0.75))]


PARTS = {"checkpoints": ("Times of steps with saves, to those without", compared)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024, help="of each layer (default 1024)")
    parser.add_argument("--layers", type=int, default=8, help="how many (default 8: 101 MB of weights and states)")
    parser.add_argument("--batch", type=int, default=64, help="rows of a step on each rank (default 64)")
    parser.add_argument("--steps", type=int, default=30, help="from one save to the next (default 30)")
    parser.add_argument("--folder", type=Path, help="an empty one on the disk to write to; ranks need it")
    add_arguments(parser, PARTS, rounds=7)
    options = parser.parse_args()
    if ht.dist.world().rank == 0:
        report(options, PARTS)
    else:
        compared(options)  # of which rank 0 tells


if __name__ == "__main__":
    main()

"""A job of ranks that are killed again and again: does it go on, how long does it stand still, are its losses the same.

    python examples/benchmarks/kills.py --kills 100 --strategy zero3

Starts `heturun --elastic 2:4` on this script, which trains a small model, and kills a random rank with SIGKILL at a
random moment whenever there are four; another one comes in its place. "stands still" is the longest time between two
steps around a kill, "comes back" until there are four ranks again, and "differs" the largest difference of a loss from
that of one process at the same step. Left out: ranks that hang, which `tests/dist/test_survivors.py` stops.
"""

from __future__ import annotations

import os

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")  # before NumPy is loaded

import argparse
import contextlib
import itertools
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from report import Row, add_arguments, report

import hetu as ht

RANKS, LEAST, PATIENCE = 4, 2, 120.0  # seconds until four are there
ROWS, WIDTH = 64, 32
DONE = "done"  # the file that ends the training


def losses(strategy: str | None) -> Iterator[tuple[float, ht.Executor]]:
    """The loss of each step of a training without end."""
    x, y = ht.placeholder("x", (None, WIDTH)), ht.placeholder("y", (None,), dtype="int64")
    out = ht.nn.Linear(WIDTH, 8)(ht.nn.Linear(WIDTH, WIDTH, activation=ht.tanh)(x))
    loss = ht.mean(ht.softmax_cross_entropy(out, y))
    executor = ht.Executor({"train": [loss, ht.optim.Momentum(1e-2).minimize(loss)]}, strategy=strategy)
    for step in itertools.count():
        draw = np.random.default_rng(step)
        feed = {"x": draw.standard_normal((ROWS, WIDTH)).astype("float32"), "y": draw.integers(0, 8, ROWS)}
        yield float(executor.run("train", feed)[0]), executor


def train(folder: Path, strategy: str) -> None:
    """The training of one rank, which writes down when each step was done."""
    with open(folder / f"steps.{os.getpid()}", "w", buffering=1, encoding="utf-8") as log:
        for step, (loss, executor) in enumerate(losses(strategy)):
            log.write(f"{step} {time.monotonic()} {loss!r}\n")
            if step % 50 == 49 and executor.placement.agree({"stop": (folder / DONE).exists()})["stop"]:
                break


def living(folder: Path, dead: set[int]) -> list[int]:
    """The processes that have made a step by now, but for the dead."""
    found = {int(path.suffix[1:]) for path in folder.glob("steps.*") if path.stat().st_size}
    return sorted(found - dead)


def kill(options: argparse.Namespace, folder: Path, job: subprocess.Popen[bytes]) -> list[Row]:
    """A row for each kill: when, who of how many, and until there were four again."""
    draw, kills, dead = random.Random(options.seed), list[Row](), set[int]()
    while len(kills) <= options.kills:
        began = time.monotonic()
        while len(alive := living(folder, dead)) < RANKS:
            if job.poll() is not None or time.monotonic() - began > PATIENCE:
                return kills
            time.sleep(0.05)
        if kills:
            kills[-1]["comes back"] = time.monotonic() - kills[-1]["at"]
        if len(kills) == options.kills:
            break
        time.sleep(draw.uniform(0.0, 1.0))
        dead.add(process := draw.choice(alive))
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
            kills.append({"at": time.monotonic()})
    return kills


def killed(options: argparse.Namespace) -> list[Row]:
    """One row of all kills."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        line = [sys.executable, "-m", "hetu.dist.launch.heturun", "--elastic", f"{LEAST}:{RANKS}", "python", __file__]
        with subprocess.Popen([*line, "--train", name, "--strategy", options.strategy], stderr=subprocess.PIPE) as job:
            kills = kill(options, folder, job)
            (folder / DONE).touch()
            _, said = job.communicate(timeout=PATIENCE)
        if job.returncode:
            print(said.decode()[-2000:], file=sys.stderr)
        rows = [line.split() for path in folder.glob("steps.*") for line in path.read_text("utf-8").splitlines()]
    made = {step: loss for (loss, _), step in zip(losses(None), range(1 + max(int(step) for step, *_ in rows)))}
    times = sorted(float(at) for _, at, _ in rows)
    gaps = [max(b - a for a, b in itertools.pairwise(times) if b > of["at"] - 0.1 and a < of["at"] + 5) for of in kills]
    came = [of["comes back"] for of in kills if "comes back" in of]
    return [
        {
            "strategy": options.strategy,
            "kills": len(kills),
            "went on": len(came),
            "ended well": job.returncode == 0,
            "steps": len(made),
            "stands still ms": quartiles([1e3 * gap for gap in gaps]),
            "at most s": max(gaps, default=0.0),
            "comes back s": quartiles(came),
            "differs": max(abs(float(loss) - made[int(step)]) for step, _, loss in rows),
        }
    ]


def quartiles(values: list[float]) -> list[float]:
    return [float(value) for value in np.quantile(values or [0.0], (0.25, 0.5, 0.75))]


PARTS = {"kills": ("Ranks that are killed at random moments", killed)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="how many ranks to kill (default 20)")
    parser.add_argument("--strategy", default="zero3", help="of the job (default zero3)")
    parser.add_argument("--seed", type=int, default=0, help="of who is killed, and when (default 0)")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    add_arguments(parser, PARTS, rounds=1)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.strategy)
    else:
        report(options, PARTS)


if __name__ == "__main__":
    main()

"""One rank of a job becomes slow: how long a step takes then, and once the work is divided by what ranks can do.

    heturun -w 2 python examples/benchmarks/stragglers.py [--slow 2] [--rounds 9] [--features 256] [--json FILE]

On the last rank each instruction is followed by idle computing, so that it takes `--slow` times as long. Nobody tells
`ht.plan.rebalance`, which times the steps of a data-parallel job and switches. Then steps of three kinds take turns:
"even" with no slow rank, "slow" as before, "rebalanced" as after. `of even` is the ratio of a turn with its quartiles,
and `optimum` what the sum of all speeds allows, communication left out. `steps` are those until the switch, and until
the one back once the rank has recovered: a switch waits until it could have saved what it costs, so short steps wait
for many. Give each rank a core of its own, else ranks slow each other, and measure the host before: `heturun -w 2 hetu
profile`.
Ignored on purpose: ranks on other hosts, and what a switch itself takes (`switch.py`).
"""

from __future__ import annotations

import os

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")  # before NumPy is loaded

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from report import Row, print_table

import hetu as ht
from hetu.core import executor as core_executor
from hetu.core.op import Role
from hetu.core.program import Program, Step
from hetu.dist import world

BATCH, LAYERS = 256, 6
MOST, SETTLE = 6000, 24  # steps until it should have switched, and until it knows what the new parts take
planted = 1.0  # how many times as long this rank takes


class Planted(Program):
    """A program on a machine that takes so many times as long."""

    def _bind(self, node: ht.Node) -> Step | None:
        step = super()._bind(node)
        if step is None or node.role is Role.COMMUNICATION:
            return step
        return replace(step, calls=tuple(partial(slowly, call) for call in step.calls))


def slowly(call: Callable[[], object]) -> None:
    began = time.perf_counter()
    call()
    until = began + planted * (time.perf_counter() - began)
    while time.perf_counter() < until:
        pass


def job(features: int) -> tuple[ht.Executor, dict[str, np.ndarray]]:
    x, t = (ht.placeholder(name, (None, features)) for name in "xt")
    h = x
    with ht.scope("model"):
        for _ in range(LAYERS):
            h = ht.tanh(ht.nn.Linear(features, features)(h))
        loss = ht.mean((h - t) ** 2)
        entries = {"train": [loss, ht.optim.SGD(0.01).minimize(loss)]}
    rng = np.random.default_rng(0)
    return ht.Executor(entries, strategy="dp"), {n: rng.random((BATCH, features), np.float32) for n in "xt"}


def step(executor: ht.Executor, feed: dict[str, np.ndarray], slow: float) -> float:
    """Seconds of a step, of the slowest rank."""
    global planted
    planted = slow if world().rank == world().world_size - 1 else 1.0
    world().barrier()
    began = time.perf_counter()
    executor.run("train", feed)
    took = np.array([time.perf_counter() - began])
    world().all_reduce(took, took, "max")
    return float(took[0])


def until_it_switches(executor: ht.Executor, look: ht.plan.Rebalance, feed: dict[str, np.ndarray], slow: float) -> int:
    """After how many steps; 0 if it does not."""
    before = len(look.events)
    for number in range(1, MOST + 1):
        step(executor, feed, slow)
        look()
        if len(look.events) > before:
            return number
    return 0


def measured(arguments: argparse.Namespace) -> list[Row]:
    (plain, feed), (unequal, _) = job(arguments.features), job(arguments.features)
    look = ht.plan.rebalance(unequal, every=4)
    there = until_it_switches(unequal, look, feed, arguments.slow)
    for _ in range(SETTLE):
        step(unequal, feed, arguments.slow)
        look()
    kinds = {"even": (plain, 1.0), "slow": (plain, arguments.slow), "rebalanced": (unequal, arguments.slow)}
    took: dict[str, list[float]] = {name: [] for name in kinds}
    for name in [*kinds] * (1 + arguments.rounds):
        took[name].append(statistics.median(step(kinds[name][0], feed, kinds[name][1]) for _ in range(10)))
    back = until_it_switches(unequal, look, feed, 1.0)
    ranks = world().world_size
    optimum = {"even": 1.0, "slow": ranks / (ranks - 1 + 1 / arguments.slow)}
    return [
        {
            "steps are": name,
            "ms": 1e3 * statistics.median(times[1:]),
            "of even": np.percentile(np.divide(times[1:], took["even"][1:]), (25, 50, 75)).tolist(),
            "optimum": optimum.get(name, optimum["slow"]),
            "steps": {"slow": there, "rebalanced": back}.get(name, 0),
        }
        for name, times in took.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", type=float, default=2.0, help="times as long as others (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of all three (default: 9)")
    parser.add_argument("--features", type=int, default=256, help="of each layer (default: 256)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all rows here")
    arguments = parser.parse_args()
    core_executor.Program = Planted
    rows = measured(arguments)
    if world().rank == 0:
        print_table(rows)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

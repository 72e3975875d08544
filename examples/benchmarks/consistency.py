"""What waiting costs: how far workers drift apart, SSP against BSP, partial reduce or a plan against all-reduce.

    python examples/benchmarks/consistency.py [--only drift ssp partial planned] [--rounds 3] [--json FILE]

Four worker processes fit a linear model by gradient descent; each has a quarter of the data. The gradients take next
to no time, so every worker also sleeps in each step, in real time, for as long as a machine of its speed would compute:
sleeping workers need no cores, and the figures hold on two. Loss is that of the whole data, and "to the same loss"
means until the last of the workers has reached the loss that serial training reaches in `STEPS` steps. Variants are
measured in alternation; the table has the median of the rounds. Ignored on purpose: throughput (`ps.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import hetu as ht
from hetu.dist import DataParallel, world
from hetu.ps import Client, Options, Parameter, ServerProcess
from hetu.strategies import Connected, OnPartners, PartialReduce

WORKERS, ROWS, COLUMNS = 4, 800, 40
RATE, STEPS, LIMIT = 0.1, 80, 400  # the step size, those of the serial run that sets the loss, and when to give up
PARTS = ["drift", "ssp", "partial", "planned"]
BEAT = 0.03  # seconds a step takes at the speed that all workers have on average
DRIFT_CLOCKS, DRIFT_BOUNDS = 2000, (0, 1, 3)
TOKEN = "benchmark"
# Seconds that each worker computes at each step.
DELAYS: dict[str, Callable[[int, int], float]] = {
    # every fourth step of worker 3 takes 13 times as long as its others: as fast as the rest, on average
    "periodic": lambda rank, step: BEAT if rank < 3 else BEAT * (13 if step % 4 == 3 else 1) / 4,
    # at every step one worker, each in its turn, takes four times as long
    "in turn": lambda rank, step: BEAT * (4 if step % WORKERS == rank else 1) * 4 / 7,
    "equal": lambda rank, step: BEAT,
    "straggler": lambda rank, step: BEAT * (3 if rank == 3 else 1),
}


# -- the model ---------------------------------------------------------------------------------------------------


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((ROWS, COLUMNS)) * np.linspace(0.3, 1, COLUMNS)).astype("f")
    return x, x @ rng.standard_normal(COLUMNS).astype("f") + rng.standard_normal(ROWS).astype("f") * np.float32(0.1)


X, Y = data()


def gradient(w: np.ndarray, rank: int | None = None) -> np.ndarray:
    """Of the mean squared error over a worker's rows, or all."""
    part = slice(None) if rank is None else slice(rank, None, WORKERS)
    return X[part].T @ (X[part] @ w - Y[part]) * np.float32(2 / len(Y[part]))


def loss(w: np.ndarray) -> float:
    return float(np.square(X @ w - Y).mean())


def target() -> float:
    w = np.zeros(COLUMNS, "f")
    for _ in range(STEPS):
        w -= np.float32(RATE) * gradient(w)
    return loss(w)


# -- what one worker does ----------------------------------------------------------------------------------------


def drift(client: Client, rank: int, task: dict[str, Any]) -> list[float]:
    """The moments at which this worker ended its clocks, by the clock that all processes of a host share."""
    rng, ended = random.Random(rank), []
    for _ in range(DRIFT_CLOCKS):
        time.sleep(rng.expovariate(1 / 0.0005))
        ended.append(time.monotonic())
        client.clock().wait()
    return ended


class Goal:
    """When this worker first had the loss wanted, and whether all others had it too: they mark it in a folder."""

    def __init__(self, folder: str, rank: int) -> None:
        self.folder, self.rank, self.wanted = Path(folder), rank, target() * 1.0001
        self.begin, self.reached = time.monotonic(), 0.0

    def met(self, w: np.ndarray) -> bool:
        if not self.reached and loss(w) <= self.wanted:
            self.reached = time.monotonic() - self.begin
            (self.folder / str(self.rank)).touch()
        return len(list(self.folder.iterdir())) == WORKERS


def train_on_servers(client: Client, rank: int, task: dict[str, Any]) -> float:
    """Pull, compute, push, clock; returns the seconds until this worker had the loss wanted."""
    client.create({"w": Parameter((COLUMNS,), options={"learning_rate": RATE})}, {"w": np.zeros(COLUMNS, "f")})
    world().barrier()
    goal = Goal(task["folder"], rank)
    for step in range(LIMIT):
        w = client.pull("w").wait()
        if goal.met(w):
            return goal.reached
        time.sleep(DELAYS[task["delays"]](rank, step))
        client.push("w", gradient(w, rank))
        client.clock().wait()
    raise SystemExit(f"worker {rank} did not reach {goal.wanted} in {LIMIT} steps: {loss(w)}")


@ht.op(infer=lambda x, **_: x, dims="...->...")
def machine(xp: Any, x: Any) -> Any:
    """The same numbers, once a machine of this rank's speed would have computed with so many rows."""
    time.sleep(machine_beat * len(x) * WORKERS / ROWS)
    return x.copy()


machine.grad(lambda g, y, x: g)
machine_beat = 0.0


def train_on_ranks(client: Client, rank: int, task: dict[str, Any]) -> float:
    """A step, averaged with all, with the group that forms, or as planned; returns what `train_on_servers` does."""
    global machine_beat
    machine_beat = DELAYS[task["delays"]](rank, 0)
    x, y, w = (
        ht.placeholder("x", (None, COLUMNS)),
        ht.placeholder("y", (None,)),
        ht.variable("w", np.zeros(COLUMNS, "f")),
    )
    mean_square = ht.mean((ht.sum(machine(x) * w, axis=1) - y) ** 2)
    strategy = {"all-reduce": DataParallel(), "partial": PartialReduce(), "planned": None}[task["mode"]]
    entries = {"train": [mean_square, ht.optim.SGD(RATE).minimize(mean_square)]}
    executor = ht.Executor(entries, strategy=strategy, comm=Connected(world(), client))
    rows = np.argsort(np.arange(ROWS) % WORKERS, kind="stable")  # so that a rank's quarter is that on servers
    executor.program("train", {x: X[rows], y: Y[rows]})
    world().barrier()
    goal = Goal(task["folder"], rank)
    for _ in range(LIMIT):
        executor.run("train", {x: X[rows], y: Y[rows]})
        if goal.met(executor.state["w"]) or (goal.reached and not isinstance(executor.placement, OnPartners)):
            if task["mode"] == "planned" and rank == 0:
                print(executor.placement.why())
            return goal.reached  # without partners all reach it at once
    raise SystemExit(f"rank {rank} did not reach {goal.wanted} in {LIMIT} steps: {loss(executor.state['w'])}")


BODIES = {"drift": drift, "servers": train_on_servers, "ranks": train_on_ranks}


def work(task: dict[str, Any]) -> None:
    """In a worker process: do the task, tell the result, leave."""
    rank = world().rank
    with Client(task["addresses"], rank, os.environ["HETU_SERVER_TOKEN"]) as client:
        result = BODIES[task["body"]](client, rank, task)
        widest = client.status()[0]["widest"]
        client.leave()
    Path(task["results"], f"{rank}.json").write_text(json.dumps({"result": result, "widest": widest}))


# -- jobs --------------------------------------------------------------------------------------------------------


def run(body: str, consistency: str = "asp", **task: Any) -> list[dict[str, Any]]:
    """One job of four processes and a server: what each worker told."""
    with tempfile.TemporaryDirectory() as folder, ServerProcess(Options(WORKERS, TOKEN, consistency)) as server:
        for name in ("goal", "results"):
            Path(folder, name).mkdir()
        task |= {
            "body": body,
            "addresses": [server.address],
            "folder": f"{folder}/goal",
            "results": f"{folder}/results",
        }
        command = [sys.executable, "-m", "hetu.dist.launch.heturun", "-w", str(WORKERS), sys.executable, __file__]
        variables = {**os.environ, "HETU_SERVER_TOKEN": TOKEN, "OPENBLAS_NUM_THREADS": "1"}
        variables["HETU_STRATEGY"] = "auto-inexact"  # as heturun --auto-inexact, where it starts the servers
        subprocess.run([*command, "--task", json.dumps(task)], env=variables, check=True, timeout=300)
        return [json.loads(Path(folder, "results", f"{rank}.json").read_text()) for rank in range(WORKERS)]


def seconds(body: str, **task: Any) -> float:
    """Until the last worker had the loss wanted."""
    return max(found["result"] for found in run(body, **task))


def measure_drift() -> list[dict[str, Any]]:
    rows = []
    for bound in DRIFT_BOUNDS:
        found = run("drift", f"ssp:{bound}")
        moments = sorted((moment, rank) for rank, worker in enumerate(found) for moment in worker["result"])
        ended, leads = [0] * WORKERS, []
        for _, rank in moments:
            ended[rank] += 1
            leads.append(max(ended) - min(ended))
        widest = max(worker["widest"] for worker in found)
        rows.append(
            {"bound": bound, "clocks": DRIFT_CLOCKS, "allowed": bound + 1, "server": widest, "workers": max(leads)}
        )
    return rows


def compare(slow: dict[str, Any], fast: dict[str, Any], rounds: int) -> dict[str, Any]:
    """How much sooner `fast` has the loss than `slow`: medians of runs in alternation."""
    times = [(seconds(**slow), seconds(**fast)) for _ in range(rounds)]
    names = [task.get("consistency") or task["mode"] for task in (slow, fast)]
    ratio = round(statistics.median(a / b for a, b in times), 3)
    medians = [round(statistics.median(column), 3) for column in zip(*times)]
    return {"delays": slow["delays"], **dict(zip(names, medians)), "speedup": ratio, "rounds": rounds}


def measure_ssp(rounds: int) -> list[dict[str, Any]]:
    tasks = [{"body": "servers", "delays": delays} for delays in ("periodic", "in turn")]
    return [compare({**t, "consistency": "bsp"}, {**t, "consistency": "ssp:3"}, rounds) for t in tasks]


def measure_partial(rounds: int) -> list[dict[str, Any]]:
    tasks = [{"body": "ranks", "delays": delays} for delays in ("straggler", "equal")]
    return [compare({**t, "mode": "all-reduce"}, {**t, "mode": "partial"}, rounds) for t in tasks]


def measure_planned(rounds: int) -> list[dict[str, Any]]:
    task = {"body": "ranks", "delays": "straggler"}
    return [compare({**task, "mode": "all-reduce"}, {**task, "mode": "planned"}, rounds)]


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    print("  ".join(f"{name:>10}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{v:10.2f}" if isinstance(v, float) else f"{v:>10}" for v in row.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=PARTS, choices=PARTS, help="parts to run (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each part (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here, over those of the same parts")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        work(json.loads(args.task))
        return
    parts = {
        "drift": ("Largest lead of a worker in clocks, seen by the server and by the workers", measure_drift),
        "ssp": ("SSP against BSP, seconds to the same loss", lambda: measure_ssp(args.rounds)),
        "partial": ("Partial reduce (groups of 2) against all-reduce, seconds to the same loss",
                    lambda: measure_partial(args.rounds)),
        "planned": ("What heturun --auto-inexact chooses against all-reduce, seconds to the same loss",
                    lambda: measure_planned(args.rounds)),
    }  # fmt: skip
    found = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    for name in args.only:
        title, measured = parts[name][0], parts[name][1]()
        show(title, measured)
        found[name] = measured
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

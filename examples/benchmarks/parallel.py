"""What parallel training costs: communication beside bare MPI, overlap, and a data-parallel step beside PyTorch.

    python examples/benchmarks/parallel.py --json result.json

1. all_reduce: bytes per second through hetu's communicator by those of mpi4py's `Allreduce` on the same buffers, in the
   same processes, in turns.
2. small: microseconds of each collective of 1 KB beyond the same call of mpi4py, called directly and bound to its
   arrays as a program does it, in turns.
3. overlap: one data-parallel step with gradients reduced one by one, by one with gradients in buckets that are reduced
   while backward goes on, on a virtual clock: computing is measured, the network is a model with 50 us of latency.
4. step: hetu's data-parallel step of an MLP by the step of PyTorch's DistributedDataParallel (gloo), from the same
   weights and batches. Jobs take turns. It needs an interpreter that has PyTorch.
5. mpi: all_reduce over MPICH, by which ranks are started at first, and over Open MPI, which `--elastic` needs; and a
   job from its start to its end without them. Jobs take turns. It needs both.

All figures are medians, with the least and the greatest. Ignored on purpose: networks between hosts, GPUs.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from report import Row, add_arguments, report
from rows import WORKLOADS

import hetu as ht
from hetu.dist import Comm, DataParallel, Link, VirtualClock, run_ranks, world
from hetu.dist.comm.call import CollectiveCall

ANSWER = "answer: "
SMALL = 1 << 10
SIZES = [1 << exponent for exponent in range(10, 27, 2)]
RANKS, DEADLINE = 2, 300  # seconds


def main() -> None:
    arguments = parse_arguments()
    if arguments.rank_part:
        answer = RANK_PARTS[arguments.rank_part](arguments.rounds)
        if world().rank == 0:
            print(ANSWER + json.dumps(answer))
        return
    report(arguments, PARTS)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, PARTS, rounds=7)
    parser.add_argument("--torch", metavar="PYTHON", help="an interpreter that has PyTorch (default: this one)")
    parser.add_argument("--rank-part", choices=list(RANK_PARTS), help=argparse.SUPPRESS)
    return parser.parse_args()


def spread(ratios: Sequence[float]) -> Row:
    return {"ratio": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)}


# -- 1. all_reduce ---------------------------------------------------------------------------------------------


def all_reduce(arguments: argparse.Namespace) -> list[Row]:
    return heturun("all_reduce", arguments.rounds)


def all_reduce_of_rank(rounds: int) -> list[Row]:
    from mpi4py import MPI

    comm, bare, rows = world(), MPI.COMM_WORLD, []
    for size in SIZES:
        x, out = np.ones(size // 4, np.float32), np.empty(size // 4, np.float32)
        sides = {
            "mpi4py": lambda x=x, out=out: bare.Allreduce(x, out),
            "hetu": comm.bind(CollectiveCall("all_reduce", x, out, "sum")),
        }
        times = in_turns(sides, rounds, repeats=max(2, min(200, (4 << 20) // size)), meet=comm.barrier)
        ratios = [theirs / ours for theirs, ours in zip(times["mpi4py"], times["hetu"])]
        micros = {f"{name} us": 1e6 * statistics.median(seconds) for name, seconds in times.items()}
        rows.append({"bytes": size, **micros, **spread(ratios)})
    return rows


def in_turns(
    sides: dict[str, Callable[[], object]], rounds: int, repeats: int, meet: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of one call of each side, `rounds` times; a round takes the sides right after each other."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            meet(), call()
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            times[name].append((time.perf_counter() - begin) / repeats)
    return times


# -- 2. small --------------------------------------------------------------------------------------------------


def small(arguments: argparse.Namespace) -> list[Row]:
    return heturun("small", arguments.rounds)


def small_of_rank(rounds: int) -> list[Row]:
    from mpi4py import MPI

    comm, bare, rows = world(), MPI.COMM_WORLD, []
    x, out = np.ones(SMALL // 4, np.float32), np.empty(SMALL // 4, np.float32)
    part, whole = np.empty(x.size // RANKS, np.float32), np.empty(x.size * RANKS, np.float32)
    peer, nothing = 1 - comm.rank, np.empty(0, np.uint8)
    calls = {
        "all_reduce": (CollectiveCall("all_reduce", x, out, "sum"), partial(bare.Allreduce, x, out)),
        "all_gather": (CollectiveCall("all_gather", x, whole), partial(bare.Allgather, x, whole)),
        "reduce_scatter": (
            CollectiveCall("reduce_scatter", x, part, "sum"),
            partial(bare.Reduce_scatter_block, x, part),
        ),
        "all_to_all": (CollectiveCall("all_to_all", x, out), partial(bare.Alltoall, x, out)),
        "broadcast": (CollectiveCall("broadcast", x, x), partial(bare.Bcast, x)),
        "barrier": (CollectiveCall("barrier", nothing, nothing), bare.Barrier),
    }
    sides = {
        name: {"mpi4py": theirs, "called": partial(comm.run, call), "bound": comm.bind(call)}
        for name, (call, theirs) in calls.items()
    }
    trade = [(peer, x)], [(peer, out)]
    sides["exchange"] = {
        "mpi4py": partial(bare.Sendrecv, x, peer, 0, out, peer, 0),
        "called": partial(comm.exchange, *trade),
        "bound": comm.bind_exchange(*trade),
    }
    for name, three in sides.items():
        times = in_turns(three, 5 * rounds, repeats=100, meet=comm.barrier)
        for side in ("called", "bound"):
            beyond = [1e6 * (ours - theirs) for ours, theirs in zip(times[side], times["mpi4py"])]
            micros = {"mpi4py us": 1e6 * statistics.median(times["mpi4py"]), "beyond us": statistics.median(beyond)}
            ratios = [ours / theirs for ours, theirs in zip(times[side], times["mpi4py"])]
            rows.append({"collective": f"{name}, {side}", **micros, "least us": min(beyond), **spread(ratios)})
    return rows


# -- 3. overlap ------------------------------------------------------------------------------------------------


class Buckets(DataParallel):
    """Data parallelism with a given size of the buckets; 0 reduces each gradient by itself, at once."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def build(self, outputs: Sequence[ht.Node], world_size: int) -> Any:
        return replace(super().build(outputs, world_size), bucket_bytes=self.limit)


def overlap(arguments: argparse.Namespace) -> list[Row]:
    rows = []
    for layers, width in ((6, 32), (6, 128), (12, 64)):
        pairs = []
        for _ in range(arguments.rounds):
            sides = [partial(virtual, layers=layers, width=width, limit=limit) for limit in (0, 1 << 20)]
            pairs.append([max(run_ranks(RANKS, side)) for side in sides])
        row = {"layers": layers, "width": width, "one by one us": 1e6 * statistics.median(a for a, _ in pairs)}
        row["buckets us"] = 1e6 * statistics.median(b for _, b in pairs)
        rows.append(row | spread([a / b for a, b in pairs]))
    return rows


def virtual(comm: Comm, layers: int, width: int, limit: int, steps: int = 10) -> float:
    """Virtual seconds of one step."""
    clock = VirtualClock(comm, Link(latency=50e-6, bandwidth=1e9))
    x, t = ht.placeholder("x", (None, width)), ht.placeholder("t", (None, width))
    with ht.scope("model"):
        h = x
        for _ in range(layers):
            h = ht.nn.Linear(width, width, activation=ht.tanh)(h)
        loss = ht.mean(ht.mse_loss(h, t))
        executor = ht.Executor([loss, ht.optim.Momentum(0.1).minimize(loss)], strategy=Buckets(limit), comm=clock)
    batch = np.random.default_rng(0).standard_normal((2, 32, width), np.float32)
    feeds = {"x": batch[0], "t": batch[1]}
    executor.run(feeds)
    begin = clock.now
    for _ in range(steps):
        executor.run(feeds)
    return (clock.now - begin) / steps


# -- 4. step ---------------------------------------------------------------------------------------------------


def step(arguments: argparse.Namespace) -> list[Row]:
    torch = arguments.torch or (sys.executable if importlib.util.find_spec("torch") else "")
    if not torch:
        print("PyTorch is not installed (see --torch): timing hetu alone.")
    mine, theirs = [], []
    for _ in range(max(3, arguments.rounds // 2)):
        mine.append(heturun("step", 1)[0])
        if torch:
            theirs.append(torchrun(torch))
    row: Row = {"workload": WORKLOADS["mlp_sgd"].summary, "hetu us": 1e6 * statistics.median(m["s"] for m in mine)}
    if not theirs:
        return [row]
    if not np.allclose(mine[0]["losses"], theirs[0]["losses"], rtol=1e-4):
        raise SystemExit(f"void, the losses differ: {mine[0]['losses']} and {theirs[0]['losses']}")
    row["torch us"] = 1e6 * statistics.median(t["s"] for t in theirs)
    return [row | spread([a["s"] / b["s"] for a, b in zip(mine, theirs)])]


def step_of_rank(rounds: int) -> list[Row]:
    """Each rank computes its half of the batch."""
    import peer_hetu

    workload = WORKLOADS["mlp_sgd"]
    loss, inputs = peer_hetu.built(workload)
    updates = peer_hetu.optimizer_of(workload).minimize(loss)
    executor = ht.Executor([loss, updates], strategy=DataParallel(), comm=world())
    batches = itertools.cycle([{inputs[name]: array for name, array in batch.items()} for batch in workload.batches()])

    def run() -> float:
        return float(executor.run(next(batches))[0])

    losses = [run() for _ in range(4)]
    return [{"losses": losses, "s": median_step(run)}]


def median_step(run: Callable[[], object], steps: int = 200) -> float:
    for _ in range(20):
        run()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


# -- 5. mpi ----------------------------------------------------------------------------------------------------


def mpi(arguments: argparse.Namespace) -> list[Row]:
    """Rows of both; the ratio is that of one to the other in the same turn."""
    found: dict[str, list[Row]] = {"MPICH": [], "Open MPI": []}
    for _ in range(arguments.rounds):
        for name, options in zip(found, (["-w", str(RANKS)], ["--elastic", f"{RANKS}:{RANKS}"])):
            begin = time.perf_counter()
            row = heturun("mpi", 1, options)[0]
            found[name].append({"start s": time.perf_counter() - begin - row.pop("measured"), **row})
    mine, theirs = found.values()
    return [
        {
            "what": what,
            **{name: statistics.median(row[what] for row in rows) for name, rows in found.items()},
            **spread([b[what] / a[what] for a, b in zip(mine, theirs)]),
        }
        for what in mine[0]
    ]


def mpi_of_rank(rounds: int) -> list[Row]:
    begin, comm, row = time.perf_counter(), world(), {}
    for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24):
        x, out = np.ones(size // 4, np.float32), np.empty(size // 4, np.float32)
        side = {"": comm.bind(CollectiveCall("all_reduce", x, out, "sum"))}
        times = in_turns(side, 5, repeats=max(2, min(200, (4 << 20) // size)), meet=comm.barrier)
        row[f"{size >> 10} KB us"] = 1e6 * min(times[""])
    return [{"measured": time.perf_counter() - begin, **row}]


# -- jobs ------------------------------------------------------------------------------------------------------


def heturun(part: str, rounds: int, options: Sequence[str] = ("-w", str(RANKS))) -> list[Row]:
    """Run a part of this file on ranks, and return what rank 0 answers."""
    command = [sys.executable, "-m", "hetu.dist.launch.heturun", *options, "python", __file__]
    command += ["--rank-part", part, "--rounds", str(rounds)]
    job = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE, check=True)
    return json.loads(job.stdout.split(ANSWER)[1].splitlines()[0])


def torchrun(python: str) -> Row:
    """The same step by DistributedDataParallel, started by hand so that nothing else runs beside it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    threads = str(max(1, (os.cpu_count() or 1) // RANKS))
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS)}
    shared |= {"OMP_NUM_THREADS": threads}
    script = str(Path(__file__).with_name("peer_ddp.py"))
    ranks = [
        subprocess.Popen([python, script], env=shared | {"RANK": str(r)}, stdout=subprocess.PIPE, text=True)
        for r in range(RANKS)
    ]
    try:
        answers = [rank.communicate(timeout=DEADLINE)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return json.loads(answers[0])


RANK_PARTS = {"all_reduce": all_reduce_of_rank, "small": small_of_rank, "step": step_of_rank, "mpi": mpi_of_rank}
PARTS = {
    "all_reduce": ("all_reduce through hetu beside mpi4py: ratio of bytes per second, more is better", all_reduce),
    "small": ("collectives of 1 KB beside mpi4py: ratio of times, less is better", small),
    "overlap": ("gradients one by one by buckets and overlap, at 50 us: ratio of times, more is better", overlap),
    "step": ("data-parallel step at 2 ranks beside PyTorch DDP: ratio of times, less is better", step),
    "mpi": ("all_reduce, and the start of a job, over Open MPI by over MPICH: ratio of times, less is better", mpi),
}

if __name__ == "__main__":
    main()

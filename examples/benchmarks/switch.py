"""What it takes to go over to another strategy in memory, beside the way over disk.

    heturun -w 4 python examples/benchmarks/switch.py [--rounds 9] [--features 256] [--layers 4] [--json FILE]

A GPT with Adam goes from each strategy to the next, and from the last to the first. "switch" is `Executor.switch` to a
strategy that the executor had before; "disk" is to save under the one strategy and to load into an executor of the
other that was made before. So neither compiles. The two take turns; seconds are medians, of the slowest rank, and
`of disk` is the ratio of a turn with its quartiles, less is better. `MB` is what ranks send: each number once to each
rank that lacks it, in so many `messages`; `most` is what the busiest rank sends beside the mean of all that hold
something. `state MB` are all variables, once.
Ignored on purpose: networks between hosts, and compiling.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from report import Row, print_table

import hetu as ht
from hetu.dist import Pipeline, world
from hetu.dist.cut.strategy import Builder

WORDS, LENGTH = 1000, 32
STRATEGIES: dict[str, str | Builder] = {
    "dp": "dp",
    "tp2 x pp2": Pipeline(2, 4, tensor=2),
    "zero3": "zero3",
    "tp": "tp",
}


def model(features: int, layers: int) -> dict[str, list[ht.Node]]:
    ids, t = (ht.placeholder(name, (None, LENGTH), "int64") for name in ("ids", "t"))
    with ht.scope("gpt"):
        h = ht.nn.Embedding(WORDS, features)(ids)
        for _ in range(layers):
            h = ht.nn.TransformerBlock(features, 4, causal=True)(h)
        loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(features, WORDS)(h), t))
    return {"train": [loss, ht.optim.Adam(1e-3).minimize(loss)]}


def slowest(act: Callable[[], object]) -> float:
    """The seconds that some work of all ranks takes the slowest."""
    job = world()
    job.barrier()
    start = time.perf_counter()
    act()
    took = np.array([time.perf_counter() - start])
    job.all_reduce(took, took, "max")
    return float(took[0])


def change(source: str, target: str, arguments: argparse.Namespace, folder: str) -> Row:
    """One change, some rounds of both ways."""
    graph = model(arguments.features, arguments.layers)
    one, before, after = (ht.Executor(graph, strategy=STRATEGIES[name]) for name in (source, source, target))
    moved = one.switch(STRATEGIES[target])
    switches, disks = [], []
    for _ in range(arguments.rounds):
        one.switch(STRATEGIES[source])
        switches.append(slowest(lambda: one.switch(STRATEGIES[target])))
        disks.append(slowest(lambda: (before.save(f"{folder}/state"), after.load(f"{folder}/state"))))
    holders = {rank for move in moved.moves.values() for rank in move.held}
    return {
        "change": f"{source} -> {target}",
        "state MB": sum(v.tensor.nbytes for v in one.variables) / 1e6,
        "MB": moved.nbytes / 1e6,
        "messages": moved.messages,
        "most": max(moved.sent.values()) * len(holders) / moved.nbytes if moved.nbytes else 0.0,
        "switch s": statistics.median(switches),
        "disk s": statistics.median(disks),
        "of disk": np.percentile([s / d for s, d in zip(switches, disks)], (25, 50, 75)).tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="turns of both ways (default: 9)")
    parser.add_argument("--features", type=int, default=256, help="of each token (default: 256)")
    parser.add_argument("--layers", type=int, default=4, help="blocks (default: 4)")
    parser.add_argument("--folder", type=Path, help="where checkpoints lie (default: the system's temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all rows here")
    arguments, first = parser.parse_args(), world().rank == 0
    names = [*STRATEGIES]
    # Rank 0 says where.
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = np.zeros(4096, np.uint8)
        path[: len(folder)] = np.frombuffer(folder.encode(), np.uint8)
        world().broadcast(path)
        shared = bytes(path).rstrip(b"\0").decode()
        rows = [change(a, b, arguments, shared) for a, b in zip(names, [*names[1:], names[0]])]
        world().barrier()
    if first:
        print_table(rows)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

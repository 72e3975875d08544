"""How well plans are predicted and chosen: five models, two links, measured on MPI ranks under a virtual clock.

    python examples/benchmarks/auto.py --json result.json

Measured: every rank really runs its part; its clock advances by the CPU time of its computing, and by a model of the
link (50 us, and 1 GB/s or 100 MB/s) where it communicates. All candidates of the planner, which is given no hints, and
some strategies by hand take turns, so that what else the machine does hits all; the time of each is that of its
quickest step, since interference only ever adds. Predicted: `hetu.plan.simulation.simulate`, from a profile measured
on one process under four plain strategies (`PROFILED`). Both sides share the model of the link, so the more a strategy
communicates, the less there is to predict.

Spearman's coefficient says how alike the two orders are. Beside it stand the pairs in the right order less those in the
wrong one, as a share of the pairs that differ by more than 10 %. The regret is the measured time of the plan that
`hetu.plan.auto` chooses by that profile, over the least that was measured. The memory that is predicted is compared
with that of the ranks' arenas, variables and feeds.

Ignored on purpose: wall time on this machine, whose few cores the ranks share.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import hetu as ht
from hetu import dist, nn
from hetu.plan import Cluster, MachineProfile, auto, simulate
from hetu.plan.costs.calibrate import measured_device

RANKS, BATCH, DEADLINE = 4, 64, 1500
STEPS = 2  # timed ones in a turn, after one that fills the caches
LINKS = {"1 GB/s": dist.Link(50e-6, 1e9), "100 MB/s": dist.Link(50e-6, 1e8)}
SPLIT = dist.MEGATRON | dist.RuleBook(
    {"*up_?/weight": 1, "*up_?/bias": 0, "*down_?/weight": 0, "*conv*/weight": 0, "*conv*/bias": 0}
)
Feed = dict[str, np.ndarray]
Row = dict[str, Any]


def classified(y: ht.Node, t: ht.Node) -> list[Any]:
    loss = ht.mean(ht.softmax_cross_entropy(y, t))
    return [loss, ht.optim.Adam(1e-3).minimize(loss)]


def mlp(features: int = 256, width: int = 1024, pairs: int = 3) -> tuple[list[Any], Feed]:
    x, t = ht.placeholder("x", (None, features)), ht.placeholder("t", (None,), "int64")
    h = x
    for k in range(pairs):
        h = nn.Linear(features, width, activation=ht.relu, name=f"up_{k}")(h)
        h = nn.Linear(width, features, activation=ht.relu, name=f"down_{k}")(h)
    rng = np.random.default_rng(0)
    return classified(nn.Linear(features, 10, name="last")(h), t), {
        "x": rng.standard_normal((BATCH, features), np.float32),
        "t": rng.integers(0, 10, BATCH),
    }


def cnn(channels: int = 32) -> tuple[list[Any], Feed]:
    x, t = ht.placeholder("x", (None, 3, 16, 16)), ht.placeholder("t", (None,), "int64")
    h = x
    for k, (inputs, outputs) in enumerate(itertools.pairwise((3, channels, channels, 2 * channels, 2 * channels))):
        h = ht.relu(nn.Conv2d(inputs, outputs, 3, padding=1, name=f"conv_{k}")(h))
        h = ht.max_pool2d(h, 2) if k == 1 else h
    h = nn.Linear(2 * channels * 64, 128, activation=ht.relu, name="up_0")(ht.flatten(h, 1))
    rng = np.random.default_rng(1)
    return classified(nn.Linear(128, 10, name="last")(h), t), {
        "x": rng.standard_normal((BATCH, 3, 16, 16), np.float32),
        "t": rng.integers(0, 10, BATCH),
    }


def transformer(rows: int = 512, features: int = 128, length: int = 32, blocks: int = 4) -> tuple[list[Any], Feed]:
    x, t = ht.placeholder("x", (None, length), "int64"), ht.placeholder("t", (None, length), "int64")
    h = nn.Embedding(rows, features)(x)
    for k in range(blocks):
        h = nn.TransformerBlock(features, 4, causal=True, name=f"block_{k}")(h)
    rng = np.random.default_rng(2)
    feed = {name: rng.integers(0, rows, (BATCH, length)) for name in ("x", "t")}
    return classified(nn.Linear(features, rows, name="head")(h), t), feed


def ctr(rows: int = 40_000, features: int = 16) -> tuple[list[Any], Feed]:
    """Clicks: nearly all parameters are in a table of which a step touches little."""
    ids, t = ht.placeholder("x", (None, 26), "int64"), ht.placeholder("t", (None,), "int64")
    h = ht.flatten(nn.Embedding(rows, features)(ids), 1)
    h = nn.Linear(26 * features, 256, activation=ht.relu, name="up_0")(h)
    h = nn.Linear(256, 256, activation=ht.relu, name="down_0")(h)
    rng = np.random.default_rng(3)
    feed = {"x": rng.integers(0, rows, (BATCH, 26)), "t": rng.integers(0, 2, BATCH)}
    return classified(nn.Linear(256, 2, name="last")(h), t), feed


def mixed() -> tuple[list[Any], Feed]:
    """A table, a block of attention over its rows, and wide dense layers."""
    ids, t = ht.placeholder("x", (None, 16), "int64"), ht.placeholder("t", (None,), "int64")
    h = nn.TransformerBlock(64, 4, name="block")(nn.Embedding(10_000, 64)(ids))
    h = nn.Linear(1024, 1024, activation=ht.relu, name="up_0")(ht.flatten(h, 1))
    h = nn.Linear(1024, 256, activation=ht.relu, name="down_0")(h)
    rng = np.random.default_rng(4)
    feed = {"x": rng.integers(0, 10_000, (BATCH, 16)), "t": rng.integers(0, 10, BATCH)}
    return classified(nn.Linear(256, 10, name="last")(h), t), feed


WORKLOADS: dict[str, Callable[[], tuple[list[Any], Feed]]] = {
    make.__name__: make for make in (mlp, cnn, transformer, ctr, mixed)
}
BY_HAND = {
    "tp4 by hand": dist.TensorParallel(SPLIT),
    "dp2 tp2 by hand": dist.Parallel(tensor=2, split=SPLIT),
    "dp2 pp2, gpipe": dist.Pipeline(2, microbatches=2, schedule="gpipe", data=2),
}
PROFILED = [  # strategy, ranks
    *((dist.DataParallel(), n) for n in (1, 4, 8, 16)),
    *((dist.TensorParallel(SPLIT), n) for n in (2, 4)),
    (dist.ZeRO(3), 4),
    (dist.Pipeline(2, microbatches=2), 2),
]


def built(name: str) -> tuple[list[Any], Feed]:
    """The entries of an executor, with the same names at every call."""
    with ht.scope(name):
        return WORKLOADS[name]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), help="(default: all)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each strategy (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all rows here")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if (
        os.environ.get("OMP_NUM_THREADS") != "1"
    ):  # a clock sees only its own thread, and BLAS reads this when it is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"OMP_NUM_THREADS": "1"})
    if arguments.measure:
        measure(arguments.measure, arguments.rounds)
        return
    searches = {name: Search(name) for name in tqdm(arguments.workloads, desc="plan")}
    measured = on_ranks({name: s.strategies for name, s in searches.items()}, arguments.rounds)
    rows = [row for name, search in searches.items() for row in search.rows(measured[name])]
    report(rows, arguments.workloads)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


# -- measured --------------------------------------------------------------------------------------------------


def on_ranks(strategies: dict[str, dict[str, str]], rounds: int) -> dict[str, Any]:
    """Start this file on MPI ranks with the strategies of each workload, as JSON, and read what rank 0 writes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        file.write_text(json.dumps(strategies))
        command = [sys.executable, "-m", "hetu.dist.launch.heturun", "-w", str(RANKS), sys.executable, __file__]
        subprocess.run([*command, "--measure", str(file), "--rounds", str(rounds)], timeout=DEADLINE, check=True)
        return json.loads(file.read_text())


def measure(file: Path, rounds: int) -> None:
    """On every rank: run all strategies, and let rank 0 write the slowest rank's times and all ranks' peaks."""
    comm, found = dist.world(), {}
    strategies = json.loads(file.read_text())
    for name in tqdm(strategies, desc="measure", disable=comm.rank > 0):
        found[name] = in_turns(comm, name, strategies[name], rounds)
    if comm.rank == 0:
        file.write_text(json.dumps(found))


def in_turns(comm: dist.Comm, name: str, strategies: dict[str, str], rounds: int) -> dict[str, Row]:
    """Seconds of the quickest step of each strategy over each link, and the peak of each rank."""
    entries, feed = built(name)
    wire = [*LINKS.values()]
    clock = dist.VirtualClock(comm, lambda ranks: wire[0])
    built_from = {s: dist.Strategy.from_json(text) for s, text in strategies.items()}
    executors = {s: ht.Executor(entries, strategy=strategy, comm=clock) for s, strategy in built_from.items()}
    seconds: dict[str, list[float]] = {f"{link}|{s}": [] for link in LINKS for s in executors}
    for _, (link, s) in itertools.product(range(rounds), itertools.product(LINKS, executors)):
        wire[0] = LINKS[link]
        executors[s].run(feed)
        seconds[f"{link}|{s}"] += [step(clock, executors[s], feed) for _ in range(STEPS)]
    held = {s: peaks(comm, executor, feed) for s, executor in executors.items()}
    return {key: {"seconds": min(found), "peaks": held[key.partition("|")[2]]} for key, found in seconds.items()}


def step(clock: dist.VirtualClock, executor: ht.Executor, feed: Feed) -> float:
    """Virtual seconds of one step of the slowest rank, from meeting to meeting."""
    clock.barrier()
    began = clock.now
    executor.run(feed)
    took = np.array([clock.now - began])
    clock.inner.all_reduce(took, took, "max")
    return float(took[0])


def peaks(comm: dist.Comm, executor: ht.Executor, feed: Feed) -> list[int]:
    program = executor.program(feed)
    arrays = [*program.feeds.values(), *executor.state.arrays.values()]
    found = np.empty(comm.world_size, np.int64)
    comm.all_gather(np.array([program.plan.arena_bytes + sum(a.nbytes for a in arrays)]), found)
    return found.tolist()


# -- predicted -------------------------------------------------------------------------------------------------


class Search:
    """What is predicted and chosen for one workload: `strategies` by name, as JSON, and the `chosen` name by link."""

    def __init__(self, name: str) -> None:
        self.name, (self.entries, self.feed) = name, built(name)
        self.profile = MachineProfile(measured_device())
        for strategy, ranks in PROFILED:
            self.profile.learn(self.entries, self.feed, strategy, world_size=ranks)
        self.chosen, builders = {}, dict(BY_HAND)
        for link in LINKS:
            planner = auto(batch_size=BATCH, profile=self.on(link))
            plan = planner.choose(self.entries, world_size=RANKS)
            self.chosen[link] = plan.name
            builders |= {r.name: r.builder for r in plan.why().rated if r.valid}
        loss, updates = self.entries
        outputs = [loss, *updates.values()]
        self.strategies = {s: builder.build(outputs, RANKS).to_json() for s, builder in builders.items()}

    def on(self, link: str) -> MachineProfile:
        return self.profile.on(Cluster(inner=LINKS[link], outer=LINKS[link]))

    def rows(self, measured: dict[str, Row]) -> list[Row]:
        """A row for each link and strategy."""
        found = list[Row]()
        for link, (strategy, text) in itertools.product(LINKS, self.strategies.items()):
            real, plan = measured[f"{link}|{strategy}"], dist.Strategy.from_json(text)
            cost = simulate(self.entries, plan, self.on(link), world_size=RANKS, shapes=self.feed)
            wrong = max(abs(a / b - 1) for a, b in zip(cost.peak, real["peaks"]))
            seconds = {"measured ms": 1e3 * real["seconds"], "predicted ms": 1e3 * cost.time}
            of = {"workload": self.name, "link": link, "strategy": strategy, "chosen": strategy == self.chosen[link]}
            found.append({**of, **seconds, "memory error": wrong})
        return found


# -- report ----------------------------------------------------------------------------------------------------


def report(rows: list[Row], workloads: list[str]) -> None:
    for row in rows:
        ratio = row["predicted ms"] / row["measured ms"]
        print(
            f"{row['workload']:12} {row['link']:9} {row['strategy']:42.42} {row['measured ms']:9.2f} ms measured "
            f"{row['predicted ms']:9.2f} predicted  {ratio:5.2f}  memory {100 * row['memory error']:+.1f} %"
            f"{'  chosen' if row['chosen'] else ''}"
        )
    for workload, link in itertools.product(workloads, LINKS):
        here = [r for r in rows if (r["workload"], r["link"]) == (workload, link)]
        print(
            f"{workload:12} {link:9} Spearman {spearman(here):.3f}, pairs over 10 % apart {ordered(here):.3f}, "
            f"regret {regret(here):.3f} among candidates, {regret(here, BY_HAND):.3f} with those by hand"
        )
    errors = [abs(r["predicted ms"] / r["measured ms"] - 1) for r in rows]
    print(f"pooled Spearman {spearman(rows):.3f}, mean relative error {statistics.mean(errors):.3f}")


def regret(rows: list[Row], more: Iterable[str] = ()) -> float:
    """The measured time of the chosen plan over the least of the planner's candidates, and of those named `more`."""
    (chosen,) = (r["measured ms"] for r in rows if r["chosen"])
    return chosen / min(r["measured ms"] for r in rows if r["strategy"] not in BY_HAND or r["strategy"] in more)


def spearman(rows: list[Row]) -> float:
    """The correlation of the ranks of measured and predicted times."""
    ranks = [np.argsort(np.argsort([r[key] for r in rows])) for key in ("measured ms", "predicted ms")]
    return float(np.corrcoef(ranks)[0, 1])


def ordered(rows: list[Row]) -> float:
    """Pairs in the right order less those in the wrong one, of those whose measured times are over 10 % apart."""
    signs = []
    for a, b in itertools.combinations(rows, 2):
        if abs(np.log(a["measured ms"] / b["measured ms"])) > np.log(1.1):
            signs.append(np.sign((a["measured ms"] - b["measured ms"]) * (a["predicted ms"] - b["predicted ms"])))
    return float(np.mean(signs)) if signs else 1.0


if __name__ == "__main__":
    main()

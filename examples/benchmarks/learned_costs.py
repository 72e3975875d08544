"""What a log of trial runs is worth to the planner: pairs of plans in the right order, with it and without.

    python examples/benchmarks/learned_costs.py --log trials.jsonl

Without a log this makes one: the machine is measured (`hetu profile` on 4 ranks), then eleven models train on 2 and on
4 MPI ranks under strategies of every kind, which take turns, by wall clock. Then every model is held out in turn:
what `auto(learned=...)` would use is learned from the trials of the others only. Counted are pairs of plans of one
model on as many ranks whose medians are over 10 % apart; regret is the time of the plan that would be chosen over the
least.

On two cores that other programs shared (a load of 9 to 15), with 357 trials of 178 plans, mostly two of each:

| | pairs in order | on 2 ranks | on 4 ranks | regret | median error, a factor of |
|---|---|---|---|---|---|
| simulated | 512 of 651 (78.6 %) | 194 of 255 | 318 of 396 | 1.167 | 1.78 |
| learned | 563 of 651 (86.5 %) | 209 of 255 | 354 of 396 | 1.083 | 1.24 |

Of the first 88 of these plans 72 % of pairs were in order as simulated, and 74 to 76 % by ridge regression of any
strength. Boosted stumps (73 to 76 %) and ridge regression on differences between plans of one model (72 to 76 %) were
no better, and weights of simulated seconds worse (61 to 70 %).
Ignored on purpose: servers, several hosts.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import auto
from tqdm import tqdm

import hetu as ht
from hetu import dist
from hetu.plan import MachineProfile, TrialRun, read_trials, trial
from hetu.plan.simulation.trials import factor, learned

RANKS, DEADLINE, APART = (2, 4), 3600, math.log(1.1)
MODELS: dict[str, Callable[[], Any]] = {
    "mlp": auto.mlp,
    "small mlp": functools.partial(auto.mlp, 64, 256, 2),
    "wide mlp": functools.partial(auto.mlp, 512, 2048, 1),
    "deep mlp": functools.partial(auto.mlp, 128, 128, 8),
    "cnn": auto.cnn,
    "small cnn": functools.partial(auto.cnn, 8),
    "transformer": auto.transformer,
    "small transformer": functools.partial(auto.transformer, 128, 64, 16, 2),
    "ctr": auto.ctr,
    "small ctr": functools.partial(auto.ctr, 2000, 64),
    "mixed": auto.mixed,
}


def plans(ranks: int) -> Mapping[str, dist.Builder]:
    """Strategies of every kind on so many ranks."""
    found: dict[str, Any] = {f"zero{level}": dist.ZeRO(level) for level in (1, 3)}
    found |= {"data": dist.DataParallel(), "tensor": dist.TensorParallel(auto.SPLIT)}
    found |= {f"data, accumulating {n}": dist.DataParallel().but(accumulate=n) for n in (2, 8)}
    for count in (2, 8):
        found[f"2 stages, {count} micro-batches"] = dist.Pipeline(2, count, data=ranks // 2)
    if ranks == 4:
        found["data x tensor"] = dist.Parallel(tensor=2, split=auto.SPLIT)
        found["data x tensor, zero3"] = dist.Parallel(tensor=2, zero=3, split=auto.SPLIT)
        found |= {f"4 stages, {count} micro-batches": dist.Pipeline(4, count) for count in (4, 16)}
    return found


def make(log: Path, rounds: int) -> None:
    """Measure the machine, then start this file on ranks."""
    start, profile = [sys.executable, "-m", "hetu.dist.launch.heturun", "-w"], log.with_suffix(".profile")
    subprocess.run(
        [*start, "4", sys.executable, "-m", "hetu", "profile", "--output", profile], timeout=DEADLINE, check=True
    )
    for _, ranks in itertools.product(range(rounds), RANKS):
        command = [sys.executable, __file__, "--log", log, "--profile", profile]
        subprocess.run([*start, str(ranks), *command], timeout=DEADLINE, check=True)


def measure(log: Path, profile: MachineProfile) -> None:
    """On every rank: a trial of each plan of each model."""
    comm = dist.world()
    for name in tqdm(MODELS, disable=comm.rank > 0):
        with ht.scope(name.replace(" ", "_")):
            entries, feed = MODELS[name]()
        for plan, builder in plans(comm.world_size).items():
            try:
                trial(entries, builder, feed, log=log, profile=profile, comm=comm)
            except ht.errors.ArgumentError as error:  # such as fewer layers than stages, on all ranks alike
                if comm.rank == 0:
                    print(f"{name}, {plan}: {error.message}", flush=True)


# -- report --------------------------------------------------------------------------------------------------------


def medians(trials: Sequence[TrialRun]) -> list[TrialRun]:
    """Every plan once."""
    found: dict[Any, list[TrialRun]] = defaultdict(list)
    for run in trials:
        found[run.model, run.name, run.analytic, *run.features.values()].append(run)
    return [replace(same[0], seconds=statistics.median(run.seconds for run in same)) for same in found.values()]


def report(trials: Sequence[TrialRun]) -> None:
    runs, models = medians(trials), {run.model for run in trials}
    numbers = {model: learned([run for run in runs if run.model != model], runs[0].machine) for model in models}
    held = [run.analytic * factor(numbers[run.model], run.features, run.analytic) for run in runs]
    print(f"{len(runs)} plans of {len(models)} models, {len(trials)} trials")
    for name, told in (("simulated", [run.analytic for run in runs]), ("learned", held)):
        right, of = pairs_in_order(runs, told), pairs_in_order(runs, [run.seconds for run in runs])
        error = statistics.median(abs(math.log(t / run.seconds)) for run, t in zip(runs, told))
        print(
            f"{name:9}: {right} of {of} pairs in order ({100 * right / of:.1f} %), regret {regret(runs, told):.3f}, "
            f"median error a factor of {math.exp(error):.2f}"
        )


def pairs_in_order(runs: Sequence[TrialRun], told: Sequence[float]) -> int:
    """Pairs of plans of one model on as many ranks, over 10 % apart, that `told` puts in order."""
    pairs = itertools.permutations(zip(runs, told), 2)
    return sum(a < b and math.log(s.seconds / f.seconds) > APART and alike(f) == alike(s) for (f, a), (s, b) in pairs)


def regret(runs: Sequence[TrialRun], told: Sequence[float]) -> float:
    """The mean over models and numbers of ranks of the measured time of the plan told to be fastest, over the least."""
    of: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for run, seconds in zip(runs, told):
        of[alike(run)].append((seconds, run.seconds))
    return statistics.mean(min(found)[1] / min(seconds for _, seconds in found) for found in of.values())


def alike(run: TrialRun) -> tuple[str, float]:
    return run.model, run.features["ranks"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, required=True, help="the trials; they are made if there is no such file")
    parser.add_argument("--rounds", type=int, default=3, help="trials of each plan (default: 3)")
    parser.add_argument("--profile", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.profile:
        measure(arguments.log, MachineProfile.load(arguments.profile))
        return
    if not arguments.log.exists():
        make(arguments.log, arguments.rounds)
    report(read_trials(arguments.log))


if __name__ == "__main__":
    main()

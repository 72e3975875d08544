"""A plan for each length of sequence, switched in mid-step: `heturun -w 4 python examples/parallel/lengths.py`.

Few texts are long, so a batch of texts padded to the longest is mostly padding, and what suits many short rows, a part
of the batch on each rank, suits a few long ones badly. Here the speeches of Shakespeare's plays, letter by letter, are
sorted into batches of like length, and each length has the strategy with which an epoch is the shortest, switches
included, as simulated on `--cluster`. After H. Ge et al., "Enabling Parallelism Hot Switching for Efficient Training of
Large Language Models" (HotSPa), SOSP 2024. With `--steps 0` nothing is trained, so the model may be as large as yours:
`--steps 0 --cluster dgx-h100 --features 1024 --layers 8 --tokens 65536 --lengths 1024 4096 16384 65536 --stretch 32`.
Ignored on purpose: accuracy, see `examples/nlp/gpt.py`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

import hetu as ht
from hetu.dist import DataParallel, Parallel, Pipeline, TensorParallel, ZeRO, world
from hetu.dist.cut.strategy import Builder
from hetu.dist.cut.switch import moves
from hetu.plan import MachineProfile, cluster, simulate
from hetu.script import positive

STRATEGIES: dict[str, Builder] = {
    "dp": DataParallel(),
    "zero3": ZeRO(3),
    "tp2": Parallel(tensor=2),
    "tp": TensorParallel(),
    "pp2": Pipeline(2, 2),
}


def speeches(limit: int | None, longest: int, stretch: int) -> list[np.ndarray]:
    """The letters of each speech, with all that fits of those that are too long; each `stretch` times over."""
    plays = ht.data.shakespeare("train")
    texts = [text for text in plays.decode(plays.codes).split("\n\n") if len(text.strip()) > 1]
    return [plays.encode(text * stretch)[: longest + 1] for text in texts[:limit]]


def model(letters: int, features: int, layers: int) -> dict[str, list[ht.Node]]:
    """Sub-graphs that add up gradients, and that update by them."""
    x, t = (ht.placeholder(name, (None, None), "int64") for name in ("x", "t"))
    weights = ht.placeholder("weights", (None, None))
    with ht.scope("lengths"):
        h = ht.nn.Embedding(letters, features)(x)
        for _ in range(layers):
            h = ht.nn.TransformerBlock(features, 8, causal=True)(h)
        y = ht.nn.Linear(features, letters, name="head")(ht.nn.LayerNorm(features)(h))
        loss = ht.sum(ht.softmax_cross_entropy(y, t) * weights)
        add, update = ht.optim.accumulated(ht.optim.Adam(3e-3).minimize(loss))
    return {"add": [loss, add], "train": [loss, update]}


class Epoch(NamedTuple):
    """The batches of an epoch: how many of each length, and how often two lengths follow each other."""

    batches: Counter[int]
    changes: Counter[tuple[int, int]]
    real: int

    @staticmethod
    def of(loader: Iterable[Sequence[tuple[np.ndarray, ...]]]) -> Epoch:
        lengths, real = [], 0
        for step in loader:
            lengths += [batch[0].shape[1] for batch in step]
            real += sum(int(np.count_nonzero(weights)) for *_, weights in step)
        return Epoch(Counter(lengths), Counter(pairwise(lengths)), real)


class Costs:
    """Simulated seconds of batches under each strategy, and of the switch from each to each."""

    def __init__(self, graph: Mapping[str, list[ht.Node]], profile: MachineProfile, ranks: int, tokens: int) -> None:
        self.entries, self.profile, self.ranks, self.tokens = graph["add"], profile, ranks, tokens
        outputs = [
            n for entries in graph.values() for e in entries for n in (e.values() if isinstance(e, dict) else [e])
        ]
        self.variables = ht.Graph(outputs).leaves("variable")
        self.built = {name: builder.build(outputs, ranks) for name, builder in STRATEGIES.items()}

    def batch(self, length: int) -> dict[str, float]:
        """The seconds of a batch of this length, by strategy, of those that can have it."""
        shapes, found = dict.fromkeys(("x", "t", "weights"), (self.tokens // length, length)), {}
        for name, strategy in STRATEGIES.items():
            try:
                cost = simulate(self.entries, strategy, self.profile, world_size=self.ranks, shapes=shapes)
            except ht.errors.ShapeError:  # too few rows for its micro-batches
                continue
            found[name] = cost.time
        return found

    def switch(self, source: str, target: str) -> float:
        """The seconds of a switch: the busiest rank sends or receives all the time."""
        way, busy = moves(self.variables, self.built[source], self.built[target]), Counter[tuple[int, int]]()
        for pair, nbytes in way.sizes.items():
            seconds = self.profile.cluster.link(pair).message(nbytes)
            for end in (0, 1):
                busy[end, pair[end]] += seconds
        return max(busy.values(), default=0.0)


def chosen(epoch: Epoch, costs: Costs) -> tuple[dict[int, str], float, dict[str, float]]:
    """The strategy of each length with which an epoch is the shortest, its seconds, and those with one strategy."""
    lengths = sorted(epoch.batches)
    seconds = {length: costs.batch(length) for length in lengths}
    switches = {pair: costs.switch(*pair) for pair in product(STRATEGIES, repeat=2)}

    def total(plan: Mapping[int, str]) -> float:
        computing = sum(count * seconds[length][plan[length]] for length, count in epoch.batches.items())
        return computing + sum(count * switches[plan[a], plan[b]] for (a, b), count in epoch.changes.items())

    plans = [dict(zip(lengths, names)) for names in product(*(seconds[length] for length in lengths))]
    alike = {plan[lengths[0]]: total(plan) for plan in plans if len({*plan.values()}) == 1}
    best = min(plans, key=total)
    return best, total(best), alike


def train(executor: ht.Executor, loader: Iterable, plan: Mapping[int, str], steps: int) -> list[float]:
    """The mean loss of a letter in each step; strategies are switched where the length of batches changes."""
    losses: list[float] = []
    for _, step in zip(range(steps), loader):
        parts = []
        for number, (x, t, weights) in enumerate(step, 1):
            if plan:
                executor.switch(STRATEGIES[plan[x.shape[1]]])
            name = "train" if number == len(step) else "add"
            parts.append(float(executor.run(name, {"x": x, "t": t, "weights": weights})[0]))
        losses.append(sum(parts) / len(parts))
    return losses


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--lengths",
        type=positive,
        nargs="+",
        default=[64, 256, 1024, 2560],
        help="to which speeches are padded (%(default)s)",
    )
    add("--tokens", type=positive, default=2560, help="letters of a batch, with padding (%(default)s)")
    add("--batch-size", type=positive, default=128, help="speeches of a step (%(default)s)")
    add("--features", type=positive, default=64, help="(%(default)s)")
    add("--layers", type=positive, default=2, help="(%(default)s)")
    add("--steps", type=partial(positive, least=0), default=12, help="to train (%(default)s)")
    add("--limit", type=positive, help="the first N speeches alone", metavar="N")
    add("--stretch", type=positive, default=1, help="say each speech so many times: longer texts (%(default)s)")
    add("--cluster", default="cpu-host", help="on which times are simulated (%(default)s)")
    add("--ranks", type=positive, help="that are simulated (default: those of the job)")
    return parser.parse_args()


def main() -> None:
    options, job = parse(), world()
    ranks = options.ranks or job.world_size
    rows = speeches(options.limit, max(options.lengths), options.stretch)
    columns, letters = ([row[:-1] for row in rows], [row[1:] for row in rows]), 1 + max(int(r.max()) for r in rows)

    def batches(lengths: Sequence[int]) -> ht.data.LengthLoader:
        asked = {"lengths": lengths, "tokens": options.tokens, "shuffle": True}
        return ht.data.LengthLoader(columns, options.batch_size, **asked)

    graph = model(letters, options.features, options.layers)
    costs = Costs(graph, MachineProfile.of(cluster(options.cluster)), ranks, options.tokens)
    by_length, padded = (Epoch.of(batches(of)) for of in (options.lengths, options.lengths[-1:]))
    plan, seconds, alike = chosen(by_length, costs)
    _, one_length, _ = chosen(padded, costs)
    if job.rank == 0:
        on = f"{ranks} ranks of {options.cluster}"
        print(f"{len(rows):,} speeches of {by_length.real:,} letters; an epoch, simulated on {on}")
        print(f"{'length':>8}{'rows':>6}{'batches':>9}  strategy")
        for length, count in sorted(by_length.batches.items()):
            print(f"{length:>8}{options.tokens // length:>6}{count:>9}  {plan[length]}")
        best = min(alike, key=alike.__getitem__)
        changes = {pair: n for pair, n in by_length.changes.items() if plan[pair[0]] != plan[pair[1]]}
        waits = sum(n * costs.switch(plan[a], plan[b]) for (a, b), n in changes.items())
        for what, epoch, took in (
            ("one length, its best plan", padded, one_length),
            (f"by length, one plan ({best})", by_length, alike[best]),
            ("by length, a plan each", by_length, seconds),
        ):
            waste = sum(epoch.batches.values()) * options.tokens - epoch.real
            print(f"{what:<32}{waste:>14,} letters of padding{took:>10.3f} s")
        print(f"of which {sum(changes.values())} switches take {waits:.3f} s")
    if options.steps:
        executor = ht.Executor(graph, strategy=STRATEGIES[plan[min(plan)]])
        losses = train(executor, batches(options.lengths), plan, options.steps)
        if job.rank == 0:
            print(f"nats of a letter: {losses[0]:.3f} in the first step, {losses[-1]:.3f} in step {len(losses)}")


if __name__ == "__main__":
    main()

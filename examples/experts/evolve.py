"""Let one expert become many and beat a Switch of as much work: `python examples/experts/evolve.py`.

EvoMoE trains one expert, goes on with copies of it, each less a share of its numbers, and a gate that sends every token
to all of them first and ever fewer as it cools down (X. Nie et al., "EvoMoE", 2021). Switch sends each token to one
expert from the start; it gets as many steps more as make the evaluations of experts equal, which nearly all operations
belong to. The task is made up: tokens of four kinds, and what is asked of each kind differs in part. Ignored on
purpose: ranks, and the rooms that experts have there.
"""

from __future__ import annotations

import itertools
import statistics

import numpy as np

import hetu as ht
from hetu import nn
from hetu.script import Script, number, positive

FEATURES, KINDS, SAMPLES = 16, 4, 4096
ALONE = 0.1  # of EvoMoE's steps, with the first expert alone
HOT, COLD = 2.0, 0.1  # temperatures of its gate, at first and in the end


def tokens(seed: int) -> tuple[ht.data.ArrayDataset, dict[str, np.ndarray]]:
    """Tokens and what is asked of them, to train on and held out; both float32 (n, FEATURES)."""
    rng = np.random.default_rng(seed)
    centers = 2 * rng.standard_normal((KINDS, FEATURES))
    common, own = (rng.standard_normal((k, FEATURES, FEATURES)) / FEATURES**0.5 for k in (1, KINDS))
    kinds = rng.integers(0, KINDS, 2 * SAMPLES)
    noise = rng.standard_normal((2 * SAMPLES, FEATURES))
    asked = np.tanh(noise @ common[0]) + 0.5 * np.tanh(np.einsum("nf,nfg->ng", noise, own[kinds]))
    x, y = (centers[kinds] + noise).astype("float32"), asked.astype("float32")
    return ht.data.ArrayDataset(x[:SAMPLES], y[:SAMPLES]), {"x": x[SAMPLES:], "y": y[SAMPLES:]}


class Mixture:
    """A mixture of experts by a gate, trained on the tokens of a seed, with a count of the evaluations of experts."""

    def __init__(self, script: Script, gate: nn.Layer, steps: int, seed: int) -> None:
        data, self.held_out = tokens(seed)
        self.batches, self.steps, self.evaluations = script.batches(data, drop_last=True, seed=seed), steps, 0.0
        options, choices = script.options, list[nn.experts.Routed]()

        def watched(x: ht.Node, ids: ht.Node | None) -> nn.experts.Routed:
            choices.append(gate(x, ids))
            return choices[-1]

        x, y = ht.placeholder("x", (None, FEATURES)), ht.placeholder("y", (None, FEATURES))
        self.layer = nn.MixtureOfExperts(FEATURES, options.hidden, options.experts, watched, capacity=None)
        made, balance = self.layer(x)
        active = ht.mean(ht.sum(ht.astype(choices[0].weights > 0, "float32"), axis=1))
        error, alone = (ht.mean(ht.square(each - y)) for each in (made, self.layer.first(x)))
        adam = ht.optim.Adam(ht.schedules.cosine(options.learning_rate, steps=steps))
        graphs = {
            "alone": [ht.constant(1.0), adam.minimize(alone)],
            "all": [active, adam.minimize(error + options.balance * balance)],
            "eval": [error, active],
        }
        self.executor = ht.Executor(graphs, seed=seed, device=options.device, precision=options.precision)

    def train(self, graph: str, steps: int) -> list[float]:
        """So many steps of a sub-graph; the experts at work for a token in each."""
        stream = itertools.chain.from_iterable(iter(self.batches) for _ in itertools.count())
        taken = itertools.islice(stream, steps)
        active = [float(self.executor.run(graph, dict(zip("xy", batch)))[0]) for batch in taken]
        self.evaluations += sum(active)
        return active

    def error(self) -> tuple[float, float]:
        """The squared error held out, and the experts at work for a token."""
        error, active = self.executor.run("eval", self.held_out)
        return float(error), float(active)


def evolve(script: Script, seed: int) -> tuple[Mixture, list[float]]:
    """EvoMoE: one expert, copies of it, a gate that cools down; and the experts at work in the steps of the gate."""
    options = script.options
    steps = options.epochs * max(1, SAMPLES // options.batch_size)  # a batch has all samples where they are fewer
    alone = round(ALONE * steps)
    cooling = ht.schedules.exponential(HOT, COLD / HOT, every=steps - alone)
    gate = nn.DenseToSparseGate(FEATURES, options.experts, temperature=cooling)
    trained = Mixture(script, gate, steps, seed)
    trained.train("alone", alone)
    trained.layer.diversify(trained.executor.state, masked=options.masked, seed=seed)
    return trained, trained.train("all", steps - alone)


def main() -> None:
    without = "--accumulate", "--limit", "--checkpoint", "--log", "--strategy"
    script = Script(__doc__, epochs=40, batch_size=128, learning_rate=1e-2, without=without)
    numbers = {"type": positive, "metavar": "N"}
    script.add("--seeds", default=3, help="runs of each, the first with --seed (%(default)s)", **numbers)
    script.add("--experts", default=KINDS, help="(%(default)s)", **numbers)
    script.add("--hidden", default=32, help="features inside an expert (%(default)s)", **numbers)
    script.add("--masked", type=number, default=0.1, metavar="SHARE", help="of a copy's numbers (%(default)s)")
    script.add("--balance", type=number, default=0.01, metavar="SHARE", help="of the gate's loss (%(default)s)")
    options = script.parse()
    print(f"{'seed':>4}  {'EvoMoE':>8}  {'Switch':>8}  experts at work at first, in the middle, in the end, held out")
    found: dict[str, list[float]] = {"EvoMoE": [], "Switch": [], "experts a token": []}
    for seed in range(options.seed, options.seed + options.seeds):
        with ht.scope(f"evolve_{seed}"):
            trained, active = evolve(script, seed)
        steps = round(trained.evaluations)
        with ht.scope(f"switch_{seed}"):
            switch = Mixture(script, nn.TopKGate(FEATURES, options.experts), steps, seed)
        switch.train("all", steps)
        (error, left), (other, _) = trained.error(), switch.error()
        for values, value in zip(found.values(), (error, other, left)):
            values.append(value)
        counts = f"{active[0]:.2f}, {active[len(active) // 2]:.2f}, {active[-1]:.2f}, {left:.2f}"
        print(f"{seed:>4}  {error:>8.4f}  {other:>8.4f}  {counts}; {steps:,} evaluations of a token each", flush=True)
    mine, others, left = map(statistics.fmean, found.values())
    reached = f"error {mine:.4f} with {left:.2f} experts a token; Switch, of as many evaluations, {others:.4f}"
    script.say(f"EvoMoE on tokens of four kinds: {reached} (mean of {options.seeds})")


if __name__ == "__main__":
    main()

"""Step times that others published of GPTs on A100s, and what the simulator says of the same plans without any of them.

    python examples/benchmarks/published.py                 # all rows
    python examples/benchmarks/published.py 22B 7.5B        # some of them
    python examples/benchmarks/published.py --planned 22B   # and what the planner would have chosen instead, and why

The sources are table 1 of D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021, in which every block is computed again for its gradients, and table 5 of V. Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models", MLSys 2023, with that ("again") and with only the
scores of attention computed again. The first gives rates, from which its equation 3 makes seconds. Both trained in 16
bits, on hosts of eight A100 80GB, with 2,048 tokens in a sequence and dropout, by attention that wrote its scores to
memory. So do the blocks here. The cluster is `dgx-a100`, whose figures come from data sheets and from measurements of
single products and all-reduces: nothing was fitted to these tables.

The schedule is plain 1F1B. Where a paper tells how often its stages are interleaved, its plan is taken to idle so many
times less (SC 2021, section 2.2). Ignored is what makes their runs faster and hetu has not: between stages each of the
tensor-parallel ranks sends a part, and in the second paper activations are split along the sequence between products.
What makes them slower is that no product is taken to reach less than the best. The first table does not say how many
samples its micro-batches have: they are set to what fits.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

import hetu as ht
from hetu.look.columns import in_columns
from hetu.nn.attention import heads_of, joined
from hetu.plan import Cluster, MachineProfile, cluster
from hetu.plan.forecast import forecast
from hetu.plan.simulation.deep import DeepSteps, Described
from hetu.plan.simulation.simulate import Cost

LENGTH, VOCABULARY, PRECISION, DROPOUT = 2048, 51_200, "bfloat16", 0.1


@ht.op(infer=lambda x: x, dims="...k!->...k!", precision="follow", inplace={0: (0,)})
def causal_softmax(xp: Any, x: Any) -> Any:
    """Softmax of scores (..., queries, keys) of earlier keys: one kernel, which reads and writes 16 bits."""
    seen = xp.tril(xp.ones(x.shape[-2:], dtype=xp.bool))
    powers = xp.where(seen, xp.exp(x - xp.max(x, axis=-1, keepdims=True)), xp.zeros_like(x))
    return powers / xp.sum(powers, axis=-1, keepdims=True)


@ht.op(infer=lambda g, y: y, dims="...k!,...k!->...k!", precision="follow", inplace={0: (0,)})
def causal_softmax_dx(xp: Any, g: Any, y: Any) -> Any:
    """Its gradient, given that of its result and the result."""
    return y * (g - xp.sum(g * y, axis=-1, keepdims=True))


causal_softmax.grad(lambda g, y, x: causal_softmax_dx(g, y))


def attended(q: ht.Node, k: ht.Node, v: ht.Node) -> ht.Node:
    """Attention of several kernels, which write scores to memory."""
    scores = (q * q.shape[-1] ** -0.5) @ ht.matrix_transpose(k)
    return ht.dropout(causal_softmax(scores), DROPOUT) @ v


class Block(ht.nn.TransformerBlock):
    """A block as it was trained then; of attention the inside is computed again, if the whole block is not."""

    def __init__(self, features: int, heads: int, recompute: bool) -> None:
        super().__init__(features, heads, dropout=DROPOUT)
        self.attended = attended if recompute else ht.recompute(attended)

    def forward(self, x: ht.Node, *, mask: Any = None) -> ht.Node:
        a, normal = self.attention, self.attention_norm(x)
        seen = self.attended(*(heads_of(part(normal), self.heads) for part in (a.query, a.key, a.value)))
        x = ht.astype(x + self.dropout(a.output(joined(seen))), PRECISION)
        return ht.astype(x + self.dropout(self.down(self.up(self.feed_forward_norm(x)))), PRECISION)


@dataclass(frozen=True)
class Published:
    """A row of a table: sizes, degrees, samples of a step and of a micro-batch on a replica; what it took."""

    layers: int
    features: int
    heads: int
    tensor: int
    stages: int
    devices: int
    batch: int
    micro: int
    recompute: bool = True
    seconds: float = 0.0
    rate: float = 0.0  # operations/s of a device
    interleaved: int = 1

    @property
    def took(self) -> float:
        l, h = self.layers, self.features
        counted = 96 * self.batch * LENGTH * l * h**2 * (1 + LENGTH / (6 * h) + VOCABULARY / (16 * l * h))
        return self.seconds or counted / (self.devices * self.rate)

    def entries(self, layers: int) -> list[Any]:
        """What a step of the model with so many blocks fetches and updates."""
        ids, wanted = (ht.placeholder(name, (None, LENGTH), "int64") for name in ("ids", "wanted"))
        h = ht.nn.Embedding(VOCABULARY, self.features)(ids)
        h = ht.dropout(h + ht.nn.Embedding(LENGTH, self.features)(np.arange(LENGTH)), DROPOUT)
        h = ht.astype(h, PRECISION)
        for _ in range(layers):
            block = Block(self.features, self.heads, self.recompute)
            h = ht.recompute(block)(h) if self.recompute else block(h)
        head = ht.nn.Linear(self.features, VOCABULARY, bias=False, name="head")
        loss = ht.mean(ht.softmax_cross_entropy(head(ht.nn.LayerNorm(self.features)(h)), wanted))
        return [loss, ht.optim.Adam(1e-4).minimize(loss)]

    @property
    def model(self) -> Described:
        return Described(self.entries, "tokens", LENGTH, self.layers)

    @property
    def plan(self) -> ht.dist.Parallel:
        data = self.devices // (self.tensor * self.stages)
        count = self.batch // (data * self.micro)
        if self.stages > 1:
            return ht.dist.Pipeline(self.stages, count, data=data, tensor=self.tensor)
        return ht.dist.Parallel(data=data, tensor=self.tensor, accumulate=count)

    @property
    def cluster(self) -> Cluster:
        return cluster(f"dgx-a100:{self.devices // 8}")

    def simulated(self) -> tuple[Cost, float]:
        """The cost of a step of the plan, and its seconds with stages as the paper interleaves them."""
        steps = DeepSteps(self.model, MachineProfile.of(self.cluster), self.batch, PRECISION)
        cost = steps.simulate(self.plan, self.devices)
        return cost, cost.time - cost.timeline.spent.idling * (1 - 1 / self.interleaved)

    @property
    def name(self) -> str:
        degrees = f"{self.devices // (self.tensor * self.stages)} x {self.tensor} x {self.stages}"
        return f"{degrees}, {self.micro} at once"


ROWS = {
    "1.7B": Published(24, 2304, 24, 1, 1, 32, 512, 4, rate=137e12),
    "3.6B": Published(30, 3072, 32, 2, 1, 64, 512, 4, rate=138e12),
    "7.5B": Published(36, 4096, 32, 4, 1, 128, 512, 4, rate=142e12),
    "18.4B": Published(40, 6144, 48, 8, 1, 256, 1024, 4, rate=135e12),
    "39.1B": Published(48, 8192, 64, 8, 2, 512, 1536, 2, rate=138e12),
    "76.1B": Published(60, 10_240, 80, 8, 4, 1024, 1792, 2, rate=140e12),
    "145.6B": Published(80, 12_288, 96, 8, 8, 1536, 2304, 2, rate=148e12),
    "310.1B": Published(96, 16_384, 128, 8, 16, 1920, 2160, 1, rate=155e12),
    "529.6B": Published(105, 20_480, 128, 8, 35, 2520, 2520, 1, rate=163e12),
    "1008B": Published(128, 25_600, 160, 8, 64, 3072, 3072, 1, rate=163e12),
    "22B-again": Published(48, 6144, 64, 8, 1, 8, 4, 4, seconds=1.42),
    "22B": Published(48, 6144, 64, 8, 1, 8, 4, 4, recompute=False, seconds=1.10),
    "175B-again": Published(96, 12_288, 96, 8, 8, 64, 64, 1, seconds=18.13, interleaved=3),
    "175B": Published(96, 12_288, 96, 8, 8, 64, 64, 1, recompute=False, seconds=13.75, interleaved=3),
    "530B-again": Published(105, 20_480, 128, 8, 35, 280, 280, 1, seconds=49.05, interleaved=3),
    "530B": Published(105, 20_480, 128, 8, 35, 280, 280, 1, recompute=False, seconds=37.83, interleaved=3),
    "1T-again": Published(128, 25_600, 160, 8, 64, 512, 512, 1, seconds=94.42),
    "1T": Published(128, 25_600, 160, 8, 64, 512, 512, 1, recompute=False, seconds=71.49),
}


def compared(name: str, row: Published, planned: bool) -> tuple[tuple[str, ...], str]:
    """A line of the table, and why the planner chose its plan."""
    began = time.perf_counter()
    cost, seconds = row.simulated()
    cells = [name, row.name, f"{row.took:.2f} s", f"{seconds:.2f} s", f"{seconds / row.took:.2f}"]
    cells += [f"{max(cost.peak) / 1e9:.0f} GB", f"{time.perf_counter() - began:.0f} s"]
    if not planned:
        return tuple(cells), ""
    found = forecast(row.model, row.cluster, row.batch, precision=PRECISION, progress=None)
    why = found.plan.why()
    cells += [why.best.name, f"{found.seconds:.2f} s", f"{cost.time / found.seconds:.2f}", f"{found.took:.0f} s"]
    more = zip(("computes", "waits", "idles"), cost.timeline.spent, why.cost.timeline.spent)
    told = ", ".join(f"{verb} {theirs - ours:+.2f} s" for verb, theirs, ours in more)
    return tuple(cells), f"\n{name}: beside it, the published plan {told}\n{why}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)} (default: all)")
    parser.add_argument("--planned", action="store_true", help="search for a plan, too")
    args = parser.parse_args()
    if unknown := [name for name in args.rows if name not in ROWS]:
        parser.error(f"no row {unknown[0]!r}: there are {', '.join(ROWS)}")
    heading = ["model", "data x tensor x stages", "published", "simulated", "ratio", "memory", "found in"]
    table = [(*heading, *(["chosen", "simulated", "ratio", "found in"] if args.planned else []))]
    reasons = list[str]()
    for name in tqdm(args.rows or ROWS):
        line, why = compared(name, ROWS[name], args.planned)
        table.append(line)
        reasons += [why] if why else []
    print(*in_columns(table, right={2, 3, 4, 5, 6, 8, 9, 10}), *reasons, sep="\n")


if __name__ == "__main__":
    main()

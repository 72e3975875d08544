"""Step times that others published of GPTs on A100s, and what the simulator says of the same plans without any of them.

    python examples/benchmarks/published.py                 # all rows, for which it takes a while
    python examples/benchmarks/published.py 22B 7.5B        # some of them
    python examples/benchmarks/published.py --planned 22B   # and what the planner would have chosen instead

The sources are table 1 of D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021, in which every block is computed again for its gradients, and table 5 of V. Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models", MLSys 2023, with that (22B-again) and without. The
first gives rates, from which its equation 3 makes seconds. Both trained in 16 bits, on hosts of eight A100 80GB, with
2,048 tokens in a sequence. The cluster is `dgx-a100`, whose figures come from data sheets and from measurements of
single products and all-reduces: nothing was fitted to these tables.

Ignored on purpose: what hetu cannot describe. There stages of pipelines are interleaved (of 175B three times) and
activations of tensor-parallel ranks split along the sequence between products; there is dropout; the numbers of
samples in a micro-batch of the first table are not published, so they are set to what fits.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

from tqdm import tqdm

import hetu as ht
from hetu.look.columns import in_columns
from hetu.plan import MachineProfile, cluster, simulate
from hetu.plan.described import Described, gpt
from hetu.plan.forecast import forecast

LENGTH, VOCABULARY, PRECISION = 2048, 51_200, "bfloat16"


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

    @property
    def took(self) -> float:
        l, h = self.layers, self.features
        counted = 96 * self.batch * LENGTH * l * h**2 * (1 + LENGTH / (6 * h) + VOCABULARY / (16 * l * h))
        return self.seconds or counted / (self.devices * self.rate)

    @property
    def model(self) -> Described:
        sizes = {"layers": self.layers, "features": self.features, "heads": self.heads}
        return gpt(**sizes, vocabulary=VOCABULARY, length=LENGTH, recompute=self.recompute)

    @property
    def plan(self) -> ht.dist.Parallel:
        data = self.devices // (self.tensor * self.stages)
        count = self.batch // (data * self.micro)
        if self.stages > 1:
            return ht.dist.Pipeline(self.stages, count, data=data, tensor=self.tensor)
        return ht.dist.Parallel(data=data, tensor=self.tensor, accumulate=count)

    @property
    def name(self) -> str:
        return f"tensor {self.tensor} x stages {self.stages} x data {self.devices // (self.tensor * self.stages)}"


ROWS = {
    "1.7B": Published(24, 2304, 24, 1, 1, 32, 512, 4, rate=137e12),
    "3.6B": Published(30, 3072, 32, 2, 1, 64, 512, 4, rate=138e12),
    "7.5B": Published(36, 4096, 32, 4, 1, 128, 512, 4, rate=142e12),
    "18.4B": Published(40, 6144, 48, 8, 1, 256, 1024, 4, rate=135e12),
    "39.1B": Published(48, 8192, 64, 8, 2, 512, 1536, 4, rate=138e12),
    "76.1B": Published(60, 10_240, 80, 8, 4, 1024, 1792, 2, rate=140e12),
    "145.6B": Published(80, 12_288, 96, 8, 8, 1536, 2304, 2, rate=148e12),
    "22B-again": Published(48, 6144, 64, 8, 1, 8, 4, 4, seconds=1.42),
    "22B": Published(48, 6144, 64, 8, 1, 8, 4, 4, recompute=False, seconds=1.10),
    "175B-again": Published(96, 12_288, 96, 8, 8, 64, 64, 1, seconds=18.13),
    "175B": Published(96, 12_288, 96, 8, 8, 64, 64, 1, recompute=False, seconds=13.75),
}


def compared(name: str, row: Published, planned: bool) -> tuple[str, ...]:
    """A line of the table."""
    began, there = time.perf_counter(), cluster(f"dgx-a100:{row.devices // 8}")
    shapes = {key: (row.batch, LENGTH) for key in ("ids", "wanted")}
    profile = MachineProfile.of(there)
    cost = simulate(
        row.model.entries, row.plan, profile, world_size=row.devices, shapes=shapes, traced=1, precision=PRECISION
    )
    cells = [name, row.name, f"{row.took:.2f} s", f"{cost.time:.2f} s", f"{cost.time / row.took:.2f}"]
    cells += [f"{max(cost.peak) / 1e9:.0f} GB", f"{time.perf_counter() - began:.0f} s"]
    if planned:
        found = forecast(row.model, there, row.batch, precision=PRECISION, progress=None)
        cells += [found.plan.why().best.name, f"{found.seconds:.2f} s", f"{found.took:.0f} s"]
    return tuple(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)} (default: all)")
    parser.add_argument("--planned", action="store_true", help="search for a plan, too")
    args = parser.parse_args()
    if unknown := [name for name in args.rows if name not in ROWS]:
        parser.error(f"no row {unknown[0]!r}: there are {', '.join(ROWS)}")
    heading = ["model", "plan", "published", "simulated", "ratio", "memory", "found in"]
    table = [(*heading, *(["chosen", "simulated", "found in"] if args.planned else []))]
    for name in tqdm(args.rows or ROWS):
        table.append(compared(name, ROWS[name], args.planned))
    print(*in_columns(table, right={2, 3, 4, 5, 6}), sep="\n")


if __name__ == "__main__":
    main()

"""What a record costs: `heturun -w 2 python examples/benchmarks/recording.py`.

Two executors of one model take turns, one of which is recorded. Printed is how much longer its steps take, at the
median of the turns, and the bytes that a step adds to the record of a rank.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

import hetu as ht
from hetu.core.executor import stepping
from hetu.dist import DataParallel, world
from hetu.dist.comm.comm import of_thread
from hetu.dist.replay.record import begin, taped
from hetu.dist.replay.tape import Record

MODELS = {  # name -> (sizes of layers, rows of a batch)
    "tiny: 16-16-4, batch 16": ((16, 16, 4), 16),
    "small: 784-256-10, batch 128": ((784, 256, 10), 128),
    "wide: 1024-1024-1024-10, batch 64": ((1024, 1024, 1024, 10), 64),
    "the same, batch 512": ((1024, 1024, 1024, 10), 512),
}
TURNS, SECONDS, LIMIT = 11, 0.3, 1 << 30


def executor(sizes: tuple[int, ...]) -> ht.Executor:
    x, t = ht.placeholder("x", (None, sizes[0])), ht.placeholder("t", (None,), "int64")
    h = x
    for before, after in pairwise(sizes):
        h = ht.nn.Linear(before, after, activation=None if after == sizes[-1] else ht.relu)(h)
    loss = ht.mean(ht.softmax_cross_entropy(h, t))
    return ht.Executor([loss, ht.optim.Adam(1e-3).minimize(loss)], strategy=DataParallel())


def seconds(ex: ht.Executor, feed: dict[str, np.ndarray], steps: int) -> float:
    world().barrier()
    began = time.perf_counter()
    for _ in range(steps):
        ex.run(feed)
    return (time.perf_counter() - began) / steps


def main() -> None:
    plain = world()
    for name, (sizes, rows) in MODELS.items():
        draws = np.random.default_rng(0)
        feed = {"x": draws.normal(size=(rows, sizes[0])).astype("float32"), "t": draws.integers(0, sizes[-1], rows)}
        with tempfile.TemporaryDirectory() as folder:
            apart = executor(sizes)
            begin(folder, ["recording.py"], plain, LIMIT)
            noted, ratios = of_thread.get(), []
            kept = executor(sizes)
            took = np.array([seconds(apart, feed, 3)])
            plain.all_reduce(took, took, "max")  # all ranks take as many steps
            steps = max(3, int(SECONDS / took[0]))
            for _ in range(TURNS):
                of_thread.set(None)
                before = seconds(apart, feed, steps)
                of_thread.set(noted)
                with stepping(taped):
                    ratios.append(seconds(kept, feed, steps) / before)
            of_thread.set(None)
            written = Record(Path(folder), plain.rank)
            each = statistics.mean(told.facts["nbytes"] for told in written.steps(written.first))
        if plain.rank == 0:
            middle = statistics.median(ratios)
            print(f"{name:36} {1e3 * before:8.3f} ms, recorded {middle:5.2f} times as long; {each:12,.0f} bytes a step")


if __name__ == "__main__":
    main()

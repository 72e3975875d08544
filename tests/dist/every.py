"""Trains every model by every strategy on the ranks of a job: `heturun -w 3 python -m tests.dist.every`.

All in one job, so that groups and requests of one row lie between those of others. The batches divide by few numbers,
and their sizes change from step to step, even to fewer rows than ranks. Behind it may be said in which precision, to
take every second row only (2), and which models.
"""

from __future__ import annotations

import sys

import numpy as np

import hetu as ht
from hetu.dist import DataParallel, Heterogeneous, Pipeline, ZeRO, stage, world

from .models import MODELS, batches
from .test_strategies import SPLIT, STRATEGIES

SIZES, EVEN = (12, 7, 12, 2), (12, 8, 12)  # EVEN: a pipeline wants 4 micro-batches


def staged():
    """An mlp whose stages are marked."""
    x, t = ht.placeholder("x", (None, 10)), ht.placeholder("t", (None,), "int64")
    with ht.scope("staged"):
        with stage(0):
            h = ht.nn.Linear(10, 16, activation=ht.relu, name="up")(x)
        with stage(1):
            loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(16, 5, name="down")(h), t))
    return {"train": [loss, ht.optim.Adam(0.01).minimize(loss)]}, batches((10,), 5)


EVERY = {**MODELS, "staged": staged}


def rows(ranks: int):
    """(name, model, strategy, sizes) of all that fits these ranks."""
    for model in MODELS:
        for name, make in STRATEGIES.items():
            if ranks % 2 == 0 or " x " not in name:
                yield name, model, make(), SIZES
        for first in range(1, ranks):
            groups = [tuple(range(first)), tuple(range(first, ranks))]
            for shares in ([2, 1], [1, 3]):
                yield f"unequal {groups} {shares}", model, Heterogeneous(groups, shares, split=SPLIT), SIZES
    if ranks % 2 == 0:
        for model in ("mlp", "transformer", "staged"):
            yield "2 stages", model, Pipeline(2, data=ranks // 2), EVEN
    for model in ("mlp", "transformer"):
        yield "accumulated", model, ZeRO(1, accumulate=4), EVEN
    yield "accumulated apart", "mlp", DataParallel(accumulate=4, statistics="microbatch"), EVEN  # no random numbers


def losses(model: str, sizes, strategy=None, comm=None, precision: str = "float32") -> list[float]:
    """The losses of batches of these sizes."""
    graph, feeds = EVERY[model]()
    ex = ht.Executor(graph, strategy=strategy, comm=comm, precision=precision)
    cut = [{name: value[:size] for name, value in feed.items()} for size, feed in zip(sizes, feeds)]
    return [float(ex.run("train", feed)[0]) for feed in cut]


# Losses of one process in the same precision differ by no more: sums are taken in other orders, and then rounded.
TOLERANCE = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}


def table(comm, precision: str, each: int, models=EVERY) -> int:
    """Train every so many of the rows on these ranks; their number."""
    wanted, chosen = {}, [row for row in rows(comm.world_size) if row[1] in models][::each]
    for name, model, strategy, sizes in chosen:
        if (model, sizes) not in wanted:
            wanted[model, sizes] = losses(model, sizes, precision=precision)
        found = losses(model, sizes, strategy, comm, precision)
        told = f"{name}, {model}, {precision}"
        np.testing.assert_allclose(found, wanted[model, sizes], atol=TOLERANCE[precision], rtol=0, err_msg=told)
    return len(chosen)


if __name__ == "__main__":
    job = world(deadline=60.0)
    job.barrier()
    precision, each, *models = sys.argv[1:] or ["float32", "1"]
    print(f"rank {job.rank}: {table(job, precision, int(each), models or EVERY)} rows equal one process")

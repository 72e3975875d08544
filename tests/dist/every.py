"""Trains every model by every strategy on the ranks of a job: `heturun -w 3 python -m tests.dist.every`.

All in one job, so that groups and requests of one row lie between those of others. The batches divide by few numbers,
and their sizes change from step to step, even to fewer rows than ranks. Behind it may be said in which precisions,
in turn, to take each strategy with every sixth of its models only (6), and which models.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

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


def chosen(ranks: int, precisions: Sequence[str], each: int, models: Iterable[str]):
    """The rows of these models, each with one of the precisions in turn, and in turn every so many of one name."""
    named: dict[str, list] = {}
    for row in rows(ranks):
        if row[1] in models:
            named.setdefault(row[0], []).append(row)
    for turn, same in enumerate(named.values()):
        for place, row in enumerate(same):
            if (place + turn) % min(each, len(same)) == 0:
                yield *row, precisions[turn % len(precisions)]


def table(comm, precisions: Sequence[str], each: int, models: Iterable[str] = EVERY) -> int:
    """Train these rows on these ranks; their number."""
    wanted, count = {}, 0
    for name, model, strategy, sizes, precision in chosen(comm.world_size, precisions, each, models):
        alike = model, sizes, precision
        if alike not in wanted:
            wanted[alike] = losses(model, sizes, precision=precision)
        found = losses(model, sizes, strategy, comm, precision)
        told = f"{name}, {model}, {precision}"
        np.testing.assert_allclose(found, wanted[alike], atol=TOLERANCE[precision], rtol=0, err_msg=told)
        count += 1
    return count


if __name__ == "__main__":
    job = world(deadline=60.0)
    job.barrier()
    precisions, each, *models = sys.argv[1:] or ["float32", "1"]
    print(f"rank {job.rank}: {table(job, precisions.split(','), int(each), models or EVERY)} rows equal one process")

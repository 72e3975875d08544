"""Trains every model by every strategy on the ranks of a job: `heturun -w 3 python -m tests.dist.every`.

All in one job, so that groups and requests of one row lie between those of others. The batches divide by few numbers,
and their sizes change from step to step, even to fewer rows than ranks.
"""

from __future__ import annotations

import numpy as np

import hetu as ht
from hetu.dist import Heterogeneous, Pipeline, world

from .models import MODELS
from .test_strategies import SPLIT, STRATEGIES

SIZES, EVEN = (12, 7, 12, 2, 5), (12, 8, 12, 4, 8)  # EVEN: a pipeline wants 4 micro-batches


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
        for model in ("mlp", "transformer"):
            yield "2 stages", model, Pipeline(2, data=ranks // 2), EVEN


def losses(model: str, sizes, strategy=None, comm=None) -> list[float]:
    """The losses of batches of these sizes."""
    graph, feeds = MODELS[model]()
    ex = ht.Executor(graph, strategy=strategy, comm=comm)
    cut = [{name: value[:size] for name, value in feed.items()} for size, feed in zip(sizes, feeds)]
    return [float(ex.run("train", feed)[0]) for feed in cut]


if __name__ == "__main__":
    comm, wanted, count = world(deadline=20.0), {}, 0
    comm.barrier()
    for name, model, strategy, sizes in rows(comm.world_size):
        alone = wanted[model, sizes] = wanted.get((model, sizes)) or losses(model, sizes)
        found = losses(model, sizes, strategy, comm)
        np.testing.assert_allclose(found, alone, atol=1e-5, rtol=0, err_msg=f"{name}, {model}")
        count += 1
    print(f"rank {comm.rank}: {count} rows equal one process")

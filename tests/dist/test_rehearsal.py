"""Steps on ranks that are threads: the losses of one process, and what the cut graph keeps and sends."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.dist import DataParallel, Pipeline, TensorParallel, ZeRO, rehearse

from .models import communication, losses, mlp

STEPS = 3


@pytest.mark.parametrize("strategy", [None, DataParallel(), ZeRO(3), TensorParallel(), Pipeline(2, 2)])
def test_it_trains_as_one_process_and_tells_what_is_kept_and_sent(strategy):
    graph, feeds = mlp()
    ranks = 1 if strategy is None else 2
    tried = rehearse(graph["train"], strategy, feeds[0], world_size=ranks, steps=STEPS)
    executor = ht.Executor(graph)
    np.testing.assert_allclose(tried.losses, [float(executor.run("train", feeds[0])[0]) for _ in range(STEPS)], 2e-6)
    whole = sum(value.nbytes for value in executor.state.arrays.values())
    parts = isinstance(strategy, ZeRO | Pipeline | TensorParallel)
    assert len(tried.kept) == len(tried.arena) == ranks
    assert (max(tried.kept) < whole) == parts and sum(tried.kept) >= whole
    assert bool(tried.sent) == (strategy is not None) and all(kind in str(tried) for kind, _ in tried.sent)


def test_what_is_sent_are_the_collectives_of_the_program():
    graph, feeds = mlp()
    tried = rehearse(graph["train"], TensorParallel(), feeds[0], world_size=2)
    assert len(tried.sent) == sum(communication(mlp, TensorParallel(), 2).values())
    assert losses(mlp, steps=1) == pytest.approx(tried.losses)

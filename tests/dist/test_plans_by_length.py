"""A plan for each length, switched in mid-step: less padding, less virtual time, and the losses of one process."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

import hetu as ht
from hetu.data import LengthLoader
from hetu.dist import run_ranks
from hetu.plan import MachineProfile, cluster

RANKS, TOKENS, LETTERS, STEPS = 4, 96, 20, 5
script = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "parallel" / "lengths.py"))


def batches(lengths):
    """Two of three texts are short, and few are long."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, LETTERS, 1 + min(96, int(rng.pareto(1.0) * 4) + 1)) for _ in range(120)]
    columns = [row[:-1] for row in rows], [row[1:] for row in rows]
    return LengthLoader(columns, 24, lengths=lengths, tokens=TOKENS, shuffle=True)


def graph():
    with ht.scope("test"):
        return script["model"](LETTERS, 16, 1)


@pytest.fixture(scope="module")
def planned(meaning):
    """The epoch, its plans by length, seconds by these, and by one strategy."""
    epoch = script["Epoch"].of(batches((8, 24, 96)))
    costs = script["Costs"](graph(), MachineProfile.of(cluster("cpu-host")), RANKS, TOKENS)
    return epoch, costs, *script["chosen"](epoch, costs)


def test_fewer_tokens_are_padded_and_virtual_time_is_shorter(planned):
    epoch, costs, plan, seconds, alike = planned
    padded = script["Epoch"].of(batches((96,)))
    _, one_length, _ = script["chosen"](padded, costs)
    assert epoch.real == padded.real
    assert 2 * epoch.batches.total() < padded.batches.total()  # all are of as many tokens
    assert len({*plan.values()}) > 1 and seconds < min(alike.values()) < one_length
    switched = sum(costs.switch(plan[a], plan[b]) * count for (a, b), count in epoch.changes.items())
    assert 0 < switched < seconds


@pytest.mark.nightly
def test_the_losses_are_those_of_one_process_that_pads_all_to_the_longest(planned):
    _, _, plan, *_ = planned
    train = script["train"]
    wanted = train(ht.Executor(graph()), batches((96,)), {}, STEPS)
    for ways in (plan, {8: "pp2", 24: "zero3", 96: "tp"}):

        def losses(comm, ways=ways):
            executor = ht.Executor(graph(), strategy=script["STRATEGIES"][ways[8]], comm=comm)
            return train(executor, batches((8, 24, 96)), ways, STEPS)

        for found in run_ranks(RANKS, losses):
            np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)

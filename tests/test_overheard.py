"""What ranks are overheard to communicate, and the picture of a loss."""

from __future__ import annotations

import re

import numpy as np
import pytest

import hetu as ht
from hetu.dist import ZeRO, run_ranks
from hetu.dist.comm.recorder import LastCalls
from hetu.teach.overheard import overheard, phases, story_svg


def train(comm):
    """Steps that gather weights and then scatter gradients."""
    x, w = ht.placeholder("x", (None, 4)), ht.variable("w", ht.init.ones, (4, 6))
    executor = ht.Executor([ht.optim.Momentum(0.1).minimize(ht.mean((x @ w) ** 2))], strategy=ZeRO(3), comm=comm)
    for _ in range(6):
        executor.run({x: np.ones((6, 4), np.float32)})


def test_the_phases_of_a_loss_and_what_is_sent_in_them():
    with overheard() as said:
        run_ranks(3, train, die_in={1: 4}, deadline=30)
    assert [heard.phase for heard in said[1]][-2:] == ["vote", "step"]  # nobody gets through all of that one
    last = len(phases(said[1]))
    for rank in (0, 2):
        assert [name for name, _ in phases(said[rank])[last - 3 : last + 6]] == (
            "copy vote step vote shrink move copy vote step".split()
        )
    moved = {rank: [heard.what for heard in said[rank] if heard.mends] for rank in (0, 2)}
    assert "message from 2 to 0" in moved[0] and "message from 2 to 0" in moved[2]  # who had the copy
    drawn = story_svg(said, dead=1)
    words = re.findall(r">([^<]+)</text>", drawn)
    assert [words.count(word) for word in ("rank 1", "lost", "broken off", "shrink", "move")] == [1, 1, 2, 2, 2]
    assert drawn.count("<rect") == 2 * 10 + 4


def test_the_recorders_are_left_as_they_were():
    add = LastCalls.add
    with pytest.raises(RuntimeError), overheard():
        assert LastCalls.add is not add
        raise RuntimeError
    assert LastCalls.add is add

"""What workers ask of each other, beside NumPy on the rows of all of them."""

from __future__ import annotations

import numpy as np

from hetu.dist import run_ranks
from hetu.ml.workers import workers_of


def test_sums_and_maxima_keep_their_shapes():
    def asked(comm):
        numbers = np.full((2, 3), float(comm.rank))
        workers = workers_of(comm)
        return *workers.sum(numbers, numbers[0, 0], numbers.T[:0]), workers.most(np.array(comm.rank))

    for rank in run_ranks(3, asked):
        assert [each.shape for each in rank] == [(2, 3), (), (0, 2), ()]
        assert (rank[0] == 3).all()
        assert (rank[1], rank[3]) == (3, 2)


def test_texts_of_several_lengths_are_gathered():
    texts = [["a", "long"], ["longer"], ["ä"]]
    for rank in run_ranks(3, lambda comm: workers_of(comm).gather(np.array(texts[comm.rank]))):
        assert rank.tolist() == ["a", "long", "longer", "ä"]

"""A row for topics of words; the reference draws one token after the other."""

from __future__ import annotations

from functools import partial

import numpy as np

from hetu.ops.topics import drawn_topics

from . import Sample, given, real

TOPICS, WORDS = np.array([0, 2, 1, 1, 0, 2, 2, 0]), np.array([3, 0, 1, 4, 3, 3, 2, 0])
STARTS = np.array([0, 3, 3])  # the second is empty
COUNTS = np.random.default_rng(0).integers(2, 9, (5, 3)).astype(float)


def one_by_one(topics, words, weights, starts, counts, totals, draws):
    topics = topics.copy()
    for begin, end in zip(starts, [*starts[1:], len(topics)]):
        for i in range(begin, end):
            own = [sum(weights[j] for j in range(begin, end) if topics[j] == k and j != i) for k in range(3)]
            less = weights[i] * (np.arange(3) == topics[i])
            chances = (own + np.float64(0.3)) * (counts[words[i]] - less + 0.1) / (totals - less + 5 * 0.1)
            topics[i] = np.searchsorted(np.cumsum(chances) / chances.sum(), draws[i], side="right")
    return topics


SAMPLES = [
    Sample(
        "drawn_topics", partial(drawn_topics, alpha=0.3, beta=0.1),
        (given(TOPICS), given(WORDS), real(8, low=0.2, high=1.0), given(STARTS), given(COUNTS),
         given(COUNTS.sum(axis=0)), real(8, low=0.0, high=0.99)),
        one_by_one, order=0, strict="it works on the host",
    ),
]  # fmt: skip

"""Topics in C have the forward function's bits, also of documents without tokens and of weights that hide others."""

from __future__ import annotations

import numpy as np
import pytest

from hetu.cpu_kernels.c_calls import CCall
from hetu.ops.topics import drawn_topics

from .divided import job_by_job

pytestmark = pytest.mark.compiled
PRIORS = {"alpha": 0.3, "beta": 0.1}


def corpus(tokens, documents, words, k, dtype, weigh):
    rng = np.random.default_rng(tokens)
    topics, word = rng.integers(0, k, tokens), rng.integers(0, words, tokens)
    weights = weigh(rng, tokens).astype(dtype)
    counts = np.zeros((words, k), dtype)
    np.add.at(counts, (word, topics), weights)
    starts = np.sort(rng.integers(0, tokens + 1, documents)) * (np.arange(documents) > 0)
    return [topics, word, weights, starts, counts, counts.sum(axis=0), rng.random(tokens).astype(dtype)]


WEIGHTS = {
    "ones": lambda rng, n: np.ones(n),
    "parts": lambda rng, n: rng.random(n),
    "large": lambda rng, n: np.where(rng.random(n) < 0.03, 1e8, 1.0),  # beside which float32 has no ones
}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("tokens", "documents", "words", "k"), [(300, 2, 5, 4), (300, 9, 5, 4), (40, 60, 3, 33), (7, 1, 2, 1), (0, 3, 2, 2)]
)
def test_topics_are_drawn_with_the_same_bits(tokens, documents, words, k, dtype, weights):
    arrays = corpus(tokens, documents, words, k, dtype, WEIGHTS[weights])
    want = drawn_topics.forward(np, *arrays, **PRIORS)
    for over in (False, True):
        given = [a.copy() for a in arrays]
        out = given[0] if over else np.full_like(want, 77)
        (call,) = drawn_topics.bound(np, out, given, PRIORS)
        assert isinstance(call, CCall)
        for run in (CCall.__call__, job_by_job):
            given[0][...] = arrays[0]
            run(call)
            np.testing.assert_array_equal(out, want)

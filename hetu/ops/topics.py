"""Topics of words, drawn again: a step of collapsed Gibbs sampling, for latent Dirichlet allocation (`hetu.ml`)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ..core.backend import to_numpy
from ..core.errors import ShapeError
from ..core.op import op
from ..core.types import TensorType, compatible, require_float
from ..ranges import Positive
from .bags import check_starts
from .index import check_range, require_indices


def _drawn_type(*types: TensorType, **_: Any) -> TensorType:
    topics, words, weights, starts, counts, totals, draws = types
    for type_ in (topics, words, starts):
        require_indices(type_)
    require_float(weights, counts, totals, draws)
    tokens, ranks = (topics, words, weights, draws), [t.ndim for t in types]
    fits = ranks == [1, 1, 1, 1, 2, 1, 1] and compatible(counts.shape[1], totals.shape[0])
    if not fits or not all(compatible(t.shape[0], topics.shape[0]) for t in tokens):
        names = "topics", "words", "weights", "starts", "counts", "totals", "draws"
        said = ", ".join(f"{name} {type_}" for name, type_ in zip(names, types))
        raise ShapeError(
            said, fix="pass (tokens,) of each, starts (documents,), counts (words, topics), totals (topics,)"
        )
    return topics


@op(infer=_drawn_type, dims="e!,e!,e!,n!,w!k!,k!,e!->e!", inplace={0: (0,)}, differentiable=False)
def drawn_topics(
    xp: ModuleType, topics: Any, words: Any, weights: Any, starts: Any, counts: Any, totals: Any, draws: Any,
    *, alpha: Positive, beta: Positive,
) -> Any:  # fmt: skip
    """The topic of each token drawn anew, one after the other in each document, which `starts` says where it begins.

    A token of word w is given topic k in proportion to (n_dk + alpha) (counts[w, k] + beta) / (totals[k] + words beta),
    itself not counted: n_dk is the weight of topic k in its document as it is then, `counts` (words, topics) and their
    sums `totals` are as they were before. `draws` are from 0 to below 1. T. Griffiths, M. Steyvers, "Finding scientific
    topics", PNAS 2004, eq. 5; D. Newman et al., "Distributed Algorithms for Topic Models", JMLR 2009, for counts that
    wait, here for the end of a sweep. ValueRangeError for topics or words that `counts` do not have.

    >>> import hetu as ht
    >>> counts = [[9.0, 0.0], [0.0, 9.0]]
    >>> drawn = drawn_topics([1, 1, 0], [0, 1, 1], [1.0] * 3, [0], counts, [9.0, 9.0], [0.5] * 3, alpha=1.0, beta=0.1)
    >>> ht.evaluate(drawn).tolist()
    [0, 1, 1]
    """
    given = (topics, words, weights, starts, counts, totals, draws)
    topics, words, weights, starts, counts, totals, draws = map(to_numpy, given)
    found, (size, k), real = np.array(topics), counts.shape, counts.dtype.type
    shares = 1 / (totals + real(size * beta))
    lengths = np.diff(starts, append=len(found))
    longest = np.argsort(-lengths, kind="stable")  # documents that have a token at a place are the first of these
    of = np.repeat(np.arange(len(starts)), lengths)
    here = np.zeros((len(starts), k), real)
    np.add.at(here, (of, found), weights)
    for place in range(int(lengths.max(initial=0))):
        docs = longest[: int((lengths > place).sum())]
        at, rows = starts[docs] + place, np.arange(len(docs))
        old, weight = found[at], weights[at]
        here[docs, old] -= weight
        seen, share = counts[words[at]], np.tile(shares, (len(docs), 1))
        seen[rows, old] -= weight
        share[rows, old] = 1 / (totals[old] - weight + real(size * beta))
        sums = np.cumsum((here[docs] + real(alpha)) * (seen + real(beta)) * share, axis=1)
        new = np.minimum((sums <= (draws[at] * sums[:, -1])[:, None]).sum(axis=1), k - 1)
        here[docs, new] += weight
        found[at] = new
    return xp.asarray(found)


@drawn_topics.check
def drawn_topics_check(
    xp: ModuleType, topics: Any, words: Any, weights: Any, starts: Any, counts: Any, *_: Any, **__: Any
) -> None:
    check_starts(xp, starts, topics.shape[0])
    check_range(xp, topics, counts.shape[1], "topic")
    check_range(xp, words, counts.shape[0], "word")


drawn_topics.flops(lambda out, topics, words, weights, starts, counts, *_, **__: 4 * out.size * counts.shape[1])

"""Topics of documents: latent Dirichlet allocation by collapsed Gibbs sampling, documents on workers.

D. Blei et al., "Latent Dirichlet Allocation", JMLR 2003; T. Griffiths, M. Steyvers, "Finding scientific topics", PNAS
2004, for the sampler. In a sweep every document draws the topics of its tokens one after the other, by its own counts
as they change and by the counts of words as they were when the sweep began, of which all then hear the changes
(AD-LDA, D. Newman et al., "Distributed Algorithms for Topic Models", JMLR 2009, with a processor for each document).
So any division of the documents draws the same, and `drawn_topics` (`ops/topics.py`) draws for many of them side by
side. Left out: priors that are learned, topics of a stream (`partial_fit`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np

from ..core.errors import DataError
from ..ops.random import Stream
from ..ops.topics import drawn_topics
from ..ranges import AtLeast1, Positive, Seed
from ..system import memory
from .estimator import Transformer
from .inputs import Sparse
from .workers import total

AVERAGED = 5  # one of so many sweeps, the last ones, count for the topics
MOST_STEPS, SETTLED = 100, 1e-3  # of a document's topics, as scikit-learn has them
TOKEN = 64  # bytes that a sweep has of each
ENTRIES = 1 << 14  # counts of words whose topics are looked for at once


@dataclass(eq=False, repr=False)
class LatentDirichletAllocation(Transformer):
    """`n_components` topics, laws of words, such that each document mixes a few.

    X (documents, words) are counts, of which none is below 0, and may be sparse; a count that is no whole number
    weighs as much. The priors are 1 / `n_components` if not given. `max_iter` are the sweeps, of which the last fifth
    are averaged. Fitted: `components_` (topics, words), how often each topic has each word, with the prior;
    `doc_topic_prior_`, `topic_word_prior_`, `n_iter_`.

    `perplexity` is exp(-log-likelihood per word), with the mix of topics that `transform` finds. scikit-learn's is of a
    bound, and higher.

    >>> import numpy as np
    >>> X = np.array([[3, 2, 0, 0], [2, 4, 0, 0], [0, 0, 5, 1], [0, 0, 2, 3]])
    >>> mixed = LatentDirichletAllocation(n_components=2).fit_transform(X)
    >>> [bool(a) for a in mixed.argmax(axis=1) == mixed[0].argmax()]
    [True, True, False, False]
    """

    n_components: AtLeast1 = 10
    doc_topic_prior: Positive | None = None
    topic_word_prior: Positive | None = None
    max_iter: AtLeast1 = 100
    random_state: Seed = 0
    sparse = positive = True

    def fit(self, X: Any, y: Any = None) -> Self:
        """Counts X (documents, words); y is not looked at. DataError for counts below 0."""
        rows, k = _entries(self._begin(X)), self.n_components
        self.doc_topic_prior_ = self.doc_topic_prior or 1 / k
        self.topic_word_prior_ = self.topic_word_prior or 1 / k
        words, weights, starts = _tokens(rows)
        draws = self._draws(len(words))
        topics = (draws(0) * k).astype(np.int64)

        def counted() -> np.ndarray:
            """How often each word has each topic here; in the last row, how often all words have it."""
            counts = np.bincount(words * k + topics, weights, rows.shape[1] * k).reshape(-1, k)
            return np.concatenate([counts, counts.sum(axis=0, keepdims=True)])

        own = counted()
        shared = self.workers.shared(own, np.append(np.unique(words), rows.shape[1]))
        counts, drawn = shared.values.copy(), np.empty(len(words))
        arrays = (topics, words, weights, starts, counts[:-1], counts[-1], drawn)
        priors = {"alpha": self.doc_topic_prior_, "beta": self.topic_word_prior_}
        calls = drawn_topics.bound(np, topics, arrays, priors)  # for all sweeps
        mean, averaged = np.zeros_like(own), -(-self.max_iter // AVERAGED)
        for sweep in range(1, self.max_iter + 1):
            counts[...], drawn[...] = shared.values, draws(sweep)
            for call in calls:
                call()
            before, own = own, counted()
            shared.add(own - before)
            mean += own * (sweep > self.max_iter - averaged)
        shared.close()
        self.components_ = self.workers.sum(mean[:-1])[0].T / averaged + self.topic_word_prior_
        self.n_iter_ = self.max_iter
        return self

    def _draws(self, tokens: int) -> Callable[[int], np.ndarray]:
        """Numbers of a sweep for the tokens of this worker, which are counted through all workers."""
        counts = self.workers.gather(np.array([tokens]))
        block, skipped = divmod(int(counts[: self.workers.rank].sum()), 4)  # numbers of a block
        seed, stream = self.random_state % 2**64, Stream(0)

        def at(sweep: int) -> np.ndarray:
            return stream.at(np.array([seed, sweep], np.uint64), block).random(skipped + tokens)[skipped:]

        return at

    def transform(self, X: Any) -> np.ndarray:
        """(documents, topics): how much of each topic a document has; the sum is 1."""
        rows = _entries(self._rows(X))
        laws = (self.components_ / self.components_.sum(axis=1, keepdims=True)).T
        cuts = np.searchsorted(rows.starts, np.arange(0, rows.starts[-1], ENTRIES))
        cuts = np.unique([0, *cuts, rows.shape[0]])
        return np.concatenate([self._mixed(rows, laws, *ends) for ends in pairwise(cuts)])

    def _mixed(self, rows: Sparse, laws: np.ndarray, first: int, last: int) -> np.ndarray:
        """The mixes of some documents: each word is divided by how likely its topics are, again and again.

        A. Asuncion et al., "On Smoothing and Inference for Topic Models", UAI 2009, with topics that are known.
        """
        some = slice(rows.starts[first], rows.starts[last])
        of = np.repeat(np.arange(last - first), np.diff(rows.starts[first : last + 1]))
        law, counts, prior = laws[rows.columns[some]], rows.values[some], self.doc_topic_prior_
        found = np.ones((last - first, laws.shape[1]))
        live = np.arange(last - first)
        for _ in range(MOST_STEPS):
            shares = found[live][of] * law
            shares *= (counts / shares.sum(axis=1))[:, None]
            new = np.full((len(live), laws.shape[1]), prior)
            begins = np.flatnonzero(np.diff(of, prepend=-1))
            if len(of):
                new[of[begins]] += np.add.reduceat(shares, begins)
            moves = np.abs(new - found[live]).mean(axis=1) > SETTLED
            found[live] = new
            if not moves.any():
                break
            kept, number = moves[of], np.cumsum(moves) - 1
            live, of, law, counts = live[moves], number[of[kept]], law[kept], counts[kept]
        return found / found.sum(axis=1, keepdims=True)

    def score(self, X: Any, y: Any = None) -> float:
        """The log-likelihood of the words of all workers, given the mixes that `transform` finds."""
        return self._likelihood(X)[0]

    def perplexity(self, X: Any) -> float:
        """exp(-log-likelihood per word), over the words of all workers; DataError where there are none."""
        found, size = self._likelihood(X)
        if not size:
            raise DataError("documents without a word", fix="pass at least one count above 0")
        return float(np.exp(-found / size))

    def _likelihood(self, X: Any) -> list[float]:
        rows, mixed = _entries(self._rows(X)), self.transform(X)
        laws = (self.components_ / self.components_.sum(axis=1, keepdims=True)).T
        parts = [slice(k, k + ENTRIES) for k in range(0, len(rows.values), ENTRIES)]
        at = rows.rows
        chances = [np.einsum("ek,ek->e", mixed[at[some]], laws[rows.columns[some]]) for some in parts]
        logs = [rows.values[some] @ np.log(chance) for some, chance in zip(parts, chances)]
        return total(self.workers, [sum(logs), rows.values.sum()])


def _entries(rows: np.ndarray | Sparse) -> Sparse:
    """The counts that are not 0."""
    rows = Sparse.entries(rows)
    keep = rows.values != 0
    return Sparse.of(rows.rows[keep], rows.columns[keep], rows.values[keep], rows.shape)


def _tokens(rows: Sparse) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each token its word and its weight, 1 where counts are whole, and where the tokens of each document begin."""
    if (size := float(np.ceil(rows.values).sum())) * TOKEN > (held := memory()):
        raise DataError(
            f"documents of {size:.3g} words, of which each is drawn and takes {TOKEN} bytes, for {held:.3g} bytes of "
            "memory",
            fix="divide the counts, or the documents among workers",
        )
    times = np.ceil(rows.values).astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(times)])
    return np.repeat(rows.columns, times), np.repeat(rows.values / times, times), ends[rows.starts[:-1]]

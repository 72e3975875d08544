"""Latent Dirichlet allocation beside scikit-learn's variational one: perplexity, by one formula for both."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, DataError, ShapeError
from hetu.ml import LatentDirichletAllocation as Topics
from hetu.ops.topics import drawn_topics


def drawn(documents: int = 300, words: int = 200, topics: int = 5, length: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Documents as the model says that they are made, and the topics."""
    rng = np.random.default_rng(0)
    laws, mixes = rng.dirichlet(np.full(words, 0.05), topics), rng.dirichlet(np.full(topics, 0.2), documents)
    return np.array([rng.multinomial(rng.poisson(length), mix @ laws) for mix in mixes], float), laws


def nouns() -> tuple[np.ndarray, None]:
    """The glosses of nouns that have one."""
    rows = ht.data.wordnet_nouns().features.astype(float)
    return rows[rows.sum(axis=1) > 0][:800], None


def perplexity(X: np.ndarray, mixes: np.ndarray, components: np.ndarray) -> float:
    laws = components / components.sum(axis=1, keepdims=True)
    return float(np.exp(-(X * np.log(mixes @ laws)).sum() / X.sum()))


@pytest.mark.parametrize("corpus", [drawn, nouns])
def test_words_that_were_held_out_are_as_likely_as_scikit_learn_has_them(corpus):
    decomposition = pytest.importorskip("sklearn.decomposition", reason="the extra [dev] is not installed")
    (X, _), k = corpus(), 5
    fit, held = X[: len(X) * 3 // 4], X[len(X) * 3 // 4 :]
    theirs = decomposition.LatentDirichletAllocation(k, max_iter=20, random_state=0).fit(fit)
    ours = Topics(k).fit(fit)
    found = perplexity(held, ours.transform(held), ours.components_)
    assert found <= 1.02 * perplexity(held, theirs.transform(held), theirs.components_)
    assert ours.perplexity(held) == pytest.approx(found, rel=1e-9)
    assert ours.score(held) == pytest.approx(-np.log(found) * held.sum(), rel=1e-9)


def test_the_topics_that_made_the_documents_are_found():
    X, laws = drawn(documents=1000)
    model = Topics(5).fit(X)
    found = model.components_ / model.components_.sum(axis=1, keepdims=True)
    apart = 0.5 * np.abs(laws[:, None] - found).sum(axis=2)  # total variation
    assert sorted(apart.argmin(axis=1)) == [0, 1, 2, 3, 4] and apart.min(axis=1).max() < 0.1


def test_it_draws_the_same_without_kernels_and_from_sparse_rows(monkeypatch):
    sparse = pytest.importorskip("scipy.sparse", reason="the extra [dev] is not installed")
    X = drawn()[0] * 0.75  # also of counts that are not whole
    fitted = Topics(5, max_iter=10).fit(X)
    monkeypatch.setenv("HETU_KERNELS", "0")
    plain = Topics(5, max_iter=10).fit(sparse.csr_matrix(X))
    np.testing.assert_array_equal(plain.components_, fitted.components_)
    np.testing.assert_array_equal(plain.transform(sparse.csr_matrix(X)), fitted.transform(X))
    assert (Topics(5, max_iter=10, random_state=1).fit(X).components_ != fitted.components_).any()


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda X: Topics().fit(-X), DataError, "Negative values"),
        (lambda X: Topics(0), ArgumentError, "n_components"),
        (lambda X: Topics(2, max_iter=1).fit(X).perplexity(X * 0), DataError, "without a word"),
        (lambda X: drawn_topics([0], [0], [1.0], [0], [1.0], [1.0], [0.5], alpha=1.0, beta=1.0),
         ShapeError, "counts"),
        (lambda X: drawn_topics([0], [0], [1.0], [0], [[1.0, 1.0]], [2.0], [0.5], alpha=1.0, beta=1.0),
         ShapeError, r"counts f32\[1, 2\], totals f32\[1\]"),
    ],
)  # fmt: skip
def test_mistakes_are_named(call, error, says):
    with pytest.raises(error, match=says):
        call(drawn()[0])

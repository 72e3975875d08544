"""Mixtures of normal distributions: scikit-learn's from the same clusters, and what a mixture makes."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import DataError

TYPES = ["full", "tied", "diag", "spherical"]
rng = np.random.default_rng(0)
X = rng.normal(size=(300, 3)) * [1, 2, 5] + np.array([[0, 0, 0], [9, 0, 9], [0, 18, 100]])[rng.integers(0, 3, 300)]


@pytest.mark.parametrize("kind", TYPES)
def test_the_same_clusters_end_where_scikit_learns_do(kind):
    mixture = pytest.importorskip("sklearn.mixture", reason="the extra [dev] is not installed")
    options = {"n_components": 3, "covariance_type": kind, "tol": 1e-8}
    theirs = mixture.GaussianMixture(**options, random_state=0, n_init=3).fit(X)
    ours = ht.ml.GaussianMixture(**options, n_init=3).fit(X)
    one, other = np.argsort(ours.means_[:, 0]), np.argsort(theirs.means_[:, 0])
    for name in ("weights_", "means_", *["covariances_"] * (kind != "tied")):
        np.testing.assert_allclose(getattr(ours, name)[one], getattr(theirs, name)[other], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(ours.lower_bound_, theirs.lower_bound_, rtol=1e-6)
    np.testing.assert_allclose(ours.score_samples(X), theirs.score_samples(X), rtol=1e-3)
    np.testing.assert_allclose(ours.predict_proba(X)[:, one], theirs.predict_proba(X)[:, other], atol=1e-3)
    np.testing.assert_allclose([ours.bic(X), ours.aic(X)], [theirs.bic(X), theirs.aic(X)], rtol=1e-4)
    assert ours.converged_


@pytest.mark.parametrize("kind", TYPES)
def test_what_a_mixture_makes_it_finds_again(kind):
    model = ht.ml.GaussianMixture(3, covariance_type=kind).fit(X)
    made, of = model.sample(20_000)
    assert (model.predict(made) == of).mean() > 0.95
    again = ht.ml.GaussianMixture(3, covariance_type=kind).fit(made)
    order, before = np.argsort(again.means_[:, 0]), np.argsort(model.means_[:, 0])
    scale = X.std(axis=0)
    np.testing.assert_allclose(again.means_[order] / scale, model.means_[before] / scale, atol=0.1)
    np.testing.assert_allclose(again.score(X), model.score(X), atol=0.1)


@pytest.mark.parametrize("kind", TYPES)
def test_rows_that_count_twice_are_rows_that_stand_twice(kind):
    weight = rng.integers(0, 3, len(X))
    once = ht.ml.GaussianMixture(3, covariance_type=kind).fit(X, sample_weight=weight)
    twice = ht.ml.GaussianMixture(3, covariance_type=kind).fit(np.repeat(X, weight, axis=0))
    np.testing.assert_allclose(once.score_samples(X), twice.score_samples(X))


@pytest.mark.parametrize("kind", TYPES)
def test_a_component_without_a_density_is_told(kind):
    flat = np.full((5, 3), 2.0)
    with pytest.raises(DataError, match=r"ill-defined covariances(.|\n)*increase reg_covar"):
        ht.ml.GaussianMixture(covariance_type=kind, reg_covar=0.0).fit(flat)
    assert np.isfinite(ht.ml.GaussianMixture(covariance_type=kind).fit(flat).score(flat))


@pytest.mark.parametrize("far", [1e4, 1e8, 1e12])
@pytest.mark.parametrize("kind", TYPES)
def test_components_that_are_far_from_each_other_keep_their_digits(kind, far):
    of = np.arange(300) % 3
    rows = rng.normal(size=(300, 2)) * [1, 2] + far * np.array([[0, 0], [1, 0], [3, 5]])[of]
    model = ht.ml.GaussianMixture(3, covariance_type=kind).fit(rows)
    own = np.stack([np.cov(rows[of == k].T, bias=True) for k in np.argsort([rows[of == k].sum() for k in range(3)])])
    order = np.argsort(model.means_.sum(axis=1))
    wanted = {"full": own, "tied": own.mean(axis=0), "diag": own.diagonal(0, 1, 2), "spherical": own.trace(0, 1, 2) / 2}
    found = model.covariances_ if kind == "tied" else model.covariances_[order]
    np.testing.assert_allclose(found, wanted[kind], atol=1e-3)
    np.testing.assert_allclose(model.weights_, 1 / 3)

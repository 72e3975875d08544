"""What users may like, by factors of users and items that are fitted in turn, each exactly where the other is given.

Users are rows and lie on workers; what they say of items is summed up. Left out: features of users and items, for
which `hetu.models` has networks; what changes with time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from ..core.errors import ArgumentError
from ..ranges import AtLeast0, AtLeast1, Positive, Seed
from .clusters import blocks
from .estimator import Transformer
from .inputs import Sparse, check_places
from .workers import total


@dataclass(eq=False, repr=False)
class ALSRecommender(Transformer):
    """Alternating least squares: a rating is the product of the factors of a user and an item.

    X is (users, items): the entries of a sparse matrix, or those of an array that are not 0, are what is known.
    Explicit ratings are approached less their mean, and factors kept small by `regularization` times the number of
    their ratings (Y. Zhou et al., "Large-scale parallel collaborative filtering for the Netflix prize", 2008). With
    `implicit`, entries say how often a user took an item, which is believed at 1 + `alpha` times so often, and that
    nothing else was wanted at 1 (Y. Hu, Y. Koren, C. Volinsky, "Collaborative filtering for implicit feedback
    datasets", 2008). A fit holds users x n_components^2 numbers.

    Fitted: `item_factors_` (items, n_components), `user_factors_` (users, n_components) of this worker, `mean_`.
    `transform` gives the factors of users, also of new ones. DataError for an implicit entry below 0.

    >>> import numpy as np
    >>> likes = np.array([[5, 4, 0, 1], [4, 5, 1, 0], [1, 0, 5, 4], [0, 1, 4, 5]])
    >>> model = ALSRecommender(1).fit(likes)
    >>> items, ratings = model.recommend(likes, 1)
    >>> items.ravel().tolist(), bool((ratings < 3).all())
    ([2, 3, 1, 0], True)
    """

    sparse = True

    n_components: AtLeast1 = 10
    implicit: bool = False
    regularization: Positive = 0.1
    alpha: AtLeast0 = 40.0
    n_iter: AtLeast1 = 15
    random_state: Seed = 0

    @property
    def positive(self) -> bool:  # type: ignore[override]
        """Whether entries are numbers of times."""
        return self.implicit

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """What this worker's users (users, items) say; weights are of users, y is not looked at."""
        known = Sparse.entries(self._begin(X))
        weight = self._weights(sample_weight, len(known))
        summed, count = total(self.workers, [weight[known.rows] @ known.values, float(weight @ np.diff(known.starts))])
        self.mean_ = 0.0 if self.implicit else summed / (count or 1)
        rng = np.random.default_rng(self.random_state)
        self.item_factors_ = 0.1 * rng.normal(size=(known.shape[1], self.n_components))
        trust, wanted = self._believed(known)
        for _ in range(self.n_iter):
            users = self._solved(*self._sums(trust, wanted, self.item_factors_))
            sums = self.workers.sum(*self._sums(trust.T, wanted.T, users, weight))
            self.item_factors_ = self._solved(*sums)
        self.user_factors_ = self._solved(*self._sums(trust, wanted, self.item_factors_))
        return self

    def _believed(self, known: Sparse) -> tuple[Sparse, Sparse]:
        """How much each entry is believed beyond what is unknown, and what it says times that it is believed."""
        if self.implicit:
            trust = self.alpha * known.values
            return replace(known, values=trust), replace(known, values=(known.values > 0) + trust)
        return replace(known, values=np.ones(len(known.values))), replace(known, values=known.values - self.mean_)

    def _sums(self, trust: Sparse, wanted: Sparse, others: np.ndarray, weight: Any = 1.0) -> list[np.ndarray]:
        """For each row the sums of products of the other side's factors, and a count; of factors; of all products."""
        heavy = others * np.reshape(weight, (-1, 1))
        products = (heavy[:, :, None] * others[:, None]).reshape(len(others), -1)
        counted = np.column_stack([products, np.broadcast_to(weight, len(others))])
        return [trust @ counted, wanted @ heavy, heavy.T @ others]

    def _solved(self, trusted: np.ndarray, wanted: np.ndarray, every: np.ndarray) -> np.ndarray:
        """(rows, n_components): the factors, each by its normal equations."""
        size = self.n_components
        small = self.regularization * np.eye(size)
        systems = trusted[:, :-1].reshape(-1, size, size)
        counts = trusted[:, -1:, None]
        systems = systems + (every + small if self.implicit else small * np.where(counts > 0, counts, 1))
        return np.linalg.solve(systems, wanted[:, :, None])[:, :, 0]

    def transform(self, X: Any) -> np.ndarray:
        """(users, n_components): the factors of users by what they say of items."""
        known = Sparse.entries(self._rows(X))
        return self._solved(*self._sums(*self._believed(known), self.item_factors_))

    def rate(self, users: Any, items: Any) -> np.ndarray:
        """(n,): the rating foretold, or how much an item is wanted, for users (n,) by their rows in `fit`, and items
        (n,) by their columns."""
        self._check_fitted()
        sides = ("user", np.asarray(users), self.user_factors_), ("item", np.asarray(items), self.item_factors_)
        for what, places, factors in sides:
            check_places(places, len(factors), what)
        found: np.ndarray = np.einsum("nk,nk->n", *(factors[places] for _, places, factors in sides))
        return found + self.mean_

    def recommend(self, X: Any, k: AtLeast1 = 10) -> tuple[np.ndarray, np.ndarray]:
        """The `k` best items (users, k) of those that each user says nothing of in X, and their ratings; -1 and -inf
        where there are not so many. ArgumentError for more than there are."""
        known = Sparse.entries(self._rows(X))
        factors, width = self.transform(X), known.shape[1]
        if k > width:
            raise ArgumentError(f"k={k} of {width} items", fix="ask for fewer")
        items, ratings = np.empty((len(known), k), np.int64), np.empty((len(known), k))
        for block in blocks(len(known), width):
            found = factors[block] @ self.item_factors_.T + self.mean_
            of = slice(known.starts[block][0], known.starts[1:][block][-1])
            found[known.rows[of] - block.start, known.columns[of]] = -np.inf
            best = np.argpartition(-found, k - 1, axis=1)[:, :k]
            order = np.argsort(-np.take_along_axis(found, best, axis=1), axis=1, kind="stable")
            best = np.take_along_axis(best, order, axis=1)
            ratings[block] = np.take_along_axis(found, best, axis=1)
            items[block] = np.where(ratings[block] > -np.inf, best, -1)
        return items, ratings

"""Fit any estimator of `hetu.ml`, on one process or many: `python examples/ml/train.py --model gbdt`.

Each worker has its share of the rows. `heturun -w 4 python examples/ml/train.py` adds up what they know of theirs among
the workers, `heturun -w 4 -s 2 ...` on servers. What learns by gradients takes `--optimizer` too: then `ht.fit` trains
it, and `--strategy` says how. Classes, groups and parts are those of images of digits, numbers are tomorrow's highest
temperatures. Ignored on purpose: choosing parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import hetu as ht
from hetu.ps.wire.environment import place
from hetu.script import Script
from hetu.script_servers import SERVED

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "logistic": ("LogisticRegression", {"C": 0.1}),
    "svm": ("LinearSVC", {"C": 0.01}),
    "fm": ("FactorizationMachineClassifier", {"max_iter": 30}),
    "linear": ("LinearRegression", {}),
    "ridge": ("Ridge", {"alpha": 10.0}),
    "bayes": ("GaussianNB", {"var_smoothing": 0.1}),
    "counts": ("MultinomialNB", {}),
    "bits": ("BernoulliNB", {"binarize": 0.5}),
    "neighbors": ("KNeighborsClassifier", {}),
    "tree": ("DecisionTreeClassifier", {"min_samples_leaf": 3}),
    "forest": ("RandomForestClassifier", {}),
    "gbdt": ("GradientBoostingClassifier", {"max_iter": 30, "max_bins": 32}),
    "tree_numbers": ("DecisionTreeRegressor", {"min_samples_leaf": 20}),
    "forest_numbers": ("RandomForestRegressor", {"min_samples_leaf": 3}),
    "gbdt_numbers": ("GradientBoostingRegressor", {"max_iter": 50}),
    "kmeans": ("KMeans", {"n_clusters": 20}),
    "mixture": ("GaussianMixture", {"n_components": 20, "covariance_type": "diag", "reg_covar": 0.01}),
    "pca": ("PCA", {"n_components": 30}),
    "nmf": ("NMF", {"n_components": 30}),
    "lda": ("LatentDirichletAllocation", {"n_components": 30, "max_iter": 20}),
    "als": ("ALSRecommender", {"n_components": 30, "implicit": True}),
    "neighbors_numbers": ("KNeighborsRegressor", {"n_neighbors": 20}),
    "fm_numbers": ("FactorizationMachineRegressor", {"alpha_factors": 0.1}),
}
OPTIMIZERS = {"sgd": ht.optim.SGD, "adam": ht.optim.Adam, "ftrl": ht.optim.FTRL}
DAYS = 7  # that a temperature is foretold from
Table = tuple[np.ndarray, np.ndarray]


def digits(part: str) -> Table:
    """Pixels (images, 784) from 0 to 1, and digits."""
    images, y = ht.data.mnist(part).arrays
    return images.reshape(len(images), -1).astype("float64"), y


def days(part: str) -> Table:
    """What was measured in a week, in spreads of the days to learn from, and the temperature of the day after."""
    data, count = ht.data.seattle_weather("all"), len(ht.data.seattle_weather("test"))
    measured, highest = data.arrays[0], data.arrays[0][:, data.info["columns"].index("temp_max")]
    x = ht.data.sliding_windows(ht.data.standardized(measured, measured[:-count])[:-1], DAYS)
    rows = x.reshape(len(x), -1).astype("float64"), highest[DAYS:].astype("float64")
    return tuple(a[-count:] if part == "test" else a[:-count] for a in rows)


def reached(model: Any, fitted: Table, test: Table) -> str:
    """How well it does on rows that it has not seen; `fitted` are those of this worker."""
    if isinstance(model, ht.ml.Classifier):
        return f"test accuracy {model.score(*test):.2%}"
    if isinstance(model, ht.ml.Regressor):
        return f"R2 {model.score(*test):.4f} in days to come"
    if hasattr(model, "predict"):
        groups = np.zeros((1000, 10))
        np.add.at(groups, (model.predict(test[0]), test[1]), 1)
        (groups,) = model.workers.sum(groups)
        return f"{groups.max(axis=1).sum() / groups.sum():.2%} of test images in groups of their digit"
    parts = ht.ml.LogisticRegression(comm=model.comm).fit(model.transform(fitted[0]), fitted[1])
    return f"test accuracy {parts.score(model.transform(test[0]), test[1]):.2%} by a logistic regression of its parts"


def main() -> None:
    left = ("--accumulate", "--checkpoint", "--log", "--device", "--precision")
    script = Script(__doc__, epochs=20, batch_size=100, learning_rate=0.02, without=left)
    script.add("--model", choices=MODELS, default="logistic", help="(%(default)s)")
    script.add("--optimizer", choices=OPTIMIZERS, help="of what learns by gradients, by default L-BFGS")
    script.only(
        "--optimizer", model=[m for m, (name, _) in MODELS.items() if hasattr(ht.ml.ESTIMATORS[name], "solver")]
    )
    for option in ("--epochs", "--batch-size", "--learning-rate"):
        script.only(option, optimizer=(*OPTIMIZERS,))
    options = script.parse()
    name, chosen = MODELS[options.model]
    make: Callable[..., Any] = partial(ht.ml.ESTIMATORS[name], **chosen)
    if options.optimizer:
        solver = partial(OPTIMIZERS[options.optimizer], options.learning_rate)
        make = partial(make, solver=solver, max_iter=options.epochs, batch_size=options.batch_size)
        model = make(strategy=options.strategy)  # by which each rank takes its part of all rows
    else:
        model = make(comm=ht.ps.connect() if options.strategy in SERVED else ht.dist.world())
    model.set_params(**{"random_state": options.seed} if hasattr(model, "random_state") else {})
    data = days if isinstance(model, ht.ml.Regressor) else digits
    train, test = (ht.data.ArrayDataset(*data(part)) for part in ("train", "test"))
    train, (script.rank, count) = script.first(train), place()
    part = (0, 1) if options.optimizer else (script.rank, count)
    own, held = (tuple(np.array_split(a, part[1])[part[0]] for a in table.arrays) for table in (train, test))

    began = time.perf_counter()
    model.fit(*own)
    shown = {"rows": len(train), "columns": own[0].shape[1], "workers": count}
    shown["seconds"] = f"{time.perf_counter() - began:.2f}"
    shown |= {"iterations": model.n_iter_} if hasattr(model, "n_iter_") else {}
    script.say("\n".join(f"{what:<12}{value:>10}" for what, value in shown.items()))
    script.say(f"{options.model} on {'weather' if data is days else 'mnist'}: {reached(model, own, held)}")


if __name__ == "__main__":
    main()

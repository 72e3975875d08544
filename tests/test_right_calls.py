"""Calls that are right, as they are written by those who come from NumPy and PyTorch: none is refused.

The zoo (`tests/zoo`) has the wrong ones. A number is a number of whatever library, a tuple as good as a list.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import numpy as np
import pytest

import hetu as ht
from hetu import automl, data, dist, init, look, metrics, ml, nn, optim, plan, ps, schedules, strategies

INT, FLOAT, RNG = np.int64, np.float32, np.random.default_rng(0)
BOTH = dist.Shard((0, 1), ((dist.DUP, 2),))
BATCHES = [([1.0, 3.0],)]
ROWS, CLASSES = [[0.0, 1.0], [1.0, 0.5], [5.0, 3.0], [6.0, 2.0]], [0, 0, 1, 1]
LOG = ml.LogisticRegression


class Table:
    """Columns with names, as pandas has them."""

    columns = ("a", "b")

    def __array__(self, dtype=None, copy=None):
        return np.array(ROWS, np.float32)


def x(*shape):
    return ht.placeholder("x", shape or (4, 3))


def images():
    return x(2, 3, 8, 8)


def fit(**options):
    y = ht.mean(ht.placeholder("x", (None,)) * ht.variable("w", 1.0))
    executor = ht.Executor({"train": [y, optim.SGD(0.1).minimize(y)]})
    return ht.fit(executor, BATCHES, inputs=["x"], **{"epochs": 1, "progress": False, **options})


def dropping(seed):
    y = ht.dropout(x(4, 3), 0.5)
    return ht.Executor({"train": [ht.sum(y), {ht.variable("w", 0.0): ht.sum(y)}]}, seed=seed).run(
        "train", {"x": np.ones((4, 3))}
    )


# A seed is one of NumPy's, such as the 128 bits of `np.random.SeedSequence().entropy`, wherever there is one.
SEEDED = [
    dropping,
    lambda seed: [*data.DataLoader(data.ArrayDataset(range(6)), 2, shuffle=True, seed=seed)],
    lambda seed: data.ArrayDataset(range(6)).split(0.5, seed),
    lambda seed: ht.check_gradients(ht.tanh, (2, 2), seed=seed),
]

CALLS = [  # one a line, which is what a failing row shows
    lambda: nn.Linear(np.prod((1, 3)), np.int32(2))(x()),
    lambda: nn.Linear(np.array(3), 2)(x()),
    lambda: nn.Conv2d(INT(3), 4, INT(3), stride=INT(2), padding=(INT(1), INT(1)))(images()),
    lambda: nn.Conv2d(3, 4, np.array([3, 3]))(images()),
    lambda: nn.Conv2d(3, 3, [3, 3], groups=INT(3))(images()),
    lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=[1, 1])(images()),
    lambda: nn.Dropout(FLOAT(0.5))(x()),
    lambda: nn.Dropout(np.array(0.5))(x()),
    lambda: nn.GroupNorm(INT(2), INT(4))(x(2, 4, 3, 3)),
    lambda: nn.LayerNorm(INT(3), epsilon=FLOAT(1e-5))(x()),
    lambda: nn.Embedding(INT(10), INT(4))((1, 2, 3)),
    lambda: nn.MultiHeadAttention(8, INT(2), causal=np.bool_(True))(x(2, 5, 8)),
    lambda: nn.TransformerBlock(8, 2, dropout=FLOAT(0.1), hidden=INT(16))(x(2, 5, 8)),
    lambda: nn.MixtureOfExperts(8, 16, 4, nn.TopKGate(8, 4, k=INT(2)), capacity=FLOAT(1.5))(x(6, 8)),
    lambda: ht.placeholder("x", np.array([4, 3])),
    lambda: ht.variable("v", init.ones, np.array([3, 4])),
    lambda: ht.full((2, 3), math.nan),
    lambda: ht.full((2, 3), True),
    lambda: ht.full_like(x(), math.nan),
    lambda: ht.dropout(x(), np.array(0.1)),
    lambda: ht.softmax(x(), axis=np.array(1)),
    lambda: ht.sum(x(), axis=np.array(0)),
    lambda: ht.reshape(x(), np.array([6, 2])),
    lambda: ht.split(x(), INT(2)),
    lambda: ht.repeat(x(), INT(2), axis=0),
    lambda: ht.topk(x(), np.array(2)),
    lambda: ht.group_norm(x(2, 4, 3), np.ones(4, "f"), np.zeros(4, "f"), groups=INT(2)),
    lambda: ht.interpolate(images(), [16, 16]),
    lambda: ht.interpolate(images(), scale=(INT(2), INT(2))),
    lambda: ht.concat(y for y in (x(), x())),
    lambda: ht.stack(map(ht.relu, [x(), x()]), axis=1),
    lambda: ht.argmax(x()),
    lambda: ht.argmin(x(), keepdims=True),
    lambda: ht.take(x(), INT(0)),
    lambda: strategies.Hybrid(served={"*large*"}),
    lambda: dist.run_ranks(2, lambda comm: comm.rank, deadline=math.inf),
    lambda: dist.plan(dist.Layout(BOTH), dist.Layout(BOTH), [4, INT(4)]),
    lambda: data.WordPieces({"[UNK]": INT(0), "low": INT(1)}).decode(np.array([1, 0])),
    *[lambda make=make: make(2**128 - 1) for make in SEEDED],
    lambda: init.constant(np.array(3.0))((2,), np.dtype("float32"), RNG),
    lambda: init.normal()((2,), "float32", RNG),
    lambda: init.zeros((2,), np.float32, RNG),
    lambda: init.he_normal([2, 3], float, RNG),
    lambda: optim.Adam(FLOAT(1e-3), beta1=FLOAT(0.9), beta2=np.array(0.999), epsilon=0).minimize(
        ht.variable("w", 1.0) ** 2
    ),
    lambda: optim.clip_by_global_norm({}, 1.0),
    lambda: schedules.warmup(schedules.cosine(FLOAT(0.1), INT(10)), np.array(3)),
    lambda: schedules.multistep(0.1, np.array([10, 20]), factor=FLOAT(0.1)),
    lambda: schedules.Plateau(FLOAT(0.1), patience=INT(0), lowest=FLOAT(1e-6)),
    lambda: metrics.ConfusionMatrix(INT(3)),
    lambda: metrics.FScore(np.array(3), FLOAT(0.5)),
    lambda: data.Normalize((0.1307,), (0.3081,)),
    lambda: data.Normalize((0, 0, 0), (1, 1, 1)),
    lambda: data.ArrayDataset(np.ones((3, 2)), (0, 1, 2)),
    lambda: data.DataLoader(data.ArrayDataset(range(6)), np.array(2), shard=(INT(0), INT(2)), seed=INT(3)),
    lambda: data.adjacency(((0, 1), (1, 2)), np.array(3)),
    lambda: data.sliding_windows((1, 2, 3, 4), INT(2)),
    lambda: fit(epochs=0),
    lambda: fit(epochs=np.array(1), accumulate=INT(1)),
    lambda: look.log_steps(Path("steps.csv"), every=INT(10)),
    lambda: look.staleness_svg([(0, 0, 0.0, 1.0)], ps.ASP().staleness),
    lambda: dist.run_ranks(INT(2), lambda comm: comm.rank),
    lambda: dist.Link(0, math.inf),
    lambda: dist.Parallel(data=INT(1), tensor=2, split={"*weight": INT(1)}, hosts=np.array([[0], [1]])),
    lambda: dist.Mesh(np.array([2, 2]), ("data", "tensor"), ranks=range(4)),
    lambda: dist.place(np.array([0, 1])),
    lambda: dist.send_recv(x(), np.array([[0, 1], [1, 0]])),
    lambda: dist.Layout(BOTH, across=INT(-1)),
    lambda: ps.SSP(INT(3)),
    lambda: ps.Cache("lru", rows={"a": FLOAT(0.5), "b": INT(10)}),
    lambda: ps.Options(INT(1), "token", snapshots=Path("snapshots"), key_file=Path("keys")),
    lambda: strategies.PartialReduce(INT(2), wait=math.inf, decay=FLOAT(0.5)),
    lambda: plan.auto(INT(10**9), hints={"data": 2}, exact=np.bool_(True)),
    lambda: plan.Table(np.array([[1.0, 2.0], [2.0, 3.0]])),
    lambda: nn.Linear(3, 2, activation=functools.partial(ht.leaky_relu, slope=FLOAT(0.1)))(x()),
    lambda: LOG(C=INT(2), tol=FLOAT(1e-3), max_iter=np.array(50), random_state=INT(3)).fit(ROWS, CLASSES),
    lambda: LOG(fit_intercept=np.bool_(False), C=math.inf).fit(np.array(ROWS, np.float16), np.array(CLASSES, np.uint8)),
    lambda: LOG().fit(np.array(ROWS, int), ["a", "a", "b", "b"]).score(ROWS, np.array(["a", "b", "b", "c"])),
    lambda: LOG().fit(np.array(ROWS, object), np.array(["a", "a", "b", "b"], object)).predict(Table()),
    lambda: LOG().fit(Table(), [False, False, True, True]).predict_proba(Table()),
    lambda: LOG().fit(ROWS, np.array(CLASSES, object), [1, 2, 0, 1]).predict(np.array(ROWS)[::-1]),
    lambda: LOG().fit(ROWS, [1.0, 1.0, 2.0, 2.0], sample_weight=2).score(ROWS, [1, 1, 2, 2], [True, True, False, True]),
    lambda: LOG(solver=functools.partial(optim.FTRL, 0.1), max_iter=2).fit(ROWS, CLASSES),
    lambda: LOG().fit(np.asfortranarray(ROWS), np.array(CLASSES)[:, None]).set_params(C=FLOAT(0.1)).get_params(),
    lambda: ml.GaussianNB(priors=np.array([0.5, 0.5])).fit(ROWS, CLASSES).partial_fit(ROWS, CLASSES),
    lambda: ml.GaussianNB().partial_fit(ROWS[:2], CLASSES[:2], classes=range(2)).partial_fit(ROWS[2:], CLASSES[2:]),
    lambda: ml.KMeans(INT(2), init=[[0, 0], [5, 3]], n_init=1).fit_predict(ROWS),
    lambda: ml.PCA(0.5).fit(np.ones((4, 2))).transform(ROWS),
    lambda: ml.PCA(INT(1)).fit_transform(ROWS, y=CLASSES),
    lambda: ml.Ridge(alpha=1).fit(ROWS, np.array(CLASSES, bool)).predict(memoryview(np.array(ROWS))),
    lambda: ml.LinearRegression().fit(np.array(ROWS), [[1, 2]] * 4).score(ROWS, [[1, 2]] * 4),
    lambda: ml.KNeighborsClassifier(INT(1)).fit(ROWS, CLASSES).kneighbors(ROWS, np.array(2)),
    lambda: ml.LatentDirichletAllocation(2, max_iter=2).fit_transform(np.array([[3, 0], [0, 2]], np.uint8)),
    lambda: ml.ALSRecommender(1).fit(ROWS).rate(0 * np.arange(2), [0, 1]),
    lambda: ml.Sparse.of((0, 1), np.array([1, 0], np.int32), [1, 2], (INT(2), 2)).dense(),
    lambda: automl.search(lambda run: FLOAT(run["x"]), {"x": automl.Float(0, INT(1), log=False)}, trials=INT(3)),
    lambda: automl.search(lambda run: run.get("y", 1), {"x": automl.Int(INT(0), 3)}, trials=2, log=Path("log")),
    lambda: automl.search(lambda run: True, {"x": automl.Categorical(1, 2.5, None, "a", True)}, trials=2, seconds=60),
    lambda: automl.search(
        lambda run: run["x"], {"x": automl.Float(0, 1)}, trials=2, sampler=automl.TPE(share=FLOAT(0.5))
    ),
    lambda: automl.Bayesian(automl.GaussianProcess, first=INT(2)),
    lambda: ml.DecisionTreeClassifier(max_depth=INT(2)).fit(Table(), [*"aabb"]).text(np.array(["size", "price"])),
    lambda: ml.RandomForestRegressor(INT(3), max_features="sqrt").fit(ROWS, CLASSES).apply(ROWS),
    lambda: ml.GradientBoostingClassifier(max_iter=INT(2), learning_rate=1).fit(ROWS, [*"aabb"]).predict_proba(ROWS),
    lambda: (
        automl.AutoClassifier(10, INT(1), categorical={INT(1)}, metric="accuracy").fit(ROWS, [*"aabb"]).predict(ROWS)
    ),
    lambda: automl.AutoRegressor(trials=1, metric=lambda y, found: 0.0).fit({"a": [1, 2, 3, 4]}, CLASSES),
]


@pytest.mark.parametrize("call", CALLS)
def test_it_is_taken(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call()


def test_a_number_of_numpy_changes_no_dtype():
    assert ht.full((2,), FLOAT(3)).dtype == ht.full((2,), 3.0).dtype == np.float32
    assert ht.constant(np.array(2.0)).dtype == np.float64  # where a value is wanted, it keeps its own
    assert ps.Options(1, "token", snapshots=Path("there")).snapshots == "there"

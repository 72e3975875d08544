"""What is made of updates: sums over batches are one batch of all, averages their formula, groups their optimizers."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu import dist, optim
from hetu.core.errors import ArgumentError, UnknownNameError
from hetu.dist import run_ranks

OPTIMIZERS = {
    "sgd": lambda: optim.SGD(0.2),
    "momentum": lambda: optim.Momentum(0.1, 0.9, weight_decay=0.1),
    "adam": lambda: optim.Adam(ht.schedules.exponential(0.05, 0.9)),
    "clipped": lambda: optim.SGD(0.2, clip_norm=0.1),
}
RNG = np.random.default_rng(0)
X, T = RNG.standard_normal((48, 4)).astype("float32"), RNG.integers(0, 3, 48)


def model():
    x, t = ht.placeholder("x", (None, 4)), ht.placeholder("t", (None,), "int64")
    with ht.scope("model"):
        h = ht.tanh(ht.nn.Linear(4, 5, name="first")(x))
        y = ht.nn.Linear(5, 3, name="second")(h)
    return y, ht.mean(ht.softmax_cross_entropy(y, t))


def parts(size):
    return [{"x": X[i : i + size], "t": T[i : i + size]} for i in range(0, 48, size)]


def weights(executor):
    return {v.name: executor.state[v].copy() for v in executor.variables if v.attrs["trainable"]}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("batches", [1, 2, 4])
def test_gradients_of_several_batches_count_as_those_of_one(name, batches):
    def trained(size, made):
        _, loss = model()
        executor = ht.Executor([loss, made(OPTIMIZERS[name]().minimize(loss))])
        for feed in parts(size):
            executor.run(feed)
        return weights(executor)

    wanted = trained(24, lambda updates: updates)
    for variable, found in trained(24 // batches, lambda updates: optim.accumulated(updates, batches)).items():
        np.testing.assert_allclose(found, wanted[variable], rtol=1e-4, atol=1e-6)


def test_between_two_updates_nothing_changes_but_the_sums():
    _, loss = model()
    executor = ht.Executor([loss, optim.accumulated(optim.Adam(0.1).minimize(loss), 3)])
    before = weights(executor)
    for number, feed in enumerate(parts(8)[:6], 1):
        executor.run(feed)
        same = all((value == before[name]).all() for name, value in weights(executor).items())
        assert same == (number % 3 != 0)
        before = weights(executor)


def both(loss):
    average = optim.Average(0.8)
    return average, average.follow(optim.accumulated(optim.Adam(0.05).minimize(loss), 2))


@pytest.mark.usefixtures("meaning")
@pytest.mark.parametrize("strategy", [dist.DataParallel, lambda: dist.ZeRO(3), lambda: dist.Pipeline(microbatches=2)])
def test_ranks_train_by_them_as_one_process_does(strategy):
    def run(comm=None):
        y, loss = model()
        average, updates = both(loss)
        graphs = {"train": [loss, updates], "eval": [average.of(y)]}
        executor = ht.Executor(graphs, strategy=strategy() if comm else None, comm=comm)
        losses = [float(executor.run("train", feed)[0]) for feed in parts(12)]
        return np.array(losses), executor.run("eval", {"x": X[:4]})[0]

    losses, seen = run()
    for found in run_ranks(2, run):
        np.testing.assert_allclose(found[0], losses, atol=1e-5)
        np.testing.assert_allclose(found[1], seen, atol=1e-5)


def test_an_average_is_that_of_all_steps_the_last_ones_most():
    y, loss = model()
    average = optim.Average(0.8)
    updates = average.follow(optim.Momentum(0.3).minimize(loss))
    executor = ht.Executor({"train": [loss, updates], "eval": [average.of(y)]})
    seen = []
    for feed in parts(8):
        executor.run("train", feed)
        seen.append(weights(executor))
    shares = 0.8 ** np.arange(len(seen))[::-1]
    wanted = {name: sum(s * w[name] for s, w in zip(shares, seen)) / shares.sum() for name in seen[0]}
    h = np.tanh(X @ wanted["model/first/weight"] + wanted["model/first/bias"])
    y = h @ wanted["model/second/weight"] + wanted["model/second/bias"]
    np.testing.assert_allclose(executor.run("eval", {"x": X})[0], y, rtol=1e-4, atol=1e-5)


def test_an_average_of_no_steps_is_the_first_values():
    y, loss = model()
    average = optim.Average(0.8)
    updates = average.follow(optim.SGD(0.1).minimize(loss))
    executor = ht.Executor({"train": [loss, updates], "plain": [y], "eval": [average.of(y)]})
    np.testing.assert_array_equal(executor.run("eval", {"x": X})[0], executor.run("plain", {"x": X})[0])


def test_groups_are_trained_by_their_optimizers_and_the_rest_is_frozen():
    _, loss = model()
    slow = optim.SGD(0.1)
    updates = optim.by_name(loss, {"*second/weight": optim.SGD(0.5), "*first/bias": None, "*first/*": slow, "*": slow})
    executor = ht.Executor([loss, updates])
    before, feed = weights(executor), parts(48)[0]
    rates = {"model/second/weight": 0.5, "model/first/weight": 0.1, "model/second/bias": 0.1}
    slopes = ht.Executor([*updates.gradients.values()], state=executor.state).run(feed)
    named = {p.name: slope for p, slope in zip(updates.gradients, slopes)}
    executor.run(feed)
    for name, value in weights(executor).items():
        np.testing.assert_allclose(value, before[name] - rates.get(name, 0) * named.get(name, 0), rtol=1e-5, atol=1e-7)
    assert named.keys() == rates.keys()
    assert sum(v.name.endswith("/step") for v in updates) == 2  # one of each optimizer


MISTAKES = [
    (lambda loss: optim.by_name(loss, {"*second/weigth": None, "*": None}), UnknownNameError, "no variable has a name"),
    (lambda loss: optim.by_name(loss, {"*/weight": optim.SGD(1.0)}), ArgumentError, "no pattern fits .*first/bias"),
    (lambda loss: optim.accumulated(optim.SGD(1.0).minimize(loss), 0), ArgumentError, "batches=0"),
    (lambda loss: optim.Average(1.0), ArgumentError, "decay=1.0"),
    (lambda loss: optim.Average().of(loss), ArgumentError, "no updates are followed yet"),
]


@pytest.mark.parametrize(("make", "error", "said"), MISTAKES, ids=[said for *_, said in MISTAKES])
def test_mistakes_are_told(make, error, said):
    with pytest.raises(error, match=said):
        make(model()[1])

"""What is made of updates: sums over batches are one batch of all, averages their formula, groups their optimizers."""

from __future__ import annotations

import operator

import numpy as np
import pytest

import hetu as ht
from hetu import dist, optim
from hetu.core.errors import ArgumentError, CheckpointError, GraphError, UnknownNameError
from hetu.dist import run_ranks
from hetu.ps import ServerProcess
from hetu.strategies import Connected, Hybrid, ParameterServer

from .strategies.test_hybrid import job
from .test_training import Interrupted

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


def executor_of(loss, updates, batches, **options):
    """That of a training whose `batches` count as one."""
    if batches == 1:
        return ht.Executor({"train": [loss, updates]}, **options)
    add, last = optim.accumulated(updates)
    return ht.Executor({"add": [loss, add], "train": [loss, last]}, **options)


def trained(executor, size, batches):
    """The mean loss of each update."""
    feeds = enumerate(parts(size), 1)
    losses = [float(executor.run("add" if n % batches else "train", feed)[0]) for n, feed in feeds]
    return np.reshape(losses, (-1, batches)).mean(axis=1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("batches", [2, 4])
def test_gradients_of_several_batches_count_as_those_of_one(name, batches):
    def run(batches):
        _, loss = model()
        executor = executor_of(loss, OPTIMIZERS[name]().minimize(loss), batches)
        return trained(executor, 24 // batches, batches), weights(executor)

    (wanted, values), (losses, found) = run(1), run(batches)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    for variable, value in found.items():
        np.testing.assert_allclose(value, values[variable], rtol=1e-4, atol=1e-6)


def test_between_two_updates_nothing_changes_but_the_sums():
    _, loss = model()
    add, last = optim.accumulated(optim.Adam(0.1).minimize(loss))
    executor = ht.Executor({"add": [loss, add], "train": [loss, last]})
    before = {name: value.copy() for name, value in executor.state.items()}
    for feed in parts(24):
        executor.run("add", feed)
    changed = {n for n, value in executor.state.items() if (value != before[n]).any()}
    assert changed == {v.name for v in add} and int(executor.state[next(n for n in changed if "batches" in n)]) == 2
    executor.run("train", parts(24)[0])
    assert all((executor.state[v] == before[v.name]).all() for v in add)


def test_a_loss_may_be_scaled():
    _, loss = model()
    executor = executor_of(loss, optim.SGD(0.2).minimize(loss), 2, precision="float16")
    _, loss = model()
    wanted = executor_of(loss, optim.SGD(0.2).minimize(loss), 1)
    np.testing.assert_allclose(trained(executor, 12, 2), trained(wanted, 24, 1), rtol=0.02)


def both(loss):
    average = optim.Average(0.8)
    return average, average.follow(optim.Adam(0.05).minimize(loss))


@pytest.mark.usefixtures("meaning")
@pytest.mark.parametrize("strategy", [dist.DataParallel, lambda: dist.ZeRO(3), lambda: dist.Pipeline(microbatches=2)])
def test_ranks_train_by_them_as_one_process_does(strategy):
    def run(comm=None, batches=2):
        y, loss = model()
        average, updates = both(loss)
        add, last = optim.accumulated(updates)
        graphs = {"add": [loss, add], "train": [loss, last], "eval": [average.of(y)]}
        if batches == 1:
            graphs = {"train": [loss, updates], "eval": [average.of(y)]}
        executor = ht.Executor(graphs, strategy=strategy() if comm else None, comm=comm)
        return trained(executor, 24 // batches, batches), executor.run("eval", {"x": X[:4]})[0]

    losses, seen = run(batches=1)
    for found in (run(), *run_ranks(2, run)):
        np.testing.assert_allclose(found[0], losses, atol=1e-5)
        np.testing.assert_allclose(found[1], seen, atol=1e-5)


def click_model():
    """A table of ids that servers may keep, and a dense layer."""
    ids, t = ht.placeholder("ids", (None, 2), "int64"), ht.placeholder("t", (None,), "int64")
    with ht.scope("model"):
        y = ht.nn.Linear(6, 3, name="dense")(ht.flatten(ht.nn.Embedding(40, 3, name="table")(ids), 1))
    return y, ht.mean(ht.softmax_cross_entropy(y, t))


def averaged(y, loss):
    average = optim.Average(0.8)
    return {"train": [loss, average.follow(optim.Adam(0.05, epsilon=1e-3).minimize(loss))], "eval": [average.of(y)]}


def added_up(y, loss):
    add, last = optim.accumulated(optim.Adam(0.05, epsilon=1e-3).minimize(loss))
    return {"add": [loss, add], "train": [loss, last], "eval": [y]}


def grouped(y, loss):
    groups = {"*table*": optim.SGD(0.5), "*/bias": None, "*": optim.Adam(0.05, epsilon=1e-3)}
    return {"train": [loss, optim.by_name(loss, groups)], "eval": [y]}


SERVED = {"servers": ParameterServer, "hybrid": Hybrid, "named": lambda: Hybrid(served="*table*")}
READ = {
    ("averaged", "servers"): "new value of 'model/.*', .* an average follows it[\\s\\S]*fix: keep the variable on ranks"
}
READ |= {
    (name, "named"): "'\\*table\\*' fits no table[\\s\\S]*fix: leave it to the ranks"
    for name in ("averaged", "added_up")
}


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("meaning")
@pytest.mark.parametrize("strategy", SERVED)
@pytest.mark.parametrize("made", [averaged, added_up, grouped])
def test_servers_train_by_them_as_one_process_does_or_tell_why_not(made, strategy):
    ids = RNG.integers(0, 40, (48, 2))

    def run(**options):
        y, loss = click_model()
        executor = ht.Executor(made(y, loss), **options)
        for n, rows in enumerate(np.arange(48).reshape(6, 8)):
            add = made is added_up and n % 2 == 0
            executor.run("add" if add else "train", {"ids": ids[rows], "t": T[rows]})
        return executor.run("eval", {"ids": ids})[0]

    def on_rank(client, comm):
        return run(strategy=SERVED[strategy](), comm=Connected(comm, client))

    if said := READ.get((made.__name__, strategy)):
        with pytest.raises((ArgumentError, UnknownNameError), match=said):
            job(1, on_rank)
        return
    for found in job(2, on_rank, kind=ServerProcess):
        np.testing.assert_allclose(found, run(), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("meaning")
@pytest.mark.parametrize("workers", [1, 2])
def test_several_workers_of_servers_save_no_sums_that_each_has_alone(workers, tmp_path):
    """Of one worker they are in the checkpoint; of two it held those of the first, with which both went on."""
    ids = RNG.integers(0, 40, (48, 2))

    def on_rank(client, comm):
        y, loss = click_model()
        executor = ht.Executor(added_up(y, loss), strategy=ParameterServer(), comm=Connected(comm, client))

        def step(name, n):
            executor.run(name, {"ids": ids[8 * n : 8 * n + 8], "t": T[8 * n : 8 * n + 8]})

        step("add", 0)
        if workers > 1:
            with pytest.raises(CheckpointError, match=f"worker {comm.rank} has summed gradients of 1 batches"):
                executor.save(tmp_path / "saved")
            assert not (tmp_path / "saved").exists()
            step("train", 1)
        executor.save(tmp_path / "saved")
        wanted = [step(name, n) or executor.run("eval", {"ids": ids})[0] for n, name in ((2, "train"), (3, "add"))]
        executor.load(tmp_path / "saved")
        found = [step(name, n) or executor.run("eval", {"ids": ids})[0] for n, name in ((2, "train"), (3, "add"))]
        return wanted, found

    for wanted, found in job(workers, on_rank):
        assert np.array_equal(wanted, found)


@pytest.mark.parametrize(("epochs", "limit"), [(2, 48), (3, 36)])
def test_fit_updates_after_so_many_batches_and_at_the_end_of_an_epoch(epochs, limit, tmp_path):
    """And a run that ended between two updates goes on with their sums."""

    def run(batches, kind=ht.data.DataLoader, **options):
        loader = kind(ht.data.ArrayDataset(X[:limit], T[:limit]), 24 // batches, shuffle=True, seed=1)
        with ht.scope("run"):
            _, loss = model()
            executor = executor_of(loss, optim.Adam(0.05).minimize(loss), batches)
            options |= {"epochs": epochs, "inputs": ("x", "t"), "accumulate": batches}
        return ht.fit(executor, loader, **options)["loss"], weights(executor)

    (wanted, values), (losses, found) = run(1), run(4)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    for name, value in found.items():
        np.testing.assert_allclose(value, values[name], rtol=1e-4, atol=1e-6)
    with pytest.raises(KeyboardInterrupt):
        run(4, Interrupted, checkpoint=tmp_path / "run")
    again, resumed = run(4, checkpoint=tmp_path / "run", resume=True)
    assert again == losses and all((resumed[name] == value).all() for name, value in found.items())


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


def fitted(loss, accumulate):
    executor = ht.Executor({"train": [loss, optim.SGD(1.0).minimize(loss)]})
    ht.fit(executor, [(X, T)], epochs=1, inputs=("x", "t"), accumulate=accumulate)


def two_of_a_class(loss):
    ht.Executor({"fast": [loss, optim.Adam(0.1).minimize(loss)], "slow": [loss, optim.Adam(0.01).minimize(loss)]})


JOINED = {"|": operator.or_, "|=": operator.ior, "update": lambda a, b: a.update(b) or a}


@pytest.mark.parametrize("way", JOINED)
def test_updates_of_several_optimizers_are_one_with_all_gradients(way):
    _, loss = model()
    weight, *others = [v for v in ht.Graph((loss,)).leaves("variable") if v.attrs["trainable"]]
    made = JOINED[way](optim.Adam(0.1).minimize(loss, others), optim.SGD(0.1).minimize(loss, [weight]))
    assert isinstance(made, optim.Updates) and made.gradients.keys() == {weight, *others} < made.keys()
    for more in (JOINED[way](made, {weight: weight}), {weight: weight} | made):
        assert isinstance(more, optim.Updates) and more.gradients == made.gradients


MISTAKES = [
    (lambda loss: optim.by_name(loss, {"*second/weigth": None, "*": None}), UnknownNameError, "no variable has a name"),
    (lambda loss: optim.by_name(loss, {"*/weight": optim.SGD(1.0)}), ArgumentError, "no pattern fits .*first/bias"),
    (lambda loss: optim.accumulated({}), ArgumentError, "updates that are a dict are not known"),
    (lambda loss: fitted(loss, 0), ArgumentError, "accumulate=0"),
    (
        lambda loss: fitted(loss, 2),
        UnknownNameError,
        r"sub-graph 'add', and there is none[\s\S]*ht.optim.accumulated\(",
    ),
    (lambda loss: two_of_a_class(loss), GraphError, r"'.*/adam_m'[\s\S]*let no two optimizers of a class train"),
    (lambda loss: optim.Average(1.0), ArgumentError, "decay=1.0"),
    (lambda loss: optim.Average().of(loss), ArgumentError, "no updates are followed yet"),
]


@pytest.mark.parametrize(("make", "error", "said"), MISTAKES, ids=[said for *_, said in MISTAKES])
def test_mistakes_are_told(make, error, said):
    with pytest.raises(error, match=said):
        make(model()[1])

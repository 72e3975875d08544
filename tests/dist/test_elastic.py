"""Steps that survive the loss of ranks, on threads that die by plan; the losses are those of one process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, HetuError
from hetu.dist import CommError, DataParallel, Parallel, Pipeline, ZeRO, elastic_copies, run_ranks, world
from hetu.dist.comm.losses import Killed
from hetu.dist.elastic_copies import EVERY

STEPS, BATCH = 2 * EVERY + 3, 24
STRATEGIES = {
    "dp": (4, DataParallel()),
    "accumulated": (3, DataParallel(accumulate=2)),
    "zero1": (4, ZeRO(1)),
    "zero3": (4, ZeRO(3)),
    "tp": (4, Parallel(data=2, tensor=2, split={"dense*weight": 1})),
    "pipeline": (2, Pipeline(2, 4)),
    "pipelines": (4, Pipeline(2, 2, data=2)),
}
DATA = np.random.default_rng(0)
X = DATA.normal(size=(STEPS, BATCH, 8)).astype(np.float32)
Y = DATA.integers(0, 6, (STEPS, BATCH))


def executor(strategy, comm, precision="float32"):
    """A model with dropout, so that random numbers count, and with what Adam keeps; the sub-graphs of `fit`."""
    x, y = ht.placeholder("x", (None, 8)), ht.placeholder("y", (None,), dtype="int64")
    with ht.scope("dense"):
        h = ht.nn.Linear(8, 12)(x)
    out = ht.nn.Linear(12, 6)(ht.dropout(ht.relu(h), 0.2))
    loss = ht.mean(ht.softmax_cross_entropy(out, y))
    graphs = {"train": [loss, ht.optim.Adam(1e-2).minimize(loss)], "eval": [loss, out]}
    return ht.Executor(graphs, strategy=strategy, comm=comm, precision=precision)


def train(comm, strategy, steps=5, **options):
    """The losses of some steps, with a look at another sub-graph between two of them."""
    made, found = executor(strategy, comm, **options), []
    for x, y in zip(X[:steps], Y[:steps]):
        found.append(float(made.run("train", {"x": x, "y": y})[0]))
        if len(found) % 2:
            found.append(float(made.run("eval", {"x": x, "y": y})[0]))
    return found


def alone(steps=5, **options):
    return run_ranks(1, lambda comm: train(comm, None, steps, **options))[0]


def deaths(n, body, rank, points):
    """What the others have found when `rank` dies at each of these points, until it has none."""
    for point in points:
        found = run_ranks(n, body, die_at={rank: point}, deadline=30)
        if found[rank] is not None:
            return
        yield point, [of for r, of in enumerate(found) if r != rank]


FIRST = 60  # a point behind those at which an executor is made


@pytest.mark.parametrize("name", STRATEGIES)
def test_wherever_a_rank_dies_the_losses_are_those_of_one_process(name):
    (n, strategy), wanted, seen = STRATEGIES[name], alone(), 0
    for rank in {0, n - 1}:
        for point, found in deaths(n, lambda comm: train(comm, strategy), rank, range(FIRST + rank, 1000, 41)):
            for losses in found:
                np.testing.assert_allclose(losses, wanted, atol=1e-5, rtol=0, err_msg=f"{name} {rank} {point}")
            seen += 1
    assert seen >= 4


@pytest.mark.parametrize("points", [*itertools.product((FIRST, 90, 121), (75, 100, 140))], ids=str)
def test_two_deaths_at_any_distance(points):
    for strategy, ranks in ((ZeRO(3), (0, 2)), (DataParallel(), (2, 3))):  # neighbors may have had copies of each other
        found = run_ranks(4, lambda comm, s=strategy: train(comm, s), die_at=dict(zip(ranks, points)), deadline=30)
        for losses in (of for rank, of in enumerate(found) if rank not in ranks):
            np.testing.assert_allclose(losses, alone(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_narrow_precisions(precision):
    if precision == "bfloat16":
        pytest.importorskip("ml_dtypes")
    wanted = alone(precision=precision)
    for _, found in deaths(3, lambda comm: train(comm, ZeRO(2), precision=precision), 1, (FIRST + 20, 110)):
        np.testing.assert_allclose(found, [wanted] * 2, atol=5e-3)


class Scripts:
    """What scripts do between steps; each returns numbers."""

    def writes(made, folder):
        for x, y in zip(X[:5], Y[:5]):
            yield made.run("train", {"x": x, "y": y})[0]
            made.state[RATE] = made.state[RATE] * 0.5

    def writes_behind_a_look(made, folder):
        for x, y in zip(X[:4], Y[:4]):
            yield made.run("train", {"x": x, "y": y})[0]
            yield made.run("eval", {"x": x, "y": y})[0]
            made.state[RATE] = made.state[RATE] * 0.5

    def loads(made, folder):
        for number, (x, y) in enumerate(zip(X[:5], Y[:5])):
            yield made.run("train", {"x": x, "y": y})[0]
            if number == 1:
                made.save(folder / "saved")
            if number in (2, 3):
                made.load(folder / "saved")

    def draws(made, folder):
        for x, y in zip(X[:4], Y[:4]):
            yield made.run("train", {"x": x, "y": y})[0]
            yield from (made.run("noise")[0] for _ in range(2))

    def errs(made, folder):
        for x, y in zip(X[:5], Y[:5]):
            yield made.run("train", {"x": x, "y": y})[0]
            for wrong in ({"x": x}, {"x": x, "y": y[:5]}, {"x": [[1.0], [1.0, 2.0]], "y": y}):
                with pytest.raises(HetuError):
                    made.run("train", wrong)

    def looks(made, folder):
        for x, y in zip(X[:4], Y[:4]):
            yield made.run("train", {"x": x, "y": y})[0]
            made.program("train", {"x": x, "y": y})
            yield made.value(made.loss, {"x": x, "y": y})

    def switches(made, folder):
        for number, (x, y) in enumerate(zip(X[:6], Y[:6])):
            yield made.run("train", {"x": x, "y": y})[0]
            if number in (1, 3) and made.strategy is not None:
                made.switch("dp" if number == 3 else "zero3")


SCRIPTS = {name: script for name, script in vars(Scripts).items() if not name.startswith("_")}
RATE = "rate"


def scripted(comm, script, folder, strategy=None):
    x, y = ht.placeholder("x", (None, 8)), ht.placeholder("y", (None,), dtype="int64")
    loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(8, 6)(ht.dropout(x, 0.2)), y))
    rate = ht.variable(RATE, 0.5, (), trainable=False)
    updates = ht.optim.Momentum(lambda step: rate).minimize(loss)
    made = ht.Executor(
        {"train": [loss, updates], "eval": [loss], "noise": [ht.normal(())]}, strategy=strategy, comm=comm
    )
    made.loss = loss
    found = [float(value) for value in script(made, folder)]
    made.placement.agree({"end": 0})  # whoever has ended makes no step again
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_scripts_do_between_steps_is_as_if_nobody_had_died(name, tmp_path):
    script, seen = SCRIPTS[name], 0
    (wanted,) = run_ranks(1, lambda comm: scripted(comm, script, tmp_path))
    for strategy, first in ((DataParallel(), 41), (ZeRO(3), 44)):
        body = lambda comm, s=strategy: scripted(comm, script, tmp_path / s.__class__.__name__, s)  # noqa: E731
        (tmp_path / type(strategy).__name__).mkdir()
        for point, found in deaths(3, body, 1, range(first, 1000, 11 if name == "writes" else 31)):
            for losses in found:
                np.testing.assert_allclose(losses, wanted, atol=1e-5, rtol=0, err_msg=f"{strategy} {point}")
            seen += 1
    assert seen >= 4


JOINS = {
    "two more": (DataParallel(), 2, 4, {}),
    "a replacement": (ZeRO(3), 3, 3, {1: 90}),
    "a pipeline again": (Pipeline(2, 2), 2, 2, {1: 90}),
    "one that does not fit": (Pipeline(2, 2), 2, 3, {}),
    "newcomers that die": (ZeRO(1), 2, 3, {2: 3, 3: 20}),
    "the first": (DataParallel(), 2, 2, {0: 90}),
    "who plans anew": ("auto", 2, 2, {0: 100}),
}


@pytest.mark.parametrize("name", JOINS)
def test_who_joins_makes_the_same_steps(name):
    strategy, n, most, die_at = JOINS[name]
    wanted = alone(STEPS)
    found = run_ranks(n, lambda comm: train(comm, strategy, STEPS), die_at=die_at, most=most, deadline=30)
    assert len(found) > n and sum(of is not None for of in found) == most
    for losses in (of for of in found if of is not None):
        np.testing.assert_allclose(losses, wanted, atol=1e-5, rtol=0)


def test_all_that_are_left_tell_alike_what_has_happened():
    def body(comm):
        train(comm, ZeRO(3))
        return world().recorder.event

    first, lost, last = run_ranks(3, body, die_at={1: 90}, deadline=30)
    assert lost is None and first == last == "rank 1 lost: ranks 0, 2 go on with ZeRO(stage=3)"


@pytest.mark.parametrize("strategy", [DataParallel(), ZeRO(3)], ids=["dp", "zero3"])
def test_a_loss_around_a_join(strategy):
    """Whoever has joined is told the past once, and who has a step behind it when it is made again with newcomers."""
    (wanted,) = run_ranks(1, lambda comm: train(comm, None, STEPS))
    for first in (0, 1):
        for point in range(126 + first, 180, 9):
            die_at = {first: point}
            found = run_ranks(3, lambda comm: train(comm, strategy, STEPS), die_at=die_at, most=4, deadline=30)
            for losses in (of for of in found if of is not None):
                np.testing.assert_allclose(losses, wanted, atol=1e-5, rtol=0, err_msg=f"{die_at}")


def test_what_a_newcomer_writes_in_its_past_is_put_back():
    def body(comm, strategy):
        made, found = executor(strategy, comm), []
        bias = next(v.name for v in made.variables if v.name.endswith("linear/bias"))
        made.state[bias] = np.ones(made.state[bias].shape)
        for x, y in zip(X, Y):
            found.append(float(made.run("train", {"x": x, "y": y})[0]))
            made.state[bias] = made.state[bias] * 0.9
        return found

    (wanted,) = run_ranks(1, lambda comm: body(comm, None))
    found = run_ranks(2, lambda comm: body(comm, DataParallel()), most=4, deadline=30)
    assert len(found) == 4
    for losses in found:
        np.testing.assert_allclose(losses, wanted, atol=1e-5, rtol=0)


def test_a_job_of_one_that_others_join_saves_to_the_same_folder(tmp_path):
    def body(comm):
        made, found = executor(DataParallel(), comm), []
        for number, (x, y) in enumerate(zip(X, Y)):
            found.append(float(made.run("train", {"x": x, "y": y})[0]))
            if number in (2, STEPS - 1):
                made.save(tmp_path / "saved", {"number": number})
        return found, made.placement.world_size

    found = [of for of in run_ranks(1, body, most=2, deadline=30) if of is not None]
    assert found[0] == found[1] and found[0][1] == 2 and (tmp_path / "saved" / "manifest.json").exists()


UNTOLD = {  # bytes of what is told, and how many ranks there are then, of 2 and one that waits
    "all is told": (1 << 20, 3),
    "little room": (500, 2),
    "room until one has joined": (1000, 3),
    "a program": (1 << 20, 2),
    "an error": (1 << 20, 2),
}


@pytest.mark.parametrize("name", UNTOLD)
def test_behind_what_cannot_be_told_nobody_joins(name, monkeypatch):
    room, ranks = UNTOLD[name]
    monkeypatch.setattr(elastic_copies, "ROOM", room)

    def body(comm):
        made = executor(DataParallel(), comm)
        if name == "a program":
            made.program("train", {"x": X[0], "y": Y[0]})
        if name == "an error":
            with pytest.raises(HetuError):
                made.load("nowhere")
        return [float(made.run("train", {"x": x, "y": y})[0]) for x, y in zip(X, Y)]

    found = run_ranks(2, body, most=3, deadline=30)
    assert len(found) == ranks and all(losses == found[0] for losses in found)


def test_one_executor_after_another():
    def body(comm, strategy):
        made = executor(strategy, comm)
        made.run("train", {"x": X[0], "y": Y[0]})
        del made
        return train(comm, strategy)

    (wanted,) = run_ranks(1, lambda comm: body(comm, None))
    found = run_ranks(3, lambda comm: body(comm, ZeRO(1)), die_at={1: 150}, most=3, deadline=30)
    assert [of is None for of in found] == [False, True, False]  # nobody joins: it would make the first one
    for losses in (found[0], found[2]):
        np.testing.assert_allclose(losses, wanted, atol=1e-5, rtol=0)


def fitted(comm, folder, keep=None, log=None):
    rows = ht.data.ArrayDataset(X.reshape(-1, 8)[:96], Y.reshape(-1)[:96])
    loader = ht.data.DataLoader(rows, BATCH, shuffle=True)
    made = executor(ZeRO(2), comm)
    path = folder / "run" if folder is not None else None
    saved = {"checkpoint": path, "keep": keep, "resume": True} if path is not None else {}
    history = ht.fit(made, loader, epochs=3, inputs=["x", "y"], validate=("eval", loader), log=log, **saved)
    return history["loss"] + history["val_loss"]


@pytest.mark.parametrize("keep", [None, 2])
def test_fit_survives_in_training_validation_and_saves(tmp_path, keep):
    (wanted,) = run_ranks(1, lambda comm: fitted(comm, None))
    for number, point in enumerate(range(FIRST + 30, 420, 61)):
        for rank in (0, 2):
            folder = tmp_path / f"{number}-{rank}"
            folder.mkdir()
            found = run_ranks(3, lambda comm, to=folder: fitted(comm, to, keep), die_at={rank: point}, deadline=30)
            for losses in (of for r, of in enumerate(found) if r != rank):
                np.testing.assert_allclose(losses, wanted, atol=1e-5, rtol=0)
            (again,) = run_ranks(1, lambda comm, to=folder: fitted(comm, to, keep))  # the last save is whole
            np.testing.assert_allclose(again, wanted, atol=1e-5, rtol=0)


def test_the_log_of_a_fit_goes_on_when_the_first_rank_is_lost(tmp_path):
    for point in (110, 171):
        log = tmp_path / f"{point}.csv"
        run_ranks(3, lambda comm, to=log: fitted(comm, None, log=to), die_at={0: point}, deadline=30)
        assert len(log.read_text().splitlines()) == 4


def test_who_joins_a_fit_is_told_its_past(tmp_path):
    (wanted,) = run_ranks(1, lambda comm: fitted(comm, None))
    found = run_ranks(2, lambda comm: fitted(comm, tmp_path, 2), die_at={1: 200}, most=3, deadline=30)
    assert sum(of is not None for of in found) == 3
    for losses in (of for of in found if of is not None):
        np.testing.assert_allclose(losses, wanted, atol=1e-5, rtol=0)


def test_what_is_copied_and_sent_before_a_step():
    def body(comm, strategy):
        made = executor(strategy, comm)
        made.run("train", {"x": X[0], "y": Y[0]})
        copies = made.run.__self__.base
        own = sum(array.nbytes for array in made.state.arrays.values())
        return sum(a.nbytes for a in copies.own.values()), own, sum(a.nbytes for a in copies.theirs.values())

    for own, kept, theirs in run_ranks(4, lambda comm: body(comm, DataParallel()), most=4):
        assert own == kept and theirs == 0  # others have all of it: nothing is sent
    for own, kept, theirs in run_ranks(4, lambda comm: body(comm, ZeRO(3)), most=4):
        assert own == kept and 0 < theirs < kept


def test_what_cannot_be_survived_says_so():
    def two_die(comm):
        made = executor(ZeRO(3), comm)
        for x, y in zip(X[:3], Y[:3]):
            if comm.rank and len(made.subgraphs["train"].programs):
                raise Killed
            made.run("train", {"x": x, "y": y})

    with pytest.raises(CommError, match="both in one step") as caught:
        run_ranks(3, two_die, die_at={1: 10000}, deadline=30)
    assert "resume=True" in str(caught.value)

    def two(comm):
        return executor(DataParallel(), comm), executor(DataParallel(), comm)

    def one_dies(comm):
        made = executor(DataParallel(), comm)
        if comm.rank:
            raise Killed
        return made.run("train", {"x": X[0], "y": Y[0]})

    with pytest.raises(ArgumentError, match="a second executor in a job that survives losses"):
        run_ranks(2, two, most=2)
    with pytest.raises(CommError, match="before the first step"):
        run_ranks(2, one_dies, die_at={1: 1000}, deadline=30)

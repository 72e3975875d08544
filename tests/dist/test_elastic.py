"""Steps that survive the loss of ranks, on threads that die by plan; the losses are those of one process."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, HetuError
from hetu.dist import CommError, DataParallel, Parallel, Pipeline, ZeRO, elastic, elastic_copies, run_ranks, world
from hetu.dist.comm.thread_world import Killed
from hetu.dist.elastic import Guard
from hetu.dist.elastic_copies import EVERY

from .test_launch import heturun
from .test_survivors import real

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


def left(found):
    """What those have found that are not lost."""
    return [of for of in found if of is not None]


def agree(found, wanted, said=""):
    """That all have found what one process has."""
    for losses in found:
        np.testing.assert_allclose(losses, wanted, atol=1e-5, rtol=0, err_msg=f"{said}")


FIRST = 60  # a point in the first step, behind those at which an executor is made


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("first", range(0, 222, 37))
def test_wherever_a_rank_dies_the_losses_are_those_of_one_process(name, first):
    """From before an executor is made to the end of the script: nobody is missed then."""
    (n, strategy), wanted, seen = STRATEGIES[name], alone(), 0
    for rank in {0, n - 1}:
        for point, found in deaths(n, lambda comm: train(comm, strategy), rank, range(rank + first, 1000, 222)):
            agree(found, wanted, f"{name} {rank} {point}")
            seen += 1
    assert seen >= 2


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_loss_before_the_first_step_and_one_behind_the_last(name):
    (n, strategy), wanted = STRATEGIES[name], alone(1)
    last = n - 1

    def body(comm, when):
        if comm.rank == last and when == "launched":
            raise Killed
        made = executor(strategy, comm)
        if comm.rank == last and when == "made":
            raise Killed
        found = [
            float(made.run("train", {"x": X[0], "y": Y[0]})[0]),
            float(made.run("eval", {"x": X[0], "y": Y[0]})[0]),
        ]
        if comm.rank == last and when == "done":
            raise Killed
        return found

    for when in ("launched", "made", "done"):
        found = run_ranks(n, lambda comm, at=when: body(comm, at), die_at={last: 10000}, deadline=30)
        assert found[last] is None
        agree(found[:last], wanted, when)


APART = [("zero3", (0, 2)), ("dp", (2, 3))]  # neighbors may have had copies of each other


@pytest.mark.parametrize("who", APART)
@pytest.mark.parametrize("first", (FIRST, 90, 121))
@pytest.mark.parametrize("then", (75, 100, 140))
def test_two_deaths_at_any_distance(who, first, then):
    name, ranks = who
    n, strategy = STRATEGIES[name]
    found = run_ranks(n, lambda comm: train(comm, strategy), die_at=dict(zip(ranks, (first, then))), deadline=30)
    agree((of for rank, of in enumerate(found) if rank not in ranks), alone())


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
    return [float(value) for value in script(made, folder)]


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("strategy", ["dp", "zero3"])
@pytest.mark.parametrize("first", (41, 52, 63))
def test_what_scripts_do_between_steps_is_as_if_nobody_had_died(name, strategy, first, tmp_path):
    script, seen = SCRIPTS[name], 0
    (wanted,) = run_ranks(1, lambda comm: scripted(comm, script, tmp_path))
    body = lambda comm: scripted(comm, script, tmp_path / "there", strategy)  # noqa: E731
    (tmp_path / "there").mkdir()
    for point, found in deaths(3, body, 1, range(first, 1000, 33)):
        agree(found, wanted, point)
        seen += 1
    assert seen >= 2


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
    assert len(found) > n and len(left(found)) == most
    agree(left(found), wanted)


def test_all_that_are_left_tell_alike_what_has_happened():
    def body(comm):
        train(comm, ZeRO(3))
        return world().recorder.event

    first, lost, last = run_ranks(3, body, die_at={1: 90}, deadline=30)
    assert lost is None and first == last == "rank 1 lost: ranks 0, 2 go on with ZeRO(stage=3)"


@pytest.mark.parametrize("name", ["dp", "zero3"])
@pytest.mark.parametrize("rank", (0, 1))
@pytest.mark.parametrize("point", range(126, 180, 9))
def test_a_loss_around_a_join(name, rank, point):
    """Whoever has joined is told the past once, and who has a step behind it when it is made again with newcomers."""
    (wanted,), (_, strategy) = run_ranks(1, lambda comm: train(comm, None, STEPS)), STRATEGIES[name]
    die_at = {rank: point + rank}
    found = run_ranks(3, lambda comm: train(comm, strategy, STEPS), die_at=die_at, most=4, deadline=30)
    agree(left(found), wanted)


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
    agree(found, wanted)


def test_a_job_of_one_that_others_join_saves_to_the_same_folder(tmp_path):
    def body(comm):
        made, found = executor(DataParallel(), comm), []
        for number, (x, y) in enumerate(zip(X, Y)):
            found.append(float(made.run("train", {"x": x, "y": y})[0]))
            if number in (2, STEPS - 1):
                made.save(tmp_path / "saved", {"number": number})
        return found, made.placement.world_size

    found = left(run_ranks(1, body, most=2, deadline=30))
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
    agree([found[0], found[2]], wanted)


def fitted(comm, folder, keep=None, log=None):
    rows = ht.data.ArrayDataset(X.reshape(-1, 8)[:96], Y.reshape(-1)[:96])
    loader = ht.data.DataLoader(rows, BATCH, shuffle=True)
    made = executor(ZeRO(2), comm)
    path = folder / "run" if folder is not None else None
    saved = {"checkpoint": path, "keep": keep, "resume": True} if path is not None else {}
    held_out = ht.data.DataLoader(rows, BATCH)
    history = ht.fit(made, loader, epochs=3, inputs=["x", "y"], validate=("eval", held_out), log=log, **saved)
    return history["loss"] + history["val_loss"]


@pytest.mark.parametrize("point", range(FIRST + 30, 420, 61))
@pytest.mark.parametrize("rank", (0, 2))
@pytest.mark.parametrize("keep", [None, 2])
def test_fit_survives_in_training_validation_and_saves(tmp_path, keep, rank, point):
    (wanted,) = run_ranks(1, lambda comm: fitted(comm, None))
    found = run_ranks(3, lambda comm: fitted(comm, tmp_path, keep), die_at={rank: point}, deadline=30)
    agree((of for r, of in enumerate(found) if r != rank), wanted)
    (again,) = run_ranks(1, lambda comm: fitted(comm, tmp_path, keep))  # the last save is whole
    np.testing.assert_allclose(again, wanted, atol=1e-5, rtol=0)


def test_the_log_of_a_fit_goes_on_when_the_first_rank_is_lost(tmp_path):
    for point in (110, 171):
        log = tmp_path / f"{point}.csv"
        run_ranks(3, lambda comm, to=log: fitted(comm, None, log=to), die_at={0: point}, deadline=30)
        assert len(log.read_text().splitlines()) == 4


def test_who_joins_a_fit_is_told_its_past(tmp_path):
    (wanted,) = run_ranks(1, lambda comm: fitted(comm, None))
    found = run_ranks(2, lambda comm: fitted(comm, tmp_path, 2), die_at={1: 200}, most=3, deadline=30)
    assert len(left(found)) == 3
    agree(left(found), wanted)


def test_what_is_copied_and_sent_before_a_step():
    def body(comm, strategy):
        made = executor(strategy, comm)
        made.run("train", {"x": X[0], "y": Y[0]})
        copies = made.guard.vote.copies
        own = sum(array.nbytes for array in made.state.arrays.values())
        return sum(a.nbytes for a in copies.own.values()), own, sum(a.nbytes for a in copies.theirs.values())

    for own, kept, theirs in run_ranks(4, lambda comm: body(comm, DataParallel()), most=4):
        assert own == kept and theirs == 0  # others have all of it: nothing is sent
    for own, kept, theirs in run_ranks(4, lambda comm: body(comm, ZeRO(3)), most=4):
        assert own == kept and 0 < theirs < kept


@pytest.mark.parametrize("ranks", [(1, 2), (0, 1), (3, 0)], ids=str)
@pytest.mark.parametrize("keep", [None, 2])
def test_when_both_copies_are_lost_a_fit_goes_back_to_its_last_checkpoint(tmp_path, ranks, keep):
    """In its place in the data, too: so losses are those of one process."""
    (wanted,) = run_ranks(1, lambda comm: fitted(comm, None))
    for point in (230, 281):
        (folder := tmp_path / f"{point}").mkdir()
        die_at = dict.fromkeys(ranks, point)
        found = run_ranks(4, lambda comm, to=folder: fitted(comm, to, keep), die_at=die_at, deadline=30)
        assert [of is None for of in found] == [rank in ranks for rank in range(4)]
        agree(left(found), wanted)


def test_a_save_that_is_being_written_is_waited_for(tmp_path, monkeypatch):
    """It is the only one, and begins to be written when it is needed."""
    (wanted,) = run_ranks(1, lambda comm: fitted(comm, None))
    needed, write, back = threading.Event(), ht.Checkpoints._write, elastic.go_back
    monkeypatch.setattr(ht.Checkpoints, "_write", lambda *of: needed.wait(30) and write(*of))
    monkeypatch.setattr(elastic, "go_back", lambda *of: (needed.set(), back(*of))[1])
    found = run_ranks(4, lambda comm: fitted(comm, tmp_path, 2), die_at={1: 230, 2: 230}, deadline=30)
    agree([found[0], found[3]], wanted)


def test_a_fit_takes_no_save_of_another_for_its_own(tmp_path):
    """Which was loaded, or made by one before it: the values are those of there, and the place in the data stays."""

    def twice(comm, folder, dying):
        rows = ht.data.ArrayDataset(X.reshape(-1, 8)[:96], Y.reshape(-1)[:96])
        made = executor(ZeRO(3), comm)

        def die(step, _):
            if comm.rank in dying and step == 6:
                raise Killed

        for options in {"epochs": 2, "checkpoint": folder}, {"epochs": 3, "after_step": die}:
            history = ht.fit(made, ht.data.DataLoader(rows, BATCH), inputs=["x", "y"], **options)
        return history.epochs, world().recorder.event

    first, *_, last = run_ranks(4, lambda comm: twice(comm, tmp_path / "run", (1, 2)), die_at={1: 10000}, deadline=30)
    assert first == last and first[0] == 3 and "6 steps undone, but not their place in the data" in first[1]


def test_both_copies_are_lost_while_another_rank_joins(tmp_path, monkeypatch):
    """Who joins goes back, too, in the call that it makes first; a save is there by then."""

    def body(comm, folder=None):
        rows = ht.data.ArrayDataset(X.reshape(-1, 8)[:96], Y.reshape(-1)[:96])
        loader = ht.data.DataLoader(rows, BATCH, shuffle=True)
        return ht.fit(executor(ZeRO(2), comm), loader, epochs=4, inputs=["x", "y"], checkpoint=folder)["loss"]

    seen, look = [], Guard._look_at_script
    monkeypatch.setattr(Guard, "_look_at_script", lambda guard: (seen.append(guard.back), look(guard)))
    (wanted,) = run_ranks(1, body)
    for point in range(164, 188, 9):
        die_at = {1: point, 2: point}
        found = run_ranks(4, lambda comm, at=point: body(comm, tmp_path / f"{at}"), die_at=die_at, most=5, deadline=30)
        assert len(left(found)) == 5
        agree(left(found), wanted, point)
    assert any(back is not None for back in seen), "at one of these points a rank was on its way"


class Counted(ht.Executor):
    """What a user writes."""

    def __init__(self, *of, **options):
        super().__init__(*of, **options)
        self.made = 0

    def run(self, *of, **options):
        self.made += 1
        return [None if value is None else 2 * value for value in super().run(*of, **options)]

    def epoch(self, rows):
        return [float(self.run("train", {"x": x, "y": y})[0]) for x, y in rows]


def test_a_subclass_of_executor_stays_one():
    def body(comm, strategy):
        x, y = ht.placeholder("x", (None, 8)), ht.placeholder("y", (None,), dtype="int64")
        loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(8, 6)(x), y))
        made = Counted({"train": [loss, ht.optim.Adam(1e-2).minimize(loss)]}, strategy=strategy, comm=comm)
        losses = made.epoch(zip(X, Y))
        return losses, made.made, isinstance(made, Counted), type(made).__name__

    (wanted,) = run_ranks(1, lambda comm: body(comm, None))
    for point in range(60, 200, 19):
        found = run_ranks(3, lambda comm: body(comm, ZeRO(3)), die_at={1: point}, most=3, deadline=30)
        for losses, *rest in (of for of in found if of is not None):
            np.testing.assert_allclose(losses, wanted[0], atol=1e-5, rtol=0)
            assert rest == [STEPS, True, "Counted"]


FIT = """
import os, signal
import numpy as np
import hetu as ht
rng = np.random.default_rng(0)
rows = ht.data.ArrayDataset(rng.normal(size=(96, 8)).astype("float32"), rng.integers(0, 6, 96))
x, y = ht.placeholder("x", (None, 8)), ht.placeholder("y", (None,), dtype="int64")
loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(8, 6)(ht.dropout(x, 0.2)), y))
ex = ht.Executor({{"train": [loss, ht.optim.Adam(1e-2).minimize(loss)]}}, strategy={strategy!r})

def die(step, _):
    if ex.placement.rank in {dying} and step == 10 and ex.placement.world_size == 4:
        os.kill(os.getpid(), signal.SIGKILL)

made = dict(epochs=4, inputs=["x", "y"], checkpoint={folder!r}, keep=2, after_step=die)
print("losses", ht.fit(ex, ht.data.DataLoader(rows, 24, shuffle=True), **made)["loss"])
"""


@real
def test_processes_go_back_to_a_checkpoint_together(tmp_path):
    def run(folder, dying, *options):
        (script := tmp_path / f"{folder}.py").write_text(
            FIT.format(strategy="zero3" if dying else None, dying=dying, folder=str(tmp_path / folder))
        )
        job = heturun(*options, "python", script)
        assert job.returncode == 0, job.stderr
        return {line.split("losses ")[1] for line in job.stdout.splitlines()}, job.stderr

    (alone,), _ = run("alone", (), "-w", 1)
    (made,), said = run("made", (1, 2), "--elastic", "1:4")
    np.testing.assert_allclose(json.loads(made), json.loads(alone), atol=1e-5, rtol=0)
    assert "ranks 1, 2 lost" in said and "steps made again: ranks 0, 3 go on with ZeRO(stage=3)" in said


EARLY = """
import os, signal, sys
import numpy as np
import hetu as ht
from hetu.dist import world

def die(at):
    if at == sys.argv[1] and os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)

die("launched")
world()
die("met")
x = ht.placeholder("x", (None, 4))
loss = ht.mean((x @ ht.variable("w", ht.init.normal(), (4, 4))) ** 2)
ex = ht.Executor([loss, ht.optim.Adam(1e-2).minimize(loss)], strategy="zero3")
die("made")
losses = [round(float(ex.run({"x": np.full((12, 4), step, "f4")})[0]), 6) for step in range(3)]
checkpoints = ht.Checkpoints(ex, sys.argv[2])
if world().rank == 1 and sys.argv[1] == "saves":
    checkpoints._write = lambda _: die("saves")
checkpoints.save()
die("done")
print("losses", losses)
"""


@real
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("when", "code"), [("launched", 137), ("met", 0), ("made", 0), ("done", 0), ("saves", 0)])
def test_processes_that_die_before_the_first_step_or_behind_the_last(tmp_path, when, code):
    (script := tmp_path / "early.py").write_text(EARLY)
    job = heturun("--elastic", "1:3", "python", script, when, tmp_path / "run")
    left = [line.split("losses ")[1] for line in job.stdout.splitlines()]
    assert (job.returncode, len(left), len({*left})) == (code, *((0, 0) if code else (2, 1))), job.stderr
    assert "killed by SIGKILL" in (job.stderr.splitlines()[-1] if code else job.stderr)
    said = f"checkpoint '{tmp_path / 'run' / '1'}' was given up: a rank was lost" in job.stderr
    assert said == (when == "saves") or when == "done"  # which may be before its part is written


def keeps(comm, strategy, save, back=None):
    """Losses of some steps; behind the second one all is saved. Before step `back` it is loaded."""
    made, found = executor(strategy, comm), []
    for number, (x, y) in enumerate(zip(X[:6], Y[:6])):
        if number == back:
            made.load(save.folder)
        found.append(float(made.run("train", {"x": x, "y": y})[0]))
        if number == 1:
            save(made)
    return found, made.placement.comm.recorder.event if strategy is not None else ""


class ByExecutor:
    def __init__(self, folder):
        self.folder = folder

    def __call__(self, made):
        made.save(self.folder)


class ByThread(ByExecutor):
    def __call__(self, made):
        (checkpoints := ht.Checkpoints(made, self.folder)).save()
        checkpoints.wait()


@pytest.mark.parametrize("save", [ByExecutor, ByThread])
@pytest.mark.parametrize("ranks", [(1, 2), (3, 0)], ids=str)
def test_when_both_copies_are_lost_other_scripts_go_on_from_the_last_save(tmp_path, save, ranks):
    wanted, seen = {}, set()
    for back in range(2, 6):
        (tmp_path / f"{back}").mkdir()
        ((wanted[back], _),) = run_ranks(
            1, lambda comm, back=back: keeps(comm, None, save(tmp_path / f"{back}" / "run"), back)
        )
    for point in range(145, 186, 20):
        (folder := tmp_path / f"{ranks}-{point}").mkdir()
        body = lambda comm, to=folder: keeps(comm, ZeRO(3), save(to / "run"))  # noqa: E731
        found = [of for of in run_ranks(4, body, die_at=dict.fromkeys(ranks, point), deadline=30) if of is not None]
        for losses, event in found:
            (back,) = [back for back, of in wanted.items() if np.allclose(losses, of, atol=1e-5, rtol=0)]
            assert f"{back - 2} step{'s' * (back != 3)} undone, but not their place in the data" in event or back == 2
            seen.add(back)
    assert len(seen) >= 2


def test_what_cannot_be_survived_says_so():
    def two_die(comm):
        made = executor(ZeRO(3), comm)
        for x, y in zip(X[:3], Y[:3]):
            if comm.rank and len(made.subgraphs["train"].programs):
                raise Killed
            made.run("train", {"x": x, "y": y})

    with pytest.raises(CommError, match="both in one step") as caught:
        run_ranks(3, two_die, die_at={1: 10000}, deadline=30)
    assert "ht.Checkpoints, or fit(checkpoint=...)" in str(caught.value)

    def two(comm):
        return executor(DataParallel(), comm), executor(DataParallel(), comm)

    with pytest.raises(ArgumentError, match="a second executor in a job that survives losses"):
        run_ranks(2, two, most=2)


def test_the_only_executor_of_a_job_makes_no_search_for_garbage(monkeypatch):
    """Each would look at all objects of the process."""
    searches = []
    monkeypatch.setattr(elastic.gc, "collect", lambda: searches.append(1))
    run_ranks(2, lambda comm: executor(DataParallel(), comm), most=2)
    assert not searches

"""What an executor promises: feeds, shared state, training by sub-graph, replay, atomic steps, evaluate."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import DTypeError, FeedError
from hetu.core.graph import OPS
from hetu.core.types import same_type


def model(seed: int = 0, **options):
    x, t = ht.placeholder("x", (None, 6)), ht.placeholder("t", (None,), "int64")
    with ht.scope("model"):
        h = ht.dropout(ht.relu(ht.nn.BatchNorm(8)(ht.nn.Linear(6, 8)(x))), 0.3)
        y = ht.nn.Linear(8, 3)(h)
        loss = ht.mean(ht.softmax_cross_entropy(y, t))
        train = ht.optim.Adam(0.01).minimize(loss)
    return ht.Executor({"train": [loss, train], "eval": [loss, y]}, seed=seed, **options)


def batch(step: int, rows: int = 16):
    rng = np.random.default_rng(step)
    return {"x": rng.normal(size=(rows, 6)).astype(np.float32), "t": rng.integers(0, 3, rows)}


def test_training_lowers_the_loss_and_evaluation_changes_nothing():
    ex = model()
    losses = [float(ex.run("train", batch(0))[0]) for _ in range(60)]
    assert losses[-1] < 0.7 * losses[0]
    before = {name: ex.state[name] for name in ex.state}
    first, second = (ex.run("eval", batch(1)) for _ in range(2))
    np.testing.assert_array_equal(first[1], second[1])
    assert all((ex.state[name] == value).all() for name, value in before.items())


def test_a_feed_like_the_one_before_is_read_anew_and_checked_anew():
    x, y = ht.placeholder("x", (None,)), ht.placeholder("y", (2,))
    ex = ht.Executor([x + 1, y * 2])
    sub = ex.subgraphs["default"]
    ones, twos = np.ones(3, np.float32), np.full(2, 2, np.float32)
    for feed in ({x: ones, y: twos}, {x: 3 * ones, y: -twos}):
        got = ex.run(feed)
        np.testing.assert_array_equal(got[0], feed[x] + 1)
        np.testing.assert_array_equal(got[1], feed[y] * 2)
    known = sub.last
    assert sub.refilled({x: ones, y: twos}) is known.program
    others = [{y: twos, x: ones}, {"x": ones, y: twos}, {x: [1, 1, 1], y: twos}, {x: ones.astype(int), y: twos}]
    for feed in [*others, {x: np.ones(5, np.float32), y: twos}]:
        ex.run({x: ones, y: twos})
        assert sub.refilled(feed) is None
        assert ex.run(feed)[0].tolist() == [2.0] * len(ex.run(feed)[0])
    for bad in ({x: ones, y: ones}, {x: ones}, {x: ones, y: twos, "z": ones}, {x: ones, y: twos + 1j}):
        ex.run({x: ones, y: twos})
        with pytest.raises(ht.errors.FeedError):
            ex.run(bad)


def test_a_step_warns_of_nothing_and_leaves_the_settings_of_numpy_alone():
    x = ht.placeholder("x", (3,))
    ex = ht.Executor([ht.log(x), ht.exp(x * 1000)])
    with np.errstate(all="raise"):
        for _ in range(2):
            assert np.isnan(ex.run({x: np.float32([-1, 0, 1])})[0][0])
        assert np.geterr()["invalid"] == "raise"


def test_updates_are_none_in_the_results():
    loss, updates = model().run("train", batch(0))
    assert updates is None and loss.shape == ()


def test_a_run_is_replayed_by_its_seed():
    runs = [[float(ex.run("train", batch(s))[0]) for s in range(4)] for ex in (model(3), model(3), model(4))]
    assert runs[0] == runs[1] != runs[2]


def test_every_pass_and_memory_option_trains_alike():
    wanted = [float(model().run("train", batch(s))[0]) for s in range(1)]
    for options in ({"passes": []}, {"donate": False}, {"reuse": False}):
        got = [float(model(**options).run("train", batch(s))[0]) for s in range(1)]
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_resume_is_bit_identical(tmp_path):
    straight, first = model(), model()
    for step in range(3):
        straight.run("train", batch(step)), first.run("train", batch(step))
    first.save(tmp_path / "c.safetensors", {"cursor": 3})
    second = model(seed=99)
    assert second.load(tmp_path / "c.safetensors") == {"cursor": 3}
    for step in range(3, 6):
        assert straight.run("train", batch(step))[0].tobytes() == second.run("train", batch(step))[0].tobytes()
    for name in straight.state:
        np.testing.assert_array_equal(straight.state[name], second.state[name])


def test_executors_may_share_variables():
    train = model()
    x = ht.placeholder("x", (None, 6))
    with ht.scope("model"):
        first = ht.nn.Linear(6, 8)(x)
    look = ht.Executor([first], state=train.state)
    train.run("train", batch(0))
    weight, bias = train.state["model/linear/weight"], train.state["model/linear/bias"]
    feed = batch(0)["x"]
    np.testing.assert_allclose(look.run({"x": feed})[0], feed @ weight + bias, rtol=1e-4, atol=1e-5)


def test_setting_a_variable_reaches_bound_programs():
    w = ht.variable("w", np.zeros(3))
    ex = ht.Executor([w + 1.0])
    ex.run()
    ex.state[w] = [1.0, 2.0, 3.0]
    assert ex.run()[0].tolist() == [2.0, 3.0, 4.0]
    with pytest.raises(ht.errors.ShapeError, match="has shape"):
        ex.state[w] = [1.0, 2.0]


def test_a_step_that_fails_after_writing_is_reported_until_a_checkpoint_is_loaded(tmp_path):
    class Break(Exception):
        pass

    broken = []

    @ht.op(infer=same_type, differentiable=False)
    def sometimes(xp, x):
        if broken:
            raise Break("as planned")
        return x * 1.0

    try:
        a, b = ht.variable("a", np.zeros(3)), ht.variable("b", np.zeros(3))
        late = sometimes(a * 2.0 + 1.0)  # reads a, so that it runs before a is written; b waits for it
        ex = ht.Executor([{a: a + 1.0, b: sometimes(late + a)}])
        ex.save(tmp_path / "c.safetensors")
        broken.append(True)
        with pytest.raises(Break) as caught:
            ex.run()
        assert any("while computing <sometimes" in note for note in caught.value.__notes__)
        broken.clear()
        if ex.state.dirty:
            with pytest.raises(ht.errors.GraphError, match="no longer belong together"):
                ex.run()
        ex.load(tmp_path / "c.safetensors")
        ex.run()
        assert ex.state["a"].tolist() == [1.0] * 3
    finally:
        del OPS["sometimes"]


def test_only_so_many_programs_are_kept(monkeypatch):
    monkeypatch.setattr("hetu.core.executor.KEPT_PROGRAMS", 3)
    x = ht.placeholder("x", (None,))
    ex = ht.Executor([x * 2.0])
    for size in (1, 2, 3, 1, 4):
        ex.run({x: np.zeros(size)})
    assert [key[1] for key in ex.subgraphs["default"].programs] == [(3,), (1,), (4,)]


def test_evaluate_uses_initial_values():
    x = ht.placeholder("x", (None, 2))
    w = ht.variable("w", np.full((2, 1), 3.0))
    assert ht.evaluate(x @ w, {x: [[1.0, 1.0]]}).tolist() == [[6.0]]


def test_infinities_of_both_signs_are_no_nan():
    w, x = ht.variable("w", np.zeros(2)), ht.placeholder("x", (2,))
    ex = ht.Executor([w + 0.0, {w: w + x}])
    with ht.debug_nans():
        ex.run({x: [np.inf, -np.inf]})
    assert ex.state["w"].tolist() == [np.inf, -np.inf]


def test_a_step_that_fails_under_debug_nans_changes_nothing():
    table, ids = ht.variable("table", np.zeros((4, 2))), ht.placeholder("ids", (None,), "int64")
    w = ht.variable("w", np.zeros(2))
    step = w + 1.0
    ex = ht.Executor([ht.take(table, ids + ht.astype(ht.sum(step) * 0.0, "int64"), axis=0), {w: step}])
    with ht.debug_nans(), pytest.raises(ht.errors.ValueRangeError):
        ex.run({ids: [9]})
    assert ex.state["w"].tolist() == [0.0, 0.0] and not ex.state.dirty
    ex.run({ids: [3]})


def test_debug_nans_costs_no_accuracy():
    plain, checked = model(), model()
    for step in range(3):
        wanted = plain.run("train", batch(step))[0]
        with ht.debug_nans():
            np.testing.assert_allclose(checked.run("train", batch(step))[0], wanted, rtol=1e-6)


def test_a_step_within_a_step_is_refused_and_the_next_one_runs():
    steps = []

    def once_more(xp, x):
        if not steps:
            steps.append(ex)
            ex.run({"x": x})
        return x + 1

    nested = ht.op(once_more, infer=same_type)
    x = ht.placeholder("x", (2,))
    try:
        ex = ht.Executor([nested(x)])
        with pytest.raises(ht.errors.HetuError, match="in the middle of another step(.|\n)*executor of its own"):
            ex.run({x: np.zeros(2, np.float32)})
        np.testing.assert_array_equal(ex.run({x: np.zeros(2, np.float32)})[0], [1, 1])
    finally:
        OPS.pop("once_more")


INTEGERS = [np.dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)]


@pytest.mark.parametrize("given", INTEGERS, ids=str)
@pytest.mark.parametrize("wanted", INTEGERS, ids=str)
def test_integers_are_fed_and_kept_as_they_are_or_not_at_all(wanted, given):
    """Each limit of either dtype, alone, among others and as one number, and again once the program is known."""
    x = ht.placeholder("x", (None,), wanted.name)
    one = ht.placeholder("one", (), wanted.name)
    ex = ht.Executor({"many": [x], "one": [one], "kept": [ht.variable("kept", 0, (3,), wanted.name)]})
    limits = {number for dtype in (wanted, given) for number in (np.iinfo(dtype).min, np.iinfo(dtype).max)}
    info, there, kept = np.iinfo(wanted), np.iinfo(given), [0, 0, 0]
    for number in sorted(n for n in {0, 1, *limits} if there.min <= n <= there.max):
        array = np.array([1, number, 0], given)
        if info.min <= number <= info.max:
            assert ex.run("many", {x: array})[0].tolist() == array.tolist()
            assert ex.run("one", {one: array[1]})[0] == number
            assert ex.run("many", {x: array[::-1]})[0].tolist() == array[::-1].tolist()
            ex.state["kept"] = array
            kept = ex.state["kept"].tolist()
            assert kept == array.tolist() == ht.Executor([ht.variable("w", array, dtype=wanted)]).run()[0].tolist()
        else:
            said = f"is {wanted}, got {number}"
            for name, feed in (("many", {x: array}), ("one", {one: array[1]}), ("many", {x: array[::-1]})):
                with pytest.raises(FeedError, match=said):
                    ex.run(name, feed)
            with pytest.raises(DTypeError, match=f"variable 'kept' {said}"):
                ex.state["kept"] = array
            assert ex.state["kept"].tolist() == kept
            with pytest.raises(DTypeError, match=f"variable 'w' {said}"):
                ht.variable("w", array, dtype=wanted)


def test_constants_of_other_bytes_first():
    """An array of the other order of bytes, also one that nobody can change."""
    array = np.arange(4).astype(np.dtype("float32").newbyteorder())
    frozen = array.copy()
    frozen.setflags(write=False)
    x = ht.placeholder("x", (4,))
    assert ht.Executor([x + array, x * frozen]).run({x: [1, 2, 3, 4]})[1].tolist() == [0, 2, 6, 12]
    assert ht.evaluate(x + array, {x: [1, 2, 3, 4]}).tolist() == [1, 3, 5, 7]

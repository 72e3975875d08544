"""Every method of `hetu.embed`: vectors by an oracle in NumPy, bytes, gradients, compact forms, servers, bad input."""

from __future__ import annotations

import gc
import math
import re
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, DTypeError, HetuError, UnknownNameError, ValueRangeError
from hetu.dist import ZeRO, run_ranks
from hetu.embed import METHODS, Embedding
from hetu.ops.sketch import sketched
from hetu.ps import Client, ServerProcess
from hetu.ps.wire.environment import Place
from hetu.strategies import Connected, Hybrid, ParameterServer

from ..ps import network
from ..ps.network import ServerThread
from ..strategies.test_hybrid import job as hybrid_job
from . import methods
from .methods import ROWS, Row, blocks_of, built

pytestmark = pytest.mark.usefixtures("meaning")
each = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
RATIOS = (0.5, 0.1, 0.01)
STEPS = 8
TARGETS = np.random.default_rng(5).normal(size=(300, 8)).astype("f4")


def model(layer: Embedding, optimizer=None):
    ids, t = ht.placeholder("ids", (None, 4), "int64"), ht.placeholder("t", (None, 4, layer.features))
    y = layer(ids)
    loss = ht.mean(ht.square(y - t))
    with ht.scope("optimizer"):
        return {"train": [loss, (optimizer or ht.optim.Adam(0.05)).minimize(loss)], "eval": [loss, y]}


def batch(step: int, rows: int = 12):
    ids = np.random.default_rng(step).integers(0, 300, (rows, 4))
    return {"ids": ids, "t": TARGETS[ids]}


def trained(layer: Embedding, steps: int = STEPS) -> ht.Executor:
    """A few steps, between which the layer settles twice, and at the end."""
    ex = ht.Executor(model(layer))
    batches = [(b["ids"], b["t"]) for b in map(batch, range(steps))]

    def between(step: int, loss: float) -> None:
        if step in (3, 6, steps):
            layer.settle(ex.state, step / steps)

    ht.fit(ex, batches, epochs=1, inputs=("ids", "t"), after_step=between, progress=False)
    return ex


def values(layer: Embedding, ex: ht.Executor) -> dict[str, np.ndarray]:
    return {name: ex.state[v].astype("f8") if v.dtype.kind == "f" else ex.state[v] for name, v in layer.parts.items()}


def small_of(layer: Embedding, ex: ht.Executor) -> ht.nn.Layer:
    """The compact form, in a scope of its own, so that it has the same names each time."""
    with ht.scope("small"):
        return layer.compact(ex.state)


def ratios(row: Row) -> list[float]:
    """Those that apply, or the least."""
    found = [r for r in RATIOS if row.least <= 1.02 * int(r * 9600)]
    return found or [1.0]


def test_every_method_is_a_row():
    assert [row.name for row in ROWS] == [*METHODS]


@each
def test_vectors_bytes_and_compact_form(row: Row, tmp_path: Path):
    """After training: vectors are the oracle's; the compact form fits, also in a file, and has the same vectors."""
    for ratio in ratios(row):
        layer = built(row.name, ratio)
        ex = trained(layer)
        every = np.arange(300).reshape(75, 4)
        before = ex.run("eval", {"ids": every, "t": TARGETS[every]})[1]
        parts = values(layer, ex)
        wanted = np.array([row.vector(layer, parts, i) for i in range(300)])
        np.testing.assert_allclose(before.reshape(300, 8), wanted, rtol=2e-4, atol=2e-6)
        small, other = small_of(layer, ex), built(row.name, ratio)
        assert small.nbytes <= 1.02 * ratio * 9600
        assert layer.training_bytes == sum(ex.state[v].nbytes for v in layer.parts.values())
        again = ht.Executor([small(ht.placeholder("ids", (None, 4), "int64"))])
        np.testing.assert_allclose(again.run({"ids": every})[0], before, rtol=1e-6, atol=1e-8)
        again.save(tmp_path / "small")
        assert (tmp_path / "small").stat().st_size <= small.nbytes + 160 * (len(small.stored) + 2)
        loaded = ht.Executor([small_of(other, ht.Executor([other(every)], seed=1))(every)])
        loaded.load(tmp_path / "small")  # as another process does, which has made the layer alone
        np.testing.assert_allclose(loaded.run()[0], before, rtol=1e-6, atol=1e-8)


@each
def test_budgets_are_kept_or_refused_with_the_least(row: Row):
    """The least is what a count by hand says; with it a table is made, with less it is not."""
    assert METHODS[row.name](ht.embed.Vectors(300, 8, 0, ht.init.zeros)).nbytes == row.least
    for ratio in RATIOS:
        if row.least <= 1.02 * int(ratio * 9600):
            layer = built(row.name, ratio)
            assert layer.budget == int(ratio * 9600)
            continue
        said = rf"cannot store 300 x 8 in {int(ratio * 9600):,} bytes \(ratio={ratio}\)"
        with pytest.raises(ArgumentError, match=said) as caught:
            built(row.name, ratio)
        found = re.fullmatch(r"the least is ([\d,]+) bytes: pass ratio=([\d.]+) or more", caught.value.fix)
        assert int(found[1].replace(",", "")) == row.least
        built(row.name, float(found[2]))


@each
def test_ids_of_any_dtype_and_shape(row: Row):
    layer = built(row.name, ratios(row)[0])
    ids = [np.int64(7), np.array([250, 3, 3], "int32"), np.array([[[0], [255]]], "uint8"), np.zeros((2, 0), "uint64")]
    ex = ht.Executor([layer(i) for i in ids])
    small = None if row.settles else layer.compact(ex.state)
    for i, vectors in zip(ids, ex.run()):
        assert vectors.shape == (*i.shape, 8)
        parts = values(layer, ex)
        wanted = np.array([row.vector(layer, parts, int(k)) for k in i.ravel()]).reshape(vectors.shape)
        np.testing.assert_allclose(vectors, wanted, rtol=2e-4, atol=2e-6)
        if small is not None:
            np.testing.assert_allclose(ht.Executor([small(i)]).run()[0], vectors, rtol=1e-6)


@each
def test_gradients(row: Row):
    """By finite differences; straight-through, that of what was rounded, by formula."""
    layer = built(row.name, ratios(row)[0])
    state = ht.Executor([layer(np.arange(300))]).state
    parts = {name: np.array(state[v]) for name, v in layer.parts.items()}
    ids = np.array([[4, 9], [299, 40]])
    if not row.straight:
        free = [name for name, v in layer.parts.items() if v.attrs["trainable"]]
        rng = np.random.default_rng(0)
        inputs = [parts[name] + 0.1 * rng.choice([-1, 1], parts[name].shape) for name in free]
        kept = {name: ht.constant(value=a) for name, a in parts.items() if name not in free}

        def vectors(*nodes):
            found = kept | dict(zip(free, nodes))
            return layer.scheme.lookup(found, ht.constant(value=ids))

        ht.check_gradients(vectors, *inputs, order=1)
        return
    g = np.random.default_rng(1).normal(size=(2, 2, 8)).astype("f4")
    trained = [v for v in layer.parts.values() if v.attrs["trainable"]]
    count = ht.variable("count", 0, (), "int64", trainable=False)
    slopes = ht.gradients(ht.sum(layer(ids) * g), trained)
    found = dict(zip([v.name.split("/")[-1] for v in trained], ht.Executor([*slopes, {count: count + 1}]).run()))
    rows = found.get("query", found.get("weight"))
    np.testing.assert_allclose(rows[ids], g, rtol=1e-6)  # as if nothing had been rounded
    assert np.flatnonzero(rows.any(axis=1)).tolist() == [4, 9, 40, 299]
    if "scale" in found:  # of the logarithm of the scale: s (q - w / s) g, where q is one of the neighbors of w / s
        s, w = np.exp(parts["scale"][ids]), parts["weight"][ids]
        low = ((np.floor(w / s) * s - w) * g, (np.ceil(w / s) * s - w) * g)
        assert (np.minimum(*low).sum(-1) <= found["scale"][ids][..., 0] + 1e-6).all()
        assert (np.maximum(*low).sum(-1) >= found["scale"][ids][..., 0] - 1e-6).all()
    if "values" in found:  # each code has the sum of the gradients of the parts that took it
        total = np.zeros_like(found["values"])
        for i, slope in zip(ids.ravel(), g.reshape(4, -1)):
            vector = row.vector(layer, parts, int(i))
            width = total.shape[2]
            for k in range(len(total)):
                code = np.square(parts["values"][k] - vector[k * width : (k + 1) * width]).sum(axis=1).argmin()
                total[k, code] += slope[k * width : (k + 1) * width]
        np.testing.assert_allclose(found["values"], total, rtol=1e-5, atol=1e-6)


@each
def test_training_lowers_the_loss(row: Row):
    layer = built(row.name, ratios(row)[0])
    ex = ht.Executor(model(layer))
    losses = [float(ex.run("train", batch(step % 2))[0]) for step in range(40)]
    assert losses[-1] < 0.7 * losses[0], losses


# -- what methods do between steps, and at random -------------------------------------------------------------------


def test_bytes_of_whole_numbers_are_exact():
    layers = built("int8", 0.5), built("int16", 0.5), built("alpt", 0.5)
    for layer, wanted in zip(layers, (2400 + 4, 4800 + 4, 2400 + 4 * 300)):
        small = layer.compact(ht.Executor([layer([0])]).state)
        assert small.nbytes == wanted and small.stored["weight"].dtype == ("int16" if wanted == 4804 else "int8")


def test_alpt_rounds_at_random_without_bias_in_training_alone():
    layer, ids = built("alpt"), ht.placeholder("ids", (None,), "int64")
    y, count = layer(ids), ht.variable("count", 0, (), "int64", trainable=False)
    ex = ht.Executor({"train": [ht.mean(y, axis=0), {count: count + 1}], "eval": [y]})
    scale = np.exp(ex.state["model/table/scale"][0])
    ex.state["model/table/weight"] = np.full((300, 8), 0.3) * scale
    nearest = ex.run("eval", {ids: [0]})[0]
    assert not nearest.any()  # 0.3 is nearest to 0
    found = np.array([ex.run("train", {ids: np.zeros(500, int)})[0] for _ in range(4)]) / scale
    assert (found[0] != found[1]).any() and abs(found.mean() - 0.3) < 0.02


def test_deeplight_leaves_ever_more_out():
    layer = built("deeplight", 0.1)
    ex = ht.Executor(model(layer))
    counts = []
    for done in (0.0, 0.2, 0.5, 0.75, 1.0):
        before = ex.state["model/table/weight"].copy()
        layer.settle(ex.state, done)
        after = ex.state["model/table/weight"]
        counts.append(np.count_nonzero(after))
        gone = (after == 0) & (before != 0)
        assert np.abs(before[gone]).max(initial=0) <= np.abs(after[after != 0]).min()
    room = (960 - 2 * 2) // 6
    assert counts == [2400 - int((1 - 0.01 ** (d / 0.75)) * (2400 - room)) for d in (0, 0.2, 0.5)] + [room, room]


@pytest.mark.parametrize("name, at", [("pep", 0.75), ("autosrh", 0.5)])
def test_what_has_left_for_good_does_not_come_back(name, at):
    """Not by the momentum that it had, either."""
    layer = built(name, 0.1)
    ex, every = ht.Executor(model(layer)), np.arange(300).reshape(75, 4)

    def vectors(first: int, last: int, done: float) -> np.ndarray:
        for step in range(first, last):
            ex.run("train", batch(step))
        layer.settle(ex.state, done)
        return np.array(ex.run("eval", {"ids": every, "t": TARGETS[every]})[1])

    assert np.count_nonzero(vectors(0, 6, at - 0.01)) > 2000
    left = vectors(6, 6, at) == 0
    assert np.count_nonzero(~left) <= (960 - 2 * 2) // 6
    for done in (at, 1.0):
        assert not vectors(6, 9, done)[left].any()


def test_autosrh_keeps_the_columns_of_most_weight_and_popularity_that_fit():
    layer = built("autosrh", 0.5)
    ex = ht.Executor(model(layer))
    alpha = np.random.default_rng(0).normal(size=ex.state["model/table/alpha"].shape)
    ex.state["model/table/alpha"] = alpha
    layer.settle(ex.state, 1.0)
    kept, sizes = ex.state["model/table/kept"], np.diff(blocks_of(300, 6))
    left = layer.scheme.types["values"][0][0] - (kept * sizes).sum()
    assert left >= 0
    assert (np.broadcast_to(sizes, kept.shape)[kept == 0] > left).all()  # no other fits beside
    loss = np.abs(alpha) * [[(1 / np.arange(a + 1, b + 1)).mean()] for a, b in blocks_of(300, 6)]
    assert kept[loss == loss.max()] == 1 and kept[loss == loss.min()] == 0


def test_dedup_merges_blocks_that_are_alike():
    layer = built("dedup", 0.5)
    ex = ht.Executor(model(layer))
    places = len(ex.state["model/table/places"])
    kinds = np.arange(places) % 5
    rng = np.random.default_rng(0)
    blocks = rng.normal(size=(5, *ex.state["model/table/rows"].reshape(places, -1).shape[1:]))
    ex.state["model/table/rows"] = (blocks[kinds] + 1e-7).reshape(ex.state["model/table/rows"].shape)
    layer.settle(ex.state, 0.4)
    assert (ex.state["model/table/places"] == np.arange(places)).all()
    layer.settle(ex.state, 0.5)
    merged = ex.state["model/table/places"]
    assert len(np.unique(merged)) <= (4800 - merged.nbytes) // (blocks.shape[1] * 4)
    assert (kinds[merged] == kinds).all()  # none that differ


def test_cafe_gives_loud_ids_rows_of_their_own():
    layer = built("cafe", 0.1)
    with ht.scope("optimizer"):
        ex = ht.Executor(model(layer, ht.optim.SGD(0.1)))
    loud = np.array([250, 260, 270])
    parts, found = layer.parts, []
    for step in range(12):
        fed = batch(step)
        fed["ids"][:, :3], fed["t"][:, :3] = loud, 9.0
        ids, slopes = fed["ids"], ex.run("eval", fed)[1] - fed["t"]
        norms = np.linalg.norm(2 * slopes / slopes.size, axis=-1)
        keys, scores = ex.state[parts["keys"]], ex.state[parts["scores"]]
        bucket = ht.embed.hashed.hashed(ids, len(keys), 0)
        wanted = [ht.evaluate(node) for node in sketched(keys, scores, bucket, ids, norms.astype("f4"))]
        ex.run("train", fed)
        np.testing.assert_array_equal(ex.state[parts["keys"]], wanted[0])
        np.testing.assert_allclose(ex.state[parts["scores"]], wanted[1], rtol=1e-4)
        found.append(np.isin(loud, ex.state[parts["owners"]]).all())
        if step == 5:
            before = ex.run("eval", fed)[1]
            layer.settle(ex.state, 0.5)
            np.testing.assert_array_equal(ex.run("eval", fed)[1], before)  # moved rows are what they were
    assert found == [False] * 6 + [True] * 6 or found == [False] * 5 + [True] * 7
    small = layer.compact(ex.state)
    assert "keys" not in small.stored


def test_an_id_that_comes_back_in_cafe_has_one_row():
    """It left the sketch for another id, which is not loud enough for its row, and took the slot of a third."""
    layer, ids = built("cafe", 0.1), np.arange(300)
    parts, ex = layer.parts, ht.Executor([layer(ids)])
    keys, scores = np.array(ex.state[parts["keys"]]), np.array(ex.state[parts["scores"]])
    a, b, c = np.flatnonzero(ht.evaluate(ht.embed.hashed.hashed(ids, len(keys), 0)) == 0)[:3]
    for heard, loud in (((a, c), (9, 1)), ((b, a), (1, 9))):
        keys[0, :2], scores[0, :2] = heard, loud
        ex.state[parts["keys"]], ex.state[parts["scores"]] = keys, scores
        before = ex.run()[0]
        layer.settle(ex.state, 0.5)
        np.testing.assert_array_equal(ex.run()[0], before)
        assert np.count_nonzero(ex.state[parts["owners"]] == a) == 1


# -- popularity, methods of one's own, and what is wrong -------------------------------------------------------------


def test_popularity_is_known_or_guessed():
    """Blocks of equal popularity have as many dimensions; by Zipf's law the first have most."""
    dims = [
        [layer.parts[f"block{k}"].shape[1] for k in range(4)]
        for layer in (built("mde", 0.5, popularity=np.full(300, 7)), built("mde", 0.5))
    ]
    assert dims == [[8, 4, 4, 3], [8, 8, 5, 3]]  # of four ids a matrix would be larger than their vectors


def halved(table):
    """A stranger's method: rows of half of the width, the others 0; a scale that falls between steps."""
    size = table.size, -(-table.features // 2)

    def lookup(parts, ids):
        rows = ht.embedding(parts["narrow"], ids % table.size)
        return parts["scale"] * ht.pad(rows, (*((0, 0) for _ in ids.shape), (0, table.features // 2)))

    return ht.embed.Scheme(
        {"narrow": ht.embed.Weights(ht.init.normal(0.1), size), "scale": ht.embed.Weights(1.0, (), trained=False)},
        lookup,
        settle=lambda values, done: {"scale": 1 - done / 2},
        types={"narrow": (size, "float16")},
        store=lambda values: {"narrow": values["narrow"] * values["scale"]},
        read=lambda stored, ids: lookup({"narrow": ht.astype(stored["narrow"], "float32"), "scale": 1.0}, ids),
    )


def test_a_method_of_ones_own():
    layer = built(halved, 0.1)
    assert layer.parts["narrow"].shape == (120, 4) and layer.budget == 960
    ex = trained(layer)
    assert ex.state["model/table/scale"] == 0.5
    small, ids = layer.compact(ex.state), np.arange(300).reshape(75, 4)
    assert small.nbytes == 960
    before = ex.run("eval", {"ids": ids, "t": TARGETS[ids]})[1]
    np.testing.assert_allclose(ht.Executor([small(ids)]).run()[0], before, rtol=1e-3, atol=1e-4)


def changed(**changes):
    """`halved` with a mistake."""
    return lambda table: ht.embed.Scheme(**(vars(halved(table)) | changes))


MISTAKES = {  # what is wrong with a method, and what is said of it
    "no scheme": (lambda table: None, "made None of a table"),
    "a part without a name": (changed(parts={"": ht.embed.Weights(0.0, (3, 8))}), "'' is no name of a part"),
    "a part that is a shape": (changed(parts={"x": (3, 8)}), "got parts={'x': (3, 8)}"),
    "no parts": (changed(parts=None), "got parts=None"),
    "a size below 0": (changed(parts={"x": ht.embed.Weights(0.0, (3, 8))}, limit=-1), "got limit=-1"),
    "bytes below 0": (changed(types={"narrow": ((-3, 8), "float32")}), "got types="),
    "bytes that are NaN": (changed(types={"narrow": ((math.nan,), "float32")}), "got types="),
    "a dtype that is none": (changed(types={"narrow": ((3,), "float33")}), "float33"),
    "all bytes, and more": (changed(types={"narrow": ((300, 80), "float32")}), "cannot store 300 x 8 in 4,800 bytes"),
    "another shape": (changed(lookup=lambda parts, ids: parts["narrow"]), r"became f32[300, 4]"),
    "another width": (changed(lookup=lambda parts, ids: ht.embedding(parts["narrow"], ids)), "became f32[2, 4, 4]"),
    "a number": (changed(lookup=lambda parts, ids: ht.constant(1.0)), "became f32[]"),
    "no vectors": (changed(lookup=lambda parts, ids: None), "became None"),
    "an unknown part settles": (
        changed(settle=lambda values, done: {"wide": 1.0}),
        "settle of <lambda> gave {'wide': 1.0}",
    ),
    "what settles is no array": (changed(settle=lambda values, done: 3.0), "settle of <lambda> gave 3.0"),
    "a part settles in another shape": (
        changed(settle=lambda values, done: {"scale": [1.0]}),
        "has shape (), got (1,)",
    ),
    "a part settles as a text": (changed(settle=lambda values, done: {"scale": "half"}), "scale' wants float32"),
    "more bytes than it said": (
        changed(store=lambda v: {"narrow": np.zeros((300, 8), "f2")}),
        "init has shape (300, 8), wanted (300, 4)",
    ),
    "other numbers than it said": (changed(store=lambda v: {"narrow": np.full((300, 4), "a")}), "wants float16"),
    "less than it said": (changed(store=lambda v: {}), "store of <lambda> gave {}"),
    "what is stored is read wrongly": (changed(read=lambda stored, ids: stored["narrow"]), "became f16[300, 4]"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_method_of_ones_own_is_told(mistake: str):
    method, said = MISTAKES[mistake]

    def used() -> None:
        layer = built(method)
        ids = np.zeros((2, 4), int)
        state = ht.Executor([layer(ids)]).state
        layer.settle(state)
        layer.compact(state)(ids)

    with pytest.raises(HetuError, match=re.escape(said)) as caught:
        used()
    assert caught.value.fix and Path(caught.value.site.code.co_filename) in (Path(__file__), Path(methods.__file__))


def test_a_model_takes_the_compact_form():
    layer, ids = built("int8"), ht.placeholder("ids", (None, 4), "int64")
    nearest = ht.argmax(layer(ids), axis=-1)
    y = ht.sum(layer(ids), axis=(1, 2)) + ht.sum(layer(nearest[:, :1]), axis=(1, 2))
    ex = ht.Executor([y])
    small = layer.compact(ex.state).replace_in(y)
    assert not any(v.name.endswith("table/weight") for v in ht.Graph((small,)).leaves("variable"))
    fed = {ids: np.arange(12).reshape(3, 4)}
    np.testing.assert_allclose(ht.Executor([small]).run(fed)[0], ex.run(fed)[0], rtol=1e-5)


def test_a_layer_keeps_no_model_alive():
    layer = built("hash")
    gone = weakref.ref(layer(np.arange(3)))
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("name", ["hash", "robe", "dhe", "adaptive", "cafe"])
def test_a_table_far_larger_than_memory(name):
    """What a method takes follows from its budget, not from how many ids there are."""
    count = 10**12
    with ht.scope("model"):
        layer = Embedding(count, 8, name, ratio=1e-9)
    assert layer.budget == 32_000 and layer.training_bytes < 40_000
    y = ht.evaluate(layer([0, 12_345_678_901, count - 1, 2**31 - 1, 2**32]))
    assert y.shape == (5, 8) and len(np.unique(y, axis=0)) == 5


def test_what_is_refused():
    for ratio in (0, -0.5, 1.5, math.nan, True):
        with pytest.raises(ArgumentError, match=f"ratio={ratio}") as caught:
            Embedding(300, 8, ratio=ratio)
        assert re.match("pass .* above 0 to 1|the least is .* bytes: pass ratio=", caught.value.fix)
    with pytest.raises(UnknownNameError, match="there is no method 'robo'") as caught:
        Embedding(300, 8, "robo")
    assert all(name in caught.value.fix for name in METHODS)
    with pytest.raises(ArgumentError, match="the least is 16 bytes: take another method, for the table has 12"):
        Embedding(3, 1, "dhe", ratio=1.0)
    for popularity in (np.ones(299), -np.ones(300), np.full(300, np.nan), np.array(["a"] * 300), np.arange(300)):
        with pytest.raises(ArgumentError, match=r"popularity is .*, wanted 300 falling numbers from 0 up") as caught:
            built("adaptive", popularity=popularity)
        assert "np.bincount(ids.ravel(), minlength=count)" in caught.value.fix
    seen = np.random.default_rng(0).integers(0, 9, 300)
    told = {"np": np, "ids": np.arange(300), "popularity": seen}
    exec(caught.value.fix.rpartition(": ")[2], told)  # what it says does what it should
    assert built("adaptive", popularity=told["popularity"]) and (told["popularity"][told["ids"]] == seen).all()
    for name in METHODS:
        layer = built(name, 1.0)
        with pytest.raises(DTypeError, match="got indices of f32"):
            layer(ht.placeholder("x", (None,)))
        ids = ht.placeholder("ids", (None,), "int64")
        for wrong in (-1, 300):
            with pytest.raises(ValueRangeError, match=f"id {wrong} at position .1. lies outside 0 to 299"):
                ht.Executor([layer(ids)]).run({ids: [0, wrong]})


def test_a_table_is_settled_for_its_compact_form_and_stays_as_it_is():
    layer = built("pep", 0.1)
    state = ht.Executor([layer([1])]).state
    small = layer.compact(state)
    assert small.stored["values"].shape == (159,) and np.count_nonzero(state["model/table/weight"]) == 2400
    for call in (layer.compact, layer.settle):
        with pytest.raises(ArgumentError, match="no values of 'model/table/weight' .*, whose rest servers"):
            call(ht.Executor([ht.placeholder("x", ())]).state)


# -- ranks and servers ----------------------------------------------------------------------------------------------


def losses(ex: ht.Executor) -> list[float]:
    return [float(ex.run("train", batch(step))[0]) for step in range(4)]


REAL = ("quotient_remainder", "int8", "cafe")  # on servers that are processes


@each
def test_servers_train_as_one_process(row: Row):
    """A worker with a server; what a method does between steps is refused where the server has the table."""
    one = ht.Executor(model(built(row.name, ratios(row)[0]), ht.optim.SGD(0.5)))
    wanted = losses(one)

    def work(client: Client, rank: int):
        layer = built(row.name, ratios(row)[0])
        ex = ht.Executor(
            model(layer, ht.optim.SGD(0.5)), strategy=ParameterServer(), comm=Connected(Place(0, 1), client)
        )
        found = losses(ex), ex.run("eval", batch(9))[1], {name for name, p in client.parameters.items() if p.sparse}
        if row.settles:
            with pytest.raises(ArgumentError, match="whose rest servers or ranks may keep"):
                layer.settle(ex.state)
        return found

    kind = ServerProcess if row.name in REAL else ServerThread
    ((found, y, tables),) = network.job("bsp", 1, work, kind=kind)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=row.chance or 1e-6)
    np.testing.assert_allclose(y, one.run("eval", batch(9))[1], rtol=1e-4, atol=row.chance or 1e-6)
    assert bool(tables) == row.table


@each
@pytest.mark.sampled(10)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("size", [(1, 1), (1, 8), (7, 1), (13, 3), (101, 7)], ids=str)
def test_odd_sizes_in_the_least_bytes(row: Row, size: tuple[int, int], servers: int, tmp_path: Path):
    """Servers train as one process does; what they save has its vectors in one process, also in the compact form."""
    count, features = size
    least = METHODS[row.name](ht.embed.Vectors(count, features, 0, ht.init.zeros)).nbytes
    ratio = math.ceil(10_000 * least / (4 * count * features)) / 10_000
    if ratio > 1:
        with pytest.raises(ArgumentError, match=f"cannot store {count} x {features}"):
            built(row.name, 1.0, size)
        return

    def started(**where: Any) -> tuple[Embedding, ht.Executor]:
        with ht.scope("job"):
            layer = built(row.name, ratio, size)
            return layer, ht.Executor(model(layer), **where)

    def fed(step: int) -> dict[str, np.ndarray]:
        ids = batch(step)["ids"] % count
        return {"ids": ids, "t": TARGETS[ids][..., :features]}

    def work(client: Client, rank: int):
        _, ex = started(strategy=ParameterServer(), comm=Connected(Place(0, 1), client))
        found = [float(ex.run("train", fed(step))[0]) for step in range(3)], ex.run("eval", fed(3))[1]
        ex.save(tmp_path / "saved")
        return found

    layer, one = started()
    wanted = [float(one.run("train", fed(step))[0]) for step in range(3)]
    ((found, y),) = network.job("bsp", 1, work, servers, ServerThread)
    near = {"rtol": 1e-4, "atol": row.chance or 1e-6}
    np.testing.assert_allclose(found, wanted, **near)
    np.testing.assert_allclose(y, one.run("eval", fed(3))[1], **near)
    one.load(tmp_path / "saved")
    np.testing.assert_allclose(one.run("eval", fed(3))[1], y, **near)
    layer.settle(one.state)
    small = ht.Executor([small_of(layer, one)(fed(3)["ids"])])
    np.testing.assert_allclose(small.run()[0], one.run("eval", fed(3))[1], rtol=1e-5, atol=1e-7)
    assert layer.scheme.nbytes <= 1.02 * max(layer.budget, least)


@pytest.mark.parametrize("name", ["hash", "tt_rec", "dpq", "mde", "cafe"])
def test_ranks_train_as_one_process(name):
    one = ht.Executor(model(built(name, 0.5), ht.optim.SGD(0.5)))
    wanted = losses(one), one.run("eval", batch(9))[1]

    def work(comm):
        layer = built(name, 0.5)
        ex = ht.Executor(model(layer, ht.optim.SGD(0.5)), strategy="dp", comm=comm)
        return losses(ex), ex.run("eval", batch(9))[1], values(layer, ex)

    for found, y, parts in run_ranks(2, work, deadline=30.0):
        np.testing.assert_allclose(found, wanted[0], rtol=1e-5)
        np.testing.assert_allclose(y, wanted[1], rtol=1e-4, atol=1e-6)
        if name == "cafe":  # the sketch has heard all ranks
            np.testing.assert_array_equal(parts["keys"], one.state["model/table/keys"])


def test_a_table_that_is_divided_among_ranks_is_not_settled():
    def work(comm):
        layer = built("pep", 0.5)
        ex = ht.Executor(model(layer), strategy=ZeRO(3), comm=comm)
        for call in (layer.settle, layer.compact):
            with pytest.raises(ArgumentError, match="'model/table/weight' .*, whose rest servers or ranks may keep"):
                call(ex.state)

    run_ranks(2, work, deadline=30.0)


@pytest.mark.parametrize("name", ["quotient_remainder", "robe"])
def test_ranks_and_servers_train_as_one_process(name):
    one = ht.Executor(model(built(name, 0.5), ht.optim.SGD(0.5)))
    wanted = losses(one)

    def work(client: Client, comm):
        strategy = Hybrid(served="*table/*")
        ex = ht.Executor(model(built(name, 0.5), ht.optim.SGD(0.5)), strategy=strategy, comm=Connected(comm, client))
        return losses(ex), [p.sparse for p in client.parameters.values()]

    for found, sparse in hybrid_job(2, work):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        assert sparse == [True] * len(sparse) and sparse

"""Numbers that travel in fewer bytes: what each codec loses, who keeps it, and how many bytes that takes."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hetu as ht
from hetu.codec import NAMES, Rounding, codec
from hetu.core.errors import ArgumentError, UnknownNameError
from hetu.dist.cut.strategy import Strategy
from hetu.ps import ASP, Cache, CachedTable, Compress, Parameter
from hetu.ps.store.messages import Kind, Message
from hetu.ps.wire.environment import Place
from hetu.ps.wire.tables import Coding
from hetu.strategies import Connected, ParameterServer

from .ps.network import ServerThread, client_of, connect, options
from .ps.simulation import contents, hello, new_store

LONG = 700_000  # floats of three chunks
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
matrices = st.tuples(st.integers(0, 4), st.integers(1, 40)).flatmap(
    lambda shape: st.lists(floats, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]).map(
        lambda values: np.array(values, "f4").reshape(shape)
    )
)


def through(name: str, rows: np.ndarray) -> np.ndarray:
    """Rows after their way."""
    coded = codec(name).encode(rows)
    assert coded.dtype == np.uint8 and coded.shape == (len(rows), codec(name).width(rows.shape[1]))
    codec(name).check(coded, rows.shape[1])
    found = codec(name).decode(coded, rows.shape[1])
    assert found.dtype == np.float32 and found.shape == rows.shape
    assert np.isfinite(found[np.isfinite(rows).all(axis=1)]).all()
    return found


@given(matrices)
def test_what_halves_and_bytes_lose_is_bounded(rows):
    half = through("float16", rows)
    beyond = np.abs(rows) > 65504
    np.testing.assert_array_equal(half[~beyond], rows[~beyond].astype("f2"))
    assert (half[beyond] == np.copysign(65504, rows[beyond])).all()
    most = np.abs(rows).max(axis=1, keepdims=True, initial=0)
    lost = np.abs(through("int8", rows) - rows)
    assert (lost <= most / 254 * 1.001 + 1e-40).all()  # a scale below 1e-38 has fewer bits


@given(matrices, st.sampled_from([0.01, 0.3, 1.0]))
def test_the_largest_numbers_arrive_as_they_are(rows, share):
    found = through(f"topk:{share}", rows)
    count = codec(f"topk:{share}").count(rows.shape[1])
    for row, arrived in zip(rows, found):
        kept = arrived != 0
        assert kept.sum() <= count and (arrived[kept] == row[kept]).all()
        left = np.abs(row[~kept]).max(initial=0)
        assert np.sort(np.abs(row))[-count] >= left or left == 0


@pytest.mark.parametrize("name", NAMES)
def test_finite_numbers_stay_finite_whatever_their_dtype(name):
    for dtype in ("f2", "f4", "f8"):
        most = np.finfo(dtype).max
        rows = np.array([[most, -most, 0, most / 2], [1, 0, 0, 0]], dtype)
        assert (through(name, rows)[1] == through(name, rows[1:])[0]).all()


LAID = {
    "columns first": np.asfortranarray,
    "backwards": lambda a: a[::-1, ::-1].copy()[::-1, ::-1],
    "apart": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "one row for all": lambda a: np.broadcast_to(a[:1], a.shape),
    "other bytes first": lambda a: a.astype(a.dtype.newbyteorder()),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("laid", LAID)
def test_it_is_all_one_how_numbers_lie_in_memory(laid, name):
    for dtype in ("f2", "f4", "f8"):
        rows = LAID[laid](np.random.default_rng(0).standard_normal((5, 8)).astype(dtype))
        np.testing.assert_array_equal(through(name, rows), through(name, np.array(rows, dtype, order="C")))
        if isinstance(kind := codec(name), Rounding):
            half = np.full(rows.shape, 0.5, "f4")
            np.testing.assert_array_equal(kind.encode(rows, half), kind.encode(np.array(rows, dtype, order="C"), half))


@given(matrices)
def test_of_signs_the_means_arrive(rows):
    found, most = through("1bit", rows), float(np.abs(rows).max(initial=0))
    np.testing.assert_allclose(found.sum(1, "f8"), rows.sum(1, "f8"), rtol=1e-3, atol=most * 1e-3)
    assert ((found < 0) <= (rows < 0)).all() and (found[rows < 0] <= 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_seen_at_the_other_end(name, number):
    rows = np.ones((2, 200), "f4")
    rows[1, 7] = number
    found = through(name, rows)
    assert np.isfinite(found[0]).all() and not np.isfinite(found[1]).all()


@pytest.mark.parametrize("name", ["topk:0.01", "1bit", "int8", "float16"])
def test_what_a_push_loses_is_sent_later(name):
    """After many steps the sum of what has arrived is that of the gradients, up to what is still kept back."""
    rng, coding = np.random.default_rng(0), Coding(Parameter((300,), push=name))
    gradients = rng.standard_normal((400, 1, 300)).astype("f4") + np.linspace(-1, 1, 300, dtype="f4")
    arrived = sum(codec(name).decode(coding.pushed(5, g), 300).astype("f8") for g in gradients)
    kept = coding.feedback[5].lost
    np.testing.assert_allclose(arrived + kept, gradients.sum(axis=0, dtype="f8"), rtol=1e-3, atol=1e-2)
    assert np.abs(kept).max() < 0.5 * np.abs(gradients.sum(axis=0)).max()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_what_is_no_number_is_sent_once(name, number):
    """A server may refuse it (`--finite`), and the job goes on."""
    coding, gradient = Coding(Parameter((300,), push=name)), np.ones((1, 300), "f4")
    gradient[0, 7] = number
    assert not np.isfinite(codec(name).decode(coding.pushed(5, gradient), 300)).all()
    assert np.isfinite(codec(name).decode(coding.pushed(5, np.ones((1, 300), "f4")), 300)).all()


# -- over real servers ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[1, 3])
def client(request):
    with client_of(request.param, "asp") as client:
        yield client


def moved(client, act) -> tuple[int, int]:
    """The bytes of arrays that servers received and sent."""
    before = client.status()
    act()
    after = client.status()
    return tuple(sum(a[k] for a in after) - sum(b[k] for b in before) for k in ("received", "sent"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("pull", ["", "float16", "int8"])
@pytest.mark.parametrize("push", ["", *NAMES])
def test_a_dense_parameter(client, push, pull):
    name, rng = f"{push} {pull}", np.random.default_rng(0)
    first, gradient = rng.standard_normal((2, LONG)).astype("f4")
    parameter = Parameter((LONG,), options={"learning_rate": 1.0}, reduce="sum", push=push, pull=pull)
    client.create({name: parameter}, {name: first})
    blocks = [(b.start, b.stop) for b in client.blocks[name]]
    received, _ = moved(client, lambda: client.push(name, gradient).wait())
    width = sum(codec(push).width(b - a) if push else 4 * (b - a) for a, b in blocks)
    assert received == width
    wanted = first.copy()
    for a, b in blocks:
        wanted[a:b] -= through(push, gradient[None, a:b])[0] if push else gradient[a:b]
        wanted[a:b] = through(pull, wanted[None, a:b])[0] if pull else wanted[a:b]
    np.testing.assert_array_equal(client.pull(name).wait(), wanted)
    _, sent = moved(client, lambda: client.pull(name).wait())
    assert sent == sum(codec(pull).width(b - a) if pull else 4 * (b - a) for a, b in blocks)


@pytest.mark.parametrize("how", ["float16", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_rows_of_a_table(client, how, dtype):
    name, rng = f"rows {how} {dtype}", np.random.default_rng(0)
    first = rng.standard_normal((90_000, 4)).astype(dtype)
    parameter = Parameter(first.shape, dtype, sparse=True, options={"learning_rate": 1.0}, push=how, pull=how)
    client.create({name: parameter}, {name: first})
    ids, rows = rng.integers(0, 90_000, 500), rng.standard_normal((500, 4)).astype(dtype)
    distinct, places = np.unique(ids, return_inverse=True)
    sums = np.zeros((len(distinct), 4), dtype)
    np.add.at(sums, places, rows)
    client.push_rows(name, ids, rows).wait()
    wanted = first[distinct] - through(how, sums.astype("f4")).astype(dtype)
    wanted = through(how, wanted.astype("f4")).astype(dtype)
    np.testing.assert_allclose(client.pull_rows(name, distinct).wait(), wanted, atol=0.05)  # a step of a byte
    received, sent = moved(client, lambda: client.pull_rows(name, ids).wait())
    assert sent == len(distinct) * codec(how).width(4)
    assert 2 * len(distinct) <= received <= 2 * len(distinct) + 16 * len(client.blocks[name])  # steps between ids
    empty = client.pull_rows(name, np.empty(0, int)).wait()
    assert empty.shape == (0, 4) and empty.dtype == dtype


def test_a_cache_of_rows_that_travel_as_bytes(client):
    parameter = Parameter((50, 8), sparse=True, rule="add", reduce="sum", push="int8", pull="int8")
    client.create({"cached": parameter}, {"cached": np.ones((50, 8))})
    table = CachedTable(client, "cached", Cache("lru", rows=20, pull_bound=0, push_bound=0))
    for _ in range(3):
        rows = table.lookup(np.arange(10))
        table.update(np.arange(10), np.full((10, 8), 0.5))
    np.testing.assert_allclose(rows, 2.0, rtol=1e-2)
    table.flush()
    np.testing.assert_allclose(
        client.pull_rows("cached", np.arange(12)).wait()[:, 0], [2.5] * 10 + [1.0] * 2, rtol=1e-2
    )


@pytest.mark.parametrize("push", ["", *NAMES])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_parameters_of_any_shape_travel(client, push, dtype):
    """One number, none, and rows that are none or have no numbers."""
    for shape in ((), (0,), (1,), (2, 0), (3, 2)):
        name, pull = f"{push} {dtype} {shape}", push if push in ("float16", "int8") else ""
        parameter = Parameter(shape, dtype, options={"learning_rate": 1.0}, reduce="sum", push=push, pull=pull)
        client.create({name: parameter}, {name: np.ones(shape, dtype)})
        client.push(name, np.full(shape, 0.25, dtype)).wait()
        assert client.push_pull(name, np.full(shape, 0.25, dtype)).wait().shape == shape
        found = client.pull(name).wait()
        assert found.shape == shape and found.dtype == dtype
        if push != "topk:0.01":
            np.testing.assert_allclose(found.astype(float), np.full(shape, 0.5), rtol=0.02)


def test_a_parameter_that_is_made_anew_travels_as_it_says_now(client):
    first, gradient = np.zeros(40, "f4"), np.linspace(-1, 1, 40, dtype="f4")
    for push in ("topk:0.1", "int8", ""):
        made = Parameter((40,), options={"learning_rate": 1.0}, reduce="sum", push=push)
        client.create({"anew": made}, {"anew": first})
        client.push("anew", gradient).wait()
        wanted = through(push, gradient[None])[0] if push else gradient  # with nothing of an earlier one
        np.testing.assert_array_equal(client.pull("anew").wait(), -wanted)
        client.free(["anew"]).wait()


# -- what is refused ---------------------------------------------------------------------------------------------------


WRONG = {
    "another width": (np.zeros((1, 8), "u1"), "value", "got uint8"),
    "as it is": (np.zeros((1, 8), "<f4"), "value", "wanted uint8"),
    "a place beyond": (np.full((1, 8), 255, "u1"), "value", "number 4294967295 of a row of 8"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bytes_that_stand_for_nothing_change_nothing(name):
    values, code, said = WRONG[name]
    store = new_store(1, ASP())
    share = "0.5" if name == "another width" else "0.1"
    meta = Parameter((8,), push=f"topk:{share}").spec("coded", 0, 8).meta()
    store.handle(Message(Kind.CREATE, key=9, seq=3, epoch=1, meta=meta), 0.0)
    before = contents(store)
    [reply] = store.handle(Message(Kind.PUSH, key=9, seq=4, epoch=1, values=values), 0.0)
    assert (reply.kind, reply.meta["code"]) == (Kind.ERROR, code) and re.search(said, reply.meta["message"])
    assert contents(store) == before


@pytest.mark.parametrize("finite", [True, False])
def test_a_push_of_what_is_no_number_is_refused_also_as_bytes(finite):
    store = new_store(1, ASP(), finite=finite)
    meta = Parameter((8,), push="float16").spec("coded", 0, 8).meta()
    store.handle(Message(Kind.CREATE, key=9, seq=3, epoch=1, meta=meta), 0.0)
    values = codec("float16").encode(np.full((1, 8), np.nan, "f4"))
    [reply] = store.handle(Message(Kind.PUSH, key=9, seq=4, epoch=1, values=values), 0.0)
    assert (reply.kind is Kind.ERROR) == finite


def test_names_are_checked_on_both_sides():
    for wrong, error, said in [("zip", UnknownNameError, "no way 'zip'"), ("topk:2", ArgumentError, "share"),
                               ("topk", ArgumentError, "share"), ("topk:x", ArgumentError, "share")]:  # fmt: skip
        with pytest.raises(error, match=said):
            Compress(gradients=wrong)
    with pytest.raises(ArgumentError, match="only what gradients lose can be sent later"):
        Compress(rows="1bit")
    with pytest.raises(ArgumentError, match="compress='int8'"):
        ParameterServer(compress="int8")
    store = new_store(1, ASP())
    hello(store, 0, 100)
    whole = Parameter((8,), "int64", rule="add", reduce="sum")
    for parameter, wrong in ((Parameter((8,)), {"push": "zip"}), (whole, {"pull": "int8"})):
        [reply] = store.handle(Message(Kind.CREATE, key=9, seq=store.members[0].done + 1, epoch=1,
                                       meta=parameter.spec("t", 0, 8).meta() | wrong), 0.0)  # fmt: skip
        assert reply.meta["code"] == "value" and len(store.tables) == 2


# -- as a strategy -----------------------------------------------------------------------------------------------------


def graph():
    ids, t = ht.placeholder("ids", (None, 4), "int64"), ht.placeholder("t", (None,), "int64")
    with ht.scope("model"):
        first, second = ht.nn.Embedding(50, 3, name="a")(ids), ht.nn.Embedding(50, 3, name="b")(ids)
        y = ht.nn.Linear(24, 3)(ht.flatten(ht.concat([first, second], axis=1), 1))
    loss = ht.mean(ht.softmax_cross_entropy(y, t))
    return {"train": [loss, ht.optim.SGD(0.5).minimize(loss)]}


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("meaning")
@pytest.mark.parametrize(
    ("compress", "within"),
    [
        (Compress("float16", "float16", "float16"), 0.01),
        (Compress("int8", "int8", "int8"), 0.05),
        (Compress(gradients="topk:0.1"), 0.1),
        (Compress(gradients="1bit"), 0.1),
    ],
    ids=["halves", "bytes", "largest", "signs"],
)
def test_training_comes_close_to_that_of_one_process(compress, within):
    rng = np.random.default_rng(0)
    feed = {"ids": rng.integers(0, 50, (32, 4)), "t": rng.integers(0, 3, 32)}
    alone = ht.Executor(graph())
    wanted = [float(alone.run("train", feed)[0]) for _ in range(30)]
    with ServerThread(options("bsp", 1)) as server, connect([server.address]) as client:
        strategy = ParameterServer(compress=compress)
        executor = ht.Executor(graph(), strategy=strategy, comm=Connected(Place(0, 1), client))
        found = [float(executor.run("train", feed)[0]) for _ in range(30)]
        written = executor.placement.strategy
        assert Strategy.from_json(written.to_json()) == written
        assert {home.compress for home in written.variables.values()} == {
            compress.part(sparse=s) for s in (True, False)
        }
    assert found[0] == pytest.approx(wanted[0], rel=0.01) and abs(found[-1] - wanted[-1]) < within * wanted[0]

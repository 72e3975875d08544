"""Estimators on parameter servers: the same fits as one worker's, and the bytes that go through sockets."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import chain
from threading import Event
from typing import Any

import numpy as np
import pytest

from hetu.core.errors import ArgumentError, DTypeError
from hetu.dist import run_ranks
from hetu.ml import LatentDirichletAllocation as Topics
from hetu.ml.served import ServedWorkers
from hetu.ml.trees import judged
from hetu.ml.trees.bins import binned, narrowed, whole
from hetu.ml.trees.grow import Grower, GrowthRules
from hetu.ml.workers import Workers, workers_of
from hetu.ps import RefusedError, ServerProcess
from hetu.ps.wire.transport import ServerTimeoutError
from tests.ml import assert_alike, rows, shared_out
from tests.ps.network import ServerThread, job, options, run_workers

from .test_topics import drawn

NAMES = sorted(name for name, row in rows().items() if row.equal)
FEW = 8192  # bytes of the headers of a few messages


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(4)
def test_two_workers_on_servers_fit_what_one_fits(name, servers):
    row = rows()[name]
    alone, fitted = shared_out(row, 2)
    for of_worker in job("bsp", 2, fitted, servers, kind=ServerThread):
        assert_alike(row, of_worker, alone)


@pytest.mark.parametrize("mode", ["bsp", "ssp:0", "ssp:2"])
def test_what_workers_ask_of_each_other_is_answered_as_by_ranks(mode):
    rng = np.random.default_rng(0)
    large = rng.normal(size=(3, 50_000))  # of several pieces

    def asked(workers: Any) -> list[np.ndarray]:
        k, found = workers.rank, []
        for turn in range(3):  # one may be ahead
            found += workers.sum(np.arange(4.0) * k + turn, np.array(7 + k), large[k])
            found += workers.sum(np.array([2**61 + k, -k]), np.array([k + turn, 7], np.int32), np.array(k, np.uint8))
            found += [*workers.part(large[:, :7] * k), *workers.part(np.full((2, 3, 2), k + turn, np.int32))]
            found += [workers.most(np.array([k, -k, 2**62 + k])), workers.most(large[k][:9])]
            found += [workers.gather(np.full((k + 1, 2), 2**60 + turn + k)), workers.gather(large[k : 2 * k])]
            found += [workers.gather(np.array(["ab", "cde", "f"][k:])), workers.unique(rng.permutation(3) > k)]
        matrix = workers.shared(np.full((5, 2), k + 1.0), np.array([0, 4]))
        matrix.add(np.eye(5, 2) * k)
        matrix.close()
        return [*found, *workers.sum(matrix.values[4])]

    wanted = run_ranks(3, lambda comm: asked(workers_of(comm)))
    served = job(mode, 3, lambda client, rank: asked(ServedWorkers(client)), servers=2, kind=ServerThread)
    for one, other in zip([*chain(*served)], [*chain(*wanted)], strict=True):
        assert np.asarray(one).dtype == np.asarray(other).dtype
        np.testing.assert_array_equal(one, other)


NUMBERS = [np.dtype(code) for code in "?bBhHiIqQefd"]
SHAPES = [(), (0,), (1,), (4,), (0, 3), (3, 0), (2, 3), (5, 1, 2)]


def extreme(dtype: np.dtype, shape: tuple[int, ...], seed: list[int]) -> np.ndarray:
    """Numbers of a dtype from all it has; of floats such that sums are exact."""
    rng = np.random.default_rng(seed)
    if dtype.kind in "iu":
        of = np.iinfo(dtype)
        return np.asarray(rng.integers(of.min, of.max, shape, dtype, endpoint=True))
    return np.asarray(rng.integers(-50 * (dtype.kind == "f"), 2, shape)).astype(dtype)


def test_arrays_of_any_dtype_and_size_are_answered_as_by_ranks():
    """Sums of whole numbers begin anew from the other end where they are too large."""

    def asked(workers: Any) -> list[np.ndarray]:
        k, found = workers.rank, []
        for number, dtype in enumerate(NUMBERS):
            for shape in SHAPES:
                x = extreme(dtype, shape, [number, k])
                found += [workers.most(x), workers.side_by_side(x), *(workers.sum(x) if dtype.kind != "b" else ())]
                if shape:
                    some = extreme(dtype, (2 * k % 3, *shape[1:]), [number, k])
                    found += [workers.gather(x), workers.gather(some), *(workers.part(x) if dtype.kind != "b" else ())]
        for wrong in (np.array([True]), *[np.array([k], kind) for kind in ("O", "U", "M8[s]")]):
            with pytest.raises((ArgumentError, DTypeError)):
                workers.sum(wrong)
        return found

    wanted = run_ranks(3, lambda comm: asked(workers_of(comm)))
    served = job("bsp", 3, lambda client, rank: asked(ServedWorkers(client)), servers=2, kind=ServerThread)
    for one, other in zip([*chain(*served)], [*chain(*wanted)], strict=True):
        assert np.asarray(one).dtype == np.asarray(other).dtype
        np.testing.assert_array_equal(one, other, strict=True)


@pytest.fixture(scope="module")
def processes():
    """Two servers in processes of their own, for each mode, and what runs two workers whose bytes all use sockets."""
    with ExitStack() as stack:

        def run(mode: str, body: Any) -> list[Any]:
            started = [stack.enter_context(ServerProcess(options(mode, 2))) for _ in range(2)]
            return run_workers(2, body, [server.address for server in started], shared=False)

        yield run


def bytes_of(client: Any, act: Any) -> tuple[int, int]:
    before = np.sum(client.traffic(), axis=0)
    act()
    sent, received = np.sum(client.traffic(), axis=0) - before
    return int(sent), int(received)


def test_a_sum_costs_its_bytes_once_up_and_once_down(processes):
    x = np.ones((100, 256, 2), np.int32)

    def body(client: Any, rank: int) -> tuple[int, int]:
        workers = ServedWorkers(client)
        workers.sum(x)  # makes the table
        return bytes_of(client, lambda: workers.sum(x))

    for both in processes("bsp", body):
        assert all(100 * 256 * 2 * 4 <= one < 100 * 256 * 2 * 4 + FEW for one in both)


def grown(workers: Any, leaves: int | None, own: slice = slice(None), features: int = 0) -> Any:
    """What grows a tree from 600 rows in 100 columns of 255 bins, with whole numbers in 4 bytes."""
    X = np.random.default_rng(0).normal(size=(600, 100))
    y = (X[:, 0] * X[:, 1] + X[:, 2])[own]
    table = binned(workers, X[own])
    short = narrowed(workers, *whole(workers, np.stack([y, np.ones(len(y))], axis=1)))
    rules = GrowthRules(max_leaf_nodes=leaves, min_samples_leaf=5, features=features)
    values, units = (each[None] for each in short)
    return Grower(workers, table, values, units, rules, [np.random.default_rng(0)], [np.arange(len(y))])


@pytest.mark.parametrize("servers", [1, 2])
def test_of_a_nodes_histogram_only_its_best_cut_is_pulled(servers):
    """A tree of 9 leaves: of the root and of the smaller child of each split all is sent; some are pruned later."""

    def body(client: Any, rank: int) -> tuple[int, int, int]:
        grower = grown(ServedWorkers(client), 9, slice(rank, None, 2))
        nodes, count = list[int](), grower._counted
        grower._counted = lambda ids, looked: nodes.append(len(ids)) or count(ids, looked)
        return *bytes_of(client, grower.grow), sum(nodes)

    with ExitStack() as stack:
        started = [stack.enter_context(ServerProcess(options("bsp", 2))) for _ in range(servers)]
        for up, down, nodes in run_workers(2, body, [each.address for each in started], shared=False):
            assert 8 <= nodes < 14
            assert 0 < up - nodes * (100 * 255 * 2 * 4) < 2 * nodes * 600 * servers
            assert 0 < down < 2 * nodes * 600 * servers


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("count", [1, 5])
def test_splits_of_any_number_of_trees_are_a_message_to_count_rows_and_one_for_each_server(count, servers):
    """By tables and clocks a worker sent 118 messages to two servers for such a tree, and for the next as many."""

    def body(client: Any, rank: int) -> list[int]:
        one = grown(ServedWorkers(client), 9, slice(rank, None, 2))
        values, units = one.values[None], one.units
        all_ = [np.repeat(each, count, axis=0) for each in (values, units)]
        draws, rows = [np.random.default_rng(0)] * count, [one.rows] * count
        before = [link.seq for link in client.transport.links]
        grower = Grower(one.workers, one.table, *all_, one.rules, draws, rows)
        rounds, split = list[int](), grower._split
        grower._split = lambda ids: rounds.append(len(ids)) or split(ids)
        grower.grow()
        return [len(rounds), *(link.seq - seq for seq, link in zip(before, client.transport.links))]

    for rounds, *found in job("bsp", 2, body, servers, kind=ServerThread):
        asked = rounds + 2  # the root and the children of all rounds are judged; then all is forgotten
        assert found == [1 + rounds + asked, asked][:servers] and rounds <= 7  # of 8 splits


@pytest.mark.parametrize("mode", ["bsp", "ssp:1"])
@pytest.mark.parametrize("leaves, features", [(30, 0), (None, 0), (None, 50)])
def test_trees_are_the_same_however_few_histograms_servers_have_place_for(mode, leaves, features, monkeypatch):
    wanted = grown(Workers(), leaves, features=features).grow()

    def body(client: Any, rank: int) -> Any:
        return grown(ServedWorkers(client), leaves, slice(rank, None, 2), features).grow()

    for kept in (1, 1 << 21, 1 << 28):
        monkeypatch.setattr(judged, "KEPT", kept)
        for tree in job(mode, 2, body, 2, kind=ServerThread):
            for one, other in zip(vars(tree).values(), vars(wanted).values(), strict=True):
                np.testing.assert_array_equal(one, other)


def test_of_a_shared_matrix_travels_what_is_read_and_what_changed(processes):
    def body(client: Any, rank: int) -> tuple[int, int]:
        matrix = ServedWorkers(client).shared(np.ones((1000, 50)), np.arange(200) + 300 * rank)
        change = np.zeros((1000, 50))
        change[rank:700:7] = 1.0
        return bytes_of(client, lambda: matrix.add(change))

    for sent, received in processes("bsp", body):  # rows of 400 bytes, and numbers of 8 at most
        assert 100 * 400 <= sent < 100 * 408 + 200 * 8 + FEW and 200 * 400 <= received < 200 * 400 + FEW


def test_topics_that_hear_of_words_late_are_as_likely(processes):
    """The best of three starts: one in ten of either kind ends where two topics have become one."""
    X, _ = drawn(400)
    fit, held = X[:300], X[300:]

    def body(client: Any, rank: int) -> tuple[np.ndarray, float]:
        models = [Topics(5, max_iter=150, random_state=k, comm=client).fit(fit[rank::2]) for k in range(3)]
        for model in models:
            model.comm = None
        return models[0].components_, min(model.perplexity(held) for model in models)

    (waited, exact), _ = processes("bsp", body)
    (late, found), (same, _) = processes("ssp:2", body)
    np.testing.assert_array_equal(late, same)  # all workers have one model
    assert found <= 1.02 * exact
    one = Topics(5, max_iter=150).fit(np.concatenate([fit[::2], fit[1::2]]))
    np.testing.assert_array_equal(waited, one.components_)


def test_sums_leave_nothing_on_servers():
    def body(client: Any, rank: int) -> int:
        workers = ServedWorkers(client)
        for size in range(100):
            assert workers.sum(np.full(size + 1, rank))[0][size] == 1
        return client.status()[0]["tables"]

    assert job("bsp", 2, body, kind=ServerThread) == [0, 0]


@pytest.mark.parametrize("mode", ["bsp", "ssp:1"])
def test_rows_of_a_worker_that_left_are_missed(mode):
    def body(client: Any, rank: int) -> None:
        workers = ServedWorkers(client)
        workers.sum(np.ones(3)), workers.sum(np.ones(3)), workers.gather(np.ones(3)), workers.gather(np.ones(3))
        if rank:
            client.leave()
            return
        for ask in (workers.sum, workers.gather):
            with pytest.raises(RefusedError, match="of 2 workers not all are there"):
                ask(np.ones(3))

    job(mode, 2, body, kind=ServerThread)


@pytest.mark.parametrize("mode", ["bsp", "ssp:1"])
@pytest.mark.parametrize("leaves", [False, True])
def test_later_clients_of_the_same_servers_begin_anew(mode, leaves):
    """Whatever tables of their own earlier ones have made, in whatever order, or have not."""
    names = ["GaussianNB", "GaussianNB", "DecisionTreeClassifier", "KMeans", "LatentDirichletAllocation", "GaussianNB"]
    counts: dict[str, int] = {}
    with ExitStack() as stack:
        servers = [stack.enter_context(ServerThread(options(mode, 2))) for _ in range(2)]
        for name in names:
            alone, fitted = shared_out(rows()[name], 2)

            def body(client: Any, rank: int, fitted: Any = fitted) -> tuple[Any, int]:
                found, tables = fitted(client, rank), client.status()[0]["tables"]
                if leaves and not rank:
                    client.leave()
                return found, tables

            for found, tables in run_workers(2, body, [each.address for each in servers]):
                if mode == "bsp" or name != "LatentDirichletAllocation":
                    assert_alike(rows()[name], found, alone)
                assert counts.setdefault(name, tables) == tables  # as many after others as before


def test_who_has_left_and_does_not_come_back_is_named():
    gone = Event()

    def body(client: Any, rank: int) -> None:
        if rank == 0:
            client.leave()
            gone.set()
        elif gone.wait(30):
            with pytest.raises(ServerTimeoutError, match=r"workers \[0\] have left and did not come back in 0.2 s"):
                workers_of(client)

    with ServerThread(options("bsp", 2)) as server:
        run_workers(2, body, [server.address], timeout=0.2)


def test_a_job_without_an_end_of_steps_is_refused():
    with pytest.raises(ArgumentError, match="on servers under asp"):
        job("asp", 2, lambda client, rank: workers_of(client), kind=ServerThread)

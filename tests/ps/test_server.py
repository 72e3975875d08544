"""Real servers in processes of their own, on loopback with random ports; every wait has a deadline."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial

import numpy as np
import pytest
import zmq

from hetu.core.errors import ArgumentError, ShapeError, UnknownNameError, ValueRangeError
from hetu.ps import (
    Parameter,
    RefusedError,
    ServerError,
    ServerProcess,
    ServerRestartedError,
    ServerTimeoutError,
    make_keys,
)
from hetu.ps.store.messages import Kind, ProtocolError
from hetu.ps.wire.handshake import dealer, read_keys

from .network import DEADLINE, TOKEN, LossyRelay, connect, job, options, run_workers

RATE = {"learning_rate": 0.5}


@pytest.fixture(scope="module")
def servers(meaning):
    """Two servers for one worker under ASP."""
    with ServerProcess(options("asp", 1)) as first, ServerProcess(options("asp", 1)) as second:
        yield [first.address, second.address]


@pytest.fixture(scope="module")
def client(servers, meaning):
    """A worker with a dense parameter of three chunks and a table with 500 rows over both servers."""
    rng = np.random.default_rng(0)
    with connect(servers) as client:
        client.create(
            {"w": Parameter((700, 1000), options=RATE), "table": Parameter((500, 2, 3), sparse=True, options=RATE)},
            {"w": rng.standard_normal((700, 1000)).astype("f"), "table": rng.standard_normal((500, 2, 3)).astype("f")},
        )
        yield client


def test_blocks_are_balanced_over_the_servers(client):
    assert len(client.blocks["w"]) == 3 and {b.server for b in client.blocks["w"]} == {0, 1}
    client.create({"large": Parameter((1 << 19, 2), sparse=True)}, {"large": np.zeros((1 << 19, 2), "f")})
    assert [b.server for b in client.blocks["large"]] == [0, 1]


def test_push_and_pull_of_a_whole_parameter(client):
    w = client.pull("w").wait()
    g = np.random.default_rng(1).standard_normal(w.shape).astype("f")
    client.push("w", g).wait()
    out = np.empty_like(w)
    assert client.pull("w", out).wait() is out
    np.testing.assert_allclose(out, w - 0.5 * g, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(client.push_pull("w", g).wait(), w - g, rtol=1e-4, atol=1e-5)


def test_rows_of_any_shape_with_repeats(client):
    table = client.pull("table").wait()
    ids = np.array([[499, 3], [3, 0]])
    np.testing.assert_array_equal(client.pull_rows("table", ids).wait(), table[ids])
    rows = np.random.default_rng(2).standard_normal((2, 2, 2, 3)).astype("f")
    np.subtract.at(table, ids, 0.5 * rows)
    np.testing.assert_allclose(client.push_pull_rows("table", ids, rows).wait(), table[ids], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(client.pull("table").wait(), table, rtol=1e-5, atol=1e-6)
    assert client.pull_rows("table", np.empty((0, 4), int)).wait().shape == (0, 4, 2, 3)


def test_the_rows_of_a_server_function_are_all_that_travels(client):
    table = np.arange(20, dtype="f").reshape(10, 2)[::-1].copy()
    client.create({"scores": Parameter((10, 2), sparse=True)}, {"scores": table})
    ids, rows = client.call("scores", "top_k", k=2).wait()
    assert ids.tolist() == [0, 1] and (rows == table[:2]).all()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda c: c.push("nope", np.ones(2, "f")), UnknownNameError),
        (lambda c: c.push("w", np.ones((2, 2), "f")), ShapeError),
        (lambda c: c.push("table", np.ones((500, 2, 3), "f")), ShapeError),
        (lambda c: c.pull_rows("table", [500]), ValueRangeError),
        (lambda c: c.pull_rows("table", [0.5]), ArgumentError),
        (lambda c: c.push_rows("table", [1, 2], np.ones((3, 2, 3), "f")), ShapeError),
        (lambda c: c.push_rows("table", [1], [[["a", "b", "c"]]]), ProtocolError),
        (lambda c: c.push_rows("table", [1, 2], [[1.0], [2.0, 3.0]]), ProtocolError),
        (lambda c: c.create({"w": Parameter((2,))}, {"w": np.ones(2)}), ArgumentError),
        (lambda c: c.create({"v": Parameter((2,))}, {"v": np.ones(3)}), ShapeError),
        (lambda c: c.call("w", "top_q").wait(), RefusedError),
    ],
)
def test_mistakes_are_named(client, call, error):
    with pytest.raises(error):
        call(client)
    client.ping()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_process_that_a_worker_forks_does_not_speak_for_it(client):
    """What it sends would wait forever for threads that are not there; its answers would be the worker's."""
    client.create({"forked": Parameter((2,))}, {"forked": np.zeros(2)})
    begun = client.pull("forked")
    calls = (begun.wait, client.ping, client.clock, lambda: client.pull("forked"), client.leave)

    def is_refused(call):
        try:
            call()
        except ArgumentError as error:
            return "has its connection in process" in str(error)

    if not (child := os.fork()):
        os._exit(sum(map(bool, map(is_refused, calls))))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    assert begun.wait().tolist() == [0, 0]


# -- several workers -------------------------------------------------------------------------------------------


def train(client, rank: int, clocks: int = 3) -> bytes:
    """Gradients that depend on what was pulled, so any wrong read shows in the end."""
    client.create(
        {"w": Parameter((300_000,), rule="adam"), "table": Parameter((40, 4), sparse=True, rule="adagrad")},
        {"w": np.ones(300_000, "f"), "table": np.ones((40, 4), "f")},
    )
    for clock in range(clocks):
        rng = np.random.default_rng([rank, clock])
        ids = rng.integers(0, 40, 15)
        w, rows = client.pull("w"), client.pull_rows("table", ids)
        client.push_rows("table", ids, rows.wait() * rng.standard_normal((15, 4)).astype("f"))
        client.push("w", w.wait() * np.float32(rng.standard_normal()))
        client.clock().wait()
    return client.pull("w").wait().tobytes() + client.pull("table").wait().tobytes()


@pytest.fixture(scope="module")
def trained(meaning):
    """The bits that each of two BSP workers ends with, over one server."""
    return job("bsp", 2, train)


def test_bsp_workers_end_with_the_same_bits_however_many_servers(trained):
    assert len({*trained, *job("bsp", 2, train, servers=2)}) == 1


def test_under_loss_delay_and_repetition_every_push_counts_once(trained):
    """20 % of all messages vanish, some come twice, some are overtaken; the bits stay those of a good network."""
    with ServerProcess(options("bsp", 2)) as server, LossyRelay(server.address, loss=0.2) as relay:
        under_loss = run_workers(2, train, [relay.address], retry=0.02)
    assert relay.dropped > 5 and relay.repeated > 2
    assert {*under_loss} == {*trained}


def test_a_worker_that_dies_is_not_waited_for_beyond_its_lease():
    def body(client, rank):
        if rank == 1:
            return  # closes without leaving
        for _ in range(3):
            client.clock().wait()
        [status] = client.status()
        return status["clocks"]

    assert job("bsp", 2, body, lease=2.0)[0] == {"0": 3}


def test_a_step_may_be_ended_without_waiting_and_read_ahead():
    """`clock()` alone: the reads of the next step are parked at the server, its first push waits for leave."""

    def body(client, rank):
        client.create({"w": Parameter((3,), options=RATE)}, {"w": np.zeros(3)})
        seen = []
        for _ in range(5):
            ahead = client.pull("w")
            client.push("w", np.ones(3))
            client.clock()
            seen.append(ahead.wait()[0])
        return seen

    assert job("bsp", 2, body) == [[0, -0.5, -1, -1.5, -2]] * 2


def test_a_worker_that_died_between_two_clocks_catches_up():
    with ServerProcess(options("bsp", 1)) as first, ServerProcess(options("bsp", 1)) as second:
        addresses = [first.address, second.address]
        with connect(addresses) as client:
            client.transport.wait([client.transport.submit(0, Kind.CLOCK, step=0)])
        with connect(addresses) as client:
            assert client.step == 1
            client.clock().wait()
            assert [status["clocks"] for status in client.status()] == [{"0": 2}] * 2


def test_partners_for_a_partial_reduce():
    groups = job("asp", 2, lambda client, rank: client.ready(iteration=rank).wait())
    assert groups[0] == groups[1] and groups[0].members == (0, 1) and groups[0].iteration == 1
    np.testing.assert_allclose(groups[0].weights, [1 / 3, 2 / 3])


# -- faults ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGSTOP")
def test_a_frozen_or_cut_off_server_is_noticed_by_the_deadline_and_serves_again_afterward():
    with (
        ServerProcess(options("asp", 1)) as server,
        LossyRelay(server.address, loss=0.0) as relay,
        connect([relay.address], retry=0.1) as client,
    ):
        client.create({"w": Parameter((2,), rule="add", reduce="sum")}, {"w": np.zeros(2)})
        stop, thaw = (partial(server.process.send_signal, s) for s in (signal.SIGSTOP, signal.SIGCONT))
        for count, (strike, mend) in enumerate([(stop, thaw), (relay.cut.set, relay.cut.clear)], 1):
            client.transport.timeout = 0.3
            strike()
            push = client.push("w", np.ones(2))
            try:
                with pytest.raises(ServerTimeoutError, match=r"PUSH of worker 0: no answer from tcp://\S+ in 0.3 s"):
                    push.wait()
            finally:
                mend()
            client.transport.timeout = DEADLINE
            push.wait()
            assert client.pull("w").wait().tolist() == [count, count]


def test_a_server_that_comes_back_empty_is_not_taken_for_the_old_one():
    server = ServerProcess(options("asp", 1))
    with connect([server.address], retry=0.1) as client:
        client.create({"w": Parameter((2,))}, {"w": np.zeros(2)})
        server.kill()
        with (
            ServerProcess(options("asp", 1, address=server.address)),
            pytest.raises(ServerRestartedError, match="restarted"),
        ):
            client.pull("w").wait()


def test_a_server_ends_when_its_starter_lets_go():
    with ServerProcess(options("asp", 1)) as server:
        pass
    assert server.process.returncode == 0


# -- security --------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_refused(servers):
    with pytest.raises(RefusedError, match="token"):
        connect(servers, token="guess")


def test_garbage_on_the_port_changes_nothing(client, servers):
    before = client.pull("w").wait()
    with zmq.Context() as context, dealer(zmq, context, servers[0], TOKEN, "") as stranger:
        rng = np.random.default_rng(0)
        for size in rng.integers(0, 300, 200):
            stranger.send_multipart([rng.bytes(56), rng.bytes(size)])
        assert stranger.poll(20_000)
    np.testing.assert_array_equal(client.pull("w").wait(), before)


def test_an_open_address_needs_keys():
    for address in ("tcp://0.0.0.0:*", "tcp://*:*"):
        with pytest.raises(ServerError, match=r"no server has started: .* is reachable by others[\s\S]*make keys"):
            ServerProcess(options("asp", 1, address=address))
    with pytest.raises(ArgumentError, match="no keys"):
        connect(["tcp://192.0.2.1:5000"])


def test_only_the_keys_of_the_job_get_in(tmp_path):
    (tmp_path / "other").mkdir()
    server_keys, (worker, _) = make_keys(tmp_path, 2)
    _, (foreign,) = make_keys(tmp_path / "other", 1)
    known, unknown = read_keys(worker), read_keys(foreign)
    pair = {name: unknown[name] for name in ("public", "secret")}
    cases = {"unknown key": {**pair, "server": known["server"]}, "wrong server": {**known, "server": unknown["server"]}}
    with ServerProcess(options("asp", 1, key_file=str(server_keys))) as server:
        with connect([server.address], key_file=str(worker)) as client:
            client.create({"w": Parameter((2,))}, {"w": np.ones(2)})
            assert client.pull("w").wait().tolist() == [1, 1]
        with pytest.raises(RefusedError, match="asks for other credentials|breaks off the handshake"):
            connect([server.address])  # no key at all
        with pytest.raises(RefusedError, match="the key of worker 0 for worker 1"):
            connect([server.address], 1, key_file=str(worker))
        for name, keys in cases.items():
            path = tmp_path / f"{name}.json"
            path.touch(mode=0o600)
            path.write_text(json.dumps(keys))
            with pytest.raises(RefusedError, match="breaks off" if name == "wrong server" else "knows neither"):
                connect([server.address], key_file=str(path))


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_keys_that_others_can_read_are_refused(tmp_path):
    path, _ = make_keys(tmp_path, 1)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(ArgumentError, match="open to others"):
        read_keys(path)


def test_the_token_is_in_no_command_line(servers):
    with ServerProcess(options("asp", 1)) as server:
        assert not any(TOKEN in part for part in server.process.args)

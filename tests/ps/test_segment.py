"""Shared memory: large values do not use the socket, late copies read and write nothing, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hetu.ps import ASP, Parameter, ServerProcess
from hetu.ps.store.messages import Kind, Message, ProtocolError, decode, encode
from hetu.ps.store.segment import ROOM_BYTES, SEGMENT_BYTES, SLOTS, Segment
from hetu.ps.wire.session import Sessions

from .network import DEADLINE, TOKEN, LossyRelay, connect, options, run_workers
from .simulation import contents, greeting, new_store

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd")
KEY, COLS = 9, 20_000
ADD = {"rule": "add", "reduce": "sum"}


@pytest.fixture
def memory():
    segment = Segment.create(number=100)
    yield segment
    segment.close()


def greeted(memory: Segment) -> Sessions:
    """A server with worker 0 at peer `p0`, whose memory it has opened, and a table of one row of zeros."""
    sessions = Sessions(new_store(1, ASP()), TOKEN)
    hello = greeting(sessions, b"p0", TOKEN, segment=memory.offer)
    [(_, reply)] = sessions.receive(b"p0", encode(hello), 0.0)
    assert decode(reply).meta["segment"] is True
    meta = {"name": "t", "start": 0, "rows": 1, "cols": COLS, **ADD}
    sessions.receive(b"p0", encode(Message(Kind.CREATE, key=KEY, seq=3, epoch=1, meta=meta)), 0.0)
    return sessions


def push(memory: Segment, seq: int, value: float, slot: int = 1, kind: Kind = Kind.PUSH_PULL) -> list[bytes]:
    values = np.full((1, COLS), value, "f")
    memory.fill(slot, seq, values)
    return encode(Message(kind, key=KEY, seq=seq, epoch=1, values=values, slot=slot))


def answer(memory: Segment, sessions: Sessions, frames: list[bytes]) -> Message:
    [(_, reply)] = sessions.receive(b"p0", frames, 0.0)
    return decode(reply, segment=memory)


def test_values_and_answers_lie_in_shared_memory(memory):
    sessions = greeted(memory)
    frames = push(memory, 4, 2.0)
    assert [len(frame) for frame in frames] == [64]
    [(_, reply)] = sessions.receive(b"p0", frames, 0.0)
    assert [len(frame) for frame in reply] == [64]
    got = decode(reply, segment=memory)
    assert got.slot == 1 and (got.values == 2.0).all() and not got.values.flags.writeable
    assert np.may_share_memory(got.values, memory.incoming[1])


def test_a_copy_of_a_request_is_answered_over_the_socket_and_leaves_the_first_answer_alone(memory):
    sessions = greeted(memory)
    frames = push(memory, 4, 2.0)
    first = answer(memory, sessions, frames)
    assert (answer(memory, sessions, push(memory, 5, 1.0, slot=0)).values == 3.0).all()
    again = answer(memory, sessions, frames)
    assert again.slot == -1 and (again.values == 3.0).all() and (first.values == 2.0).all()


def test_a_late_copy_never_reads_what_a_newer_request_put_there(memory):
    sessions = greeted(memory)
    old = push(memory, 4, 2.0)  # never arrives in time
    answer(memory, sessions, push(memory, 5, 1.0))
    before = contents(sessions.store)
    refused = answer(memory, sessions, old)
    assert refused.kind is Kind.ERROR and refused.meta["code"] == "protocol"
    assert contents(sessions.store) == before and not sessions.store.members[0].knows(4)


@pytest.mark.parametrize("slot", [SLOTS, 1 << 40])
def test_a_slot_that_is_not_there_is_refused(memory, slot):
    sessions = greeted(memory)
    frames = encode(Message(Kind.PUSH, key=KEY, seq=4, epoch=1, values=np.ones((1, COLS), "f"), slot=slot))
    assert answer(memory, sessions, frames).meta["code"] == "protocol"


def test_more_values_than_a_slot_holds_are_refused(memory):
    sessions = greeted(memory)
    memory.fill(1, 4, None)
    values = np.zeros((1, ROOM_BYTES // 4 + 1), "f")
    frames = encode(Message(Kind.PUSH, key=KEY, seq=4, epoch=1, values=values, slot=1))
    assert answer(memory, sessions, frames).meta["code"] == "protocol"


def test_a_stranger_is_told_to_say_hello_and_slots_without_memory_are_no_message(memory):
    sessions = greeted(memory)
    frames = push(memory, 4, 2.0)
    [(_, reply)] = sessions.receive(b"stranger", frames, 0.0)
    assert (decode(reply).meta["code"], decode(reply).seq) == ("hello", 4)
    with pytest.raises(ProtocolError, match="not shared"):
        decode(frames)


def test_a_worker_that_was_taken_out_shares_nothing_any_more(memory):
    sessions = greeted(memory)
    sessions.tick(1e6)
    assert answer(memory, sessions, push(memory, 4, 2.0)).meta["code"] == "hello" and not sessions.segments
    hello = greeting(sessions, b"p0", TOKEN, segment=memory.offer)
    assert answer(memory, sessions, encode(hello)).meta["segment"] is False
    inline = encode(Message(Kind.PUSH, key=KEY, seq=4, epoch=1, values=np.zeros((1, COLS), "f")))
    assert answer(memory, sessions, inline).meta["code"] == "evicted"


def test_pushes_that_are_held_back_keep_their_values(memory):
    frames = push(memory, 4, 2.0, kind=Kind.PUSH)
    server = Segment.open(memory.offer, number=100)
    kept = decode(frames, segment=server).kept()
    push(memory, 5, 7.0)
    assert kept.slot == -1 and (kept.values == 2.0).all()


def test_only_sealed_memory_of_this_job_is_opened(memory, tmp_path):
    path = tmp_path / "file"
    with path.open("wb+") as file:
        file.truncate(SEGMENT_BYTES)
        loose = os.memfd_create("loose")
        os.ftruncate(loose, SEGMENT_BYTES)
        me = os.getpid()
        for offer in (
            None,
            "x",
            [],
            [me],
            [me, 1 << 40],
            [me, True],
            [me, -1],
            [me, file.fileno()],
            [me, loose],
            [1 << 40, 3],
        ):
            assert Segment.open(offer, number=0) is None
        os.close(loose)
    assert Segment.open(memory.offer, number=99) is None
    with pytest.raises(PermissionError):
        os.ftruncate(memory.file, 0)


# -- over real servers ------------------------------------------------------------------------------------------


def carried(shared: bool) -> int:
    """Bytes that go over the sockets for a push_pull of 1 MB."""
    with (
        ServerProcess(options("asp", 1)) as server,
        LossyRelay(server.address, loss=0) as relay,
        connect([relay.address], shared=shared) as client,
    ):
        client.create({"w": Parameter((1 << 18,), **ADD)}, {"w": np.zeros(1 << 18, "f")})
        before = relay.carried
        out = client.push_pull("w", np.ones(1 << 18, "f")).wait()
        assert (out == 1).all()
        return relay.carried - before


def test_only_headers_use_the_socket_on_one_host():
    assert carried(shared=True) == 2 * 64
    assert carried(shared=False) == 2 * (56 + (1 << 20))


def add_up(client, rank: int) -> np.ndarray:
    """Pushes that leave and come in pieces, several at once, each of another number."""
    client.create({"w": Parameter((400_000,), **ADD)}, {"w": np.zeros(400_000, "f")})
    for i in range(8):
        client.push("w", np.full(400_000, 4.0 ** (i % 4) + rank, "f")).wait()
    client.clock().wait()
    return client.pull("w").wait()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shared", [True, False])
def test_under_loss_and_repetition_every_push_counts_once(shared):
    with ServerProcess(options("bsp", 2)) as server, LossyRelay(server.address, loss=0.2, seed=1) as relay:
        results = run_workers(2, add_up, [relay.address], retry=0.02, shared=shared)
    assert relay.dropped > 5 and relay.repeated > 2
    total = 2 * 2 * (1 + 4 + 16 + 64) + 8
    assert all((result == total).all() for result in results)


WORKER = """
import sys, numpy as np
from hetu.ps import Client, Parameter
client = Client([sys.argv[1]], 0, sys.argv[2])
client.create({"w": Parameter((1 << 18,))}, {"w": np.zeros(1 << 18, "f")})
print(len(client.transport.links[0].free), flush=True)
sys.stdin.read()
"""


def mapped(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:hetu")


def test_a_killed_worker_leaves_nothing_behind():
    files = set(os.listdir("/dev/shm"))
    with ServerProcess(options("asp", 2, lease=1.0)) as server:
        command = [sys.executable, "-c", WORKER, server.address, TOKEN]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
            assert int(worker.stdout.readline()) == SLOTS and mapped(server.process.pid) == 1
            assert not [name for name in os.listdir("/dev/shm") if "hetu" in name]
            worker.send_signal(signal.SIGKILL)
        with connect([server.address], 1, shared=False) as other:
            end = time.monotonic() + DEADLINE
            while mapped(server.process.pid) and time.monotonic() < end:
                other.ping()
        assert mapped(server.process.pid) == 0
    assert not [name for name in set(os.listdir("/dev/shm")) - files if "hetu" in name]

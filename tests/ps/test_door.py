"""No message ends a server, and a refused one changes nothing: each field of each kind at and beyond its limits."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from hetu.ps import ASP, BSP, Consistency, Options, ServerProcess
from hetu.ps.store.member import UNANSWERED
from hetu.ps.store.messages import ALLOWED, Kind, Message, decode, encode
from hetu.ps.store.segment import Segment
from hetu.ps.store.server_table import ServerTable
from hetu.ps.wire.handshake import Introduction, dealer
from hetu.ps.wire.session import Sessions
from hetu.ps.wire.snapshot import dump

from .grammar import SECRET, TOKEN, Draft, Grammar
from .simulation import DENSE, greeting, grow, new_store

LIMIT, PARTS = 1 << 20, 16


class Target:
    """A server with two greeted workers, one of which sends all that is tried; made anew once it has changed."""

    def __init__(self) -> None:
        self.segment, self.number, self.refused = Segment.create(100), 0, 0
        self.renew()

    def renew(self) -> None:
        mode: Consistency = (BSP, ASP)[self.number % 2]()
        self.number += 1
        store = new_store(2, mode, "momentum", ("", "int8", "float16")[self.number % 3], memory_limit=LIMIT)
        grow(store)
        store.moments.keep = lambda clock: None
        self.sessions = Sessions(store, TOKEN)
        self.sessions.secret = SECRET
        for worker in (0, 1):
            facts = {"segment": self.segment.offer} if self.segment is not None and worker == 0 else {}
            peer = b"p%d" % worker
            self.sessions.receive(peer, encode(greeting(self.sessions, peer, TOKEN, worker, **facts)), 0.0)
        self.before = self.state()

    def state(self) -> list[Any]:
        """All but which numbers are used up: that of a refused request is, so that it is refused again."""
        store = self.sessions.store
        tensors, plain = dump(store)
        members = [member["incarnation"] for member in plain.pop("members")]
        pending = [[(push.worker, push.seq) for push in table.pending] for table in store.tables.values()]
        moments, sessions = store.moments, self.sessions
        partners = [
            (key, {**c.waiting}, {*c.workers}, [*c.recent], [*c.requests], [*c.told])
            for key, c in store.partial.of.items()
        ]
        return [
            {name: array.copy().tobytes() for name, array in tensors.items()}, repr(plain), members, pending,
            store.bytes_used, store.failure, [*store.parked], {**store.clocks.fed}, {*store.returning},
            partners, {*store.partial.present}, [(held.message.worker, held.message.seq) for held in store.maps],
            {*moments.coming}, [*moments.awaited], {**sessions.worker_of}, {**sessions.peer_of}, {**sessions.segments},
            [*store.givers.drawing], {**store.givers.workers},
        ]  # fmt: skip

    def send(self, draft: Draft, peer: bytes = b"p0") -> None:
        """Send it: an answer that is a refusal leaves the server as it was, and nothing is a defect."""
        store = self.sessions.store
        draft.seq = store.members[0].done + 1
        told = []
        for _, frames in self.sessions.receive(peer, draft.frames(self.segment), 0.0):
            told.append(decode(frames, segment=self.segment))
        assert "defect" not in [reply.facts.get("code") for reply in told], (draft, told[0].meta)
        drawing = [*store.givers.drawing]
        for _ in range(3):
            store.givers.draw()
        assert not drawing or not any(store.tables[key].wanting for key in drawing), draft
        assert store.bytes_used <= LIMIT
        after = self.state()
        if told and all(reply.kind is Kind.ERROR for reply in told):
            self.refused += 1
            assert after == self.before, draft
        elif after != self.before:
            self.renew()


@pytest.fixture(scope="module")
def grammar(meaning):
    return Grammar()


def test_a_message_of_each_kind_is_taken_before_it_is_changed(grammar):
    """A new field without a sample has all messages of its kind refused, and the tests below prove nothing of it."""
    taken = set()
    for draft in (grammar.single(number) for number, (_, change) in enumerate(grammar.singles) if change is None):
        target = Target()
        target.send(draft)
        taken |= set() if target.refused else {draft.kind}
    assert {*ALLOWED} - taken == {Kind.OK, Kind.ERROR, Kind.SNAPSHOT}  # not for a server; of a clock that is not over


def test_no_field_at_its_limits_ends_a_server_or_changes_one_that_refuses(grammar):
    """A sample of all single changes, another part of them for each `seed`."""
    target, seed = Target(), 0
    for number in range(seed, len(grammar.singles), len(grammar.singles) // 3000):
        target.send(grammar.single(number))
    assert target.refused > 2000 and target.number > 50


def test_strangers_are_refused_whatever_they_send(grammar):
    target, rng = Target(), random.Random(1)
    for _ in range(300):
        target.send(grammar.drawn(rng), b"stranger")


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_a_million_messages_of_the_grammar(grammar, part):
    """All single changes, and drawn ones with up to three."""
    target, rng = Target(), random.Random(part)
    singles = range(part, len(grammar.singles), PARTS)
    for number in singles:
        target.send(grammar.single(number))
    for _ in range(1_000_000 // PARTS - len(singles)):
        target.send(grammar.drawn(rng))
    assert target.number > 10_000 // PARTS


def test_a_real_server_goes_on_after_all_that_strangers_and_workers_send(grammar, capfd):
    """Over a socket: none of it ends the process, makes it larger by more than a frame, or is a defect."""
    rng = random.Random(3)
    with ServerProcess(Options(1, TOKEN, "asp", memory_limit=LIMIT)) as server, zmq.Context() as context:
        with dealer(zmq, context, server.address, TOKEN, "") as socket:
            before, introduction = _peak(server), Introduction(server.address, TOKEN)
            socket.rcvtimeo = 30_000
            socket.send_multipart(encode(Message(Kind.HELLO, meta={**introduction.facts, "incarnation": 0})))
            assert introduction.hears(decode(socket.recv_multipart()))
            for life in range(1, 41):  # the first is a stranger's; among what is sent may be a LEAVE
                for seq in range(1, 11):
                    draft = grammar.drawn(rng)
                    draft.seq = seq
                    socket.send_multipart(draft.frames(None))
                introduction.said = 0, life
                socket.send_multipart(encode(Message(Kind.HELLO, meta=introduction.facts)))
            introduction.said = 0, 0
            socket.send_multipart(encode(Message(Kind.STATUS, seq=99, meta=introduction.facts)))
            answer = decode(socket.recv_multipart())
            while answer.kind is Kind.ERROR or answer.seq != 99:
                assert answer.facts.get("code") != "defect"
                answer = decode(socket.recv_multipart())
        assert _peak(server) < before + (64 << 10)
    assert server.process.returncode == 0 and "Traceback" not in capfd.readouterr().err


def test_a_defect_is_answered_as_one_and_shown_once(monkeypatch, capfd):
    """A mistake of ours in one answer; and one in the end of a clock, after which nobody may go on."""
    store = new_store(2, BSP())

    def fails(*_: object) -> None:
        raise ZeroDivisionError("ours")

    def told(kind: Kind, worker: int, seq: int, **fields: Any) -> list[str | None]:
        message = Message(kind, worker=worker, seq=seq, epoch=1, **fields)
        return [reply.facts.get("code") for reply in store.handle(message, 0.0)]

    monkeypatch.setattr(ServerTable, "read", fails)
    monkeypatch.setattr(ServerTable, "apply", fails)
    assert [told(Kind.PULL, 0, seq, key=DENSE) for seq in (3, 4)] == [["defect"]] * 2
    assert told(Kind.PING, 0, 5) == [None] and capfd.readouterr().err.count("ZeroDivisionError: ours") == 1
    assert told(Kind.PUSH, 0, 6, key=DENSE, values=np.ones((1, 8), "<f4")) == [None]
    assert told(Kind.CLOCK, 0, 7) == [] and told(Kind.CLOCK, 1, 1) == ["defect", "defect"]
    assert told(Kind.PING, 0, 8) == ["defect"]


def test_a_worker_has_only_so_many_requests_waiting():
    store = new_store(2, BSP())
    pulls = [Message(Kind.PULL, key=DENSE, seq=seq, step=1, epoch=1) for seq in range(3, 3 + 2 * UNANSWERED)]
    told = [reply.facts["code"] for pull in pulls for reply in store.handle(pull, 0.0)]
    assert told == ["credit"] * UNANSWERED and len(store.parked) == UNANSWERED


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory to share")
def test_an_answer_that_waited_finds_its_worker_without_the_memory_that_it_had():
    target = Target()
    target.segment.fill(1, 3, None)
    end = {"step": 0, "epoch": 1}
    for worker, message in (
        (0, Message(Kind.PULL, key=DENSE, seq=3, step=1, slot=1, epoch=1)),
        (0, greeting(target.sessions, b"p0", TOKEN)),
        (0, Message(Kind.CLOCK, seq=4, **end)),
        (1, Message(Kind.CLOCK, worker=1, seq=1, **end)),
    ):
        told = target.sessions.receive(b"p%d" % worker, encode(message), 0.0)
    answers = [decode(frames) for peer, frames in told if peer == b"p0"]
    assert [(answer.seq, answer.kind) for answer in answers] == [(3, Kind.OK), (4, Kind.OK)]
    assert answers[0].values.shape == (1, 8)


def _peak(server: ServerProcess) -> int:
    """The most memory that a server has had, in KB; 0 where the system does not say."""
    file = Path(f"/proc/{server.process.pid}/status")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)

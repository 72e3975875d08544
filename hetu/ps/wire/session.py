"""Who may speak to a server, and for whom: between raw frames from a peer and the store, still without sockets.

A peer is one connection. It proves that it knows the job's token, by an answer to what this connection alone is asked,
and names its worker; from then on it speaks for that worker only, until a newer life of the worker arrives. A peer may
also ask for the status without being a worker, or, unasked, report that a life of a worker lasts. A message that does
not decode, or comes from a stranger, gets at most an error and stops here. CURVE encrypts and enforces the allow-list
of keys before a frame gets here.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ..store.door import check_facts, understood
from ..store.messages import Buffer, Kind, Message, ProtocolError, RefusedError, decode, encode
from ..store.segment import Segment
from ..store.store import ParameterStore
from .handshake import is_proof, proof

Peer = bytes
Envelope = tuple[Peer, list[Buffer]]


class Sessions:
    """Peers of one server, each bound to a worker by its HELLO.

    >>> from hetu.ps import ASP
    >>> sessions = Sessions(ParameterStore(1, ASP()), token="secret")
    >>> [(_, frames)] = sessions.receive(b"peer", [b"garbage"], now=0.0)
    >>> decode(frames).meta["code"]
    'protocol'
    """

    def __init__(self, store: ParameterStore, token: str) -> None:
        self.store, self.token, self.secret = store, token, secrets.token_hex(16)
        self.worker_of: dict[Peer, int] = {}
        self.peer_of: dict[int, Peer] = {}
        self.owner: Callable[[Any], int] | None = None  # the worker whose key a frame came by
        self.connection: Callable[[Any], int] | None = None  # and a number of its connection, given to no other
        self.segments: dict[int, Segment] = {}  # memory shared with workers on this host

    def receive(self, peer: Peer, frames: Sequence[Buffer], now: float) -> list[Envelope]:
        """Handle frames from `peer`; returns what to send, and to whom."""
        message = None
        try:
            message = decode(frames, segment=self.segments.get(self.worker_of.get(peer, -1)))
            if message.kind is Kind.HELLO or (message.kind is Kind.PING and message.meta is not None):
                self._check_key(message, frames[0])
            if message.kind is Kind.HELLO:
                return self._hello(peer, message, self._question(peer, frames[0]), now)
            if message.kind is Kind.STATUS and message.meta is not None:
                return self._status(peer, message, self._question(peer, frames[0]))
            return self._admit(peer, message, now)
        except Exception as error:
            known = getattr(error, "header", None) or message or Message(Kind.ERROR)
            return [(peer, encode(known.refusal(understood(error))))]

    def sign(self, peer: Peer, frames: Sequence[Buffer], now: float) -> list[Envelope] | None:
        """What to send to who gives or asks for a sign of life, while no table may change; None of all other messages.

        A greeting is answered as that of who has to wait.
        """
        with contextlib.suppress(ProtocolError):
            message = decode(frames)
            if message.kind is Kind.HELLO:
                return self._ask(peer, message, self._question(peer, frames[0]))
            if message.kind is Kind.PING and message.meta is not None:
                return self.receive(peer, frames, now)
        return None

    def _admit(self, peer: Peer, message: Message, now: float) -> list[Envelope]:
        """Hand a message to the store if its sender may send it."""
        if message.kind is Kind.PING and message.meta is not None:
            check_facts(message)
            self._check(message, "alive")
            self.store.renew(message.worker, message.meta["incarnation"], now)
            return []
        if self.worker_of.get(peer) != message.worker:
            raise RefusedError("hello", f"this connection does not speak for worker {message.worker}", fix="HELLO")
        return self.envelopes(self.store.handle(message, now))

    def tick(self, now: float) -> list[Envelope]:
        """End leases and deadlines that have passed; returns what to send."""
        before = {*self.store.clocks.of}
        envelopes = self.envelopes(self.store.tick(now))
        for worker in before - self.store.clocks.of.keys():
            why = self.store.members[worker].lost
            print(f"hetu server: worker {worker} {why}, and the others go on without it", file=sys.stderr)
        for worker in self.segments.keys() - self.store.clocks.of:
            del self.segments[worker]
        return envelopes

    def forgive(self, now: float) -> None:
        """Begin all leases anew, because a server that was frozen itself cannot tell who was silent."""
        for member in self.store.members:
            member.last_seen = max(member.last_seen, now)

    def _check_key(self, message: Message, frame: Buffer) -> None:
        """Refuse what names another worker than that whose key it came by, if there are keys."""
        owner = message.worker if self.owner is None else self.owner(frame)
        if owner != message.worker:
            raise RefusedError("key", f"the key of worker {owner} for worker {message.worker}", fix="use its own key")

    def _status(self, peer: Peer, message: Message, asked: str) -> list[Envelope]:
        """Tell the status to who is no worker."""
        check_facts(message)
        if not self._proves(message, asked):
            return self._ask(peer, message, asked)
        return [(peer, encode(message.reply(meta=self.store.status())))]

    def _hello(self, peer: Peer, message: Message, asked: str, now: float) -> list[Envelope]:
        """Greet a worker."""
        check_facts(message)
        if not self._proves(message, asked):
            return self._ask(peer, message, asked)
        if self.worker_of.get(peer, message.worker) != message.worker:
            raise RefusedError("hello", "this connection speaks for another worker")
        replies = self.store.handle(message, now)
        if not replies:
            return self._ask(peer, message, asked)  # a sign of life to who has to wait
        if replies[0].kind is Kind.ERROR:
            return [(peer, encode(replies[0]))]
        self.worker_of.pop(self.peer_of.get(message.worker, b""), None)
        self.worker_of[peer], self.peer_of[message.worker] = message.worker, peer
        replies[0].meta = {**replies[0].facts, "segment": self._open_segment(message)}
        return self.envelopes(replies)

    def _open_segment(self, hello: Message) -> bool:
        self.segments.pop(hello.worker, None)
        if hello.worker not in self.store.clocks.of:
            return False
        segment = Segment.open(hello.facts.get("segment"), hello.facts["incarnation"])
        if segment is not None:
            self.segments[hello.worker] = segment
        return segment is not None

    def _question(self, peer: Peer, frame: Buffer) -> str:
        """What this connection is asked, and no other before or after; to keep it would take memory for strangers.

        A peer may choose its name, so the connection that a frame came by counts, too.
        """
        return proof(self.secret, peer.hex(), 0 if self.connection is None else self.connection(frame))

    def _ask(self, peer: Peer, message: Message, asked: str) -> list[Envelope]:
        """Ask who has said this for a proof, and give one."""
        answer = proof(self.token, "server", message.facts.get("question", ""), asked)
        return [(peer, encode(message.reply(Kind.HELLO, meta={"question": asked, "proof": answer})))]

    def _proves(self, message: Message, asked: str) -> bool:
        """Whether a message answers what its peer was asked; RefusedError if it does so without the token."""
        if message.facts.get("asked") != asked:
            return False
        self._check(message, asked)
        return True

    def _check(self, message: Message, asked: str) -> None:
        said = message.worker, message.facts.get("incarnation", 0)
        if not is_proof(message.facts.get("proof"), self.token, asked, *said):
            raise RefusedError("token", "the token is not that of this job", fix="pass the token that heturun made")

    def envelopes(self, replies: list[Message]) -> list[Envelope]:
        for reply in replies:
            segment = self.segments.get(reply.worker)
            if reply.slot >= 0 and segment is not None:
                segment.fill(reply.slot, reply.seq, None)  # the values are there already
            elif reply.slot >= 0:  # its worker has greeted again without memory while it waited
                reply.slot = -1
        made = [(self.peer_of[reply.worker], _encoded(reply)) for reply in replies if reply.worker in self.peer_of]
        self.store.traffic[1] -= sum(reply.saved for reply in replies)
        return made


def _encoded(reply: Message) -> list[Buffer]:
    """An answer, or that it is too large for one."""
    try:
        return encode(reply)
    except RefusedError as error:
        return encode(reply.refusal(error))

"""Requests and replies over unreliable connections: numbering, credit, resending with backoff, deadlines.

A request is sent again, under its old number, as long as a caller waits for its answer. The server makes sure that it
takes effect once, and every wait has a deadline. At most `CREDIT` requests fly to a server at a time: this bounds the
server's memory and is faster than more (ZeroMQ guide, chapter 4, "lazy pirate", and chapter 7, credit-based flow
control). On one host the values of large requests and answers lie in shared memory (`segment.py`). A socket belongs to
the thread that made it; the thread that waits for an answer receives it.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numpy as np

from ...core.errors import ArgumentError, HetuError
from ..store.messages import FRAME_LIMIT, Buffer, Kind, Message, ProtocolError, RefusedError, decode, encode, given
from ..store.partition import Index
from ..store.segment import ROOM_BYTES, SLOTS, Segment
from .handshake import Handshake, Introduction, is_loopback

CREDIT = SLOTS  # requests in flight to one server
SHARED_BYTES = 16 << 10  # values from this size on go through shared memory where there is some
SLOWEST_RETRY = 4.0  # seconds; the time between two sendings doubles up to this
LONGEST_POLL = 0.05
COPIED = 256 << 10  # up to so many bytes a copy costs less than the notice, from another thread, that a buffer is free


def send_frames(socket: Any, frames: Sequence[Buffer], flags: int, more: int, *, copy: bool = False) -> None:
    """Do what `socket.send_multipart` does in half the time; long arrays are sent without a copy unless `copy`.

    `flags` and `more` are plain numbers, because adding members of an enumeration takes long.
    """
    for frame in frames[:-1]:
        socket.send(frame, flags | more)
    last = frames[-1]
    socket.send(last, flags, copy=copy or isinstance(last, bytes) or last.nbytes <= COPIED)


def receive_frames(socket: Any) -> list[Buffer]:
    """The frames of the next message, without a copy."""
    frame = socket.recv(copy=False)
    frames = [frame.buffer]
    while frame.more:
        frame = socket.recv(copy=False)
        frames.append(frame.buffer)
    return frames


class ServerTimeoutError(HetuError, TimeoutError):
    """A server did not answer before the deadline."""


class ServerRestartedError(HetuError, ConnectionError):
    """A server came back without its tables."""


@dataclass(eq=False)
class ServerLink:
    """The connection to one server. `flying` holds the unanswered requests by their number; HELLO is number 0.

    `clock` is the last clock that this server has allowed, `at` the first clock whose end it has not been told. `due`:
    it asks for a snapshot of the next clock's end. `heard`: when it last said something. `free` holds the slots of
    `segment` that no request uses; it is empty unless the server has opened the segment. `sent` and `received` count
    the bytes of all frames, without what lies in the segment.
    """

    address: str
    socket: Any
    introduction: Introduction
    handshake: Handshake | None = None  # until it has been greeted
    epoch: int = 0
    clock: int = 0
    at: int = 0
    due: bool = False
    seq: int = 0
    lease: float = 0.0
    heard: float = 0.0
    queue: deque[Request] = field(default_factory=deque)
    flying: dict[int, Request] = field(default_factory=dict)
    segment: Segment | None = None
    free: list[int] = field(default_factory=list)
    sent: int = 0
    received: int = 0


@dataclass(eq=False, slots=True)
class Request:
    """A message on its way, and the index `part` of its values in the caller's arrays.

    The values of its answer are written into `out` as soon as they arrive.
    """

    message: Message
    link: ServerLink
    retry: float
    part: Index = ()
    start: int = 0
    out: np.ndarray | None = None
    decode: Callable[[np.ndarray], np.ndarray] | None = None  # makes numbers of the answer's bytes
    due: float = 0.0  # when to send it again
    frames: list[Buffer] | None = None
    reply: Message | None = None
    error: HetuError | None = None
    told: bool = False  # its error has been raised


class Transport:
    """The links of one worker to all servers, over sockets of the module `zmq`."""

    def __init__(
        self,
        zmq: ModuleType,
        links: Sequence[ServerLink],
        worker: int,
        life: int,
        *,
        timeout: float,
        silence: float,
        retry: float,
        shared: bool,
    ) -> None:
        self.zmq, self.links, self.worker, self.process = zmq, list(links), worker, os.getpid()
        self.timeout, self.silence, self.retry = timeout, silence, retry
        self.flags, self.more = int(zmq.NOBLOCK), int(zmq.SNDMORE)
        self.due = 0.0  # when the next request has to be sent again
        self.failures = 0
        self.polled = {link.socket: link for link in self.links}
        for link in self.links:
            link.socket.rcvtimeo = max(1, int(1000 * min(LONGEST_POLL, retry)))
            if shared and is_loopback(link.address):
                link.segment = Segment.create(life)
        try:
            self.wait([self._greet(link) for link in self.links])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give up the shared memory; whoever made the sockets closes them."""
        for link in self.links:
            if link.segment is not None:
                link.segment.close()
                link.segment = None

    def submit(
        self,
        server: int,
        kind: Kind,
        *,
        part: Index = (),
        start: int = 0,
        out: np.ndarray | None = None,
        decode: Callable[[np.ndarray], np.ndarray] | None = None,
        **fields: Any,
    ) -> Request:
        """Number a request and send it as soon as there is credit; RefusedError if it is too large for a message."""
        self._refuse_fork()
        link = self.links[server]
        if link.socket.closed:
            raise RefusedError(
                "closed", f"{kind.name} by a client that is closed", fix="ask before `close`, or inside `with`"
            )
        message = Message(kind, worker=self.worker, seq=link.seq + 1, epoch=link.epoch, **fields)
        if message.meta is not None or message.nbytes > FRAME_LIMIT // 2:
            encode(message)  # no number is used up by what never leaves
        link.seq += 1
        if kind is Kind.CLOCK:
            link.at = message.step + 1
        request = Request(message, link, self.retry, part, start, out, decode)
        link.queue.append(request)
        self._fill(link)
        return request

    def _refuse_fork(self) -> None:
        """ArgumentError in a process forked since: the threads behind a socket are not there, so nothing is sent."""
        if os.getpid() != self.process:
            raise ArgumentError(
                f"worker {self.worker} has its connection in process {self.process}, which has forked this one",
                fix="use it there, and pass on what is needed; or make a Client here, of another worker",
            )

    def wait(self, requests: Sequence[Request]) -> list[Message]:
        """The replies, in order; the first error as soon as there is one."""
        self._refuse_fork()
        begin = None  # deadlines count from the beginning of the wait, not of the request
        for request in requests:
            while request.reply is None:
                if self.failures and (error := next((r.error for r in requests if r.error is not None), None)):
                    raise error
                now = time.monotonic()
                begin = begin or now
                if now >= begin + self.timeout:
                    raise ServerTimeoutError(
                        f"{request.message.kind.name} of worker {self.worker}: no answer from {request.link.address} "
                        f"in {self.timeout:g} s",
                        fix="are all workers at work? Or wait longer by timeout=",
                    )
                self._listen(request, now, max(begin, request.link.heard))
                self._pump(now)
        return [given(request.reply) for request in requests]

    def _listen(self, request: Request, now: float, since: float) -> None:
        """Ask a server that has become silent to greet again; ServerTimeoutError if it is gone, RefusedError if it does
        not let this worker in."""
        link, found = request.link, ""
        if link.handshake is not None:
            link.handshake.check()
            found = f": {link.handshake.found}"
        if now < since + self.silence / 4:
            return
        if now >= since + self.silence:
            raise ServerTimeoutError(
                f"{request.message.kind.name} of worker {self.worker}: no sign of life from {link.address} "
                f"in {self.silence:g} s{found}",
                fix="has the server ended? If it only takes long to come back, heturun --silence S waits for S seconds",
            )
        if 0 not in link.flying:
            self._greet(link)

    # -- moving ----------------------------------------------------------------------------------------------

    def _pump(self, now: float) -> None:
        """Send again what is due, and receive what arrives within `LONGEST_POLL`."""
        if now >= self.due:
            self._send_again(now)
        if len(self.links) == 1:
            self._receive_from(self.links[0])
            return
        pause = int(1000 * min(LONGEST_POLL, max(self.due - now, 0.001)))
        for socket, _ in self.zmq.zmq_poll([(socket, self.zmq.POLLIN) for socket in self.polled], pause):
            self._receive_from(self.polled[socket])

    def _send_again(self, now: float) -> None:
        self.due = float("inf")
        for link in self.links:
            for request in list(link.flying.values()):
                if now >= request.due:
                    self._transmit(request)
                self.due = min(self.due, request.due)

    def _fill(self, link: ServerLink) -> None:
        while link.queue and len(link.flying) < CREDIT:
            request = link.queue.popleft()
            link.flying[request.message.seq] = request
            if link.free and link.segment is not None:
                self._share(request, link.free, link.segment)
            self._transmit(request)

    def _share(self, request: Request, free: list[int], segment: Segment) -> None:
        """Give a request a slot if its values, or those of its answer, are many."""
        message = request.message
        sizes = [x.nbytes for x in (message.values, request.out) if x is not None]
        if sizes and SHARED_BYTES <= max(sizes) <= ROOM_BYTES:
            message.slot = free.pop()
            segment.fill(message.slot, message.seq, message.values)

    def _transmit(self, request: Request) -> None:
        wait = min(request.retry, SLOWEST_RETRY, self.silence / 4)
        request.due, request.retry = time.monotonic() + wait, 2 * wait
        self.due = min(self.due, request.due)
        if not request.message.seq:  # the clock of this worker may have changed since
            request.message, request.frames = self._hello(request.link), None
        if request.frames is None:
            request.frames = encode(request.message)
        try:
            send_frames(request.link.socket, request.frames, self.flags, self.more)
        except self.zmq.Again:
            return  # the connection is down and its queue is full: the next turn sends it
        request.link.sent += sum(memoryview(frame).nbytes for frame in request.frames)

    def _receive_from(self, link: ServerLink) -> None:
        """Receive one message, if any arrives within the time limit of the socket."""
        try:
            frames = receive_frames(link.socket)
        except self.zmq.Again:
            return
        link.received += sum(memoryview(frame).nbytes for frame in frames)
        self._receive(link, frames)
        self._fill(link)

    def _receive(self, link: ServerLink, frames: list[Buffer]) -> None:
        link.heard = time.monotonic()
        try:
            message = decode(frames, segment=link.segment)
        except ProtocolError as error:
            if link.handshake is not None:
                link.handshake.unread(error)
            return  # the answer was damaged on its way: the request is sent again
        code = str(message.facts.get("code", "error")) if message.kind is Kind.ERROR else ""
        if message.kind is Kind.HELLO:  # the server asks for a proof, or again because the greeting has to wait
            if link.introduction.hears(message) and 0 in link.flying:
                self._transmit(link.flying[0])
            return
        if code == "protocol" and link.epoch:
            return  # the request was damaged on its way
        if code in ("hello", "epoch") and message.seq:
            if 0 not in link.flying:
                self._greet(link)
            return
        if (request := link.flying.pop(message.seq, None)) is None:
            return  # a second answer to a request that was sent twice
        if code:
            request.error = RefusedError(code, str(message.facts.get("message")), fix=str(message.facts.get("fix")))
            self.failures += 1
            if not message.seq:
                self._give_up(link, request.error)
        else:
            if request.out is not None and request.message.slot < 0:
                self._fill(link)  # the next request travels while this answer is copied
            request.reply = _landed(message, request)
            if message.seq == 0:
                self._greeted(link, message)
            elif request.message.kind is Kind.CLOCK:
                link.clock = max(link.clock, request.message.step + 1)
                link.due = message.meta is not None
        if request.message.slot >= 0:
            link.free.append(request.message.slot)

    # -- greeting --------------------------------------------------------------------------------------------

    def _greet(self, link: ServerLink) -> Request:
        request = Request(self._hello(link), link, self.retry)
        link.flying[0] = request
        self._transmit(request)
        return request

    def _hello(self, link: ServerLink) -> Message:
        unanswered = [seq for seq in link.flying if seq] + [r.message.seq for r in link.queue]
        meta = {**link.introduction.facts, "first": min(unanswered, default=link.seq + 1), "at": link.at}
        if link.segment is not None:
            meta["segment"] = link.segment.offer
        return Message(Kind.HELLO, worker=self.worker, step=link.clock, meta=meta)

    def _greeted(self, link: ServerLink, message: Message) -> None:
        facts = message.facts
        restored = facts.get("restored")
        if link.epoch not in (0, message.epoch) and restored:
            warnings.warn(
                f"the server at {link.address} restarted from its snapshot at clock {restored['clock']}, "
                f"{restored['age']:g} s old; what it was sent since then is lost, and training goes on",
                RuntimeWarning,
                stacklevel=2,
            )
            for request in (*link.flying.values(), *link.queue):
                request.message = replace(request.message, epoch=message.epoch)
            link.epoch = message.epoch
        if link.epoch in (0, message.epoch):
            joined, link.clock = link.epoch == 0, int(facts["clock"])
            link.epoch, link.at = message.epoch, link.clock if joined else link.at
            link.lease, link.due = facts["lease"], "snapshot" in facts
            if link.handshake is not None:
                link.handshake.close()
                link.handshake = None
            self._shared(link, facts.get("segment") is True)
            self.due = 0.0
            for request in link.flying.values():
                request.due, request.frames = 0.0, None
            return
        error = ServerRestartedError(
            f"the server at {link.address} restarted and holds nothing of this job",
            fix="start the workers again from their last checkpoint",
        )
        self._give_up(link, error)

    def _give_up(self, link: ServerLink, error: HetuError) -> None:
        """Nothing that this server was asked will be answered: it does not know this life, or no longer."""
        for request in (*link.flying.values(), *link.queue):
            request.error = error
        link.free += [r.message.slot for r in link.flying.values() if r.message.slot >= 0]
        link.flying.clear()
        link.queue.clear()
        self.failures += 1

    def _shared(self, link: ServerLink, opened: bool) -> None:
        """Use the slots from now on, or stop using them if the server, in a new life, could not open them."""
        taken = [r.message for r in link.flying.values() if r.message.slot >= 0]
        if not opened:
            for message in taken:
                message.slot = -1
        link.free = [slot for slot in range(SLOTS) if slot not in {m.slot for m in taken}] if opened else []


def _landed(reply: Message, request: Request) -> Message:
    """A reply with lasting values: in `out`, or a copy of those that lie where the server will write again."""
    if reply.values is not None and request.decode is not None:
        reply.values = request.decode(reply.values)
    if reply.values is not None and request.out is not None:
        np.copyto(request.out, reply.values)
        reply.values = None
    return reply.kept()

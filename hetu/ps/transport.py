"""Requests and replies over unreliable connections: numbering, credit, resending with backoff, deadlines.

A request is sent again, under its old number, as long as somebody waits for its answer; the server takes care that
it takes effect once, and every wait has a deadline. Only `CREDIT` requests fly to a server at a time, which bounds
the server's memory and is faster than more (ZeroMQ guide, chapter 4, "lazy pirate", and chapter 7, credit-based flow
control). Ignored on purpose: what the requests mean (`client.py`), and threads: a socket belongs to its maker.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ..errors import HetuError
from .messages import Buffer, Kind, Message, RefusedError, decode, encode

CREDIT = 4  # requests in flight to one server
SLOWEST_RETRY = 4.0  # seconds; the time between two sendings doubles up to this
LONGEST_POLL = 1.0


class ServerTimeoutError(HetuError, TimeoutError):
    """A server that did not answer before the deadline."""


class ServerRestartedError(HetuError, ConnectionError):
    """A server that came back without what it held."""


@dataclass(eq=False)
class Link:
    """The connection to one server. `flying` are the unanswered requests by their number; HELLO is number 0."""

    address: str
    socket: Any
    epoch: int = 0
    clock: int = 0
    seq: int = 0
    slowest_retry: float = SLOWEST_RETRY
    queue: deque[Request] = field(default_factory=deque)
    flying: dict[int, Request] = field(default_factory=dict)


@dataclass(eq=False)
class Request:
    """A message on its way, and where its part lies in the caller's arrays."""

    message: Message
    link: Link
    retry: float
    place: slice | None = None
    start: int = 0
    due: float = 0.0  # when to send it again
    reply: Message | None = None
    error: HetuError | None = None


class Transport:
    """Links of one worker to all servers, over sockets of the module `zmq`."""

    def __init__(
        self, zmq: ModuleType, links: Sequence[Link], worker: int, token: str, timeout: float, retry: float
    ) -> None:
        self.zmq, self.links, self.worker, self.timeout, self.retry = zmq, list(links), worker, timeout, retry
        self.hello = {"token": token, "incarnation": secrets.randbits(62)}
        self.poller = zmq.Poller()
        for link in self.links:
            self.poller.register(link.socket, zmq.POLLIN)
        self.wait([self._greet(link) for link in self.links])

    def submit(self, server: int, kind: Kind, *, place: slice | None = None, start: int = 0, **fields: Any) -> Request:
        """Number a request and send it as soon as there is credit."""
        link = self.links[server]
        link.seq += 1
        message = Message(kind, worker=self.worker, seq=link.seq, epoch=link.epoch, **fields)
        request = Request(message, link, self.retry, place, start)
        link.queue.append(request)
        self._fill(link)
        return request

    def wait(self, requests: Sequence[Request]) -> list[Message]:
        """The replies, in order; the first error as soon as there is one."""
        deadline = time.monotonic() + self.timeout  # of the wait: what was computed meanwhile does not count
        while True:
            failed = next((r for r in requests if r.error is not None), None)
            if failed is not None:
                raise failed.error
            missing = next((r for r in requests if r.reply is None), None)
            if missing is None:
                return [r.reply for r in requests]
            if time.monotonic() >= deadline:
                raise ServerTimeoutError(
                    f"{missing.message.kind.name} of worker {self.worker}: no answer from {missing.link.address} "
                    f"in {self.timeout:g} s",
                    fix="is the server alive, are all workers at work, do the keys fit? A longer timeout= waits longer",
                )
            self._pump(deadline)

    # -- moving ----------------------------------------------------------------------------------------------

    def _pump(self, until: float) -> None:
        """Receive whatever is there, waiting for something until the next time to act."""
        until = min([until, *(r.due for link in self.links for r in link.flying.values())])
        pause = min(max(until - time.monotonic(), 0.0), LONGEST_POLL)
        ready = dict(self.poller.poll(pause * 1000))
        for link in self.links:
            if link.socket in ready:
                self._receive_all(link)
            self._fill(link)
        now = time.monotonic()
        for link in self.links:
            for request in [r for r in link.flying.values() if now >= r.due]:
                self._transmit(request)

    def _fill(self, link: Link) -> None:
        while link.queue and len(link.flying) < CREDIT:
            request = link.queue.popleft()
            link.flying[request.message.seq] = request
            self._transmit(request)

    def _transmit(self, request: Request) -> None:
        wait = min(request.retry, request.link.slowest_retry)
        request.due, request.retry = time.monotonic() + wait, 2 * wait
        with contextlib.suppress(self.zmq.Again):  # the connection is down and its queue full: the next turn will do
            request.link.socket.send_multipart(encode(request.message), self.zmq.NOBLOCK, copy=False)

    def _receive_all(self, link: Link) -> None:
        while True:
            try:
                frames = link.socket.recv_multipart(self.zmq.NOBLOCK, copy=False)
            except self.zmq.Again:
                return
            self._receive(link, [frame.buffer for frame in frames])

    def _receive(self, link: Link, frames: list[Buffer]) -> None:
        message = decode(frames)
        code = str(message.meta.get("code", "error")) if message.kind is Kind.ERROR else ""
        if code in ("hello", "epoch") and message.seq:
            if 0 not in link.flying:
                self._greet(link)
            return
        request = link.flying.pop(message.seq, None)
        if request is None:
            return  # the answer to something sent twice
        if code:
            request.error = RefusedError(code, str(message.meta.get("message")), fix=str(message.meta.get("fix")))
        else:
            request.reply = message
            if message.kind is Kind.OK and message.seq == 0:
                self._greeted(link, message)

    # -- greeting --------------------------------------------------------------------------------------------

    def _greet(self, link: Link) -> Request:
        message = Message(Kind.HELLO, worker=self.worker, meta=self.hello)
        request = Request(message, link, self.retry)
        link.flying[0] = request
        self._transmit(request)
        return request

    def _greeted(self, link: Link, message: Message) -> None:
        if link.epoch in (0, message.epoch):
            link.epoch, link.clock = message.epoch, int(message.meta["clock"])
            link.slowest_retry = min(SLOWEST_RETRY, message.meta["lease"] / 4)  # waiting in silence is no sign of life
            for request in link.flying.values():
                request.due = 0.0
            return
        for request in link.flying.values():
            request.error = ServerRestartedError(
                f"the server at {link.address} restarted and holds nothing of this job",
                fix="start the workers again from their last checkpoint",
            )
        link.flying.clear()

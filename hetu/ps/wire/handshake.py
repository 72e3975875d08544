"""How a worker proves that it may speak, and a server that it is the job's; and what is told to who may not.

ZeroMQ reads a message of many frames wholly before anyone sees it, whatever it grows to. So a stranger must not come so
far: on loopback a connection begins with a digest of token and port (ZeroMQ's PLAIN), elsewhere with keys (CURVE).
Whoever has neither is cut off, after `HANDSHAKE` if he says nothing. A socket's monitor tells a worker at once that it
is refused. Then each side answers what the other asks of this connection alone (`Introduction`). What a message takes
before it is seen is bounded by `watch.py`.

On loopback a token is enough, because a user who can read it can read the whole job. Any other address needs CURVE (D.
Bernstein, "CurveCP"; ZeroMQ RFC 26) with a key pair for the server and one for each worker, in files that only their
owner can read.

A worker then gives signs of life from a thread of its own, so that it may compute for longer than its lease. They name
its life and get no answer; a lost one is followed by another. A process that is frozen or killed falls silent. A
process whose training thread hangs does not: other workers give up after their `timeout`.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import secrets
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ...core.errors import ArgumentError
from ...core.state import FilePath
from ..store.messages import VERSION, Buffer, Kind, Message, ProtocolError, RefusedError, encode


def is_loopback(address: str) -> bool:
    """Whether `address` (tcp://host:port) can be reached from this machine only.

    >>> is_loopback("tcp://127.0.0.1:*"), is_loopback("tcp://0.0.0.0:5000"), is_loopback("tcp://node7:5000")
    (True, False, False)

    Of names only localhost is (RFC 6761, section 6.3).
    """
    scheme, _, rest = address.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    if scheme != "tcp" or not host:
        raise ArgumentError(f"the address {address!r}", fix="write it as tcp://host:port, with * for any free port")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # any other name may point anywhere


def check_address(address: str, key_file: FilePath) -> None:
    """Refuse to speak beyond this machine without encryption."""
    if not key_file and not is_loopback(address):
        raise ArgumentError(
            f"{address} is reachable by others and no keys are given",
            fix="use 127.0.0.1, or make keys with hetu.ps.wire.server.make_keys and pass key_file=",
        )


def write_keys(path: Path, keys: dict[str, Any]) -> None:
    """Write a new file that only its owner may read; an existing file is never overwritten."""
    write_private(path, json.dumps(keys))


def read_keys(path: FilePath) -> dict[str, Any]:
    """The keys in a file; ArgumentError if others could have read or written it."""
    keys: dict[str, Any] = json.loads(read_private(path))
    return keys


def write_private(path: Path, text: str) -> None:
    """As `write_keys`, of any text."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def read_private(path: FilePath) -> str:
    """As `read_keys`, of any text."""
    mode = os.stat(path).st_mode
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ArgumentError(f"{path} is open to others ({stat.filemode(mode)})", fix=f"chmod 600 {path}")
    return Path(path).read_text("utf-8")


HANDSHAKE = 1000  # milliseconds; a connection that is cut meanwhile is begun again after so long
AT_ONCE, BROKEN = 0.5, 5  # handshakes that break off within so many seconds, one after the other, are no accident
SETTINGS = {
    "LINGER": 0, "RECONNECT_IVL": 50, "RECONNECT_IVL_MAX": 2000, "SNDHWM": 64, "TCP_KEEPALIVE": 1,
    "HEARTBEAT_IVL": 1000, "HEARTBEAT_TIMEOUT": 3000, "HANDSHAKE_IVL": HANDSHAKE,
}  # fmt: skip
FOREIGN = 3  # answers of another version, one after the other, are no accident
USER, SILENT = "worker", "it listens but is silent"


def proof(token: str, *said: str | int) -> str:
    """What shows that who says this knows the token, which itself never travels (HMAC, RFC 2104).

    >>> proof("secret", "a", "b") == proof("secret", "ab")
    False
    """
    return hmac.digest(token.encode(errors="surrogatepass"), json.dumps(said).encode(), "sha256").hex()


def shown(token: str, address: str) -> str:
    """What opens a connection to the server at an address, of which another server that was told can make no use."""
    return proof(token, "port", address.rpartition(":")[2])


def is_proof(given: Any, token: str, *said: str | int) -> bool:
    """Whether `given` is the `proof` of this, in a time that does not tell how far it is right."""
    return hmac.compare_digest(str(given).encode(errors="surrogatepass"), proof(token, *said).encode())


def sign_of_life(token: str, worker: int, life: int) -> list[Buffer]:
    """A message that answers no question: who repeats it lengthens the lease of this life, and no more."""
    meta = {"incarnation": life, "proof": proof(token, "alive", worker, life)}
    return encode(Message(Kind.PING, worker=worker, meta=meta))


class Introduction:
    """What a peer of the server at an address says of itself: the life of a worker, or 0 of none.

    The server answers a first greeting with a question that no other connection is ever asked, and with a proof for
    that of the peer. The next greeting has the proof for the server's question, worth nothing on any other connection.
    """

    def __init__(self, address: str, token: str, worker: int = 0, life: int = 0) -> None:
        self.address, self.token, self.said = address, token, (worker, life)
        self.question, self.asked = secrets.token_hex(16), ""

    @property
    def facts(self) -> dict[str, Any]:
        """For the JSON object of a greeting."""
        answer = {"asked": self.asked, "proof": proof(self.token, self.asked, *self.said)} if self.asked else {}
        life = {"incarnation": self.said[1]} if self.said[1] else {}
        return {"question": self.question, **life, **answer}

    def hears(self, message: Message) -> bool:
        """Whether the server asks what has not been answered; RefusedError if it does not know the token itself."""
        asked = str(message.facts.get("question"))
        if not is_proof(message.facts.get("proof"), self.token, "server", self.question, asked):
            fix = "is it a server of this job? Pass its token"
            raise RefusedError("token", f"the server at {self.address} does not know the token of this job", fix=fix)
        before, self.asked = self.asked, asked
        return asked != before


def dealer(zmq: Any, context: Any, address: str, token: str, key_file: FilePath, *, watched: bool = False) -> Any:
    """A socket that is connected to a server; a `Handshake` can be made of one that is `watched`."""
    check_address(address, key_file)
    socket = context.socket(zmq.DEALER)
    for name, value in SETTINGS.items():
        socket.setsockopt(getattr(zmq, name), value)
    if key_file:
        keys = {name: str(key).encode() for name, key in read_keys(key_file).items()}
        socket.curve_secretkey, socket.curve_publickey = keys["secret"], keys["public"]
        socket.curve_serverkey = keys["server"]
    else:
        socket.plain_username, socket.plain_password = USER.encode(), shown(token, address).encode()
    if watched:
        socket.get_monitor_socket()  # before anything can have happened
    socket.connect(address)
    return socket


def guarded(context: Any, socket: Any) -> Any:
    """A guard before a server's socket, which lets nobody in but whom `admit` or its keys say, until it is stopped."""
    from zmq.auth.thread import ThreadAuthenticator

    guard = ThreadAuthenticator(context)
    guard.start()
    socket.plain_server = True
    return guard


def admit(guard: Any, token: str, address: str) -> None:
    """Let those who know the token in to the server at an address."""
    guard.configure_plain(domain="*", passwords={USER: shown(token, address)})


class Handshake:
    """What becomes of the connection of a watched socket."""

    def __init__(self, zmq: ModuleType, socket: Any, address: str) -> None:
        self.zmq, self.socket, self.address, self.monitor = zmq, socket, address, socket.get_monitor_socket()
        self.last, self.since = 0, 0.0  # where it has come to, and since when
        self.broken = self.foreign = 0  # handshakes that broke off; answers of another version

    def unread(self, error: ProtocolError) -> None:
        """RefusedError for answers of another version, of which one may be damage on the way."""
        self.foreign += error.version != VERSION
        if self.foreign >= FOREIGN:
            told = f"the server at {self.address} answers in version {error.version} of the protocol, this is {VERSION}"
            raise RefusedError("version", told, fix="let both sides run the same hetu")

    def check(self) -> None:
        """RefusedError if the server does not let this socket in, and never will."""
        from zmq.utils.monitor import recv_monitor_message

        zmq, now = self.zmq, time.monotonic()
        while self.monitor.poll(0):
            event = int(recv_monitor_message(self.monitor)["event"])
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                fix = "pass the token, or the key_file, of this job"
                raise self._refused("knows neither this token nor this key", fix)
            if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                fix = "pass key_file= to a server that has one, and only to such; is it of this version?"
                raise self._refused("asks for other credentials than these", fix)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.broken = 0
            elif event == zmq.EVENT_DISCONNECTED and self.last == zmq.EVENT_CONNECTED and now < self.since + AT_ONCE:
                self.broken += 1
            if event in (zmq.EVENT_CONNECTED, zmq.EVENT_CLOSED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED):
                self.last, self.since = event, now
            elif event == zmq.EVENT_CONNECT_RETRIED and self.last == zmq.EVENT_DISCONNECTED:
                self.last = event
        gave_up = self.last == zmq.EVENT_DISCONNECTED and now > self.since + AT_ONCE  # it does not try again
        if self.broken >= BROKEN or gave_up:
            fix = "is it a server of this job? One that has keys wants those that belong to them (key_file=)"
            raise self._refused("breaks off the handshake", fix)

    def _refused(self, what: str, fix: str) -> RefusedError:
        return RefusedError("key", f"the server at {self.address} {what}", fix=fix)

    @property
    def found(self) -> str:
        """Where it has come to, in words for who gives up."""
        zmq = self.zmq
        silent = dict.fromkeys((zmq.EVENT_CONNECTED, zmq.EVENT_DISCONNECTED, zmq.EVENT_CONNECT_RETRIED), SILENT)
        words = {**silent, zmq.EVENT_CLOSED: "nobody listens there",
                 zmq.EVENT_HANDSHAKE_SUCCEEDED: "it let this worker in and is silent since"}  # fmt: skip
        return words.get(self.last, "no connection came about")

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close()


BEATS = 4  # per lease
FIRST_PAUSE = 0.1  # seconds between two, before the lease is known


class Heartbeat:
    """Sends `frames` over each of the `sockets`, now its own, until `stop`: `BEATS` times per lease, once it is known.

    It begins before that, because the lease at one server runs while the worker waits for another to greet it.
    """

    def __init__(self, zmq: ModuleType, sockets: Sequence[Any], frames: Sequence[Buffer]) -> None:
        self.zmq, self.sockets, self.frames = zmq, sockets, frames
        self.pause, self.stopping = FIRST_PAUSE, threading.Event()
        self.thread = threading.Thread(target=self._beat, name="hetu heartbeat", daemon=True)
        self.thread.start()

    def keep(self, lease: float) -> None:
        """Beat as often as this lease needs."""
        self.pause = lease / BEATS

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join()

    def _beat(self) -> None:
        pause = self.pause
        while not self.stopping.wait(pause):
            due, pause = pause == self.pause, self.pause  # or the worker has just greeted all
            for socket in self.sockets if due else ():
                try:
                    socket.send_multipart(self.frames, self.zmq.NOBLOCK)
                except self.zmq.Again:
                    continue  # there is no connection, and the queue is full of beats
        for socket in self.sockets:
            socket.close()

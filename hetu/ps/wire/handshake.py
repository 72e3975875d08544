"""Before the first message: how a worker's socket proves that it may speak, and what is told if it may not.

ZeroMQ reads a message of many frames wholly before anyone sees it, whatever it grows to. So a stranger must not come so
far: on loopback a connection begins with a digest of token and port (ZeroMQ's PLAIN), elsewhere with keys (CURVE).
Whoever has neither is cut off, after `HANDSHAKE` if he says nothing. A socket's monitor tells a worker at once that it
is refused. What bounds a message of those who are let in is only that they are workers of the job.
"""

from __future__ import annotations

import hmac
import time
from types import ModuleType
from typing import Any

from ..store.messages import VERSION, ProtocolError, RefusedError
from .keys import check_address, read_keys

HANDSHAKE = 1000  # milliseconds; a connection that is cut meanwhile is begun again after so long
AT_ONCE, BROKEN = 0.5, 5  # handshakes that break off within so many seconds, one after the other, are no accident
SETTINGS = {
    "LINGER": 0, "RECONNECT_IVL": 50, "RECONNECT_IVL_MAX": 2000, "SNDHWM": 64, "TCP_KEEPALIVE": 1,
    "HEARTBEAT_IVL": 1000, "HEARTBEAT_TIMEOUT": 3000, "HANDSHAKE_IVL": HANDSHAKE,
}  # fmt: skip
FOREIGN = 3  # answers of another version, one after the other, are no accident
USER, SILENT = "worker", "it listens but is silent"


def shown(token: str, address: str = "") -> str:
    """What shows that somebody knows the token, which itself never travels: to open a connection to the server at an
    address, of which another server that was told can make no use; without an address, in messages.

    >>> shown("secret", "tcp://127.0.0.1:5000") == shown("secret", "tcp://127.0.0.1:5001")
    False
    """
    port = address.rpartition(":")[2].encode()
    return hmac.digest(token.encode(errors="surrogatepass"), b"hetu server " + port, "sha256").hex()


def dealer(zmq: Any, context: Any, address: str, token: str, key_file: str, *, watched: bool = False) -> Any:
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
            if event == zmq.EVENT_DISCONNECTED and now < self.since + AT_ONCE:
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

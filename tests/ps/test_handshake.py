"""Who is let in to a server, what those are told who are not, and what strangers cost."""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

import pytest
import zmq

from hetu.ps import Options, RefusedError, ServerError, ServerProcess, ServerTimeoutError
from hetu.ps.store import messages
from hetu.ps.store.member import Member
from hetu.ps.store.messages import VERSION, Kind, Message, decode, encode
from hetu.ps.wire import watch
from hetu.ps.wire.handshake import BROKEN, HANDSHAKE, SETTINGS, Handshake, admit, shown
from hetu.ps.wire.server import HEARTBEAT
from hetu.ps.wire.status import ServerJob, ask

from .network import DEADLINE, TOKEN, ServerThread, connect, options

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"


def memory(process) -> int:
    """What a process holds now, in MB; `os` stands for this one."""
    lines = Path(f"/proc/{os.getpid() if process is os else process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) >> 10


def port_of(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def carry(source: socket.socket, target: socket.socket, seen: bytearray | None = None) -> None:
    """Whatever comes, until it ends."""
    with suppress(OSError), source:
        while data := source.recv(1 << 16):
            if seen is not None:
                seen += data
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what a process holds")
def test_a_stranger_is_cut_off_before_the_first_frame_of_an_endless_message():
    with ServerProcess(options("asp", 1)) as server:
        before = memory(server.process)
        with socket.create_connection(port_of(server.address), DEADLINE) as stranger, suppress(ConnectionError):
            stranger.sendall(GREETING + b"\x04" + bytes([len(READY)]) + READY)
            for _ in range(100):
                stranger.sendall(b"\x03" + struct.pack(">Q", 1 << 20) + bytes(1 << 20))
            raise AssertionError("a stranger sent 100 MB")
        assert memory(server.process) < before + 20
        with connect([server.address]) as client:
            client.ping()


def admitted(address: str) -> socket.socket:
    """A connection that has been let in, by hand."""
    found = socket.create_connection(port_of(address), DEADLINE)
    name, word = b"worker", shown(TOKEN, address).encode()
    hello = b"\x05HELLO" + bytes([len(name)]) + name + bytes([len(word)]) + word
    initiate = b"\x08INITIATE" + READY.removeprefix(b"\x05READY")
    found.sendall(GREETING.replace(b"NULL\0", b"PLAIN") + b"\x04" + bytes([len(hello)]) + hello)
    heard = b""
    while b"WELCOME" not in heard:
        heard += found.recv(1 << 10)
    found.sendall(b"\x04" + bytes([len(initiate)]) + initiate)
    return found


@pytest.mark.skipif(
    sys.platform != "linux", reason="/proc says what a process holds, the kernel what a connection sent"
)
@pytest.mark.parametrize("sender", ["stranger", "admitted", "worker"])
def test_a_message_without_an_end_takes_no_more_than_what_a_worker_may_have_in_flight(sender, monkeypatch, capfd):
    """A stranger's is a command of the handshake, as long as a frame may be."""
    monkeypatch.setattr(watch, "UNHEARD", 32 << 20)
    monkeypatch.setitem(HEARTBEAT, "HANDSHAKE_IVL", 0)  # for as long as it takes
    frame = b"\x03" + struct.pack(">Q", 1 << 20) + bytes(1 << 20)
    make = {"stranger": lambda address: socket.create_connection(port_of(address), DEADLINE)}.get(sender, admitted)
    with ServerThread(options("asp", 1)) as server, make(server.address) as endless:
        if sender == "stranger":
            endless.sendall(GREETING.replace(b"NULL\0", b"PLAIN") + b"\x06" + struct.pack(">Q", 60 << 20))
        if sender == "worker":
            endless.sendall(b"\x00\x01x")
            while not server.server.watch.files:
                time.sleep(0.001)
            server.server.sessions.worker_of |= dict.fromkeys(server.server.watch.files, 0)
        before = memory(os)
        with pytest.raises(ConnectionError):
            for _ in range(40 if sender == "stranger" else 1000):
                endless.sendall(frame)
            while endless.recv(100):
                pass
            raise ConnectionError
        assert memory(os) < before + 300
        told = "a connection of worker 0 has sent" in capfd.readouterr().err
        assert told == (sender == "worker")
        with connect([server.address]) as client:
            client.ping()


def test_there_are_only_so_many_connections_and_who_comes_is_let_in(monkeypatch):
    monkeypatch.setitem(HEARTBEAT, "HANDSHAKE_IVL", 0)
    with ServerThread(options("asp", 1)) as server, connect([server.address]) as client, ExitStack() as stack:
        most, opened = server.server.watch.most, []
        for _ in range(most + 20):
            opened.append(stack.enter_context(socket.create_connection(port_of(server.address), DEADLINE)))
        for stranger in opened[:20]:  # the oldest go
            with suppress(ConnectionError):
                while stranger.recv(100):
                    pass
        client.ping()
        assert len(server.server.watch.open) <= most + 1  # while one is being cut off
        with connect([server.address]) as later:
            later.ping()


def test_strangers_that_come_without_end_do_not_cut_off_who_has_spoken_since_the_last_look(monkeypatch, capfd):
    """They left no time for a look, after which alone a worker that had just come counted as heard."""
    looks = threading.Event()
    monkeypatch.setattr(watch.Watch, "_look", lambda self: looks.set())
    with ServerThread(options("asp", 1)) as server, connect([server.address]) as client, ExitStack() as stack:
        client.ping()
        own = {*server.server.watch.files.values()}
        for _ in range(server.server.watch.most + 20):
            stack.enter_context(socket.create_connection(port_of(server.address), DEADLINE))
        client.ping()
        assert looks.wait(DEADLINE) and own and {*server.server.watch.files.values()} == own
        assert own < server.server.watch.open.keys()
    assert "is cut off" not in capfd.readouterr().err


@pytest.mark.parametrize("older", ["server", "worker"])
def test_a_worker_is_told_that_the_server_speaks_another_version(older, monkeypatch):
    """It was dropped as damage on the way, and asked for again without end."""
    struct_of = messages._FIELDS

    class Older:
        size = struct_of.size

        def pack(self, magic, version, *fields):
            old = (threading.current_thread() is not threading.main_thread()) == (older == "server")
            return struct_of.pack(magic, version - old, *fields)

    with ServerThread(options("asp", 1)) as server:
        monkeypatch.setattr(messages, "_FIELDS", Older())
        if older == "server":
            with pytest.raises(
                RefusedError, match=rf"answers in version {VERSION - 1} of the protocol, this is {VERSION}"
            ):
                connect([server.address])
        else:  # what an older worker makes of it is its own affair: the server goes on
            with pytest.raises((RefusedError, ServerTimeoutError)):
                connect([server.address], silence=1.0)
        monkeypatch.undo()
        with connect([server.address]) as client:
            client.ping()


def test_a_connection_that_says_nothing_is_cut_off():
    with ServerThread(options("asp", 1)) as server, socket.create_connection(port_of(server.address)) as stranger:
        stranger.settimeout(5 * HANDSHAKE / 1000)
        while stranger.recv(100):  # the server's own greeting, then the end
            pass


def test_a_port_where_nobody_listens_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ServerTimeoutError, match=rf"from tcp://127.0.0.1:{port} in 0.3 s: nobody listens"):
        connect([f"tcp://127.0.0.1:{port}"], silence=0.3)


def test_who_speaks_something_else_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answers() -> None:
            with suppress(OSError):
                while True:
                    caller, _ = other.accept()
                    with caller:
                        caller.recv(100)
                        caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answers, daemon=True).start()
        with pytest.raises(RefusedError, match="breaks off the handshake"):
            connect([f"tcp://127.0.0.1:{other.getsockname()[1]}"])


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGSTOP")
def test_a_server_that_is_frozen_before_a_worker_comes_is_named_and_set_by_silence(monkeypatch):
    monkeypatch.setenv("HETU_SILENCE", "1.5")
    with ServerProcess(options("asp", 1)) as server:
        server.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.process.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            with pytest.raises(ServerTimeoutError, match="in 1.5 s: it listens but is silent"):
                connect([server.address])
        finally:
            server.process.send_signal(signal.SIGCONT)


def test_a_server_that_lets_a_greeting_wait_for_others_gives_signs_of_life():
    """After a restart a new worker waits until those that know the clock are back, here for the lease of one."""
    with ServerThread(options("asp", 2, lease=2.5)) as server:
        store = server.server.sessions.store
        store.members[1] = Member(time.monotonic(), incarnation=5)
        store.returning, store.restored = {0, 1}, {"clock": 0, "age": 0.0}
        with connect([server.address], silence=1.2, retry=0.1) as client:
            assert client.status()[0]["clocks"].keys() == {"0"}


def test_a_handshake_that_is_lost_halfway_is_begun_again(monkeypatch):
    """The first connection is taken and never answered, as where its packets are lost; ZeroMQ alone waits for 30 s."""
    monkeypatch.setitem(SETTINGS, "HANDSHAKE_IVL", 200)
    with ExitStack() as stack:
        server = stack.enter_context(ServerThread(options("asp", 1)))
        front = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def relay() -> None:
            with suppress(OSError):
                lost.append(front.accept()[0])
                while True:
                    caller, back = front.accept()[0], socket.create_connection(port_of(server.address))
                    for ends in ((caller, back), (back, caller)):
                        threading.Thread(target=carry, args=ends, daemon=True).start()

        address = f"tcp://127.0.0.1:{front.getsockname()[1]}"
        admit(server.server.guard, TOKEN, address)
        lost: list[socket.socket] = []
        threading.Thread(target=relay, daemon=True).start()
        with connect([address], silence=10.0) as client:
            client.ping()
            assert len(lost) == 1
        lost[0].close()


class Told:
    """A socket whose monitor tells what it is given."""

    def __init__(self, events: list[int]) -> None:
        self.events = events

    def get_monitor_socket(self) -> Told:
        return self

    def poll(self, _: int) -> bool:
        return bool(self.events)


C, S, D = zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED


@pytest.mark.parametrize(
    ("events", "refused"),
    [
        ([C, D] * BROKEN, True),
        ([C, D] * (BROKEN - 1), False),
        ([C, S, D] * 3 * BROKEN, False),  # a bad network: nothing is wrong with this worker's keys
        (([C, D] * (BROKEN - 1) + [C, S, D]) * 2, False),
    ],
)
def test_handshakes_that_break_off_are_counted_one_after_the_other(events, refused, monkeypatch):
    monkeypatch.setattr("zmq.utils.monitor.recv_monitor_message", lambda told: {"event": told.events.pop(0)})
    with pytest.raises(RefusedError, match="breaks off") if refused else nullcontext():
        Handshake(zmq, Told([*events, zmq.EVENT_CONNECT_RETRIED]), "tcp://server").check()


def test_what_is_overheard_holds_no_token_and_is_worth_nothing_when_it_is_sent_again():
    """All bytes of a worker, whose greeting answered what its connection was asked, and no other is."""
    seen: list[bytearray] = []  # of each connection, there and back
    with ServerThread(options("asp", 1)) as server, socket.create_server(("127.0.0.1", 0)) as front:

        def overhear() -> None:
            with suppress(OSError):
                while True:
                    caller, back = front.accept()[0], socket.create_connection(port_of(server.address))
                    for ends in ((caller, back), (back, caller)):
                        seen.append(bytearray())
                        threading.Thread(target=carry, args=(*ends, seen[-1]), daemon=True).start()

        address = f"tcp://127.0.0.1:{front.getsockname()[1]}"
        admit(server.server.guard, TOKEN, address)
        threading.Thread(target=overhear, daemon=True).start()
        with connect([address]) as client:
            client.ping()
            [sent] = [each for each in seen if b'"asked"' in each]
            assert any(b'"lease"' in each for each in seen) and not any(TOKEN.encode() in each for each in seen)
            with socket.create_connection(port_of(server.address), DEADLINE) as replay:
                heard, start = b"", sent.index(b"INITIATE") - 3
                replay.sendall(sent[:start])
                while b"WELCOME" not in heard:
                    heard += replay.recv(1 << 16)
                replay.sendall(sent[start:])
                while heard.count(b'"question"') < 2:  # a greeting and its answer are both asked anew
                    got = replay.recv(1 << 16)
                    assert got
                    heard += got
            assert b'"lease"' not in heard
            client.ping()


@pytest.mark.skipif(sys.platform == "win32", reason="no number of a connection is known there")
def test_a_connection_that_takes_the_name_of_another_is_asked_something_else():
    asked = []
    with ServerThread(options("asp", 1)) as server, zmq.Context() as context:
        while len(asked) < 2:
            with context.socket(zmq.DEALER) as peer:
                peer.linger, peer.plain_username, peer.rcvtimeo = 0, b"worker", 1000
                peer.plain_password, peer.routing_id = shown(TOKEN, server.address).encode(), b"same"
                peer.connect(server.address)
                hello = {"question": "q", "incarnation": 7}
                peer.send_multipart(encode(Message(Kind.HELLO, meta=hello)))
                # the name is taken until the server has seen the end of the connection before
                with suppress(zmq.Again):
                    asked.append(decode(peer.recv_multipart()).facts["question"])
    assert asked[0] != asked[1]


def test_what_opens_a_server_opens_no_other():
    with (
        ServerThread(options("asp", 1)) as told,
        ServerThread(options("asp", 1)) as other,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as replay,
    ):
        replay.linger, replay.plain_username = 0, b"worker"
        replay.plain_password = shown(TOKEN, told.address).encode()
        handshake = Handshake(zmq, replay, other.address)
        replay.connect(other.address)
        with pytest.raises(RefusedError, match="knows neither"):
            while handshake.monitor.poll(1000 * DEADLINE):
                handshake.check()
        handshake.close()


def test_a_server_that_does_not_know_the_token_is_told_from_that_of_the_job():
    with ServerThread(Options(1, "guess", consistency="asp")) as other:
        admit(other.server.guard, TOKEN, other.address)  # it lets in whoever comes
        with pytest.raises(RefusedError, match="does not know the token of this job"):
            connect([other.address])
        with pytest.raises(RefusedError, match="does not know the token of this job"):
            ask(ServerJob((other.address,), TOKEN))


def test_a_port_that_is_taken_is_named():
    with (
        ServerThread(options("asp", 1)) as server,
        pytest.raises(ServerError, match="started: Address already in use"),
    ):
        ServerProcess(options("asp", 1, address=server.address))

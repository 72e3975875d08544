"""A server process: one ROUTER socket around one store. Other files decide all that needs no socket.

A `ServerProcess` is a server in a process of its own, which lives as long as its standard input is open, so it never
outlives the process that started it. Options arrive by standard input too, because others can read a command line and
an environment. With `snapshots` it writes its state to a folder (`snapshot.py`), and a server that is started with that
folder, on the same address, goes on from there. It does not restart itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...answers import seconds
from ...core.errors import ArgumentError, HetuError
from ...core.state import FilePath
from ...files import check_place
from ...ranges import AtLeast1, Count, Fraction, Positive
from ..store.consistency import consistency
from ..store.messages import FRAME_LIMIT, HEADER
from ..store.partial_reduce import Controllers, GroupSize
from ..store.store import ParameterStore
from .decisions import Decisions
from .handshake import HANDSHAKE, admit, check_address, guarded, read_keys, write_keys
from .heritage import Heritage
from .session import Envelope, Sessions
from .snapshot import Snapshots
from .transport import receive_frames, send_frames
from .watch import Watch

TICK = 0.05  # seconds between looks at leases and deadlines
HEARTBEAT = {
    "HANDSHAKE_IVL": HANDSHAKE,
    "HEARTBEAT_IVL": 1000,
    "HEARTBEAT_TIMEOUT": 3000,
    "HEARTBEAT_TTL": 5000,
    "LINGER": 0,
    "TCP_KEEPALIVE": 1,
}
# One BLAS thread, because other processes use the other cores; and a malloc that keeps the pages of large messages
# (glibc only), because fresh pages cost more than the copy into them.
ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}


class ServerError(HetuError, RuntimeError):
    """A server process did not start."""


@dataclass(frozen=True)
class Options:
    """How to run a server; all times are in seconds.

    * `workers`, `token`: the number of workers, and the secret by which they prove that they take part.
    * `consistency`: "bsp" (all wait for all, bit-deterministic), "ssp:3" (the fastest worker leads by at most 3 clocks)
      or "asp" (no worker waits).
    * `lease`, `arrive`, `on_loss`: a worker without a sign of life for `lease` is lost: it was killed, frozen or cut
      off. So is one that has not come `arrive` seconds after the first worker (ten times $HETU_ARRIVE, or 300). Then
      "evict" goes on without it (it may come back), and "fail" refuses all further requests, so that the job ends. Keep
      both below the workers' `timeout`, or they give up first.
    * `snapshots`, `snapshot_every`: the folder for this server's state, "" for none, and the time between snapshots: a
      server that is killed loses at most the pushes of that time and of two clocks. Each server needs a folder of its
      own, and a new job a new one: a server that finds snapshots goes on from that of `snapshot_clock`, by default the
      newest. Give servers that start together the newest clock that all of them have, as heturun does.
    * `inherit`: folders of servers of another number, from whose snapshots of `snapshot_clock` this one takes its
      rows, instead of from its own.
    * `address`: where to listen, * for any free port; beyond this machine it needs a `key_file` by `make_keys`.
    * `memory_limit`: bytes of tables, optimizer state and what waits for the end of a clock; more is refused.
    * `finite`: refuse pushes that hold NaN or infinities, which otherwise end up in all that workers pull.
    * `imports`: modules to import first, for their server functions.
    * `group`, `wait`, `decay`: the arguments of `Controller`, for partial reduce.

    >>> Options(workers=2, token="secret", consistency="ssp:3", lease=20.0).on_loss
    'evict'
    """

    workers: AtLeast1
    token: str
    consistency: str = "bsp"
    address: str = "tcp://127.0.0.1:*"
    key_file: FilePath = ""
    lease: Positive = 60.0
    arrive: Positive | None = None
    on_loss: str = "evict"
    snapshots: FilePath = ""
    snapshot_every: Positive = 30.0
    snapshot_clock: Count | None = None
    inherit: tuple[str, ...] = ()
    memory_limit: AtLeast1 = 8 << 30
    finite: bool = False
    imports: tuple[str, ...] = ()
    group: GroupSize = 2
    wait: Positive | None = None
    decay: Fraction = 0.5

    def __post_init__(self) -> None:
        for name in ("key_file", "snapshots"):  # which travel as text
            object.__setattr__(self, name, os.fspath(getattr(self, name)))
        if self.on_loss not in ("evict", "fail"):
            raise ArgumentError(f"on_loss={self.on_loss!r}", fix="use evict or fail")
        if self.workers < 1:
            raise ArgumentError(f"workers={self.workers!r}", fix="count the workers of the job, at least 1")
        consistency(self.consistency)
        if not re.fullmatch(r"tcp://.+:(\d+|\*)", self.address):
            raise ArgumentError(f"address={self.address!r}", fix="give tcp://HOST:PORT, where * is any free port")
        times = {"lease": self.lease, "arrive": self.arrive, "snapshot_every": self.snapshot_every, "wait": self.wait}
        if wrong := [
            f"{name}={time!r}" for name, time in times.items() if time is not None and not 0 < time < math.inf
        ]:
            raise ArgumentError(", ".join(wrong), fix="use times above 0 seconds that end")
        if not self.memory_limit > 0:
            fix = "give the bytes of a server, such as 1 << 30"
            raise ArgumentError(f"memory_limit={self.memory_limit!r}", fix=fix)
        if not 0 <= self.decay <= 1:
            raise ArgumentError(f"decay={self.decay!r}", fix="give a factor between 0 and 1")

    def sessions(self, now: float) -> Sessions:
        """A fresh store behind its sessions. The epoch is random, so no two lives of a server share one."""
        wait = math.inf if self.wait is None else self.wait
        store = ParameterStore(
            self.workers,
            consistency(self.consistency),
            epoch=secrets.randbits(32) | 1,
            lease=self.lease,
            arrive=10 * seconds("HETU_ARRIVE", 30.0) if self.arrive is None else self.arrive,
            on_loss=self.on_loss,
            memory_limit=self.memory_limit,
            finite=self.finite,
            partial=Controllers(self.workers, group=self.group, wait=wait, decay=self.decay),
            now=now,
        )
        return Sessions(store, self.token)


class Server:
    """The socket of one server; `address` is where it can be reached. It may fork if it is a process of its own."""

    def __init__(self, options: Options, *, forks: bool = False) -> None:
        import zmq

        check_address(options.address, options.key_file)
        for module in options.imports:
            try:
                importlib.import_module(module)
            except Exception as error:  # any code may run there
                found = f"{type(error).__name__}: {error}"
                raise ArgumentError(f"imports={module!r}: {found}", fix="name modules that Python finds") from error
        self.sessions, self.snapshots = options.sessions(time.monotonic()), None
        if options.snapshots:
            self.snapshots = Snapshots(self.sessions.store, Path(options.snapshots), options.snapshot_every, forks)
            if options.inherit and options.snapshot_clock is not None:
                folders = [Path(folder) for folder in options.inherit]
                Heritage(folders, options.snapshot_clock).begin(self.sessions.store)
                self.snapshots.give_up()
            else:
                self.snapshots.restore(options.snapshot_clock)
                Decisions(self.sessions.store, Path(options.snapshots), options.token).recall()
        self.zmq, self.context, self.more = zmq, zmq.Context(), int(zmq.SNDMORE)
        self.socket = self.context.socket(zmq.ROUTER)
        # A ROUTER drops answers above the send mark of a peer that reads none; a worker's credit keeps it far below.
        settings = {**HEARTBEAT, "SNDHWM": 128, "RCVHWM": 64, "MAXMSGSIZE": FRAME_LIMIT, "RCVTIMEO": int(TICK * 1000)}
        for name, value in settings.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.guard = _guard(self.context, self.socket, self.sessions, options)
        self.sessions.connection = _number
        self.watch = Watch(zmq, self.socket, options.workers, self.sessions.worker_of)
        admit(self.guard, options.token, options.address)  # a port that workers know, after a restart
        try:
            self.socket.bind(options.address)
        except zmq.ZMQError as error:
            self.close()
            fix = "is a server there already? Use * for any free port"
            raise ArgumentError(str(error.strerror), fix=fix) from None
        self.held: dict[tuple[bytes, bytes], Envelope] = {}
        if self.snapshots is not None:
            self.snapshots.meanwhile = self._only_live
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        admit(self.guard, options.token, self.address)

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set; check it, leases and deadlines every `TICK` seconds."""
        due = 0.0
        nowait, drawing = int(self.zmq.NOBLOCK), self.sessions.store.givers.drawing
        while not stop.is_set():
            try:
                first = next(iter(self.held), None)
                peer, frames = self.held.pop(first) if first else self._receive(nowait if drawing else 0)
            except self.zmq.Again:
                now = time.monotonic()
            else:
                now = time.monotonic()
                self._send(self.sessions.receive(peer, frames, now))
                self.sessions.store.handled.add(time.monotonic() - now)
            if drawing or now >= due:
                if now - due > self.sessions.store.lease / 2:
                    self.sessions.forgive(now)  # the signs of life of that time have not been received yet
                self._send(self.sessions.tick(now))
                if self.snapshots is not None:
                    self._send(self.sessions.envelopes(self.snapshots.tick()))
                due = now + TICK

    def _receive(self, flags: int = 0) -> Envelope:
        """The next message and its peer."""
        peer, frames = self.socket.recv(flags), receive_frames(self.socket)
        self.watch.hear(peer, frames[0])
        return peer, frames

    def _only_live(self) -> None:
        """Give a sign of life to who asks for one, and hold other messages back: once each, however often they come."""
        with contextlib.suppress(self.zmq.Again):
            peer, frames = self._receive()
            if (signs := self.sessions.sign(peer, frames, time.monotonic())) is None:
                self.held[peer, bytes(frames[0][:HEADER])] = peer, frames
            self._send(signs or [])

    def _send(self, envelopes: list[Envelope]) -> None:
        for peer, frames in envelopes:
            self.socket.send(peer, self.more)
            send_frames(self.socket, frames, 0, self.more, copy=True)  # the next message may change a table

    def close(self) -> None:
        if self.snapshots is not None:
            self.snapshots.finish()
        self.guard.stop()
        self.watch.stop()
        self.socket.close()
        self.context.term()


def _number(frame: Any) -> int:
    """A number of the connection that a frame came by, which the system gives to no other; 0 where it tells none."""
    with contextlib.suppress(OSError):
        return os.fstat(int(frame.obj.get("__fd"))).st_ino
    return 0


def _guard(context: Any, socket: Any, sessions: Sessions, options: Options) -> Any:
    """Let through the handshake who knows the token, or has a key on the job's list and speaks for its worker."""
    guard = guarded(context, socket)
    if not options.key_file:
        return guard
    keys = read_keys(options.key_file)
    allowed = [str(key).encode() for key in keys["allowed"]]
    sessions.owner = lambda frame: allowed.index(frame.obj.get("User-Id").encode())

    class AllowList:
        def callback(self, domain: str, key: bytes) -> bool:
            return key in allowed

    guard.configure_curve_callback(domain="*", credentials_provider=AllowList())
    socket.curve_server = True
    socket.curve_secretkey, socket.curve_publickey = str(keys["secret"]).encode(), str(keys["public"]).encode()
    return guard


def make_keys(folder: str | Path, workers: int) -> tuple[Path, list[Path]]:
    """Write the key files of one job, mode 0600: the server's, with the allowed keys, and one per worker."""
    import zmq

    folder = Path(folder)
    check_place(folder / "server.json")
    server_public, server_secret = zmq.curve_keypair()
    pairs = [zmq.curve_keypair() for _ in range(workers)]
    allowed = [public.decode() for public, _ in pairs]
    server = folder / "server.json"
    write_keys(server, {"public": server_public.decode(), "secret": server_secret.decode(), "allowed": allowed})
    paths = [folder / f"worker-{rank}.json" for rank in range(workers)]
    for path, (public, secret) in zip(paths, pairs):
        write_keys(path, {"public": public.decode(), "secret": secret.decode(), "server": server_public.decode()})
    return server, paths


# -- processes -------------------------------------------------------------------------------------------------


class ServerProcess:
    """A running server process and its `address`; it ends with the `with` block, or with the process that made it."""

    def __init__(self, options: Options, *, deadline: float | None = None) -> None:
        command = [sys.executable, "-c", "from hetu.ps.wire.server import main; main()"]
        variables = {**ENVIRONMENT, **os.environ}
        pipe = subprocess.PIPE
        self.token = options.token
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=variables, text=True, encoding="utf-8")
        assert self.process.stdin is not None and self.process.stdout is not None  # both are pipes
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.stdin.write(json.dumps(asdict(options)) + "\n")
        self.stdin.flush()
        line: list[str] = []
        reader = threading.Thread(target=lambda: line.append(self.stdout.readline()), daemon=True)
        reader.start()
        deadline = seconds("HETU_ARRIVE", 30.0) if deadline is None else deadline
        reader.join(deadline)
        word, _, text = (line[0] if line else "").strip().partition(" ")
        if word != "ready":
            late = "it ended by itself" if line else f"it was not ready after {deadline:g} s"
            self.kill()
            why = json.loads(text) if word == "refused" else late
            raise ServerError(
                f"no server has started: {why}", fix="see its own messages above, if any, or wait longer: $HETU_ARRIVE"
            )
        self.address = text

    def stop(self, deadline: float = 5.0) -> int:
        """Close its standard input, so that it ends by itself; kill it if it does not. Returns the exit code."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        try:
            self.process.wait(deadline)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.stdout.close()
        return self.process.returncode

    def kill(self) -> None:
        self.process.kill()
        self.stop()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def main() -> None:
    """Read options as one line of JSON, print `ready <address>`, and serve until standard input closes.

    The answer to wrong options is `refused` and a text in JSON. The option `make_keys` makes the `key_file` first.
    """
    given = json.loads(sys.stdin.readline())
    try:
        if given.pop("make_keys", False):
            make_keys(Path(given["key_file"]).parent, given["workers"])
        options = Options(**given | {name: tuple(given.get(name, ())) for name in ("imports", "inherit")})
        server = Server(options, forks=sys.platform == "linux")
    except HetuError as error:
        print(f"refused {json.dumps(error.text(where=False))}", flush=True)
        return
    stop = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    if restored := server.sessions.store.restored:
        text = "hetu server: goes on from a snapshot at clock {clock}, taken {age:g} s ago"
        print(text.format(**restored), file=sys.stderr)
    print(f"ready {server.address}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(stop)
    server.close()

"""Workers as threads with clients of their own, and a relay between them and a server that loses and reorders."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq

from hetu.ps import Client, Options, ServerProcess
from hetu.ps.wire.handshake import admit, dealer, guarded
from hetu.ps.wire.server import Server

TOKEN = "a token of the job"
DEADLINE = 30.0


def options(mode: str, workers: int, **more: Any) -> Options:
    return Options(workers, TOKEN, consistency=mode, **more)


def connect(addresses: list[str], worker: int = 0, token: str = TOKEN, **more: Any) -> Client:
    return Client(addresses, worker, token, **{"timeout": DEADLINE, **more})


@contextlib.contextmanager
def client_of(servers: int, mode: str) -> Iterator[Client]:
    """The only worker of so many server processes."""
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(ServerProcess(options(mode, 1))) for _ in range(servers)]
        yield stack.enter_context(connect([server.address for server in started]))


def run_workers(workers: int, body: Callable[[Client, int], Any], addresses: list[str], **more: Any) -> list[Any]:
    """`body(client, rank)` in a thread for each worker; the results, or the first error."""

    def work(rank: int) -> Any:
        with connect(addresses, rank, **more) as client:
            return body(client, rank)

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, rank) for rank in range(workers)]
        return [future.result(timeout=4 * DEADLINE) for future in futures]


class ServerThread:
    """A server in a thread, where nothing depends on a process of its own, which takes longer to start."""

    def __init__(self, options: Options) -> None:
        self.server, self.over = Server(options), threading.Event()
        self.address = self.server.address
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.server.run(self.over)
        finally:
            self.server.close()

    def stop(self) -> None:
        self.over.set()
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive()

    def __enter__(self) -> ServerThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def job(
    mode: str,
    workers: int,
    body: Callable[[Client, int], Any],
    servers: int = 1,
    kind: Callable[[Options], Any] = ServerProcess,
    **more: Any,
) -> list[Any]:
    """The same with servers of their own."""
    started: list[Any] = []
    try:
        for _ in range(servers):
            started.append(kind(options(mode, workers, **more)))
        return run_workers(workers, body, [server.address for server in started])
    finally:
        for server in started:
            server.stop()


class LossyRelay:
    """Forwards whole messages between clients and one server; drops, repeats and holds back a share of them.

    With `truncate` some lose their end, and while `cut` is set none gets through.
    """

    def __init__(self, server: str, loss: float, seed: int = 0, *, truncate: bool = False) -> None:
        self.server, self.loss, self.rng = server, loss, random.Random(seed)
        self.truncate, self.cut = truncate, threading.Event()
        self.stop, self.dropped, self.repeated, self.carried = threading.Event(), 0, 0, 0
        self.context = zmq.Context()
        self.front = self.context.socket(zmq.ROUTER)
        self.front.linger = 0
        self.guard = guarded(self.context, self.front)
        self.front.bind("tcp://127.0.0.1:*")
        self.address = self.front.getsockopt_string(zmq.LAST_ENDPOINT)
        admit(self.guard, TOKEN, self.address)
        self.backs: dict[bytes, zmq.Socket] = {}  # to the server, by the peer that it stands for
        self.thread = threading.Thread(target=self._run)

    def __enter__(self) -> LossyRelay:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()
        self.guard.stop()
        self.context.destroy(linger=0)

    def _run(self) -> None:
        held: list[tuple[zmq.Socket, list[bytes]]] = []
        poller = zmq.Poller()
        poller.register(self.front, zmq.POLLIN)
        while not self.stop.is_set():
            for socket, _ in poller.poll(10):
                frames = socket.recv_multipart()
                if socket is self.front:
                    peer, *frames = frames
                    if peer not in self.backs:
                        self.backs[peer] = dealer(zmq, self.context, self.server, TOKEN, "")
                        poller.register(self.backs[peer], zmq.POLLIN)
                    held.append((self.backs[peer], frames))
                else:
                    peer = next(p for p, back in self.backs.items() if back is socket)
                    held.append((self.front, [peer, *frames]))
                self.carried += sum(map(len, frames))
            keep = 1 if self.rng.random() < 0.3 else 0  # one waits until others have overtaken it
            self.rng.shuffle(held)
            while len(held) > keep:
                self._pass_on(*held.pop())

    def _pass_on(self, socket: zmq.Socket, frames: list[bytes]) -> None:
        draw = self.rng.random()
        if draw < self.loss or self.cut.is_set():
            self.dropped += 1
            return
        if self.truncate and draw < 2 * self.loss:
            frames = [*frames[:-1], frames[-1][: self.rng.randrange(len(frames[-1]) + 1)]]
        socket.send_multipart(frames)
        if draw > 1 - self.loss / 2:
            self.repeated += 1
            socket.send_multipart(frames)

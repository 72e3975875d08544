"""What the parameter server's transport costs beside bare ZeroMQ, and what shared memory and several workers give.

    python examples/benchmarks/ps.py --json result.json

1. dense: push_pull of a whole parameter over TCP and through shared memory, beside an echo: as many bytes there and
   back over the same kind of sockets, cut into the same chunks, as many of them in flight, and put into the caller's
   array as they come, by the plain calls of pyzmq. `relay` is the best echo that ZeroMQ allows: nothing is copied, and
   the server looks at no byte. Neither computes anything. `of echo` is the time of the echo by that of push_pull over
   TCP, `of relay` that of the relay, and `shared` that of TCP by that of shared memory; more is better.
2. small: push_pull of 1 KB beside an echo of one message of as many bytes; the ratio of times, less is better.
3. sparse: push_pull_rows of 1024 distinct rows of 16 floats by several worker processes at once, requests per second.

The sides take turns, all in the environment of a server (one BLAS thread, a malloc that keeps its pages). Figures are
medians, ratios with their quartiles; CPU time is that of both processes.
Ignored on purpose: networks between hosts, encryption, and update rules other than SGD.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import zmq
from report import Row, add_arguments, report

from hetu.ps import Client, Options, Parameter, ServerProcess
from hetu.ps.store.partition import CHUNK
from hetu.ps.wire.handshake import SETTINGS
from hetu.ps.wire.server import ENVIRONMENT, HEARTBEAT
from hetu.ps.wire.transport import CREDIT

TOKEN, DEADLINE = "benchmark", 120  # seconds
SIZES = [1 << exponent for exponent in range(16, 27, 2)]
SMALL = 1 << 10
ROWS, COLS, TABLE = 1024, 16, 100_000


def main() -> None:
    arguments = parse_arguments()
    if not ENVIRONMENT.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**ENVIRONMENT, **os.environ})
    if arguments.role:
        ROLES[arguments.role](*arguments.role_arguments)
        return
    report(arguments, PARTS)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, PARTS, rounds=41)
    parser.add_argument("--workers", type=int, default=4, help="worker processes of the sparse part (default: 4)")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the samples")
    parser.add_argument("--role", choices=list(ROLES), help=argparse.SUPPRESS)
    parser.add_argument("role_arguments", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = max(3, arguments.rounds // 20)
    return arguments


# -- the bare echo -----------------------------------------------------------------------------------------------


def serve_echo(copy: bool) -> None:
    """Send back whatever comes, until standard input closes."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    for name, value in {**HEARTBEAT, "SNDHWM": 0, "RCVHWM": 64, "RCVTIMEO": 50}.items():
        socket.setsockopt(getattr(zmq, name), value)
    socket.bind("tcp://127.0.0.1:*")
    print(socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
    os.set_blocking(sys.stdin.fileno(), False)
    while sys.stdin.buffer.raw.read(1) is None:
        with contextlib.suppress(zmq.Again):
            while True:
                socket.send_multipart(socket.recv_multipart(copy=copy), copy=copy)
    context.destroy()


class Echo:
    """An echo process and a socket to it. Without `copy` frames are passed on as they are."""

    def __init__(self, copy: bool) -> None:
        self.process, self.copy = child("echo" if copy else "relay"), copy
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        for name, value in SETTINGS.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(self.process.stdout.readline().decode().strip())

    def exchange(self, array: np.ndarray, out: np.ndarray) -> None:
        """`array` there and back into `out` in chunks, `CREDIT` of them in flight."""
        chunks = [slice(i, i + CHUNK) for i in range(0, len(array), CHUNK)]
        ahead = min(CREDIT, len(chunks))
        for chunk in chunks[:ahead]:
            self.socket.send(array[chunk], copy=self.copy)
        for i, chunk in enumerate(chunks):
            out[chunk] = np.frombuffer(self.socket.recv(copy=self.copy), np.uint8)
            if i + ahead < len(chunks):
                self.socket.send(array[chunks[i + ahead]], copy=self.copy)

    def __enter__(self) -> Echo:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)
        self.process.stdin.close()
        self.process.wait(DEADLINE)


def child(*role: str) -> subprocess.Popen:
    command = [sys.executable, __file__, "--role", *role]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


# -- 1. and 2. ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sides(nbytes: int) -> Iterator[tuple[dict[str, Callable[[], object]], dict[str, int]]]:
    """What is compared for one size, and the process that serves each."""
    gradient, out = np.full(nbytes // 4, 1e-3, np.float32), np.empty(nbytes // 4, np.float32)
    with contextlib.ExitStack() as stack:
        calls, servers = {}, {}
        for name, copy in (("echo", True), ("relay", False)):
            echo = stack.enter_context(Echo(copy))
            calls[name] = partial(echo.exchange, gradient.view(np.uint8), out.view(np.uint8))
            servers[name] = echo.process.pid
        for name, shared in (("tcp", False), ("shared", True)):
            server = stack.enter_context(ServerProcess(Options(1, TOKEN, consistency="asp")))
            client = stack.enter_context(Client([server.address], 0, TOKEN, shared=shared))
            client.create({"w": Parameter(out.shape, options={"learning_rate": 0.1})}, {"w": out})
            calls[name] = lambda client=client: client.push_pull("w", gradient, out).wait()
            servers[name] = server.process.pid
        yield calls, servers


def in_turns(nbytes: int, rounds: int, repeats: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Wall seconds of one call of each side, `rounds` times, and the median of its CPU seconds."""
    with sides(nbytes) as (calls, servers):
        wall, cpu = ({name: [] for name in calls} for _ in range(2))
        for _ in range(rounds):
            for name, call in calls.items():
                call()
                used, begin = cpu_seconds(servers[name]), time.perf_counter()
                for _ in range(repeats):
                    call()
                wall[name].append((time.perf_counter() - begin) / repeats)
                cpu[name].append((cpu_seconds(servers[name]) - used) / repeats)
    return wall, {name: statistics.median(seconds) for name, seconds in cpu.items()}


def cpu_seconds(pid: int) -> float:
    """Of this process and of another one if it can be looked at, as on Linux."""
    used = time.process_time()
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        used += int(task.read_text().split()[0]) * 1e-9
    return used


def ratio(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """The quartiles of the ratios."""
    return statistics.quantiles([a / b for a, b in zip(above, below)], n=4)


def dense(arguments: argparse.Namespace) -> list[Row]:
    rows = []
    for size in SIZES:
        wall, cpu = in_turns(size, arguments.rounds, repeats=max(1, (8 << 20) // size))
        millis = {f"{name} ms": 1e3 * statistics.median(seconds) for name, seconds in wall.items()}
        used = {f"{name} cpu": 1e3 * seconds for name, seconds in cpu.items()}
        ratios = {f"of {name}": ratio(wall[name], wall["tcp"]) for name in ("echo", "relay")}
        rows.append({"bytes": size, **millis, **used, **ratios, "shared": ratio(wall["tcp"], wall["shared"])})
    return rows


def small(arguments: argparse.Namespace) -> list[Row]:
    wall, cpu = in_turns(SMALL, 2 * arguments.rounds, repeats=100)
    micros = {f"{name} us": 1e6 * statistics.median(wall[name]) for name in ("echo", "tcp")}
    used = {f"{name} cpu": 1e6 * cpu[name] for name in ("echo", "tcp")}
    return [{"bytes": SMALL, **micros, **used, "by echo": ratio(wall["tcp"], wall["echo"])}]


# -- 3. sparse ---------------------------------------------------------------------------------------------------


def work(address: str, rank: str) -> None:
    """A worker: for every count of requests on standard input the seconds that they took."""
    rng = np.random.default_rng(int(rank))
    batches = [np.sort(rng.choice(TABLE, ROWS, replace=False)) for _ in range(16)]
    rows = np.ones((ROWS, COLS), np.float32)
    with Client([address], int(rank), TOKEN) as client:
        table = {"table": Parameter((TABLE, COLS), sparse=True, options={"learning_rate": 0.1})}
        client.create(table, {"table": np.zeros((TABLE, COLS), np.float32)})
        print("ready", flush=True)
        for line in sys.stdin:
            begin = time.perf_counter()
            for i in range(int(line)):
                client.push_pull_rows("table", batches[i % 16], rows).wait()
            print(time.perf_counter() - begin, flush=True)


def sparse(arguments: argparse.Namespace) -> list[Row]:
    requests, rates = 100, []
    with ServerProcess(Options(arguments.workers, TOKEN, consistency="asp")) as server:
        workers = [child("worker", server.address, str(rank)) for rank in range(arguments.workers)]
        for worker in workers:
            worker.stdout.readline()
        for _ in range(arguments.rounds):
            for worker in workers:
                worker.stdin.write(b"%d\n" % requests)
                worker.stdin.flush()
            rates.append(requests * len(workers) / max(float(worker.stdout.readline()) for worker in workers))
        for worker in workers:
            worker.stdin.close()
            worker.wait(DEADLINE)
    shape = {"rows": ROWS, "columns": COLS, "workers": len(workers), "cores": os.cpu_count()}
    quartiles = [round(rate) for rate in statistics.quantiles(rates, n=4)]
    return [{**shape, "requests/s": quartiles, "greatest": round(max(rates))}]


ROLES = {"echo": partial(serve_echo, True), "relay": partial(serve_echo, False), "worker": work}
PARTS = {
    "dense": ("push_pull of a whole parameter with SGD beside a chunked echo of the same bytes", dense),
    "small": ("push_pull of 1 KB with SGD beside an echo of the same bytes", small),
    "sparse": ("push_pull_rows by several workers at once", sparse),
}

if __name__ == "__main__":
    main()

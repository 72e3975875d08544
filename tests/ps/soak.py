"""What the suite does for seconds, for as long as you like: histories, and mutated messages against a real server.

    python -m tests.ps.soak --simulated 2000 --processes 20 --messages 1000000 --json FILE

`process_history` is the run of a real job under a nemesis: servers are processes that are killed and frozen, workers
are threads with clients of their own that vanish and come back, and a relay between them loses, repeats, reorders and
truncates messages and cuts everybody off. Ignored on purpose: faults of the disk, and clocks that jump.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
import warnings
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from hetu.ps import Client, Parameter, RefusedError, ServerProcess
from hetu.ps.store.consistency import consistency
from hetu.ps.store.messages import Kind, Message, decode, encode
from hetu.ps.wire.handshake import Introduction, dealer
from hetu.ps.wire.status import ServerJob, ask

from .history import SHARED, History, check
from .nemesis import MODES, World
from .network import DEADLINE, TOKEN, LossyRelay, connect, options
from .test_messages import genuine, mutated

CELLS, CLOCKS, WORKERS = 400, 8, 3
PATIENCE = 3 * DEADLINE  # half of all round trips are lost, and a request is sent every 4 s at last: 30 s may not do
CELLS_TABLE = {"cells": Parameter((CELLS, 1), sparse=True, rule="add", reduce="sum")}


# -- histories of real processes ---------------------------------------------------------------------------------


class RealJob:
    """Workers, a server, and what they have done so far."""

    def __init__(self, seed: int, mode: str, folder: Path) -> None:
        self.rng, self.mode, self.folder = random.Random(seed), mode, folder
        self.history = History(consistency(mode), CELLS)
        self.server = self.start("tcp://127.0.0.1:*")
        self.saved, self.finished = 0, threading.Event()
        self.doomed = [threading.Event() for _ in range(WORKERS)]  # set: this life of the worker is to end

    def start(self, address: str) -> ServerProcess:
        settings = {"snapshots": str(self.folder / "snapshots"), "snapshot_every": 1e6, "lease": 3.0}
        return ServerProcess(options(self.mode, WORKERS, address=address, **settings))

    def run(self) -> list[str]:
        """What the checker says about it."""
        loss = self.rng.choice([0.02, 0.1])
        try:
            with (
                LossyRelay(self.server.address, loss, self.rng.randrange(1 << 30), truncate=True) as self.relay,
                ThreadPoolExecutor(WORKERS + 1) as pool,
            ):
                workers = [pool.submit(self.work, rank) for rank in range(WORKERS)]
                nemesis = pool.submit(self.strike)
                try:
                    ended, _ = wait(workers, 2 * PATIENCE, FIRST_EXCEPTION)
                    for worker in [*ended, *workers]:  # what failed first has made the others wait
                        worker.result(timeout=0)
                except BaseException:
                    if nemesis.done():  # without a new server nobody is answered
                        nemesis.result()
                    raise
                finally:
                    self.finished.set()
                nemesis.result(timeout=DEADLINE)
            with connect([self.server.address]) as client:
                client.create(CELLS_TABLE, {"cells": np.zeros((CELLS, 1))})
                _, versions, values = client.sync_rows("cells", np.arange(CELLS), np.full(CELLS, -1)).wait()
            return check(self.history, values[:, 0], versions)
        finally:
            self.server.stop()

    # -- workers -------------------------------------------------------------------------------------------------

    def work(self, rank: int) -> None:
        """Lives of a worker until one comes to the end."""
        for life in range(1, 100):
            self.doomed[rank].clear()
            try:
                with connect([self.relay.address], rank, retry=0.05, timeout=PATIENCE) as client:
                    if self.live(client, rank, life):
                        return
            except RefusedError as error:
                if error.code not in ("evicted", "protocol"):  # taken out; or the first word of this life was damaged
                    raise
        raise AssertionError(f"worker {rank} never came to the end")

    def live(self, client: Client, rank: int, life: int) -> bool:
        """Whether this life ended with its last clock."""
        history, rng = self.history, random.Random(f"{rank} {life}")
        client.create(CELLS_TABLE, {"cells": np.zeros((CELLS, 1))})
        while client.step < CLOCKS:
            clock = client.step
            time.sleep(rng.random() * 0.1)
            self.read(client, rank, life)
            pushes = [history.begin("push", rank, life, clock) for _ in range(rng.randint(1, 2))]
            ones = np.ones((2, 1), "f")
            handles = [client.push_rows("cells", np.array([SHARED, push.cell]), ones) for push in pushes]
            for push, handle in zip(pushes, handles):
                handle.wait()
                history.end(push)
            if self.doomed[rank].is_set():
                return False
            self.read(client, rank, life)
            keep, before = rank == 0 and clock in (1, 4), next(history.now)
            end = history.begin("clock", rank, life, clock)
            try:
                client.clock(snapshot=keep).wait()
                self.saved = before if keep else self.saved
            except RefusedError as error:
                if error.code != "snapshot":  # the server was killed before
                    raise
                client.transport.wait(client.ticks)
            history.end(end)
        client.leave()
        return True

    def read(self, client: Client, rank: int, life: int) -> None:
        operation = self.history.begin("read", rank, life, client.step)
        _, versions, values = client.sync_rows("cells", np.arange(CELLS), np.full(CELLS, -1)).wait()
        self.history.end(operation, values[:, 0].copy(), versions.copy())

    # -- the nemesis ---------------------------------------------------------------------------------------------

    def strike(self) -> None:
        faults = [self.kill_server, self.freeze, self.cut, self.kill_worker]
        while not self.finished.wait(self.rng.uniform(0.05, 0.4)):
            self.rng.choice(faults)()

    def kill_server(self) -> None:
        if self.saved and len(self.history.outages) < 2:
            saved = self.saved  # a snapshot that ends while the server dies is not one that it has to have
            self.server.kill()
            self.history.outages.append((saved, next(self.history.now)))
            self.server = self.start(self.server.address)

    def freeze(self) -> None:
        self.server.process.send_signal(signal.SIGSTOP)
        time.sleep(self.rng.uniform(0.05, 0.5))
        self.server.process.send_signal(signal.SIGCONT)

    def cut(self) -> None:
        self.relay.cut.set()
        time.sleep(self.rng.uniform(0.05, 0.5))
        self.relay.cut.clear()

    def kill_worker(self) -> None:
        self.rng.choice(self.doomed).set()


def process_history(seed: int, mode: str, folder: Path) -> tuple[History, list[str]]:
    """One real job under the nemesis, and what is wrong with it."""
    job = RealJob(seed, mode, folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the server at .* restarted from its snapshot", RuntimeWarning)
        return job.history, job.run()


def simulated_history(seed: int, mode: str, folder: Path) -> tuple[History, list[str]]:
    """The same in virtual time, every other one with two servers, of which the history of one is returned."""
    world = World(seed, mode, folder, servers=1 + seed // len(MODES) % 2)
    found = world.run()
    return world.hosts[0].history, found


# -- mutated messages --------------------------------------------------------------------------------------------


def flood(messages: int, seed: int = 0) -> dict[str, Any]:
    """Send a real server what `mutated` makes of genuine messages, over the connection of a worker that it trusts."""
    rng = random.Random(seed)
    lease = 3600.0  # none of this is a sign of life
    with (
        ServerProcess(options("asp", 2, lease=lease)) as server,
        zmq.Context() as context,
        dealer(zmq, context, server.address, TOKEN, "") as socket,
    ):
        introduction = Introduction(server.address, TOKEN, life=100)
        socket.send_multipart(encode(Message(Kind.HELLO, meta=introduction.facts)))
        assert introduction.hears(_answer(socket))
        socket.send_multipart(encode(Message(Kind.HELLO, meta=introduction.facts)))
        epoch = _answer(socket).epoch
        for key, rows, cols in ((1, 1, 8), (2, 6, 2)):
            meta = {"name": f"t{key}", "start": 0, "rows": rows, "cols": cols}
            socket.send_multipart(encode(Message(Kind.CREATE, key=key, seq=key, epoch=epoch, meta=meta)))
            _answer(socket)
        originals, errors = genuine(epoch), 0
        before, memory = _state(server), None
        for start in range(0, messages, 50):
            batch = min(50, messages - start)
            for _ in range(batch):
                socket.send_multipart(mutated(rng.choice(originals), rng))
            errors += sum(_answer(socket).kind is Kind.ERROR for _ in range(batch))
            memory = memory or _memory(server)  # what the first messages take, others take again
        return {"messages": messages, "refused": errors, "unchanged": _state(server) == before,
                "alive": server.process.poll() is None, "grown": _memory(server) - memory}  # fmt: skip


def _answer(socket: zmq.Socket) -> Message:
    if not socket.poll(DEADLINE * 1000):
        raise AssertionError("a message without an answer")
    return decode(socket.recv_multipart())


def _state(server: ServerProcess) -> dict[str, Any]:
    [found] = ask(ServerJob((server.address,), TOKEN), DEADLINE)
    return {name: found[name] for name in ("clocks", "tables", "bytes", "requests", "received", "parked")}


def _memory(server: ServerProcess) -> int:
    """Bytes of the process that are in memory; 0 where the system does not tell."""
    file = Path(f"/proc/{server.process.pid}/statm")
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if file.exists() else 0


# -- the soak ----------------------------------------------------------------------------------------------------


def soak(name: str, make: Any, count: int) -> dict[str, Any]:
    """`count` histories, by seed; every complaint with its seed."""
    totals, complaints, began = dict.fromkeys(("push", "read", "clock"), 0), [], time.monotonic()
    outages = 0
    for seed in range(count):
        with tempfile.TemporaryDirectory() as folder:
            history, found = make(seed, MODES[seed % len(MODES)], Path(folder))
        complaints += [f"seed {seed}: {line}" for line in found]
        outages += len(history.outages)
        for kind in totals:
            totals[kind] += len(history.of(kind))
    print(f"{name}: {count} histories, {totals}, {outages} servers killed, {len(complaints)} complaints")
    seconds = round(time.monotonic() - began)
    return {"histories": count, **totals, "servers killed": outages, "complaints": complaints, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--simulated", type=int, default=200, help="histories in virtual time")
    parser.add_argument("--processes", type=int, default=20, help="histories of real processes")
    parser.add_argument("--messages", type=int, default=1_000_000, help="mutated messages")
    parser.add_argument("--json", type=Path, help="write the result here; parts with the number 0 stay as they are")
    args = parser.parse_args()
    result = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    for name, make, count in (
        ("simulated", simulated_history, args.simulated),
        ("processes", process_history, args.processes),
    ):
        if count:
            result[name] = soak(name, make, count)
    if args.messages:
        result["mutated"] = flood(args.messages)
        print(f"mutated: {result['mutated']}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

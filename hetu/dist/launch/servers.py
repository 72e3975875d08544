"""The parameter servers of a job, as processes beside its ranks.

`dist` does not know what a server does: it starts the command, writes one line of JSON to its standard input, waits for
`ready ADDRESS`, and tells the ranks in their environment. A server lives as long as its standard input is open, so it
never outlives the launcher. Ranks on other hosts reach it through CURVE, with keys that the first server makes in the
job's directory. A server with snapshots that is killed starts again at its address, from the last of them; servers that
start together go on from the last clock of which all have a snapshot. All servers run on this host.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from ...checkpoint import generations
from ...core.errors import HetuError

SERVER_VARIABLES = ADDRESSES, TOKEN, KEYS = "HETU_SERVERS", "HETU_SERVER_TOKEN", "HETU_SERVER_KEYS"
ANY_HOST = "tcp://0.0.0.0:"
TOGETHER = 0.5  # seconds within which servers die that are killed at once
RESTARTS = 10  # of one server; what kills it every time must end


class ServerStartError(HetuError, RuntimeError):
    """A server that did not say that it is ready."""


def opened(pipe: IO[str] | None) -> IO[str]:
    """One end of a pipe that `Popen` was told to make."""
    assert pipe is not None
    return pipe


class Servers:
    """`count` running servers; `variables` tell the ranks about them.

    Ranks on other hosts find the keys in the directory `keys`; without it only this host can reach the servers. Every
    `snapshot_every` seconds each server writes its state to its own folder in `snapshots`, from which it also starts.
    A server may take `arrive` seconds to start.
    """

    COMMAND = (sys.executable, "-c", "from hetu.ps.wire.server import main; main()")

    def __init__(
        self,
        count: int,
        workers: int,
        consistency: str = "bsp",
        keys: Path | None = None,
        *,
        snapshots: Path | None = None,
        snapshot_every: float = 30.0,
        arrive: float = 30.0,
    ) -> None:
        self.count, self.keys, self.token, self.arrive = count, keys, secrets.token_hex(16), arrive
        self.folders = [] if snapshots is None else [snapshots / f"server-{number}" for number in range(count)]
        self.options: dict[str, Any] = {"workers": workers, "token": self.token, "consistency": consistency}
        if keys is not None:
            self.options |= {"address": f"{ANY_HOST}*", "key_file": str(keys / "server.json")}
        if snapshots is not None:
            try:
                snapshots.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ServerStartError(f"snapshots in {snapshots}: {error.strerror}", fix="name a folder") from error
            self.options["snapshot_every"] = snapshot_every
        self.processes: list[subprocess.Popen[str]] = []
        self.addresses: list[str] = []  # where they listen
        self.restarts = [0] * count
        self.variables: dict[str, str] = {}

    def __enter__(self) -> Servers:
        try:
            first, clock = self.count if self.keys is None else 1, self._common_clock()  # one makes keys for the others
            for batch in (range(self.count)[:first], range(self.count)[first:]):
                self.processes += [self._start(number, clock) for number in batch]
                self.addresses += [self._ready(number) for number in batch]
        except BaseException:
            self.__exit__()
            raise
        if self.addresses:
            known = ",".join(self.addresses).replace(ANY_HOST, f"tcp://{socket.gethostname()}:")
            self.variables = {ADDRESSES: known, TOKEN: self.token}
        if self.addresses and self.keys is not None:
            self.variables[KEYS] = str(self.keys)
        return self

    def _start(self, number: int, clock: int | None) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(self.COMMAND, stdin=pipe, stdout=pipe, text=True, encoding="utf-8")
        options = self.options | {"make_keys": self.keys is not None and not self.addresses and number == 0}
        if self.folders:
            options |= {"snapshots": str(self.folders[number]), "snapshot_clock": clock}
        if self.addresses[number:]:
            options["address"] = self.addresses[number]
        with contextlib.suppress(BrokenPipeError):  # it has ended by itself: `_ready` says so
            opened(process.stdin).write(json.dumps(options) + "\n")
            opened(process.stdin).flush()
        return process

    def _ready(self, number: int) -> str:
        """The address where it listens; ServerStartError if it does not come, with what the server says."""
        lines: list[str] = []
        stdout = opened(self.processes[number].stdout)
        reader = threading.Thread(target=lambda: lines.append(stdout.readline()), daemon=True)
        reader.start()
        reader.join(self.arrive)
        word, _, text = (lines or [""])[0].rstrip("\n").partition(" ")
        if word == "refused":
            message, _, fix = json.loads(text).partition("\n  fix: ")
            raise ServerStartError(f"server {number}: {message}", fix=fix)
        if word != "ready":
            raise ServerStartError(
                f"server {number} did not get ready in {self.arrive:g} s",
                fix="see its own message, or heturun --arrive",
            )
        return text

    def describe(self, directory: Path) -> None:
        """Leave what `hetu ps status` needs in the job's directory, for this user alone."""
        if self.variables:
            file = os.open(directory / "servers.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(file, "w", encoding="utf-8") as opened:
                json.dump(self.variables, opened)

    def dead(self) -> list[int]:
        """The numbers of the servers that have ended."""
        return [number for number, process in enumerate(self.processes) if process.poll() is not None]

    def restart(self) -> list[str]:
        """Start killed servers again, and say so; [] if one of them has no snapshot, or ended by itself.

        If others still run, a server goes on from its own last snapshot; if all are dead, from the last that all have.
        """
        if not self.folders:
            return []
        until = time.monotonic() + TOGETHER
        while len(dead := self.dead()) < self.count and time.monotonic() < until:
            time.sleep(0.02)
        if not all(self._may_restart(number) for number in dead):
            return []
        clock = self._common_clock() if len(dead) == self.count else None
        return [self._restart(number, clock) for number in dead]

    def _may_restart(self, number: int) -> bool:
        killed = self.processes[number].returncode < 0
        return killed and self.restarts[number] < RESTARTS and bool(generations(self.folders[number]))

    def _restart(self, number: int, clock: int | None) -> str:
        process = self.processes[number]
        self.restarts[number] += 1
        with contextlib.suppress(BrokenPipeError):
            opened(process.stdin).close()
        opened(process.stdout).close()
        self.processes[number] = self._start(number, clock)
        self._ready(number)
        cause, folder = signal.Signals(-process.returncode).name, self.folders[number]
        which = "its newest snapshot" if clock is None else f"its snapshot of clock {clock}"
        return f"server {number} was killed by {cause} and runs again, from {which} in {folder}"

    def _common_clock(self) -> int | None:
        """The last clock of which all servers have a snapshot; None if there is no snapshot at all."""
        found = [generations(folder) for folder in self.folders]
        if not any(found):
            return None
        if common := set.intersection(*map(set, found)):
            return max(common)
        clocks = "; ".join(f"server {number}: {own or 'none'}" for number, own in enumerate(found))
        raise ServerStartError(
            f"there is no clock of which all servers have a snapshot in {self.folders[0].parent} ({clocks})",
            fix="start the job with a new folder, or with as many servers as before",
        )

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):
                opened(process.stdin).close()
        for process in self.processes:
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            opened(process.stdout).close()

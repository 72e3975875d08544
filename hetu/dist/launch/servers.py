"""The parameter servers of a job, as processes beside its ranks.

`dist` does not know what a server does: it starts the command, writes one line of JSON to its standard input, waits for
`ready ADDRESS`, and tells the ranks in their environment. A server lives as long as its standard input is open, so it
never outlives the launcher. Ranks on other hosts reach it through CURVE, with keys that the first server makes in the
job's directory. One on another host runs under an mpiexec of its own, which carries its standard input there. A server
with snapshots that is killed starts again at its address, from the last of them; servers that start together go on from
the last clock of which all have a snapshot, also where there were more of them, or fewer. All hosts see the same
folders.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ...checkpoint import generations
from ...core.errors import HetuError
from ...job import cores
from .mpiexec import there

SERVER_VARIABLES = ADDRESSES, TOKEN, KEYS = "HETU_SERVERS", "HETU_SERVER_TOKEN", "HETU_SERVER_KEYS"
ANY_HOST = "tcp://0.0.0.0:"
DECISIONS = "partners.json"  # which a server leaves beside its snapshots, and goes on from without any
TOGETHER = 0.5  # seconds within which servers die that are killed at once
RESTARTS = 10  # of one server; what kills it every time must end


class ServerStartError(HetuError, RuntimeError):
    """A server that did not say that it is ready."""


def _folders(snapshots: Path, count: int) -> list[Path]:
    """Where each of so many servers keeps its snapshots."""
    return [snapshots / f"server-{number}-of-{count}" for number in range(count)]


def opened(pipe: IO[str] | None) -> IO[str]:
    """One end of a pipe that `Popen` was told to make."""
    assert pipe is not None
    return pipe


class Servers:
    """Running servers, one on the host of each of `places`, "" for this one; `variables` tell the ranks about them.

    Other hosts find the keys in the directory `keys`; without it only this host can reach the servers. Each server
    writes its state to its own folder in `snapshots`, from which it also starts. A server may take `arrive` seconds to
    start, and a worker ten times that until it comes to it. `options` are told to all of them, fields of
    `hetu.ps.Options`.
    """

    COMMAND = (sys.executable, "-c", "from hetu.ps.wire.server import main; main()")

    def __init__(
        self,
        places: Sequence[str],
        workers: int,
        options: Mapping[str, Any] | None = None,
        keys: Path | None = None,
        *,
        snapshots: Path | None = None,
        arrive: float = 30.0,
    ) -> None:
        self.places, self.keys, self.token, self.arrive = places, keys, secrets.token_hex(16), arrive
        self.snapshots, self.count = snapshots, len(places)
        self.folders = [] if snapshots is None else _folders(snapshots, self.count)
        self.options: dict[str, Any] = {"workers": workers, "token": self.token, **(options or {})}
        self.options |= {"arrive": 10 * arrive}
        if keys is not None:
            self.options |= {"address": f"{ANY_HOST}*", "key_file": str(keys / "server.json")}
        if snapshots is not None:
            try:
                snapshots.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ServerStartError(f"snapshots in {snapshots}: {error.strerror}", fix="name a folder") from error
        self.processes: list[subprocess.Popen[str]] = []
        self.addresses: list[str] = []  # where they listen
        self.restarts = [0] * len(places)
        self.variables: dict[str, str] = {}

    def __enter__(self) -> Servers:
        try:
            first, origin = self.count if self.keys is None else 1, self.origin()  # one makes keys for the others
            for batch in (range(self.count)[:first], range(self.count)[first:]):
                self.processes += [self._start(number, *origin) for number in batch]
                self.addresses += [self._ready(number) for number in batch]
        except BaseException:
            self.__exit__()
            raise
        if self.addresses:
            hosts = [f"tcp://{place or socket.gethostname()}:" for place in self.places]
            known = [address.replace(ANY_HOST, host) for address, host in zip(self.addresses, hosts)]
            self.variables = {ADDRESSES: ",".join(known), TOKEN: self.token}
        if self.addresses and self.keys is not None:
            self.variables[KEYS] = str(self.keys)
        return self

    def _start(self, number: int, clock: int | None, inherit: Sequence[str] = ()) -> subprocess.Popen[str]:
        pipe, place = subprocess.PIPE, self.places[number]
        line = [*(there(place) if place else ()), *self.COMMAND]
        process = subprocess.Popen(
            line, stdin=pipe, stdout=pipe, text=True, encoding="utf-8", start_new_session=bool(place)
        )
        options = self.options | {"make_keys": self.keys is not None and not self.addresses and number == 0}
        if self.folders:
            options |= {"snapshots": str(self.folders[number]), "snapshot_clock": clock, "inherit": [*inherit]}
        if self.addresses[number:]:
            options["address"] = self.addresses[number]
        with contextlib.suppress(BrokenPipeError):  # it has ended by itself: `_ready` says so
            opened(process.stdin).write(json.dumps(options) + "\n")
            opened(process.stdin).flush()
        return process

    def called(self, number: int) -> str:
        """A server in messages."""
        place = self.places[number]
        return f"server {number} on {place}" if place else f"server {number}"

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
            raise ServerStartError(f"{self.called(number)}: {message}", fix=fix)
        if word != "ready":
            here = self.places.count("")
            many = f", of {here} that start on {cores()} cores" if here > cores() and not self.places[number] else ""
            what = "has ended" if lines else f"did not get ready in {self.arrive:g} s{many}"
            fix = f"start fewer (-s), or wait longer: heturun --arrive {2 * self.arrive:g}"
            if lines:
                fix = "see its own message above" + "; can this host reach it by ssh?" * bool(self.places[number])
            raise ServerStartError(f"{self.called(number)} {what}", fix=fix)
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
        clock, inherit = self.origin() if len(dead) == self.count else (None, [])
        return [self._restart(number, clock, inherit) for number in dead]

    def _may_restart(self, number: int) -> bool:
        folder = self.folders[number]
        kept = bool(generations(folder)) or (folder / DECISIONS).is_file()
        return self._killed_by(number) > 0 and self.restarts[number] < RESTARTS and kept

    def _killed_by(self, number: int) -> int:
        """The signal that ended a server, 0 for none; mpiexec passes on its number, or 128 more."""
        code = self.processes[number].returncode or 0
        there = code % 128 if self.places[number] and code > 1 else 0
        return -code if code < 0 else there

    def end_of(self, number: int) -> str:
        """What to say of a server that has ended and does not run again."""
        if (killed := self._killed_by(number)) not in {*signal.Signals}:
            return f"{self.called(number)} has ended"
        again = "" if self.folders else "; with --snapshots DIR it would run again"
        return f"{self.called(number)} was killed by {signal.Signals(killed).name}{again}"

    def _restart(self, number: int, clock: int | None, inherit: Sequence[str]) -> str:
        cause = signal.Signals(self._killed_by(number)).name
        while True:  # it may be killed again before it is ready: then it begins where it was to begin
            process = self.processes[number]
            self.restarts[number] += 1
            with contextlib.suppress(BrokenPipeError):
                opened(process.stdin).close()
            opened(process.stdout).close()
            self.processes[number] = self._start(number, clock, inherit)
            try:
                self._ready(number)
                break
            except ServerStartError:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.processes[number].wait(TOGETHER)
                if not self._may_restart(number):
                    raise
        folder = self.folders[number]
        newest = "its newest snapshot" if generations(folder) else "its record of groups"
        which = newest if clock is None else f"its snapshot of clock {clock}"
        return f"{self.called(number)} was killed by {cause} and runs again, from {which} in {folder}"

    def origin(self) -> tuple[int | None, list[str]]:
        """The last clock of which all servers have a snapshot, None if there is none at all; and the folders of these
        servers if there were fewer or more than now.
        """
        if self.snapshots is None:
            return None, []
        counts = {int(folder.name.rpartition("-")[2]) for folder in self.snapshots.glob("server-*-of-*")}
        kept = {count: [generations(folder) for folder in _folders(self.snapshots, count)] for count in counts}
        last = {count: max(set.intersection(*map(set, found)), default=-1) for count, found in kept.items()}
        count = max(last, key=lambda count: (last[count], count == self.count), default=self.count)
        if not any(map(any, kept.values())):
            return None, []
        if last[count] >= 0:
            return last[count], [] if count == self.count else [*map(str, _folders(self.snapshots, count))]
        clocks = "; ".join(f"{count} servers: {found}" for count, found in kept.items())
        raise ServerStartError(
            f"there is no clock of which all servers have a snapshot in {self.snapshots} ({clocks})",
            fix="start the job with a new folder",
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

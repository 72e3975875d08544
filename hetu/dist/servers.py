"""The parameter servers of a job, as processes beside its ranks.

`dist` does not know what a server does: it starts the command, writes one line of JSON to its standard input, waits
for `ready ADDRESS`, and tells the ranks in their environment. A server lives as long as its standard input is open, so
it never outlives the launcher. Ignored on purpose: servers on other hosts.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
import threading

from ..errors import HetuError

ADDRESSES, TOKEN = "HETU_SERVERS", "HETU_SERVER_TOKEN"
READY_WITHIN = 30.0  # seconds


class ServerStartError(HetuError, RuntimeError):
    """A server that did not say that it is ready."""


class Servers:
    """`count` running servers; `variables` is what the ranks get to know about them."""

    COMMAND = (sys.executable, "-c", "from hetu.ps.server import main; main()")

    def __init__(self, count: int, workers: int) -> None:
        self.count, self.workers, self.token = count, workers, secrets.token_hex(16)
        self.processes: list[subprocess.Popen[str]] = []
        self.variables: dict[str, str] = {}

    def __enter__(self) -> Servers:
        try:
            for _ in range(self.count):
                self.processes.append(self._start())
            addresses = [self._ready(number, process) for number, process in enumerate(self.processes)]
        except BaseException:
            self.__exit__()
            raise
        if addresses:
            self.variables = {ADDRESSES: ",".join(addresses), TOKEN: self.token}
        return self

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(self.COMMAND, stdin=pipe, stdout=pipe, text=True, encoding="utf-8")
        options = {"workers": self.workers, "token": self.token, "imports": []}
        with contextlib.suppress(BrokenPipeError):  # it has ended by itself: `_ready` says so
            process.stdin.write(json.dumps(options) + "\n")
            process.stdin.flush()
        return process

    def _ready(self, number: int, process: subprocess.Popen[str]) -> str:
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.append(process.stdout.readline()), daemon=True)
        reader.start()
        reader.join(READY_WITHIN)
        if not lines or not lines[0].startswith("ready "):
            raise ServerStartError(f"server {number} did not get ready", fix="see its own message above")
        return lines[0].split()[1]

    def dead(self) -> list[int]:
        """The numbers of those that have ended."""
        return [number for number, process in enumerate(self.processes) if process.poll() is not None]

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()

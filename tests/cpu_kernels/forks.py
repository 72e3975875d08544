"""Processes that have imported hetu already: forks of one, each with variables, a script and an output of its own.

Importing is most of what a short process does. A fork has met no compiler and no folder, as a new process has not;
what happens while hetu is imported is for a new one to show.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
DEADLINE = 100  # seconds


class Forks:
    """The one process whose forks run scripts."""

    def __init__(self) -> None:
        line, variables = [sys.executable, __file__], os.environ | {"PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(line, stdin=pipe, stdout=pipe, env=variables, text=True)

    def asked(self, **request: Any) -> int:
        assert self.process.stdin and self.process.stdout
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def start(self, script: str, variables: Mapping[str, str], *arguments: str) -> Fork:
        return Fork(self, script, dict(variables), arguments)

    def close(self) -> None:
        self.process.communicate(timeout=DEADLINE)


class Fork:
    """One of them: as much of a `Popen` as is needed."""

    def __init__(self, forks: Forks, script: str, variables: dict[str, str], arguments: tuple[str, ...]) -> None:
        self.forks, self.said = forks, tempfile.TemporaryDirectory()
        self.paths = [f"{self.said.name}/{name}" for name in ("out", "err")]
        self.pid = forks.asked(script=script, variables=variables, arguments=arguments, paths=self.paths)

    def communicate(self, timeout: float = DEADLINE) -> tuple[str, str]:
        """It has a deadline of its own."""
        self.returncode = self.forks.asked(wait=self.pid)
        out, err = (Path(path).read_text("utf-8") for path in self.paths)
        self.said.cleanup()
        return out, err


def serve() -> dict[str, Any]:
    """Fork, or wait for a fork, as it is asked; what comes back is the request, in a fork that is to run it."""
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        elif (answer := os.fork()) == 0:
            return request
        print(answer, flush=True)
    return {}


if __name__ == "__main__":
    import hetu  # noqa: F401
    from hetu.cpu_kernels import compiled  # noqa: F401

    if asked := serve():
        signal.alarm(DEADLINE)
        for number, (path, mode) in enumerate(zip((os.devnull, *asked["paths"]), "rww")):
            with open(path, mode) as file:
                os.dup2(file.fileno(), number)
        os.environ.clear()
        os.environ.update(asked["variables"])
        sys.argv[1:] = asked["arguments"]
        exec(compile(asked["script"], "<script>", "exec"), {"__name__": "__main__"})

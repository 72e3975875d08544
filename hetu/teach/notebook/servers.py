"""`%servers`: what `hetu ps status --watch` shows in a terminal, below a cell, renewed until it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from ...core.errors import ArgumentError, HetuError
from ...ps.wire.server import ServerProcess
from ...ps.wire.status import ServerJob, ask, find_job
from ...ps.wire.view import as_html, looks_at


class Live:
    """A thread that looks at a job's servers and passes HTML to `show`, until `stop()` or the servers' end."""

    def __init__(self, job: ServerJob, show: Callable[[str], None], every: float) -> None:
        self.job, self.show, self.every, self.ended = job, show, every, threading.Event()
        self.before = ask(job)
        self.thread = threading.Thread(target=self._renew, name="hetu servers", daemon=True)
        self.thread.start()

    def _renew(self) -> None:
        while not self.ended.wait(self.every):
            try:
                now = ask(self.job)
            except HetuError:  # they have ended: the last look stays
                return
            self.show(as_html(looks_at(self.job.addresses, self.before, now)))
            self.before = now

    def stop(self) -> None:
        self.ended.set()
        self.thread.join()


def job_in(names: Mapping[str, Any], name: str) -> ServerJob:
    """The job whose servers are meant: those of a variable that holds `ServerProcess`es, or of the newest job here."""
    if not name:
        return find_job(None)
    value = names.get(name)
    found = [s for s in (value if isinstance(value, list | tuple) else [value]) if isinstance(s, ServerProcess)]
    if not found:
        raise ArgumentError(
            f"{name} holds no server", fix="name a variable that holds a ServerProcess, or some of them"
        )
    return ServerJob(tuple(server.address for server in found), found[0].token)

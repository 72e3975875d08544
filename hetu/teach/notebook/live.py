"""What is seen of a running job below a cell, renewed until it ends: `%ranks watch` of ranks, `%servers` of servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from ...core.errors import ArgumentError, HetuError
from ...ps.wire.server import ServerProcess
from ...ps.wire.status import ServerJob, find_job


class Live:
    """A thread that looks again and again and passes HTML of two looks to `show`, until `stop()` or the job's end."""

    def __init__(
        self, look: Callable[[], Any], page: Callable[[Any, Any], str], show: Callable[[str], None], every: float
    ) -> None:
        self.look, self.page, self.show, self.every, self.ended = look, page, show, every, threading.Event()
        self.before = look()
        self.thread = threading.Thread(target=self._renew, name="hetu live", daemon=True)
        self.thread.start()

    def _renew(self) -> None:
        while not self.ended.wait(self.every):
            try:
                now = self.look()
            except (HetuError, OSError):  # they have ended: the last look stays
                return
            self.show(self.page(self.before, now))
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

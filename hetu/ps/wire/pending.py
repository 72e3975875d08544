"""What a request returns at once: an answer that is on its way, so that communication overlaps with the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .transport import Request, Transport


class PendingReply:
    """An answer that is on its way."""

    def __init__(
        self, transport: Transport, requests: list[Request], finish: Callable[[list[Request]], Any] | None = None
    ) -> None:
        self.transport, self.requests, self.finish = transport, requests, finish

    def wait(self) -> Any:
        """The answer, once all its parts have arrived; RefusedError, ServerTimeoutError or ServerRestartedError."""
        self.transport.wait(self.requests)
        return self.finish(self.requests) if self.finish else None

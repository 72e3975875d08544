"""Answers that are on their way, and who is told that a request was refused: whoever waits for it, and nobody twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from ..store.messages import RefusedError
from .transport import Request, Transport


class PendingReply:
    """An answer that is on its way."""

    def __init__(
        self, transport: Transport, requests: list[Request], finish: Callable[[list[Request]], Any] | None = None
    ) -> None:
        self.transport, self.requests, self.finish = transport, requests, finish

    def wait(self) -> Any:
        """The answer, once all its parts have arrived; RefusedError, ServerTimeoutError or ServerRestartedError."""
        try:
            self.transport.wait(self.requests)
        except RefusedError:
            for request in self.requests:
                request.told = True
            raise
        return self.finish(self.requests) if self.finish else None


def settle(transport: Transport, requests: list[Request] | deque[Request]) -> None:
    """Wait for all of these, and forget them; then RefusedError if one was refused of which nobody was told."""
    refused = None
    while untold := [request for request in requests if not request.told]:
        try:
            transport.wait(untold)
            break
        except RefusedError as error:
            refused = refused or error
            for request in untold:
                request.told = request.error is not None
    requests.clear()
    if refused is not None:
        raise refused

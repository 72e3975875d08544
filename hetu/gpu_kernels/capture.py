"""Replays the calls of a program as one CUDA graph: a step then costs one launch, however many kernels it has.

The first run is an ordinary one, in which libraries take their workspaces; the second records the calls instead of
running them, and replays the record, as do all later ones. That a replay is a new step is the business of the calls:
they read feeds, rates, step counts and the state of random numbers from the memory of the device. Memory that calls
take while they are recorded comes from a pool of the graph's own, so that nobody else is given it between two replays.
Programs that communicate run call by call, as they meet other ranks. A captured graph never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .machine import Call


class Captured:
    """`calls` for the current stream, which must not be the default one. `obstacle` says why they cannot be captured.

    `say(call, reason)` is called once if it turns out that they cannot; they then run one by one.
    """

    def __init__(
        self, xp: Any, calls: Sequence[Call], say: Callable[[Call | None, str], None], obstacle: str = ""
    ) -> None:
        self.xp, self.calls, self.say, self.obstacle = xp, calls, say, obstacle
        self.pool, self.graph = xp.cuda.MemoryPool(), None
        self.call: Call | None = None  # the one under way, for the report of an error
        self.warm = False

    def run(self) -> None:
        """One step, on the current stream."""
        if self.warm and self.graph is None and not self.obstacle:
            self._capture()
        if self.graph is not None:
            self.graph.launch(self.xp.cuda.get_current_stream())
            return
        with self.xp.cuda.using_allocator(self.pool.malloc):
            self._run_calls()
        self.warm = True

    def _run_calls(self) -> None:
        for call in self.calls:
            self.call = call
            call()

    def _capture(self) -> None:
        stream, cuda, failure = self.xp.cuda.get_current_stream(), self.xp.cuda, None
        # CuPy copies arrays of the host through pinned memory that it takes back at once; a replay would read what lies
        # there by then, so such copies must fail.
        cuda.set_pinned_memory_allocator(_refuse)
        try:
            with cuda.using_allocator(self.pool.malloc):
                stream.begin_capture()
                try:
                    self._run_calls()
                except Exception as error:
                    failure = error
                try:  # it has to be ended in any case, and fails again after a failure
                    graph = stream.end_capture()
                except Exception as error:
                    failure = failure or error
        finally:
            cuda.set_pinned_memory_allocator(self.xp.get_default_pinned_memory_pool().malloc)
        if failure is None:
            self.graph = graph
        else:
            self.obstacle = f"{type(failure).__name__}: {failure}"
            self.say(self.call, self.obstacle)

    def __str__(self) -> str:
        return f"runs call by call: {self.obstacle}" if self.obstacle else "one CUDA graph from its second run on"


def _refuse(nbytes: int) -> NoReturn:
    raise RuntimeError("it copies an array of the host")

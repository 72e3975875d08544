"""Recording a rank: what it is fed, its random state, and what others have sent it, beside each step.

What arrives passes a tape, by a communicator, and so does what the steps of the first executor that trains begin with,
by a stepper (`core.executor.stepping`). Left out: what servers answer, arrays on GPUs, steps that update nothing, those
inside `ht.debug_nans`, and all behind an `Executor.switch`, a full disk, or a step too large for the record.
"""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import ArgumentError, HetuError
from ...core.executor import Executor, stepping
from ...core.leaf import random_state
from ...core.program import Program
from ...core.state import State
from ...core.subgraph import Feed, SubGraph
from ..comm.alike import WeighedFeed
from ..comm.call import CollectiveCall, PeerMessage
from ..comm.comm import Comm, Handle, of_thread
from ..comm.line import calling_line, show
from ..comm.recorder import Raw
from ..comm.world import world
from ..cut.on_ranks import OnRanks
from ..layout.layout import show_ranks
from .tape import LIMIT, VERSION, Tape, digest

RECORD, RECORD_LIMIT = "HETU_RECORD", "HETU_RECORD_LIMIT"  # environment variables: a folder, and bytes of each rank
AROUND = (  # what results depend on beside the script, and is read before it runs
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
    *("HETU_STRATEGY", "HETU_PASSES", "HETU_KERNELS", "HETU_CC", "HETU_BLAS", "HETU_DATA"),
)
whole_process = ExitStack()  # what is entered until its end


class TapedComm(Comm):
    """`inner`; what arrives from others passes a `tape`, which keeps it, or in a replay gives it."""

    def __init__(self, inner: Comm, tape: Any) -> None:
        super().__init__(inner.rank, inner.ranks, inner.deadline, inner.recorder)
        self.inner, self.tape, self.widens, self.shown = inner, tape, inner.widens, show_ranks(inner.ranks)

    def _arrived(self, call: CollectiveCall) -> None:
        self._passes(f"{call.what} of {self.shown}", call.out)

    def _passes(self, what: str, out: np.ndarray) -> None:
        self.tape.passes(f"{what} for {show(self.recorder.site or calling_line(3))}", out)

    def run(self, call: CollectiveCall) -> None:
        self.inner.run(call)
        self._arrived(call)

    def bind(self, call: CollectiveCall) -> Callable[[], None]:
        run = self.inner.bind(call)

        def act() -> None:
            run()
            self._arrived(call)

        return act

    def _start(self, call: CollectiveCall) -> Handle:
        return Then(self.inner._start(call).wait, partial(self._arrived, call))

    def _exchange(self, sends: Sequence[PeerMessage], recvs: Sequence[PeerMessage], noted: Sequence[Raw]) -> None:
        self.inner._exchange(sends, recvs, noted)
        for source, out in recvs:
            self._passes(f"message from rank {self.ranks[source]}", out)

    def _split(self, group: tuple[int, ...]) -> Comm:
        return TapedComm(self.inner.split(group), self.tape)

    def progress(self) -> None:
        self.inner.progress()

    def compare_feeds(self, noted: Sequence[WeighedFeed]) -> None:
        self.inner.compare_feeds(noted)


class Then(Handle):
    """What is done at the first wait, and not again."""

    def __init__(self, *acts: Callable[[], None]) -> None:
        self.acts = [*acts]

    def wait(self) -> None:
        while self.acts:
            self.acts.pop(0)()


def taped(executor: Executor, sub: SubGraph, feed: Feed | None, program: Program) -> list[np.ndarray]:
    """The stepper: has a tape run the steps of the rank whose messages pass it."""
    if not isinstance(comm := of_thread.get(), TapedComm):
        return executor.quiet.run(program.run)
    results: list[np.ndarray] = comm.tape.step(executor, sub, program)
    return results


class Recording:
    """The record of one rank as it grows.

    What anything but a step that is recorded does to the variables counts as given before the next one.
    """

    def __init__(self, folder: Path, comm: Comm, command: Sequence[str], limit: int = LIMIT) -> None:
        self.tape, self.number, self.over = Tape(folder, limit), 0, False  # of the next step; whether no more is kept
        made = f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.platform()}"
        around = {name: os.environ[name] for name in AROUND if name in os.environ}
        self.about = {"version": VERSION, "size": comm.world_size, "command": [*command], "folder": os.getcwd(),
                      "made": made, "environment": around}  # fmt: skip
        self.passed: dict[str, np.ndarray] | None = {}  # of the step; None between steps, when nothing is kept
        self.nbytes = 0  # of these
        self.followed: tuple[Executor, Any] | None = None  # and its placement
        self.known: dict[str, int] = {}  # digests of its variables, and of what was last fetched
        self.unseen: Any = None  # what users had given values when these were last looked at

    def passes(self, what: str, array: np.ndarray) -> None:
        """Keep a copy of what has come to the rank."""
        if self.passed is None or not array.size:
            return
        self.passed[what if what not in self.passed else f"{what}, {len(self.passed)}"] = array.copy()
        self.nbytes += array.nbytes
        self._act(self.tape.check, self.nbytes)  # or memory would have no bound

    def step(self, executor: Executor, sub: SubGraph, program: Program) -> list[np.ndarray]:
        """Run a step, and write it down if it is one that is recorded."""
        if not (sub.updates and self._follows(executor, sub.name)):
            return executor.quiet.run(program.run)
        shapes = next(key[1:] for key, made in reversed(sub.programs.items()) if made is program)
        self.passed, results = {}, list[np.ndarray]()
        for name in self._given(executor.state, sub, program):
            self.passes(f"given {name}", executor.state.arrays[name])
        for name in sorted(program.feeds):
            self.passes(f"feed {name}", program.feeds[name])
        try:
            results = executor.quiet.run(program.run)
            numbers = ", ".join(f"{value.item():.9g}" for value in results if value.size == 1)
            shown = f"fetched {numbers}" if numbers else "ran"
        except BaseException as error:
            shown = f"failed: {type(error).__name__}: {error}"
            raise
        finally:
            ended, feeds = outcome(program, results), dict(zip(sub.placeholders, shapes))
            self._write({"name": sub.name, "feeds": feeds, "shown": shown, "ended": ended})
            self.known |= ended
            self.number += 1
        return results

    def _follows(self, executor: Executor, name: str) -> bool:
        """Whether its steps are recorded. The first step that trains begins with what has arrived until then."""
        if self.followed is None:
            if executor.device.kind != "cpu":
                raise ArgumentError(f"a record of {executor.device}", fix="record on CPUs, or leave out --record")
            self.followed = executor, (spread := executor.placement)
            boxes = {v.name: str(spread.box(v)) for v in executor.variables if isinstance(spread, OnRanks)}
            self._write({**self.about, "boxes": boxes})
        if self.followed != (executor, executor.placement) and not self.over:
            self.unseen = None
            said = f"no step is recorded of {name!r}, as a record is of the first executor that trains, by one strategy"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        return self.followed == (executor, executor.placement) and not self.over

    def _given(self, state: State, sub: SubGraph, program: Program) -> list[str]:
        """The variables that do not have the values which the step before has left, or a chapter begins with."""
        given = self._changed(state, program)
        if self.tape.full:
            begun = {f"given {name}": array for name, array in state.arrays.items() if array.size}
            facts = {"name": "", "feeds": {}, "shown": "", "ended": self.known}
            self._act(self.tape.begin, self.number, begun, facts)
            given = []
        return given + [random_state.name] * sub.random

    def _changed(self, state: State, program: Program) -> list[str]:
        """The variables that have changed between two steps: users gave them values, or other steps updated them, which
        the smallest one tells, such as the count of an optimizer."""
        least = min((v.name for v in program.updates), key=lambda name: int(state.arrays[name].nbytes))
        if self.unseen is state.unseen and self.known[f"variable {least}"] == digest(state.arrays[least]):
            return []
        self.unseen, before = state.unseen, self.known
        self.known = {f"variable {name}": digest(array) for name, array in state.arrays.items()}
        return [key.removeprefix("variable ") for key, now in self.known.items() if now != before.get(key)]

    def _write(self, facts: Mapping[str, Any]) -> None:
        """Add to the tape, with what has passed."""
        passed, self.passed, self.nbytes = self.passed or {}, None, 0
        self._act(self.tape.add, passed, facts)

    def _act(self, act: Callable[..., None], *given: Any) -> None:
        """Act on the tape; what cannot be written ends the record, and not the job."""
        try:
            if not self.over:
                act(*given)
        except (OSError, HetuError) as error:
            self.over, self.passed = True, None
            why, fix = (error.message, error.fix) if isinstance(error, HetuError) else (error.strerror, "make room")
            said = f"the record ends before step {self.number}, and the job goes on without it: {why}; {fix}"
            warnings.warn(said, RuntimeWarning, stacklevel=2)


def outcome(program: Program, results: Sequence[np.ndarray]) -> dict[str, int]:
    """What is compared of a step that has ended: digests of what it fetched and updated."""
    ended = {f"result {number}": value for number, value in enumerate(results)}
    ended |= {f"variable {v.name}": program.state.arrays[v.name] for v in program.updates}
    return {name: digest(array) for name, array in ended.items()}


def begin(folder: str | Path, command: Sequence[str], comm: Comm | None = None, limit: int = LIMIT) -> None:
    """From now on note what this rank hears, for a record in a folder of its own in `folder`.

    `command` runs its script. Steps are recorded inside `stepping(taped)`.
    """
    comm = world() if comm is None else comm
    of_thread.set(TapedComm(comm, Recording(Path(folder) / f"rank{comm.rank}", comm, command, limit)))


def begin_as_told(command: Sequence[str]) -> None:
    """The same for all of this process, as its environment says."""
    begin(os.environ[RECORD], command, limit=int(os.environ.get(RECORD_LIMIT, LIMIT)))
    whole_process.enter_context(stepping(taped))

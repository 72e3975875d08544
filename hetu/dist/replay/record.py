"""Recording a rank: what it is fed, its random state, and what others have sent it, beside each step.

A communicator notes what arrives, and a stepper (`core.executor.stepping`) what the steps of the first executor that
trains begin and end with. Left out: what servers answer, arrays on GPUs, steps that update nothing, those inside
`ht.debug_nans`, and all behind an `Executor.switch`, a full disk, or a step too large for the record, which end it.
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

from ...core.errors import ArgumentError, CheckpointError
from ...core.executor import Executor, stepping
from ...core.leaf import random_state
from ...core.program import Program
from ...core.state import State
from ...core.subgraph import Feed, SubGraph
from ..comm.call import CollectiveCall, PeerMessage
from ..comm.comm import Comm, Handle, of_thread
from ..comm.fed import WeighedFeed
from ..comm.line import CallLine, calling_line, show
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
        self.tape.passes(f"{call.what} of {self.shown}", self.recorder.site, call.out)

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
            self.tape.passes(f"message from rank {self.ranks[source]}", self.recorder.site, out)

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
    return comm.tape.step(executor, sub, program)


class Recording:
    """The record of one rank as it grows.

    What anything but a step that is recorded does to the variables counts as given before the next one.
    """

    def __init__(self, folder: Path, comm: Comm, command: Sequence[str], limit: int = LIMIT) -> None:
        self.tape = Tape(folder, limit)
        self.about = {"version": VERSION, "size": comm.world_size, "command": [*command]}
        self.messages: dict[str, np.ndarray] | None = {}  # None between steps, when nothing is kept
        self.followed: Executor | None = None
        self.spread: Any = None  # its placement
        self.number, self.nbytes = 0, 0  # of the next step; of messages
        self.known: dict[str, int] = {}  # digests of its variables
        self.unseen: Any = None  # what users had given values when these were last looked at
        self.over = False  # whether no more is kept

    def passes(self, what: str, line: CallLine, out: np.ndarray) -> None:
        """Keep a copy of what has arrived, and for which line."""
        if self.messages is None or self.over or not out.size:
            return
        self.messages[f"message/{len(self.messages):06d}/{what} for {show(line or calling_line())}"] = out.copy()
        self.nbytes += out.nbytes
        if self.nbytes > self.tape.limit:  # or memory would have none
            self._end(f"{self.nbytes:,} bytes have arrived, and the record takes {self.tape.limit:,} at most")

    def step(self, executor: Executor, sub: SubGraph, program: Program) -> list[np.ndarray]:
        """Run a step, and write it down if it is one that is recorded."""
        if self.followed is None and sub.updates:
            self._follow(executor)
        if executor is self.followed and executor.placement is not self.spread and not self.over:
            self._end("it has gone over to another strategy, and a record is of one")
        if self.over or executor is not self.followed or not sub.updates:
            self._pass_over(sub)
            return executor.quiet.run(program.run)
        arrays = self._given(executor.state, sub, program)
        shapes = next(key[1:] for key, made in reversed(sub.programs.items()) if made is program)
        results, failed, self.messages = list[np.ndarray](), "", {}
        try:
            results = executor.quiet.run(program.run)
        except BaseException as error:
            failed = f"{type(error).__name__}: {error}"
            raise
        finally:
            facts = {"name": sub.name, "shapes": shapes, "failed": failed, **outcome(program, results)}
            self._write(arrays, facts)
            self.known |= {v.name: facts["ended"][f"variable/{v.name}"] for v in program.updates}
            self.number += 1
        return results

    def _follow(self, executor: Executor) -> None:
        """The first step that trains begins: write down what has arrived until now."""
        if executor.device.kind != "cpu":
            raise ArgumentError(f"a record of {executor.device}", fix="record on CPUs, and leave --record out on GPUs")
        self.followed = executor
        made = f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.platform()}"
        self.spread = spread = executor.placement
        boxes = {v.name: str(spread.box(v)) for v in executor.variables if isinstance(spread, OnRanks)}
        around = {name: os.environ[name] for name in AROUND if name in os.environ}
        facts = {**self.about, "folder": os.getcwd(), "environment": around, "made": made, "boxes": boxes}
        self._write({}, facts)

    def _pass_over(self, sub: SubGraph) -> None:
        """A step that is not recorded begins."""
        if sub.updates and not self.over:
            self.unseen = None
            said = "no step of it is recorded: a record is of the first executor that trains"
            warnings.warn(f"{sub.name!r} of another executor trains; {said}", RuntimeWarning, stacklevel=2)

    def _given(self, state: State, sub: SubGraph, program: Program) -> dict[str, np.ndarray]:
        """Copies of what a step begins with beside the values that the one before has left."""
        given = self._changed(state, program)
        if self.tape.full:
            begun = {f"given/{name}": array for name, array in state.arrays.items()}
            ended = {f"variable/{name}": number for name, number in self.known.items()}
            facts = {"name": "", "shapes": [], "shown": "", "failed": "", "ended": ended}
            self._act(self.tape.begin, self.number, begun, facts)
            given = []
        given += [random_state.name] * sub.random
        arrays = {f"given/{name}": state.arrays[name] for name in given}
        arrays |= {f"feed/{name}": buffer for name, buffer in program.feeds.items()}
        return {name: array.copy() for name, array in arrays.items()}

    def _changed(self, state: State, program: Program) -> list[str]:
        """The variables that have changed between two steps: users gave them values, or other steps updated them, which
        the smallest one tells, such as the count of an optimizer."""
        least = min((v.name for v in program.updates), key=lambda name: int(state.arrays[name].nbytes))
        if self.unseen is state.unseen and self.known[least] == digest(state.arrays[least]):
            return []
        self.unseen, before = state.unseen, self.known
        self.known = {name: digest(array) for name, array in state.arrays.items()}
        return [name for name, now in self.known.items() if now != before.get(name)]

    def _write(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        """Add to the tape, with the messages that have arrived."""
        messages, self.messages, self.nbytes = self.messages or {}, None, 0
        self._act(self.tape.add, {**arrays, **messages}, facts)

    def _act(self, act: Callable[..., None], *given: Any) -> None:
        """Act on the tape; what cannot be written ends the record, and not the job."""
        try:
            if not self.over:
                act(*given)
        except OSError as error:
            self._end(f"{error.strerror}; make room, or lower its heturun --record-limit")
        except (ArgumentError, CheckpointError) as error:
            self._end(f"{error.message}; {error.fix}")

    def _end(self, why: str) -> None:
        self.over, self.messages = True, None
        said = f"the record ends before step {self.number}, and the job goes on without it: {why}"
        warnings.warn(said, RuntimeWarning, stacklevel=2)


def outcome(program: Program, results: Sequence[np.ndarray]) -> dict[str, Any]:
    """What is compared of a step that has ended: digests of what it fetched and updated; and numbers as they read."""
    ended = {f"result/{number}": value for number, value in enumerate(results)}
    ended |= {f"variable/{v.name}": program.state.arrays[v.name] for v in program.updates}
    shown = ", ".join(f"{value.item():.9g}" for value in results if value.size == 1)
    return {"ended": {name: digest(array) for name, array in ended.items()}, "shown": shown}


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

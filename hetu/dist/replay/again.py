"""`hetu replay RECORD --rank 2 --step 1200`: one rank of a recorded job again, alone, and equal to it bit for bit.

The script runs until an executor begins a step that trains; whatever it communicates until then is answered from the
record. There the replay takes over: variables are those of the record's last checkpoint before the step, and each step
from there on is fed, and hears of others, what it did then. Left out: what the script does behind its first step.
"""

from __future__ import annotations

import argparse
import os
import pdb
import shlex
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ... import system
from ...core.errors import HetuError
from ...core.executor import Executor, stepping
from ...core.program import Program
from ...core.subgraph import SubGraph
from ...job import RANK_VARIABLES, SIZE_VARIABLES
from ...look.nans import apart, watched
from ..comm.call import show_array
from ..comm.comm import of_thread
from ..comm.seat import Seat
from ..launch.boot import run_script
from ..launch.heturun import script_of
from .record import AROUND, TapedComm, outcome, taped
from .tape import Frame, Record, RecordError, numbered, plain

FED = 8  # a part of the memory that a feed may take
NOTHING = np.zeros(1, bool)
OnStep = Callable[[Program], None] | None
SAME = "replay by the script, the arguments and the data that were recorded"


class CameToStep(BaseException):
    """Ends the script, whose replay has come to its step; it is no `Exception`, which scripts catch."""


class Replay:
    """A tape that takes over from the script, and goes on to a `step` of a record.

    With `nans` steps are watched as by `ht.debug_nans`; with `pause` a debugger is entered before the step; `look` is
    given the program of the step instead, with each operator by itself.
    """

    def __init__(self, record: Record, step: int, nans: bool = False, pause: bool = False, look: OnStep = None) -> None:
        self.frames, self.number, self.made = record.way(step), step, record.start.facts["made"]
        self.nans, self.pause, self.look, self.doing = nans, pause, look, "before the first step"
        self.comm = TapedComm(Seat(record.rank, record.start.facts["size"]), self)
        self.hear(record.start.arrays())

    def hear(self, told: Mapping[str, np.ndarray] | None) -> None:
        """What passes from now on, in its order; None while one compiles, to which others only agree."""
        self.left = None if told is None else deque(told.items())

    def passes(self, what: str, array: np.ndarray) -> None:
        """Write what comes next into `array`. RecordError if the script asks for another one."""
        if self.left is None or not array.size:
            return
        name, value = self.left.popleft() if self.left else ("nothing more", NOTHING)
        asked, told = ((of.partition(" for ")[0], show_array(x)) for of, x in ((what, array), (name, value)))
        if asked != told:
            raise RecordError(f"the script has {what} ({asked[1]}), the record {name} ({told[1]})", fix=SAME)
        array[...] = value

    def step(self, executor: Executor, sub: SubGraph, program: Program) -> list[np.ndarray]:
        """Run one that does not train; the first that does is where the script ends."""
        if not sub.updates:
            return executor.quiet.run(program.run)
        for number, told in enumerate(self.frames, self.number - len(self.frames) + 1):
            passed = told.arrays()
            self.hear(passed)
            variables = {f"given {name}": array for name, array in executor.state.arrays.items()}
            for name in [name for name in passed if name.startswith("given ")]:
                self.passes(name if name in variables else "no such variable", variables.get(name, NOTHING))
            if told is not self.frames[0]:
                self.doing = f"step {number}"
                self._again(executor, told, dict(self.left or ()))
        raise CameToStep

    def _again(self, executor: Executor, told: Frame, passed: Mapping[str, np.ndarray]) -> None:
        """Run a step as it was begun. RecordError if it ends otherwise than it did."""
        self.hear(None)
        sub, shapes = _asked(executor, told.facts)
        program = executor.compiled(sub, shapes, executor.donate)

        def feed(program: Program) -> None:
            self.hear(passed)
            for name in sorted(program.feeds):
                self.passes(f"feed {name}", program.feeds[name])

        def run() -> list[np.ndarray]:
            feed(program)
            return executor.quiet.run(program.run)

        def careful() -> Program:
            self.hear(None)
            made = apart(executor, sub, shapes)
            feed(made)
            made.steps[:1] = [replace(step, calls=(partial(feed, made), *step.calls)) for step in made.steps[:1]]
            return made

        is_last, then = told is self.frames[-1], told.facts["ended"]
        if is_last and self.look is not None:
            return self.look(careful())
        if is_last and self.pause:
            feed(program)
            breakpoint()  # look at `passed`, `program.feeds`, `executor.state`; the next line runs the step
        results = watched(executor, program, run, careful) if self.nans else run()
        differs = [f"it did not ask for {name}" for name, _ in self.left or ()]
        differs += [f"{key} is another" for key, _ in sorted(outcome(program, results).items() ^ then.items())]
        if differs:
            raise RecordError(f"the step is not what it was: {differs[0]}", fix=f"{SAME}, by {self.made}")


def _asked(executor: Executor, facts: Mapping[str, Any]) -> tuple[SubGraph, dict[str, np.ndarray]]:
    """The sub-graph of a step, and what has the shapes of its feeds, whose parts for this rank lie in the record."""
    try:
        sub = executor.subgraphs[facts["name"]]
        shapes = sub.match({name: np.broadcast_to(np.False_, shape) for name, shape in facts["feeds"].items()})
    except (KeyError, ValueError):
        said = f"the script has no sub-graph {facts['name']!r} with feeds {facts['feeds']}"
        raise RecordError(said, fix=SAME) from None
    if sum(v.size * sub.placeholders[name].dtype.itemsize for name, v in shapes.items()) > system.memory() / FED:
        raise RecordError(f"the feeds {facts['feeds']} are too large here", fix="replay where memory is larger")
    return sub, shapes


def is_another_users(record: Record) -> bool:
    return hasattr(os, "getuid") and record.start.path.stat().st_uid != os.getuid()


def environment(record: Record) -> dict[str, str]:
    """The variables that a rank's process had, and those that told it of its job; of another user none that names a
    command, as `HETU_CC` does, and of nobody any that are not recorded: `LD_PRELOAD` would run what it names."""
    facts, names = record.start.facts, {*AROUND} - ({"HETU_CC"} if is_another_users(record) else set())
    job = {SIZE_VARIABLES[0]: str(facts["size"]), RANK_VARIABLES[0]: str(record.rank)}
    around = {name: value for name, value in facts["environment"].items() if name in names}
    return {**around, **(job if facts["size"] > 1 else {})}


def run_again(record: Record, replay: Replay, given: Sequence[str]) -> None:
    """Run the `given` script, or that of the record, until the replay has come to its step. RecordError if it does not
    come that far, or none is given and that of the record is another user's, or is gone."""
    folder, command = Path(record.start.facts["folder"]), script_of(given or record.start.facts["command"])[1]
    if not given:
        is_there = folder.is_dir() and (command[0] == "-m" or (folder / command[0]).is_file())
        if is_another_users(record) or not is_there:
            said = f"{shlex.join(command)!r} in {str(folder)!r} is gone, or told by another user's record"
            raise RecordError(said, fix="say what to run, with the arguments that it had: --run python train.py")
        os.chdir(folder)
    of_thread.set(replay.comm)
    try:
        with stepping(taped):
            run_script(command)
    except CameToStep:
        return
    raise RecordError(f"{shlex.join(command)} ended without a step that trains", fix=SAME)


def listed(path: Path) -> str:
    """What is in a record, a line for each rank."""
    records = [Record(path, rank) for rank in numbered(path, "rank") or [0]]
    facts = records[0].start.facts
    lines = [f"{shlex.join(facts['command'])} on {facts['size']} rank{'s' * (facts['size'] > 1)}, by {facts['made']}"]
    for record in records:
        told = record.way(record.last)[-1].facts
        lines.append(f"rank {record.rank}: {record.window}; the last, of {told['name']!r}, {told['shown']}")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `hetu replay`."""
    add = parser.add_argument
    add("record", type=Path, metavar="RECORD", help="the folder of heturun --record; with nothing else: what it has")
    add("--rank", type=int, metavar="R", help="which rank (default: 0)")
    add("--step", type=int, metavar="N", help="which of its steps that train, counted from 0 (default: the last)")
    add("--nans", action="store_true", help="name the line that makes the first NaN on the way")
    add("--pdb", action="store_true", help="enter a debugger before the step, and where it fails")
    add_run(parser)


def add_run(parser: argparse.ArgumentParser) -> None:
    said = "python train.py and its arguments, at the end of the line (default: what was recorded)"
    parser.add_argument("--run", nargs=argparse.REMAINDER, default=[], help=said)


def main(args: argparse.Namespace) -> int:
    """`hetu replay`: 0 if the step is equal to the record, 1 if it fails."""
    if args.rank is None and args.step is None:
        print(plain(listed(args.record)))
        return 0
    rank = args.rank or 0
    record = Record(args.record, rank)
    step = record.last if args.step is None else args.step
    replay, wanted = Replay(record, step, args.nans, args.pdb), environment(record)
    if any(os.environ.get(name) != value for name, value in wanted.items()):  # they are read as hetu is imported
        os.environ |= wanted
        system.become([sys.executable, "-m", "hetu", *sys.argv[1:]])
    try:
        run_again(record, replay, args.run)
    except (Exception, KeyboardInterrupt) as error:
        print(f"rank {rank}, {replay.doing}:", file=sys.stderr)
        if args.pdb and not isinstance(error, RecordError):
            pdb.post_mortem(error.__traceback__)
        if not isinstance(error, HetuError):
            raise
        print(error.text(), file=sys.stderr)
        return 1
    print(plain(f"rank {rank}, step {step} {replay.frames[-1].facts['shown']}: equal to the record bit for bit"))
    return 0

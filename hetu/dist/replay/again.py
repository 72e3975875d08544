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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ... import system
from ...core.errors import HetuError
from ...core.executor import Executor, stepping
from ...core.program import Program, Step
from ...core.state import State
from ...core.subgraph import SubGraph
from ...core.types import TensorType
from ...job import RANK_VARIABLES, SIZE_VARIABLES
from ...look.nans import apart, watched
from ..comm.call import show_array
from ..comm.comm import of_thread
from ..comm.line import CallLine
from ..comm.seat import Seat
from ..launch.boot import run_script
from ..launch.heturun import script_of
from .record import AROUND, TapedComm, outcome, taped
from .tape import Frame, Record, RecordError, numbered, plain

FED = 8  # a part of the memory that a feed may take
WORDS = {"given": "what was given to", "feed": "the feed", "shapes": "the shapes of feeds"}
NOTHING = np.empty(0, np.uint8)
SAME = "replay by the script, the arguments and the data that were recorded"


class CameToStep(BaseException):
    """Ends the script, whose replay has come to its step; it is no `Exception`, which scripts catch."""


class Replay:
    """A tape that takes over from the script, and goes on to a `step` of a record.

    With `nans` steps are watched as by `ht.debug_nans`; with `pause` a debugger is entered before the step; `look` is
    given the program of the step instead, with each operator by itself.
    """

    def __init__(
        self,
        record: Record,
        step: int,
        nans: bool = False,
        pause: bool = False,
        look: Callable[[Program], None] | None = None,
    ) -> None:
        (self.before, *self.steps), self.number = record.way(step), step
        self.nans, self.pause, self.look, facts = nans, pause, look, record.start.facts
        self.made, self.doing = facts["made"], "before the first step"
        self.comm = TapedComm(Seat(record.rank, facts["size"]), self)
        self.hear(record.start.arrays()["message"])

    def hear(self, messages: Mapping[str, np.ndarray] | None) -> None:
        """What is heard of others from now on, in its order; None while one compiles, which others only agree to."""
        self.left = None if messages is None else deque(sorted(messages.items()))

    def passes(self, what: str, line: CallLine, out: np.ndarray) -> None:
        """Write the next message into `out`. RecordError if the script asks for another one."""
        if self.left is None or not out.size:
            return
        name, value = self.left.popleft() if self.left else ("", NOTHING)
        told, _, at = name.partition("/")[2].partition(" for ")
        if (told, value.size, value.dtype) != (what, out.size, out.dtype):
            has = f"{told} {show_array(value)} for {at}" if name else "nothing more"
            raise RecordError(f"the script asks for {what} {show_array(out)}, the record has {has}", fix=SAME)
        out.reshape(-1)[:] = value.reshape(-1)

    def step(self, executor: Executor, sub: SubGraph, program: Program) -> list[np.ndarray]:
        """Run one that does not train; the first that does is where the script ends."""
        if not sub.updates:
            return executor.quiet.run(program.run)
        _assign(executor.state, self.before.arrays()["given"])
        for number, told in enumerate(self.steps, self.number - len(self.steps) + 1):
            self.doing = f"step {number}"
            self._again(executor, told, number == self.number)
        raise CameToStep

    def _again(self, executor: Executor, told: Frame, last: bool) -> None:
        """Run a step as it was begun, and compare what comes of it."""
        arrays = told.arrays()
        fed = arrays["feed"]
        _assign(executor.state, arrays["given"])
        self.hear(None)
        sub, shapes = _asked(executor, told.facts)
        program = _filled(executor.compiled(sub, shapes, executor.donate), fed)

        def run() -> list[np.ndarray]:
            self.hear(arrays["message"])
            return executor.quiet.run(program.run)

        def careful() -> Program:
            self.hear(None)
            made = _filled(apart(executor, sub, shapes), fed)
            made.steps.insert(0, Step(made.steps[0].node, (), (partial(self.hear, arrays["message"]),)))
            return made

        if last and self.look is not None:
            return self.look(careful())
        if last and self.pause:
            breakpoint()  # look at `fed`, `executor.state`, `print(program)`; the next line runs the step
        results = watched(executor, program, run, careful) if self.nans else run()
        self._compare(told.facts, outcome(program, results))

    def _compare(self, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """RecordError if a step has ended otherwise than it did."""
        differs = [f"it ended, and failed then: {then['failed']}"] if then["failed"] else []
        differs += [f"it did not ask for {name.partition('/')[2]}" for name, _ in self.left or ()]
        differs += [f"{words(key)} is another" for key, _ in sorted(now["ended"].items() ^ then["ended"].items())]
        if differs:
            raise RecordError(f"the step is not what it was: {differs[0]}", fix=f"{SAME}, by {self.made}")


def _check(what: str, here: Mapping[str, np.ndarray], then: Mapping[str, np.ndarray]) -> None:
    """RecordError unless arrays of the script have the names, shapes and dtypes of those of the record."""
    now, was = ({name: show_array(array) for name, array in arrays.items()} for arrays in (here, then))
    for name in sorted(name for name, _ in now.items() ^ was.items()):
        said = (
            f"the {what} {name!r} of the script is {now.get(name, 'not there')}, and was {was.get(name, 'not there')}"
        )
        raise RecordError(said, fix=SAME)


def _assign(state: State, given: Mapping[str, np.ndarray]) -> None:
    """Give variables the values that they had."""
    _check("variable", {name: array for name, array in state.arrays.items() if name in given}, given)
    state.assign(given)


def _asked(executor: Executor, facts: Mapping[str, Any]) -> tuple[SubGraph, dict[str, np.ndarray]]:
    """The sub-graph of a step, and what has the shapes of what was fed, whose parts for this rank lie in the record."""
    sub, shapes = executor.subgraphs.get(facts["name"]), facts["shapes"]
    if sub is None or [*map(len, shapes)] != [n.ndim for n in sub.placeholders.values()]:
        raise RecordError(f"the script has no sub-graph {facts['name']!r} with feeds of shapes {shapes}", fix=SAME)
    types = {name: TensorType(tuple(shape), n.dtype) for (name, n), shape in zip(sub.placeholders.items(), shapes)}
    if large := [f"{name!r} {type_}" for name, type_ in types.items() if int(type_.nbytes) > system.memory() / FED]:
        raise RecordError(f"the feed {large[0]} of the record is too large here", fix="replay where memory is larger")
    return sub, {name: np.broadcast_to(np.zeros((), t.dtype), [*map(int, t.shape)]) for name, t in types.items()}


def _filled(program: Program, fed: Mapping[str, np.ndarray]) -> Program:
    """A program with these feeds in its buffers."""
    _check("feed", program.feeds, fed)
    for name, value in fed.items():
        program.feeds[name][...] = value
    return program


def words(key: str) -> str:
    """`feed/x` as `the feed 'x'`."""
    kind, _, name = key.partition("/")
    if kind == "message":
        number, _, what = name.partition("/")
        return f"message {number.lstrip('0') or 0}, {what}"
    return f"{WORDS.get(kind, kind)} {name if name.isdecimal() else name and repr(name)}".rstrip()


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
    """Run the `given` script, or that of the record, which then is this user's, until the replay has come to its step.

    RecordError if it does not come that far."""
    facts, command = record.start.facts, script_of(given)[1] if given else record.start.facts["command"]
    if not given:
        if is_another_users(record):
            said = f"another user's record would run {shlex.join(command)!r}"
            raise RecordError(said, fix="say what to run: --run python train.py")
        os.chdir(facts["folder"] if Path(facts["folder"]).is_dir() else ".")
        if command[0] != "-m" and not Path(command[0]).is_file():
            said = f"{facts['folder']!r} has no script {command[0]!r} any more"
            raise RecordError(said, fix="say where it is: --run python train.py, with the arguments that it had")
    of_thread.set(replay.comm)
    try:
        with stepping(taped):
            run_script([*command])
    except CameToStep:
        return
    raise RecordError(f"{shlex.join(command)} ended without a step that trains", fix=SAME)


def told_of(number: int, told: Frame) -> str:
    """`step 1200 of 'train': fetched 0.693, 24 variables updated, 14 messages`."""
    facts = told.facts
    keys = [key.partition("/")[0] for key in (*facts["ended"], *facts["digests"])]
    variables, messages = (
        f"{n} {what}{'s' * (n != 1)}" for what in ("variable", "message") for n in [keys.count(what)]
    )
    fetched = f"fetched {facts['shown']}, " if facts["shown"] else ""
    failed = f", failed: {facts['failed']}" if facts["failed"] else ""
    return f"step {number} of {facts['name']!r}: {fetched}{variables} updated, {messages}{failed}"


def listed(path: Path) -> str:
    """What is in a record, a line for each rank."""
    records = [Record(path, rank) for rank in numbered(path, "rank") or [0]]
    facts = records[0].start.facts
    lines = [f"{shlex.join(facts['command'])} on {facts['size']} rank{'s' * (facts['size'] > 1)}, by {facts['made']}"]
    for record in records:
        last = told_of(record.last, record.way(record.last)[-1])
        lines.append(f"rank {record.rank}: {record.window}; the last is {last}")
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
        more = ["--nans"] * args.nans + ["--pdb"] * args.pdb + ["--run", *args.run] * bool(args.run)
        line = ["replay", str(args.record), "--rank", str(rank), "--step", str(step), *more]
        system.become([sys.executable, "-m", "hetu", *line])
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
    print(plain(f"rank {rank}, {told_of(step, replay.steps[-1])}: equal to the record bit for bit"))
    return 0

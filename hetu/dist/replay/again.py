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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ... import system
from ...checkpoint import Checkpoint
from ...core.errors import CheckpointError, HetuError
from ...core.executor import Executor, stepping
from ...core.leaf import random_state
from ...core.program import Program, Step
from ...core.subgraph import Feed, SubGraph
from ...job import RANK_VARIABLES, SIZE_VARIABLES
from ...look.nans import apart, watched
from ..comm.call import CollectiveCall, PeerMessage, show_array
from ..comm.comm import Comm, Handle, of_thread
from ..comm.recorder import Raw
from ..launch.boot import run_script
from ..launch.heturun import script_of
from .record import AROUND, Then, collective, message_from, outcome, random_of
from .tape import Frame, Record, RecordError, damaged, digest, plain, ranks_of, record_of

SAME = "replay by the script, the arguments and the data that were recorded"


class Heard:
    """What a rank has heard of others, in its order. Without a frame the others say what the rank itself says, as
    those do that compare what they compile."""

    def __init__(self, frame: Frame) -> None:
        self.take(frame)

    def take(self, frame: Frame | None) -> None:
        """From now on give what this frame has."""
        self.frame, self.at = frame, 0
        arrays, told = (frame.arrays("message/"), frame.facts["messages"]) if frame else ({}, [])
        self.messages = [(what, line, arrays[str(number)]) for number, (what, line) in enumerate(told)]

    def give(self, what: str, out: np.ndarray, x: np.ndarray) -> None:
        """Write the next message into `out`. RecordError if the script asks for another one."""
        if self.frame is None or not out.size:
            out.reshape(-1)[:] = np.resize(x, out.size)
            return
        told, line, value = self.messages[self.at] if self.at < len(self.messages) else ("nothing more", "?", out[:0])
        if (told, value.size, value.dtype) != (what, out.size, out.dtype):
            said = f"the script asks for {what} {show_array(out)}, the record has {told} {show_array(value)} for {line}"
            raise RecordError(said, fix=SAME)
        out.reshape(-1)[:] = value.reshape(-1)
        self.at += 1


class HeardComm(Comm):
    """A rank whose others are no more than a record."""

    def __init__(self, heard: Heard, rank: int, ranks: Sequence[int]) -> None:
        super().__init__(rank, ranks, deadline=0.0)
        self.heard = heard

    def _start(self, call: CollectiveCall) -> Handle:
        return Then(lambda: self.heard.give(collective(call, self.ranks), call.out, call.x))

    def _exchange(self, sends: Sequence[PeerMessage], recvs: Sequence[PeerMessage], noted: Sequence[Raw]) -> None:
        for source, out in recvs:
            self.heard.give(message_from(self.ranks[source]), out, out)

    def _split(self, group: tuple[int, ...]) -> Comm:
        return HeardComm(self.heard, group.index(self.rank), [self.ranks[rank] for rank in group])


class CameToStep(BaseException):
    """Ends the script, whose replay has come to its step; it is no `Exception`, which scripts catch."""


class Replay:
    """A stepper that takes over from the script, and goes on to a `step` of a record.

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
        self.checkpoint, self.frames = record.way(step)
        self.nans, self.pause, self.look, facts = nans, pause, look, record.start.facts
        self.heard, self.made, self.doing = Heard(record.start), facts["made"], "before the first step"
        self.comm = HeardComm(self.heard, facts["rank"], range(facts["size"]))

    def __call__(self, executor: Executor, sub: SubGraph, feed: Feed | None, program: Program) -> list[np.ndarray]:
        if of_thread.get() is not self.comm or not sub.updates:
            return executor.quiet.run(program.run)
        state, before = executor.state, self.frames[0].facts["before"]
        try:
            Checkpoint(self.checkpoint)
        except CheckpointError as error:
            raise damaged(self.checkpoint, 0, error.message) from None
        try:
            state.load(self.checkpoint)
        except CheckpointError as error:
            raise RecordError(error.message, fix=SAME) from None
        if changed := [name for name, array in state.arrays.items() if digest(array) != before.get(name)]:
            raise damaged(self.checkpoint, 0, f"the bits of {changed[0]!r} have changed")
        for frame in self.frames:
            self.doing = f"step {frame.facts['step']}"
            self._again(executor, frame, frame is self.frames[-1])
        raise CameToStep

    def _again(self, executor: Executor, frame: Frame, last: bool) -> None:
        """Run the step of a frame, and compare what comes of it."""
        facts, state = frame.facts, executor.state
        given, fed = frame.arrays("given/"), frame.arrays("feed/")
        sub = executor.subgraphs.get(facts["name"])
        if sub is None or [len(shape) for shape in facts["shapes"]] != [n.ndim for n in sub.placeholders.values()]:
            raise RecordError(f"the script has no sub-graph {facts['name']!r} with these feeds: {[*fed]}", fix=SAME)
        nothing = zip(sub.placeholders.items(), facts["shapes"])  # only shapes count: what lies in buffers is in `fed`
        shapes = {name: np.broadcast_to(np.zeros((), node.dtype), shape) for (name, node), shape in nothing}
        kept = {name: show_array(state.arrays[name]) for name in given.keys() & state.arrays}
        if odd := [f"{name!r} {show_array(a)}" for name, a in given.items() if kept.get(name) != show_array(a)]:
            raise RecordError(f"the script has no variable {odd[0]}, which was given a value", fix=SAME)
        state.assign(given)
        self.heard.take(None)
        program = _filled(executor.compiled(sub, shapes, executor.donate), fed)
        if random_of(state) != facts["random"]:
            raise RecordError(f"the random state is {random_of(state)}, and was {facts['random']}", fix=SAME)

        def run() -> list[np.ndarray]:
            self.heard.take(frame)
            return executor.quiet.run(program.run)

        def careful() -> Program:
            self.heard.take(None)
            made = _filled(apart(executor, sub, shapes), fed)
            made.steps.insert(0, Step(made.steps[0].node, (), (lambda: self.heard.take(frame),)))
            return made

        if last and self.look is not None:
            return self.look(careful())
        if last and self.pause:
            breakpoint()  # look at `fed`, `executor.state`, `print(program)`; the next line runs the step
        results = watched(executor, program, run, careful) if self.nans else run()
        if sub.random:
            state.arrays[random_state.name][1] += np.uint64(1)
        self._compare(facts, outcome(program, results))

    def _compare(self, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """RecordError if a step has ended otherwise than it did."""
        differs = [f"it ended, and failed then: {then['failed']}"] if then["failed"] else []
        differs += [f"it did not ask for {what} for {line}" for what, line, _ in self.heard.messages[self.heard.at :]]
        pairs = enumerate(zip(now["results"], then["results"]))
        differs += [f"result {number} is another" for number, (one, other) in pairs if one != other]
        names = now["variables"].keys() | then["variables"]
        differs += [f"{n!r} is another" for n in names if now["variables"].get(n) != then["variables"].get(n)]
        if differs:
            raise RecordError(f"the step is not what it was: {differs[0]}", fix=f"{SAME}, by {self.made}")


def _filled(program: Program, fed: Mapping[str, np.ndarray]) -> Program:
    """A program with these feeds in its buffers."""
    here, then = ({name: show_array(array) for name, array in arrays.items()} for arrays in (program.feeds, fed))
    if here != then:
        raise RecordError(f"the script is fed {here}, and was fed {then}", fix=SAME)
    for name, value in fed.items():
        program.feeds[name][...] = value
    return program


def is_another_users(start: Frame) -> bool:
    return hasattr(os, "getuid") and start.path.stat().st_uid != os.getuid()


def environment(start: Frame) -> dict[str, str]:
    """The variables that a rank's process had, and those that told it of its job; of another user none that names a
    command, as `HETU_CC` does, and of nobody any that are not recorded: `LD_PRELOAD` would run what it names."""
    facts, names = start.facts, {*AROUND} - ({"HETU_CC"} if is_another_users(start) else set())
    job = {SIZE_VARIABLES[0]: str(facts["size"]), RANK_VARIABLES[0]: str(facts["rank"])}
    around = {name: value for name, value in facts["environment"].items() if name in names}
    return {**around, **(job if facts["size"] > 1 else {})}


def run_again(record: Record, replay: Replay, given: Sequence[str]) -> None:
    """Run the `given` script, or that of the record, which then is this user's, until the replay has come to its step.

    RecordError if it does not come that far."""
    facts, command = record.start.facts, script_of(given)[1] if given else record.start.facts["command"]
    if not given:
        if is_another_users(record.start):
            said = f"another user's record would run {shlex.join(command)!r}"
            raise RecordError(said, fix="say what to run: --run python train.py")
        os.chdir(facts["folder"] if Path(facts["folder"]).is_dir() else ".")
        if command[0] != "-m" and not Path(command[0]).is_file():
            said = f"{facts['folder']!r} has no script {command[0]!r} any more"
            raise RecordError(said, fix="say where it is: --run python train.py, with the arguments that it had")
    of_thread.set(replay.comm)
    try:
        with stepping(replay):
            run_script([*command])
    except CameToStep:
        return
    raise RecordError(f"{shlex.join(command)} ended without a step that trains", fix=SAME)


def told_of(frame: Frame) -> str:
    """`step 1200 of 'train': fetched 0.693, 24 variables updated, 14 messages`."""
    facts = frame.facts
    fetched = [f"fetched {', '.join(filter(None, facts['shown']))}"] if any(facts["shown"]) else []
    numbers = {what: len(facts[f"{what}s"]) for what in ("variable", "message")}
    variables, messages = (f"{number} {what}{'s' * (number != 1)}" for what, number in numbers.items())
    counts = f"{variables} updated", messages
    failed = [f"failed: {facts['failed']}"] if facts["failed"] else []
    return f"step {facts['step']} of {facts['name']!r}: {', '.join([*fetched, *counts, *failed])}"


def listed(path: Path) -> str:
    """What is in a record, a line for each rank."""
    records = [record_of(path, rank) for rank in ranks_of(path) or [0]]
    facts = records[0].start.facts
    lines = [f"{shlex.join(facts['command'])} on {facts['size']} rank{'s' * (facts['size'] > 1)}, by {facts['made']}"]
    for record in records:
        last = told_of(record.steps[max(record.steps)])
        lines.append(f"rank {record.start.facts['rank']}: {record.window}; the last is {last}")
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
    record = record_of(args.record, rank)
    step = max(record.steps) if args.step is None else args.step
    replay, wanted = Replay(record, step, args.nans, args.pdb), environment(record.start)
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
    print(plain(f"rank {rank}, {told_of(replay.frames[-1])}: equal to the record bit for bit"))
    return 0

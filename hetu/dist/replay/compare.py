"""`hetu compare A B`: the first step, node and line where two runs of a job part, or two ranks of one.

Records tell the step, and whether something else was fed, or heard, in it. If not, both run it again, each in a process
of its own, and values are compared node by node: the first that differs although all that it is made of is alike. Two
ranks are compared in the parts of variables that both keep, and in what both hear of all: they may be fed other things.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.op import Role
from ...core.program import Program
from ...core.types import is_float
from ..comm.call import show_array
from ..comm.recorder import named
from .again import SAME, Replay, add_run, environment, run_again
from .tape import Frame, Record, RecordError, digest, plain, record_of

NodeRow = dict[str, Any]  # of one node: how it reads, which rows it is made of, and digests of its values
ITS_OWN = {Role.PLACEHOLDER: "feed", Role.VARIABLE: "variable", Role.COMMUNICATION: "message"}  # of a rank, if need be
TOLD = ("name", "shapes", "random")  # in which frames say themselves what they have
WORDS = {"name": "the sub-graph", "shapes": "the shapes of feeds", "random": "the random state", "given": "what was "
         "given to", "feed": "the feed", "result": "result", "variable": "variable"}  # fmt: skip
GIVE_ALL_THE_SAME = ("all_reduce", "all_gather", "broadcast")
NAMED = 8  # differences
OUTSIDE = "the cause lies outside: "


def seen(frame: Frame) -> dict[str, Any]:
    """What is compared of a step, in the order of causes."""
    facts, kinds = frame.facts, ("given/", "feed/", "message/")
    found = {key: facts[key] for key in TOLD}
    found |= {name: value for kind in kinds for name, value in facts["digests"].items() if name.startswith(kind)}
    found |= {f"result/{number}": value for number, value in enumerate(facts["results"])}
    return found | {f"variable/{name}": value for name, value in facts["variables"].items()}


def words(key: str, frame: Frame) -> str:
    """What a key of `seen` is."""
    kind, _, name = key.partition("/")
    if kind != "message":
        return f"{WORDS[kind]} {name if name.isdecimal() else name and repr(name)}".rstrip()
    what, line = frame.facts["messages"][int(name)] if int(name) < len(frame.facts["messages"]) else ("", "?")
    return f"message {name}, {what} for {line}"


def parted(a: Record, b: Record, ranks: bool) -> tuple[int, list[str]] | None:
    """The first step that differs, and in what; None if none does. RecordError if there is none that both have."""
    both = sorted(a.steps.keys() & b.steps.keys())
    if not both:
        said = f"one record has {a.window}, the other {b.window}"
        raise RecordError(said, fix="record both for as long: heturun --record-limit")
    before, other = (record.way(both[0])[1][0].facts["before"] for record in (a, b))
    boxes, there = a.start.facts["boxes"], b.start.facts["boxes"]
    kept = [name for name in before if before[name] == other.get(name) and boxes.get(name) == there.get(name)]
    for step in both:
        frames = a.steps[step], b.steps[step]
        one, two = map(seen, frames)
        differs = [key for key in {**one, **two} if one.get(key) != two.get(key)]
        if ranks:  # which may well be fed, sent and told other things
            alike = {f"variable/{name}" for name in kept}
            pairs = enumerate(zip(*(frame.facts["messages"] for frame in frames)))
            alike |= {f"message/{n}" for n, (x, y) in pairs if x[0] == y[0] and x[0].startswith(GIVE_ALL_THE_SAME)}
            differs = [key for key in differs if key in alike]
        if differs:
            return step, differs
    return None


# -- running a step again ----------------------------------------------------------------------------------------------


def rows(program: Program) -> Iterator[tuple[NodeRow, list[np.ndarray]]]:
    """Run a program node by node: what each is, and its values."""
    steps, at = {step.node: step.calls for step in program.steps[1:]}, {}
    for call in program.steps[0].calls:
        call()
    for number, node in enumerate(program.plan.nodes):
        for call in steps.get(node, ()):
            call()
        at[node], found = number, program.arrays[node]
        values = [*found] if isinstance(found, tuple) else [found]
        row: NodeRow = {"node": f"{node!r}\n{node.site.excerpt() if node.site else ''}".rstrip()}
        row |= {"kind": f"{node.op.name} {node.type}", "role": ITS_OWN.get(node.role, "")}
        yield row | {"inputs": [at[i] for i in node.inputs], "digests": [digest(value) for value in values]}, values


def taken(program: Program, node: int | None) -> list[Any]:
    """All rows, or the values of one of them."""
    if node is None:
        return [row for row, _ in rows(program)]
    return next(values for number, (_, values) in enumerate(rows(program)) if number == node)


def first(a: Sequence[NodeRow], b: Sequence[NodeRow], ranks: bool) -> int | None:
    """The first row that differs although what it is made of is alike; ranks are fed, and hear, other things."""
    alike: list[bool] = []
    for number, (one, other) in enumerate(zip(a, b)):
        alike.append(one["digests"] == other["digests"])
        excused = (ranks and one["role"]) or not all(alike[i] for i in one["inputs"])
        if one["kind"] != other["kind"] or not (alike[-1] or excused):
            return number
    return None


def child(folder: str, step: str, node: str, file: str, *command: str) -> None:
    """Run a step of a record again, and write what is `taken` of it into a file."""

    def look(program: Program) -> None:
        found = taken(program, int(node) if node else None)
        if not node:
            return np.savez(file, json.dumps(found))
        np.savez(file, *(v.astype(np.float64) if is_float(v.dtype) else v for v in found))  # no file has bfloat16

    record = Record(Path(folder))
    run_again(record, Replay(record, int(step), look=look), command)


def again(sides: Sequence[Record], step: int, node: int | None, command: Sequence[str]) -> list[list[Any]]:
    """What is `taken` of this step of both sides, which run at once."""
    jobs, pipe = [], subprocess.PIPE
    with tempfile.TemporaryDirectory() as folder:
        for side, record in enumerate(sides):
            told = [str(record.folder), str(step), "" if node is None else str(node), f"{folder}/{side}.npz", *command]
            line, known = [sys.executable, "-m", "hetu.dist.replay.compare", *told], environment(record.start)
            jobs.append(subprocess.Popen(line, env=os.environ | known, stdout=pipe, stderr=pipe, text=True))
        try:
            told = [job.communicate()[1] for job in jobs]
        finally:  # also of Ctrl-C
            for job in jobs:
                job.kill()
        for record, job, text in zip(sides, jobs, told):
            if job.returncode:
                raise RecordError(f"{record.folder} does not run again:\n{text.strip()[-2000:]}", fix=SAME)
        read = [[*np.load(f"{folder}/{side}.npz", allow_pickle=False).values()] for side in range(2)]
    return [json.loads(str(values[0])) for values in read] if node is None else read


# -- the answer --------------------------------------------------------------------------------------------------------


def show(names: Sequence[str], one: np.ndarray, other: np.ndarray) -> list[str]:
    """Two values in a line each, where they differ most, and by how much."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return [f"  {name}: {show_array(value)}" for name, value in zip(names, (one, other))]
    differ = (one != other) & ((one == one) | (other == other))
    if not differ.any():
        return ["  they differ in bits that no comparison tells: signs of zeros, or kinds of NaN"]
    with np.errstate(all="ignore"):
        far = np.where(differ, np.abs(one.astype(np.float64) - other.astype(np.float64)), 0.0)
    at = np.unravel_index(int(np.argmax(far)), far.shape)  # NaN counts as the most
    place = f" at {[*map(int, at)]}" if far.ndim else ""
    values = [f"{value:.9g}" if isinstance(value := x[at].item(), float) else value for x in (one, other)]
    lines = [f"  {name}: {value}{place}" for name, value in zip(names, values)]
    return [*lines, f"  {np.count_nonzero(differ):,} of {far.size:,} differ, by {far[at]:.3g} at most"]


def explain(names: Sequence[str], sides: Sequence[Record], ranks: bool, command: Sequence[str] = ()) -> str:
    """The first difference in words; "" if there is none."""
    if (found := parted(sides[0], sides[1], ranks)) is None:
        return ""
    (step, differs), frames = found, [side.steps[found[0]] for side in sides]
    more, key = [f"{len(differs) - NAMED} more"] * (len(differs) > NAMED), differs[0]
    told = ", ".join([words(key, frames[0]) for key in differs[:NAMED]] + more)
    lines = [f"step {step} of {frames[0].facts['name']!r} is the first that differs: in {told}"]
    if key in TOLD:
        return "\n".join([*lines, *(f"  {name}: {frame.facts[key]}" for name, frame in zip(names, frames))])
    if key.startswith(("feed/", "given/")) or (ranks and key.startswith("message/")):
        one, other = (frame.arrays().get(key) for frame in frames)
        both = (
            show(names, one, other)
            if one is not None and other is not None
            else [
                f"  {name}: {'nothing' if value is None else show_array(value)}"
                for name, value in zip(names, (one, other))
            ]
        )
        return "\n".join([*lines, f"{OUTSIDE}{words(key, frames[0])}", *both])
    a, b = again(sides, step, None, command)
    if (number := first(a, b, ranks)) is None:
        why = "it is made of what each has of its own" if ranks else "run again it is alike: what ran it was not"
        return f"{lines[0]}\n{why}"
    if a[number]["kind"] != b[number]["kind"]:
        lines.append("the graphs differ:")
        return "\n".join([*lines, *(f"  {name}: {side[number]['node']}" for name, side in zip(names, (a, b)))])
    slot = next(k for k, (x, y) in enumerate(zip(a[number]["digests"], b[number]["digests"])) if x != y)
    one, other = (values[slot] for values in again(sides, step, number, command))
    cause = OUTSIDE + "what was sent" if a[number]["role"] == "message" else "the first node that differs"
    return "\n".join([*lines, f"{cause}: {a[number]['node']}", *show(names, one, other)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `hetu compare`."""
    add = parser.add_argument
    add("records", nargs="+", type=Path, metavar="RECORD", help="two folders of heturun --record, or one")
    add("--ranks", nargs="+", type=int, default=[0], metavar="R", help="two of one record, or one of both (default: 0)")
    add_run(parser)


def main(args: argparse.Namespace) -> int:
    """`hetu compare`: 0 if nothing differs, else 1."""
    pairs = [(path, rank) for path in args.records for rank in args.ranks]
    if len(pairs) != 2:
        said = f"{len(args.records)} record{'s' * (len(args.records) > 1)}, and {named(args.ranks)} of each"
        raise RecordError(said, fix="give two records, or one and --ranks 0 1")
    ranks, (one, other) = len(args.records) == 1, [record_of(*pair) for pair in pairs]
    said = explain([f"rank {rank}" if ranks else str(path) for path, rank in pairs], (one, other), ranks, args.run)
    both = one.steps.keys() & other.steps.keys()
    print(plain(said) or f"steps {min(both)} to {max(both)} are alike, bit for bit")
    return 1 if said else 0


if __name__ == "__main__":
    child(*sys.argv[1:])

"""`hetu compare A B`: the first step, node and line where two runs of a job part, or two ranks of one.

Records tell the step, and whether something else was fed, or heard, in it. If not, both run it again, each in a process
of its own, and values are compared node by node: the first that differs although all that it is made of is alike. Two
ranks are compared in the parts of variables that both keep, and in what both hear of all: they may be fed other things.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...checkpoint import Checkpoint, whole, write_atomically
from ...core.op import Role
from ...core.program import Program
from ..comm.call import show_array
from ..comm.recorder import named
from .again import SAME, Replay, add_run, environment, run_again
from .tape import Frame, Record, RecordError, digest, plain

NodeRow = dict[str, Any]  # of one node: how it reads, which rows it is made of, and digests of its values
ITS_OWN = {Role.PLACEHOLDER: "feed", Role.VARIABLE: "variable", Role.COMMUNICATION: "message"}  # of a rank, if need be
GIVE_ALL_THE_SAME = ("all_reduce", "all_gather", "broadcast")
NAMED = 8  # differences
OUTSIDE = "the cause lies outside: "


def seen(facts: dict[str, Any]) -> dict[str, Any]:
    """What is compared of a step, in the order of causes."""
    return {"sub-graph": f"{facts['name']!r} fed {facts['feeds']}", **facts["digests"], **facts["ended"]}


def kept_alike(a: Record, b: Record, step: int) -> set[str]:
    """The variables of which two ranks keep the same part, with the same values before a step."""
    found = []
    for record in (a, b):
        values = {key: number for told in record.way(step)[:-1] for key, number in told.facts["ended"].items()}
        boxes = record.start.facts["boxes"]
        found.append({(key, number, boxes.get(key.partition(" ")[2])) for key, number in values.items()})
    return {key for key, _, _ in found[0] & found[1]}


def parted(a: Record, b: Record, ranks: bool) -> tuple[int, list[str], list[Frame]] | None:
    """The first step that differs, in what, and what is told of it; None if none does. RecordError if there is none
    that both have. Ranks may well be fed, sent and told other things."""
    begun = max(a.first, b.first)
    kept = kept_alike(a, b, begun)
    for step, *sides in zip(itertools.count(begun), a.steps(begun), b.steps(begun)):
        one, two = (seen(told.facts) for told in sides)
        differs = [key for key in {**one, **two} if one.get(key) != two.get(key)]
        if ranks:
            told_all = {key for key in one.keys() & two if key.startswith(GIVE_ALL_THE_SAME)}
            differs = [key for key in differs if key in kept | told_all]
        if differs:
            return step, differs, sides
    return None


# -- running a step again ----------------------------------------------------------------------------------------------


def nodes(program: Program) -> Iterator[tuple[NodeRow, list[np.ndarray]]]:
    """Run a program node by node: what each is, and its values."""
    steps, at = {step.node: step.calls for step in program.steps}, {}
    for number, node in enumerate(program.plan.nodes):
        for call in steps.get(node, ()):
            call()
        at[node], found = number, program.arrays[node]
        values = [*found] if isinstance(found, tuple) else [found]
        row: NodeRow = {"node": f"{node!r}\n{node.site.excerpt() if node.site else ''}".rstrip()}
        row |= {"kind": f"{node.op.name} {node.type}", "role": ITS_OWN.get(node.role, "")}
        yield row | {"inputs": [at[i] for i in node.inputs], "digests": [digest(value) for value in values]}, values


def first(a: Sequence[NodeRow], b: Sequence[NodeRow], ranks: bool) -> int | None:
    """The first row that differs although what it is made of is alike; ranks are fed, and hear, other things."""
    alike: list[bool] = []
    for number, (one, other) in enumerate(zip(a, b)):
        alike.append(one["digests"] == other["digests"])
        excused = (ranks and one["role"]) or not all(alike[i] for i in one["inputs"])
        if one["kind"] != other["kind"] or not (alike[-1] or excused):
            return number
    return None


def child(path: str, rank: str, step: str, wanted: str, file: str, *command: str) -> None:
    """Run a step of a record again, and write its rows into a file, and of the node that is `wanted` the values."""

    def look(program: Program) -> None:
        rows, arrays = list[NodeRow](), dict[str, np.ndarray]()
        for row, values in nodes(program):
            arrays |= {str(slot): value.copy() for slot, value in enumerate(values) if str(len(rows)) == wanted}
            rows.append(row)
        write_atomically(Path(file), arrays, {"extra": json.dumps({"rows": rows})})

    record = Record(Path(path), int(rank))
    run_again(record, Replay(record, int(step), look=look), command)


def again(record: Record, step: int, wanted: int, command: Sequence[str]) -> tuple[list[NodeRow], list[np.ndarray]]:
    """The rows of a step, and the values of the node that is `wanted`; it is run by a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/nodes"
        asked = [str(record.path), str(record.rank), str(step), str(wanted), file]
        line = [sys.executable, "-m", "hetu.dist.replay.compare", *asked]
        around = os.environ | environment(record)
        job = subprocess.run([*line, *command], env=around, capture_output=True, text=True, check=False)
        if job.returncode:
            raise RecordError(f"{record.folder} does not run again:\n{job.stderr.strip()[-2000:]}", fix=SAME)
        saved = Checkpoint(file)
        return saved.extra["rows"], [saved.read(name, whole(a["shape"])) for name, a in sorted(saved.variables.items())]


# -- the answer --------------------------------------------------------------------------------------------------------


def show(one: np.ndarray | None, other: np.ndarray | None) -> list[str]:
    """Two values in a line each, where they differ most, and in another by how much."""
    if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        return ["nothing" if value is None else show_array(value) for value in (one, other)]
    bits = [np.asarray(value, order="C").view(f"V{value.itemsize}") for value in (one, other)]
    with np.errstate(all="ignore"):
        far = np.where(bits[0] != bits[1], np.abs(one.astype(np.float64) - other.astype(np.float64)), -1.0)
    at = np.unravel_index(int(np.argmax(far)), far.shape)  # NaN counts as the most
    place = f" at {[*map(int, at)]}" if far.ndim else ""
    values = [f"{value:.9g}" if isinstance(value := x[at].item(), float) else value for x in (one, other)]
    lines = [f"{value}{place}" for value in values]
    return [*lines, f"  {np.count_nonzero(far != -1.0):,} of {far.size:,} differ, by {far[at]:.3g} at most"]


def explain(names: Sequence[str], sides: Sequence[Record], ranks: bool, command: Sequence[str] = ()) -> str:
    """The first difference in words; "" if there is none."""
    if (found := parted(sides[0], sides[1], ranks)) is None:
        return ""
    step, differs, told = found
    key = differs[0]
    if key == "sub-graph":
        cause, lines = "", [seen(each.facts)[key] for each in told]
    elif key.startswith(("feed ", "given ", *GIVE_ALL_THE_SAME * ranks)):
        cause, lines = f"{OUTSIDE}{key}", show(*(each.arrays().get(key) for each in told))
    else:
        cause, lines = inside(sides, step, ranks, command)
    listed = ", ".join(differs[:NAMED]) + ", ..." * (len(differs) > NAMED)
    head = [f"step {step} of {told[0].facts['name']!r} is the first that differs: in {listed}", *[cause] * bool(cause)]
    return "\n".join([*head, *(f"  {name}: {line}" for name, line in zip(names, lines)), *lines[2:]])


def inside(sides: Sequence[Record], step: int, ranks: bool, command: Sequence[str]) -> tuple[str, list[str]]:
    """The first node that differs, in words, and its values."""
    a, b = (again(side, step, -1, command)[0] for side in sides)
    if (number := first(a, b, ranks)) is None:
        return "it is made of what each has of its own" if ranks else "run again it is alike: what ran it was not", []
    if a[number]["kind"] != b[number]["kind"]:
        return "the graphs differ:", [side[number]["node"] for side in (a, b)]
    slot = next(k for k, (x, y) in enumerate(zip(a[number]["digests"], b[number]["digests"])) if x != y)
    cause = OUTSIDE + "what was sent" if a[number]["role"] == "message" else "the first node that differs"
    return f"{cause}: {a[number]['node']}", show(*(again(side, step, number, command)[1][slot] for side in sides))


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
    ranks, (one, other) = len(args.records) == 1, [Record(*pair) for pair in pairs]
    said = explain([f"rank {rank}" if ranks else str(path) for path, rank in pairs], (one, other), ranks, args.run)
    first, last = max(one.first, other.first), min(one.last, other.last)
    print(plain(said) or f"steps {first} to {last} are alike, bit for bit")
    return 1 if said else 0


if __name__ == "__main__":
    child(*sys.argv[1:])

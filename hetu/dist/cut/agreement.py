"""What all ranks must have alike: compared before anything waits, so that a difference is an error and never a hang.

Two comparisons are made of a step. Before a graph is cut, all ranks must have the same one. When nothing will change it
any more, what each rank will do must fit what the others do: on each track, a group of ranks or the way from one to
another, all members must do the same things in the same order. As each step of communication has one number on all
ranks and every rank goes up the numbers, ranks that fit cannot wait for each other in a circle.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from ...core.errors import GraphError
from ...core.graph import Node, topological
from ...core.op import Role
from ..comm.comm import Comm
from ..comm.recorder import Ranks
from ..layout.boxes import volume
from ..layout.layout import show_ranks
from ..layout.redistribute import plan
from ..ops import RESHARD, whole_reduction

Track = tuple[str, Ranks]  # ("group", its ranks), or ("message", (source, target))
RankCalls = Mapping[Track, Sequence[str]]  # what a rank does on each track, in its order
END = "nothing more"


def calls_of(outputs: Iterable[Node], rank: int) -> RankCalls:
    """What a rank whose step is the graph of `outputs` does on each track, in words."""
    found: dict[Track, list[str]] = defaultdict(list)
    nodes = [n for n in topological(tuple(outputs)) if n.role is Role.COMMUNICATION and not n.op.lazy]
    for node in sorted(nodes, key=lambda n: n.attrs["order"]):
        for track, words in _calls(node, rank):
            found[track].append(f"step {node.attrs['order']}: {words}")
    return found


def _calls(node: Node, rank: int) -> Iterator[tuple[Track, str]]:
    """The tracks on which `rank` takes part in a step, and as what. Only a strategy's own communication is known."""
    a = node.attrs
    if "group" in a:
        sizes = "+".join(str(i.tensor.size) for i in node.inputs)
        yield ("group", a["group"]), f"{node.op.name} by {a['op']} of {node.dtype}[{sizes}]"
    if node.op is not RESHARD.get(node.op.collective):
        return
    way = plan(a["src"], a["dst"], a["shape"]).over(a.get("hosts", ()))
    for change in way.collectives:
        if rank in change.group:
            bound = "bound " * (whole_reduction(way, rank) is change)
            what = f"{bound}{change.kind}{' by ' * bool(change.op)}{change.op} of {a['dtype']} {change.box}"
            yield ("group", change.group), f"{what} from {way.src} to {way.dst} at {node.site}"
    for (source, target), boxes in way.between.items() if not way.collectives else ():
        if rank in (source, target) and source != target:
            sizes = "+".join(str(volume(box)) for box in boxes)
            yield ("message", (source, target)), f"message of {a['dtype']}[{sizes}] at {node.site}"


def misfit(calls: Mapping[int, RankCalls]) -> str | None:
    """The first difference between what ranks do on one track, in words; None if all fit."""
    for track in sorted({track for rank in calls.values() for track in rank}):
        kind, members = track
        rows = [[*calls[rank].get(track, ()), END] for rank in members]
        for other, row in zip(members[1:], rows[1:]):
            if row != rows[0]:
                at = next(k for k, (a, b) in enumerate(zip(rows[0], row)) if a != b)
                where = f"the group of ranks {show_ranks(members)}" if kind == "group" else "their messages"
                return f"{where}\n  rank {members[0]} has {rows[0][at]},\n  rank {other} has {row[at]}"
    return None


def compare_calls(comm: Comm, outputs: Iterable[Node]) -> None:
    """GraphError on all ranks unless what they do fits: `outputs` are this rank's graph, as it will run."""
    calls = calls_of(outputs, comm.rank)
    rows = [(_hash(track), len(track[1]), _hash(words)) for track, words in calls.items()]
    everyone = gathered(comm, np.array(rows, np.uint64).reshape(-1))
    alike, counts = np.unique(np.concatenate(everyone).reshape(-1, 3), axis=0, return_counts=True)
    if (counts >= alike[:, 1]).all():  # each track has all its members, who do the same
        return
    told = texts(comm, json.dumps([(*track, words) for track, words in calls.items()]))
    read = [{(kind, tuple(ranks)): words for kind, ranks, words in json.loads(text)} for text in told]
    raise GraphError(
        f"the ranks would wait for each other: in {misfit(dict(enumerate(read)))}",
        fix="a pass must leave communication alike on all ranks; if you wrote none, please report the model",
    )


def compare_graphs(comm: Comm, what: str, lines: Iterable[str]) -> None:
    """GraphError unless all ranks have these lines; it names the first that differs."""
    mine = [" ".join(line.split()) for line in lines]  # graphs are printed in columns as wide as they are
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    everyone = np.empty((comm.world_size, len(digest)), np.uint8)
    comm.all_gather(np.frombuffer(digest, np.uint8).copy(), everyone)
    if (everyone == everyone[0]).all():
        return
    told = [[*text.split("\n"), "the end"] for text in texts(comm, "\n".join(mine))]
    for rank, theirs in enumerate(told):
        for number, (first, other) in enumerate(zip(told[0], theirs)):
            if first != other:
                raise GraphError(
                    f"the ranks {what}: line {number} is\n  {first} on rank 0,\n  {other} on rank {rank}",
                    fix="all ranks must build the same graph and fetch the same values",
                )


def texts(comm: Comm, mine: str) -> list[str]:
    """Every rank's text."""
    return [bytes(row).decode() for row in gathered(comm, np.frombuffer(mine.encode(), np.uint8))]


def gathered(comm: Comm, mine: np.ndarray) -> list[np.ndarray]:
    """Every rank's row of numbers, which may be of other lengths."""
    sizes = np.empty((comm.world_size, 1), np.int64)
    comm.all_gather(np.array([mine.size], np.int64), sizes)
    padded = np.zeros(sizes.max(), mine.dtype)
    padded[: mine.size] = mine
    everyone = np.empty((comm.world_size, padded.size), mine.dtype)
    comm.all_gather(padded, everyone)
    return [row[:size] for row, (size,) in zip(everyone, sizes)]


def _hash(value: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little")

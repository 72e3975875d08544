"""What all ranks must have alike: compared before anything waits, so that a difference is an error and never a hang.

Executors compare what they were given, and once the values that several ranks keep. Two comparisons are made of a step:
before a graph is cut, all ranks must have the same one; when nothing will change it any more, what each rank will do
must fit what the others do: on each track, a group of ranks or the way from one to another, all members must do the
same things in the same order. As each step of communication has one number on all ranks and every rank goes up the
numbers, ranks that fit cannot wait for each other in a circle. Left out: communication that operators of a stranger do.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from ...core.errors import ArgumentError, GraphError, HetuError
from ...core.graph import Graph, Node, topological
from ...core.op import Role
from ...core.state import State
from ..comm.call import show_array
from ..comm.comm import Comm
from ..comm.recorder import Ranks
from ..layout.boxes import volume
from ..layout.layout import show_ranks
from ..layout.redistribute import plan
from ..ops import RESHARD
from .strategy import Strategy

T = TypeVar("T")
Track = tuple[str, Ranks]  # ("group", its ranks), or ("message", (source, target)); or a variable, and who keeps it
RankCalls = Mapping[Track, Sequence[str]]  # what a rank does on each track, in its order
Unlike = Callable[[str], Mapping[str, str]]  # what ranks say, by what they are called; nothing if all say the same
ALIKE = "make the executor alike on all ranks; what must differ, such as dropout's numbers, does"
NAMED = {"group": "the group of ranks", "message": "the messages between ranks"}
END = "nothing more"


def calls_of(outputs: Iterable[Node], rank: int) -> RankCalls:
    """What a rank whose step is the graph of `outputs` does on each track, in words."""
    found: dict[Track, list[str]] = defaultdict(list)
    nodes = [n for n in topological(tuple(outputs)) if n.role is Role.COMMUNICATION and not n.op.lazy]
    for node in sorted(nodes, key=lambda n: n.attrs["order"]):
        for track, words in _calls(node, rank):
            found[track].append(f"step {node.attrs['order']:.0f}: {words}")
    return found


def _calls(node: Node, rank: int) -> Iterator[tuple[Track, str]]:
    """The tracks on which `rank` takes part in a step, and as what. Only a strategy's own communication is known."""
    a = node.attrs
    if "group" in a:
        # Of an array in pieces ranks give unlike numbers of elements, but all know the pieces.
        whole = [a["rooms"]] if "rooms" in a else [i.tensor.size for i in node.inputs]
        arrays = a.get("pieces") or whole
        how = f" by {a['op']}" if "op" in a else ""
        yield ("group", a["group"]), f"{node.op.name}{how} of {node.inputs[0].dtype}[{'+'.join(map(str, arrays))}]"
    if node.op is not RESHARD.get(node.op.collective):
        return
    way = plan(a["src"], a["dst"], a["shape"]).over(a.get("hosts", ()))
    for change in way.collectives:
        if rank in change.group:
            what = f"{change.kind}{' by ' * bool(change.op)}{change.op} of {a['dtype']} {change.box}"
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
                where = f"{NAMED.get(kind, kind)} {show_ranks(members)}"
                return f"{where}\n  rank {members[0]} has {rows[0][at]},\n  rank {other} has {row[at]}"
    return None


def compare_calls(comm: Comm, outputs: Iterable[Node], acts: bool = False) -> bool:
    """GraphError on all ranks unless what they do fits: `outputs` are this rank's graph, as it will run.

    True on all ranks if one of them talks to others, or `acts` without.
    """
    calls = calls_of(outputs, comm.rank)
    if differs := _compared(comm, calls):
        raise GraphError(
            f"the ranks would wait for each other: in {differs}",
            fix="a pass must leave communication alike on all ranks; if you wrote none, please report the model",
        )
    anyone = np.array([acts or bool(calls)])
    comm.all_reduce(anyone, anyone, "max")
    return bool(anyone[0])


def compare_values(comm: Comm, strategy: Strategy, variables: Iterable[Node], state: State) -> str | None:
    """The first variable of which ranks that keep the same part have other values, in words."""
    kept: dict[Track, list[str]] = {}
    for node in variables:
        if (mine := strategy.piece(node, comm.rank)) is not None and node.name in state:
            alike = [rank for rank, piece in strategy.store(node).pieces(node.shape).items() if piece.box == mine.box]
            value = state.contiguous(node.name)
            kept[f"{node.name!r} on ranks", tuple(sorted(alike))] = [crc(value)]
    return _compared(comm, kept)


def compare_feeds(
    comm: Comm, strategy: Strategy, placeholders: Iterable[Node], fed: Mapping[str, np.ndarray]
) -> str | None:
    """The first feed of which ranks are fed other values, or parts of other sizes, where they need the same."""
    given: dict[Track, list[str]] = {}
    for node in placeholders if comm.world_size > 1 else ():
        value = np.asarray(fed[node.name], node.dtype)
        for title, ranks, whole in fed_alike(strategy, node.name, comm):
            given[f"{title} on ranks", ranks] = [crc(value) if whole else show_array(value)]
    return _compared(comm, given)


def fed_alike(strategy: Strategy, name: str, comm: Comm) -> list[tuple[str, Ranks, bool]]:
    """What to call a feed, or its shape, and which ranks feed it alike; True for the feed itself."""
    everyone = tuple(range(comm.world_size))
    if name not in strategy.local:
        return [(repr(name), everyone, True)]
    return [(f"the shape of {name!r}", everyone, False), (repr(name), strategy.fed_alike(name, comm.rank), True)]


def _compared(comm: Comm, mine: RankCalls) -> str | None:
    """The first misfit, the same on all ranks; only then words are sent."""
    rows = [(_hash(track), len(track[1]), _hash(words)) for track, words in mine.items()]
    everyone = gathered(comm, np.array(rows, np.uint64).reshape(-1))
    alike, counts = np.unique(np.concatenate(everyone).reshape(-1, 3), axis=0, return_counts=True)
    if (counts >= alike[:, 1]).all():  # each track has all its members, who say the same
        return None
    told = texts(comm, json.dumps([(*track, words) for track, words in mine.items()]))
    read = [{(kind, tuple(ranks)): words for kind, ranks, words in json.loads(text)} for text in told]
    return misfit(dict(enumerate(read)))


def compare_graphs(unlike: Unlike, graph: Graph) -> None:
    """GraphError unless all ranks have this graph; it shows the first line that differs."""
    lines = [" ".join(line.split()) for line in str(graph).split("\n")]  # columns are as wide as their rows
    told = {rank: [*text.split("\n"), "the end"] for rank, text in unlike("\n".join(lines)).items()}
    one = next(iter(told), "")
    for rank, theirs in told.items():
        for number, (first, other) in enumerate(zip(told[one], theirs)):
            if first != other:
                raise GraphError(
                    f"the ranks run different graphs: line {number} is\n  {first} on {one},\n  {other} on {rank}",
                    fix="all ranks must build the same graph and fetch the same values",
                )


def compare_given(unlike: Unlike, given: Mapping[str, object], fix: str = ALIKE) -> None:
    """ArgumentError unless all ranks were given the same; it names the first thing that differs, and both values."""
    mine = {name: value if isinstance(value, str) else repr(value) for name, value in given.items()}
    told = {rank: json.loads(text) for rank, text in unlike(json.dumps(mine)).items()}
    one = next(iter(told), "")
    for rank, theirs in told.items():
        for name in {**told[one], **theirs}:
            first, other = (words.get(name, "missing") for words in (told[one], theirs))
            if first != other:
                raise ArgumentError(
                    f"the ranks were given different things: {name} is\n  {first} on {one},\n  {other} on {rank}",
                    fix=fix,
                )


def together(
    comm: Comm,
    act: Callable[[], T],
    kind: type[HetuError],
    fix: str,
    caught: tuple[type[Exception], ...] = (HetuError, MemoryError, OSError),
) -> T:
    """What `act` returns on this rank; an error on all ranks if it fails on one, of this `kind` on the others."""
    results: list[T] = []
    error: Exception | None = None
    try:
        results.append(act())
    except caught as failure:
        error = failure
    failed = np.array([0 if error is None else comm.rank + 1], np.int64)
    comm.all_reduce(failed, failed, "max")
    if not failed[0]:
        return results[0]
    reasons = texts(comm, "" if error is None else str(error).split("\n")[0])
    if error is not None:
        raise error
    rank = int(failed[0]) - 1
    raise kind(f"rank {rank}: {reasons[rank]}", fix=fix)


def of_first(comm: Comm, values: Mapping[str, float]) -> dict[str, float]:
    """The numbers that rank 0 has."""
    numbers = np.array([*values.values()], np.float64)
    comm.broadcast(numbers)
    return dict(zip(values, numbers.tolist()))


def named_by_any(comm: Comm, names: Sequence[str]) -> set[str]:
    """The names that one rank or more gives."""
    return {name for told in unlike(comm, json.dumps(names)).values() for name in json.loads(told)} or {*names}


def unlike(comm: Comm, mine: str) -> Mapping[str, str]:
    """Every rank's text, by what the rank is called, if they are not all equal, else none."""
    digest = hashlib.sha256(mine.encode()).digest()
    everyone = np.empty((comm.world_size, len(digest)), np.uint8)
    comm.all_gather(np.frombuffer(digest, np.uint8).copy(), everyone)
    if (everyone == everyone[0]).all():
        return {}
    return {f"rank {rank}": text for rank, text in enumerate(texts(comm, mine))}


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


def crc(value: np.ndarray) -> str:
    """An array in a few words, which differ where arrays do."""
    shown = f"{value.flat[0]}, ... " if value.size else ""
    raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return f"{show_array(value)} of {shown}with CRC {zlib.crc32(raw.data):08x}"

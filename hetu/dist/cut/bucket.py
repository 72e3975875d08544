"""Join small collectives, and let them run beside the computation.

Each costs a latency, so arrays are copied into flat buckets, and a bucket travels as a whole: sums of gradients (S. Li
et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020; A. Sergeev and M. Del Balso,
"Horovod", 2018), and what ZeRO gathers and scatters (Y. Zhao et al., "PyTorch FSDP", 2023). It starts when its last
array exists; the first reader waits for it (`under_way.py`). What is gathered from variables exists from the start: it
is asked for when the bucket before it is, and not before the bucket `AHEAD` of it has come, which bounds the memory;
the first of a pipeline's pass is asked for before the pass that its stage makes first.
A loss that is only fetched travels with the first gradients.
Left out: what the forward pass reduces and reads, and gathers of activations, which are waited for at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

from ...core.graph import OPS, Node, origin_of, remade, topological
from ...core.memory import types_of
from ...core.op import Role
from ..layout.collectives import Collective
from ..layout.redistribute import plan
from ..ops import whole_reduction
from .under_way import gather_start, gather_wait, reduce_start, reduce_wait, scatter_start, scatter_wait

AHEAD = 2  # buckets of one kind that are under way or waited for
LATE = 1 << 60  # a wait for gradients gives way to all that is not an update


class Moment(NamedTuple):
    """Between two passes of a pipeline: an event, and a number in the order of communication."""

    event: float
    order: float


class Due(NamedTuple):
    """When a collective is needed: in which phase of a step, and behind how many others of the update.

    The first bucket of a phase may be asked for from `since` on, so that it comes beside the pass before. Those that a
    strategy gives the number of a `bucket` are joined with no others, whatever their size.
    """

    phase: str
    level: int = 0
    since: Moment | None = None
    bucket: int | None = None

    @property
    def early(self) -> bool:
        """Whether it brings a variable as it was before the pass, so that it may start at any time."""
        return self.phase != "update"


def turn_of(made: Node, variable: bool, due: Due) -> Due | None:
    """The turn of a collective that may be joined with others; `variable` says whether it brings one together."""
    update = due.phase == "update"
    kinds = ("all_reduce", "reduce_scatter", "all_gather") if update else ("all_gather",) if variable else ()
    return due if made.op.collective in kinds else None


def join_collectives(outputs: Sequence[Node], turns: Mapping[Node, Due], limit: int) -> tuple[Node, ...]:
    """The graph with the collectives `turns` joined into buckets, of at most `limit` bytes if they have no number.

    In the order of communication a bucket takes the place of its last member, and one of variables that of the first of
    the bucket before it; all ranks of a group join alike.
    """
    joined = {node for node, turn in turns.items() if limit or turn.bucket is not None}
    if not joined:
        return tuple(outputs)
    found = sorted(joined & {*topological(outputs)}, key=lambda n: n.attrs["order"])
    needed, behind = _dependence(outputs, found, turns)
    rows: dict[Any, list[list[Node]]] = defaultdict(list)
    for node in found:
        mine, turn = _collective(node), turns[node]
        if mine is None or node in behind:
            continue
        row = rows[mine.kind, mine.group, mine.op, node.dtype, node.tags.get("event"), turn]
        due = min((needed[n] for n in row[-1] if n in needed), default=node.attrs["order"] + 1) if row else 0
        fits = row and (turn.bucket is not None or sum(_nbytes(n) for n in (*row[-1], node)) <= limit)
        if fits and (turn.early or due > node.attrs["order"]):
            row[-1].append(node)
        else:
            row.append([node])
    return _Joining(rows).rebuilt(outputs)


def _nbytes(node: Node) -> int:
    """Of the whole array."""
    return max(int(node.tensor.nbytes), int(node.inputs[0].tensor.nbytes))


def _dependence(
    outputs: Sequence[Node], found: Sequence[Node], turns: Mapping[Node, Due]
) -> tuple[dict[Node, int], set[Node]]:
    """Where in the order other communication first needs each collective, and those that depend on others of a level.

    A bucket must end before the first and cannot hold the second.
    """
    needed: dict[Node, int] = {}
    number = {node: k for k, node in enumerate(found)}
    levels: dict[Any, int] = defaultdict(int)  # event and level -> the collectives of it, as bits
    for node, k in number.items():
        levels[_level(node, turns)] |= 0 if turns[node].early else 1 << k
    masks: dict[Node, int] = {}  # the collectives that a node depends on, as bits
    for node in topological(outputs):
        mask = reduce(or_, (masks[i] for i in node.inputs), 0)
        masks[node] = mask | (1 << number[node] if node in number else 0)
        if node.role is Role.COMMUNICATION:
            for k in (k for k in range(mask.bit_length()) if mask >> k & 1):
                needed[found[k]] = min(needed.get(found[k], node.attrs["order"]), node.attrs["order"])
    return needed, {n for n in found if masks[n.inputs[0]] & levels[_level(n, turns)]}


def _level(node: Node, turns: Mapping[Node, Due]) -> tuple[Any, int]:
    """Which update of a step a collective belongs to, if it has several, and its level there."""
    return node.tags.get("event"), turns[node].level


def _collective(node: Node) -> Collective | None:
    """What a node does on this rank, if it is one collective of whole arrays in a single group."""
    a = node.attrs
    way = plan(a["src"], a["dst"], a["shape"])
    if node.op.collective == "all_reduce":
        return whole_reduction(way, a["rank"])
    return next((c for c in way.collectives if a["rank"] in c.group), None) if node.inputs else None


class _Joining:
    """Builds the graph anew with buckets in the place of their members."""

    def __init__(self, rows: Mapping[Any, Sequence[Sequence[Node]]]) -> None:
        self.before: dict[Node, Sequence[Sequence[Node]]] = {}  # member -> the buckets of its kind up to its own
        self.turn: dict[Node, Due] = {}
        for (*_, turn), row in rows.items():
            for k, bucket in enumerate(row):
                self.before |= dict.fromkeys(bucket, row[max(k - AHEAD, 0) : k + 1])
                self.turn |= dict.fromkeys(bucket, turn)
        self.last = {bucket[0] for row in rows.values() for bucket in row[-AHEAD:]}  # no start waits for them
        self.made: dict[Node, Node] = {}
        self.started: dict[Node, Node] = {}  # first member -> the operator that starts its bucket

    def rebuilt(self, outputs: Sequence[Node]) -> tuple[Node, ...]:
        """The graph, inputs first."""
        stack = [*outputs]
        while stack:
            node = stack[-1]
            if missing := [i for i in self._first(node) if i not in self.made]:
                stack += missing
                continue
            stack.pop()
            if node in self.made:
                continue
            with origin_of(node):
                if node in self.before:
                    self.made |= self._joined(self.before[node][-1])
                else:
                    self.made[node] = remade(node, tuple(self.made[i] for i in node.inputs))
        return tuple(self.made[node] for node in outputs)

    def _first(self, node: Node) -> Sequence[Node]:
        """What must be there before a node can be made: for a bucket, all inputs, and the bucket that it waits for."""
        if node not in self.before:
            return node.inputs
        *_, bucket = self.before[node]
        return [*(n.inputs[0] for n in bucket), *self._awaited(bucket)[:1]]

    def _awaited(self, bucket: Sequence[Node]) -> Sequence[Node]:
        """The bucket that has to end before this one starts."""
        first, *more = self.before[bucket[0]]
        return first if len(more) == AHEAD else ()

    def _joined(self, bucket: Sequence[Node]) -> dict[Node, Node]:
        """The result of each member."""
        given = [self.made[n.inputs[0]] for n in bucket]
        with origin_of(bucket[-1]):
            return dict(zip(bucket, JOINED[bucket[0].op.collective](self, bucket, given)))

    def reduced(self, bucket: Sequence[Node], given: Sequence[Node]) -> list[Node]:
        """Members of an all-reduce."""
        last, mine = bucket[-1], _known(bucket[-1])
        order = last.attrs["order"]
        flat = reduce_start.make(tuple(given), {"group": mine.group, "op": mine.op, "order": order})
        with origin_of(last, **_late(last)):
            done = reduce_wait.make((flat,), {"order": order})
        return _views(done, bucket, [int(n.tensor.size) for n in bucket])

    def scattered(self, bucket: Sequence[Node], given: Sequence[Node]) -> list[Node]:
        """Members of a reduce-scatter. It ends the one that it waits for itself: that one's readers take their time."""
        last, mine = bucket[-1], _known(bucket[-1])
        order, pieces = last.attrs["order"], tuple(_known(n).tiling for n in bucket)
        attrs = {"group": mine.group, "op": mine.op, "order": order, "pieces": pieces}
        if awaited := self._awaited(bucket):
            started = self.started[awaited[0]]
            given, attrs = [*given, _items(started)[0]], {**attrs, "ends": started.attrs["order"]}
        self.started[bucket[0]] = made = scatter_start.make(tuple(given), attrs)
        blocks, part = _items(made)
        with origin_of(last, **_late(last)):
            done = scatter_wait.make((part, blocks) if bucket[0] in self.last else (part,), {"order": order})
        return _views(done, bucket, [p.most for p in pieces])

    def gathered(self, bucket: Sequence[Node], given: Sequence[Node]) -> list[Node]:
        """Members of an all-gather."""
        pieces, (order, tags) = tuple(_known(n).tiling for n in bucket), self._asked(bucket)
        if awaited := self._awaited(bucket):
            given = [*given[:-1], OPS["barrier"](given[-1], self.made[awaited[0]])]
        attrs = {"group": _known(bucket[-1]).group, "order": order, "pieces": pieces}
        with origin_of(bucket[-1], **tags):
            mine, blocks = _items(gather_start.make(tuple(given), attrs))
        return _items(gather_wait.make((blocks, mine), {"order": order, "pieces": pieces}))

    def _asked(self, bucket: Sequence[Node]) -> tuple[float, dict[str, Any]]:
        """The number at which an all-gather starts, and its tags, if they are not those of the bucket."""
        turn, ahead = self.turn[bucket[0]], self.before[bucket[0]][-2:][0][0]
        if not turn.early:
            return bucket[-1].attrs["order"], {}
        if ahead is not bucket[0]:  # behind the start of the bucket before it
            return ahead.attrs["order"] + 1, {}
        if turn.since and all(n.inputs[0].tags.get("event", -1) < turn.since.event for n in bucket):
            line = 1e-9 * ahead.attrs["order"]  # those that are asked for at one moment stand in the line of their own
            return turn.since.order + line, {"event": turn.since.event}
        return ahead.attrs["order"], {}


JOINED = {"all_reduce": _Joining.reduced, "reduce_scatter": _Joining.scattered, "all_gather": _Joining.gathered}


def _late(node: Node) -> dict[str, Any]:
    return {"event": node.tags.get("event", LATE)}


def _known(node: Node) -> Collective:
    found = _collective(node)
    assert found is not None
    return found


def _items(node: Node) -> list[Node]:
    return [OPS["item"].make((node,), {"index": k}) for k in range(len(types_of(node)))]


def _views(flat: Node, bucket: Sequence[Node], rooms: Sequence[int]) -> list[Node]:
    """What lies in a flat array one behind the other, each in a room of its own."""
    found, at = [], 0
    for node, room in zip(bucket, rooms):
        part = OPS["getitem"](flat, key=(slice(at, at + int(node.tensor.size)),))
        found.append(OPS["reshape"](part, shape=node.shape))
        at += room
    return found

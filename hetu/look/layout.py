"""Where the boxes of a picture go: a layered layout with groups, after Sugiyama, Tagawa and Toda (1981).

Rows follow the data. An arrow longer than one row runs down a straight channel that is reserved like a box, so no arrow
ever crosses a box. Left-to-right order is one total order of boxes, channels and groups; the places are then pulled
toward their neighbors while every pair keeps its distance. Crossings are few, not minimal.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

Point = tuple[float, float]
Arrow = tuple[int, int]  # from box to box
Rectangle = tuple[float, float, float, float]  # left, top, width, height

BOX_HEIGHT = 40.0
GAP = 18.0  # between boxes of a row
CHANNEL_GAP = 9.0
ROW_GAP = 34.0
GROUP_PAD = 12.0
GROUP_LABEL = 16.0
MARGIN = 12.0
ROUNDS, SWEEPS = 8, 24  # orders tried; relaxations for each


@dataclass
class Drawing:
    """Centers of the boxes, points of the arrows, rectangles of the groups, and the size of it all."""

    centers: list[Point]
    paths: dict[Arrow, list[Point]]
    groups: dict[Any, Rectangle]
    width: float
    height: float


@dataclass
class _Item:
    """A box, a channel or one edge of a group: something with a place on each of the rows `first` to `last`."""

    width: float
    first: int
    last: int
    group: Hashable = None
    gap: float = GAP
    x: float = 0.0
    neighbors: list[tuple[_Item, float]] = field(default_factory=list)

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def wanted(self) -> float:
        """Half way to the weighted mean of the neighbors' places: all the way, two neighbors would swap forever."""
        total = sum(weight for _, weight in self.neighbors)
        return (self.x + sum(item.x * weight for item, weight in self.neighbors) / total) / 2 if total else self.x


def layout(widths: Sequence[float], arrows: Sequence[Arrow], groups: Sequence[Hashable]) -> Drawing:
    """Place boxes of the given widths. Arrows go from lower to higher indices; `groups[i]` is None or box i's group.

    >>> layout([50, 50], [(0, 1)], [None, None]).centers
    [(37.0, 32.0), (37.0, 106.0)]
    """
    rows = _rows(len(widths), arrows, groups)
    boxes = [_Item(w, row, row, group) for w, row, group in zip(widths, rows, groups)]
    channels = _channels(boxes, arrows)
    _link(boxes, channels, arrows)
    edges = _place(boxes, channels)
    tops = _tops(max(rows, default=0) + 1, edges)
    left = min((i.x - i.width / 2 for pair in edges.values() for i in pair), default=0.0)
    items = [*boxes, *dict.fromkeys(channels.values())]
    shift = MARGIN - min([left, *(i.x - i.width / 2 for i in items)])
    right = max([*(i.x + i.width / 2 for i in items), *(pair[1].x for pair in edges.values())], default=0.0)
    for item in [*items, *(i for pair in edges.values() for i in pair)]:
        item.x += shift
    bottom = (
        tops[-1] + BOX_HEIGHT + max((GROUP_PAD for pair in edges.values() if pair[1].last == len(tops) - 1), default=0)
    )
    return Drawing(
        centers=[(box.x, tops[box.first] + BOX_HEIGHT / 2) for box in boxes],
        paths=_paths(boxes, channels, arrows, tops),
        groups={key: _rectangle(*pair, tops) for key, pair in edges.items()},
        width=right + shift + MARGIN,
        height=bottom + MARGIN,
    )


# -- rows ----------------------------------------------------------------------------------------------------------


def _rows(count: int, arrows: Sequence[Arrow], groups: Sequence[Hashable]) -> list[int]:
    """The longest path to each box; boxes with at most one input then move down to just above their first use.

    Arrows that enter a group beside an input from inside it are two rows long, so that groups in a chain stand
    below and not beside each other.
    """
    partners = {t for s, t in arrows if groups[t] is not None and groups[s] == groups[t]}
    length = {(s, t): 2 if t in partners and groups[s] != groups[t] else 1 for s, t in arrows}
    rows, inputs = [0] * count, [0] * count
    outputs: list[list[int]] = [[] for _ in range(count)]
    for source, target in sorted(arrows, key=lambda a: a[1]):
        rows[target] = max(rows[target], rows[source] + length[source, target])
        inputs[target] += 1
        outputs[source].append(target)
    for box in reversed(range(count)):
        if outputs[box] and inputs[box] <= 1:
            rows[box] = min(rows[t] - length[box, t] for t in outputs[box])
    lowest = min(rows, default=0)
    return [row - lowest for row in rows]


def _channels(boxes: list[_Item], arrows: Sequence[Arrow]) -> dict[Arrow, _Item]:
    """Channels of the long arrows. Those of one box share one, except where an arrow can run inside a group."""
    begins: dict[Hashable, int] = {}
    for box in boxes:
        begins[box.group] = min(begins.get(box.group, box.first), box.first)
    shared: dict[tuple[int, Hashable], _Item] = {}
    channels = {}
    for source, target in arrows:
        first, last = boxes[source].first + 1, boxes[target].first - 1
        if first <= last:
            group = boxes[target].group
            inside = group if group is not None and first >= begins[group] else None
            channel = shared.setdefault((source, inside), _Item(2.0, first, last, inside, CHANNEL_GAP))
            channel.last = max(channel.last, last)
            channels[source, target] = channel
    return channels


def _link(boxes: list[_Item], channels: dict[Arrow, _Item], arrows: Sequence[Arrow]) -> None:
    """Springs: along arrows, strongest where data flows on within a group, weak from leaves and into channels."""
    fed = {target for _, target in arrows}

    def spring(a: _Item, b: _Item, weight: float) -> None:
        a.neighbors.append((b, weight))
        b.neighbors.append((a, weight))

    entered: set[_Item] = set()
    for source, target in arrows:
        start, end, channel = boxes[source], boxes[target], channels.get((source, target))
        weight = 0.25 if source not in fed else 2.0 if start.group == end.group else 1.0
        if channel is None:
            spring(start, end, weight)
            continue
        short = channel.last - channel.first < 2
        spring(channel, end, weight if short else 0.15)
        if channel not in entered:
            entered.add(channel)
            spring(start, channel, weight if short else 0.3)


# -- left to right -------------------------------------------------------------------------------------------------


def _place(boxes: list[_Item], channels: dict[Arrow, _Item]) -> dict[Hashable, tuple[_Item, _Item]]:
    """Give every item its x; returns the left and right edge of each group. Keeps the best of several orders."""
    items = [*boxes, *dict.fromkeys(channels.values())]
    members: dict[Hashable, list[_Item]] = {}
    for item in items:
        if item.group is not None:
            members.setdefault(item.group, []).append(item)
    edges = {}
    for key, inside in members.items():
        span = min(i.first for i in inside), max(i.last for i in inside)
        edges[key] = (_Item(0.0, *span, key, GROUP_PAD), _Item(0.0, *span, key, GROUP_PAD))
    everything = [*items, *(e for pair in edges.values() for e in pair)]
    best: tuple[float, list[float]] | None = None
    for index, item in enumerate(items):
        item.x = float(index)
    for _ in range(ROUNDS):
        sequence = _sequence(items, members, edges)
        _spread(sequence, members, edges)
        cost = sum(abs(i.x - other.x) * weight for i in items for other, weight in i.neighbors)
        if best is None or cost < best[0]:
            best = cost, [i.x for i in everything]
        places = [item.wanted() for item in items]
        for item, x in zip(items, places):
            item.x = x
    for item, x in zip(everything, best[1] if best else ()):
        item.x = x
    return edges


def _sequence(
    items: list[_Item], members: dict[Hashable, list[_Item]], edges: dict[Hashable, tuple[_Item, _Item]]
) -> list[_Item]:
    """One total order of everything by the present x; a group stands together, between its two edges."""
    entries: list[tuple[float, list[_Item]]] = [(i.x, [i]) for i in items if i.group is None]
    for key, inside in members.items():
        middle = sum(i.x for i in inside) / len(inside)
        left, right = edges[key]
        entries.append((middle, [left, *sorted(inside, key=lambda i: i.x), right]))
    entries.sort(key=lambda entry: entry[0])
    return [item for _, entry in entries for item in entry]


def _spread(
    sequence: list[_Item], members: dict[Hashable, list[_Item]], edges: dict[Hashable, tuple[_Item, _Item]]
) -> None:
    """Pull items toward their neighbors while those that share a row keep their order and distance.

    Pushing from the left and pushing from the right each gives valid places, hence so does their mean.
    """
    after = _distances(sequence)
    before: dict[_Item, list[tuple[_Item, float]]] = {item: [] for item in sequence}
    for item, followers in after.items():
        for other, distance in followers:
            before[other].append((item, distance))
    for _ in range(SWEEPS):
        wanted = {item: item.wanted() for item in sequence}
        for key, (left, right) in edges.items():
            wanted[left] = min(i.x - i.width / 2 for i in members[key]) - GROUP_PAD
            wanted[right] = max(i.x + i.width / 2 for i in members[key]) + GROUP_PAD
        low: dict[_Item, float] = {}
        for item in sequence:
            low[item] = max([wanted[item], *(low[other] + distance for other, distance in before[item])])
        high: dict[_Item, float] = {}
        for item in reversed(sequence):
            high[item] = min([wanted[item], *(high[other] - distance for other, distance in after[item])])
        for item in sequence:
            item.x = (low[item] + high[item]) / 2


def _distances(sequence: list[_Item]) -> dict[_Item, list[tuple[_Item, float]]]:
    """For each item, those that follow it directly on some row, with the least distance of their centers."""
    newest: dict[int, _Item] = {}
    pairs: dict[_Item, dict[_Item, float]] = {item: {} for item in sequence}
    for item in sequence:
        for row in range(item.first, item.last + 1):
            previous = newest.get(row)
            if previous is not None:
                gap = min(previous.gap, item.gap) if previous.group == item.group else max(previous.gap, item.gap)
                pairs[previous][item] = (previous.width + item.width) / 2 + gap
            newest[row] = item
    return {item: list(found.items()) for item, found in pairs.items()}


# -- top to bottom -------------------------------------------------------------------------------------------------


def _tops(count: int, edges: dict[Hashable, tuple[_Item, _Item]]) -> list[float]:
    """The upper border of each row, with room for the frames and names of the groups that begin or end there."""
    begins = {left.first for left, _ in edges.values()}
    ends = {left.last for left, _ in edges.values()}
    tops, y = [], MARGIN
    for row in range(count):
        y += GROUP_PAD + GROUP_LABEL if row in begins else 0
        tops.append(y)
        y += BOX_HEIGHT + ROW_GAP + (GROUP_PAD if row in ends else 0)
    return tops


def _rectangle(left: _Item, right: _Item, tops: list[float]) -> Rectangle:
    top = tops[left.first] - GROUP_PAD - GROUP_LABEL + 4
    return left.x, top, right.x - left.x, tops[left.last] + BOX_HEIGHT + GROUP_PAD - 2 - top


def _paths(
    boxes: list[_Item], channels: dict[Arrow, _Item], arrows: Sequence[Arrow], tops: list[float]
) -> dict[Arrow, list[Point]]:
    """Points of each arrow, two per row: it crosses a row straight down and shifts sideways only between rows."""
    arriving: dict[int, list[tuple[float, int]]] = {}
    for source, target in arrows:
        arriving.setdefault(target, []).append((channels.get((source, target), boxes[source]).x, source))
    paths = {}
    for target, sources in arriving.items():
        end = boxes[target]
        for place, (_, source) in enumerate(sorted(sources)):
            start = boxes[source]
            points = [(start.x, tops[start.first] + BOX_HEIGHT)]
            if (source, target) in channels:
                x = channels[source, target].x
                points += [(x, tops[start.first + 1]), (x, tops[end.first - 1] + BOX_HEIGHT)]
            port = (place + 1) / (len(sources) + 1) - 0.5
            paths[source, target] = [*points, (end.x + port * end.width * 0.7, tops[end.first])]
    return paths

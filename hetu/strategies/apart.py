"""Ranks that each train like a job of one, on their part of a batch, which is split along its first axis."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ..core.errors import ShapeError
from ..core.graph import Node
from ..core.op import Role
from ..core.placement import Local
from ..core.types import Atom, Box, Dim


def batches_of(nodes: Collection[Node], feeds: Collection[str]) -> set[str]:
    """Of these feeds those whose first axis is that of the batch."""
    fed = [n for n in nodes if n.role is Role.PLACEHOLDER and n.name in feeds]
    return {n.name for n in fed if isinstance(n.shape[0], Dim)}


def part_sizes(sizes: Mapping[Atom, int], batches: Collection[str], ranks: int, other: str = "") -> dict[Atom, int]:
    """The sizes of a rank's part of the feeds, from those that all are fed; ShapeError if they do not divide, with
    what `other` remedy there is."""
    found = dict(sizes)
    for (feed, axis), size in found.items():
        if feed in batches and axis == 0:
            if size % ranks:
                raise ShapeError(
                    f"a batch of {size} in {feed!r} does not divide among {ranks} workers",
                    fix=f"feed batches of a multiple of the workers (drop_last=True){other}",
                )
            found[feed, axis] = size // ranks
    return found


def part_fed(local: Local, batches: Collection[str], rank: int) -> Local:
    """A rank's graph, which takes its part of each batch, when it was cut as if that were the whole."""
    sizes = dict[str, int]()
    for name, box in local.feeds.values():
        sizes[name] = max(sizes.get(name, 0), box[0][1] if name in batches else 0)

    def part(name: str, box: Box) -> tuple[str, Box]:
        if name not in batches:
            return name, box
        (low, high), *rest = box
        return name, ((low + rank * sizes[name], high + rank * sizes[name]), *rest)

    return replace(local, feeds={name: part(*fed) for name, fed in local.feeds.items()})

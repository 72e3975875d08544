"""Ranks that each train like a job of one, on their part of a batch, which is split along its first axis.

Those that know only the servers compare what they are with what the first of them has left there: none waits for
another longer than that one takes to leave something. All leave it alike, in the same order, so that it has a number.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from ..core.errors import ArgumentError, ShapeError
from ..core.placement import Local
from ..core.types import Atom, Box, Dim
from ..dist.cut.on_ranks import OnRanks
from ..ps.store.messages import RefusedError
from ..ps.store.partition import Parameter
from ..ps.wire.client import Client

ROOM = 64 << 10  # bytes of a text, compressed: of a longer one the beginning
LEFT = "compared by ranks, "  # begins the names of the parameters in which texts lie
AGREEMENT = "agreed by ranks, clock"  # and of those by which they agree


class Apart(OnRanks):
    """Ranks of which each may train like a job of one: `ranks` are all of them, `comm` those that its graph knows."""

    ranks: Any

    @property
    def rank(self) -> int:
        return int(self.ranks.rank)

    @property
    def world_size(self) -> int:
        return int(self.ranks.world_size)

    @cached_property
    def batches(self) -> set[str]:
        """The feeds of which each takes its part: those whose first axis is that of the batch."""
        whole = self.strategy.feeds.keys() - {*self.strategy.local}
        return {name for name in whole if isinstance(self.placeholders[name].shape[0], Dim)}

    def part_sizes(self, sizes: Mapping[Atom, int], other: str = "") -> dict[Atom, int]:
        """The sizes of a rank's part of the feeds, from those that all are fed; ShapeError if they do not divide, with
        what `other` remedy there is."""
        found = dict(sizes)
        for (feed, axis), size in found.items():
            if feed in self.batches and axis == 0:
                if size % self.world_size:
                    raise ShapeError(
                        f"a batch of {size} in {feed!r} does not divide among {self.world_size} workers",
                        fix=f"feed batches of a multiple of the workers (drop_last=True){other}",
                    )
                found[feed, axis] = size // self.world_size
        return found

    def part_fed(self, local: Local) -> Local:
        """A rank's graph, which takes its part of each batch, when it was cut as if that were the whole."""
        sizes = dict[str, int]()
        for name, box in local.feeds.values():
            sizes[name] = max(sizes.get(name, 0), box[0][1] if name in self.batches else 0)

        def part(name: str, box: Box) -> tuple[str, Box]:
            if name not in self.batches:
                return name, box
            (low, high), *rest = box
            return name, ((low + self.rank * sizes[name], high + self.rank * sizes[name]), *rest)

        return replace(local, feeds={name: part(*fed) for name, fed in local.feeds.items()})


def unlike_first(client: Client, mine: str) -> Mapping[str, str]:
    """The text of the first rank to come and that of this one, if they differ, else none."""
    packed = f"{zlib.crc32(mine.encode()):08x}".encode() + zlib.compress(mine.encode(), 9)
    left = np.frombuffer(packed[:ROOM].ljust(ROOM, b"\0"), np.float64)
    name = f"{LEFT}{sum(known.startswith(LEFT) for known in client.parameters)}"
    client.create({name: Parameter(left.shape, "float64", rule="add", reduce="sum")}, {name: left})
    found = client.pull(name).wait().tobytes()
    if found == left.tobytes() or any(server["restored"] for server in client.status()):  # of an earlier job
        return {}
    text = zlib.decompressobj()
    first = text.decompress(found[8:]).decode(errors="replace")
    if not text.eof:
        raise ArgumentError("the ranks were given different things, too long to be shown", fix="let all run one script")
    return {"the first rank to come": first, f"rank {client.worker}": mine}


def agreed(client: Client, rank: int, values: Mapping[str, float]) -> dict[str, float]:
    """The numbers of the first rank in place of these; ends a clock. ArgumentError if others ask at another step."""
    mine, step = np.array([*values.values()], np.float64), client.step
    name = f"{AGREEMENT} {step}"  # a new life of a worker must not find what was agreed on before it
    parameter = {name: Parameter(mine.shape, "float64", rule="add", reduce="sum")}
    try:
        if rank == 0:
            client.create(parameter, {name: mine})
        client.clock().wait()
        if rank:
            client.create(parameter, {name: mine})
    except RefusedError as error:
        if AGREEMENT not in str(error):
            raise
        raise ArgumentError(
            f"rank {rank} has made {step} steps when it asks for {', '.join(values)}, others have made more or fewer",
            fix="give all ranks as many batches an epoch, whatever each has of the data",
        ) from error
    return dict(zip(values, client.pull(name).wait().tolist()))

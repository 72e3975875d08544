"""What servers of another number have kept, for those that go on from it: each takes its rows as workers make tables.

Another number of servers deals the rows of a table otherwise, and a parameter comes under another key to another server
(`partition.py`). So nothing is taken over by key: a new table takes its rows, by the name of its parameter, from the
shards in which they lie, whatever first values it is given. Workers are all new, and begin at the clock of the shards;
under BSP that is one moment (`snapshot.py`). What no worker makes again is in no later snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...checkpoint import Checkpoint
from ..store.consistency import consistency
from ..store.growing import GrowingTable
from ..store.messages import RefusedError
from ..store.partition import ids_of, places_before, places_of
from ..store.server_table import ReadPart, ServerTable
from ..store.store import ParameterStore
from ..store.table_spec import TableSpec
from .snapshot import chain_of, check_workers, damage_in, parts_of


class KeptBlock(NamedTuple):
    """A block of a parameter in the snapshot of one server, and what reads it of each that this goes on from."""

    spec: TableSpec
    parts: list[ReadPart]
    path: Path


class Heritage:
    """The snapshots of a clock in the `folders` of servers that were."""

    def __init__(self, folders: Sequence[Path], clock: int) -> None:
        self.shards: dict[str, list[KeptBlock]] = {}
        self.snapshots = list[Checkpoint]()
        for folder in folders:
            with damage_in(folder):
                chain = chain_of(folder, clock)
                self.snapshots.append(chain[-1])
                for key, meta in chain[-1].extra["tables"].items():
                    block = KeptBlock(TableSpec.parse(meta), parts_of(chain, key), chain[-1].path)
                    self.shards.setdefault(block.spec.name, []).append(block)
        for shards in self.shards.values():
            shards.sort(key=lambda shard: shard.spec.start)

    def begin(self, store: ParameterStore) -> None:
        """Put a new store at the clock of the shards, where its workers begin, and have it fill the tables it makes."""
        with damage_in(self.snapshots[0].path):
            states = [snapshot.extra for snapshot in self.snapshots]
            for snapshot in self.snapshots:
                check_workers(snapshot, store)
            store.consistency = consistency(states[0]["consistency"])
            least = max(int(state["slowest"]) for state in states)
            clocks = {w: max(state["clocks"].get(str(w), least) for state in states) for w in range(len(store.members))}
            store.clocks.of, store.clocks.slowest = clocks, min(clocks.values())
            store.partial.formed_before = max(int(state["groups"]) for state in states)
            age = max(0.0, time.time() - min(state["time"] for state in states))
            store.restored = {"clock": states[0]["clock"], "age": round(age, 3)}
        store.inherit = self.fill

    def fill(self, table: ServerTable) -> None:
        """Give a new table the rows of its parameter, if there are any; RefusedError if it is another one now."""
        spec, shards = table.spec, self.shards.get(table.spec.name, [])
        if not shards:
            return
        for shard in shards:
            if _kind(shard.spec) != _kind(spec):
                differs = _kind(shard.spec).unlike(_kind(spec))
                raise RefusedError("spec", f"{spec.name} was kept with {differs}", fix=_FIX)
        with damage_in(shards[0].path):
            if not isinstance(table, GrowingTable):
                self._take(table, shards)
                return
            for shard in shards:
                old = GrowingTable(shard.spec)
                old.resume(shard.parts, 0)
                table.take(old)

    def _take(self, table: ServerTable, shards: list[KeptBlock]) -> None:
        for shard, mine, theirs in self._moves(table.spec, shards):
            for part, array in table.kept().items():
                kept = shard.parts[-1](part)
                if array.ndim:
                    array[mine] = kept[theirs]
                else:  # the rate and the step of the rule
                    array[...] = kept if part == "rate" else max(array, kept)
        table.wanting = table.spec.rows - int(table.filled.sum())

    def _moves(self, spec: TableSpec, shards: list[KeptBlock]) -> Iterator[tuple[KeptBlock, Any, Any]]:
        """From which shards rows come: which of its rows a table takes, and which of the shard's they are."""
        before = [0, *accumulate(shard.spec.rows for shard in shards)]
        total, dense = before.pop(), before != [shard.spec.start for shard in shards]
        if dense := dense or spec.placed > 0:  # its blocks stay the same; of a placed table some may have no rows
            shards = [s for s in shards if (s.spec.start, s.spec.rows) == (spec.start, spec.rows)]
        if not shards or shards[0].spec.cols != spec.cols:
            raise RefusedError("spec", f"no block of {spec.name} was kept as {spec}", fix=_FIX)
        if dense:
            yield shards[0], slice(None), slice(None)
            return
        edges = [places_before(part, total, spec.parts) for part in range(spec.parts + 1)]
        if (spec.start, spec.start + spec.rows) not in pairwise(edges):
            raise RefusedError("spec", f"{spec.name} was kept with {total} rows, of which {spec} is no part", fix=_FIX)
        ids = ids_of(np.arange(spec.start, spec.start + spec.rows), total, spec.parts)
        places = places_of(ids, total, len(shards))
        for shard in shards:
            here = places - shard.spec.start
            mine = np.flatnonzero((here >= 0) & (here < shard.spec.rows))
            if len(mine):
                yield shard, mine, here[mine]


_FIX = "create it as before, or start the job with a new folder of snapshots"


def _kind(spec: TableSpec) -> TableSpec:
    """What the blocks of a parameter have in common."""
    return replace(spec, start=0, rows=1, cols=0, generation=0, options={}, parts=1, first=0, joined=[], consistency="")

"""How checkpoints hold what servers keep: variables as on one process, tables without a bound as the rows they have."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint import Checkpoint, ids_name, whole, write_part
from ..core.errors import CheckpointError
from ..core.graph import Node
from ..core.types import Box
from ..ps.saved import export_rows, restore, restore_rows, state_of
from ..ps.wire.client import Client
from .bundles import Bundle
from .servable import known_shape


@dataclass(frozen=True)
class KeptBundle:
    """Variables that servers keep together under a name, each with the variables of its rule's state."""

    client: Client
    name: str
    bundle: Bundle
    each: Mapping[Node, list[Node]]

    @property
    def grows(self) -> bool:
        """Whether it is a table without a bound."""
        return self.client.parameters[self.name].grows is not None

    def write(self, folder: Path, number: int, sizes: list[int], table: dict[str, Any]) -> None:
        """Add a part for each piece, so that only one of them is in memory at a time."""
        if self.grows:
            self._write_rows(folder, number, sizes, table)
            return
        for rows, piece in self.bundle.pieces:
            part, all_nodes = len(sizes), [self.each[v] for v in piece.variables]
            arrays = zip(all_nodes, piece.parts(state_of(self.client, self.name, rows)))
            tensors = {n.name: np.asarray(a) for nodes, stacked in arrays for n, a in zip(nodes, stacked)}  # of ()
            sizes.append(write_part(folder, number, part, tensors))
            for n in (n for nodes in all_nodes for n in nodes):
                pieces = [(part, whole(known_shape(n)))]
                table[n.name] = {"shape": n.shape, "dtype": n.dtype.name, "pieces": pieces}

    def _write_rows(self, folder: Path, number: int, sizes: list[int], table: dict[str, Any]) -> None:
        """The ids of rows, their values and the states of their rule, a part for some rows at a time."""
        [(variable, held)], first = self.each.items(), len(sizes)
        for ids, rows in export_rows(self.client, self.name):
            tensors = {ids_name(variable.name): ids, **{n.name: array for n, array in zip(held, rows)}}
            sizes.append(write_part(folder, number, len(sizes), tensors))
        where = {"pieces": [], "parts": [*range(first, len(sizes))], "ids": variable.name}
        table |= {n.name: {"shape": n.shape, "dtype": n.dtype.name, **where} for n in held}

    def check(self, taken: Collection[str]) -> None:
        """CheckpointError if that is the state of rows without the rows: a table without a bound is loaded by rows."""
        for variable, held in self.each.items() if self.grows else ():
            if variable.name not in taken and (states := [n.name for n in held if n.name in taken]):
                raise CheckpointError(
                    f"{states[0]}, of which the rows are those of {variable.name}, and not all of these are loaded",
                    fix=f"load {variable.name} as well; without the states, these begin at 0",
                )

    def read(self, checkpoint: Checkpoint, taken: Collection[str], step: int) -> None:
        """Have the servers go on from what is `taken` of a checkpoint, at this step of the rule."""
        held = [n for nodes in self.each.values() for n in nodes]
        if not any(n.name in taken for n in held):
            return
        if self.grows:
            restore_rows(self.client, self.name, partial(self._read_rows, checkpoint, taken, held), step)
            return
        parts = []
        for rows, where in self.bundle.slices:
            kept = None if all(n.name in taken for n in held) else state_of(self.client, self.name, rows)
            parts.append((rows, partial(self._read, checkpoint, taken, kept, *where)))
        restore(self.client, self.name, parts, step)

    def _read_rows(
        self, checkpoint: Checkpoint, taken: Collection[str], held: list[Node]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Rows of a table without a bound as they were saved; what is not taken of a rule's state begins at 0."""
        there = [n.name for n in held if n.name in taken]
        for ids, arrays in checkpoint.rows(there):
            found = dict(zip(there, arrays))
            yield ids, np.stack([found.get(n.name, np.zeros_like(arrays[0])) for n in held])

    def _read(
        self, checkpoint: Checkpoint, taken: Collection[str], kept: np.ndarray | None, piece: Bundle, some: Box
    ) -> np.ndarray:
        """The values of a bundle, or of `some` rows of its table, then each of the states: `taken`, or as `kept`."""
        joined = []
        for k, nodes in enumerate(zip(*[self.each[v] for v in piece.variables])):
            parts = [None] * len(nodes) if kept is None else piece.parts(kept[k])
            boxes = [(n.name, (*some, *whole(known_shape(n)[len(some) :]))) for n in nodes]
            read = [checkpoint.read(*box) if box[0] in taken else part for box, part in zip(boxes, parts)]
            joined.append(piece.joined([np.asarray(part) for part in read]))
        return np.stack(joined)

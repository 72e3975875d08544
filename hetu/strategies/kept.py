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
        """Add a part for each piece, or for some rows of a table without a bound: only one is in memory at a time."""
        if self.grows:
            [(variable, nodes)], first = self.each.items(), len(sizes)
            for ids, rows in export_rows(self.client, self.name):
                tensors = {ids_name(variable.name): ids, **{n.name: array for n, array in zip(nodes, rows)}}
                sizes.append(write_part(folder, number, len(sizes), tensors))
            where = {"pieces": [], "parts": [*range(first, len(sizes))], "ids": variable.name}
            table |= {n.name: {"shape": n.shape, "dtype": n.dtype.name, **where} for n in nodes}
            return
        for some, piece in self.bundle.pieces:
            parts = piece.parts(state_of(self.client, self.name, some))
            tensors = {n.name: np.asarray(a) for v, of in zip(piece.variables, parts) for n, a in zip(self.each[v], of)}
            for n in (n for v in piece.variables for n in self.each[v]):
                pieces = [(len(sizes), whole(known_shape(n)))]
                table[n.name] = {"shape": n.shape, "dtype": n.dtype.name, "pieces": pieces}
            sizes.append(write_part(folder, number, len(sizes), tensors))

    def check(self, taken: Collection[str]) -> None:
        """CheckpointError if that is the state of rows without the rows: a table without a bound is loaded by rows."""
        for variable, held in self.each.items() if self.grows else ():
            if variable.name not in taken and (states := [n.name for n in held if n.name in taken]):
                raise CheckpointError(
                    f"{states[0]}, of which the rows are those of {variable.name}, and not all of these are loaded",
                    fix=f"load {variable.name} as well; without the states, these begin at 0",
                )

    def read(self, checkpoint: Checkpoint, taken: Collection[str], step: int) -> None:
        """Have the servers go on from what is `taken` of a checkpoint, at this step of the rule.

        What is not taken of the state of a table without a bound begins at 0; of others it stays.
        """
        held = [n.name for nodes in self.each.values() for n in nodes]
        there = [name for name in held if name in taken]

        def rows() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for ids, arrays in checkpoint.rows(there):
                found = dict(zip(there, arrays))
                yield ids, np.stack([found.get(name, np.zeros_like(arrays[0])) for name in held])

        if there and self.grows:
            checkpoint.check_rows(there)  # before the rows there are go
            restore_rows(self.client, self.name, rows, step)
        elif there:
            parts = []
            for some, where in self.bundle.slices:
                kept = None if there == held else state_of(self.client, self.name, some)
                parts.append((some, partial(self._read, checkpoint, taken, kept, *where)))
            restore(self.client, self.name, parts, step)

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

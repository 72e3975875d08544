"""The values of variables, and one atomic checkpoint file for all of them.

The arrays never move once made, because programs are bound to their addresses: setting a value copies into place. A
checkpoint is a safetensors file (no code can hide in it), written beside the old one, flushed and renamed, so that a
crash leaves the old one whole. All variables are saved, trained or not.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .backend import Device, aligned_empty, to_numpy
from .checkpoint import Checkpoint, whole, write_atomically
from .errors import CheckpointError, ShapeError, UnknownNameError, did_you_mean, public
from .graph import Node
from .types import Box, show_shape


def initial_value(node: Node, seed: int) -> np.ndarray:
    """What a variable begins with; random numbers depend only on the seed and the name."""
    init = node.attrs["init"]
    if callable(init):
        init = init(node.shape, node.dtype, np.random.default_rng([seed, zlib.crc32(node.name.encode())]))
    return np.asarray(init, node.dtype)


class State(Mapping[str, np.ndarray]):
    """Variable values by name. Reading gives a copy; `state[name] = value` writes into the bound array.

    >>> import hetu as ht
    >>> state = State([ht.variable("w", np.ones((2, 2)))])
    >>> state["w"] = np.zeros((2, 2))
    >>> float(state["w"].sum())
    0.0
    """

    def __init__(self, variables: Iterable[Node] = (), *, seed: int = 0, device: Device | None = None) -> None:
        self.seed, self.device = seed, device or Device("cpu")
        self.stream = self.device.stream()  # of all executors that work on these values
        self.variables: dict[str, Node] = {}
        self.arrays: dict[str, Any] = {}
        self.dirty = False  # a step failed after it had begun to write variables
        for node in variables:
            self.add(node)

    def add(self, node: Node) -> None:
        """Make room for a variable and initialize it."""
        self.variables[node.name] = node
        xp, type_ = self.device.xp, node.tensor
        array = aligned_empty(xp, int(type_.nbytes)).view(type_.dtype).reshape(type_.shape)
        array[...] = xp.asarray(initial_value(node, self.seed))
        self.arrays[node.name] = array

    def _name(self, key: str | Node) -> str:
        name = key.name if isinstance(key, Node) else key
        if name not in self.arrays:
            raise UnknownNameError(f"there is no variable {name!r}", fix=did_you_mean(name, self.arrays))
        return name

    @public
    def __getitem__(self, key: str | Node) -> np.ndarray:
        return to_numpy(self.arrays[self._name(key)])

    @public
    def __setitem__(self, key: str | Node, value: Any) -> None:
        name = self._name(key)
        array = self.arrays[name]
        value = np.asarray(value)
        if value.shape != array.shape:
            raise ShapeError(
                f"variable {name!r} has shape {show_shape(array.shape)}, got {show_shape(value.shape)}",
                fix="assign an array of the variable's shape",
            )
        array[...] = self.device.xp.asarray(value, dtype=array.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def __repr__(self) -> str:
        total = sum(a.nbytes for a in self.arrays.values())
        return f"<State of {len(self)} variables, {total / 1e6:.1f} MB>"

    @public
    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """Write all variables and `extra` (plain JSON data, such as a data cursor) to one file, atomically."""
        tensors = {name: self.contiguous(name) for name in self.arrays}
        write_atomically(Path(path), tensors, {"extra": json.dumps(dict(extra or {}))})

    def contiguous(self, name: str) -> np.ndarray:
        """The value of a variable as a dense array in the memory of the host."""
        array = self.arrays[name]
        return np.ascontiguousarray(to_numpy(array)).reshape(array.shape)

    @public
    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Set every variable from a file, or from a folder that ranks wrote, and return its `extra`.

        On any mismatch: CheckpointError, and nothing is changed.
        """
        checkpoint = Checkpoint(Path(path))
        wanted = {n: Wanted(a.shape, a.dtype.name, whole(a.shape)) for n, a in self.arrays.items()}
        self.assign(fitting(checkpoint, wanted))
        extra: dict[str, Any] = checkpoint.extra
        return extra

    def assign(self, values: Mapping[str, np.ndarray]) -> None:
        """Set variables to what a checkpoint holds for them."""
        for name, value in values.items():
            self.arrays[name][...] = self.device.xp.asarray(value)
        self.dirty = False


class Wanted(NamedTuple):
    """What is wanted of a checkpoint for one variable: its whole shape and dtype, and the box to read, if any."""

    shape: tuple[int, ...]
    dtype: str
    box: Box | None


def fitting(checkpoint: Checkpoint, wanted: Mapping[str, Wanted]) -> dict[str, np.ndarray]:
    """The wanted boxes by name. CheckpointError with a table of missing, unexpected and mis-shaped entries."""
    rows = [f"  missing     {name}" for name in wanted if name not in checkpoint.variables]
    rows += [f"  unexpected  {name}" for name in checkpoint.variables if name not in wanted]
    for name, (shape, dtype, _) in wanted.items():
        entry = checkpoint.variables.get(name)
        if entry is not None and (tuple(entry["shape"]), entry["dtype"]) != (shape, dtype):
            here, there = f"{dtype}{show_shape(shape)}", f"{entry['dtype']}{show_shape(tuple(entry['shape']))}"
            rows.append(f"  different   {name}: the file has {there}, the model {here}")
    if rows:
        shown = rows[:8] + ([f"  ... and {len(rows) - 8} more"] if len(rows) > 8 else [])
        raise CheckpointError(
            "\n".join([f"{checkpoint.path.name} belongs to another model; nothing was loaded", *shown]),
            fix="build the model as it was saved; names come from layers and ht.scope(...)",
        )
    return {name: checkpoint.read(name, w.box) for name, w in wanted.items() if w.box is not None}

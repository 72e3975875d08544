"""The values of variables.

Arrays stay until an executor switches, as programs are bound to their addresses: setting a value copies into place.
All variables are saved, trained or not. `checkpoint.py` decides what a file looks like.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast
from weakref import WeakSet

import numpy as np

from .backend import Device, Seed, aligned_empty, array_from, fitting, to_numpy
from .errors import ArgumentError, DTypeError, ShapeError, UnknownNameError, did_you_mean, public, user_site
from .graph import Node
from .leaf import seed_of
from .types import show_shape

FilePath = str | os.PathLike[str]
FILES: dict[str, Callable[..., Any]] = {}  # "begin" a save and "load", which `hetu.saving` enters, and "lend"


def initial_value(node: Node, seed: int) -> np.ndarray:
    """What a variable begins with; random numbers depend only on the seed and the name."""
    init = node.attrs["init"]
    value = init(node.shape, node.dtype, np.random.default_rng(seed_of(node, seed))) if callable(init) else init
    return np.asarray(array_from(value), node.dtype)


class State(Mapping[str, np.ndarray]):
    """Variable values by name. Reading gives a copy, `state[name] = value` writes into the bound array. `boxes` are the
    parts that ranks have, where not all have all.

    >>> import hetu as ht
    >>> state = State([ht.variable("w", np.ones((2, 2)))])
    >>> state["w"] = np.zeros((2, 2))
    >>> float(state["w"].sum())
    0.0
    """

    def __init__(self, variables: Iterable[Node] = (), *, seed: Seed = 0, device: Device | None = None) -> None:
        self.seed, self.device = seed, device or Device("cpu")
        self.stream = self.device.stream()  # of all executors that work on these values
        self.variables, self.arrays, self.boxes = dict[str, Node](), dict[str, Any](), dict[str, Any]()
        self.executors = WeakSet[Any]()  # that work on these values
        self.dirty = False  # a step failed after it had begun to write variables
        self.unseen = dict[str, Any]()  # what ranks have not compared, and from which line; new whenever it grows
        self.copies = dict[str, str]()  # variables kept elsewhere, such as on servers, and their names there
        for node in variables:
            self.add(node)

    def add(self, node: Node) -> None:
        """Make room for a variable and initialize it."""
        if node.name in self.copies:
            fix = "use it in a sub-graph of the executor that trains it"
            raise ArgumentError(f"the values of {node.name!r} are kept elsewhere", fix=fix, site=node.site)
        self.variables[node.name] = node
        xp, type_, value = self.device.xp, node.tensor, initial_value(node, self.seed)
        self.arrays[node.name] = array = aligned_empty(xp, int(type_.nbytes)).view(type_.dtype).reshape(type_.shape)
        array[...] = xp.asarray(value)
        self.unseen = self.unseen | {node.name: user_site()}

    def _name(self, key: str | Node) -> str:
        name = key.name if isinstance(key, Node) else key
        if name not in self.arrays:
            raise UnknownNameError(f"there is no variable {name!r}", fix=did_you_mean(name, self.arrays))
        return name

    @public
    def __getitem__(self, key: str | Node) -> np.ndarray:
        return cast(np.ndarray, FILES.get("lend", np.asarray)(to_numpy(self.arrays[self._name(key)])))

    @public
    def __setitem__(self, key: str | Node, value: Any) -> None:
        array = self.arrays[name := self._name(key)]
        if name in self.copies:
            raise ArgumentError(f"{name!r} is a copy, which the next step replaces", fix="load a checkpoint instead")
        value = fitting(value, array.dtype, lambda what, fix: DTypeError(f"variable {name!r} {what}", fix=fix))
        if value.shape != array.shape:
            said = f"variable {name!r} has shape {show_shape(array.shape)}, got {show_shape(value.shape)}"
            raise ShapeError(said, fix="assign an array of the variable's shape")
        array[...] = self.device.xp.asarray(value, dtype=array.dtype)
        self.unseen = self.unseen | {name: user_site()}

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def __repr__(self) -> str:
        return f"<State of {len(self)} variables, {sum(a.nbytes for a in self.arrays.values()) / 1e6:.1f} MB>"

    @public
    def save(self, path: FilePath, extra: Mapping[str, Any] | None = None) -> None:
        """Write all variables and `extra` (plain JSON data, such as a data cursor) to one file, atomically."""
        FILES["begin"](self, path, extra).finish()

    def contiguous(self, name: str) -> np.ndarray:
        """The value of a variable as a dense array in the memory of the host."""
        return np.asarray(to_numpy(self.arrays[name]), order="C")

    @public
    def load(self, path: FilePath, only: Any = None, strict: bool = True) -> dict[str, Any]:
        """Set every variable from a file, or from a folder that ranks wrote, and return its `extra`.
        `only` is what to take: variables, layers or patterns of names such as "encoder/*", one or a list of them; the
        file may then hold others. Not `strict`, it may also lack some, which stay as they are.
        On any mismatch: CheckpointError, and nothing is changed.
        """
        return dict(FILES["load"](self, path, only, strict))

    def assign(self, values: Mapping[str, np.ndarray]) -> None:
        """Set variables to what a checkpoint holds for them."""
        for name, value in values.items():
            self.arrays[name][...] = self.device.xp.asarray(value)
        self.unseen = self.unseen | dict.fromkeys(values, user_site())
        self.dirty = False

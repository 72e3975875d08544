"""A trained model at work: weights alone out of a checkpoint, predictions of any number of rows, single values.

Left out: files that hold the graph, and serving (`serving/`), and exporting to C (`Executor.export_c`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoint import Checkpoint
from .core.backend import array_from
from .core.errors import ArgumentError, CheckpointError, FeedError, UnknownNameError, did_you_mean, public
from .core.executor import Executor
from .core.graph import Graph, Node
from .core.leaf import random_state
from .core.op import Role
from .core.state import FilePath
from .core.subgraph import SubGraph
from .core.types import Dim, show_shape, substitute
from .progress import bar
from .renamed import ArrayPart, Renamed
from .saving import among

SOME = 1_000_003  # rows, where their number is open: so many that no other size is the same


@dataclass(frozen=True, repr=False)
class Loaded:
    """What `load_weights` took from a file, what it did not find there, and what it left, by name."""

    file: str
    taken: tuple[str, ...]
    missing: tuple[str, ...]
    left: tuple[str, ...]
    places: Mapping[str, ArrayPart] = field(default_factory=dict, compare=False)

    def state_dict(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What `state` has now of all that was taken, by the names and in the axes of its file, for its library.

        Arrays that were taken in part are left out. Of ranks that keep parts of variables, save and load them in one.
        """
        found = dict[str, tuple[tuple[int, ...], list[Any]]]()  # axes and parts
        for name in self.taken:
            array, axes, part, parts = self.places.get(name, ArrayPart(name, tuple(range(state[name].ndim))))
            found.setdefault(array, (axes, [None] * parts))[1][part] = state[name]
        return {
            array: np.array((np.concatenate(held, -1) if axes else held[0]).transpose(np.argsort(axes)), order="C")
            for array, (axes, held) in found.items()
            if all(value is not None for value in held)
        }

    def __repr__(self) -> str:
        rows = (
            (f"taken from {self.file}", self.taken),
            ("not in the file, as they were", self.missing),
            ("left in the file", self.left),
        )
        return "\n".join(f"{len(names):>5,} {what}: {_shown(names)}" for what, names in rows if names)


@public
def load_weights(
    executor: Executor,
    path: FilePath | Mapping[str, Any],
    *,
    only: Any = None,
    names: Sequence[Any] | None = None,
) -> Loaded:
    """Set a model's variables from a checkpoint that may hold more and lack some, under any strategy; tells which.

    For inference and fine-tuning, where `Executor.load` continues a training: states of optimizers and random numbers
    stay as they are. `only` is what to take: variables, layers or patterns of names, one or a list of them.
    CheckpointError where the file has none of them, or one of another shape; nothing is changed then.

    Of other libraries' safetensors, a file or a folder with an index, `names` says which variable an array is:
    rows (pattern, name), where a list of names divides the last axis, and (pattern, name, axes), which orders the axes
    first: `(r"fc(\\d)\\.weight", r"mlp/linear_\\1/weight", (1, 0))`; `linear_0` is `linear`. Floats of 16 bits are
    widened. `path` may also be the arrays, a mapping by name such as the `state_dict()` of a module. The report gives
    them back, as they are after training: `report.state_dict(executor.state)`.

    >>> import hetu as ht, tempfile
    >>> with ht.scope("demo"):
    ...     y = ht.nn.Linear(3, 2)(ht.placeholder("x", (None, 3)))
    >>> training = ht.Executor([ht.optim.Adam().minimize(ht.sum(y * y))])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     training.save(f"{folder}/run")
    ...     load_weights(ht.Executor([y]), f"{folder}/run")  # doctest: +ELLIPSIS
        2 taken from run: demo/linear/weight, demo/linear/bias
        5 left in the file: ...
    """
    model = {v.name: v for v in _weights(executor)}
    wanted = [*model] if only is None else among(model, only)
    source: FilePath = path if names is None and not isinstance(path, Mapping) else Renamed(path, names or (), model)
    executor.load(source, only=wanted, strict=False)  # which ranks open together
    there = source if isinstance(source, Renamed) else Checkpoint(source)
    taken = tuple(name for name in wanted if name in there.variables)
    if not taken:
        said = f"{Path(source).name} has none of {_shown(wanted)}, it has {_shown([*there.variables])}"
        raise CheckpointError(said, fix=there.fix)
    missing = tuple(name for name in wanted if name not in there.variables)
    left = tuple(name for name in there.variables if name not in taken)
    return Loaded(Path(source).name, taken, missing, left, getattr(there, "places", {}))


def _weights(executor: Executor) -> list[Node]:
    """The variables of the model: those that are trained, and others that what is fetched needs."""
    fetched = Graph(tuple(e for sub in executor.subgraphs.values() for e in sub.entries if isinstance(e, Node)))
    needed = {*fetched.leaves("variable")} - {random_state}
    return [v for v in executor.variables if v.attrs["trainable"] or v in needed]


def _shown(names: Any) -> str:
    return ", ".join(names[:6]) + (f", and {len(names) - 6:,} more" if len(names) > 6 else "")


@public
def _predict(
    self: Executor,
    x: Any,
    *,
    name: str | None = None,
    batch_size: int = 256,
    progress: bool | None = None,
) -> Any:
    """What a sub-graph gives for any number of rows, `batch_size` at a time: an array, or a list if it has several.

    Args:
        x: an array for its one placeholder, or a feed of arrays of equally many rows.
        name: the sub-graph; by default the only one that updates nothing.
        batch_size: rows of a run. A placeholder of a fixed number of them decides, and the last run is filled up.
        progress: show a bar; by default in a terminal and in a notebook.

    ArgumentError where a value is not one per row, such as a loss.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (None, 2))
    >>> ht.Executor([ht.sum(x, axis=1)]).predict(np.ones((1000, 2))).shape
    (1000,)
    """
    sub = _only(self) if name is None else self.subgraphs.get(name)
    if sub is None:
        raise UnknownNameError(f"there is no sub-graph {name!r}", fix=did_you_mean(str(name), self.subgraphs))
    if sub.updates:
        raise ArgumentError(f"sub-graph {sub.name!r} trains", fix="name one that updates nothing, or give it [y]")
    if type(batch_size) is not int or batch_size < 1:
        raise ArgumentError(f"batch_size is {batch_size!r}", fix="count the rows of a run, from 1 up")
    feed = _columns(sub, x)
    count = min(map(len, feed.values()))
    fixed = _fixed_rows(sub)
    size = fixed or batch_size
    if fixed and not count:
        raise FeedError("there is no row", fix=f"feed at least one; {sub.name!r} takes {fixed} at a time")
    results: list[list[np.ndarray]] = [[] for entry in sub.entries if isinstance(entry, Node)]
    with bar("rows", count, progress, rank=self.placement.rank) as shown:
        for first in range(0, max(count, 1), size):
            rows = np.arange(first, min(first + size, count))
            filled = np.resize(rows, size) if fixed else rows
            values = self.run(sub.name, {key: column[filled] for key, column in feed.items()})
            for kept, value in zip(results, (v for v in values if v is not None)):
                kept.append(value[: len(rows)])
            shown.update(len(rows))
    made = [np.concatenate(parts) for parts in results]
    return made[0] if len(made) == 1 else made


@public
def _value(self: Executor, node: Any, feed: Any = None) -> np.ndarray:
    """The value of any node with the variables as they are now, under the executor's strategy; a look, no program kept.

    Nothing is trained, so dropout drops nothing. `ht.evaluate` has initial values. Of a table that servers keep by rows
    a node may look rows up; ArgumentError for one that reads it whole.

    >>> import hetu as ht
    >>> w = ht.variable("w", 1.0, ())
    >>> ex = ht.Executor([{w: w + 1}])
    >>> _ = ex.run()
    >>> float(ex.value(w * 10))
    20.0
    """
    asked = f"value of {node.op.name}"
    known = {random_state.name, *self.state, *(v.name for v in self.variables)}  # of which this rank may have none
    if foreign := [v.name for v in Graph((node,)).leaves("variable") if v.name not in known]:
        said = f"the executor has no value of {_shown(foreign)}"
        raise UnknownNameError(said, fix="ask for a node of its graph, or use ht.evaluate, which has initial values")
    strategy, comm = getattr(self.placement, "strategy", None), self.placement.comm
    entries = {asked: [node]}
    if strategy is not None:
        leaves = SubGraph(asked, [node]).written.nodes
        if any(strategy.is_served(leaf) for leaf in leaves if leaf.role is Role.VARIABLE):  # known by how they train
            entries |= {name: sub.entries for name, sub in self.subgraphs.items()}
        else:
            strategy = strategy.naming([leaf.name for leaf in leaves])
    return Executor(entries, state=self.state, strategy=strategy, comm=comm).run(asked, feed)[0]


Executor.predict, Executor.value = _predict, _value


def _only(executor: Executor) -> SubGraph:
    """The one sub-graph that updates nothing."""
    still = [sub for sub in executor.subgraphs.values() if not sub.updates]
    if len(still) != 1:
        names = ", ".join(repr(sub.name) for sub in still) or "none"
        raise ArgumentError(f"of sub-graphs that update nothing there are {names}", fix="say which: name=...")
    return still[0]


def _columns(sub: SubGraph, x: Any) -> dict[str, np.ndarray]:
    """What is fed, by name."""
    if isinstance(x, Mapping):
        feed = {key.name if isinstance(key, Node) else key: array_from(value) for key, value in x.items()}
    elif len(sub.placeholders) == 1:
        feed = {name: array_from(x) for name in sub.placeholders}
    else:
        names = ", ".join(map(repr, sub.placeholders)) or "nothing"
        raise ArgumentError(f"sub-graph {sub.name!r} is fed {names}", fix="pass a feed, an array for each")
    if len({column.shape[:1] for column in feed.values()}) != 1 or not all(c.ndim for c in feed.values()):
        shapes = ", ".join(f"{name} {show_shape(column.shape)}" for name, column in feed.items())
        raise FeedError(f"{shapes}: not as many rows in each", fix="feed an array of one row per example for each")
    return feed


def _fixed_rows(sub: SubGraph) -> int | None:
    """How many rows a run takes, if that is fixed; ArgumentError for a value that is not one per row."""
    firsts = {node.shape[0] for node in sub.placeholders.values() if node.shape}
    fixed = next((size for size in firsts if isinstance(size, int)), None)
    rows = SOME if fixed is None else fixed
    sizes = {atom: rows for size in firsts if isinstance(size, Dim) for atom in size.atoms}
    for entry in sub.entries:
        if isinstance(entry, Node) and substitute(entry.shape[:1], sizes) != (rows,):
            said = f"sub-graph {sub.name!r} gives {entry!r}, which is not one value per row"
            raise ArgumentError(said, fix="list what is: Executor({..., 'predict': [y]})")
    return fixed

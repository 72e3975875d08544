"""One named entry of an executor: what it fetches, updates and is fed, and its graph after all passes.

`executor.py` holds the variables and runs the programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from .backend import Unfit, array_from, fitting
from .errors import ArgumentError, FeedError, GraphError, did_you_mean
from .graph import Graph, Made, Node
from .leaf import random_state
from .op import Role
from .passes import PRECISIONS, Pass, applied, is_last, resolve_training, specialize
from .placement import Alone, Placement
from .program import Program
from .types import Atom, Dim, TensorType, show_shape

Fetch = Node | Mapping[Node, Node]
Feed = Mapping[Node | str, Any]


class Fed(NamedTuple):
    """What the last step was fed, and its program: for the same again, names need not be looked up."""

    program: Program
    keys: tuple[Node | str, ...]
    takes: tuple[tuple[tuple[int, ...], np.dtype, Callable[[np.ndarray], Any], Unfit], ...]  # shape, dtype as fed
    held: list[np.ndarray]  # what they have taken lives until something else is fed


class SubGraph:
    """One named entry of an executor: what is fetched, what is updated, and its programs by fed shapes."""

    def __init__(self, name: str, entries: Sequence[Fetch], precision: str = "float32") -> None:
        if not isinstance(entries, list | tuple):
            said = f"sub-graph {name!r} is a {type(entries).__name__}: {entries!r:.60}"
            raise ArgumentError(said, fix="pass a list of what it fetches and updates: [loss, train_op]")
        if precision not in PRECISIONS:
            raise ArgumentError(f"unknown precision {precision!r}", fix=f"use one of {', '.join(PRECISIONS)}")
        self.name, self.entries = name, list(entries)
        fetches, updates = _sort_entries(name, entries)
        gradients = [g for e in entries if not isinstance(e, Node) for g in getattr(e, "gradients", {}).values()]
        outputs, self.updates = resolve_training((*fetches, *gradients), updates)
        self.fetches, slopes = outputs[: len(fetches)], outputs[len(fetches) :]
        self.fetches, self.updates = PRECISIONS[precision](self.fetches, self.updates, slopes)
        graph = Graph((*fetches, *updates.values()))
        graph.verify()
        self.written = Graph(Made((*self.fetches, *self.updates.values())))  # as written, training flag resolved
        self.placeholders = {n.name: n for n in self.written.leaves("placeholder")}
        self.known = {n.name for n in graph.leaves("placeholder")}
        self.variables = [*graph.leaves("variable"), *self.updates]
        self.random = random_state in self.written.nodes
        self.programs: dict[Any, Program] = {}
        self.last: Fed | None = None
        self.whole: tuple[Any, tuple[Node, ...]] = None, ()  # of the last sizes, which may be cut for several ranks
        numbers = count()
        self.places = [next(numbers) if isinstance(entry, Node) else None for entry in self.entries]

    def lower(
        self,
        shapes: Mapping[str, Sequence[int]],
        passes: Sequence[Pass],
        placement: Placement | None = None,
        explain: bool = False,
        fed: Mapping[str, np.ndarray] | None = None,
    ) -> tuple[tuple[Node, ...], dict[Node, Node], Mapping[str, Any]]:
        """Fetches and updates for these fed shapes after all passes, and which box of which feed a placeholder takes:
        of this process where a placement cuts the graph. With `explain` passes tell what they change."""
        sizes: Mapping[Atom, int] = {
            (name, axis): size
            for name, shape in shapes.items()
            for axis, size in enumerate(shape)
            if isinstance(self.placeholders[name].shape[axis], Dim)
        }
        sizes = (placement := placement or Alone()).sizes(sizes, self.name, bool(self.updates), fed or {})
        if self.whole[0] != (key := (sizes, placement.passes, explain)):
            self.whole = key, applied(placement.passes, specialize(self.written.outputs, sizes), explain)
        outputs = self.whole[1]
        local = placement.cut(outputs[: len(self.fetches)], dict(zip(self.updates, outputs[len(self.fetches) :])))
        outputs, count = (*local.fetches, *local.tokens, *local.updates.values()), len(local.fetches + local.tokens)
        # Applied again, they could drop communication that another rank, whose constants differ, keeps.
        passes = [run for run in passes if run not in placement.passes]
        then = [run for run in passes if is_last(run)]
        outputs = applied([run for run in passes if run not in then], outputs, explain)
        fetches, updates = placement.last(outputs[:count], dict(zip(local.updates, outputs[count:])), then)
        outputs = applied(then, (*fetches, *updates.values()), explain)
        return outputs[: len(fetches)], dict(zip(updates, outputs[len(fetches) :])), local.feeds

    def match(self, feed: Feed) -> dict[str, np.ndarray]:
        """Fed arrays by placeholder name, in their own order; FeedError for missing, extra or unfitting ones."""
        given = _by_name(feed)
        for name in given:
            if name not in self.placeholders and name not in self.known:
                fix = did_you_mean(name, self.placeholders) or "feed it nothing"
                raise FeedError(f"sub-graph {self.name!r} has no placeholder {name!r}", fix=fix)
        if missing := [node for name, node in self.placeholders.items() if name not in given]:
            shown = ", ".join(f"{n.name!r} {n.type}" for n in missing)
            raise FeedError(f"sub-graph {self.name!r} was not fed {shown}", fix="add it to the feed of run(...)")
        return {n: fitted(given[n], node.tensor, _unfit(node)) for n, node in self.placeholders.items()}

    def remember(self, feed: Feed | None, program: Program, values: Mapping[str, np.ndarray]) -> None:
        """Recognize this feed, which fits `program` as `values`, when it comes again with other numbers."""
        names = [key.name if isinstance(key, Node) else key for key in feed or ()]
        known = type(feed) is dict and all(name in program.feeds for name in names)
        takes = []
        for name in names if known else ():
            take = program.takes if values[name].dtype == program.feeds[name].dtype else program.fills
            takes.append((values[name].shape, values[name].dtype, take[name], _unfit(self.placeholders[name])))
        self.last = Fed(program, tuple(feed or ()), tuple(takes), []) if known else None

    def refilled(self, feed: Feed | None) -> Program | None:
        """The program of the last step with `feed` in its buffers, if nothing but numbers has changed since."""
        if self.last is None or type(feed) is not dict or len(feed) != len(self.last.keys):
            return None
        program, keys, takes, held = self.last
        found = []
        for known, key, value, (shape, dtype, _, unfit) in zip(keys, feed, feed.values(), takes):
            if key is not known or (array := array_from(value, unfit)).shape != shape or array.dtype != dtype:
                return None
            found.append(array)
        held[:] = found
        for array, (_, _, take, _) in zip(held, takes):
            take(array)
        return program

    def values(self, results: list[np.ndarray]) -> list[Any]:
        """Results in the order of the entries, None for updates."""
        return [None if place is None else results[place] for place in self.places]


def _sort_entries(name: str, entries: Sequence[Fetch]) -> tuple[list[Node], dict[Node, Node]]:
    fetches: list[Node] = []
    updates: dict[Node, Node] = {}
    for entry in entries:
        if isinstance(entry, Node):
            fetches.append(entry)
        elif isinstance(entry, Mapping):
            for variable, value in entry.items():
                if not isinstance(variable, Node) or variable.role is not Role.VARIABLE:
                    raise ArgumentError(f"sub-graph {name!r} updates {variable!r}", fix="only variables can be updated")
                if updates.setdefault(variable, value) is not value:
                    raise GraphError(f"{variable!r} gets two new values in one step", fix="keep one of the updates")
                if value.type != variable.type:
                    raise GraphError(f"{value!r} cannot be the new value of {variable!r}", fix="make the types equal")
        else:
            said = f"sub-graph {name!r} fetches a {type(entry).__name__}: {entry!r:.60}"
            raise ArgumentError(said, fix="list nodes and what minimize(...) returned")
    return fetches, updates


def _by_name(feed: Feed) -> dict[Any, Any]:
    if not isinstance(feed, Mapping):
        raise FeedError(f"the feed is a {type(feed).__name__}", fix="pass a mapping: {placeholder: array}")
    given: dict[Any, Any] = {}
    for key, value in feed.items():
        if isinstance(key, Node) and key.role is not Role.PLACEHOLDER:
            raise FeedError(f"{key!r} was fed, only placeholders are", fix="set it with executor.state[name] = value")
        name = key.name if isinstance(key, Node) else key
        if name in given:
            raise FeedError(f"placeholder {name!r} was fed twice, by node and by name", fix="keep one of the two")
        given[name] = value
    return given


def _unfit(node: Node) -> Unfit:
    """The error for what was fed to a placeholder and cannot be."""
    return lambda what, fix: FeedError(f"placeholder {node.name!r} {what}", fix=fix, site=node.site)


def fitted(value: Any, wanted: TensorType, unfit: Unfit) -> np.ndarray:
    """What was fed as an array of a type, its numbers as they are; else raises `unfit(reason, fix)`."""
    array = fitting(value, wanted.dtype, unfit)
    alike = array.ndim == wanted.ndim
    if not (alike and all(isinstance(w, Dim) or w == s for w, s in zip(wanted.shape, array.shape))):
        fix = "reshape the array, or declare the size as None" if alike else "check the axes"
        raise unfit(f"is {wanted}, got shape {show_shape(array.shape)}", fix)
    return array

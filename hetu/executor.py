"""Run named sub-graphs: passes, one program per set of fed shapes, feeds in, values out, updates committed.

`ht.Executor` is for training; `ht.evaluate` is for a look at one node. Ignored on purpose: the training loop
(`training.py`) and where ranks and servers come in (they arrive as passes and context).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from .backend import Device, aligned_empty
from .errors import ArgumentError, FeedError, GraphError, UnknownNameError, did_you_mean, public
from .graph import Graph, Node
from .interpret import interpret
from .op import as_node
from .ops.random import random_state
from .passes import chosen_passes, explained, fuse_elementwise, resolve_training, specialise
from .program import Arena, Program
from .state import State
from .types import Dim, show_shape

Fetch = Node | Mapping[Node, Node]
Feed = Mapping[Node | str, Any]
KEPT_PROGRAMS = 64  # sets of shapes a sub-graph keeps compiled; beyond, the least recently used goes
_debug_nans = False


@contextlib.contextmanager
def debug_nans(on: bool = True) -> Iterator[None]:
    """Inside, a step that makes a NaN raises NumericError naming the first node that made one; no update is kept.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", ())
    >>> with ht.debug_nans():
    ...     ht.Executor([ht.log(x)]).run({x: -1.0})  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    hetu.errors.NumericError: <log f32[] at ...> made the first NaN; its inputs are ...
    """
    global _debug_nans
    before, _debug_nans = _debug_nans, on
    try:
        yield
    finally:
        _debug_nans = before


class Distribution(Protocol):
    """How an executor is spread over ranks. `hetu.dist` has the builders; here only their use is known."""

    def attach(self, outputs: Sequence[Node], comm: Any) -> Any: ...


class SubGraph:
    """One named entry of an executor: what is fetched, what is updated, and its programs by fed shapes."""

    def __init__(self, name: str, entries: Sequence[Fetch]) -> None:
        if not isinstance(entries, list | tuple):
            raise ArgumentError(
                f"sub-graph {name!r} is a {type(entries).__name__}: {entries!r:.60}",
                fix="pass a list of what it fetches and updates: [loss, train_op]",
            )
        self.name, self.entries = name, list(entries)
        fetches, updates = _sort_entries(name, entries)
        self.fetches, self.updates = resolve_training(fetches, updates)
        graph = Graph((*fetches, *updates.values()))
        graph.verify()
        self.written = Graph((*self.fetches, *self.updates.values()))  # what the user wrote, training flag resolved
        self.placeholders = {n.name: n for n in self.written.leaves("placeholder")}
        self.known = {n.name for n in graph.leaves("placeholder")}
        self.variables = [*graph.leaves("variable"), *updates]
        self.random = random_state in self.written.nodes
        self.programs: dict[Any, Program] = {}
        self.optimised: tuple[Node, ...] | None = None

    def values(self, results: list[np.ndarray]) -> list[Any]:
        """Results in the order of the entries, None for updates."""
        found = iter(results)
        return [next(found) if isinstance(e, Node) else None for e in self.entries]


def _sort_entries(name: str, entries: Sequence[Fetch]) -> tuple[list[Node], dict[Node, Node]]:
    fetches: list[Node] = []
    updates: dict[Node, Node] = {}
    for entry in entries:
        if isinstance(entry, Node):
            fetches.append(entry)
        elif isinstance(entry, Mapping):
            for variable, value in entry.items():
                if not isinstance(variable, Node) or variable.op.name != "variable":
                    raise ArgumentError(f"sub-graph {name!r} updates {variable!r}", fix="only variables can be updated")
                if updates.setdefault(variable, value) is not value:
                    raise GraphError(f"{variable!r} gets two new values in one step", fix="keep one of the updates")
                if value.type != variable.type:
                    raise GraphError(f"{value!r} cannot be the new value of {variable!r}", fix="make the types equal")
        else:
            raise ArgumentError(
                f"sub-graph {name!r} fetches a {type(entry).__name__}: {entry!r:.60}",
                fix="list nodes and what minimize(...) returned",
            )
    return fetches, updates


class Executor:
    """Compiles and runs sub-graphs that share variables.

    `subgraphs` maps names to lists of nodes and updates (`minimize(...)`); one list alone is called "default". A
    sub-graph trains, so that dropout drops and statistics move, if and only if it commits updates.
    `strategy` spreads the work over the ranks of the job (see `hetu.dist`); every rank is fed the whole batch.
    `state` shares the variables of another executor. `donate=False` keeps every step atomic at the price of copies.
    `explain` prints what each pass changed, and where, whenever a program is compiled.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (None,))
    >>> ex = ht.Executor([x * 2])
    >>> ex.run({x: [1.0, 2.0]})[0].tolist()
    [2.0, 4.0]
    """

    @public
    def __init__(
        self,
        subgraphs: Mapping[str, Sequence[Fetch]] | Sequence[Fetch],
        *,
        seed: int = 0,
        device: str = "cpu",
        state: State | None = None,
        passes: Iterable[str] | None = None,
        donate: bool = True,
        reuse: bool = True,
        strategy: Distribution | None = None,
        comm: Any = None,
        explain: bool = False,
    ) -> None:
        named = subgraphs if isinstance(subgraphs, Mapping) else {"default": subgraphs}
        if any(isinstance(name, Node) for name in named):
            raise ArgumentError("updates were passed alone", fix="list them: Executor([loss, updates])")
        self.donate, self.reuse = donate, reuse
        self.subgraphs = {name: SubGraph(name, entries) for name, entries in named.items()}
        self.device = Device.parse(device) if state is None else state.device
        self.passes = chosen_passes(passes, self.device.kind)
        if explain:
            self.passes = [explained(run) for run in self.passes]
        variables = {v: v for s in self.subgraphs.values() for v in s.variables}
        _check_names(variables)
        self.variables = list(variables)
        self.state = State(seed=seed, device=self.device) if state is None else state
        self.placement = None
        if strategy is not None:
            self.placement = strategy.attach([n for s in self.subgraphs.values() for n in s.written.outputs], comm)
            variables = {v: self.placement.variable(v) for v in variables}
        for node in variables.values():
            if node is not None and node.name not in self.state.variables:
                self.state.add(node)
                if node is random_state:
                    self.state[node] = np.array([seed, 0], np.uint64)
        if self.placement is not None:
            self.placement.start(self.state)
        self.arena = Arena(self.device)
        self.saved: dict[str, Any] = {}  # under `debug_nans`: the variables before the step

    # -- running -------------------------------------------------------------------------------------------------

    @public
    def run(self, name: str | Feed | None = None, feed: Feed | None = None) -> list[Any]:
        """One step of a sub-graph: its values in the order they were listed, None for updates.

        `feed` maps placeholders, or their names, to arrays. The name may be left out when there is one sub-graph.
        """
        if not isinstance(name, str):
            name, feed = self._only_name(), name if feed is None else feed
        sub = self._subgraph(name)
        values = _match(sub, feed or {})
        if self.state.dirty:
            raise GraphError(
                "an earlier step failed after it had changed some variables, so they no longer belong together",
                fix="load a checkpoint, or make the executor with donate=False",
            )
        program = self._program(sub, values, self.donate)
        self._fill(program, values)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
            results = program.run() if not _debug_nans else self._run_checked(sub, values, program)
        if sub.random:
            self.state.arrays[random_state.name][1] += np.uint64(1)
        return sub.values(results)

    @public
    def program(self, name: str | Feed | None = None, feed: Feed | None = None) -> Program:
        """The program that `run` would use for these feeds, to print or profile."""
        if not isinstance(name, str):
            name, feed = self._only_name(), name if feed is None else feed
        sub = self._subgraph(name)
        return self._program(sub, _match(sub, feed or {}), self.donate)

    def _only_name(self) -> str:
        if len(self.subgraphs) != 1:
            names = ", ".join(map(repr, self.subgraphs))
            raise ArgumentError(f"the executor has sub-graphs {names}", fix="say which: run(name, feed)")
        return next(iter(self.subgraphs))

    def _subgraph(self, name: str) -> SubGraph:
        if name not in self.subgraphs:
            raise UnknownNameError(f"there is no sub-graph {name!r}", fix=did_you_mean(name, self.subgraphs))
        return self.subgraphs[name]

    def _fill(self, program: Program, values: Mapping[str, np.ndarray]) -> None:
        """Copy what was fed into the program's buffers."""
        for key, buffer in program.feeds.items():  # without the placeholders that passes found unused
            name, part = program.parts.get(key, (key, ...))
            value = values[name][part]
            if self.device.kind == "cpu":
                np.copyto(buffer, value, casting="same_kind")
            else:
                buffer.set(value.astype(buffer.dtype, order="C"))

    def _run_checked(self, sub: SubGraph, values: Mapping[str, np.ndarray], program: Program) -> list[np.ndarray]:
        """Run; if a value that is kept holds a NaN, put the variables back and look for the node that made it."""
        written = {v.name: self.state.arrays[v.name] for v in program.updates}
        for name, array in written.items():
            if name not in self.saved:
                self.saved[name] = aligned_empty(program.xp, array.nbytes).view(array.dtype).reshape(array.shape)
            program.xp.copyto(self.saved[name], array)
        try:
            results = program.run()
            # Optimizer state (`w/adam_m`) cannot hold a NaN that does not reach its variable in the same step.
            watched = [array for name, array in written.items() if name.rpartition("/")[0] not in written]
            if _any_nan(program.xp, [*results, *watched]):
                self._put_back(written)
                careful = self._program(sub, values, donate=False)
                self._fill(careful, values)
                careful.find_nan()
                results = program.run()  # no node made it: it stood in a variable before
        except BaseException:
            self._put_back(written)
            raise
        return results

    def _put_back(self, written: Mapping[str, Any]) -> None:
        for name, array in written.items():
            self.device.xp.copyto(array, self.saved[name])
        self.state.dirty = False

    def _program(self, sub: SubGraph, values: Mapping[str, np.ndarray], donate: bool) -> Program:
        key = (donate, *(v.shape for v in values.values()))
        program = sub.programs.pop(key, None)
        if program is None:
            program = self._compile(sub, values, donate)
        sub.programs[key] = program  # the last used stands last
        if len(sub.programs) > KEPT_PROGRAMS:
            del sub.programs[next(iter(sub.programs))]
        return program

    def _compile(self, sub: SubGraph, values: Mapping[str, np.ndarray], donate: bool) -> Program:
        early = self.passes if self.placement is None else self.placement.passes
        if sub.optimised is None:
            sub.optimised = sub.written.outputs
            for run in early:
                sub.optimised = run(sub.optimised)
        sizes = {
            (name, axis): size
            for name, value in values.items()
            for axis, size in enumerate(value.shape)
            if isinstance(sub.placeholders[name].shape[axis], Dim)
        }
        if self.placement is not None:
            sizes = self.placement.sizes(sizes, training=bool(sub.updates))
        outputs = specialise(sub.optimised, sizes)
        if sizes:
            for run in early:  # sizes are numbers now: more folds
                outputs = run(outputs)
        count, targets, parts, comm = len(sub.fetches), list(sub.updates), {}, None
        if self.placement is not None:
            local = self.placement.partition(outputs[:count], dict(zip(targets, outputs[count:])))
            outputs = (*local.fetches, *local.tokens, *local.updates.values())
            count, targets, parts = count + len(local.tokens), list(local.updates), local.feeds
            comm = self.placement.comm
            for run in self.passes:
                if run not in early:  # it could drop communication that another rank, whose constants differ, keeps
                    outputs = run(outputs)
        if self.device.kind == "gpu":
            outputs = fuse_elementwise(outputs)
        updates = dict(zip(targets, outputs[count:]))
        program = Program(outputs[:count], updates, self.state, self.arena, donate=donate, reuse=self.reuse, comm=comm)
        program.parts = {
            local: (name, tuple(slice(low, high) for low, high in box)) for local, (name, box) in parts.items()
        }
        return program

    # -- state ---------------------------------------------------------------------------------------------------

    @public
    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """All variables, statistics, optimizer and random state in one file, atomically; see `State.save`.

        Under a strategy on several ranks `path` becomes a folder, to which each rank writes its part.
        """
        if self.placement is None or self.placement.comm.world_size == 1:
            self.state.save(path, extra)
        else:
            self.placement.save(self.state, self.variables, path, extra)

    @public
    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Continue from what `save` wrote, under this or another strategy; returns its `extra`. See `State.load`."""
        if self.placement is None:
            return self.state.load(path)
        return self.placement.load(self.state, self.variables, path)

    def __repr__(self) -> str:
        return f"<Executor of {', '.join(self.subgraphs)} on {self.device}, {self.state!r}>"


def _any_nan(xp: Any, arrays: Iterable[Any]) -> bool:
    """Whether an array holds a NaN: its sum of squares then is one, and is the cheapest to find."""
    return any(a.dtype.kind == "f" and bool(xp.isnan(xp.vdot(a, a))) for a in arrays)


def _check_names(variables: Iterable[Node]) -> None:
    owners: dict[str, Node] = {}
    for node in variables:
        if owners.setdefault(node.name, node) is not node:
            raise GraphError(
                f"two variables are called {node.name!r}: {owners[node.name]!r} and {node!r}",
                fix="give one another name, or build each model in its own ht.scope(...)",
                site=node.site,
            )


def _match(sub: SubGraph, feed: Feed) -> dict[str, np.ndarray]:
    """Fed arrays by placeholder name, in the sub-graph's order; FeedError for missing, extra or unfitting ones."""
    given = _by_name(feed)
    for name in given:
        if name not in sub.placeholders and name not in sub.known:
            known = ", ".join(map(repr, sub.placeholders)) or "no feeds"
            fix = f"did you mean {n!r}?" if (n := _near(name, sub.placeholders)) else f"it takes {known}"
            raise FeedError(f"sub-graph {sub.name!r} has no placeholder {name!r}", fix=fix)
    missing = [node for name, node in sub.placeholders.items() if name not in given]
    if missing:
        shown = ", ".join(f"{n.name!r} {n.type}" for n in missing)
        raise FeedError(f"sub-graph {sub.name!r} was not fed {shown}", fix="add it to the feed of run(...)")
    return {name: _fitting(node, given[name]) for name, node in sub.placeholders.items()}


def _by_name(feed: Feed) -> dict[Any, Any]:
    if not isinstance(feed, Mapping):
        raise FeedError(f"the feed is a {type(feed).__name__}", fix="pass a mapping: {placeholder: array}")
    given: dict[Any, Any] = {}
    for key, value in feed.items():
        if isinstance(key, Node) and key.op.name != "placeholder":
            raise FeedError(
                f"{key!r} was fed, only placeholders are", fix="set a variable with executor.state[name] = value"
            )
        name = key.name if isinstance(key, Node) else key
        if name in given:
            raise FeedError(f"placeholder {name!r} was fed twice, by node and by name", fix="keep one of the two")
        given[name] = value
    return given


def _near(name: object, known: Iterable[str]) -> str | None:
    text = did_you_mean(name, known)
    return text.split("'")[1] if text.startswith("did you mean") else None


def _fitting(node: Node, value: Any) -> np.ndarray:
    if isinstance(value, Node):
        raise FeedError(f"placeholder {node.name!r} was fed the node {value!r}", fix="feed an array of numbers")
    try:
        array = np.asarray(value)
    except ValueError:
        raise FeedError(
            f"placeholder {node.name!r} was fed rows of different lengths", fix="pad or cut them to one length"
        ) from None
    wanted = node.tensor
    if array.dtype.kind not in "biuf":
        raise FeedError(
            f"placeholder {node.name!r} wants {wanted.dtype.name}, was fed {value!r:.60}",
            fix="feed an array of numbers",
            site=node.site,
        )
    if array.dtype != wanted.dtype and not np.can_cast(array.dtype, wanted.dtype, "same_kind"):
        raise FeedError(
            f"placeholder {node.name!r} wants {wanted.dtype.name}, was fed {array.dtype.name}",
            fix=f'convert it: array.astype("{wanted.dtype.name}")',
            site=node.site,
        )
    fits = array.ndim == wanted.ndim and all(isinstance(w, Dim) or w == s for w, s in zip(wanted.shape, array.shape))
    if not fits:
        raise FeedError(
            f"placeholder {node.name!r} is {wanted}, was fed shape {show_shape(array.shape)}",
            fix="reshape the array, or declare the size as None" if array.ndim == wanted.ndim else "check the axes",
            site=node.site,
        )
    return array


@public
def evaluate(node: Any, feed: Feed | None = None) -> np.ndarray:
    """The value of one node, for notebooks: no program, no training; variables have their initial values.

    >>> import hetu as ht
    >>> float(evaluate(ht.sum(ht.constant([1.0, 2.0]))))
    3.0
    """
    node = as_node(node)
    sub = SubGraph("evaluate", [node])
    values = _match(sub, feed or {})
    sizes = {(name, axis): size for name, v in values.items() for axis, size in enumerate(v.shape)}
    outputs = specialise(sub.fetches, sizes)
    graph, state = Graph(outputs), State(dict.fromkeys(sub.variables))
    known: dict[Node, Any] = {n: state.arrays[n.name] for n in graph.leaves("variable")}
    known |= {n: values[n.name].astype(n.dtype) for n in graph.leaves("placeholder")}
    with np.errstate(all="ignore"):
        return np.array(interpret(outputs, known)[0])

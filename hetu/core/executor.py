"""Run named sub-graphs: passes, one program per set of fed shapes, feeds in, values out, updates committed.

`ht.Executor` is for training, `ht.evaluate` for a look at one node. The loop is in `training.py`, ranks are elsewhere.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from .backend import Device, Seed
from .errors import ArgumentError, GraphError, UnknownNameError, did_you_mean, of_steps, public
from .graph import Graph, Node
from .kernels import kernels_of
from .leaf import random_state
from .op import as_node
from .passes import chosen_passes, specialize
from .placement import attach, chosen
from .program import Arena, Program
from .simplify import interpret
from .state import State
from .subgraph import Feed, Fetch, SubGraph

KEPT_PROGRAMS = 64  # sets of shapes a sub-graph keeps compiled; beyond, the first goes
DOUBTS: list[Callable[[SubGraph, State, Any], None]] = []  # look at what is first run; `hetu.look` enters it
MADE: list[Callable[[Executor], None]] = []  # look at each executor that is made; `hetu.dist.elastic` enters it
Ahead = Feed | Iterable[Feed] | None
Stepper = Callable[["Executor", SubGraph, "Feed | None", Program], list[np.ndarray]]
_stepper: Stepper | None = None  # runs a step in place of the program itself


@contextlib.contextmanager
def stepping(stepper: Stepper | None = None) -> Iterator[None]:
    """Inside, `stepper` runs the steps of all executors; `debug_nans` is one that looks closer."""
    global _stepper
    before, _stepper = _stepper, stepper
    try:
        yield
    finally:
        _stepper = before


class Executor:
    """Compiles and runs sub-graphs that share variables.

    `subgraphs` maps names to lists of nodes and updates (`minimize(...)`); one list alone is called "default". A
    sub-graph trains, so that dropout drops and statistics move, if and only if it commits updates.
    `strategy` spreads the work over the ranks of the job (see `hetu.dist`); every rank is fed the whole batch. "auto"
    lets the planner choose (`hetu.plan.auto`), and `$HETU_STRATEGY` is taken where none is given.
    Without one `comm` is what collectives written by hand go over (`ht.dist.all_reduce`), each rank fed its own batch.
    All ranks of `comm` make the executor.
    `state` shares the variables of another executor. `donate=False` keeps every step atomic at the price of copies.
    `precision` is what products (matrices, convolutions, attention) compute in: "float16", with the loss scaled so that
    gradients do not vanish, or "bfloat16". Variables stay float32; see `hetu.passes.mixed_precision`.
    `explain` prints what each pass changed, and where, and what compiling C took, whenever a program is made.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (None,))
    >>> ex = ht.Executor([x * 2])
    >>> ex.run({x: [1.0, 2.0]})[0].tolist()
    [2.0, 4.0]
    """

    predict, value, switch = cast(Any, None), cast(Any, None), cast(Any, None)  # of `hetu.inference` and `switching`

    @public
    def __init__(
        self,
        subgraphs: Mapping[str, Sequence[Fetch]] | Sequence[Fetch],
        *,
        seed: Seed = 0,
        device: str = "cpu",
        state: State | None = None,
        passes: Iterable[str] | None = None,
        donate: bool = True,
        reuse: bool = True,
        strategy: Any = None,
        comm: Any = None,
        explain: bool = False,
        precision: str = "float32",
    ) -> None:
        entries = subgraphs if isinstance(subgraphs, Mapping) else {"default": subgraphs}
        if any(isinstance(name, Node) for name in entries):
            raise ArgumentError("updates were passed alone", fix="list them: Executor([loss, updates])")
        self.donate, self.reuse, self.explain = donate, reuse, explain
        self.subgraphs = {name: SubGraph(name, listed, precision) for name, listed in entries.items()}
        self.device = Device.parse(device) if state is None else state.device
        self.variables = list(dict.fromkeys(v for s in self.subgraphs.values() for v in s.variables))
        Graph(tuple(self.variables)).verify()
        self.state = State(seed=seed, device=self.device) if state is None else state
        self.strategy = chosen(strategy, {name: sub.entries for name, sub in self.subgraphs.items()}, comm, precision)
        self.placement = attach(self.strategy, [n for s in self.subgraphs.values() for n in s.written.outputs], comm)
        for node in map(self.placement.variable, self.variables):
            if node is not None and node.name not in self.state.variables:
                self.state.add(node)
                if node is random_state:
                    self.state[node] = np.array([(seed ^ seed >> 64) % 2**64, 0], np.uint64)
        self.asked: dict[str, Any] = {"seed": self.state.seed, "precision": precision, "passes": passes and [*passes]}
        self.asked["updated"] = {name: [v.name for v in sub.updates] for name, sub in self.subgraphs.items()}
        self.placement.start(self.state, self.asked | {"entries": [*entries], "shared state": state is not None})
        self.passes = chosen_passes(self.asked["passes"], self.device.kind)  # ranks agree on whether they compile
        self.state.executors.add(self)
        self.arena, self.busy, self.settings = Arena(self.device), threading.Lock(), list[Any]()
        self.quiet = contextvars.copy_context()  # steps run in it: np.errstate would cost each of them 1 us
        self.quiet.run(np.seterr, all="ignore")
        self.quiet.run(np.setbufsize, 2048)  # rows of half as many numbers, or more, are not copied through a buffer
        for look in MADE:
            look(self)

    @of_steps
    def run(self, name: str | Feed | None = None, feed: Feed | None = None, *, ahead: Ahead = None) -> list[Any]:
        """One step of a sub-graph, of the only one if none is named: its values as they were listed, None for updates.

        `feed` maps placeholders, or their names, to arrays of any library, which stay as they are until it is done.
        `ahead` is what the next step will be fed, or a list of what the next ones will be, where that is known, so that
        a strategy can fetch early what they need, and keep what they share. No result depends on it but by staleness.
        """
        sub, feed = self._asked(name, feed)
        if self.state.dirty:
            said = "an earlier step failed after it had changed some variables, so they no longer belong together"
            raise GraphError(said, fix="load a checkpoint, or make the executor with donate=False")
        if not self.busy.acquire(False):
            said = "this executor is in the middle of another step, whose buffers a second one would overwrite"
            raise GraphError(said, fix="let each thread have an executor of its own")
        try:
            lend = (stepper := _stepper) is None
            program = (sub.refilled(feed) if lend else None) or self._filled(sub, feed, ahead, lend)
            with self.state.stream:
                results = self.quiet.run(program.run) if stepper is None else stepper(self, sub, feed, program)
                if sub.random:
                    self.state.arrays[random_state.name][1] += np.uint64(1)
        finally:
            self.busy.release()
        return sub.values(results)

    @public
    def program(self, name: str | Feed | None = None, feed: Feed | None = None) -> Program:
        """The program that `run` would use for these feeds, to print or profile."""
        sub, feed = self._asked(name, feed)
        return self.compiled(sub, sub.match(feed or {}), self.donate)

    def _asked(self, name: str | Feed | None, feed: Feed | None) -> tuple[SubGraph, Feed | None]:
        """The sub-graph of that name, or the only one, and what it is fed."""
        if not isinstance(name, str):
            if len(self.subgraphs) != 1:
                names = ", ".join(map(repr, self.subgraphs))
                raise ArgumentError(f"the executor has sub-graphs {names}", fix="say which: run(name, feed)")
            feed, name = name if feed is None else feed, next(iter(self.subgraphs))
        if name not in self.subgraphs:
            raise UnknownNameError(f"there is no sub-graph {name!r}", fix=did_you_mean(name, self.subgraphs))
        return self.subgraphs[name], feed

    def _filled(self, sub: SubGraph, feed: Feed | None, ahead: Ahead = None, lend: bool = False) -> Program:
        """The program for this feed, which lies in its buffers, or may be read elsewhere where they `lend`."""
        values = sub.match(feed or {})
        program = self.compiled(sub, values, self.donate)
        self.placement.compare(self.state, sub.name, values)
        if self.placement.ahead and ahead is not None:
            coming = map(sub.match, [ahead] if isinstance(ahead, Mapping) else ahead)
            self.placement.expect((self.compiled(sub, fed, self.donate), fed) for fed in coming)
        alone = self.placement.world_size == 1  # others are told what this one is fed
        if program.fills and alone and not (program.parts or self.placement.ahead) and self.device.kind == "cpu":
            sub.remember(feed, program, values)
        if not (lend and sub.refilled({k: values.get(getattr(k, "name", str(k))) for k in feed or ()})):
            with self.state.stream:
                self.quiet.run(self.fill, program, values)
        return program

    def fill(self, program: Program, values: Mapping[str, np.ndarray]) -> None:
        """Copy what was fed into the program's buffers."""
        for key, fill in program.fills.items():  # without the placeholders that passes found unused
            name, part = program.parts.get(key, (key, ...))
            fill(values[name][part])

    def compiled(self, sub: SubGraph, values: Mapping[str, np.ndarray], donate: bool) -> Program:
        """The program for fed arrays of these shapes."""
        key = (donate, *(v.shape for v in values.values()))
        found = sub.programs.pop if self.placement.world_size == 1 else sub.programs.get  # one rank may look alone
        program = found(key, None) or self._compile(sub, values, donate)
        sub.programs[key] = program  # the last used stands last; on ranks, which must keep the same, the last made
        if len(sub.programs) > KEPT_PROGRAMS:
            del sub.programs[next(iter(sub.programs))]
        return program

    def _compile(self, sub: SubGraph, values: Mapping[str, np.ndarray], donate: bool) -> Program:
        for doubt in DOUBTS if self.placement.world_size == 1 else ():
            doubt(sub, self.state, values)
        shapes = {name: value.shape for name, value in values.items()}
        room, comm, looked = kernels_of(self.device.xp), self.placement.comm, gc.isenabled()
        gc.disable()  # to look for garbage takes a quarter of the time, and of the many objects of a graph none is
        try:
            fetches, updates, parts = sub.lower(shapes, self.passes, self.placement, self.explain, values)
            with room.along(self, sub, shapes):
                program = Program(fetches, updates, self.state, self.arena, donate=donate, reuse=self.reuse, comm=comm)
        finally:
            if looked:
                gc.enable()
        if self.explain and program.captured is not None:
            print(f"capture: {program.captured}")
        program.parts = {k: (name, tuple(slice(*ends) for ends in box)) for k, (name, box) in parts.items()}
        return program

    def trial(self, sub: SubGraph, shapes: Mapping[str, Sequence[int]]) -> None:
        """Bind a program to no other use than to see what it takes; nothing is kept."""
        Program(*sub.lower(shapes, self.passes)[:2], self.state, Arena(self.device), donate=self.donate)

    @public
    def export_c(self, name: str, folder: str | os.PathLike[str], feed: Feed | None = None) -> Any:
        """A sub-graph, at the sizes of `feed`, as one C file with a `main`; ArgumentError without C for all of it."""
        sub, feed = self._asked(name, feed)
        return kernels_of(self.device.xp).export(self._filled(sub, feed), folder, name, sub.random)

    @public
    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """All variables, random state too, atomically, in a file, or a folder of parts; see also `ht.Checkpoints`."""
        self.placement.save(self.state, self.variables, path, extra).finish()

    @public
    def load(self, path: str | os.PathLike[str], *, only: Any = None, strict: bool = True) -> dict[str, Any]:
        """Continue from what `save` wrote, under this or another strategy; returns its `extra`. See `State.load`."""
        return self.placement.load(self.state, self.variables, path, only=only, strict=strict)

    def __repr__(self) -> str:
        return f"<Executor of {', '.join(self.subgraphs)} on {self.device}, {self.state!r}>"


@public
def evaluate(node: Any, feed: Feed | None = None) -> np.ndarray:
    """The value of one node, for notebooks: no program, no training; variables have their initial values.

    >>> import hetu as ht
    >>> float(evaluate(ht.sum(ht.constant([1.0, 2.0]))))
    3.0
    """
    sub = SubGraph("evaluate", [as_node(node)])
    values = sub.match(feed or {})
    sizes = {(name, axis): size for name, v in values.items() for axis, size in enumerate(v.shape)}
    outputs = specialize(sub.fetches, sizes)
    graph, state = Graph(outputs), State(dict.fromkeys(sub.variables))
    for doubt in DOUBTS:
        doubt(sub, state, values)
    known: dict[Node, Any] = {n: state.arrays[n.name] for n in graph.leaves("variable")}
    known |= {n: values[n.name].astype(n.dtype) for n in graph.leaves("placeholder")}
    with np.errstate(all="ignore"):
        return np.array(interpret(outputs, known)[0])

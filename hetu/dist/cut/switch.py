"""An executor goes over to another strategy between two steps: its variables move in one exchange (`layout/fused.py`).

Values have arrays of their own under each strategy, but for those of which a rank keeps the same part. So nothing is
lost if anything fails on the way: only when all ranks have everything does the executor take the new arrays, programs
and placement. What servers keep stays there. Left out: moving it, and models that ranks only average.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from ...core.backend import aligned_empty
from ...core.errors import ArgumentError, GraphError, user_site
from ...core.executor import Executor
from ...core.graph import Node
from ...core.placement import Alone, Placement, attach, chosen
from ...core.program import Program
from ...core.state import State
from ...core.types import Box
from ..comm.comm import Comm, SerialComm
from ..layout.fused import Fused, Move, fused
from ..layout.layout import DUP, Layout, Shard
from .agreement import compare_given, together, unlike
from .on_ranks import OnRanks, spread
from .strategy import Strategy

T = TypeVar("T")
SAME = "all ranks switch together, to one strategy"
BY_FILE = "save, and load into an executor that is made with the other strategy"


@dataclass(eq=False)
class Setting:
    """What an executor has under one strategy: the placement, this rank's arrays by box, and its programs."""

    strategy: Any
    placement: Placement
    arrays: Mapping[tuple[str, Box], Any] = field(default_factory=dict)
    programs: Mapping[str, dict[Any, Program]] = field(default_factory=dict)
    ways: WeakKeyDictionary[Setting, Fused] = field(default_factory=WeakKeyDictionary)  # hither, from others
    started: bool = False


def switched(executor: Executor, strategy: Any, keep: bool) -> Fused:
    """What `Executor.switch` does."""
    free = executor.busy.acquire(False)
    try:
        comm = executor.placement.comm
        _together(comm, partial(_check, executor, free))
        if comm is not None:
            said = strategy if isinstance(strategy, str) else type(strategy).__name__
            compare_given(partial(unlike, comm), {"strategy to switch to": said, "keep": keep}, SAME)
        entries = {name: sub.entries for name, sub in executor.subgraphs.items()}
        wanted = chosen(strategy, entries, comm, executor.asked["precision"])
        settings = executor.settings or [_now(executor)]  # the first is that which it has
        number = next((n for n, had in enumerate(settings) if had.strategy == wanted), len(settings))
        if number == len(settings):
            settings = [*settings, Setting(wanted, _together(comm, partial(_attached, executor, wanted, comm)))]
        comm = settings[number].placement.comm or comm or SerialComm()
        compare_given(partial(unlike, comm), {"number among the strategies so far": number}, SAME)
        return _moved(executor, settings, number, keep, comm) if number else fused({})
    finally:
        if free:
            executor.busy.release()


def _together(comm: Comm | None, act: Callable[[], T]) -> T:
    return together(comm or SerialComm(), act, GraphError, "no rank has switched; see there")


def _check(executor: Executor, free: bool) -> None:
    """GraphError or ArgumentError for an executor whose variables cannot move now."""
    state = executor.state
    if not free:
        raise GraphError("this executor is in the middle of a step", fix="switch between two steps")
    if state.dirty:
        said = "a step failed after it had changed some variables, so there is no state to switch with"
        raise GraphError(said, fix="load a checkpoint first")
    if len(state.executors) > 1:
        gc.collect()  # of those that are gone some may lie in circles
    if len(state.executors) > 1:
        said = f"{len(state.executors)} executors share these variables, and only one would switch"
        raise ArgumentError(said, fix="make one executor with the sub-graphs of all, or delete the others first")


def movable(placement: Placement, executor: Executor, other: Strategy | None = None) -> Placement:
    """The placement; ArgumentError if ranks keep values of their own, or servers what they do not keep alike under the
    `other` strategy, if there is one."""
    if isinstance(placement, Alone):
        return placement
    strategy = spread(placement).strategy
    if strategy.alone:
        said = f"under {strategy.kind!r} ranks keep values, or a connection, of their own"
        raise ArgumentError(f"{said}, and a switch moves what they keep together", fix=BY_FILE)
    for v in (v for v in executor.variables if strategy.is_served(v)):
        if other is None or other.kept(v) != strategy.kept(v):
            how = "and a switch moves what ranks keep" if other is None else f"under the other strategy {other.kept(v)}"
            raise ArgumentError(f"{v.name!r} is {strategy.kept(v)}, {how}", fix=BY_FILE)
    return placement


def _attached(executor: Executor, strategy: Any, comm: Comm | None) -> Placement:
    outputs = [n for s in executor.subgraphs.values() for n in s.written.outputs]
    placement = attach(strategy, outputs, comm)
    before, after = (_on_ranks(of, SerialComm()).strategy for of in (executor.placement, placement))
    movable(executor.placement, executor, after)
    return movable(placement, executor, before)


def _now(executor: Executor) -> Setting:
    """The setting of an executor as it is."""
    placement, held = executor.placement, executor.state.arrays
    boxes = {v.name: _on_ranks(placement, SerialComm()).box(v) for v in executor.variables}
    arrays = {(name, box): held[name] for name, box in boxes.items() if box is not None}
    programs = {name: sub.programs for name, sub in executor.subgraphs.items()}
    return Setting(executor.strategy, placement, arrays, programs, started=True)


def _on_ranks(placement: Placement, comm: Comm) -> OnRanks:
    """The placement; where there is no strategy, one by which each rank has everything."""
    if not isinstance(placement, Alone):
        return spread(placement)
    everywhere = Shard(tuple(range(comm.world_size)), ((DUP, comm.world_size),))
    return OnRanks(Strategy(Layout((everywhere,))), comm)


def _moved(executor: Executor, settings: Sequence[Setting], number: int, keep: bool, comm: Comm) -> Fused:
    """Go over from the first of the settings to that of this number; what was moved."""
    old, new, state = settings[0], settings[number], executor.state
    before, after = _on_ranks(old.placement, comm), _on_ranks(new.placement, comm)
    if isinstance(old.placement, Alone) and comm.world_size > 1:  # which has compared nothing with others
        state.unseen = state.unseen | dict.fromkeys(state.arrays, user_site())
        before.outputs = tuple(executor.variables)
    before.compared = {}
    before.compare(state, "", {})
    if (way := new.ways.get(old)) is None:
        way = new.ways[old] = moves(executor.variables, before.strategy, after.strategy)

    def move(fresh: State) -> None:
        given, made = ({name: [of[name]] for name in way.moves if name in of} for of in (state.arrays, fresh.arrays))
        with state.stream:
            way.run(comm, given, made)
            for name in [*fresh.arrays][:1]:
                fresh.contiguous(name)  # a GPU has done by then all that was asked of it
        comm.progress()
        comm.barrier()

    fresh = _together(comm, partial(room, executor, after, settings))
    go_over(executor, [new, *(one for one in settings if one is not new)], fresh, move)
    if not keep:
        executor.settings.remove(old)
    return way


def go_over(executor: Executor, settings: Sequence[Setting], fresh: State, fill: Callable[[State], T]) -> T:
    """Work under the first of these settings, with `fresh` values, which `fill` fills; what it returns."""
    new, state = settings[0], executor.state
    if not new.started:
        asked = {"entries": [*executor.subgraphs], "shared state": False}
        new.placement.start(fresh, executor.asked | asked)
    found = fill(fresh)
    after = _on_ranks(new.placement, executor.placement.comm or SerialComm())
    new.arrays = {(v.name, box): fresh.arrays[v.name] for v in executor.variables if (box := after.box(v)) is not None}
    new.programs = {name: new.programs.get(name, {}) for name in executor.subgraphs}
    new.started = True
    others = state.arrays.keys() - {v.name for v in executor.variables}  # of executors that are gone
    state.variables = fresh.variables | {name: state.variables[name] for name in others}
    state.boxes |= {v.name: after.boxes(v) for v in executor.variables}
    state.arrays = fresh.arrays | {name: state.arrays[name] for name in others}
    state.unseen = {name: site for name, site in state.unseen.items() if name in state.arrays}
    for name, sub in executor.subgraphs.items():
        sub.programs, sub.last = new.programs[name], None
    executor.strategy, executor.placement, executor.settings = new.strategy, new.placement, [*settings]
    return found


def moves(variables: Iterable[Node], before: Strategy, after: Strategy) -> Fused:
    """What ranks send where variables go from one strategy over to another."""
    layouts = {v: (before.store(v), after.store(v)) for v in variables if not before.is_served(v)}
    found = {v.name: Move.between(*of, v.shape, v.dtype) for v, of in layouts.items()}
    return fused(found, after.hosts or before.hosts)


def room(executor: Executor, after: OnRanks, settings: Sequence[Setting] = ()) -> State:
    """Arrays for what this rank will have: those that it has had for the same parts, or new ones."""
    known = {key: array for had in settings for key, array in had.arrays.items()}
    fresh = State(seed=executor.state.seed, device=executor.device)
    fresh.copies = dict(executor.state.copies)
    for node in executor.variables:
        box, local = after.box(node), after.variable(node)
        if box is not None and local is not None:
            if (array := known.get((node.name, box))) is None:
                empty = aligned_empty(executor.device.xp, int(local.tensor.nbytes))
                array = empty.view(local.dtype).reshape(local.shape)
            fresh.variables[node.name], fresh.arrays[node.name] = local, array
    return fresh

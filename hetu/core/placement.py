"""Where an executor's work is done: what it asks of a placement, the placement of one process, and how to get one.

A strategy says how a model is spread; `attach` makes of it the placement on this process, which holds what lives, such
as connections. Whoever writes a new kind of strategy registers it there. This file knows neither ranks nor servers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any, Protocol

import numpy as np

from .errors import ArgumentError, UnknownNameError, did_you_mean
from .graph import Node
from .passes import Pass
from .program import Program
from .state import FILES, FilePath, State
from .types import Atom, Box

Last = tuple[tuple[Node, ...], Mapping[Node, Node]]


@dataclass(frozen=True)
class Local:
    """One process's part of a graph: its fetches (whole values), tokens of what only acts, new values, and feeds.

    `feeds` are the feed, and the box of it, that a local placeholder takes; one that is not named takes its own whole.
    """

    fetches: tuple[Node, ...]
    tokens: tuple[Node, ...]
    updates: dict[Node, Node]
    feeds: dict[str, tuple[str, Box]] = field(default_factory=dict)


class Placement(Protocol):
    """What an executor asks of where its work is done. All processes of a job ask alike, in the same order."""

    comm: Any  # the communicator that operators are bound to, if there is one
    ahead: int  # of how many steps to come it has use for the feeds
    in_parts: bool  # whether what it saves is a folder
    late: int  # steps that others have gone ahead, which this process may leave out; whoever does counts them down
    passes: Sequence[Pass]  # those applied to the whole graph before `cut`, and not again

    @property
    def rank(self) -> int:
        """The number of this process, from 0, among those that train together."""

    @property
    def world_size(self) -> int:
        """The number of processes that train together."""

    def variable(self, node: Node) -> Node | None:
        """The variable that holds this process's part of `node`; None if it has no part."""

    def start(self, state: State, asked: Mapping[str, Any]) -> None:
        """The variables have been made; `asked` is what the executor was asked for, by name."""

    def compare(self, state: State, name: str, fed: Mapping[str, np.ndarray]) -> None:
        """A step of this sub-graph begins with these feeds, before which a user may have given variables values."""

    def sizes(self, sizes: Mapping[Atom, int], name: str, training: bool, fed: Mapping[str, Any]) -> Mapping[Atom, int]:
        """The sizes that the sub-graph `name` is specialized for, given those of what is `fed`."""

    def cut(self, fetches: Sequence[Node], updates: Mapping[Node, Node]) -> Local:
        """This process's part of a graph whose sizes are known."""

    def last(self, fetches: Sequence[Node], updates: Mapping[Node, Node], then: Sequence[Pass]) -> Last:
        """This process's part, tokens among the fetches, once all passes but `then`, the last, have been applied."""

    def expect(self, coming: Iterable[tuple[Program, Mapping[str, np.ndarray]]]) -> None:
        """The next steps will run these programs on these feeds; those that are not asked for are not compiled."""

    def agree(self, values: Mapping[str, float]) -> Mapping[str, float]:
        """The numbers that all processes go by, given those of each."""

    def save(self, state: State, variables: Iterable[Node], path: FilePath, extra: Mapping[str, Any] | None) -> Any:
        """Begin to write them, as they are on all processes together; `finish()` of what it returns ends it."""

    def load(self, state: State, variables: Iterable[Node], path: FilePath, **of: Any) -> dict[str, Any]:
        """Continue from what any placement saved, all of it or what `of` chooses; returns its `extra`."""


class Alone:
    """One process does everything. What a user's own collectives go over, `comm`, is passed on to them.

    >>> alone = Alone()
    >>> alone.rank, alone.world_size, alone.agree({"loss": 0.5})
    (0, 1, {'loss': 0.5})
    """

    rank, world_size, ahead, late, in_parts = 0, 1, 0, 0, False
    passes: Sequence[Pass] = ()

    def __init__(self, comm: Any = None) -> None:
        self.comm = comm

    def variable(self, node: Node) -> Node:
        return node

    def start(self, state: State, asked: Mapping[str, Any]) -> None:
        if self.comm is not None:
            self.comm.compile_alike()
        if kept := state.copies.keys() & {name for names in asked["updated"].values() for name in names}:
            fix = "give this executor the strategy of the one that has made its state"
            raise ArgumentError(f"this executor would train {', '.join(sorted(kept))}, kept elsewhere", fix=fix)

    def compare(self, state: State, name: str, fed: Mapping[str, np.ndarray]) -> None:
        pass

    def sizes(self, sizes: Mapping[Atom, int], name: str, training: bool, fed: Mapping[str, Any]) -> Mapping[Atom, int]:
        return sizes

    def cut(self, fetches: Sequence[Node], updates: Mapping[Node, Node]) -> Local:
        return Local(tuple(fetches), (), dict(updates))

    def last(self, fetches: Sequence[Node], updates: Mapping[Node, Node], then: Sequence[Pass]) -> Last:
        return tuple(fetches), updates

    def expect(self, coming: Iterable[tuple[Program, Mapping[str, np.ndarray]]]) -> None:
        pass

    def agree(self, values: Mapping[str, float]) -> Mapping[str, float]:
        return values

    def save(self, state: State, variables: Iterable[Node], path: FilePath, extra: Mapping[str, Any] | None) -> Any:
        return FILES["begin"](state, path, extra)

    def load(self, state: State, variables: Iterable[Node], path: FilePath, **of: Any) -> dict[str, Any]:
        return state.load(path, **of)

    def __repr__(self) -> str:
        return "Alone()"


STRATEGY = "HETU_STRATEGY"  # the environment variable that names the strategy where an executor is given none
STRATEGIES: dict[str, Callable[[], Any]] = {}  # by name; the top of the package enters them

choice = singledispatch(lambda strategy, subgraphs, comm, precision: strategy)
chooses = choice.register


def chosen(strategy: Any, subgraphs: Mapping[str, Sequence[Any]], comm: Any, precision: str = "float32") -> Any:
    """The strategy to attach: that of a name, or of `$HETU_STRATEGY` where none is given, and what it then chooses.

    A kind that decides by the entries of the sub-graphs is `@chooses(Kind)` before a function of these arguments.
    """
    name = strategy or os.environ.get(STRATEGY) if strategy is None or isinstance(strategy, str) else None
    if name and name not in STRATEGIES:
        raise UnknownNameError(f"there is no strategy {name!r:.80}", fix=did_you_mean(name, STRATEGIES))
    strategy = STRATEGIES[name]() if name else strategy
    return choice.dispatch(type(strategy))(strategy, subgraphs, comm, precision)


def attach(strategy: Any, outputs: Sequence[Node], comm: Any = None) -> Placement:
    """The placement by which `strategy` spreads the graph of `outputs` over `comm`, by default all of the job.

    Each kind of strategy has its own way: `@attaches(Kind)` before a function of these arguments.

    >>> attach(None, [])
    Alone()
    """
    return way.dispatch(type(strategy))(strategy, outputs, comm)


@singledispatch
def way(strategy: Any, outputs: Sequence[Node], comm: Any) -> Placement:
    raise ArgumentError(f"{strategy!r:.80} is no strategy", fix="pass one of hetu.dist, say DataParallel(), or a name")


attaches = way.register


@attaches(type(None))
def _alone(strategy: None, outputs: Sequence[Node], comm: Any) -> Placement:
    return Alone(comm)

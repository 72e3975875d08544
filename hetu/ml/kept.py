"""Graphs that outlive a fit: of one that takes milliseconds, most would go into building and compiling its graph.

What is kept follows from plain values alone: functions that always make the same graph, sizes, dtypes. The numbers of a
fit are fed, or set as variables. Left out: functions of a user, which may make another graph tomorrow.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from ..core.executor import Executor
from ..core.program import Program

KEPT = 16  # executors, those that were used last
ROOM = 1 << 23  # bytes of the programs of each: large fits take long enough to compile again


class Executing(Protocol):
    """What computes by an executor of its own."""

    executor: Executor


Owned = TypeVar("Owned", bound=Executing)
_free = dict[Hashable, Any]()  # what nobody uses at the moment, the last used last


@contextmanager
def kept(make: Callable[..., Owned], *asked: Hashable) -> Iterator[Owned]:
    """What `make(*asked)` makes, which an earlier `with` may have left. Inside, nobody else has it; one that fails is
    not left to others."""
    made = _free.pop((make, *asked), None) or make(*asked)
    yield made
    for sub in made.executor.subgraphs.values():
        sub.last = None  # which holds what was fed
        while sum(map(_nbytes, sub.programs.values())) > ROOM:
            del sub.programs[next(iter(sub.programs))]
    _free[make, *asked] = made
    for old in [*_free][:-KEPT]:
        _free.pop(old, None)


def _nbytes(program: Program) -> int:
    fed: int = sum(buffer.nbytes for buffer in program.feeds.values())
    return program.plan.arena_bytes + fed

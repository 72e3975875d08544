"""What a program of open sizes will lack at other sizes is compiled with what it lacks at these.

A text serves all sizes of its kind: sizes are arguments. But along a size of 1 nothing tells an axis from one that
arrays lack, groups are other ones where two sizes are equal by chance, and short rows and small constants have a limit.
So where the folder of libraries lacks something for a program, it is also lowered and bound at one size of each kind,
to no other use than to know what it would lack there; so are the other sub-graphs of its executor, such as the one that
evaluates. The last batch of an epoch, a single sample and sequences of any
length then compile nothing; a program that is all there costs nothing.

Deliberately ignored: the programs of several ranks, which would have to agree on each; graphs of thousands of nodes,
for the time it takes; and all pairs of limits, such as rows that are short beside a constant that is large.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import numpy as np

from ..core.types import Dim
from .compiled import CSource, spent

FEW, MANY = (7, 9, 11, 13, 17), (131, 137, 139, 149, 151)  # of two axes together few, too; seldom sizes of others
MOST_NODES = 8_000  # of graphs that are bound to know what they lack, which takes 0.2 ms a node

_bound: ContextVar[Any] = ContextVar("bound", default=None)  # the executor, sub-graph and shapes of a program
_noted: ContextVar[list[CSource] | None] = ContextVar("noted", default=None)


@contextmanager
def along(executor: Any, sub: Any, shapes: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """Inside, the program of a sub-graph of the executor is bound at these shapes; `explain` says what C took."""
    before = spent()
    token = _bound.set((executor, sub, shapes))
    try:
        yield
    finally:
        _bound.reset(token)
    if executor.explain and spent() > before:
        print(f"C was compiled in {spent() - before:.1f} s, and is kept")


@contextmanager
def noting() -> Iterator[list[CSource]]:
    """Inside, programs are bound to no other use than to know what they want, which is noted in the list."""
    noted: list[CSource] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def is_noted(wanted: Iterable[CSource] = ()) -> bool:
    """Whether this is such a program; what it wants is noted."""
    noted = _noted.get()
    if noted is not None:
        noted.extend(wanted)
    return noted is not None


def with_others(wanted: Sequence[CSource]) -> list[CSource]:
    """What is wanted now, and what other sizes will want, if anything of this is not there yet."""
    if _bound.get() is None or all([source.loaded() for source in wanted]):
        return [*wanted]
    executor, sub, shapes = _bound.get()
    if executor.placement.world_size > 1:
        return [*wanted]
    with noting() as noted, np.errstate(all="ignore"):  # of this thread alone, as filters of warnings are not
        for each, other in _trials(executor, sub, shapes):
            with suppress(Exception):  # what is wrong there is said where it is really fed
                executor.trial(each, other)
    return [*wanted, *noted]


def alike(lacking: Sequence[CSource]) -> bool:
    """Whether the other ranks of the program that is being bound lack the same; else none compiles from now on."""
    placement = None if _bound.get() is None else _bound.get()[0].placement
    if placement is None or placement.world_size == 1:
        return True
    texts = "\0".join(source.text for source in lacking).encode()
    return placement.comm.compile_alike(hashlib.sha256(texts).digest()[:8] if lacking else b"")


def _trials(executor: Any, sub: Any, shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[Any, Any]]:
    """Other sizes of a sub-graph; and these and others of those of the executor that are fed no more than it."""
    yield from ((sub, other) for other in others(sub, shapes))
    for each in executor.subgraphs.values():
        if each is not sub and each.placeholders.keys() <= shapes.keys():
            own = {name: shapes[name] for name in each.placeholders}
            yield from ((each, other) for other in (own, *others(each, own)))


def others(sub: Any, shapes: Mapping[str, Sequence[int]]) -> list[dict[str, tuple[int, ...]]]:
    """These shapes with other open sizes, each or all but each of them 1, many or few. Equal ones stay equal.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (None, 3, None))
    >>> sub = ht.Executor([x * 2]).subgraphs["default"]
    >>> [shapes["x"] for shapes in others(sub, {"x": (8, 3, 12)})]
    [(1, 3, 12), (8, 3, 1), (1, 3, 1), (131, 3, 137), (1, 3, 137), (131, 3, 1), (7, 3, 9), (1, 3, 9), (7, 3, 1)]
    """
    places = {name: [isinstance(n, Dim) for n in sub.placeholders[name].shape] for name in shapes}
    known = dict.fromkeys(n for name, shape in shapes.items() for n, is_open in zip(shape, places[name]) if is_open)
    few, many = (dict(zip(known, sizes)) for sizes in (FEW, MANY))
    ones = dict.fromkeys(known, 1)
    wanted = [{n: 1} for n in known] + [ones, many] + [many | {n: 1} for n in known]
    wanted += [few] + [few | {n: 1} for n in known] + [ones | {n: n} for n in known]
    made = [
        {
            name: tuple(sizes.get(n, n) if is_open else n for n, is_open in zip(shape, places[name]))
            for name, shape in shapes.items()
        }
        for sizes in wanted[: MOST_NODES // len(sub.written.nodes) if known else 0]
    ]
    return [shapes for k, shapes in enumerate(made) if shapes not in made[:k]]

"""Tell what a pass changed, where: the operators that went and came, and the user's lines they belong to.

Ignored on purpose: how much time that saves, which is for a profile to say.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence

from ..graph import Node, topological

LINES = 3  # of the user's program that a row shows


def explained(run: Callable[[Sequence[Node]], tuple[Node, ...]]) -> Callable[[Sequence[Node]], tuple[Node, ...]]:
    """The same pass; it prints one row whenever it changes a graph.

    >>> import hetu as ht
    >>> from hetu.passes import simplify
    >>> x = ht.placeholder("x", (2,))
    >>> _ = explained(simplify)([-(-x)])
    simplify: 3 -> 1 nodes, without negative x2
    """

    @functools.wraps(run)
    def loud(outputs: Sequence[Node]) -> tuple[Node, ...]:
        before = topological(outputs)
        made = run(outputs)
        after = topological(made)
        old, new = (Counter(n.op.name for n in nodes) for nodes in (before, after))
        if old != new:
            parts = [f"{run.__name__}: {len(before)} -> {len(after)} nodes"]
            parts += [f"{word} {_listed(c)}" for word, c in (("without", old - new), ("with", new - old)) if c]
            print(", ".join(parts) + _places(set(after) - set(before), new - old))
        return made

    return loud


def _listed(ops: Counter[str]) -> str:
    return ", ".join(f"{name} x{count}" if count > 1 else name for name, count in sorted(ops.items()))


def _places(made: set[Node], new: Counter[str]) -> str:
    """` (model.py:3, model.py:7, ...)` for the new nodes of new operators."""
    found = sorted((n for n in made if n.op.name in new and n.site is not None), key=lambda n: n.serial)
    lines = list(dict.fromkeys(str(n.site) for n in found))
    more = ", ..." if len(lines) > LINES else ""
    return f" ({', '.join(lines[:LINES])}{more})" if lines else ""

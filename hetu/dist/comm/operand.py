"""What tells operators that communicate from others of their line: whatever they are computed from.

One line makes many of them, as in `[all_reduce(g) for g in gradients]`, and ranks that go through a set of names do so
in orders of their own. Calls on arrays have nothing of this kind, so those that one line makes in a loop are one.
"""

from __future__ import annotations

import weakref
import zlib

from ...core.errors import Site
from ...core.graph import Node

_known: weakref.WeakKeyDictionary[Node, int] = weakref.WeakKeyDictionary()


class OperandSite(Site):
    """A line, and what an operator of it is given: in words, and as a number that ranks with one graph share."""

    words: str
    number: int

    @classmethod
    def of(cls, site: Site, given: Node) -> OperandSite:
        """The line `site`, with what it is given there."""
        made = cls(*site)
        made.number = digest(given)
        made.words = f"{given.name} of {given.site} (graph {made.number:08x})"
        return made


def digest(node: Node) -> int:
    """A number of the graph of `node`: operators, names, and attributes that are numbers or texts."""
    open_ = [node]
    while open_:
        if unknown := [i for i in open_[-1].inputs if i not in _known]:
            open_ += unknown
            continue
        last = open_.pop()
        plain = [value for _, value in sorted(last.attrs.items()) if isinstance(value, int | float | str)]
        _known[last] = zlib.crc32(repr((last.op.name, plain, [_known[i] for i in last.inputs])).encode())
    return _known[node]

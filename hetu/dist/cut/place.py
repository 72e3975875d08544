"""Sub-graph placement: parts of a model on ranks of their own, which all other nodes follow.

Nodes that are made inside `with place(ranks)` are computed on these ranks, and variables made there live there; values
that cross a border are sent. Within a place the strategy holds as it does on all ranks: two ranks of data parallelism
share the batch. Stages, which work on different micro-batches at the same time, are places with a schedule: see
`pipeline_stages.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

from ...core.errors import ArgumentError
from ...core.graph import Node, tagged, topological
from ...core.op import Role
from ...core.types import Dim
from ...ranges import Count
from ..comm.recorder import Ranks
from ..layout.layout import Layout, show_ranks


def place(ranks: Count | Sequence[Count]) -> AbstractContextManager[None]:
    """Compute all nodes made inside, and their gradients, on these ranks; without a strategy it has no effect.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (None, 4))
    >>> with place([2, 3]):
    ...     y = x * 2
    >>> y.tags["place"]
    (2, 3)
    """
    found = tuple(ranks) if isinstance(ranks, Sequence) else (ranks,)
    if not found or len(set(found)) != len(found) or not all(type(r) is int and r >= 0 for r in found):
        raise ArgumentError(f"a place on ranks {ranks!r}", fix="name one or more different ranks from 0 up")
    return tagged(place=found)


def marked_places(outputs: Sequence[Node]) -> dict[Ranks, Node]:
    """The places that the user has marked, each with the first node there."""
    found: dict[Ranks, Node] = {}
    for node in topological(outputs):
        if "place" in node.tags:
            found.setdefault(node.tags["place"], node)
    return found


def refuse_places(outputs: Sequence[Node], who: str) -> None:
    """ArgumentError for a place that the user has marked, where there are stages."""
    for ranks, node in marked_places(outputs).items():
        raise ArgumentError(
            f"{node!r} is placed on rank {show_ranks(ranks)}, but {who} nodes by their stages",
            fix="mark stages instead: with ht.dist.stage(i): ...",
            site=node.site,
        )


def places_of(
    outputs: Sequence[Node],
    places: Collection[Ranks],
    compute: Callable[[Node], Layout],
    store: Callable[[Node], Layout],
    late: Collection[Node],
) -> dict[Node, Ranks]:
    """Which of the `places` computes each node; nodes without a place are computed on all ranks.

    Variables have the place of the layout that `compute` gives. Other nodes have their mark, else the place of their
    largest input. Nodes in `late`, the update of variables, ignore marks: they follow the layouts that `store` gives.
    """
    placed: dict[Node, Ranks] = {}
    for node in topological(outputs):
        found: Ranks | None = node.tags.get("place")
        if node.role is Role.VARIABLE:
            found = compute(node).ranks
        elif node in late or found is None:
            homes = {i: store(i).ranks for i in node.inputs if i.role is Role.VARIABLE and node in late}
            known = {i: ranks for i in node.inputs if (ranks := homes.get(i, placed.get(i))) in places}
            found = known[max(known, key=_elements)] if known else None
        if found is not None and found in places:
            placed[node] = found
    return placed


def _elements(node: Node) -> int:
    """How many elements a node has, those of one sample where the batch is not known."""
    if isinstance(node.type, tuple):
        return 0
    size = node.tensor.size
    return size.coef if isinstance(size, Dim) else int(size)

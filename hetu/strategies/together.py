"""What one rank's step asks of servers, asked together: of tables that they keep as one, and for all micro-batches.

A request takes as long as tens of KB of values do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from ..core.graph import OPS, Node, origin_of, rewrite, topological
from ..core.op import Role
from ..core.placement import Local
from .push_pull import descend_rows, pull_rows, push_rows


def together(local: Local) -> Local:
    """A rank's graph in which pulls of rows of one parameter are one, and pushes.

    Pulls go together if their ids follow from feeds alone, so that they wait neither for each other nor for other
    ranks; those of ids that are fed, which may leave a step ahead, have one of their own.
    """
    kept, acting = len(local.fetches), len(local.fetches) + len(local.tokens)
    outputs = _pulled_together((*local.fetches, *local.tokens, *local.updates.values()))
    tokens, pushes = list[Node](), defaultdict[Any, list[Node]](list)
    for node in outputs[kept:acting]:
        if node.op in (push_rows, descend_rows):
            pushes[node.op, node.attrs["parameter"], node.attrs["acts"], node.inputs[2:]].append(node)
        else:
            tokens.append(node)
    tokens += (_joined(group, group[-1].attrs["order"]) for group in pushes.values())
    return replace(local, fetches=outputs[:kept], tokens=(*tokens,), updates=dict(zip(local.updates, outputs[acting:])))


def _pulled_together(outputs: Sequence[Node]) -> tuple[Node, ...]:
    free, pulls = set[Node](), defaultdict[Any, list[Node]](list)
    for node in topological(outputs):
        if not all(i in free for i in node.inputs):
            continue
        if node.op is pull_rows:
            pulls[node.attrs["parameter"], node.inputs[0].role is Role.PLACEHOLDER].append(node)
        elif node.role is not Role.COMMUNICATION:
            free.add(node)
    found = dict[Node, tuple[Node, int]]()  # of each the one that takes its place, and which of its results
    for group in pulls.values():
        one = _joined(group, min(n.attrs["order"] for n in group))
        found |= {node: (one, k) for k, node in enumerate(group)}

    def rule(node: Node, _: tuple[Node, ...]) -> Node | None:
        of = found.get(node.inputs[0]) if node.role is Role.ITEM else None
        return None if of is None else OPS["item"](of[0], index=of[1])

    return rewrite(outputs, rule)


def _joined(group: Sequence[Node], order: int) -> Node:
    """One request in the place of several, each for one table: the ids of all, then the rows, then what they share."""
    inputs = chain.from_iterable(zip(*(node.inputs[:2] for node in group)))
    tables = tuple(table for node in group for table in node.attrs["tables"])
    with origin_of(group[-1]):
        attrs = {**group[0].attrs, "tables": tables, "order": order}
        return group[0].op.make((*inputs, *group[0].inputs[2:]), attrs)

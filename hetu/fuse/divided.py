"""A graph divided into groups, by the numbers of its nodes, and the graph with these groups as one operator each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..core.graph import OPS, Node, origin_of, remade
from .apart import Checks, Looked
from .form import Enter, Form, PartCheck, line_of, overwriting, overwritten


class Division(NamedTuple):
    """A group: its lines, what each reads, its arrays and its results. `like` is equal for groups of one form.

    An operand is the place of a value among arrays and lines, or that of a constant among the nodes, n, as -1 - n.
    """

    lines: tuple[int, ...]
    operands: tuple[tuple[int, ...], ...]
    arrays: tuple[int, ...]
    results: tuple[int, ...]
    space: int  # a node of this shape
    split: int | None
    flat: tuple[bool, ...]  # of arrays, then of lines
    like: int


def rebuilt(
    divided: Sequence[int | Division], nodes: Sequence[Node], outputs: Sequence[Node], checks: Checks, enter: Enter
) -> tuple[Node, ...]:
    """The graph of `outputs`, whose `nodes` are divided into those that stay and groups, inputs first."""
    new: dict[Node, Node] = {}
    forms: dict[Form, Form] = {}  # each once, so that equal ones are found at a glance
    made: dict[int, Node] = {}  # a group of each kind
    for part in divided:
        if isinstance(part, int):
            node = nodes[part]
            with origin_of(node):
                new[node] = remade(node, tuple([new[i] for i in node.inputs]))
            continue
        own = [check for k in part.lines for check in checks.get(nodes[k], ())] if checks else []
        alike = None if own else made.get(part.like)
        results = [nodes[k] for k in part.results]
        with origin_of(results[-1]):
            if alike is None:
                form, arrays = _form_of(part, nodes, own)
                form = forms.setdefault(form, form)
                inputs = tuple([new.get(i, i) for i in arrays])  # what only a check looks at is nowhere else
                group = overwriting(tuple(overwritten(form).items()), enter).make(inputs, {"form": form})
                made |= {} if own else {part.like: group}
            else:
                group = Node(alike.op, tuple([new[nodes[k]] for k in part.arrays]), alike.attrs, alike.type)
        for k, node in enumerate(results):
            with origin_of(node):
                new[node] = OPS["item"].make((group,), {"index": k}) if len(results) > 1 else group
    return tuple(new[o] for o in outputs)


def _form_of(part: Division, nodes: Sequence[Node], checks: Sequence[Looked]) -> tuple[Form, list[Node]]:
    """The form of a group, and the arrays that it reads."""
    arrays = [nodes[k] for k in part.arrays]
    types = tuple([x.tensor for x in arrays])
    lines = []
    for k, operands in zip(part.lines, part.operands):
        read = [o if o >= 0 else number_of(nodes[-1 - o]) for o in operands]
        lines.append(line_of(nodes[k].op, read, nodes[k].attrs))
    made = []
    for check in dict.fromkeys(checks):
        extra = {x: len(arrays) - len(types) + k for k, x in enumerate(check.arrays)}
        arrays += extra
        looked_at = tuple(extra.get(i, i.tensor) for i in check.inputs)
        made.append(PartCheck(check.op, looked_at, check.attrs, check.site))
    place = {k: n for n, k in enumerate(part.lines, len(types))}
    space: Any = nodes[part.space].shape
    results = tuple([place[k] for k in part.results])
    return Form(types, tuple(lines), results, space, part.split or 0, part.flat, tuple(made)), arrays


def number_of(node: Node) -> tuple[str, float]:
    """A constant as lines have it among their operands."""
    return node.dtype.name, node.attrs["value"].item()

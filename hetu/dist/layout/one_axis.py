"""One operator on one axis of a grid of ranks: the roles in which it may have its inputs, and which of them are best.

The candidates and the order among them are those that `deduce.py` tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...core.graph import OPS, Node
from ...core.memory import types_of
from ...core.op import Op
from ...ops.routing import moe_combine, moe_dispatch
from .layout import DUP, MAX, MIN, SUM
from .rules import AxisFactors, ShardingRule, holds


class Route(NamedTuple):
    """The factors `rows` and `rooms` of an operator's `dims` may be split among the same ranks: then rows travel.

    Input `ids` has the room of each choice of each row, which all ranks know; input `at` has the rooms, or the result
    has, if it is None.
    """

    rows: str
    rooms: str
    ids: int
    at: int | None


ROUTES: dict[Op[..., Any], Route] = {
    moe_dispatch: Route("n", "e", ids=1, at=None),
    moe_combine: Route("n", "e", ids=1, at=0),
    OPS["moe_products"]: Route("n", "e", ids=2, at=1),
}
ROLE_OF = {"sum": SUM, "max": MAX, "min": MIN}


@dataclass(frozen=True)
class AxisCandidate:
    """Roles wanted of the inputs on one axis, and the outputs' roles that follow."""

    wants: tuple[int, ...]
    outs: tuple[int, ...]


def choose(
    node: Node,
    rule: ShardingRule,
    roles: Sequence[Sequence[int]],
    n: int,
    pinned: set[Node],
    readers: Counter[Node],
    degrees: dict[str, int],
    ratio: tuple[int, ...],
    exchanges: bool,
) -> AxisCandidate:
    """The best candidate for one axis of degree `n`, on which each input is at hand in these `roles`, first that in
    which it was made; `degrees` are those of the factors that are split already.

    Along some axes ranks may exchange rows.
    """
    options: list[tuple[tuple[float, ...], AxisCandidate, str | None]] = []
    parts = sum(ratio) or n  # equal ones, of which a rank may have several
    kept = any(of[0] != DUP for of in roles if of)  # of what all have no split is sought
    present = [rule.factor(term, role) for term, of in zip(rule.inputs, roles) for role in of if kept and role >= 0]
    for factor in dict.fromkeys(present):  # those that some input already splits
        whole = factor in rule.fixed or (factor in rule.windowed and "window" not in node.op.defaults)
        if factor is None or (whole and n > 1):  # one part is whole
            continue
        if rule.can_split(factor, degrees.get(factor, 1) * parts):
            options.append((*_scored(node, _split(node, rule, factor), roles, n, pinned), factor))
    meeting = _meeting(node, rule, present, n, degrees) if exchanges else None
    if meeting is not None:
        (moved, cost, pending), _ = _scored(node, meeting, roles, n, pinned)
        options.append(((moved, cost + _routed_bytes(node, n), pending), meeting, ROUTES[node.op].rows))
    replicated = AxisCandidate((DUP,) * len(rule.inputs), (DUP,) * len(rule.outputs))
    options.append((*_scored(node, replicated, roles, n, pinned), None))
    made = [next(iter(of), None) for of in roles]
    if (flowing := _flowing(node, made, len(rule.outputs), readers)) is not None:
        options.append((*_scored(node, flowing, roles, n, pinned), None))

    def order(option: tuple[tuple[float, ...], AxisCandidate, str | None]) -> tuple[float, ...]:
        (moved, *rest), _, factor = option
        return moved, factor is None, *rest

    _, best, chosen = min(options, key=order)
    if chosen is not None:
        for factor in (chosen, ROUTES[node.op].rooms) if best is meeting else (chosen,):
            degrees[factor] = degrees.get(factor, 1) * parts
    return best


def _split(node: Node, rule: ShardingRule, factor: str) -> AxisCandidate:
    """Split `factor` wherever it is; where it vanishes the result is pending."""

    def role(term: AxisFactors, absent: int) -> int:
        place = rule.place(term, factor)
        return absent if place is None else place

    pending = ROLE_OF[node.op.reduce]
    return AxisCandidate(
        tuple(role(term, DUP) for term in rule.inputs), tuple(role(term, pending) for term in rule.outputs)
    )


def _meeting(
    node: Node, rule: ShardingRule, present: Sequence[str | None], n: int, degrees: dict[str, int]
) -> AxisCandidate | None:
    """Split the rows of an operator and its rooms, so that rows travel; all know the ids. See `exchange.py`."""
    route = ROUTES.get(node.op)
    if route is None or {route.rows, route.rooms}.isdisjoint(present):
        return None
    if not all(rule.can_split(factor, degrees.get(factor, 1) * n) for factor in (route.rows, route.rooms)):
        return None

    def role(term: AxisFactors) -> int:
        places = (rule.place(term, factor) for factor in (route.rows, route.rooms))
        return next((place for place in places if place is not None), DUP)

    wants = (DUP if k == route.ids else role(term) for k, term in enumerate(rule.inputs))
    return AxisCandidate(tuple(wants), tuple(map(role, rule.outputs)))


def _routed_bytes(node: Node, n: int) -> float:
    """Of what travels at most: all rooms."""
    at = ROUTES[node.op].at
    return float((node.tensor if at is None else node.inputs[at].tensor).nbytes) * _traffic(0, 1, n)


def _flowing(node: Node, roles: Sequence[int | None], outputs: int, readers: Counter[Node]) -> AxisCandidate | None:
    """Let a pending sum pass: one input of a multilinear operator, or all inputs of a jointly linear one; and pending
    minima or maxima those operators that are such themselves, whatever else they read.

    A sum that others read too does not pass: each reader would have to combine it again. Nor does one whose terms the
    result cannot hold: it would round each.
    """
    linear, extreme = node.op.linear, ROLE_OF[node.op.reduce]
    if extreme != SUM:
        shared = any(role == extreme and readers[i] > 1 for i, role in zip(node.inputs, roles))
        if extreme not in roles or shared:
            return None
        return AxisCandidate(tuple(extreme if role == extreme else DUP for role in roles), (extreme,) * outputs)
    if linear == "joint":
        if all(role == SUM for role in roles):
            return AxisCandidate((SUM,) * len(roles), (SUM,) * outputs)
        return None
    pending = [k for k, role in enumerate(roles) if role == SUM]
    if len(pending) != 1 or pending[0] not in linear or readers[node.inputs[pending[0]]] > 1:
        return None
    if not all(holds(type_.dtype, node.inputs[pending[0]].dtype) for type_ in types_of(node)):
        return None
    return AxisCandidate(tuple(SUM if k in pending else DUP for k in range(len(roles))), (SUM,) * outputs)


def _scored(
    node: Node, candidate: AxisCandidate, roles: Sequence[Sequence[int]], n: int, pinned: set[Node]
) -> tuple[tuple[float, ...], AxisCandidate]:
    """(pinned inputs that move, bytes, pending outputs) of a candidate."""
    moved, cost = 0, 0.0
    for position, (i, of, want) in enumerate(zip(node.inputs, roles, candidate.wants)):
        if not of or want in of or position in node.op.like:
            continue
        moved += i in pinned
        cost += float(i.tensor.nbytes) * _traffic(of[0], want, n)
    pending = 0
    for type_, role in zip(types_of(node), candidate.outs):
        if role in (SUM, MAX, MIN):
            pending += 1
            combined = sum(int(i.tensor.size) for i, r in zip(node.inputs, roles) if r[:1] == [role])
            more = max(int(type_.size) - combined, 0)  # numbers to combine than if what is pending were combined before
            cost += float(more * type_.dtype.itemsize) * _traffic(role, DUP, n)
    return (moved, cost, pending), candidate


def _traffic(src: int, dst: int, n: int) -> float:
    """Bytes on the wire for a change of role over `n` ranks, as a share of the array."""
    share = (n - 1) / n
    if src in (dst, DUP):
        return 0.0
    if src < DUP:
        return share if dst >= 0 else 2 * share
    return share if dst == DUP else share / n

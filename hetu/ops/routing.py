"""Moving tokens to experts and back: the layout transform of a mixture of experts.

Each token (n, features) goes to k experts, each of which has room for `capacity` tokens. Their rooms in a row, expert
by expert, are slots; a choice that found no room has slot -1. The three operators are derivatives of one form, the sum
over n and k of weights[n, k] (x[n] . y[slots[n, k]]): `moe_dispatch` of it by y, `moe_combine` by x and `moe_products`
by the weights, so the gradients of each are the other two. X. Nie et al., "HetuMoE", 2022. Gates and experts are made
of other operators; the layouts of a strategy send slots to other ranks.

All may have a first axis of groups: tokens then compete for room within their group alone (D. Lepikhin et al.,
"GShard", 2020). Where ranks share the batch, rooms travel to the ranks of their experts and back by all-to-all. A group
that lies on one rank needs nothing of the others. Without groups all ranks need to know what all tokens have chosen,
and what travels are the tokens that have found room (`dist/layout/exchange.py`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from ..core.errors import ArgumentError, ShapeError, ValueRangeError, public
from ..core.graph import OPS, Node
from ..core.kernels import Call
from ..core.op import as_node, op
from ..core.types import Dim, Size, TensorType, compatible, promote, require_float
from .along_axis import take_along_axis
from .elementwise import in_full
from .index import check_range, one_hot, require_indices

__all__ = ["moe_combine", "moe_dispatch", "moe_slots"]

Bind = Callable[..., list[Call] | None]
ROUNDS = 100  # in which experts find their prices


@public
def moe_slots(experts: Any, *, count: int, capacity: Size) -> Node:
    """The slot of each choice (tokens, k) of one of `count` experts, int64; -1 where the expert is full.

    The first choices of all tokens come before the second ones, and earlier tokens before later ones. Of `experts`
    (groups, tokens, k), each group has its own rooms, `capacity` an expert.

    >>> import hetu as ht
    >>> ht.evaluate(moe_slots([[0, 1], [1, 0], [1, 0]], count=2, capacity=2)).tolist()
    [[0, -1], [2, 1], [3, -1]]
    """
    _check_positive(count=count, capacity=capacity)
    experts = as_node(experts)
    if experts.ndim not in (2, 3):
        raise ShapeError(
            f"moe_slots: experts are {experts.type}, wanted (tokens, k) or (groups, tokens, k)",
            fix="give each token a row",
        )
    *groups, _, k = experts.shape
    in_turn = OPS["reshape"](OPS["matrix_transpose"](experts), shape=(*groups, -1, 1))
    arrived = OPS["cumsum"](one_hot(in_turn[..., 0], depth=count, dtype="int64"), axis=-2)
    place, room = take_along_axis(arrived, in_turn, axis=-1) - 1, as_node(capacity)
    # In turn, as ranks that share the batch have gathered all choices there.
    slots = OPS["where"](OPS["less"](place, room), in_turn * room + place, -1)
    return OPS["matrix_transpose"](OPS["reshape"](slots, shape=(*groups, k, -1)))


# -- rules that the operators share ------------------------------------------------------------------------------


def _check_positive(**sizes: Any) -> None:
    for name, value in sizes.items():
        known = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not isinstance(value, Dim) and not (known and value > 0):
            raise ArgumentError(f"{name}={value!r}", fix="pass a positive whole number")


def _check_types(slots: TensorType, *floats: TensorType) -> None:
    require_indices(slots)
    require_float(*floats)
    if slots.ndim not in (2, 3):
        raise ShapeError(f"slots are {slots}, wanted (tokens, k)", fix="make them with ht.moe_slots")


def _check_tokens(slots: TensorType, x: TensorType) -> None:
    if x.ndim != slots.ndim or not all(map(compatible, x.shape[:-1], slots.shape[:-1])):
        raise ShapeError(
            f"x is {x} for slots {slots}, wanted (tokens, features)", fix="flatten the axes before the last"
        )


def _check_weights(slots: TensorType, weights: TensorType) -> None:
    if weights.ndim != slots.ndim or not all(map(compatible, weights.shape, slots.shape)):
        raise ShapeError(f"weights are {weights} for slots {slots}", fix="pass one for each slot; ones change nothing")


def _check_rooms(slots: TensorType, y: TensorType) -> None:
    if y.ndim != slots.ndim + 1 or not all(map(compatible, y.shape[:-3], slots.shape[:-2])):
        groups = "groups, " * (slots.ndim - 2)
        raise ShapeError(
            f"y is {y} for slots {slots}, wanted ({groups}experts, capacity, features)",
            fix="reshape what the experts gave",
        )


def _check_slots(xp: ModuleType, slots: Any, count: int) -> None:
    check_range(xp, xp.where(slots == -1, xp.zeros_like(slots), slots), count, "slot")


def _of_all_groups(xp: ModuleType, slots: Any, rooms: Any) -> Any:
    """The slots among the rooms of all groups, of which each has `rooms`."""
    if slots.ndim == 2:
        return slots
    first, slots = xp.reshape(xp.arange(slots.shape[0], dtype=xp.int64) * rooms, (-1, 1, 1)), in_full(xp, slots)
    return xp.where(slots >= 0, slots + first, slots)


def _rows(xp: ModuleType, y: Any, slots: Any) -> Any:
    """What lies in the slots, (..., tokens, k, features); zeros for -1."""
    flat, kept = xp.reshape(y, (math.prod(y.shape[:-1]), y.shape[-1])), slots >= 0
    among = _of_all_groups(xp, slots, y.shape[-3] * y.shape[-2])
    rows = xp.take(flat, xp.reshape(xp.where(kept, among, xp.zeros_like(among)), (-1,)), axis=0)
    rows = xp.reshape(rows, (*slots.shape, y.shape[-1]))
    return xp.where(kept[..., None], rows, xp.zeros_like(rows))


def of_each_group(bind: Bind) -> Bind:
    """A kernel for one group, as one for any number of them."""

    @functools.wraps(bind)
    def calls(where: Any, out: Any, *arrays: Any, **attrs: Any) -> list[Call] | None:
        if min(a.ndim for a in arrays) == 2:
            return bind(where, out, *arrays, **attrs)
        found = [bind(where, out[g], *(a[g] for a in arrays), **attrs) for g in range(len(out))]
        return None if None in found else [call for of_one in found for call in of_one or ()]

    return calls


# -- the operators -----------------------------------------------------------------------------------------------


def _dispatch_attrs(*types: TensorType, experts: Any, capacity: Any) -> dict[str, Any]:
    _check_positive(experts=experts, capacity=capacity)
    return {"experts": experts, "capacity": capacity}


def _dispatch_type(
    x: TensorType, slots: TensorType, weights: TensorType, *, experts: Size, capacity: Size
) -> TensorType:
    _check_types(slots, x, weights)
    _check_tokens(slots, x)
    _check_weights(slots, weights)
    return TensorType((*x.shape[:-2], experts, capacity, x.shape[-1]), promote(x.dtype, weights.dtype))


@op(infer=_dispatch_type, dims="...nd,...nk,...nk->...e!c!d", linear=(0, 2))
def moe_dispatch(xp: ModuleType, x: Any, slots: Any, weights: Any, *, experts: Size, capacity: Size) -> Any:
    """Tokens times their weights in their slots, zeros in the others: (..., experts, capacity, features).

    `x` is (..., tokens, features), `slots` and `weights` are (..., tokens, k). No slot may be given twice:
    ValueRangeError then, and for slots that do not exist.

    >>> import hetu as ht
    >>> x, slots = [[1.0, 2.0], [3.0, 4.0]], [[2], [0]]
    >>> ht.evaluate(moe_dispatch(x, slots, [[1.0], [0.5]], experts=2, capacity=2)).tolist()
    [[[1.5, 2.0], [0.0, 0.0]], [[1.0, 2.0], [0.0, 0.0]]]
    """
    rows, shape = xp.expand_dims(weights, axis=-1) * xp.expand_dims(x, axis=-2), (*x.shape[:-2], experts, capacity)
    y = xp.zeros((math.prod(shape) + 1, x.shape[-1]), dtype=rows.dtype)
    xp.add.at(y, _of_all_groups(xp, slots, experts * capacity), rows)  # -1 is the last row, which is left out
    return xp.reshape(y[:-1, :], (*shape, x.shape[-1]))


moe_dispatch.normalize(_dispatch_attrs)


@moe_dispatch.check
def moe_dispatch_check(xp: ModuleType, x: Any, slots: Any, weights: Any, *, experts: int, capacity: int) -> None:
    _check_slots(xp, slots, experts * capacity)
    counts = np.bincount(_of_all_groups(xp, slots, experts * capacity)[slots >= 0], minlength=1)
    if (counts > 1).any():
        raise ValueRangeError(
            f"slot {counts.argmax() % (experts * capacity)} is given {counts.max()} times",
            fix="make the slots with ht.moe_slots",
        )


@moe_dispatch.grad
def moe_dispatch_grad(g: Node, y: Node, x: Node, slots: Node, weights: Node, **_: Any) -> tuple[Node, None, Node]:
    return moe_combine(g, slots, weights), None, moe_products(x, g, slots)


def _combine_type(y: TensorType, slots: TensorType, weights: TensorType) -> TensorType:
    _check_types(slots, y, weights)
    _check_rooms(slots, y)
    _check_weights(slots, weights)
    return TensorType((*slots.shape[:-1], y.shape[-1]), promote(y.dtype, weights.dtype))


@op(infer=_combine_type, dims="...e!c!d,...nk,...nk->...nd", linear=(0, 2))
def moe_combine(xp: ModuleType, y: Any, slots: Any, weights: Any) -> Any:
    """What the experts made of each token, weighed and summed: (..., tokens, features). Slot -1 counts for nothing.

    `y` is (..., experts, capacity, features), `slots` and `weights` are (..., tokens, k).

    >>> import hetu as ht
    >>> y = [[[1.0], [2.0]], [[4.0], [8.0]]]
    >>> ht.evaluate(moe_combine(y, [[0, 3], [2, -1]], [[1.0, 0.5], [1.0, 1.0]])).tolist()
    [[5.0], [4.0]]
    """
    return xp.sum(xp.expand_dims(weights, axis=-1) * _rows(xp, y, slots), axis=-2)


moe_combine.check(lambda xp, y, slots, weights: _check_slots(xp, slots, y.shape[-3] * y.shape[-2]))


@moe_combine.grad
def moe_combine_grad(g: Node, out: Node, y: Node, slots: Node, weights: Node) -> tuple[Node, None, Node]:
    *_, experts, capacity, _ = y.shape
    return moe_dispatch(g, slots, weights, experts=experts, capacity=capacity), None, moe_products(g, y, slots)


def _products_type(x: TensorType, y: TensorType, slots: TensorType) -> TensorType:
    _check_types(slots, x, y)
    _check_tokens(slots, x)
    _check_rooms(slots, y)
    if not compatible(x.shape[-1], y.shape[-1]):
        raise ShapeError(f"x is {x} and y is {y}", fix="both need the same features")
    return TensorType(slots.shape, promote(x.dtype, y.dtype))


@op(infer=_products_type, dims="...nd,...e!c!d,...nk->...nk", linear=(0, 1))
def moe_products(xp: ModuleType, x: Any, y: Any, slots: Any) -> Any:
    """The inner product of each token with what lies in each of its slots: (..., tokens, k); 0 for slot -1.

    The gradient of the weights. `x` is (..., tokens, features), `y` (..., experts, capacity, features), `slots` (...,
    tokens, k).

    >>> import hetu as ht
    >>> ht.evaluate(moe_products([[1.0, 2.0]], [[[3.0, 4.0], [5.0, 6.0]]], [[1, -1]])).tolist()
    [[17.0, 0.0]]
    """
    return xp.sum(xp.expand_dims(x, axis=-2) * _rows(xp, y, slots), axis=-1)


moe_products.check(lambda xp, x, y, slots: _check_slots(xp, slots, y.shape[-3] * y.shape[-2]))


@moe_products.grad
def moe_products_grad(g: Node, out: Node, x: Node, y: Node, slots: Node) -> tuple[Node, Node, None]:
    *_, experts, capacity, _ = y.shape
    return moe_combine(y, slots, g), moe_dispatch(x, slots, g, experts=experts, capacity=capacity), None


# -- as many tokens for each expert ------------------------------------------------------------------------------


def _assigned_type(scores: TensorType) -> TensorType:
    require_float(scores)
    if scores.ndim != 2:
        raise ShapeError(f"scores are {scores}, wanted (tokens, experts)", fix="give each token a row")
    return TensorType(scores.shape[:1], np.dtype("int64"))


@op(infer=_assigned_type, dims="n!e!->n!", differentiable=False)
def balanced_assignment(xp: ModuleType, scores: Any) -> Any:
    """An expert for each token, as many tokens for each, so that the sum of their scores is the greatest: (tokens,).

    No expert gets more than tokens / experts, rounded up. Exact: tokens begin at their best experts, and while one has
    too many, the cheapest chain of moves leads from it to one with room, for as many tokens as it costs the same
    (shortest augmenting paths; R. Ahuja et al., "Network Flows", 1993, section 9.7). Of infinite scores as many are
    taken, or left out, as can be; NaN counts as -inf. M. Lewis et al., "BASE Layers", ICML 2021, eq. 4. Runs on the
    host.

    >>> import hetu as ht
    >>> ht.evaluate(balanced_assignment([[3.0, 1.0], [2.0, 1.9], [5.0, 0.0], [4.0, 1.0]])).tolist()
    [1, 1, 0, 0]
    """
    host = _finite(np.asarray(scores.get() if hasattr(scores, "get") else scores, np.float64))
    tokens, experts = host.shape
    if not tokens:
        return xp.zeros(0, np.int64)
    room = -(-tokens // experts)
    host = np.concatenate([host, np.zeros((experts * room - tokens, experts))])  # and tokens that fill all rooms
    at = np.argmax(host - _prices(host, room), axis=1)
    load, changed = np.bincount(at, minlength=experts), [*range(experts)]
    cost = np.full((experts, experts), np.inf)
    while (load > room).any():
        for expert in changed:  # what the cheapest of its tokens loses by a move to each other
            cost[expert] = _lost(host, at, expert)[1].min(axis=0, initial=np.inf)
        changed = chain = _cheapest_chain(cost, load > room, load < room)
        moves = []
        for here, there in itertools.pairwise(chain):
            mine, lost = _lost(host, at, here)
            moves.append((there, mine[lost[:, there] == cost[here, there]]))
        count = min(load[chain[0]] - room, room - load[chain[-1]], *(len(alike) for _, alike in moves))
        for there, alike in moves:
            at[alike[:count]] = there
        load[chain[0]] -= count
        load[chain[-1]] += count
    return xp.asarray(at[:tokens].astype(np.int64))


def _finite(scores: Any) -> Any:
    """Scores of about 1 at most, whose greatest sum is of the same tokens and experts; an infinite one counts for more
    than all finite ones together."""
    known, far = np.isfinite(scores), len(scores) + 1.0
    scores = scores / (np.abs(scores).max(initial=0.0, where=known) or 1.0)  # the differences of which are finite
    low = scores.min(initial=1.0, where=known)
    span = scores.max(initial=low, where=known) - low
    return np.nan_to_num((scores - low) / (span or 1.0), nan=-far, neginf=-far, posinf=far) / far


def _lost(scores: Any, at: Any, expert: int) -> tuple[Any, Any]:
    """The tokens of an expert, and what each loses by a move to each other."""
    mine = np.flatnonzero(at == expert)
    return mine, scores[mine, expert, None] - scores[mine]


def _prices(scores: Any, room: int) -> Any:
    """What experts cost, so that about `room` tokens want each: then few have to move, and those that want one best at
    its price are the best for as many as want it."""
    prices, step = np.zeros(scores.shape[1]), 0.3 * scores.std() + 1e-9
    for _ in range(ROUNDS):
        load = np.bincount(np.argmax(scores - prices, axis=1), minlength=len(prices))
        prices += step * (load / room - 1)
        step *= 0.95
    return prices


def _cheapest_chain(cost: Any, full: Any, free: Any) -> list[int]:
    """The experts on the cheapest way from a full one to one with room (Bellman and Ford)."""
    far, before = np.where(full, 0.0, np.inf), np.full(len(cost), -1)
    for _ in range(len(cost)):
        ways = far[:, None] + cost
        nearer = ways.min(axis=0) < far - 1e-12
        if not nearer.any():
            break
        before[nearer] = ways.argmin(axis=0)[nearer]
        far = np.where(nearer, ways.min(axis=0), far)
    chain = [int(np.where(free, far, np.inf).argmin())]
    while before[chain[-1]] >= 0:
        chain.append(int(before[chain[-1]]))
    return chain[::-1]

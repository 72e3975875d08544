"""Pushes and pulls as operators: how a step's gradients reach the servers and new values come back.

`servable.py` makes them, never a model. Each names a parameter; binding a program adds the worker's connection. Those
of rows serve several tables that servers keep as one, in one request: `tables` says of each input of ids which table it
means, and which rows of the whole these are. A push keeps its array alive until the tick, because the array may still
be on its way. What one rank's step asks is asked `together`, for all micro-batches and for tables that servers keep as
one: a request takes as long as tens of KB of values do.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import numpy as np

from ..codec import Compress
from ..core.errors import ValueRangeError
from ..core.graph import OPS, Node, origin_of, rewrite, topological
from ..core.op import Op, Role
from ..core.placement import Local
from ..core.program import Program
from ..core.types import Shape, TensorType, as_dtype, axis_letters
from ..dist.ops import communicates
from ..ps.wire.rows import RowRequest
from ..ps.wire.rows import pull_bags as bag_sums
from .room import OF_ROWS, ROOMS, Room, RowCount, coding, dense_coded

TOKEN = TensorType((0,), np.dtype("uint8"))  # stands for "this has been sent"
Tables = tuple[tuple[str, int, int], ...]  # name, first row in what servers keep as one, and number of rows


def _token(*_: TensorType, **__: Any) -> TensorType:
    return TOKEN


def _pulled(*_: TensorType, shape: Shape, dtype: str, **__: Any) -> TensorType:
    return TensorType(shape, as_dtype(dtype))


def _pulled_rows(*ids: TensorType, row: Shape, dtype: str, **_: Any) -> tuple[TensorType, ...]:
    return tuple(TensorType((*i.shape, *row), as_dtype(dtype)) for i in ids)


def _whole_dims(*gradients: TensorType, **_: Any) -> str:
    """Sharding rule of an operator that sends whole gradients."""
    return f"{','.join(''.join(f'{c}!' for c in axis_letters(g.ndim)) for g in gradients)}->z"


def _terms(ids: Sequence[TensorType], row: str) -> tuple[str, str]:
    """The terms of ids and of their rows, whose axes are named by `row`, for rules of parts of a batch.

    All ids are split alike, so where their sizes differ they are not split.
    """
    sizes = [set(found) for found in zip_longest(*(i.shape for i in ids))]
    letters = [letter if len(of) == 1 else f"{letter}!" for letter, of in zip(axis_letters(len(sizes)), sizes)]
    terms = ["".join(letters[: i.ndim]) for i in ids]
    return ",".join(terms), ",".join(f"{term}{row}" for term in terms)


def _push_dims(*types: TensorType, tables: Tables, **_: Any) -> str:
    """Sharding rule of an operator that sends whole rows of a part of the batch."""
    ids, rows = types[: len(tables)], types[len(tables) :]
    given, sent = _terms(ids, "".join(f"{c}!" for c in ROW[: rows[0].ndim - ids[0].ndim]))
    return f"{given},{sent}{',' * (len(rows) > len(ids))}->z"


def _pull_dims(*ids: TensorType, row: Shape, **_: Any) -> str:
    """Sharding rule of an operator that fetches the rows of a part of the batch."""
    given, made = _terms(ids, ROW[: len(row)])
    return f"{given}->{made}"


ROW = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # the axes of a row


def _whole_room(*gradients: TensorType, coded: Compress, **_: Any) -> Room:
    nbytes = sum(int(g.nbytes) for g in gradients)
    joined = nbytes if gradients[1:] else 0
    return dense_coded(nbytes, coded.gradients).beside(joined) if coded.gradients else Room(joined, joined)


def _push_room(*types: TensorType, tables: Tables, lines: int | None, coded: Compress, **_: Any) -> Room:
    ids, rows = types[: len(tables)], types[len(tables) :]
    row = math.prod(map(int, rows[0].shape[ids[0].ndim :])) * rows[0].dtype.itemsize
    return RowCount.of(ids, tables, row, lines, coding(coded.rows)).pushed


def _pull_room(*ids: TensorType, tables: Tables, row: Shape, dtype: str, lines: Any, coded: Any, **_: Any) -> Room:
    nbytes = math.prod(map(int, row)) * as_dtype(dtype).itemsize
    return RowCount.of(ids, tables, nbytes, lines, coding(coded.rows)).pulled


def _bags_room(ids: TensorType, *_: TensorType, tables: Tables, shape: Shape, dtype: str, **__: Any) -> Room:
    sums = TensorType(shape, as_dtype(dtype)).nbytes
    return Room(RowCount.of([ids], tables, 0).sorting + 2 * int(sums))


def _acting(
    infer: Callable[..., Any],
    dims: str | Callable[..., str] | None = None,
    room: Callable[..., Room] = lambda *types, **_: Room(),
    *,
    rows: bool = False,
) -> Callable[[Callable[..., None]], Op[..., Any]]:
    """Makes an operator of `run(out, *arrays, comm, **attrs)`, which only acts: not if another rank `acts` for it.

    `room(*types, lines, coded, **attrs)` says what it takes beside the plan, if so many lines are cached of what it is
    for, which travels as `coded`; with `rows` that is what it takes if all rows that it asks for are distinct.
    """

    def made(run: Callable[..., None]) -> Op[..., Any]:
        def bind(
            xp: Any, out: Any, *arrays: Any, order: int, comm: Any, acts: bool = True, **attrs: Any
        ) -> list[Callable[[], Any]]:
            return [partial(run, out, *arrays, comm=comm, **attrs)] if acts else []

        bind.__doc__, bind.__module__ = run.__doc__, run.__module__
        acting = communicates(run.__name__, infer, "served", dims=dims)(bind)
        ROOMS[acting] = room
        if rows:
            OF_ROWS.add(acting)
        return acting

    return made


def rows_of(ids: Sequence[np.ndarray], tables: Tables) -> np.ndarray:
    """The rows of the whole that ids of each of these tables mean, one after the other.

    ValueRangeError for those that a table lacks, which would be rows of another.

    >>> rows_of([np.array([1, 0]), np.array([[2]])], (("a", 0, 2), ("b", 2, 5))).tolist()
    [1, 0, 4]
    """
    sizes, (_, firsts, counts) = [i.size for i in ids], zip(*tables)
    rows = np.concatenate([i.reshape(-1) for i in ids], dtype="<i8", casting="same_kind")
    if (rows.view("<u8") >= np.repeat(np.array(counts, "<u8"), sizes)).any():
        wrong = ((i, *table) for i, table in zip(ids, tables) if i.size and not 0 <= i.min() <= i.max() < table[2])
        for found, name, _, count in wrong:
            got = f"ids {found.min()}..{found.max()} of {name}, which has {count} rows"
            raise ValueRangeError(got, fix=f"use ids from 0 to {count - 1}")
    rows += np.repeat(np.array(firsts, "<i8"), sizes)
    return rows


def _joined(arrays: Sequence[np.ndarray], tables: Tables) -> tuple[np.ndarray, list[np.ndarray]]:
    """Ids of several tables as rows of the whole, and arrays of a row for each of these."""
    return rows_of(arrays[: len(tables)], tables), [*arrays[len(tables) :]]


@_acting(_token, _whole_dims, _whole_room)
def push(out: Any, *gradients: Any, parameter: str, comm: Any) -> None:
    """Send the gradient of a whole parameter, or those of all variables in it; the result is an empty token."""
    comm.client.push(parameter, np.concatenate([g.reshape(-1) for g in gradients]) if gradients[1:] else gradients[0])


@_acting(_token, _push_dims, _push_room, rows=True)
def push_rows(out: Any, *arrays: Any, parameter: str, tables: Tables, comm: Any) -> None:
    """Send gradients of rows, equal ids summed: the ids of each table, then the rows; the result is an empty token."""
    comm.rows.push(parameter, *_joined(arrays, tables))


@_acting(_token, _push_dims, _push_room, rows=True)
def descend_rows(out: Any, *arrays: Any, parameter: str, tables: Tables, comm: Any) -> None:
    """Gradient descent on such rows of cached tables by a rate, the last input; pushes if it must."""
    *given, rate = arrays
    comm.rows.descend(parameter, *_joined(given, tables), float(rate))


@_acting(_token, "->z")
def set_rate(out: Any, rate: Any, *, parameter: str, comm: Any) -> None:
    """Tell the servers the learning rate of a parameter, once per job; the result is an empty token."""
    if comm.client.worker == 0:
        comm.client.set_rate(parameter, float(rate))


@_acting(_token)
def tick(out: Any, *sent: Any, comm: Any, **_: Any) -> None:
    """End the clock after every push of this step, then request the rows that the next step is expected to need.

    Its inputs are the tokens, and the arrays on their way.
    """
    comm.rows.tick()


@_acting(_pulled)
def pull(out: Any, ticked: Any, *, parameter: str, comm: Any, **_: Any) -> None:
    """The new value of a whole parameter, as the job's consistency allows."""
    comm.client.pull(parameter, out).wait()


@_acting(_pulled_rows, _pull_dims, _pull_room, rows=True)
def pull_rows(outs: Any, *ids: Any, parameter: str, tables: Tables, comm: Any, **_: Any) -> None:
    """The rows of each table that live on the servers, one result for each input of ids."""
    comm.rows.pull(parameter, rows_of(ids, tables), outs)


@_acting(
    _pulled, lambda *types, shape, **_: f"{','.join(['e!'] * len(types))}->{ROW[: len(shape)]}", _bags_room, rows=True
)
def pull_bags(
    out: Any, ids: Any, bags: Any, *weights: Any, parameter: str, tables: Tables, comm: Any, **_: Any
) -> None:
    """The sums of rows of a table that live on the servers, which sum them up: one row for each bag."""
    rows = rows_of([ids], tables)
    found = bag_sums(comm.client, parameter, rows, bags, out.shape[0], *weights).wait()
    np.copyto(out, found.reshape(out.shape))


def requests(program: Program, values: Mapping[str, np.ndarray]) -> list[RowRequest]:
    """The rows that a program will ask for by ids that it is fed."""
    found = []
    for node in (step.node for step in program.steps):
        if node.op is pull_rows and all(i.role is Role.PLACEHOLDER for i in node.inputs):
            parts = [program.parts.get(i.name, (i.name, ...)) for i in node.inputs]
            ids = [values[name][part] for name, part in parts]
            found.append((node.attrs["parameter"], rows_of(ids, node.attrs["tables"])))
    return found


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
    tokens += (_one_request(group, group[-1].attrs["order"]) for group in pushes.values())
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
        one = _one_request(group, min(n.attrs["order"] for n in group))
        found |= {node: (one, k) for k, node in enumerate(group)}

    def rule(node: Node, _: tuple[Node, ...]) -> Node | None:
        of = found.get(node.inputs[0]) if node.role is Role.ITEM else None
        return None if of is None else OPS["item"](of[0], index=of[1])

    return rewrite(outputs, rule)


def _one_request(group: Sequence[Node], order: int) -> Node:
    """One request in the place of several, each for one table: the ids of all, then the rows, then what they share."""
    inputs = chain.from_iterable(zip(*(node.inputs[:2] for node in group)))
    tables = tuple(table for node in group for table in node.attrs["tables"])
    with origin_of(group[-1]):
        attrs = {**group[0].attrs, "tables": tables, "order": order}
        return group[0].op.make((*inputs, *group[0].inputs[2:]), attrs)

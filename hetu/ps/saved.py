"""Read and restore what servers hold of a parameter: its values and the state of its rule, at one clock.

To restore, the servers ask one worker for its data, as for first values (`filling.py`). Their own snapshots
(`snapshot.py`) also hold clocks.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..core.errors import ArgumentError, ShapeError, ValueRangeError
from ..ranges import AtLeast1, Count, unmasked
from .store.messages import FRAME_LIMIT, Kind, given, row_bytes
from .store.partition import Block, Parameter
from .wire.client import Client
from .wire.filling import fill
from .wire.transport import Request

MOST = 1 << 16  # rows that are exported at once, at most


def state_of(client: Client, name: str, rows: slice | None = None) -> np.ndarray:
    """A parameter and the state of its rule at this clock, (arrays, *shape), or some rows of a table.

    >>> from hetu.ps import Options, Parameter, ServerProcess
    >>> with ServerProcess(Options(workers=1, token="secret")) as server:
    ...     with Client([server.address], worker=0, token="secret") as client:
    ...         client.create({"w": Parameter((2,), rule="momentum")}, {"w": np.ones(2)})
    ...         state_of(client, "w").tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """
    parameter = client.parameter(name, whole=True).of(rows)
    made = np.empty((parameter.arrays, *parameter.matrix), parameter.element)
    requests, side = client.request(Kind.STATE, name, rows, arrays=parameter.arrays), made.swapaxes(0, 1)
    for request, reply in zip(requests, client.transport.wait(requests)):
        side[request.part] = given(reply.values).reshape(side[request.part].shape)
    return made.reshape(parameter.arrays, *parameter.shape)


def export_rows(
    client: Client, name: str, since: Count = 0, most: AtLeast1 = MOST
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The rows of a table without a bound, some at a time: their ids, and (arrays, ids, *row) as of `state_of`.

    With `since`, only those that were updated at that clock or later: what an earlier export lacks.

    >>> import hetu as ht
    >>> from hetu.ps import Growth, Options, Parameter, ServerProcess, UNBOUNDED
    >>> with ServerProcess(Options(workers=1, token="secret")) as server:
    ...     with Client([server.address], worker=0, token="secret") as client:
    ...         table = Parameter((UNBOUNDED, 1), sparse=True, rule="add", reduce="sum", grows=Growth(1 << 20))
    ...         client.create({"t": table}, {"t": ht.init.zeros})
    ...         client.push_rows("t", np.array([1 << 50]), np.ones((1, 1))).wait()
    ...         client.clock().wait()
    ...         [(ids.tolist(), rows.tolist()) for ids, rows in export_rows(client, "t")]
    [([1125899906842624], [[[1.0]]])]
    """
    parameter, blocks = _growing(client, name), client.blocks[name]
    most = min(most, MOST, max(1, FRAME_LIMIT // row_bytes(parameter.arrays * parameter.cols, parameter.element)))
    for block in blocks:
        start = 0
        while True:
            meta = {"start": start, "most": most, "since": since}
            asked = client.transport.submit(block.server, Kind.EXPORT, key=block.key, step=client.step, meta=meta)
            (reply,) = client.transport.wait([asked])
            if count := len(ids := given(reply.ids)):
                rows = given(reply.values).reshape(count, parameter.arrays, parameter.cols).swapaxes(0, 1)
                rows = np.ascontiguousarray(rows).reshape(parameter.arrays, count, *parameter.shape[1:])
                yield parameter.ids(ids + block.start, len(blocks)), rows
            if not (start := reply.step):
                break


def import_rows(client: Client, name: str, ids: np.ndarray, rows: np.ndarray, step: Count = 0) -> None:
    """Give a table without a bound rows as `export_rows` gives them, in place of those that it has, at a step of the
    rule. One worker imports a row.

    ArgumentError, ShapeError or ValueRangeError for ids or rows that do not fit, or that hold NaN or infinities, of
    which none is imported.
    """
    _growing(client, name)
    rows = unmasked(rows, f"rows for {name}")
    each, fits = (0, *range(2, rows.ndim)), rows.dtype.kind == "f" and rows.shape[1:2] == ids.shape
    if fits and len(bad := ids[~np.isfinite(rows).all(axis=each)]):
        text = f"rows of {name} with numbers that are not finite, of ids {reprlib.repr(bad.tolist())}"
        raise ValueRangeError(text, fix="leave these rows out, or find where they became so: ht.debug_nans()")
    client.wait_for_leave()
    client.transport.wait(_given_rows(client, name, client.blocks[name], ids, rows, step))


def restore_rows(
    client: Client, name: str, parts: Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]], step: int
) -> None:
    """As `restore`, of a table without a bound: it has no other rows then than those of all parts, (ids, rows)."""
    client.wait_for_leave()
    parameter = _growing(client, name)
    client.parameters[name] = replace(parameter, generation=parameter.generation + 1)
    none = np.empty(0, "<i8")

    def give(name: str, blocks: Sequence[Block]) -> Iterator[list[Request]]:
        for ids, rows in parts():
            client.transport.wait(_given_rows(client, name, blocks, ids, rows, step))
        how: dict[str, Any] = {"blocks": blocks, "arrays": parameter.arrays, "meta": {"step": step, "last": True}}
        yield client.request(Kind.RESTORE, name, none, values=none.astype(parameter.element), always=True, **how)

    fill(client, [name], give)


def _given_rows(
    client: Client, name: str, blocks: Sequence[Block], ids: np.ndarray, rows: np.ndarray, step: int
) -> list[Request]:
    """Requests that give these blocks rows."""
    parameter, places = _growing(client, name), client.places(name, ids)
    wanted = (parameter.arrays, *places.shape, *parameter.shape[1:])
    if places.ndim != 1 or rows.shape != wanted or rows.dtype != parameter.element:
        raise ShapeError(
            f"rows {rows.dtype}{list(rows.shape)} for ids {list(places.shape)} of {name}",
            fix=f"pass {parameter.element}{list(wanted)}: values, then each state of its rule, of rows of that width",
        )
    order = np.argsort(places)
    if len(places) > 1 and not np.diff(places[order]).all():
        raise ValueRangeError(f"ids of {name} that are imported twice", fix="give each row once")
    values = np.ascontiguousarray(rows[:, order].swapaxes(0, 1)).reshape(len(places), parameter.arrays * parameter.cols)
    how: dict[str, Any] = {"blocks": blocks, "values": values, "meta": {"step": step}, "arrays": parameter.arrays}
    return client.request(Kind.RESTORE, name, places[order], **how)


def _growing(client: Client, name: str) -> Parameter:
    """A parameter that must be a table without a bound."""
    parameter = client.parameter(name)
    if not parameter.grows:
        raise ArgumentError(f"{name} is no table without a bound", fix="use state_of and restore, or a checkpoint")
    return parameter


def restore(
    client: Client, name: str, parts: Sequence[tuple[slice | None, Callable[[], np.ndarray]]], step: int
) -> None:
    """Have the servers continue from what all `parts` give, as `state_of` does, and from this step of the rule.

    A part is a slice of the rows of a table, or None for the whole parameter, and what reads it. Every worker
    calls this alike. The first call for a row decides, so that updates by workers that have already gone on are not
    undone; nothing is read unless rows are wanted of this one, and one part at a time. The others wait.
    """
    client.wait_for_leave()
    parameter = client.parameter(name, whole=True)
    client.parameters[name] = parameter = replace(parameter, generation=parameter.generation + 1)

    def give(name: str, blocks: Sequence[Block]) -> Iterator[list[Request]]:
        meta, arrays = {"step": step}, parameter.arrays
        for rows, read in parts:
            values = np.asarray(read(), parameter.element)
            values = values.reshape(arrays, *parameter.of(rows).matrix).swapaxes(0, 1)
            yield client.request(Kind.RESTORE, name, rows, blocks=blocks, values=values, meta=meta, arrays=arrays)

    fill(client, [name], give)

"""What servers hold of a parameter, out and in again: its values and the state of its rule, at one clock.

To continue, every worker offers what it has and the first one counts, as with first values. The servers' own snapshots
(`snapshot.py`) also hold clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from .store.messages import Kind, row_bytes, wire_array
from .store.partition import Block, split_rows
from .wire.client import Client
from .wire.transport import Request


def state_of(client: Client, name: str) -> np.ndarray:
    """A parameter and the state of its rule as they are at this clock, (arrays, *shape), in chunks.

    >>> from hetu.ps import Options, Parameter, ServerProcess
    >>> with ServerProcess(Options(workers=1, token="secret")) as server:
    ...     with Client([server.address], worker=0, token="secret") as client:
    ...         client.create({"w": Parameter((2,), rule="momentum")}, {"w": np.ones(2)})
    ...         state_of(client, "w").tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """
    found = np.empty(_matrix(client, name), client.parameters[name].element)
    asked = [(b, piece) for b in client.blocks[name] for piece in _pieces(client, name, b)]
    requests = [_ask(client, Kind.STATE, block, ids) for block, (ids, _) in asked]
    for (_, (_, piece)), reply in zip(asked, client.transport.wait(requests)):
        found[piece] = np.split(reply.values, len(found), axis=1)
    return found.reshape(len(found), *client.parameters[name].shape)


def restore(client: Client, name: str, read: Callable[[], np.ndarray], step: int) -> None:
    """Have the servers continue from what `read` gives, of the shape of `state_of`, and from this step of the rule.

    Every worker calls this alike. The first that does so for a row decides, so that updates by workers that are
    already under way again are not undone; `read` is called only where rows are wanted.
    """
    client.transport.wait(client.ticks)
    parameter = client.parameters[name]
    client.parameters[name] = parameter = replace(parameter, generation=parameter.generation + 1)
    blocks = client.blocks[name]
    made = [
        client.transport.submit(b.server, Kind.CREATE, key=b.key, meta=parameter.spec(name, b.start, b.stop).meta())
        for b in blocks
    ]
    if not any(reply.step for reply in client.transport.wait(made)):
        return
    arrays = np.asarray(read(), parameter.element).reshape(_matrix(client, name))
    requests = []
    for block in blocks:
        for ids, piece in _pieces(client, name, block):
            values = np.concatenate(arrays[piece], axis=1)
            requests.append(_ask(client, Kind.RESTORE, block, ids, values=values, meta={"step": step}))
    client.transport.wait(requests)


def _ask(client: Client, kind: Kind, block: Block, ids: np.ndarray | None, **fields: Any) -> Request:
    if ids is not None:
        fields["ids"] = wire_array(ids - block.start)
    return client.transport.submit(block.server, kind, key=block.key, step=client.step, **fields)


def _matrix(client: Client, name: str) -> tuple[int, int, int]:
    """The shape in which a parameter and the state of its rule are cut into blocks: tables by rows, others flat."""
    parameter = client.parameters[name]
    rows = parameter.shape[0] if parameter.sparse else 1
    size = int(np.prod(parameter.shape, dtype=np.int64))
    return parameter.arrays, rows, parameter.cols if parameter.sparse else size


def _pieces(client: Client, name: str, block: Block) -> list[tuple[np.ndarray | None, tuple[slice, ...]]]:
    """The chunks of a block: the ids of their rows, None for a flat one, and where they lie in the matrix."""
    parameter = client.parameters[name]
    if not parameter.sparse:
        return [(None, (slice(None), slice(None), slice(block.start, block.stop)))]
    ids = np.arange(block.start, block.stop)
    parts = split_rows(ids, block, row_bytes(parameter.arrays * parameter.cols, parameter.element))
    return [(ids[p], (slice(None), slice(block.start + p.start, block.start + p.stop))) for p in parts]

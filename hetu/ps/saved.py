"""Read and restore what servers hold of a parameter: its values and the state of its rule, at one clock.

To restore, the servers ask one worker for its data, as for first values (`filling.py`). Their own snapshots
(`snapshot.py`) also hold clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from .store.messages import Kind, given
from .store.partition import Block
from .wire.client import Client
from .wire.filling import fill
from .wire.transport import Request


def state_of(client: Client, name: str, rows: slice | None = None) -> np.ndarray:
    """A parameter and the state of its rule at this clock, (arrays, *shape), or some rows of a table.

    >>> from hetu.ps import Options, Parameter, ServerProcess
    >>> with ServerProcess(Options(workers=1, token="secret")) as server:
    ...     with Client([server.address], worker=0, token="secret") as client:
    ...         client.create({"w": Parameter((2,), rule="momentum")}, {"w": np.ones(2)})
    ...         state_of(client, "w").tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """
    parameter = client.parameters[name].of(rows)
    made = np.empty((parameter.arrays, *parameter.matrix), parameter.element)
    requests = client.request(Kind.STATE, name, rows, arrays=parameter.arrays)
    for request, reply in zip(requests, client.transport.wait(requests)):
        part = made.swapaxes(0, 1)[request.part]
        part[...] = given(reply.values).reshape(part.shape)
    return made.reshape(parameter.arrays, *parameter.shape)


def restore(
    client: Client, name: str, parts: Sequence[tuple[slice | None, Callable[[], np.ndarray]]], step: int
) -> None:
    """Have the servers continue from what all `parts` give, as `state_of` does, and from this step of the rule.

    A part is a slice of the rows of a table, or None for the whole parameter, and what reads it. Every worker
    calls this alike. The first call for a row decides, so that updates by workers that have already gone on are not
    undone; nothing is read unless rows are wanted of this one, and one part at a time. The others wait.
    """
    client.wait_for_leave()
    parameter = client.parameters[name]
    client.parameters[name] = parameter = replace(parameter, generation=parameter.generation + 1)

    def give(name: str, blocks: Sequence[Block]) -> Iterator[list[Request]]:
        meta, arrays = {"step": step}, parameter.arrays
        for rows, read in parts:
            values = np.asarray(read(), parameter.element)
            values = values.reshape(arrays, *parameter.of(rows).matrix).swapaxes(0, 1)
            yield client.request(Kind.RESTORE, name, rows, blocks=blocks, values=values, meta=meta, arrays=arrays)

    fill(client, [name], give)

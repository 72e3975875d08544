"""Read and restore what servers hold of a parameter: its values and the state of its rule, at one clock.

To restore, every worker offers its data and the first offer counts, as with first values. The servers' own snapshots
(`snapshot.py`) also hold clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from .store.messages import Kind, given
from .wire.client import Client


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
    client: Client, name: str, parts: Iterable[tuple[slice | None, Callable[[], np.ndarray]]], step: int
) -> None:
    """Have the servers continue from what all `parts` give, as `state_of` does, and from this step of the rule.

    A part is a slice of the rows of a table, or None for the whole parameter, and what reads it. Every worker
    calls this alike. The first call for a row decides, so that updates by workers that have already gone on are not
    undone; nothing is read unless rows are wanted, and one part at a time.
    """
    client.wait_for_leave()
    parameter = client.parameters[name]
    client.parameters[name] = parameter = replace(parameter, generation=parameter.generation + 1)
    if any(reply.step for reply in client.transport.wait(client.describe(name))):
        for rows, read in parts:
            shape = parameter.arrays, *parameter.of(rows).matrix
            values = np.asarray(read(), parameter.element).reshape(shape).swapaxes(0, 1)
            sent = client.request(Kind.RESTORE, name, rows, values=values, meta={"step": step}, arrays=parameter.arrays)
            client.transport.wait(sent)

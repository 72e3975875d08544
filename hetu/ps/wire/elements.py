"""Vectors on servers: a worker sends a function of single elements, and only numbers come back.

The function is written with hetu's operators, anywhere, and travels as plain data (`store/functions.py`). Tables that
it takes together lie together: `Parameter(..., beside="w")`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ...core.errors import ArgumentError
from ...ops.composition import traced
from ..store.messages import Kind, given
from ..store.partition import Block
from .client import Client
from .pending import PendingReply
from .transport import Request


def map_elements(
    client: Client, name: str, function: Callable[..., Any], *beside: str, **scalars: float
) -> PendingReply:
    """Each element x of a parameter becomes `function(x, *y, **scalars)`, with the elements y of parameters beside it.

    Under BSP at the end of this clock, after its pushes, and those of several workers in the order of their ranks;
    otherwise at once. All rows count as updated. One worker asks for it, or the values change once for each.

    >>> import numpy as np
    >>> from hetu.ps import Options, Parameter, ServerProcess
    >>> with ServerProcess(Options(workers=1, token="secret")) as server:
    ...     with Client([server.address], worker=0, token="secret") as client:
    ...         client.create({"y": Parameter((2,)), "x": Parameter((2,), beside="y")},
    ...                       {"y": np.array([1.0, 2.0]), "x": np.array([3.0, 4.0])})
    ...         _ = map_elements(client, "y", lambda y, x, a: y + a * x, "x", a=10.0)
    ...         client.clock().wait()
    ...         client.pull("y").wait().tolist(), sum_elements(client, "y", lambda y, x: y * x, "x").wait()
    ([31.0, 42.0], 261.0)
    """
    return client.ask(Kind.MAP, name, _described(client, name, function, beside, scalars))


def sum_elements(
    client: Client, name: str, function: Callable[..., Any], *beside: str, **scalars: float
) -> PendingReply:
    """The sum of `function` over the elements of a parameter, a float added in float64; as fresh as a pull."""

    def added(requests: list[Request]) -> float:
        return float(sum(given(given(request.reply).values)[0, 0] for request in requests))

    return client.ask(Kind.SUM, name, _described(client, name, function, beside, scalars), added)


def _described(
    client: Client, name: str, function: Callable[..., Any], beside: tuple[str, ...], scalars: Mapping[str, float]
) -> Callable[[Block], dict[str, Any]]:
    """What the server of each block is told."""
    for other in beside:
        if not {name, other} <= client.blocks.keys() or _places(client, name) != _places(client, other):
            fix = f"make it as Parameter(..., beside={name!r})"
            raise ArgumentError(f"{other!r} lies not beside {name!r} on the servers", fix=fix)
    arrays, names = 1 + len(beside), [*scalars]
    made = traced(lambda *x: function(*x[:arrays], **dict(zip(names, x[arrays:]))), arrays, len(names), (1,), {})
    if made.whole:
        raise ArgumentError(f"servers cannot apply this function: {made.whole}", fix="use operators of single elements")
    told = {"function": made.data(), "scalars": [float(number) for number in scalars.values()]}

    def meta(block: Block) -> dict[str, Any]:
        number = client.blocks[name].index(block)
        return {**told, "beside": [client.blocks[other][number].key for other in beside]}

    return meta


def _places(client: Client, name: str) -> list[Block]:
    """Where the blocks of a parameter lie."""
    return [replace(block, key=0) for block in client.blocks[name]]

"""How parameters get their first values: a worker tells the servers what they are, and gives what it is asked for.

Servers ask one worker for what they cannot draw (`store/givers.py`), so values are made, read and sent once, in pieces
of which few are under way; the others wait until all is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...core.errors import ArgumentError, ShapeError
from ...init import law_of
from ..store.first_values import Drawn, FirstValues, Given, data, pieces_of
from ..store.messages import Kind, given, wire_array
from ..store.partition import Block, Parameter
from .pending import settle
from .transport import CREDIT, Request

# A client imports this file, so that none is named here.
Give = Callable[[str, Sequence[Block]], Iterable[list[Request]]]


def checked(name: str, parameter: Parameter, values: np.ndarray | FirstValues) -> FirstValues:
    """First values of the shape of a parameter; of one that grows they must follow a law that servers know."""
    if parameter.grows:
        law = law_of(values, parameter.shape) if callable(values) else None
        first = values if law is None else [Drawn(law, parameter.shape, [0])]
        if not isinstance(first, list | tuple) or len(first) != 1 or first[0].data() is None:
            raise ArgumentError(
                f"first values of {name}, a table without a bound, of which servers draw each row as it comes",
                fix="use an initializer that draws each element alone, of any number of rows: ht.init.normal(), ...",
            )
        return first
    if isinstance(values, list | tuple) and values and isinstance(values[0], Drawn | Given):
        return values
    array = wire_array(values, parameter.element)
    if array.shape != tuple(parameter.shape):
        raise ShapeError(f"{name} is {parameter.shape}, its first value {array.shape}")
    return [Given(lambda: array, array.shape)]


def give_first(client: Any, first: Mapping[str, FirstValues]) -> None:
    """Have the servers draw these first values, or give them."""

    def give(name: str, blocks: Sequence[Block]) -> Iterator[list[Request]]:
        parameter, start = client.parameters[name], 0
        dtype = parameter.element
        for part in (part.made() for part in first[name]):  # one of them is in memory
            if parameter.placed is not None:
                for ids, values in pieces_of(part, start, dtype, range(parameter.shape[0])):
                    order = np.argsort(places := parameter.placed.places[ids])
                    rows = wire_array(values.reshape(len(ids), -1)[order], dtype)
                    yield client.request(Kind.ASSIGN, name, places[order], blocks=blocks, values=rows)
                start += part.shape[0]
            elif parameter.sparse:
                for block in blocks:
                    for places, values in pieces_of(part, start, dtype, block.rows(parameter)):
                        rows = wire_array(values.reshape(len(places), -1), dtype)
                        yield client.request(Kind.ASSIGN, name, block.start + places, blocks=[block], values=rows)
                start += part.shape[0]
            else:
                matrix = wire_array(part.whole(dtype), dtype).reshape(parameter.matrix)
                yield from (client.request(Kind.ASSIGN, name, blocks=[block], values=matrix) for block in blocks)

    for name, parts in first.items():
        if client.parameters[name].grows:
            client.laws[name] = replace(parts[0], shape=(1, client.parameters[name].cols)).data()  # of a row
    fill(client, first, give, first)


def fill(client: Any, names: Iterable[str], give: Give, first: Mapping[str, FirstValues] | None = None) -> None:
    """Tell the servers what these parameters are, send what `give` makes of the blocks that they ask this worker for,
    and wait until they have all others."""

    def tell(name: str, block: Block, turn: str = "ask") -> Request:
        parameter = client.parameters[name]
        spec = parameter.spec(name, block.start, block.stop, block.step, block.first)
        meta: dict[str, Any] = {**spec.meta(), "turn": turn}
        drawable = first if parameter.sparse and parameter.placed is None else None  # or a server lacks the rows' ids
        if parameter.grows:
            meta |= {"law": client.laws[name]}
        elif drawable and (told := data(drawable[name], block.rows(parameter))) is not None:
            meta |= {"draw": told}
        fields = {"key": block.key, "start": block.start, "step": client.step, "meta": meta}
        request: Request = client.transport.submit(block.server, Kind.CREATE, **fields)
        return request

    def send(name: str, blocks: Sequence[Block]) -> None:
        sent = deque[Request]()
        try:
            for requests in give(name, blocks):
                sent += requests
                while len(sent) > 2 * CREDIT * len(client.transport.links):
                    client.transport.wait([sent.popleft()])
            settle(client.transport, sent)
        except BaseException:
            for block in blocks:
                tell(name, block, "pass")  # or the others would wait for this worker
            raise

    asked = [(name, block, tell(name, block)) for name in names for block in client.blocks[name]]
    settle(client.transport, [request for _, _, request in asked])
    for name in dict.fromkeys(name for name, _, request in asked if given(request.reply).step):
        send(name, [block for other, block, request in asked if other == name and given(request.reply).step])
    for name, block, request in asked:
        if given(request.reply).meta is not None:
            waited = tell(name, block, "wait")
            if client.transport.wait([waited])[0].step:
                send(name, [block])

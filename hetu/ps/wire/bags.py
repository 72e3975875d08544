"""Bags of rows that servers sum up: of each bag one row comes, however many it has.

Fewer bytes travel where bags are longer than about two rows and ids are seldom the same; `pull_rows` fetches each
distinct row once. A server is asked for the bags that have rows there, bag by bag, so that few are cut in two; the sums
of several servers are added here. Gradients go as those of rows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from ...core.errors import ShapeError, ValueRangeError
from ..store.messages import Kind, given, row_bytes, wire_array
from ..store.partition import CHUNK
from .client import Client
from .pending import PendingReply


def pull_bags(
    client: Client, name: str, ids: np.ndarray, bags: np.ndarray, count: int, weights: np.ndarray | None = None
) -> PendingReply:
    """The sums of the rows `ids` (entries,) in each of `count` bags, (count, *row); entry e is in bag `bags[e]`.

    Each row counts `weights[e]` times. ShapeError unless these are as many as the ids, ValueRangeError for other bags.

    >>> from hetu.ps import Client, Options, Parameter, ServerProcess
    >>> with ServerProcess(Options(workers=1, token="secret")) as server:
    ...     with Client([server.address], worker=0, token="secret") as client:
    ...         client.create({"t": Parameter((3, 1), sparse=True)}, {"t": np.array([[1.0], [2.0], [4.0]], "f4")})
    ...         pull_bags(client, "t", np.array([2, 0, 2]), np.array([0, 0, 1]), 2).wait().tolist()
    [[5.0], [4.0]]
    """
    parameter, places, bags = client.parameter(name), client.places(name, ids), np.asarray(bags)
    weights = None if weights is None else np.asarray(weights, parameter.element)
    if places.ndim != 1 or bags.shape != places.shape or (weights is not None and weights.shape != places.shape):
        shapes = [places.shape, bags.shape, None if weights is None else weights.shape]
        raise ShapeError(f"ids, bags and weights {shapes} for bags of {name}", fix="give each entry its bag and weight")
    if bags.size and not 0 <= bags.min() <= bags.max() < count:
        raise ValueRangeError(f"bags {bags.min()}..{bags.max()} of {count}", fix="number them from 0")
    blocks, most = client.blocks[name], max(1, CHUNK // row_bytes(parameter.cols, parameter.element))
    lies = np.searchsorted([block.start for block in blocks], places, side="right") - 1  # in which of them
    order, found = np.lexsort((bags, lies)), list[np.ndarray]()
    sent = list[Any]()
    for block, (first, last) in zip(blocks, pairwise(np.searchsorted(lies[order], range(len(blocks) + 1)))):
        for start in range(first, last, most):
            some = order[start : min(start + most, last)]
            some = some[np.argsort(places[some], kind="stable")]
            distinct, numbers = np.unique(bags[some], return_inverse=True)
            found.append(distinct)
            fields: dict[str, Any] = {"key": block.key, "start": block.start, "step": client.step}
            fields |= {"ids": wire_array(places[some] - block.start), "counts": wire_array(numbers, np.dtype("<i8"))}
            fields["values"] = None if weights is None else wire_array(weights[some][:, None])
            sent.append(client.transport.submit(block.server, Kind.POOL, **fields))

    def total(requests: list[Any]) -> np.ndarray:
        sums = np.zeros((count, parameter.cols), parameter.element)
        with np.errstate(all="ignore"):  # what is infinite stays so
            for distinct, request in zip(found, requests):
                sums[distinct] += given(given(request.reply).values)
        return sums.reshape(count, *parameter.shape[1:])

    return PendingReply(client.transport, sent, total)

"""The parameters that a client knows: where their rows lie on servers, and how arrays are laid out to travel there.

What a push loses that travels in fewer bytes is kept, and added to the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ...codec import Feedback, codec
from ...core.errors import ArgumentError, ShapeError, UnknownNameError, ValueRangeError, did_you_mean
from ...ranges import unmasked
from ..store.messages import Kind, wire_array
from ..store.partition import Block, Parameter, sum_by_id


class Coding:
    """How one parameter travels. What rows of a table lose is lost: nobody knows when they are pushed again.

    >>> coding, gradient = Coding(Parameter((3,), push="topk:0.3")), np.array([[1.0, 3.0, 2.0]], "f4")
    >>> [codec("topk:0.3").decode(coding.pushed(0, gradient), 3).tolist() for _ in range(2)]
    [[[0.0, 3.0, 0.0]], [[0.0, 0.0, 4.0]]]
    """

    def __init__(self, parameter: Parameter) -> None:
        self.push, self.pull, self.parameter = codec(parameter.push), codec(parameter.pull), parameter
        self.feedback: dict[int, Feedback] = {}  # of each block of a dense parameter

    def pushed(self, block: int, values: np.ndarray) -> np.ndarray:
        """What travels of rows, or of a block of a dense parameter."""
        if self.push is None:
            return values
        if self.parameter.sparse:
            return self.push.encode(values)
        if block not in self.feedback:
            self.feedback[block] = Feedback(self.push)
        return self.feedback[block].encode(values)

    def pulled(self, kind: Kind, block: Block) -> Callable[[np.ndarray], np.ndarray] | None:
        """What makes numbers of an answer, if that is of bytes."""
        if self.pull is None or kind not in (Kind.PULL, Kind.PUSH_PULL, Kind.SYNC):
            return None
        return partial(
            self.pull.decode, cols=self.parameter.cols if self.parameter.sparse else block.stop - block.start
        )


class ClientTables:
    """What is kept on servers, by name, and its blocks there."""

    def __init__(self) -> None:
        self.parameters: dict[str, Parameter] = {}
        self.blocks: dict[str, list[Block]] = {}

    def parameter(self, name: str, *, whole: bool = False) -> Parameter:
        """What is kept by a name; ArgumentError if all of it is meant and it has no bound."""
        if name not in self.parameters:
            raise UnknownNameError(f"no parameter {name!r}", fix=did_you_mean(name, self.parameters))
        if whole and self.parameters[name].grows:
            raise ArgumentError(f"all rows of {name}, a table without a bound", fix="use pull_rows, or export_rows")
        return self.parameters[name]

    def _flat(self, name: str, gradient: np.ndarray) -> np.ndarray:
        parameter = self.parameter(name)
        if parameter.sparse or np.shape(gradient) != tuple(parameter.shape):
            raise ShapeError(f"a gradient {np.shape(gradient)} for {name} {parameter.shape}", fix="or use push_rows")
        return wire_array(gradient, parameter.element).reshape(1, -1)

    def _ids(self, name: str, ids: np.ndarray) -> np.ndarray:
        parameter, found = self.parameter(name), unmasked(ids, f"ids of {name}")
        if not parameter.sparse or found.dtype.kind not in "iu":
            raise ArgumentError(f"rows {found.dtype} of {name}", fix="pass integer ids of a parameter with sparse=True")
        if found.size and not 0 <= found.min() <= found.max() < parameter.shape[0]:
            got, most = f"ids {found.min()}..{found.max()} of {name}", parameter.shape[0] - 1
            raise ValueRangeError(f"{got}, which has {most + 1} rows", fix=f"use ids from 0 to {most}")
        return found.astype("<i8", copy=False)

    def places(self, name: str, ids: np.ndarray) -> np.ndarray:
        """The places of rows, in the shape of `ids`."""
        return self.parameter(name).places(self._ids(name, ids), len(self.blocks[name]))

    def _unique_rows(self, name: str, ids: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The distinct places of rows, increasing, and the sums of what is at each."""
        parameter, places = self.parameter(name), self.places(name, ids)
        rows = wire_array(rows, parameter.element)
        if rows.shape != (*places.shape, *parameter.shape[1:]):
            raise ShapeError(f"rows {rows.shape} for ids {places.shape} of {name} {parameter.shape}")
        return sum_by_id(places.reshape(-1), [rows.reshape(places.size, parameter.cols)], (parameter.cols,))

    def _buffer(self, name: str, shape: tuple[int, ...], out: np.ndarray | None) -> np.ndarray:
        dtype = self.parameter(name).element
        if out is None:
            return np.empty(shape, dtype)
        if out.shape != tuple(shape) or out.dtype != dtype or not out.flags.c_contiguous:
            raise ShapeError(f"out is {out.dtype}{out.shape}, wanted {dtype}{tuple(shape)}, C-contiguous")
        return out

    def _rows(self, name: str, count: int) -> np.ndarray:
        """Memory for rows of a table."""
        parameter = self.parameters[name]
        return np.empty((count, parameter.cols), parameter.element)

    def _spread(
        self, name: str, shape: tuple[int, ...], found: tuple[np.ndarray, np.ndarray], out: np.ndarray | None
    ) -> np.ndarray:
        """The distinct rows that were `found`, laid out as ids of this shape asked for them."""
        parameter, (rows, inverse) = self.parameters[name], found
        out = self._buffer(name, (*shape, *parameter.shape[1:]), out)
        np.take(rows, inverse.reshape(-1), axis=0, out=out.reshape(inverse.size, parameter.cols), mode="clip")
        return out

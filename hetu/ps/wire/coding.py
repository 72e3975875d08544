"""A worker's side of numbers that travel in fewer bytes: what a push loses is kept, and added to the next one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ...codec import Feedback, codec
from ..store.messages import Kind
from ..store.partition import Block, Parameter


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

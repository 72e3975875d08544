"""What is fed is read where it lies: to copy a large batch takes longer than many a model that is small.

Tables hold addresses, so those in the buffer of a placeholder may as well be changed before a step. Gain: 2.5 times for
a linear regression of 256 rows of 4,096 numbers in inference. Off with `HETU_CC=0`. Left out, and copied into the
buffer: small arrays, other dtypes and strides, and what anything but compiled calls looks at.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..core.kernels import Call
from ..core.memory import Value, types_of
from ..core.op import Role
from .c_calls import CCall, CTable

LEAST = 1 << 15  # bytes that take longer to copy than addresses to change


class Lent:
    """The places in a program's tables of what is fed to a placeholder, whose buffer `copy` fills."""

    def __init__(self, program: Any, name: str, rows: Sequence[tuple[CCall, np.ndarray]]) -> None:
        self.buffer, self.copy = program.feeds[name], program.fills[name]
        self.start = self.buffer.ctypes.data
        self.fed: weakref.ref[np.ndarray] | None = None
        self.places = [
            (block, k, word.ctypes.data - self.start)
            for call, block in rows
            for k, word in enumerate(call.words)
            if isinstance(word, np.ndarray) and np.may_share_memory(word, self.buffer)
        ]
        program.fills[name] = self.fill

    def take(self, array: np.ndarray) -> None:
        """Let the next step read an array of the buffer's shape and dtype, where it lies if it lies as the buffer."""
        if not (array.flags.c_contiguous and array.flags.aligned):
            return self.fill(array)
        self.point(array.ctypes.data)
        self.fed = weakref.ref(array, lambda _: self.point(self.start))  # C reads no memory that is gone

    def fill(self, array: np.ndarray) -> None:
        """Copy an array into the buffer, for whoever looks there."""
        self.copy(array)
        self.point(self.start)

    def settle(self, check: Call) -> None:
        """Copy what is lent into the buffer, for a check that looks there."""
        if self.fed is not None and (array := self.fed()) is not None:
            self.copy(array)
        check()

    def point(self, start: int) -> None:
        self.fed = None
        for block, k, offset in self.places:
            block[k] = start + offset


def lent(program: Any) -> dict[str, Lent]:
    """Where a program reads what is fed to a placeholder, for each that need not lie in its buffer."""
    large = [n for n in program.arrays if n.role is Role.PLACEHOLDER and program.feeds[n.name].nbytes >= LEAST]
    if not large:
        return {}
    tables = [call for call in program.calls if isinstance(call, CTable)]
    blocks = {call: block for table in tables for call, block in zip(table.calls, table.blocks)}
    roots, calls = program.plan.roots, defaultdict[Value, list[Any]](list)
    for step in program.steps:
        for root in {roots[i, slot] for i in step.node.inputs for slot in range(len(types_of(i)))}:
            calls[root] += step.calls
    for node in (*program.fetches, *program.plan.late.values()):
        calls[roots[node, 0]].append(None)  # is looked at when all calls are made
    fit = [n for n in large if all(call in blocks for call in calls[n, 0])]
    made = {n.name: Lent(program, n.name, [(call, blocks[call]) for call in calls[n, 0]]) for n in fit}
    for node in fit:
        for call in calls[node, 0]:
            call.check = call.check and partial(made[node.name].settle, call.check)
    return made

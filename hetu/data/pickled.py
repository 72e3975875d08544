"""The plain data in a pickle, read without running it.

A pickle is a program for a small machine that may call whatever it names. Here the steps that arrays, lists and
dictionaries take are played alone, and what the program would call is only written down: nothing that a file names is
imported, made or called. Left out: every other step, and so most pickles; those of Python 3.
"""

from __future__ import annotations

import math
import os
import pickletools
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..core.errors import DataError
from .formats import PathLike, opened

ARRAY, CSR = "numpy.core.multiarray _reconstruct", "scipy.sparse.csr csr_matrix"
MOST = 1 << 26  # numbers of a dense matrix
LONGEST = 1 << 28  # bytes of a file, unpacked: a few of a packed one can say that there are any number
T = TypeVar("T")


@dataclass
class Called:
    """What a pickle would make: by what name, of what, and what it then puts into it."""

    name: str
    arguments: Any
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)


class PickleMachine:
    """The stack and the memory of a pickle; `play` answers what it ends with."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memory: dict[int, Any] = {}

    def play(self, raw: bytes) -> Any:
        """The data; ValueError for a step that plain data does not take, and others for a damaged file."""
        steps: Iterator[Any] = pickletools.genops(raw)
        for operation, argument, place in steps:
            if operation.name == "STOP":
                return self.stack.pop()
            step = STEPS.get(operation.name)
            if step is None:
                raise ValueError(f"its pickle does {operation.name} at byte {place}, which no published file does")
            step(self, argument)
        raise ValueError("it has no end")

    def marked(self) -> list[Any]:
        """What lies above the last mark, taken from the stack."""
        place = self.marks.pop()
        found, self.stack[place:] = self.stack[place:], []
        return found

    def tuple_of(self, count: int) -> None:
        if count > len(self.stack):
            raise IndexError("it takes more than there is")
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def make(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str):
            raise ValueError("it calls what is no name")
        self.stack.append(Called(name, arguments))

    def build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if not isinstance(made, Called):
            raise ValueError("it changes what it has not made")
        made.state = state

    def set_items(self) -> None:
        pairs, into = self.marked(), self.stack[-1]
        found = into.items if isinstance(into, Called) else into
        if not isinstance(found, dict) or len(pairs) % 2:
            raise ValueError("it fills what is no dictionary")
        if not all(isinstance(key, int | str) for key in pairs[::2]):  # deep tuples could not be looked up
            raise ValueError("it has keys that are neither numbers nor texts")
        found.update(zip(pairs[::2], pairs[1::2]))

    def append(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("it extends what is no list")
        self.stack[-1].extend(values)


def _push(machine: PickleMachine, value: Any) -> None:
    machine.stack.append(value)


def _put(machine: PickleMachine, place: int) -> None:
    machine.memory[place] = machine.stack[-1]


STEPS: dict[str, Callable[[PickleMachine, Any], None]] = {
    "PROTO": lambda machine, number: None,
    **dict.fromkeys(("GLOBAL", "BININT", "BININT1", "BININT2", "BINSTRING", "SHORT_BINSTRING"), _push),
    "NONE": lambda machine, _: _push(machine, None),
    "NEWTRUE": lambda machine, _: _push(machine, True),
    "NEWFALSE": lambda machine, _: _push(machine, False),
    "EMPTY_TUPLE": lambda machine, _: _push(machine, ()),
    "EMPTY_LIST": lambda machine, _: _push(machine, []),
    "EMPTY_DICT": lambda machine, _: _push(machine, {}),
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "TUPLE": lambda machine, _: _push(machine, tuple(machine.marked())),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "APPEND": lambda machine, _: machine.append([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.marked()),
    "SETITEMS": lambda machine, _: machine.set_items(),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda machine, _: machine.make()),
    "BUILD": lambda machine, _: machine.build(),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, place: _push(machine, machine.memory[place])),
}  # fmt: skip


def read_matrix(path: PathLike) -> NDArray[Any]:
    """An array, or a sparse matrix by rows of SciPy as a dense one, of a pickle that Python 2 wrote."""
    return _read(path, lambda data, _: matrix(data))


def read_lists(path: PathLike) -> dict[int, list[int]]:
    """A dictionary of lists of whole numbers, of a pickle that Python 2 wrote."""
    return _read(path, lists)


def is_made(data: Any, name: str) -> bool:
    """Whether a pickle would make this by that name."""
    return isinstance(data, Called) and data.name == name


def _read(path: PathLike, convert: Callable[[Any, int], T]) -> T:
    with opened(path) as stream:
        raw = stream.read(LONGEST + 1)
    try:
        if len(raw) > LONGEST:
            raise ValueError(f"it has more than {LONGEST} bytes")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of strange letters in a damaged name
            return convert(PickleMachine().play(raw), len(raw))
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        told = str(error) if type(error) is ValueError else "it does not hold what it should"
        raise DataError(
            f"{os.fspath(path)} cannot be read: {told:.200}",
            fix="fetch the published file again; other pickles are not read, as these could run code",
        ) from error


def matrix(data: Any) -> NDArray[Any]:
    """What `read_matrix` makes of the data."""
    return dense(data) if is_made(data, CSR) else array(data)


def array(data: Any) -> NDArray[Any]:
    """The array that a pickle would make: numbers of one kind, and as many as its shape says."""
    if not is_made(data, ARRAY):
        raise ValueError("it holds no array")
    _, shape, kind, by_columns, text = data.state
    letters, order = kind.arguments[0], kind.state[1]
    if kind.name != "numpy dtype" or not isinstance(letters, str):  # what else it is may be too long to be shown
        raise ValueError("it holds numbers of no kind")
    if not re.fullmatch("[iuf][1248]", letters) or order not in ("<", ">", "|", "="):
        raise ValueError(f"it holds numbers of the kind {letters!r:.40}")
    dtype, sizes = np.dtype(letters).newbyteorder(order), [int(size) for size in shape]
    raw = text.encode("latin-1")  # as which Python 3 reads bytes of Python 2
    if min(sizes, default=-1) < 0 or math.prod(sizes) * dtype.itemsize != len(raw):
        raise ValueError(f"it holds {len(raw)} bytes of an array of shape {sizes} and kind {letters}")
    found = np.frombuffer(raw, dtype).reshape(sizes, order="F" if by_columns else "C")
    return found.astype(dtype.newbyteorder("="))


def dense(data: Called) -> NDArray[Any]:
    """The matrix of which a pickle has the entries, row by row."""
    rows, columns = (int(size) for size in data.state["_shape"])
    starts, places, values = (array(data.state[name]) for name in ("indptr", "indices", "data"))
    if not (rows >= 0 <= columns and rows * columns <= MOST):
        raise ValueError(f"it says that it has {rows} x {columns} numbers")
    whole = all(a.dtype.kind in "iu" and a.ndim == 1 for a in (starts, places))
    right = whole and starts.shape == (rows + 1,) and starts[0] == 0 and (starts[:-1] <= starts[1:]).all()
    if not right or places.shape != values.shape or starts[-1] != len(places):  # a difference could overflow
        raise ValueError("its rows do not begin where they should")
    if len(places) and not 0 <= places.min() <= places.max() < columns:
        raise ValueError(f"it has columns {places.min()} to {places.max()} of {columns}")
    matrix, counts = np.zeros((rows, columns), values.dtype), (starts[1:] - starts[:-1]).astype(np.int64)
    np.add.at(matrix, (np.repeat(np.arange(rows), counts), places), values)
    return matrix


def lists(data: Any, size: int) -> dict[int, list[int]]:
    """The dictionary that a pickle would make. One list may stand there many times, so all are counted first."""
    found = data.items if is_made(data, "collections defaultdict") else data
    if not isinstance(found, dict) or not all(isinstance(values, list) for values in found.values()):
        raise ValueError("it holds no dictionary of lists")
    if sum(map(len, found.values())) > size:
        raise ValueError("it holds more numbers than bytes")
    if not all(type(n) is int for key, values in found.items() for n in (key, *values)):
        raise ValueError("its lists hold other things than whole numbers")
    return found

"""What travels between a notebook and its ranks: JSON, then one frame for each array.

A value travels if it is a number, text, None, an array of numbers or booleans, a module or what can be imported from
one (by its name), or a list, tuple or dict of these. A function that a cell has defined goes to the ranks as its text.
There is no pickle, so every other object stays where it was made.
"""

from __future__ import annotations

import importlib
import io
import json
import sys
from multiprocessing.connection import Connection
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np

TOKEN, ADDRESS = "HETU_NOTEBOOK_TOKEN", "HETU_NOTEBOOK_ADDRESS"
MOST_BYTES = 1 << 30  # of one frame
PLAIN = (bool, int, float, str, type(None))


class CannotTravel(TypeError):
    """A value that has no form on the wire."""


def pack(value: Any, arrays: list[np.ndarray]) -> Any:
    """`value` as plain data for JSON; its arrays are appended to `arrays`. CannotTravel for any other value.

    >>> pack({"loss": 0.5, "shape": (2, 3)}, [])
    {'dict': [['loss', 0.5], ['shape', {'tuple': [2, 3]}]]}
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, ModuleType):
        return {"module": value.__name__}
    if isinstance(value, type | FunctionType | BuiltinFunctionType) and is_imported(value):
        return {"import": [value.__module__, value.__name__]}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        arrays.append(np.asarray(value))
        return {"array" if isinstance(value, np.ndarray) else "number": len(arrays) - 1}
    if type(value) in (list, tuple):
        return {type(value).__name__: [pack(v, arrays) for v in value]}
    if type(value) is dict and all(type(k) in PLAIN for k in value):
        return {"dict": [[k, pack(v, arrays)] for k, v in value.items()]}
    raise CannotTravel(type(value).__name__)


def is_imported(value: Any) -> bool:
    """Whether a class or function is what its module has under its name; those of the notebook are not."""
    module = sys.modules.get(value.__module__)
    return value.__module__ != "__main__" and getattr(module, value.__name__, None) is value


def unpack(packed: Any, arrays: list[np.ndarray]) -> Any:
    """What `pack` was given."""
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "module":
        return importlib.import_module(content)
    if kind == "import":
        return getattr(importlib.import_module(content[0]), content[1])
    if kind in ("array", "number"):
        return arrays[content] if kind == "array" else arrays[content][()]
    if kind == "dict":
        return {k: unpack(v, arrays) for k, v in content}
    return {"list": list, "tuple": tuple}[kind](unpack(v, arrays) for v in content)


def send(connection: Connection, kind: str, values: dict[str, Any] | None = None, **fields: Any) -> None:
    """One message: its kind, plain fields, and values by name."""
    arrays: list[np.ndarray] = []
    packed = {name: pack(value, arrays) for name, value in (values or {}).items()}
    header = {"kind": kind, "arrays": len(arrays), "values": packed, **fields}
    connection.send_bytes(json.dumps(header).encode())
    for array in arrays:
        frame = io.BytesIO()
        np.save(frame, array, allow_pickle=False)
        connection.send_bytes(frame.getbuffer())


def receive(connection: Connection) -> dict[str, Any]:
    """The next message. EOFError when the other side has gone; OSError for a frame that is too large."""
    header: dict[str, Any] = json.loads(connection.recv_bytes(MOST_BYTES))
    frames = [io.BytesIO(connection.recv_bytes(MOST_BYTES)) for _ in range(header.pop("arrays"))]
    arrays = [np.load(frame, allow_pickle=False) for frame in frames]
    header["values"] = {name: unpack(value, arrays) for name, value in header["values"].items()}
    return header


def travels(value: Any) -> bool:
    """Whether a value can be sent.

    >>> travels([1, 2.5]), travels(object())
    (True, False)
    """
    try:
        pack(value, [])
    except CannotTravel:
        return False
    return True

"""What travels between a notebook and its ranks: any value that `cloudpickle` takes, with what cells have defined.

Functions and classes of a cell go with what they name, and live in the namespace of the other side. A node is the same
node whenever it comes again, and so are its graph and own operators. Executors and connections stay where they were
made. Both ends are processes of one user, joined by a private socket that no other user can open; nothing else in
hetu reads pickles.
"""

from __future__ import annotations

import dis
import importlib
import io
import json
import pickle
import sys
from collections.abc import Iterator, Mapping
from itertools import count
from multiprocessing.connection import Connection
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import cloudpickle

from ...core.graph import OPS, Node, topological
from ...core.leaf import random_state
from ...core.op import TAKEN, Op

TOKEN, ADDRESS = "HETU_NOTEBOOK_TOKEN", "HETU_NOTEBOOK_ADDRESS"
MOST_BYTES = 1 << 30  # of one message
TravelKey = tuple[str, int]


class Traveled:
    """The nodes and own operators that have traveled, by keys that are the same on both sides.

    Ranks that run the same cells give their own the same keys in turn; one that does not fit is taken for another.
    """

    def __init__(self) -> None:
        self.side, self.numbers = "notebook", count()
        self.keys: WeakKeyDictionary[Node | Op[..., Any], TravelKey] = WeakKeyDictionary()
        self.made: WeakValueDictionary[TravelKey, Any] = WeakValueDictionary()
        self.enter(("hetu", 0), random_state)

    def key(self, thing: Node | Op[..., Any]) -> TravelKey:
        if thing not in self.keys:
            self.enter((self.side, next(self.numbers)), thing)
        return self.keys[thing]

    def enter(self, key: TravelKey, thing: Any) -> Any:
        self.keys[thing], self.made[key] = key, thing
        return thing


KNOWN = Traveled()  # of this process


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes graphs by their nodes in order, however deep, and operators by their names."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.written: set[Node] = set()

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Node):
            new = sorted(set(topological([value])) - self.written, key=lambda node: node.serial)
            self.written.update(new)
            return _node, ([_row(node) for node in new], KNOWN.key(value))
        if isinstance(value, Op):
            if value.__module__ != "__main__":
                return _imported, (value.__module__, value.name)
            return _operator, (KNOWN.key(value),), vars(value), None, None, _filled
        if isinstance(value, ModuleType) and value.__name__ in sys.modules:
            return importlib.import_module, (value.__name__,)
        if isinstance(value, MappingProxyType):
            return MappingProxyType, (dict(value),)
        return super().reducer_override(value)


def _row(node: Node) -> tuple[Any, ...]:
    inputs = [KNOWN.key(i) for i in node.inputs]
    return KNOWN.key(node), node.op, inputs, dict(node.attrs), node.type, node.site, dict(node.tags)


def _node(rows: list[tuple[Any, ...]], wanted: TravelKey) -> Node:
    """The node that `wanted` is the key of, and those that it needs; those that are here already stay what they are."""
    held = []  # nothing else holds those that only others need
    for key, op, inputs, attrs, type_, site, tags in rows:
        known = KNOWN.made.get(key)
        if known is None or (known.op.name, known.name, known.type) != (op.name, attrs.get("name", op.name), type_):
            known = Node(op, tuple(KNOWN.made[i] for i in inputs), MappingProxyType(attrs), type_)
            for name, value in (("site", site), ("tags", MappingProxyType(tags))):
                object.__setattr__(known, name, value)
            KNOWN.enter(key, known)
        held.append(known)
    return KNOWN.made[wanted]


def _imported(module: str, name: str) -> Op[..., Any]:
    importlib.import_module(module)
    return OPS[name]


def _operator(key: TravelKey) -> Op[..., Any]:
    """An operator of a cell, to be filled, or the one that has come before."""
    return KNOWN.made.get(key) or KNOWN.enter(key, Op.__new__(Op))


def _filled(made: Op[..., Any], rules: dict[str, Any]) -> None:
    vars(made).update(rules)
    if made.name not in TAKEN:
        OPS[made.name] = made


class Unpickler(pickle.Unpickler):
    """Functions and classes of cells find their names in `names`, and what they come with is entered there."""

    def __init__(self, file: Any, names: dict[str, Any]) -> None:
        super().__init__(file)
        self.names = names

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("cloudpickle.cloudpickle", "_make_function"):
            return self.function
        return super().find_class(module, name)

    def function(self, code: CodeType, given: dict[str, Any], *others: Any) -> FunctionType:
        of_a_cell = given.get("__name__") == "__main__"
        return cloudpickle.cloudpickle._make_function(code, self.names if of_a_cell else given, *others)


def packed(values: Mapping[str, Any]) -> tuple[bytes, dict[str, str]]:
    """Those of `values` that can travel, as bytes, and why the others cannot, by name.

    >>> import threading
    >>> sorted(unpacked(packed({"a": [1.5, lambda: 2]})[0], {})), packed({"lock": threading.Lock()})[1]
    (['a'], {'lock': "cannot pickle '_thread.lock' object"})
    """
    stays: dict[str, str] = {}
    try:
        return _dumped(dict(values)), stays
    except Exception:  # which of them? any kind of error is that of a foreign object
        goes = {}
        for name, value in values.items():
            try:
                _dumped(value)
                goes[name] = value
            except Exception as error:
                stays[name] = str(error).split("\n")[0]
    return _dumped(goes), stays


def _dumped(value: Any) -> bytes:
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def unpacked(data: bytes, names: dict[str, Any]) -> dict[str, Any]:
    """What `packed` was given; functions of cells use `names`."""
    return dict(Unpickler(io.BytesIO(data), names).load()) if data else {}


def send(connection: Connection, kind: str, values: bytes = b"", **fields: Any) -> None:
    """One message: its kind, plain fields, and packed values."""
    header = json.dumps({"kind": kind, **fields}).encode()
    connection.send_bytes(len(header).to_bytes(4, "little") + header + values)


def receive(connection: Connection) -> dict[str, Any]:
    """The next message. EOFError when the other side has gone; OSError for a frame that is too large."""
    message = connection.recv_bytes(MOST_BYTES)
    end = 4 + int.from_bytes(message[:4], "little")
    return {**json.loads(message[4:end]), "values": message[end:]}


def mentioned(value: Any, seen: frozenset[Any] = frozenset()) -> Iterator[str]:
    """The names that code reads: compiled code, or what a cell has defined: a function, a class, an object of one.

    >>> sorted(mentioned(compile("y = [np.sum(x) for x in z]", "", "exec")))
    ['np', 'z']
    """
    if isinstance(value, CodeType):
        yield from (i.argval for i in dis.get_instructions(value) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        for constant in value.co_consts:
            yield from mentioned(constant) if isinstance(constant, CodeType) else ()
    elif getattr(value, "__module__", None) != "__main__":
        return
    elif isinstance(value, FunctionType):
        yield from mentioned(value.__code__)
    elif isinstance(value, type):
        for own in vars(value).values() if value not in seen else ():
            yield from mentioned(own, seen | {value})
    else:
        yield from mentioned(type(value), seen)

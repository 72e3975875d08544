"""The messages between workers and parameter servers: a 56-byte header, then raw frames; nothing is ever unpickled.

A server reads bytes that anyone may have sent, so `decode` checks every field before it is used and builds nothing
but numbers, NumPy views of the received buffers, and one small JSON object. Ignored on purpose: who sent a message
(`session.py`), what it does (`store.py`), and the integrity of the values, which TCP or CURVE looks after.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np

from ..errors import HetuError

Buffer = Any  # bytes, memoryview or a C-contiguous array
MAGIC, VERSION = 0x55544548, 1  # "HETU" in memory
FRAME_LIMIT = 64 << 20  # bytes of one frame of values
META_LIMIT = 64 << 10  # bytes of the JSON object
_FIELDS = struct.Struct("<IBBBBIIqqqqI")  # without the checksum
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
DTYPES = tuple(np.dtype(name) for name in ("<u1", "<f4", "<f8", "<i4", "<i8", "<f2"))
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_COUNT = np.dtype("<i8")


class ProtocolError(HetuError, ValueError):
    """Bytes that are no message of this protocol."""


class RefusedError(HetuError, RuntimeError):
    """A server's refusal of a well-formed message. `code` is one word for programs, such as "clock" or "range"."""

    def __init__(self, code: str, message: str, *, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.code = code


class Kind(IntEnum):
    """What a message asks for or answers."""

    OK = 0
    ERROR = 1
    HELLO = 2  # token and incarnation of a worker; the answer tells epoch, clock and consistency
    CREATE = 3  # a table; the answer's clock field tells how many of its rows still wait for a first value
    ASSIGN = 4  # first values of rows
    PUSH = 5  # gradients or deltas
    PULL = 6  # values
    PUSH_PULL = 7
    SYNC = 8  # of the rows `ids`, those whose version is above `counts` (the cache's check and fetch in one)
    CLOCK = 9  # "I finished this clock"
    CALL = 10  # a server function
    STATUS = 11
    PING = 12  # renews the lease
    LEAVE = 13
    READY = 14  # partial reduce: "group me"
    RATE = 15  # a new learning rate, from this clock on


class Part(IntFlag):
    """The frames after the header, in this order; the header says which are there."""

    IDS = 1  # int64, one a row
    COUNTS = 2  # int64, one a row
    VALUES = 4  # (rows, cols) of the header's dtype
    META = 8  # a JSON object


_ROWS = Part.IDS | Part.VALUES
_NONE = Part(0)
ALLOWED: dict[Kind, tuple[Part, ...]] = {
    Kind.OK: tuple(Part(bits) for bits in range(9)),
    Kind.ERROR: (Part.META,),
    Kind.HELLO: (Part.META,),
    Kind.CREATE: (Part.META,),
    Kind.ASSIGN: (Part.VALUES, _ROWS),
    Kind.PUSH: (Part.VALUES, _ROWS, _ROWS | Part.COUNTS),
    Kind.PULL: (_NONE, Part.IDS),
    Kind.PUSH_PULL: (Part.VALUES, _ROWS),
    Kind.SYNC: (Part.IDS | Part.COUNTS,),
    Kind.CLOCK: (_NONE,),
    Kind.CALL: (Part.META,),
    Kind.STATUS: (_NONE,),
    Kind.PING: (_NONE,),
    Kind.LEAVE: (_NONE,),
    Kind.READY: (_NONE,),
    Kind.RATE: (Part.META,),
}

# The names of the frames by what a header says of them, so that decoding handles no flags.
_KINDS = tuple(Kind)
_LAYOUTS = {
    (int(kind), int(parts)): tuple(str(part.name).lower() for part in Part if part in parts)
    for kind, allowed in ALLOWED.items()
    for parts in allowed
}


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """One request or reply.

    `key` names a table, `worker` the sender (or, in a reply, the receiver), `seq` the request, `step` the worker's
    clock, `epoch` the incarnation of the server. Arrays: ids and counts int64 (rows,), values (rows, cols).

    >>> push = Message(Kind.PUSH, key=3, values=np.ones((2, 4), "float32"), ids=np.array([5, 9]))
    >>> [len(memoryview(frame).cast("B")) for frame in encode(push)]
    [56, 16, 32]
    >>> decode(encode(push)).ids.tolist()
    [5, 9]
    """

    kind: Kind
    key: int = 0
    worker: int = 0
    seq: int = 0
    step: int = 0
    epoch: int = 0
    ids: np.ndarray | None = None
    counts: np.ndarray | None = None
    values: np.ndarray | None = None
    meta: dict[str, Any] | None = None

    @property
    def parts(self) -> int:
        """Which frames there are, as bits of `Part`."""
        present = (self.ids, self.counts, self.values, self.meta)
        return sum(1 << i for i, part in enumerate(present) if part is not None)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.ids, self.counts, self.values) if a is not None)

    def reply(self, kind: Kind = Kind.OK, **fields: Any) -> Message:
        """An answer to this request."""
        return Message(kind, key=self.key, worker=self.worker, seq=self.seq, epoch=self.epoch, **fields)

    def refusal(self, error: HetuError) -> Message:
        code = getattr(error, "code", "value")
        return self.reply(Kind.ERROR, meta={"code": code, "message": error.message[:2000], "fix": error.fix[:2000]})


def encode(message: Message) -> list[Buffer]:
    """Header and frames, ready to be sent without a copy. Arrays must be C-contiguous and of the wire's dtypes."""
    values, rows, cols, dtype = message.values, 0, 0, 0
    if values is not None:
        rows, cols = values.shape
        dtype = _DTYPE_CODES[values.dtype]
    elif message.ids is not None:
        rows = len(message.ids)
    elif message.counts is not None:
        rows = len(message.counts)
    frames: list[Buffer] = [a for a in (message.ids, message.counts, values) if a is not None]
    if message.meta is not None:
        frames.append(json.dumps(message.meta).encode())
    header = _FIELDS.pack(
        MAGIC, VERSION, message.kind, dtype, message.parts, message.key, message.worker, message.seq, message.step,
        rows, cols, message.epoch,
    )  # fmt: skip
    checked = frames if values is None else [f for f in frames if f is not values]
    sent = [f if memoryview(f).nbytes else b"" for f in frames]  # a buffer without bytes cannot be cast
    return [header + _CHECKSUM.pack(_checksum(header, checked)), *sent]


def _checksum(header: Buffer, frames: Sequence[Buffer]) -> int:
    """Over the header and every frame but the values, for which it would cost as much as sending them."""
    total = zlib.crc32(header)
    for frame in frames:
        total = zlib.crc32(frame, total)
    return total


def decode(frames: Sequence[Buffer], limit: int = FRAME_LIMIT) -> Message:
    """The message of these frames; arrays are read-only views of them. ProtocolError for anything out of place."""
    views = [memoryview(frame).cast("B") for frame in frames]
    if not views or views[0].nbytes != HEADER_BYTES:
        raise ProtocolError(f"a header of {views[0].nbytes if views else 0} bytes, wanted {HEADER_BYTES}")
    head, body = views[0], views[1:]
    magic, version, kind, dtype, parts, key, worker, seq, step, rows, cols, epoch = _FIELDS.unpack_from(head)
    if (magic, version) != (MAGIC, VERSION):
        raise ProtocolError(
            f"magic {magic:#x}, version {version}", fix=f"both sides must speak version {VERSION} of this protocol"
        )
    if (kind, parts) not in _LAYOUTS or dtype >= len(DTYPES):
        raise ProtocolError(f"kind {kind} with dtype {dtype} and frames {parts:#x}")
    names = _LAYOUTS[kind, parts]
    sizes = _frame_sizes(names, rows, cols, DTYPES[dtype], limit)
    if len(body) != len(sizes) or any(n is not None and v.nbytes != n for v, n in zip(body, sizes)):
        raise ProtocolError(f"frames of {[v.nbytes for v in body]} bytes, wanted {sizes}")
    found: dict[str, Any] = dict(zip(names, body))
    checked = [view for name, view in found.items() if name != "values"]
    if _checksum(head[: _FIELDS.size], checked) != _CHECKSUM.unpack_from(head, _FIELDS.size)[0]:
        raise ProtocolError("the checksum does not fit")
    if seq < 0 or step < 0:
        raise ProtocolError(f"request {seq} at clock {step}, wanted numbers >= 0")
    for name, view in found.items():
        if name == "meta":
            found[name] = _object(view)
        elif name == "values":
            found[name] = np.frombuffer(view, DTYPES[dtype]).reshape(rows, cols)
        else:
            found[name] = np.frombuffer(view, _COUNT)
    return Message(_KINDS[kind], key, worker, seq, step, epoch, **found)


def _frame_sizes(names: tuple[str, ...], rows: int, cols: int, dtype: np.dtype, limit: int) -> list[int | None]:
    """Bytes wanted of each frame; None where any number up to a limit will do."""
    values = "values" in names
    if rows < 0 or cols < 0 or (cols and not values) or (rows and names in ((), ("meta",))):
        raise ProtocolError(f"{rows} rows of {cols} columns with frames {names}")
    each = {"values": rows * cols * dtype.itemsize, "meta": None}
    wanted = [each.get(name, rows * _COUNT.itemsize) for name in names]
    if any(size is not None and size > limit for size in wanted):
        raise ProtocolError(f"frames of {wanted} bytes, the limit is {limit}", fix="send fewer rows in one message")
    return wanted


def _object(view: memoryview) -> dict[str, Any]:
    if view.nbytes > META_LIMIT:
        raise ProtocolError(f"{view.nbytes} bytes of JSON, the limit is {META_LIMIT}")
    try:
        found = json.loads(bytes(view), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a frame that should be JSON is not") from error
    if not isinstance(found, dict):
        raise ProtocolError(f"JSON of a {type(found).__name__}, wanted an object")
    return found


def _refuse_constant(name: str) -> float:
    raise ProtocolError(f"{name} in JSON")


def wire_array(x: Any, dtype: np.dtype | None = None) -> np.ndarray:
    """`x` as a C-contiguous array of a dtype that the wire carries; ProtocolError when there is none.

    >>> wire_array([1, 2]).dtype.name, wire_array(np.ones((2, 2))[:, 0]).flags.c_contiguous
    ('int64', True)
    """
    made = np.asarray(x, dtype=dtype, order="C")
    made = made.astype(made.dtype.newbyteorder("<"), copy=False)
    if made.dtype not in _DTYPE_CODES:
        names = ", ".join(d.name for d in DTYPES)
        raise ProtocolError(f"{made.dtype} cannot be sent", fix=f"use one of {names}")
    return made


def row_bytes(cols: int, dtype: np.dtype) -> int:
    """Bytes that one row of a table takes on the wire, its id included."""
    return math.prod((cols, dtype.itemsize)) + _COUNT.itemsize

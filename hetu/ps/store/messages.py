"""The messages between workers and parameter servers: a 56-byte header, then raw arrays; nothing is ever unpickled.

A small message is one frame, because every frame costs a few microseconds on each side. Values of more than `INLINE`
bytes are a second frame, which is sent without a copy, or lie in memory that both sides share (`segment.py`). Many ids
and counts are packed (`packing.py`). Anyone may send bytes to a server, so `decode` checks every field before use and
builds only numbers, NumPy arrays, most of them views of the received buffers, and one small JSON object. TCP or CURVE
protects the integrity of the values. `session.py` knows who sent a message, `store.py` what it does.
"""

from __future__ import annotations

import json
import math
import reprlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, IntFlag
from typing import Any, NoReturn, TypeVar

import numpy as np

from ...core.errors import DataError, HetuError
from ...ranges import unmasked
from .packing import PACKED, packed, size, unpacked
from .segment import Segment

Buffer = Any  # bytes, memoryview or a C-contiguous array
T = TypeVar("T")
MAGIC, VERSION = 0x55544548, 4  # "HETU" in memory
FRAME_LIMIT = 64 << 20  # bytes of one frame of values
META_LIMIT = 64 << 10  # bytes of the JSON object
DEEPEST = 8  # levels of the JSON object; a rule has six
LARGEST = 1 << 62  # of the numbers that count requests, clocks and rows: one more is still an int64
INLINE = 64 << 10  # bytes of values that are cheaper to copy than to send apart
_FIELDS = struct.Struct("<IBBBBIIqqqqI")  # without the checksum
_CHECKSUM, _NUMBER = struct.Struct("<I"), struct.Struct("<q")
HEADER = _FIELDS.size  # bytes that tell a request from all others of its sender
_HEADER = struct.Struct(_FIELDS.format + "I")
HEADER_BYTES = _HEADER.size
DTYPES = tuple(np.dtype(name) for name in ("<u1", "<f4", "<f8", "<i4", "<i8", "<f2"))
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_COUNT = np.dtype("<i8")


class ProtocolError(HetuError, ValueError):
    """The bytes are no message of this protocol, or of a `version` of it; `header` is what could be read of one."""

    code, version = "protocol", VERSION
    header: Message | None = None


class NoSegmentError(ProtocolError):
    """A message refers to memory that is not shared with its sender."""

    code = "hello"

    def __init__(self, header: Message) -> None:
        super().__init__(f"slot {header.slot} of memory that is not shared", fix="offer it in a HELLO")
        self.header = header


class RefusedError(HetuError, RuntimeError):
    """A server's refusal of a well-formed message. `code` is one word for programs, such as "clock" or "range"."""

    def __init__(self, code: str, message: str, *, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.code = code


class Kind(IntEnum):
    """What a message asks for, or how it answers."""

    OK = 0
    ERROR = 1
    HELLO = 2  # a worker's life, and the other side's question; the last answer has epoch, clock and consistency
    CREATE = 3  # a table; the answer's clock field is the number of rows that its sender is to give first values
    ASSIGN = 4  # first values of rows
    PUSH = 5  # gradients or deltas
    PULL = 6  # values
    PUSH_PULL = 7
    SYNC = 8  # those of the rows `ids` whose version is above `counts`: a cache's check and fetch in one
    CLOCK = 9  # "I finished this clock"; with {"snapshot": true}: "keep the moment when all have"
    CALL = 10  # a server function
    STATUS = 11
    PING = 12  # renews the lease, as every message does
    LEAVE = 13
    READY = 14  # partial reduce: "group me"
    RATE = 15  # a new learning rate, from this clock on
    SNAPSHOT = 16  # "tell me when the snapshot of this clock is on disk"
    MODE = 17  # the consistency that the job wants, before it makes tables
    STATE = 18  # values and optimizer state of rows, side by side
    RESTORE = 19  # the reverse: what rows are from now on
    MAP = 20  # every element becomes a function of itself, and of those beside it
    SUM = 21  # the sum of such a function
    FREE, EXPORT, POOL = 22, 23, 24  # "I need this table no longer"; rows of one that grows; sums of bags of rows
    REDUCE = 25  # a part of what all workers give in a round; the answer is what is made of all parts


class Part(IntFlag):
    """What follows the header, in this order, except that SLOT comes first; the header says what is there.

    Above the dtype the header holds how wide ids and counts are, as `packing.py` says.
    """

    IDS = 1  # int64, one per row, or packed
    COUNTS = 2  # int64, one per row, or packed
    VALUES = 4  # (rows, cols) of the header's dtype
    META = 8  # a JSON object
    SLOT = 16  # int64: the place in shared memory of the values, or of those of the answer


_ROWS = Part.IDS | Part.VALUES
_NONE = Part(0)
ALLOWED: dict[Kind, tuple[Part, ...]] = {
    Kind.OK: tuple(Part(bits) for bits in range(9)),
    **dict.fromkeys((Kind.LEAVE, Kind.SNAPSHOT, Kind.FREE), (_NONE,)),
    **dict.fromkeys((Kind.ERROR, Kind.HELLO, Kind.CREATE, Kind.MODE, Kind.RATE), (Part.META,)),
    **dict.fromkeys((Kind.CALL, Kind.MAP, Kind.SUM, Kind.EXPORT), (Part.META,)),
    **dict.fromkeys((Kind.CLOCK, Kind.READY), (_NONE, Part.META)),
    **dict.fromkeys((Kind.STATUS, Kind.PING), (_NONE, Part.META)),  # with a proof: no worker sends it, or its heartbeat
    **dict.fromkeys((Kind.PULL, Kind.STATE), (_NONE, Part.IDS)),
    Kind.ASSIGN: (Part.VALUES, _ROWS),
    Kind.PUSH: (Part.VALUES, _ROWS, _ROWS | Part.COUNTS, _ROWS | Part.META, _ROWS | Part.COUNTS | Part.META),
    Kind.PUSH_PULL: (Part.VALUES, _ROWS, _ROWS | Part.META),
    Kind.SYNC: (Part.IDS | Part.COUNTS,),
    Kind.RESTORE: (Part.VALUES | Part.META, _ROWS | Part.META),
    Kind.POOL: (Part.IDS | Part.COUNTS, _ROWS | Part.COUNTS),  # counts: the bag of each row
    Kind.REDUCE: (Part.VALUES | Part.META,),
}
_SHARING = (Kind.ASSIGN, Kind.PUSH, Kind.PULL, Kind.PUSH_PULL, Kind.RESTORE, Kind.POOL, Kind.REDUCE)

# The headers that are allowed, as numbers, so that decoding handles no flags.
_KINDS = tuple(Kind)
LAYOUTS = {(int(kind), int(parts)) for kind, allowed in ALLOWED.items() for parts in allowed}
LAYOUTS |= {(kind, parts | Part.SLOT) for kind, parts in LAYOUTS if kind in _SHARING}
LAYOUTS |= {(kind, parts | Part.SLOT) for kind, parts in LAYOUTS if kind == Kind.OK and parts & Part.VALUES}
_IDS, _COUNTS, _VALUES, _META, _SLOT = (int(part) for part in Part)
_CODES = (0, 3, 12, 15)  # the bits of codes that ids, counts, or both may use


@dataclass(slots=True, eq=False)
class Message:
    """One request or reply.

    `key` names a table, `worker` the sender (or, in a reply, the receiver), `seq` the request, `step` the worker's
    clock, `epoch` the incarnation of the server. Arrays: ids and counts int64 (rows,), values (rows, cols). With a
    `slot` the values lie in shared memory, and `room` holds the free bytes there for the values of the answer.

    >>> push = Message(Kind.PUSH, key=3, values=np.ones((2, 4), "float32"), ids=np.array([5, 9]))
    >>> [len(frame) for frame in encode(push)]
    [104]
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
    slot: int = -1
    room: np.ndarray | None = None
    saved: int = 0  # bytes that its ids and counts took less than they have, once it is encoded or decoded

    @property
    def facts(self) -> dict[str, Any]:
        """The JSON object, empty where there is none."""
        return self.meta or {}

    @property
    def parts(self) -> int:
        """The parts of this message, as bits of `Part`."""
        parts = 0 if self.ids is None else _IDS
        if self.counts is not None:
            parts |= _COUNTS
        if self.values is not None:
            parts |= _VALUES
        if self.meta is not None:
            parts |= _META
        return parts if self.slot < 0 else parts | _SLOT

    @property
    def nbytes(self) -> int:
        nbytes = 0
        for array in (self.ids, self.counts, self.values):
            if array is not None:
                nbytes += array.nbytes
        return nbytes

    def place(self, rows: int, cols: int, dtype: np.dtype) -> np.ndarray:
        """Memory for the values of the answer: where the sender reads them in place, otherwise a new array."""
        nbytes = rows * cols * dtype.itemsize
        if self.room is None or not 0 < nbytes <= self.room.nbytes:
            return np.empty((rows, cols), dtype)
        return self.room[:nbytes].view(dtype).reshape(rows, cols)

    def kept(self) -> Message:
        """This message, to be kept after it is answered: its sender then writes over its slot."""
        return self if self.slot < 0 or self.values is None else replace(self, values=self.values.copy(), slot=-1)

    def reply(self, kind: Kind = Kind.OK, **fields: Any) -> Message:
        """An answer to this request."""
        values = fields.get("values")
        placed = values is not None and self.room is not None and np.may_share_memory(values, self.room)
        slot = self.slot if placed else -1
        return Message(kind, self.key, self.worker, self.seq, epoch=self.epoch, slot=slot, **fields)

    def refusal(self, error: HetuError) -> Message:
        code = getattr(error, "code", "value")
        return self.reply(Kind.ERROR, meta={"code": code, "message": error.message[:2000], "fix": error.fix[:2000]})


def encode(message: Message) -> list[Buffer]:
    """One frame, or two, of which the second is meant to be sent without a copy. Arrays must be C-contiguous and of the
    wire's dtypes; values with a slot must lie there already. RefusedError for what the other side would not read."""
    ids, counts, values = message.ids, message.counts, message.values
    rows, cols, dtype = 0, 0, 0
    inline: Buffer = b""
    apart: list[Buffer] = []
    if values is not None:
        rows, cols = values.shape
        dtype = _DTYPE_CODES[values.dtype]
        if message.slot < 0 and values.nbytes <= INLINE and message.meta is None:
            inline = values
        elif message.slot < 0:
            apart = [values if values.nbytes else b""]  # a buffer without bytes cannot be sent as it is
    elif (listed := counts if ids is None else ids) is not None:
        rows = len(listed)
    checked: list[Buffer] = [part for part in (ids, counts) if part is not None]
    if rows >= PACKED and checked:
        checked, codes = packed(ids, counts)
        dtype |= codes << 4
        message.saved = rows * _COUNT.itemsize * len(checked) - sum(part.nbytes for part in checked)
    header = _FIELDS.pack(
        MAGIC, VERSION, message.kind, dtype, message.parts, message.key, message.worker, message.seq, message.step,
        rows, cols, message.epoch,
    )  # fmt: skip
    if message.slot >= 0:
        checked.insert(0, _NUMBER.pack(message.slot))
    if message.meta is not None:
        checked.append(json.dumps(message.meta).encode())
        _check_sent(message, len(checked[-1]), META_LIMIT)
    total = zlib.crc32(header)
    for part in checked:
        total = zlib.crc32(part, total)
    frames: list[Buffer] = [b"".join((header, _CHECKSUM.pack(total), *checked, inline)), *apart]
    _check_sent(message, len(frames[0]) if values is None else max(len(frames[0]), values.nbytes), FRAME_LIMIT)
    return frames


def _check_sent(message: Message, nbytes: int, limit: int) -> None:
    """Refuse to send what would be dropped on the other side, and be asked for again without end."""
    if nbytes > limit:
        what = "an answer" if message.kind is Kind.OK else f"a {message.kind.name}"
        text = f"{what} of {nbytes} bytes in one part, the limit is {limit}"
        raise RefusedError("size", text, fix="use fewer, or shorter, rows at once")


def decode(frames: Sequence[Buffer], limit: int = FRAME_LIMIT, segment: Segment | None = None) -> Message:
    """The message of these frames. Values are read-only views of them, or of `segment`, the memory shared with the
    sender. ProtocolError for anything out of place."""
    head = memoryview(frames[0]) if frames else memoryview(b"")
    if head.nbytes < HEADER_BYTES:
        raise ProtocolError(f"a header of {head.nbytes} bytes, wanted {HEADER_BYTES}")
    magic, version, kind, dtype, parts, key, worker, seq, step, rows, cols, epoch, checksum = _HEADER.unpack_from(head)
    if magic != MAGIC or version != VERSION:
        raise _foreign(magic, version)
    dtype, codes = dtype & 15, dtype >> 4
    if (kind, parts) not in LAYOUTS or dtype >= len(DTYPES):
        raise ProtocolError(f"kind {kind} with dtype {dtype} and parts {parts:#x}")
    stray = (cols and not parts & _VALUES) or (rows and not parts & ~(_META | _SLOT))
    if stray or min(rows, cols, seq, step) < 0 or seq > LARGEST or step > LARGEST:
        raise ProtocolError(f"{rows} rows of {cols} columns with parts {parts:#x}, request {seq} at clock {step}")
    first = HEADER_BYTES + (_COUNT.itemsize if parts & _SLOT else 0)
    second = first + (size(rows, codes & 3) if parts & _IDS else 0)
    third = second + (size(rows, codes >> 2) if parts & _COUNTS else 0)
    nbytes = rows * cols * DTYPES[dtype].itemsize
    if parts & _SLOT or not parts & _VALUES:
        wanted = [third]
    else:
        wanted = [third + nbytes] if nbytes <= INLINE and not parts & _META else [third, nbytes]
    amiss = codes and (rows * _COUNT.itemsize > limit or codes & ~_CODES[parts & (_IDS | _COUNTS)])
    if amiss or rows > limit or cols > limit:  # of an empty array too, because none could be made
        raise ProtocolError(f"{rows} rows of {cols} columns packed as {codes:#x} ({parts:#x}), the limit is {limit}")
    sizes = [head.nbytes] if len(frames) == 1 else [memoryview(frame).nbytes for frame in frames]
    if sizes != wanted or max(wanted) > limit:
        _check_sizes(sizes, wanted, META_LIMIT if parts & _META else 0, limit)
    total, end = zlib.crc32(head[: _FIELDS.size]), head.nbytes if parts & _META else third
    if checksum != (total if end == HEADER_BYTES else zlib.crc32(head[HEADER_BYTES:end], total)):
        raise ProtocolError("the checksum does not fit")
    message = Message(_KINDS[kind], key, worker, seq, step, epoch)
    if codes:
        message.saved = rows * _COUNT.itemsize * (parts & (_IDS | _COUNTS)).bit_count() - (third - first)
    if parts & _IDS:
        message.ids = unpacked(head, rows, first, codes & 3, steps=True)
    if parts & _COUNTS:
        message.counts = unpacked(head, rows, second, codes >> 2)
    if parts & _META:
        message.meta = _object(head[third:], message)
    source, offset = (head, third) if len(wanted) == 1 else (frames[1], 0)
    if parts & _SLOT:
        message.slot = _NUMBER.unpack_from(head, HEADER_BYTES)[0]
        source, offset = _slotted(message, segment, nbytes), 0
    if parts & _VALUES:
        message.values = np.ndarray((rows, cols), DTYPES[dtype], source, offset)
    return message


def _foreign(magic: int, version: int) -> ProtocolError:
    fix = f"both sides must speak version {VERSION} of this protocol: is one of an older hetu?"
    error = ProtocolError(f"magic {magic:#x}, version {version}", fix=fix)
    error.version = version if magic == MAGIC else VERSION
    return error


def _slotted(message: Message, segment: Segment | None, nbytes: int) -> np.ndarray:
    """The values of a message in shared memory; it gets the room for those of its answer."""
    if segment is None:
        raise NoSegmentError(message)
    found, message.room = segment.read(message.slot, message.seq, nbytes), segment.room(message.slot, message.seq)
    if found is None:
        raise ProtocolError(f"{nbytes} bytes of request {message.seq} in slot {message.slot}, where they are not")
    return found


def _check_sizes(got: list[int], wanted: list[int], more: int, limit: int) -> None:
    """Refuse frames of other sizes; the first may have up to `more` bytes more."""
    if max(wanted) > limit:
        raise ProtocolError(f"frames of {wanted} bytes, the limit is {limit}", fix="send fewer rows in one message")
    if len(got) != len(wanted) or got[1:] != wanted[1:] or not wanted[0] <= got[0] <= wanted[0] + more:
        raise ProtocolError(f"frames of {got} bytes, wanted {wanted}")


def _object(view: memoryview, header: Message) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(bytes(view), parse_float=_finite, parse_constant=_refuse)
        if not isinstance(found, dict):
            raise ProtocolError(f"JSON of a {type(found).__name__}, wanted an object")
        if _is_deep(found):
            raise ProtocolError(f"JSON of more than {DEEPEST} levels")
        return found
    except (ValueError, RecursionError) as error:
        told = error if isinstance(error, ProtocolError) else ProtocolError("a frame that should be JSON is not")
        told.code, told.header = "value", header  # its sender computed the checksum of it, and can be told
        raise told from None


def _is_deep(x: Any, level: int = 0) -> bool:
    """Whether anything lies deeper than any message needs, where others would come to the end of their stack."""
    inside = x.values() if type(x) is dict else x if type(x) is list else ()
    return level > DEEPEST or any(_is_deep(each, level + 1) for each in inside)


def _refuse(number: str) -> NoReturn:
    raise ProtocolError(f"{number[:40]} in JSON", fix="send finite numbers")


def _finite(text: str) -> float:
    return number if abs(number := float(text)) < math.inf else _refuse(text)


def given(part: T | None) -> T:
    """A part that every message of its kind has, as `ALLOWED` says."""
    if part is None:
        raise ProtocolError("a message without a part that its kind needs")
    return part


def wire_array(x: Any, dtype: np.dtype | None = None) -> np.ndarray:
    """`x` as a C-contiguous array of a dtype that the wire carries; ProtocolError if it is none.

    >>> wire_array([1, 2]).dtype.name, wire_array(np.ones((2, 2))[:, 0]).flags.c_contiguous
    ('int64', True)
    """
    if type(x) is np.ndarray and x.dtype in _DTYPE_CODES and x.dtype == (dtype or x.dtype) and x.flags.c_contiguous:
        return x  # the general way is slow
    try:
        made = np.asarray(unmasked(x, "numbers to send"), dtype=dtype, order="C")
    except DataError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        text = f"{reprlib.repr(x)} is no array of {dtype or 'numbers'}: {error}"
        raise ProtocolError(text, fix="pass numbers, in rows of one length") from error
    made = made.astype(made.dtype.newbyteorder("<"), copy=False)
    if made.dtype not in _DTYPE_CODES:
        names = ", ".join(d.name for d in DTYPES)
        raise ProtocolError(f"{made.dtype} cannot be sent", fix=f"use one of {names}")
    return made


def row_bytes(cols: int, dtype: np.dtype) -> int:
    """Bytes of one row of a table on the wire, including its id."""
    return cols * dtype.itemsize + _COUNT.itemsize

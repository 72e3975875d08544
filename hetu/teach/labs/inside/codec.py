"""Plain data as bytes: numbers, texts, lists, tuples, dicts and NumPy arrays, and nothing that could run.

A frame is eight bytes of length, then a value; a value is a letter, then its content. Lengths are checked before memory
is taken, so that what a hostile process writes costs no more than was agreed on. Left out: complex numbers and sets.
"""

from __future__ import annotations

import math
import struct
from typing import IO, Any

import numpy as np

LIMIT = 16 << 20  # bytes in a frame; as objects they take some eight times that
DEPTH = 40  # lists in lists
DIGITS = 512  # bytes of a whole number
AXES = 16
VALUES = 500_000  # in a frame: to read that many takes a second
KEYS = 10_000  # in all dicts of a frame: whoever chooses keys of one hash makes each cost as much as all before it
DTYPES = {
    np.dtype(name).str[1:]: np.dtype(name).newbyteorder("<")
    for name in "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
}


class NotPlain(TypeError):
    """A value that cannot be handed over, told in words."""


def encode(value: Any) -> bytes:
    """The bytes of a value. NotPlain for what is no plain data, or too much of it.

    >>> decode(encode({"a": [1, 2.5, None], "b": (True, "x")}))
    {'a': [1, 2.5, None], 'b': (True, 'x')}
    >>> encode({1, 2})
    Traceback (most recent call last):
    hetu.teach.labs.inside.codec.NotPlain: a set cannot be handed over: ...
    """
    parts: list[bytes] = []
    _put(value, parts, 0)
    if (size := sum(map(len, parts))) > LIMIT:
        raise NotPlain(f"{size:,} bytes are too many to hand over: at most {LIMIT:,}")
    return b"".join(parts)


def _put(value: Any, parts: list[bytes], depth: int) -> None:
    if len(parts) > VALUES:
        raise NotPlain(f"more than {VALUES:,} values cannot be handed over: use an array")
    if depth > DEPTH:
        raise NotPlain(f"lists in lists more than {DEPTH} deep cannot be handed over")
    if value is None or value is True or value is False:
        parts.append(b"N" if value is None else b"T" if value else b"F")
    elif isinstance(value, (np.ndarray, np.generic)):
        _put_array(np.asarray(value), parts)
    elif isinstance(value, int):
        size = value.bit_length() // 8 + 1
        if size > DIGITS:
            raise NotPlain(f"a whole number of {size} bytes cannot be handed over: at most {DIGITS}")
        parts.append(b"I" + struct.pack("<I", size) + int(value).to_bytes(size, "little", signed=True))
    elif isinstance(value, float):
        parts.append(b"D" + struct.pack("<d", value))
    elif isinstance(value, str):
        text = str(value).encode("utf-8", "replace")
        parts.append(b"S" + struct.pack("<I", len(text)) + text)
    elif isinstance(value, (list, tuple)):
        parts.append((b"L" if isinstance(value, list) else b"U") + struct.pack("<I", len(value)))
        for item in value:
            _put(item, parts, depth + 1)
    elif isinstance(value, dict):
        if len(value) > KEYS:
            raise NotPlain(f"a dict of more than {KEYS:,} keys cannot be handed over")
        parts.append(b"M" + struct.pack("<I", len(value)))
        for key, item in value.items():
            _put(key, parts, depth + 1)
            _put(item, parts, depth + 1)
    else:
        raise NotPlain(
            f"a {type(value).__name__} cannot be handed over: numbers, texts, lists, tuples, dicts and arrays can"
        )


def _put_array(array: np.ndarray, parts: list[bytes]) -> None:
    name = array.dtype.str[1:]
    if name not in DTYPES or array.ndim > AXES or array.nbytes > LIMIT:
        raise NotPlain(f"an array of {array.dtype} and shape {array.shape} cannot be handed over")
    head = name.encode() + bytes([array.ndim]) + struct.pack(f"<{array.ndim}Q", *array.shape)
    parts.append(b"A" + bytes([len(name)]) + head)
    parts.append(np.ascontiguousarray(array, DTYPES[name]).tobytes())


def decode(data: bytes) -> Any:
    """The value of bytes. ValueError when they are no value, or promise more than they hold."""
    reader = _Reader(data)
    value = reader.value(0)
    if reader.at != len(data):
        raise ValueError("bytes are left behind the value")
    return value


class _Reader:
    """Takes values from bytes; each length is compared with what is left."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.values, self.keys = data, 0, 0, 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise ValueError("a length is larger than what is there")
        self.at += size
        return self.data[self.at - size : self.at]

    def count(self) -> int:
        """How many items follow; each takes a byte at least."""
        (number,) = struct.unpack("<I", self.take(4))
        if number > len(self.data) - self.at:
            raise ValueError("a length is larger than what is there")
        return int(number)

    def value(self, depth: int) -> Any:
        kind = self.take(1)
        self.values += 1
        if depth > DEPTH or self.values > VALUES:
            raise ValueError("too deep, or too many values")
        match kind:
            case b"N" | b"T" | b"F":
                return {b"N": None, b"T": True, b"F": False}[kind]
            case b"I":
                if (size := self.count()) > DIGITS:
                    raise ValueError("a number is too long")
                return int.from_bytes(self.take(size), "little", signed=True)
            case b"D":
                return struct.unpack("<d", self.take(8))[0]
            case b"S":
                return self.take(self.count()).decode("utf-8")
            case b"L" | b"U":
                items = [self.value(depth + 1) for _ in range(self.count())]
                return items if kind == b"L" else tuple(items)
            case b"M":
                return dict(self.pair(depth + 1) for _ in range(self.count()))
            case b"A":
                return self.array()
        raise ValueError(f"no value begins with {kind!r}")

    def pair(self, depth: int) -> tuple[Any, Any]:
        self.keys += 1
        if self.keys > KEYS:
            raise ValueError("too many keys")
        key, item = self.value(depth), self.value(depth)
        try:
            hash(key)
        except TypeError:
            raise ValueError("a key is a list, a dict or an array") from None
        return key, item

    def array(self) -> np.ndarray:
        name = self.take(self.take(1)[0]).decode("ascii")
        if name not in DTYPES:
            raise ValueError("an array of an unknown kind")
        axes = self.take(1)[0]
        if axes > AXES:
            raise ValueError("an array has too many axes")
        shape = struct.unpack(f"<{axes}Q", self.take(8 * axes))
        size = DTYPES[name].itemsize * math.prod(shape)
        raw = np.frombuffer(self.take(size), np.uint8)
        return raw.view(DTYPES[name]).reshape(shape).copy()


def send(file: IO[bytes], value: Any) -> None:
    """Write a frame."""
    data = encode(value)
    file.write(struct.pack("<Q", len(data)) + data)
    file.flush()


def receive(file: IO[bytes]) -> Any:
    """Read a frame: EOFError when the other side has ended, ValueError when it is none."""
    (size,) = struct.unpack("<Q", _exactly(file, 8))
    if size > LIMIT:
        raise ValueError(f"a frame of {size:,} bytes, where {LIMIT:,} are allowed")
    return decode(_exactly(file, size))


def _exactly(file: IO[bytes], size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = file.read(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError("the other side has ended")
        data += piece
    return bytes(data)

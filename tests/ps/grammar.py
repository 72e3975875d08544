"""Messages that a server's grammar allows, and what becomes of them at and beyond the limits of each field.

They are made from the tables of the protocol (`ALLOWED`, `LAYOUTS`, `FACTS`), so a new kind or field joins by itself.
Sizes and checksums are right again after every change, so that a server reads on to the field that was changed.
"""

from __future__ import annotations

import copy
import json
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hetu.core.graph import OPS
from hetu.ops.composition import traced
from hetu.ps.store.door import FACTS
from hetu.ps.store.messages import DTYPES, LAYOUTS, VERSION, Kind, Part
from hetu.ps.store.packing import WIDTHS
from hetu.ps.store.segment import ROOM_BYTES, SLOTS, Segment
from hetu.ps.wire.handshake import proof

from .simulation import COLS, DENSE, GROWING, GROWS, LAW, SPARSE

FORMAT = struct.Struct("<IBBBBIIqqqqI")
NAMES = ("magic", "version", "kind", "dtype", "parts", "key", "worker", "seq", "step", "rows", "cols", "epoch")
BYTE = (0, 1, 2, 3, 5, 6, 7, 8, 15, 16, 19, 20, 31, 127, 128, 255)
WORD = (0, 1, 2, 3, 1 << 31, (1 << 31) - 1, (1 << 32) - 1)
LONG = (0, 1, -1, 2, 5, 6, 7, 1 << 16, 1 << 26, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 61, 1 << 62, (1 << 63) - 1,
        -(1 << 31), -(1 << 63))  # fmt: skip
LIMITS = {name: {"I": WORD, "B": BYTE, "q": LONG}[code] for name, code in zip(NAMES, FORMAT.format[1:])}
FLOATS = (0.0, -0.0, 1.0, float("nan"), float("inf"), float("-inf"), 6e4, 3e38, 1e-45)
# As text, because what no JSON may hold is among it.
JSON = (*map(str, LONG), str(1 << 63), str(1 << 64), str(-(1 << 63) - 1), "1" * 400, "1" * 5000, "0.5", "-0.5", "1e308",
        "1e29", "1e999", "-1e999", "NaN", "Infinity", "-Infinity", "null", "true", "false", "[]", "{}", '""', '"x"',
        '"\\ud800"', '"\\u0000"', '"ssp:3"', '"ssp:' + "9" * 5000 + '"', '"' + "x" * 60_000 + '"',
        "[" * 900 + "]" * 900, '{"a": ' * 900 + "1" + "}" * 900, "[1, 2]", '[["multiply", [0, 0], {}]]',
        '{"k": 1}', "[[0], 1]",
        *(f'"{dtype.name}"' for dtype in DTYPES), '"complex64"', '"object"', '"add"', '"sum"', '"adam"')  # fmt: skip
RULE = {"name": "momentum", **OPS["momentum"].update.composition((1, 1), {**OPS["momentum"].defaults}).data()}
TOKEN, SECRET = "token", "what a server asks follows from it"
ASKED = proof(SECRET, b"p0".hex())
PROOFS = {Kind.HELLO: (ASKED, 0, 100), Kind.STATUS: (ASKED, 0, 0), Kind.PING: ("alive", 0, 100)}
SAMPLES = {
    "asked": ASKED, "incarnation": 100, "first": 1, "name": "new", "rows": 2, "cols": 2, "dtype": "float32",
    "rule": RULE, "options": {"learning_rate": 0.5}, "reduce": "mean", "function": "top_k",
    "arguments": {"k": 1, "column": 0}, "rate": 0.5, "consistency": "bsp", "generation": 1, "parts": 1, "turn": "wait",
    "joined": [["a", 1]], "placed": 5,
    "draw": {"rows": [1, 5, 2], "parts": [
        {"law": "normal", "numbers": [0, 1.0], "rows": r, "seed": [1]} for r in (2, 3)]},
    "grows": {}, "law": {}, "most": 5, "bags": 5,
    "push": "int8", "pull": "float16", "at_rest": "int8", "seed": 7, "group": 2, "beside": [SPARSE], "scalars": [0.5],
}  # fmt: skip
OF_ELEMENTS = traced(lambda x, y, a: x + a * y, 2, 1, (1,), {}).data()  # a function with a scalar
Change = tuple[str, Callable[["Draft"], None]]


class Raw(str):
    """Text that stands in the JSON as it is."""


@dataclass
class Draft:
    """A message before it is bytes; `forged` fields of its header are not those that follow from it."""

    kind: Kind
    parts: int
    key: int
    cols: int
    ids: list[int]
    counts: list[int]
    values: np.ndarray
    meta: dict[str, Any]
    slot: int = 1
    seq: int = 0
    step: int = 0
    code: int = 0  # of the `WIDTHS` of ids and counts
    forged: dict[str, int] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)

    def frames(self, segment: Segment | None) -> list[bytes]:
        """Its bytes, with the values in `segment` where it says so."""
        has = [bool(self.parts & part) for part in Part]
        rows = len(self.values) if has[2] else len(self.ids) if has[0] else 0
        if has[0] and has[2]:
            rows = len(self.ids)
            self.values = np.resize(self.values, (rows, self.values.shape[1]))
        values = np.ascontiguousarray(self.values)
        dtype = (DTYPES.index(values.dtype) if has[2] else 0) | self.code * (has[0] + 4 * has[1]) << 4
        plain = {"magic": 0x55544548, "version": VERSION, "kind": self.kind, "parts": self.parts, "key": self.key,
                 "worker": 0, "dtype": dtype, "seq": self.seq, "step": self.step,
                 "rows": rows, "cols": values.shape[1] if has[2] else 0, "epoch": 1}  # fmt: skip
        header = {**plain, **self.forged}
        packed = FORMAT.pack(*(header[name] for name in NAMES))
        body = struct.pack("<q", self.slot) if has[4] else b""
        for there, numbers in ((has[0], self.ids), (has[1], np.resize(self.counts or [1], rows))):
            body += _numbers(np.array(numbers, "<i8"), self.code, steps=numbers is self.ids) if there else b""
        body += _text(self.meta).encode() if has[3] else b""
        if has[4] and has[2] and segment is not None and 0 <= self.slot < SLOTS and values.nbytes <= ROOM_BYTES:
            segment.fill(self.slot, self.seq, values)
        apart = [values.tobytes()] if has[2] and not has[4] else []
        if apart and not has[3] and len(apart[0]) <= 64 << 10:
            body, apart = body + apart[0], []
        forged, rows, codes = header["parts"], max(0, header["rows"]), header["dtype"] >> 4
        end = 8 * bool(forged & Part.SLOT)
        end += sum(_size(rows, code) for part, code in ((1, codes & 3), (2, codes >> 2)) if forged & part)
        checked = body if forged & Part.META else body[:end]
        total = zlib.crc32(checked, zlib.crc32(packed))
        return [packed + struct.pack("<I", total) + body, *apart]


def _size(rows: int, code: int) -> int:
    """Bytes of so many ids or counts."""
    return 8 + -(-rows * WIDTHS[code] // 8) * 8 if code else 8 * rows


def _numbers(numbers: np.ndarray, code: int, *, steps: bool) -> bytes:
    """Ids, as steps, or counts, in bytes of this code, whether or not they hold them."""
    if not code:
        return numbers.tobytes()
    base = numbers[:1] if steps or not len(numbers) else numbers.min(keepdims=True)
    above = np.diff(numbers, prepend=base) if steps else numbers - base
    packed = base.tobytes().ljust(8, b"\0") + above.astype(f"<u{WIDTHS[code]}").tobytes()
    return packed.ljust(_size(len(numbers), code), b"\0")


def _text(x: Any) -> str:
    """`x` as JSON, with `Raw` text as it is."""
    if isinstance(x, Raw):
        return str(x)
    if isinstance(x, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))}: {_text(v)}" for k, v in x.items()) + "}"
    return "[" + ", ".join(map(_text, x)) + "]" if isinstance(x, list | tuple) else json.dumps(x)


def _sample(name: str, types: tuple[type, ...]) -> Any:
    plain = {str: "x", int: 0, float: 0.5, bool: True, dict: OF_ELEMENTS, list: [1, 2]}
    sample = SAMPLES.get(name)
    return copy.deepcopy(sample if isinstance(sample, types) else plain[types[0]])


def drafts() -> list[Draft]:
    """A message of each kind and layout, which a server takes, on either table; some are empty."""
    found = []
    for kind, parts in sorted(LAYOUTS):
        facts = {name: _sample(name, fact.types) for name, fact in FACTS.get(kind, {}).items()}
        facts |= {"proof": proof(TOKEN, *PROOFS[kind])} if kind in PROOFS else {}
        for rows, code in ((rows, code) for rows in (2, 0) for code in range(len(WIDTHS) if parts & 3 else 1)):
            sparse = bool(parts & Part.IDS) or not parts & Part.VALUES
            width = 1 if kind == Kind.POOL else (COLS if sparse else 8) * (2 if kind == Kind.RESTORE else 1)
            values = np.ones((rows if sparse else 1, width), "<f4") if rows or sparse else np.ones((0, width), "<f4")
            key = {Kind.CREATE: 9, Kind.EXPORT: GROWING}.get(kind, SPARSE if sparse else DENSE)
            counts = [[1, 2], [0, 1]][kind == Kind.POOL][:rows]
            draft = Draft(Kind(kind), parts, key, COLS, [1, 4][:rows], counts, values, facts, code=code)
            found += [draft, replace(draft, key=GROWING)] if parts & Part.IDS and rows and not code else [draft]
        if kind == Kind.CREATE:
            grows = {"grows": GROWS | {"after": 2, "chance": 0.5}, "law": LAW, "at_rest": ""}
            found.append(replace(found[-1], meta={k: v for k, v in facts.items() if k != "draw"} | grows))
    return found


def changes(draft: Draft) -> Iterator[Change]:
    """Every field of a message, at and beyond its limits."""

    def setter(place: str, key: Any, value: Any) -> Change:
        def change(d: Draft) -> None:
            d.forged[key] = value

        return f"{place} {key} = {value}", change

    for name in NAMES:
        yield from (setter("header", name, value) for value in LIMITS[name])
    yield from ((f"{name} = {v}", lambda d, n=name, v=v: setattr(d, n, v)) for name in ("slot",) for v in LONG)
    if draft.parts & (Part.IDS | Part.COUNTS):
        yield from (_number(name, place, v) for name in ("ids", "counts") for place in (0, -1) for v in LONG)
        yield "many ids", lambda d: setattr(d, "ids", list(range(3 * len(d.ids))))
        yield "ids in disorder", lambda d: d.ids.reverse()
    if draft.parts & Part.VALUES:
        yield from ((f"values are {v}", lambda d, v=v: np.copyto(d.values, np.float64(v), "unsafe")) for v in FLOATS)
        yield from ((f"values of {t}", lambda d, t=t: setattr(d, "values", d.values.astype(t))) for t in DTYPES)
        yield from (_shape(r, c) for r in (0, 1, 2, 3, 700) for c in (0, 1, 2, 4, 8, 9, 200))
    if draft.parts & Part.META:
        yield from _meta_changes(draft.meta)


def _number(name: str, place: int, value: int) -> Change:
    def change(d: Draft) -> None:
        if numbers := getattr(d, name):
            numbers[place] = value

    return f"{name}[{place}] = {value}", change


def _shape(rows: int, cols: int) -> Change:
    return f"values {rows} x {cols}", lambda d: setattr(
        d, "values", np.resize(np.ones(1, d.values.dtype), (rows, cols))
    )


def _meta_changes(meta: dict[str, Any]) -> Iterator[Change]:
    """Every node of a JSON tree replaced by each of `JSON`, or left out; and a field that nobody knows."""

    def at(path: tuple[Any, ...], value: str | None) -> Change:
        def change(d: Draft) -> None:
            here: Any = d.meta
            for step in path[:-1]:
                if isinstance(here, Raw) or not isinstance(here, dict | list) or not _holds(here, step):
                    return
                here = here[step]
            if not isinstance(here, dict | list) or not (_holds(here, path[-1]) or isinstance(here, dict)):
                return
            if value is None:
                here.pop(path[-1]) if _holds(here, path[-1]) else None
            else:
                here[path[-1]] = Raw(value)

        return f"meta {'.'.join(map(str, path))} = {value}"[:200], change

    yield from (at(("unknown",), value) for value in JSON)
    for path in _paths(meta):
        yield from (at(path, value) for value in (*JSON, None))


def _holds(here: Any, step: Any) -> bool:
    return step in here if isinstance(here, dict) else isinstance(step, int) and -len(here) <= step < len(here)


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    steps = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for step, inner in steps:
        yield from _paths(inner, (*path, step))


class Grammar:
    """All single changes of all messages, and any number of drawn ones with up to three."""

    def __init__(self) -> None:
        self.bases = [(draft, list(changes(draft))) for draft in drafts()]
        self.singles = [(n, change) for n, (_, found) in enumerate(self.bases) for change in (None, *found)]

    def single(self, number: int) -> Draft:
        base, change = self.singles[number]
        return self._made(base, [] if change is None else [change])

    def drawn(self, rng: random.Random) -> Draft:
        base = rng.randrange(len(self.bases))
        return self._made(base, rng.choices(self.bases[base][1], k=rng.randrange(1, 4)))

    def _made(self, base: int, chosen: list[Change]) -> Draft:
        draft = self.bases[base][0]
        made = copy.copy(draft)
        made.ids, made.counts, made.values = [*draft.ids], [*draft.counts], draft.values.copy()
        made.meta, made.forged, made.changes = copy.deepcopy(draft.meta), {}, [name for name, _ in chosen]
        with np.errstate(all="ignore"):
            for _, change in chosen:
                change(made)
        return made

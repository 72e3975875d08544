"""Messages survive the wire as they are; what is malformed, truncated, mutated or foreign changes nothing."""

from __future__ import annotations

import random
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu.ps import ASP, BSP
from hetu.ps.store.messages import (
    ALLOWED,
    DTYPES,
    HEADER_BYTES,
    INLINE,
    Kind,
    Message,
    Part,
    ProtocolError,
    decode,
    encode,
    wire_array,
)
from hetu.ps.store.packing import PACKED
from hetu.ps.wire.handshake import proof
from hetu.ps.wire.session import Sessions

from .simulation import COLS, DENSE, ROWS, SPARSE, contents, greeting, new_store

TOKEN = "token"


def raw(message: Message) -> list[bytes]:
    return [bytes(memoryview(frame).cast("B")) for frame in encode(message)]


def sample(kind: Kind, parts: Part, rows: int = 3, cols: int = 2, dtype: str = "float32") -> Message:
    return Message(
        kind, key=7, worker=1, seq=5, step=2, epoch=9,
        ids=np.arange(rows) if Part.IDS in parts else None,
        counts=np.arange(rows) + 1 if Part.COUNTS in parts else None,
        values=np.arange(rows * cols, dtype=dtype).reshape(rows, cols) if Part.VALUES in parts else None,
        meta={"a": [1, "ü"]} if Part.META in parts else None,
    )  # fmt: skip


@pytest.mark.parametrize("kind", Kind, ids=lambda k: k.name)
def test_messages_cross_the_wire_unchanged(kind):
    for parts in ALLOWED[kind]:
        sent = sample(kind, parts)
        got = decode(raw(sent))
        for name in ("kind", "key", "worker", "seq", "step", "epoch", "meta", "parts"):
            assert getattr(got, name) == getattr(sent, name)
        for name in ("ids", "counts", "values"):
            np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))


FARTHEST = 1 << 62
NUMBERS = [
    ("a byte", np.arange(1000) * 255, 1), ("beyond a byte", np.arange(1000) * 256, 2),
    ("two bytes", np.arange(1000) + 65_535 * (np.arange(1000) > 7), 4), ("four", np.arange(1000) * ((1 << 32) - 1), 4),
    ("beyond four", np.arange(1000) << 32, 8), ("falling", -np.arange(1000), 8), ("few", np.arange(PACKED - 1), 8),
    ("far below zero", np.arange(1000) - FARTHEST, 1), ("apart", np.array([-FARTHEST, FARTHEST] * 50), 8),
]  # fmt: skip


@pytest.mark.parametrize(("numbers", "width"), [row[1:] for row in NUMBERS], ids=[row[0] for row in NUMBERS])
def test_ids_travel_in_as_few_bytes_as_their_steps_need_and_values_lie_aligned(numbers, width):
    ids = numbers.astype("<i8")
    for counts in (None, np.where(ids % 2, 1 << 40, (1 << 40) + 255)):
        frames = raw(Message(Kind.PUSH, ids=ids, counts=counts, values=np.ones((len(ids), 1), "f")))
        got = decode(frames)
        np.testing.assert_array_equal(got.ids, ids)
        np.testing.assert_array_equal(got.counts, counts)
        sizes = [width] if counts is None else [width, 8 if len(ids) < PACKED else 1]
        room = sum(8 * (len(ids) if size == 8 else 1 - -len(ids) * size // 8) for size in sizes)
        assert len(frames[0]) == HEADER_BYTES + room + 4 * len(ids) and got.values.flags.aligned


def test_packed_numbers_take_no_more_memory_than_others_could():
    frames = raw(Message(Kind.PULL, ids=np.arange(1000)))
    assert len(frames[0]) < 1100 and len(decode(frames, limit=8000).ids) == 1000
    with pytest.raises(ProtocolError, match="packed"):
        decode(frames, limit=7999)


@pytest.mark.parametrize("dtype", [d.name for d in DTYPES])
@pytest.mark.parametrize(("rows", "cols"), [(3, 2), (0, 4), (2, 0), (0, 0)])
def test_dtypes_and_empty_values(dtype, rows, cols):
    got = decode(raw(sample(Kind.PUSH, Part.VALUES, rows, cols, dtype)))
    assert (got.values.dtype.name, got.values.shape) == (dtype, (rows, cols))
    assert not got.values.flags.writeable


FIELDS = "<IBBBBIIqqqqI"
NAMES = ["magic", "version", "kind", "dtype", "parts", "key", "worker", "seq", "step", "rows", "cols", "epoch"]
PLACES = {name: i for i, name in enumerate(NAMES)}


def covered(frames: list[bytes]) -> int:
    """The bytes of the first frame that the checksum covers: all but the values."""
    values = decode(frames).values
    return len(frames[0]) - (0 if values is None or len(frames) == 2 else values.nbytes)


def forged(frames: list[bytes], **fields: int) -> list[bytes]:
    """The message with header fields changed and the checksum put right again."""
    values = list(struct.unpack_from(FIELDS, frames[0]))
    for name, value in fields.items():
        values[PLACES[name]] = value
    header = struct.pack(FIELDS, *values)
    body = frames[0][HEADER_BYTES:]
    total = zlib.crc32(body[: covered(frames) - HEADER_BYTES], zlib.crc32(header))
    return [header + struct.pack("<I", total) + body, *frames[1:]]


BAD_FIELDS = [
    {"magic": 1}, {"version": 1}, {"kind": 200}, {"kind": len(Kind)}, {"dtype": 6}, {"parts": 255}, {"parts": 1},
    {"rows": -1}, {"cols": -1}, {"rows": 4}, {"cols": 3}, {"rows": 1 << 62, "cols": 1 << 62}, {"rows": 6, "cols": 1},
    {"seq": -1}, {"step": -1}, {"seq": (1 << 63) - 1}, {"step": (1 << 63) - 1},
    {"rows": 0, "cols": 1 << 62}, {"dtype": 2}, {"kind": Kind.CLOCK}, {"dtype": 1 | 1 << 4}, {"dtype": 1 | 1 << 6},
]  # fmt: skip


@pytest.mark.parametrize("fields", BAD_FIELDS, ids=str)
def test_a_field_out_of_place_is_refused(fields):
    frames = raw(sample(Kind.PUSH, Part.IDS | Part.VALUES))
    assert decode(forged(frames)).key == 7
    with pytest.raises(ProtocolError):
        decode(forged(frames, **fields))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[1]",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": ' + b"[" * 9 + b"]" * 9 + b"}",
        b'{"a"',
        b"\xff\xfe",
        b"[" * 30_000,
        b'{"a": "' + b"x" * 70_000 + b'"}',
    ],
)
def test_what_is_no_json_object_is_refused(text):
    header = struct.pack(FIELDS, 0x55544548, 1, Kind.HELLO, 0, Part.META, 0, 0, 0, 0, 0, 0, 0)
    frame = header + struct.pack("<I", zlib.crc32(text, zlib.crc32(header))) + text
    with pytest.raises(ProtocolError):
        decode([frame])


def test_frames_missing_cut_or_added_are_refused():
    parts = Part.IDS | Part.COUNTS | Part.VALUES
    [small] = raw(sample(Kind.PUSH, parts))
    large, values = raw(sample(Kind.PUSH, parts, INLINE // 8 + 1))
    cut = [[small[:-1]], [small[:HEADER_BYTES], small[HEADER_BYTES:]], [large], [values], [large[:-1], values]]
    for bad in ([], *cut, [large, values[:-1]], [small + b"."], [small, b""], [b"", small], [values, large],
                [large + values], [large, values, b""]):  # fmt: skip
        with pytest.raises(ProtocolError):
            decode(bad)


def test_small_messages_are_one_frame_and_large_values_are_not_copied():
    sizes = [[len(frame) for frame in encode(sample(Kind.PUSH, Part.IDS | Part.VALUES, rows))] for rows in (3, 8192)]
    assert sizes == [[HEADER_BYTES + 3 * 8 + 3 * 8], [HEADER_BYTES + 8 + 8192 + INLINE]]
    message = sample(Kind.PUSH, Part.VALUES, 8193)
    assert encode(message)[1] is message.values
    assert np.may_share_memory(decode(encode(message)).values, message.values)


def test_a_value_frame_above_the_limit_is_refused():
    with pytest.raises(ProtocolError, match="limit"):
        decode(raw(sample(Kind.PUSH, Part.VALUES, 100, 100)), limit=39_999)
    with pytest.raises(ProtocolError, match="cannot be sent"):
        wire_array(np.ones(3, complex))


# -- against the door of a server ------------------------------------------------------------------------------


def guarded(mode=None) -> Sessions:
    """A server with one greeted worker 0 at peer `p0`, out of two."""
    sessions = Sessions(new_store(2, mode or ASP()), TOKEN)
    sessions.receive(b"p0", raw(greeting(sessions, b"p0", TOKEN)), 0.0)
    return sessions


def genuine(epoch: int = 1) -> list[list[bytes]]:
    """One message of each kind that worker 0 may send."""
    fields = {"seq": 3, "epoch": epoch}
    values, rows = np.ones((1, 8), "<f4"), np.ones((2, COLS), "<f4")
    ids = np.array([1, 4])
    spec = {"name": "new", "start": 0, "rows": 2, "cols": 2}
    made = [
        Message(Kind.HELLO, meta={"question": "?", "incarnation": 100}),
        Message(Kind.CREATE, key=9, meta=spec, **fields),
        Message(Kind.ASSIGN, key=DENSE, values=values, **fields),
        Message(Kind.PUSH, key=DENSE, values=values, **fields),
        Message(Kind.PUSH, key=SPARSE, ids=ids, values=rows, **fields),
        Message(Kind.PUSH, key=SPARSE, ids=ids, counts=ids, values=rows, **fields),
        Message(Kind.PUSH_PULL, key=SPARSE, ids=ids, values=rows, **fields),
        Message(Kind.PULL, key=SPARSE, ids=ids, **fields),
        Message(Kind.SYNC, key=SPARSE, ids=ids, counts=ids - 5, **fields),
        Message(Kind.CALL, key=SPARSE, meta={"function": "top_k", "arguments": {"k": 1}}, **fields),
        Message(Kind.REDUCE, key=1, values=values, meta={"function": "total"}, **fields),
        Message(Kind.CLOCK, **fields),
        Message(Kind.LEAVE, **fields),
        Message(Kind.READY, **fields),
    ]
    return [raw(message) for message in made]


def mutated(frames: list[bytes], rng: random.Random) -> list[bytes]:
    """One random change anywhere but in the values, which no checksum covers."""
    frames, choice = list(frames), rng.randrange(5)
    if choice == 0:  # a flipped bit
        frame = bytearray(frames[0])
        frame[rng.randrange(covered(frames))] ^= 1 << rng.randrange(8)
        frames[0] = bytes(frame)
    elif choice == 1:  # cut short
        place = rng.randrange(len(frames))
        frames[place] = frames[place][: rng.randrange(max(1, len(frames[place])))]
    elif choice == 2:  # grown
        place = rng.randrange(len(frames))
        frames[place] += rng.randbytes(rng.randrange(1, 9))
    elif choice == 3 and len(frames) > 1:  # a frame lost
        del frames[rng.randrange(len(frames))]
    else:  # a frame too many
        frames.insert(rng.randrange(len(frames) + 1), rng.randbytes(rng.randrange(70)))
    return frames


def test_ten_thousand_mutated_messages_change_nothing():
    sessions, rng, originals = guarded(), random.Random(0), genuine()
    before = contents(sessions.store)
    for _ in range(10_000):
        frames = mutated(rng.choice(originals), rng)
        for peer, reply in sessions.receive(b"p0", frames, 0.0):
            assert (peer, decode(reply).kind) == (b"p0", Kind.ERROR)
    assert contents(sessions.store) == before and len(sessions.store.tables) == 2
    assert not sessions.store.parked and sessions.store.members[0].done == 2


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=80), max_size=4))
def test_arbitrary_bytes_are_refused(frames):
    with pytest.raises(ProtocolError):
        decode(frames)


@settings(max_examples=300)
@given(
    st.integers(1, len(genuine()) - 1),
    st.sampled_from(["kind", "dtype", "key", "worker", "seq", "step", "epoch"]),
    st.integers(0, (1 << 31) - 1) | st.integers(0, 15),
)
def test_forged_fields_never_break_a_server(index, name, value):
    """A field changed by someone who computes the checksum too: whatever is answered, the server goes on."""
    frames = forged(genuine()[index], **{name: value % 256 if name in ("kind", "dtype") else value})
    sessions = guarded(BSP())
    before = contents(sessions.store)
    sessions.receive(b"p0", frames, 0.0)
    if name in ("worker", "epoch") and value not in (0, 1):
        assert contents(sessions.store) == before
    [(_, reply)] = sessions.receive(b"p0", raw(Message(Kind.STATUS, seq=4, epoch=1)), 0.0) or [(0, None)]
    assert reply is None or decode(reply).kind in (Kind.OK, Kind.ERROR)


def test_strangers_and_other_workers_change_nothing():
    sessions = guarded()
    before = contents(sessions.store)
    for frames in genuine()[1:]:
        [(peer, reply)] = sessions.receive(b"stranger", frames, 0.0)
        assert (peer, decode(reply).meta["code"]) == (b"stranger", "hello")
    push = Message(Kind.PUSH, key=DENSE, worker=1, seq=1, epoch=1, values=np.ones((1, 8), "<f4"))
    [(peer, reply)] = sessions.receive(b"p0", raw(push), 0.0)
    assert (peer, decode(reply).meta["code"]) == (b"p0", "hello")
    asked = greeting(sessions, b"stranger", TOKEN).facts["asked"]
    for token in ("wrong", "", None, 7, "\ud800"):
        facts = {"asked": asked, "proof": proof(token, asked, 1, 1) if isinstance(token, str) else token}
        [(_, reply)] = sessions.receive(
            b"stranger", raw(Message(Kind.HELLO, worker=1, meta={"incarnation": 1, **facts})), 0.0
        )
        assert decode(reply).meta["code"] == ("token" if isinstance(token, str) else "value")
    assert contents(sessions.store) == before and list(sessions.worker_of) == [b"p0"]


def test_a_greeting_that_is_sent_again_from_elsewhere_or_after_a_restart_is_asked_anew():
    sessions = guarded()
    hello = raw(greeting(sessions, b"p0", TOKEN))
    places = (sessions, b"p0"), (sessions, b"p1"), (guarded(), b"p0")
    answers = [server.receive(peer, hello, 0.0)[0][1] for server, peer in places]
    assert [decode(answer).kind for answer in answers] == [Kind.OK, Kind.HELLO, Kind.HELLO]
    assert list(sessions.worker_of) == [b"p0"]


def test_a_new_connection_of_a_worker_takes_over_and_the_old_one_is_a_stranger():
    sessions = guarded()
    hello = raw(greeting(sessions, b"p1", TOKEN, life=101))
    assert sessions.receive(b"p1", hello, 0.0)[0][0] == b"p1"
    [(_, reply)] = sessions.receive(b"p0", genuine()[3], 0.0)
    assert decode(reply).meta["code"] == "hello"
    old = raw(greeting(sessions, b"p0", TOKEN))
    [(_, reply)] = sessions.receive(b"p0", old, 0.0)
    assert decode(reply).meta["code"] == "hello" and sessions.peer_of == {0: b"p1"}


def test_header_is_56_bytes():
    assert HEADER_BYTES == 56 and ROWS == 6

"""The door of a server: what a request may say in its JSON object, and what is told to the sender of anything wrong.

Whoever reads a message lets no error but these out, so that no message ends a server. The sizes of arrays are checked
as a message is decoded (`messages.py`), and against a table where they are meant for one (`server_table.py`).
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import NamedTuple

from ...core.errors import ArgumentError, HetuError
from .messages import LARGEST, Kind, Message, RefusedError


class Fact(NamedTuple):
    """A field of the JSON object: its types, and the least and most that a number, or a length, may be."""

    types: tuple[type, ...]
    least: float = 0
    most: float = LARGEST
    needed: bool = False


_PROOF = {name: Fact((str,), 1, 64) for name in ("question", "asked", "proof")}
_WORD = Fact((str,), 1, 200)
_ELEMENTS = {
    "function": Fact((dict,), 1, 8, needed=True), "beside": Fact((list,), 0, 16, needed=True),
    "scalars": Fact((list,), 0, 64, needed=True),
}  # fmt: skip
_FUNCTION = {"function": _WORD._replace(needed=True), "arguments": Fact((dict,))}
_MORE = {"more": Fact((bool,))}  # a push is cut in several, of which the first counts as a step
_SIZE, _INCARNATION = Fact((int,), needed=True), Fact((int,), needed=True)
FACTS: dict[Kind, dict[str, Fact]] = {
    Kind.HELLO: {
        **_PROOF, "incarnation": _INCARNATION, "first": Fact((int,)), "at": Fact((int,)), "segment": Fact((list,), 2, 2)
    },
    Kind.CREATE: {
        "name": Fact((str,), 0, 1000, needed=True), "start": _SIZE, "rows": _SIZE, "cols": _SIZE, "dtype": _WORD,
        "rule": Fact((str, dict)), "options": Fact((dict,)), "reduce": _WORD, "generation": Fact((int,)),
        "push": Fact((str,), 0, 40), "pull": Fact((str,), 0, 40), "parts": Fact((int,)),
        "first": Fact((int,)), "at_rest": Fact((str,), 0, 40), "seed": Fact((int,)), "joined": Fact((list,)),
        "placed": Fact((int,), 0, (1 << 32) - 1), "fleeting": Fact((bool,)),
        "consistency": Fact((str,), 0, 40),
        "draw": Fact((dict,), 2, 2), "turn": _WORD, "grows": Fact((dict,), 0, 5), "law": Fact((dict,), 0, 4),
    },
    Kind.PUSH: _MORE,
    Kind.PUSH_PULL: _MORE,
    Kind.CLOCK: {"snapshot": Fact((bool,)), "fed": Fact((int,), -LARGEST)},
    Kind.CALL: _FUNCTION,
    Kind.REDUCE: _FUNCTION,
    Kind.STATUS: _PROOF,
    Kind.PING: {"proof": _PROOF["proof"], "incarnation": _INCARNATION},
    Kind.RATE: {"rate": Fact((int, float), 0, 1e30, needed=True)},
    Kind.MODE: {"consistency": _WORD._replace(needed=True)},
    Kind.RESTORE: {"step": Fact((int,), needed=True), "last": Fact((bool,))},
    Kind.READY: {
        "group": Fact((int,), 2), "wait": Fact((int, float), 0, 1e9), "decay": Fact((int, float), 0, 1),
        "away": Fact((bool,)),
    },
    Kind.EXPORT: {
        "start": Fact((int,), needed=True), "most": Fact((int,), 1, 1 << 24, needed=True),
        "since": Fact((int,), needed=True),
    },
    Kind.MAP: _ELEMENTS,
    Kind.SUM: _ELEMENTS,
}  # fmt: skip
_SHOWN: set[tuple[str, int | None]] = set()  # where defects have shown


def check_facts(message: Message) -> None:
    """ArgumentError unless the fields of a request's JSON object are those of its kind."""
    kind, known = message.kind, FACTS.get(message.kind, {})
    for name, value in message.facts.items():
        fact = known.get(name)
        if fact is None or type(value) not in fact.types:
            raise ArgumentError(f"{name[:40]}={value!r:.80} in a {kind.name}", fix=f"it may have {', '.join(known)}")
        size = value if isinstance(value, int | float) else len(value)
        if not fact.least <= size <= fact.most:
            raise ArgumentError(f"{name}={value!r:.80} in a {kind.name}", fix=f"use {fact.least:g} to {fact.most:g}")
    if missing := [name for name, fact in known.items() if fact.needed and name not in message.facts]:
        raise ArgumentError(f"a {kind.name} lacks {', '.join(missing)}")


def understood(error: Exception) -> HetuError:
    """What the sender of a message is told of an error: ours as it is, and what nobody foresaw as a "defect".

    A defect is shown on standard error, once for each place, because a sender may drop its answer.
    """
    if isinstance(error, HetuError):
        return error
    if isinstance(error, MemoryError):
        return RefusedError("memory", "the server has no memory for that", fix="use more servers (heturun -s)")
    place = traceback.extract_tb(error.__traceback__)[-1]
    if (place.filename, place.lineno) not in _SHOWN:
        _SHOWN.add((place.filename, place.lineno))
        traceback.print_exception(error)
    text = f"{type(error).__name__}: {error} (at {Path(place.filename).name}:{place.lineno})"
    return RefusedError("defect", text, fix="this is a mistake in hetu: the server has printed where; please report it")

"""Dataclasses as plain data: what is written is read, and what is wrong in it is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import pytest

from hetu.codec import Compress
from hetu.core.errors import ArgumentError
from hetu.plain_data import from_text, to_text, written


class Point(NamedTuple):
    x: int
    y: float


@dataclass
class Inner:
    count: int = 1
    called: ClassVar = "an inner one", "say its count"


@dataclass
class Outer:
    name: str
    points: Mapping[str, Point]
    inner: Inner | None = None
    either: Inner | Compress = field(default_factory=Compress)
    by_number: dict[int, tuple[float, ...]] = field(default_factory=dict)
    own: object = field(default=None, compare=False)
    version: int = 2
    called: ClassVar = "an outer one", "write it by to_text"


FULL = Outer("o", {"a": Point(1, 2.0)}, Inner(3), Inner(4), {5: (0.5, float("inf"))})


@pytest.mark.parametrize("value", [FULL, Outer("o", {}), Outer("o", {}, either=Compress("int8"), own=object())])
def test_what_is_written_is_read(value):
    assert from_text(Outer, to_text(value)) == value


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": 3}, "not an outer one: name is 3: wanted str"),
        ({"points": {"a": [1]}}, "not an outer one: points is"),
        ({"points": []}, r"points is \[\]: wanted dict"),
        ({"inner": {"cuont": 3}}, "inner is .*not an inner one: wanted count; wrong or missing: count, cuont"),
        ({"inner": {"count": True}}, "inner is .*not an inner one: count is True: wanted int[\\s\\S]*say its count"),
        ({"either": {"rows": "int9"}}, "either is .*no way 'int9'"),
        ({"by_number": {"five": []}}, "by_number is"),
        ({"by_number": {"5": "12"}}, "by_number is .*wanted list"),
        ({"own": 1}, "wrong or missing: own"),
        ({"version": 1, "gone": 3}, "an outer one of version 1, wanted 2[\\s\\S]*write it by to_text"),
    ],
)
def test_what_is_wrong_is_named(change, said):
    data = json.loads(to_text(FULL)) | change
    with pytest.raises(ArgumentError, match=said):
        from_text(Outer, json.dumps(data))


@pytest.mark.parametrize("text", ["", "[", "3", "[]", "{}", "null", None])
def test_what_is_no_data_is_refused(text):
    with pytest.raises(ArgumentError, match=r"not an outer one: [\s\S]*write it by to_text"):
        from_text(Outer, text)


def test_what_has_no_form_is_not_written():
    with pytest.raises(ArgumentError, match="has no form as data"):
        written({"made": [object()]})

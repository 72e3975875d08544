"""Dataclasses as plain data: what is written is read, and what is wrong in it is named."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import pytest

import hetu as ht
from hetu.codec import Compress
from hetu.core.errors import ArgumentError, HetuError
from hetu.core.subgraph import SubGraph
from hetu.dist import DataParallel, Pipeline
from hetu.dist.cut.strategy import Strategy
from hetu.plain_data import from_text, to_text, written
from hetu.plan import MachineProfile
from hetu.plan.costs.profile import Timing
from hetu.plan.plan import Plan
from hetu.ranges import Count
from hetu.strategies import ParameterServer


class Point(NamedTuple):
    x: int
    y: float


@dataclass
class Inner:
    count: Count = 1
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
        ({"inner": {"count": -1}}, "count is -1: -1 is not of 0 at least"),
        ({"by_number": {"5": [10**400]}}, "by_number is .*too large"),
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


@pytest.mark.parametrize("text", ["", "[", "3", "[]", "{}", "null", None, "[" * 100_000, '{"inner":' * 400])
def test_what_is_no_data_is_refused(text):
    with pytest.raises(ArgumentError, match=r"not an outer one: [\s\S]*write it by to_text"):
        from_text(Outer, text)


def test_what_has_no_form_is_not_written():
    with pytest.raises(ArgumentError, match="has no form as data"):
        written({"made": [object()]})


def kept(builder):
    """What the builder writes for two layers on two ranks."""
    h = ht.placeholder("x", (None, 4))
    for k in range(2):
        h = ht.nn.Linear(4, 4, name=f"l{k}")(h)
    loss = ht.mean(h)
    return builder.build(SubGraph("t", [loss, ht.optim.SGD(0.1).minimize(loss)]).written.outputs, 2)


PROFILE = MachineProfile(step=1e-4, speeds={1: 2.0}, timings={"a": Timing("add", 1, 1, 1.0, "b")})
KEPT = {
    "data": lambda: kept(DataParallel()),
    "stages": lambda: kept(Pipeline(2, 2)),
    "servers": lambda: kept(ParameterServer()),
    "profile": lambda: PROFILE,
    "plan": lambda: Plan("p", kept(DataParallel()), 10**6, PROFILE),
}
WRONG = [None, True, -1, 0, 0.5, math.nan, math.inf, 10**30, 10**400, "", "a", "\ud800", [], [[]], [1, [1]], {}]
WRONG += [{"a": 1}, {"kind": "layouts"}, {"1": []}]


def with_wrong(data: Any) -> Iterator[Any]:
    """The data, in which one part after the other is each of `WRONG`, or missing, or nested very deep."""
    yield from (*WRONG, DEEP)
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        for other in with_wrong(data[key]):
            yield (data | {key: other}) if isinstance(data, dict) else [*data[:key], other, *data[key + 1 :]]
        yield {k: v for k, v in data.items() if k != key} if isinstance(data, dict) else data[:key] + data[key + 1 :]


DEEP = "deep"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_and_damaged_is_read_or_refused_and_nothing_else(name):
    value, refused = KEPT[name](), 0
    kind = Strategy if isinstance(value, Strategy) else type(value)
    for damaged in with_wrong(json.loads(value.to_json())):
        try:
            again = kind.from_json(json.dumps(damaged).replace(f'"{DEEP}"', "[" * 800 + "]" * 800))
        except HetuError:
            refused += 1
        else:
            assert str(again) and again.to_json()
    assert refused > 100

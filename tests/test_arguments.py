"""What annotations promise of the elements of collections, whatever holds them: combinations of both, generated."""

from __future__ import annotations

from collections import ChainMap, OrderedDict, UserDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AnySet
from types import MappingProxyType

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError
from hetu.promises import check_of
from hetu.ranges import AtLeast1, Share

ELEMENTS = {  # right, and wrong
    str: ("a", 3),
    int: (3, "a"),
    float: (0.5, "a"),
    AtLeast1: (2, 0),
    Share: (0.5, 1.5),
    str | None: (None, 3),
    tuple[str, int]: (("a", 3), ("a", "b")),
}
ORDERED = {"list": list, "tuple": tuple, "deque": deque, "array": lambda some: np.fromiter(some, object)}
OTHERS = {"set": set, "frozenset": frozenset, "dict": dict.fromkeys, "keys": lambda some: dict.fromkeys(some).keys(),
          "values": lambda some: dict(enumerate(some)).values()}  # fmt: skip
MAPPINGS = {"dict": dict, "ordered": OrderedDict, "proxy": lambda d: MappingProxyType(dict(d)),
            "user's": lambda d: UserDict(dict(d)), "chain": lambda d: ChainMap(dict(d))}  # fmt: skip


@pytest.mark.parametrize("hint", ELEMENTS, ids=str)
def test_elements_are_looked_at_in_whatever_holds_them(hint):
    right, wrong = ELEMENTS[hint]
    for held, make in (ORDERED | OTHERS).items():
        hints = [
            Collection,
            Iterable,
            *[Sequence, list] * (held in ORDERED),
            *[AnySet] * ("set" in held or held == "keys"),
        ]
        for kind in hints:
            holds = check_of(kind[hint])
            assert holds(make([right])) and not holds(make([wrong])) and not holds(make([right, wrong])), (kind, held)
            assert check_of(Mapping[str, kind[hint]])({"k": make([right])})
            assert not check_of(Mapping[str, kind[hint]])({"k": make([wrong])})
            assert not check_of(kind[hint] | str)(make([wrong])) and check_of(kind[hint] | str)("text")


def test_a_mapping_is_no_sequence():
    assert not any(check_of(kind[int])({0: 1}) for kind in (Sequence, list, tuple))


@pytest.mark.parametrize("held", MAPPINGS)
@pytest.mark.parametrize("hint", ELEMENTS, ids=str)
def test_keys_and_values_are_looked_at_in_whatever_mapping(hint, held):
    right, wrong = ELEMENTS[hint]
    holds, made = check_of(Mapping[str, hint]), MAPPINGS[held]
    assert holds(made([("k", right)])) and not holds(made([("k", wrong)])) and not holds(made([(3, right)]))


@pytest.mark.parametrize(
    ("call", "fix"),
    [
        (lambda: ht.ps.Cache(rows={3: 4}), "pass rows as a whole number of 1 at least or a number above 0 to 1 or "
         "{str: a whole number of 1 at least or a number above 0 to 1}"),
        (lambda: ht.strategies.Hybrid(pooled=[3]), "pass pooled as str or a list of str"),
        (lambda: ht.strategies.Hybrid(pooled={3}), "pass pooled as str or a list of str"),
        (lambda: ht.strategies.Hybrid(pooled=np.array([3])), "pass pooled as str or a list of str"),
    ],
    ids=range(4),
)  # fmt: skip
def test_what_is_wanted_is_told_in_words(call, fix):
    with pytest.raises(ArgumentError) as told:
        call()
    assert told.value.fix == fix

"""A graph at other sizes is divided into groups as if it were seen for the first time, mostly without finding them."""

from __future__ import annotations

import re

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import Graph
from hetu.core.types import Dim
from hetu.cpu_kernels.groups import LIMITS
from hetu.fuse import group, pattern
from hetu.gpu_kernels.passes import fuse_kernels

from .. import test_open_sizes
from ..test_open_sizes import MODELS, compiled


def towers(rng):
    """Two sets of numbers of which nothing but a scale is common."""
    x, y, w = ht.placeholder("x", (None,)), ht.placeholder("y", (None,)), ht.variable("w", np.ones((), "f"))
    return [ht.mean(ht.exp(x * w)) + ht.mean(ht.tanh(y * w))], {x: rng.random(5, "f"), y: rng.random(6, "f")}


def table(rng):
    """Folds over both axes of a table."""
    x, w = ht.placeholder("x", (None, None)), ht.variable("w", np.ones((), "f"))
    return [ht.mean(ht.sum(ht.exp(x * w), 0)) + ht.mean(ht.tanh(ht.sum(x * w, 1)))], {x: rng.random((5, 7), "f")}


EMPTY = {"towers": towers, "table": table}  # which may be
ORDINARY = ((37, 41, 43), (53, 59, 61))  # equal to nothing else
SIZES = (0, 1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 64, 84, 127, 128, 400, 784)  # among them fixed ones of the models


def shapes_of(sub, feed, sizes):
    """The shapes of a feed with these sizes in the place of open ones; equal ones stay equal."""
    known: dict[int, int] = {}
    left = iter(sizes)

    def size(n, declared):
        return known.setdefault(n, next(left)) if isinstance(declared, Dim) and n not in known else known.get(n, n)

    def sized(name, value):
        return tuple(size(n, d) if isinstance(d, Dim) else n for n, d in zip(value.shape, sub.placeholders[name].shape))

    return {name: sized(name, value) for name, value in feed.items()}


@pytest.mark.parametrize("model", [*MODELS, *EMPTY])
@pytest.mark.sampled(8)
def test_other_sizes_are_divided_as_if_they_were_the_first(model, monkeypatch):
    monkeypatch.setattr(test_open_sizes, "MODELS", MODELS | EMPTY)
    ex, feed = compiled(model, "adam")
    (sub,) = ex.subgraphs.values()
    found, units = [], group._Units
    monkeypatch.setattr(group, "_Units", lambda *given: found.append(given) or units(*given))

    def text(shapes):
        fetches, updates, _ = sub.lower(shapes, ex.passes)
        return re.sub(" at 0x[0-9a-f]+", "", str(Graph((*fetches, *updates.values()))))

    draw = np.random.default_rng(0)
    some = [draw.choice(SIZES if model in EMPTY else SIZES[1:], 3).tolist() for _ in range(3)]
    tried = [*ORDINARY, *([(0, 37, 41), (37, 0, 41)] if model in EMPTY else []), *some]
    shapes = [shapes_of(sub, feed, sizes) for sizes in tried]
    pattern.kept.cache_clear()
    known, searched = [], []
    for fed in shapes:
        known.append(text(fed))
        searched.append(len(found))
    assert searched[0] == searched[1] == 1, "the second ordinary shape is divided as the first"
    for fed, seen in zip(shapes, known):
        pattern.kept.cache_clear()
        assert text(fed) == seen, fed


def test_a_device_that_asks_how_large_sizes_are_keeps_nothing():
    assert LIMITS.by_pattern and not fuse_kernels.LIMITS.by_pattern

"""What communication costs in Python, counted: calls of a small one, and of one among a thousand ranks."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from hetu.dist import SUM, Mesh, plan

from .test_launch import heturun

MOST = {"called": 20, "bound": 8}
MORE = {
    "all_to_all by counts, called": 56,
    "all_to_all by counts, bound": 9,
    "messages, called": 34,
    "messages, bound": 14,
}
MORE |= {"reduce_scatter, called": 23, "reduce_scatter, bound": 11}  # NumPy finds the largest float, or NaN


def test_calls_of_small_communication():
    found = heturun("-w", 2, "python", "-m", "tests.dist.counted")
    assert found.returncode == 0, found.stderr
    counts = json.loads(found.stdout.partition("counts: ")[2])
    assert len(counts) == 16
    over = {name: n for name, n in counts.items() if n > MORE.get(name, MOST[name.rpartition(", ")[2]])}
    assert not over


class Group:
    """One rank of a group, in which nothing is sent."""

    def __init__(self, n):
        self.rank, self.world_size, self.ranks, self.widens = 0, n, tuple(range(n)), False

    def split(self, group):
        return self

    def run(self, call):
        return None

    def bind(self, call):
        return lambda: None


WAYS = {  # global shape, from, to; n ranks in one row or, as a square, in two
    "all_gather": (lambda n: (n * 4, 16), {"d": 0}, {}),
    "all_gather along axis 1": (lambda n: (4, n * 2), {"d": 1}, {}),
    "reduce_scatter": (lambda n: (n * 4, 16), {"d": SUM}, {"d": 0}),
    "reduce_scatter along axis 1": (lambda n: (4, n * 2), {"d": SUM}, {"d": 1}),
    "all_reduce": (lambda n: (4, 4), {"d": SUM}, {}),
}


def calls(act, *arguments) -> int:
    made = []
    sys.setprofile(lambda frame, event, what: made.append(what) if event in ("call", "c_call") else None)
    act(*arguments)
    sys.setprofile(None)
    return len(made)


def run_all(actions):
    for act in actions:
        act()


def arrays(way):
    return (np.zeros(pieces[0].shape, "f4") for pieces in (way.before, way.after))


@pytest.mark.parametrize("name", WAYS)
def test_a_collective_among_a_thousand_ranks_makes_as_many_calls_as_among_eight(name):
    shape, src, dst = WAYS[name]
    counts = []
    for n in (8, 1024):
        mesh, group = Mesh((n,), ("d",)), Group(n)
        way = plan(mesh.layout(**src), mesh.layout(**dst), shape(n))
        x, out = arrays(way)
        assert way.kind in name
        way.run(group, x, out)  # plans
        bound = way.bind(group, x, out)
        counts.append((calls(way.run, group, x, out), len(bound), calls(run_all, bound)))
    assert counts[0] == counts[1]
    assert counts[0][0] < 60


@pytest.mark.parametrize(
    ("shape", "parts", "in_line", "tiled"),
    [
        ((8, 6), (4, 1), True, True),
        ((8, 6), (1, 3), False, True),
        ((8, 6), (4, 3), False, True),
        ((4, 6), (4, 3), True, True),  # rows of one: the parts of a row follow each other
        ((7, 6), (4, 1), False, False),
        ((8, 6), (1, 1), True, True),
    ],
)
def test_equal_tiles_are_copied_at_once_others_one_by_one(shape, parts, in_line, tiled):
    from hetu.dist.layout.tiling import Tiling

    mesh = Mesh(parts, ("a", "b"))
    pieces = [*mesh.layout(a=0, b=1).pieces(shape).values()]
    tiling = Tiling.of(pieces, tuple((0, n) for n in shape))
    whole = np.arange(np.prod(shape), dtype="f4").reshape(shape)
    blocks = np.zeros((len(pieces), tiling.most), "f4")
    pairs = [*tiling.pairs(blocks, whole)]
    for block, part in pairs:
        block[...] = part
    assert len(pairs) == (1 if tiled else len(pieces)) and tiling.in_line == in_line
    for block, piece in zip(blocks, pieces):
        part = whole[tuple(slice(*span) for span in piece.box)]
        np.testing.assert_array_equal(block[: part.size], part.reshape(-1))
    assert not in_line or (blocks.reshape(shape) == whole).all()

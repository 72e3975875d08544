"""Layouts say exactly which rank holds what, survive JSON and refuse what makes no sense."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from hetu import init
from hetu.core.errors import ArgumentError, AxisError
from hetu.dist import DUP, MAX, SUM, Layout, Mesh, Shard
from hetu.dist.cut.kept import LocalInitializer
from hetu.dist.cut.partition import acting_ranks

from .layouts import index, random_layout, scatter


def test_row_major_grid():
    layout = Layout(Shard((4, 5, 6, 7, 8, 9), ((0, 2), (1, 3))))
    assert layout.local_shape((4, 9), 4) == (2, 3)
    assert layout.pieces((4, 9))[8].box == ((2, 4), (3, 6))


def test_two_axes_may_split_one_dimension():
    boxes = [piece.box for piece in Layout(Shard(range(4), ((0, 2), (0, 2)))).pieces((7,)).values()]
    assert boxes == [((0, 1),), ((1, 3),), ((3, 5),), ((5, 7),)]


def test_more_ranks_than_rows_leave_some_empty():
    assert [Layout(Shard(range(4), ((0, 4),))).local_shape((2,), r) for r in range(4)] == [(0,), (1,), (0,), (1,)]


def test_ratio_shares_unevenly():
    layout = Layout((Shard((0,)), Shard((1,)), Shard((2,))), across=0, ratio=(2, 1, 1))
    assert [layout.local_shape((8,), r) for r in range(3)] == [(4,), (2,), (2,)]


def test_terms_and_copies():
    terms = Layout((Shard((0, 1), ((SUM, 2),)), Shard((2,))), across=SUM).pieces((3,))
    assert len({piece.term for piece in terms.values()}) == 3 and {p.copy for p in terms.values()} == {0}
    copies = Layout((Shard((0, 1), ((SUM, 2),)), Shard((2,))), across=DUP).pieces((3,))
    assert [piece.copy for piece in copies.values()] == [0, 0, 1] and copies[2].term == ()


def test_splits_partition_the_tensor_in_every_copy_and_term():
    draw = random.Random(1)
    for _ in range(200):
        layout = random_layout(draw, list(range(8)), 2, SUM)
        shape = (draw.randint(1, 9), draw.randint(1, 9))
        held = np.zeros(shape, int)
        for piece in layout.pieces(shape).values():
            held[index(piece.box)] += 1
        assert held.min() >= 1
        if all(role >= 0 for role, n in layout.axes().values() if n > 1):
            assert held.max() == 1


def test_parts_of_the_ranks_that_act_for_others_are_the_whole_once():
    """Whatever copies there are, and however each is cut; the first rank acts where all have everything."""
    draw, values = random.Random(3), np.random.default_rng(3)
    for n in range(400):
        layout, shape = random_layout(draw, [*range(n % 8 + 1)], 2, SUM), draw.choice([(4, 6), (5, 3), (1, 7)])
        x = values.integers(-9, 10, shape)
        parts, pieces, found = scatter(x, layout, values), layout.pieces(shape), np.zeros_like(x)
        acting = acting_ranks(layout, shape)
        for rank in acting:
            found[index(pieces[rank].box)] += parts[rank]
        np.testing.assert_array_equal(found, x, err_msg=f"{layout}")
        assert min(layout.ranks) in acting or len({piece.box for piece in pieces.values()}) > 1


def test_json_round_trip_and_hash():
    draw = random.Random(2)
    for _ in range(100):
        layout = random_layout(draw, list(range(8)), 3, MAX)
        twin = Layout.from_json(json.loads(json.dumps(layout.to_json())))
        assert twin == layout and hash(twin) == hash(layout) and repr(twin) == repr(layout)


def test_repr():
    assert repr(Layout(Shard((0, 2, 3, 4), ((SUM, 4),)))) == "Layout([sum/4] on 0,2,3,4)"
    assert repr(Mesh((2, 3), ("data", "model"))) == "Mesh(data=2, model=3 on 0-5)"


def test_mesh():
    mesh = Mesh((2, 2, 2), ("stage", "data", "model"), ranks=range(8, 16))
    assert mesh.layout(data=0, model=SUM) == Layout(Shard(range(8, 16), ((DUP, 2), (0, 2), (SUM, 2))))
    assert mesh.group("stage", 9) == (9, 13)
    assert mesh.group("data", 15) == (13, 15)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Shard(()),
        lambda: Shard((0, 0), ((0, 2),)),
        lambda: Shard((-1,)),
        lambda: Shard((0, 1)),
        lambda: Shard((0, 1), ((0, 3),)),
        lambda: Shard((0, 1), ((-9, 2),)),
        lambda: Shard((0, 1), (("rows", 2),)),
        lambda: Shard((0, 1), ((0, -2), (0, -1))),
        lambda: Shard((0, 1), (0, 2)),
        lambda: Layout(()),
        lambda: Layout((Shard((0,)), Shard((0,)))),
        lambda: Layout((Shard((0,)), Shard((1,))), across=0, ratio=(1,)),
        lambda: Layout((Shard((0,)), Shard((1,))), across=0, ratio=(1, 0)),
        lambda: Layout((Shard((0,)), Shard((1,))), across=SUM, ratio=(1, 1)),
        lambda: Layout(Shard((0, 1, 2, 3), ((SUM, 2), (MAX, 2)))),
        lambda: Layout.from_json({"parts": []}),
        lambda: Layout.from_json({"parts": [{"ranks": [0], "axes": [["summ", 1]]}], "across": "dup", "ratio": []}),
        lambda: Layout.from_json([]),
        lambda: Mesh((2, 2), ("data",)),
        lambda: Mesh((2, 2), ("data", "data")),
        lambda: Mesh((2,), ("data",)).layout(model=0),
        lambda: Mesh((2,), ("data",)).group("data", 2),
    ],
)
def test_mistakes(make):
    with pytest.raises(ArgumentError):
        make()


def test_a_dimension_that_the_tensor_lacks():
    with pytest.raises(AxisError, match="splits dimension 1"):
        Layout(Shard((0, 1), ((1, 2),))).pieces((4,))


# -- initial values of a part --------------------------------------------------------------------------------------


@pytest.mark.parametrize("box", [((0, 65), (0, 4)), ((65, 130), (1, 3)), ((129, 130), (0, 4)), ((7, 7), (0, 4))])
@pytest.mark.parametrize("law", [True, False])
def test_a_part_of_initial_values_is_made_alone(law, box, monkeypatch):
    monkeypatch.setattr(init, "AT_ONCE", 240)  # windows of 60 rows
    made, shape, dtype = [], (130, 4), np.dtype("float32")

    def drawn(shape, dtype, rng):
        made.append(shape[0])
        return rng.standard_normal(shape, dtype)

    initializer = init.elementwise(drawn) if law else drawn
    whole, cut = initializer(shape, dtype, np.random.default_rng(0)), tuple(slice(*edges) for edges in box)
    made.clear()
    part = LocalInitializer(initializer, shape, box)(whole[cut].shape, dtype, np.random.default_rng(0))
    np.testing.assert_array_equal(part, whole[cut])
    assert sum(made) == (box[0][1] - box[0][0] if law else 130)

"""Many tensors at once: exact, in one message between two ranks, of the least bytes, which holders send alike."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from hetu.core.errors import ArgumentError
from hetu.dist import DUP, SUM, Layout, Mesh, Shard, run_ranks
from hetu.dist.layout.fused import Move, fused

from .layouts import index, random_layout

DTYPES = ("float32", "uint8", "uint64", "float64", "bool", "float16")
SETS = 60  # of up to eight tensors, for every number of ranks


def by_layouts(draw, n):
    """Tensors that all lie by a few layouts, as the variables of a model."""
    src, dst = ([random_layout(draw, [*range(n)], 2, DUP) for _ in range(2)] for _ in range(2))
    return [(draw.choice(src), draw.choice(dst)) for _ in range(draw.randint(1, 8))]


def by_survivors(draw, n):
    """What is held after ranks have died: pieces, and perhaps those of the rank before; new ranks hold nothing."""
    dead, found = {*draw.sample(range(n), draw.randint(0, n - 1))}, []
    for src, dst in by_layouts(draw, n):
        found.append((src, dst, dead, draw.random() < 0.7))
    return found


def move_of(shape, dtype, src, dst, dead=(), buddies=False):
    """The move, or None where nobody is left who holds all of the tensor."""
    move = Move.between(src, dst, shape, np.dtype(dtype))
    ranks = [*move.held]
    held = {
        rank: tuple(dict.fromkeys((*move.held[rank], *(move.held[ranks[at - 1]] if buddies else ()))))
        for at, rank in enumerate(ranks)
        if rank not in dead
    }
    wanted = {rank: boxes for rank, boxes in move.wanted.items() if rank not in dead}
    covered = np.zeros(shape, bool)
    for box in itertools.chain(*held.values()):
        covered[index(box)] = True
    return Move(move.dtype, held, wanted) if covered.all() and wanted else None


def lacked(move, shape):
    """By rank, how often it lacks each element, counted on whole arrays."""
    found = {}
    for rank, boxes in move.wanted.items():
        here, wanted = np.zeros(shape, bool), np.zeros(shape, int)
        for box in move.held.get(rank, ()):
            here[index(box)] = True
        for box in boxes:
            wanted[index(box)] += 1
        found[rank] = wanted * ~here
    return found


def least_load(moves, shapes):
    """Bytes that some rank must send, however cells are shared out: for any ranks, what they alone hold, on average."""
    loads = {}
    for name, move in moves.items():
        needed = sum(lacked(move, shapes[name]).values()) * move.dtype.itemsize
        masks = np.zeros(shapes[name], int)
        for rank, boxes in move.held.items():
            for box in boxes:
                masks[index(box)] |= 1 << rank
        for mask in np.unique(masks):
            loads[mask] = loads.get(mask, 0) + int(needed[masks == mask].sum())
    ranks = [r for r in range(8) if any(mask >> r & 1 for mask in loads)]
    some = (
        sum(1 << r for r in chosen) for k in range(1, len(ranks) + 1) for chosen in itertools.combinations(ranks, k)
    )
    return max(sum(n for mask, n in loads.items() if not mask & ~of) / of.bit_count() for of in some)


def drawn(draw, n, how):
    """(moves, shapes) of one set."""
    moves, shapes = {}, {}
    for number, case in enumerate(how(draw, n)):
        shape = tuple(draw.choice((1, 2, 4, 5, 7, 8, 12, 40)) for _ in range(2))
        if (move := move_of(shape, draw.choice(DTYPES), *case)) is not None:
            moves[f"v{number}"], shapes[f"v{number}"] = move, shape
    return moves, shapes


@pytest.mark.parametrize("how", [by_layouts, by_survivors])
@pytest.mark.parametrize("n", [2, 3, 4, 6, 8])
def test_random_sets(n, how):
    """About 2,500 tensors."""
    draw, values = random.Random(f"{n} {how.__name__}"), np.random.default_rng(n)
    sets = [case for _ in range(SETS) if (case := drawn(draw, n, how))[0]]
    wholes = [{k: values.integers(0, 99, s).astype(m[k].dtype) for k, s in shapes.items()} for m, shapes in sets]
    ways = [fused(moves) for moves, _ in sets]

    def rank_of(comm):
        found, counts, exchange = [], [], comm.exchange
        comm.exchange = lambda sends, recvs: (counts.append(([*sends], len(recvs))), exchange(sends, recvs))
        for (moves, _), whole, way in zip(sets, wholes, ways):
            parts = [
                {
                    name: [
                        whole[name][index(box)].copy() if full else np.zeros_like(whole[name][index(box)]) for box in b
                    ]
                    for name, move in moves.items()
                    if (b := of(move).get(comm.rank))
                }
                for full, of in ((True, lambda m: m.held), (False, lambda m: m.wanted))
            ]
            way.run(comm, *parts)
            found.append(parts[1])
        return found, [(to, x.nbytes) for sends, _ in counts for to, x in sends]

    outcome = run_ranks(n, rank_of, rendezvous=True)
    for at, ((moves, _), whole) in enumerate(zip(sets, wholes)):
        for name, move in moves.items():
            for rank, boxes in move.wanted.items():
                for box, got in zip(boxes, outcome[rank][0][at][name]):
                    np.testing.assert_array_equal(got, whole[name][index(box)])
    sent = sum(nbytes for _, messages in outcome for _, nbytes in messages)
    least = sum(
        int(count.sum()) * move.dtype.itemsize
        for moves, shapes in sets
        for name, move in moves.items()
        for count in lacked(move, shapes[name]).values()
    )
    assert sent == sum(way.nbytes for way in ways) == least
    assert sum(len(messages) for _, messages in outcome) == sum(way.messages for way in ways)
    for (moves, shapes), way in zip(sets, ways):
        assert way.messages <= n * (n - 1)
        if way.messages:
            most, least = max(way.sent.values()), least_load(moves, shapes)
            assert most <= 1.3 * least + 2 * 8, (way, most, least)  # and elements that cannot be cut


def one(*axes, ranks=None):
    degree = int(np.prod([n for _, n in axes]))
    return Layout(Shard(tuple(range(degree)) if ranks is None else ranks, axes))


MESH = Mesh((4, 2), ("data", "tensor"))
TWICE = [  # every slice has two holders or more
    (MESH.layout(), MESH.layout(data=0), (64, 64)),
    (MESH.layout(tensor=1), MESH.layout(data=0), (64, 64)),
    (MESH.layout(data=0), MESH.layout(tensor=1), (64, 64)),
    (one((DUP, 4)), one((0, 4), ranks=(4, 5, 6, 7)), (64, 64)),
    (one((DUP, 2)), one((DUP, 1), ranks=(7,)), (64, 64)),  # one that joins takes halves
    (one((0, 2), (DUP, 2)), one((1, 4), ranks=(4, 5, 6, 7)), (64, 64)),
    (one((DUP, 3)), one((DUP, 1), ranks=(3,)), (3,)),
]


@pytest.mark.parametrize(("src", "dst", "shape"), TWICE)
@pytest.mark.parametrize("tensors", [1, 3, 20])
def test_no_holder_sends_much_more_than_the_mean(src, dst, shape, tensors):
    way = fused({f"v{k}": Move.between(src, dst, shape, np.dtype("float32")) for k in range(tensors)})
    if way.messages:
        mean = way.nbytes / len({rank for move in way.moves.values() for rank in move.held})
        assert max(way.sent.values()) <= 1.5 * mean, way


def test_holders_on_the_same_host_come_first():
    src, dst = one((DUP, 2), (DUP, 2)), one((0, 2), ranks=(1, 3))
    moves = {"w": Move.between(one((DUP, 2), ranks=(0, 2)), dst, (8, 8), np.dtype("float32"))}
    assert set(fused(moves, hosts=((0, 1), (2, 3))).sizes) == {(0, 1), (2, 3)}
    assert set(fused(moves, hosts=((0, 3), (1, 2))).sizes) == {(0, 3), (2, 1)}
    assert fused({"w": Move.between(src, dst, (8, 8), np.dtype("float32"))}).messages == 0


def test_what_nobody_holds_is_named():
    move = Move(np.dtype("float32"), {0: [((0, 2), (0, 3))]}, {1: [((0, 4), (0, 3))]})
    with pytest.raises(ArgumentError, match=r"no rank holds w\[2:4, 0:3\]"):
        fused({"w": move})
    with pytest.raises(ArgumentError, match="still to be combined"):
        Move.between(one((SUM, 2)), one((DUP, 2)), (4,), np.dtype("float32"))


def test_scalars_and_nothing():
    move = Move.between(one((DUP, 1)), one((DUP, 2)), (), np.dtype("int64"))
    assert str(fused({"count": move})) == "1 tensors: 1 messages, 8 bytes\nfrom  to 1\n   0     8"
    assert str(fused({})) == "0 tensors: 0 messages, 0 bytes"

"""Random layouts, and a dense oracle: scatter a tensor into the parts of a layout, and put parts together again.

The oracle knows nothing of boxes that cut each other, of copies that are chosen or of collectives: it works
element by element on whole arrays.
"""

from __future__ import annotations

import itertools
import random

import numpy as np

from hetu.dist import DUP, MAX, MIN, SUM, Layout, Shard
from hetu.dist.comm.call import REDUCE
from hetu.dist.layout.layout import NAMES


def random_layout(draw: random.Random, ranks: list[int], ndim: int, pending: int) -> Layout:
    """One to three parts on some of `ranks`, each a grid with random roles."""
    ranks = draw.sample(ranks, draw.randint(1, len(ranks)))
    roles = [DUP, pending, *range(ndim)]
    cuts = sorted(draw.sample(range(1, len(ranks)), min(draw.choice((0, 0, 1, 2)), len(ranks) - 1)))
    parts = [random_shard(draw, ranks[a:b], roles) for a, b in zip([0, *cuts], [*cuts, len(ranks)])]
    across = draw.choice(roles)
    ratio = tuple(draw.randint(1, 3) for _ in parts) if across >= 0 and draw.random() < 0.5 else ()
    return Layout(tuple(parts), across, ratio)


def random_shard(draw: random.Random, ranks: list[int], roles: list[int]) -> Shard:
    degrees, left = [], len(ranks)
    while left > 1:
        n = draw.choice([d for d in range(2, left + 1) if left % d == 0])
        degrees.append(n)
        left //= n
    return Shard(tuple(ranks), tuple((draw.choice(roles), n) for n in degrees))


def change_roles(draw: random.Random, layout: Layout, ndim: int, pending: int) -> Layout:
    """The same grid, with the role of one position (or the relation between the parts) replaced."""
    role = draw.choice([DUP, DUP, pending, *range(ndim)])
    position = draw.randint(-1, max(len(part.axes) for part in layout.parts) - 1)
    if position < 0:
        return Layout(layout.parts, role, layout.ratio if role >= 0 else ())
    parts = []
    for part in layout.parts:
        axes = [(role if i == position else old, n) for i, (old, n) in enumerate(part.axes)]
        parts.append(Shard(part.ranks, tuple(axes)))
    return Layout(tuple(parts), layout.across, layout.ratio)


def random_pair(draw: random.Random, n: int) -> tuple[Layout, Layout, tuple[int, ...]]:
    """Two layouts on up to `n` ranks and a shape for both. Half of the pairs share a grid."""
    ndim = draw.randint(1, 3)
    shape = tuple(draw.choice((1, 2, 4, 5, 7, 8, 12)) for _ in range(ndim))
    first, second = draw.choice([(SUM, SUM), (SUM, SUM), (MAX, MAX), (MIN, MIN), (SUM, MAX)])
    src = random_layout(draw, list(range(n)), ndim, first)
    if draw.random() < 0.5:
        return src, change_roles(draw, src, ndim, first), shape
    return src, random_layout(draw, list(range(n)), ndim, second), shape


def random_unequal(draw: random.Random, n: int) -> tuple[Layout, Layout, tuple[int, ...]]:
    """Two or three groups of `n` ranks that are not alike, between which terms are combined, divided or gathered."""
    ndim, order = draw.randint(1, 3), draw.sample(range(n), n)
    cuts = [0, *sorted(draw.sample(range(1, n), draw.choice((1, 1, 2)))), n]
    shards = tuple(random_shard(draw, order[a:b], [DUP, *range(ndim)]) for a, b in itertools.pairwise(cuts))
    if len({shard.axes for shard in shards}) == 1:
        return random_unequal(draw, n)
    dim, ratio = draw.randrange(ndim), tuple(len(s.ranks) for s in shards) if draw.random() < 0.3 else ()
    split, whole, terms = Layout(shards, dim, ratio), Layout(shards, DUP), Layout(shards, SUM)
    shape = tuple(draw.choice((1, 2, 4, 5, 6, 8, 12)) for _ in range(ndim))
    return *draw.choice([(terms, whole), (terms, split), (split, whole)]), shape


def _families(layout: Layout, shape: tuple[int, ...]) -> dict[tuple[int, int], list[int]]:
    """The ranks whose terms belong together: of one copy and, where parts hold different regions, of one part."""
    pieces, found = layout.pieces(shape), {}
    for rank, p, _ in layout.places():
        found.setdefault((pieces[rank].copy, p if layout.across >= 0 else 0), []).append(rank)
    return found


def index(box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in box)


def scatter(x: np.ndarray, layout: Layout, draw: np.random.Generator) -> dict[int, np.ndarray]:
    """Parts that stand for `x`: in every family, random terms that combine to `x` exactly (they are integers)."""
    pieces, found = layout.pieces(x.shape), {}
    for ranks in _families(layout, x.shape).values():
        names = list(dict.fromkeys(pieces[rank].term for rank in ranks))
        terms = draw.integers(-8, 9, (len(names), *x.shape)).astype(x.dtype)
        if layout.pending in (None, SUM):
            terms[-1] = x - terms[:-1].sum(0, dtype=x.dtype)
        else:
            bound = np.minimum if layout.pending == MAX else np.maximum
            terms = bound(terms, x)
            np.put_along_axis(terms, draw.integers(0, len(names), (1, *x.shape)), x[None], 0)
        for rank in ranks:
            found[rank] = terms[names.index(pieces[rank].term)][index(pieces[rank].box)].copy()
    return found


def check_parts(x: np.ndarray, layout: Layout, parts: dict[int, np.ndarray]) -> None:
    """Raise unless `parts` stand for `x`: duplicates equal, every family combining to `x` where it has elements."""
    pieces = layout.pieces(x.shape)
    combine = REDUCE[NAMES.get(layout.pending, "sum")] if layout.pending else None
    covered = np.zeros(x.shape, bool)
    for ranks in _families(layout, x.shape).values():
        terms: dict[object, tuple[np.ndarray, np.ndarray]] = {}
        for rank in ranks:
            piece = pieces[rank]
            whole, known = terms.setdefault(piece.term, (np.zeros_like(x), np.zeros(x.shape, bool)))
            at = index(piece.box)
            assert parts[rank].shape == piece.shape
            assert (whole[at] == parts[rank])[known[at]].all(), "duplicates differ"
            whole[at], known[at] = parts[rank], True
        (total, region), *others = terms.values()
        for whole, known in others:
            assert (known == region).all(), "terms do not cover the same elements"
            total = combine(total, whole)
        np.testing.assert_array_equal(total[region], x[region])
        covered |= region
    assert covered.all()


def lower_bound(src: Layout, dst: Layout, shape: tuple[int, ...]) -> int:
    """Elements that must cross: for every needer its terms that it does not own, of the best copy.

    Ranks that will hold different terms of one value must choose the same copy, others choose alone.
    """
    before, after = src.pieces(shape), dst.pieces(shape)
    total = 0
    for ranks in _families(dst, shape).values():
        alone = len({after[rank].term for rank in ranks}) == 1
        for unit in [[rank] for rank in ranks] if alone else [ranks]:
            costs = [
                sum(_missing(before, copy, rank, after[rank], shape) for rank in unit)
                for copy in sorted({piece.copy for piece in before.values()})
            ]
            total += int(np.min(costs, 0).sum())
    return total


def _missing(before: dict, copy: int, target: int, wanted, shape: tuple[int, ...]) -> np.ndarray:
    """How many terms of each element `target` needs from others, if it takes all from `copy`."""
    somewhere: dict[object, np.ndarray] = {}
    here: dict[object, np.ndarray] = {}
    for rank, piece in before.items():
        if piece.copy == copy:
            at = index(piece.box)
            somewhere.setdefault(piece.term, np.zeros(shape, bool))[at] = True
            here.setdefault(piece.term, np.zeros(shape, bool))[at] |= rank == target
    missing = np.zeros(shape, int)
    for term in somewhere:
        if all(dict(term).get(axis, 0) == at for axis, at in wanted.term):
            missing += somewhere[term] & ~here[term]
    needed = np.zeros(shape, int)
    needed[index(wanted.box)] = 1
    return missing * needed

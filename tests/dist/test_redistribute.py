"""Any layout to any other: equal to the oracle, by collectives and by batched send/receive, at the least bytes."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random

import numpy as np
import pytest

from hetu.core.errors import ArgumentError, DTypeError, ShapeError
from hetu.dist import DUP, MAX, MIN, SUM, Layout, Mesh, SerialComm, Shard, plan, redistribute, run_ranks
from hetu.dist.layout.redistribute import _plan, cut_first

from .layouts import check_parts, lower_bound, random_pair, random_unequal, scatter

PAIRS = 300  # for every number of ranks


def run_all(n, cases, generic=False):
    """The parts after every case on all ranks, and the elements each rank sent as messages."""

    def body(comm):
        sent, send = [0], comm.exchange

        def counted(sends, recvs):
            sent[0] += sum(x.size for _, x in sends)
            send(sends, recvs)

        comm.exchange = counted
        results = []
        for (src, dst, shape), parts in cases:
            way, before = plan(src, dst, shape), sent[0]
            if generic:
                way = dataclasses.replace(way, kind="batched", collectives=())
            out = np.full(way.after[comm.rank].shape, 77.0) if comm.rank in way.after else None
            way.run(comm, parts.get(comm.rank), out)
            results.append((out, sent[0] - before))
        return results

    outcome = run_ranks(n, body, rendezvous=True)
    return [({r: outcome[r][i][0] for r in range(n)}, sum(o[i][1] for o in outcome)) for i in range(len(cases))]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", [2, 3, 4, 6, 8])
def test_random_pairs(n):
    draw, values = random.Random(n), np.random.default_rng(n)
    pairs = [random_pair(draw, n) for _ in range(PAIRS)]
    tensors = [values.integers(-9, 10, shape).astype(float) for _, _, shape in pairs]
    cases = [(pair, scatter(x, pair[0], values)) for pair, x in zip(pairs, tensors)]
    fast, generic = run_all(n, cases), run_all(n, cases, generic=True)
    kinds = collections.Counter()
    for (src, dst, shape), x, (by_plan, _), (by_messages, sent) in zip(pairs, tensors, fast, generic):
        for parts in (by_plan, by_messages):
            try:
                check_parts(x, dst, parts)
            except AssertionError as error:
                raise AssertionError(f"{plan(src, dst, shape)} of shape {shape}") from error
        assert sent == lower_bound(src, dst, shape), plan(src, dst, shape)
        kinds[plan(src, dst, shape).kind] += 1
    assert {"nothing", "slice", "all_reduce", "reduce_scatter", "all_gather", "batched"} <= set(kinds), kinds


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", [3, 5, 8])
def test_what_unequal_groups_divide_is_reduced_and_gathered_by_no_more_bytes_and_messages(n):
    draw, values = random.Random(n), np.random.default_rng(n)
    cases = [random_unequal(draw, n) for _ in range(PAIRS)]
    tensors = [values.integers(-9, 10, shape).astype(float) for _, _, shape in cases]
    outcome = run_all(n, [(case, scatter(x, case[0], values)) for case, x in zip(cases, tensors)])
    kinds = collections.Counter()
    for (src, dst, shape), x, (parts, _) in zip(cases, tensors, outcome):
        check_parts(x, dst, parts)
        way, least = plan(src, dst, shape), lower_bound(src, dst, shape)
        kinds[way.kind] += 1
        assert way.moved == least or ("all_reduce" in way.kind and way.moved < least), way
        groups = [c.group for c in way.collectives if c.kind != "all_reduce"]
        pairs = {(t.source, t.target) for t in way.transfers if t.source != t.target}
        assert sum(len(group) * (len(group) - 1) for group in groups) <= len(pairs), way
    assert min(kinds[f"split_{kind}"] for kind in ("all_reduce", "reduce_scatter", "all_gather")), kinds


def with_other_shares(draw: random.Random, layout: Layout, ndim: int) -> Layout:
    """The same grid with other shares, and in one part with another role."""
    part, role = draw.choice(layout.parts), draw.choice([DUP, *range(ndim)])
    changed = Shard(part.ranks, ((role, part.axes[0][1]), *part.axes[1:]) if part.axes else ())
    parts = tuple(changed if p is part else p for p in layout.parts)
    return Layout(parts, layout.across, tuple(draw.randint(1, 3) for _ in parts) if layout.across >= 0 else ())


def test_collectives_reach_every_rank_that_needs_something():
    """Whoever receives something takes part, also where shares change for ranks whose roles do not."""
    draw, found = random.Random(5), 0
    while found < 60:
        src, _, shape = random_pair(draw, 6)
        if src.pending is not None or len(src.parts) < 2:
            continue
        way = plan(src, with_other_shares(draw, src, len(shape)), shape)
        found += bool(way.collectives)
        receiving = {t.target for t in way.transfers if t.source != t.target}
        assert not way.collectives or receiving <= way.of_rank.keys(), (way, shape)


def one(*axes, ranks=None):
    degree = int(np.prod([n for _, n in axes]))
    return Layout(Shard(tuple(range(degree)) if ranks is None else ranks, axes))


HETERO = (Shard((0, 1), ((1, 2),)), Shard((2,)))
KINDS = [
    ("nothing", one((0, 4)), one((0, 4)), 0),
    ("slice", one((DUP, 4)), one((0, 4)), 0),
    ("slice", one((DUP, 4)), one((SUM, 4)), 0),
    ("all_reduce", one((SUM, 4)), one((DUP, 4)), 2 * 3 * 64),
    ("all_reduce", one((SUM, 2), (SUM, 2)), one((DUP, 2), (DUP, 2)), 2 * 3 * 64),
    ("all_reduce", one((0, 2), (MAX, 2)), one((0, 2), (DUP, 2)), 2 * 1 * 64),
    ("reduce_scatter", one((SUM, 4)), one((1, 4)), 3 * 64),
    ("all_gather", one((1, 4)), one((DUP, 4)), 3 * 64),
    ("all_gather", one((0, 2), (1, 2)), one((DUP, 2), (DUP, 2)), 3 * 64),
    ("all_to_all", one((0, 4)), one((1, 4)), 3 * 16),
    ("all_to_all", one((0, 3)), one((1, 3)), 64 - (2 * 2 + 3 * 3 + 3 * 3)),
    ("send_recv", one((0, 2)), one((0, 2), ranks=(2, 3)), 64),
    ("batched", one((0, 2), (0, 2)), one((DUP, 2), (0, 2)), 4 * 16),
    ("batched", one((0, 4)), one((DUP, 3)), 16 * 3 + 3 * 48 - 48),
    ("split_all_reduce", Layout(HETERO, SUM), Layout(HETERO, DUP), 2 * 64),
    ("split_reduce_scatter", Layout(HETERO, SUM), Layout(HETERO, 0), 64),
    ("split_all_gather", Layout(HETERO, 0), Layout(HETERO, DUP), 64),
    ("batched", Layout(HETERO, SUM), Layout(HETERO, 0, (2, 1)), 64),  # no pieces of one size
]


@pytest.mark.parametrize(("kind", "src", "dst", "moved"), KINDS, ids=[f"{k}: {s} to {d}" for k, s, d, _ in KINDS])
def test_kind_and_traffic(kind, src, dst, moved):
    way = plan(src, dst, (8, 8))
    assert way.kind == kind
    if kind != "batched":
        assert way.moved == moved
    assert sum(np.prod(piece.shape) for piece in way.after.values()) >= 64


CUT = [  # from, to, what is cut out on the way, what leads on
    (one((SUM, 4), (DUP, 2)), one((DUP, 4), (0, 2)), one((SUM, 4), (0, 2)), "all_reduce"),
    (one((SUM, 4), (DUP, 2)), one((1, 4), (0, 2)), one((SUM, 4), (0, 2)), "reduce_scatter"),
    (one((0, 4), (DUP, 2)), one((DUP, 4), (1, 2)), one((0, 4), (1, 2)), "all_gather"),
    (one((SUM, 4), (DUP, 2)), one((DUP, 4), (DUP, 2)), None, ""),
    (one((DUP, 4)), one((0, 4)), None, ""),
    (one((0, 2)), one((0, 2), ranks=(2, 3)), None, ""),
]


@pytest.mark.parametrize(("src", "dst", "cut", "kind"), CUT)
def test_what_every_rank_has_is_cut_before_it_is_sent(src, dst, cut, kind):
    assert cut_first(src, dst, (8, 8)) == cut
    if cut is not None:
        way = plan(cut, dst, (8, 8))
        assert way.kind == kind and way.moved <= plan(src, dst, (8, 8)).moved


def test_collectives_of_pieces_that_differ_are_padded_if_that_is_little():
    for kind, src, dst in (("reduce_scatter", SUM, 0), ("all_gather", 0, DUP)):
        assert plan(one((src, 3)), one((dst, 3)), (9, 8)).kind == kind
        assert plan(one((src, 3)), one((dst, 3)), (8, 8)).kind == kind  # 2, 3 and 3 rows
        assert plan(one((src, 7)), one((dst, 7)), (3, 8)).kind == "batched"  # four of seven have none


def test_rule_t1():
    """One axis changes its role: a group collective (or a local slice) iff no later axis splits the old or new dim."""
    seen = collections.Counter()
    for roles in itertools.product([DUP, SUM, 0, 1], repeat=3):
        for position, role in itertools.product(range(3), [DUP, 0, 1]):
            if role == roles[position]:
                continue
            changed = [*roles[:position], role, *roles[position + 1 :]]
            src, dst = one(*((r, 2) for r in roles)), one(*((r, 2) for r in changed))
            later = roles[position + 1 :]
            allowed = not any(dim >= 0 and dim in later for dim in (roles[position], role))
            found = plan(src, dst, (16, 16)).kind not in ("batched", "send_recv")
            assert found == allowed, plan(src, dst, (16, 16))
            seen[allowed] += 1
    assert seen[True] > 200 and seen[False] > 100


def test_terms_inside_and_between_parts_do_not_pair_up():
    """Both parts have two ranks for every cell, but one has two terms there and the other two duplicates."""
    parts = (Shard((0, 1), ((SUM, 2),)), Shard((2, 3), ((DUP, 2),)))
    src, dst = Layout(parts, SUM), Layout(parts, DUP)
    x = np.arange(5.0)
    pieces = scatter(x, src, np.random.default_rng(0))
    check_parts(x, dst, dict(enumerate(run_ranks(4, lambda c: redistribute(c, pieces[c.rank], src, dst, x.shape)))))


def test_duplicates_share_the_sending():
    way = plan(one((DUP, 2)), one((0, 2), ranks=(2, 3)), (8,))
    assert [(t.source, t.target) for t in way.transfers] == [(0, 2), (1, 3)]


def test_plans_are_the_same_in_every_process():
    """Ranks derive their plans from equal, not the same, layouts; nothing may hang on identities."""
    draw = random.Random(0)
    for _ in range(50):
        src, dst, shape = random_pair(draw, 8)
        twin = Layout.from_json(src.to_json()), Layout.from_json(dst.to_json())
        first = plan(src, dst, shape)
        _plan.cache_clear()
        assert plan(*twin, shape) == first


def test_collectives_run_in_one_order_on_all_ranks():
    """Overlapping groups under rendezvous: ranks that took their groups in another order would deadlock."""
    parts = (Shard((0, 1, 2), ((0, 3),)), Shard((3, 4), ((0, 2),)), Shard((5,)))
    src, dst = Layout(parts, SUM), Layout(parts, DUP)
    x = np.arange(12.0).reshape(6, 2)
    pieces = scatter(x, src, np.random.default_rng(0))
    assert plan(src, dst, x.shape).kind == "split_all_reduce"
    outcome = run_ranks(6, lambda c: redistribute(c, pieces[c.rank], src, dst, x.shape), rendezvous=True)
    check_parts(x, dst, dict(enumerate(outcome)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "int8", "bool"])
@pytest.mark.parametrize("role", [MAX, MIN])
def test_identity_of_the_dtype(dtype, role):
    """A maximum that becomes pending, and the maximum of ranks that hold nothing (two rows on four ranks)."""
    x = np.array([[0, 1], [1, 0]]).astype(dtype)
    whole, pending = one((DUP, 4)), one((role, 4))
    outcome = run_ranks(4, lambda comm: redistribute(comm, x, whole, pending, x.shape))
    combine = np.maximum if role == MAX else np.minimum
    np.testing.assert_array_equal(combine.reduce(outcome), x)
    assert all(part.dtype == x.dtype for part in outcome)
    split = one((0, 4))
    outcome = run_ranks(4, lambda comm: redistribute(comm, outcome[comm.rank], pending, split, x.shape))
    np.testing.assert_array_equal(np.concatenate(outcome), x)


def test_terms_of_16_bits_are_added_in_32_and_rounded_once():
    """Three messages, as no group of all ranks takes part: step by step the small ones would be lost."""
    src, dst = one((SUM, 4)), one((DUP, 1), ranks=(4,))
    terms = [np.full(3, value, np.float16) for value in (2048, 1, 1, 1)]

    def run(comm):
        return redistribute(comm, [*terms, None][comm.rank], src, dst, (3,), dtype=np.float16)

    np.testing.assert_array_equal(run_ranks(5, run)[4], np.float16(2051))


def test_data_times_tensor_parallel_mesh():
    mesh, x = Mesh((2, 2), ("data", "model")), np.arange(16.0).reshape(4, 4)
    src, dst = mesh.layout(data=SUM, model=1), mesh.layout(data=0, model=1)
    assert repr(plan(src, dst, (4, 4))).startswith("Redistribution(reduce_scatter on (0, 2), (1, 3)")
    parts = scatter(x, src, np.random.default_rng(0))
    outcome = run_ranks(4, lambda comm: redistribute(comm, parts[comm.rank], src, dst, x.shape))
    check_parts(x, dst, dict(enumerate(outcome)))


def test_input_is_left_alone_and_may_be_strided():
    x = np.arange(12.0).reshape(3, 4).T
    kept = x.copy()
    for dst in (one((DUP, 2)), one((0, 2))):
        outcome = run_ranks(2, lambda comm, dst=dst: redistribute(comm, x, one((SUM, 2)), dst, (4, 3)))
        check_parts(2 * kept, dst, dict(enumerate(outcome)))
        np.testing.assert_array_equal(x, kept)


def test_ranks_outside_pass_nothing():
    src, dst = one((0, 2)), one((DUP, 1), ranks=(2,))

    def body(comm):
        x = np.full((2, 3), comm.rank) if comm.rank < 2 else None
        return redistribute(comm, x, src, dst, (4, 3), dtype=int)

    first, second, third, fourth = run_ranks(4, body)
    assert first is second is fourth is None
    np.testing.assert_array_equal(third, np.repeat([[0], [1]], [2, 2], 0) * np.ones(3, int))


def test_mistakes():
    serial, here = SerialComm(), one((DUP, 1))
    with pytest.raises(ArgumentError, match="names rank 3"):
        redistribute(serial, np.zeros(4), here, one((0, 4)), (4,))
    with pytest.raises(ShapeError, match=r"x of shape \(3,\), its part has \(4,\)"):
        redistribute(serial, np.zeros(3), here, here, (4,))
    with pytest.raises(DTypeError):
        plan(here, here, (4,)).run(serial, np.zeros(4), np.zeros(4, "float32"))
    with pytest.raises(ArgumentError, match="holds nothing"):
        run_ranks(2, lambda c: redistribute(c, None, one((DUP, 1), ranks=(1 - c.rank,)), here, (4,)))
    assert redistribute(serial, np.float64(3).reshape(()), here, here, ()).shape == ()

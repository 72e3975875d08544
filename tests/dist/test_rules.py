"""Sharding rules: an operator on parts, in any layouts of its inputs, gives the parts of what it gives on the whole."""

from __future__ import annotations

import functools
import zlib

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import OPS
from hetu.dist import DUP, MAX, MIN, SUM, Layout, Mesh, Shard, run_ranks
from hetu.dist.cut.strategy import Strategy
from hetu.dist.layout.rules import rule_of
from hetu.dist.ops import shard

from ..pairs import in_turn
from ..samples import SAMPLES
from ..test_ops import as_tuple, built

GRIDS = {
    "2": Layout(Shard((0, 1), ((DUP, 2),))),
    "2x2": Mesh((2, 2), ("a", "b")).layout(),
    "2+1": Layout((Shard((0, 1), ((DUP, 2),)), Shard((2,)))),
}
SPLITTABLE = [s for s in SAMPLES if s.inputs and (len(s.inputs) > 1 or s.arrays()[0].ndim)]


def random_layout(rng: np.random.Generator, grid: Layout, x: np.ndarray) -> Layout:
    """Roles at random on the axes of a grid: any dimension, duplicates, or a pending extreme or sum of floats."""
    roles = [*range(x.ndim), *range(x.ndim), DUP, int(rng.choice([MAX, MIN] + [SUM] * 4 * (x.dtype.kind == "f")))]
    pick = lambda: roles[rng.integers(len(roles))]  # noqa: E731
    parts = tuple(Shard(p.ranks, tuple((pick(), n) for _, n in p.axes)) for p in grid.parts)
    across = pick() if len(parts) > 1 else DUP
    return Layout(parts, across)


# Two ranks find most mistakes of a rule, if they try several layouts; how grids of more play together is no operator's.
TRIED = {"2": 4, "2x2": 2, "2+1": 2}
CASES = [*((sample, "2") for sample in SPLITTABLE), *in_turn(6, SPLITTABLE, ["2x2", "2+1"])]


@pytest.mark.parametrize(("sample", "grid"), CASES, ids=lambda v: getattr(v, "id", v))
@pytest.mark.filterwarnings("ignore:operator .* has no dims rule")
@pytest.mark.sampled(16)
def test_operator_on_parts(sample, grid):
    """In several layouts at once: one program of them all takes hardly longer than one of each."""
    rng, base = np.random.default_rng(zlib.crc32(f"{sample.id} {grid}".encode())), GRIDS[grid]
    nodes, feed = built(sample)
    wanted = ht.Executor(list(nodes)).run(feed)
    tried = [{n: random_layout(rng, base, a) for n, a in feed.items()} for _ in range(TRIED[grid])]
    outputs = [as_tuple(sample.build(*(shard(n, layout=layouts[n]) for n in feed))) for layouts in tried]

    def run(comm):
        return ht.Executor(sum(outputs, ()), strategy=Strategy(base), comm=comm, donate=False).run(feed)

    for results in run_ranks(len(base.ranks), run):
        for at, (got, want) in enumerate(zip(results, wanted * len(tried), strict=True)):
            close, layouts = 1e-9 if want.dtype == np.float64 else 1e-6, tried[at // len(wanted)]
            np.testing.assert_allclose(got, want, rtol=close, atol=close, err_msg=str([*layouts.values()]))


EXTREMES = {  # operator: what it is, of which dtype
    "minimum": (MIN, "float32"), "logical_and": (MIN, "bool"), "min": (MIN, "float32"), "all": (MIN, "bool"),
    "maximum": (MAX, "float32"), "logical_or": (MAX, "bool"), "max": (MAX, "float32"), "any": (MAX, "bool"),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("role", [SUM, MAX, MIN])
@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("again", [False, True])
def test_what_is_a_maximum_or_minimum_lets_those_pass_that_nobody_else_reads(name, role, again):
    extreme, dtype = EXTREMES[name]
    if dtype == "bool" and role == SUM:
        return  # there are none
    x, y = (ht.placeholder(name, (4, 3), dtype) for name in "xy")
    given = shard(x, layout=Mesh((2,), ("a",)).layout(a=role))
    folds = name in ("min", "max", "all", "any")
    made = OPS[name](given, axis=1) if folds else OPS[name](given, y)
    outputs = [made, ht.astype(given, "int64")] if again else [made]
    values = np.random.default_rng(0).integers(0, 2, (2, 4, 3)).astype(dtype)
    feed = dict(zip("x" if folds else "xy", values))

    def run(comm):
        ex = ht.Executor(outputs, strategy=Strategy(GRIDS["2"]), comm=comm)
        reduced = [s.node.shape for s in ex.program(feed).steps if s.node.op.collective == "all_reduce"]
        return ex.run(feed)[0], reduced

    (wanted, *_) = ht.Executor(outputs).run(feed)
    passes = role == extreme and not again
    for found, reduced in run_ranks(2, run):
        np.testing.assert_array_equal(found, wanted)
        assert reduced == [made.shape if passes else (4, 3)]


@pytest.mark.parametrize("ratio", [(), (3, 1), (1, 2)])
def test_merged_axes_are_split_by_whole_rows_among_unequal_groups_too(ratio):
    """By the shares of groups, and inside each; rows of any number, joined with the next axis or taken apart."""
    rows = Layout((Shard((0,), ((0, 1),)), Shard((1, 2), ((0, 2),))), 0, ratio)
    wanted = {n: np.arange(6.0 * n).reshape(n, 6) for n in (3, 4, 6, 8, 9, 12)}
    outputs = []
    for n in wanted:
        matrix, line = (ht.placeholder(f"{name}{n}", shape) for name, shape in (("x", (n, 6)), ("y", (6 * n,))))
        outputs += [ht.reshape(shard(matrix, layout=rows), (-1,)), ht.reshape(shard(line, layout=rows), (-1, 6))]
    feed = {f"x{n}": x for n, x in wanted.items()} | {f"y{n}": x.ravel() for n, x in wanted.items()}

    for results in run_ranks(3, lambda comm: ht.Executor(outputs, strategy=Strategy(rows), comm=comm).run(feed)):
        for got, want in zip(results, (made for x in wanted.values() for made in (x.ravel(), x)), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("channels", [False, True])
def test_a_part_of_a_dropout_mask_is_that_of_the_whole(channels):
    rng = np.random.default_rng(0)
    state = np.array([7, 3], np.uint64)
    dropped = functools.partial(OPS["dropout"].forward, np, rate=0.4, stream=11, channels=channels)
    for _ in range(50):
        shape = tuple(rng.integers(1, 9, 3))
        whole = dropped(np.ones(shape), state)
        low = [int(rng.integers(0, size)) for size in shape]
        high = [int(rng.integers(start, size + 1)) for start, size in zip(low, shape)]
        box = tuple(map(slice, low, high))
        window = tuple(zip(low, high, map(int, shape)))
        np.testing.assert_array_equal(dropped(np.ones(shape)[box], state, window=window), whole[box])


def rule(node):
    found = rule_of(node)
    return found.inputs, found.outputs


def test_a_rule_aligns_axes_from_the_last():
    x, b = ht.placeholder("x", (6, 4)), ht.placeholder("b", (4,))
    inputs, (out,) = rule(x + b)
    assert inputs == ((("~1",), ("~0",)), (("~0",),)) and out == inputs[0]


def test_axes_of_size_one_have_no_factor():
    node = ht.placeholder("x", (6, 1)) * ht.placeholder("y", (1, 4))
    assert rule(node) == (((("~1",), ()), ((), ("~0",))), ((("~1",), ("~0",)),))


def test_only_the_major_factor_of_a_merged_axis_splits():
    node = ht.reshape(ht.placeholder("x", (4, 6)), shape=(24,))
    found = rule_of(node)
    assert found.inputs == ((("a",), ("b",)),) and found.outputs == ((("a", "b"),),)
    assert found.can_split("a", 4) and not found.can_split("a", 3)  # a cut inside a row would not be one block
    assert not found.can_split("b", 2)


def test_a_factor_does_not_split_into_more_parts_than_it_has_elements():
    found = rule_of(ht.exp(ht.placeholder("x", (3,))))
    assert found.can_split("~0", 3) and not found.can_split("~0", 4)


def test_an_operator_without_a_rule_is_replicated_and_warned_of_once():
    @ht.op
    def cube_without_rule(xp, x):
        return x**3

    x = ht.placeholder("x", (4, 2))
    y = cube_without_rule(cube_without_rule(x))
    split = Mesh((2,), ("data",)).layout(data=0)
    feed = {"x": np.arange(8.0, dtype=np.float32).reshape(4, 2)}
    with pytest.warns(UserWarning, match="operator 'cube_without_rule' has no dims rule") as warned:
        found = run_ranks(
            2,
            lambda comm: ht.Executor([y], strategy=Strategy(GRIDS["2"], feeds={"x": split}), comm=comm).run(feed)[0],
        )
    assert len(warned) == 1
    np.testing.assert_array_equal(found[1], feed["x"] ** 9)

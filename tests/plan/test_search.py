"""The searches against brute force: every answer is compared with that of trying everything."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hetu as ht
from hetu.core.errors import ArgumentError, BudgetError
from hetu.dist import Link
from hetu.plan.search.candidates import Hints, candidates
from hetu.plan.search.elimination import Edge, eliminate, fastest_within
from hetu.plan.search.stage_cut import LayerCosts, cut_stages

# -- layers under a memory budget ---------------------------------------------------------------------------------


def taken(picks, seconds, nbytes) -> tuple[float, float]:
    """The bytes and the seconds of one choice."""
    return tuple(sum(of[i, s] for i, s in enumerate(picks)) for of in (nbytes, seconds))


def layers_of_random(seed: int, layers: int, strategies: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.random((layers, strategies)), rng.integers(0, 50, (layers, strategies)).astype(float)


@settings(max_examples=150)
@given(st.integers(1, 5), st.integers(1, 6), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_layers_within_a_budget_equal_brute_force(layers, strategies, slack, seed):
    seconds, nbytes = layers_of_random(seed, layers, strategies)
    least, most = nbytes.min(axis=1).sum(), nbytes.max(axis=1).sum()
    budget = float(np.floor(least - 1 + slack * (most - least + 2)))
    every = (taken(p, seconds, nbytes) for p in itertools.product(range(strategies), repeat=layers))
    fit = [took for kept, took in every if kept <= budget]
    if not fit:
        with pytest.raises(BudgetError, match=rf"{least - budget:,.0f} more than the budget"):
            fastest_within(seconds, nbytes, budget)
        return
    kept, took = taken(fastest_within(seconds, nbytes, budget), seconds, nbytes)
    assert kept <= budget and took == pytest.approx(min(fit), rel=1e-12)


def test_many_layers_with_few_levels_still_fit_and_are_near_the_optimum():
    layers, strategies = 24, 22  # the ways of a layer on 8 ranks in Galvatron's decision tree
    seconds, nbytes = layers_of_random(0, layers, strategies)
    least = nbytes.min(axis=1).sum()
    (exact, fine), (coarse, some) = (
        taken(fastest_within(seconds, nbytes, least + 200, levels), seconds, nbytes) for levels in (2000, 100)
    )
    assert max(exact, coarse) <= least + 200 and fine <= some <= 1.02 * fine
    tight, _ = taken(fastest_within(seconds, nbytes, least, levels=100), seconds, nbytes)
    assert tight == least  # the one choice that fits is found


# -- products of degrees ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "split", "count"), [(1, True, 1), (8, True, 16), (8, False, 6), (12, True, 28)])
def test_products_are_all_of_them_each_once(ranks, split, count):
    x = ht.placeholder("x", (None, 8))
    y = x @ ht.variable("w", ht.init.zeros, (8, 8)) if split else x * ht.variable("w", ht.init.zeros, ())
    found = [c.builder for c in candidates([y], ranks, Hints(), 48)]
    degrees = {(getattr(b, "stages", None) or 1, b.data, b.tensor) for b in found}
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    wanted = {of for of in itertools.product(divisors, repeat=3) if math.prod(of) == ranks and (split or of[2] == 1)}
    assert degrees == wanted and len(found) == len({repr(b) for b in found}) == count


# -- cutting into stages ------------------------------------------------------------------------------------------


def pass_seconds(layers: LayerCosts, starts: list[int], microbatches: int, link: Link) -> float:
    """Of a chain, one rank a stage: all stages once, and the slowest for all others, beside what ends the step late."""
    first, rest = 0.0, 0.0
    for k, (i, j) in enumerate(itertools.pairwise((*starts, len(layers.names)))):
        begin = first + (2 * link.message(layers.reads[i][i - 1]) if k else 0.0)
        once, adds, late = (sum(of[i:j]) for of in (layers.seconds, layers.adds, layers.updates))
        first, rest = begin + once, max(rest, (microbatches - 1) * (once + adds) + max(0.0, late - 2 / 3 * begin))
    return first + rest


@settings(max_examples=60)
@given(st.integers(1, 7), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_a_cut_is_about_as_fast_as_the_best_of_all(count, stages, seed):
    draw = np.random.default_rng(seed).random
    seconds, adds, updates, kept = draw((4, count)).tolist()
    reads = [{k - 1: int(8e8 * draw())} if k else {} for k in range(count)]
    layers = LayerCosts([*map(str, range(count))], seconds, [0.0] * count, adds, updates, kept, [0] * count, reads)
    link, microbatches = Link(1e-3, 1e9), 1 + int(4 * draw())
    every = [[0, *starts] for starts in itertools.combinations(range(1, count), stages - 1)]
    fit = [s for s in every if all(sum(kept[i:j]) < 2.0 for i, j in itertools.pairwise((*s, count)))]
    if not fit:
        with pytest.raises(ArgumentError, match=f"{count} layers, of up to .* fit into no stages on {stages} ranks"):
            cut_stages(layers, [1.0] * stages, microbatches, link, 2.0, sizes=(1,))
        return
    found, grids, cut = cut_stages(layers, [1.0] * stages, microbatches, link, 2.0, sizes=(1,))
    starts = [[*cut.values()].index(k) for k in range(stages)]
    assert grids == [(1, 1)] * stages and found == pytest.approx(pass_seconds(layers, starts, microbatches, link))
    assert starts in fit and found <= 1.15 * min(pass_seconds(layers, s, microbatches, link) for s in fit)


# -- graphs that are no chain -------------------------------------------------------------------------------------


def series_parallel(draw: random.Random, most: int = 7) -> tuple[int, list[tuple[int, int]]]:
    """A random one, grown from an edge: edges get an operator in their middle, a twin, or a leaf."""
    count, edges = 2, [(0, 1)]
    while count < most:
        u, v = draw.choice(edges)
        match draw.randrange(4):
            case 0:
                edges.remove((u, v))
                edges += [(u, count), (count, v)]
            case 1:
                edges.append((u, v))
                continue
            case 2:
                edges += [(u, count), (count, v)]
            case 3:
                edges.append((u, count))
        count += 1
    return count, edges


def graph_seconds(picks, nodes, edges) -> float:
    return sum(c[p] for c, p in zip(nodes, picks)) + sum(c[picks[u], picks[v]] for u, v, c in edges)


def brute_force(nodes, edges) -> float:
    return min(graph_seconds(p, nodes, edges) for p in itertools.product(*(range(len(c)) for c in nodes)))


def with_costs(draw: random.Random, count: int, pairs, choices: int) -> tuple[list[np.ndarray], list[Edge]]:
    rng = np.random.default_rng(draw.randrange(1 << 30))
    nodes = [rng.random(draw.randint(1, choices)) for _ in range(count)]
    return nodes, [(u, v, rng.random((len(nodes[u]), len(nodes[v])))) for u, v in pairs]


def test_elimination_equals_brute_force_on_200_series_parallel_graphs():
    sizes = Counter()
    for seed in range(200):
        draw = random.Random(seed)
        nodes, edges = with_costs(draw, *series_parallel(draw, draw.randint(2, 6)), choices=3)
        cost, picks = eliminate(nodes, edges)
        assert cost == pytest.approx(brute_force(nodes, edges))
        assert cost == pytest.approx(graph_seconds(picks, nodes, edges))
        sizes[len(nodes)] += 1
    assert len(sizes) == 5


def test_elimination_solves_graphs_that_do_not_reduce_too():
    draw = random.Random(0)
    complete = [*itertools.combinations(range(5), 2)]
    nodes, edges = with_costs(draw, 5, complete, choices=4)
    assert eliminate(nodes, edges)[0] == pytest.approx(brute_force(nodes, edges))
    apart = with_costs(draw, 4, [(0, 1)], choices=3)  # operators without an edge
    assert eliminate(*apart)[0] == pytest.approx(brute_force(*apart))


def test_a_long_series_parallel_graph_never_needs_a_table_of_more_than_two_others():
    draw = random.Random(1)
    nodes, edges = with_costs(draw, *series_parallel(draw, 150), choices=24)
    cost, picks = eliminate(nodes, edges)  # a table over three others would have 24^4 entries
    assert cost == pytest.approx(graph_seconds(picks, nodes, edges))


def test_a_table_that_would_be_too_large_is_refused():
    nodes = [np.zeros(30)] * 7
    edges = [(u, v, np.zeros((30, 30))) for u, v in itertools.combinations(range(7), 2)]
    with pytest.raises(ArgumentError, match="depends on 6 others at once: a table of 21,870,000,000 entries"):
        eliminate(nodes, edges)
    with pytest.raises(ArgumentError, match="join two operators"):
        eliminate(nodes, [(1, 1, np.zeros((30, 30)))])

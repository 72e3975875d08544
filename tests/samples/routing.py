"""Rows for the layout transform of a mixture of experts; the references are products with one-hot slots."""

from __future__ import annotations

import itertools

import numpy as np

import hetu as ht
from hetu.core.graph import OPS

from . import Sample, distinct, given, ints, real

NO_SCATTER = "the array API has no scatter"
SLOTS = given(np.array([[3, 0], [-1, 5], [2, -1], [4, -1]]))  # of 2 experts with 3 rooms each; slot 1 stays empty


def chosen(slots):
    """1 where a choice (tokens, k) has a slot."""
    return (slots[..., None] == np.arange(6)).astype(float)


def dispatched(x, slots, weights):
    return np.einsum("nks,nd,nk->sd", chosen(slots), x, weights).reshape(2, 3, -1)


def combined(y, slots, weights):
    return np.einsum("nks,sd,nk->nd", chosen(slots), y.reshape(6, -1), weights)


def products(x, y, slots):
    return np.einsum("nks,nd,sd->nk", chosen(slots), x, y.reshape(6, -1))


def of_groups(reference):
    """What a reference for one group gives for each."""
    return lambda *arrays: np.stack([reference(*parts) for parts in zip(*arrays)])


GROUPS = given(np.array([[[3, 0], [-1, 5], [2, -1], [4, -1]], [[0, 1], [2, 3], [-1, -1], [5, 4]]]))


def slots_one_by_one(experts):
    """First choices first; each takes the next room of its expert while there is one."""
    taken, slots = [0] * 4, np.full(experts.shape, -1)
    for k in range(experts.shape[1]):
        for n, expert in enumerate(experts[:, k]):
            if taken[expert] < 3:
                slots[n, k] = 3 * expert + taken[expert]
            taken[expert] += 1
    return slots


def best_of_all(scores):
    """Of all ways to give each of 2 experts at most 3 of 5 tokens that of the greatest sum."""
    ways = [way for way in itertools.product(range(2), repeat=5) if 2 <= sum(way) <= 3]
    return np.array(max(ways, key=lambda way: sum(scores[n, e] for n, e in enumerate(way))))


SAMPLES = [
    Sample("balanced_assignment", OPS["balanced_assignment"], (distinct(5, 2),), best_of_all, order=0),
    Sample(
        "moe_dispatch",
        lambda x, s, w: ht.moe_dispatch(x, s, w, experts=2, capacity=3),
        (real(4, 4), SLOTS, real(4, 2)),
        dispatched,
        strict=NO_SCATTER,
    ),
    Sample(
        "moe_dispatch",
        lambda x, s, w: ht.moe_dispatch(x, s, w, experts=2, capacity=3),
        (real(2, 4, 5), GROUPS, real(2, 4, 2)),
        of_groups(dispatched),
        label="groups",
        strict=NO_SCATTER,
    ),
    Sample(
        "moe_combine", ht.moe_combine, (real(2, 2, 3, 5), GROUPS, real(2, 4, 2)), of_groups(combined), label="groups"
    ),
    Sample(
        "moe_products",
        OPS["moe_products"],
        (real(2, 4, 5), real(2, 2, 3, 5), GROUPS),
        of_groups(products),
        label="groups",
    ),
    Sample("moe_combine", ht.moe_combine, (real(2, 3, 4), SLOTS, real(4, 2)), combined),
    Sample("moe_products", OPS["moe_products"], (real(4, 4), real(2, 3, 4), SLOTS), products),
    Sample(
        "moe_slots",
        lambda experts: ht.moe_slots(experts, count=4, capacity=3),
        (ints(9, 2, high=4),),
        slots_one_by_one,
        order=0,
    ),
    Sample(
        "moe_slots",
        lambda experts: ht.moe_slots(experts, count=4, capacity=3),
        (ints(2, 9, 2, high=4),),
        of_groups(slots_one_by_one),
        label="groups",
        order=0,
    ),
]

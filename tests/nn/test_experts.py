"""Mixtures of experts: what each gate chooses, by its definition; rooms; and experts that are shared by ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import hetu as ht
from hetu import dist, nn
from hetu.core.errors import ArgumentError, ShapeError
from hetu.core.graph import OPS
from hetu.dist import run_ranks
from hetu.ops import routing

TOKENS, FEATURES, EXPERTS = 24, 6, 4
RNG = np.random.default_rng(0)
X, IDS = RNG.standard_normal((TOKENS, FEATURES)).astype("float32"), RNG.integers(0, 50, TOKENS)


def softmax(x):
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def balanced(chances, first):
    shares = np.bincount(first, minlength=chances.shape[1]) / len(first)
    return chances.shape[1] * (shares * chances.mean(axis=0)).sum()


def top(chances, k):
    """The k likeliest experts, their chances, the first ones first."""
    order = np.argsort(-chances, axis=1)[:, :k]
    return order, np.take_along_axis(chances, order, axis=1)


def topk(weights, k):
    chances = softmax(X @ weights[0])
    order, kept = top(chances, k)
    return order, kept if k == 1 else kept / kept.sum(axis=1, keepdims=True), balanced(chances, order[:, 0])


def prototypes(weights):
    experts, kept, losses = [], [], []
    for group, weight in enumerate(weights):
        chances = softmax(X @ weight)
        order, best = top(chances, 1)
        experts.append(order + 2 * group)
        kept.append(best)
        losses.append(balanced(chances, order[:, 0]))
    return np.concatenate(experts, axis=1), np.concatenate(kept, axis=1), np.mean(losses)


def hashed(weights):
    return (IDS % EXPERTS)[:, None], np.ones((TOKENS, 1)), 0.0


def best(weights):
    scores = X @ weights[0]
    experts = scores.argmax(axis=1)[:, None]
    return experts, 1 / (1 + np.exp(-np.take_along_axis(scores, experts, axis=1))), 0.0


def groups(weights):
    chances = softmax(X @ weights[0])
    sums = chances.reshape(TOKENS, 2, 2).sum(axis=2)
    group = sums.argmax(axis=1)
    inside = chances.reshape(TOKENS, 2, 2)[np.arange(TOKENS), group]
    order, kept = top(inside, 2)
    experts = order + 2 * group[:, None]
    return experts, kept, balanced(chances, experts[:, 0]) + 1 - sums.max(axis=1).mean()


def dense(weights):
    chances = softmax(X @ weights[0] / 0.2)
    kept = np.where(chances > 0.3, chances, 0)
    return np.tile(np.arange(EXPERTS), (TOKENS, 1)), kept, balanced(chances, chances.argmax(axis=1))


GATES = {
    "top 1": (lambda: nn.TopKGate(FEATURES, EXPERTS), lambda w: topk(w, 1)),
    "top 3": (lambda: nn.TopKGate(FEATURES, EXPERTS, k=3), lambda w: topk(w, 3)),
    "prototypes": (lambda: nn.PrototypeGate(FEATURES, EXPERTS, k=2), prototypes),
    "hash": (lambda: nn.HashGate(EXPERTS), hashed),
    "balanced": (lambda: nn.BalancedGate(FEATURES, EXPERTS), best),
    "groups": (lambda: nn.GroupGate(FEATURES, EXPERTS, groups=2, k=2), groups),
    "dense to sparse": (lambda: nn.DenseToSparseGate(FEATURES, EXPERTS, temperature=0.2, threshold=0.3), dense),
}
each_gate = pytest.mark.parametrize("name", GATES)


def given():
    return ht.placeholder("x", (None, FEATURES)), ht.placeholder("ids", (None,), "int64")


def fed(name):
    return {"x": X, "ids": IDS} if name == "hash" else {"x": X}


@pytest.mark.sampled(3)
@each_gate
def test_a_gate_chooses_as_it_is_defined(name):
    build, wanted = GATES[name]
    choice = build()(*given())
    executor = ht.Executor([*choice])
    variables = sorted(executor.variables, key=lambda v: v.serial)
    weights = [RNG.standard_normal(v.shape) for v in variables if v.dtype == "float32"]
    for variable, weight in zip((v for v in variables if v.dtype == "float32"), weights):
        executor.state[variable] = weight
    for found, right in zip(executor.run(fed(name) if name != "hash" else {"ids": IDS, "x": X}), wanted(weights)):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("tokens", "experts"), [(7, 2), (6, 3), (5, 3), (1, 3), (4, 1)])
@pytest.mark.parametrize("ties", [False, True])
def test_a_balanced_assignment_is_the_best_of_all(tokens, experts, ties):
    rng, room = np.random.default_rng(tokens), -(-tokens // experts)
    for scale in (1e-300, 1e-15, 1.0, 1e15, 1e300):
        scores = (
            rng.integers(0, 3, (tokens, experts)) * scale if ties else rng.standard_normal((tokens, experts)) * scale
        )
        found = ht.evaluate(OPS["balanced_assignment"](scores))
        fitting = (
            sum(scores[n, e] for n, e in enumerate(every))
            for every in itertools.product(range(experts), repeat=tokens)
            if np.bincount(every, minlength=experts).max() <= room
        )
        assert np.bincount(found, minlength=experts).max() <= room
        assert scores[np.arange(tokens), found].sum() == pytest.approx(max(fitting), abs=0)


@pytest.mark.parametrize(("tokens", "experts"), [(0, 3), (2, 4), (6, 3), (7, 2)])
@pytest.mark.parametrize("odd", [[np.inf], [-np.inf], [np.nan], [np.inf, -np.inf, np.nan]])
def test_scores_that_are_no_numbers_are_assigned_as_well(tokens, experts, odd):
    rng, room = np.random.default_rng(tokens), -(-tokens // experts)

    def worth(every):
        taken = scores[np.arange(tokens), [*every]]
        return (taken == np.inf).sum() - (~(taken > -np.inf)).sum(), taken[np.isfinite(taken)].sum()

    for share in (0.1, 0.5, 1.0):
        scores = rng.standard_normal((tokens, experts))
        changed = rng.random(scores.shape) < share
        scores[changed] = rng.choice(odd, changed.sum())
        found = ht.evaluate(OPS["balanced_assignment"](scores.reshape(-1, experts))).tolist()
        every = itertools.product(range(experts), repeat=tokens)
        fitting = [way for way in every if np.bincount(way, minlength=experts).max(initial=0) <= room]
        assert tuple(found) in fitting
        assert worth(found) == pytest.approx(max(map(worth, fitting)))


def test_tokens_that_are_alike_are_moved_together(monkeypatch):
    """4,096 of them took a search each, and seconds a layer: padding is such."""
    searched = []
    monkeypatch.setattr(
        routing, "_cheapest_chain", lambda *a, search=routing._cheapest_chain: searched.append(0) or search(*a)
    )
    for kinds in (1, 3):
        searched.clear()
        scores = np.tile(np.random.default_rng(kinds).standard_normal((kinds, 16)), (1024 // kinds, 1))
        found = ht.evaluate(OPS["balanced_assignment"](scores))
        assert np.bincount(found, minlength=16).max() <= 64 and len(searched) < 100


def test_a_balanced_gate_gives_each_expert_as_many_tokens_in_training_and_the_best_else():
    x, _ = given()
    gate = nn.BalancedGate(FEATURES, EXPERTS)
    choice = gate(x)
    updates = ht.optim.SGD(0.0).minimize(ht.mean(choice.weights))
    executor = ht.Executor({"train": [choice.experts, updates], "eval": [choice.experts]})
    executor.state[gate.linear.weight] = np.eye(FEATURES, EXPERTS) + [9, 0, 0, 0]  # all want the first
    skewed = {"x": np.abs(X)}
    assert np.bincount(executor.run("train", skewed)[0].ravel(), minlength=EXPERTS).tolist() == [TOKENS // EXPERTS] * 4
    assert np.bincount(executor.run("eval", skewed)[0].ravel(), minlength=EXPERTS)[0] > TOKENS // 2


def test_a_gate_grows_sparse_as_its_temperature_falls():
    x, _ = given()
    with ht.scope("cooling"):  # so that it draws the same numbers, whatever has been built before
        gate = nn.DenseToSparseGate(FEATURES, EXPERTS, temperature=ht.schedules.exponential(4.0, 0.01, every=40))
        chosen = gate(x)
    active = ht.mean(ht.sum(ht.astype(chosen.weights > 0, "float32"), axis=1))
    updates = ht.optim.Adam(0.01).minimize(-ht.mean(ht.sum(ht.square(chosen.weights), axis=1)))
    executor = ht.Executor([active, updates])
    counts = [float(executor.run({"x": X})[0]) for _ in range(60)]
    smooth = np.convolve(counts, np.ones(8) / 8, "valid")
    assert counts[0] == EXPERTS and smooth[-1] <= 1.2
    assert (np.diff(smooth) <= 0.1).all() and int(executor.state[gate.step]) == 60


def layer(gate, capacity):
    x, ids = given()
    with ht.scope("layer"):
        mixture = nn.MixtureOfExperts(FEATURES, 5, EXPERTS, gate(), capacity=capacity)
        y, loss = mixture(x, ids)
        return mixture, y, ht.mean(ht.square(y - x)) + 0.1 * loss


@pytest.mark.parametrize("capacity", [None, 0.5])
def test_tokens_go_through_their_experts_as_far_as_these_have_room(capacity):
    mixture, y, _ = layer(lambda: nn.TopKGate(FEATURES, EXPERTS, k=2), capacity)
    executor = ht.Executor([y])
    found = executor.run({"x": X})[0]
    gate, up, up_bias, down, down_bias = (executor.state[v] for v in (mixture.gate.linear.weight, *mixture.parts))
    experts, weights, _ = topk([gate], 2)
    room = TOKENS if capacity is None else -(-TOKENS * 2 * 50 // (100 * EXPERTS))
    wanted, taken = np.zeros_like(X), [0] * EXPERTS
    for choice, n in itertools.product(range(2), range(TOKENS)):
        e = experts[n, choice]
        taken[e] += 1
        if taken[e] <= room:
            hidden = np.maximum(X[n] @ up[e] + up_bias[e], 0)
            wanted[n] += weights[n, choice] * (hidden @ down[e] + down_bias[e])[0]
    assert capacity is None or max(taken) > room
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_all_experts_begin_with_the_first_less_a_share_of_their_own():
    mixture, *_ = layer(lambda: nn.TopKGate(FEATURES, EXPERTS), None)
    executor = ht.Executor([mixture.first(ht.placeholder("x", (None, FEATURES)))])
    executor.state[mixture.up_bias] = RNG.standard_normal(mixture.up_bias.shape)
    before = [executor.state[part] for part in mixture.parts]
    up, up_bias, down, down_bias = (value[0] for value in before)
    wanted = np.maximum(X @ up + up_bias, 0) @ down + down_bias
    np.testing.assert_allclose(executor.run({"x": X})[0], wanted, rtol=1e-4, atol=1e-5)
    mixture.diversify(executor.state, masked=0.0)
    assert all((executor.state[part] == value[:1]).all() for part, value in zip(mixture.parts, before))
    mixture.diversify(executor.state, masked=0.5, seed=1)
    after = executor.state[mixture.up]
    kept = after != 0
    np.testing.assert_array_equal(after[kept], np.broadcast_to(up, after.shape)[kept])
    assert all(0.2 < each.mean() < 0.8 for each in kept) and (kept[0] != kept[1]).any()
    with pytest.raises(ArgumentError, match="masked=1.0[^§]*share of numbers that become 0"):
        mixture.diversify(executor.state, masked=1.0)


@pytest.mark.usefixtures("meaning")
def test_experts_that_are_spread_are_not_diversified():
    def work(comm):
        mixture, _, loss = layer(lambda: nn.TopKGate(FEATURES, EXPERTS), None)
        executor = ht.Executor([loss], strategy=dist.ExpertParallel(), comm=comm)
        executor.run({"x": X})
        with pytest.raises(ArgumentError, match="this rank has a part of 'layer/.*experts/up' alone"):
            mixture.diversify(executor.state, masked=0.1)

    run_ranks(2, work)


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("meaning")
@each_gate
def test_four_ranks_share_experts_and_train_as_one_process_does(name):
    def losses(comm=None):
        _, _, loss = layer(GATES[name][0], None)
        strategy = dist.ExpertParallel() if comm else None
        executor = ht.Executor([loss, ht.optim.Adam(0.01).minimize(loss)], strategy=strategy, comm=comm)
        return [float(executor.run(fed(name))[0]) for _ in range(4)]

    alone = losses()
    for found in run_ranks(4, losses):
        np.testing.assert_allclose(found, alone, atol=1e-5, rtol=0)
    assert alone[-1] < alone[0]


MISTAKES = [
    (lambda: nn.TopKGate(6, 4, k=5), "k=5 of 4 experts"),
    (lambda: nn.PrototypeGate(6, 4, k=3), "4 experts in 3 groups"),
    (lambda: nn.GroupGate(6, 8, groups=4, k=3), "3 of 8 experts in 4 groups"),
    (lambda: nn.MixtureOfExperts(6, 5, 3, nn.TopKGate(6, 5)), "3 experts by a gate that chooses among 5"),
    (lambda: nn.MixtureOfExperts(6, 5, 5, nn.PrototypeGate(6, 4)), "5 experts by a gate that chooses among 4"),
    (lambda: nn.MixtureOfExperts(6, 5, 4, nn.HashGate(4), capacity=0.001), "capacity=0.001"),
    (lambda: nn.MixtureOfExperts(6, 5, 4, nn.HashGate(4), capacity=-1.0), "capacity=-1.0"),
    (lambda: nn.MixtureOfExperts(6, 5, 4, nn.HashGate(4), capacity=float("nan")), "capacity=nan"),
    (lambda: nn.MixtureOfExperts(6, 5, 4, nn.HashGate(4), capacity=float("inf")), "capacity=inf"),
    (lambda: nn.DenseToSparseGate(6, 4, temperature=0.0), "temperature=0.0"),  # all tokens were left out
    (lambda: nn.DenseToSparseGate(6, 4, temperature=-1.0), "temperature=-1.0"),
    (lambda: nn.DenseToSparseGate(6, 4, temperature=float("nan")), "temperature=nan"),
    (lambda: nn.DenseToSparseGate(6, 4, temperature=1.0, threshold=1.0), "threshold=1.0"),
    (lambda: nn.HashGate(4)(given()[0]), "goes by the ids of tokens, and was given none"),
]


@pytest.mark.parametrize(("build", "said"), MISTAKES, ids=[said for _, said in MISTAKES])
def test_a_mistake_is_told(build, said):
    with pytest.raises(ArgumentError, match=said):
        build()


def test_scores_are_a_row_for_each_token():
    with pytest.raises(ShapeError, match=r"wanted \(tokens, experts\)"):
        OPS["balanced_assignment"](np.ones(3))

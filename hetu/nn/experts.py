"""A mixture of experts: a gate sends each token to a few of many small networks, and weighs what they make of it.

Gates differ in what they choose and in the loss that keeps experts busy; each is a layer from tokens (n, features),
and their ids where it goes by these, to a `Routed`. Ranks share the experts by
`dist.ExpertParallel()`; how tokens travel is in `ops/routing.py`. X. Nie et al., "HetuMoE", 2022. Left
out: groups of tokens that compete apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import ops
from ..core.errors import ArgumentError
from ..core.graph import Node, tagged
from ..core.leaf import seed_of, variable
from ..core.operators import if_training, with_updates
from ..core.types import Size
from ..init import xavier_uniform, zeros
from ..ops.routing import balanced_assignment
from ..ranges import AtLeast1, Positive, Seed
from ..schedules import RateSchedule
from .dense import Linear
from .layer import Activation, Layer, check_sizes, width


class Routed(NamedTuple):
    """The experts (tokens, k) of each token, the first ones first; the weights (tokens, k) of what they make, 0 for one
    that is left out; and a scalar that is least where all experts have as much to do."""

    experts: Node
    weights: Node
    loss: Node


class TopKGate(Layer):
    """The `k` experts of the greatest probability. With k = 1 the gate of Switch, with 2 that of GShard.

    Weights are the probabilities, of several divided by their sum; the loss is that of `balance`. W. Fedus et al.,
    "Switch Transformers", 2021, section 2.2; D. Lepikhin et al., "GShard", 2020, algorithm 1.

    >>> import hetu as ht
    >>> TopKGate(16, 4, k=2)(ht.placeholder("x", (10, 16))).weights.shape
    (10, 2)
    """

    def __init__(self, features: AtLeast1, experts: AtLeast1, *, k: AtLeast1 = 1, name: str | None = None) -> None:
        check_sizes(features=features, experts=experts, k=k)
        if k > experts:
            raise ArgumentError(f"k={k} of {experts} experts", fix="choose no more than there are")
        super().__init__(name)
        self.experts, self.k = experts, k
        with self.naming():
            self.linear = Linear(features, experts, bias=False, name="linear")

    def forward(self, x: Node, ids: Node | None = None) -> Routed:
        probabilities = ops.softmax(self.linear(x), axis=1)
        weights, experts = ops.topk(probabilities, k=self.k, axis=1)
        if self.k > 1:
            weights = weights / ops.sum(weights, axis=1, keepdims=True)
        return Routed(experts, weights, balance(probabilities, experts[:, 0]))


class PrototypeGate(Layer):
    """Experts in `k` groups, the best of each: k top-1 gates beside each other, which cost no more than one.

    A. Yang et al., "M6-T: Exploring Sparse Expert Models and Beyond", 2021, section 3.2 (k top-1).

    >>> import hetu as ht
    >>> PrototypeGate(16, 4, k=2)(ht.placeholder("x", (10, 16))).experts.shape
    (10, 2)
    """

    def __init__(self, features: AtLeast1, experts: AtLeast1, *, k: AtLeast1 = 2, name: str | None = None) -> None:
        check_sizes(features=features, experts=experts, k=k)
        if experts % k:
            raise ArgumentError(f"{experts} experts in {k} groups", fix="choose a k that divides them")
        super().__init__(name)
        self.experts, self.k = experts, k
        with self.naming():
            self.gates = [TopKGate(features, experts // k, name=f"gate_{group}") for group in range(k)]

    def forward(self, x: Node, ids: Node | None = None) -> Routed:
        made = [gate(x) for gate in self.gates]
        experts = [choice.experts + group * (self.experts // self.k) for group, choice in enumerate(made)]
        weights = ops.concat([choice.weights for choice in made], axis=1)
        loss = sum((choice.loss for choice in made[1:]), made[0].loss) / self.k
        return Routed(ops.concat(experts, axis=1), weights, loss)


class HashGate(Layer):
    """The expert of the token's id: its remainder by their number. S. Roller et al., "Hash Layers", NeurIPS 2021.

    >>> import hetu as ht
    >>> ids = ht.placeholder("ids", (10,), "int64")
    >>> HashGate(4)(ht.placeholder("x", (10, 16)), ids).experts.shape
    (10, 1)
    """

    def __init__(self, experts: AtLeast1, *, name: str | None = None) -> None:
        check_sizes(experts=experts)
        super().__init__(name)
        self.experts = experts

    def forward(self, x: Node, ids: Node | None = None) -> Routed:
        if ids is None:
            raise ArgumentError(f"{self.name} goes by the ids of tokens, and was given none", fix="pass layer(x, ids)")
        experts = ops.expand_dims(ids % self.experts, axis=1)
        return Routed(experts, ops.ones_like(x[:, :1]), ops.full((), 0.0))


class BalancedGate(Layer):
    """As many tokens for each expert, of the greatest sum of scores; in evaluation the best expert of each token.

    The weight is the logistic function of the score, so that scores are learned. M. Lewis et al., "BASE Layers", ICML
    2021, sections 3.1 and 3.2.

    >>> import hetu as ht
    >>> BalancedGate(16, 4)(ht.placeholder("x", (10, 16))).experts.shape
    (10, 1)
    """

    def __init__(self, features: AtLeast1, experts: AtLeast1, *, name: str | None = None) -> None:
        check_sizes(features=features, experts=experts)
        super().__init__(name)
        self.experts = experts
        with self.naming():
            self.linear = Linear(features, experts, bias=False, name="linear")

    def forward(self, x: Node, ids: Node | None = None) -> Routed:
        scores = self.linear(x)
        best = if_training(balanced_assignment(scores), ops.argmax(scores, axis=1))
        experts = ops.expand_dims(best, axis=1)
        weights = ops.sigmoid(ops.take_along_axis(scores, experts, axis=1))
        return Routed(experts, weights, ops.full((), 0.0))


class GroupGate(Layer):
    """One group of experts for each token, and the `k` best in it, so that a token travels to one place alone.

    The group of the greatest sum of probabilities is taken; the loss also wants that sum to be all. H. Jiang et al.,
    "Towards More Effective and Economic Sparsely-Activated Model", 2021 ("switch and mixture", SAM).

    >>> import hetu as ht
    >>> GroupGate(16, 8, groups=4, k=2)(ht.placeholder("x", (10, 16))).experts.shape
    (10, 2)
    """

    def __init__(
        self, features: AtLeast1, experts: AtLeast1, *, groups: AtLeast1, k: AtLeast1 = 1, name: str | None = None
    ) -> None:
        check_sizes(features=features, experts=experts, groups=groups, k=k)
        if experts % groups or k > experts // groups:
            raise ArgumentError(f"{k} of {experts} experts in {groups} groups", fix="groups divide them, and hold k")
        super().__init__(name)
        self.experts, self.groups, self.k = experts, groups, k
        with self.naming():
            self.linear = Linear(features, experts, bias=False, name="linear")

    def forward(self, x: Node, ids: Node | None = None) -> Routed:
        probabilities = ops.softmax(self.linear(x), axis=1)
        size = self.experts // self.groups
        grouped = ops.reshape(probabilities, shape=(x.shape[0], self.groups, size))
        sums = ops.sum(grouped, axis=2)
        group = ops.expand_dims(ops.argmax(sums, axis=1), axis=1)
        places = ops.broadcast_to(ops.expand_dims(group, axis=2), shape=(x.shape[0], 1, size))
        inside = ops.squeeze(ops.take_along_axis(grouped, places, axis=1), axis=1)
        weights, experts = ops.topk(inside, k=self.k, axis=1)
        aside = 1 - ops.mean(ops.take_along_axis(sums, group, axis=1))
        experts = experts + group * size
        return Routed(experts, weights, balance(probabilities, experts[:, 0]) + aside)


class DenseToSparseGate(Layer):
    """All experts at first, and ever fewer as `temperature` falls: those of which the weight is above `threshold`.

    Weights are softmax(logits / temperature + Gumbel noise), noise only in training: the colder, the rarer it changes
    what is chosen. The temperature is a number, or one of `ht.schedules` by the steps of training. X. Nie et al.,
    "Dense-to-Sparse Gate for Mixture-of-Experts", 2021 (EvoMoE), section 4.2; there the noise is divided as well, so
    that at any temperature an expert is chosen as often as softmax(logits) says.

    >>> import hetu as ht
    >>> DenseToSparseGate(16, 4, temperature=2.0)(ht.placeholder("x", (10, 16))).experts.shape
    (10, 4)
    """

    def __init__(
        self,
        features: AtLeast1,
        experts: AtLeast1,
        *,
        temperature: Positive | RateSchedule,
        threshold: float = 1e-3,
        name: str | None = None,
    ) -> None:
        check_sizes(features=features, experts=experts)
        if not callable(temperature) and not 0 < temperature < math.inf:
            raise ArgumentError(f"temperature={temperature!r}", fix="pass a number above 0, or one of ht.schedules")
        if not 0 <= threshold < 1:
            raise ArgumentError(f"threshold={threshold!r}", fix="pass a weight from 0 to below 1, or none is above it")
        super().__init__(name)
        self.experts, self.temperature, self.threshold = experts, temperature, threshold
        with self.naming():
            self.linear = Linear(features, experts, bias=False, name="linear")
            self.step = variable("step", 0, (), "int64", trainable=False)

    def forward(self, x: Node, ids: Node | None = None) -> Routed:
        logits = self.linear(x)
        if callable(self.temperature):
            heat = ops.astype(self.temperature(self.step), logits.dtype)
            scores = with_updates(logits / heat, {self.step: self.step + 1})
        else:
            scores = logits / self.temperature
        weights = ops.softmax(if_training(scores + ops.gumbel(logits.shape), scores), axis=1)
        kept = ops.where(weights > self.threshold, weights, 0.0)
        experts = ops.broadcast_to(ops.arange(self.experts), shape=logits.shape)
        return Routed(experts, kept, balance(weights, ops.argmax(weights, axis=1)))


def balance(probabilities: Node, first: Node) -> Node:
    """experts * sum over experts of (share of tokens that choose it first * mean probability): 1 if all are alike.

    W. Fedus et al., "Switch Transformers", 2021, eq. 4.
    """
    count = width(probabilities)
    shares = ops.mean(ops.one_hot(first, depth=count, dtype="float32"), axis=0)
    return count * ops.sum(shares * ops.mean(probabilities, axis=0))


Gate = Callable[..., Routed]


class MixtureOfExperts(Layer):
    """Pairs of linear layers, of which a gate chooses for each token: (..., features) -> the same, and the gate's loss.

    Every expert has room for `capacity`, in hundredths, times k * tokens / experts tokens; a choice that finds none
    gives 0, beside which a residual connection stands. With `capacity=None` all find room.

    >>> import hetu as ht
    >>> layer = MixtureOfExperts(16, 32, 4, TopKGate(16, 4, k=2))
    >>> y, loss = layer(ht.placeholder("x", (None, 5, 16)))
    >>> y.shape[1:], loss.shape, layer.up.shape
    ((5, 16), (), (4, 16, 32))
    """

    def __init__(
        self,
        features: AtLeast1,
        hidden: AtLeast1,
        experts: AtLeast1,
        gate: Gate,
        *,
        capacity: Positive | None = 1.25,
        activation: Activation = ops.relu,
        name: str | None = None,
    ) -> None:
        check_sizes(features=features, hidden=hidden, experts=experts)
        if (chosen := getattr(gate, "experts", experts)) != experts:
            raise ArgumentError(f"{experts} experts by a gate that chooses among {chosen}", fix="give both as many")
        if capacity is not None and not 0.01 <= capacity < math.inf:
            raise ArgumentError(f"capacity={capacity!r}", fix="pass 0.01 or more, or None so that all find room")
        super().__init__(name)
        self.features, self.experts, self.gate, self.activation = features, experts, gate, activation
        self.percent = None if capacity is None else round(100 * capacity)
        with self.naming():
            self.up = variable("experts/up", xavier_uniform, (experts, features, hidden))
            self.up_bias = variable("experts/up_bias", zeros, (experts, 1, hidden))
            self.down = variable("experts/down", xavier_uniform, (experts, hidden, features))
            self.down_bias = variable("experts/down_bias", zeros, (experts, 1, features))
        self.parts = self.up, self.up_bias, self.down, self.down_bias

    def forward(self, x: Node, ids: Node | None = None) -> tuple[Node, Node]:
        self._check_axis(x, -1, self.features)
        tokens = ops.reshape(x, shape=(-1, self.features))
        choice: Routed = self.gate(tokens, None if ids is None else ops.reshape(ids, shape=(-1,)))
        room = self._room(tokens.shape[0], choice.experts.shape[1])
        slots = ops.moe_slots(choice.experts, count=self.experts, capacity=room)
        taken = ops.moe_dispatch(tokens, slots, ops.ones_like(choice.weights), experts=self.experts, capacity=room)
        made = self._made(taken, *self.parts)
        return ops.reshape(ops.moe_combine(made, slots, choice.weights), shape=x.shape), choice.loss

    def first(self, x: Node) -> Node:
        """What the first expert makes of all tokens, without the gate: (..., features) -> the same.

        For a training that begins with one expert, and goes on with copies of it: see `diversify`.
        """
        with tagged(layer=self.name):
            self._check_axis(x, -1, self.features)
            return self._made(x, *(part[0] for part in self.parts))

    def diversify(self, state: Any, *, masked: float, seed: Seed = 0) -> None:
        """Give all experts in `state` the numbers of the first, each less a share `masked` of its own, which is 0.

        X. Nie et al., "EvoMoE", 2021, section 4.1: what one expert has learned is where many begin, and what each
        lacks lets them differ. For one process; others read its checkpoint.

        >>> import hetu as ht
        >>> layer = MixtureOfExperts(16, 32, 4, TopKGate(16, 4))
        >>> executor = ht.Executor([layer.first(ht.placeholder("x", (None, 16)))])
        >>> layer.diversify(executor.state, masked=0.2)
        >>> up = executor.state[layer.up]
        >>> round(float((up == 0).mean()), 1), bool((up[0] == up[1]).all())
        (0.2, False)
        """
        if not 0 <= masked < 1:
            raise ArgumentError(f"masked={masked!r}", fix="pass the share of numbers that become 0, from 0 to below 1")
        values = {part: state[part] for part in self.parts}
        if split := [part for part, value in values.items() if value.shape != part.shape]:
            fix = "diversify in one process, save the state, and load that on all ranks"
            raise ArgumentError(f"this rank has a part of {split[0].name!r} alone", fix=fix)
        for part, value in values.items():
            kept = np.random.default_rng(seed_of(part, seed)).random(value.shape) >= masked
            state[part] = value[:1] * kept

    def _made(self, x: Node, up: Node, up_bias: Node, down: Node, down_bias: Node) -> Node:
        return self.activation(x @ up + up_bias) @ down + down_bias

    def _room(self, tokens: Size, k: Size) -> Size:
        if self.percent is None:
            return tokens
        return -(-tokens * k * self.percent // (100 * self.experts))

    def describe(self) -> str:
        return f"{self.experts} experts of {self.features} features"

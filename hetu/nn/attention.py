"""Attention with several heads, and the transformer block built on it.

For position codes add an `Embedding` of positions to the input. `Past` keeps keys and values for generation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import ops
from ..core.errors import ArgumentError
from ..core.graph import Node
from ..core.leaf import unique_name, variable
from ..init import zeros
from ..ranges import AtLeast1, Beta
from .dense import Dropout, Linear
from .layer import Activation, Layer, check_sizes, width
from .normalization import LayerNorm


class MultiHeadAttention(Layer):
    """Softmax-weighted sums of values, by `num_heads` heads. A. Vaswani et al., 2017, section 3.2.

    x (batch, time, features) asks `memory` (batch, length, features), by default x itself. With `causal`, a place sees
    only itself and earlier ones. `mask` is boolean, broadcasts to (batch, heads, time, length), and True means "may
    be seen". Four linear layers: query, key, value, output; splitting the columns of the first three splits heads.

    >>> import hetu as ht
    >>> MultiHeadAttention(64, 4, causal=True)(ht.placeholder("x", (None, 10, 64))).shape[1:]
    (10, 64)
    """

    def __init__(
        self,
        features: AtLeast1,
        num_heads: AtLeast1,
        *,
        causal: bool = False,
        bias: bool = True,
        name: str | None = None,
    ) -> None:
        check_heads(features, num_heads)
        super().__init__(name)
        self.features, self.heads, self.causal = features, num_heads, causal
        with self.naming():
            self.query, self.key, self.value, self.output = (
                Linear(features, features, bias=bias, name=part) for part in ("query", "key", "value", "output")
            )

    def forward(self, x: Node, memory: Node | None = None, *, mask: Any = None) -> Node:
        self._check_axis(x, -1, self.features, ndim=3)
        memory = x if memory is None else memory
        q, k, v = (heads_of(part, self.heads) for part in (self.query(x), self.key(memory), self.value(memory)))
        seen = ops.scaled_dot_product_attention(q, k, v, mask, causal=self.causal)
        return self.output(joined(seen))

    def describe(self) -> str:
        return f"{self.features} features, {self.heads} heads" + (", causal" if self.causal else "")


class TransformerBlock(Layer):
    """x + attention(norm(x)), then the same with a feed-forward pair of linear layers: the pre-norm form.

    (batch, time, features) -> the same; the inner width is `hidden`, by default 4 features. A. Vaswani et al., 2017;
    R. Xiong et al., "On Layer Normalization in the Transformer Architecture", ICML 2020, fig. 1b.

    >>> import hetu as ht
    >>> TransformerBlock(64, 4, causal=True)(ht.placeholder("x", (None, 10, 64))).shape[1:]
    (10, 64)
    """

    def __init__(
        self,
        features: AtLeast1,
        num_heads: AtLeast1,
        *,
        hidden: AtLeast1 | None = None,
        causal: bool = False,
        dropout: Beta = 0.0,
        activation: Activation = ops.gelu,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.features, self.heads = features, num_heads
        with self.naming():
            self.attention_norm = LayerNorm(features, name="attention_norm")
            self.attention = MultiHeadAttention(features, num_heads, causal=causal, name="attention")
            self.feed_forward_norm = LayerNorm(features, name="feed_forward_norm")
            self.up = Linear(features, hidden or 4 * features, activation=activation, name="up")
            self.down = Linear(hidden or 4 * features, features, name="down")
            self.dropout = Dropout(dropout, name="dropout")

    def forward(self, x: Node, *, mask: Any = None) -> Node:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask=mask))
        y = self.dropout(self.down(self.up(self.feed_forward_norm(x))))
        return x + y

    def describe(self) -> str:
        return f"{self.features} features, {self.heads} heads"


class DecoderBlock(Layer):
    """A causal transformer block that also attends to a memory: x + self(norm), + cross(norm, memory), + feed-forward.

    (n, t, features) and (n, s, features) -> (n, t, features); `mask` says what of the memory is seen.
    A. Vaswani et al., 2017, section 3.1, with norms in front.

    >>> import hetu as ht
    >>> x, memory = ht.placeholder("x", (None, 10, 64)), ht.placeholder("memory", (None, 7, 64))
    >>> DecoderBlock(64, 4)(x, memory).shape[1:]
    (10, 64)
    """

    def __init__(
        self, features: AtLeast1, num_heads: AtLeast1, *, dropout: Beta = 0.0, name: str | None = None
    ) -> None:
        super().__init__(name)
        with self.naming():
            self.itself = MultiHeadAttention(features, num_heads, causal=True)
            self.across = MultiHeadAttention(features, num_heads)
            self.norms = [LayerNorm(features) for _ in range(3)]
            self.up = Linear(features, 4 * features, activation=ops.gelu)
            self.down = Linear(4 * features, features)
            self.dropout = Dropout(dropout)

    def forward(self, x: Node, memory: Node, *, mask: Any = None) -> Node:
        x = x + self.dropout(self.itself(self.norms[0](x)))
        x = x + self.dropout(self.across(self.norms[1](x), memory, mask=mask))
        return x + self.dropout(self.down(self.up(self.norms[2](x))))


def check_heads(features: AtLeast1, heads: AtLeast1) -> None:
    """ArgumentError unless so many features divide into so many heads."""
    check_sizes(features=features, heads=heads)
    if features % heads:
        raise ArgumentError(f"{features} features do not divide into {heads} heads", fix="choose a divisor")


def heads_of(x: Node, heads: AtLeast1) -> Node:
    """(batch, time, features) -> (batch, heads, time, features / heads)."""
    batch, time, features = x.shape
    return ops.permute_dims(ops.reshape(x, shape=(batch, time, heads, features // heads)), (0, 2, 1, 3))


def joined(seen: Node) -> Node:
    """The inverse of `heads_of`."""
    batch, heads, time, features = seen.shape
    return ops.reshape(ops.permute_dims(seen, (0, 2, 1, 3)), shape=(batch, time, heads * features))


def rotation(positions: Node, features: AtLeast1, theta: float = 10000.0) -> tuple[Node, Node]:
    """Cosines and sines (time, features / 2) of position x theta^(-2 i / features).

    J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, eq. 15.
    """
    rates = (theta ** -(np.arange(0, features, 2) / features)).astype(np.float32)
    angles = ops.expand_dims(ops.astype(positions, "float32"), axis=1) * rates
    return ops.cos(angles), ops.sin(angles)


def rotated(x: Node, turns: tuple[Node, Node]) -> Node:
    """Pairs (i, i + features / 2) of (batch, heads, time, features) turned, the order of published weights.

    RoFormer, 2021, eq. 34, whose pairs are neighbors: the same but for the order of features.
    """
    (a, b), (cos, sin) = ops.split(x, 2, axis=-1), turns
    return ops.concat([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Past:
    """Keys and values of the positions read so far, up to `length` of them, which a step adds its own to.

    `positions` (time,) are those of the step. `updates` has the new values of the variables, for an executor to commit,
    `mask` (time, length) what each position may see. The variables begin with zeros: what is added is set.
    """

    def __init__(self, positions: Node, length: int) -> None:
        self.positions, self.length = positions, length
        self.updates: dict[Node, Node] = {}
        self.mask = ops.arange(length) <= ops.expand_dims(positions, axis=1)

    def extended(self, x: Node) -> Node:
        """Keys or values of the step, (batch, heads, time, features) -> those of all positions, in place of time."""
        batch, heads, features = width(x, 0), width(x, 1), width(x, 3)
        kept = variable(unique_name("past"), zeros, (self.length, batch, heads, features), trainable=False)
        self.updates[kept] = new = ops.scatter_add(kept, self.positions, ops.permute_dims(x, (2, 0, 1, 3)))
        return ops.permute_dims(new, (1, 2, 0, 3))

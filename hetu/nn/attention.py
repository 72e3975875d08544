"""Attention with several heads, and the transformer block built on it.

For position codes add an `Embedding` of positions to the input. Left out: caches for generation.
"""

from __future__ import annotations

from typing import Any

from .. import ops
from ..core.errors import ArgumentError
from ..core.graph import Node
from .dense import Dropout, Linear
from .layer import Activation, Layer, check_sizes
from .normalization import LayerNorm


class MultiHeadAttention(Layer):
    """Softmax-weighted sums of values, by `heads` heads of features / heads each. A. Vaswani et al., 2017, sect. 3.2.

    x (batch, time, features) asks `memory` (batch, length, features), by default x itself. With `causal`, a place sees
    only itself and earlier ones. `mask` is boolean, broadcasts to (batch, heads, time, length), and True means "may
    be seen". Four linear layers: query, key, value, output; splitting the columns of the first three splits heads.

    >>> import hetu as ht
    >>> MultiHeadAttention(64, 4, causal=True)(ht.placeholder("x", (None, 10, 64))).shape[1:]
    (10, 64)
    """

    def __init__(
        self, features: int, heads: int, *, causal: bool = False, bias: bool = True, name: str | None = None
    ) -> None:
        check_sizes(features=features, heads=heads)
        if features % heads:
            raise ArgumentError(f"{features} features do not divide into {heads} heads", fix="choose a divisor")
        super().__init__(name)
        self.features, self.heads, self.causal = features, heads, causal
        with self.naming():
            self.query, self.key, self.value, self.output = (
                Linear(features, features, bias=bias, name=part) for part in ("query", "key", "value", "output")
            )

    def forward(self, x: Node, memory: Node | None = None, *, mask: Any = None) -> Node:
        self._check_axis(x, -1, self.features, ndim=3)
        memory = x if memory is None else memory
        q, k, v = (self._split(part) for part in (self.query(x), self.key(memory), self.value(memory)))
        seen = ops.scaled_dot_product_attention(q, k, v, mask, causal=self.causal)
        return self.output(ops.reshape(ops.permute_dims(seen, (0, 2, 1, 3)), shape=x.shape))

    def _split(self, x: Node) -> Node:
        """(batch, time, features) -> (batch, heads, time, features / heads)."""
        batch, time, _ = x.shape
        heads = ops.reshape(x, shape=(batch, time, self.heads, self.features // self.heads))
        return ops.permute_dims(heads, (0, 2, 1, 3))

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
        features: int,
        heads: int,
        *,
        hidden: int | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        activation: Activation = ops.gelu,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.features, self.heads = features, heads
        with self.naming():
            self.attention_norm = LayerNorm(features, name="attention_norm")
            self.attention = MultiHeadAttention(features, heads, causal=causal, name="attention")
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

"""Models of text, from ids of characters or words to logits of what follows."""

from __future__ import annotations

import numpy as np

from .. import nn
from ..answers import answer_calls as _answer_calls
from ..core.autodiff import recompute as again
from ..core.graph import Node
from ..init import normal
from ..nn.layer import width

__all__ = ["RecurrentText", "gpt"]


def gpt(
    x: Node,
    vocabulary: int,
    *,
    features: int = 128,
    layers: int = 3,
    heads: int = 4,
    dropout: float = 0.0,
    recompute: bool = False,
) -> Node:
    """A decoder of transformer blocks: (n, length) ids -> (n, length, vocabulary) logits of the next ones.

    With `recompute`, gradients compute each block once more instead of keeping its inner values (`ht.recompute`).

    A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """
    length = width(x)
    h = nn.Embedding(vocabulary, features)(x) + nn.Embedding(length, features)(np.arange(length))
    for _ in range(layers):
        block = nn.TransformerBlock(features, heads, causal=True, dropout=dropout)
        h = again(block)(h) if recompute else block(h)
    return nn.Linear(features, vocabulary, bias=False, name="head")(nn.LayerNorm(features)(h))


class RecurrentText(nn.Layer):
    """Embedding, LSTM, linear: (n, time) ids and a first state to logits (n, time, vocabulary) and the last state.

    S. Hochreiter and J. Schmidhuber, "Long Short-Term Memory", 1997.
    """

    def __init__(self, vocabulary: int, units: int, features: int = 64, name: str | None = None) -> None:
        super().__init__(name)
        with self.naming():
            self.embedding = nn.Embedding(vocabulary, features, weight_init=normal(0.3))
            self.lstm = nn.LSTM(features, units)
            self.head = nn.Linear(units, vocabulary)

    def forward(self, x: Node, state: tuple[Node, Node] | None = None) -> tuple[Node, tuple[Node, Node]]:
        outputs, last = self.lstm(self.embedding(x), state)
        return self.head(outputs), last


_answer_calls(__name__)

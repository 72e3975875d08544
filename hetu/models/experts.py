"""Text by mixtures of experts: decoders whose feed-forward layers are many, of which a gate chooses for each token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import nn, ops
from ..answers import answer_calls as _answer_calls
from ..core.graph import Node
from ..nn.experts import Gate
from ..nn.layer import width

__all__ = ["gpt_of_experts"]


def gpt_of_experts(
    x: Node,
    vocabulary: int,
    gate: Callable[[], Gate],
    *,
    features: int = 64,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    experts: int = 4,
    capacity: float | None = 1.25,
) -> tuple[Node, Node]:
    """(n, length) ids -> (n, length, vocabulary) logits of the next ones, and the mean loss of the gates.

    `gate()` makes a gate of `experts` for tokens of `features`. W. Fedus et al., "Switch Transformers", 2021, figure 2.
    """
    length, losses = width(x), list[Node]()
    h = nn.Embedding(vocabulary, features)(x) + nn.Embedding(length, features)(np.arange(length))
    for _ in range(layers):
        h = h + nn.MultiHeadAttention(features, heads, causal=True)(nn.LayerNorm(features)(h))
        mixture = nn.MixtureOfExperts(features, hidden, experts, gate(), capacity=capacity, activation=ops.gelu)
        made, loss = mixture(nn.LayerNorm(features)(h), x)
        h = h + made
        losses.append(loss)
    logits = nn.Linear(features, vocabulary, bias=False)(nn.LayerNorm(features)(h))
    return logits, ops.mean(ops.stack(losses))


_answer_calls(__name__)

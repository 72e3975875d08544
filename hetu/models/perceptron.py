"""The network that models of clicks have beside what they compute of ids."""

from __future__ import annotations

from .. import nn, ops
from ..core.graph import Node
from ..nn.layer import width


def network(x: Node) -> Node:
    """Two hidden layers with dropout, and a logit: (n, features) -> (n,)."""
    layers = nn.Sequential(
        nn.Linear(width(x), 64, activation=ops.relu),
        nn.Dropout(0.2),
        nn.Linear(64, 64, activation=ops.relu),
        nn.Dropout(0.2),
        nn.Linear(64, 1),
    )
    return ops.squeeze(layers(x), axis=1)

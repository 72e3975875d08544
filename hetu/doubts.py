"""Graphs that run and cannot be meant: one warning with the user's line each, never an error.

Operators declare here that what they make are shares of a whole (softmax, sigmoid), losses that what they take is not
yet normalized. What only shows once a graph is run stands in `look/doubtful.py`.
"""

from __future__ import annotations

import warnings
from typing import Any

from .core.errors import Site
from .core.graph import Node
from .core.op import Op, Role

SHARES: set[Op[..., Any]] = set()  # operators whose results are from 0 to 1


def makes_shares(*ops: Op[..., Any]) -> None:
    """Declare that what operators make are probabilities."""
    SHARES.update(ops)


def takes_logits(loss: str, given: Node, wanted: str = "logits") -> None:
    """Doubt that a loss is given probabilities where it takes the numbers that they are made of."""
    node = given
    while node.role is Role.MOVE and node.inputs:
        node = node.inputs[0]
    if node.op in SHARES:
        inner = f"{loss} applies {node.op.name} itself" if wanted == "logits" else f"{loss} takes {wanted}"
        doubt(f"{inner}, and is given the result of {node.op.name}", f"pass {wanted}", node.site)


def doubt(said: str, fix: str, site: Site | None) -> None:
    """Warn once of a line of the user's."""
    text = f"{said}\n  fix: {fix}"
    if site is None:
        warnings.warn(text, stacklevel=3)
    else:
        warnings.warn_explicit(text, UserWarning, site.code.co_filename, site.line)

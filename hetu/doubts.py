"""Graphs that run and cannot be meant: one warning with the user's line each, never an error.

Operators declare here that what they make are shares of a whole (softmax, sigmoid), losses that what they take is not
yet normalized. What only shows once a graph is run stands in `look/doubtful.py`.

Targets that a loss is not defined for are no doubt but an error: constants when the loss is written, placeholders when
a graph is first run, and again at other sizes. Left out: later batches, as to look at each would take time.
"""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from .core.errors import Site, ValueRangeError, user_site
from .core.graph import Node
from .core.op import Op, Role

RANGES: WeakKeyDictionary[Node, tuple[str, Site | None]] = WeakKeyDictionary()  # targets, of which loss and where
KEEPING: set[Op[..., Any]] = set()  # operators whose results are the numbers that they are given
SHARES: set[Op[..., Any]] = set()  # operators whose results are from 0 to 1


def makes_shares(*ops: Op[..., Any]) -> None:
    """Declare that what operators make are probabilities."""
    SHARES.update(ops)


def keeps_numbers(*ops: Op[..., Any]) -> None:
    """Declare that what operators make are the numbers that they are given."""
    KEEPING.update(ops)


def takes_probabilities(loss: str, targets: Node) -> None:
    """Declare that a loss is defined for targets from 0 to 1."""
    node = targets
    while node.inputs and (node.role is Role.MOVE or node.op in KEEPING) and 0 not in node.op.like:
        if not node.op.differentiable:  # places and ids are read, as by `one_hot` and `argsort`, and do not pass
            return
        node = node.inputs[0]
    if node.role is Role.PLACEHOLDER:
        RANGES.setdefault(node, (loss, user_site()))
    elif node.role is Role.CONSTANT:
        check_probabilities(loss, np.asarray(node.attrs["value"]), user_site())


def check_probabilities(loss: str, values: Any, site: Site | None) -> None:
    """ValueRangeError unless all are from 0 to 1."""
    if values.size and not 0 <= values.min() <= values.max() <= 1 and not np.isnan(values.max()):
        fix = "divide counts by their sum, or map -1 and 1 to 0 and 1 by (y + 1) / 2"
        raise ValueRangeError(
            f"{loss} takes targets from 0 to 1, these are {float(values.min()):g} to {float(values.max()):g}",
            fix=fix,
            site=site,
        )


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

"""The plain meaning of a graph: every node's forward function, one after the other, nothing reused.

Tests compare the compiled program with it, and constant folding uses it. It does not update variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from .errors import HetuError
from .graph import Node, topological


def interpret(outputs: Sequence[Node], values: Mapping[Node, Any], xp: ModuleType = np) -> list[Any]:
    """The values of `outputs`, given those of placeholders and variables (and of any node that should be cut off)."""
    known: dict[Node, Any] = dict(values)
    stop = {n for n in known}
    for node in topological(outputs):
        if node in stop:
            continue
        arrays = [known[i] for i in node.inputs]
        if node.op.check_rule:
            try:
                node.op.check_rule(xp, *arrays, **node.attrs)
            except HetuError as error:
                raise error.raised_by(node.op.name, node.site) from error.__cause__
        known[node] = node.op.forward(xp, *arrays, **node.attrs)
    return [known[o] for o in outputs]

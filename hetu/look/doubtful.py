"""What can only be doubted once a graph is run: weights that nobody trained, updates that nobody runs, no dropout.

`doubt_of` is called when a sub-graph is compiled for the first time, or evaluated. Each finding is one warning with the
user's line. Graphs on several ranks are left alone: their values lie elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import numpy as np

from ..core.errors import user_site
from ..core.executor import DOUBTS
from ..core.graph import Node, topological
from ..core.leaf import random_state
from ..core.op import Role
from ..core.operators import if_training
from ..core.state import State, initial_value
from ..core.subgraph import SubGraph
from ..doubts import RANGES, check_probabilities, doubt
from ..optimizer import LOSSES

TRAINED: WeakValueDictionary[int, State] = WeakValueDictionary()  # what a sub-graph with updates has been compiled for
SEEN: WeakSet[SubGraph] = WeakSet()


def doubt_of(sub: SubGraph, state: State, fed: Mapping[str, Any]) -> None:
    """Warn of what cannot be meant about a sub-graph that is to be run on these values."""
    for name, node in sub.placeholders.items():
        if node in RANGES and name in fed:
            called, site = RANGES[node]
            check_probabilities(called, fed[name], site)
    if sub in SEEN:
        return
    SEEN.add(sub)
    fetched = [entry for entry in sub.entries if isinstance(entry, Node)]
    _updates_that_nobody_runs(fetched)
    if sub.updates:
        TRAINED[id(state)] = state
        for loss in [loss for loss, (made, _) in LOSSES.items() if any(made() is new for new in sub.updates.values())]:
            del LOSSES[loss]
    else:
        _no_dropout(sub.name, fetched)
        _initial_weights(sub, state)


def _updates_that_nobody_runs(fetched: list[Node]) -> None:
    for loss in fetched:
        made, site = LOSSES.get(loss, (None, None))
        if made is not None and made() is None:  # nobody holds them any more
            del LOSSES[loss]
            fix = "list what it returns: ht.Executor([loss, optimizer.minimize(loss)])"
            doubt("minimize returned updates that no executor was given, so nothing is trained", fix, site)


def _no_dropout(name: str, fetched: list[Node]) -> None:
    slopes = [node for node in fetched if node.tags.get("gradient")]
    kept = [node.inputs[0] for node in topological(fetched) if node.op is if_training]  # what training alone computes
    if slopes and random_state in topological(kept):
        said = (
            f"sub-graph {name!r} computes gradients but commits no updates, so it does not train: dropout drops nothing"
        )
        doubt(said, "let it commit updates: [loss, {w: w - rate * slope}]", user_site())


def _initial_weights(sub: SubGraph, state: State) -> None:
    mine = [node for node in sub.variables if node.role is Role.VARIABLE and node.attrs["trainable"]]
    for trained in [*TRAINED.values()]:
        both = [n for n in mine if trained.variables.get(n.name) is n and n.name not in trained.copies]
        if trained is state or not both or trained.device.kind != "cpu" or state.device.kind != "cpu":
            continue
        node = min(both, key=lambda each: each.tensor.nbytes)
        here, there = state.arrays.get(node.name), trained.arrays.get(node.name)
        if here is None or there is None or here.shape != there.shape or np.array_equal(here, there):
            continue
        if np.array_equal(here, initial_value(node, state.seed)):
            said = f"{node!r} has its initial value here, though another executor has trained it"
            doubt(said, "run a sub-graph of that executor, or pass ht.Executor(..., state=executor.state)", user_site())


DOUBTS.append(doubt_of)

"""The passes of an executor by name, in the order in which it applies them: once each, when all sizes are known.

A pass is a pure function of output nodes. Each can be switched off by name (`Executor(passes=...)` or the environment
variable `HETU_PASSES`), and the result must not change. The core brings the one without which no program is small;
`hetu.passes` and the rooms of kernels enter theirs. A pass that looks for some operators says so when it is entered,
and does not run on a graph that has none of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .errors import UnknownNameError, did_you_mean
from .graph import Node, topological
from .kernels import RoomPass, switched_off
from .op import Role
from .simplify import simplify

Pass = Callable[[Sequence[Node]], tuple[Node, ...]]
PASSES: dict[str, Pass] = {"simplify": simplify}
SOUGHT: dict[Pass, frozenset[str | Role]] = {}  # the names or roles of operators that a pass looks for
# How fetches and updates come to compute in another dtype: (fetches, updates, gradients) -> (fetches, updates).
PRECISIONS: dict[str, Callable[[Sequence[Node], Mapping[Node, Node], Sequence[Node]], Any]] = {
    "float32": lambda fetches, updates, _: (tuple(fetches), updates)
}


def enter(run: Any, before: str = "", seeks: Iterable[str | Role] = ()) -> None:
    """Add a pass before the one of that name, or behind all others.

    With `seeks` it runs only on graphs with an operator of one of these names or roles.
    """
    SOUGHT[run] = frozenset(seeks)
    order = list(PASSES.items())
    order.insert(list(PASSES).index(before) if before else len(order), (run.__name__, run))
    PASSES.clear()
    PASSES.update(order)


def is_last(run: Pass) -> bool:
    """Whether no other pass sees into what it makes, so that what a placement does comes before it."""
    return getattr(run, "last", False)


# How one pass runs, as it is and with `Executor(explain=True)`; `hetu.look` enters what tells what the pass changed.
APPLIED: dict[bool, Callable[[Pass, Sequence[Node]], tuple[Node, ...]]] = dict.fromkeys(
    (False, True), lambda run, outputs: run(outputs)
)


def applied(passes: Iterable[Pass], outputs: Sequence[Node], explain: bool = False) -> tuple[Node, ...]:
    """What the passes make, one after the other; those that find nothing of what they look for are left out."""
    present: set[str | Role] = set()  # unknown while empty
    for run in passes:
        if sought := SOUGHT.get(run):
            present = present or {kind for node in topological(outputs) for kind in (node.op.name, node.role)}
            if present.isdisjoint(sought):
                continue
        outputs, present = APPLIED[explain](run, outputs), set()
    return tuple(outputs)


def _serves(run: Pass, device: str) -> bool:
    """Whether a pass is for such a device, which is so unless it says otherwise, and not of a room that is off."""
    off = isinstance(run, RoomPass) and switched_off("HETU_KERNELS")
    return getattr(run, "device", device) == device and not off


def chosen_passes(names: Iterable[str] | None, device: str = "cpu") -> list[Pass]:
    """The passes called `names`, in their proper order; None means `$HETU_PASSES` (comma-separated), else all.

    Without a name those for another kind of `device` are left out, which a pass says by its attribute `device`.
    """
    if names is None:
        setting = os.environ.get("HETU_PASSES")
        kept = [name for name, run in PASSES.items() if _serves(run, device)]
        names = kept if setting is None else [n for n in setting.split(",") if n]
    wanted = list(names)
    for name in wanted:
        if name not in PASSES:
            raise UnknownNameError(f"there is no pass {name!r}", fix=did_you_mean(name, PASSES))
    return [run for name, run in PASSES.items() if name in wanted]

"""The passes of an executor by name, in the order in which it applies them: once each, when all sizes are known.

Before them `resolve_training` fixes whether a sub-graph trains, which it does if and only if it commits updates, and
`specialize` fixes the open sizes: each set of fed shapes gets its own program, without buckets.

A pass is a pure function of output nodes. Each can be switched off by name (`Executor(passes=...)` or the environment
variable `HETU_PASSES`), and the result must not change. The core brings the one without which no program is small;
`hetu.passes` and the rooms of kernels enter theirs. A pass that looks for some operators says so when it is entered,
and does not run on a graph that has none of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .errors import GraphError, UnknownNameError, did_you_mean
from .graph import Made, Node, replace, rewrite, topological
from .kernels import RoomPass, kernels, switched_off
from .leaf import constant, size
from .op import Role
from .operators import if_training, with_updates_op
from .simplify import simplify
from .types import Atom, has_dim, substitute

Pass = Callable[[Sequence[Node]], tuple[Node, ...]]
PASSES: dict[str, Pass] = {"simplify": simplify}
SOUGHT: dict[Pass, frozenset[str | Role]] = {}  # the names or roles of operators that a pass looks for
COMPILED: set[Pass] = set()  # which make what plain array code is slow at
# How fetches and updates come to compute in another dtype: (fetches, updates, gradients) -> (fetches, updates).
PRECISIONS: dict[str, Callable[[Sequence[Node], Mapping[Node, Node], Sequence[Node]], Any]] = {
    "float32": lambda fetches, updates, _: (tuple(fetches), updates)
}


def enter(run: Any, before: str = "", seeks: Iterable[str | Role] = (), compiled: bool = False) -> None:
    """Add a pass before the one of that name, or behind all others.

    With `seeks` it runs only on graphs with an operator of one of these names or roles; a `compiled` one only where
    kernels can be compiled, or if it is named.
    """
    SOUGHT[run] = frozenset(seeks)
    COMPILED.update([run] if compiled else [])
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
    outputs, present = Made(outputs), set[str | Role]()  # what is there is unknown while empty
    for run in passes:
        if sought := SOUGHT.get(run):
            present = present or {kind for node in topological(outputs) for kind in (node.op.name, node.role)}
            if present.isdisjoint(sought):
                continue
        made = APPLIED[explain](run, outputs)
        outputs, present = (outputs, present) if made == outputs else (Made(made), set())
    return tuple(outputs)


def _serves(run: Pass, device: str) -> bool:
    """Whether a pass serves such a device, as all do that name no other, and its room is not switched off."""
    off = isinstance(run, RoomPass) and switched_off("HETU_KERNELS")
    return getattr(run, "device", device) == device and not off and (run not in COMPILED or kernels(device).compiles())


def chosen_passes(names: Iterable[str] | None, device: str = "cpu") -> list[Pass]:
    """The passes called `names`, in their proper order; None means `$HETU_PASSES` (comma-separated), else all.

    Without names, those are left out whose attribute `device` is another kind.
    """
    if names is None:
        setting = os.environ.get("HETU_PASSES")
        kept = [name for name, run in PASSES.items() if _serves(run, device)]
        names = kept if setting is None else [n for n in setting.split(",") if n]
    for name in (wanted := list(names)):
        if name not in PASSES:
            raise UnknownNameError(f"there is no pass {name!r}", fix=did_you_mean(name, PASSES))
    return [run for name, run in PASSES.items() if name in wanted]


# -- what is fixed before --------------------------------------------------------------------------------------


def resolve_training(
    fetches: Sequence[Node], updates: Mapping[Node, Node]
) -> tuple[tuple[Node, ...], dict[Node, Node]]:
    """(fetches, updates) without `if_training` and `with_updates`; carried updates are added in training.

    A layer applied twice updates in the order of its calls. If an optimizer updates its variables too, a GraphError.
    """
    training = bool(updates)
    calls: list[tuple[int, tuple[Node, ...], tuple[Node, ...]]] = []  # when, which variables, their new values

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node.op is if_training:
            return inputs[0] if training else inputs[1]
        if training and node.op is with_updates_op:
            calls.append((node.serial, inputs[1::2], inputs[2::2]))
        return inputs[0] if node.op is with_updates_op else None

    outputs = rewrite((*fetches, *updates.values()), rule)
    merged = dict(zip(updates, outputs[len(fetches) :]))
    carried: dict[Node, Node] = {}
    for variables, values in dict.fromkeys(call[1:] for call in sorted(calls)):
        carried |= zip(variables, replace(values, {v: carried[v] for v in variables if v in carried}))
    for variable, value in carried.items():
        if variable in merged:
            fix = "make it trainable=False, or leave it out of minimize(...)"
            raise GraphError(f"{variable!r} is updated by an optimizer and by its layer", fix=fix, site=variable.site)
        merged[variable] = value
    return outputs[: len(fetches)], merged


def specialize(outputs: Sequence[Node], sizes: Mapping[Atom, int]) -> tuple[Node, ...]:
    """The graph at the given sizes, for example `{("x", 0): 128}`; every type follows anew.

    A size that does not fit is a ShapeError.
    """

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if not any(map(has_dim, node.attrs.values())):
            return None
        attrs = {name: substitute(value, sizes) for name, value in node.attrs.items()}
        if node.op is size and isinstance(attrs["value"], int):
            return constant(value=attrs["value"])
        return node.op.make(inputs, attrs)

    return rewrite(outputs, rule)

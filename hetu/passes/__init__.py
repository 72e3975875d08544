"""Graph -> Graph passes, in the order the executor applies them: once each, when all sizes are known.

A pass is a pure function of output nodes. Each can be switched off by name (`Executor(passes=...)` or the environment
variable `HETU_PASSES`), and the result must not change. Those that only make one kind of device faster stand in its
room of kernels, and say so; the others serve all devices.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..core.errors import UnknownNameError, did_you_mean
from ..core.graph import Node
from ..core.kernels import KINDS, RoomPass, room, switched_off
from ..core.simplify import simplify
from ..core.specialize import specialize
from ..core.training_flag import resolve_training
from ..look.explain import explained
from .channels_last import channels_last
from .mixed_precision import mixed_precision
from .sparsify import sparsify_updates

Pass = Callable[[Sequence[Node]], tuple[Node, ...]]


def _joined(common: Mapping[str, Pass]) -> dict[str, Pass]:
    """The common passes and those of the rooms, each before the one it names, or at the end."""
    order = list(common.items())
    for own in (own for kind in KINDS for own in room(kind).passes):
        names = [name for name, _ in order]
        order.insert(names.index(own.before) if own.before else len(order), (own.__name__, own))
    return dict(order)


PASSES = _joined({"simplify": simplify, "sparsify_updates": sparsify_updates, "channels_last": channels_last})

# Once all sizes are known and the graph is that of one rank, as no other pass sees into what they make.
LAST = tuple(run for run in PASSES.values() if getattr(run, "last", False))


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

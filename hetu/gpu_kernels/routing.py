"""Launches the kernels of `routing.cu`: the layout transform of a mixture of experts and its gradients.

CuPy takes weights of another dtype than the tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..ops import routing
from .launchers import kernel
from .machine import Call, Machine, contiguous, spread, warps, widest_pack
from .source import assemble, file_text


def text(dtype: str, index: str, pack: int) -> str:
    """The kernels for tokens of `dtype` and slots of dtype `index`."""
    return assemble(f"constexpr int PACK = {pack};\n{file_text('routing')}", "routing.cu", S=dtype, I=index)


def _kernel(machine: Machine, name: str, slots: Any, *arrays: Any) -> Any:
    pack = widest_pack(arrays[0].shape[-1], *arrays)
    return machine.kernel(text(arrays[0].dtype.name, slots.dtype.name, pack), name)


def _fits(slots: Any, *floats: Any) -> bool:
    return contiguous(slots, *floats) and all(a.dtype == floats[0].dtype for a in floats)


@kernel(routing.moe_dispatch)
@routing.of_each_group
def moe_dispatch(
    machine: Machine, out: Any, x: Any, slots: Any, weights: Any, *, experts: int, capacity: int
) -> list[Call] | None:
    if not _fits(slots, out, x, weights):
        return None
    count, features, k = experts * capacity, x.shape[1], slots.shape[1]
    choice, find = machine.xp.empty(count, "int64"), _kernel(machine, "find_choices", slots, x, out)
    move = _kernel(machine, "moe_dispatch", slots, x, out)
    return [
        partial(choice.fill, -1),
        partial(find, *spread(slots.size), (slots, choice, slots.size, count)),
        partial(move, *warps(count), (x, choice, weights, out, count, features, k)),
    ]


@kernel(routing.moe_combine)
@routing.of_each_group
def moe_combine(machine: Machine, out: Any, y: Any, slots: Any, weights: Any) -> list[Call] | None:
    if not _fits(slots, out, y, weights):
        return None
    experts, capacity, features = y.shape
    sizes = (*slots.shape, experts * capacity, features)
    launch = _kernel(machine, "moe_combine", slots, y, out)
    return [partial(launch, *warps(len(out)), (y, slots, weights, out, *sizes))]


@kernel(routing.moe_products)
@routing.of_each_group
def moe_products(machine: Machine, out: Any, x: Any, y: Any, slots: Any) -> list[Call] | None:
    if not _fits(slots, out, x, y):
        return None
    experts, capacity, features = y.shape
    sizes = (slots.size, slots.shape[1], experts * capacity, features)
    launch = _kernel(machine, "moe_products", slots, x, y)
    return [partial(launch, *warps(slots.size), (x, y, slots, out, *sizes))]

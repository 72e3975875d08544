"""Move values into the memory of the host while no instruction reads them.

After TSplit (ICDE 2022). A value is cut out of the arena in its longest *gap*, the time between two instructions that
read it, which for an activation reaches from the forward to the backward pass. It is copied out as soon as it is
computed, and copied in right before the gap ends: `from_host` waits for the instruction before its reader. `fit.py`
chooses the values. The memory plan places the result of `to_host` outside the arena, right after its operand is
computed; on a CPU both lie in the same memory. The copies wait in the device's queue. Left out: several gaps of one
value, and copying while the device computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ...core.graph import OPS, Node, origin_of
from ...core.kernels import Call
from ...core.memory import MemoryPlan, Value, types_of
from ...core.op import Role, op
from ...core.types import same_type


@op(role=Role.MOVE, infer=same_type, on_host=True, differentiable=False)
def to_host(xp: ModuleType, x: Any) -> Any:
    """A copy of `x` in the memory of the host, which only `from_host` reads.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (2, 3))
    >>> from_host(to_host(x), x).shape
    (2, 3)
    """
    return xp.asarray(x, copy=True)


@to_host.bind
def bind_to_host(xp: ModuleType, out: Any, x: Any) -> Call:
    if xp is np:
        return partial(np.copyto, out, x)
    kind = xp.cuda.runtime.memcpyDeviceToHost
    return lambda: _copy(xp, out.ctypes.data, xp.ascontiguousarray(x).data.ptr, out.nbytes, kind)


@op(role=Role.MOVE, infer=same_type, like=(1,), awaited=(1,), reads_host=True, differentiable=False)
def from_host(xp: ModuleType, x: Any, after: Any) -> Any:
    """A copy on the device of what `to_host` has put away. It waits until `after`, any other value, is computed.

    >>> import hetu as ht
    >>> x = ht.constant([1.0, 2.0])
    >>> ht.evaluate(from_host(to_host(x), ht.exp(x))).tolist()
    [1.0, 2.0]
    """
    return xp.asarray(x, copy=True)


@from_host.bind
def bind_from_host(xp: ModuleType, out: Any, x: Any, after: Any) -> Call:
    if xp is np:
        return partial(np.copyto, out, x)
    return partial(_copy, xp, out.data.ptr, x.ctypes.data, x.nbytes, xp.cuda.runtime.memcpyHostToDevice)


def _copy(xp: ModuleType, target: int, source: int, nbytes: int, kind: int) -> None:
    """As CuPy's own copies, which it refuses while a stream is captured; a GPU copies when its stream gets there."""
    xp.cuda.runtime.memcpyAsync(target, source, nbytes, kind, xp.cuda.get_current_stream().ptr)


Rewritten = tuple[tuple[Node, ...], dict[Node, Node]]


class Gap(NamedTuple):
    """The instructions around the longest time in which a value is not read."""

    before: int
    after: int


def gaps(planned: MemoryPlan, outputs: Collection[Node]) -> dict[Value, Gap]:
    """The gap of each value of the arena that only the step itself reads.

    >>> import hetu as ht
    >>> from hetu.core.memory import plan
    >>> a = ht.sin(ht.placeholder("x", (4,)))
    >>> y = ht.sin(ht.exp(ht.exp(a))) * a
    >>> gaps(plan([y], {}), [y])[a, 0]
    Gap(before=1, after=4)
    """
    used: dict[Value, list[int]] = defaultdict(list)
    for index, node in enumerate(planned.order):
        for slot in range(len(types_of(node))):
            used[node, slot].append(index)
        for i in node.inputs:
            for slot in range(len(types_of(i))):
                used[planned.roots[i, slot]].append(index)
    asked = {planned.roots[node, 0] for node in outputs}
    found = {}
    for value, times in used.items():
        storage, sent = planned.storages[value].final(), value[0].role is Role.COMMUNICATION
        if storage.home is None and not storage.on_host and value not in asked and not sent:
            found[value] = max(map(Gap, times, times[1:]), key=lambda gap: gap.after - gap.before, default=Gap(0, 0))
    return {value: gap for value, gap in found.items() if gap.after - gap.before > 1}


class Swap:
    """The planned step, in which those of `values` that have a gap wait in the memory of the host.

    `made` has the new node of each old one, as it is before its gap.

    >>> import hetu as ht
    >>> from hetu.core.memory import plan
    >>> a = ht.sin(ht.placeholder("x", (4,)))
    >>> y = ht.sin(ht.exp(ht.exp(a))) * a
    >>> (y,), _ = Swap([y], {}, plan([y], {}), {a}).step
    >>> [node.op.name for node in plan([y], {}).order]
    ['sin', 'to_host', 'exp', 'exp', 'sin', 'from_host', 'multiply']
    """

    def __init__(
        self, fetches: Sequence[Node], updates: Mapping[Node, Node], planned: MemoryPlan, values: Collection[Node]
    ) -> None:
        self.planned = planned
        self.at = {node: index for index, node in enumerate(planned.order)}
        roots = {planned.roots[node, 0] for node in values}
        known = gaps(planned, (*fetches, *updates.values()))
        self.gaps = {value: gap for value, gap in known.items() if value in roots}
        self.made: dict[Node, Node] = {}
        self.late: dict[Node, Node] = {}  # values, and views of them, as they are after the gap
        for node in planned.nodes:
            with origin_of(node):
                inputs = tuple(self._input(i, node) for i in node.inputs)
                self.made[node] = node if inputs == node.inputs else node.op.make(inputs, node.attrs)
        self.step: Rewritten = (
            tuple(self.made[node] for node in fetches),
            {variable: self.made[value] for variable, value in updates.items()},
        )

    def _input(self, node: Node, reader: Node) -> Node:
        gap = None if isinstance(node.type, tuple) else self.gaps.get(self.planned.roots[node, 0])
        if gap is None or self.at.get(reader, -1) < gap.after:  # views are made where they are read
            return self.made[node]
        return self._late(node)

    def _late(self, node: Node) -> Node:
        if node not in self.late:
            source, slot = root = self.planned.roots[node, 0]
            if node is source or (node.role is Role.ITEM and node.inputs[0] is source):
                self.late[node] = self._back(self._value(source, slot), self.gaps[root])
            else:
                inputs = (self._late(node.inputs[0]), *(self.made[i] for i in node.inputs[1:]))
                self.late[node] = node.op.make(inputs, node.attrs)
        return self.late[node]

    def _value(self, source: Node, slot: int) -> Node:
        made = self.made[source]
        return OPS["item"](made, index=slot) if isinstance(made.type, tuple) else made

    def _back(self, value: Node, gap: Gap) -> Node:
        with origin_of(value):
            away = to_host(value)
        return from_host(away, self._value(self.planned.order[gap.after - 1], 0))

"""Compose chains of elementwise operators into one, which a GPU computes by one generated kernel.

Only for GPUs: NumPy would run the same steps one by one, so it gains nothing. The values do not change, as every step
keeps its dtype. A value is taken into a group if all its readers are in the group and it has the group's shape, so
nothing is computed twice and only the last value reaches memory. Ignored on purpose: groups with several results,
reductions at the end of a chain, and recomputing a cheap value for several groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ..gpu_kernels.elementwise import elementwise, make_step
from ..gpu_kernels.source import Step
from ..graph import OPS, Node, origin_of, topological
from ..op import Instruction, op
from ..types import TensorType, same

MOST_STEPS, MOST_INPUTS = 24, 10  # beyond, a thread runs out of registers

Operand = int | tuple[str, float]  # a value by number, or a number with its dtype
Line = tuple[str, tuple[Operand, ...], tuple[tuple[str, Any], ...]]


# -- the fused operator ------------------------------------------------------------------------------------------------


def _fused_type(*types: TensorType, lines: tuple[Line, ...]) -> TensorType:
    known = list(types)
    for name, operands, attrs in lines:
        inputs = [TensorType((), np.dtype(o[0])) if isinstance(o, tuple) else known[o] for o in operands]
        known.append(OPS[name].infer(*inputs, **dict(attrs)))
    return known[-1]


@op(name="fused_elementwise", infer=_fused_type, differentiable=False, inplace={0: tuple(range(MOST_INPUTS))})
def fused_elementwise(xp: ModuleType, *arrays: Any, lines: tuple[Line, ...]) -> Any:
    """The last of some elementwise operators applied one after the other.

    Each of `lines` is (operator, operands, attributes). Operands are numbered: first the inputs, then the lines'
    results; one that is a number is (dtype, value).

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (3,))
    >>> (y,) = fuse_elementwise([ht.exp(x * 2 + 1)])
    >>> [line[0] for line in y.attrs["lines"]]
    ['multiply', 'add', 'exp']
    """
    known = list(arrays)
    for name, operands, attrs in lines:
        inputs = [xp.asarray(o[1], dtype=getattr(xp, o[0])) if isinstance(o, tuple) else known[o] for o in operands]
        known.append(OPS[name].forward(xp, *inputs, **dict(attrs)))
    return known[-1]


@fused_elementwise.bind
def fused_elementwise_bind(xp: ModuleType, out: Any, *arrays: Any, lines: tuple[Line, ...]) -> list[Instruction] | None:
    if xp is np:
        return None
    from ..gpu_kernels.device import gpu

    return elementwise(gpu(out.device.id), steps_of(lines, [a.dtype for a in arrays]), out, arrays)


def steps_of(lines: Sequence[Line], dtypes: Sequence[np.dtype]) -> list[Step]:
    """The steps of the generated kernel, with the dtype of each."""
    known, steps = [TensorType((), d) for d in dtypes], []
    for name, operands, attrs in lines:
        made = OPS[name]
        types = [TensorType((), np.dtype(o[0])) if isinstance(o, tuple) else known[o] for o in operands]
        known.append(made.infer(*types, **dict(attrs)))
        pairs = list(zip(made.inputs, operands))
        inputs = tuple((n, o) for n, o in pairs if not isinstance(o, tuple))
        numbers = [(n, o[1]) for n, o in pairs if isinstance(o, tuple)]
        numbers += [(n, v) for n, v in attrs if isinstance(v, bool | int | float)]
        steps.append(make_step(made.cuda, inputs, tuple(numbers), [t.dtype.name for t in types], known[-1].dtype.name))
    return steps


# -- the pass ----------------------------------------------------------------------------------------------------------


def fuse_elementwise(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """Groups of two or more elementwise operators become one `fused_elementwise` each."""
    nodes = topological(outputs)
    readers: dict[Node, set[Node]] = defaultdict(set)
    for node in nodes:
        for i in node.inputs:
            readers[i].add(node)
    kept = set(outputs)
    group_of: dict[Node, list[Node]] = {}
    taken: set[Node] = set()
    for node in reversed(nodes):
        if _fits(node) and node not in taken:
            group = _grown(node, readers, kept | taken)
            if len(group) > 1:
                group_of[node] = group
                taken.update(group)
    new: dict[Node, Node] = {}
    for node in nodes:
        with origin_of(node):
            if node in group_of:
                new[node] = _fuse(node, group_of[node], new)
            else:
                inputs = tuple(new[i] for i in node.inputs)
                new[node] = node if inputs == node.inputs else node.op.make(inputs, node.attrs)
    return tuple(new[o] for o in outputs)


def _fits(node: Node) -> bool:
    return node.op.cuda is not None and not isinstance(node.type, tuple) and node.attrs.get("window") is None


def _grown(root: Node, readers: dict[Node, set[Node]], closed: set[Node]) -> list[Node]:
    """The root and what feeds only the group, in graph order. Greedy from the root upwards."""
    group, frontier = {root: None}, list(root.inputs)
    while frontier and len(group) < MOST_STEPS:
        node = frontier.pop(0)
        ready = node not in group and node not in closed and _fits(node)
        if ready and same(node.shape, root.shape) and readers[node] <= group.keys():
            grown = [*group, node]
            if len({i for n in grown for i in n.inputs if i not in grown and _number(i) is None}) <= MOST_INPUTS:
                group[node] = None
                frontier.extend(node.inputs)
    return [n for n in topological([root]) if n in group]


def _number(node: Node) -> tuple[str, float] | None:
    """(dtype, value) of a constant of one number, which is compiled into the kernel."""
    if node.op.name != "constant" or node.ndim or node.dtype.kind not in "bif":
        return None
    return node.dtype.name, node.attrs["value"].item()


def _fuse(root: Node, group: Sequence[Node], new: dict[Node, Node]) -> Node:
    outside = dict.fromkeys(i for n in group for i in n.inputs if i not in group and _number(i) is None)
    place = {node: k for k, node in enumerate([*outside, *group])}
    lines = []
    for node in group:
        operands = tuple(place[i] if i in place else _number(i) for i in node.inputs)
        lines.append((node.op.name, operands, tuple(node.attrs.items())))
    inputs = tuple(new[i] for i in outside)
    return fused_elementwise.make(inputs, {"lines": tuple(lines)})

"""A program as text, `print(program)`; what was compiled for it, `print(program.c)`; the picture of its memory plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.errors import ArgumentError
from ..core.graph import Node, remade, topological
from ..core.kernels import kernels_of, room
from ..core.leaf import placeholder
from ..core.memory import SCRATCH, types_of
from ..core.op import LEAVES, Role
from ..core.program import Program
from ..core.types import Dim, NodeType, show_type
from .arena import memory_svg
from .columns import in_columns
from .svg import Svg

MOST_WIDE = (5, 42, 20, 20, 13, 10)  # characters of each column


def program_svg(program: Program) -> Svg:
    """The memory plan: which values lie where, and for how long."""
    names, last = _names(program), len(program.steps) - 1
    return memory_svg(
        [
            (f"{names[node]} {node.op.name}", s.first, min(s.last, last), s.offset, s.nbytes)
            for (node, _), s in program.plan.storages.items()
            if s.home is None and s.shared_with is None and not s.on_host
        ]
    )


def program_text(program: Program) -> str:
    """One row per instruction, cut to a line: its place in memory, what it frees, and the peak.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (2,))
    >>> print(ht.Executor([ht.exp(x)]).program({x: [0.0, 1.0]}))
       instruction  type    place  bytes  frees
    0  %1 = exp(x)  f32[2]  @0         8
    1 instructions, 1 calls; arena 64 bytes at the peak (8 without reuse)
    0 updates in place, 0 copied
    """
    names = _names(program)
    ends: dict[int, list[str]] = {}
    for (node, slot), storage in program.plan.storages.items():
        own = storage.home is None and storage.shared_with is None
        if slot != SCRATCH and own and storage.last < len(program.steps):
            ends.setdefault(storage.last, []).append(f"{names[node]}{f'.{slot}' if slot else ''}")
    rows = []
    for index, step in enumerate(program.steps):
        call = f"{names[step.node]} = {_call(step.node, [names[i] for i in step.node.inputs])}"
        nbytes = sum(int(t.nbytes) for t in types_of(step.node))
        place, frees = _place(program, step.node), " ".join(ends.get(index, []))
        rows.append((str(index), call, show_type(step.node.type), place, f"{nbytes:,}", frees))
    header = ("", "instruction", "type", "place", "bytes", "frees")
    cells = [tuple(map(_cut, row, MOST_WIDE)) for row in (header, *rows)]
    return "\n".join([*in_columns(cells, right={0, 4}), _totals(program)])


def compiled_text(program: Program) -> str:
    """What was compiled for it, as C or CUDA C: each function once, below the numbers of its instructions."""
    text = kernels_of(program.xp).text
    calls = [(text(call), k) for k, step in enumerate(program.steps) for call in step.calls]
    users = {text: sorted({k for other, k in calls if other == text}) for text, _ in calls if text}
    return "\n".join(f"// of {', '.join(map(str, numbers))}:\n{text}" for text, numbers in users.items())


def cuda_text(node: Node) -> str:
    """The CUDA C that a GPU runs for a node alone, an operator or a group; here there need be neither GPU nor compiler.

    >>> import hetu as ht
    >>> print(cuda_text(ht.exp(ht.placeholder("x", (4, 8)))))  # doctest: +ELLIPSIS
    extern "C" __global__ void places(const float* x0, float* y0, Index n) {
    ...
                const float v1 = exp(v0);  // exp
    ...
    """
    if not isinstance(node, Node):
        raise ArgumentError(f"{node!r} is no node", fix="pass what an operator returns, such as ht.exp(x)")
    if any(type(size) is Dim for n in (node, *node.inputs) for t in types_of(n) for size in t.shape):
        raise ArgumentError(f"{node!r} has an open size", fix="give its placeholders sizes: the text is for some")
    nodes: Sequence[Node] = (remade(node, tuple(map(_apart, node.inputs))),)
    if not (text := _cuda_of(nodes[0])):
        for run in room("gpu").passes:  # what becomes of it in a program
            nodes = run(nodes)
        text = "\n".join(filter(None, (_cuda_of(n) for n in topological(nodes) if n.role not in LEAVES)))
    return text or f"// {node.op.name}: computed by CuPy\n"


def _apart(node: Node) -> Node:
    """A placeholder for what another operator makes."""
    given = node.role in LEAVES or isinstance(node.type, tuple)
    return node if given else placeholder("x", tuple(map(int, node.shape)), node.dtype)


def _cuda_of(node: Node) -> str:
    gpu, inputs = room("gpu"), [_empty(i.type) for i in node.inputs]
    calls = gpu.bound(node.op, np, _empty(node.type), inputs, node.attrs, None) or ()
    return "\n".join(filter(None, dict.fromkeys(map(gpu.text, calls))))


def _empty(type_: NodeType) -> Any:
    """Arrays of a type, to bind an operator to."""
    return tuple(map(_empty, type_)) if isinstance(type_, tuple) else np.empty(type_.shape, type_.dtype)


def _call(node: Node, operands: Sequence[str]) -> str:
    """An instruction as it is written; of a group its lines."""
    form = node.attrs.get("form")
    return f"{node.op.name}({', '.join(operands)})" if form is None else f"{node.op.name}: {form.text(operands)}"


def _totals(program: Program) -> str:
    plan = program.plan
    return (
        f"{len(program.steps)} instructions, {len(program.calls)} calls; arena {plan.arena_bytes:,} bytes at the peak "
        f"({plan.unplanned_bytes:,} without reuse)"
        + (f", {plan.host_bytes:,} bytes of the host" if plan.host_bytes else "")
        + f"\n{len(plan.donated)} updates in place, {len(program.commits)} copied"
        + (f"; {program.captured}" if program.captured is not None else "")
    )


def _names(program: Program) -> dict[Node, str]:
    names: dict[Node, str] = {}
    for index, node in enumerate(program.plan.nodes):
        names[node] = _operand(program, node, index, names)
    return names


def _operand(program: Program, node: Node, index: int, names: Mapping[Node, str]) -> str:
    """The name of a value: leaves have their own or their number, views that of their operand, results are counted."""
    if node.role is Role.CONSTANT:
        value = node.attrs["value"]
        return f"{value.flat[0]:g}" if value.size and value.strides == (0,) * value.ndim else f"%{index}"
    if node.role is Role.ITEM:
        return f"{names[node.inputs[0]]}.{node.attrs['index']}"
    if node in program.plan.views:
        return f"{node.op.name}({names[node.inputs[0]]})"
    return node.name if node.role in LEAVES else f"%{index}"


def _place(program: Program, node: Node) -> str:
    plan = program.plan
    if donated := [plan.donated[node, k].name for k in range(len(types_of(node))) if (node, k) in plan.donated]:
        return f"-> {', '.join(donated)}"
    storage = plan.storage(node, 0)
    return f"{'host ' if storage.on_host else ''}@{storage.offset:,}" + (
        " in place" if (node, 0) in plan.in_place else ""
    )


def _cut(text: str, width: int) -> str:
    """At most `width` characters: the end of a variable's name, which says more, else the beginning."""
    if len(text) <= width:
        return text
    return f"-> …{text[4 - width :]}" if text.startswith("-> ") else f"{text[: width - 1]}…"

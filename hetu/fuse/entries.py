"""What is computed for each entry of a list of ids and summed where its ids say: found in a graph, as one operator.

Pattern: `scatter_rows` of elementwise lines, whoever wrote them, over rows that are looked up. A wide model is two of
these: its entries are summed for each sample, and their gradients for each row that a step touched. X. Miao et al.,
"CuWide", ICDE 2021: aggregate, loss, apply. Rooms of kernels say how a device computes it, and gain by having no row in
memory for each entry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from ..core.graph import Node, readers_of, remade, rewrite, topological
from ..core.op import Role, op
from ..core.types import TensorType
from ..ops.elementwise import multiply
from ..ops.index import in_range, take
from .form import FOLDS, MOVES, Form, fused, line_of
from .group import is_number
from .unit import Limits, Rules

# -- the operator ------------------------------------------------------------------------------------------------------


def _type(*types: TensorType, form: Form, reads: tuple[int, ...], size: int) -> Any:
    columns = form.space[form.split :]
    made = tuple(TensorType((size, *columns), t.dtype) for t in form.types_of_results())
    return made[0] if len(made) == 1 else made


@op(infer=_type, differentiable=False, scratch=True)
def summed_entries(xp: ModuleType, *arrays: Any, form: Form, reads: tuple[int, ...], size: int) -> Any:
    """The results of a form over entries, summed in `size` rows by the last array of ids; one outside is left out.

    `arrays` are those of the form, then arrays of ids. Operand k is row ids[e] of its array for entry e, where
    `reads[k]` is the place of these ids among all arrays, and else, where that is -1, has a value for each entry.
    """
    given = [a if r < 0 else take.forward(xp, a, arrays[r]) for a, r in zip(arrays, reads)]
    made = fused.forward(xp, *given, form=form)
    inside = (arrays[-1] >= 0) & (arrays[-1] < size)
    sums = []
    for rows in made if isinstance(made, tuple) else (made,):
        out = xp.zeros((size, *form.space[form.split :]), dtype=rows.dtype)
        xp.add.at(out, arrays[-1][inside], xp.broadcast_to(rows, form.space)[inside])
        sums.append(out)
    return sums[0] if len(sums) == 1 else tuple(sums)


def _ranges(*arrays: Any, form: Form, reads: tuple[int, ...], size: int) -> list[tuple[Any, int, str]]:
    pairs = dict.fromkeys((r, a.shape[0]) for a, r in zip(arrays, reads) if r >= 0)
    return [(arrays[r], count, "index") for r, count in pairs]


in_range(summed_entries, _ranges)
summed_entries.flops(lambda out, *arrays, form, **_: len(form.lines) * math.prod(form.space))


# -- the pass ----------------------------------------------------------------------------------------------------------


class Joining:
    """The rewriting of a graph: `inner` is what is computed entry by entry, and read by nothing but sums of entries."""

    def __init__(self, outputs: Sequence[Node], limits: Limits) -> None:
        self.outputs, self.new, self.rules = outputs, dict[Node, Node](), Rules(limits)
        nodes = topological(outputs)
        self.at = {node: k for k, node in enumerate(nodes)}
        readers, self.inner = readers_of(nodes, outputs), set[Node]()
        for node in reversed(nodes):
            if (self.gathers(node) or self._is_line(node)) and all(
                r is not None and self._takes(r, node) for r in readers[node]
            ):
                self.inner.add(node)

    def _is_line(self, node: Node) -> bool:
        if isinstance(node.type, tuple) or not node.ndim or node.op in FOLDS:
            return False
        return self.rules.unit_of(node) is not None

    def sums(self, node: Node) -> bool:
        """Whether a node adds rows, its third input, where the ids say that are its second."""
        window = node.attrs["window"] if node.role is Role.SCATTER else ((1, 0, 0),)
        return window is None or window[0][0] == 0

    def gathers(self, node: Node, entries: Any = None) -> bool:
        """Whether a node is a row for each entry, looked up in a table."""
        found = node.role is Role.LOOKUP and node.op is take and node.attrs["window"] is None
        return found and entries in (None, node.inputs[1].shape)

    def _takes(self, reader: Node, node: Node) -> bool:
        if self.sums(reader):
            return reader.inputs[2] is node and reader.inputs.count(node) == 1
        return reader in self.inner and reader.op is not take

    def joined(self) -> tuple[Node, ...]:
        return rewrite(self.outputs, self._rule)

    def _rule(self, node: Node, inputs: tuple[Node, ...]) -> Node:
        made = self.replaced(node, inputs) if self.sums(node) and node.inputs[2] in self.inner else None
        self.new[node] = remade(node, inputs) if made is None else made
        return self.new[node]

    def replaced(self, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        """What stands for a node that sums what is computed entry by entry."""
        return self.summed(node, inputs[1], node.tensor.shape[0])

    def summed(self, node: Node, into: Node, size: Any) -> Node | None:
        """The sums of a node's rows by the ids `into`, if these are computed entry by entry."""
        rows, entries = node.inputs[2], node.inputs[1].shape
        if 0 in (*rows.shape, size):
            return None
        lines = self._lines(rows, entries)
        unit = self.rules.unit_of_all(lines[::-1]) if lines else None  # each behind what reads it
        if unit is None or unit.space != rows.shape or unit.split not in (None, len(entries)):
            return None
        form, given, lists, reads = self.read(lines, unit.members, lines[-1:], entries)
        lists = [*lists, into]
        reads = tuple(r if r < 0 else len(given) + r for r in reads)
        return summed_entries.make((*given, *lists), {"form": form, "reads": reads, "size": size})

    def _lines(self, node: Node, entries: Any) -> list[Node]:
        """The lines that lead to a node, inputs first; what is looked up as it is becomes one."""
        if node.op is take:
            return [multiply(node, 1.0)]
        found, waiting = set[Node](), [node]
        while waiting:
            line = waiting.pop()
            inside = line in self.inner and line.op is not take and line.shape[: len(entries)] == entries
            if inside and line not in found:
                found.add(line)
                waiting += line.inputs
        return sorted(found, key=self.at.__getitem__)

    def read(
        self, lines: Sequence[Node], flat: Mapping[Node, bool], results: Sequence[Node], entries: Any
    ) -> tuple[Form, list[Node], list[Node], tuple[int, ...]]:
        """The form of lines, its arrays, the arrays of ids, and by which of these each array is read, or -1."""
        read = [[None if is_number(i) else (i, _is_flat(node, flat, i)) for i in node.inputs] for node in lines]
        arrays = [*dict.fromkeys(k for keys in read for k in keys if k is not None and k[0] not in flat)]
        values = [*arrays, *((node, flat[node]) for node in lines)]
        number = {key: n for n, key in enumerate(values)}
        made = tuple(
            line_of(n.op, [number[k] if k else _number(i) for i, k in zip(n.inputs, keys)], n.attrs)
            for n, keys in zip(lines, read)
        )
        ids = [self.new[i.inputs[1]] if self.gathers(i, entries) else None for i, _ in arrays]
        given = [self.new[i if by is None else i.inputs[0]] for (i, _), by in zip(arrays, ids)]
        lists = [*dict.fromkeys(by for by in ids if by is not None)]
        reads = tuple(-1 if by is None else lists.index(by) for by in ids)
        types, last = tuple(i.tensor for i, _ in arrays), tuple(number[r, flat[r]] for r in results)
        form = Form(types, made, last, results[-1].shape, len(entries), tuple(f for _, f in values))
        return form, given, lists, reads


def _number(node: Node) -> tuple[str, float]:
    return node.dtype.name, node.attrs["value"].item()


def _is_flat(reader: Node, flat: Mapping[Node, bool], i: Node) -> bool:
    """Whether what a line reads has the axes of the entries only."""
    return flat[i] if i in flat else bool(i.ndim) and flat[reader] != (reader.op in MOVES)

"""What is computed for each entry of a list of ids and summed where its ids say: found in a graph, as one operator.

Pattern: rows that are added by ids, made by elementwise lines, whoever wrote them, of rows that are looked up. A wide
model is two of these: its entries are summed for each sample, and their gradients for each row that a step touched.
X. Miao et al., "CuWide", ICDE 2021: aggregate, loss, apply. Rooms of kernels say how a device computes it, and gain by
having no row in memory for each entry.

Left out: the update of a table that several lists of ids look up. Its gradients are one list of rows, those of the
first ids before those of the next, each made in another way, so they lie in memory; sums of samples are joined still.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from ..core.graph import OPS, Node, readers_of, remade, rewrite, topological
from ..core.leaf import filling
from ..core.op import Op, Role, op
from ..core.types import TensorType
from ..ops.index import in_range, scatter_add, take, whole_size, within
from .divided import number_of
from .form import FOLDS, Enter, Form, fused, line_of
from .group import is_number
from .unit import Limits, Rules, reads_flat

T = TypeVar("T")

# -- the operators -----------------------------------------------------------------------------------------------------


def _type(*types: TensorType, form: Form, reads: tuple[int, ...], size: int) -> TensorType:
    return TensorType((size, *form.space[form.split :]), form.types_of_results()[0].dtype)


@op(infer=_type, differentiable=False, scratch=True)
def summed_entries(xp: ModuleType, *arrays: Any, form: Form, reads: tuple[int, ...], size: int) -> Any:
    """The result of a form over entries, summed in `size` rows by the last array of ids; one outside is left out.

    `arrays` are those of the form, then arrays of ids. Operand k is row ids[e] of its array for entry e, where
    `reads[k]` is the place of these ids among all arrays, and else, where that is -1, has a value for each entry.
    """
    rows, ids = _rows(xp, arrays, form, reads), arrays[-1]
    inside = (ids >= 0) & (ids < size)
    out = xp.zeros((size, *form.space[form.split :]), dtype=rows.dtype)
    xp.add.at(out, ids[inside], rows[inside])
    return out


def _rows(xp: ModuleType, arrays: Sequence[Any], form: Form, reads: Sequence[int]) -> Any:
    """The row of each entry."""
    given = (a if r < 0 else take.forward(xp, a, arrays[r]) for a, r in zip(arrays, reads))
    return xp.broadcast_to(fused.forward(xp, *given, form=form), form.space)


def _ranges(*arrays: Any, reads: Sequence[int], **_: Any) -> list[tuple[Any, int, str]]:
    return [(arrays[r], size, "index") for r, size in {(r, a.shape[0]): 0 for a, r in zip(arrays, reads) if r >= 0}]


in_range(summed_entries, _ranges)
summed_entries.flops(lambda out, *arrays, form, **_: len(form.lines) * math.prod(form.space))


@dataclass(frozen=True)
class RowsUpdate:
    """An update of some rows of tables, by rows that are computed for entries: its operator and attributes by name."""

    op: Op[..., Any]
    attrs: tuple[tuple[str, Any], ...]

    def cut(self, arrays: Sequence[T]) -> tuple[Sequence[T], Sequence[T], Sequence[T], T]:
        """The tables, the scalars, what the entries are computed of, and the ids by which they are summed."""
        rule: Any = self.op.row_update
        first, last = rule.tables, rule.tables + rule.scalars
        return arrays[:first], arrays[first:last], arrays[last:-1], arrays[-1]


@cache
def update_entries(over: tuple[tuple[int, ...], ...], enter: Enter) -> Op[..., Any]:
    """The operator of row updates whose results may overwrite these of its inputs, entered where a device finds it."""

    def on(xp: ModuleType, arrays: Sequence[Any], update: RowsUpdate, form: Form, reads: tuple[int, ...]) -> Any:
        tables, scalars, given, ids = update.cut(arrays)
        return (*tables, ids, _rows(xp, given, form, reads), *scalars), dict(update.attrs)

    def forward(xp: ModuleType, *arrays: Any, update: RowsUpdate, **attrs: Any) -> Any:
        given, options = on(xp, arrays, update, **attrs)
        return update.op.forward(xp, *given, **options)

    def into(xp: ModuleType, out: Any, *arrays: Any, update: RowsUpdate, **attrs: Any) -> None:
        given, options = on(xp, arrays, update, **attrs)
        rule: Any = update.op.into_rule
        rule(xp, out, *given, **options)

    def ranges(*arrays: Any, update: RowsUpdate, form: Form, reads: tuple[int, ...]) -> list[tuple[Any, int, str]]:
        (table, *_), _, given, ids = update.cut(arrays)
        return [*_ranges(*given, reads=reads), (ids, whole_size(len(table), dict(update.attrs)["window"]), "row id")]

    made: Op[..., Any] = Op(
        forward, name="update_entries", role=Role.UPDATE, differentiable=False, inplace=dict(enumerate(over)),
        infer=lambda *types, **_: types[: len(over)] if len(over) > 1 else types[0], scratch=True,
    )  # fmt: skip
    made.__doc__ = "The row form of an update by rows that are computed where they are summed: see `hetu.ops.update`."
    made.into(into)
    in_range(made, ranges)
    enter(made)
    return made


# -- the pass ----------------------------------------------------------------------------------------------------------


class PerEntry(NamedTuple):
    """What is computed for each entry: the form, its arrays and those of ids, and by which of these each is read."""

    form: Form
    inputs: tuple[Node, ...]
    reads: tuple[int, ...]


class Joining:
    """The rewriting of a graph: `inner` is what is computed entry by entry, and read by nothing but sums of entries.

    `enter` makes operators known to a device, which changes no row before all entries are summed.
    """

    def __init__(self, outputs: Sequence[Node], limits: Limits, enter: Enter) -> None:
        self.outputs, self.new, self.rules = outputs, dict[Node, Node](), Rules(limits)
        self.enter = enter
        nodes = topological(outputs)
        self.at = {node: k for k, node in enumerate(nodes)}
        readers, self.inner = readers_of(nodes, outputs), set[Node]()
        for node in reversed(nodes):
            if (_is_lookup(node) or self._is_line(node)) and all(self._takes(r, node) for r in readers[node]):
                self.inner.add(node)

    def joined(self) -> tuple[Node, ...]:
        return rewrite(self.outputs, self._rule)

    def _is_line(self, node: Node) -> bool:
        alone = isinstance(node.type, tuple) or not node.ndim or node.op in FOLDS
        return not alone and self.rules.unit_of(node) is not None

    def _takes(self, reader: Node | None, node: Node) -> bool:
        if reader is not None and (at := _summed(reader)):
            return reader.inputs[at] is node and reader.inputs.count(node) == 1
        return reader in self.inner and not _is_lookup(reader)

    def _rule(self, node: Node, inputs: tuple[Node, ...]) -> Node:
        at, made = _summed(node), None
        if at and node.inputs[at] in self.inner and (found := self._entries(node.inputs[at], node.inputs[at - 1].ndim)):
            made = (_sums if node.op.row_update is None else self._updated)(node, inputs, found)
        self.new[node] = remade(node, inputs) if made is None else made
        return self.new[node]

    def _updated(self, node: Node, inputs: tuple[Node, ...], entries: PerEntry) -> Node | None:
        rule: Any = node.op.row_update
        tables, (ids, _, *scalars) = inputs[: rule.tables], inputs[rule.tables :]
        over, read = [], [*zip(entries.inputs, entries.reads)]
        for k, table in enumerate(tables):
            own = [n for n, (x, _) in enumerate(read) if x is table]
            over.append((k, *(rule.tables + rule.scalars + n for n in own)))
        attrs = {"update": RowsUpdate(node.op, tuple(node.attrs.items())), "form": entries.form, "reads": entries.reads}
        return update_entries(tuple(over), self.enter).make((*tables, *scalars, *entries.inputs, ids), attrs)

    def _entries(self, rows: Node, split: int) -> PerEntry | None:
        """How rows, of so many axes of entries, are computed entry by entry."""
        lines = self._lines(rows, split) if split and 0 not in rows.shape else []
        unit = self.rules.unit_of_all(lines[::-1])  # each behind what reads it
        if unit is None or unit.space != rows.shape or unit.split not in (None, split):
            return None
        form, arrays = form_of_lines(lines, unit.members, lines[-1:], split)
        ids = [i.inputs[1] if _is_lookup(i) and i.inputs[1].shape == rows.shape[:split] else None for i in arrays]
        lists = [*dict.fromkeys(i for i in ids if i is not None)]
        given = [i if by is None else i.inputs[0] for i, by in zip(arrays, ids)]
        reads = tuple(-1 if by is None else len(given) + lists.index(by) for by in ids)
        return PerEntry(form, tuple(self.new[i] for i in (*given, *lists)), reads)

    def _lines(self, node: Node, split: int) -> list[Node]:
        """The lines that lead to a node, inputs first; what is looked up as it is becomes one."""
        if _is_lookup(node):
            return [OPS["astype"].make((node,), {"dtype": node.dtype.name})]
        found, waiting = set[Node](), [node]
        while waiting:
            line = waiting.pop()
            inside = line in self.inner and not _is_lookup(line) and line.shape[:split] == node.shape[:split]
            if inside and line not in found:
                found.add(line)
                waiting += line.inputs
        return sorted(found, key=self.at.__getitem__)


def _is_lookup(node: Node) -> bool:
    return node.role is Role.LOOKUP and node.op is take and node.attrs["window"] is None


def _summed(node: Node) -> int:
    """Which input of a node are rows that it adds where the ids say, the input before; 0 where it adds none."""
    rule, window = node.op.row_update, node.attrs.get("window")
    if rule is not None:
        return int(rule.tables) + 1
    return 2 * (node.op is scatter_add or (node.role is Role.SCATTER and (window is None or window[0][0] == 0)))


def _sums(node: Node, inputs: tuple[Node, ...], entries: PerEntry) -> Node | None:
    size, added = int(node.tensor.shape[0]), node.op is scatter_add
    if not size:
        return None
    into = within(inputs[1], size=size, what="row id") if added else inputs[1]
    made = summed_entries.make((*entries.inputs, into), {"form": entries.form, "reads": entries.reads, "size": size})
    return inputs[0] + made if added and filling(inputs[0]) != 0 else made


def form_of_lines(
    lines: Sequence[Node], flat: Mapping[Node, bool], results: Sequence[Node], split: int, first: Sequence[Node] = ()
) -> tuple[Form, list[Node]]:
    """Lines, inputs first, over the space of the last result, as one form; and what its arrays are, `first` before all.

    `flat` says which lines have the axes of the entries only.
    """
    read = [[None if is_number(i) else (i, reads_flat(flat, node, i)) for i in node.inputs] for node in lines]
    outside = (k for keys in read for k in keys if k is not None and k[0] not in flat)
    arrays = [*dict.fromkeys((*((i, False) for i in first), *outside))]
    values = [*arrays, *((node, flat[node]) for node in lines)]
    number = {key: n for n, key in enumerate(values)}
    made = tuple(
        line_of(n.op, [number[k] if k else number_of(i) for i, k in zip(n.inputs, keys)], n.attrs)
        for n, keys in zip(lines, read)
    )
    types, last = tuple(i.tensor for i, _ in arrays), tuple(number[r, flat[r]] for r in results)
    form = Form(types, made, last, results[-1].shape, split, tuple(f for _, f in values))
    return form, [i for i, _ in arrays]

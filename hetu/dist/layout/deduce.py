"""Deduce a layout for every node of a graph, from those of variables and feeds and from the operators' rules.

It is one forward walk. For every axis of the device grid an operator has a few candidates: replicate, split one
factor that some input already splits, let a pending sum flow through, or send rows to where a variable that is split
awaits them (`ROUTES`). No other split is invented. The best candidate moves the fewest pinned inputs, then keeps a
split if any candidate does, then moves the fewest bytes; ties combine early (`one_axis.py`). What a reader has had
brought lies there for those behind it too. This policy gives Megatron's two all-reduces per block and data
parallelism's one per gradient (compare GSPMD, Xu et al. 2021, and the annotations of Hetu v2). It does not search for
the global optimum.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...core.graph import Node, topological
from ...core.memory import types_of
from ...core.op import Op, Role
from .layout import ACROSS, DUP, Layout, Shard
from .one_axis import choose
from .rules import roles_along, rule_of, widens

AxisId = tuple[int, int]


@dataclass(frozen=True)
class Grid:
    """Ranks and degrees without roles: what layouts that differ only in roles have in common."""

    parts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    ratio: tuple[int, ...] = ()

    @staticmethod
    def of(layout: Layout) -> Grid:
        """That of a layout."""
        return Grid(tuple((p.ranks, tuple(n for _, n in p.axes)) for p in layout.parts), layout.ratio)

    @cached_property
    def degrees(self) -> dict[AxisId, int]:
        """Axis -> degree, the outermost first."""
        found = {ACROSS: len(self.parts)}
        for p, (_, sizes) in enumerate(self.parts):
            found |= {(p, position): n for position, n in enumerate(sizes)}
        return found

    @cached_property
    def _made(self) -> dict[Any, Layout]:
        """Layouts by roles, and layouts carried over: a graph asks for few, but for each very often."""
        return {}

    def layout(self, roles: Mapping[AxisId, int]) -> Layout:
        """The layout of this grid with these roles; axes that are not named hold duplicates."""
        key = tuple(roles.items())
        if key not in self._made:
            self._made[key] = self._layout(roles)
        return self._made[key]

    def _layout(self, roles: Mapping[AxisId, int]) -> Layout:
        parts = tuple(
            Shard(ranks, tuple((roles.get((p, position), DUP), n) for position, n in enumerate(sizes)))
            for p, (ranks, sizes) in enumerate(self.parts)
        )
        across = roles.get(ACROSS, DUP)
        return Layout(parts, across, self.ratio if across >= 0 else ())

    def carry(self, layout: Layout) -> Layout:
        """`layout` on this grid: the same roles where the degrees agree, the same splits where only the axes do."""
        if layout not in self._made:
            theirs, roles = Grid.of(layout).degrees, dict[AxisId, int]()
            if theirs.keys() == self.degrees.keys():
                alike = theirs == self.degrees
                roles = {axis: role for axis, (role, _) in layout.axes().items() if alike or role >= 0}
            self._made[layout] = self.layout(roles)
        return self._made[layout]

    @property
    def whole_batches(self) -> bool:
        """Whether ranks have all rows of theirs at once."""
        return True

    def hinted(self, hint: Layout, given: Layout | None, node: Node) -> Layout:
        """The layout that the hint `node` asks for here, for a value that lies as `given`."""
        return hint


@dataclass
class Decision:
    """The layouts an operator wants of its inputs, and those of its outputs."""

    wants: tuple[Layout, ...]
    outs: tuple[Layout, ...]


@dataclass
class Deduction:
    """`layouts[node]` are the layouts of its outputs, `wants[node]` those it needs its inputs in; `apart` are the nodes
    that are to be taken apart, of which the outputs lie as those of their parts."""

    layouts: dict[Node, tuple[Layout, ...]] = field(default_factory=dict)
    wants: dict[Node, tuple[Layout, ...]] = field(default_factory=dict)
    apart: set[Node] = field(default_factory=set)


PartsOf = Callable[[Node, Deduction], tuple[Node, ...]]


def updating(outputs: Sequence[Node]) -> set[Node]:
    """The nodes that belong to the update of variables: update operators, what is tagged `update`, and all nodes that
    follow from them. Tagged are what an optimizer makes of gradients, what stands in its place, and hints on it.
    """
    found: set[Node] = set()
    for node in topological(outputs):
        tagged = bool(node.inputs) and node.tags.get("update")  # a number may also be one of the model
        if node.role is Role.UPDATE or tagged or any(i in found for i in node.inputs):
            found.add(node)
    return found


def deduce(
    outputs: Sequence[Node],
    leaf: Callable[[Node, bool], Layout | None],
    grid_of: Callable[[Node], Grid],
    updating: set[Node],
    *,
    narrow: bool = False,
    parts: PartsOf = lambda node, found: (),
) -> Deduction:
    """Layouts for every node that `outputs` need; with `narrow` sums are combined before a cast widens them.

    `parts(node, found)` is what to write in the place of a node that lies as is found, () to leave it. So what follows
    from one that is taken apart is laid out at once as it will be.

    `leaf(node, updating)` gives the layout of a variable or feed, for readers in or outside the update of variables;
    None means that the leaf can be had in any layout (constants). `grid_of(node)` is where a node is computed.
    """
    found = Deduction()
    readers = Counter(i for node in topological(outputs) for i in node.inputs)
    readers.update(node.inputs[0] for node in readers if narrow and widens(node))  # as if others read it too
    pinned: set[Node] = set()
    brought = _Brought()
    variables = [leaf(node, False) for node in topological(outputs) if node.role is Role.VARIABLE]
    split = {axis for v in variables if v for axis, (role, n) in v.axes().items() if role >= 0 and n > 1}
    meets = split - {ACROSS}

    def lay(node: Node, late: bool, grid: Grid) -> None:
        if not node.inputs:
            layout = leaf(node, False)
            found.layouts[node] = (grid.layout({}) if layout is None else layout,)
            if node.role is Role.VARIABLE:
                pinned.add(node)
            return
        if node.role is Role.ITEM:
            found.layouts[node] = (found.layouts[node.inputs[0]][node.attrs["index"]],)
            found.wants[node] = found.layouts[node]
            return
        given = [found.layouts[i][0] if i.inputs else leaf(i, late) for i in node.inputs]
        lies = [() if g is None else (g, *brought.layouts[i]) for i, g in zip(node.inputs, given)]
        decision = _decide(node, lies, grid, pinned, readers, meets)
        found.layouts[node], found.wants[node] = decision.outs, decision.wants
        for i, g, want in zip(node.inputs, given, decision.wants):
            if want != g and i.role is not Role.VARIABLE:  # which is gathered anew in each phase
                brought.add(i, want)
        brought.follow(node)
        if all(i in pinned for i in node.inputs) and not _makes_axes(node):
            pinned.add(node)
        if made := parts(node, found):
            found.apart.add(node)
            new = _not_laid_out(made, found.layouts, {})
            readers.update(i for part in new for i in part.inputs)
            for part in new:
                lay(part, late, grid)
            found.layouts[node] = tuple(found.layouts[part][0] for part in made)

    for node in topological(outputs):
        lay(node, node in updating, grid_of(node))
    return found


class _Brought:
    """The layouts to which readers have had values brought; what is only moved from these is at hand there, too."""

    def __init__(self) -> None:
        self.layouts = defaultdict[Node, dict[Layout, None]](dict)
        self.moves = defaultdict[Node, list[Node]](list)

    def add(self, node: Node, layout: Layout) -> None:
        """A reader has had a value brought to this layout."""
        new = [(node, layout)]
        while new:
            node, layout = new.pop()
            if layout not in self.layouts[node]:
                self.layouts[node][layout] = None
                new += [(move, to) for move in self.moves[node] if (to := _moved(move, layout)) is not None]

    def follow(self, node: Node) -> None:
        """A value that may only be moved from another is there, too."""
        if node.role is Role.MOVE and len(node.inputs) == 1 and not isinstance(node.type, tuple):
            self.moves[node.inputs[0]].append(node)
            for layout in [*self.layouts[node.inputs[0]]]:
                if (to := _moved(node, layout)) is not None:
                    self.add(node, to)


def _moved(node: Node, layout: Layout) -> Layout | None:
    """The layout of a value whose source lies in this one, if it needs nothing else."""
    roles = None if layout.pending is not None else roles_along(node, layout)
    return None if roles is None else Grid.of(layout).layout(roles)


def _not_laid_out(outputs: Sequence[Node], known: Mapping[Node, Any], order: dict[Node, None]) -> Collection[Node]:
    """The nodes that `outputs` need besides the `known` ones, inputs first, behind those in `order`."""
    for node in outputs:
        if node not in known and node not in order:
            _not_laid_out(node.inputs, known, order)
            order[node] = None
    return order


def _makes_axes(node: Node) -> bool:
    """Whether it has axes that no input has, as what is drawn or repeated: any slice of it is at hand."""
    if (rule := rule_of(node)) is None:
        return False
    given, made = ({f for term in side for axis in term for f in axis} for side in (rule.inputs, rule.outputs))
    return not made <= given


def _decide(
    node: Node,
    given: Sequence[Sequence[Layout]],
    grid: Grid,
    pinned: set[Node],
    readers: Counter[Node],
    meets: Collection[AxisId],
) -> Decision:
    """The layouts for one node, of whose inputs `given` are the layouts, in which they were made and to which they were
    brought; none for one that can be had in any.

    `meets` are the axes along which variables are split, so that rows may travel to them.
    """
    if node.role is Role.HINT:
        hinted = grid.hinted(node.attrs["layout"], next(iter(given[0]), None), node)
        return Decision((hinted,), (hinted,))
    at_hand = [[grid.carry(of[0]), *(g for g in of[1:] if Grid.of(g) == grid)] if of else [] for of in given]
    if node.op.awaited:  # however they lie
        here = tuple(of[0] if of else grid.layout({}) for of in at_hand)
        return Decision(here, here[:1])
    rule = rule_of(node)
    count = len(types_of(node))
    if rule is None:
        if any(n > 1 for n in grid.degrees.values()):
            _warn_once(node)
        plain = grid.layout({})
        return Decision((plain,) * len(given), (plain,) * count)
    wants: list[dict[AxisId, int]] = [{} for _ in given]
    outs: list[dict[AxisId, int]] = [{} for _ in range(count)]
    degrees: dict[str, int] = {}
    lie = [[g.axes() for g in of] for of in at_hand]
    for axis, n in grid.degrees.items():
        roles = [[axes[axis][0] for axes in of] for of in lie]
        if n == 1 and all(of[:1] in ([], [DUP]) for of in roles):
            continue
        ratio = grid.ratio if axis == ACROSS else ()
        chosen = choose(node, rule, roles, n, pinned, readers, degrees, ratio, axis in meets and grid.whole_batches)
        for store, values in ((wants, chosen.wants), (outs, chosen.outs)):
            for entry, role in zip(store, values, strict=True):
                # A split into one part is remembered for a larger grid that the value may come to; a sum is complete.
                entry[axis] = role if n > 1 else max(role, DUP)
    return Decision(tuple(map(grid.layout, wants)), tuple(map(grid.layout, outs)))


_warned: set[Op[..., Any]] = set()


def _warn_once(node: Node) -> None:
    if node.op not in _warned:
        _warned.add(node.op)
        warnings.warn(
            f"operator {node.op.name!r} has no dims rule, so its inputs are gathered on every rank ({node!r})",
            stacklevel=2,
        )

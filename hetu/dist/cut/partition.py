"""Turn the graph of one device into the graph of one rank: local sizes, and communication as ordinary nodes.

Every rank walks the same graph with the same layouts, in the same order, so all agree without talking on what is
communicated when. Operators know nothing of it: each gets its local inputs in the layouts that its rule asks for.
`layout/deduce.py` chooses the layouts, `layout/redistribute.py` moves the data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import singledispatch
from itertools import count
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ...core.errors import GraphError
from ...core.graph import OPS, Node, origin_of, topological
from ...core.memory import types_of
from ...core.op import Role
from ...core.placement import Local
from ...core.types import Box, Shape, as_dtype, is_float
from ...ops.composition import Scalars
from ...passes import simplify
from ..layout.boxes import within
from ..layout.deduce import Deduction, Grid, PartsOf, deduce, updating
from ..layout.exchange import exchanged, exchanges
from ..layout.layout import SUM, Layout, Piece
from ..layout.redistribute import cut_first, plan
from ..layout.rules import roles_along, rule_of
from ..ops import RESHARD
from .bucket import Due, Moment, join_collectives, turn_of
from .coded import coded
from .kept import SUMMED
from .rewrites import alike, decomposed, hint_gradients, is_split_though_fixed, push_hints, written_out
from .strategy import Strategy

Key = tuple[Any, ...]  # of a value: the node, its layout, and where it is made anew the phase, or the micro-batch
T = TypeVar("T")


def here(part: T | None) -> T:
    """What this rank has, as its layout says."""
    assert part is not None
    return part


@singledispatch
def partition(
    strategy: Strategy, fetches: Sequence[Node], updates: Mapping[Node, Node], effects: Sequence[Node] = ()
) -> Callable[[int], Local]:
    """What gives each rank its part of a graph, which is laid out once. Sizes are known and global; `mean` has folded
    its count.

    `effects` are nodes that only act, such as a push to a server: each rank acts on its part, and of ranks with equal
    parts the first. They become the last of the tokens. A strategy that is cut in another way registers its own
    function.
    """
    laid = laid_out(strategy, fetches, updates, effects)
    return lambda rank: part_of(rank, laid, strategy, updates)


class LaidOut(NamedTuple):
    """A graph with the layouts of all its values, in which all ranks see the same: fetches, new values, effects."""

    fetches: tuple[Node, ...]
    values: tuple[Node, ...]
    effects: tuple[Node, ...]
    found: Deduction
    late: set[Node]
    levels: Mapping[Node, int]


def laid_out(
    strategy: Strategy, fetches: Sequence[Node], updates: Mapping[Node, Node], effects: Sequence[Node] = ()
) -> LaidOut:
    """The graph as the strategy lays it out: hints moved up, and what may not be split as it is decomposed."""
    outputs = hint_gradients((*fetches, *updates.values(), *effects), strategy.kept, strategy.store)
    kept, acting = len(fetches), len(fetches) + len(updates)

    def lay(outputs: Sequence[Node], parts: PartsOf) -> Deduction:
        late = updating(outputs)
        grid_of = strategy.grid_of(outputs, late)
        return deduce(outputs, strategy.leaf, grid_of, late, narrow=strategy.narrow_sums, parts=parts)

    outputs, found = settled(outputs, strategy, lay)
    late = updating(outputs)
    levels = levels_of(outputs, found, late)
    return LaidOut(outputs[:kept], outputs[kept:acting], outputs[acting:], found, late, levels)


def settled(
    outputs: Sequence[Node], strategy: Strategy, lay: Callable[[Sequence[Node], PartsOf], Deduction]
) -> tuple[tuple[Node, ...], Deduction]:
    """The graph in which nothing is left to take apart, and how it lies: once more for parts that have parts."""
    scalars: Scalars = {}

    def parts(node: Node, found: Deduction) -> tuple[Node, ...]:
        return written_out(node, node.inputs, scalars) if is_split_though_fixed(node, found, strategy) else ()

    for _ in topological(outputs):
        outputs = push_hints(outputs, narrow=strategy.narrow_sums)
        found = lay(outputs, parts)
        if not found.apart:
            return tuple(outputs), found
        outputs = simplify(decomposed(outputs, found.apart))
    name = min(map(repr, found.apart))
    raise GraphError(f"{name} has itself among its parts", fix="mend the `.decompose` of its operator")


def levels_of(outputs: Sequence[Node], found: Deduction, late: set[Node]) -> dict[Node, int]:
    """How many changes of layout of the update lie one behind the other on the way to each value."""
    levels: dict[Node, int] = {}
    for node in topological(outputs):
        wants = found.wants.get(node, ())
        moved = [node in late and i.inputs and found.layouts[i][0] != want for i, want in zip(node.inputs, wants)]
        levels[node] = max((levels[i] + bool(move) for i, move in zip(node.inputs, moved)), default=0)
    return levels


def gradients_of(updates: Mapping[Node, Node], late: Collection[Node]) -> dict[Node, Node]:
    """Gradient -> variable, by the operators that keep every element of it on its way to the new value, and these."""
    found = dict[Node, Node]()
    for variable, value in updates.items():
        stack = [value]
        while stack:
            node = stack.pop()
            if node in found or not node.inputs:
                continue
            found[node] = variable
            if node.op.update is not None:
                stack.append(node.inputs[node.op.update.tables])
            elif node in late:
                stack += node.inputs if node.role is Role.ITEM else alike(node, several=True)
    return found


def part_of(rank: int, laid: LaidOut, strategy: Strategy, updates: Mapping[Node, Node]) -> Local:
    """What `rank` does of a graph."""
    walk = Walk(laid.found, strategy, rank, laid.late, laid.levels)
    walk.owners = gradients_of(dict(zip(updates, laid.values)), laid.late)
    # The last variable first, as the program will run: its gradient is the first that backward finishes. What an update
    # sends once more, such as norms, comes behind all gradients, so that both can be joined.
    nodes = topological((*laid.fetches, *reversed(laid.values), *laid.effects))
    wants = laid.found.wants
    read = {i for n in nodes for i, want in zip(n.inputs, wants.get(n, ())) if want == strategy.whole}
    sums = {n for n in {*laid.fetches} - read if n.inputs and laid.found.layouts[n][0].pending == SUM}
    for node in sorted(nodes, key=lambda n: max(laid.levels[n], 1)):
        with origin_of(node):
            walk.visit(node)
            if node in sums:  # nobody reads it, such as a loss, so it may travel with the first gradients
                walk.value(node, strategy.whole, "update")
    fetches = []
    for node in laid.fetches:
        with origin_of(node):
            fetches.append(here(walk.value(node, strategy.whole)))
    values = {}
    for variable, node in reversed([*zip(updates, laid.values)]):  # in the order in which they are there
        with origin_of(node):
            values[variable] = walk.value(node, strategy.store(variable), "update")
    locals_ = {variable: strategy.local_variable(variable, rank) for variable in updates}
    new = {local: here(values[variable]) for variable, local in locals_.items() if local is not None}
    at = {node: laid.found.layouts[node][0] for node in laid.effects}
    acts = [walk.acting(here(walk.made[node, layout, ""]), layout) for node, layout in at.items()]
    tokens = (*walk.unread((*fetches, *new.values(), *acts)), *acts)
    outputs = join_collectives((*fetches, *tokens, *new.values()), walk.turns, strategy.bucket_bytes)
    kept, end = len(fetches), len(fetches) + len(tokens)
    return Local(outputs[:kept], outputs[kept:end], dict(zip(new, outputs[end:])), walk.feeds)


def acting_ranks(layout: Layout, shape: Shape) -> Collection[int]:
    """Those that act in a layout: of the copy that the first rank has, as others may be cut otherwise, one a part."""
    pieces = layout.pieces(shape)
    copy = pieces[min(pieces)].copy
    return {(p.box, p.term): rank for rank, p in sorted(pieces.items(), reverse=True) if p.copy == copy}.values()


class Walk:
    """Builds the local graph; `made` remembers every value in every layout it is needed in."""

    def __init__(
        self, found: Deduction, strategy: Strategy, rank: int, updating: set[Node], levels: Mapping[Node, int]
    ) -> None:
        self.found, self.strategy, self.rank, self.updating, self.levels = found, strategy, rank, updating, levels
        self.made: dict[Key, Node | None] = {}
        self.moves: list[Node] = []  # the communication in which this rank takes part
        self.fetched: dict[tuple[Node, Node], Node] = {}  # rooms of the rows that this rank has
        self.feeds: dict[str, tuple[str, Box]] = {}
        self.numbers = count(step=2)  # of the steps of communication, in the one order that all ranks share
        self.turns: dict[Node, Due] = {}  # the collectives that may be joined
        self.since: Moment | None = None  # from when on the first variables of a phase may be asked for
        self.owners: Mapping[Node, Node] = {}  # gradient, or new value -> the variable that it is of

    def visit(self, node: Node) -> None:
        """Make the local node in the layout in which it comes out, or None on ranks that have no part of it."""
        if node.role in (Role.CONSTANT, Role.PLACEHOLDER):
            return  # made by `value`, in the layout that is wanted
        layout = self.found.layouts[node][0]
        if node.role is Role.VARIABLE:
            layout = self.strategy.store(node)
            made = self.strategy.local_variable(node, self.rank)
        elif not node.inputs:  # what is made from nothing is made whole
            made = None if self.piece(layout, node.shape) is None else node
        else:
            phase = "update" if node in self.updating else "backward" if node.tags.get("gradient") else "forward"
            made = self._local(
                node, [self.value(i, want, phase) for i, want in zip(node.inputs, self.found.wants[node])]
            )
        self.made[node, layout, ""] = made

    def _fed(self, node: Node, layout: Layout) -> Node | None:
        """This rank's part of a feed, which every rank gets as a whole, or has been fed alone."""
        key = node, layout, ""
        if key not in self.made:
            piece = self.piece(layout, node.shape)
            self.made[key] = None if piece is None else self.placeholder(node, piece)
        return self.made[key]

    def placeholder(self, node: Node, piece: Piece) -> Node:
        """The local node for one piece of a feed."""
        name = f"{node.name}[{len(self.feeds)}]" if node.name in self.feeds else node.name
        self.feeds[name] = node.name, self.taken(node, piece.box)
        return node.op.make((), {**node.attrs, "name": name, "shape": piece.shape})

    def taken(self, node: Node, box: Box) -> Box:
        """Where in what this rank is fed the part `box` of a feed lies."""
        return tuple((0, high - low) for low, high in box) if node.name in self.strategy.local else box

    def piece(self, layout: Layout, shape: Shape) -> Piece | None:
        """What this rank holds of a tensor of the global `shape`."""
        return layout.pieces(shape).get(self.rank)

    def _local(self, node: Node, inputs: Sequence[Node | None]) -> Node | None:
        """The operator on this rank's parts."""
        if node.role is Role.HINT:
            return inputs[0]
        if node.role is Role.ITEM:
            parent = inputs[0]
            return None if parent is None else OPS["item"].make((parent,), node.attrs)
        layouts = self.found.layouts[node]
        found = [self.piece(layout, type_.shape) for layout, type_ in zip(layouts, types_of(node))]
        travels = exchanges(node, self.found.wants[node], layouts)
        order = next(self.numbers) if travels or node.role is Role.COMMUNICATION else 0
        if found[0] is None:
            return None
        if mine := next((e for e in travels if self.rank in e.group), None):
            return exchanged(node, tuple(map(here, inputs)), mine, self.rank, order, self.fetched)
        shapes = [here(piece).shape for piece in found]
        attrs = dict(node.attrs)
        if "shape" in attrs:
            attrs["shape"] = shapes[0]
        if "window" in node.op.defaults:
            attrs["window"] = self._window(node)
        if node.role is Role.COMMUNICATION:
            attrs["order"] = order
        made = node.op.make(tuple(map(here, inputs)), attrs)
        for type_, shape in zip(types_of(made), shapes):
            if type_.shape != shape:
                raise GraphError(f"{node!r}: its part on rank {self.rank} is {type_}, the layout says {shape}")
        return made

    def acting(self, made: Node, layout: Layout) -> Node:
        """The local node of one that only acts: not where other ranks do so with an equal part."""
        return made.op.make(made.inputs, {**made.attrs, "acts": self.rank in acting_ranks(layout, made.shape)})

    def _window(self, node: Node) -> tuple[tuple[int, int, int], ...] | None:
        """(low, high, size) of each `@` factor of the operator's rule, in its order; None where all are whole."""
        rule = here(rule_of(node))
        terms = [*zip(rule.inputs, (i.shape for i in node.inputs), self.found.wants[node])]
        terms += zip(rule.outputs, (t.shape for t in types_of(node)), self.found.layouts[node])
        spans: dict[str, tuple[int, int, int]] = {}
        for term, shape, layout in terms:
            box = here(self.piece(layout, shape)).box
            spans.update({axis[0]: (*span, int(size)) for axis, span, size in zip(term, box, shape) if len(axis) == 1})
        found = tuple(spans.get(factor, (0, 1, 1)) for factor in rule.windowed)
        return None if all((low, high) == (0, size) for low, high, size in found) else found

    # -- values in the layouts they are wanted in -------------------------------------------------------------------

    def value(self, node: Node, want: Layout, phase: str = "") -> Node | None:
        """`node` in the layout `want`; a reshard is made once, or once per phase for a variable that is kept in parts.

        A gathered variable must not stay alive from the forward to the backward pass: that would undo the sharding.
        """
        if node.role is Role.CONSTANT:
            return self._constant(node, want)
        if isinstance(node.type, tuple):
            return self.made[node, self.found.layouts[node][0], ""]
        have = self.strategy.store(node) if node.role is Role.VARIABLE else self.found.layouts[node][0]
        if node.role is Role.PLACEHOLDER:
            have = have if want.pending or node.name in self.strategy.local else want
            self._fed(node, have)
        if have == want:
            return self.made[node, have, ""]
        local = self.made[node, have, ""]
        return self.once(node, want, phase, lambda: self.brought(node, local, have, want, node.shape, phase))

    def key(self, node: Node, want: Layout, phase: str = "") -> Key:
        """Under what `made` has a value in a layout."""
        return node, want, phase if node.role is Role.VARIABLE else ""

    def once(self, node: Node, want: Layout, phase: str, bring: Callable[[], Node | None]) -> Node | None:
        """A value in a layout to which it was brought before, or was what it is only moved from; else to `bring`."""
        key = self.key(node, want, phase)
        if key not in self.made:
            turned, made = self._turned(node, want)
            self.made[key] = made if turned else bring()
        return self.made[key]

    def _turned(self, node: Node, want: Layout) -> tuple[bool, Node | None]:
        """Whether what this value is only moved from was brought to such a layout already, and its local form then."""
        way = list[tuple[Node, Layout]]()
        while not way or self.key(node, want) not in self.made:
            if want.pending is not None or (roles := roles_along(node, want, back=True)) is None:
                return False, None
            way.append((node, want))
            node, want = node.inputs[0], Grid.of(want).layout(roles)
        local = self.made[self.key(node, want)]
        for node, want in reversed(way):
            if local is not None:
                more = {"shape": here(self.piece(want, node.shape)).shape} if "shape" in node.attrs else {}
                local = node.op.make((local,), {**node.attrs, **more})
            self.made[self.key(node, want)] = local
        return True, local

    def _constant(self, node: Node, want: Layout) -> Node | None:
        piece = self.piece(want, node.shape)
        if piece is None:
            return None
        part = node.attrs["value"][within(piece.box, tuple((0, int(s)) for s in node.shape))]
        part.setflags(write=False)
        return node if part.shape == node.shape else OPS["constant"].make((), {"value": part})

    def brought(
        self, node: Node, local: Node | None, have: Layout, want: Layout, shape: Shape, phase: str
    ) -> Node | None:
        """`local` in another layout, noted as a change that may be joined; a gradient travels as its variable asks."""
        owner, dtype = self.owners.get(node), as_dtype(node.dtype)
        ends = phase == "update" and have.pending == SUM and want.pending is None and is_float(dtype)
        wire = self.strategy.kept(owner).wire if owner is not None and ends and dtype.itemsize > 2 else ""
        if owner is not None and wire and wire not in SUMMED:
            mine = self.strategy.local_variable(owner, self.rank)
            local, have = coded(local, have, shape, self.rank, mine, wire, next(self.numbers))
        elif wire and local is not None:
            local = OPS["astype"](local, dtype=wire)
        made = self._reshard(as_dtype(wire) if wire in SUMMED else dtype, local, have, want, shape)
        self.note(made, node, phase)
        return OPS["astype"](made, dtype=dtype) if made is not None and made.dtype != dtype else made

    def _reshard(self, dtype: np.dtype, local: Node | None, have: Layout, want: Layout, shape: Shape) -> Node | None:
        way = plan(have, want, shape)
        if way.kind == "batched" and (cut := cut_first(have, want, shape)) is not None:
            return self._reshard(dtype, self._reshard(dtype, local, have, cut, shape), cut, want, shape)
        made_pending = any(way.before[r].term != piece.term for r, piece in way.after.items() if r in way.before)
        if way.kind in ("nothing", "slice") and not made_pending:
            if self.rank not in way.after:
                return None
            box, outer = way.after[self.rank].box, way.before[self.rank].box
            if box == outer:
                return local
            return OPS["getitem"](local, key=within(box, outer)[: len(box)])
        order = next(self.numbers)
        if self.rank not in way.before and self.rank not in way.after:
            return None
        attrs: dict[str, Any] = {"src": have, "dst": want, "shape": shape, "rank": self.rank, "order": order}
        if way.kind == "all_to_all" and self.strategy.hosts:
            attrs["hosts"] = self.strategy.hosts
        made = RESHARD[way.kind].make(() if local is None else (local,), {**attrs, "dtype": dtype})
        self.moves.append(made)
        return made if self.rank in way.after else None

    def note(self, made: Node | None, node: Node, phase: str) -> None:
        """Remember a change of layout of `node` that may be joined with others."""
        owner, variable = self.owners.get(node, node), node.role is Role.VARIABLE
        bucket = self.strategy.kept(owner).bucket if owner.role is Role.VARIABLE else None
        turn = None if made is None else turn_of(made, variable, Due(phase, self.levels[node], self.since, bucket))
        if made is not None and turn is not None:
            self.turns[made] = turn

    def unread(self, outputs: Sequence[Node]) -> list[Node]:
        """The communication that `outputs` do not need: on this rank nobody reads it, but other ranks wait in it."""
        seen, found = set(topological(outputs)), list[Node]()
        for node in reversed(self.moves):  # the last first: it needs those before it
            if node not in seen:
                found.append(node)
                seen.update(topological((node,)))
        return found[::-1]

"""Strategies: plain data that says how a model is spread over ranks.

A `Strategy` is a device grid, a layout for each feed, and for each variable where it is kept (`kept.py`). Everything
else is deduced. `builders.py` writes one for a given model.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar, Self

from ...core.errors import ArgumentError, AxisError, GraphError, UnknownNameError, did_you_mean, public
from ...core.graph import OPS, Node, origin_of, topological
from ...core.leaf import random_state
from ...core.op import Role
from ...core.types import Atom, show_shape
from ...look.columns import in_columns
from ...look.html_table import rows_html
from ...look.shards import shards_svg
from ...look.svg import Svg
from ...plain_data import form, from_text, read_fields, to_text, write_fields
from ...ranges import Count
from ..comm.hierarchical import Hosts
from ..cut.kept import LocalInitializer
from ..layout.deduce import Grid
from ..layout.layout import DUP, SUM, Layout, Piece, show_ranks
from ..layout.redistribute import plan
from .kept import WRITTEN, Home, Kept, owners_of
from .place import marked_places, places_of
from .regroup import WorkDivision, on_groups

HEADER = ("variable", "shape", "compute", "store", "bytes a rank", "collectives")


class Builder:
    """Writes the strategy for a graph. An executor takes a builder or a strategy, which is a builder of itself.

    `asked` are the arguments that it was made with, by name, without those that are the default.
    """

    asked: Mapping[str, Any] = MappingProxyType({})

    def __init_subclass__(cls) -> None:
        if (init := vars(cls).get("__init__")) is None:
            return
        signature = inspect.signature(init)

        @functools.wraps(init)
        def made(self: Builder, *args: Any, **options: Any) -> None:
            init(self, *args, **options)
            _, *given = signature.bind(self, *args, **options).arguments.items()
            usual = {name: parameter.default for name, parameter in signature.parameters.items()}
            self.asked = {n: v for n, v in given if type(v) is not type(usual[n]) or v != usual[n]}

        setattr(cls, "__init__", made)  # noqa: B010 - what mypy takes

    def build(self, outputs: Sequence[Node], world_size: int) -> Strategy:
        """The strategy for the graph of `outputs` on `world_size` ranks."""
        raise NotImplementedError

    def regrouped(self, outputs: Sequence[Node], world_size: int, to: WorkDivision) -> Builder:
        """The same for ranks of unequal speed, which divide the work so; see `hetu.plan.rebalance`.

        By default the strategy that it builds on other groups, where all layouts keep their roles. A builder of
        builders that adds what no strategy says adds it again:
        `return self.but(builder=self.builder.regrouped(outputs, world_size, to))`.
        ArgumentError where ranks divide something alike by its nature, such as experts.
        """
        return self.build(outputs, world_size).regrouped(outputs, world_size, to)

    def but(self, **changed: Any) -> Self:
        """The same builder with other arguments, by name.

        >>> from hetu.dist import DataParallel
        >>> DataParallel().but(accumulate=4).accumulate
        4
        """
        if is_dataclass(self):
            return replace(self, **changed)
        return type(self)(**{**self.asked, **changed})

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.asked.items())})"


@dataclass
class Strategy(Builder):
    """Layouts of variables and feeds by name on the grid of `base`; all others are duplicated.

    `places` are the grids of the ranks on which the user has placed nodes, with duplicates (`place.py`). Sums of
    gradients, and what ZeRO gathers and scatters, are joined in buckets of at most `bucket_bytes`, which travel beside
    the computation; 0 keeps them apart. Of gathered variables about three buckets are there ahead of their readers.
    `hosts` are the ranks of each host, for all-to-alls that go within hosts first (`comm/hierarchical.py`). Sums of
    16-bit floats that are read in 32 alone, as gradients are in mixed precision, are taken between ranks in 32;
    `narrow_sums` takes them in 16, in half the bytes, and rounds. A sum that anything reads in 16 bits, as layers under
    tensor parallelism do, is taken once for all its readers, in 16. Of the feeds named in `local` each rank is fed its
    own part, all of one size; of others the whole.

    >>> from hetu.dist import Mesh
    >>> mesh = Mesh((2,), ("data",))
    >>> strategy = Strategy(mesh.layout(), {}, {"x": mesh.layout(data=0)})
    >>> Strategy.from_json(strategy.to_json()) == strategy
    True
    """

    base: Layout
    variables: dict[str, Home] = field(default_factory=dict)
    feeds: dict[str, Layout] = field(default_factory=dict)
    bucket_bytes: Count = 4 << 20
    places: tuple[Layout, ...] = ()
    hosts: Hosts = ()
    narrow_sums: bool = False
    local: tuple[str, ...] = field(default=(), kw_only=True)
    kind: ClassVar[str] = "layouts"
    alone = False  # whether each rank's graph is that of a job of one
    lives: ClassVar[Any] = dict[str, Kept]  # what is said of each variable, by the kind of the strategy
    called: ClassVar = "a strategy", WRITTEN

    def __init_subclass__(cls) -> None:
        cls.kind = vars(cls).get("kind", cls.__name__)
        KINDS[cls.kind] = cls

    def __post_init__(self) -> None:
        self.grid = Grid.of(self.base)
        self.whole = self.grid.layout({})
        self._everywhere = Kept(self.whole, self.whole)
        self._local: dict[tuple[Node, int], Node] = {}

    # -- what the passes ask -------------------------------------------------------------------------------------

    def grids(self) -> Sequence[Layout]:
        """The ranks that work on the model: one layout, or one per stage."""
        return (self.base,)

    @property
    def microbatches(self) -> int:
        """In how many parts, one after the other, a step takes what each rank has of its batch."""
        return 1

    def moments(self) -> Mapping[int, str]:
        """What the moments of a step are called, by number, where operators are marked with theirs."""
        return {}

    def grid_of(self, outputs: Sequence[Node], late: Collection[Node]) -> Callable[[Node], Grid]:
        """Where each node of a graph is computed; `late` are those that update variables."""
        grids = {layout.ranks: Grid.of(layout) for layout in self.places}
        placed = places_of(outputs, grids, self.compute, self.store, late) if grids else {}
        return lambda node: grids[placed[node]] if node in placed else self.grid

    def leaf(self, node: Node, updating: bool) -> Layout | None:
        """The layout of a leaf for its readers; None for constants, which can be had in any."""
        if node.role is Role.VARIABLE:
            return self.store(node) if updating else self.compute(node)
        return self.feeds.get(node.name, self.whole) if node.role is Role.PLACEHOLDER else None

    def sizes(self, sizes: Mapping[Atom, int], training: bool) -> Mapping[Atom, int]:
        """The sizes that a graph is made for, from those that are fed."""
        return {key: size * self._parts(*key) for key, size in sizes.items()}

    def _parts(self, name: str, axis: int) -> int:
        """Into how many parts, which ranks feed, the axis of a feed is split."""
        roles = self.feeds[name].axes().values() if name in self.local else ()
        return math.prod(n for role, n in roles if role == axis)

    def fed_alike(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks that feed the same part of a local feed as `rank`."""
        layout = self.feeds[name]
        most = max(role for role, _ in layout.axes().values())
        pieces = layout.pieces(tuple(self._parts(name, axis) for axis in range(most + 1)))
        return tuple(sorted(r for r, piece in pieces.items() if piece.box == pieces[rank].box))

    def kept(self, node: Node) -> Home:
        """Where a variable is kept."""
        return self.variables.get(node.name, self._everywhere)

    def compute(self, node: Node) -> Layout:
        """The layout in which the model reads a variable."""
        return self._layouts(node)[0]

    def store(self, node: Node) -> Layout:
        """The layout in which ranks keep a variable; copies of what servers keep are whole."""
        return self._layouts(node)[-1]

    def _layouts(self, node: Node) -> tuple[Layout, ...]:
        return self.kept(node).layouts or self._everywhere.layouts

    def is_served(self, node: Node) -> bool:
        """Whether servers keep a variable."""
        return self.kept(node).served

    def piece(self, node: Node, rank: int) -> Piece | None:
        """What a rank has of a variable between steps."""
        return self.store(node).pieces(node.shape).get(rank) if self.kept(node).copied else None

    def local_variable(self, node: Node, rank: int) -> Node | None:
        """The variable that holds this rank's part, the same node at every call; None if it has no part."""
        piece = self.piece(node, rank)
        if piece is None:
            return None
        if piece.shape == node.shape:
            return node
        if (node, rank) not in self._local:
            init = LocalInitializer(node.attrs["init"], node.shape, piece.box)
            with origin_of(node):
                attrs = {**node.attrs, "shape": piece.shape, "init": init}
                self._local[node, rank] = OPS["variable"].make((), attrs)
        return self._local[node, rank]

    def build(self, outputs: Sequence[Node], world_size: int) -> Self:
        """Itself, for any graph."""
        return self

    def regrouped(self, outputs: Sequence[Node], world_size: int, to: WorkDivision) -> Strategy:
        made = on_groups(self, outputs, to, [[0] * len(to.pipelines)], dict.fromkeys(self.variables, 0))
        return replace(self, **{name: made[name] for name in ("base", "variables", "feeds")}, hosts=())

    def naming(self, names: Collection[str]) -> Self:
        """The same for a graph that has no other variables and placeholders than of these names."""
        variables = {name: kept for name, kept in self.variables.items() if name in names}
        feeds = {name: layout for name, layout in self.feeds.items() if name in names}
        return replace(self, variables=variables, feeds=feeds, local=tuple(n for n in self.local if n in names))

    def check(self, outputs: Sequence[Node], world_size: int) -> None:
        """UnknownNameError for variables or feeds that the graph lacks, ArgumentError or AxisError for layouts that do
        not fit them or name ranks that do not exist."""
        nodes = topological(outputs)
        for node in nodes:
            if node.role is Role.COMMUNICATION and "order" not in node.attrs:
                raise GraphError(
                    f"{node!r} is written by hand, but a strategy puts in all communication itself",
                    fix="leave out strategy=, or lay the value out by ht.dist.shard(node, layout=...)",
                    site=node.site,
                )
        layouts: list[tuple[str, Layout]] = [("the strategy", self.base)]
        named = [(Role.VARIABLE, name, kept.layouts) for name, kept in self.variables.items()]
        named += [(Role.PLACEHOLDER, name, (layout,)) for name, layout in self.feeds.items()]
        known: dict[tuple[Role, str], Node] = {
            (n.role, n.name): n for n in nodes if n.role in (Role.VARIABLE, Role.PLACEHOLDER)
        }
        for role, name, given in named:
            if (role, name) not in known:
                fix = did_you_mean(name, [other for of, other in known if of is role])
                raise UnknownNameError(f"the strategy names the {role.value} {name!r}, which the graph lacks", fix=fix)
            through = self.variables[name].through if role is Role.VARIABLE else ()
            for place, layout in enumerate((*given, *through)):
                _check_fits(known[role, name], layout, passing=place >= len(given))
                layouts.append((f"the layout of {name!r}", layout))
        layouts += [(f"the hint at {n.site}", n.attrs["layout"]) for n in nodes if n.role is Role.HINT]
        self._check_places(outputs, world_size)
        if self.hosts and sorted(chain.from_iterable(self.hosts)) != [*range(world_size)]:
            raise ArgumentError(f"hosts {self.hosts}, the job has {world_size} ranks", fix="name each rank once")
        for what, layout in layouts:
            if (most := max(layout.ranks)) >= world_size:
                raise ArgumentError(
                    f"{what} uses rank {most}, the job has {world_size} ranks: {layout}",
                    fix=f"start more: heturun -w {most + 1} ...",
                )

    def _check_places(self, outputs: Sequence[Node], world_size: int) -> None:
        known = {layout.ranks for layout in self.places}
        for ranks, node in marked_places(outputs).items():
            if max(ranks) >= world_size:
                what, fix = f"the job has {world_size} ranks", f"start more: heturun -w {max(ranks) + 1} ..."
            elif ranks not in known:
                what, fix = "the strategy has no such place", "let a builder write it: strategy=ht.dist.DataParallel()"
            else:
                continue
            raise ArgumentError(f"{node!r} is placed on rank {show_ranks(ranks)}, {what}", fix=fix, site=node.site)

    # -- plain data ----------------------------------------------------------------------------------------------

    @public
    def to_json(self) -> str:
        return to_text(self)

    @staticmethod
    def from_json(text: str) -> Strategy:
        """What `to_json` of a strategy of any kind wrote; ArgumentError names what is wrong."""
        return from_text(Strategy, text)

    @public
    def data(self) -> dict[str, Any]:
        """The kind and all fields as JSON has them."""
        return {"kind": self.kind, **write_fields(self)}

    # -- tables and pictures: print a program to see the communication of activations ------------------------------

    def table(self, outputs: Iterable[Node]) -> str:
        """One row per variable: its shape, layouts, bytes on a rank, and the collectives that a step needs for it."""
        found = self.rows(outputs)
        widths = [max(map(len, column)) for column in zip(*found)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in found)

    def rows(self, outputs: Iterable[Node]) -> list[tuple[str, ...]]:
        """The cells of `table`."""
        found: list[tuple[str, ...]] = [HEADER]
        nodes = topological(outputs)
        owners = owners_of(nodes)
        for node in (n for n in nodes if n.role is Role.VARIABLE):
            most = max((math.prod(p.shape) for p in self._pieces(node).values()), default=0) * node.dtype.itemsize
            read, kept, how = self.kept(node).words
            implied = [*self._implied(node, owners), *([how] if how else [])] if node.attrs["trainable"] else []
            found.append((node.name, show_shape(node.shape), read, kept, f"{most:,}", ", ".join(implied)))
        return found

    def shards(self, outputs: Iterable[Node]) -> Svg:
        """A picture of which rank keeps which part of each variable."""
        rows, kept = [], {rank: 0 for rank in self.base.ranks}
        for node in (n for n in topological(outputs) if n.role is Role.VARIABLE):
            pieces = self._pieces(node)
            rows.append((node.name, tuple(map(int, node.shape)), {rank: p.box for rank, p in pieces.items()}))
            for rank, piece in pieces.items():
                kept[rank] += math.prod(piece.shape) * node.dtype.itemsize
        return shards_svg(rows, {rank: f"{nbytes:,} bytes" for rank, nbytes in kept.items()})

    def _pieces(self, node: Node) -> dict[int, Piece]:
        """What each rank has of a variable."""
        pieces = {rank: self.piece(node, rank) for rank in self.store(node).ranks}
        return {rank: piece for rank, piece in pieces.items() if piece is not None}

    def _implied(self, node: Node, owners: Mapping[Node, Node]) -> list[str]:
        """What a step communicates for a variable: it gathers it, combines its gradient, gathers the new value."""
        if self.is_served(node):
            return ["push", "pull"]
        compute, store = self.compute(node), self.store(node)
        states = [self.store(v) for v, owner in owners.items() if owner is node is not v]
        updated = states[0] if states else store
        changes = [(store, compute), (self._gradient(compute), updated), (updated, store)]
        kinds = [plan(src, dst, node.shape).kind for src, dst in changes]
        return [kind for kind in kinds if kind not in ("nothing", "slice")]

    def _gradient(self, compute: Layout) -> Layout:
        """The layout of a gradient at the end of the backward pass: still to be summed over the axes of the batch."""
        split = {axis for feed in self.feeds.values() for axis, (role, _) in feed.axes().items() if role >= 0}
        roles = {axis: SUM if axis in split and role == DUP else role for axis, (role, _) in compute.axes().items()}
        return Grid.of(compute).layout(roles)

    def overview(self) -> list[tuple[str, ...]]:
        """What is known without a graph, as the cells of a table: how each variable and each feed lies."""
        found: list[tuple[str, ...]] = [("", "compute", "store", "synchronized")]
        found.append(("all else", *2 * (str(self.whole),), f"buckets of {self.bucket_bytes:,} bytes"))
        found += [(name, *kept.words) for name, kept in self.variables.items()]
        found += [(f"{name} (fed)", str(layout), "", "") for name, layout in self.feeds.items()]
        return found + [(f"placed on {show_ranks(grid.ranks)}", str(grid), "", "") for grid in self.places]

    def _repr_html_(self) -> str:
        """What is known without a graph; with one, `table` and `shards` show shapes and bytes."""
        return rows_html(self.overview())

    def __str__(self) -> str:
        return "\n".join(in_columns(self.overview()))


KINDS: dict[str, type[Strategy]] = {Strategy.kind: Strategy}  # by what their JSON says they are


def _read(data: Any) -> Strategy:
    """What `data` of a strategy of any kind gave."""
    name = str(data.get("kind")) if isinstance(data, dict) else type(data).__name__
    if name not in KINDS:
        fix = f"{WRITTEN}, and import first what defines the kind, as hetu.strategies does those with servers"
        raise ArgumentError(f"not a strategy: a kind {name!r}, wanted one of {', '.join(KINDS)}", fix=fix)
    kind, told = KINDS[name], {name: value for name, value in data.items() if name != "kind"}
    return kind(**read_fields(kind, told, variables=kind.lives))


form(Strategy, Strategy.data, _read)


def _check_fits(node: Node, layout: Layout, *, passing: bool) -> None:
    most = max(role for role, _ in layout.axes().values())
    if most >= node.ndim:
        raise AxisError(f"{layout} splits axis {most} of {node!r}", fix=f"it has the axes 0 to {node.ndim - 1}")
    if layout.pending is not None and not passing:
        raise ArgumentError(f"{layout} keeps {node!r} as a pending result", fix="split or duplicate it")
    if node is random_state and most >= 0:
        raise ArgumentError(f"{layout} splits {node!r}, which every rank draws by", fix="leave it out of variables=")

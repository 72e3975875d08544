"""Builders: functions of a graph and a number of ranks that write the `Strategy` of a well-known scheme.

Data parallelism, ZeRO (S. Rajbhandari et al., 2020), Megatron's tensor parallelism (M. Shoeybi et al., 2019) and their
products are layouts of variables and feeds on one mesh. The planner (`hetu.plan`) chooses among them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Protocol

from ...core.errors import ArgumentError, AxisError, UnknownNameError, did_you_mean
from ...core.graph import Node, topological
from ...core.op import Role
from ...core.types import Dim, Shape
from ...ranges import AtLeast1, Range
from ..layout.layout import DUP, Layout, Mesh
from .axes import tensor_axes
from .kept import Kept, owners_of
from .pipeline_strategy import check_statistics, in_one_stage
from .place import marked_places, refuse_places
from .strategy import Builder, Strategy

Stage = Annotated[int, Range(0, 3)]  # of ZeRO


class RuleBook(dict[str, int]):
    """Name patterns -> axis, for many models: a pattern that fits no variable of a model is passed over.

    must_fit: those for which it is an error, as it is for all of a plain dict.
    by_graph: whether the graph says the axis of variables that none fits, as it does for the book `MEGATRON`: tensor
        parallelism then splits what one operator after the other can work on in parts (M. Shoeybi et al., 2019),
        whatever the names. Of a book in braces, `{**MEGATRON}`, only patterns are left: join books by `|`.

    Joined with a dict, as in `MEGATRON | {"conv*": 0}`, a book is one of both, where those of the dict must fit. The
    right side says the axis of a pattern that stands in both; the left side's come first, and the first pattern that
    fits a variable counts.

    >>> book = RuleBook({"*up": 1, "*down": 0}) | {"conv*": 0}
    >>> book, book.must_fit
    ({'*up': 1, '*down': 0, 'conv*': 0}, frozenset({'conv*'}))
    """

    def __init__(self, patterns: Mapping[str, int], must_fit: Iterable[str] = (), *, by_graph: bool = False) -> None:
        super().__init__(patterns)
        self.must_fit, self.by_graph = frozenset(must_fit), by_graph

    @staticmethod
    def of(patterns: Mapping[str, int]) -> RuleBook:
        """These patterns, all of which must fit unless they stand in a book."""
        return patterns if isinstance(patterns, RuleBook) else RuleBook(patterns, patterns)

    def axes(self, trained: Sequence[Node]) -> dict[str, int]:
        """Name -> axis of the variables that patterns fit and that have it."""
        found: dict[str, int] = {}
        for node in trained:
            axis = next((a for pattern, a in self.items() if fnmatch.fnmatch(node.name, pattern)), None)
            if axis is not None and -node.ndim <= axis < node.ndim:
                found[node.name] = axis % node.ndim
        return found

    def __bool__(self) -> bool:
        return self.by_graph or len(self) > 0

    def __or__(self, other: Mapping[str, int]) -> RuleBook:  # type: ignore[override]
        added = RuleBook.of(other)
        must_fit = (self.must_fit - added.keys()) | added.must_fit
        return RuleBook({**self, **added}, must_fit, by_graph=self.by_graph or added.by_graph)

    def __ror__(self, other: Mapping[str, int]) -> RuleBook:  # type: ignore[override]
        return RuleBook.of(other) | self

    __ior__ = __or__  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RuleBook({super().__repr__()}, by_graph=True)" if self.by_graph else super().__repr__()


MEGATRON = RuleBook({}, by_graph=True)
Axes = Mapping[str, Mapping[str, int]]  # axis of the mesh -> variable -> axis of it that is split


class RankRows(Protocol):
    """Ranks in rows: the axis `data` is between them, the axis `tensor` inside each; these are the last of `sizes`."""

    @property
    def sizes(self) -> tuple[int, ...]: ...

    def layout(self, *, data: int = DUP, tensor: int = DUP) -> Layout: ...


class Parallel(Builder):
    """Data x tensor parallelism on a mesh, with the variables' storage sharded over the data axis if `zero` says so.

    data, tensor: how many ways each; `data=None` takes all other ranks.
    zero: 0 keeps everything everywhere, 1 (and 2) shards optimizer state, 3 shards the variables too.
    split: name patterns -> axis that tensor parallelism splits, counted from the end if it is negative; by default, or
        with the book `MEGATRON`, the graph says it, whatever the names.
    experts: name patterns -> axis of the experts, which the ranks that share the batch divide among them.
    hosts: the ranks of each host, for all-to-alls that go within hosts first.
    accumulate: micro-batches in which each batch that updates is fed, one after the other; their gradients add up.
    statistics: with `accumulate`, of the whole "batch", so that what looks at several samples at once (batch norm, the
    capacity of experts, penalties of gradients) is a GraphError; or of each "microbatch": it is then a batch of its
    own, whose gradients, fetched scalars and statistics kept for evaluation are averaged, once a step.
    local_feeds: each rank along the data axis feeds its own part of a batch, all of one size, as
        `DataLoader(shard=True)` hands them out; the batch is the parts in the order of the ranks. Else all feed all.
        A micro-batch has an equal slice of each part, and the samples of a batch that updates follow in this order.

    Each pattern must fit a trained variable that has its axis; of those of a `RuleBook` one must, if ranks divide them.
    `build` raises UnknownNameError or AxisError.

    >>> Parallel(tensor=2, split={"w": 1})
    Parallel(tensor=2, split={'w': 1})
    """

    def __init__(
        self,
        *,
        data: AtLeast1 | None = None,
        tensor: AtLeast1 = 1,
        zero: Stage = 0,
        split: Mapping[str, int] | None = None,
        experts: Mapping[str, int] | None = None,
        hosts: Sequence[Sequence[int]] = (),
        accumulate: AtLeast1 = 1,
        statistics: str = "batch",
        local_feeds: bool = False,
    ) -> None:
        if zero not in (0, 1, 2, 3):
            raise ArgumentError(f"zero={zero!r}", fix="use 0, 1, 2 or 3")
        if type(accumulate) is not int or accumulate < 1:
            raise ArgumentError(f"accumulate={accumulate!r}", fix="use a whole number from 1 up")
        check_statistics(statistics)
        self.data, self.tensor, self.zero = data, tensor, zero
        self.accumulate, self.statistics = accumulate, statistics
        self.split, self.experts = RuleBook.of(MEGATRON if split is None else split), RuleBook.of(experts or {})
        self.hosts = tuple(map(tuple, hosts))
        self.local_feeds = local_feeds

    def build(self, outputs: Sequence[Node], world_size: int) -> Strategy:
        mesh = self.mesh(range(world_size))
        places = {ranks: self.mesh(ranks) for ranks in marked_places(outputs)}
        nodes, owners, axes = topological(outputs), owners_of(outputs), self._axes(outputs, mesh)
        strategy = Strategy(
            mesh.layout(data=0), places=tuple(here.layout() for here in places.values()), hosts=self.hosts
        )
        for node in nodes:
            if node.role is Role.PLACEHOLDER and _is_batch(node, nodes):
                strategy.feeds[node.name] = mesh.layout(data=0)
                if self.local_feeds:
                    strategy.local += (_fed_in_parts(node),)
            elif node.role is Role.VARIABLE:
                owner = owners.get(node, node)
                here = places.get(owner.tags.get("place", ()), mesh)
                if (kept := self._kept(node, owner, here, axes)) is not None:
                    strategy.variables[node.name] = kept
                elif here is not mesh:
                    strategy.variables[node.name] = Kept(here.layout(), here.layout())
        if self.accumulate == 1:
            return strategy
        refuse_places(outputs, "who accumulates places")
        return in_one_stage(strategy, self.accumulate, self.statistics)

    def mesh(self, ranks: Sequence[int]) -> RankRows:
        """These ranks in a grid with the axes `data` and `tensor`."""
        data = len(ranks) // self.tensor if self.data is None else self.data
        if data * self.tensor != len(ranks):
            raise ArgumentError(
                f"{data} x {self.tensor} (data x tensor) ranks, there are {len(ranks)}",
                fix="the product must be the number of ranks",
            )
        return Mesh((data, self.tensor), ("data", "tensor"), ranks)

    def _axes(self, outputs: Sequence[Node], mesh: RankRows) -> Axes:
        """Which axes of trained variables are split along `tensor` and along `data`."""
        trained = [n for n in topological(outputs) if n.role is Role.VARIABLE and n.attrs["trainable"]]
        data, tensor = mesh.sizes[-2:]
        named = {"tensor": self.split.axes(trained), "data": self.experts.axes(trained)}
        if tensor > 1 and self.split.by_graph:
            named["tensor"] |= tensor_axes(outputs, tensor, named["tensor"])
        if trained:
            _check_patterns("split", self.split, trained, tensor, named["tensor"])
            _check_patterns("experts", self.experts, trained, data, named["data"])
        return named

    def _kept(self, node: Node, owner: Node, mesh: RankRows, axes: Axes) -> Kept | None:
        """How a trainable variable or its optimizer state is kept; None for variables that are everywhere."""
        if not owner.attrs["trainable"] or node.shape != owner.shape:
            return None
        state = owner is not node
        data, tensor = mesh.sizes[-2:]
        degrees = {"tensor": tensor, "data": data}
        roles = {name: of[owner.name] for name, of in axes.items() if owner.name in of and degrees[name] > 1}
        compute = mesh.layout(**roles)
        sharded = data > 1 and "data" not in roles and (self.zero == 3 or (self.zero > 0 and state))
        free = _divisible(node.shape, data, roles.get("tensor")) if sharded else None
        store = compute if free is None else mesh.layout(**roles, data=free)
        return Kept(store if state else compute, store) if roles or free is not None else None


def _check_patterns(
    what: str, patterns: RuleBook, trained: Sequence[Node], degree: int, axes: Mapping[str, int]
) -> None:
    """UnknownNameError or AxisError for a pattern by which nothing would be split `degree` ways; `axes` are split."""
    names = [n.name for n in trained]
    for pattern, axis in patterns.items():
        found = [n for n in trained if fnmatch.fnmatch(n.name, pattern)]
        given, must_fit = f"{what}={{{pattern!r}: {axis}}}", pattern in patterns.must_fit
        if not found and must_fit:
            fix = f"{did_you_mean(pattern, names)} (in a RuleBook, a pattern may fit none)"
            raise UnknownNameError(f"{given} fits no trained variable", fix=fix)
        if found and (must_fit or degree > 1) and not any(-n.ndim <= axis < n.ndim for n in found):
            largest = max(found, key=lambda n: n.ndim)
            fix = f"it has the axes 0 to {largest.ndim - 1}"
            raise AxisError(f"{given} splits axis {axis} of {largest!r}", fix=fix)
    if degree > 1 and patterns and not axes:
        said = [f"the graph has no weights that {degree} ranks can divide"] * patterns.by_graph
        said += [f"no trained variable has a name that a pattern of {what}= fits"] * (len(patterns) > 0)
        raise UnknownNameError(
            f"{', and '.join(said)}; its variables: {', '.join(names[:5])}, ...",
            fix=f'say what to split: {what}={{"*up/weight": 1, "*down/weight": 0}}',
        )


def _divisible(shape: Shape, parts: int, taken: int | None) -> int | None:
    """The axis to split: the first that divides evenly, else the first that is long enough; never `taken`."""
    axes = [d for d, size in enumerate(shape) if d != taken and int(size) >= parts]
    return next((d for d in axes if int(shape[d]) % parts == 0), next(iter(axes), None))


def _is_batch(node: Node, nodes: Sequence[Node]) -> bool:
    """Whether a feed is a batch: its first axis has an unknown size, or that of no feed has."""
    unknown = any(n.role is Role.PLACEHOLDER and n.ndim and isinstance(n.shape[0], Dim) for n in nodes)
    return bool(node.ndim) and (isinstance(node.shape[0], Dim) or not unknown)


def _fed_in_parts(node: Node) -> str:
    """The name of a feed; ArgumentError unless it can be fed a part, which is shorter than what the model was told."""
    if not isinstance(node.shape[0], Dim):
        raise ArgumentError(
            f"{node!r} has {node.shape[0]} rows, and local_feeds=True feeds each rank a part of them",
            fix=f"leave the size of the batch open: placeholder({node.name!r}, (None, ...))",
            site=node.site,
        )
    return node.name


class DataParallel(Parallel):
    """Every rank has the whole model and a part of each batch; gradients are summed (all-reduce).

    Of a table that is only looked up, ranks gather the gradients of the rows, or sum those of the table with a count of
    the lookups of each row, whichever is fewer bytes at the size of the batch. Either way only rows looked up change.
    All ranks feed the whole batch, or, with `local_feeds`, each its own part.

    >>> DataParallel()
    DataParallel()
    """

    def __init__(self, *, accumulate: AtLeast1 = 1, statistics: str = "batch", local_feeds: bool = False) -> None:
        super().__init__(accumulate=accumulate, statistics=statistics, local_feeds=local_feeds)


class ZeRO(Parallel):
    """Data parallelism that shards optimizer state (stage 1, 2) and variables (3) over the ranks.

    S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.

    >>> ZeRO(3)
    ZeRO(stage=3)
    """

    def __init__(
        self, stage: Stage = 1, *, accumulate: AtLeast1 = 1, statistics: str = "batch", local_feeds: bool = False
    ) -> None:
        super().__init__(zero=stage, accumulate=accumulate, statistics=statistics, local_feeds=local_feeds)


class TensorParallel(Parallel):
    """Weights are split over all ranks: by default as the graph says, which is attention and feed-forward blocks as in
    Megatron, and what else follows this pattern.

    >>> TensorParallel({"linear/weight": 1}).split
    {'linear/weight': 1}
    """

    def __init__(
        self, split: Mapping[str, int] | None = None, *, accumulate: AtLeast1 = 1, statistics: str = "batch"
    ) -> None:
        super().__init__(data=1, split=split, accumulate=accumulate, statistics=statistics)

    def mesh(self, ranks: Sequence[int]) -> Mesh:
        """These ranks in one row."""
        return Mesh((1, len(ranks)), ("data", "tensor"), ranks)


class ExpertParallel(Parallel):
    """Data parallelism in which each rank keeps some of the experts; tokens travel to them and back (all-to-all).

    `experts` names their variables and the axis that counts them, by default those of `nn.MixtureOfExperts`. With
    `hosts`, the ranks of each host, tokens for other hosts are joined first (`comm/hierarchical.py`). D. Lepikhin et
    al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", 2020.

    >>> ExpertParallel({"*/experts/*": 0}, hosts=[(0, 1), (2, 3)]).hosts
    ((0, 1), (2, 3))
    """

    def __init__(
        self,
        experts: Mapping[str, int] | None = None,
        *,
        hosts: Sequence[Sequence[int]] = (),
        accumulate: AtLeast1 = 1,
        statistics: str = "batch",
    ) -> None:
        experts = {"*experts/*": 0} if experts is None else experts
        super().__init__(experts=experts, hosts=hosts, accumulate=accumulate, statistics=statistics)

"""Strategies: plain data that says how a model is spread over ranks, and the builders that write it.

A `Strategy` is a device grid, a layout for each feed, and for each variable two layouts: `compute`, in which the model
reads it, and `store`, in which it is kept and updated. Everything else is deduced. Data parallelism, ZeRO
(S. Rajbhandari et al., 2020), Megatron's tensor parallelism (M. Shoeybi et al., 2019) and products are values of it.
Ignored on purpose: which strategy is best.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ArgumentError, AxisError, UnknownNameError, did_you_mean
from ..graph import OPS, Node, origin_of, topological
from ..types import Atom, Dim
from .deduce import Grid
from .initial import LocalInitializer
from .layout import Layout, Mesh
from .table import table


@dataclass(frozen=True)
class Kept:
    """How one variable is kept: `compute` is what the model reads, `store` what is kept and updated."""

    compute: Layout
    store: Layout


@dataclass
class Strategy:
    """Layouts of variables and feeds by name on the grid of `base`; what is not named is duplicated.

    Reductions of gradients are joined and overlapped in buckets of at most `bucket_bytes`; 0 keeps them apart.

    >>> mesh = Mesh((2,), ("data",))
    >>> strategy = Strategy(mesh.layout(), {}, {"x": mesh.layout(data=0)})
    >>> Strategy.from_json(strategy.to_json()) == strategy
    True
    """

    base: Layout
    variables: dict[str, Kept] = field(default_factory=dict)
    feeds: dict[str, Layout] = field(default_factory=dict)
    bucket_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        self.grid = Grid.of(self.base)
        self.whole = self.grid.layout({})
        self._local: dict[tuple[Node, int], Node] = {}

    # -- what the passes ask -------------------------------------------------------------------------------------

    def grid_of(self, node: Node) -> Grid:
        """Where a node is computed."""
        return self.grid

    def leaf(self, node: Node, updating: bool) -> Layout | None:
        """The layout of a leaf for its readers; None for constants, which can be had in any."""
        if node.op.name == "variable":
            kept = self.variables.get(node.name)
            return self.whole if kept is None else kept.store if updating else kept.compute
        return self.feeds.get(node.name, self.whole) if node.op.name == "placeholder" else None

    def sizes(self, sizes: Mapping[Atom, int], training: bool) -> Mapping[Atom, int]:
        """The sizes that a graph is made for, from those that are fed."""
        return sizes

    def store(self, node: Node) -> Layout:
        """The layout in which a variable is kept."""
        kept = self.variables.get(node.name)
        return self.whole if kept is None else kept.store

    def local_variable(self, node: Node, rank: int) -> Node | None:
        """The variable that holds this rank's part, the same node at every call; None if it has no part."""
        piece = self.store(node).pieces(node.shape).get(rank)
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

    def attach(self, outputs: Sequence[Node], comm: Any = None) -> Any:
        """What an executor works with: a strategy is used as it is, its builders write one first."""
        from .placement import attach

        return attach(self, outputs, comm)

    def build(self, outputs: Sequence[Node], world_size: int) -> Strategy:
        """Itself, whatever the graph."""
        return self

    def check(self, outputs: Iterable[Node], world_size: int) -> None:
        """UnknownNameError for variables or feeds that the graph lacks; ArgumentError or AxisError for layouts that do
        not fit them or name ranks that do not exist."""
        nodes = topological(outputs)
        layouts: list[tuple[str, Layout]] = [("the strategy", self.base)]
        for kind, given in (("variable", self.variables), ("placeholder", self.feeds)):
            known = {n.name: n for n in nodes if n.op.name == kind}
            for name, kept in given.items():
                if name not in known:
                    fix = did_you_mean(name, known)
                    raise UnknownNameError(f"the strategy names the {kind} {name!r}, which the graph lacks", fix=fix)
                here = [kept.compute, kept.store] if isinstance(kept, Kept) else [kept]
                for layout in here:
                    _check_fits(known[name], layout)
                    layouts.append((f"the layout of {name!r}", layout))
        layouts += [(f"the hint at {n.site}", n.attrs["layout"]) for n in nodes if n.op.name == "shard"]
        for what, layout in layouts:
            if (most := max(layout.ranks)) >= world_size:
                raise ArgumentError(
                    f"{what} uses rank {most}, the job has {world_size} ranks: {layout}",
                    fix=f"start more: heturun -w {most + 1} ...",
                )

    # -- plain data ----------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        data = {
            "base": self.base.to_json(),
            "variables": {
                n: {"compute": k.compute.to_json(), "store": k.store.to_json()} for n, k in self.variables.items()
            },
            "feeds": {name: layout.to_json() for name, layout in self.feeds.items()},
            "bucket_bytes": self.bucket_bytes,
        }
        return json.dumps(data, indent=1)

    @staticmethod
    def from_json(text: str) -> Strategy:
        """What `to_json` wrote."""
        read = Layout.from_json
        try:
            data = json.loads(text)
            variables = {n: Kept(read(k["compute"]), read(k["store"])) for n, k in data["variables"].items()}
            feeds = {n: read(v) for n, v in data["feeds"].items()}
            plain = Strategy(read(data["base"]), variables, feeds, int(data["bucket_bytes"]))
            if "stages" not in data:
                return plain
            from .pipeline import Staged

            return Staged.read(plain, data)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ArgumentError(f"not a strategy: {error!r}", fix="pass what Strategy.to_json wrote") from None

    def table(self, outputs: Iterable[Node]) -> str:
        """One row per variable: its shape, layouts, bytes on a rank, and the collectives that a step needs for it."""
        return table(self, outputs)

    def __str__(self) -> str:
        rows = [f"{name}: {k.compute}, kept as {k.store}" for name, k in self.variables.items()]
        rows += [f"{name} (fed): {layout}" for name, layout in self.feeds.items()]
        return "\n".join([f"all else: {self.grid.layout({})}", *rows])


def _check_fits(node: Node, layout: Layout) -> None:
    most = max(role for role, _ in layout.axes().values())
    if most >= node.ndim:
        raise AxisError(f"{layout} splits axis {most} of {node!r}", fix=f"it has the axes 0 to {node.ndim - 1}")
    if layout.pending is not None:
        raise ArgumentError(f"{layout} keeps {node!r} as a pending result", fix="split or duplicate it")


# -- builders ------------------------------------------------------------------------------------------------

MEGATRON = {  # column-parallel layers split their outputs (axis 1, and the bias), row-parallel ones their inputs;
    # the table of tokens and the last layer split the vocabulary
    "*query/weight": 1, "*key/weight": 1, "*value/weight": 1, "*query/bias": 0, "*key/bias": 0, "*value/bias": 0,
    "*attention/output/weight": 0, "*up/weight": 1, "*up/bias": 0, "*down/weight": 0,
    "*embedding*/weight": 0, "*head/weight": 1, "*head/bias": 0,
}  # fmt: skip


class Parallel:
    """Data x tensor parallelism on a mesh, with the variables' storage sharded over the data axis if `zero` says so.

    data, tensor: how many ways each; `data=None` takes the ranks that are left.
    zero: 0 keeps everything everywhere, 1 (and 2) shards optimizer state, 3 shards the variables too.
    split: name patterns -> axis that tensor parallelism splits.

    >>> Parallel(tensor=2, split={"w": 1})
    Parallel(data=None, tensor=2, zero=0)
    """

    def __init__(
        self, *, data: int | None = None, tensor: int = 1, zero: int = 0, split: Mapping[str, int] | None = None
    ) -> None:
        if zero not in (0, 1, 2, 3):
            raise ArgumentError(f"zero={zero!r}", fix="use 0, 1, 2 or 3")
        self.data, self.tensor, self.zero = data, tensor, zero
        self.split = dict(MEGATRON if split is None else split)

    def build(self, outputs: Sequence[Node], world_size: int) -> Strategy:
        """The strategy for a graph on `world_size` ranks."""
        mesh = self.mesh(world_size)
        nodes = topological(outputs)
        owners = {n.name: n for n in nodes if n.op.name == "variable" and n.attrs["trainable"]}
        strategy = Strategy(mesh.layout(data=0))
        for node in nodes:
            if node.op.name == "placeholder" and _is_batch(node, nodes):
                strategy.feeds[node.name] = mesh.layout(data=0)
            elif node.op.name == "variable" and (kept := self._kept(node, mesh, owners)) is not None:
                strategy.variables[node.name] = kept
        return strategy

    def mesh(self, world_size: int) -> Mesh:
        """The ranks in a grid with the axes `data` and `tensor`."""
        data = world_size // self.tensor if self.data is None else self.data
        if data * self.tensor != world_size:
            raise ArgumentError(
                f"{data} x {self.tensor} (data x tensor) ranks, the job has {world_size}",
                fix="the product must be the number of ranks",
            )
        return Mesh((data, self.tensor), ("data", "tensor"))

    def _kept(self, node: Node, mesh: Mesh, owners: Mapping[str, Node]) -> Kept | None:
        """How a trainable variable or its optimizer state is kept; None for what is everywhere, as statistics are."""
        owner = node.name if node.name in owners else node.name.rpartition("/")[0]
        if owner not in owners or node.shape != owners[owner].shape:
            return None
        state = owner != node.name
        axis = next((a for pattern, a in self.split.items() if fnmatch.fnmatch(owner, pattern)), None)
        data, tensor = mesh.sizes
        roles = {"tensor": axis} if axis is not None and tensor > 1 and axis < node.ndim else {}
        compute = mesh.layout(**roles)
        sharded = data > 1 and (self.zero == 3 or (self.zero > 0 and state))
        free = _divisible(node.shape, data, roles.get("tensor")) if sharded else None
        store = compute if free is None else mesh.layout(**roles, data=free)
        return Kept(store if state else compute, store) if roles or free is not None else None

    def attach(self, outputs: Sequence[Node], comm: Any = None) -> Any:
        """What an executor works with: the strategy for this graph, on these ranks."""
        from .placement import attach

        return attach(self, outputs, comm)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(data={self.data}, tensor={self.tensor}, zero={self.zero})"


def _divisible(shape: Sequence[int], parts: int, taken: int | None) -> int | None:
    """The axis to split: the first that divides evenly, else the first that is long enough; never `taken`."""
    axes = [d for d, size in enumerate(shape) if d != taken and size >= parts]
    return next((d for d in axes if shape[d] % parts == 0), next(iter(axes), None))


def _is_batch(node: Node, nodes: Sequence[Node]) -> bool:
    """A feed is split along its first axis if that is of unknown size, or if no feed has such an axis."""
    unknown = any(n.op.name == "placeholder" and n.ndim and isinstance(n.shape[0], Dim) for n in nodes)
    return bool(node.ndim) and (isinstance(node.shape[0], Dim) or not unknown)


class DataParallel(Parallel):
    """Every rank has the whole model and a part of each batch; gradients are summed (all-reduce).

    >>> DataParallel()
    DataParallel(data=None, tensor=1, zero=0)
    """

    def __init__(self) -> None:
        super().__init__()


class ZeRO(Parallel):
    """Data parallelism that shards optimizer state (stage 1, 2) and variables (3) over the ranks.

    S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.

    >>> ZeRO(3)
    ZeRO(data=None, tensor=1, zero=3)
    """

    def __init__(self, stage: int = 1) -> None:
        super().__init__(zero=stage)


class TensorParallel(Parallel):
    """Weights are split over all ranks: by default attention and feed-forward blocks as Megatron does.

    >>> TensorParallel({"linear/weight": 1}).split
    {'linear/weight': 1}
    """

    def __init__(self, split: Mapping[str, int] | None = None) -> None:
        super().__init__(data=1, split=split)

    def build(self, outputs: Sequence[Node], world_size: int) -> Strategy:
        self.tensor = world_size
        return super().build(outputs, world_size)

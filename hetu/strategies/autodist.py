"""AutoDist's builders: where each variable has its home, and how its gradient gets there.

After H. Zhang et al., "AutoSync: Learning to Synchronize for Data-Parallel Distributed Deep Learning", NeurIPS 2020,
and the AutoDist system, by whose names they go. All are data parallel. A *home* is one rank, or a few that each keep
some rows: it gets the summed gradient, updates, and hands the new value to all, as a parameter server does. Without a
home of its own a variable is all-reduced, or *partitioned*: reduced to a part on every rank, updated there and
gathered, which are the two halves of an all-reduce. `Parallax` alone needs servers. What each writes is plain data
(`Strategy.to_json`), and each sends as many bytes as its row of `tests/strategies/test_autodist.py` counts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence

from ..core.graph import Node
from ..dist.comm.hierarchical import within_hosts
from ..dist.cut.builders import DataParallel, RankRows
from ..dist.cut.kept import Kept, check_wire, owners_of
from ..dist.cut.strategy import Strategy
from ..dist.layout.layout import DUP, SUM, Layout, Mesh, Shard
from ..ranges import AtLeast1, Seed
from .hybrid import Hybrid
from .servable import Servable


class _Homes(DataParallel):
    """Data parallelism in which `homes` says where each trained variable, with its optimizer state, is kept."""

    def build(self, outputs: Sequence[Node], world_size: int) -> Strategy:
        strategy = super().build(outputs, world_size)
        owners = owners_of(outputs)
        trained = {n.name: n for n in owners.values()}
        homes = self.homes(trained, world_size) if world_size > 1 else {}
        for node, owner in owners.items():
            if (home := homes.get(owner.name)) is not None:
                strategy.variables[node.name] = Kept(strategy.whole if node is owner else home, home)
        grids = {h.ranks: _grid(h.ranks, DUP) for h in homes.values()}
        strategy.places = tuple(grid for ranks, grid in grids.items() if len(ranks) < world_size)
        return strategy

    def homes(self, trained: Mapping[str, Node], world_size: int) -> dict[str, Layout]:
        """The layout in which each variable is kept; those without one are everywhere."""
        raise NotImplementedError


def _grid(ranks: Sequence[int], role: int) -> Layout:
    """The ranks in one row, along which an array has one role."""
    return Layout((Shard(tuple(ranks), ((role, len(ranks)),)),))


class PS(_Homes):
    """All variables are at home on rank 0, which sends and receives as much as all others together.

    >>> PS()
    PS()
    """

    def homes(self, trained: Mapping[str, Node], world_size: int) -> dict[str, Layout]:
        return {name: _grid((0,), DUP) for name in trained}


class PartitionedPS(_Homes):
    """Each variable is cut into the least number of equal parts of rows, which live on the least loaded ranks."""

    def parts(self, rows: int, most: int) -> int:
        """How many parts, of 2 to `most`, a variable of `rows` rows is cut into; 1 if none suits."""
        return next((k for k in range(2, most + 1) if rows % k == 0), 1)

    def homes(self, trained: Mapping[str, Node], world_size: int) -> dict[str, Layout]:
        load, found = [0] * world_size, dict[str, Layout]()
        # The largest first: the least loaded home then stays within 4/3 of the best balance (R. Graham, "Bounds on
        # Multiprocessing Timing Anomalies", 1969). AutoDist itself does not sort.
        for node in sorted(trained.values(), key=lambda node: -int(node.tensor.nbytes)):
            rows = int(node.shape[0]) if node.ndim else 1
            parts = self.parts(rows, min(world_size, rows))
            ranks = sorted(sorted(range(world_size), key=lambda rank: load[rank])[:parts])
            for rank in ranks:
                load[rank] += int(node.tensor.nbytes) // parts
            found[node.name] = _grid(ranks, 0 if parts > 1 else DUP)
        return found


class PSLoadBalancing(PartitionedPS):
    """Each variable is at home on one rank, the largest first on the rank that has the fewest bytes so far."""

    def parts(self, rows: int, most: int) -> int:
        return 1


class UnevenPartitionedPS(PartitionedPS):
    """As `PartitionedPS`, with the least number of parts that does not divide the rows: some have a row more."""

    def parts(self, rows: int, most: int) -> int:
        return next((k for k in range(2, most + 1) if rows % k), 1)


class AllReduce(DataParallel):
    """Gradients are summed in messages of `chunk_size` variables each, and every rank updates everything.

    With `hosts`, the ranks of each, the sum is hierarchical: a reduce-scatter within hosts, an all-reduce between the
    ranks of one place on each host, and an all-gather within hosts. With G ranks a host, each sends 1 / G of the
    gradients to other hosts. Those that have no axis that divides by G are summed at once, as are all where
    hosts have unequal numbers of ranks. `wire` is how gradients travel, with `hosts` between these; see
    `hetu.dist.cut.kept.Kept`.

    >>> AllReduce(64)
    AllReduce(chunk_size=64)
    """

    def __init__(self, chunk_size: AtLeast1 = 128, *, hosts: Sequence[Sequence[int]] = (), wire: str = "") -> None:
        super().__init__()
        self.chunk_size, self.hosts, self.wire = chunk_size, tuple(map(tuple, hosts)), check_wire(wire)

    def mesh(self, ranks: Sequence[int]) -> RankRows:
        """These ranks in a row, or in one for each host."""
        rows = within_hosts(ranks, self.hosts)
        return _Hosts([[ranks[place] for place in row] for row in rows]) if rows else super().mesh(ranks)

    def build(self, outputs: Sequence[Node], world_size: int) -> Strategy:
        strategy, mesh = super().build(outputs, world_size), self.mesh(range(world_size))
        for index, variable in enumerate(dict.fromkeys(owners_of(outputs).values())):
            placed = variable.name in strategy.variables  # on ranks of its own
            through = mesh.through(variable) if isinstance(mesh, _Hosts) and not placed else ()
            layouts = strategy.compute(variable), strategy.store(variable)
            strategy.variables[variable.name] = Kept(*layouts, index // self.chunk_size, through, self.wire)
        return strategy


class _Hosts:
    """A row of ranks for each host, over all of which the batch is split."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.mesh = Mesh((len(rows), len(rows[0])), ("hosts", "places"), [rank for row in rows for rank in row])
        self.sizes = math.prod(self.mesh.sizes), 1

    def layout(self, *, data: int = DUP, tensor: int = DUP) -> Layout:
        return self.mesh.layout(hosts=data, places=data)

    def through(self, variable: Node) -> tuple[Layout, ...]:
        """The layouts of a sum within hosts, and then between them."""
        axis = next((d for d, size in enumerate(variable.shape) if int(size) % self.mesh.sizes[1] == 0), None)
        return () if axis is None else tuple(self.mesh.layout(hosts=role, places=axis) for role in (SUM, DUP))


class PartitionedAR(_Homes):
    """Each rank updates its part, along the first axis, of every variable that is long enough."""

    def axis(self, node: Node, world_size: int) -> int | None:
        """The axis that is cut; None to all-reduce the whole."""
        return next((d for d, size in enumerate(node.shape) if size >= world_size), None)

    def homes(self, trained: Mapping[str, Node], world_size: int) -> dict[str, Layout]:
        axes = {node.name: self.axis(node, world_size) for node in trained.values()}
        ranks = tuple(range(world_size))  # on the mesh of data parallelism, whose second axis is empty
        return {n: Layout((Shard(ranks, ((d, world_size), (DUP, 1))),)) for n, d in axes.items() if d is not None}


class RandomAxisPartitionAR(PartitionedAR):
    """As `PartitionedAR`, along an axis that is drawn for each variable; equal seeds draw alike.

    >>> RandomAxisPartitionAR(seed=3)
    RandomAxisPartitionAR(seed=3)
    """

    def __init__(self, seed: Seed = 0) -> None:
        super().__init__()
        self.seed = seed

    def axis(self, node: Node, world_size: int) -> int | None:
        axes = [d for d, size in enumerate(node.shape) if size >= world_size]
        return random.Random(f"{self.seed} {node.name}").choice(axes) if axes else None


class Parallax(Hybrid):
    """Tables that are only looked up live on the servers, balanced by bytes; dense gradients are all-reduced.

    S. Kim et al., "Parallax: Sparsity-aware Data Parallel Training of Deep Neural Networks", EuroSys 2019. `Hybrid`
    leaves those tables to the ranks that so move fewer bytes.

    >>> Parallax()
    Parallax()
    """

    def __init__(self) -> None:
        super().__init__(AllReduce())

    def named(self, servable: Servable) -> Collection[Node]:
        """All tables."""
        return servable.tables

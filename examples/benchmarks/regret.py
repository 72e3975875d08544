"""What the planner leaves on the table: drawn models, 2 to 8 ranks, three networks, against an independent search.

    python examples/benchmarks/regret.py --seeds 0 1 2 --proposals 200 --json result.json

The regret of a plan is its seconds over the least that anybody found. Nobody can try all strategies of even a small
model: each variable and feed has a role on each axis of each mesh, and there are pipelines besides. So strategies are
drawn at random as plain data, without asking the planner what it would propose, and the best of them, with the
planner's choice among them, are changed at random for as long as changes are cheaper now and then: a long local search.
Both sides cost plans by `hetu.plan.simulate`, so the regret is that of the search, not of the simulator.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from report import print_table
from tqdm import tqdm

import hetu as ht
from hetu import dist, nn
from hetu.core.errors import HetuError
from hetu.core.subgraph import SubGraph
from hetu.dist.cut.kept import Kept, owners_of
from hetu.dist.cut.pipeline_stages import EVERYWHERE, label_by, layers_of, phases, stages_of
from hetu.dist.layout.layout import DUP, Layout, Shard
from hetu.plan import Cluster, MachineProfile, auto, simulate

NETWORKS = {
    "fast": dist.Link(2e-6, 1e10),
    "1 GB/s": dist.Link(50e-6, 1e9),
    "100 MB/s": dist.Link(50e-6, 1e8),
}
MICRO = (1, 2, 4, 8, 16)
MOST = 1.05  # a larger regret counts as a plan that the planner lacks
BUCKETS = (0, 1 << 16, 1 << 18, 1 << 20, 4 << 20, 64 << 20)
Row = dict[str, Any]

# -- models that are drawn -------------------------------------------------------------------------------------------


@dataclass
class Model:
    """What an executor is given, the size of a batch, and ranks to spread it over."""

    family: str
    entries: list[Any]
    batch: int
    world: int
    speeds: dict[int, float]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        fed = SubGraph("plan", self.entries).placeholders
        return {n: tuple(s if isinstance(s, int) else self.batch for s in p.shape) for n, p in fed.items()}

    @cached_property
    def outputs(self) -> list[ht.Node]:
        loss, updates = self.entries
        return [loss, *updates.values()]

    def profile(self, network: str) -> MachineProfile:
        link = NETWORKS[network]
        return MachineProfile(cluster=Cluster(inner=link, outer=link), speeds=self.speeds)


def deep(draw: random.Random) -> ht.Node:
    """Many narrow layers."""
    width = draw.choice((8, 16, 32, 48))
    h = ht.placeholder("x", (None, width))
    for _ in range(draw.randint(3, 5)):
        h = nn.Linear(width, width, activation=draw.choice((ht.relu, ht.tanh)))(h)
    return h


def wide(draw: random.Random) -> ht.Node:
    """A few layers whose weights are large."""
    features = draw.choice((64, 256, 784))
    h = ht.placeholder("x", (None, features))
    for width in draw.choices((32, 256, 512, 1024, 2048), k=draw.randint(1, 3)):
        h, features = nn.Linear(features, width, activation=ht.relu)(h), width
    return h


def embeddings(draw: random.Random) -> ht.Node:
    """Tables of which a step touches little, and layers over what is looked up."""
    width, fields = draw.choice((8, 16, 64)), draw.choice((2, 8, 26))
    ids = ht.placeholder("ids", (None, fields), "int64")
    h = ht.flatten(nn.Embedding(draw.choice((500, 5_000, 50_000)), width)(ids), 1)
    if draw.random() < 0.5:
        few = ht.placeholder("few", (None, 2), "int64")
        h = ht.concat([h, ht.flatten(nn.Embedding(draw.choice((50, 2_000)), width)(few), 1)], axis=1)
    return nn.Linear(h.shape[1], draw.choice((64, 256)), activation=ht.relu)(h)


def towers(draw: random.Random) -> ht.Node:
    """Two networks that need not be alike, and the products of what they make."""
    made, last = [], draw.choice((16, 64))
    for name in ("left", "right"):
        width, hidden = draw.choice((16, 128, 512)), draw.choice((32, 256, 1024))
        if draw.random() < 0.5:
            h = ht.mean(nn.Linear(width, hidden, activation=ht.tanh)(ht.placeholder(name, (None, 16, width))), axis=1)
        else:
            h = nn.Linear(width, hidden, activation=ht.relu)(ht.placeholder(name, (None, width)))
        made.append(nn.Linear(hidden, last)(h))
    return made[0] * made[1] if draw.random() < 0.5 else ht.concat(made, axis=1)


def convolutions(draw: random.Random) -> ht.Node:
    """Many pixels and small weights, then few and large ones."""
    size, channels = draw.choice((8, 16)), draw.choice((1, 3))
    h = ht.placeholder("x", (None, channels, size, size))
    for k, made in enumerate(draw.choices((4, 16, 32), k=draw.randint(1, 3))):
        h, channels = ht.relu(nn.Conv2d(channels, made, 3, padding=1)(h)), made
        h = ht.max_pool2d(h, 2) if k == 0 else h
    h = ht.flatten(h, 1)
    return nn.Linear(h.shape[1], draw.choice((32, 256)), activation=ht.relu)(h)


def attention(draw: random.Random) -> ht.Node:
    """A block of attention over a sequence."""
    length, width = draw.choice((8, 32)), draw.choice((16, 64, 128))
    h = nn.Embedding(draw.choice((100, 2_000)), width)(ht.placeholder("ids", (None, length), "int64"))
    h = nn.TransformerBlock(width, 4, causal=True, name="block")(h)
    return ht.mean(h, axis=1)


def experts(draw: random.Random) -> ht.Node:
    """A layer of experts between two others."""
    width, count = draw.choice((16, 64)), draw.choice((4, 8))
    h = nn.Linear(32, width, activation=ht.relu)(ht.placeholder("x", (None, 32)))
    gate = nn.TopKGate(width, count, k=draw.choice((1, 2)))
    y, _ = nn.MixtureOfExperts(width, draw.choice((32, 256)), count, gate, capacity=draw.choice((None, 1.25)))(h)
    return h + y


def mixed(draw: random.Random) -> ht.Node:
    """A wide linear part beside a network on a sequence."""
    x, width = ht.placeholder("x", (None, draw.choice((256, 2048)))), draw.choice((16, 32))
    h = nn.Linear(16, 64, activation=ht.tanh)(ht.placeholder("z", (None, draw.choice((8, 64)), 16)))
    h = nn.Linear(64, width)(ht.mean(h, axis=1))
    return nn.Linear(x.shape[1], width)(x) + h


FAMILIES: dict[str, Callable[[random.Random], ht.Node]] = {
    make.__name__: make for make in (deep, wide, embeddings, towers, convolutions, attention, experts, mixed)
}


def drawn(seed: int) -> Model:
    """The model, the world and the stragglers of a seed; the families take turns."""
    draw = random.Random(seed)
    family = [*FAMILIES][seed % len(FAMILIES)]
    with ht.scope("model"):
        h = FAMILIES[family](draw)
        classes = draw.choice((2, 10, 100))
        y, t = nn.Linear(h.shape[1], classes, name="last")(h), ht.placeholder("t", (None,), "int64")
        loss = ht.mean(ht.softmax_cross_entropy(y, t))
        optimizer = draw.choice((ht.optim.SGD(0.1), ht.optim.Momentum(0.1), ht.optim.Adam(1e-3)))
        entries = [loss, optimizer.minimize(loss)]
    world = draw.choice((2, 3, 4, 4, 5, 6, 8, 8))
    speeds = {draw.randrange(world): draw.choice((1.5, 3.0))} if draw.random() < 0.15 else {}
    return Model(family, entries, draw.choice((16, 48, 64, 256, 1024)), world, speeds)


# -- strategies as plain data that is drawn and changed ---------------------------------------------------------------

Roles = tuple[int, ...]  # on each axis of a mesh


@dataclass(frozen=True)
class Spread:
    """A mesh; the roles there of each feed, and those in which each variable is read, kept, and has its state kept."""

    mesh: tuple[int, ...]
    feeds: tuple[tuple[str, Roles], ...]
    variables: tuple[tuple[str, tuple[Roles, Roles, Roles]], ...]
    micro: int = 1
    bucket: int = 4 << 20

    def strategy(self, model: Model) -> dist.Strategy:
        def layout(roles: Roles) -> Layout:
            return Layout((Shard(tuple(range(model.world)), tuple(zip(roles, self.mesh))),))

        whole, owners = layout((DUP,) * len(self.mesh)), owners_of(model.outputs)
        named, kept = dict(self.variables), dict[str, Kept]()
        for node, owner in owners.items():
            if node.shape == owner.shape and owner.name in named:
                read, store, state = named[owner.name]
                kept[node.name] = Kept(layout(read), layout(store)) if node is owner else Kept(*[layout(state)] * 2)
        feeds = {name: layout(roles) for name, roles in self.feeds}
        made = dist.Strategy(whole, kept, feeds, bucket_bytes=self.bucket)
        if self.micro == 1:
            return made
        return dist.Staged(whole, kept, feeds, self.bucket, stages=(whole,), microbatches=self.micro)


@dataclass(frozen=True)
class Line:
    """A pipeline: of each stage how many ranks share the batch and how many the weights, and where it begins."""

    stages: tuple[tuple[int, int], ...]
    starts: tuple[int, ...]
    split: tuple[tuple[str, int], ...]
    micro: int
    schedule: str
    bucket: int = 4 << 20

    def strategy(self, model: Model) -> dist.Strategy:
        outputs, world, feeds = model.outputs, model.world, model.shapes
        layers, _ = layers_of(outputs, feeds, len(self.stages))
        cut = {name: sum(k >= start for start in self.starts) for k, name in enumerate(layers)}
        firsts = [0, *itertools.accumulate(d * t for d, t in self.stages)]

        def layout(stage: int, batch: int = DUP, weight: int = DUP) -> Layout:
            ranks = tuple(range(firsts[stage], firsts[stage + 1]))
            return Layout((Shard(ranks, tuple(zip((batch, weight), self.stages[stage]))),))

        owners, kept, split = owners_of(outputs), dict[str, Kept](), dict(self.split)
        for node, stage in stages_of(outputs, phases(outputs, feeds), label_by(cut)).items():
            if node in owners and stage != EVERYWHERE:
                owner = owners[node]
                axis = split.get(owner.name, DUP) if node.shape == owner.shape else DUP
                kept[node.name] = Kept(*[layout(stage, weight=axis)] * 2)
        base = Layout((Shard(tuple(range(world)), ((DUP, world), (DUP, 1))),))
        return dist.Staged(
            base,
            kept,
            {name: layout(0, batch=0) for name, shape in feeds.items() if shape},
            self.bucket,
            stages=tuple(map(layout, range(len(self.stages)))),
            cut=cut,
            microbatches=self.micro,
            schedule=self.schedule,
        )


@dataclass(frozen=True)
class Uneven:
    """Groups of ranks of any size, side by side, and the rows that each gets, by their shares."""

    groups: tuple[int, ...]
    shares: tuple[int, ...]
    split: tuple[tuple[str, int], ...]

    def strategy(self, model: Model) -> dist.Strategy:
        ends = [0, *itertools.accumulate(self.groups)]
        ranks = [tuple(range(a, b)) for a, b in itertools.pairwise(ends)]
        return dist.Heterogeneous(ranks, self.shares, split=dict(self.split)).build(model.outputs, model.world)


class Oracle:
    """Draws and changes strategies of one model, and remembers what each costs over each network."""

    def __init__(self, model: Model, seed: int, networks: Iterable[str]) -> None:
        self.model, self.draw, self.networks = model, random.Random(seed), [*networks]
        self.trained = [n for n, owner in owners_of(model.outputs).items() if n is owner]
        self.layers = [*dict.fromkeys(n.name.rpartition("/")[0] for n in self.trained)]
        self.known: dict[Any, dict[str, float]] = {}
        try:
            self.order = layers_of(model.outputs, model.shapes)[0]
        except HetuError:
            self.order = []

    def cost(self, plan: Any) -> dict[str, float]:
        """Seconds over each network; infinite for what is no strategy of this model."""
        if plan not in self.known:
            self.known[plan] = seconds_of(self.model, plan, self.networks)
        return self.known[plan]

    # -- drawing -----------------------------------------------------------------------------------------------------

    def any(self) -> Any:
        chance = self.draw.random()
        if chance < 0.1 and self.model.world > 2:
            return self.uneven()
        return self.line() if len(self.order) > 1 and chance < 0.3 else self.spread()

    def uneven(self) -> Uneven:
        draw = self.draw
        cuts = sorted(draw.sample(range(1, self.model.world), draw.randint(1, self.model.world - 1)))
        sizes = tuple(b - a for a, b in itertools.pairwise((0, *cuts, self.model.world)))
        shares = tuple(draw.choice((1, 1, 2, 3)) for _ in sizes) if draw.random() < 0.5 else (1,) * len(sizes)
        return Uneven(sizes, shares, self._any_split() if draw.random() < 0.5 else ())

    def _any_split(self) -> tuple[tuple[str, int], ...]:
        draw = self.draw
        return tuple((n.name, draw.randrange(n.ndim)) for n in self.trained if n.ndim and draw.random() < 0.5)

    def mesh(self) -> tuple[int, ...]:
        found = [m for n in (1, 2, 3) for m in itertools.product(range(1, self.model.world + 1), repeat=n)]
        return self.draw.choice([m for m in found if math.prod(m) == self.model.world and (len(m) == 1 or min(m) > 1)])

    def spread(self) -> Spread:
        """Each axis of a mesh divides the batch, weights, both, or nothing."""
        mesh, draw = self.mesh(), self.draw
        fed = {n: [DUP] * len(mesh) for n, shape in self.model.shapes.items() if shape}
        kept = {n.name: [[DUP] * len(mesh) for _ in range(3)] for n in self.trained}
        for axis in range(len(mesh)):
            match draw.choice(("batch", "batch", "zero", "weights", "weights", "nothing")):
                case "batch":
                    for roles in fed.values():
                        roles[axis] = 0
                case "zero":
                    for roles in fed.values():
                        roles[axis] = 0
                    for n in self.trained:
                        if level := draw.choice((0, 1, 3)):
                            self._keep(n, kept[n.name], axis, level)
                case "weights":
                    for roles in fed.values():
                        roles[axis] = draw.choice((DUP, 0))
                    for n in draw.sample(self.trained, draw.randint(1, len(self.trained))):
                        for roles in kept[n.name]:
                            roles[axis] = draw.randrange(n.ndim) if n.ndim else DUP
        return self._made(mesh, fed, kept)

    def _keep(self, node: ht.Node, roles: list[list[int]], axis: int, level: int) -> None:
        if node.ndim:
            by = self.draw.randrange(node.ndim)
            roles[1][axis], roles[2][axis] = (by if level == 3 else DUP), by
            roles[0][axis] = DUP

    def _made(self, mesh: Any, fed: Any, kept: Any, micro: int = 1, bucket: int = 4 << 20) -> Spread:
        feeds = tuple((n, tuple(roles)) for n, roles in fed.items())
        return Spread(mesh, feeds, tuple((n, tuple(map(tuple, r))) for n, r in kept.items()), micro, bucket)

    def line(self) -> Line:
        draw = self.draw
        count = draw.randint(2, min(len(self.order), self.model.world, 4))
        cuts = sorted(draw.sample(range(1, self.model.world), count - 1))
        sizes = [b - a for a, b in itertools.pairwise((0, *cuts, self.model.world))]
        if self.model.world % count == 0 and draw.random() < 0.5:
            sizes = [self.model.world // count] * count
        stages = tuple((d, n // d) for n in sizes for d in [draw.choice([d for d in range(1, n + 1) if n % d == 0])])
        starts = tuple(sorted(draw.sample(range(1, len(self.order)), count - 1)))
        split = self._any_split() if draw.random() < 0.5 else ()
        return Line(stages, starts, split, draw.choice(MICRO[1:]), draw.choice(("1f1b", "gpipe")))

    # -- changing ----------------------------------------------------------------------------------------------------

    def changed(self, plan: Any) -> Any:
        """The plan with one or a few of its choices made anew."""
        for _ in range(self.draw.choice((1, 1, 2, 3))):
            plan = {Line: self._line, Spread: self._spread, Uneven: self._uneven}[type(plan)](plan)
        return plan

    def _uneven(self, plan: Uneven) -> Uneven:
        other = self.uneven()
        match self.draw.choice(("groups", "shares", "split")):
            case "groups":
                return other
            case "split":
                return replace(plan, split=self._split_otherwise(plan.split))
        return replace(plan, shares=tuple(max(1, n + self.draw.choice((-1, 0, 1))) for n in plan.shares))

    def _line(self, plan: Line) -> Line:
        draw = self.draw
        match draw.choice(("micro", "schedule", "starts", "stages", "bucket", "split", "split")):
            case "bucket":
                return replace(plan, bucket=draw.choice(BUCKETS))
            case "micro":
                return replace(plan, micro=draw.choice(MICRO))
            case "schedule":
                return replace(plan, schedule=draw.choice(("1f1b", "gpipe")))
            case "starts":
                starts = {*draw.sample(range(1, len(self.order)), len(plan.starts))}
                return replace(plan, starts=tuple(sorted(starts)))
            case "stages":
                other = self.line()
                return replace(plan, stages=other.stages, starts=other.starts)
        return replace(plan, split=self._split_otherwise(plan.split))

    def _split_otherwise(self, given: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        split, node = dict(given), self.draw.choice(self.trained)
        split.pop(node.name, None)
        if node.ndim and self.draw.random() < 0.7:
            split[node.name] = self.draw.randrange(node.ndim)
        return tuple(split.items())

    def _spread(self, plan: Spread) -> Spread:
        draw, mesh = self.draw, plan.mesh
        fed, kept = {n: [*r] for n, r in plan.feeds}, {n: [[*r] for r in roles] for n, roles in plan.variables}
        axis = draw.randrange(len(mesh))
        what = draw.choice(("feed", "feeds", "micro", "bucket", "mesh", *("variable", "layer") * 4, "kept", "all"))
        match what:
            case "micro":
                return replace(plan, micro=draw.choice(MICRO))
            case "bucket":
                return replace(plan, bucket=draw.choice(BUCKETS))
            case "mesh":
                other = self.mesh()
                if len(other) != len(mesh):
                    return self.spread()
                return replace(plan, mesh=other)
            case "feed":
                name = draw.choice([*fed])
                fed[name][axis] = draw.choice((DUP, 0, *range(len(self.model.shapes[name]))))
            case "feeds":
                role = draw.choice((DUP, 0))
                for roles in fed.values():
                    roles[axis] = role
            case "variable":
                self._change([draw.choice(self.trained)], kept, axis)
            case "layer":
                layer = draw.choice(self.layers)
                self._change([n for n in self.trained if n.name.rpartition("/")[0] == layer], kept, axis)
            case "all":
                self._change(self.trained, kept, axis)
            case "kept":
                node = draw.choice(self.trained)
                self._keep(node, kept[node.name], axis, draw.choice((1, 3)))
        return self._made(mesh, fed, kept, plan.micro, plan.bucket)

    def _change(self, nodes: Sequence[ht.Node], kept: Any, axis: int) -> None:
        """Of variables together: replicated, split along their first or their last axis, or kept in parts."""
        how = self.draw.choice(("whole", "first", "last", "any", "zero1", "zero3"))
        for node in nodes:
            if how.startswith("zero"):
                self._keep(node, kept[node.name], axis, int(how[-1]))
                continue
            role = {"whole": DUP, "first": 0, "last": node.ndim - 1}.get(how, self.draw.randrange(node.ndim or 1))
            for roles in kept[node.name]:
                roles[axis] = role if node.ndim else DUP

    # -- searching ---------------------------------------------------------------------------------------------------

    def best(self, network: str, proposals: int, drawn: int) -> tuple[float, Any]:
        """The least seconds over a network by `proposals` changes, after so many drawn plans, and the plan."""
        for _ in range(drawn - len(self.known)):
            self.cost(self.any())
        for _ in range(proposals):
            order = sorted(self.known, key=lambda p: self.known[p][network])[:6]
            plan = order[min(int(self.draw.expovariate(0.7)), len(order) - 1)]
            self.cost(self.changed(plan))
        found = min(self.known, key=lambda p: self.known[p][network])
        return self.known[found][network], found


def seconds_of(model: Model, plan: Any, networks: Iterable[str]) -> dict[str, float]:
    found = dict.fromkeys(networks, math.inf)
    with contextlib.suppress(HetuError):
        strategy = plan.strategy(model)
        for network in networks:
            cost = simulate(
                model.entries, strategy, model.profile(network), world_size=model.world, shapes=model.shapes, traced=0
            )
            found[network] = cost.time
    return found


def as_drawn(model: Model, builder: Any) -> Any:
    """What the planner has built in the form in which the oracle changes it; None for what has another form."""
    made = builder.build(model.outputs, model.world)
    if len(made.base.parts) > 1 or any(len(layout.parts) > 1 for layout in made.grids()):
        return None
    if len(made.grids()) > 1:
        return _as_line(model, made)

    def roles(layout: Layout) -> Roles:
        return tuple(role for role, _ in layout.parts[0].axes)

    fed = tuple((n, roles(made.feeds.get(n, made.whole))) for n, shape in model.shapes.items() if shape)
    states: dict[str, Roles] = {}
    owners = owners_of(model.outputs)
    for node, owner in owners.items():
        if node is not owner and node.shape == owner.shape:
            states[owner.name] = roles(made.store(node))
    kept = tuple(
        (n.name, (roles(made.compute(n)), roles(made.store(n)), states.get(n.name, roles(made.store(n)))))
        for n, owner in owners.items()
        if n is owner
    )
    mesh = tuple(n for _, n in made.base.parts[0].axes)
    return Spread(mesh, fed, kept, getattr(made, "microbatches", 1), made.bucket_bytes)


def _as_line(model: Model, made: Any) -> Line:
    order = layers_of(model.outputs, model.shapes, len(made.stages))[0]
    starts = tuple(next(k for k, name in enumerate(order) if made.cut[name] == s) for s in range(1, len(made.stages)))
    split = {
        name: max(role for role, _ in kept.compute.axes().values())
        for name, kept in made.variables.items()
        if max(role for role, _ in kept.compute.axes().values()) >= 0
    }
    trained = {n.name for n, owner in owners_of(model.outputs).items() if n is owner}
    stages = tuple(tuple(n for _, n in layout.parts[0].axes) for layout in made.stages)
    kept_split = tuple((n, a) for n, a in split.items() if n in trained)
    return Line(stages, starts, kept_split, made.microbatches, made.schedule, made.bucket_bytes)


def rows_of(seed: int, networks: Sequence[str], drawn_plans: int, proposals: int) -> list[Row]:
    """The planner's choice and the best that is known, over each network."""
    model = drawn(seed)
    oracle, chosen = Oracle(model, seed, networks), {}
    for network in networks:
        plan = auto(batch_size=model.batch, profile=model.profile(network)).choose(
            model.entries, world_size=model.world
        )
        chosen[network] = plan.why()
        for r in sorted((r for r in plan.why().rated if r.valid), key=lambda r: r.seconds)[:3]:
            if (known := as_drawn(model, r.builder)) is not None:
                oracle.cost(known)
    found = []
    for network in networks:
        why = chosen[network]
        seconds, best = oracle.best(network, proposals, drawn_plans)
        least = min(seconds, why.best.seconds)
        found.append(
            {
                "seed": seed,
                "family": model.family,
                "world": model.world,
                "batch": model.batch,
                "network": network,
                "stragglers": len(model.speeds),
                "chosen": why.best.name,
                "ms": 1e3 * why.best.seconds,
                "best ms": 1e3 * least,
                "regret": why.best.seconds / least,
                "plans": len(why.rated),
                "tried": len(oracle.known),
                "best": str(best),
            }
        )
    return found


def summary(rows: Sequence[Row]) -> list[Row]:
    """Of each family, and of all: how many, and the largest, the 90 % and the mean regret."""
    found = list[Row]()
    for family in [*dict.fromkeys(r["family"] for r in rows), "all"]:
        regrets = sorted(r["regret"] for r in rows if family in (r["family"], "all"))
        high = regrets[math.ceil(0.9 * len(regrets)) - 1]
        figures = {"largest": regrets[-1], "90 %": high, "mean": statistics.mean(regrets)}
        over = {f"over {MOST}": sum(r > MOST for r in regrets)}
        found.append({"family": family, "cases": len(regrets), **figures, **over})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seeds", nargs="+", type=int, help="models, of which each has its world (default: 0 to 39)")
    add("--networks", nargs="+", choices=[*NETWORKS], default=[*NETWORKS], help="(default: all)")
    add("--drawn", type=int, default=60, help="strategies that are drawn for each model (default: %(default)s)")
    add("--proposals", type=int, default=60, help="changes for each network (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write all rows here, with the best strategies")
    arguments = parser.parse_args()
    rows = list[Row]()
    for seed in tqdm(arguments.seeds or range(40), desc="models"):
        rows += rows_of(seed, arguments.networks, arguments.drawn, arguments.proposals)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print_table([{k: v for k, v in row.items() if k != "best"} for row in rows])
    print()
    print_table(summary(rows))


if __name__ == "__main__":
    main()

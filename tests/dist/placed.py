"""Random placed graphs, each with a strategy, an optimizer and 2 to 4 ranks, by number; and whether ranks would fit.

Layers lie on places, sub-sets of the ranks in any order, or on none; some are shared between places, and some are split
by columns or rows. Hints lay values out on their place or on all ranks.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

import hetu as ht
from hetu.core.passes import applied, specialize
from hetu.core.subgraph import SubGraph
from hetu.dist import MEGATRON, Mesh, OnRanks, RuleBook, Strategy, place, shard
from hetu.dist.cut.agreement import RankCalls, calls_of, misfit
from hetu.dist.cut.partition import partition
from hetu.dist.cut.strategy import Builder

from .models import uniform

WIDTH = 8
NAMES = ("up", "down", "query", "output")
COLUMNS = {f"*{name}*/{part}": axis for name in ("up", "query") for part, axis in (("weight", 1), ("bias", 0))}
SPLIT = MEGATRON | RuleBook({**COLUMNS, "*down*/weight": 0, "*output*/weight": -2})  # the others by rows
STRATEGIES = uniform(SPLIT)
OPTIMIZERS = {
    "SGD": lambda: ht.optim.SGD(0.1),
    "Momentum": lambda: ht.optim.Momentum(0.1),
    "Adam": lambda: ht.optim.Adam(0.01),
    "LAMB": lambda: ht.optim.LAMB(0.01),
    "SGD, clipped": lambda: ht.optim.SGD(0.1, clip_norm=0.5),
    "Adam, clipped": lambda: ht.optim.Adam(0.01, clip_norm=0.5),
}
ENDS = (  # what follows a layer: of its source and its result
    lambda x, h: ht.tanh(h),
    lambda x, h: ht.relu(h),
    lambda x, h: ht.nn.LayerNorm(WIDTH)(h),
    lambda x, h: ht.softmax(h),
    lambda x, h: ht.dropout(h, 0.1),
    lambda x, h: h + x,
)
BUCKETS = (4 << 20, 400, 0)


class Case(NamedTuple):
    """One placed graph and how it is spread."""

    number: int
    strategy: str
    ranks: int
    bucket_bytes: int

    @property
    def inside(self) -> int:
        """The ranks of a place are a multiple of it."""
        return 2 if "x" in self.strategy else 1

    def graph(self) -> dict[str, Any]:
        """The same at every call."""
        draw = random.Random(self.number)
        values, layers = [ht.placeholder("x", (None, WIDTH))], []
        with ht.scope("m"):
            for _ in range(draw.choice((1, 2, 2, 3))):
                values.append(self.layer(draw, draw.choice(values[-2:]), layers))
            loss = ht.mean(ht.square(values[-1]))
            if draw.random() < 0.3:
                loss = loss + ht.mean(values[-2])
        optimizer = OPTIMIZERS[draw.choice([*OPTIMIZERS])]()
        return {"train": [loss, optimizer.minimize(loss)], "eval": [values[-1]]}

    def layer(self, draw: random.Random, x: ht.Node, layers: list[Any]) -> ht.Node:
        """One more layer somewhere, new or one that was used before."""
        mine = self.some_ranks(draw)
        if not layers or draw.random() < 0.7:
            with place(self.some_ranks(draw)) if draw.random() < 0.2 else contextlib.nullcontext():
                layers.append(ht.nn.Linear(WIDTH, WIDTH, name=draw.choice(NAMES)))
        with place(mine) if draw.random() < 0.75 else contextlib.nullcontext():
            if draw.random() < 0.5:
                x = self.hinted(draw, x, mine)
            x = draw.choice(ENDS)(x, draw.choice(layers)(x))
            return self.hinted(draw, x, mine) if draw.random() < 0.2 else x

    def some_ranks(self, draw: random.Random) -> tuple[int, ...]:
        size = draw.choice([k for k in range(1, self.ranks + 1) if k % self.inside == 0])
        return tuple(draw.sample(range(self.ranks), size))

    def hinted(self, draw: random.Random, x: ht.Node, mine: tuple[int, ...]) -> ht.Node:
        ranks = mine if draw.random() < 0.5 else tuple(range(self.ranks))
        mesh = Mesh((len(ranks) // self.inside, self.inside), ("data", "tensor"), ranks)
        return shard(x, layout=mesh.layout(**draw.choice([{}, {"data": 0}, {"data": 1}, {"tensor": 1}])))

    def build(self, graph: Mapping[str, Any]) -> Strategy:
        return built(STRATEGIES[self.strategy](), graph, self.ranks, self.bucket_bytes)


def case(number: int) -> Case:
    """The placed graph of this number, with the next strategy of the list."""
    draw = random.Random(-number)
    strategy = [*STRATEGIES][number % len(STRATEGIES)]
    ranks = draw.choice((2, 4) if "x" in strategy else (2, 3, 4))
    return Case(number, strategy, ranks, draw.choice(BUCKETS))


def built(builder: Builder, graph: Mapping[str, Any], ranks: int, bucket_bytes: int | None = None) -> Strategy:
    """The strategy for a graph."""
    outputs = [n for entries in graph.values() for e in entries for n in (e.values() if isinstance(e, dict) else [e])]
    strategy = builder.build(outputs, ranks)
    strategy.check(outputs, ranks)
    if bucket_bytes is not None:
        strategy.bucket_bytes = bucket_bytes
    return strategy


def calls_of_ranks(
    graph: Mapping[str, Any], strategy: Strategy, ranks: int, batch: int, name: str = "train"
) -> dict[int, RankCalls]:
    """What each rank would do in one entry of a graph; none runs."""
    sub = SubGraph(name, graph[name])
    fed = {(p, axis): batch for p, node in sub.placeholders.items() for axis in range(node.ndim)}
    sizes = strategy.sizes(fed, training=bool(sub.updates))
    outputs = applied(OnRanks.passes, specialize(sub.written.outputs, sizes), False)
    fetches, updates = outputs[: len(sub.fetches)], dict(zip(sub.updates, outputs[len(sub.fetches) :]))
    part = partition(strategy, fetches, updates)
    parts = {rank: part(rank) for rank in range(ranks)}
    return {rank: calls_of((*of.fetches, *of.tokens, *of.updates.values()), rank) for rank, of in parts.items()}


def static_misfit(*given: Any) -> str | None:
    """What does not fit among `calls_of_ranks`."""
    return misfit(calls_of_ranks(*given))


def misfits(numbers: range) -> dict[Case, str]:
    """The placed graphs of these numbers whose ranks do not fit, and where."""
    found = {}
    gc.disable()  # what is made here is dropped without circles
    try:
        for tried in map(case, numbers):
            graph = tried.graph()
            if difference := static_misfit(graph, tried.build(graph), tried.ranks, 6 if tried.number % 3 else 5):
                found[tried] = difference
    finally:
        gc.enable()
    return found


def trained(tried: Case, comm: Any = None) -> tuple[list[np.ndarray], list[float]]:
    """What evaluation gives before and after three steps of training, and their losses, on ranks or alone."""
    graph, rng = tried.graph(), np.random.default_rng(tried.number)
    feeds = [{"x": rng.normal(size=(5, WIDTH)).astype("float32")} for _ in range(3)]
    ex = ht.Executor(graph, strategy=tried.build(graph) if comm else None, comm=comm, passes=[])
    before = ex.run("eval", feeds[0])[0]
    found = [float(ex.run("train", feed)[0]) for feed in feeds]
    return [before, ex.run("eval", feeds[0])[0]], found

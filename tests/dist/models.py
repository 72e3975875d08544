"""Small models for tests of strategies: each gives its loss, its output, the updates and its batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import hetu as ht
from hetu.core.op import Role
from hetu.dist import DataParallel, Parallel, TensorParallel, ZeRO, run_ranks
from hetu.dist.cut.strategy import Builder

from ..at_once import only_bound

BATCH, STEPS = 12, 8


def mlp(optimizer: Any = None, hidden: int = 16):
    x, t = ht.placeholder("x", (None, 10)), ht.placeholder("t", (None,), "int64")
    with ht.scope("mlp"):
        h = ht.nn.Linear(10, hidden, activation=ht.relu, name="up")(x)
        y = ht.nn.Linear(hidden, 5, name="down")(h)
        graph = _with_loss(y, t, optimizer or ht.optim.Adam(0.01))
    return graph, batches((10,), 5)


def cnn(optimizer: Any = None):
    x, t = ht.placeholder("x", (None, 2, 8, 8)), ht.placeholder("t", (None,), "int64")
    with ht.scope("cnn"):
        h = ht.relu(ht.nn.BatchNorm(4)(ht.nn.Conv2d(2, 4, 3, padding=1)(x)))
        h = ht.dropout(ht.max_pool2d(h, 2), 0.2)
        y = ht.nn.Linear(64, 5)(ht.flatten(h, 1))
        graph = _with_loss(y, t, optimizer or ht.optim.Momentum(0.05))
    return graph, batches((2, 8, 8), 5)


def transformer(optimizer: Any = None, vocabulary: int = 20):
    ids, t = ht.placeholder("x", (None, 6), "int64"), ht.placeholder("t", (None, 6), "int64")
    with ht.scope("gpt"):
        h = ht.nn.Embedding(vocabulary, 16)(ids)
        h = ht.nn.TransformerBlock(16, 4, causal=True, dropout=0.1, name="block")(h)
        y = ht.nn.Linear(16, vocabulary, name="head")(h)
        graph = _with_loss(y, t, optimizer or ht.optim.Adam(0.01))
    return graph, batches((6,), vocabulary, ids=True)


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


def _with_loss(y: ht.Node, t: ht.Node, optimizer: Any):
    loss = ht.mean(ht.softmax_cross_entropy(y, t))
    return {"train": [loss, optimizer.minimize(loss)], "eval": [y]}


def batches(shape: tuple[int, ...], classes: int, *, ids: bool = False, count: int = STEPS) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    made = []
    for _ in range(count):
        size = (BATCH, *shape)
        x = rng.integers(0, classes, size) if ids else rng.normal(size=size).astype("float32")
        made.append({"x": x, "t": rng.integers(0, classes, size if ids else BATCH)})
    return made


def losses(
    model: Callable[..., Any], strategy: Any = None, comm: Any = None, steps: int = STEPS, **options: Any
) -> list[float]:
    """The loss of each step, with this strategy on these ranks or alone; `options` are the executor's."""
    graph, feeds = model()
    ex = ht.Executor(graph, strategy=strategy, comm=comm, **options)
    return [float(ex.run("train", feed)[0]) for feed in feeds[:steps]]


def communication(model: Callable[..., Any], strategy: Any, ranks: int, name: str = "train") -> Counter[str]:
    """How often each kind of communication runs in one step on rank 0."""
    return Counter(node.op.name for node in communicating(model, strategy, ranks, name))


def communicating(
    model: Callable[..., Any], strategy: Any, ranks: int, name: str = "train", **options: Any
) -> Sequence[ht.Node]:
    """The communicating nodes of one step on rank 0; `options` are the executor's."""

    def nodes(comm):
        graph, feeds = model()
        built = strategy.build([loss for loss, *_ in graph.values()] + [*graph["train"][1].values()], ranks)
        built.bucket_bytes = 0
        ex = ht.Executor(graph, strategy=built, comm=comm, **options)
        feed = feeds[0] if name == "train" else {"x": feeds[0]["x"]}
        with only_bound():
            return [step.node for step in ex.program(name, feed).steps if step.node.role is Role.COMMUNICATION]

    return run_ranks(ranks, nodes)[0]


def uniform(split: Mapping[str, int]) -> dict[str, Callable[[], Builder]]:
    """Strategies that treat all ranks alike; those of tensor parallelism split by these patterns."""
    return {
        "data": DataParallel,
        "zero1": lambda: ZeRO(1),
        "zero2": lambda: ZeRO(2),
        "zero3": lambda: ZeRO(3),
        "tensor": lambda: TensorParallel(split),
        "data x tensor": lambda: Parallel(tensor=2, split=split),
        "zero3 x tensor": lambda: Parallel(tensor=2, zero=3, split=split),
    }

"""Random trainings by number: a model, its optimizer, hints, a strategy of any kind, batches and a precision.

`placed.py` draws where layers lie; here each draw has a strategy for all ranks, unequal groups, ZeRO, pipelines and
micro-batches among them. Whatever is drawn equals one process: left out is what does not by its nature, as PipeDream's
stashed weights, batch norm in micro-batches, and random numbers of samples that are fed in another order.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np

import hetu as ht
from hetu.core.errors import HetuError
from hetu.dist import Heterogeneous, Mesh, Parallel, Pipeline, RuleBook, TensorParallel, run_ranks, shard
from hetu.dist.cut.strategy import Builder

WIDTH, CLASSES = 8, 5
RATES = {"number": lambda rate: rate, "cosine": lambda rate: ht.schedules.cosine(rate, 10)}
RATES["warmup"] = lambda rate: ht.schedules.warmup(rate, 2)
OPTIMIZERS = {
    "SGD": lambda rate, **more: ht.optim.SGD(rate(0.1), **more),
    "Momentum": lambda rate, **more: ht.optim.Momentum(rate(0.05), **more),
    "Nesterov": lambda rate, **more: ht.optim.Momentum(rate(0.05), nesterov=True, **more),
    "AdaGrad": lambda rate, **more: ht.optim.AdaGrad(rate(0.02), epsilon=1e-2, **more),
    "RMSProp": lambda rate, **more: ht.optim.RMSProp(rate(0.01), epsilon=1e-2, **more),
    "Adam": lambda rate, **more: ht.optim.Adam(rate(0.01), epsilon=1e-3, **more),
    "AMSGrad": lambda rate, **more: ht.optim.AMSGrad(rate(0.01), epsilon=1e-3, **more),
    "AdamW": lambda rate, **more: ht.optim.AdamW(rate(0.01), epsilon=1e-3, **more),
    "LAMB": lambda rate, **more: ht.optim.LAMB(rate(0.01), epsilon=1e-3, **more),
    "Lion": lambda rate, **more: ht.optim.Lion(rate(1e-4), **more),
}  # with an epsilon, as batch norm below, at which the rounding of a slope that is 0 moves little
MORE = [{}, {}, {"clip_norm": 0.5}, {"clip_value": 0.01}, {"weight_decay": 0.01}, {"clip_norm": 1, "weight_decay": 0.1}]
KINDS = ("parallel", "parallel", "groups", "tensor", "pipeline", "accumulate", "local")
GRIDS = {2: [(2, 1, 1)], 3: [(3, 1, 1)], 4: [(2, 2, 1), (2, 1, 2), (4, 1, 1)]}  # stages x data x tensor
TOLERANCE = {"float32": (2e-5, 1e-3), "float16": (1e-2, 0.1), "bfloat16": (5e-2, 0.5)}  # of losses, and of outputs


class Training(NamedTuple):
    """One drawn training; the same at every call of its methods."""

    number: int
    kind: str
    ranks: int
    precision: str
    apart: bool  # each micro-batch is a batch of its own
    parts: int  # into which each batch must divide
    share: int  # ranks that are fed one part
    ids: bool
    long: bool
    builder: Builder

    @property
    def plain(self) -> bool:
        """Whether all samples of a batch are seen at once, in the order of one process."""
        return self.kind not in ("pipeline", "accumulate", "local")

    def graph(self) -> dict[str, Any]:
        draw, shape = random.Random(self.number), (None, 4) if self.long else (None,)
        x = ht.placeholder("x", shape if self.ids else (*shape, WIDTH), "int64" if self.ids else "float32")
        t = ht.placeholder("t", shape, "int64")
        with ht.scope("m"):
            h = ht.nn.Embedding(20, WIDTH, name="embedding")(x) if self.ids else x
            for k in range(draw.choice((3, 4) if self.kind == "pipeline" else (1, 2, 3))):
                with ht.scope(f"l{k}"):
                    h = self.hinted(draw, draw.choice(self.layers())(h))
            y = ht.nn.Linear(WIDTH, CLASSES, name="head")(h)
            loss = ht.mean(ht.softmax_cross_entropy(y, t))
        how = OPTIMIZERS[draw.choice([*OPTIMIZERS])](RATES[draw.choice([*RATES])], **draw.choice(MORE))
        # Whether a step is skipped follows from an overflow in float16, and so from the order of sums.
        trained = loss * 2**-6 if self.precision == "float16" else loss
        return {"train": [loss, how.minimize(trained), y], "eval": [y]}

    def layers(self) -> list[Any]:
        """Functions of (batch, ..., WIDTH) that a layer may be."""

        def linear(name: str, **more: Any) -> Any:
            return ht.nn.Linear(WIDTH, WIDTH, name=name, **more)

        found = [
            lambda h: linear("up", activation=ht.tanh)(h),
            lambda h: h + linear("down")(ht.gelu(linear("up")(h))),
            lambda h: linear("up")(h) * ht.sigmoid(linear("gate")(h)),
            lambda h: ht.nn.LayerNorm(WIDTH)(h + linear("down", activation=ht.tanh)(h)),
            lambda h: linear("up", activation=ht.silu)(ht.nn.RMSNorm(WIDTH)(h)),
            lambda h: ht.softmax(linear("up")(h)) + linear("gate", activation=ht.tanh)(h),
        ]
        if self.long:
            drop = 0.1 if self.plain else 0.0
            found += [lambda h: ht.nn.TransformerBlock(WIDTH, 2, causal=True, dropout=drop, name="block")(h)] * 3
        if self.plain:
            found += [lambda h: ht.dropout(linear("up", activation=ht.tanh)(h), 0.2)]
            found += [lambda h: ht.nn.BatchNorm(WIDTH, epsilon=0.1)(linear("down")(h))] * (not self.long)
        return found

    def hinted(self, draw: random.Random, h: ht.Node) -> ht.Node:
        """The value, perhaps with a layout of its own on all ranks, in any order of them."""
        chance, ranks = draw.random(), draw.sample(range(self.ranks), self.ranks)
        role = draw.choice([{}, {"d": 0}, {"d": h.ndim - 1}])
        if self.kind in ("pipeline", "accumulate") or chance < 0.7:
            return h
        return shard(h, layout=Mesh((self.ranks,), ("d",), ranks).layout(**role))

    def feeds(self) -> list[dict[str, np.ndarray]]:
        """Batches, in every third training of sizes that differ, even smaller than the number of ranks."""
        draw, rng = random.Random(f"feeds {self.number}"), np.random.default_rng(self.number)
        one, other = (self.parts * n for n in draw.sample((2, 3, 4) if self.parts > 1 else (12, 7, 5, 3), 2))
        made = []
        for size in (one, other if self.number % 3 == 0 else one, one):
            shape = size, *[4] * self.long
            x = rng.integers(0, 20, shape) if self.ids else rng.normal(size=(*shape, WIDTH)).astype("float32")
            made.append({"x": x, "t": rng.integers(0, CLASSES, shape)})
        return made

    def part(self, feed: dict[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
        """What a rank is fed."""
        if self.kind != "local":
            return feed
        count, part = self.ranks // self.share, rank // self.share
        return {name: np.split(value, count)[part] for name, value in feed.items()}


def training(number: int) -> Training:
    """The training of this number, with the next kind of strategy of the list."""
    draw = random.Random(-number)
    kind, ranks = KINDS[number % len(KINDS)], draw.choice((2, 3, 4))
    apart, micro = draw.random() < 0.5, draw.choice((2, 3))
    statistics = {"statistics": "microbatch" if apart else "batch"}
    tensor = draw.choice((1, 2)) if ranks % 2 == 0 else 1
    given = {"tensor": tensor, "zero": draw.choice((0, 1, 2, 3)), "split": split(draw)}
    share, parts = 1, 1
    if kind == "groups":
        order, cut = draw.sample(range(ranks), ranks), sorted(draw.sample(range(1, ranks), draw.randrange(1, ranks)))
        groups = [tuple(order[a:b]) for a, b in zip((0, *cut), (*cut, ranks))]
        builder = Heterogeneous(groups, [draw.choice((1, 2, 3)) for _ in groups], split=given["split"])
    elif kind == "tensor":
        builder = TensorParallel(given["split"])
    elif kind == "pipeline":
        stages, data, tensor = draw.choice(GRIDS[ranks])
        schedule, parts = draw.choice(("gpipe", "1f1b")), micro * data
        more = given | {"tensor": tensor, "zero": given["zero"] if data > 1 else 0}
        builder = Pipeline(stages, micro, schedule, data=data, **more, **statistics)
    elif kind == "accumulate":
        parts, builder = micro * (ranks // tensor), Parallel(accumulate=micro, **given, **statistics)
    elif kind == "local":
        share, parts = tensor, ranks // tensor * micro
        builder = Parallel(local_feeds=True, accumulate=draw.choice((1, micro)), **given, **statistics)
    else:
        builder = Parallel(**given)
    precision = draw.choice(("float32", "float32", "float16", "bfloat16"))
    looks = draw.random() < 0.3, draw.random() < 0.4
    return Training(number, kind, ranks, precision, apart, parts, share, *looks, builder)


def split(draw: random.Random) -> RuleBook:
    """Axes that tensor parallelism splits, of any of the variables."""
    names = [f"*l{k}*/{name}" for k in range(4) for name in ("up", "down", "gate")] + ["*block/*"]
    rules = {"*head/weight": 1}  # which every model has
    for name in draw.sample(names, draw.randrange(2, len(names))):
        axis = draw.choice((0, 1))
        rules |= {f"{name}/weight": axis} | ({f"{name}/bias": 0} if axis else {})
    return RuleBook(rules | ({"*embedding*/weight": draw.choice((0, 1))} if draw.random() < 0.5 else {}))


def trained(drawn: Training, comm: Any = None) -> tuple[list[float], np.ndarray]:
    """The losses of its steps, and what the last step fetches, or in every third training evaluation then."""
    graph, feeds = drawn.graph(), drawn.feeds()
    strategy, rank = (drawn.builder, comm.rank) if comm else (None, 0)
    passes = None if drawn.number % 32 == 0 else []  # the rest compiles nothing
    ex = ht.Executor(graph, strategy=strategy, comm=comm, precision=drawn.precision, passes=passes)
    mine = [drawn.part(feed, rank) if comm else feed for feed in feeds]
    looks = drawn.number % 3 == 1 or drawn.kind == "local"  # whose micro-batches change the order of samples
    losses, _, fetched = zip(*(ex.run("train", feed) for feed in mine))
    last = ex.run("eval", {"x": mine[0]["x"]})[0] if looks else fetched[-1]
    return [*map(float, losses)], last.astype("float32")


def difference(number: int) -> str:
    """How the training of this number differs from that of one process; nothing if it does not."""
    drawn = training(number)
    wanted = trained(drawn)
    losses, outputs = TOLERANCE[drawn.precision]
    try:
        for rank, found in enumerate(run_ranks(drawn.ranks, lambda comm: trained(drawn, comm), deadline=300.0)):
            np.testing.assert_allclose(found[0], wanted[0], atol=losses, rtol=0, err_msg=f"losses of rank {rank}")
            np.testing.assert_allclose(found[1], wanted[1], atol=outputs, rtol=0, err_msg=f"outputs of rank {rank}")
    except (AssertionError, HetuError) as error:
        return f"{drawn}: {error}"
    return ""

"""One model, any parallel strategy: `heturun -w 4 python examples/parallel/train.py --strategy dp+tp`.

The model is written as if for one device; the strategy is the only line that differs. Run alone (`python ...`) it is
the same program on one rank, with the same losses. Ignored on purpose: accuracy, see `examples/cnn`, `examples/nlp`.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

import hetu as ht
from hetu import dist, nn
from hetu.script import positive

Feed = dict[str, np.ndarray]
Built = tuple[ht.Node, ht.data.ArrayDataset]  # the loss of feeds "x" and "t", and the data
Part = contextlib.AbstractContextManager[None]  # where the first or the second part of a model is placed, if anywhere


def mlp(first: Part, second: Part) -> Built:
    """Digits through a wide hidden layer, which tensor parallelism cuts into columns and rows."""
    x, t = ht.placeholder("x", (None, 28, 28)), ht.placeholder("t", (None,), "int64")
    with first:
        h = nn.Linear(784, 256, activation=ht.relu, name="up")(ht.reshape(x, (-1, 784)))
    with second:
        h = nn.Linear(256, 128, activation=ht.relu, name="down")(h)
        return ht.mean(ht.softmax_cross_entropy(nn.Linear(128, 10, name="head")(h), t)), ht.data.mnist("train")


def cnn(first: Part, second: Part) -> Built:
    """Digits through two convolutions, normalized in groups of channels."""
    x, t = ht.placeholder("x", (None, 28, 28)), ht.placeholder("t", (None,), "int64")
    h = ht.expand_dims(x, axis=1)
    for part, inputs, outputs in ((first, 1, 8), (second, 8, 16)):
        with part:
            h = nn.Conv2d(inputs, outputs, 3, padding=1, name=f"conv_{outputs}")(h)
            h = ht.max_pool2d(ht.relu(nn.GroupNorm(4, outputs, name=f"norm_{outputs}")(h)), 2)
    y = nn.Linear(16 * 49, 10, name="head")(ht.dropout(ht.flatten(h, 1), 0.2))
    return ht.mean(ht.softmax_cross_entropy(y, t)), ht.data.mnist("train")


def transformer(first: Part, second: Part) -> Built:
    """Shakespeare, letter by letter; heads, hidden units and the vocabulary are what tensor parallelism splits."""
    plays, length, features = ht.data.shakespeare("train"), 32, 64
    x, t = ht.placeholder("x", (None, length), "int64"), ht.placeholder("t", (None, length), "int64")
    vocabulary = len(plays.vocabulary)
    with first:
        h = nn.Embedding(vocabulary, features)(x) + nn.Embedding(length, features)(np.arange(length))
        h = nn.TransformerBlock(features, 4, causal=True, dropout=0.1, name="block_0")(h)
    with second:
        h = nn.TransformerBlock(features, 4, causal=True, dropout=0.1, name="block_1")(h)
        y = nn.Linear(features, vocabulary, name="head")(nn.LayerNorm(features)(h))
    return ht.mean(ht.softmax_cross_entropy(y, t)), plays.windows(length, stride=length)


def moe(first: Part, second: Part) -> Built:
    """Digits, row by row, through 8 experts: each takes one weighted mean of an image's rows ("Soft MoE", 2023)."""
    x, t, experts, features = ht.placeholder("x", (None, 28, 28)), ht.placeholder("t", (None,), "int64"), 8, 32
    init = ht.init.normal(0.2)
    with first:
        h = nn.Linear(28, features, name="rows")(x)
        chosen = nn.Linear(features, experts, name="gate")(h)
        taken = ht.einsum("bte,btd->bed", ht.softmax(chosen, axis=1), h)
    with second:
        with ht.scope("experts"):
            up, down = (
                ht.variable("up", init, (experts, features, 64)),
                ht.variable("down", init, (experts, 64, features)),
            )
        done = ht.einsum("bef,efd->bed", ht.relu(ht.einsum("bed,edf->bef", taken, up)), down)
        h = h + ht.einsum("bte,bed->btd", ht.softmax(chosen, axis=2), done)
        y = nn.Linear(28 * features, 10, name="classes")(ht.flatten(h, 1))
    return ht.mean(ht.softmax_cross_entropy(y, t)), ht.data.mnist("train")


MODELS: dict[str, Callable[[Part, Part], Built]] = {"mlp": mlp, "cnn": cnn, "transformer": transformer, "moe": moe}
EXPERTS = {"*experts/up": 0, "*experts/down": 0}


def strategies(ranks: int) -> dict[str, dist.Parallel]:
    """The strategies by name; a product gives two ranks to its second factor, as far as there are any."""
    two = 2 if ranks % 2 == 0 else 1
    half = max(1, ranks // 2)
    groups = [tuple(range(half)), tuple(range(half, ranks))] if ranks > 1 else [(0,)]
    shares = [2, 1][: len(groups)]
    return {
        "dp": dist.DataParallel(),
        "dp-local": dist.DataParallel(local_feeds=True),
        "zero1": dist.ZeRO(1),
        "zero2": dist.ZeRO(2),
        "zero3": dist.ZeRO(3),
        "tp": dist.TensorParallel(),
        "dp+tp": dist.Parallel(tensor=two),
        "zero3+tp": dist.Parallel(tensor=two, zero=3),
        "pp": dist.Pipeline(),
        "dp+pp": dist.Pipeline(stages=two, data=ranks // two),
        "unequal": dist.Heterogeneous(groups, shares),
        "place": dist.DataParallel(),  # on the ranks of each part
        "ep": dist.ExpertParallel(EXPERTS),
        "ep-hosts": dist.ExpertParallel(EXPERTS, hosts=groups),  # as if the groups were hosts
    }


def parts(ranks: int, placed: bool) -> tuple[Part, Part]:
    """Where both parts of a model are placed: on half of the ranks each, or nowhere."""
    if not placed or ranks == 1:
        return contextlib.nullcontext(), contextlib.nullcontext()
    return dist.place(range(ranks // 2)), dist.place(range(ranks // 2, ranks))


def arguments(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train one of four models with any parallel strategy.")
    parser.add_argument("--model", choices=MODELS, default="mlp", help="(%(default)s)")
    parser.add_argument("--strategy", choices=names, default="dp", help="how ranks share the work (%(default)s)")
    parser.add_argument("--steps", type=positive, default=20, help="batches (%(default)s)")
    parser.add_argument("--batch-size", type=positive, default=48, help="of all ranks together (%(default)s)")
    parser.add_argument(
        "--seed", type=partial(positive, least=0), default=0, help="of the first weights and the data (%(default)s)"
    )
    parser.add_argument(
        "--checkpoint", metavar="PATH", help="write the trained variables to this file, or folder on several ranks"
    )
    return parser.parse_args()


def batches(data: ht.data.ArrayDataset, batch_size: int, seed: int, shard: bool) -> Iterator[Feed]:
    """Endless batches, the same on every rank: a strategy takes from each what a rank needs. Or this rank's parts."""
    loader = ht.data.DataLoader(data, batch_size, shuffle=True, drop_last=True, seed=seed, shard=shard)
    while True:
        for x, t in loader:
            yield {"x": x, "t": t}


def main() -> None:
    comm = dist.world()
    known = strategies(comm.world_size)
    args = arguments(list(known))
    with ht.scope(args.model):
        loss, data = MODELS[args.model](*parts(comm.world_size, args.strategy == "place"))
        updates = ht.optim.Adam(1e-3).minimize(loss)
    executor = ht.Executor({"train": [loss, updates]}, seed=args.seed, strategy=known[args.strategy])
    say = print if comm.rank == 0 else lambda *_: None
    say(executor.placement)
    feeds = batches(data, args.batch_size, args.seed, known[args.strategy].local_feeds)
    for step in range(1, args.steps + 1):
        value = float(executor.run("train", next(feeds))[0])
        say(f"step {step:3}  loss {value:.6f}")
    if args.checkpoint:
        executor.save(args.checkpoint)


if __name__ == "__main__":
    main()

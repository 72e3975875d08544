"""What each recipe of `hetu/cpu_kernels/` gains: `python examples/benchmarks/recipes.py [convolution pooling ...]`.

Each row runs the operators of one file of the room, at sizes as they occur in models, with the file and without, which
leaves them to what `hetu/ops/` says they mean; or a whole step with one pass and without; or one whose feed is read
where it lies, and copied. Processor time of one thread, by alternation in one process; above 1 the recipe is faster.
Ignored on purpose: whole models, where a recipe is only a part of a step (`train_step.py`), and what only another
recipe calls.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Collection
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

import numpy as np
from report import print_table
from tqdm import tqdm

import hetu as ht
from hetu.core.passes import chosen_passes
from hetu.cpu_kernels import KERNELS, fed, openblas

Case = Callable[[], "ht.Node | tuple[ht.Node, ...]"]
rng = np.random.default_rng(0)
numbers = count()


def normal(*shape: int) -> ht.Node:
    """A variable of random numbers."""
    return ht.variable(f"v{next(numbers)}", rng.standard_normal(shape, "float32"))


def ids(high: int, *shape: int) -> ht.Node:
    return ht.constant(rng.integers(0, high, shape))


def experts() -> ht.Node:
    slots, weights = ht.moe_slots(ids(8, 1024, 2), count=8, capacity=320), normal(1024, 2)
    return ht.moe_combine(ht.moe_dispatch(normal(1024, 128), slots, weights, experts=8, capacity=320), slots, weights)


def bags() -> ht.Node:
    return ht.sum(ht.embedding(normal(100_000, 64), ids(100_000, 1024, 32)), axis=1)


def product() -> ht.Node:
    entries = [np.sort(rng.integers(0, 5000, 50_000)), rng.integers(0, 5000, 50_000), rng.random(50_000, "float32")]
    return ht.sparse_matmul(*entries, normal(5000, 64), size=5000)


def packed() -> ht.Node:
    """Queries, keys and values of one projection."""
    parts = ht.permute_dims(ht.reshape(normal(2048, 128) @ normal(128, 384), (16, 128, 3, 2, 64)), (2, 0, 3, 1, 4))
    return ht.permute_dims(ht.scaled_dot_product_attention(*(parts[i] for i in range(3)), causal=True), (0, 2, 1, 3))


def written() -> ht.Node:
    """Causal attention, as one writes it out."""
    q, k, v = (normal(2, 4, 512, 64) for _ in "qkv")
    scores = ht.where(np.tri(512, dtype=bool), q @ ht.matrix_transpose(k) / 8.0, -1e9)
    return ht.softmax(scores, axis=-1) @ v


# By file of the room.
FILES: dict[str, Case] = {
    "along_axis": lambda: ht.take_along_axis(normal(512, 1024), ids(1024, 512, 8), axis=1),
    "attention": lambda: ht.scaled_dot_product_attention(*(normal(8, 4, 128, 64) for _ in "qkv"), causal=True),
    "batch_norm": lambda: ht.nn.BatchNorm(64)(normal(32, 64, 16, 16)),
    "convolution": lambda: (
        ht.nn.Conv2d(8, 16, 5)(normal(16, 8, 28, 28)),
        ht.nn.Conv2d(64, 64, 3, padding=1)(normal(16, 64, 32, 32)),
    ),
    "einsum": lambda: ht.einsum("bij,bkj->bik", normal(16, 128, 64), normal(16, 128, 64)),
    "index": lambda: ht.embedding(normal(100_000, 64), ids(100_000, 1024, 8)),
    "linalg": lambda: ht.linear(normal(16, 32), normal(32, 32), normal(32)),
    "masks": lambda: ht.tril(normal(512, 512)),
    "moves": lambda: ht.roll(ht.concat([normal(256, 512), normal(256, 512)], axis=1), 3, axis=1),
    "pooling": lambda: (ht.max_pool2d(normal(32, 64, 16, 16), 2), ht.avg_pool2d(normal(32, 64, 16, 16), 2)),
    "random": lambda: (ht.dropout(normal(512, 1024), 0.1), ht.uniform((512, 1024)), ht.normal((512, 1024))),
    "recurrent": lambda: tuple(make(128, 128)(normal(64, 28, 128))[0] for make in (ht.nn.GRU, ht.nn.LSTM)),
    "routing": experts,
    "scan": lambda: ht.cumsum(normal(512, 1024), axis=1),
    "shape": lambda: ht.square(normal(128, 256) + normal(256)),
    "sparse": product,
    "sums": lambda: ht.sum(normal(32, 64, 256), axis=(0, 2)),
    "touched": lambda: ht.embedding(normal(100_000, 64), ids(100_000, 64, 8)),
}
# By pass.
RUNS: dict[str, Case] = {
    "join_bags": bags,
    "join_entries": lambda: ht.pair_products(normal(100_000, 8), ids(100_000, 40_000), np.arange(0, 40_000, 40)),
    "find_attention": written,
    "fuse_attention": packed,
    "fuse_groups": lambda: ht.gelu(ht.layer_norm(normal(2048, 512), normal(512), normal(512))),
}


def predicted() -> Callable[[], None]:
    """What a linear regression makes of 4 MB that it is fed."""
    x = ht.placeholder("x", (256, 4096))
    executor, feed = ht.Executor([x @ normal(4096, 1)]), {x: rng.standard_normal((256, 4096), "float32")}
    executor.run(feed)
    return partial(executor.run, feed)


def bound(case: Case, passes: list[str], operators: Collection[Any] = ()) -> Callable[[], None]:
    """What runs these operators in one training step of a case, by default all."""
    with ht.scope(f"case{next(numbers)}"):
        made = case()
        parts = made if isinstance(made, tuple) else (made,)
        total = sum((ht.sum(part * rng.standard_normal(part.shape, "float32")) for part in parts), ht.constant(0.0))
        executor = ht.Executor({"train": [total, ht.optim.SGD(1e-6).minimize(total)]}, passes=passes)
    feed = {p: rng.standard_normal(p.shape, "float32") for p in executor.subgraphs["train"].placeholders.values()}
    executor.run("train", feed)
    steps = executor.program("train", feed).steps
    kinds = [{s.node.op, "row_update" if s.node.op.row_update else ""} for s in steps]
    calls = [call for s, own in zip(steps, kinds) if not operators or own & {*operators} for call in s.calls]
    assert calls, f"nothing is left of {operators}"

    def run() -> None:
        for call in calls:
            call()

    return partial(executor.quiet.run, run)


def operators_of(file: str) -> list[Any]:
    """The operators that a file of the room computes, and "row_update" where it applies the rules of optimizers."""
    made = {op: getattr(function, "func", function).__module__ for op, function in KERNELS.functions.items()}
    return [op for op in made if made[op] == f"hetu.cpu_kernels.{file}"]


def gain(name: str, rounds: int) -> list[float]:
    """Quartiles of the time without by the time with what is called `name`."""
    if name == "fed":
        with patch.object(fed, "LEAST", np.inf):
            copied = predicted()
        pair = predicted(), copied
    elif name in RUNS:
        passes = [run.__name__ for run in chosen_passes(None)]
        pair = bound(RUNS[name], passes), bound(RUNS[name], [p for p in passes if p != name])
    else:
        operators = operators_of(name)
        passes = ["simplify", *["sparsify_updates"][: "row_update" in operators]]
        case = partial(bound, FILES[name], passes, operators)
        with_it = case()
        with patch.dict(KERNELS.functions):
            for op in operators:
                del KERNELS.functions[op]
            pair = with_it, case()
    began = time.process_time()
    for run in pair:
        run()
    repeat = max(1, int(0.1 / (time.process_time() - began + 1e-6)))
    ratios = []
    for turn in range(rounds):
        spent = {}
        for run in pair if turn % 2 else pair[::-1]:
            began = time.process_time()
            for _ in range(repeat):
                run()
            spent[run] = time.process_time() - began
        ratios.append(spent[pair[1]] / spent[pair[0]])
    return statistics.quantiles(ratios, n=4)


def main() -> None:
    known = [*FILES, *RUNS, "fed"]
    parser = argparse.ArgumentParser(description="What each recipe of the room of the CPU gains.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of: {' '.join(known)} (default: all)")
    parser.add_argument("--rounds", type=int, default=11, help="samples of each side (default: 11)")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in known]:
        parser.error(f"no recipe is called {unknown[0]!r}; there are {' '.join(known)}")
    openblas.set_threads(1)
    KERNELS.function(ht.relu)  # loads all files
    bar = tqdm(arguments.names or known, leave=False)
    print_table([{"recipe": name, "times as fast": gain(name, arguments.rounds)} for name in bar])


if __name__ == "__main__":
    main()

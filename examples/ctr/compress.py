"""Store the table of a click model in fewer bytes, by every method of `hetu.embed`: `python examples/ctr/compress.py`.

The same model is trained with the table that each method makes at each ratio; bytes are those that inference stores,
and AUC is that of what is stored. Of clicks that are drawn here the weight of each id is known, so also the AUC of the
truth. Ids are numbered by how often they occur, so no method stores their ranks. Ignored on purpose: tuning anything
for a method; the test set chooses only the best, which the last line names.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

import hetu as ht
from hetu.script import Script, number, positive

FIELDS, WIDTH, EVERY = 8, 16, 100  # of drawn clicks; of a vector; so many steps tables settle


class Clicks(NamedTuple):
    """Ids (n, fields) and labels (n,) to train on and to test, how many ids there are, and what is known of them."""

    train: ht.data.ArrayDataset
    test: ht.data.ArrayDataset
    count: int
    known: str = ""


def drawn(rows: int, count: int) -> Clicks:
    """Clicks whose log odds are the sum of the weights of 8 ids, by Zipf's law."""
    rng = np.random.default_rng(0)
    weights, share = rng.normal(size=count), 1 / np.arange(1, count + 1)
    ids = rng.choice(count, (rows, FIELDS), p=share / share.sum())
    odds = weights[ids].sum(axis=1)
    y, first = (rng.random(rows) < 1 / (1 + np.exp(-odds))).astype("float32"), rows // 5
    test, train = (ht.data.ArrayDataset(ids[part], y[part]) for part in (slice(first), slice(first, None)))
    return Clicks(train, test, count, f"; the AUC of the truth is {area(odds[:first], y[:first]):.4f}")


def census(train: ht.data.ArrayDataset) -> Clicks:
    """The categories of the census forms, and each pair of two: what a linear model is given as crosses."""
    sizes = [len(names) for names in train.info["categorical"].values()]
    pairs = [*itertools.combinations(range(len(sizes)), 2)]
    offsets = np.cumsum([0, *sizes, *(sizes[a] * sizes[b] for a, b in pairs)])
    made = []
    for part in (train, ht.data.adult("test")):
        codes = part.arrays[1]
        crossed = [codes[:, a] * sizes[b] + codes[:, b] for a, b in pairs]
        ids = np.concatenate([codes, np.stack(crossed, axis=1)], axis=1) + offsets[:-1]
        made.append(ht.data.ArrayDataset(ids, part.arrays[2].astype("float32")))
    return Clicks(*made, int(offsets[-1]))


def by_popularity(clicks: Clicks) -> Clicks:
    """The same with ids numbered by how often they occur in training."""
    order = np.argsort(-np.bincount(clicks.train.arrays[0].ravel(), minlength=clicks.count), kind="stable")
    ranks = np.argsort(order)
    train, test = (ht.data.ArrayDataset(ranks[d.arrays[0]], d.arrays[1]) for d in (clicks.train, clicks.test))
    return clicks._replace(train=train, test=test)


def area(scores: np.ndarray, labels: np.ndarray) -> float:
    (auc := ht.metrics.AUC()).update(scores, labels)
    return auc.result()


def share(text: str) -> float:
    """What an option gives as a number above 0 up to 1."""
    if 0 < (found := number(text)) <= 1:
        return found
    raise argparse.ArgumentTypeError(f"{text!r} is no number above 0 up to 1")


def model(vectors: ht.Node) -> ht.Node:
    """Logits (n,) of vectors (n, fields, width): products of all pairs of them, and a network."""
    pairs = ht.pairs_of_sums(ht.sum(vectors, axis=1), ht.sum(ht.square(vectors), axis=1))
    joined = ht.flatten(vectors, 1)
    network = ht.nn.Sequential(ht.nn.Linear(joined.shape[1], 64, activation=ht.relu), ht.nn.Linear(64, 1))
    return pairs + ht.squeeze(network(joined), axis=1)


def trained(script: Script, clicks: Clicks, table: ht.embed.Embedding) -> tuple[int, float, float]:
    """Bytes that inference stores, their AUC, and seconds."""
    started, batches = time.perf_counter(), script.batches(clicks.train)
    steps = script.options.epochs * len(batches)
    ids, t = ht.placeholder("ids", (None, clicks.train.arrays[0].shape[1]), "int64"), ht.placeholder("t", (None,))
    y = model(table(ids))
    loss = ht.mean(ht.binary_cross_entropy_with_logits(y, t))
    executor = script.executor({"train": [loss, ht.optim.Adam(script.rate(batches)).minimize(loss)]})

    def between(step: int, loss: float) -> None:
        if step % EVERY == 0 or step == steps:
            table.settle(executor.state, step / steps)

    ht.fit(executor, batches, epochs=script.options.epochs, inputs=(ids, t), after_step=between, progress=False)
    small = table.compact(executor.state)
    stored = ht.Executor([small.replace_in(y)], state=executor.state)
    auc = area(stored.run({ids: clicks.test.arrays[0]})[0], clicks.test.arrays[1])
    return small.nbytes, auc, time.perf_counter() - started


def rows(
    script: Script, clicks: Clicks, methods: Sequence[str], ratios: Sequence[float]
) -> Iterator[tuple[str, float, float]]:
    """Each method at each ratio as a line of the table; yields those that apply, and their AUC."""
    script.say(f"{'method':<19}{'ratio':>6}{'bytes':>11}{'of budget':>11}{'AUC':>9}{'seconds':>9}")
    for method, ratio in [("hash", 1.0), *itertools.product(methods, ratios)]:  # the first is the whole table
        with ht.scope(f"{method}_{ratio}"):
            try:
                table = ht.embed.Embedding(clicks.count, WIDTH, method, ratio=ratio)
            except ht.errors.ArgumentError as error:
                script.say(f"{method:<19}{ratio:>6g}   {error.fix}")
                continue
            nbytes, auc, seconds = trained(script, clicks, table)
        share = nbytes / table.budget
        script.say(f"{method:<19}{ratio:>6g}{nbytes:>11,}{share:>11.3f}{auc:>9.4f}{seconds:>9.1f}")
        yield method, ratio, auc


def draw(path: str, found: Sequence[tuple[str, float, float]], ratios: Sequence[float]) -> None:
    """Write the AUC of each method by ratios as an SVG."""
    at = {(method, ratio): auc for method, ratio, auc in found}
    curves = {m: [at.get((m, r), math.nan) for r in ratios] for m in dict.fromkeys(m for m, _, _ in found)}
    picture = ht.look.curves_svg(curves, ratios, label="share of the bytes", up="AUC", log_x=True)
    Path(path).write_text(picture, "utf-8")


def main() -> None:
    without = ("--accumulate", "--checkpoint", "--log", "--strategy")
    script = Script(__doc__, epochs=2, batch_size=256, learning_rate=1e-2, without=without)
    script.add("--data", choices=["adult", "drawn"], default="drawn", help="(%(default)s)")
    names, numbers = [*ht.embed.METHODS], {"type": positive, "metavar": "N"}
    script.add("--methods", nargs="+", choices=names, default=names, metavar="NAME", help="some of %(default)s")
    script.add("--ratios", nargs="+", type=share, default=[0.5, 0.1, 0.01], metavar="R", help="(%(default)s)")
    script.add("--count", default=10_000, help="ids of drawn clicks (%(default)s)", **numbers)
    script.add("--clicks", default=50_000, type=partial(positive, least=5), metavar="N", help="drawn (%(default)s)")
    script.add("--picture", metavar="PATH", help="draw AUC by ratios, an SVG")
    script.only("--count", data=("drawn",))
    script.only("--clicks", data=("drawn",))
    options = script.parse()
    clicks = census(ht.data.adult("train")) if options.data == "adult" else drawn(options.clicks, options.count)
    clicks = by_popularity(clicks._replace(train=script.first(clicks.train)))
    script.say(f"{clicks.count:,} ids x {WIDTH}: {clicks.count * WIDTH * 4:,} bytes{clicks.known}\n")
    (_, _, full), *found = rows(script, clicks, options.methods, options.ratios)
    best = {ratio: max((a, m) for m, r, a in found if r == ratio) for ratio in dict.fromkeys(r for _, r, _ in found)}
    told = "".join(f", {method} {auc:.4f} at {ratio:g}" for ratio, (auc, method) in best.items())
    script.say(f"\nfm on {'drawn clicks' if options.data == 'drawn' else 'adult'}: test AUC {full:.4f}{told}")
    if options.picture:
        draw(options.picture, found, options.ratios)


if __name__ == "__main__":
    main()

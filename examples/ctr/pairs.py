"""Learn who takes what, from pairs of a user and an item: `python examples/ctr/pairs.py`.

With MovieLens in `--data FOLDER` or `$HETU_DATA/movielens`, a user takes a film that he gives four stars or five.
Otherwise words of Shakespeare stand in for both, as MovieLens may not be shipped: a word takes the next one, and what
it does not take is drawn at random. Ignored on purpose: choosing anything by a validation set.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

import hetu as ht
from hetu.models import clicks
from hetu.script import Script
from hetu.script_servers import ServerOptions

PARTS, WORDS, MOST = ("train", "test"), 1000, 40_000  # words that are known, and pairs of a part
ASKED = 100  # users and items of a batch of the test, among which each user's item is looked for


class Pairs(NamedTuple):
    """Rows (n, 3) of user, item and whether it was taken; how many there are; a bag of each item; and what they are."""

    train: np.ndarray
    test: np.ndarray
    users: int
    items: int
    bags: np.ndarray
    name: str


def films(root: str | None) -> Pairs:
    parts = [ht.data.movielens(part, root) for part in PARTS]
    rows = [
        np.stack([user, item, stars >= 4], axis=1).astype("int64") for user, item, stars in (p.arrays for p in parts)
    ]
    info = parts[0].info
    return Pairs(*rows, len(info["users"]), len(info["genres"]), info["genres"], "movielens")


def words(seed: int) -> Pairs:
    """A word takes the one that follows it in a play. Others are drawn by their uses, and a bag holds letters."""
    plays = [re.findall("[a-z]+", (part := ht.data.shakespeare(name)).decode(part.codes).lower()) for name in PARTS]
    known = {word: place for place, (word, _) in enumerate(Counter(plays[0]).most_common(WORDS))}
    rng, rows = np.random.default_rng(seed), []
    for play in plays:
        taken = np.array([(known[a], known[b], 1) for a, b in pairwise(play) if a in known and b in known])
        taken = taken[rng.permutation(len(taken))[:MOST]]
        others = np.stack([taken[:, 0], rng.permutation(taken[:, 1]), np.zeros(len(taken), "int64")], axis=1)
        rows.append(np.concatenate([taken, others]))
    bags = np.zeros((len(known), 26), "int64")
    for word, place in known.items():
        letters = sorted({ord(letter) - ord("a") + 1 for letter in word})
        bags[place, : len(letters)] = letters
    return Pairs(*rows, len(known), len(known), bags, "shakespeare in place of movielens")


def dataset(pairs: Pairs, rows: np.ndarray, model: str) -> ht.data.ArrayDataset:
    """User and item, or how often both occur, their ids and the item's bag; then the target, but for two towers."""
    user, item, taken = rows.T
    if model == "two_towers":
        return ht.data.ArrayDataset(user, item, names=("user", "item"))
    if model == "ncf":
        return ht.data.ArrayDataset(user, item, taken.astype("float32"), names=("user", "item", "t"))
    used = [np.bincount(pairs.train[:, k], minlength=n)[rows[:, k]] for k, n in ((0, pairs.users), (1, pairs.items))]
    x, ids = np.log1p(np.stack(used, axis=1)).astype("float32"), np.stack([user, pairs.users + item], axis=1)
    names = ("x", "ids", "bag", "t")
    return ht.data.ArrayDataset(x, ids, pairs.bags[item], taken.astype("float32"), names=names)


def built(model: str, pairs: Pairs, fed: list[ht.Node]) -> ht.Node:
    """The logits of a model."""
    if model == "deepfm":
        x, ids, bag = fed
        return clicks.deepfm(x, ids, pairs.users + pairs.items, bags=[(bag, int(pairs.bags.max()) + 1)])
    return getattr(clicks, model)(*fed, pairs.users, pairs.items)


def found_first(executor: ht.Executor, batches: ht.data.DataLoader) -> str:
    """How often a user's item is the first, and one of the first ten, of all items of a batch."""
    places = []
    for user, item in batches:
        scores = executor.run("eval", {"user": user, "item": item})[1]
        places.append((scores > np.diag(scores)[:, None]).sum(axis=1))
    place = np.concatenate(places)
    return f"test item first of {ASKED} in {np.mean(place < 1):.1%}, among ten in {np.mean(place < 10):.1%}"


def main() -> None:
    script = Script(__doc__, epochs=10, batch_size=256, learning_rate=2e-3)
    script.add("--model", choices=["ncf", "two_towers", "deepfm"], default="ncf", help="(%(default)s)")
    script.add(
        "--data", metavar="FOLDER", help="MovieLens: u.data, u.user, u.item, or ratings.dat, users.dat, movies.dat"
    )
    servers = ServerOptions(script, {"*embedding*": 1.0}, cached_rate=0.3)
    options = script.parse()
    kept = "HETU_DATA" in os.environ and Path(os.environ["HETU_DATA"], "movielens").exists()
    pairs = films(options.data) if options.data or kept else words(options.seed)
    model, towers = options.model, options.model == "two_towers"
    train, test = (rows[rows[:, 2] == 1] if towers else rows for rows in pairs[:2])
    train = np.random.default_rng(options.seed).permutation(train)[: options.limit]
    batches = script.batches(dataset(pairs, train, model), drop_last=True)

    first = next(iter(batches))
    names = {"deepfm": ("x", "ids", "bag", "t"), "two_towers": ("user", "item")}.get(model, ("user", "item", "t"))
    inputs = [ht.placeholder(name, (None, *part.shape[1:]), part.dtype.name) for name, part in zip(names, first)]
    y = built(model, pairs, inputs[: 2 if towers else -1])
    if towers:  # of all items of a batch a user's own is the right one, on each worker where it takes a part
        loss = ht.mean(ht.softmax_cross_entropy(y, ht.arange(y.shape[0], dtype="int64")))
    else:
        loss = ht.mean(ht.binary_cross_entropy_with_logits(y, inputs[-1]))
    graphs = {"train": [loss, servers.updates(loss, batches)], "eval": [loss, y]}
    executor = script.executor(graphs, servers.strategy(servers.cache(epoch=len(batches))))
    validate = "eval", ht.data.DataLoader(dataset(pairs, test, model), ASKED, drop_last=True)
    metrics = {} if towers else {"auc": ht.metrics.AUC()}
    history = script.fit(executor, batches, inputs=inputs, validate=validate, metrics=metrics)
    reached = found_first(executor, validate[1]) if towers else f"test AUC {history['val_auc'][-1]:.4f}"
    script.say(f"{model} on {pairs.name}: {reached}")


if __name__ == "__main__":
    main()

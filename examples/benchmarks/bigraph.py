"""Rows of a table placed beside the workers that look them up: `python examples/benchmarks/bigraph.py [--train]`.

Samples have fields of categories. Each sample is of some kind, and a field has with a chance, the locality, an id of
that kind, or else any; within a kind ids follow Zipf's law. Samples and rows are divided into 4 parts at random, by
HET-GMP's moves, with copies of 1 % of the rows at each part besides, and by METIS (`pip install "hetu-dl[metis]"`): the
table has the share of the distinct rows of a batch that lie with another part. `--large` takes a million samples of 26
fields. `--train` has 4 workers, each with a server beside it, learn to predict clicks, and counts the bytes at the
sockets of each worker to each server, which say as much as on four hosts: nothing goes through shared memory. Ignored
on purpose: time, but for that of dividing.

Remote rows, as shares of those of a random division, and seconds on two cores that others used too:

    locality   gmp   + copies   metis   + copies   seconds of gmp
    0.5        69%        64%     63%        57%              0.4
    0.8        34%        29%     34%        29%              0.3
    0.95       11%         9%     11%         8%              0.3

`--train --bounds 0 10 100`: MB between workers and the servers beside others, and the AUC on 20,000 samples:

    locality   random        gmp           bounds 0      bounds 10     bounds 100
    0.5        257   .8517   176   .8519   183   .8519   172   .8518   169   .8509
    0.8        257   .8465    70   .8463    73   .8463    64   .8462    62   .8450
    0.95       257   .8457    22   .8459    25   .8459    23   .8456    22   .8422

A copy saves its row, but not the question whether it is fresh: rows that all workers update in each step save little.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

import numpy as np
from tqdm import tqdm

import hetu as ht
from hetu.data import ArrayDataset, DataLoader
from hetu.dist import Comm, DataParallel, run_ranks
from hetu.ps import BigraphPartition, Cache, Client, Options, ServerProcess, partition_bigraph
from hetu.strategies import Connected, Hybrid

PARTS, COLS, TOKEN = 4, 16, "token"


def samples(count: int, fields: int, rows: int, kinds: int, locality: float, seed: int = 0) -> np.ndarray:
    """Ids (count, fields); each field has a range of its own, of which each kind has an equal share."""
    rng, each = np.random.default_rng(seed), rows // fields // kinds
    odds = np.cumsum(1 / np.arange(1.0, each + 1))
    kind, columns = rng.integers(0, kinds, count), list[np.ndarray]()
    for field in range(fields):
        names = np.random.default_rng([field, 1]).permutation(each * kinds)  # so that neighbors are not of one kind
        taken = np.where(rng.random(count) < locality, kind, rng.integers(0, kinds, count))
        columns.append(names[taken * each + np.searchsorted(odds, rng.random(count) * odds[-1])] + field * each * kinds)
    return np.stack(columns, axis=1)


def divisions(ids: np.ndarray, rows: int, parts: int, batch_size: int) -> dict[str, tuple[BigraphPartition, float]]:
    """The partition by each method that is there, and the seconds that it took."""
    made = dict[str, tuple[BigraphPartition, float]]()
    for method in ("random", "gmp", "metis"):
        began = time.perf_counter()
        with contextlib.suppress(ht.errors.ArgumentError):
            found = partition_bigraph(ids, parts, rows=rows, batch_size=batch_size, method=method)
            made[method] = found, time.perf_counter() - began
    return made


def compare(large: bool) -> None:
    """The table of shares."""
    count, fields, rows, kinds, parts, batch = (
        (1_000_000, 26, 1_040_000, 64, 8, 1024) if large else (20_000, 8, 8000, 16, PARTS, 256)
    )
    print("locality  method  remote  + copies  of random  samples   rows  rounds  seconds")
    for locality in (0.8,) if large else (0.5, 0.8, 0.95):
        made = divisions(samples(count, fields, rows, kinds, locality), rows, parts, batch)
        base = made["random"][0].remote(copies=False)
        for method, (found, seconds) in made.items():
            plain, copied, (data, placed) = found.remote(copies=False), found.remote(), found.imbalance
            assert all(b < a for a, b in zip(found.costs, found.costs[1:]))
            print(
                f"{locality:>8}  {method:<6}  {plain:>6.1%}  {copied:>8.1%}  {copied / base:>9.1%}  {data:>7.3f}"
                f"  {placed:>5.3f}  {len(found.costs) - 1:>6}  {seconds:>7.2f}",
                flush=True,
            )


# -- training ------------------------------------------------------------------------------------------------------


def clicks(ids: np.ndarray, rows: int, seed: int) -> np.ndarray:
    """Whether each sample is clicked: by what its ids are worth, and by chance."""
    worth = np.random.default_rng(0).standard_normal(rows)[ids].sum(axis=1)
    return (np.random.default_rng(seed).random(len(ids)) < 1 / (1 + np.exp(-worth))).astype("float32")


def learn(
    train: ArrayDataset, test: ArrayDataset, rows: int, division: np.ndarray, epochs: int, batch: int, **served: Any
) -> tuple[float, np.ndarray]:
    """The AUC on `test`, and the bytes between each worker and each server, of ranks that reduce dense gradients."""

    def work(comm: Comm) -> tuple[float, list[int]]:
        with Client(addresses, comm.rank, TOKEN, shared=False) as client:
            ids, clicked = (
                ht.placeholder("ids", (None, train.arrays[0].shape[1]), "int64"),
                ht.placeholder("y", (None,)),
            )
            vectors = ht.flatten(ht.nn.Embedding(rows, COLS, name="table")(ids), 1)
            hidden = ht.nn.Linear(vectors.shape[1], 32, activation=ht.relu)(vectors)
            y = ht.squeeze(ht.nn.Linear(32, 1)(hidden), 1)
            loss = ht.mean(ht.binary_cross_entropy_with_logits(y, clicked))
            graphs = {"train": [loss, ht.optim.SGD(0.5).minimize(loss)], "eval": [y]}
            strategy = Hybrid(DataParallel(local_feeds=True), served="*table*", **served)
            executor = ht.Executor(graphs, strategy=strategy, comm=Connected(comm, client))
            shard = comm.rank, comm.world_size
            batches = DataLoader(train, batch * PARTS, shuffle=True, drop_last=True, division=division, shard=shard)
            before = client.traffic()
            for _ in range(epochs):
                for some, said in batches:
                    executor.run("train", {ids: some, clicked: said})
            moved = [sum(after) - sum(then) for after, then in zip(client.traffic(), before)]
            executor.placement.comm.rows.flush()
            auc = ht.metrics.AUC()
            for some, said in DataLoader(test, 1000):  # each rank feeds its part, and gets the answers for all
                auc.update(executor.run("eval", {ids: np.split(some, PARTS)[comm.rank]})[0], said)
            return auc.result(), moved

    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(ServerProcess(Options(PARTS, TOKEN))).address for _ in range(PARTS)]
        found = run_ranks(PARTS, work, deadline=600.0)
    return found[0][0], np.array([moved for _, moved in found])


def train(locality: float, epochs: int, bounds: list[int]) -> None:
    """Four workers, whose rows are dealt in turn or placed, with and without copies."""
    rows, batch = 8000, 256
    ids = samples(60_000, 8, rows, 16, locality)
    data = ArrayDataset(ids, clicks(ids, rows, 1))
    learned, tested = (ArrayDataset(*data[part]) for part in (slice(0, 40_000), slice(40_000, None)))
    made = {m: partition_bigraph(ids[:40_000], PARTS, rows=rows, batch_size=batch, method=m) for m in ("random", "gmp")}
    runs: list[tuple[str, str, Cache | None]] = [("random", "", None), ("gmp", "", None)]
    runs += [
        ("gmp", f"copies, bound {bound}", Cache("replicas", 0.01, bound, bound, inter_bound=bound)) for bound in bounds
    ]
    print("rows    copies              MB between workers and other servers   all MB  of random  test AUC")
    base = 0.0
    for method, copies, cache in tqdm(runs, leave=False):
        found = made[method]
        auc, moved = learn(learned, tested, rows, found.samples, epochs, batch, placed=found.placed, cache=cache)
        far = float(moved.sum() - np.trace(moved))
        base = base or far
        tqdm.write(
            f"{method:<6}  {copies:<18}  {far / 1e6:>38.1f}  {moved.sum() / 1e6:>7.1f}  {far / base:>9.1%}  {auc:>8.4f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Rows of a table placed beside the workers that look them up.")
    parser.add_argument("--train", action="store_true", help="train 4 workers beside 4 servers, and count bytes")
    parser.add_argument("--large", action="store_true", help="divide a million samples of 26 fields into 8 parts")
    parser.add_argument("--locality", type=float, default=0.8, help="of --train (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=12, help="of --train (default: %(default)s)")
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 10], help="of copies (default: 0 10)")
    args = parser.parse_args()
    if args.train:
        train(args.locality, args.epochs, args.bounds)
    else:
        compare(args.large)


if __name__ == "__main__":
    main()

"""Samples and rows of tables divided together, so that few rows that a worker looks up lie with another.

Samples and the rows that they look up are the two sides of a graph. Both are divided into parts, one for each worker
and the server beside it: in turn, rows move to where most of their samples are, and samples to where most of their rows
are. What counts is not an edge but a fetch: of all uses of a row in one batch only the first costs. Rows that are
wanted elsewhere too are copied there. X. Miao et al., "HET-GMP: A Graph-based System Approach to Scaling Large
Embedding Model Training", SIGMOD 2022: expected fetches, greedy moves, and copies by priority, as in the authors' code.

Here samples move in blocks: all of a block see the same counts, so that NumPy does the work. Parts have one number of
samples, within one; where there is no room for all, those that gain most move. A round that does not lower the expected
cost is undone. METIS (the extra `hetu-dl[metis]`) cuts the same graph by edges, and better where samples of a kind have
less in common. It knows no costs, and balances the sum of samples and rows, so each alone may be out of balance.
Left out: a term for the load of a server, and graphs that do not fit in memory. A million samples of 26 fields and as
many rows in 8 parts take a processor half a minute, 7 rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike

from ...core.errors import ArgumentError, ShapeError, ValueRangeError
from ...look.columns import in_columns
from ...ranges import AtLeast1, Count, Fraction, OneOf, Range, Seed, unmasked
from .placed import Placed

ROUNDS, BLOCKS = 50, 32  # at most; of samples in a round: more see newer counts, fewer take less time
SETTLED = 1e-3  # a round that lowers the cost by less is the last
MOST_ROWS = 1 << 31
METHODS = ("gmp", "metis", "random")
DivisionMethod = Annotated[str, OneOf(*METHODS)]


@dataclass(frozen=True, eq=False)
class BigraphPartition:
    """Where samples and rows lie: `samples` int (n,) the part of each sample, `placed` that of each row, and copies.

    `costs` are the expected fetches of an epoch between parts, each weighted by what it costs, at the start and after
    each round. `print` shows it as a table.
    """

    ids: np.ndarray
    samples: np.ndarray
    placed: Placed
    costs: Sequence[float]
    batch_size: int
    method: str

    @property
    def parts(self) -> int:
        return self.placed.parts

    def samples_of(self, part: Count) -> np.ndarray:
        """The samples of one part, increasing; of a worker: `ArrayDataset(*train[partition.samples_of(rank)])`."""
        return np.flatnonzero(self.samples == part)

    @property
    def imbalance(self) -> tuple[float, float]:
        """The largest part by the average: of samples, and of rows."""
        sizes = np.bincount(self.samples), np.diff(self.placed.edges)
        data, rows = (float(size.max() * self.parts / size.sum()) for size in sizes)
        return data, rows

    def fetches(self, *, copies: bool = True, seed: Seed = 0) -> np.ndarray:
        """The distinct rows that batches of each part look up in an epoch, by who owns them: int (parts, parts).

        Batches are of `batch_size` samples, in an order drawn from `seed`. With `copies` those that a part keeps are
        its own.
        """
        found, rng = np.zeros((self.parts, self.parts), np.int64), np.random.default_rng(seed)
        for part in range(self.parts):
            owners, order = self.placed.owners, rng.permutation(self.samples_of(part))
            if copies:
                owners = owners.copy()
                owners[self.placed.kept_by(part)] = part
            for first in range(0, len(order), self.batch_size):
                wanted = np.unique(self.ids[order[first : first + self.batch_size]])
                found[part] += np.bincount(owners[wanted], minlength=self.parts)
        return found

    def remote(self, *, copies: bool = True, seed: Seed = 0) -> float:
        """The share of these fetches that goes to another part."""
        found = self.fetches(copies=copies, seed=seed)
        return float(1 - np.trace(found) / max(1, found.sum()))

    def __str__(self) -> str:
        (data, rows), found = self.imbalance, self.fetches()
        lines = [
            f"{len(self.samples):,} samples, {len(self.placed.owners):,} rows in {self.parts} parts by {self.method}",
            f"fetched from other parts  {self.remote():.1%}, without copies {self.remote(copies=False):.1%}",
            f"largest part by average   samples {data:.3f}, rows {rows:.3f}",
            f"expected cost             {' > '.join(f'{cost:,.0f}' for cost in self.costs)}",
        ]
        table: list[tuple[str, ...]] = [("part", "samples", "rows", "copies", "fetched at home")]
        for part, count in enumerate(np.diff(self.placed.edges)):
            sizes = len(self.samples_of(part)), count, len(self.placed.kept_by(part))
            own = found[part, part] / max(1, found[part].sum())
            table.append((str(part), *(f"{size:,}" for size in sizes), f"{own:.1%}"))
        return "\n".join([*lines, *in_columns(table, range(5))])


def partition_bigraph(
    ids: ArrayLike,
    parts: AtLeast1,
    *,
    rows: Count = 0,
    batch_size: AtLeast1 = 256,
    replicas: Fraction = 0.01,
    method: DivisionMethod = "gmp",
    imbalance: Annotated[float, Range(1, endless=True)] = 1.05,
    costs: ArrayLike | None = None,
    seed: Seed = 0,
) -> BigraphPartition:
    """Divide samples, and the rows that they look up, among `parts` workers and the servers beside them.

    Args:
        ids: integers (samples, fields): the rows of one table that each sample looks up. Where fields have tables of
            their own, add to their ids the rows of those before; `partition.placed.of(slice(a, b))` is one table's.
        rows: of the table; by default up to the largest id.
        batch_size: samples of a step of one worker.
        replicas: of how many rows each part keeps copies, as a share of all.
        method: "gmp", "metis" (of the extra hetu-dl[metis]), or "random", with which to compare.
        imbalance: rows of the largest part by the average, as a limit of "gmp".
        costs: (parts, parts), what part k pays for a row of part j; by default 1 for any other than its own. Between
            nodes of two parts each, say 0.1 inside and 1 outside.
        seed: of the start, and of the order of moves.

    ArgumentError, ShapeError or ValueRangeError for ids that are no such integers, more parts than samples or rows, and
    costs of another shape or below 0; ArgumentError without METIS where it is asked for.

    >>> kind, number = np.arange(400) % 8, np.arange(400) // 8  # eight kinds, which share no row
    >>> ids = np.stack([10 * kind + number % 5, 10 * kind + 5 + number % 3], axis=1)
    >>> by = {method: partition_bigraph(ids, parts=2, batch_size=10, method=method) for method in ("random", "gmp")}
    >>> {method: round(found.remote(), 2) for method, found in by.items()}, by["gmp"].imbalance[0]
    ({'random': 0.47, 'gmp': 0.04}, 1.0)
    """
    ids, rows, price = _checked(ids, parts, rows, costs)
    graph, rng = _Bigraph(ids, rows, parts, batch_size, price), np.random.default_rng(seed)
    at = graph.counted(*(rng.permutation(np.arange(size, dtype=np.int32) % parts) for size in (len(ids), rows)))
    spent, most = [graph.cost(*at)], max(-(-rows // parts), int(min(imbalance, parts) * rows / parts))
    for _ in range({"gmp": ROUNDS if parts > 1 else 0, "metis": 1, "random": 0}[method]):
        new = graph.counted(*_by_metis(ids, rows, parts, seed)) if method == "metis" else graph.moved(*at, most, rng)
        cost = graph.cost(*new)
        if method == "gmp" and cost >= spent[-1]:
            break
        at = new
        spent.append(cost)
        if cost > (1 - SETTLED) * spent[-2]:
            break
    samples, owners, counts = at
    kept = graph.copies(owners, counts, round(replicas * rows))
    return BigraphPartition(ids, samples, Placed(owners, kept, parts), spent, batch_size, method)


Counted = tuple[np.ndarray, np.ndarray, np.ndarray]  # the part of each sample, of each row, and `counts`


class _Bigraph:
    """The graph, and tables of what a use costs: `soft[x]` fetches in an epoch of a part that uses a row x times.

    A part has n / parts samples, so a row that x of them use is in a batch of b with chance 1 - (1 - x parts / n)^b, as
    if each sample were drawn anew, and an epoch has n / parts / b batches.
    """

    def __init__(self, ids: np.ndarray, rows: int, parts: int, batch_size: int, price: np.ndarray) -> None:
        self.ids, self.parts, self.price = ids, parts, price
        self.degree = np.bincount(ids.reshape(-1), minlength=rows)
        each = len(ids) / parts
        chance = np.minimum(1.0, np.arange(int(self.degree.max()) + 2) / each)
        self.soft = ((1 - (1 - chance) ** batch_size) * max(1.0, each / batch_size)).astype(np.float32)
        self.step = np.diff(self.soft)  # what one use more costs

    def counted(self, samples: np.ndarray, owners: np.ndarray) -> Counted:
        """These, and how many samples of each part use a row: int32 (rows, parts)."""
        counts = np.zeros((len(self.degree), self.parts), np.int32)
        np.add.at(counts.reshape(-1), self.ids * self.parts + samples[:, None], 1)
        return samples, owners, counts

    def cost(self, samples: np.ndarray, owners: np.ndarray, counts: np.ndarray) -> float:
        return float((self.soft[counts] * self.price.T[owners]).sum(dtype=np.float64))

    def moved(
        self, samples: np.ndarray, owners: np.ndarray, counts: np.ndarray, most: int, rng: np.random.Generator
    ) -> Counted:
        """After rows have moved, at most so many to a part, and then samples."""
        samples, counts = samples.copy(), counts.copy()
        owners = _assigned(self.soft[counts] @ self.price, np.full(self.parts, most))
        price = self.price.T[owners]  # (rows, parts): what each part pays for a row
        more, flat = self.step[counts] * price, counts.reshape(-1)  # what one sample more of each part would pay
        for block in np.array_split(rng.permutation(len(samples)), min(BLOCKS, len(samples))):
            ids, own = self.ids[block], samples[block]
            at = ids * self.parts + own[:, None]
            costs = more[ids].sum(axis=1)
            stays = self.step[flat[at] - 1] * price.reshape(-1)[at]  # it is counted there already
            costs[np.arange(len(block)), own] = stays.sum(axis=1)
            new = _assigned(costs, np.bincount(own, minlength=self.parts))  # so that parts keep their sizes
            gone = np.flatnonzero(new != own)
            np.subtract.at(flat, at[gone], 1)
            np.add.at(flat, ids[gone] * self.parts + new[gone][:, None], 1)
            samples[block], changed = new, ids[gone].reshape(-1)
            more[changed] = self.step[counts[changed]] * price[changed]
        return samples, owners, counts

    def copies(self, owners: np.ndarray, counts: np.ndarray, most: int) -> list[np.ndarray]:
        """Of each part the rows of others that it keeps: those that it fetches most, and others seldom change."""
        often = 1 / np.maximum(1, self.degree)[:, None] + 1 / np.maximum(1, counts)
        worth = self.price.T[owners] * self.soft[counts] ** 2 * often
        worth[np.arange(len(owners)), owners] = 0
        best = np.argsort(-worth, axis=0, kind="stable")[:most].T
        return [np.sort(rows[worth[rows, part] > 0]) for part, rows in enumerate(best)] if most else []


def _assigned(costs: np.ndarray, room: np.ndarray) -> np.ndarray:
    """The cheapest part for each item, of costs (items, parts), where there is room for so many.

    Where there is not, those for whom the second best would cost the most more come first.
    """
    made, left = np.empty(len(costs), np.int32), np.arange(len(costs))
    costs, room = costs.copy(), room.copy()
    while len(left):
        costs[:, room <= 0] = np.inf
        mine = costs[left]
        best, (cheapest, second) = mine.argmin(axis=1), np.partition(mine, 1, axis=1)[:, :2].T
        order = np.lexsort((cheapest - second, best))  # by part, the greatest loss first
        best = best[order]
        fits = np.arange(len(left)) - np.searchsorted(best, best) < room[best]
        made[left[order[fits]]] = best[fits]
        room -= np.bincount(best[fits], minlength=len(room))
        left = np.delete(left, order[fits])
    return made


def _by_metis(ids: np.ndarray, rows: int, parts: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The parts of samples and of rows as METIS cuts the graph that has a node for each."""
    try:
        import pymetis
    except ImportError:
        fix = 'python -m pip install "hetu-dl[metis]", or use method="gmp"'
        raise ArgumentError('method="metis" without METIS', fix=fix) from None
    count, fields = ids.shape
    users = np.argsort(ids.reshape(-1), kind="stable") // fields  # of row 0, then of row 1, ...
    degrees = np.concatenate([np.full(count, fields), np.bincount(ids.reshape(-1), minlength=rows)])
    ends, neighbors = np.cumsum(degrees), np.concatenate([(ids + count).reshape(-1), users])
    graph = pymetis.CSRAdjacency(np.concatenate([[0], ends]), neighbors)
    _, found = pymetis.part_graph(parts, graph, options=pymetis.Options(seed=seed % (1 << 31)))
    made = np.array(found, np.int32)
    return made[:count], made[count:]


def _checked(ids: ArrayLike, parts: int, rows: int, costs: ArrayLike | None) -> tuple[np.ndarray, int, np.ndarray]:
    """Ids int64 (samples, fields), the number of rows, and what a fetch costs, float32 (parts, parts)."""
    found = unmasked(ids, "ids of samples")
    if found.ndim != 2 or found.dtype.kind not in "iu" or not found.size:
        fix = "give the row of each field of each sample, as integers (samples, fields)"
        raise ShapeError(f"ids are {found.dtype} of shape {found.shape}", fix=fix)
    rows = rows or int(found.max()) + 1
    if not 0 <= found.min() <= found.max() < rows <= MOST_ROWS:
        fix = f"count rows from 0, at most {MOST_ROWS}: _, ids = np.unique(ids, return_inverse=True) counts anew"
        raise ValueRangeError(f"ids {found.min()}..{found.max()} of a table of {rows} rows", fix=fix)
    if not 1 <= parts <= min(len(found), rows):
        fix = "make from 1 part up to as many as there are samples, and rows"
        raise ArgumentError(f"{parts} parts of {len(found)} samples and {rows} rows", fix=fix)
    price = unmasked(1 - np.eye(parts) if costs is None else costs, "costs", np.float32)
    if price.shape != (parts, parts):
        raise ShapeError(f"costs {price.shape} of {parts} parts", fix="give a number for each part and each owner")
    if not (price >= 0).all() or not np.isfinite(price).all():
        raise ValueRangeError(f"costs from {price.min()} to {price.max()}", fix="give numbers from 0 on")
    return found.astype(np.int64, copy=False), rows, price

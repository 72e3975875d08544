"""DataLoader: the batches of an epoch in a repeatable order, gathered ahead by a background thread.

The order of epoch e depends only on (seed, e), so three small integers are the whole state, and a resumed run sees
exactly the batches of an unbroken one. One thread is enough to hide the gathering of rows, because NumPy releases the
interpreter's lock while it copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..answers import AnswersCalls
from ..core.errors import DataError
from ..ranges import Count, Seed
from .augment import Transform, through
from .dataset import Batch, Dataset

PLACE = "epoch", "cursor", "batches", "seed"  # what a position is made of
JOB: dict[str, Callable[[], tuple[int, int]]] = {}  # "shard": this rank and how many there are; entered by the package


class Resumable(AnswersCalls):
    """A loader whose batches follow from a seed, the number of the epoch and their place in it: its position."""

    def __init__(self, seed: Seed) -> None:
        self._seed, self._epoch, self._cursor, self._start = seed, 0, 0, 0

    def __len__(self) -> int:
        raise NotImplementedError

    def state(self) -> dict[str, int]:
        """The position after the last batch handed out: four integers to save with a checkpoint."""
        over = self._cursor == len(self)  # the last batch is out, but its loop has not asked for more
        epoch, cursor = (self._epoch + 1, 0) if over else (self._epoch, self._cursor)
        return {"epoch": epoch, "cursor": cursor, "batches": len(self), "seed": self._seed}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Continue from `state`: the next loop hands out the remaining batches of its epoch.

        Raises DataError for a state that this loader cannot have written; within an epoch batches are of one size.

        >>> from hetu.data import ArrayDataset, DataLoader
        >>> loader = DataLoader(ArrayDataset(range(6)), batch_size=2, shuffle=True)
        >>> loader.load_state({"epoch": 4, "cursor": 2, "batches": 3, "seed": 7})
        >>> len(list(loader)), loader.state()
        (1, {'epoch': 5, 'cursor': 0, 'batches': 3, 'seed': 7})
        """
        if not isinstance(state, Mapping) or set(state) != {*PLACE}:
            found = ", ".join(map(str, state)) if isinstance(state, Mapping) else repr(state)
            raise DataError(
                f"a loader's state has {', '.join(PLACE)}; got {found or 'nothing'}", fix="pass what state() returned"
            )
        numbers = [state[key] for key in PLACE]
        epoch, cursor, batches, seed = numbers
        known = all(type(number) is int and number >= 0 for number in numbers)
        if not known or cursor >= len(self) or (cursor and batches != len(self)):
            said = ", ".join(f"{key} {state[key]!r}" for key in PLACE)
            raise DataError(
                f"state {said} does not fit {len(self)} batches per epoch",
                fix="load it into a loader of the same data and batch size as the one that wrote it",
            )
        self._seed, self._epoch, self._cursor, self._start = seed, epoch, cursor, cursor

    def __iter__(self) -> Iterator[Batch]:
        """One epoch from its start, or from where `load_state` placed the cursor.

        Where the loop is left early, the next one begins the same epoch anew.
        """
        self._cursor, self._start = self._start, 0
        for batch in self._batches(range(self._cursor, len(self))):
            self._cursor += 1
            yield batch
        self._epoch, self._cursor = self._epoch + 1, 0

    def _batches(self, steps: range) -> Iterator[Batch]:
        """The batches of these places in the epoch."""
        raise NotImplementedError

    def _shuffled(self, rows: int) -> NDArray[np.int64]:
        """The order of rows in this epoch."""
        return np.random.default_rng((self._seed, self._epoch)).permutation(rows)


class DataLoader(Resumable):
    """Iterate over a data set in batches; every `for` loop is one epoch.

    Args:
        dataset: anything with a length whose `dataset[rows]` is a tuple of arrays.
        batch_size: rows of one step over all shards together, the batch that the model is written for.
        shuffle: a new order each epoch, drawn from `seed` and the epoch's number.
        drop_last: leave out the last batch if it is smaller.
        seed: of the order.
        shard: `(rank, world_size)`: this loader hands out its rank's contiguous part of each batch. The parts of all
            ranks, in rank order, are the batch; sizes differ by at most one row, and all ranks get the same number of
            batches. If the last batch has fewer rows than there are ranks, rows from the start of the order fill it.
            True: of this rank among those of its job, in parts of one size, as `local_feeds=True` of a strategy wants
            them; `batch_size` is a multiple of the number of ranks, and the last batch is filled up to one.
        prefetch: batches gathered ahead in the background; 0 gathers in the caller's thread, for a data set that gives
            out the same arrays each time, filled anew.
        division: the part of each row, from 0, one part for each rank, as that of `hetu.ps.partition_bigraph`. Then a
            batch has as many rows of each part, in the order of parts, so a shard hands out rows of one. A part that
            is shorter than the longest begins anew; with drop_last an epoch is as long as the shortest.
        transform: what is done to each batch, such as `[RandomCrop(4), RandomFlip()]`, in turn: functions
            `(batch, draws) -> batch`, whose random numbers follow from seed, epoch and sample (see `Draws`).

    Raises DataError for an empty data set, a batch larger than the data, or a shard that does not exist. An error
    raised while a batch is gathered reaches the loop that asked for it.

    >>> from hetu.data import ArrayDataset, DataLoader
    >>> loader = DataLoader(ArrayDataset(range(5)), batch_size=2)
    >>> [x.tolist() for (x,) in loader]
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: Seed = 0,
        shard: tuple[int, int] | bool = (0, 1),
        division: ArrayLike | None = None,
        prefetch: Count = 2,
        transform: Transform | Sequence[Transform] = (),
    ) -> None:
        if isinstance(dataset, list | tuple):
            raise DataError(
                f"a {type(dataset).__name__} has no rows by position", fix="pass ArrayDataset(rows, labels)"
            )
        self._alike = shard is True
        if isinstance(shard, bool):
            shard = JOB["shard"]() if shard else (0, 1)
        if self._alike and batch_size % shard[1]:
            raise DataError(
                f"a batch of {batch_size} rows does not divide among {shard[1]} ranks",
                fix=f"batch_size counts the rows of all ranks together: pass a multiple of {shard[1]}",
            )
        _check_sizes(len(dataset), batch_size, shard, seed, prefetch)
        self.parts = None if division is None else _parts(division, len(dataset), batch_size, shard[1])
        self.dataset, self.batch_size, self.shuffle, self.drop_last = dataset, batch_size, shuffle, drop_last
        if not len(self):
            said = f"no whole batch of {batch_size} rows in {len(self.parts or ())} parts, with drop_last"
            raise DataError(said, fix="the shortest part gives each batch as many rows as others: pass a smaller batch")
        self.shard, self.prefetch = shard, prefetch
        self.transform = (transform,) if callable(transform) else tuple(transform)
        if not all(map(callable, self.transform)):
            raise DataError(f"transform={transform!r:.60}", fix="pass a function (batch, draws) -> batch, or several")
        super().__init__(seed)

    def __len__(self) -> int:
        """Batches in an epoch."""
        rows = len(self.dataset)
        if self.parts is not None:
            rows = len(self.parts) * (min if self.drop_last else max)(map(len, self.parts))
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def _batches(self, steps: range) -> Iterator[Batch]:
        order = self._order()
        return self._prefetched(order, steps) if self.prefetch else (self._gather(order, k) for k in steps)

    def _order(self) -> NDArray[np.int64]:
        """The epoch's row positions."""
        rows = len(self.dataset)
        order = self._shuffled(rows) if self.shuffle else np.arange(rows)
        if self.parts is None:
            return order
        place, each = np.empty_like(order), self.batch_size // len(self.parts)
        place[order] = np.arange(rows)
        orders = [part[np.argsort(place[part])] for part in self.parts]  # each part's rows in the order of all
        return np.concatenate([np.resize(part, (len(self), each)) for part in orders], axis=1).reshape(-1)

    def _gather(self, order: NDArray[np.int64], step: int) -> Batch:
        """This shard's part of batch `step`."""
        rank, ranks = self.shard
        rows = order[step * self.batch_size : (step + 1) * self.batch_size]
        lacking = -len(rows) % ranks if self._alike else max(0, ranks - len(rows))
        if lacking:
            rows = np.concatenate([rows, order[:lacking]])
        part, longer = divmod(len(rows), ranks)  # the first `longer` ranks take one row more
        first = rank * part + min(rank, longer)
        own = rows[first : first + part + (rank < longer)]
        return through(self.dataset, self.transform, self._seed, self._epoch, own)

    def _prefetched(self, order: NDArray[np.int64], steps: range) -> Iterator[Batch]:
        """The batches of `steps`, gathered by one thread that is never more than `prefetch` batches ahead; a loop that
        is left early ends it."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="hetu-data")
        try:
            pending: deque[Future[Batch]] = deque()
            for step in steps:
                pending.append(pool.submit(self._gather, order, step))
                if len(pending) > self.prefetch:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _parts(division: ArrayLike, rows: int, batch_size: int, ranks: int) -> list[NDArray[np.int64]]:
    """The rows of each part."""
    given = np.asarray(division)
    if given.shape != (rows,) or given.dtype.kind not in "iu" or not 0 <= given.min() <= given.max() < rows:
        raise DataError(
            f"a division {given.dtype} of shape {given.shape} of {rows} rows", fix="give the part of each row, from 0"
        )
    parts = [np.flatnonzero(given == part) for part in range(int(given.max()) + 1)]
    if not all(map(len, parts)) or ranks not in (1, len(parts)) or batch_size % len(parts):
        text = f"{len(parts)} parts of {[*map(len, parts)]!r:.60} rows, for {ranks} ranks and batches of {batch_size}"
        raise DataError(text, fix="give each rank a part that has rows, and pass a multiple of them as batch_size")
    return parts


def _check_sizes(rows: int, batch_size: int, shard: tuple[int, int], seed: int, prefetch: int) -> None:
    rank, ranks = shard
    if rows == 0:
        raise DataError("a data set without rows", fix="check the file or the filter the rows came from")
    if not 1 <= batch_size <= rows:
        raise DataError(f"batch_size={batch_size} with {rows} rows", fix=f"pass a batch_size from 1 to {rows}")
    if not 0 <= rank < ranks:
        raise DataError(f"shard=({rank}, {ranks}) names no part", fix="pass (rank, world_size) with 0 <= rank < size")
    if batch_size < ranks:
        raise DataError(
            f"a batch of {batch_size} rows has no row for some of {ranks} ranks",
            fix=f"batch_size counts the rows of all ranks together: pass at least {ranks}",
        )
    if seed < 0 or prefetch < 0:
        raise DataError(f"seed={seed}, prefetch={prefetch}", fix="neither may be negative")

"""DataLoader: every row once, the same order again, equal shards, exact resumption, and a thread that ends."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import pytest

from hetu.core.errors import DataError
from hetu.data import ArrayDataset, DataLoader


def rows_of(loader: DataLoader) -> list[list[int]]:
    return [x.tolist() for (x,) in loader]


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("hetu-data")]


@pytest.mark.parametrize("prefetch", [0, 1, 5])
@pytest.mark.parametrize("rows", [6, 7])
def test_an_epoch_holds_every_row_once(rows: int, prefetch: int) -> None:
    loader = DataLoader(ArrayDataset(np.arange(rows)), 3, shuffle=True, prefetch=prefetch)
    batches = rows_of(loader)
    assert [len(b) for b in batches] == [3, 3] + [1] * (rows - 6)
    assert len(loader) == len(batches)
    assert sorted(chain(*batches)) == list(range(rows))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_has_as_many_rows_of_each_part_of_a_division(shuffle: bool) -> None:
    division = np.array([1, 0, 0, 1, 1, 0, 1, 0, 1, 1])
    whole, *parts = (
        DataLoader(ArrayDataset(np.arange(10)), 4, shuffle=shuffle, division=division, shard=shard)
        for shard in ((0, 1), (0, 2), (1, 2))
    )
    for _ in range(2):
        batches = rows_of(whole)
        assert [division[batch].tolist() for batch in batches] == [[0, 0, 1, 1]] * 3
        assert [first + second for first, second in zip(*map(rows_of, parts))] == batches
        assert sorted(row for batch in batches for row in batch[2:]) == [0, 3, 4, 6, 8, 9]
        assert {row for batch in batches for row in batch[:2]} == {1, 2, 5, 7}  # which begin anew
    short = DataLoader(ArrayDataset(np.arange(10)), 4, shuffle=shuffle, division=division, drop_last=True)
    assert len(short) == len(rows_of(short)) == 2


@pytest.mark.parametrize(
    ("division", "more", "text"),
    [
        ([0, 1], {}, r"a division int64 of shape \(2,\) of 6 rows"),
        ([0.0] * 6, {}, "a division float64"),
        ([0, 1, -1, 0, 1, 0], {}, "a division"),
        ([0, 1, 1 << 40, 0, 1, 0], {}, "a division"),
        ([0, 2, 0, 2, 0, 2], {}, r"3 parts of \[3, 0, 3\] rows"),
        ([0, 1, 2, 0, 1, 2], {}, "for 1 ranks and batches of 4"),
        ([0, 1, 0, 1, 0, 1], {"shard": (0, 4)}, "2 parts .* for 4 ranks"),
        ([0, 1, 1, 1, 1, 1], {"drop_last": True}, "no whole batch of 4 rows in 2 parts"),
    ],
)
def test_a_division_that_is_none_is_refused(division, more, text) -> None:
    with pytest.raises(DataError, match=text):
        DataLoader(ArrayDataset(np.arange(6)), 4, division=division, **more)


def test_drop_last_leaves_out_the_smaller_batch() -> None:
    loader = DataLoader(ArrayDataset(np.arange(7)), 3, drop_last=True)
    assert rows_of(loader) == [[0, 1, 2], [3, 4, 5]] and len(loader) == 2


def test_order_depends_on_seed_and_epoch_alone() -> None:
    data = ArrayDataset(np.arange(50))
    one, two = (DataLoader(data, 10, shuffle=True, seed=5) for _ in range(2))
    epochs = [rows_of(one) for _ in range(3)]
    assert epochs == [rows_of(two) for _ in range(3)]
    assert epochs[0] != epochs[1]
    assert epochs[0] != rows_of(DataLoader(data, 10, shuffle=True, seed=6))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("stop", range(1, 9))
def test_a_resumed_run_sees_the_batches_of_an_unbroken_one(stop: int, prefetch: int) -> None:
    data = ArrayDataset(np.arange(20))
    unbroken = DataLoader(data, 6, shuffle=True, seed=1)
    expected = [batch for _ in range(2) for batch in rows_of(unbroken)]

    first = DataLoader(data, 6, shuffle=True, seed=1, prefetch=prefetch)
    seen: list[list[int]] = []
    while len(seen) < stop:
        for (x,) in first:
            seen.append(x.tolist())
            if len(seen) == stop:
                state = first.state()
                break
    second = DataLoader(data, 6, shuffle=True, prefetch=prefetch)
    second.load_state(state)
    assert second.state() == state
    while len(seen) < len(expected):
        seen += rows_of(second)
    assert seen == expected
    assert second.state() == unbroken.state()


def test_a_loop_left_early_begins_the_same_epoch_anew() -> None:
    loader = DataLoader(ArrayDataset(np.arange(9)), 3, shuffle=True)
    peeked = next(iter(loader))[0].tolist()
    assert rows_of(loader)[0] == peeked
    assert loader.state()["epoch"] == 1


@pytest.mark.parametrize("rows", [16, 17, 18, 23])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shards_in_rank_order_are_the_batches(ranks: int, rows: int) -> None:
    data = ArrayDataset(np.arange(rows))
    whole = rows_of(DataLoader(data, 8, shuffle=True, seed=2))
    shards = [rows_of(DataLoader(data, 8, shuffle=True, seed=2, shard=(r, ranks))) for r in range(ranks)]
    assert {len(s) for s in shards} == {len(whole)}
    assert set(chain(*chain(*shards))) == set(range(rows))
    for step, batch in enumerate(whole):
        parts = [s[step] for s in shards]
        sizes = [len(p) for p in parts]
        assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
        assert list(chain(*parts))[: len(batch)] == batch  # a last batch below one row a rank is filled up


class Broken:
    """Fails at row 6."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, rows: np.ndarray) -> tuple[np.ndarray]:
        if 6 in rows:
            raise OSError("disk on fire")
        return (rows,)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_of_the_data_set_reaches_the_loop_at_its_batch(prefetch: int) -> None:
    seen = []
    with pytest.raises(OSError, match="disk on fire"):
        for (x,) in DataLoader(Broken(), 2, prefetch=prefetch):
            seen.append(x.tolist())
    assert seen == [[0, 1], [2, 3], [4, 5]]
    assert not loader_threads()


def test_the_background_thread_ends_with_the_loop() -> None:
    loader = DataLoader(ArrayDataset(np.arange(100)), 5)
    batches = iter(loader)
    next(batches)
    assert len(loader_threads()) == 1
    batches.close()
    assert not loader_threads()
    rows_of(loader)
    assert not loader_threads()


def test_prefetch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[int] = []

    class Pool(ThreadPoolExecutor):
        def submit(self, fn, order, step):
            submitted.append(step)
            return super().submit(fn, order, step)

    monkeypatch.setattr("hetu.data.loader.ThreadPoolExecutor", Pool)
    for step, _ in enumerate(DataLoader(ArrayDataset(np.arange(20)), 1, prefetch=3)):
        assert submitted == list(range(min(step + 4, 20)))  # the batch in hand and three more


DATA = ArrayDataset(np.arange(4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataLoader(DATA, 5), "batch_size=5 with 4 rows"),
        (lambda: DataLoader(DATA, 5, drop_last=True), "batch_size=5 with 4 rows"),
        (lambda: DataLoader(DATA, 0), "batch_size=0"),
        (lambda: DataLoader(type("Empty", (), {"__len__": lambda self: 0})(), 1), "without rows"),
        (lambda: DataLoader(DATA, 2, shard=(2, 2)), r"shard=\(2, 2\)"),
        (lambda: DataLoader(DATA, 2, shard=(0, 3)), "no row for some of 3 ranks"),
        (lambda: DataLoader(DATA, 2, seed=-1), "seed=-1"),
        (lambda: DataLoader(DATA, 2).load_state({"epoch": 0}), "epoch, cursor, batches, seed; got epoch"),
        (
            lambda: DataLoader(DATA, 2).load_state({"epoch": 0, "cursor": 2, "batches": 2, "seed": 0}),
            "2 batches per epoch",
        ),
    ],
)
def test_mistakes_are_named_with_a_fix(make, message: str) -> None:
    with pytest.raises(DataError) as caught:
        make()
    assert re.search(message, str(caught.value).splitlines()[0]) and caught.value.fix  # below is the line of this table


@pytest.mark.parametrize(("rows", "batch_size"), [(40, 5), (40, 20), (30, 10), (80, 10)])
def test_a_place_within_an_epoch_is_that_of_its_batches_alone(rows: int, batch_size: int) -> None:
    """A run taken up with batches of another size, or fewer samples, saw some twice and others never."""
    written, other = DataLoader(ArrayDataset(np.arange(40)), 10), DataLoader(ArrayDataset(np.arange(rows)), batch_size)
    batches = iter(written)
    next(batches)
    with pytest.raises(DataError, match="cursor 1, batches 4, seed 0 does not fit [0-9]+ batches(?s:.*)same data and"):
        other.load_state(written.state())
    list(batches)
    other.load_state(written.state())  # an epoch later all is new
    assert len(list(other)) == rows // batch_size

"""Tables without a bound: bytes of a row, look-ups beside a plain gather, and what eviction and increments cost.

    python examples/benchmarks/growing.py --json result.json

1. fill: rows that one server makes in a second as one worker pushes new ids, the memory of its process by the bytes of
   the rows with their optimizer state, and look-ups a second in batches by shared memory beside `numpy.take` of as
   many rows out of an array in the worker's own memory; the sides take turns.
2. evict: the same pushes of new ids into a table that is full, by the time of those into one that is not.
3. disk: look-ups by ids of Zipf's law (1.05) that were found in memory, where a share of the rows lies there and the
   others in a file, and steps a second that look rows up and train them.
4. snapshot: bytes that a snapshot writes after a thousandth of the rows has changed, by those of the first.

Ten million rows of 32 float32, made by one worker of one server, on two cores:

    rule     memory by rows   rows made/s   look-ups/s    of numpy.take
    sgd      1.29             520,000       3.1 million   12 % (11-13)
    adagrad  1.14             410,000       2.4 million    9 % (7-11)

A million rows: of the ids of Zipf's law 70 % are found in memory where half of the rows lie there, 58 % with a fifth,
46 % with a tenth. After a thousandth of the rows has changed, a snapshot writes 0.1 % of the bytes of the first.

Ignored on purpose: several workers and servers at once (`ps.py` has them), and what is learned.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from report import Row, add_arguments, report

import hetu as ht
from hetu.checkpoint import generations
from hetu.ps import UNBOUNDED, Client, Growth, Options, Parameter, ServerProcess

TOKEN, COLS, AT_ONCE = "benchmark", 32, 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, PARTS, rounds=30)
    parser.add_argument("--rows", type=float, default=1e7, help="rows of the table (default: %(default)s)")
    report(parser.parse_args(), PARTS)


@contextmanager
def table(rows: int, rule: str, share: float = 1.0, **options: Any) -> Iterator[tuple[Client, Parameter, int]]:
    """A worker, its table with room for so many rows, of which a share is in memory, and the process of its server."""
    width = 4 * COLS * Parameter((1,), rule=rule).arrays
    cold = int(rows * (1 - share))
    beside = Growth(1, disk=cold).beside
    growth = Growth(rows * beside + (rows - cold) * width, disk=cold * width)
    parameter = Parameter((UNBOUNDED, COLS), sparse=True, rule=rule, reduce="sum", grows=growth)
    server = ServerProcess(Options(1, TOKEN, consistency="asp", **options))
    with server, Client([server.address], 0, TOKEN) as client:
        client.create({"t": parameter}, {"t": ht.init.normal(0.1)})
        yield client, parameter, server.process.pid


def push(client: Client, ids: np.ndarray) -> float:
    """The seconds of a step that trains these rows."""
    rows, begin = np.ones((len(ids), COLS), "f4"), time.perf_counter()
    client.push_rows("t", ids, rows).wait()
    client.clock().wait()
    return time.perf_counter() - begin


def memory_of(pid: int) -> int:
    """Bytes that a process has for itself, where that can be seen (Linux), else 0."""
    told = Path(f"/proc/{pid}/smaps_rollup")
    lines = told.read_text().splitlines() if told.exists() else []
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss_Anon"))


def fill(arguments: argparse.Namespace) -> list[Row]:
    found, count = [], int(arguments.rows)
    ids = np.random.default_rng(0).integers(0, UNBOUNDED, count)
    for rule in ("sgd", "adagrad"):
        with table(count, rule) as (client, parameter, pid):
            seconds = sum(push(client, ids[first : first + AT_ONCE]) for first in range(0, count, AT_ONCE))
            memory = memory_of(pid) / (count * 4 * COLS * parameter.arrays)
            served, plain = look_ups(client, ids, arguments.rounds)
        ratios = [b / a for a, b in zip(served, plain)]
        rates = {"look-ups/s": AT_ONCE / statistics.median(served), "of take": statistics.quantiles(ratios, n=4)}
        found.append({"rule": rule, "rows": count, "made/s": count / seconds, "memory by rows": memory, **rates})
    return found


def look_ups(client: Client, ids: np.ndarray, rounds: int) -> tuple[list[float], list[float]]:
    """The seconds of look-ups of a batch by the server, and of a gather, in turn."""
    rng, array, out = np.random.default_rng(1), np.ones((len(ids), COLS), "f4"), np.empty((AT_ONCE, COLS), "f4")
    served, plain = list[float](), list[float]()
    for _ in range(rounds):
        at = rng.integers(0, len(ids), AT_ONCE)
        begin = time.perf_counter()
        client.pull_rows("t", ids[at], out).wait()
        middle = time.perf_counter()
        np.take(array, at, axis=0, out=out, mode="clip")
        served.append(middle - begin)
        plain.append(time.perf_counter() - middle)
    return served, plain


def evict(arguments: argparse.Namespace) -> list[Row]:
    count = max(10 * AT_ONCE, int(arguments.rows) // 10)
    batches = np.random.default_rng(2).integers(0, UNBOUNDED, (2, count // AT_ONCE, AT_ONCE))
    with table(count, "adagrad") as (client, _, _):
        into_room, full = (sum(push(client, ids) for ids in half) for half in batches)
        grown = client.status()[0]["largest"][0]["grown"]
    return [{"rows": count, "made/s": count / into_room, "made/s when full": count / full, "gone": grown["evicted"]}]


def disk(arguments: argparse.Namespace) -> list[Row]:
    """Steps that look up and train ids of Zipf's law."""
    found, count, rng = [], max(10 * AT_ONCE, int(arguments.rows) // 10), np.random.default_rng(4)
    weights = np.cumsum(1 / np.arange(1, count + 1) ** 1.05)
    batches = [np.searchsorted(weights, rng.random(AT_ONCE) * weights[-1]) for _ in range(40)]
    names = rng.permutation(count)
    for share in (1.0, 0.5, 0.2, 0.1):
        with table(count, "adagrad", share) as (client, _, pid):
            for first in range(0, count, AT_ONCE):
                push(client, names[first : first + AT_ONCE])
            seconds = list[float]()
            for ids in batches:
                begin = time.perf_counter()
                client.pull_rows("t", names[ids]).wait()
                push(client, names[ids])
                seconds.append(time.perf_counter() - begin)
            grown = client.status()[0]["largest"][0]["grown"]
            rates = {"found in memory": 1 - grown["on_disk"] / grown["hits"], "steps/s": 1 / statistics.median(seconds)}
            found.append({"rows": count, "in memory": share, **rates, "memory": memory_of(pid)})
    return found


def snapshot(arguments: argparse.Namespace) -> list[Row]:
    count = max(10 * AT_ONCE, int(arguments.rows) // 10)
    ids, sizes = np.random.default_rng(3).integers(0, UNBOUNDED, count), list[int]()
    with tempfile.TemporaryDirectory() as name, table(count, "adagrad", snapshots=name) as (client, _, _):
        for some in (ids, ids[: count // 1000]):
            for first in range(0, len(some), AT_ONCE):
                push(client, some[first : first + AT_ONCE])
            client.clock(snapshot=True).wait()
            newest = Path(name) / str(generations(Path(name))[-1])
            sizes.append(sum(path.stat().st_size for path in newest.iterdir()))
    return [{"rows": count, "changed": count // 1000, "bytes": sizes[0], "bytes then": sizes[1],
             "by the first": sizes[1] / sizes[0]}]  # fmt: skip


PARTS = {
    "fill": ("rows are made, and looked up beside numpy.take", fill),
    "evict": ("new ids when the budget is full", evict),
    "disk": ("rows of which some lie in a file", disk),
    "snapshot": ("a snapshot of what has changed", snapshot),
}

if __name__ == "__main__":
    main()

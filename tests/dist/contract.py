"""What every communicator must do, as checks that each rank runs: `python contract.py` runs them on the ranks of a job.

A check is a function of the communicator. Inputs are made from the rank alone, so every rank knows every answer.
"""

from __future__ import annotations

import functools
import itertools
from importlib.util import find_spec

import numpy as np

from hetu.core.errors import ArgumentError, DTypeError, ShapeError
from hetu.core.types import as_dtype
from hetu.dist import world
from hetu.dist.comm.call import CollectiveCall

HALVES = ("float16", *(["bfloat16"] if find_spec("ml_dtypes") else []))
DTYPES = ("float32", "float64", *HALVES, "int64", "int32", "uint8")


def mine(rank: int, shape=(3, 2), dtype="float32") -> np.ndarray:
    return np.asarray(np.arange(np.prod(shape)).reshape(shape) % 5 + rank, as_dtype(dtype))


def all_reduce(comm):
    for dtype in DTYPES:
        for op, reference in (("sum", np.sum), ("max", np.max), ("min", np.min)):
            out = np.empty((3, 2), as_dtype(dtype))
            comm.all_reduce(mine(comm.rank, dtype=dtype), out, op)
            expected = reference([mine(r, dtype=dtype) for r in range(comm.world_size)], axis=0)
            np.testing.assert_array_equal(out, expected)


def all_reduce_of_equal_dtypes(comm):
    """NumPy has two equal dtypes for one size of integers."""
    for a, b in ("lq", "ql", "LQ"):
        x, out = np.full(3, 1, a), np.empty(3, b)
        comm.all_reduce(x, out)
        assert (out == comm.world_size).all()
        out[...] = 0
        comm.bind(CollectiveCall("all_reduce", x, out, "sum"))()
        assert (out == comm.world_size).all()


def all_reduce_in_place(comm):
    for shape in ((4,), (), (0, 3), (100_000,)):
        x = mine(comm.rank, shape)
        comm.all_reduce(x, x)
        np.testing.assert_array_equal(x, sum(mine(r, shape) for r in range(comm.world_size)))


def all_reduce_large(comm):
    """Beyond the size from which a transport may use shared memory, in several chunks of it."""
    for dtype, op, reference in (("float32", "sum", np.sum), ("int64", "max", np.max), ("float64", "min", np.min)):
        for n in (300_000, 1_000_003):
            x, out = mine(comm.rank, (n,), dtype), np.empty(n, dtype)
            comm.all_reduce(x, out, op)
            expected = reference([mine(r, (n,), dtype) for r in range(comm.world_size)], axis=0)
            np.testing.assert_array_equal(out, expected)
            np.testing.assert_array_equal(x, mine(comm.rank, (n,), dtype))
            comm.all_reduce(x, x, op)
            np.testing.assert_array_equal(x, expected)
    x = np.random.default_rng(comm.rank).standard_normal(200_001).astype("float32")
    comm.all_reduce(x, x)
    everyone = np.empty((comm.world_size, x.size), "float32")
    comm.all_gather(x, everyone)
    assert (everyone == x).all()


def halves_are_rounded_once(comm):
    """Beside a large term each small one alone would be rounded away; together they count."""
    n = comm.world_size
    for dtype in map(as_dtype, HALVES):
        step = 2048 if dtype.name == "float16" else 256  # the next number but one is 2 larger
        wanted = np.asarray(step + n - 1, dtype)
        for size in (n, 400_000 * n):
            x = np.full(size, 1 if comm.rank else step, dtype)
            part = np.empty(size // n, dtype)
            comm.reduce_scatter(x, part)
            handle = comm.all_reduce_async(x, x)
            handle.wait()
            assert (x == wanted).all() and (part == wanted).all(), (dtype, x[0], wanted)


def all_reduce_bound(comm):
    kinds = [((3, 2), "float32"), ((), "int64"), ((300_000,), "float32"), *(((4,), half) for half in HALVES)]
    for shape, dtype in kinds:
        x, out = np.empty(shape, as_dtype(dtype)), np.empty(shape, as_dtype(dtype))
        calls = [comm.bind(CollectiveCall("all_reduce", x, out, op)) for op in ("sum", "max")]
        inside = comm.bind(CollectiveCall("all_reduce", x, x, "sum"))
        for step in range(3):
            for call, reference in zip(calls, (np.sum, np.max)):
                x[...] = mine(comm.rank + step, shape, dtype)
                call()
                everyone = [mine(r + step, shape, dtype) for r in range(comm.world_size)]
                np.testing.assert_array_equal(out, reference(everyone, axis=0))
            inside()
            np.testing.assert_array_equal(x, np.sum(everyone, axis=0))


def all_reduce_bool(comm):
    x = np.array([True, False, comm.rank == 0])
    out = np.empty(3, bool)
    comm.all_reduce(x, out, "max")
    np.testing.assert_array_equal(out, [True, False, True])
    comm.all_reduce(x, out, "min")
    np.testing.assert_array_equal(out, [True, False, comm.world_size == 1])


def all_reduce_keeps_a_nan(comm):
    """Whichever rank has it, and however the call goes."""
    for dtype, size, op in itertools.product(("float32", "float64", *HALVES), (3, 300_000), ("sum", "max", "min")):
        x, out = np.ones(size, as_dtype(dtype)), np.empty(size, as_dtype(dtype))
        later = functools.partial(comm.all_reduce_async, x, out, op)
        ways = [functools.partial(comm.all_reduce, x, out, op), comm.bind(CollectiveCall("all_reduce", x, out, op))]
        for where, way in itertools.product(range(comm.world_size), (*ways, lambda start=later: start().wait())):
            x[0] = np.nan if where == comm.rank else 1
            way()
            assert np.isnan(out[0]) and np.isfinite(out[1:].astype("f")).all(), (dtype, size, op, where)


def all_reduce_is_the_same_everywhere(comm):
    x = np.random.default_rng(comm.rank).standard_normal(1001).astype("float32")
    comm.all_reduce(x, x)
    everyone = np.empty((comm.world_size, 1001), "float32")
    comm.all_gather(x, everyone)
    assert (everyone == x).all()


def asynchronous_all_reduces_overlap(comm):
    buffers = [mine(comm.rank, (50,)) * (i + 1) for i in range(4)]
    handles = [comm.all_reduce_async(x, x) for x in buffers]
    comm.progress()
    for i in (3, 0, 1, 2):
        handles[i].wait()
        handles[i].wait()  # a second time is harmless
        np.testing.assert_array_equal(buffers[i], sum(mine(r, (50,)) * (i + 1) for r in range(comm.world_size)))


def all_gather(comm):
    for dtype in (*DTYPES, "bool"):
        out = np.empty((comm.world_size, 3, 2), as_dtype(dtype))
        comm.all_gather(mine(comm.rank, dtype=dtype), out)
        np.testing.assert_array_equal(out, [mine(r, dtype=dtype) for r in range(comm.world_size)])


def reduce_scatter(comm):
    n = comm.world_size
    for dtype in DTYPES:
        out = np.empty(2, as_dtype(dtype))
        comm.reduce_scatter(mine(comm.rank, (n, 2), dtype), out)
        expected = np.sum([mine(r, (n, 2), dtype) for r in range(n)], axis=0)[comm.rank]
        np.testing.assert_array_equal(out, expected)


def broadcast(comm):
    for root, dtype in itertools.product(range(comm.world_size), DTYPES):
        x = mine(comm.rank, dtype=dtype)
        comm.broadcast(x, root)
        np.testing.assert_array_equal(x, mine(root, dtype=dtype))


def all_to_all(comm):
    n = comm.world_size
    for dtype in DTYPES:
        x, out = mine(10 * comm.rank, (n, 2), dtype), np.empty((n, 2), as_dtype(dtype))
        comm.all_to_all(x, out)
        np.testing.assert_array_equal(out, [mine(10 * r, (n, 2), dtype)[comm.rank] for r in range(n)])


def all_to_all_uneven(comm):
    n, rank = comm.world_size, comm.rank
    sent, received = [(rank + to) % 3 for to in range(n)], [(source + rank) % 3 for source in range(n)]
    for dtype in map(as_dtype, DTYPES):
        x = np.concatenate([np.full(count, 10 * rank + to) for to, count in enumerate(sent)]).astype(dtype)
        out = np.empty(sum(received), dtype)
        comm.all_to_all(x, out, (sent, received))
        expected = [np.full(count, 10 * source + rank) for source, count in enumerate(received)]
        np.testing.assert_array_equal(out, np.concatenate(expected))


def send_and_recv_in_order(comm):
    if comm.rank == 0:
        for to in range(1, comm.world_size):
            x = mine(to)
            comm.send(x, to)
            x[...] = -1  # it is the sender's again
            comm.send(mine(to + 1, (2000,)), to)
    else:
        first, second = np.empty((3, 2), "float32"), np.empty(2000, "float32")
        comm.recv(first, 0)
        comm.recv(second, 0)
        np.testing.assert_array_equal(first, mine(comm.rank))
        np.testing.assert_array_equal(second, mine(comm.rank + 1, (2000,)))


def exchange_with_everyone(comm):
    others = [r for r in range(comm.world_size) if r != comm.rank]
    big = (50_000,)  # more than a transport would buffer
    recvs = [(r, np.empty(big, "float32")) for r in others]
    comm.exchange([(r, mine(comm.rank, big)) for r in others], recvs)
    for source, x in recvs:
        np.testing.assert_array_equal(x, mine(source, big))


def ring(comm):
    n = comm.world_size
    for dtype in DTYPES:
        x = mine(comm.rank, dtype=dtype)
        for _ in range(n if n > 1 else 0):
            arrived = np.empty_like(x)
            comm.exchange([((comm.rank + 1) % n, x)], [((comm.rank - 1) % n, arrived)])
            x = arrived
        np.testing.assert_array_equal(x, mine(comm.rank, dtype=dtype))


def sub_groups(comm):
    n = comm.world_size
    group = [r for r in range(n) if r % 2 == comm.rank % 2][::-1]
    sub = comm.split(group)
    assert sub is comm.split(group)
    assert comm.split(range(n)) is comm
    assert sub.ranks == tuple(group) and sub.rank == group.index(comm.rank) and sub.world_size == len(group)
    x = mine(comm.rank)
    sub.all_reduce(x, x)
    np.testing.assert_array_equal(x, sum(mine(r) for r in group))
    if len(group) > 1:
        alone = sub.split([sub.rank])
        assert alone.ranks == (comm.rank,)
        alone.barrier()
    gathered = np.empty((len(group), 3, 2), "float32")
    sub.all_gather(mine(comm.rank), gathered)
    np.testing.assert_array_equal(gathered, [mine(r) for r in group])


def overlapping_groups(comm):
    for pair in ((r, r + 1) for r in range(comm.world_size - 1)):
        if comm.rank in pair:
            x = mine(comm.rank)
            comm.split(pair).all_reduce(x, x)
            np.testing.assert_array_equal(x, mine(pair[0]) + mine(pair[1]))


def refused_before_anyone_waits(comm):
    x = np.zeros(4)
    wrong = [
        (ShapeError, lambda: comm.all_reduce(x, np.zeros(3))),
        (ShapeError, lambda: comm.all_gather(x, np.zeros(4 * comm.world_size + 1))),
        (ShapeError, lambda: comm.all_to_all(x, np.zeros(5))),
        (DTypeError, lambda: comm.all_reduce(x, np.zeros(4, "float32"))),
        (DTypeError, lambda: comm.all_reduce(np.zeros(2, bool), np.zeros(2, bool))),
        (DTypeError, lambda: comm.broadcast(np.zeros(2, np.dtype("f8").newbyteorder()))),
        (ArgumentError, lambda: comm.all_reduce(x, x, "mean")),
        (ArgumentError, lambda: comm.all_reduce([1.0], x)),
        (ArgumentError, lambda: comm.all_reduce(np.zeros((4, 4))[:, 0], x)),
        (ArgumentError, lambda: comm.all_reduce(x, np.broadcast_to(x, (1, 4)))),
        (ArgumentError, lambda: comm.all_reduce(np.zeros(33, "u1")[1:].view("f8"), x)),  # not aligned
        (ArgumentError, lambda: comm.broadcast(x, comm.world_size)),
        (ArgumentError, lambda: comm.broadcast(np.array([{}], object))),
        (ArgumentError, lambda: comm.send(x, comm.rank)),
        (ArgumentError, lambda: comm.recv(x, comm.world_size)),
        (ArgumentError, lambda: comm.all_to_all(x, x.copy(), ([4], [4, 0, 0]))),
        (ArgumentError, lambda: comm.split([comm.rank, comm.rank])),
        (ArgumentError, lambda: comm.split([comm.rank + 1])),
    ]
    for _ in range(3):  # before there were calls of their kinds, and when these are known
        for error, call in wrong:
            try:
                call()
            except error:
                continue
            raise AssertionError(f"no {error.__name__}")
        comm.all_reduce(x, np.zeros(4))
        comm.all_gather(x, np.zeros(4 * comm.world_size))
        comm.broadcast(np.zeros(4))
    comm.barrier()


CHECKS = [
    all_reduce,
    all_reduce_of_equal_dtypes,
    all_reduce_in_place,
    all_reduce_large,
    halves_are_rounded_once,
    all_reduce_bound,
    all_reduce_bool,
    all_reduce_keeps_a_nan,
    all_reduce_is_the_same_everywhere,
    asynchronous_all_reduces_overlap,
    all_gather,
    reduce_scatter,
    broadcast,
    all_to_all,
    all_to_all_uneven,
    send_and_recv_in_order,
    exchange_with_everyone,
    ring,
    sub_groups,
    overlapping_groups,
    refused_before_anyone_waits,
]


if __name__ == "__main__":
    job = world(deadline=60.0)
    for check in CHECKS:
        check(job)
    if job.rank == 0:
        print(f"{len(CHECKS)} checks on {job.world_size} ranks of {type(job).__name__}")

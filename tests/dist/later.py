"""Mistakes of rank 1 in calls whose kinds are known: `heturun -w 2 python -m tests.dist.later sizes 300`.

All ranks have made both calls before; then rank 1 makes the second where the others make the first, and all make 300
more alike. MPI itself takes most of these pairs for one.
"""

from __future__ import annotations

import functools
import sys

import numpy as np

import hetu as ht
from hetu.dist import Mesh, Strategy, all_gather, all_reduce, world
from hetu.dist.comm.call import CollectiveCall

CULPRIT = 1


def reduce(n=4, dtype="f4", op="sum"):
    def call(comm):
        x = np.ones(n, dtype)
        comm.all_reduce(x, x, op)

    return call


def bound(n):
    def call(comm):
        x = np.ones(n, "f4")
        kept.setdefault((comm.rank, n), comm.bind(CollectiveCall("all_reduce", x, x, "sum")))()

    return call


kept: dict = {}


def started(n):
    def call(comm):
        x = np.ones(n, "f4")
        comm.all_reduce_async(x, x).wait()

    return call


def gather(comm):
    comm.all_gather(np.ones(4, "f4"), np.empty((comm.world_size, 4), "f4"))


def scatter(comm):
    comm.reduce_scatter(np.ones((comm.world_size, 4), "f4"), np.empty(4, "f4"))


def trade(comm):
    x = np.ones((comm.world_size, 4), "f4")
    comm.all_to_all(x, x.copy())


def spread(root):
    return lambda comm: comm.broadcast(np.ones(4, "f4"), root)


def inside(call):
    """In a group of its own, made of the same ranks in another order."""
    return lambda comm: call(comm.split(range(comm.world_size)[::-1]))


def message(n=4, dtype="f4"):
    def call(comm):
        if comm.rank == CULPRIT:
            comm.send(np.ones(n, dtype), 0)
        elif comm.rank == 0:
            comm.recv(np.ones(4, "f4"), CULPRIT)

    return call


# What the others call, what rank 1 calls, and how the report shows both.
PAIRS = {
    "sizes": (reduce(4), reduce(8), "all_reduce sum f32[4]", "all_reduce sum f32[8]"),
    "dtypes": (reduce(4), reduce(2, "f8"), "all_reduce sum f32[4]", "all_reduce sum f64[2]"),
    "ops": (reduce(), reduce(op="max"), "all_reduce sum f32[4]", "all_reduce max f32[4]"),
    "roots": (spread(0), spread(1), "broadcast from 0", "broadcast from 1"),
    "kinds": (trade, gather, "all_to_all f32", "all_gather f32[4]"),
    "reductions": (reduce(), scatter, "all_reduce sum f32[4]", "reduce_scatter sum f32"),
    "bound": (bound(4), bound(8), "all_reduce sum f32[4]", "all_reduce sum f32[8]"),
    "started": (started(4), started(2), "all_reduce sum f32[4]", "all_reduce sum f32[2]"),
    "large": (reduce(300_000), reduce(300_008), "all_reduce sum f32[300000]", "all_reduce sum f32[300008]"),
    "groups": (inside(reduce(4)), inside(reduce(8)), "all_reduce sum f32[4]", "all_reduce sum f32[8]"),
}
MESSAGES = {
    "shorter": (message(), message(2), "from 1 to 0 f32[4]", "from 1 to 0 f32[2]"),
    "longer": (message(), message(6), "from 1 to 0 f32[4]", "from 1 to 0 f32[6]"),
    "as many bytes": (message(), message(4, "i4"), "from 1 to 0 f32[4]", "from 1 to 0 i32[4]"),
}


def run(comm, name: str, more: int) -> None:
    usual, odd, *_ = (PAIRS | MESSAGES)[name]
    for call in (usual, odd, usual) if name in PAIRS else (usual,):
        call(comm)
    (odd if comm.rank == CULPRIT else usual)(comm)
    for _ in range(more):
        usual(comm)


def swapped(comm, more: int, before: int) -> None:
    """Two reductions of one kind, in the order of their lines on rank 0 and in the other on rank 1."""
    a, b = np.full(4, 1.0), np.full(4, 10.0)
    for _ in range(before):
        comm.barrier()
    for turn in (0, 1):
        if (turn == 0) == (comm.rank == 0):
            comm.all_reduce(a, a)  # first
        else:
            comm.all_reduce(b, b)  # second
    for _ in range(more):
        comm.barrier()


def swapped_in_line(comm, more: int) -> None:
    """As `swapped`, but in functions of one line, which have equal instructions."""
    a, b = np.full(4, 1.0), np.full(4, 10.0)
    calls = [lambda: comm.all_reduce(a, a), lambda: comm.all_reduce(b, b)]  # first and second
    for call in calls if comm.rank == 0 else calls[::-1]:
        call()
    for _ in range(more):
        comm.barrier()


def reduce_by_helper(comm, x):
    comm.all_reduce(x, x)  # helper


def in_turn(comm, more: int, before: int) -> None:
    """As `swapped`, but both reductions are made by one line."""
    a, b = np.full(4, 1.0), np.full(4, 10.0)
    for _ in range(before):
        comm.barrier()

    def first():
        reduce_by_helper(comm, a)  # first by helper

    def second():
        reduce_by_helper(comm, b)  # second by helper

    for call in (first, second) if comm.rank == 0 else (second, first):
        call()
    for _ in range(more):
        comm.barrier()


def reductions(order):
    """Of gradients of one shape, made by one line in this order."""
    weights = [ht.variable(f"w{i}", np.ones((4, 4))) for i in range(3)]
    slopes = ht.gradients(ht.sum(functools.reduce(lambda h, w: ht.tanh(h @ w), weights)), weights)
    made = {i: all_reduce(slopes[i]) for i in order}  # reductions
    return [made[i] for i in order]


def looped(comm, more: int) -> None:
    """As `swapped`, but in a graph, and all are made by one line, which has no helper."""
    ex = ht.Executor(reductions([0, 1, 2] if comm.rank == 0 else [1, 0, 2]), comm=comm)
    for _ in range(more + 1):
        ex.run()


def of_own_sizes(comm, more: int) -> None:
    """Rank 1 is fed another number of rows in each step, and so binds its program alone."""
    x = ht.placeholder("x", (None, 3))
    ex = ht.Executor([all_reduce(ht.sum(x, axis=0)), all_gather(ht.max(x, axis=0))], comm=comm)
    for step in range(more):
        total, most = ex.run({x: np.ones((2 + step % 5 * (comm.rank == CULPRIT), 3))})
        assert total.tolist() == [2.0 * comm.world_size + step % 5] * 3 and most.tolist() == [1.0] * 3 * comm.world_size


def spread_in_turn(comm, more: int, before: int) -> None:
    """As `swapped`, but what rank 0 has is sent to all."""
    a, b = np.full(4, 1.0), np.full(4, 10.0)
    for _ in range(before):
        comm.barrier()
    for turn in (0, 1):
        if (turn == 0) == (comm.rank == 0):
            comm.broadcast(a)  # first broadcast
        else:
            comm.broadcast(b)  # second broadcast
    for _ in range(more):
        comm.barrier()


def roots_in_turn(comm, more: int) -> None:
    """Each rank sends from one line and receives by another, as often as they like."""
    for step in range(more + comm.world_size):
        root = step % comm.world_size
        if comm.rank == root:
            comm.broadcast(np.ones(4), root)
        else:
            comm.broadcast(np.empty(4), root)


def unreceived(comm) -> None:
    if comm.rank == CULPRIT:
        for _ in range(3):
            comm.send(np.ones(4, "f4"), 0)  # one too many
    elif comm.rank == 0:
        for _ in range(2):
            comm.recv(np.ones(4, "f4"), CULPRIT)


def counted(comm, more: int, number: int) -> None:
    """All give each other 4 numbers; in the second call rank 1 gives and takes others."""
    for step in range(more + 3):
        n = [number if step == 1 and comm.rank == CULPRIT else 4] * comm.world_size
        comm.all_to_all(np.ones(sum(n), "f4"), np.empty(sum(n), "f4"), counts=(n, n))  # counted


def unawaited(comm) -> None:
    x = np.ones(4, "f4")
    begun = comm.all_reduce_async(x, x)  # and that is all
    if comm.rank != CULPRIT:
        begun.wait()


def one_too_many(comm, kind: str, steps: int) -> None:
    """Rank 1 makes one step more than the others, and nobody waits for anybody."""
    steps, x = steps + (comm.rank == CULPRIT or kind == "others"), ht.placeholder("x", (None, 3))
    peer, a = (comm.rank + 1) % comm.world_size, np.ones(4)
    w = ht.variable("w", np.ones((3, 2)))
    entries = {"fed": [{w: w * ht.mean(x @ w)}], "unfed": [{w: w * 0.5}], "other": [{w: w * ht.mean(x @ w) * 0.5}]}
    ex = ht.Executor(entries, strategy=Strategy(Mesh((comm.world_size,), ("d",)).layout(), {}, {}), comm=comm)
    for step in range(steps):
        last = step == steps - 1 and comm.rank == CULPRIT
        if kind == "sent":
            comm.exchange([(peer, a)], [((comm.rank - 1) % comm.world_size, a.copy())] if not last else [])
        elif kind == "begun":
            handle = comm.all_reduce_async(a, a.copy())
            _ = last or handle.wait()
        elif kind == "others":  # as many, but the last one is another
            for name in ["fed", "other"] if step == 0 else ["other" if last else "fed"]:
                ex.run(name, {x: a[:3].reshape(1, 3)})
        else:
            ex.run(kind, {x: a[:3].reshape(1, 3)} if kind == "fed" else None)


def by_ways(comm, more: int) -> None:
    """Ranks come to one line on ways of their own, as often as they like."""
    x = np.ones(4)
    for _ in range(more + 1):
        if comm.rank == 0:
            reduce_by_helper(comm, x)
        else:
            reduce_by_helper(comm, x)


def branches(comm, more: int) -> None:
    x = np.ones(4)
    for _ in range(more + 1):
        if comm.rank == 0:
            comm.all_reduce(x, x)  # branch of rank 0
        else:
            comm.all_reduce(x, x)  # branch of others


if __name__ == "__main__":
    name, *counts = sys.argv[1:]
    comm = world(deadline=5.0)
    if name in PAIRS | MESSAGES:
        run(comm, name, *map(int, counts))
    else:
        globals()[name](comm, *(int(c) if c.isdigit() else c for c in counts))
    print(f"rank {comm.rank} is done")

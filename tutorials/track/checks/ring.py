"""The checks of lab 5, on ranks that are processes. Messages are counted where they are switched."""

from __future__ import annotations

import numpy as np

from hetu.teach.labs import Lab, Ran, Student, different, first

lab = Lab("5", "all-reduce on a ring of ranks", "ring.py")


def held(student: Student, n: int, size: int) -> np.ndarray:
    """An array for each of `n` ranks."""
    rng = np.random.default_rng(5)
    ### BEGIN HIDDEN TESTS
    rng = student.rng
    ### END HIDDEN TESTS
    return rng.integers(-50, 50, (n, size)).astype(float)


def bounds(size: int, n: int) -> list[list[int]]:
    ends = [0]
    for k in range(n):
        ends.append(ends[-1] + size // n + (k < size % n))
    return [[ends[k], ends[k + 1]] for k in range(n)]


def summed(student: Student, n: int, size: int) -> str:
    x = held(student, n, size)
    ran = student.on_ranks(n, "all_reduce", [[row] for row in x])
    return first(
        different(got, x.sum(0), f"{n} ranks, {size} numbers: rank {r}: ") for r, (got, *_) in enumerate(ran.values)
    )


@lab.check(
    "chunks cover all, the first ones longer by one",
    hint="size = n * least + more: the first `more` get one more.",
)
def chunks(student: Student) -> str:
    seen = different(student.chunks(8, 4), [[0, 2], [2, 4], [4, 6], [6, 8]])
    seen = seen or different(student.chunks(7, 3), [[0, 3], [3, 5], [5, 7]], "7 in 3: ")
    seen = seen or different(student.chunks(1, 3), [[0, 1], [1, 1], [1, 1]], "1 in 3: ")
    ### BEGIN HIDDEN TESTS
    for _ in range(5):
        size, n = (int(k) for k in student.rng.integers(1, 60, 2))
        seen = seen or different(student.chunks(size, n), bounds(size, n), f"{size} in {n}: ")
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "reduce-scatter: chunk r of rank r is the sum",
    hint="What arrives is added (+=). In n - 1 steps a chunk passes n ranks: that of rank r starts at rank r + "
    "1, so rank r sends chunk r - 1 first, and next the one that has just arrived.",
    points=2,
)
def scattered(student: Student) -> str:
    seen = ""
    for n, size in ((2, 4), (3, 7), (4, 8)):
        x, places = held(student, n, size), bounds(size, n)
        ran = student.on_ranks(n, "reduce_scatter", [[row] for row in x])
        for r, got in enumerate(ran.values):
            mine = slice(*places[r])
            wanted = x.sum(0)[mine]
            seen = seen or different(np.ravel(got)[mine], wanted, f"{n} ranks, {size} numbers: chunk {r} of rank {r}: ")
    return seen


@lab.check(
    "all-gather hands every chunk around",
    hint="Rank r sends its own chunk r first, and next the one that has just arrived, which replaces what was there.",
)
def gathered(student: Student) -> str:
    seen = ""
    for n, size in ((2, 4), (3, 7), (4, 8)):
        (x,), places = held(student, 1, size), bounds(size, n)
        own = [np.where((np.arange(size) >= a) & (np.arange(size) < b), x, -1000.0) for a, b in places]
        ran = student.on_ranks(n, "all_gather", [[row] for row in own])
        seen = seen or first(different(got, x, f"{n} ranks: rank {r}: ") for r, got in enumerate(ran.values))
    return seen


@lab.check(
    "all-reduce on one rank and on four",
    hint="One rank alone sends nothing. Else: reduce-scatter, then all-gather.",
)
def sums(student: Student) -> str:
    return summed(student, 1, 3) or summed(student, 4, 8)


@lab.check(
    "lengths that do not divide, and fewer numbers than ranks",
    hint="Chunks differ in size: the buffer has that of the chunk which arrives. Empty ones may be sent like any"
    " other.",
)
def uneven(student: Student) -> str:
    return summed(student, 3, 7) or summed(student, 4, 2)


@lab.check(
    "any shape and dtype, and `x` stays as it was",
    hint="`x.reshape(-1)` may be a view, and adding into it changes x: work on a copy. The result has the shape "
    "of x, and buffers have its dtype.",
    points=2,
)
def kept(student: Student) -> str:
    x = held(student, 2, 6).reshape(2, 2, 3).astype(np.float32)
    seen = ""
    for transposed in (False, True):
        ran = student.on_ranks(2, "all_reduce", [[row] for row in x], transposed=transposed)
        wanted = x.sum(0).T if transposed else x.sum(0)
        for r, (got, dtype, own) in enumerate(ran.values):
            seen = seen or different(got, wanted, f"rank {r}: ") or different(dtype, "float32", "dtype: ")
            seen = seen or different(own, x[r], f"x of rank {r} afterward: ")
    return seen


@lab.check(
    "a rank sends to its right neighbor only",
    hint="To the right is (rank + 1) % world_size, to the left rank - 1.",
)
def neighbors(student: Student) -> str:
    x = held(student, 3, 6)
    ran = student.on_ranks(3, "all_reduce", [[row] for row in x])
    for rank in range(3):
        others = {m.to for m in ran.sent(rank)} - {(rank + 1) % 3}
        if others:
            return f"rank {rank} sent to {', '.join(str(r) for r in sorted(others))}"
    return first(different(got, x.sum(0)) for got, *_ in ran.values)


@lab.check(
    "2 (n - 1) messages, and 2 (n - 1) / n of the data",
    hint="One chunk in a step, not the whole array; n - 1 steps on each of the two ways, and not one more.",
    points=2,
)
def traffic(student: Student) -> str:
    x = held(student, 4, 400)
    ### BEGIN HIDDEN TESTS
    x = student.rng.normal(size=(4, 400))  # whose digits cannot be packed into fewer numbers
    ### END HIDDEN TESTS
    ran = student.on_ranks(4, "all_reduce", [[row] for row in x])
    seen = first(different(got, x.sum(0), tolerance=1e-12) for got, *_ in ran.values)
    for r in range(4):
        seen = seen or different(sum(m.numbers for m in ran.sent(r)), 600, f"numbers that rank {r} sent, for 400: ")
        seen = seen or different(len(ran.sent(r)), 6, f"messages that rank {r} sent: ")
    return seen


def broadcasted(student: Student, n: int, root: int) -> tuple[Ran, str]:
    x = held(student, n, 3)
    ran = student.on_ranks(n, "broadcast", [[row, root] for row in x])
    what = f"{n} ranks, root {root}: rank"
    return ran, first(different(got, x[root], f"{what} {r}: ") for r, got in enumerate(ran.values))


@lab.check(
    "broadcast gives the root's array to all",
    hint="Count places from the root: (rank - root) % n. The place p receives from p - 2 ** k.",
)
def from_root(student: Student) -> str:
    return first(broadcasted(student, n, root)[1] for n, root in ((1, 0), (2, 1), (3, 2), (4, 1)))


@lab.check(
    "broadcast along a tree: n - 1 messages, in log2(n) rounds",
    hint="Each place receives once, so none is sent to beyond the last; in round k those below 2 ** k send, "
    "which doubles.",
)
def tree(student: Student) -> str:
    ran, seen = broadcasted(student, 3, 0)
    seen = seen or different(len(ran.messages), 2, "messages for 3 ranks: ")
    ran, other = broadcasted(student, 4, 2)
    seen = seen or other or different(len(ran.messages), 3, "messages for 4 ranks: ")
    return seen or different(len(ran.sent(2)), 2, "messages of the root of 4 ranks: ")

"""The checks of lab 6, on ranks that are processes. Messages are counted where they are switched."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hetu.teach.labs import Lab, Ran, Student, different, first

lab = Lab("6", "a ring all-reduce", "lab6_ring_all_reduce.py")


def on_ranks(student: Student, n: int, size: int, rng: np.random.Generator | None = None) -> tuple[Ran, np.ndarray]:
    """What `n` ranks come to with arrays of `size` numbers, and what they hold; sends wait for their receivers."""
    held = np.random.default_rng(6).integers(-50, 50, (n, size)).astype(float)
    ### BEGIN HIDDEN TESTS
    held = held if rng is None else rng.normal(size=(n, size))
    ### END HIDDEN TESTS
    return student.on_ranks(n, "ring_all_reduce", [[x] for x in held]), held


def wrong(ran: Ran, held: np.ndarray) -> str:
    """The first rank whose sum is not that of all, in all digits but those that the order of adding up decides."""
    return first(different(got, held.sum(0), f"rank {r}: ", 1e-12) for r, (got, _) in enumerate(ran.values))


def _sums(n: int, size: int) -> Callable[[Student], str]:
    def test(student: Student) -> str:
        seen = wrong(*on_ranks(student, n, size))
        ### BEGIN HIDDEN TESTS
        seen = seen or wrong(*on_ranks(student, n, size, student.rng))
        ### END HIDDEN TESTS
        return seen

    return test


lab.check("one rank", hint="There is nobody to talk to, and a rank must not send to itself.", points=0)(_sums(1, 4))
lab.check("two ranks", hint="One step of each kind: send the chunk that the other one will own.")(_sums(2, 4))
lab.check(
    "four ranks",
    hint="Let each rank begin with the chunk of its own number; what has just arrived and been added to is what it "
    "sends next. Draw a table of ranks and chunks: which chunk is complete where after n - 1 steps?",
    points=2,
)(_sums(4, 8))
lab.check("lengths that do not divide", hint="Chunks differ in size then: receive into a buffer of the right one.")(
    _sums(4, 7)
)
lab.check("fewer elements than ranks", hint="Some chunks are empty. They may be sent like any other.")(_sums(4, 2))


@lab.check("`x` is not changed", hint="Work on a copy.")
def keeps(student: Student) -> str:
    rng = None
    ### BEGIN HIDDEN TESTS
    rng = student.rng
    ### END HIDDEN TESTS
    ran, held = on_ranks(student, 3, 6, rng)
    return wrong(ran, held) or first(different(x, held[r], f"rank {r}: ") for r, (_, x) in enumerate(ran.values))


@lab.check("every rank talks to its right neighbor only", hint="To the right is (rank + 1) % world_size.")
def neighbors(student: Student) -> str:
    rng = None
    ### BEGIN HIDDEN TESTS
    rng = student.rng
    ### END HIDDEN TESTS
    ran, held = on_ranks(student, 4, 8, rng)
    for rank in range(4):
        others = {m.to for m in ran.sent(rank)} - {(rank + 1) % 4}
        if others:
            return f"rank {rank} sent to {', '.join(str(r) for r in sorted(others))}"
    return wrong(ran, held)


@lab.check(
    "no rank sends more than 2 (n - 1) / n of the data",
    hint="Send one chunk in a step, not the whole array, and n - 1 steps in each of the two rounds.",
    points=2,
)
def traffic(student: Student) -> str:
    rng = None
    ### BEGIN HIDDEN TESTS
    rng = student.rng
    ### END HIDDEN TESTS
    ran, held = on_ranks(student, 4, 400, rng)
    most = max(sum(m.numbers for m in ran.sent(r)) for r in range(4))
    return wrong(ran, held) or (f"a rank sent {most} numbers to add up 400, wanted 600 at most" if most > 600 else "")

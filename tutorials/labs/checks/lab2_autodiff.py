"""The checks of lab 2. A graph is a list of rows of pairs (index of an input before it, local slope)."""

from __future__ import annotations

import math

import numpy as np

from hetu.teach.labs import Lab, Student, different

lab = Lab("2", "reverse-mode automatic differentiation", "lab2_autodiff.py")
Rows = list[list[tuple[int, float]]]


@lab.check("a product knows its slopes", hint="If a grows by one unit, a * b grows by b. And if b does?")
def product(student: Student) -> str:
    seen = slopes_of_product(student, 3.0, 5.0)
    ### BEGIN HIDDEN TESTS
    seen = seen or slopes_of_product(student, *student.rng.normal(size=2).tolist())
    ### END HIDDEN TESTS
    return seen


def slopes_of_product(student: Student, a: float, b: float) -> str:
    value, slopes = student.local([a, b], ["mul", 0, 1])
    return different(value, a * b, "the value: ") or different(sorted(slopes), [(0, b), (1, a)], "inputs and slopes: ")


@lab.check("tanh knows its slope", hint="The slope at x uses the value of tanh at x, which you have just computed.")
def tanh(student: Student) -> str:
    value, slopes = student.local([0.5], ["tanh", 0])
    seen = different(value, 0.4621171573, "the value: ") or different(slopes, [(0, 0.7864477330)], "the slope: ")
    ### BEGIN HIDDEN TESTS
    x = float(student.rng.normal())
    value, slopes = student.local([x], ["tanh", 0])
    seen = seen or different(value, math.tanh(x), "the value: ")
    seen = seen or different(slopes, [(0, 1 / math.cosh(x) ** 2)], "the slope: ")
    ### END HIDDEN TESTS
    return seen


@lab.check("slopes of a chain multiply", hint="A number's slope times the local slope is what it passes on.")
def multiply(student: Student) -> str:
    seen = different(student.walked([[], [(0, 3.0)], [(1, 2.0)]], [0, 2]), [6.0, 1.0])
    ### BEGIN HIDDEN TESTS
    locals_ = student.rng.normal(size=6).tolist()
    rows: Rows = [[], *([(k, s)] for k, s in enumerate(locals_))]
    seen = seen or different(student.walked(rows, [0, 3, 6]), reverse(rows, [0, 3, 6]))
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "a number used twice gets both contributions", hint="What arrives is added to what is there, not put in its place."
)
def add(student: Student) -> str:
    steps = [["mul", 0, 0], ["add", 1, 0]]
    seen = different(student.differentiated([3.0], steps, [0]), [7.0])
    ### BEGIN HIDDEN TESTS
    x = float(student.rng.normal())
    seen = seen or different(student.differentiated([x], steps, [0]), [2 * x + 1])
    for _ in range(3):
        rows = drawn(student.rng, 4)
        seen = seen or different(student.walked([*rows, [(3, 1.0), (3, 2.0)]], [3]), [3.0])
    ### END HIDDEN TESTS
    return seen


@lab.check("a number that does not matter has slope 0", hint="Who was never reached is in no table: use a default.")
def unused(student: Student) -> str:
    seen = different(student.differentiated([3.0, 4.0], [["add", 0, 0]], [1, 0]), [0.0, 2.0])
    ### BEGIN HIDDEN TESTS
    rows: Rows = [[], [], *([(0, s)] for s in student.rng.normal(size=4).tolist())]
    wanted = [int(k) for k in student.rng.permutation(6)]
    seen = seen or different(student.walked(rows, wanted), reverse(rows, wanted))
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "a slope is complete before it is passed on",
    hint="Here one input is reached early by a short way and late by a long one. Order the numbers first, so that each "
    "stands behind everything it was computed from; then walk that list from its end.",
    points=3,
)
def complete(student: Student) -> str:
    rows: Rows = [[], [(0, 2.0)], [(1, 3.0)], [(2, 1.0)]]
    turned = [[(1, 5.0), (3, 1.0)], [(3, 1.0), (1, 5.0)]]
    seen = different([student.walked([*rows, last], [0]) for last in turned], [[16.0], [16.0]])
    ### BEGIN HIDDEN TESTS
    for size in (6, 9, 14):
        rows = drawn(student.rng, size)
        wanted = [int(k) for k in student.rng.permutation(size)]
        seen = seen or different(student.walked(rows, wanted), reverse(rows, wanted))
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "each number has one turn, however many paths lead to it",
    hint="Forty numbers that are each used twice have 2 to the 40 paths. Remember which ones you have visited.",
    points=2,
)
def once(student: Student) -> str:
    rows: Rows = [[], *([(k, 0.5), (k, 0.5)] for k in range(40))]
    seen = different(student.walked(rows, [0]), [1.0])
    ### BEGIN HIDDEN TESTS
    rows = [[], *([(k, s), (k, 1.1 - s)] for k, s in enumerate(student.rng.uniform(0, 1, 40).tolist()))]
    seen = seen or different(student.walked(rows, [0, 20]), reverse(rows, [0, 20]))
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "a chain of 5,000 numbers works", hint="Python allows about 1,000 nested calls. Keep a list as a stack instead."
)
def deep(student: Student) -> str:
    seen = different(student.walked([[], *([(k, 1.0)] for k in range(5000))], [0]), [1.0])
    ### BEGIN HIDDEN TESTS
    rows: Rows = [[], *([(k, s)] for k, s in enumerate(student.rng.uniform(0.999, 1.001, 5000).tolist()))]
    seen = seen or different(student.walked(rows, [0, 2500]), reverse(rows, [0, 2500]))
    ### END HIDDEN TESTS
    return seen


### BEGIN HIDDEN TESTS
def drawn(rng: np.random.Generator, size: int) -> Rows:
    """Numbers that are each computed from some before them, the one just before among these."""
    rows: Rows = [[]]
    for k in range(1, size):
        others = [int(i) for i in rng.permutation(k)[: int(rng.integers(0, 3))] if i != k - 1]
        order = [*others, k - 1]
        rng.shuffle(order)
        rows.append([(i, float(rng.normal())) for i in order])
    return rows


def reverse(rows: Rows, wanted: list[int]) -> list[float]:
    """The slopes, by rows that stand in the order in which they were computed."""
    found = [0.0] * len(rows)
    found[-1] = 1.0
    for k in range(len(rows) - 1, -1, -1):
        for i, slope in rows[k]:
            found[i] += found[k] * slope
    return [found[k] for k in wanted]


### END HIDDEN TESTS

"""The checks of lab 2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType

from .grading import Lab, different

lab = Lab(2, "reverse-mode automatic differentiation", "lab2_autodiff.py")
PATIENCE = 20_000  # how often one may look at the inputs of a number


class Watched:
    """A number that counts how often inputs are looked at, because a walk along all *paths* never ends."""

    looks = 0

    def __init__(self, value: float, inputs: Sequence[tuple[Watched, float]] = ()) -> None:
        self.value, self._inputs = value, list(inputs)

    @property
    def inputs(self) -> list[tuple[Watched, float]]:
        Watched.looks += 1
        if Watched.looks > PATIENCE:
            raise TimeoutError(f"inputs were looked at {PATIENCE:,} times")
        return self._inputs


def chain(length: int, uses: int) -> tuple[Watched, Watched]:
    """The first and the last of `length` numbers, each computed from the one before, `uses` times."""
    Watched.looks = 0
    first = last = Watched(1.0)
    for _ in range(length):
        last = Watched(1.0, [(last, 1.0 / uses)] * uses)
    return first, last


@lab.check("a product knows its slopes", hint="If a grows by one unit, a * b grows by b. And if b does?")
def product(student: ModuleType) -> str:
    a, b = student.Number(3.0), student.Number(5.0)
    c = a * b
    return different(c.value, 15.0, "the value: ") or different([s for _, s in c.inputs], [5.0, 3.0], "the slopes: ")


@lab.check("tanh knows its slope", hint="The slope at x uses the value of tanh at x, which you have just computed.")
def tanh(student: ModuleType) -> str:
    y = student.Number(0.5).tanh()
    wanted = math.tanh(0.5)
    return different(y.value, wanted, "the value: ") or different(y.inputs[0][1], 1 - wanted**2, "the slope: ")


@lab.check("slopes of a chain multiply", hint="A number's slope times the local slope is what it passes on.")
def multiply(student: ModuleType) -> str:
    x = Watched(1.0)
    output = Watched(1.0, [(Watched(1.0, [(x, 3.0)]), 2.0)])
    return different(student.slopes(output, [x, output]), [6.0, 1.0])


@lab.check(
    "a number used twice gets both contributions", hint="What arrives is added to what is there, not put in its place."
)
def add(student: ModuleType) -> str:
    x = student.Number(3.0)
    return different(student.slopes(x * x + x, [x]), [7.0])


@lab.check("a number that does not matter has slope 0", hint="Who was never reached is in no table: use a default.")
def unused(student: ModuleType) -> str:
    x, other = student.Number(3.0), student.Number(4.0)
    return different(student.slopes(x + x, [other, x]), [0.0, 2.0])


@lab.check(
    "a slope is complete before it is passed on",
    hint="Here one input is reached early by a short way and late by a long one. Order the numbers first, so that each "
    "stands behind everything it was computed from; then walk that list from its end.",
)
def complete(student: ModuleType) -> str:
    x = Watched(1.0)
    middle = Watched(1.0, [(x, 2.0)])
    late = Watched(1.0, [(Watched(1.0, [(middle, 3.0)]), 1.0)])
    first = student.slopes(Watched(1.0, [(middle, 5.0), (late, 1.0)]), [x])
    second = student.slopes(Watched(1.0, [(late, 1.0), (middle, 5.0)]), [x])
    return different([first, second], [[16.0], [16.0]])


@lab.check(
    "each number has one turn, however many paths lead to it",
    hint="Forty numbers that are each used twice have 2 to the 40 paths. Remember which ones you have visited.",
)
def once(student: ModuleType) -> str:
    first, last = chain(40, uses=2)
    return different(student.slopes(last, [first]), [1.0])


@lab.check(
    "a chain of 5,000 numbers works", hint="Python allows about 1,000 nested calls. Keep a list as a stack instead."
)
def deep(student: ModuleType) -> str:
    first, last = chain(5000, uses=1)
    return different(student.slopes(last, [first]), [1.0])

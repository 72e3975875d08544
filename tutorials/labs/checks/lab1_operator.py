"""The checks of lab 1. They measure no speed, but whether arrays are allocated.

What the rules ask of `xp` comes as a list of steps, which is done again here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from hetu.teach.labs import Lab, NoAnswer, Student, different

lab = Lab("1", "an operator with a gradient", "lab1_operator.py", with_hetu=True)
X = np.array([-3.0, -0.5, 0.0, 1.0, 4.0])


### BEGIN HIDDEN TESTS
def drawn(student: Student) -> tuple[np.ndarray, float]:
    """Numbers of both signs, and a scale."""
    return student.rng.normal(size=7) * 4, float(student.rng.uniform(0.5, 3))


def softsign(x: np.ndarray, scale: float) -> np.ndarray:
    made: np.ndarray = x / (scale + np.abs(x))
    return made


### END HIDDEN TESTS
@lab.check("the values are right", hint="The forward function is one line of array arithmetic: use xp.abs.")
def values(student: Student) -> str:
    seen = different(student.forward(X, 1.0), [-0.75, -1 / 3, 0.0, 0.5, 0.8])
    ### BEGIN HIDDEN TESTS
    x, _ = drawn(student)
    seen = seen or different(student.forward(x, 1.0), softsign(x, 1.0))
    ### END HIDDEN TESTS
    return seen


@lab.check("`scale` is respected", hint="scale stands beside |x|, below the line.")
def attribute(student: Student) -> str:
    seen = different(student.evaluated(X, 3.0), [-0.5, -1 / 7, 0.0, 0.25, 4 / 7])
    ### BEGIN HIDDEN TESTS
    x, scale = drawn(student)
    seen = seen or different(student.evaluated(x, scale), softsign(x, scale))
    ### END HIDDEN TESTS
    return seen


@lab.check("the values come from `xp`, not from NumPy", hint="Call xp.abs, so that the same text runs on a GPU.")
def module(student: Student) -> str:
    steps, made = student.recorded("forward", 3.0)
    seen = different(done(steps, X, X * 0)[made], [-0.5, -1 / 7, 0.0, 0.25, 4 / 7], "the steps asked of xp: ")
    ### BEGIN HIDDEN TESTS
    x, scale = drawn(student)
    steps, made = student.recorded("forward", scale)
    seen = seen or different(done(steps, x, x * 0)[made], softsign(x, scale), "the steps asked of xp: ")
    ### END HIDDEN TESTS
    return seen


def done(steps: Any, x: np.ndarray, out: np.ndarray) -> dict[int, np.ndarray]:
    """All values of a record: 0 is x, 1 is out, then what each step has made."""
    values: dict[int, Any] = {0: x.copy(), 1: out.copy(), -1: np.nan}
    for number, (name, operands, place) in enumerate(steps, 2):
        told = [values[o[1]] if isinstance(o, list) else float(o) for o in operands]
        if name == "copyto":
            told[0][...] = told[1]
            continue
        function = getattr(np, str(name), None)
        if not isinstance(function, np.ufunc) or len(told) != function.nin:
            raise NoAnswer(f"xp.{name} is asked for {len(told)} arrays: elementwise functions are enough")
        with np.errstate(all="ignore"):
            values[number] = function(*told, out=None if place is None else values[place])
    return values


def derivative(student: Student, order: int) -> str:
    ones = np.ones(5)
    known = {1: [1 / 16, 4 / 9, 1.0, 1 / 4, 1 / 25], 2: [1 / 32, 16 / 27, 0.0, -1 / 4, -2 / 125]}
    seen = different(student.gradient(X, ones, 1.0, order), known[order])
    ### BEGIN HIDDEN TESTS
    x, scale = drawn(student)
    weights = student.rng.normal(size=7)
    below = scale + np.abs(x)
    wanted = weights * (scale / below**2 if order == 1 else -2 * scale * np.sign(x) / below**3)
    seen = seen or different(student.gradient(x, weights, scale, order), wanted)
    ### END HIDDEN TESTS
    return seen


lab.check(
    "the gradient is the slope, times what arrives",
    hint="Use the quotient rule for x > 0 and for x < 0, then see what both have in common. Do not forget g.",
    points=2,
)(partial(derivative, order=1))
lab.check(
    "the gradient of the gradient is right as well",
    hint="The rule must be written in graph functions of the nodes x and y (ht.abs, ...), with no NumPy in between.",
    points=2,
)(partial(derivative, order=2))


@lab.check(
    "`into` writes the right values", hint="The last step must leave the quotient in out. Which step comes first?"
)
def into(student: Student) -> str:
    out, x = student.into(X, 3.0)
    seen = different(out, [-0.5, -1 / 7, 0.0, 0.25, 4 / 7]) or different(x, X, "the input was changed: ")
    ### BEGIN HIDDEN TESTS
    given, scale = drawn(student)
    out, x = student.into(given, scale)
    seen = seen or different(out, softsign(given, scale)) or different(x, given, "the input was changed: ")
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "`into` makes no other array", hint="Each of the three steps takes out=out, and an operator sign has no out."
)
def allocates_nothing(student: Student) -> str:
    steps, _ = student.recorded("into", 3.0)
    values = done(steps, X, X * np.nan)
    seen = different(values[1], [-0.5, -1 / 7, 0.0, 0.25, 4 / 7], "the steps asked of xp: ")
    ### BEGIN HIDDEN TESTS
    x, scale = drawn(student)
    steps, _ = student.recorded("into", scale)
    seen = seen or different(done(steps, x, x * np.nan)[1], softsign(x, scale), "the steps asked of xp: ")
    ### END HIDDEN TESTS
    made = [str(name) for name, _, place in steps if place is None]
    return seen or (f"a new array is made by {', '.join(made)}" if made else "")

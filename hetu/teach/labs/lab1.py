"""The checks of lab 1. They measure no speed, but whether arrays are allocated."""

from __future__ import annotations

import tracemalloc
from functools import partial
from types import ModuleType

import numpy as np

from ...core.autodiff import gradients
from ...core.errors import GradientError
from ...core.executor import evaluate
from ...gradcheck import check_gradients
from ...ops import placeholder
from ...ops import sum as sum_
from .grading import Lab, different

lab = Lab(1, "an operator with a gradient", "lab1_operator.py")
X = np.array([-3.0, -0.5, 0.0, 1.0, 4.0])


def softsign(x: np.ndarray, scale: float) -> np.ndarray:
    made: np.ndarray = x / (scale + np.abs(x))
    return made


@lab.check("the values are right", hint="The forward function is one line of array arithmetic: use xp.abs.")
def values(student: ModuleType) -> str:
    return different(student.softsign.forward(np, X, scale=1.0), softsign(X, 1.0))


@lab.check("`scale` is respected", hint="scale stands beside |x|, below the line.")
def attribute(student: ModuleType) -> str:
    return different(evaluate(student.softsign(X, scale=3.0)), softsign(X, 3.0))


@lab.check("the values come from `xp`, not from NumPy", hint="Call xp.abs, so that the same text runs on a GPU.")
def module(student: ModuleType) -> str:
    student.softsign.forward(np, X, scale=1.0)
    names = student.softsign.forward.__code__.co_names
    return "the forward function names NumPy itself" if {"np", "numpy"} & set(names) else ""


def disagreement(student: ModuleType, order: int) -> str:
    x = placeholder("x", (3,))
    gradients(sum_(student.softsign(x)), [x])
    try:
        check_gradients(student.softsign, (3, 4), order=order, scale=1.5)
    except GradientError as error:
        return error.message
    return ""


lab.check(
    "the gradient agrees with finite differences",
    hint="Use the quotient rule for x > 0 and for x < 0, then see what both have in common. Do not forget g.",
)(partial(disagreement, order=1))
lab.check(
    "so does the gradient of the gradient",
    hint="The rule must be written in graph functions of the nodes x and y (ht.abs, ...), with no NumPy in between.",
)(partial(disagreement, order=2))


@lab.check(
    "`into` writes the right values", hint="The last step must leave the quotient in out. Which step comes first?"
)
def into(student: ModuleType) -> str:
    out = np.full_like(X, np.nan)
    x = X.copy()
    student.softsign.into_rule(np, out, x, scale=2.0)
    return different(out, softsign(X, 2.0)) or different(x, X, "the input was changed: ")


@lab.check(
    "`into` makes no other array", hint="Each of the three steps takes out=out, and an operator sign has no out."
)
def allocates_nothing(student: ModuleType) -> str:
    x = np.ones(100_000)
    out = np.empty_like(x)
    tracemalloc.start()
    try:
        student.softsign.into_rule(np, out, x, scale=2.0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return f"{peak:,} bytes were allocated for an array of {x.nbytes:,}" if peak > x.nbytes / 2 else ""

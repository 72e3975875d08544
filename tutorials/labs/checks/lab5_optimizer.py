"""The checks of lab 5. They check that it is Lion, not how well it trains."""

from __future__ import annotations

from typing import Any

import numpy as np

from hetu.teach.labs import Lab, Student, different

lab = Lab("5", "an optimizer", "lab5_optimizer.py", with_hetu=True)
START = np.array([1.0, -2.0, 0.5], np.float32)
GRADIENTS = np.array([[1.0, -2, 0.25], [-3, -1, 0.5], [2, 4, -2], [-1, 0.5, 1]], np.float32)
DECAY = {"rate": 0.1, "every": 2, "factor": 0.5}


@lab.check("the first step", hint="m is zero, so p moves by rate against the sign of the gradient.")
def first_step(student: Student) -> str:
    seen = different(student.trained(START, GRADIENTS[:1], 0.1, {})[0], [0.9, -1.9, 0.4])
    ### BEGIN HIDDEN TESTS
    seen = seen or compared(student, 1, 0.3)[0]
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "the running mean is kept in a slot",
    hint='Return two entries: for p and for self.slot(p, "lion_m"). What is not returned is not committed.',
)
def slot(student: Student) -> str:
    seen = different(student.trained(START, GRADIENTS[:1], 0.1, {})[1], [0.01, -0.02, 0.0025], "the running mean: ")
    ### BEGIN HIDDEN TESTS
    seen = seen or compared(student, 1, 0.1)[1]
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "many steps",
    hint="The new p needs the old m. All values of a step are computed from the old ones: write both so.",
    points=2,
)
def many_steps(student: Student) -> str:
    seen = different(student.trained(START, GRADIENTS, 0.1, {})[0], [1.0, -2.0, 0.3])
    ### BEGIN HIDDEN TESTS
    seen = seen or compared(student, 30, 0.1)[0]
    ### END HIDDEN TESTS
    return seen


@lab.check("both betas matter", hint="beta1 mixes for the step, beta2 for the mean; use self.beta1 and self.beta2.")
def betas(student: Student) -> str:
    values, mean = student.trained(START, GRADIENTS, 0.1, {"beta1": 0.5, "beta2": 0.2})
    seen = different(values, [1.0, -2.0, 0.5]) or different(mean, [-0.5696, 0.9952, 0.4976], "the running mean: ")
    ### BEGIN HIDDEN TESTS
    low, high = (float(b) for b in student.rng.uniform([0.3, 0.1], [0.6, 0.4]))
    seen = seen or "".join(compared(student, 20, 0.1, beta1=low, beta2=high))
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "the rate may follow a schedule",
    hint="Then rate is a float64 node, float64 times float32 is float64, and the new value must have the type of p. "
    "ht.astype(node, dtype) converts.",
    points=2,
)
def schedule(student: Student) -> str:
    values, _ = student.trained(START, GRADIENTS, DECAY, {})
    seen = different(values, [1.0, -1.9, 0.3])
    ### BEGIN HIDDEN TESTS
    seen = seen or compared(student, 6, [0.1, 0.1, 0.05, 0.05, 0.025, 0.025])[0]
    ### END HIDDEN TESTS
    return seen


### BEGIN HIDDEN TESTS
def compared(student: Student, steps: int, rate: Any, **options: float) -> tuple[str, str]:
    """How the parameter and the mean differ from the formulas, with gradients that are drawn."""
    start, gradients = student.rng.normal(size=5), student.rng.normal(size=(steps, 5))
    start, gradients = start.astype(np.float32), gradients.astype(np.float32)
    values, mean = student.trained(start, gradients, DECAY if isinstance(rate, list) else rate, options)
    p, m = lion(start, gradients, rate if isinstance(rate, list) else [rate] * steps, **options)
    return different(values, p, tolerance=1e-5), different(mean, m, "the running mean: ", tolerance=1e-5)


def lion(
    start: np.ndarray, gradients: np.ndarray, rates: list[float], beta1: float = 0.9, beta2: float = 0.99
) -> tuple[np.ndarray, np.ndarray]:
    p, m = start.astype(float), np.zeros(len(start))
    for rate, g in zip(rates, gradients.astype(float)):
        p = p - rate * np.sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g
    return p, m


### END HIDDEN TESTS

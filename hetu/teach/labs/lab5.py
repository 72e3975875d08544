"""The checks of lab 5. They check that it is Lion, not how well it trains."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ...core.executor import Executor
from ...ops import placeholder, variable
from ...ops import sum as sum_
from ...schedules import step_decay
from .grading import Lab, different

lab = Lab(5, "an optimizer", "lab5_optimizer.py")
START = np.array([1.0, -2.0, 0.5], np.float32)
GRADIENTS = np.random.default_rng(5).normal(size=(6, 3)).astype(np.float32)


def trained(student: ModuleType, rate: Any, steps: int, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """The parameter and its running mean after some steps, in which it sees the rows of `GRADIENTS`."""
    p, g = variable("p", START, (3,)), placeholder("g", (3,))
    executor = Executor([sum_(p * g), student.Lion(rate, **options).minimize(sum_(p * g))])
    for row in GRADIENTS[:steps]:
        executor.run({g: row})
    if f"{p.name}/lion_m" not in executor.state:
        raise LookupError(f"there is no running mean among the variables {', '.join(executor.state)}")
    return executor.state[p], executor.state[f"{p.name}/lion_m"]


def lion(rates: list[float], beta1: float = 0.9, beta2: float = 0.99) -> tuple[np.ndarray, np.ndarray]:
    p, m = START.astype(float), np.zeros(3)
    for rate, g in zip(rates, GRADIENTS.astype(float)):
        p = p - rate * np.sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g
    return p, m


@lab.check("the first step", hint="m is zero, so p moves by rate against the sign of the gradient.")
def first_step(student: ModuleType) -> str:
    return different(trained(student, 0.1, 1)[0], lion([0.1])[0])


@lab.check(
    "the running mean is kept in a slot",
    hint='Return two entries: for p and for self.slot(p, "lion_m"). What is not returned is not committed.',
)
def slot(student: ModuleType) -> str:
    return different(trained(student, 0.1, 1)[1], lion([0.1])[1], "the running mean: ")


@lab.check(
    "six steps", hint="The new p needs the old m. All values of a step are computed from the old ones: write both so."
)
def six_steps(student: ModuleType) -> str:
    return different(trained(student, 0.1, 6)[0], lion([0.1] * 6)[0])


@lab.check("both betas matter", hint="beta1 mixes for the step, beta2 for the mean; use self.beta1 and self.beta2.")
def betas(student: ModuleType) -> str:
    values, mean = trained(student, 0.1, 6, beta1=0.5, beta2=0.2)
    wanted = lion([0.1] * 6, beta1=0.5, beta2=0.2)
    return different(values, wanted[0]) or different(mean, wanted[1], "the running mean: ")


@lab.check(
    "the rate may follow a schedule",
    hint="Then rate is a float64 node, float64 times float32 is float64, and the new value must have the type of p. "
    "ht.astype(node, dtype) converts.",
)
def schedule(student: ModuleType) -> str:
    values, _ = trained(student, step_decay(0.1, every=2, factor=0.5), 6)
    return different(values, lion([0.1, 0.1, 0.05, 0.05, 0.025, 0.025])[0])

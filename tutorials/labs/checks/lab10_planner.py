"""The checks of lab 10. A model is (operations, parameters, activations, layers, exchanged), a machine (speed,
bandwidth, memory)."""

from __future__ import annotations

from typing import Any

import numpy as np

from hetu.teach.labs import Lab, Student, different

lab = Lab("10", "a planner of parallel training", "lab10_planner.py")
Plan = tuple[int, int, int]
Numbers = tuple[Any, ...]
MODEL = (6e12, 1_000_000, 8e6, 4, 2e6)
MACHINE = (1e12, 1e9, 1e9)


@lab.check("all plans", hint="Data times tensor times stages is the number of ranks: try all divisors for each.")
def all_plans(student: Student) -> str:
    found = different(student.plans(4), [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)])
    ### BEGIN HIDDEN TESTS
    for ranks in (1, 7, int(student.rng.choice([12, 24, 30, 36, 48]))):
        found = found or different(student.plans(ranks), divided(ranks), f"{ranks} ranks: ")
    ### END HIDDEN TESTS
    return found


@lab.check(
    "what a rank holds",
    hint="Data ranks all hold the parameters, so data divides the activations only. Do not forget gradients and means.",
    points=2,
)
def holds(student: Student) -> str:
    found = different(student.memory(MODEL, (1, 1, 1)), 24e6) or different(student.memory(MODEL, (2, 2, 1)), 10e6)
    ### BEGIN HIDDEN TESTS
    for _ in range(4):
        model, _, plan = drawn(student.rng)
        data, tensor, stages = plan
        wanted = (16 * model[1] + model[2] / data) / tensor / stages
        found = found or different(student.memory(model, plan), wanted, f"plan {plan}: ")
    ### END HIDDEN TESTS
    return found


@lab.check("a ring all-reduce", hint="Each rank sends 2 (n - 1) / n of the data; one rank alone sends nothing.")
def ring(student: Student) -> str:
    found = different(student.all_reduce(4, 8e6, 1e9), 0.012) or different(student.all_reduce(1, 8e6, 1e9), 0.0)
    ### BEGIN HIDDEN TESTS
    for _ in range(3):
        n, nbytes, bandwidth = int(student.rng.integers(2, 99)), float(student.rng.uniform(1, 9)) * 1e6, 3e8
        found = found or different(student.all_reduce(n, nbytes, bandwidth), (2 - 2 / n) * nbytes / bandwidth)
    ### END HIDDEN TESTS
    return found


@lab.check("one rank only computes", hint="Operations by speed; nothing is sent, and there is no bubble.")
def alone(student: Student) -> str:
    found = different(student.seconds(MODEL, MACHINE, (1, 1, 1), 4), 6.0)
    ### BEGIN HIDDEN TESTS
    model, machine, _ = drawn(student.rng)
    found = found or different(student.seconds(model, machine, (1, 1, 1), 3), model[0] / machine[0])
    ### END HIDDEN TESTS
    return found


@lab.check("stages wait for each other", hint="3 stages and 4 parts take 6 times a part's time instead of 4.")
def piped(student: Student) -> str:
    found = different(student.seconds(MODEL, MACHINE, (1, 1, 3), 4), 3.0)
    ### BEGIN HIDDEN TESTS
    for _ in range(3):
        model, machine, _ = drawn(student.rng)
        stages, parts = (int(n) for n in student.rng.integers(2, 9, 2))
        found = found or timed(student, model, machine, (1, 1, stages), parts)
    ### END HIDDEN TESTS
    return found


@lab.check("data ranks add up gradients", hint="4 bytes for each parameter that the rank holds, not for all of them.")
def summed(student: Student) -> str:
    found = different(student.seconds(MODEL, MACHINE, (2, 1, 1), 4), 3.004)
    ### BEGIN HIDDEN TESTS
    for _ in range(3):
        model, machine, (data, _, stages) = drawn(student.rng)
        found = found or timed(student, model, machine, (data, 1, stages), 5)
    ### END HIDDEN TESTS
    return found


@lab.check(
    "tensor ranks add up activations",
    hint="Once for each layer that the rank holds: layers by stages. Its data rank sees only a part of the samples.",
    points=2,
)
def added(student: Student) -> str:
    found = different(student.seconds(MODEL, MACHINE, (1, 2, 1), 4), 3.008)
    ### BEGIN HIDDEN TESTS
    for _ in range(4):
        model, machine, plan = drawn(student.rng)
        found = found or timed(student, model, machine, plan, 6)
    ### END HIDDEN TESTS
    return found


@lab.check("the fastest plan", hint="Ask for the seconds of each plan, and take the smallest.")
def fastest(student: Student) -> str:
    found = different(student.best((*MODEL[:4], 3e6), MACHINE, 4, 4), (4, 1, 1))
    ### BEGIN HIDDEN TESTS
    for _ in range(6):
        model, machine, _ = drawn(student.rng)
        found = found or chosen(student, model, (*machine[:2], 1e18), int(student.rng.choice([8, 12, 16])))
    ### END HIDDEN TESTS
    return found


@lab.check(
    "only plans that fit",
    hint="A plan that needs exactly the memory of a rank fits. There cannot be more stages than layers. If none fits, "
    "say None.",
    points=2,
)
def fitting(student: Student) -> str:
    tight = (MACHINE[0], MACHINE[1], 6e6)
    found = different(student.best(MODEL, tight, 4, 4), (1, 4, 1))
    found = found or different(student.best(MODEL, (1e12, 1e9, 1e3), 4, 4), None, "no memory: ")
    deep = (6e12, 1e9, 8e6, 2, 1e12)  # so many parameters that four stages were best, if there were four layers
    found = found or different(student.best(deep, (1e12, 1e9, 1e12), 4, 99), (2, 1, 2), "two layers: ")
    ### BEGIN HIDDEN TESTS
    for part in (0.3, 0.5, 0.8):
        model, machine, _ = drawn(student.rng)
        needs = sorted((16 * model[1] + model[2] / d) / t / s for d, t, s in divided(16))
        found = found or chosen(student, model, (*machine[:2], needs[int(part * len(needs))]), 16)
    ### END HIDDEN TESTS
    return found


### BEGIN HIDDEN TESTS
def divided(ranks: int) -> list[Plan]:
    sizes = range(1, ranks + 1)
    return [(d, t, s) for d in sizes for t in sizes if ranks % (d * t) == 0 for s in (ranks // (d * t),)]


def drawn(rng: np.random.Generator) -> tuple[Numbers, Numbers, Plan]:
    """A model, a machine and a plan in whose seconds every term counts."""
    parameters = 2 ** int(rng.integers(17, 22))
    operations, activations, exchanged, bandwidth = rng.uniform(1, 9, 4).tolist()
    model = (operations * 1e10, parameters, activations * parameters, int(rng.integers(3, 9)), exchanged * 1e5)
    data, tensor, stages = (int(n) for n in rng.integers(2, 6, 3))
    return model, (1e12, bandwidth * 1e8, 1e12), (data, tensor, stages)


def takes(model: Numbers, machine: Numbers, plan: Plan, parts: int) -> float:
    operations, parameters, _, layers, exchanged = model
    (data, tensor, stages), (speed, bandwidth, _) = plan, machine
    sent = (2 - 2 / data) * 4 * parameters / tensor / stages + layers / stages * (2 - 2 / tensor) * exchanged / data
    return float(operations / (speed * data * tensor * stages) * (1 + (stages - 1) / parts) + sent / bandwidth)


def timed(student: Student, model: Numbers, machine: Numbers, plan: Plan, parts: int) -> str:
    got = student.seconds(model, machine, plan, parts)
    return different(got, takes(model, machine, plan, parts), f"plan {plan}: ")


def chosen(student: Student, model: Numbers, machine: Numbers, ranks: int) -> str:
    """Whether the plan is as fast as the fastest that fits, up to rounding."""
    plans = [
        p
        for p in divided(ranks)
        if (16 * model[1] + model[2] / p[0]) / p[1] / p[2] <= machine[2] * (1 + 1e-12) and p[2] <= model[3]
    ]
    got = student.best(model, machine, ranks, 8)
    if not plans or got is None:
        return different(got, plans[0] if plans else None)
    least = min(takes(model, machine, p, 8) for p in plans)
    if tuple(got) in plans and takes(model, machine, tuple(got), 8) <= least * (1 + 1e-9):
        return ""
    return f"got {got!r:.60}, and another plan that fits takes {least:.6g} s"


### END HIDDEN TESTS

"""The checks of lab 9. Orders are lists of pairs (kind, part)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from hetu.teach.labs import Lab, Student, different

lab = Lab("9", "pipeline schedules", "lab9_pipeline.py")
Order = list[tuple[str, int]]
F, B = "F", "B"


def all_forward(parts: int) -> Order:
    return [(F, k) for k in range(parts)] + [(B, k) for k in range(parts)]


def passes(*text: str) -> Order:
    return [(p[0], int(p[1:])) for p in text]


def ordered(student: Student, stage: int, stages: int, parts: int, wanted: Order) -> str:
    got = student.one_f_one_b(stage, stages, parts)
    return different(got, wanted, f"stage {stage} of {stages}, {parts} parts: ")


@lab.check("the last stage: forward and backward in turn", hint="There is no stage behind it: it begins with a pair.")
def last(student: Student) -> str:
    found = ordered(student, 1, 2, 3, passes("F0", "B0", "F1", "B1", "F2", "B2"))
    ### BEGIN HIDDEN TESTS
    stages, parts = (int(n) for n in student.rng.integers(3, 9, 2))  # two stages are the example
    found = found or ordered(student, stages - 1, stages, parts, order(stages - 1, stages, parts))
    ### END HIDDEN TESTS
    return found


@lab.check(
    "the first stage runs ahead of those behind it",
    hint="Of 3 stages the first runs 2 forward passes, then the forward pass of part 2 and the backward one of part 0.",
    points=2,
)
def ahead(student: Student) -> str:
    found = ordered(student, 0, 3, 4, passes("F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"))
    ### BEGIN HIDDEN TESTS
    for _ in range(4):
        stages = int(student.rng.integers(3, 7))
        stage, parts = int(student.rng.integers(stages)), stages + int(student.rng.integers(6))
        found = found or ordered(student, stage, stages, parts, order(stage, stages, parts))
    ### END HIDDEN TESTS
    return found


@lab.check("fewer parts than stages", hint="No stage can run ahead by more parts than there are.")
def few(student: Student) -> str:
    found = ordered(student, 0, 5, 2, passes("F0", "F1", "B0", "B1"))
    ### BEGIN HIDDEN TESTS
    for _ in range(4):
        stages = int(student.rng.integers(4, 9))
        parts, stage = int(student.rng.integers(1, stages - 2)), int(student.rng.integers(stages))
        found = found or ordered(student, stage, stages, parts, order(stage, stages, parts))
    ### END HIDDEN TESTS
    return found


@lab.check("how many activations are kept", hint="Count up and down along the order, and remember the most.")
def held(student: Student) -> str:
    found = different(student.most_held(passes("F0", "F1", "B0", "F2", "B1", "B2")), 2)
    found = found or different(student.most_held(all_forward(5)), 5, "all forward: ")
    ### BEGIN HIDDEN TESTS
    for _ in range(4):
        drawn = some_order(student.rng, 9)
        count = np.cumsum([1 if kind == F else -1 for kind, _ in drawn]).max()
        found = found or different(student.most_held(drawn), int(count))
    ### END HIDDEN TESTS
    return found


@lab.check(
    "a pass starts when its stage is free and what it needs is there",
    hint="Forward passes wait for the stage before. Keep when each stage is free, and when each pass has ended.",
    points=2,
)
def forward_only(student: Student) -> str:
    found = different(student.finished([passes("F0", "F1"), passes("F0", "F1")], [1.0, 3.0], [0.0, 0.0]), 7.0)
    ### BEGIN HIDDEN TESTS
    for _ in range(4):
        stages, parts = (int(n) for n in student.rng.integers(2, 6, 2))
        orders = [[(F, k) for k in range(parts)]] * stages
        found = found or timed(student, orders)
    ### END HIDDEN TESTS
    return found


@lab.check(
    "backward passes go from the last stage to the first",
    hint="On the last stage a backward pass needs its own forward pass only; on the others, the backward pass behind.",
    points=2,
)
def whole(student: Student) -> str:
    found = different(student.finished([all_forward(2)] * 2, [1.0, 1.0], [2.0, 2.0]), 9.0)
    ### BEGIN HIDDEN TESTS
    for _ in range(4):
        stages, parts = (int(n) for n in student.rng.integers(2, 6, 2))
        found = found or timed(student, [all_forward(parts)] * stages)
        found = found or timed(student, [order(s, stages, parts) for s in range(stages)])
    ### END HIDDEN TESTS
    return found


@lab.check(
    "orders that wait for each other are told",
    hint="If no stage can run the next pass of its order and some are left, nobody ever will: return None.",
)
def stuck(student: Student) -> str:
    crossed = [passes("F0", "B0", "F1", "B1"), passes("F1", "F0", "B0", "B1")]
    found = different(student.finished(crossed, [1.0, 1.0], [1.0, 1.0]), None)
    ### BEGIN HIDDEN TESTS
    found = found or timed(student, [all_forward(3)] * 3)
    for _ in range(6):
        stages = int(student.rng.integers(2, 4))
        found = found or timed(student, [some_order(student.rng, 3) for _ in range(stages)])
    ### END HIDDEN TESTS
    return found


@lab.check("the bubble", hint="How many passes does a stage run, and for how many does it wait at the two ends?")
def waited(student: Student) -> str:
    found = different(student.bubble(4, 4), 3 / 7) or different(student.bubble(1, 5), 0.0)
    ### BEGIN HIDDEN TESTS
    for _ in range(3):
        stages, parts = (int(n) for n in student.rng.integers(2, 12, 2))
        total = end([all_forward(parts)] * stages, [1.0] * stages, [1.0] * stages)
        found = found or different(student.bubble(stages, parts), 1 - 2 * parts / (total or 1.0))
    ### END HIDDEN TESTS
    return found


### BEGIN HIDDEN TESTS
def timed(student: Student, orders: list[Order]) -> str:
    forward, backward = student.rng.integers(1, 9, (2, len(orders))).astype(float).tolist()
    got, wanted = student.finished(orders, forward, backward), end(orders, forward, backward)
    if wanted is None or got is None:
        return "" if got is wanted else f"got {got!r:.40}, wanted {wanted} for the orders {orders!r:.300}"
    return different(got, wanted)


def end(orders: list[Order], forward: list[float], backward: list[float]) -> float | None:
    """When the last pass ends: a fixed point of "start after what is before on the stage, and after what is needed"."""
    names = [(kind, part, stage) for stage, row in enumerate(orders) for kind, part in row]
    before: dict[Any, list[Any]] = {name: [] for name in names}
    for stage, row in enumerate(orders):
        for one, two in pairwise(row):
            before[*two, stage].append((*one, stage))
        for kind, part in row:
            if kind == F and stage:
                before[F, part, stage].append((F, part, stage - 1))
            if kind == B:
                before[B, part, stage].append((F, part, stage))
                if stage + 1 < len(orders):
                    before[B, part, stage].append((B, part, stage + 1))
    ends = dict.fromkeys(names, 0.0)
    for _ in range(len(names) + 1):
        new = {
            (kind, part, stage): max([0.0, *(ends[b] for b in before[kind, part, stage])])
            + (forward if kind == F else backward)[stage]
            for kind, part, stage in names
        }
        if new == ends:
            return max(ends.values())
        ends = new
    return None  # it grows without end: a circle


def order(stage: int, stages: int, parts: int) -> Order:
    """1F1B by another way: a backward pass is due as soon as enough parts are under way."""
    made: Order = []
    sent = returned = 0
    while returned < parts:
        if sent < parts and sent - returned < stages - stage:
            made.append((F, sent))
            sent += 1
        else:
            made.append((B, returned))
            returned += 1
    return made


def some_order(rng: np.random.Generator, parts: int) -> Order:
    """Any order in which each forward pass comes before its backward pass."""
    made: Order = []
    waiting, left = [], [int(k) for k in rng.permutation(parts)]
    while left or waiting:
        if left and (not waiting or rng.random() < 0.5):
            waiting.append(left.pop())
            made.append((F, waiting[-1]))
        else:
            made.append((B, waiting.pop(int(rng.integers(len(waiting))))))
    return made


### END HIDDEN TESTS

"""The checks of lab 8: schedules as lists, a clock of the grader's own, and stages that are processes."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from hetu.teach.labs import Lab, Ran, Student, different, first

EARLIER = ("values.py", "operators.py", "program.py")
lab = Lab("8", "pipeline schedules", "pipeline.py", needs=EARLIER)
Schedule = list[list[list[Any]]]
TWO = [
    [["forward", 0], ["forward", 1], ["backward", 0], ["forward", 2], ["backward", 1], ["backward", 2]],
    [["forward", 0], ["backward", 0], ["forward", 1], ["backward", 1], ["forward", 2], ["backward", 2]],
]


def rng_of(student: Student) -> np.random.Generator:
    rng = np.random.default_rng(8)
    ### BEGIN HIDDEN TESTS
    rng = student.rng
    ### END HIDDEN TESTS
    return rng


@lab.check(
    "GPipe: all forward passes, then all backward passes",
    hint="Two loops one after the other, not one in the other.",
)
def gpipe(student: Student) -> str:
    stages, micro = (int(n) for n in rng_of(student).integers(2, 6, 2))
    steps = [["forward", m] for m in range(micro)] + [["backward", m] for m in range(micro)]
    return different(student.gpipe(stages, micro), [steps] * stages, f"{stages} stages, {micro} micro-batches: ")


@lab.check(
    "1F1B: warm up, then one of each in turn",
    hint="Stage s of p warms up with p - 1 - s forward passes, so the last with none; then it takes the next "
    "forward pass and the oldest backward pass, whose number counts from 0; the backward passes that are "
    "left come last.",
    points=2,
)
def in_turn(student: Student) -> str:
    seen = different(student.one_f_one_b(2, 3), TWO, "2 stages, 3 micro-batches: ")
    ### BEGIN HIDDEN TESTS
    for _ in range(4):
        stages, micro = int(student.rng.integers(2, 6)), int(student.rng.integers(6, 10))
        what = f"{stages} stages, {micro} micro-batches: "
        seen = seen or different(student.one_f_one_b(stages, micro), turns(stages, micro), what)
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "1F1B with fewer micro-batches than stages",
    hint="A stage cannot warm up with more forward passes than there are micro-batches.",
)
def few(student: Student) -> str:
    micro = int(rng_of(student).integers(1, 3))
    got = student.one_f_one_b(4, micro)
    wanted = [["forward", m] for m in range(micro)] + [["backward", m] for m in range(micro)]
    return different(got[0], wanted, f"4 stages, {micro} micro-batches: stage 0: ")


@lab.check(
    "how many micro-batches a stage keeps",
    hint="Count up at a forward pass and down at a backward pass; the answer is the largest count on the way.",
)
def kept(student: Student) -> str:
    seen = different([student.most_kept(steps) for steps in TWO], [2, 1])
    ### BEGIN HIDDEN TESTS
    for _ in range(3):
        steps, count, most = [], 0, 0
        for k in student.rng.integers(2, size=12):
            up = bool(k) or count == 0
            count += 1 if up else -1
            most = max(most, count)
            steps.append(["forward" if up else "backward", 0])
        seen = seen or different(student.most_kept(steps), most, f"{steps}: ")
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "the clock: a step begins when its stage is free and what it needs is there",
    hint="A forward pass needs that of stage s - 1, a backward pass that of stage s + 1. Begin at the later of "
    "both times.",
    points=2,
)
def clock(student: Student) -> str:
    seen = different((student.simulate(TWO, 1.0, 2.0) or [0])[0], 12, "2 stages, 3 micro-batches: time: ")
    ### BEGIN HIDDEN TESTS
    for _ in range(4):
        stages, micro = int(student.rng.integers(2, 6)), int(student.rng.integers(2, 7))
        f, b = (float(n) for n in student.rng.integers(1, 9, 2))
        for schedule in (turns(stages, micro), mixed(student.rng, stages, micro)):
            got, what = student.simulate(schedule, f, b), f"{stages} stages, {micro} micro-batches: "
            seen = seen or (got if got == "ValueError" else different(got[0], longest(schedule, f, b), what + "time: "))
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "the bubble: (p - 1) / (m + p - 1) of the time of all stages",
    hint="All stages together have time * (number of stages) seconds; what they work is the sum of all steps.",
)
def bubble(student: Student) -> str:
    stages, micro = (int(n) for n in rng_of(student).integers(2, 7, 2))
    steps = [["forward", m] for m in range(micro)] + [["backward", m] for m in range(micro)]
    got = student.simulate([steps] * stages, 1.0, 2.0)
    wanted = [3.0 * (micro + stages - 1), (stages - 1) / (micro + stages - 1)]
    return different(got, wanted, f"{stages} stages, {micro} micro-batches: [time, idle]: ")


@lab.check(
    "a schedule that never ends is refused",
    hint="If no stage can take its next step and some have steps left, raise ValueError.",
)
def stuck(student: Student) -> str:
    m = int(rng_of(student).integers(5))
    schedule = [[["forward", m], ["backward", m]], [["backward", m], ["forward", m]]]
    seen = different(student.simulate([[["backward", m], ["forward", m]], schedule[0]], 1.0, 1.0), "ValueError")
    return seen or different(student.simulate([schedule[0]] * 2, 1.0, 1.0), [4, 0.5], "one that ends: ")


def layers(rng: np.random.Generator, sizes: tuple[int, ...]) -> list[dict[str, np.ndarray]]:
    pairs = list(pairwise(sizes))
    return [{"w": rng.normal(size=pair).astype("f4"), "b": rng.normal(size=pair[1]).astype("f4")} for pair in pairs]


@lab.check(
    "a stage's backward pass",
    hint="For a stage that is not the last it is the gradient of sum(y * g), for x and for each weight, and "
    "there is no loss. The last one has the loss, for which g is the classes.",
    points=2,
)
def stage(student: Student) -> str:
    rng = rng_of(student)
    (w,) = layers(rng, (4, 3))
    x, g = rng.normal(size=(2, 4)).astype("f4"), rng.normal(size=(2, 3)).astype("f4")
    loss, dx, found = student.stage(w, x, g, False)
    d = g * (x @ w["w"] + w["b"] > 0)
    seen = different(loss, None, "loss: ") or different(dx, d @ w["w"].T, "dL/dx: ", 1e-4)
    seen = seen or different(found, {"w": x.T @ d, "b": d.sum(0)}, "", 1e-4)
    t = np.eye(3, dtype="f4")[rng.integers(3, size=2)]
    loss, dx, found = student.stage(w, x, t, True)
    y = np.exp(x @ w["w"] + w["b"])
    p = y / y.sum(1, keepdims=True)
    seen = seen or different(loss, -np.mean(np.log(p[t > 0])), "the last: loss: ", 1e-4)
    return seen or different(found, {"w": x.T @ (p - t) / 2, "b": (p - t).mean(0)}, "the last: ", 1e-4)


def trained(student: Student, schedule: Schedule) -> tuple[Ran, float, list[dict[str, np.ndarray]]]:
    """Three stages, four micro-batches of two samples: what the ranks say, and one process's loss and gradients."""
    rng = rng_of(student)
    w = layers(rng, (4, 5, 4, 3))
    x, t = rng.normal(size=(8, 4)).astype("f4"), np.eye(3, dtype="f4")[rng.integers(3, size=8)]
    args = [[w[r], schedule[r], np.split(x, 4), np.split(t, 4)] for r in range(3)]
    ran = student.on_ranks(3, "run", args, rendezvous=False)
    inputs, y = [], x
    for k, layer in enumerate(w):
        inputs.append(y)
        y = y @ layer["w"] + layer["b"]
        y = np.maximum(y, 0) if k < 2 else y
    p = np.exp(y) / np.exp(y).sum(1, keepdims=True)
    d, wanted = (p - t) / 8, []
    for k in (2, 1, 0):
        wanted.append({"w": inputs[k].T @ d, "b": d.sum(0)})
        d = d @ w[k]["w"].T * (inputs[k] > 0)
    return ran, float(-np.mean(np.log(p[t > 0]))), wanted[::-1]


F, B = ([[kind, m] for m in range(4)] for kind in ("forward", "backward"))
GPIPE = [F + B] * 3
WARM = [  # 1F1B
    [F[0], F[1], F[2], B[0], F[3], B[1], B[2], B[3]],
    [F[0], F[1], B[0], F[2], B[1], F[3], B[2], B[3]],
    [F[0], B[0], F[1], B[1], F[2], B[2], F[3], B[3]],
]


@lab.check(
    "three ranks come to the gradients of one process",
    hint="Micro-batches add to the same gradient; a mean over the batch is their sum divided by how many they "
    "are. Each backward pass is made with the input of its own forward pass.",
    points=3,
)
def as_one(student: Student) -> str:
    seen = ""
    for name, schedule in (("GPipe", GPIPE), ("1F1B", WARM)):
        ran, _, wanted = trained(student, schedule)
        for r, (_, found) in enumerate(ran.values):
            seen = seen or different(found, wanted[r], f"{name}: rank {r}: ", 1e-4)
    return seen


@lab.check(
    "the loss is the mean of all micro-batches, on the last rank",
    hint="The last stage has one for each; others none.",
)
def loss(student: Student) -> str:
    ran, wanted, _ = trained(student, GPIPE)
    seen = different(ran.values[2][0], wanted, "rank 2: ", 1e-4)
    return seen or first(different(ran.values[r][0], None, f"rank {r}: ") for r in (0, 1))


@lab.check(
    "a message forward and one backward, for each micro-batch and border",
    hint="The first stage receives no input and sends no gradient; the last sends no result.",
)
def traffic(student: Student) -> str:
    ran, _, wanted = trained(student, WARM)
    seen = first(different(found, wanted[r], f"rank {r}: ", 1e-4) for r, (_, found) in enumerate(ran.values))
    counts = [[sum(m.source == a and m.to == b for m in ran.messages) for b in range(3)] for a in range(3)]
    return seen or different(counts, [[0, 4, 0], [4, 0, 4], [0, 4, 0]], "messages from rank (row) to rank (column): ")


### BEGIN HIDDEN TESTS
def turns(stages: int, micro: int) -> Schedule:
    """Each stage in its turn: backward as soon as it holds as many micro-batches as it may."""
    found: Schedule = []
    for stage in range(stages):
        forward, backward, steps = 0, 0, []
        while backward < micro:
            if forward < micro and forward - backward < stages - stage:
                steps.append(["forward", forward])
                forward += 1
            else:
                steps.append(["backward", backward])
                backward += 1
        found.append(steps)
    return found


def mixed(rng: np.random.Generator, stages: int, micro: int) -> Schedule:
    """All forward passes in one random order, then all backward passes in another."""
    there, back = rng.permutation(micro), rng.permutation(micro)
    steps = [["forward", int(m)] for m in there] + [["backward", int(m)] for m in back]
    return [list(steps) for _ in range(stages)]


def longest(schedule: Schedule, f: float, b: float) -> float:
    """The longest path through the steps: after the one before it, and after its neighbor's."""

    @cache
    def end(stage: int, k: int) -> float:
        kind, m = schedule[stage][k]
        before = [end(stage, k - 1)] if k else []
        other = stage - 1 if kind == "forward" else stage + 1
        if 0 <= other < len(schedule):
            before.append(end(other, schedule[other].index([kind, m])))
        return max(before, default=0.0) + (f if kind == "forward" else b)

    return max(end(stage, len(steps) - 1) for stage, steps in enumerate(schedule))


### END HIDDEN TESTS

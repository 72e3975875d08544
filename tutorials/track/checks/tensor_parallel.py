"""The checks of lab 7: what ranks compute with parts of the weights is what one computes with all of them."""

from __future__ import annotations

import numpy as np

from hetu.teach.labs import Lab, Ran, Student, different, first

EARLIER = ("values.py", "operators.py", "program.py", "training.py", "ring.py")
lab = Lab("7", "tensor parallel layers", "tensor_parallel.py", needs=EARLIER)
DIVIDED = {"a": 1, "b": 0}


def rng_of(student: Student) -> np.random.Generator:
    rng = np.random.default_rng(7)
    ### BEGIN HIDDEN TESTS
    rng = student.rng
    ### END HIDDEN TESTS
    return rng


@lab.check("a part is cut along its axis", hint="np.split(array, n, axis) has all n parts, in the order of the ranks.")
def parts(student: Student) -> str:
    array = rng_of(student).normal(size=(4, 6))
    seen = first(different(student.part(array, 0, r, 2)[0], array[2 * r : 2 * r + 2], "axis 0: ") for r in (0, 1))
    return seen or first(
        different(student.part(array, 1, r, 3)[0], array[:, 2 * r : 2 * r + 2], "axis 1: ") for r in range(3)
    )


@lab.check(
    "a part is a copy",
    hint="A slice is a view of the whole array: training the part would change it.",
    points=0.5,
)
def copied(student: Student) -> str:
    array = rng_of(student).normal(size=(4, 6))
    seen = different(student.part(array, 0, 1, 2)[1], array, "the whole, after the part was written: ")
    return seen or different(student.part(array, 1, 1, 2)[1:], [array, True], "along axis 1: ")


@lab.check(
    "the whole again, by one all-gather",
    hint="Put the own part in its place of one flat array, gather, then join the n parts along the axis.",
)
def wholes(student: Student) -> str:
    seen = ""
    for axis in (0, 1):
        array = rng_of(student).normal(size=(4, 6))
        ran = student.on_ranks(2, "whole", [[part, axis] for part in np.split(array, 2, axis)])
        seen = seen or first(different(got, array, f"axis {axis}: rank {r}: ") for r, got in enumerate(ran.values))
        seen = seen or different(len(ran.sent(0)), 1, f"axis {axis}: messages of rank 0: ")
    return seen


@lab.check(
    "local shapes, and axes that cannot be divided",
    hint="Axis 0 is an axis, too: `if axis` is False for it. Ask whether it is None.",
)
def shapes(student: Student) -> str:
    n = int(rng_of(student).integers(2, 7))
    whole = {"a": [4, 3 * n], "b": [5 * n, 2], "c": [7, 7]}
    wanted = {"a": [4, 3], "b": [5, 2], "c": [7, 7]}
    seen = different(student.local_shapes(whole, DIVIDED, n), wanted, f"{n} ranks: ")
    for name, shape in (("a", [4, 3 * n + 1]), ("b", [5 * n + 1, 2])):
        got = student.local_shapes(whole | {name: shape}, DIVIDED, n)
        seen = seen or different(got, "ValueError", f"{name} of shape {shape} on {n} ranks: ")
    return seen


def problem(student: Student, n: int) -> tuple[list[np.ndarray], list[list[np.ndarray]], np.ndarray]:
    """x (3, 4), w1 (4, 8n), b1, w2 (8n, 5), b2; each rank's part of them; and t."""
    rng = rng_of(student)
    x, w1, b1, w2, b2, t = (rng.normal(size=s) for s in ((3, 4), (4, 8 * n), (8 * n,), (8 * n, 5), (5,), (3, 5)))
    local = zip(np.split(w1, n, 1), np.split(b1, n), np.split(w2, n))
    return [x, w1, b1, w2, b2], [[x, w, b, v, b2] for w, b, v in local], t


@lab.check(
    "a layer divided by columns: this rank's columns, and no message",
    hint="x is whole and stays as it is: `enter`.",
)
def columns(student: Student) -> str:
    (x, w, b, *_), local, _ = problem(student, 2)
    ran = student.on_ranks(2, "forward", [["column_linear", each[:3]] for each in local])
    wanted = np.split(x @ w + b, 2, 1)
    seen = first(different(got, wanted[r], f"rank {r}: ") for r, got in enumerate(ran.values))
    return seen or different(len(ran.messages), 0, "messages: ")


@lab.check(
    "a layer divided by rows: the sum of all terms, and the bias once",
    hint="Each rank has a term of x w: `leave` adds them up. Add the bias behind it, or it is there once for "
    "each rank.",
    points=2,
)
def rows(student: Student) -> str:
    (x, w1, _, w2, b2), local, _ = problem(student, 2)
    h = np.split(x @ w1, 2, 1)
    ran = student.on_ranks(2, "forward", [["row_linear", [h[r], local[r][3], b2]] for r in range(2)])
    return first(different(got, x @ w1 @ w2 + b2, f"rank {r}: ") for r, got in enumerate(ran.values))


def together(student: Student) -> tuple[Ran, list[np.ndarray], list[list[np.ndarray]]]:
    """What two ranks say, the whole [y, dx, dw1, db1, dw2, db2], and each rank's part of it."""
    (x, w1, b1, w2, b2), local, t = problem(student, 2)
    z = x @ w1 + b1
    h, d = np.maximum(z, 0), t @ w2.T * (z > 0)
    whole = [h @ w2 + b2, d @ w1.T, x.T @ d, d.sum(0), h.T @ t, t.sum(0)]
    y, dx, dw1, db1, dw2, db2 = whole
    cut = zip(np.split(dw1, 2, 1), np.split(db1, 2), np.split(dw2, 2))
    return student.on_ranks(2, "two_layers", [[each, t] for each in local]), whole, [[y, dx, *c, db2] for c in cut]


@lab.check(
    "backward through columns: every rank has the whole gradient of x",
    hint="Each knows what came through its own columns; `enter` backward is an all-reduce.",
    points=2,
)
def entering(student: Student) -> str:
    ran, whole, _ = together(student)
    return first(different(got[1], whole[1], f"dL/dx on rank {r}: ") for r, got in enumerate(ran.values))


@lab.check(
    "backward through rows: the gradient passes as it is",
    hint="The sum y has the same g on all ranks, and each term of a sum gets g once: `leave` backward adds nothing up.",
    points=2,
)
def leaving(student: Student) -> str:
    ran, _, wanted = together(student)
    names = ["y", "dL/dx", "dL/dw1", "dL/db1", "dL/dw2", "dL/db2"]
    seen = ""
    for r, got in enumerate(ran.values):
        for k in (2, 3, 4, 5):
            seen = seen or different(got[k], wanted[r][k], f"{names[k]} on rank {r}: ")
    return seen


@lab.check(
    "two layers cost one all-reduce forward and one backward",
    hint="Between the columns and the rows nothing is sent: relu takes this rank's columns as they are.",
)
def traffic(student: Student) -> str:
    ran, whole, _ = together(student)
    seen = first(different(got[0], whole[0]) for got in ran.values)
    seen = seen or different(len(ran.sent(0)), 4, "messages of rank 0, two for an all-reduce: ")
    return seen or different(sum(m.numbers for m in ran.sent(0)), 15 + 12, "numbers that rank 0 sent: ")


@lab.check("LeNet's classifier on two ranks", hint="Columns, relu, rows, relu, and the third layer whole.")
def lenet(student: Student) -> str:
    rng = rng_of(student)
    sizes = {
        "fc1/w": (400, 120),
        "fc1/b": (120,),
        "fc2/w": (120, 84),
        "fc2/b": (84,),
        "fc3/w": (84, 10),
        "fc3/b": (10,),
    }
    w, x = {name: rng.normal(size=size) / 10 for name, size in sizes.items()}, rng.random((2, 400))
    h = np.maximum(np.maximum(x @ w["fc1/w"] + w["fc1/b"], 0) @ w["fc2/w"] + w["fc2/b"], 0)
    local = []
    for r in range(2):
        cut = {"fc1/w": np.split(w["fc1/w"], 2, 1)[r], "fc1/b": np.split(w["fc1/b"], 2)[r]}
        local.append(w | cut | {"fc2/w": np.split(w["fc2/w"], 2)[r]})
    ran = student.on_ranks(2, "classifier", [[x, each] for each in local])
    return first(different(got, h @ w["fc3/w"] + w["fc3/b"], f"rank {r}: ") for r, got in enumerate(ran.values))

"""The checks of lab 4. Packing values into an arena can need more than the peak."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ...core.autodiff import gradients
from ...core.executor import Executor
from ...core.op import LEAVES
from ...core.program import Program
from ...ops import placeholder, tanh
from ...ops import sum as sum_
from .grading import Lab, different

lab = Lab(4, "liveness: the memory a program needs", "lab4_liveness.py")


class Row(NamedTuple):
    """An instruction, as in the student's file; theirs may have been changed."""

    name: str
    nbytes: int
    reads: tuple[str, ...] = ()


CHAIN = [Row("a", 10), Row("b", 20, ("a",)), Row("c", 5, ("b",)), Row("d", 1, ("c",))]
SKIP = [Row("a", 10), Row("b", 20, ("a",)), Row("c", 5, ("b",)), Row("d", 1, ("c", "a"))]


@lab.check("a value lives until its last reader", hint="Walk the program; a later reader replaces an earlier one.")
def chain(student: ModuleType) -> str:
    return different(student.last_use(SKIP, ["d"]), {"a": 3, "b": 2, "c": 3, "d": 3})


@lab.check(
    "results live to the end", hint="The index of the last instruction, even if another reads the result before."
)
def results(student: ModuleType) -> str:
    return different(student.last_use(CHAIN, ["b", "d"]), {"a": 1, "b": 3, "c": 3, "d": 3})


@lab.check("a value nobody reads dies where it is made", hint="Begin with the instruction that makes the value.")
def unread(student: ModuleType) -> str:
    return different(student.last_use([Row("a", 10), Row("b", 20)], ["b"]), {"a": 0, "b": 1})


@lab.check("the peak of a chain", hint="While b is made from a, both are there. Which pair of neighbors is largest?")
def peak(student: ModuleType) -> str:
    return different(student.peak_bytes(CHAIN, ["d"]), 30)


@lab.check("the peak with a long-lived value", hint="a is read by d, so it is live while b and c are made.")
def skip(student: ModuleType) -> str:
    return different(student.peak_bytes(SKIP, ["d"]), 35) or different(student.peak_bytes([], []), 0, "nothing: ")


@lab.check(
    "the training step of tutorial 4, as hetu plans it without overwriting",
    hint="If the small examples pass and this does not, look at values that are read several times.",
)
def training_step(student: ModuleType) -> str:
    program, rows, fetched = compiled()
    wanted = reference(rows, fetched)
    return different(student.peak_bytes(rows, fetched), wanted, f"a program of {len(program.steps)} instructions: ")


@lab.check(
    "an operand may be overwritten when it dies",
    hint="b, c and d can all lie in one place. An instruction that overwrites adds nothing to what was live before it.",
)
def in_place(student: ModuleType) -> str:
    rows = [Row("a", 8), Row("b", 8, ("a",)), Row("c", 8, ("b",)), Row("d", 8, ("c",))]
    return different(student.peak_in_place(rows, ["d"]), 8)


@lab.check(
    "but not one that is read later, or of another size",
    hint="Compare the last use of the operand with the index of this instruction, and the two sizes.",
)
def not_in_place(student: ModuleType) -> str:
    later = [Row("a", 8), Row("b", 8, ("a",)), Row("c", 8, ("b", "a"))]
    smaller = [Row("a", 8), Row("b", 4, ("a",))]
    both = [Row("a", 8), Row("b", 8), Row("c", 8, ("a", "b"))]
    got = [
        student.peak_in_place(later, ["c"]),
        student.peak_in_place(smaller, ["b"]),
        student.peak_in_place(both, ["c"]),
    ]
    return different(got, [16, 12, 16])


def compiled() -> tuple[Program, list[Row], list[str]]:
    """A training step as rows, without views and without the variables and data that live elsewhere."""
    x = h = placeholder("x", (64, 32))
    for _ in range(4):
        h = tanh(h * 1.5)
    loss = sum_(h * h)
    program = Executor([loss, *gradients(loss, [x])], passes=[]).program({x: np.ones((64, 32))})
    roots = program.plan.roots

    def name(node: Any) -> str:
        return str(roots[node, 0][0].serial)

    rows = [
        Row(name(n), int(n.tensor.nbytes), tuple(name(i) for i in n.inputs if roots[i, 0][0].role not in LEAVES))
        for n in program.plan.order
    ]
    return program, rows, [name(f) for f in program.fetches]


def reference(rows: list[Row], fetched: list[str]) -> int:
    """The peak by the definition, instruction by instruction."""
    live = [
        sum(
            r.nbytes
            for first, r in enumerate(rows)
            if first <= at and (first == at or r.name in fetched or any(r.name in later.reads for later in rows[at:]))
        )
        for at in range(len(rows))
    ]
    return max(live)

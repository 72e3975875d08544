"""The checks of lab 3. Unlike hetu's own pass, they set no limit on the size of constants.

A graph goes over and comes back as rows, which are looked at and computed here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hetu.teach.labs import Lab, NoAnswer, Student, different

lab = Lab("3", "a pass that folds constants", "lab3_fold_constants.py", with_hetu=True)
MEANING = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply, "tanh": np.tanh, "exp": np.exp}
Rows = list[list[Any]]


def names(rows: Rows) -> list[str]:
    return [row[0] for row in rows]


def values(rows: Rows, leaves: dict[int, np.ndarray]) -> list[np.ndarray]:
    """What each row of a graph is worth, computed here."""
    worth: list[np.ndarray] = []
    for number, (name, *given) in enumerate(rows):
        if name in ("placeholder", "variable", "leaf"):
            worth.append(leaves.get(given[0] if name == "leaf" else number, np.array(np.nan)))
        elif name == "constant":
            worth.append(np.asarray(given[0]))
        elif name in MEANING and all(type(k) is int and 0 <= k < number for k in given):
            with np.errstate(all="ignore"):
                worth.append(MEANING[name](*(worth[k] for k in given)))
        else:
            raise NoAnswer(f"the folded graph has an operator {name!r:.40} that the graph before had not")
    return worth


def compared(
    student: Student, rows: Rows, left: list[str], wanted: list[int], leaves: dict[int, np.ndarray] | None = None
) -> str:
    """Whether what is left are these operators, whose values and dtypes are those of the graph as it was."""
    found, places = student.folded(rows, wanted)
    seen = different(names(found), left, "the operators that are left: ")
    if seen:
        return seen
    now, before = values(found, leaves or {}), values(rows, leaves or {})
    for place, k in zip(places, wanted):
        seen = seen or different(now[place], before[k]) or different(str(now[place].dtype), str(before[k].dtype))
    return seen


@lab.check("2 * 3 becomes one constant", hint="Are all inputs constants? Then the value can be known now.")
def folds(student: Student) -> str:
    seen = compared(student, [constant(2.0), constant(3.0), ["multiply", 0, 1]], ["constant"], [2])
    ### BEGIN HIDDEN TESTS
    a, b = student.rng.normal(size=(2, 3))
    seen = seen or compared(student, [constant(a), constant(b), ["multiply", 0, 1]], ["constant"], [2])
    ### END HIDDEN TESTS
    return seen


def constant(value: Any, dtype: str = "float64") -> list[Any]:
    return ["constant", np.asarray(value, dtype)]


@lab.check(
    "what became a constant lets the next fold",
    hint="The rule gets the new inputs as its second argument; node.inputs are the old ones.",
)
def cascade(student: Student) -> str:
    rest: Rows = [["tanh", 0], constant(1.0), ["subtract", 1, 2], ["exp", 3]]
    seen = compared(student, [constant([1.0, 2.0]), *rest], ["constant"], [4])
    ### BEGIN HIDDEN TESTS
    rows: Rows = [constant(student.rng.normal(size=4))]
    for k in range(int(student.rng.integers(3, 7))):
        rows.append([str(student.rng.choice(["tanh", "exp"])), k])
    seen = seen or compared(student, rows, ["constant"], [len(rows) - 1])
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "placeholders and variables are left alone",
    hint="They have no inputs, so it is true of them that all their inputs are constants. (And constants?)",
)
def leaves(student: Student) -> str:
    rows: Rows = [["placeholder", [2]], ["variable", np.array([1.0, 2.0])], constant([3.0, 4.0]), ["add", 0, 1]]
    left = ["leaf", "leaf", "add", "constant"]
    known = {0: np.array([5.0, 6.0]), 1: rows[1][1]}
    seen = folds(student) or compared(student, rows, left, [3, 2], known)
    ### BEGIN HIDDEN TESTS
    a, b, c = student.rng.normal(size=(3, 2))
    rows = [["placeholder", [2]], ["variable", a], constant(b), ["multiply", 0, 1]]
    seen = seen or compared(student, rows, [*left[:2], "multiply", "constant"], [3, 2], {0: c, 1: a})
    ### END HIDDEN TESTS
    return seen


@lab.check("only what is constant is folded", hint="One constant among the inputs is not enough.", points=2)
def mixed(student: Student) -> str:
    rows: Rows = [["placeholder", [2]], constant(2.0), constant(3.0), ["add", 1, 2], ["multiply", 0, 3]]
    left = ["leaf", "constant", "multiply"]
    seen = compared(student, rows, left, [4], {0: np.array([1.0, 2.0])})
    ### BEGIN HIDDEN TESTS
    a, b, c = student.rng.normal(size=(3, 2))
    rows[1], rows[2] = constant(a), constant(b)
    seen = seen or compared(student, rows, left, [4], {0: c})
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "dtypes stay as they were", hint="A constant made of a Python number takes another dtype; pass the array itself."
)
def dtypes(student: Student) -> str:
    rng = np.random.default_rng(3)
    ### BEGIN HIDDEN TESTS
    rng = student.rng
    ### END HIDDEN TESTS
    for dtype in ("float64", "float32", "int32"):
        value = constant(rng.integers(1, 50, 2), dtype)
        seen = compared(student, [value, ["add", 0, 0]], ["constant"], [1])
        if seen:
            return seen
    return ""


@lab.check(
    "operators of several outputs do no harm",
    hint="Such a node has a tuple as its type and is read through `item` nodes; it is all right to leave both alone.",
)
def several(student: Student) -> str:
    seen = folds(student) or different(student.values_of_largest(np.array([1.0, 5.0, 3.0]), 2), [5.0, 3.0])
    ### BEGIN HIDDEN TESTS
    drawn = student.rng.normal(size=6)
    seen = seen or different(student.values_of_largest(drawn, 3), np.sort(drawn)[:2:-1])
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "sizes that are not known yet are left alone",
    hint="A node whose inputs are constants may still depend on a size of the data. Does its shape hold a number for "
    "every axis? ht.evaluate cannot know.",
)
def unknown_sizes(student: Student) -> str:
    seen = folds(student) or different(student.values_of_open_size(2.0, np.array([1.0, 2.0, 3.0])), [2.0, 4.0, 6.0])
    ### BEGIN HIDDEN TESTS
    factor, drawn = float(student.rng.normal()), student.rng.normal(size=5)
    seen = seen or different(student.values_of_open_size(factor, drawn), factor * drawn)
    ### END HIDDEN TESTS
    return seen

"""The checks of lab 3. Unlike hetu's own pass, they set no limit on the size of constants."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from ...core.executor import evaluate
from ...core.graph import Graph, Node
from ...ops import broadcast_to, constant, exp, placeholder, tanh, topk, variable
from .grading import Lab, different

lab = Lab(3, "a pass that folds constants", "lab3_fold_constants.py")


def names(outputs: tuple[Node, ...]) -> list[str]:
    """The operators of a graph, inputs first."""
    return [node.op.name for node in Graph(outputs).nodes]


@lab.check("2 * 3 becomes one constant", hint="Are all inputs constants? Then the value can be known now.")
def folds(student: ModuleType) -> str:
    (made,) = student.fold_constants([constant(2.0) * 3])
    return different(names((made,)), ["constant"]) or different(evaluate(made), 6.0)


@lab.check(
    "what became a constant lets the next fold",
    hint="The rule gets the new inputs as its second argument; node.inputs are the old ones.",
)
def cascade(student: ModuleType) -> str:
    (made,) = student.fold_constants([exp(tanh(constant([1.0, 2.0])) - 1)])
    return different(names((made,)), ["constant"]) or different(evaluate(made), np.exp(np.tanh([1.0, 2.0]) - 1))


@lab.check(
    "placeholders and variables are left alone",
    hint="They have no inputs, so it is true of them that all their inputs are constants. (And constants?)",
)
def leaves(student: ModuleType) -> str:
    x, w = placeholder("x", (2,)), variable("w", 1.0, (2,))
    outputs = x + 1, w, constant(3.0)
    made = student.fold_constants(outputs)
    same = all(a is b for a, b in zip(made, outputs))
    return "" if same else f"the nodes were replaced: {names(made)}"


@lab.check("only what is constant is folded", hint="One constant among the inputs is not enough.")
def mixed(student: ModuleType) -> str:
    x = placeholder("x", (2,))
    (made,) = student.fold_constants([x * (constant(2.0) + 3)])
    return different(names((made,)), ["placeholder", "constant", "multiply"]) or different(
        evaluate(made, {x: [1.0, 2.0]}), [5.0, 10.0]
    )


@lab.check(
    "dtypes stay as they were", hint="A constant made of a Python number takes another dtype; pass the array itself."
)
def dtypes(student: ModuleType) -> str:
    arrays = [np.array([1, 2], dtype) for dtype in ("float64", "float32", "int32")]
    made = student.fold_constants([constant(a) + a for a in arrays])
    return different([str(n.dtype) for n in made], [str(a.dtype) for a in arrays])


@lab.check(
    "operators of several outputs do no harm",
    hint="Such a node has a tuple as its type and is read through `item` nodes; it is all right to leave both alone.",
)
def several(student: ModuleType) -> str:
    largest, _ = topk(constant([1.0, 5.0, 3.0]), k=2)
    (made,) = student.fold_constants([largest])
    return different(evaluate(made), [5.0, 3.0])


@lab.check(
    "sizes that are not known yet are left alone",
    hint="A node whose inputs are constants may still depend on a size of the data. Does its shape hold a number for "
    "every axis? ht.evaluate cannot know.",
)
def unknown_sizes(student: ModuleType) -> str:
    x = placeholder("x", (None,))
    (made,) = student.fold_constants([broadcast_to(constant(2.0), x.shape) * x])
    return different(evaluate(made, {x: [1.0, 2.0, 3.0]}), [2.0, 4.0, 6.0])

"""The checks of lab 1. Graphs are sent as rows; what is right is computed here by NumPy and by finite differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hetu.teach.labs import Lab, Student, different

lab = Lab("1", "values and gradients", "values.py")
Row = list[Any]


def placeholder(*size: int) -> Row:
    return ["placeholder", [], {"size": list(size)}]


def weighed(rows: list[Row], y: int, shape: Sequence[int]) -> list[Row]:
    """`rows`, and behind them a placeholder t of `shape` and the loss sum(t * row y): the last three rows."""
    n = len(rows)
    axes = list(range(len(shape)))
    return [
        *rows,
        placeholder(*shape),
        ["multiply", [y, n], {}],
        ["total", [n + 1], {"axes": axes}],
        ["reshape", [n + 2], {"size": []}],
    ]


A, B, T = np.array([1.0, 2.0, 3.0]), np.array([4.0, -1.0, 0.5]), np.array([1.0, 10.0, 100.0])
PRODUCT = weighed([placeholder(3), placeholder(3), ["multiply", [0, 1], {}]], 2, [3])


@lab.check("a product knows its gradient", hint="For y = a b: dL/da = g b, and dL/db = g a: the other factor, times g.")
def product(student: Student) -> str:
    got = student.slopes(PRODUCT, {0: A, 1: B, 3: T}, 6, [0, 1])
    seen = different(got, [[4, -10, 50], [1, 20, 300]])
    ### BEGIN HIDDEN TESTS
    a, b, t = student.rng.normal(size=(3, 3))
    seen = seen or different(student.slopes(PRODUCT, {0: a, 1: b, 3: t}, 6, [0, 1]), [t * b, t * a])
    ### END HIDDEN TESTS
    return seen


@lab.check("a power knows its gradient", hint="g times exponent times x ** (exponent - 1): three factors.")
def powers(student: Student) -> str:
    seen = ""
    for exponent, wanted in ((3.0, [3, 120, 2700]), (-1.0, [-1, -2.5, -100 / 9])):
        rows = weighed([placeholder(3), ["power", [0], {"exponent": exponent}]], 1, [3])
        seen = seen or different(student.slopes(rows, {0: A, 2: T}, 5, [0]), [wanted], f"exponent {exponent:g}: ")
    ### BEGIN HIDDEN TESTS
    x, t, p = 1 + student.rng.random(3), student.rng.normal(size=3), float(student.rng.normal())
    rows = weighed([placeholder(3), ["power", [0], {"exponent": p}]], 1, [3])
    seen = seen or different(student.slopes(rows, {0: x, 2: t}, 5, [0]), [t * p * x ** (p - 1)])
    ### END HIDDEN TESTS
    return seen


@lab.check("exp knows its gradient", hint="exp is its own derivative, and y is exp(x) already; times g.", points=0.5)
def exponential(student: Student) -> str:
    rows = weighed([placeholder(3), ["exp", [0], {}]], 1, [3])
    seen = different(student.slopes(rows, {0: np.zeros(3), 2: T}, 5, [0]), [T])
    ### BEGIN HIDDEN TESTS
    x, t = student.rng.normal(size=(2, 3))
    seen = seen or different(student.slopes(rows, {0: x, 2: t}, 5, [0]), [t * np.exp(x)])
    ### END HIDDEN TESTS
    return seen


@lab.check("a gradient goes back through reshape", hint="It needs the shape that x had, not that of y.", points=0.5)
def reshaped(student: Student) -> str:
    rows = weighed([placeholder(2, 3), ["reshape", [0], {"size": [3, 2]}]], 1, [3, 2])
    t = np.arange(6.0).reshape(3, 2)
    seen = different(student.slopes(rows, {0: np.zeros((2, 3)), 2: t}, 5, [0])[0], [[0, 1, 2], [3, 4, 5]])
    ### BEGIN HIDDEN TESTS
    t = student.rng.normal(size=(3, 2))
    seen = seen or different(student.slopes(rows, {0: t.reshape(2, 3), 2: t}, 5, [0])[0], t.reshape(2, 3))
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "a total keeps its axes with size 1, and its gradient goes to every term",
    hint="The shape of total((2, 3), axes=(1,)) is (2, 1). Each term counts once, so it gets g: repeated to x's shape.",
)
def totals(student: Student) -> str:
    rows = weighed([placeholder(2, 3), ["total", [0], {"axes": [1]}]], 1, [2, 1])
    seen = different(student.shapes(rows)[1], [2, 1], "shape: ")
    got = student.slopes(rows, {0: np.ones((2, 3)), 2: np.array([[5.0], [7.0]])}, 5, [0])
    seen = seen or different(got, [[[5, 5, 5], [7, 7, 7]]])
    ### BEGIN HIDDEN TESTS
    x, t = student.rng.normal(size=(2, 3, 4)), student.rng.normal(size=(1, 3, 1))
    rows = weighed([placeholder(2, 3, 4), ["total", [0], {"axes": [0, 2]}]], 1, [1, 3, 1])
    seen = seen or different(student.slopes(rows, {0: x, 2: t}, 5, [0])[0], np.broadcast_to(t, x.shape))
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "sum_to undoes broadcasting",
    hint="Two things are summed over: axes that were put in front, and axes of size 1 that were repeated. Shapes"
    " are compared from the right, so axis k of `shape` is axis k + (number of axes in front) of g.",
    points=2,
)
def summing(student: Student) -> str:
    x = np.arange(24.0).reshape(2, 3, 4)
    seen = different(student.summed(x, [3, 1])[0], [[60], [92], [124]], "(2, 3, 4) to (3, 1): ")
    seen = seen or different(student.summed(x, [])[0], 276, "(2, 3, 4) to (): ")
    seen = seen or different(student.summed(x, [2, 3, 4])[1], True, "the same shape returns g itself: ")
    ### BEGIN HIDDEN TESTS
    x = student.rng.normal(size=(2, 3, 4))
    for shape, axes in (([4], (0, 1)), ([3, 4], (0,)), ([1, 3, 1], (0, 2)), ([2, 1, 4], (1,)), ([1], (0, 1, 2))):
        seen = seen or different(student.summed(x, shape)[0], x.sum(axes).reshape(shape), f"(2, 3, 4) to {shape}: ")
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "what is used twice gets the sum of both",
    hint="x * x reads x twice. Add to what has been found for a node, do not replace it.",
)
def twice(student: Student) -> str:
    rows = weighed([placeholder(3), ["multiply", [0, 0], {}], ["add", [1, 0], {}]], 2, [3])
    seen = different(student.slopes(rows, {0: A, 3: T}, 6, [0]), [[3, 50, 700]])
    ### BEGIN HIDDEN TESTS
    x, t = student.rng.normal(size=(2, 3))
    seen = seen or different(student.slopes(rows, {0: x, 3: t}, 6, [0]), [t * (2 * x + 1)])
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "a gradient is complete before it is handed on",
    hint="A node's turn comes after that of all that read it: the reverse of a topological order does that.",
    points=2,
)
def complete(student: Student) -> str:
    # y = x x, z = exp(y), u = z y, and u + y: y is read early and late
    body = [placeholder(2), ["multiply", [0, 0], {}], ["exp", [1], {}], ["multiply", [2, 1], {}], ["add", [3, 1], {}]]
    rows, x = weighed(body, 4, [2]), np.array([0.0, 1.0])
    wanted = [2 * x * (np.exp(x * x) * (1 + x * x) + 1)]
    seen = different(student.slopes(rows, {0: x, 5: np.ones(2)}, 8, [0]), wanted)
    ### BEGIN HIDDEN TESTS
    for _ in range(6):
        rows, feeds = drawn(student.rng)
        got = student.slopes(rows, feeds, len(rows) - 1, [0, 1])
        for i in (0, 1):
            seen = seen or different(got[i], numeric(rows, feeds, i), f"a random graph, placeholder {i}: ", 1e-4)
    ### END HIDDEN TESTS
    return seen


@lab.check("what the loss does not depend on has zeros of its shape", hint="Not the number 0: an array, as w is one.")
def independent(student: Student) -> str:
    rows = [*PRODUCT, placeholder(2, 2)]
    got = student.slopes(rows, {0: A, 1: B, 3: T}, 6, [7, 0])
    seen = different(got[0], np.zeros((2, 2))) or different(got[1], [4, -10, 50])
    ### BEGIN HIDDEN TESTS
    a, b, t = student.rng.normal(size=(3, 3))
    got = student.slopes(rows, {0: a, 1: b, 3: t}, 6, [0, 7])
    seen = seen or different(got[0], t * b) or different(got[1], np.zeros((2, 2)))
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "a topological order has each node once, after its inputs",
    hint="Put a node into the order when its inputs are done, and remember which nodes you have seen.",
)
def ordered(student: Student) -> str:
    diamond = [placeholder(2), ["exp", [0], {}], ["add", [0, 1], {}], ["multiply", [2, 1], {}]]
    seen = different(student.order(diamond, [3]), [0, 1, 2, 3])
    ### BEGIN HIDDEN TESTS
    for _ in range(4):
        rows, _ = drawn(student.rng)
        got = student.order(rows, [len(rows) - 1])
        places = {row: k for k, row in enumerate(got)}
        seen = seen or different(len(got), len(places), "a node comes twice: ")
        seen = seen or different(sorted(places), sorted(needed(rows)), "rows in the order: ")
        late = [row for row in places for i in rows[row][1] if places[i] > places[row]]
        seen = seen or (f"row {late[0]} comes before its input" if late else "")
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "thousands of nodes, each computed once",
    hint="A function that calls itself for each input ends at a thousand calls; one that computes an input again"
    " for each reader takes 2 ** 60 steps for sixty additions x + x.",
)
def long_chain(student: Student) -> str:
    chain: list[Row] = [placeholder()]
    chain += [["exp" if k == 0 else "multiply", [k] if k == 0 else [k, 0], {}] for k in range(3000)]
    doubled: list[Row] = [placeholder(), *(["add", [k, k], {}] for k in range(60))]
    x = 1.0
    ### BEGIN HIDDEN TESTS
    x = float(student.rng.integers(1, 9))
    ### END HIDDEN TESTS
    seen = different(student.run(chain, {0: np.array(1.0)}, [3000]), [np.e])
    return seen or different(student.run(doubled, {0: np.array(x)}, [60]), [x * 2**60])


@lab.check("the gradient of a gradient", hint="A gradient is made of nodes whose operators have gradients themselves.")
def second(student: Student) -> str:
    rows = weighed([placeholder(3), ["power", [0], {"exponent": 3.0}]], 1, [3])
    seen = different(student.slopes(rows, {0: A, 2: T}, 5, [0], times=2), [[6, 120, 1800]])
    ### BEGIN HIDDEN TESTS
    x, t = student.rng.normal(size=(2, 3))
    rows = weighed([placeholder(3), ["multiply", [0, 0], {}], ["exp", [1], {}]], 2, [3])
    wanted = [t * np.exp(x * x) * (2 + 4 * x * x)]
    seen = seen or different(student.slopes(rows, {0: x, 3: t}, 6, [0], times=2), wanted)
    ### END HIDDEN TESTS
    return seen


### BEGIN HIDDEN TESTS
SIZES = [(3,), (2, 3), (2, 1), (1,), (2, 3)]


def drawn(rng: np.random.Generator) -> tuple[list[Row], dict[int, np.ndarray]]:
    """A random graph over broadcasting placeholders, and what it is fed; the last row is its loss."""
    rows: list[Row] = [placeholder(*size) for size in SIZES]
    feeds = {i: 0.4 + 0.3 * rng.random(size) for i, size in enumerate(SIZES)}
    for _ in range(7):
        kind, n = ["add", "multiply", "multiply", "exp"][rng.integers(4)], len(rows)
        inputs = [int(i) for i in rng.integers(max(0, n - 6), n, 1 if kind == "exp" else 2)]
        if kind == "exp":
            rows += [[kind, inputs, {}], ["power", [n], {"exponent": -0.5}]]
        else:
            rows.append([kind, inputs, {}])
    rows += [["multiply", [len(rows) - 1, 0], {}], ["multiply", [len(rows), 1], {}]]
    rows.append(["add", [len(rows) - 1, 1], {}])
    rows.append(["total", [len(rows) - 1], {"axes": [0, 1]}])
    rows.append(["reshape", [len(rows) - 1], {"size": []}])
    used = needed(rows)
    return rows, {i: feeds[i] for i in feeds if i in used}


def needed(rows: list[Row]) -> set[int]:
    found, stack = set(), [len(rows) - 1]
    while stack:
        i = stack.pop()
        found.add(i)
        stack += rows[i][1]
    return found


def loss_of(rows: list[Row], feeds: dict[int, np.ndarray]) -> float:
    """The last row, by plain NumPy."""
    known: dict[int, Any] = dict(feeds)
    plain = {
        "add": lambda a, b: a + b,
        "multiply": lambda a, b: a * b,
        "exp": np.exp,
        "power": lambda x, exponent: x**exponent,
        "total": lambda x, axes: x.sum(tuple(axes), keepdims=True),
        "reshape": lambda x, size: x.reshape(size),
    }
    for i in sorted(needed(rows) - set(feeds)):
        name, inputs, attrs = rows[i]
        known[i] = plain[name](*[known[k] for k in inputs], **attrs)
    return float(known[len(rows) - 1])


def numeric(rows: list[Row], feeds: dict[int, np.ndarray], i: int) -> np.ndarray:
    """The gradient for placeholder i by central differences."""
    found, step = np.zeros_like(feeds[i]), 1e-5
    for place in np.ndindex(found.shape):
        sides = []
        for sign in (1, -1):
            moved = feeds[i].copy()
            moved[place] += sign * step
            sides.append(loss_of(rows, feeds | {i: moved}))
        found[place] = (sides[0] - sides[1]) / (2 * step)
    return found


### END HIDDEN TESTS

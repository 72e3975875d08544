"""The checks of lab 2: values by loops over places, gradients by formulas and by central differences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hetu.teach.labs import Lab, Student, different

lab = Lab("2", "the operators of a network", "operators.py", needs=("values.py",))
EYE = np.eye(2)


@lab.check("a product of matrices knows both gradients", hint="The shapes allow one order only: write them beside it.")
def products(student: Student) -> str:
    a, b, t = np.array([[1.0, 2.0, 3.0]]), np.array([[1.0], [0.0], [2.0]]), np.array([[10.0]])
    y, da, db = student.both("matmul", [a, b], t)
    seen = (
        different(y, [[7]]) or different(da, [[10, 0, 20]], "dL/dA: ") or different(db, [[10], [20], [30]], "dL/dB: ")
    )
    ### BEGIN HIDDEN TESTS
    a, b, t = (student.rng.normal(size=size) for size in ((2, 3), (3, 4), (2, 4)))
    _, da, db = student.both("matmul", [a, b], t)
    seen = seen or different(da, t @ b.T, "dL/dA: ") or different(db, a.T @ t, "dL/dB: ")
    ### END HIDDEN TESTS
    return seen


@lab.check("relu passes the gradient where x > 0", hint="g where x is positive, 0 elsewhere; not y, which is x there.")
def relus(student: Student) -> str:
    x, t = np.array([[-1.0, 0.0, 2.0]]), np.array([[5.0, 6.0, 7.0]])
    seen = different(student.both("relu", [x], t)[1], [[0, 0, 7]])
    ### BEGIN HIDDEN TESTS
    x, t = student.rng.normal(size=(2, 4, 5))
    seen = seen or different(student.both("relu", [x], t)[1], np.where(x > 0, t, 0))
    ### END HIDDEN TESTS
    return seen


@lab.check("the gradient of a maximum goes to the largest", hint="share(x, y) says where it is; times g.")
def maxima(student: Student) -> str:
    x, t = np.array([[1.0, 4.0, 2.0], [9.0, 0.0, 3.0]]), np.array([[5.0], [7.0]])
    y, dx = student.both("largest", [x], t, axes=[1])
    seen = different(y, [[4], [9]]) or different(dx, [[0, 5, 0], [7, 0, 0]])
    ### BEGIN HIDDEN TESTS
    x, t = student.rng.normal(size=(2, 3, 4)), student.rng.normal(size=(1, 3, 1))
    dx = student.both("largest", [x], t, axes=[0, 2])[1]
    seen = seen or different(dx, np.where(x == x.max((0, 2), keepdims=True), t, 0))
    ### END HIDDEN TESTS
    return seen


@lab.check("equal largest elements share it", hint="Divide by how many there are: the sum of the ones along the axes.")
def ties(student: Student) -> str:
    x, y = np.array([[3.0, 3.0, 1.0, 3.0]]), np.array([[3.0]])
    seen = different(student.result("share", [x, y], axes=[1]), [[1 / 3, 1 / 3, 0, 1 / 3]])
    ### BEGIN HIDDEN TESTS
    x = student.rng.integers(0, 3, (4, 6)).astype(float)
    y = x.max(1, keepdims=True)
    wanted = [[(v == max(row)) / row.count(max(row)) for v in row] for row in x.tolist()]
    seen = seen or different(student.result("share", [x, y], axes=[1]), wanted)
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "patches: the squares of all places",
    hint="Of h pixels with padding on both sides, a square of `size` fits at h + 2 padding - size + 1 places. "
    "Element [n, i, j, a, b] is pixel (i + a, j + b) of the padded image: rows first.",
    points=2,
)
def squares(student: Student) -> str:
    x = np.arange(6.0).reshape(1, 2, 3, 1)
    got = student.result("patches", [x], size=2, padding=0)
    seen = different(np.shape(got), (1, 1, 2, 2, 2, 1), "shape: ")
    seen = seen or different(np.ravel(got), [0, 1, 3, 4, 1, 2, 4, 5])
    got = student.result("patches", [np.ones((1, 1, 1, 1))], size=3, padding=1)
    seen = seen or different(np.ravel(got), [0, 0, 0, 0, 1, 0, 0, 0, 0], "one pixel, padding 1: ")
    ### BEGIN HIDDEN TESTS
    for size, padding in ((3, 0), (3, 1), (2, 2)):
        x = student.rng.normal(size=(2, 4, 5, 2))
        got = student.result("patches", [x], size=size, padding=padding)
        seen = seen or different(got, by_places(x, size, padding), f"size {size}, padding {padding}: ")
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "fold: each pixel is the sum of its copies",
    hint="Where `patches` copies from a place, `fold` adds to that place: += onto zeros, then the padding is cut off.",
    points=2,
)
def folding(student: Student) -> str:
    x = np.ones((1, 2, 2, 2, 2, 1))
    seen = different(student.result("fold", [x], size=2, padding=0)[0, :, :, 0], [[1, 2, 1], [2, 4, 2], [1, 2, 1]])
    ### BEGIN HIDDEN TESTS
    for size, padding in ((3, 0), (3, 1), (2, 1)):
        x = student.rng.normal(size=(2, 4, 5, 2))
        t = student.rng.normal(size=by_places(x, size, padding).shape)
        wanted = numeric(partial(by_places, size=size, padding=padding), [x], t)[0]
        got = student.result("fold", [t], size=size, padding=padding)
        seen = seen or different(got, wanted, f"size {size}, padding {padding}: ", 1e-5)
    ### END HIDDEN TESTS
    return seen


@lab.check("softmax: rows that add up to 1, also of large numbers", hint="Subtract each row's maximum before exp.")
def softmaxes(student: Student) -> str:
    seen = different(student.result("softmax", [np.array([[1000.0, 1000.0], [0.0, -2000.0]])]), [[0.5, 0.5], [1, 0]])
    ### BEGIN HIDDEN TESTS
    x = student.rng.normal(size=(3, 4)) + student.rng.choice([-900.0, 0.0, 900.0], (3, 1))
    seen = seen or different(student.result("softmax", [x]), probabilities(x))
    ### END HIDDEN TESTS
    return seen


@lab.check("softmax knows its gradient", hint="y (g - s), where s is a row's sum of g y: it runs along axis 1.")
def softmax_gradient(student: Student) -> str:
    y, dx = student.both("softmax", [np.zeros((2, 2))], np.array([[1.0, 0.0], [0.0, 3.0]]))
    seen = different(y, [[0.5, 0.5], [0.5, 0.5]]) or different(dx, [[0.25, -0.25], [-0.75, 0.75]])
    ### BEGIN HIDDEN TESTS
    x, t = student.rng.normal(size=(2, 3, 4))
    seen = seen or different(student.both("softmax", [x], t)[1], numeric(probabilities, [x], t)[0], "", 1e-5)
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "cross entropy: the mean over the rows",
    hint="log(sum(exp(x))) - sum(t x) in each row, after the row's maximum was subtracted from x; then the mean.",
)
def entropy(student: Student) -> str:
    got = student.result("cross_entropy", [np.zeros((2, 2)), EYE])
    seen = different(got, np.log(2)) or different(
        student.result("cross_entropy", [np.array([[0.0, 1000.0]]), EYE[:1]]), 1000, "large scores: "
    )
    ### BEGIN HIDDEN TESTS
    x, t = student.rng.normal(size=(5, 3)), np.eye(3)[student.rng.integers(3, size=5)]
    wanted = -np.mean(np.log(probabilities(x)[t > 0]))
    seen = seen or different(student.result("cross_entropy", [x, t]), wanted)
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "cross entropy knows its gradient",
    hint="A mean over n rows has 1/n in its gradient, and a loss that is multiplied by 3 has g = 3.",
    points=2,
)
def entropy_gradient(student: Student) -> str:
    dx = student.both("cross_entropy", [np.zeros((2, 2)), EYE], np.array(1.0))[1]
    seen = different(dx, [[-0.25, 0.25], [0.25, -0.25]])
    ### BEGIN HIDDEN TESTS
    x, labels = student.rng.normal(size=(5, 3)), np.eye(3)[student.rng.integers(3, size=5)]
    g = float(student.rng.integers(2, 9))
    dx = student.both("cross_entropy", [x, labels], np.array(g))[1]
    seen = seen or different(dx, g * (probabilities(x) - labels) / 5, f"g = {g:g}: ")
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "a convolution, by one product",
    hint="A row of the matrix is a patch, (size, size, channels) in this order; the product has a row for each "
    "pixel, in the order (samples, height, width).",
    points=2,
)
def convolutions(student: Student) -> str:
    x, w = np.arange(6.0).reshape(1, 2, 3, 1), np.array([[1.0], [0.0], [0.0], [1.0]])
    y = student.both("conv2d", [x, w, np.array([0.5])], np.ones((1, 1, 2, 1)), size=2, padding=0)[0]
    seen = different(y, np.array([4.5, 6.5]).reshape(1, 1, 2, 1))
    ### BEGIN HIDDEN TESTS
    x, w, b = (student.rng.normal(size=size) for size in ((2, 4, 5, 2), (18, 3), (3,)))
    t = student.rng.normal(size=convolved(x, w, b).shape)
    y, *found = student.both("conv2d", [x, w, b], t, size=3, padding=1)
    seen = seen or different(y, convolved(x, w, b))
    for name, got, wanted in zip("xwb", found, numeric(convolved, [x, w, b], t)):
        seen = seen or different(got, wanted, f"the gradient of {name}: ", 1e-4)
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "max pooling",
    hint="(n, h / size, size, w / size, size, c): the second of each pair of axes counts inside of a square.",
)
def pooling(student: Student) -> str:
    x = np.arange(8.0).reshape(1, 2, 4, 1)
    y, dx = student.both("max_pool", [x], np.array([1.0, 2.0]).reshape(1, 1, 2, 1), size=2)
    seen = different(np.ravel(y), [5, 7]) or different(np.ravel(dx), [0, 0, 0, 0, 0, 1, 0, 2])
    ### BEGIN HIDDEN TESTS
    x, t = student.rng.normal(size=(2, 4, 6, 3)), student.rng.normal(size=(2, 2, 3, 3))
    y, dx = student.both("max_pool", [x], t, size=2)
    seen = seen or different(y, pooled(x)) or different(dx, numeric(pooled, [x], t)[0], "gradient: ", 1e-5)
    ### END HIDDEN TESTS
    return seen


### BEGIN HIDDEN TESTS
def numeric(f: Callable[..., Any], inputs: list[np.ndarray], t: np.ndarray) -> list[np.ndarray]:
    """The gradients of sum(t * f(*inputs)) by central differences."""
    found = []
    for k, x in enumerate(inputs):
        slope = np.zeros_like(x)
        for place in np.ndindex(x.shape):
            sides = []
            for step in (1e-6, -1e-6):
                moved = x.copy()
                moved[place] += step
                sides.append(float((t * f(*inputs[:k], moved, *inputs[k + 1 :])).sum()))
            slope[place] = (sides[0] - sides[1]) / 2e-6
        found.append(slope)
    return found


def by_places(x: np.ndarray, size: int, padding: int) -> np.ndarray:
    x = np.pad(x, [(0, 0), (padding, padding), (padding, padding), (0, 0)])
    height, width = x.shape[1] - size + 1, x.shape[2] - size + 1
    rows = [[x[:, i : i + size, j : j + size] for j in range(width)] for i in range(height)]
    return np.moveaxis(np.array(rows), 2, 0)


def convolved(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Size 3, padding 1."""
    return np.einsum("nhwijc,ijcf->nhwf", by_places(x, 3, 1), w.reshape(3, 3, x.shape[3], -1)) + b


def pooled(x: np.ndarray) -> np.ndarray:
    corners = [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
    return np.max(corners, 0)


def probabilities(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(1)[:, None])
    return e / e.sum(1)[:, None]


### END HIDDEN TESTS

"""The checks of lab 4: orders against NumPy's, a softmax regression and LeNet against their formulas."""

from __future__ import annotations

import numpy as np

from hetu.teach.labs import Lab, Student, different

lab = Lab("4", "data loader and training", "training.py", needs=("values.py", "operators.py", "program.py"))


@lab.check(
    "batches are full, and no sample comes twice",
    hint="The last batch begins at samples - batch_size or before.",
)
def full(student: Student) -> str:
    seen = ""
    for samples, size in ((10, 3), (12, 4), (3, 3), (2, 3)):
        got = [list(batch) for batch in student.batches(samples, size, 0, 0)]
        numbers = [i for batch in got for i in batch]
        seen = seen or different([len(batch) for batch in got], [size] * (samples // size), f"{samples} by {size}: ")
        seen = seen or different(len(set(numbers)), len(numbers), f"{samples} by {size}: different samples: ")
        seen = seen or ("" if set(numbers) <= set(range(samples)) else f"samples {sorted(numbers)} of {samples}")
    ### BEGIN HIDDEN TESTS
    samples, seed = int(student.rng.integers(20, 40)), int(student.rng.integers(1000))
    wanted = permuted(samples, 4, seed, 0)
    seen = seen or different(student.batches(samples, 4, seed, 0), wanted, "the batches: ")
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "every epoch has another order, and the same one again",
    hint="The generator is made from both numbers, [seed, epoch], and from nothing else.",
)
def orders(student: Student) -> str:
    seen = different(student.batches(6, 6, 1, 0), [[4, 0, 2, 1, 5, 3]], "seed 1, epoch 0: ")
    seen = seen or different(student.batches(6, 6, 1, 1), [[1, 4, 0, 3, 2, 5]], "seed 1, epoch 1: ")
    ### BEGIN HIDDEN TESTS
    seed, epoch = (int(n) for n in student.rng.integers(1, 1000, 2))
    for e in (epoch, epoch + 1, epoch):
        seen = seen or different(student.batches(9, 3, seed, e), permuted(9, 3, seed, e), "the batches: ")
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "weights begin with the variance 2 / rows, biases with 0, all float32",
    hint="`normal(0, scale, shape)` takes the standard deviation, the root of the variance; a weight's rows are "
    "its inputs, shape[0].",
)
def beginnings(student: Student) -> str:
    shapes = {"w": (200, 50), "b": (50,)}
    found, dtypes = student.drawn(shapes, 0)
    seen = different(dtypes, {"w": "float32", "b": "float32"}) or different(found["b"], np.zeros(50), "b: ")
    seen = seen or different(round(float(np.std(found["w"])), 2), 0.1, "the standard deviation of 200 rows: ")
    ### BEGIN HIDDEN TESTS
    seed = int(student.rng.integers(1000))
    rng = np.random.default_rng(seed)
    a, b = (rng.normal(0, np.sqrt(2 / size[0]), size) for size in ((8, 3), (3, 2)))
    found, _ = student.drawn({"a": (8, 3), "c": (3,), "b": (3, 2)}, seed)
    seen = seen or different(found, {"a": a, "c": np.zeros(3), "b": b}, f"seed {seed}: ", 1e-5)
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "features: two convolutions, each with relu and pooling",
    hint="The first has padding 2 and keeps 28 by 28 pixels, the second none and leaves 10 of 14. 5 * 5 * 16 = 400.",
)
def features(student: Student) -> str:
    weights = {name: np.zeros(shape) for name, shape in LENET.items() if "conv" in name}
    weights["conv2/b"] = np.arange(16.0) - 8
    got = student.through("features", np.zeros((1, 28, 28, 1)), weights)
    seen = different(got, np.tile(np.maximum(np.arange(16.0) - 8, 0), 25)[None])
    ### BEGIN HIDDEN TESTS
    weights = {name: student.rng.normal(size=shape) / 5 for name, shape in LENET.items() if "conv" in name}
    x = student.rng.random((2, 28, 28, 1))
    seen = seen or different(student.through("features", x, weights), halves(x, weights))
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "classifier: three linear layers with relu between them",
    hint="Two relus: after the first and after the second. Scores may be negative.",
)
def classifier(student: Student) -> str:
    weights = {name: np.zeros(shape) for name, shape in LENET.items() if "fc" in name}
    weights["fc3/b"] = np.arange(10.0) - 5
    seen = different(student.through("classifier", np.ones((1, 400)), weights), [np.arange(10.0) - 5])
    ### BEGIN HIDDEN TESTS
    weights = {name: student.rng.normal(size=shape) / 10 for name, shape in LENET.items() if "fc" in name}
    x = student.rng.random((3, 400))
    wanted = x
    for k in (1, 2, 3):
        wanted = wanted @ weights[f"fc{k}/w"] + weights[f"fc{k}/b"]
        wanted = np.maximum(wanted, 0) if k < 3 else wanted
    seen = seen or different(student.through("classifier", x, weights), wanted)
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "a model's loss and gradients",
    hint="`labels` are class numbers; the loss takes rows of 0 and 1: row k of an identity matrix is that of "
    "class k. The program returns the loss first, then the gradients in the order of the weights.",
    points=2,
)
def model(student: Student) -> str:
    w = {"w": np.zeros((2, 2), "f4"), "b": np.zeros(2, "f4")}
    loss, found = student.slopes(w, np.array([[1.0, 2.0]], "f4"), np.array([1]))
    seen = different(loss, np.log(2), "loss: ", 1e-5)
    seen = seen or different(found, {"w": np.array([[0.5, -0.5], [1, -1]]), "b": np.array([0.5, -0.5])}, "", 1e-5)
    ### BEGIN HIDDEN TESTS
    w, x, labels = problem(student.rng, 6)
    p, t = scores(w, x), np.eye(3)[labels]
    loss, found = student.slopes(w, x, labels)
    seen = seen or different(loss, -np.mean(np.log(p[t > 0])), "loss: ", 1e-4)
    seen = seen or different(found, {"w": x.T @ (p - t) / 6, "b": (p - t).mean(0)}, "", 1e-4)
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "accuracy over any number of samples",
    hint="The last batch may have fewer samples than the program takes: they count, what fills it up does not, "
    "and the share is that of all samples.",
)
def accuracy(student: Student) -> str:
    w = {"w": np.eye(2, dtype="f4"), "b": np.array([0.0, -0.5], "f4")}
    x = np.array([[1, 0], [0, 1], [1, 0], [0, 1], [0, 1]], "f4")
    seen = different(student.accuracy(w, x, np.array([0, 1, 1, 0, 1]), 2), 0.6, "five samples, two at a time: ")
    ### BEGIN HIDDEN TESTS
    for size in (4, 7, 30):
        w, x, labels = problem(student.rng, 23)
        wanted = float(np.mean(scores(w, x).argmax(1) == labels))
        seen = seen or different(student.accuracy(w, x, labels, size), wanted, f"23 samples, {size} at a time: ")
    ### END HIDDEN TESTS
    return seen


@lab.check("momentum keeps a velocity", hint="v = momentum * v + g, kept for the next step; w moves by rate * v.")
def momentum(student: Student) -> str:
    got = student.momentum({"w": np.array([1.0])}, [np.array([1.0])] * 3, 0.5, 0.5)
    seen = different(np.ravel(got), [0.5, -0.25, -1.125])
    ### BEGIN HIDDEN TESTS
    rate, beta = (float(n) for n in student.rng.random(2))
    w, steps = student.rng.normal(size=(2, 3)), student.rng.normal(size=(4, 2, 3))
    total = [sum(beta ** (k - i) * g for i, g in enumerate(steps[: k + 1])) for k in range(4)]
    wanted = w - rate * np.cumsum(total, 0)
    seen = seen or different(student.momentum({"w": w.copy()}, list(steps), rate, beta), wanted)
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "an update changes the arrays themselves",
    hint="`a -= b` writes into the array a; `a = a - b` makes another.",
)
def in_place(student: Student) -> str:
    w, g = np.array([3.0]), np.array([1.0])
    ### BEGIN HIDDEN TESTS
    w, g = student.rng.normal(size=(2, 3))
    ### END HIDDEN TESTS
    return different(student.momentum({"w": w.copy()}, [g], 1.0, 0.0)[0], w - g, "the array that was passed: ")


@lab.check(
    "fit goes through all batches of all epochs",
    hint="Epoch number 0, then 1 ...: `batches` takes it. One mean for each epoch, over the steps of that epoch.",
)
def fit(student: Student) -> str:
    means, asked = student.fitted(6, 3, 1, 2)
    seen = different(len(asked), 4, "steps: ") or different(means, [2.5, 2.0], "means: ")
    ### BEGIN HIDDEN TESTS
    seed = int(student.rng.integers(1000))
    means, asked = student.fitted(11, 3, seed, 3)
    wanted = [permuted(11, 3, seed, epoch) for epoch in range(3)]
    seen = seen or different(asked, np.concatenate(wanted), "the batches: ")
    seen = seen or different(means, [np.mean([batch[0] for batch in epoch]) for epoch in wanted], "means: ")
    ### END HIDDEN TESTS
    return seen


LENET = {
    **{"conv1/w": (25, 6), "conv1/b": (6,), "conv2/w": (150, 16), "conv2/b": (16,), "fc1/w": (400, 120)},
    **{"fc1/b": (120,), "fc2/w": (120, 84), "fc2/b": (84,), "fc3/w": (84, 10), "fc3/b": (10,)},
}


### BEGIN HIDDEN TESTS
def permuted(samples: int, size: int, seed: int, epoch: int) -> np.ndarray:
    order = np.random.default_rng([seed, epoch]).permutation(samples)
    return order[: samples // size * size].reshape(-1, size)


def problem(rng: np.random.Generator, samples: int) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Weights of a linear layer of 4 inputs and 3 classes, samples, labels."""
    w = {"w": rng.normal(size=(4, 3)).astype("f4"), "b": rng.normal(size=3).astype("f4")}
    return w, rng.normal(size=(samples, 4)).astype("f4"), rng.integers(3, size=samples)


def scores(w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """As probabilities."""
    e = np.exp(x @ w["w"] + w["b"])
    return e / e.sum(1, keepdims=True)


def halves(x: np.ndarray, w: dict[str, np.ndarray]) -> np.ndarray:
    """LeNet's convolutions, place by place."""
    for k, padding in ((1, 2), (2, 0)):
        x = np.pad(x, [(0, 0), (padding, padding), (padding, padding), (0, 0)])
        side = x.shape[1] - 4
        rows = [[x[:, i : i + 5, j : j + 5].reshape(len(x), -1) for j in range(side)] for i in range(side)]
        y = np.maximum(np.array(rows) @ w[f"conv{k}/w"] + w[f"conv{k}/b"], 0)  # (side, side, n, filters)
        y = y.reshape(side // 2, 2, side // 2, 2, len(x), -1).max((1, 3))
        x = np.moveaxis(y, 2, 0)
    return x.reshape(len(x), -1)


### END HIDDEN TESTS

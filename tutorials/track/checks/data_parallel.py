"""The checks of lab 6: ranks that share a batch come to what one process does with all of it."""

from __future__ import annotations

import numpy as np

from hetu.teach.labs import Lab, Ran, Student, different, first

EARLIER = ("values.py", "operators.py", "program.py", "training.py", "ring.py")
lab = Lab("6", "data parallel training", "data_parallel.py", needs=EARLIER)
KIB = 1024


def rng_of(student: Student) -> np.random.Generator:
    rng = np.random.default_rng(6)
    ### BEGIN HIDDEN TESTS
    rng = student.rng
    ### END HIDDEN TESTS
    return rng


@lab.check(
    "a batch in equal parts, one after the other",
    hint="Rank r has the numbers from r * size to (r + 1) * size.",
)
def shards(student: Student) -> str:
    numbers = rng_of(student).permutation(12)
    seen = ""
    for n in (1, 3, 4):
        got = [student.shard(numbers, r, n) for r in range(n)]
        seen = seen or different(got, numbers.reshape(n, -1), f"{n} ranks: ")
    return seen


@lab.check(
    "parts that cannot be equal are refused",
    hint="The mean of means is the mean only for parts of one size: raise ValueError if n does not divide the batch.",
    points=0.5,
)
def refused(student: Student) -> str:
    n = int(rng_of(student).integers(2, 9))
    seen = different(student.shard(np.arange(3 * n + 1), 0, n), "ValueError", f"{3 * n + 1} samples on {n} ranks: ")
    return seen or different(student.shard(np.arange(2 * n), 1, n), [2, 3])


@lab.check(
    "buckets are filled from the last gradient to the first",
    hint="Backward the last layer is ready first: reversed.",
)
def backward(student: Student) -> str:
    seen = different(student.buckets({"a": 3, "b": 4, "c": 5}, 9), [["c", "b"], ["a"]])
    ### BEGIN HIDDEN TESTS
    for _ in range(5):
        sizes = {f"w{k}": int(n) for k, n in enumerate(student.rng.integers(1, 60, 12))}
        seen = seen or different(student.buckets(sizes, 100), joined(sizes, 100), f"{sizes}, limit 100: ")
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "a bucket may be full to the limit, a large gradient has its own, none is empty",
    hint="Close a bucket when the sum would be *above* the limit; the next one begins with nothing in it, and is"
    " made only when there is something to put into it.",
)
def limits(student: Student) -> str:
    seen = different(student.buckets({"a": 5, "b": 5, "c": 5}, 10), [["c", "b"], ["a"]], "full: ")
    seen = seen or different(student.buckets({"a": 5, "b": 50, "c": 5}, 10), [["c"], ["b"], ["a"]], "large: ")
    seen = seen or different(student.buckets({"a": 50, "b": 50}, 10), [["b"], ["a"]], "large at once: ")
    ### BEGIN HIDDEN TESTS
    for _ in range(5):
        sizes = {f"w{k}": 5 * int(n) for k, n in enumerate(student.rng.integers(1, 5, 12))}
        seen = seen or different(student.buckets(sizes, 15), joined(sizes, 15), f"{sizes}, limit 15: ")
    ### END HIDDEN TESTS
    return seen


SHAPES = {"conv": (3, 4), "bias": (5,), "fc": (2, 2, 3)}


def averaged(student: Student, n: int, limit: int) -> tuple[Ran, list[dict[str, np.ndarray]]]:
    rng = rng_of(student)
    arrays = [{k: rng.integers(-9, 9, size).astype("f4") for k, size in SHAPES.items()} for _ in range(n)]
    return student.on_ranks(n, "average", [[each, limit] for each in arrays]), arrays


@lab.check(
    "average: the mean over all ranks, each array in its shape and place",
    hint="Divide the sum by world_size. What is cut out of a bucket begins where the one before has ended, and "
    "has the shape of its gradient; the names keep the order of `arrays`.",
    points=2,
)
def means(student: Student) -> str:
    ran, arrays = averaged(student, 3, KIB)
    seen = ""
    for found, _ in ran.values:
        seen = seen or different([name for name, *_ in found], list(SHAPES), "names: ")
        for name, array, dtype in found:
            wanted = np.mean([each[name] for each in arrays], 0)
            seen = seen or different(array, wanted, f"{name}: ", 1e-5) or different(dtype, "float32", f"{name}: ")
    for r, (_, own) in enumerate(ran.values):
        seen = seen or different(own, arrays[r], f"the gradients of rank {r} afterward: ")
    return seen


@lab.check(
    "one all-reduce for each bucket",
    hint="Join the flat arrays of a bucket to one array and reduce that: 2 (n - 1) messages for all of them.",
)
def messages(student: Student) -> str:
    seen = ""
    for limit, count in ((KIB, 1), (70, 2), (10, 3)):
        ran, arrays = averaged(student, 2, limit)
        wanted = np.mean([each["fc"] for each in arrays], 0)
        seen = seen or different({name: a for name, a, _ in ran.values[0][0]}["fc"], wanted, f"limit {limit}: fc: ")
        seen = seen or different(len(ran.sent(0)), 2 * count, f"limit {limit}, {count} buckets: messages of rank 0: ")
    return seen


@lab.check(
    "all begin with the weights of rank 0",
    hint="`broadcast` writes into the array that it is given: give it the array of the dict, not a copy, and root 0.",
)
def same_start(student: Student) -> str:
    rng = rng_of(student)
    weights = [{"a": rng.normal(size=(2, 3)), "b": rng.normal(size=4)} for _ in range(3)]
    ran = student.on_ranks(3, "start", [[each] for each in weights])
    seen = ""
    for r, (a, b) in enumerate(ran.values):
        seen = seen or different(a, weights[0]["a"], f"rank {r}: ") or different(b, weights[0]["b"], f"rank {r}: ")
    return seen


def problem(student: Student) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """A linear layer of 4 inputs and 3 classes, and 8 samples, sorted by class: parts of them differ."""
    rng = rng_of(student)
    w = {"w": rng.normal(size=(4, 3)).astype("f4"), "b": rng.normal(size=3).astype("f4")}
    return w, rng.normal(size=(8, 4)).astype("f4"), np.array([0, 0, 0, 1, 1, 2, 2, 2])


@lab.check(
    "the gradients of two ranks are those of one process with the whole batch",
    hint="This rank's samples and *their* labels; then the average of what all have found.",
    points=2,
)
def as_one(student: Student) -> str:
    w, x, labels = problem(student)
    ran = student.on_ranks(2, "gradients", [[w, x, labels]] * 2)
    p = np.exp(x @ w["w"] + w["b"])
    d = (p / p.sum(1, keepdims=True) - np.eye(3)[labels]) / 8
    wanted = {"w": x.T @ d, "b": d.sum(0)}
    return first(different(found, wanted, f"rank {r}: ", 1e-4) for r, (_, found) in enumerate(ran.values))


@lab.check(
    "the loss is that of the whole batch, and costs no message",
    hint="Put it into the dict of gradients as an array of one number, and take the mean out of it.",
)
def loss(student: Student) -> str:
    w, x, labels = problem(student)
    ran = student.on_ranks(2, "gradients", [[w, x, labels]] * 2)
    p = np.exp(x @ w["w"] + w["b"])
    wanted = -np.mean(np.log(p[np.arange(8), labels] / p.sum(1)))
    seen = first(different(got, wanted, f"rank {r}: ", 1e-4) for r, (got, _) in enumerate(ran.values))
    return seen or different(len(ran.sent(0)), 2, "messages of rank 0: ")


### BEGIN HIDDEN TESTS
def joined(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Name by name: into the last bucket if that stays within the limit."""
    found: list[list[str]] = []
    for name in list(sizes)[::-1]:
        if found and sum(sizes[k] for k in found[-1]) + sizes[name] <= limit:
            found[-1].append(name)
        else:
            found.append([name])
    return found


### END HIDDEN TESTS

"""What the cumulative track's own system is compared with: the same LeNet, weights, batches and steps, by hetu.

`heturun -w 4 python -m hetu.teach.labs.beside data digits.npz result.json 3` trains as `tutorials/track/train.py` does:
weights are drawn by the formula of the track's lab 4, batches are in that lab's order. So the losses of both
agree to rounding, and bytes and times are of the same work. The way "server" needs `-s 1`.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ... import data, dist, ops, optim, strategies
from ...core.executor import Executor
from ...core.graph import Node
from ...core.leaf import placeholder, scope, variable
from ...dist import Parallel, Pipeline, RuleBook, stage, world
from ...plan import MachineProfile, simulate
from ...ps import SSP

BATCH, RATE, MOMENTUM, SEED, MICRO_BATCHES = 128, 0.05, 0.9, 0, 4
SHAPES = {"conv1": (25, 6), "conv2": (150, 16), "fc1": (400, 120), "fc2": (120, 84), "fc3": (84, 10)}
SPLIT = RuleBook({"lenet/fc1_w": 1, "lenet/fc1_b": 0, "lenet/fc2_w": 0})


def weights() -> dict[str, np.ndarray]:
    """Those that the track begins with, in the order of axes of hetu's operators: channels before rows and columns."""
    rng, found = np.random.default_rng(SEED), {}
    for name, shape in SHAPES.items():
        found[name] = rng.normal(0, (2 / shape[0]) ** 0.5, shape).astype("float32")
    for name, channels in (("conv1", 1), ("conv2", 6)):
        found[name] = found[name].reshape(5, 5, channels, -1).transpose(3, 2, 0, 1)
    found["fc1"] = found["fc1"].reshape(5, 5, 16, 120).transpose(2, 0, 1, 3).reshape(400, 120)
    return {name: np.ascontiguousarray(array) for name, array in found.items()}


def network(staged: bool) -> list[Any]:
    """[loss, updates, scores] of LeNet; `staged` marks the convolutions and the rest as two stages."""

    def part(k: int) -> AbstractContextManager[None]:
        return stage(k) if staged else nullcontext()

    first = weights()
    x, t = placeholder("x", (None, 1, 28, 28)), placeholder("t", (None,), "int64")

    def both(name: str, size: int) -> tuple[Node, Node]:
        return variable(f"{name}_w", first[name]), variable(f"{name}_b", np.zeros(size, "float32"))

    with scope("lenet"):
        h = x
        with part(0):
            for name, size, padding in (("conv1", 6, 2), ("conv2", 16, 0)):
                w, b = both(name, size)
                h = ops.conv2d(h, w, padding=padding) + ops.reshape(b, (1, size, 1, 1))
                h = ops.max_pool2d(ops.relu(h), 2)
        with part(1):
            h = ops.flatten(h, 1)
            for name, size in (("fc1", 120), ("fc2", 84), ("fc3", 10)):
                w, b = both(name, size)
                h = h @ w + b
                h = h if name == "fc3" else ops.relu(h)
            loss = ops.mean(ops.softmax_cross_entropy(h, t))
    return [loss, optim.Momentum(RATE, MOMENTUM).minimize(loss), h]


WAYS: dict[str, Any] = {
    "one": None,
    "data": dist.DataParallel(),
    "tensor": Parallel(data=2, tensor=2, split=SPLIT),
    "pipeline": Pipeline(2, MICRO_BATCHES, data=2),
    "server": strategies.ParameterServer(consistency=SSP(1)),
}


def digits() -> dict[str, np.ndarray]:
    """The images that both train on, with the channel as last axis: those of `data.mnist`."""
    train, test = data.mnist("train").arrays, data.mnist("test").arrays
    return {"x_train": train[0][..., None], "y_train": train[1], "x_test": test[0][..., None], "y_test": test[1]}


def bytes_a_step(way: str) -> int:
    """What all ranks together send in a step, and servers to them.

    A collective counts as its ring does, an all-reduce of b bytes as 2 (n - 1) / n b for each of n ranks.
    """
    loss, updates, _ = network(way == "pipeline")
    step, shapes = [loss, updates], {"x": (BATCH, 1, 28, 28), "t": (BATCH,)}
    cost = simulate(
        step, WAYS[way] or dist.DataParallel(), MachineProfile(), world_size=1 if way == "one" else 4, shapes=shapes
    )
    return sum(cost.sent.values())


def main(way: str, images: str, result: str, epochs: str = "3") -> None:
    """Train, and write the figures of the first rank."""
    stored = dict(np.load(images))
    x_train, y_train = stored["x_train"].transpose(0, 3, 1, 2), stored["y_train"]
    loss, updates, scores = network(way == "pipeline")
    strategy, comm = WAYS[way], world()
    executor = Executor({"train": [loss, updates], "test": [scores]}, strategy=strategy, comm=comm)
    feed: dict[Node | str, Any] = {"x": x_train[:BATCH], "t": y_train[:BATCH]}
    executor.program("train", feed)  # compiled before the clock starts
    losses, steps, began, processor = [], 0, time.perf_counter(), time.process_time()
    for epoch in range(int(epochs)):
        order = np.random.default_rng([SEED, epoch]).permutation(len(y_train))
        values = []
        for start in range(0, len(order) - BATCH + 1, BATCH):
            rows = order[start : start + BATCH]
            values.append(float(executor.run("train", {"x": x_train[rows], "t": y_train[rows]})[0]))
        losses.append(float(np.mean(values)))
        steps += len(values)
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    found = executor.predict(stored["x_test"].transpose(0, 3, 1, 2), name="test", batch_size=250, progress=False)
    if comm.rank == 0:
        figures = {
            "losses": losses,
            "accuracy": float(np.mean(np.asarray(found).argmax(1) == stored["y_test"])),
            "ms_a_step": 1e3 * seconds / steps,
            "processor_ms_a_step": 1e3 * processor / steps,
        }
        with open(result, "w", encoding="utf-8") as file:
            json.dump(figures, file)


if __name__ == "__main__":
    main(*sys.argv[1:])

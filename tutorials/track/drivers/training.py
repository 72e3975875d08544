"""Beside lab 4: models and optimizers are made here, and answer with arrays."""

import numpy as np
from operators import linear
from values import evaluate, placeholder


def drawn(student, shapes, seed):
    """`initial`, and the names of its dtypes."""
    found = student.initial(shapes, seed)
    return found, {name: str(array.dtype) for name, array in found.items()}


def through(student, half, x, weights):
    """One of `features`, `classifier`, `lenet` for an array and arrays."""
    nodes = {name: placeholder(size=array.shape) for name, array in weights.items()}
    node = placeholder(size=x.shape)
    y = getattr(student, half)(node, nodes)
    return evaluate([y], {node: x} | {nodes[name]: array for name, array in weights.items()})[0]


def regression(student, w, batch_size):
    """A `Model` of one linear layer."""
    shapes = {"w": w["w"].shape, "b": w["b"].shape}

    def network(x, w):
        return linear(x, w["w"], w["b"])

    return student.Model(network, shapes, (batch_size, w["w"].shape[0]), classes=w["b"].shape[0])


def slopes(student, w, x, labels):
    loss, found = regression(student, w, len(x)).gradients(w, x, labels)
    return float(loss), found


def accuracy(student, w, x, labels, batch_size):
    return float(regression(student, w, batch_size).accuracy(w, x, labels))


def momentum(student, weights, steps, rate, momentum):
    """The array that was there before the first step, after each step; the dict may hold another."""
    optimizer, held, seen = student.Momentum(rate, momentum), weights["w"], []
    for g in steps:
        optimizer.update(weights, {"w": g})
        seen.append(held.copy())
    return seen


def fitted(student, samples, batch_size, seed, epochs):
    """What `fit` returns for the loss number-of-the-first-sample, and all that it asked for."""
    asked = []

    def step(numbers):
        asked.append(np.array(numbers))
        return float(numbers[0])

    return student.fit(step, samples, batch_size, seed, epochs), asked

"""Beside lab 6: a softmax regression, its rows shared by ranks."""

import numpy as np
from operators import linear
from training import Model


def shard(student, numbers, rank, n):
    """The part, or the name of the error."""
    try:
        return np.asarray(student.shard(numbers, rank, n))
    except ValueError:
        return "ValueError"


def average(student, comm, arrays, limit):
    """The means in their order, their dtypes, and the arrays afterward."""
    found = student.average(comm, arrays, limit)
    return [[name, array, str(array.dtype)] for name, array in found.items()], arrays


def start(student, comm, weights):
    """The arrays that were passed, afterward."""
    held = list(weights.values())
    student.DataParallel(None, comm).start(weights)
    return held


def gradients(student, comm, w, x, labels):
    shapes = {name: array.shape for name, array in w.items()}

    def network(x, w):
        return linear(x, w["w"], w["b"])

    part = (len(x) // comm.world_size, x.shape[1])
    model = student.DataParallel(Model(network, shapes, part, classes=w["b"].shape[0]), comm)
    loss, found = model.gradients(w, x, labels)
    return float(loss), found

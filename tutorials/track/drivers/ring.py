"""Beside lab 5: what a rank's array has become."""

import numpy as np


def after(student, name, comm, x, *args):
    """`reduce_scatter`, `all_gather` or `broadcast` in place."""
    x = x.copy()
    getattr(student, name)(comm, x, *args)
    return x


def reduce_scatter(student, comm, x):
    return after(student, "reduce_scatter", comm, x)


def all_gather(student, comm, x):
    return after(student, "all_gather", comm, x)


def broadcast(student, comm, x, root):
    return after(student, "broadcast", comm, x, root)


def all_reduce(student, comm, x, transposed=False):
    """The sum, its dtype, and this rank's own array afterward."""
    x = x.copy()
    y = np.asarray(student.all_reduce(comm, x.T if transposed else x))
    return y, str(y.dtype), x


def chunks(student, size, n):
    return [[int(start), int(stop)] for start, stop in student.chunks(size, n)]

"""Lab 7: tensor parallel layers.

A layer may be too large for one rank. Then the layer itself is divided, and every rank computes with its part of the
weights on the same samples. For Y = X W there are two ways. By *columns*, W = [W1 W2]: each rank gets some columns of
Y, and needs nothing from the others. By *rows*, W = [W1; W2], if the columns of X are divided already: each rank gets a
term of the sum Y = X1 W1 + X2 W2, and an all-reduce adds them up. Columns first, then rows: between two layers nothing
is sent at all, and relu does not mind (Shoeybi et al., "Megatron-LM", 2019, section 3).

Backward it is the mirror image. Where a whole X enters divided layers, each rank knows only the part of dL/dX that came
through its own weights, so those are added up. Two operators say all this, and `gradients` does the rest:

    enter   forward as it is, backward an all-reduce       (before a layer divided by columns)
    leave   forward an all-reduce, backward as it is       (after a layer divided by rows)
"""

import numpy as np
from operators import linear, matmul, relu
from ring import all_gather, all_reduce
from training import LENET, Model, features
from values import as_it_is, operator

DIVIDED = {"fc1/w": 1, "fc1/b": 0, "fc2/w": 0}  # the axis along which a weight of LeNet is divided; others are whole


def part(array, axis, rank, n):
    """This rank's part of an array whose `axis` is divided into n equal ones: a contiguous copy."""
    ### BEGIN SOLUTION
    return np.split(array, n, axis)[rank].copy()
    ### END SOLUTION


def divide(weights, divided, rank, n):
    """{name: array} for this rank: its part of the names in `divided` ({name: axis}), the others whole."""
    return {name: part(a, divided[name], rank, n) if name in divided else a for name, a in weights.items()}


def whole(comm, array, axis):
    """The array whose parts along `axis` the ranks have: the inverse of `part`, by one all-gather (lab 5)."""
    ### BEGIN SOLUTION
    n = comm.world_size
    flat = np.empty(n * array.size, array.dtype)
    flat[comm.rank * array.size : (comm.rank + 1) * array.size] = array.reshape(-1)
    all_gather(comm, flat)
    return np.concatenate(list(flat.reshape(n, *array.shape)), axis)
    ### END SOLUTION


@operator(shape=as_it_is)
def enter(out, x, *, comm):
    ### BEGIN SOLUTION
    out[...] = x
    ### END SOLUTION


@operator(shape=as_it_is)
def leave(out, x, *, comm):
    ### BEGIN SOLUTION
    out[...] = all_reduce(comm, x)
    ### END SOLUTION


@enter.gradient
def enter_gradient(g, y, x, *, comm):
    ### BEGIN SOLUTION
    return [leave(g, comm=comm)]
    ### END SOLUTION


@leave.gradient
def leave_gradient(g, y, x, *, comm):
    ### BEGIN SOLUTION
    return [enter(g, comm=comm)]
    ### END SOLUTION


def column_linear(x, w, b, comm):
    """Some columns of x w + b, for a whole x and this rank's columns of w and of b."""
    ### BEGIN SOLUTION
    return linear(enter(x, comm=comm), w, b)
    ### END SOLUTION


def row_linear(x, w, b, comm):
    """x w + b, whole on every rank, for this rank's columns of x, its rows of w, and a whole b."""
    ### BEGIN SOLUTION
    return leave(matmul(x, w), comm=comm) + b
    ### END SOLUTION


def classifier(x, w, comm):
    """That of lab 4, with its first two layers divided as DIVIDED says; the third is whole and done by every rank."""
    ### BEGIN SOLUTION
    x = relu(column_linear(x, w["fc1/w"], w["fc1/b"], comm))
    x = relu(row_linear(x, w["fc2/w"], w["fc2/b"], comm))
    return linear(x, w["fc3/w"], w["fc3/b"])
    ### END SOLUTION


def local_shapes(shapes, divided, n):
    """{name: shape} of the weights as each of n ranks has them. ValueError if n does not divide an axis."""
    ### BEGIN SOLUTION
    found = {}
    for name, shape in shapes.items():
        axis = divided.get(name)
        if axis is not None and shape[axis] % n:
            raise ValueError(f"axis {axis} of {name}, {shape}, cannot be divided by {n}")
        found[name] = tuple(size // n if k == axis else size for k, size in enumerate(shape))
    return found
    ### END SOLUTION


def tensor_parallel_lenet(comm, batch_size):
    """The `Model` of LeNet on the ranks of `comm`: its weights are those that `divide` makes. Given."""
    shapes = local_shapes(LENET, DIVIDED, comm.world_size)
    return Model(lambda x, w: classifier(features(x, w), w, comm), shapes, (batch_size, 28, 28, 1))

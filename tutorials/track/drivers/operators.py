"""Beside lab 2: an operator, or a function that makes nodes, with the gradients of sum(t * y) for its inputs."""

import numpy as np
from values import OPERATORS, evaluate, gradients, placeholder, reshape, total


def both(student, name, arrays, t, **attrs):
    """[y, dL/dx of each input x] for L = sum(t * y)."""
    inputs = [placeholder(size=array.shape) for array in arrays]
    y = (OPERATORS.get(name) or getattr(student, name))(*inputs, **attrs)
    weight = placeholder(size=t.shape)
    loss = reshape(total(y * weight, axes=tuple(range(len(y.shape)))), size=())
    feeds = dict(zip([*inputs, weight], [*arrays, t]))
    return evaluate([y, *gradients(loss, inputs)], feeds)


def result(student, name, arrays, **attrs):
    """y alone, computed into memory that held something else before."""
    shape = OPERATORS[name].shape(*[array.shape for array in arrays], **attrs)
    out = np.full(shape, 7.0)
    OPERATORS[name].forward(out, *arrays, **attrs)
    return out

"""Rows for normalization; the references normalize one channel, row or group after the other."""

from __future__ import annotations

import numpy as np

import hetu as ht
from hetu.core.graph import OPS

from . import Sample, positive, real


def batch_norm(x, scale, bias, axis=1, epsilon=1e-5):
    y, means, variances = np.empty_like(x), [], []
    for c in range(x.shape[axis]):
        at = (slice(None),) * axis + (c,)
        values = x[at]
        means.append(values.mean())
        variances.append(values.var())
        y[at] = (values - means[-1]) / np.sqrt(variances[-1] + epsilon) * scale[c] + bias[c]
    return y, np.array(means), np.array(variances)


def batch_norm_y(x, scale, bias):
    return batch_norm(x, scale, bias)[0]


def layer_norm(x, scale, bias, epsilon=1e-5):
    rows = [(r - r.mean()) / np.sqrt(r.var() + epsilon) * scale + bias for r in x.reshape(-1, x.shape[-1])]
    return np.array(rows).reshape(x.shape)


def rms_norm(x, scale):
    rows = [r / np.sqrt((r * r).mean() + 1e-6) * scale for r in x.reshape(-1, x.shape[-1])]
    return np.array(rows).reshape(x.shape)


def slopes(function, g, *inputs, step=1e-5):
    """The gradients of sum(g function(inputs)) by central differences, one element at a time."""
    results = []
    for array in inputs:
        slope = np.zeros(array.shape)
        for place in np.ndindex(*array.shape):
            kept, ends = array[place], []
            for sign in (1, -1):
                array[place] = kept + sign * step
                ends.append((g * function(*inputs)).sum())
            array[place] = kept
            slope[place] = (ends[0] - ends[1]) / (2 * step)
        results.append(slope)
    return tuple(results)


def statistics(x):
    return ht.mean(x, axis=(0, 2)), ht.var(x, axis=(0, 2))


def batch_norm_dx(g, x, scale):
    return OPS["batch_norm_dx"](g, x, scale, *statistics(x))


def group_norm(x, scale, bias, groups, epsilon=1e-5):
    y = np.empty_like(x)
    size = x.shape[1] // groups
    for n, k in np.ndindex(x.shape[0], groups):
        part = x[n, k * size : (k + 1) * size]
        y[n, k * size : (k + 1) * size] = (part - part.mean()) / np.sqrt(part.var() + epsilon)
    shape = (-1, *(1 for _ in x.shape[2:]))
    return y * scale.reshape(shape) + bias.reshape(shape)


SAMPLES = [
    Sample("batch_norm_train", OPS["batch_norm_train"], (real(4, 3, 2, 5), real(3), real(3)), batch_norm),
    Sample(
        "batch_norm_train",
        lambda x, s, b: OPS["batch_norm_train"](x, s, b, axis=-1, epsilon=0.1),
        (real(6, 3), real(3), real(3)),
        lambda x, s, b: batch_norm(x, s, b, -1 % x.ndim, 0.1),
        label="last-axis",
    ),
    Sample(
        "batch_norm_train",
        lambda x, s, b: OPS["batch_norm_train"](x, s, b)[0],
        (real(4, 3, 5), real(3), real(3)),
        lambda x, s, b: batch_norm(x, s, b)[0],
        label="alone",
    ),
    Sample(
        "batch_norm_dx",
        batch_norm_dx,
        (real(4, 2, 3), real(4, 2, 3), positive(2)),
        lambda g, x, s: slopes(lambda x, s, b: batch_norm(x, s, b)[0], g, x, s, np.zeros(2)),
    ),
    Sample(
        "batch_norm_dx",
        lambda g, x, s: OPS["batch_norm_dx"](g, x, s, ht.mean(x, axis=0), ht.var(x, axis=0), axis=1),
        (real(9, 2), real(9, 2), positive(2)),
        lambda g, x, s: slopes(batch_norm_y, g, x, s, np.zeros(2)),
        label="last-axis",
    ),
    Sample("layer_norm", ht.layer_norm, (real(2, 3, 6), real(6), real(6)), layer_norm),
    Sample(
        "layer_norm_dx",
        OPS["layer_norm_dx"],
        (real(2, 3, 4), real(2, 3, 4), positive(4)),
        lambda g, x, s: slopes(layer_norm, g, x, s, np.zeros(4)),
    ),
    Sample(
        "rms_norm",
        ht.rms_norm,
        (real(3, 5), real(5)),
        rms_norm,
    ),
    Sample(
        "rms_norm_dx",
        OPS["rms_norm_dx"],
        (real(2, 3, 4), real(2, 3, 4), positive(4)),
        lambda g, x, s: slopes(rms_norm, g, x, s),
    ),
    Sample(
        "rms_norm",
        lambda x, s: OPS["rms_norm"].decompose_rule(x, s, epsilon=1e-6),
        (real(3, 5), real(5)),
        rms_norm,
        label="parts",
    ),
    Sample(
        "rms_norm_dx",
        lambda g, x, s: OPS["rms_norm_dx"].decompose_rule(g, x, s, epsilon=1e-6),
        (real(2, 3, 4), real(2, 3, 4), positive(4)),
        lambda g, x, s: slopes(rms_norm, g, x, s),
        label="parts",
        order=1,
    ),
    Sample(
        "group_norm",
        lambda x, s, b: ht.group_norm(x, s, b, groups=2),
        (real(2, 4, 3, 2), real(4), real(4)),
        lambda x, s, b: group_norm(x, s, b, 2),
    ),
    Sample(
        "batch_norm_train",
        lambda x, s, b: OPS["batch_norm_train"].decompose_rule(x, s, b, axis=1, epsilon=1e-5),
        (real(4, 3, 5), real(3), real(3)),
        batch_norm,
        label="parts",
    ),
    Sample(
        "batch_norm_dx",
        lambda g, x, s: OPS["batch_norm_dx"].decompose_rule(g, x, s, *statistics(x), axis=1, epsilon=1e-5),
        (real(4, 2, 3), real(4, 2, 3), positive(2)),
        lambda g, x, s: slopes(lambda x, s, b: batch_norm(x, s, b)[0], g, x, s, np.zeros(2)),
        label="parts",
        order=1,
    ),
    Sample(
        "layer_norm",
        lambda x, s, b: OPS["layer_norm"].decompose_rule(x, s, b, epsilon=1e-5),
        (real(2, 3, 6), real(6), real(6)),
        layer_norm,
        label="parts",
    ),
    Sample(
        "layer_norm_dx",
        lambda g, x, s: OPS["layer_norm_dx"].decompose_rule(g, x, s, epsilon=1e-5),
        (real(2, 3, 4), real(2, 3, 4), positive(4)),
        lambda g, x, s: slopes(layer_norm, g, x, s, np.zeros(4)),
        label="parts",
        order=1,
    ),
]

"""Rows for operators that only passes for GPUs make; the references are the plain operators they stand for."""

from __future__ import annotations

import numpy as np

import hetu as ht
import hetu.gpu_kernels.passes.batch_norm_relu
from hetu.core.graph import OPS
from hetu.gpu_kernels.passes.group_checks import ALL_FINITE
from hetu.gpu_kernels.passes.group_updates import group_updates

from . import Sample, given, positive, real
from .normalization import batch_norm, slopes
from .update import RULES, SHAPE


def relued(normal, added=0.0):
    return np.maximum(normal[0] + added, 0), *normal[1:]


def relu_slopes(g, x, scale, added):
    """The gradients of `batch_norm_relu`, with the mask as it is at `x`."""
    y = batch_norm(x, scale, np.ones(2), -1 % x.ndim)[0]
    masked = g * (y + added > 0)
    return slopes(lambda x, s, b: batch_norm(x, s, b, -1 % x.ndim)[0], masked, x, scale, np.ones(2))


def batch_norm_relu_dx(g, x, scale, added):
    y, center, var = OPS["batch_norm_relu"](x, scale, ht.ones_like(scale), added, epsilon=1e-5)
    return OPS["batch_norm_relu_dx"](g, y, x, scale, center, var, epsilon=1e-5)


def finite(*gradients, scale=0.5):
    """Whether gradients of several shapes are finite when they are divided by a number."""

    def values(*arrays):
        return (np.bool_(all(np.isfinite(a / scale).all() for a in arrays[:-1])),)

    inputs, label = (*map(given, gradients), given(scale)), f"of {len(gradients)}"
    return Sample("all_finite", lambda *nodes: ALL_FINITE.make(nodes, {}), inputs, values, label=label, order=0)


def grouped(name, under=None):
    """Two parameters of different shapes, updated by one operator; or not, where the condition `under` says so."""
    rule, each = RULES[name], RULES[name].op.update.tables
    _, *scalars = rule.inputs((), None)[each:]
    old = [make(*shape) for shape in (SHAPE, (7,)) for make in (real, *rule.states)]
    inputs = (*old, real(*SHAPE), real(7), *scalars, *([] if under is None else [given(np.bool_(under))]))

    def cut(values):
        gradients, shared = values[2 * each :][:2], values[2 * each + 2 :][: len(scalars)]
        return [(*values[k * each : (k + 1) * each], g, *shared) for k, g in enumerate(gradients)]

    def build(*nodes):
        made = [rule.op(*member) for member in cut(nodes)]
        new = [n for m in made for n in (m if isinstance(m, tuple) else (m,))]
        return group_updates(new if under is None else [ht.where(nodes[-1], n, o) for n, o in zip(new, nodes)])

    def values(*arrays):
        return arrays[: 2 * each] if under is False else tuple(v for m in cut(arrays) for v in rule.reference(*m))

    label = name if under is None else f"{name}, {under}"
    return Sample("update_all", build, inputs, values, label=label, order=0)


def in_16_bits():
    """As mixed precision with a loss scale of 8 has it: in float32 no gradient is cast or divided beforehand."""
    first = grouped("adam")

    def rounded(g):
        return ht.astype(ht.astype(g * 8.0, dtype="float16"), dtype=g.dtype.name) / 8.0

    def build(*nodes):
        made = [OPS["adam"](*nodes[3 * k :][:3], rounded(nodes[6 + k]), *nodes[8:]) for k in range(2)]
        return group_updates([n for m in made for n in m])

    def values(*arrays):
        gradients = [(g * 8.0).astype(np.float16).astype(g.dtype) / 8.0 for g in arrays[6:8]]
        return first.reference(*arrays[:6], *gradients, *arrays[8:])

    extra = {"no_float16": "its gradients would be rounded once more"}
    no_float16 = "the standard has no float16"
    return Sample("update_all", build, first.inputs, values, label="16 bits", order=0, strict=no_float16, extra=extra)


WIDE = "parameters stay float32 beside images of 16 bits"
SAMPLES = [
    Sample(
        "batch_norm_relu",
        lambda x, s, b: OPS["batch_norm_relu"](x, s, b, epsilon=0.1),
        (real(4, 3, 5), real(5), real(5)),
        lambda x, s, b: relued(batch_norm(x, s, b, 2, 0.1)),
        order=0,
        extra={"no_float16": WIDE},
    ),
    Sample(
        "batch_norm_relu",
        lambda x, s, b, h: OPS["batch_norm_relu"](x, s, b, h, epsilon=1e-5),
        (real(7, 5), real(5), real(5), real(7, 5)),
        lambda x, s, b, h: relued(batch_norm(x, s, b), h),
        label="added",
        order=0,
        extra={"no_float16": WIDE},
    ),
    Sample(
        "batch_norm_relu_dx",
        batch_norm_relu_dx,
        (real(5, 3, 2), real(5, 3, 2), positive(2), real(5, 3, 2)),
        relu_slopes,
        order=0,
    ),
    finite([1.0, -2.0] * 9, [[3.0] * 4]),
    finite([1.0, 2.0], [[0.0, np.inf]], np.nan),
    *map(grouped, RULES),
    *(grouped(name, under=under) for name in ("momentum", "lamb") for under in (True, False)),
    in_16_bits(),
]

"""Launches the kernels of `rows.cu`: softmax, its cross entropy, layer and RMS norm, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from .machine import Call, Machine, contiguous
from .source import compute_dtype, kernel_file

PARTS = 64  # into how many parts the rows are cut where columns are summed


def text(values: str, labels: str = "int64", **others: str) -> str:
    """The kernels for these dtypes; `others` are those that differ: vectors V, gradients G and results Y."""
    return kernel_file("rows", S=values, I=labels, **{"V": values, "G": values, "Y": values} | others)


def row_shape(rows: int, width: int) -> tuple[tuple[int], tuple[int, int]]:
    """Grid and block: 8 warps of one row each for narrow rows, a block for a wide one.

    >>> row_shape(100, 768), row_shape(100, 50257)
    (((13,), (32, 8)), ((100,), (1024, 1)))
    """
    if width <= 1024:
        return (-(-rows // 8),), (32, 8)
    return (rows,), (1024 if width >= 8192 else 256, 1)


def _along_axis(name: str, machine: Machine, out: Any, x: Any, axis: int) -> list[Call] | None:
    if x.dtype != out.dtype or not contiguous(x, out):
        return None
    width, inner = x.shape[axis], prod(x.shape[axis + 1 :])
    rows = x.size // width
    kernel = machine.kernel(text(x.dtype.name), name)
    return [partial(kernel, *row_shape(rows, width), (x, out, rows, width, inner))]


def softmax(machine: Machine, out: Any, x: Any, *, axis: int) -> list[Call] | None:
    return _along_axis("softmax", machine, out, x, axis)


def log_softmax(machine: Machine, out: Any, x: Any, *, axis: int) -> list[Call] | None:
    return _along_axis("log_softmax", machine, out, x, axis)


def softmax_cross_entropy(
    machine: Machine,
    out: Any,
    logits: Any,
    labels: Any,
    *,
    ignore_index: int | None,
    label_smoothing: float,
    dtype: str | None = None,
) -> list[Call] | None:
    if not contiguous(labels) or not _fit((logits, *out), out):
        return None
    rows, width = labels.size, logits.shape[-1]
    made = text(logits.dtype.name, labels.dtype.name, V=out[0].dtype.name)
    kernel = machine.kernel(made, "softmax_cross_entropy")
    options = _label_options(ignore_index, label_smoothing)
    return [partial(kernel, *row_shape(rows, width), (logits, labels, *out, rows, width, *options))]


def softmax_cross_entropy_dx(
    machine: Machine,
    out: Any,
    g: Any,
    logits: Any,
    labels: Any,
    total: Any,
    *,
    ignore_index: int | None,
    label_smoothing: float,
    dtype: str | None = None,
) -> list[Call] | None:
    if not contiguous(labels) or not _fit((g, logits, out), (g, total)):
        return None
    rows, width = labels.size, logits.shape[-1]
    made = text(logits.dtype.name, labels.dtype.name, V=total.dtype.name, Y=out.dtype.name)
    kernel = machine.kernel(made, "softmax_cross_entropy_dx")
    options = _label_options(ignore_index, label_smoothing)
    return [partial(kernel, *row_shape(rows, width), (g, logits, labels, total, out, rows, width, *options))]


def _label_options(ignore_index: int | None, label_smoothing: float) -> tuple[np.bool_, int, float]:
    return np.bool_(ignore_index is not None), ignore_index or 0, float(label_smoothing)


# -- normalization ---------------------------------------------------------------------------------------------------


def layer_norm(
    machine: Machine, out: Any, x: Any, scale: Any, bias: Any, *, epsilon: float, dtype: str | None = None
) -> list[Call] | None:
    return _norm("layer_norm", machine, out, (x, scale, bias), epsilon)


def rms_norm(
    machine: Machine, out: Any, x: Any, scale: Any, *, epsilon: float, dtype: str | None = None
) -> list[Call] | None:
    return _norm("rms_norm", machine, out, (x, scale), epsilon)


def _fit(activations: Sequence[Any], vectors: Sequence[Any]) -> bool:
    """Whether arrays are contiguous and computed in one dtype, and vectors stored in one."""
    arrays = (*activations, *vectors)
    alike = {compute_dtype(a.dtype.name) for a in arrays}, {v.dtype.name for v in vectors}
    return contiguous(*arrays) and all(len(dtypes) == 1 for dtypes in alike)


def _norm(name: str, machine: Machine, out: Any, arrays: tuple[Any, ...], epsilon: float) -> list[Call] | None:
    x, *vectors = arrays
    if not _fit((x, out), vectors):
        return None
    width = out.shape[-1]
    rows = out.size // width
    kernel = machine.kernel(text(x.dtype.name, V=vectors[0].dtype.name, Y=out.dtype.name), name)
    return [partial(kernel, *row_shape(rows, width), (*arrays, out, rows, width, float(epsilon)))]


def layer_norm_dx(
    machine: Machine, out: Any, g: Any, x: Any, scale: Any, *, epsilon: float, dtype: str | None = None
) -> list[Call] | None:
    """`out` is (dx, dscale, dbias)."""
    return _norm_dx("layer_norm_dx", machine, out, g, x, scale, epsilon)


def rms_norm_dx(
    machine: Machine, out: Any, g: Any, x: Any, scale: Any, *, epsilon: float, dtype: str | None = None
) -> list[Call] | None:
    """`out` is (dx, dscale)."""
    unused = machine.xp.empty_like(out[1])
    return _norm_dx("rms_norm_dx", machine, (*out, unused), g, x, scale, epsilon)


def _norm_dx(name: str, machine: Machine, out: Any, g: Any, x: Any, scale: Any, epsilon: float) -> list[Call] | None:
    dx, dscale, dbias = out
    if not _fit((g, x, dx), (scale, dscale, dbias)):
        return None
    made = text(x.dtype.name, V=scale.dtype.name, G=g.dtype.name, Y=dx.dtype.name)
    width, xp, wide = x.shape[-1], machine.xp, compute_dtype(x.dtype.name)
    rows = x.size // width
    parts = min(PARTS, -(-rows // 8))
    statistics, sums = xp.empty((rows, 2), wide), xp.empty((parts, 2, width), wide)
    columns, add = machine.kernel(made, "norm_columns"), machine.kernel(made, "add_parts")
    return [
        partial(
            machine.kernel(made, name),
            *row_shape(rows, width),
            (g, x, scale, dx, statistics, rows, width, float(epsilon)),
        ),
        partial(columns, (-(-width // 32), parts), (32, 8), (g, x, statistics, sums, rows, width)),
        partial(add, (-(-width // 256), 2), (256,), (sums, dscale, dbias, parts, width)),
    ]


# -- selection -------------------------------------------------------------------------------------------------------

MOST_SELECTED = 32  # beyond, CuPy sorts the rows


def topk(machine: Machine, out: Any, x: Any, *, k: int, axis: int) -> list[Call] | None:
    """`out` is (values, places)."""
    if axis != x.ndim - 1 or k > MOST_SELECTED or not contiguous(x, *out):
        return None
    rows, width = x.size // x.shape[-1], x.shape[-1]
    kernel = machine.kernel(text(x.dtype.name), "topk")
    return [partial(kernel, (-(-rows // 8),), (32, 8), (x, *out, rows, width, k))]

"""Launches the kernels of `rows.cu`: softmax, its cross entropy, layer and RMS norm, their gradients, and top k."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ..fuse.line_text import compute_dtype
from ..ops import activation, loss, normalization, sorting
from .launchers import kernel
from .machine import Call, Machine, contiguous, warps
from .source import kernel_file

PARTS = 64  # into how many parts the rows are cut where columns are summed
MOST_SELECTED = 32  # beyond, CuPy sorts the rows


def text(values: str, labels: str = "int64", **others: str) -> str:
    """The kernels for these dtypes; `others` are those that differ: vectors V, gradients G and results Y."""
    return kernel_file("rows", S=values, I=labels, **{"V": values, "G": values, "Y": values} | others)


def row_shape(rows: int, width: int) -> tuple[tuple[int], tuple[int, int]]:
    """Grid and block: 8 warps of one row each for narrow rows, a block for a wide one.

    >>> row_shape(100, 768), row_shape(100, 50257)
    (((13,), (32, 8)), ((100,), (1024, 1)))
    """
    if width <= 1024:
        return warps(rows)
    return (rows,), (1024 if width >= 8192 else 256, 1)


def along_axis(name: str, machine: Machine, out: Any, x: Any, *, axis: int) -> list[Call] | None:
    if x.dtype != out.dtype or not contiguous(x, out):
        return None
    width, inner = x.shape[axis], prod(x.shape[axis + 1 :])
    rows = x.size // width
    launch = machine.kernel(text(x.dtype.name), name)
    return [partial(launch, *row_shape(rows, width), (x, out, rows, width, inner))]


@kernel(loss.cross_entropy_of_ids)
def softmax_cross_entropy(machine: Machine, out: Any, logits: Any, labels: Any, **attrs: Any) -> list[Call] | None:
    if not contiguous(labels) or not _fit((logits, *out), out):
        return None
    rows, width = labels.size, logits.shape[-1]
    made = text(logits.dtype.name, labels.dtype.name, V=out[0].dtype.name)
    launch = machine.kernel(made, "softmax_cross_entropy")
    return [partial(launch, *row_shape(rows, width), (logits, labels, *out, rows, width, *_label_options(**attrs)))]


@kernel(loss.softmax_cross_entropy_dx)
def softmax_cross_entropy_dx(
    machine: Machine, out: Any, g: Any, logits: Any, labels: Any, total: Any, **attrs: Any
) -> list[Call] | None:
    if not contiguous(labels) or not _fit((g, logits, out), (g, total)):
        return None
    rows, width = labels.size, logits.shape[-1]
    made = text(logits.dtype.name, labels.dtype.name, V=total.dtype.name, Y=out.dtype.name)
    launch = machine.kernel(made, "softmax_cross_entropy_dx")
    arguments = (g, logits, labels, total, out, rows, width, *_label_options(**attrs))
    return [partial(launch, *row_shape(rows, width), arguments)]


def _label_options(ignore_index: int | None, label_smoothing: float, **_: Any) -> tuple[np.bool_, int, float]:
    return np.bool_(ignore_index is not None), ignore_index or 0, float(label_smoothing)


# -- normalization ---------------------------------------------------------------------------------------------------


def _fit(activations: Sequence[Any], vectors: Sequence[Any]) -> bool:
    """Whether arrays are contiguous and computed in one dtype, and vectors stored in one."""
    arrays = (*activations, *vectors)
    alike = {compute_dtype(a.dtype.name) for a in arrays}, {v.dtype.name for v in vectors}
    return contiguous(*arrays) and all(len(dtypes) == 1 for dtypes in alike)


def norm(
    name: str, machine: Machine, out: Any, x: Any, *vectors: Any, epsilon: float, dtype: str | None = None
) -> list[Call] | None:
    if not _fit((x, out), vectors):
        return None
    width = out.shape[-1]
    rows = out.size // width
    launch = machine.kernel(text(x.dtype.name, V=vectors[0].dtype.name, Y=out.dtype.name), name)
    return [partial(launch, *row_shape(rows, width), (x, *vectors, out, rows, width, float(epsilon)))]


def norm_dx(
    name: str, machine: Machine, out: Any, g: Any, x: Any, scale: Any, *, epsilon: float, dtype: str | None = None
) -> list[Call] | None:
    """`out` is (dx, dscale) or (dx, dscale, dbias)."""
    dx, dscale, *rest = out
    dbias = rest[0] if rest else machine.xp.empty_like(dscale)  # which nobody reads
    if not _fit((g, x, dx), (scale, dscale, dbias)):
        return None
    made = text(x.dtype.name, V=scale.dtype.name, G=g.dtype.name, Y=dx.dtype.name)
    width, xp, wide = x.shape[-1], machine.xp, compute_dtype(x.dtype.name)
    rows = x.size // width
    parts = min(PARTS, -(-rows // 8))
    statistics, sums = xp.empty((rows, 2), wide), xp.empty((parts, 2, width), wide)
    by_row, by_column, add = (machine.kernel(made, part) for part in (name, "norm_columns", "add_parts"))
    arguments = (g, x, scale, dx, statistics, rows, width, float(epsilon))
    return [
        partial(by_row, *row_shape(rows, width), arguments),
        partial(by_column, (-(-width // 32), parts), (32, 8), (g, x, statistics, sums, rows, width)),
        partial(add, (-(-width // 256), 2), (256,), (sums, dscale, dbias, parts, width)),
    ]


for _operators, _launcher in {
    (activation.softmax, activation.log_softmax): along_axis,
    (normalization.layer_norm, normalization.rms_norm): norm,
    (normalization.layer_norm_dx, normalization.rms_norm_dx): norm_dx,
}.items():
    for _op in _operators:
        kernel(_op)(partial(_launcher, _op.name))


@kernel(sorting.topk)
def topk(machine: Machine, out: Any, x: Any, *, k: int, axis: int) -> list[Call] | None:
    """`out` is (values, places)."""
    if axis != x.ndim - 1 or k > MOST_SELECTED or not contiguous(x, *out):
        return None
    rows, width = x.size // x.shape[-1], x.shape[-1]
    launch = machine.kernel(text(x.dtype.name), "topk")
    return [partial(launch, *warps(rows), (x, *out, rows, width, k))]

"""Launches the kernels of `rows.cu`: softmax, its cross entropy, layer and RMS norm, their gradients, and top k."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..fuse.line_text import compute_dtype
from ..ops import activation, loss, normalization, sorting
from .launchers import kernel
from .machine import Call, Machine, contiguous, warps, widest_pack
from .source import assemble, file_text, number_text

MOST_SELECTED = 32  # beyond, CuPy sorts the rows
MOST_THREADS, MOST_KEPT = 512, 4  # of a team; packs of a thread, so that two arrays take 32 of its 128 registers
LONGEST = 1 << 30  # elements of a row: columns are counted in 32 bits
BLOCKS = 1024  # that keep a large GPU busy where columns are summed
LEAST_ROWS = 32  # of one of them


class Team(NamedTuple):
    """The threads that share a row, the neighbors that each moves at once, and how many such packs it loads ahead."""

    pack: int = 1
    threads: int = 32
    kept: int = 1
    whole: bool = False
    ragged: bool = False

    def shape(self, rows: int) -> tuple[tuple[int], tuple[int, int]]:
        """Grid and block: 8 teams of a warp each share a block, a larger one is a block."""
        return warps(rows) if self.threads == 32 else ((rows,), (self.threads, 1))


def team(width: int, *arrays: Any, beside: Sequence[Any] = (), apart: bool = False) -> Team:
    """A team for rows of `width` elements of these arrays, and vectors beside them; neighbors may lie apart in memory.

    >>> team(4096, np.zeros((1, 4096), "float32"))
    Team(pack=4, threads=256, kept=4, whole=True, ragged=False)
    >>> team(50257, np.zeros((1, 50257), "float32"))
    Team(pack=4, threads=512, kept=4, whole=False, ragged=True)
    """
    pack = 1 if apart else widest_pack(16, *arrays, beside=beside)  # 16: a row may begin anywhere
    packs = -(-width // pack)
    threads = min(32 * -(-packs // (32 * MOST_KEPT)), MOST_THREADS)
    kept = min(-(-packs // threads), MOST_KEPT)
    return Team(pack, threads, kept, packs <= threads * kept, width % pack > 0)


def text(values: str, labels: str = "int64", team: Team = Team(), **others: str) -> str:  # noqa: B008 - a tuple
    """The kernels for these dtypes; `others` are those that differ: vectors V, gradients G and results Y."""
    flags = f"const bool WHOLE = {number_text(team.whole)}, RAGGED = {number_text(team.ragged)};\n"
    sizes = f"const int PACK = {team.pack}, TEAM = {team.threads}, KEPT = {team.kept};\n"
    body = f'{sizes}{flags}#line 1 "rows.cu"\n{file_text("rows")}'
    return assemble(body, "rows.cu", S=values, I=labels, **{"V": values, "G": values, "Y": values} | others)


def along_axis(name: str, machine: Machine, out: Any, x: Any, *, axis: int) -> list[Call] | None:
    if x.dtype != out.dtype or not contiguous(x, out) or x.shape[axis] > LONGEST:
        return None
    width, inner = x.shape[axis], prod(x.shape[axis + 1 :])
    rows, made = x.size // width, team(width, x, out, apart=inner > 1)
    launch = machine.kernel(text(x.dtype.name, team=made), name)
    return [partial(launch, *made.shape(rows), (x, out, rows, width, inner))]


@kernel(loss.cross_entropy_of_ids)
def softmax_cross_entropy(machine: Machine, out: Any, logits: Any, labels: Any, **attrs: Any) -> list[Call] | None:
    if not contiguous(labels) or not _fit((logits, *out), out):
        return None
    rows, width = labels.size, logits.shape[-1]
    made = team(width, logits)
    launch = machine.kernel(
        text(logits.dtype.name, labels.dtype.name, made, V=out[0].dtype.name), "softmax_cross_entropy"
    )
    return [partial(launch, *made.shape(rows), (logits, labels, *out, rows, width, *_label_options(**attrs)))]


@kernel(loss.softmax_cross_entropy_dx)
def softmax_cross_entropy_dx(
    machine: Machine, out: Any, g: Any, logits: Any, labels: Any, total: Any, **attrs: Any
) -> list[Call] | None:
    if not contiguous(labels) or not _fit((g, logits, out), (g, total)):
        return None
    rows, width = labels.size, logits.shape[-1]
    made, dtypes = team(width, logits, out), {"V": total.dtype.name, "Y": out.dtype.name}
    launch = machine.kernel(text(logits.dtype.name, labels.dtype.name, made, **dtypes), "softmax_cross_entropy_dx")
    arguments = (g, logits, labels, total, out, rows, width, *_label_options(**attrs))
    return [partial(launch, *made.shape(rows), arguments)]


def _label_options(ignore_index: int | None, label_smoothing: float, **_: Any) -> tuple[np.bool_, int, float]:
    return np.bool_(ignore_index is not None), ignore_index or 0, float(label_smoothing)


# -- normalization ---------------------------------------------------------------------------------------------------


def _fit(activations: Sequence[Any], vectors: Sequence[Any]) -> bool:
    """Whether arrays are contiguous, in rows not too long, computed in one dtype, and vectors stored in one."""
    arrays = (*activations, *vectors)
    alike = {compute_dtype(a.dtype.name) for a in arrays}, {v.dtype.name for v in vectors}
    short = all(a.shape[-1] <= LONGEST for a in activations)
    return short and contiguous(*arrays) and all(len(dtypes) == 1 for dtypes in alike)


def norm(
    name: str, machine: Machine, out: Any, x: Any, *vectors: Any, epsilon: float, dtype: str | None = None
) -> list[Call] | None:
    if not _fit((x, out), vectors):
        return None
    width = out.shape[-1]
    rows, made = out.size // width, team(width, x, out, beside=vectors)
    launch = machine.kernel(text(x.dtype.name, team=made, V=vectors[0].dtype.name, Y=out.dtype.name), name)
    return [partial(launch, *made.shape(rows), (x, *vectors, out, rows, width, float(epsilon)))]


def norm_dx(
    name: str, machine: Machine, out: Any, g: Any, x: Any, scale: Any, *, epsilon: float, dtype: str | None = None
) -> list[Call] | None:
    """`out` is (dx, dscale) or (dx, dscale, dbias)."""
    dx, dscale, *rest = out
    dbias = rest[0] if rest else machine.xp.empty_like(dscale)  # which nobody reads
    if not _fit((g, x, dx), (scale, dscale, dbias)):
        return None
    width, xp, wide = x.shape[-1], machine.xp, compute_dtype(x.dtype.name)
    rows, made = x.size // width, team(width, g, x, dx, beside=[scale])
    columns = -(-width // (32 if made.ragged else 32 * made.pack))
    parts = max(min(BLOCKS // columns, rows // LEAST_ROWS), 1)
    statistics, sums = xp.empty((rows, 2), wide), xp.empty((parts, 2, width), wide)
    whole = text(x.dtype.name, team=made, V=scale.dtype.name, G=g.dtype.name, Y=dx.dtype.name)
    by_row, by_column, add = (machine.kernel(whole, part) for part in (name, "norm_columns", "add_parts"))
    return [
        partial(by_row, *made.shape(rows), (g, x, scale, dx, statistics, rows, width, float(epsilon))),
        partial(by_column, (columns, parts), (32, 8), (g, x, statistics, sums, rows, width)),
        partial(add, (-(-width // 32), 2), (32, 8), (sums, dscale, dbias, parts, width)),
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

"""Launches the kernels of `rows.cu`: the cross entropy of a softmax, and top k.

A softmax alone, norms and all gradients of rows are groups, see `group_text.py`. The cross entropy is none: its rows
are as long as a vocabulary, and a group would read them from memory three times.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..fuse.line_text import compute_dtype
from ..ops import loss, sorting
from .launchers import kernel
from .machine import Call, Machine, contiguous, warps, widest_pack
from .source import assemble, file_text, number_text

MOST_SELECTED = 32  # beyond, CuPy sorts the rows
MOST_THREADS, TOGETHER = 512, 4  # of a team; packs of a thread that are under way at once
LONGEST = 1 << 30  # elements of a row: columns are counted in 32 bits


class Team(NamedTuple):
    """The neighbors that each thread moves at once, the threads that share a row, and whether rows begin anywhere."""

    pack: int = 1
    threads: int = 32
    ragged: bool = False

    def shape(self, rows: int) -> tuple[tuple[int], tuple[int, int]]:
        """Grid and block: 8 teams of a warp each share a block, a larger one is a block."""
        return warps(rows) if self.threads == 32 else ((rows,), (self.threads, 1))


def team(width: int, array: Any) -> Team:
    """A team for rows of `width` elements of an array.

    >>> team(4096, np.zeros((1, 4096), "float32"))
    Team(pack=4, threads=256, ragged=False)
    >>> team(50257, np.zeros((1, 50257), "float32"))
    Team(pack=4, threads=512, ragged=True)
    """
    pack = widest_pack(16, array)  # 16: a row may begin anywhere
    packs = -(-width // pack)
    return Team(pack, min(32 * -(-packs // (32 * TOGETHER)), MOST_THREADS), width % pack > 0)


def text(logits: str, losses: str = "float32", labels: str = "int64", team: Team = Team()) -> str:  # noqa: B008 - a tuple
    """The kernels for these dtypes."""
    sizes = f"const int PACK = {team.pack}, TEAM = {team.threads}, TOGETHER = {TOGETHER};\n"
    early = f"{sizes}const bool RAGGED = {number_text(team.ragged)};\n"
    body = f'{early}#line 1 "rows.cu"\n{file_text("rows")}'
    return assemble(body, "rows.cu", S=logits, I=labels, V=losses)


@kernel(loss.cross_entropy_of_ids, widens=[0])
def softmax_cross_entropy(
    machine: Machine,
    out: Any,
    logits: Any,
    labels: Any,
    *,
    ignore_index: int | None,
    label_smoothing: float,
) -> list[Call] | None:
    """`out` is (losses, logarithms of the sums of exponentials)."""
    width, wide = logits.shape[-1], {compute_dtype(a.dtype.name) for a in (logits, *out)}
    if width > LONGEST or len(wide) > 1 or not contiguous(logits, labels, *out):
        return None
    rows, made = labels.size, team(width, logits)
    whole = text(logits.dtype.name, out[0].dtype.name, labels.dtype.name, made)
    options = np.bool_(ignore_index is not None), ignore_index or 0, float(label_smoothing)
    launch = machine.kernel(whole, "softmax_cross_entropy")
    return [partial(launch, *made.shape(rows), (logits, labels, *out, rows, width, *options))]


@kernel(sorting.topk)
def topk(machine: Machine, out: Any, x: Any, *, k: int, axis: int) -> list[Call] | None:
    """`out` is (values, places)."""
    if axis != x.ndim - 1 or k > MOST_SELECTED or not contiguous(x, *out):
        return None
    rows, width = x.size // x.shape[-1], x.shape[-1]
    launch = machine.kernel(text(x.dtype.name), "topk")
    return [partial(launch, *warps(rows), (x, *out, rows, width, k))]

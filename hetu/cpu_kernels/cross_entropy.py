"""The cross entropy of class ids and its gradient in one reused buffer; own classes are picked by flat position.

Gain: 3.2 times the speed of the forward function. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ..core.kernels import Call
from ..core.op import FEW
from ..ops.index import RowWindow
from ..ops.loss import cross_entropy_of_ids, softmax_cross_entropy_dx
from .recipes import kernel


@kernel(cross_entropy_of_ids)
def softmax_cross_entropy_bind(
    xp: ModuleType, out: Any, logits: Any, labels: Any, *, ignore_index: int | None, label_smoothing: float, **_: Any
) -> list[Call] | None:
    """Exponentials in one reused buffer; the loss of the own class is picked by flat position."""
    if not logits.flags.c_contiguous or not labels.flags.c_contiguous or not logits.size:
        return None
    if out[0].dtype != logits.dtype:
        return None
    loss, total = (o.reshape(-1) for o in out)
    rows, ids = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    powers, top, own = np.empty_like(rows), np.empty_like(loss), np.empty_like(loss)
    picks = picked(rows, ids, own)[1]
    calls = [*row_maxima(rows, top), *exponentials(rows, top, powers, total), *picks, *losses(total, top, own, loss)]
    if label_smoothing:
        calls.append(lambda: np.add(loss, label_smoothing * (own - rows.mean(axis=1)), loss))
    if ignore_index is not None:
        calls.append(lambda: np.putmask(loss, ids == ignore_index, 0))
    return calls


@kernel(softmax_cross_entropy_dx)
def softmax_cross_entropy_dx_bind(
    xp: ModuleType,
    out: Any,
    g: Any,
    logits: Any,
    labels: Any,
    total: Any,
    *,
    ignore_index: int | None,
    label_smoothing: float,
    window: RowWindow = None,
    **_: Any,
) -> Call | None:
    if window is not None or not out.flags.c_contiguous or not labels.flags.c_contiguous:
        return None
    if not out.dtype == logits.dtype == total.dtype:
        return None
    flat, ids = out.reshape(-1), labels.reshape(-1)
    starts = np.arange(ids.size) * out.shape[-1]
    places = np.empty_like(starts)
    column, shift = g[..., None], total[..., None]

    def run() -> None:
        np.subtract(logits, shift, out)
        np.exp(out, out)
        if label_smoothing:
            np.subtract(out, label_smoothing / out.shape[-1], out)
        np.add(starts, ids, places, casting="unsafe")
        if ignore_index is None:
            flat[places] -= 1 - label_smoothing
        else:
            skipped = ids == ignore_index
            flat[places[~skipped]] -= 1 - label_smoothing
        np.multiply(out, column, out)
        if ignore_index is not None:
            out[skipped.reshape(labels.shape)] = 0

    return run


def picked(rows: np.ndarray, ids: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, list[Call]]:
    """The flat position of each row's class once the calls have run, which fetch what lies there into `own`."""
    starts = np.arange(len(rows)) * rows.shape[1]
    places = np.empty_like(starts)
    casting = (
        {} if np.can_cast(ids.dtype, places.dtype) else {"casting": "unsafe"}
    )  # ids are small, whatever their dtype
    add = partial(np.add, starts, ids, places, **casting)
    return places, [add, partial(rows.reshape(-1).take, places, None, own, "clip")]  # clipped: ids to be ignored


def row_maxima(rows: np.ndarray, top: np.ndarray) -> list[Call]:
    """By position: NumPy finds the maximum of a short row eight times, of a long one twice as fast as its value."""
    best = np.empty(len(rows), np.intp)
    return [partial(rows.argmax, 1, best), *picked(rows, best, top)[1]]


def exponentials(rows: np.ndarray, top: np.ndarray, powers: np.ndarray, total: np.ndarray) -> list[Call]:
    """powers = exp(rows - top), and the sum of each row of them."""
    flat, ones = powers.reshape(-1), np.ones(rows.shape[1], rows.dtype)
    return [*row_wise(np.subtract, rows, top, powers), partial(np.exp, flat, flat), partial(powers.dot, ones, total)]


def losses(total: np.ndarray, top: np.ndarray, own: np.ndarray, loss: np.ndarray) -> list[Call]:
    """total = log(sum of the exponentials), then loss = total - own."""
    return [partial(np.log, total, total), partial(np.add, total, top, total), partial(np.subtract, total, own, loss)]


def row_wise(ufunc: np.ufunc, rows: np.ndarray, column: np.ndarray, out: np.ndarray) -> list[Call]:
    """out[i] = ufunc(rows[i], column[i]). NumPy spreads a few numbers faster by a copy than inside of a ufunc."""
    if rows.size > FEW:
        return [partial(ufunc, rows, column[:, None], out)]
    spread = np.empty_like(rows)
    apply = partial(ufunc, rows.reshape(-1), spread.reshape(-1), out.reshape(-1))
    return [partial(np.copyto, spread, column[:, None]), apply]

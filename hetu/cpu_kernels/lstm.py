"""The long short-term memory with one product and one tanh per time step, in buffers bound once.

Gain: 3.3 times the speed of the forward function, 1.2 with the gradient's. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ..core.backend import fixed_value
from ..core.kernels import Call
from ..ops.lstm import _lstm, lstm_dx
from . import blas
from .recipes import kernel


def _fast(xp: ModuleType, *arrays: np.ndarray) -> bool:
    dtype = arrays[0].dtype
    return dtype.char in "fd" and all(a.dtype == dtype and a.size for a in arrays)


def _gates(array: np.ndarray) -> list[np.ndarray]:
    """The blocks i, f, g, o of (4 k, n)."""
    k = len(array) // 4
    return [array[j * k : (j + 1) * k] for j in range(4)]


@kernel(_lstm)
def lstm_bind(xp: ModuleType, out: Any, x: Any, w: Any, u: Any, b: Any, h: Any, c: Any) -> list[Call] | None:
    """The logistic function of z is (1 + tanh(z / 2)) / 2: one tanh for all gates, the halves lie in the weights."""
    if not _fast(xp, *out, x, w, u, b, h, c):
        return None
    hs, h_last, c_last, cs, tops, joined, gates = out
    f, k, half = w.shape[0], u.shape[0], x.dtype.type(0.5)
    weights, part = np.empty((f + 1 + k, 4 * k), x.dtype), np.empty(c.shape, x.dtype)
    scale = np.repeat(np.array([0.5, 0.5, 1, 0.5], x.dtype), k)
    calls: list[Call] = [
        partial(np.multiply, w, scale, weights[:f]),
        partial(np.multiply, b, scale, weights[f]),
        partial(np.multiply, u, scale, weights[f + 1 :]),
        partial(np.copyto, joined[:f], x.transpose(2, 1, 0)),
        partial(joined[f].fill, 1),
        partial(np.copyto, joined[f + 1 :, 0], h),
    ]
    for t in range(len(hs)):
        z, before = gates[t], cs[t - 1] if t else c
        i, forget, g, o = _gates(z)
        calls += [
            blas.product(weights.T, joined[:, t], z),
            partial(np.tanh, z, z),
            *(partial(function, rows, half, rows) for rows in (z[: 2 * k], o) for function in (np.multiply, np.add)),
            partial(np.multiply, i, g, cs[t]),
            partial(np.multiply, forget, before, part),
            partial(np.add, cs[t], part, cs[t]),
            partial(np.tanh, cs[t], tops[t]),
            partial(np.multiply, o, tops[t], hs[t]),
        ]
        if t + 1 < len(hs):
            calls.append(partial(np.copyto, joined[f + 1 :, t + 1], hs[t]))
    return [*calls, partial(np.copyto, h_last, hs[-1]), partial(np.copyto, c_last, cs[-1])]


@kernel(lstm_dx)
def lstm_dx_bind(
    xp: ModuleType,
    out: Any,
    gh: Any,
    dh: Any,
    dc: Any,
    x: Any,
    w: Any,
    u: Any,
    b: Any,
    h: Any,
    c: Any,
    cs: Any,
    tops: Any,
    joined: Any,
    gates: Any,
) -> list[Call] | None:
    if not _fast(xp, *out, gh, dh, dc, w, u, c, cs, tops, joined, gates):
        return None
    dz, dw, du, db, dh_t, dc_t = out
    f, slopes = w.shape[0], np.empty((5, *dh.shape), u.dtype)
    product = np.empty((len(joined), dz.shape[1]), u.dtype)
    calls: list[Call] = [partial(product.fill, 0), partial(np.copyto, dh_t, dh), partial(np.copyto, dc_t, dc)]
    for t in reversed(range(len(gh))):
        calls += _added(dh_t, gh[t])
        calls += _step_back(dz[t], dh_t, dc_t, slopes, cs[t - 1] if t else c, tops[t], gates[t])
        calls += [blas.product(u, dz[t], dh_t), blas.product(joined[:, t], dz[t].T, product, beta=1.0)]
    return [
        *calls,
        partial(np.copyto, dw, product[:f]),
        partial(np.copyto, db, product[f]),
        partial(np.copyto, du, product[f + 1 :]),
    ]


def _step_back(dz: Any, dh: Any, dc: Any, slopes: Any, before: Any, top: Any, gates: Any) -> list[Call]:
    """One time step: dz, which may lie where the gates do, from dh and dc, which then is that of the step before.

    With p = i g, q = f `before` and h = o `top`, the slopes of the gates are p - p i, q - q f, i - p g and h - h o, and
    that of c is o - h `top`. All but dz is made in the five blocks of `slopes`, which stay in the cache.
    """
    i, f, g, o = gates = gates.reshape(4, *dh.shape)
    dz = dz.reshape(4, *dh.shape)
    p, q = slopes[:2]
    return [
        partial(np.multiply, i, g, p),
        partial(np.multiply, f, before, q),
        partial(np.multiply, slopes[:2], gates[:2], slopes[2:4]),
        partial(np.subtract, slopes[:2], slopes[2:4], slopes[2:4]),
        partial(np.multiply, p, g, slopes[4]),
        partial(np.subtract, i, slopes[4], slopes[4]),
        partial(np.multiply, o, top, p),
        partial(np.multiply, p, top, q),
        partial(np.subtract, o, q, q),
        partial(np.multiply, q, dh, q),
        partial(np.add, dc, q, dc),
        partial(np.multiply, p, o, q),
        partial(np.subtract, p, q, p),
        partial(np.multiply, p, dh, dz[3]),
        partial(np.multiply, dc, f, q),
        partial(np.multiply, slopes[2:], dc, dz[:3]),
        partial(np.copyto, dc, q),
    ]


def _added(total: np.ndarray, term: np.ndarray) -> list[Call]:
    """total += term, for nothing where the term is a constant zero (one element spread over the whole)."""
    zero = fixed_value(term) is not None and not any(term.strides) and not term.flat[0]
    return [] if zero else [partial(np.add, total, term, total)]

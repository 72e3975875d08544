"""cuBLAS between the stand-ins: the one product that hetu asks of it, on the memory and the streams of `fake_cupy.py`.

Matrices are columns here as there, and every address is checked against the memory of the device. Ignored on purpose:
the precision of tensor cores.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from .fake_cupy import holding
from .fake_nccl import memory
from .fake_streams import LOG, Item, stream_at

DTYPES = {0: "float32", 1: "float64", 2: "float16", 14: "bfloat16"}
COMPUTED = {68: "float32", 70: "float64"}
STREAM: dict[int, int] = {}  # of each handle, of which every thread has its own


def call(name: str, handle: int, *given: Any) -> None:
    """As `hetu.gpu_kernels.products.cublas`."""
    if name == "SetStream_v2":
        STREAM[handle] = given[0]
    elif name == "SetWorkspace_v2":
        memory(given[0], given[1], "uint8")
    else:
        if name == "GemmEx":  # one of a batch
            given = (*given[:9], 0, *given[9:12], 0, *given[12:16], 0, 1, *given[16:])
        else:
            assert name == "GemmStridedBatchedEx"
        LOG.append("product")
        found = [a for pointer in (given[6], given[10], given[15]) for a in holding(pointer)]
        stream_at(STREAM[handle]).add(Item(partial(_product, found, *given)))


def _product(kept, turn_a, turn_b, m, n, k, one, a, a_kind, lda, a_step, b, b_kind, ldb, b_step, zero, c, c_kind, ldc,
             c_step, count, compute, algorithm) -> None:  # fmt: skip
    assert algorithm == -1 and one._obj.value == 1 and zero._obj.value == 0
    left = _matrices(a, a_kind, (k, m) if turn_a else (m, k), lda, a_step, count).astype(COMPUTED[compute])
    right = _matrices(b, b_kind, (n, k) if turn_b else (k, n), ldb, b_step, count).astype(COMPUTED[compute])
    left, right = left.swapaxes(1, 2) if turn_a else left, right.swapaxes(1, 2) if turn_b else right
    _matrices(c, c_kind, (m, n), ldc, c_step, count)[...] = left @ right


def _matrices(pointer: int, kind: int, shape: tuple[int, int], lead: int, step: int, count: int) -> np.ndarray:
    dtype = np.dtype(DTYPES[kind])
    rows, columns = shape
    assert lead >= rows, "columns overlap"
    flat = memory(pointer, (count - 1) * step + (columns - 1) * lead + rows, dtype)
    return as_strided(flat, (count, rows, columns), [s * dtype.itemsize for s in (step, 1, lead)])

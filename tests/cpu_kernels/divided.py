"""Makes a compiled call in parts, the last first, as threads might."""

from __future__ import annotations

import ctypes

import numpy as np

from hetu.cpu_kernels.c_calls import CCall
from hetu.cpu_kernels.compiled import build


def job_by_job(call: CCall) -> None:
    """The same as `call()`, if no job needs another and results do not depend on the division."""
    in_parts(call, call.jobs)


def in_parts(call: CCall, parts: int) -> None:
    """The same for so many parts, whose jobs follow each other."""
    assert build([call.source])
    function, block = call.source.function(call.function), call.block()
    scratch = np.empty(call.scratch + 64, np.uint8)
    place = -scratch.ctypes.data % 64 + scratch.ctypes.data
    for part in reversed(range(parts)):
        scratch.fill(255)  # what another part has left there is of no use
        first, last = (call.jobs * edge // parts for edge in (part, part + 1))
        arguments = (ctypes.c_void_p(block.ctypes.data), ctypes.c_int64(first), ctypes.c_int64(last))
        function(*arguments, ctypes.c_void_p(place))

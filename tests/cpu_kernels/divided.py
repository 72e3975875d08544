"""Makes a compiled call job by job, the last first, as threads might."""

from __future__ import annotations

import ctypes

import numpy as np

from hetu.cpu_kernels.c_calls import CCall
from hetu.cpu_kernels.compiled import build


def job_by_job(call: CCall) -> None:
    """The same as `call()`, if no job needs another and results do not depend on the division."""
    assert build([call.source])
    function, block = call.source.function(call.function), call.block()
    scratch = np.empty(call.scratch + 64, np.uint8)
    place = -scratch.ctypes.data % 64 + scratch.ctypes.data
    for job in reversed(range(call.jobs)):
        scratch.fill(255)  # what another job has left there is of no use
        arguments = (ctypes.c_void_p(block.ctypes.data), ctypes.c_int64(job), ctypes.c_int64(job + 1))
        function(*arguments, ctypes.c_void_p(place))

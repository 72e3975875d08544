"""Whether the ranks of a group compute by the same code.

Compiled code and NumPy differ in last digits, so ranks that keep variables alike all compile the same, or none does.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from ...core.kernels import kernels


def compile_alike(comm: Any, failed: bytes) -> bool:
    """See `Comm.compile_alike`."""
    library, before = kernels("cpu").compiled, comm.compiles
    if comm.world_size == 1 or before is False:
        return True
    mine = np.frombuffer(failed or (bytes(8) if library is None else library.digest()), np.uint8).copy()
    everyone = np.empty((comm.world_size, mine.size), np.uint8)
    comm.all_gather(mine, everyone)
    alike = bool((everyone == everyone[0]).all())
    comm.compiles = alike and bool(mine.any())
    if alike:
        return True
    if library is not None:
        library.switch_off()
    lacking = [rank for rank, row in enumerate(everyone) if not row.any()]
    if lacking:
        reason, fix = f"ranks {lacking} compile nothing", "set HETU_CC and HETU_KERNELS alike; or see hetu doctor"
    elif before:
        reason, fix = "one could not compile what others can", "see its warning, and hetu doctor on its host"
    else:
        reason, fix = "the ranks run different versions of hetu", "install the same on all"
    if comm.rank == 0:
        warnings.warn(f"all ranks compute by NumPy: {reason} (fix: {fix})", RuntimeWarning, stacklevel=3)
    return False

"""The device that a notebook takes, so that one text runs with a GPU and without. Ignores that there may be several."""

from __future__ import annotations

from ..core.backend import Device
from ..core.errors import MissingDependencyError


def best_device() -> str:
    """`"gpu"` where CuPy finds one, else `"cpu"`, for `ht.Executor(..., device=)`.

    >>> best_device() in ("cpu", "gpu")
    True
    """
    try:
        _ = Device("gpu").xp
    except MissingDependencyError:
        return "cpu"
    return "gpu"

"""Copies between the memory of the device and that of the host, for values that are not read for a long time.

The memory plan places the result of `to_host` outside the arena, right after its operand is computed; on a CPU both lie
in the same memory. Only the pass of `hetu.plan.memory.swap` makes it, after autodiff. The copies wait in the device's
queue, so nothing is copied while it computes.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ...core.kernels import Call
from ...core.op import Role, op
from ...core.types import same_type


@op(role=Role.MOVE, infer=same_type, on_host=True, differentiable=False)
def to_host(xp: ModuleType, x: Any) -> Any:
    """A copy of `x` in the memory of the host, which only `from_host` reads.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (2, 3))
    >>> from_host(to_host(x), x).shape
    (2, 3)
    """
    return xp.asarray(x, copy=True)


@to_host.bind
def bind_to_host(xp: ModuleType, out: Any, x: Any) -> Call:
    if xp is np:
        return partial(np.copyto, out, x)
    kind = xp.cuda.runtime.memcpyDeviceToHost
    return lambda: _copy(xp, out.ctypes.data, xp.ascontiguousarray(x).data.ptr, out.nbytes, kind)


@op(role=Role.MOVE, infer=same_type, like=(1,), awaited=(1,), reads_host=True, differentiable=False)
def from_host(xp: ModuleType, x: Any, after: Any) -> Any:
    """A copy on the device of what `to_host` has put away. It waits until `after`, any other value, is computed.

    >>> import hetu as ht
    >>> x = ht.constant([1.0, 2.0])
    >>> ht.evaluate(from_host(to_host(x), ht.exp(x))).tolist()
    [1.0, 2.0]
    """
    return xp.asarray(x, copy=True)


@from_host.bind
def bind_from_host(xp: ModuleType, out: Any, x: Any, after: Any) -> Call:
    if xp is np:
        return partial(np.copyto, out, x)
    return partial(_copy, xp, out.data.ptr, x.ctypes.data, x.nbytes, xp.cuda.runtime.memcpyHostToDevice)


def _copy(xp: ModuleType, target: int, source: int, nbytes: int, kind: int) -> None:
    """As CuPy's own copies, which it refuses while a stream is captured; a GPU copies when its stream gets there."""
    xp.cuda.runtime.memcpyAsync(target, source, nbytes, kind, xp.cuda.get_current_stream().ptr)

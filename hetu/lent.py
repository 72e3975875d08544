"""What a state gives out when it is read: copies, which say so when somebody writes into one.

`state["w"][:] = 0` would change nothing but a copy that nobody sees. What is computed of such a copy is a plain array,
and `state["w"] += 1` stands, as it is assigned. Left out: NumPy's own functions that write, whose error is NumPy's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .core.errors import ArgumentError
from .core.state import FILES


class Copied(np.ndarray):
    """A copy of a variable's value, read-only as long as it is not copied again.

    >>> import hetu as ht
    >>> state = ht.State([ht.variable("w", [1.0, 2.0])])
    >>> state["w"] += 1
    >>> state["w"], type(state["w"] * 2).__name__
    (array([2., 3.], dtype=float32), 'ndarray')
    """

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar else np.asarray(array)

    def copy(self, order: Any = "C") -> Any:
        return np.array(self, order=order)

    def astype(self, *given: Any, **options: Any) -> Any:
        return np.asarray(self).astype(*given, **options)

    def __repr__(self) -> str:
        return repr(np.asarray(self))


def _writing(name: str) -> Callable[..., Any]:
    """A method that writes, once it is known that somebody will see it."""

    def write(self: Copied, *given: Any, **options: Any) -> Any:
        if not self.flags.writeable:
            raise ArgumentError(
                f"what a state gives out is a copy, {self.dtype}{list(self.shape)}, and was written into",
                fix="write into value = state[name].copy(), then assign it: state[name] = value",
            )
        return getattr(np.ndarray, name)(self, *given, **options)

    return write


def _in_a_copy(name: str) -> Callable[[Copied, Any], np.ndarray]:
    """`value += 1` makes a new value, for whoever holds the old one and for a state that it is assigned to."""

    def changed(self: Copied, other: Any) -> Any:
        return getattr(self.copy(), name)(other)

    return changed


for _name in ("__setitem__", "fill", "put", "sort", "partition"):
    setattr(Copied, _name, _writing(_name))
for _name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split():
    setattr(Copied, f"__i{_name}__", _in_a_copy(f"__i{_name}__"))


def lend(copied: np.ndarray) -> np.ndarray:
    """A copy as it is given out."""
    copied.setflags(write=False)
    return copied.view(Copied)


FILES["lend"] = lend

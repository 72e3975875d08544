"""The wall between meaning and speed: what a room of kernels offers, and what stands in where there is none.

`hetu/cpu_kernels/` and `hetu/gpu_kernels/` know how one kind of device computes fast what operators mean. Each offers
one `Kernels`, which is loaded when it is first asked for. Without the folder, or with `HETU_KERNELS=0` in the
environment, everything runs as it is defined, with the same results to rounding.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeVar

from .errors import ArgumentError

Call = Callable[[], Any]
Calls = Sequence[Call]
F = TypeVar("F", bound=Callable[..., Any])
KINDS = ("cpu", "gpu")


def switched_off(variable: str) -> bool:
    """Whether a variable of the environment is 0; ArgumentError for anything but 0, 1 and nothing."""
    setting = os.environ.get(variable) or "1"
    if setting not in ("0", "1"):
        raise ArgumentError(f"{variable}={setting!r} in the environment", fix="set it to 0 or 1, or leave it out")
    return setting == "0"


class RoomPass:
    """A pass for one kind of device: the function `name` of a module of that room, loaded when it first runs.

    It goes `before` the common pass of that name, or after all of them. `last` is one that wants all sizes known and
    the graph of one rank, as no other pass sees into what it makes. `seeks` are the names or roles that it looks for.
    """

    def __init__(
        self, name: str, device: str, module: str, before: str = "", last: bool = False, seeks: Sequence[Any] = ()
    ) -> None:
        self.__name__, self.device, self.module = name, device, module
        self.before, self.last, self.seeks = before, last, seeks

    def __call__(self, outputs: Sequence[Any]) -> tuple[Any, ...]:
        made: tuple[Any, ...] = getattr(import_module(self.module), self.__name__)(outputs)
        return made


class Kernels:
    """What a room offers. This one knows nothing, which is always right: operators then run as they are defined."""

    passes: Sequence[RoomPass] = ()
    compiled: Any = None  # what it has compiled for this machine and keeps, if that is its way
    files: Sequence[str] = ()  # modules that enter functions, imported when the first operator is bound

    def __init__(self) -> None:
        self.functions: dict[Any, Callable[..., Any]] = {}

    def kernel(self, *operators: Any) -> Callable[[F], F]:
        """Let a function compute these operators. Others of the same names have nothing to do with it."""

        def enter(function: F) -> F:
            self.functions.update(dict.fromkeys(operators, function))
            return function

        return enter

    def function(self, op: Any) -> Callable[..., Any] | None:
        """What is entered for the operator, or for "update" or "row_update" where it applies an optimizer's rule."""
        for file in self.files:
            import_module(file)
        self.files = ()  # all are there by now
        rules = {"update": op.update, "row_update": op.row_update}
        of_rules = (partial(self.functions[k], r) for k, r in rules.items() if r is not None and k in self.functions)
        return self.functions.get(op) or next(of_rules, None)

    def compiles(self) -> bool:
        """Whether kernels can be compiled; without them plain array code is what computes."""
        return False

    def bound(
        self, op: Any, xp: ModuleType, out: Any, arrays: Sequence[Any], attrs: Mapping[str, Any], scratch: Any
    ) -> Calls | None:
        """Calls that compute the operator into `out`, or None where the room has nothing for it or these arrays."""
        return None

    def checked(self, op: Any, check: Call, arrays: Sequence[Any], attrs: Mapping[str, Any]) -> Calls:
        """Calls that make the check of an operator where something may be wrong."""
        return [] if op.ranges_rule is not None and op.ranges_rule(*arrays, **attrs) == [] else [check]

    def array_module(self, xp: ModuleType) -> Any:
        """The array module, with faster functions in the place of some of its own."""
        return xp

    def along(self, executor: Any, sub: Any, shapes: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """Inside, an executor binds the program of a sub-graph at these shapes."""
        return nullcontext()

    def joined(self, calls: Calls) -> Calls | None:
        """The calls of a program with as few as may be; None where some cannot be made, and all are bound again."""
        return calls

    def takers(self, program: Any) -> dict[str, Callable[[Any], None]]:
        """By placeholder a call that feeds an array, of the shape and dtype of the buffer, to the next step."""
        return {name: partial(buffer.__setitem__, ...) for name, buffer in program.feeds.items()}

    def export(self, program: Any, folder: Any, name: str, random: bool) -> Any:
        """Write a program as one C file with a `main`, which counts steps if they are `random`; its path."""
        raise ArgumentError("there are no kernels in C here", fix="put `hetu/cpu_kernels/` back")

    def text(self, call: Call) -> str:
        """What was compiled for a call, as a reader wants to see it."""
        return getattr(call, "text", "")

    def captured(self, xp: Any, calls: Calls, say: Callable[[Any, str], None], obstacle: str) -> Any:
        """An object that runs all calls at once (`run()`; `call` is the one under way), or None."""
        return None

    def threads(self) -> int | None:
        """How many threads one call may use, or None if nobody knows."""
        return None

    def at_most(self, threads: int) -> AbstractContextManager[Any]:
        """Inside, a call computes in no more threads than these, that of its caller counted."""
        return nullcontext()

    def architectures(self) -> Sequence[str]:
        """The devices that code can be generated for here, present or not."""
        return ()


PLAIN = Kernels()


@cache
def room(kind: str) -> Kernels:
    """The room of a kind of device, whether it is switched off or not; `PLAIN` where its folder is missing."""
    name = f"hetu.{kind}_kernels"
    return PLAIN if find_spec(name) is None else import_module(name).KERNELS


def kernels(kind: str) -> Kernels:
    """The room for a kind of device, "cpu" or "gpu"."""
    return PLAIN if switched_off("HETU_KERNELS") else room(kind)


def kernels_of(xp: ModuleType) -> Kernels:
    """The room for the arrays of a module."""
    return kernels("cpu" if xp.__name__ == "numpy" else "gpu")

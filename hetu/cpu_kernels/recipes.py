"""What this room offers: recipes that compute operators on a CPU, its passes and BLAS.

A recipe, `(xp, out, *arrays, **attrs)`, returns calls bound to its arrays, or None where it declines them. A file
enters it for the operators it computes: `@kernel(relu)`. The operators of optimizers' rules, which anybody makes at any
time, are known by having a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, ClassVar

from ..core.backend import Scratch
from ..core.kernels import Call, Calls, Kernels, RoomPass
from ..core.op import Role
from . import compiled, openblas
from .ahead import along
from .c_calls import checked, compiles, joined

FILES = (
    "along_axis attention bags batch_norm convolution einsum entries groups index linalg masks moves pooling random "
    "recurrent routing scan shape sparse sums topics touched trees"
)
SUMS = Role.SCATTER, "scatter_add"  # which add rows by ids


class CpuKernels(Kernels):
    """What this room offers."""

    passes = (
        RoomPass("find_attention", "cpu", f"{__package__}.find_attention", seeks=["softmax"]),
        RoomPass("fuse_attention", "cpu", f"{__package__}.attention", seeks=["attention"]),
        RoomPass("join_bags", "cpu", f"{__package__}.bags", last=True, seeks=["take"]),
        RoomPass(
            "join_entries",
            "cpu",
            f"{__package__}.touched",
            last=True,
            seeks=[*SUMS, Role.UPDATE],
        ),
        RoomPass("fuse_groups", "cpu", f"{__package__}.groups", last=True),
    )
    compiled = compiled
    files = tuple(f"{__package__}.{file}" for file in FILES.split())
    whole: ClassVar[set[Any]] = set()  # operators of which no parts are looked for, as these grow with a size

    def compiles(self) -> bool:
        return compiles()

    def stays_whole(self, op: Any) -> bool:
        return self.function(op) is not None and op in self.whole

    def bound(
        self, op: Any, xp: Any, out: Any, arrays: Sequence[Any], attrs: Mapping[str, Any], scratch: Scratch | None
    ) -> list[Call] | None:
        function, scratch = self.function(op), scratch or Scratch()
        if function is None:
            made = import_module(f"{__package__}.groups").single(op, out, arrays, attrs)
        else:
            made = function(xp, out, *arrays, **attrs, **({"scratch": scratch} if op.scratch else {}))
        if made is None and not (op.bind_rule or op.ufunc):  # these come here again, or take no whole arrays
            made = import_module(f"{__package__}.halves").widened(op, xp, out, arrays, attrs, scratch)
        return [made] if callable(made) else made and list(made)

    def checked(self, op: Any, check: Call, arrays: Sequence[Any], attrs: Mapping[str, Any]) -> Calls:
        ranges = None if op.ranges_rule is None else op.ranges_rule(*arrays, **attrs)
        return [check] if ranges is None else checked(ranges, check)

    def export(self, program: Any, folder: Any, name: str, random: bool) -> Any:
        return import_module(f"{__package__}.export").export_c(program, folder, name, random=random)

    def along(self, executor: Any, sub: Any, shapes: Any) -> AbstractContextManager[Any]:
        return along(executor, sub, shapes)

    def joined(self, calls: Calls) -> Calls | None:
        return joined(calls)

    def takers(self, program: Any) -> dict[str, Callable[[Any], None]]:
        found = import_module(f"{__package__}.fed").lent(program)
        return super().takers(program) | {name: lent.take for name, lent in found.items()}

    def threads(self) -> int | None:
        return openblas.get_threads()

    def at_most(self, threads: int) -> AbstractContextManager[Any]:
        return openblas.at_most(threads)


KERNELS = CpuKernels()
kernel = KERNELS.kernel
openblas.fit()

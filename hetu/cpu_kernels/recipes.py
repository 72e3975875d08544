"""Which recipe computes which operator on a CPU: from its name to the file, from the operator itself to the function.

Such a function, `(xp, out, *arrays, **attrs)`, returns calls bound to its arrays, or None where it declines them. It is
found by the operator itself, so that another operator of the same name has nothing to do with it; the operators of
optimizers' rules, which anybody makes at any time, by being of a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from ..core.backend import Scratch
from ..core.kernels import Call, Calls, Kernels, RoomPass
from . import blas, lanes
from .ufuncs import bound_ufunc

F = TypeVar("F", bound=Callable[..., Any])

# The file that binds each operator. Files are imported when their first operator is bound.
FILES = {
    "activation": "relu",
    "along_axis": "take_along_axis put_along_axis_add",
    "attention": "attention attention_dx",
    "batch_norm": "batch_norm_train batch_norm_dx",
    "conv": "conv2d conv2d_dx conv2d_dw",
    "conv_last": "conv2d_last conv2d_last_dx conv2d_last_dw",
    "cross_entropy": "softmax_cross_entropy softmax_cross_entropy_dx",
    "einsum": "einsum",
    "elementwise": "rsqrt erf leaky_relu elu sigmoid softplus gelu_erf gelu_erf_dx gelu_tanh gelu_tanh_dx",
    "index": "take scatter_rows scatter_add",
    "linalg": "matmul linear",
    "lstm": "lstm lstm_dx",
    "masks": "tril triu",
    "normalization": "layer_norm layer_norm_dx rms_norm rms_norm_dx",
    "pooling": "max_pool2d max_pool2d_dx avg_pool2d_dx",
    "random": "random dropout",
    "reduction": "sum",
    "routing": "moe_dispatch moe_combine moe_products",
    "shape": "sum_to_like",
    "sparse": "sparse_matmul sampled_matmul",
}
FILE_OF = {name: file for file, names in FILES.items() for name in names.split()}
RECIPES: dict[Any, Callable[..., Any]] = {}  # by operator


def kernel(*operators: Any) -> Callable[[F], F]:
    """Let the function compute these operators."""

    def enter(function: F) -> F:
        RECIPES.update(dict.fromkeys(operators, function))
        return function

    return enter


def recipe(op: Any) -> Callable[..., Any] | None:
    """The function that binds an operator."""
    if op.update is not None or op.row_update is not None:
        update = import_module(f"{__package__}.update")
        return partial(update.on_rows, op.row_update) if op.update is None else partial(update.on_arrays, op.update)
    if op.name not in FILE_OF:
        return None
    import_module(f"{__package__}.{FILE_OF[op.name]}")
    return RECIPES.get(op)


class CpuKernels(Kernels):
    """What this room offers."""

    passes = (
        RoomPass("fuse_conv_pool", "cpu", f"{__package__}.conv_pool", "channels_last", seeks=["max_pool2d"]),
        RoomPass("fuse_attention", "cpu", f"{__package__}.attention_rows", seeks=["attention"]),
        RoomPass("share_gelu", "cpu", f"{__package__}.gelu", seeks=["gelu_tanh_dx", "gelu_erf_dx"]),
        RoomPass("share_cross_entropy", "cpu", f"{__package__}.loss", seeks=["softmax_cross_entropy_dx"]),
        RoomPass("fuse_linear", "cpu", f"{__package__}.fuse_linear", seeks=["matmul"]),
        RoomPass("fuse_updates", "cpu", f"{__package__}.fuse_updates"),
    )
    blas = blas

    def bound(
        self, op: Any, xp: Any, out: Any, arrays: Sequence[Any], attrs: Mapping[str, Any], scratch: Scratch | None
    ) -> list[Call] | None:
        function = recipe(op)
        if function is None:
            return None
        more = {"scratch": scratch or Scratch()} if op.scratch else {}
        made = function(xp, out, *arrays, **attrs, **more)
        return [made] if callable(made) else made and list(made)

    def in_place(
        self, composition: Any, outs: Sequence[Any], arrays: Sequence[Any], scalars: Sequence[Any]
    ) -> Calls | None:
        made: Calls | None = import_module(f"{__package__}.update").in_place(composition, outs, arrays, scalars)
        return made

    def ufunc(self, ufunc: Any, arrays: Sequence[Any], out: Any) -> list[Call]:
        return bound_ufunc(ufunc, arrays, out)

    def together(self, steps: Sequence[Calls]) -> tuple[Sequence[Calls], AbstractContextManager[Any]]:
        """With one instruction in lanes, products are too: BLAS's own threads would go on spinning beside them."""
        if not any(lanes.is_divided(call) for calls in steps for call in calls):
            return steps, nullcontext()
        return [tuple(map(lanes.divided, calls)) for calls in steps], lanes.session

    def threads(self) -> int | None:
        return blas.get_threads()

    def one_thread(self) -> AbstractContextManager[Any]:
        return blas.one_thread()


KERNELS = CpuKernels()

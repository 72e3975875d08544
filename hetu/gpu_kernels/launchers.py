"""Which kernel computes which operator: a table from the operator's name to the function that launches it.

Such a function chooses kernel, launch shape and scratch for given arrays, once, and returns calls without arguments,
or None where it cannot (a layout or dtype its kernel does not take); CuPy then runs the operator's own forward
function. The same function runs under the emulator, so that launch shapes are proven together with kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from .elementwise import elementwise, single_step
from .machine import Call, Machine

Launcher = Callable[..., "list[Call] | None"]

# The module that launches each operator. Modules are imported when their first operator is bound.
MODULES = {
    "rows": "softmax log_softmax softmax_cross_entropy softmax_cross_entropy_dx layer_norm layer_norm_dx rms_norm "
    "rms_norm_dx topk",
    "tables": "take take_along_axis put_along_axis_add scatter_rows scatter_add",
    "sparse": "sparse_matmul sampled_matmul",
    "routing": "moe_dispatch moe_combine moe_products",
    "random": "dropout random",
    "images": "max_pool2d max_pool2d_dx max_pool2d_pick avg_pool2d avg_pool2d_dx conv2d conv2d_dx conv2d_dw",
    "attention": "flash_attention flash_attention_dx",
    "convolution": "conv2d_last conv2d_last_dx conv2d_last_dw",
    "channels": "batch_norm_train batch_norm_dx batch_norm_relu batch_norm_relu_dx",
    "update": "update_all",
    "many": "cast_all all_finite",
    "products": "matmul linear",
    "reduce": "sum prod max min all any sum_to_like argmax argmin",
}
MODULE_OF = {name: module for module, names in MODULES.items() for name in names.split()}


def launcher(name: str) -> Launcher | None:
    """The function `(machine, out, *arrays, **attrs) -> calls or None` of an operator, or None if it has no kernel."""
    if name not in MODULE_OF:
        return None
    module = import_module(f"{__package__}.{MODULE_OF[name]}")
    return getattr(module, "LAUNCHERS", vars(module))[name]


def bound(
    machine: Machine,
    name: str,
    out: Any,
    arrays: Sequence[Any],
    attrs: Mapping[str, Any],
    *,
    cuda: str | None = None,
    inputs: Sequence[str] = (),
    update: Any = None,
    row_update: Any = None,
) -> list[Call] | None:
    """Calls that compute the operator `name` into `out` (a tuple for several outputs), or None without a kernel for it.

    `cuda` and `inputs` are the expression of an elementwise operator and the names of its inputs; `update` and
    `row_update` the rule of an optimizer's.
    """
    if attrs.get("window") is not None:  # the operator sees a slice of a partitioned axis only
        return None
    attrs = {name: value for name, value in attrs.items() if name != "window"}
    launch = launcher(name)
    if update is not None or row_update is not None:
        from .update import dense, sparse

        launch = partial(sparse, row_update) if update is None else partial(dense, update)
    if launch is not None:
        calls = launch(machine, out, *arrays, **attrs)
        if calls is None and not all(a.flags.c_contiguous for a in arrays):
            calls = _of_copies(machine, launch, out, arrays, attrs)
        if calls is not None:
            return calls
    if cuda is None:
        return None
    return elementwise(machine, [single_step(cuda, inputs, arrays, attrs, out)], out, arrays)


def _of_copies(
    machine: Machine, launch: Launcher, out: Any, arrays: Sequence[Any], attrs: Mapping[str, Any]
) -> list[Call] | None:
    """As `launch`, for a kernel that takes no strides: a copy costs less than what CuPy makes of many operators."""
    whole = [a if a.flags.c_contiguous else machine.xp.empty(a.shape, a.dtype) for a in arrays]
    calls = launch(machine, out, *whole, **attrs)
    copies = [partial(machine.xp.copyto, w, a) for w, a in zip(whole, arrays) if w is not a]
    return None if calls is None else [*copies, *calls]

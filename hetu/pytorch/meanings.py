"""What a function of PyTorch means: one of nodes, whose parameters are called as in PyTorch's own schema (`self` is x).

What a schema has and a function has not is read with its default alone. Functions without a meaning are taken apart by
PyTorch, so here stands what it ends in, and what is ours as a whole (`layers.py` too).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

import numpy as np

from .. import ops
from ..core.graph import OPS, Node
from ..core.op import as_node
from ..core.operators import cast_to
from ..core.types import Dim, as_dtype, broadcast_shapes, is_float, normalize_axis, product
from ..onnx import indexing
from ..onnx.meaning import MEANINGS as OF_ONNX

F = TypeVar("F", bound=Callable[..., Any])
MEANINGS: dict[str, Callable[..., Any]] = {}
OWN = {"self": "x", "from": "low"}  # what parameters are called here
IGNORED = set(  # where it lies, who computes it, and what it is cast to
    """device generator layout memory_format non_blocking pin_memory copy implicit
    cudnn_enable cudnn_enabled dtype""".split()
)


class Lacks(Exception):
    """A function, or a way of calling it, that has no counterpart."""


class Refused(Lacks):
    """What must not be taken apart either, as it would have other gradients."""


def means(*names: str) -> Callable[[F], F]:
    """Enter a function as what those of these names mean, of one overload ("max.dim") or of all."""

    def enter(function: F) -> F:
        MEANINGS.update(dict.fromkeys(names, function))
        return function

    return enter


def entered(table: Mapping[str, Any], form: Callable[[Any], Callable[..., Any]]) -> None:
    """Enter a table of functions that are called in one form."""
    for names, function in table.items():
        means(*names.split())(form(function))


def meaning_of(schema: Any) -> Callable[..., Any] | None:
    name = schema.name.rpartition("::")[2]
    return MEANINGS.get(f"{name}.{schema.overload_name}") or MEANINGS.get(name)


@cache
def parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def called(schema: Any, args: Mapping[str, Any]) -> Any:
    """The result of a function of PyTorch; Lacks where it has no meaning when called so."""
    if (function := meaning_of(schema)) is None:
        raise Lacks
    known, given = parameters(function), {}
    for declared in schema.arguments:
        own, value = OWN.get(declared.name, declared.name), args.get(declared.name, declared.default_value)
        if own in known and declared.name in args:
            given[own] = value
        elif own not in known and own not in IGNORED and value != declared.default_value:
            raise Lacks(f"its {own} is {value!r:.40}")
    return function(**given)


# -- element by element --------------------------------------------------------------------------------------------


def by_kind(of_truths: str, of_numbers: str) -> Callable[..., Node]:
    """Of truths alone one function, of all else another."""
    return lambda *given: OPS[of_truths if {as_node(x).dtype.kind for x in given} == {"b"} else of_numbers](*given)


AS_ONNX = """Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor IsNaN Log Neg Reciprocal Relu Round
    Sigmoid Sign Sin Sinh Sqrt Tan Tanh""".split()
entered(
    {
        **{name.lower(): OF_ONNX[name].function for name in AS_ONNX},
        "alias clone contiguous lift_fresh_copy": lambda x: x, "bitwise_not": by_kind("logical_not", "bitwise_invert"),
        "detach": ops.stop_gradient, "erfc": lambda x: 1 - ops.erf(x), "exp2": lambda x: OPS["power"](2.0, x),
        "expm1": ops.expm1, "isfinite": ops.isfinite, "log10": lambda x: ops.log(x) / math.log(10), "log1p": ops.log1p,
        "log2": lambda x: ops.log(x) / math.log(2), "log_sigmoid": lambda x: -ops.softplus(-x), "mish": ops.mish,
        "logical_not": lambda x: ops.logical_not(to(x, "bool")), "rsqrt": ops.rsqrt, "sgn": ops.sign, "silu": ops.silu,
        "square": ops.square, "trunc": lambda x: ops.sign(x) * ops.floor(ops.abs(x)),
    },
    lambda function: lambda x: function(x),
)  # fmt: skip
entered(
    {
        "bitwise_left_shift __lshift__": OPS["bitwise_left_shift"],
        "bitwise_right_shift __rshift__": OPS["bitwise_right_shift"],
        **{f"bitwise_{name}": by_kind(f"logical_{name}", f"bitwise_{name}") for name in ("and", "or", "xor")},
        "eq": ops.equal, "floor_divide": OPS["floor_divide"], "ge": OPS["greater_equal"], "gt": OPS["greater"],
        "le": OPS["less_equal"], "lt": OPS["less"], "matmul": ops.matmul, "maximum": ops.maximum,
        "minimum": ops.minimum, "mul": by_kind("logical_and", "multiply"), "ne": ops.not_equal,
        "remainder": OPS["remainder"],
        "fmod": lambda x, other: OF_ONNX["Mod"].function(x, as_node(other), fmod=1),
    },
    lambda function: lambda x, other: function(x, other),
)  # fmt: skip
entered(
    {"logical_and": ops.logical_and, "logical_or": ops.logical_or, "logical_xor": ops.logical_xor},
    lambda function: lambda x, other: function(to(x, "bool"), to(other, "bool")),
)
means("add")(lambda x, other, alpha=1: by_kind("logical_or", "add")(x, other if alpha == 1 else other * alpha))
means("sub")(lambda x, other, alpha=1: OPS["subtract"](x, other if alpha == 1 else other * alpha))
means("mm", "bmm")(lambda x, mat2: ops.matmul(x, mat2))
means("addmm", "baddbmm")(lambda x, mat1, mat2, beta=1, alpha=1: x * beta + ops.matmul(mat1, mat2) * alpha)
means("clamp", "clamp_min", "clamp_max")(lambda x, min=None, max=None: OF_ONNX["Clip"].function(x, min, max))
means("pow")(lambda x, exponent: OPS["power"](x, exponent))
means("where")(lambda condition, x, other: ops.where(condition, x, other))
means("masked_fill")(lambda x, mask, value: ops.where(mask, value, x))
means("gelu")(lambda x, approximate="none": ops.gelu(x, approximate))
means("softplus")(lambda x, beta=1.0, threshold=20.0: ops.where(x * beta > threshold, x, ops.softplus(x * beta) / beta))
means("dropout")(lambda input, p, train: ops.dropout(input, p) if p and train else input)
means("_to_copy", "to.dtype", "convert_element_type")(
    lambda x=None, a=None, dtype=None: to(a if x is None else x, dtype)
)
means("copy")(lambda x, src: ops.broadcast_to(cast_to(src, x.dtype), x.shape))


def to(x: Node, dtype: str | None) -> Node:
    return x if dtype is None else ops.not_equal(x, 0) if dtype == "bool" else cast_to(x, as_dtype(dtype))


@means("div")
def divide(x: Node, other: Any, rounding_mode: str | None = None) -> Node:
    if rounding_mode == "floor":
        return OPS["floor_divide"](x, other)
    if rounding_mode == "trunc" and not is_float(x.dtype):
        return OF_ONNX["Div"].function(x, as_node(other))
    made = OPS["divide"](x, other)
    return made if rounding_mode is None else MEANINGS["trunc"](made)


@means("elu")
def elu(x: Node, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Node:
    """As a sum, so that neither part is infinite where the other counts."""
    return scale * (ops.relu(x) + alpha * ops.expm1(ops.minimum(x, 0) * input_scale))


# -- over axes -----------------------------------------------------------------------------------------------------


def axes(dim: Any) -> Any:
    """None, or nothing, is all axes."""
    return dim if isinstance(dim, int) else tuple(dim) if dim else None


entered(
    {
        "all": lambda x, **over: ops.all(to(x, "bool"), **over), "amax": ops.max, "amin": ops.min,
        "any": lambda x, **over: ops.any(to(x, "bool"), **over), "argmax": ops.argmax, "argmin": ops.argmin,
        "logsumexp": ops.logsumexp, "max": ops.max, "min": ops.min,
    },
    lambda function: lambda x, dim=None, keepdim=False: function(x, axis=axes(dim), keepdims=keepdim),
)  # fmt: skip
entered(
    {"mean": ops.mean, "prod": ops.prod, "sum": ops.sum},
    lambda function: (
        lambda x, dim=None, keepdim=False, dtype=None: function(to(x, dtype), axis=axes(dim), keepdims=keepdim)
    ),
)
entered(
    {"max.dim": (ops.max, ops.argmax), "min.dim": (ops.min, ops.argmin)},
    lambda both: lambda x, dim, keepdim=False: tuple(found(x, axis=dim, keepdims=keepdim) for found in both),
)
entered(
    {"log_softmax _log_softmax": ops.log_softmax, "softmax _softmax": ops.softmax},
    lambda function: lambda x, dim, dtype=None, half_to_float=False: function(to(x, dtype), axis=dim),
)
means("cumsum")(lambda x, dim, dtype=None: ops.cumsum(to(x, dtype), axis=dim))
means("cumprod")(lambda x, dim, dtype=None: OF_ONNX["CumProd"].function(to(x, dtype), np.array(dim)))
means("argsort")(lambda x, dim=-1, descending=False, stable=False: ops.argsort(x, axis=dim, descending=descending))
means("linalg_vector_norm")(
    lambda x, ord=2, dim=None, keepdim=False, dtype=None: ops.norm(to(x, dtype), axes(dim), ord, keepdim)
)


@means("var", "var.correction")
def variance(x: Node, dim: Any = None, unbiased: bool = True, correction: Any = 1, keepdim: bool = False) -> Node:
    return ops.var(x, axes(dim), (1 if correction is None else correction) if unbiased else 0, keepdim)


means("var_mean", "var_mean.correction")(
    lambda x, dim=None, unbiased=True, correction=1, keepdim=False: (
        variance(x, dim, unbiased, correction, keepdim),
        ops.mean(x, axis=axes(dim), keepdims=keepdim),
    )
)


@means("sort")
def sort(x: Node, dim: int = -1, descending: bool = False, stable: bool = False) -> tuple[Node, Node]:
    places = ops.argsort(x, axis=dim, descending=descending)
    return ops.take_along_axis(x, places, axis=dim), places


means("topk")(
    lambda x, k, dim=-1, largest=True, sorted=True: (
        OF_ONNX["TopK"].function(x, np.array(k), axis=dim, largest=largest)
        if x.ndim
        else (x, ops.full(shape=(), fill_value=0, dtype="int64"))
    )
)
# -- shapes --------------------------------------------------------------------------------------------------------

means("sym_size")(lambda x, dim: x.shape[dim])
means("sym_numel")(lambda x: product(x.shape))
means("reshape", "view", "_unsafe_view")(lambda x, size=None, shape=None: ops.reshape(x, size or shape or ()))
means("flatten")(lambda x, start_dim=0, end_dim=-1: ops.flatten(x, start_dim, end_dim))
means("permute")(lambda x, dims: ops.permute_dims(x, tuple(d % x.ndim for d in dims)))
means("t")(lambda x: ops.matrix_transpose(x) if x.ndim == 2 else x)
means("unsqueeze")(lambda x, dim: ops.expand_dims(x, axis=dim))
means("unflatten")(
    lambda x, dim, sizes: ops.reshape(x, (*x.shape[: dim % x.ndim], *sizes, *x.shape[dim % x.ndim + 1 :]))
)
means("expand_as")(lambda x, other: ops.broadcast_to(x, other.shape))
means("type_as")(lambda x, other: to(x, other.dtype.name))
means("flip")(lambda x, dims: ops.flip(x, tuple(dims)))
means("roll")(
    lambda x, shifts, dims=(): ops.roll(x, shift=tuple(shifts) if dims else shifts[0], axis=tuple(dims) or None)
)
means("cat")(lambda tensors, dim=0: tensors[0] if len(tensors) == 1 else ops.concat(tensors, axis=dim))
means("stack")(lambda tensors, dim=0: ops.stack(tensors, axis=dim))
means("tril")(lambda x, diagonal=0: ops.tril(x, k=diagonal))
means("triu")(lambda x, diagonal=0: ops.triu(x, k=diagonal))
means("select")(lambda x, dim, index: x[(*(slice(None),) * (dim % x.ndim), index)])
means("slice")(
    lambda x, dim=0, start=None, end=None, step=1: OF_ONNX["Slice"].function(
        x, [0 if start is None else start], [indexing.FAR if end is None else end], [dim], [step]
    )
)


@means("diagonal")
def diagonal(x: Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Node:
    """Column k + offset of row k, along a new last axis."""
    rows, columns = int(x.shape[dim1]), int(x.shape[dim2])
    first, count = max(-offset, 0), min(rows + min(offset, 0), columns - max(offset, 0))
    x = ops.permute_dims(x, [*(i for i in range(x.ndim) if i not in (dim1 % x.ndim, dim2 % x.ndim)), dim1, dim2])
    x = ops.reshape(x, (*x.shape[:-2], rows * columns))
    return ops.take(x, ops.arange(max(count, 0)) * (columns + 1) + first * columns + max(offset, 0), axis=-1)


means("trace")(lambda x: ops.sum(diagonal(x)))


@means("transpose")
def transpose(x: Node, dim0: int, dim1: int) -> Node:
    order = list(range(x.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return ops.permute_dims(x, tuple(order))


@means("squeeze")
def squeeze(x: Node, dim: Any = None) -> Node:
    ones = [i for i, size in enumerate(x.shape) if size == 1]
    asked = ones if dim is None else [normalize_axis(d, x.ndim) for d in ([dim] if isinstance(dim, int) else dim)]
    return ops.squeeze(x, [axis for axis in asked if axis in ones])


@means("expand")
def expand(x: Node, size: Any) -> Node:
    kept = (1,) * (len(size) - x.ndim) + x.shape
    return ops.broadcast_to(x, tuple(k if isinstance(w, int) and w == -1 else w for w, k in zip(size, kept)))


@means("split_with_sizes")
def split(x: Node, split_sizes: Any, dim: int = 0) -> tuple[Node, ...]:
    return tuple(ops.split(x, np.cumsum(split_sizes[:-1], dtype=object).tolist(), axis=dim))


@means("split.Tensor", "chunk")
def equal_split(x: Node, split_size: Any = None, chunks: int = 1, dim: int = 0) -> tuple[Node, ...]:
    size = x.shape[dim]
    step = -(-size // chunks) if split_size is None else split_size
    if not (isinstance(size, int) and isinstance(step, int)):
        raise Lacks
    return tuple(ops.split(x, [*range(step, size, step)], axis=dim))


@means("unbind")
def unbind(x: Node, dim: int = 0) -> tuple[Node, ...]:
    dim = normalize_axis(dim, x.ndim)
    return tuple(x[(*(slice(None),) * dim, k)] for k in range(int(x.shape[dim])))


@means("unfold")
def unfold(x: Node, dimension: int, size: int, step: int) -> Node:
    """Windows along an axis, whose places lie along a new last one."""
    dim = dimension % x.ndim
    starts = ops.arange((x.shape[dim] - size) // step + 1) * step
    made = ops.take(x, ops.expand_dims(starts, axis=1) + ops.arange(size), axis=dim)
    return ops.permute_dims(made, tuple(i for i in range(made.ndim) if i != dim + 1) + (dim + 1,))


@means("constant_pad_nd")
def pad(x: Node, pad: Any, value: Any = 0) -> Node:
    """The last axis first."""
    pairs = [*zip(pad[::2], pad[1::2])][::-1]
    widths = np.array([(0, 0)] * (x.ndim - len(pairs)) + pairs, dtype=object).T.ravel()
    return indexing.pad(x, widths, np.array(value))


# -- new ones ------------------------------------------------------------------------------------------------------


# As all results, they are cast to what PyTorch says that they are.

entered(
    {"zeros empty": 0, "ones": 1},  # who reads what is empty reads anything
    lambda value: lambda size: ops.full(shape=tuple(size), fill_value=value, dtype="float32"),
)
entered({"zeros_like empty_like": 0, "ones_like": 1}, lambda value: lambda x: ops.full_like(x, value))
means("full")(lambda size, fill_value: of_number(tuple(size), fill_value))
means("full_like")(lambda x, fill_value: of_number(x.shape, fill_value))
means("scalar_tensor")(lambda s: as_node(s) if isinstance(s, Dim) else of_number((), s))
means("rand")(lambda size: ops.uniform(tuple(size)))
means("randn", "normal.float_float")(lambda size, mean=0.0, std=1.0: ops.normal(tuple(size), mean, std))
means("randint", "randint.low")(lambda high, size, low=0: ops.randint(low, high, tuple(size)))
means("rand_like", "uniform")(lambda x, low=0.0, to=1.0: ops.uniform(x.shape, low, to))
means("randn_like", "normal_functional")(lambda x, mean=0.0, std=1.0: ops.normal(x.shape, mean, std))
means("randint_like", "randint_like.low_dtype")(lambda x, high, low=0: ops.randint(low, high, x.shape))
means("bernoulli", "bernoulli.p")(lambda x, p=None: OPS["less"](ops.uniform(x.shape), x if p is None else p))
means("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor")(
    lambda mean, std=1.0: mean + std * ops.normal(broadcast_shapes(as_node(mean).shape, as_node(std).shape))
)
means("iota")(lambda length, start, step, dtype: ops.arange(start, start + length * step, step, dtype))


def of_number(shape: tuple[Any, ...], value: Any) -> Node:
    return ops.full(shape=shape, fill_value=value, dtype="float64" if isinstance(value, float) else "int64")


@means("arange", "arange.start", "arange.start_step")
def arange(start: Any = 0, end: Any = None, step: Any = 1, dtype: str | None = None) -> Node:
    return ops.arange(start, end, step, dtype or ("float32" if float in map(type, (start, end, step)) else "int64"))

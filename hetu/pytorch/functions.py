"""What a function of PyTorch means: one of nodes, whose signature is its declaration, with PyTorch's defaults.

A name stands for the function, the method and the operator of Python that are called so. A parameter annotated `Only`
is read with no other value than its default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from .. import ops
from ..core.graph import OPS, Node
from ..core.types import DTYPES, normalize_axis
from ..onnx import indexing, products, shapes

F = TypeVar("F", bound=Callable[..., Any])
Only = Any
FUNCTIONS: dict[str, Callable[..., Any]] = {}
IN_PLACE = {"iadd", "isub", "imul", "itruediv"}
VIEWS = {
    "chunk", "expand", "flatten", "getitem", "narrow", "permute", "reshape", "select", "split", "squeeze", "transpose",
    "unbind", "unflatten", "unsqueeze", "view",
}  # fmt: skip


class Lacks(Exception):
    """A way of calling a function that has no counterpart."""


def means(*names: str) -> Callable[[F], F]:
    """Enter a function as what those of these names mean."""

    def enter(function: F) -> F:
        FUNCTIONS.update(dict.fromkeys(names, function))
        return function

    return enter


def _entered(table: Mapping[str, Callable[..., Any]], form: Callable[[Any], Callable[..., Any]]) -> None:
    for names, function in table.items():
        means(*names.split())(form(function))


# -- element by element --------------------------------------------------------------------------------------------


def by_bits(of_truths: str, of_numbers: str = "") -> Callable[..., Node]:
    truths, bits = OPS[f"logical_{of_truths}"], OPS[f"bitwise_{of_numbers or of_truths}"]
    return lambda x, *other: (truths if x.dtype.kind == "b" else bits)(x, *other)


_entered(
    {
        "abs": ops.abs, "bitwise_not invert": by_bits("not", "invert"), "ceil": ops.ceil, "cos": ops.cos,
        "detach": ops.stop_gradient, "erf": ops.erf, "exp": ops.exp, "expm1": ops.expm1, "floor": ops.floor,
        "isfinite": ops.isfinite, "isnan": ops.isnan, "log": ops.log, "log1p": ops.log1p, "mish": ops.mish,
        "logical_not": ops.logical_not, "neg": OPS["negative"], "ones_like": ops.ones_like, "relu": ops.relu,
        "reciprocal": ops.reciprocal, "round": ops.round, "rsqrt": ops.rsqrt, "sigmoid": ops.sigmoid,
        "sign": ops.sign, "silu": ops.silu, "sin": ops.sin, "sqrt": ops.sqrt, "square": ops.square,
        "t": ops.matrix_transpose, "tanh": ops.tanh, "arctan atan": ops.atan,
        "zeros_like": ops.zeros_like, "clone contiguous": lambda x: x, "bool": lambda x: ops.not_equal(x, 0),
        "float": lambda x: ops.astype(x, "float32"), "long": lambda x: ops.astype(x, "int64"),
        "hardsigmoid": lambda x: ops.clip(x / 6 + 0.5, min=0.0, max=1.0),
        "hardswish": lambda x: x * ops.clip(x / 6 + 0.5, min=0.0, max=1.0),
        "log_sigmoid logsigmoid": lambda x: -ops.softplus(-x), "relu6": lambda x: ops.clip(x, min=0.0, max=6.0),
        "selu": lambda x: 1.0507009873554805 * ops.elu(x, alpha=1.6732632423543772),
        "softsign": lambda x: x / (1 + ops.abs(x)), "tanhshrink": lambda x: x - ops.tanh(x),
    },
    lambda function: lambda input: function(input),
)  # fmt: skip
_entered(
    {
        "and bitwise_and": by_bits("and"), "bitwise_or or": by_bits("or"), "bitwise_xor xor": by_bits("xor"),
        "bmm matmul mm": products.matmul, "div divide itruediv truediv": OPS["divide"], "eq": ops.equal,
        "floor_divide floordiv": OPS["floor_divide"], "ge": OPS["greater_equal"], "gt": OPS["greater"],
        "imul mul multiply": OPS["multiply"], "le": OPS["less_equal"], "logical_and": ops.logical_and,
        "logical_or": ops.logical_or, "logical_xor": ops.logical_xor, "lt": OPS["less"], "maximum": ops.maximum,
        "minimum": ops.minimum, "mod remainder": OPS["remainder"], "ne": ops.not_equal,
    },
    lambda function: lambda input, other: function(input, other),
)  # fmt: skip
_entered(
    {"dropout": ops.dropout, "dropout2d": ops.dropout2d},
    lambda function: lambda input, p=0.5, training=True: function(input, p) if training and p else input,
)
means("add", "iadd")(lambda input, other, *, alpha=1: OPS["add"](input, other if alpha == 1 else other * alpha))
means("isub", "sub")(lambda input, other, *, alpha=1: OPS["subtract"](input, other if alpha == 1 else other * alpha))
means("pow")(lambda input, exponent: OPS["power"](input, exponent))
means("where")(lambda condition, input, other: ops.where(condition, input, other))
means("masked_fill")(lambda input, mask, value: ops.where(mask, value, input))
means("clamp", "clip")(lambda input, min=None, max=None: ops.clip(input, min=min, max=max))
means("hardtanh")(lambda input, min_val=-1.0, max_val=1.0: ops.clip(input, min=min_val, max=max_val))
means("elu")(lambda input, alpha=1.0: ops.elu(input, alpha=alpha))
means("gelu")(lambda input, approximate="none": ops.gelu(input, approximate))
means("leaky_relu")(lambda input, negative_slope=0.01: ops.leaky_relu(input, slope=negative_slope))
means("softplus")(lambda input, beta=1.0, threshold=20.0: ops.softplus(input * beta) / beta)
means("type_as")(lambda input, other: ops.astype(input, other.dtype))


@means("to", "type")
def to(input: Node, *what: Any, dtype: Any = None) -> Node:
    """Another dtype; where a tensor lies is not looked at."""
    wanted = (dtype, *(each.dtype if isinstance(each, Node) else each for each in what))
    names = [str(name) for name in wanted if str(name) in (*(d.name for d in DTYPES.values()), "bfloat16")]
    return ops.astype(input, names[0]) if names else input


@means("glu")
def glu(input: Node, dim: int = -1) -> Node:
    value, gate = ops.split(input, 2, axis=dim)
    return value * ops.sigmoid(gate)


@means("prelu")
def prelu(input: Node, weight: Node) -> Node:
    slope = weight if weight.shape == (1,) else ops.reshape(weight, (-1,) + (1,) * (input.ndim - 2))
    return ops.where(input < 0, input * slope, input)


# -- over axes -----------------------------------------------------------------------------------------------------


def axes(dim: Any) -> Any:
    """None, or nothing, is all axes."""
    return dim if dim == 0 else dim or None


_entered(
    {
        "all": ops.all, "amax": ops.max, "amin": ops.min, "any": ops.any, "argmax": ops.argmax, "argmin": ops.argmin,
        "logsumexp": ops.logsumexp, "mean": ops.mean, "prod": ops.prod, "sum": ops.sum,
    },
    lambda function: lambda input, dim=None, keepdim=False: function(input, axis=axes(dim), keepdims=keepdim),
)  # fmt: skip
_entered(
    {"log_softmax": ops.log_softmax, "softmax": ops.softmax},
    lambda function: lambda input, dim, dtype=None: function(to(input, dtype), axis=dim),
)
means("cumsum")(lambda input, dim: ops.cumsum(input, axis=dim))
means("argsort")(lambda input, dim=-1, descending=False: ops.argsort(input, axis=dim, descending=descending))


means("norm")(lambda input, p=2, dim=None, keepdim=False: ops.norm(input, axes(dim), 2 if p == "fro" else p, keepdim))


@means("var")
def variance(
    input: Node, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: int = 1
) -> Node:
    return ops.var(input, axes(dim), correction if unbiased else 0, keepdim)


means("std")(lambda *given, **options: ops.sqrt(variance(*given, **options)))


def extremum(whole: Any, place: Any, of_two: Any) -> Callable[..., Any]:
    """Of two tensors, or of one, and along an axis with its places."""

    def found(input: Node, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is None or isinstance(dim, Node):
            return whole(input) if dim is None else of_two(input, dim)
        return whole(input, axis=dim, keepdims=keepdim), place(input, axis=dim, keepdims=keepdim)

    return found


means("max")(extremum(ops.max, ops.argmax, ops.maximum))
means("min")(extremum(ops.min, ops.argmin, ops.minimum))


@means("topk")
def topk(input: Node, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Node, Node]:
    places = ops.argsort(input, axis=dim, descending=largest)
    places = places[(*(slice(None),) * normalize_axis(dim, input.ndim), slice(0, k))]
    return ops.take_along_axis(input, places, axis=dim), places


# -- shapes --------------------------------------------------------------------------------------------------------


def numbers(given: Any) -> tuple[Any, ...]:
    """Sizes or axes, which may be passed one by one or as one sequence."""
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else given


means("size")(lambda input, dim=None: input.shape if dim is None else input.shape[dim])
means("dim", "ndimension")(lambda input: input.ndim)
means("numel")(lambda input: input.tensor.size)
means("reshape", "view")(lambda input, *shape: ops.reshape(input, numbers(shape)))
means("view_as", "reshape_as")(lambda input, other: ops.reshape(input, other.shape))
means("flatten")(lambda input, start_dim=0, end_dim=-1: ops.flatten(input, start_dim, end_dim))
means("permute")(lambda input, *dims: ops.permute_dims(input, numbers(dims)))
means("unsqueeze")(lambda input, dim: ops.expand_dims(input, axis=dim))
means("expand_as")(lambda input, other: ops.broadcast_to(input, other.shape))
means("flip")(lambda input, *dims: ops.flip(input, numbers(dims)))
means("roll")(lambda input, shifts, dims=None: ops.roll(input, shift=shifts, axis=dims))
means("repeat_interleave")(lambda input, repeats, dim=None: ops.repeat(input, repeats, axis=dim))
means("cat", "concat")(lambda tensors, dim=0: ops.concat(tensors, axis=dim))
means("stack")(lambda tensors, dim=0: ops.stack(tensors, axis=dim))
means("tril")(lambda input, diagonal=0: ops.tril(input, k=diagonal))
means("triu")(lambda input, diagonal=0: ops.triu(input, k=diagonal))
means("index_select")(lambda input, dim, index: ops.take(input, index, axis=dim))
means("gather")(lambda input, dim, index: indexing.gather_elements(input, index, axis=dim))
means("einsum")(lambda equation, *operands: products.einsum(*numbers(operands), equation=equation))
means("full_like")(lambda input, fill_value: ops.full_like(input, fill_value))


@means("getattr")
def attribute(input: Any, name: str) -> Any:
    if isinstance(input, tuple):  # of max, min or topk
        return input[("values", "indices").index(name)]
    if name in ("T", "mT"):
        return ops.matrix_transpose(input)
    found = {"shape": input.shape, "ndim": input.ndim, "dtype": str(input.dtype), "device": "cpu", "is_cuda": False}
    if name not in found:
        raise Lacks(f"reads {name!r}")
    return found[name]


@means("getitem")
def item(input: Any, index: Any) -> Any:
    """One index may be a vector or more of places, along the axis where it stands."""
    if not isinstance(input, Node):
        return input[index]
    key = index if isinstance(index, tuple) else (index,)
    given = [k for k, each in enumerate(key) if isinstance(each, Node)]
    if not given:
        return input[key]
    if len(given) > 1 or key[given[0]].dtype.kind == "b" or any(each is None or each is ... for each in key):
        raise Lacks("picks by truths, or by several tensors")
    before = sum(not isinstance(each, int) for each in key[: given[0]])
    cut = input[tuple(slice(None) if isinstance(each, Node) else each for each in key)]
    return ops.take(cut, indexing.placed(key[given[0]], cut.shape[before]), axis=before)


@means("transpose", "swapaxes")
def transpose(input: Node, dim0: int, dim1: int) -> Node:
    order = list(range(input.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return ops.permute_dims(input, tuple(order))


@means("unflatten")
def unflatten(input: Node, dim: int, sizes: Any) -> Node:
    dim = normalize_axis(dim, input.ndim)
    return ops.reshape(input, (*input.shape[:dim], *sizes, *input.shape[dim + 1 :]))


@means("squeeze")
def squeeze(input: Node, dim: Any = None) -> Node:
    ones = [i for i, size in enumerate(input.shape) if size == 1]
    asked = (
        ones if dim is None else [normalize_axis(d, input.ndim) for d in (dim if isinstance(dim, tuple) else (dim,))]
    )
    return ops.squeeze(input, [axis for axis in asked if axis in ones])


@means("expand")
def expand(input: Node, *sizes: Any) -> Node:
    wanted = numbers(sizes)
    kept = (1,) * (len(wanted) - input.ndim) + input.shape
    return ops.broadcast_to(input, tuple(k if isinstance(w, int) and w == -1 else w for w, k in zip(wanted, kept)))


@means("repeat")
def repeat(input: Node, *repeats: Any) -> Node:
    wanted = numbers(repeats)
    return ops.tile(ops.reshape(input, (1,) * (len(wanted) - input.ndim) + input.shape), wanted)


@means("split")
def split(tensor: Node, split_size: Any, dim: int = 0) -> tuple[Node, ...]:
    size, sizes = tensor.shape[dim], split_size
    if isinstance(split_size, int):
        sizes = [split_size] * (int(size) // split_size) + [int(size) % split_size] * (int(size) % split_size > 0)
    return tuple(ops.split(tensor, np.cumsum(sizes[:-1], dtype=object).tolist(), axis=dim))


@means("chunk")
def chunk(input: Node, chunks: int, dim: int = 0) -> tuple[Node, ...]:
    return split(input, -(-int(input.shape[dim]) // chunks), dim)


@means("unbind")
def unbind(input: Node, dim: int = 0) -> tuple[Node, ...]:
    return tuple(ops.squeeze(part, dim) for part in split(input, 1, dim))


@means("select")
def select(input: Node, dim: int, index: int) -> Any:
    return input[(*(slice(None),) * normalize_axis(dim, input.ndim), index)]


@means("narrow")
def narrow(input: Node, dim: int, start: Any, length: Any) -> Any:
    return input[(*(slice(None),) * normalize_axis(dim, input.ndim), slice(start, start + length))]


@means("arange")
def arange(start: Any, end: Any = None, step: Any = 1, *, dtype: Any = None) -> Node:
    return ops.arange(start, end, step, dtype)


def filled(value: Any) -> Callable[..., Node]:
    return lambda *size, dtype=None: ops.full(shape=numbers(size), fill_value=value, dtype=dtype or "float32")


means("zeros")(filled(0))
means("ones")(filled(1))
means("new_zeros")(lambda input, *size, dtype=None: filled(0)(*size, dtype=dtype or input.dtype))
means("full")(lambda size, fill_value, *, dtype=None: filled(fill_value)(size, dtype=dtype))


@means("one_hot")
def one_hot(tensor: Node, num_classes: int) -> Node:
    return ops.one_hot(tensor, depth=num_classes, dtype="int64")


MODES = {"circular": "wrap", "constant": "constant", "reflect": "reflect", "replicate": "edge"}


@means("pad")
def pad(input: Node, pad: Any, mode: str = "constant", value: float | None = None) -> Node:
    """The last axis first."""
    pairs = [*zip(pad[::2], pad[1::2])][::-1]
    widths = np.array([(0, 0)] * (input.ndim - len(pairs)) + pairs).T.ravel()
    return shapes.pad(input, widths, None if value is None else np.array(value), mode=MODES[mode])

"""What operators are written as in a file: a row each, a function of the writer, the node and the names of its inputs.

An operator without a row is made of others that have one: by `PARTS`, by its own `decompose` rule, or as its forward
function says (`traced.py`). So here are rows for what ends there, functions of an array module, and for layers, which
could do without, but which ONNX computes faster as a whole. Left out: random numbers, results whose shapes follow from
values, and windows whose frame follows from open sizes, where ONNX counts it otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from .. import ops
from ..core.graph import OPS, Node
from ..core.op import Op
from ..core.types import Dim, Size, has_dim, is_float, promote
from ..ops.reduction import as_floats
from ..ops.window import Window
from .arithmetic import SAME

if TYPE_CHECKING:
    from .save import Writer

F = TypeVar("F", bound=Callable[..., Any])
Written = str | tuple[str, ...]
Condition = Callable[[Node, set[int]], bool]
LAST = np.iinfo(np.int64)
FROM_OURS: dict[str, Any] = {own: name for name, own in SAME.items()}


class WrittenAs(NamedTuple):
    """How an operator is written, and of which nodes with which outputs that somebody reads."""

    write: Callable[..., Written]
    when: Condition


ROWS: dict[Op[..., Any], WrittenAs] = {}
PARTS: dict[Op[..., Any], Callable[..., Any]] = {}  # compositions of nodes, where forward calls the function itself


def row(*names: str, when: Condition = lambda node, used: True, **family: Any) -> Callable[[F], F]:
    """Enter what writes these operators; of a family what stands beside the name is the first argument."""

    def enter(write: F) -> F:
        each = dict.fromkeys(names, write) | {name: partial(write, own) for name, own in family.items()}
        ROWS.update({OPS[name]: WrittenAs(made, when) for name, made in each.items()})
        return write

    return enter


# -- element by element ----------------------------------------------------------------------------------------


def own(node: Node) -> np.dtype:
    """The dtype in which an operator computes: that of its result, if this is no truth value."""
    return promote(*(i.dtype for i in node.inputs)) if node.dtype.kind == "b" else node.dtype


def alike(out: Writer, node: Node, names: Sequence[str], dtype: np.dtype | None = None) -> list[str]:
    """The inputs in one dtype, that in which the operator computes."""
    return [out.cast(name, i.dtype, dtype or own(node)) for name, i in zip(names, node.inputs)]


@row(**FROM_OURS, divide="Div", matmul="MatMul", maximum="Max", minimum="Min")
def same(kind: str, out: Writer, node: Node, *names: str, **attributes: Any) -> str:
    taken = out.takes(kind, own(node))
    made = out(kind, *alike(out, node, names, taken), **attributes)
    return made if taken == own(node) else out.cast(made, taken, node.dtype)


@row(elu=("Elu", "alpha"), leaky_relu=("LeakyRelu", "alpha"), concat=("Concat", "axis"))
@row(softmax=("Softmax", "axis"), log_softmax=("LogSoftmax", "axis"), einsum=("Einsum", "equation"))
def attributed(how: tuple[str, str], out: Writer, node: Node, *names: str) -> Written:
    """Also one of one attribute."""
    (kind, name), (value,) = how, node.attrs.values()
    return same(kind, out, node, *names, **{name: float(value) if name == "alpha" else value})


row(negative="Neg", relu="Relu", when=lambda node, used: node.dtype.kind != "u")(same)
row(ceil="Ceil", floor="Floor", round="Round", isnan="IsNaN", when=lambda node, used: is_float(node.inputs[0].dtype))(
    same
)


@row("where")
def where(out: Writer, node: Node, condition: str, *names: str) -> str:
    dtype = np.dtype("uint8") if node.dtype.kind == "b" else node.dtype  # ONNX Runtime has none of booleans
    pair = (out.cast(name, i.dtype, dtype) for name, i in zip(names, node.inputs[1:]))
    return out.cast(out("Where", condition, *pair), dtype, node.dtype)


row(bitwise_left_shift="LEFT", bitwise_right_shift="RIGHT", when=lambda node, used: node.dtype.kind == "u")(
    lambda way, out, node, *names: out("BitShift", *alike(out, node, names), direction=way)
)
row("astype")(lambda out, node, x: out.cast(x, node.inputs[0].dtype, node.dtype))


row("clip")(
    lambda out, node, x: out(
        "Clip", x, *(out.constant(np.asarray(node.attrs[end], node.dtype)) for end in ("min", "max"))
    )
)


@row(floor_divide=True, remainder=False)
def division(whole: bool, out: Writer, node: Node, *names: str) -> str:
    """Towards -inf, where ONNX goes towards 0: a remainder of the sign of a takes b once more if b has the other."""
    floats = is_float(node.dtype)
    dtype = out.takes("Round", node.dtype) if floats else node.dtype
    a, b = alike(out, node, names, dtype)
    zero, rest = out.constant(np.zeros((), dtype)), out("Mod", a, b, fmod=1)
    signs = out("Xor", out("Less", rest, zero), out("Less", b, zero))
    other = out("And", signs, out("Not", out("Equal", rest, zero)))
    if not whole:
        return out.cast(out("Where", other, out("Add", rest, b), rest), dtype, node.dtype)
    ratio = out("Round", out("Div", out("Sub", a, rest), b)) if floats else out("Div", a, b)
    made = out("Sub", ratio, out.cast(other, np.dtype(bool), dtype))
    made = out("Where", out("Equal", b, zero), out("Div", a, b), made) if floats else made
    return out.cast(made, dtype, node.dtype)


def log1p(x: Node) -> Node:
    """Accurate near 0: what x loses when 1 is added is known afterwards."""
    u = x + 1
    kept = u - 1
    lost = ops.equal(kept, 0)
    found = ops.log(u) * (x / ops.where(lost, OPS["ones_like"](x), kept))
    return ops.where(ops.equal(u, x), ops.log(u), ops.where(lost, x, found))


PARTS |= dict.fromkeys((OPS["ceil"], OPS["floor"], OPS["round"]), lambda x: x)  # of integers
PARTS |= {
    OPS["square"]: lambda x: x * x,
    OPS["rsqrt"]: lambda x: OPS["reciprocal"](ops.sqrt(x)),
    OPS["not_equal"]: lambda a, b: ops.logical_not(ops.equal(a, b)),
    OPS["negative"]: lambda x: OPS["bitwise_invert"](x) + 1,
    OPS["relu"]: lambda x: ops.maximum(x, 0),
    OPS["isnan"]: lambda x: ops.not_equal(x, x),
    OPS["isfinite"]: lambda x: OPS["less"](ops.abs(as_floats(x)), np.inf),
    OPS["expm1"]: lambda x: ops.tanh(x / 2) * (ops.exp(x) + 1),  # accurate near 0
    OPS["log1p"]: log1p,
    OPS["bitwise_left_shift"]: lambda a, b: a * OPS["power"](2, b),
    OPS["bitwise_right_shift"]: lambda a, b: OPS["floor_divide"](a, OPS["power"](2, b)),
    OPS["printed"]: lambda x, *, label: x,
}

# -- shapes ----------------------------------------------------------------------------------------------------


@row("reshape")
def reshape(out: Writer, node: Node, x: str) -> str:
    single = sum(isinstance(size, Dim) for size in node.shape) == 1 and 0 not in node.shape
    sizes = [-1 if single and isinstance(size, Dim) else size for size in node.shape]
    return out("Reshape", x, out.sizes(sizes), allowzero=int(0 in node.shape))


row("expand_dims")(lambda out, node, x: out("Unsqueeze", x, out.sizes(node.attrs["axis"])))
row("broadcast_to", "broadcast_like")(lambda out, node, x, *like: out("Expand", x, out.sizes(node.shape)))


@row("permute_dims", "matrix_transpose")
def transpose(out: Writer, node: Node, x: str) -> str:
    swapped = (*range(node.ndim - 2), node.ndim - 1, node.ndim - 2)
    return out("Transpose", x, perm=node.attrs.get("axes", swapped))


@row("pad")
def pad(out: Writer, node: Node, x: str) -> str:
    widths = [pair[side] for side in (0, 1) for pair in node.attrs["pad_width"]]
    return out("Pad", x, out.sizes(widths), out.constant(np.asarray(node.attrs["value"], node.dtype)))


@row("getitem")
def getitem(out: Writer, node: Node, x: str) -> str:
    cuts, ints, new = [], [], [i for i, e in enumerate(_without_ints(node.attrs["key"])) if e == "new"]
    for axis, entry in enumerate(e for e in node.attrs["key"] if e != "new"):
        if not isinstance(entry, tuple):
            ints.append(axis)
            cuts.append((axis, entry, LAST.max if entry == -1 else entry + 1, 1))
        elif entry[1:] != (None, None, 1):
            _, start, stop, step = entry
            first, last = (0, LAST.max) if step > 0 else (LAST.max, LAST.min)
            cuts.append((axis, first if start is None else start, last if stop is None else stop, step))
    if cuts:
        axes, starts, stops, steps = (out.sizes(column) for column in zip(*cuts))
        x = out("Slice", x, starts, stops, axes, steps)
    x = out("Squeeze", x, out.sizes(ints)) if ints else x
    return out("Unsqueeze", x, out.sizes(new)) if new else x


def _without_ints(key: Sequence[Any]) -> list[Any]:
    return [e for e in key if e == "new" or isinstance(e, tuple)]


def slice_scatter(values: Node, like: Node, *, key: tuple[Any, ...]) -> Node:
    """Zeros around the values, axis by axis; of steps each place takes the value that lies there, or a zero behind."""
    cuts = [e if isinstance(e, tuple) else ("slice", e, None, 1) for e in key if e != "new"]
    counts = iter([n for n, entry in zip(values.shape, _without_ints(key)) if entry != "new"])
    made = ops.reshape(values, [next(counts) if isinstance(e, tuple) else 1 for e in key if e != "new"])
    for axis, ((_, start, _, step), size, count) in enumerate(zip(cuts, like.shape, made.shape)):
        start = (0 if step > 0 else size - 1) if start is None else start
        start = size + start if isinstance(start, int) and start < 0 else start
        widths: list[Any] = [(0, 0)] * made.ndim
        widths[axis] = (start, size - start - count) if step == 1 else (0, 1)
        made = OPS["pad"](made, pad_width=tuple(widths)) if widths[axis] != (0, 0) else made
        if step != 1:
            steps = ops.arange(size) - start
            there = ops.logical_and(ops.equal(steps % step, 0), steps // step >= 0)
            made = ops.take(made, ops.where(there, ops.minimum(steps // step, count), count), axis=axis)
    return made


def roll(x: Node, *, shift: Any, axis: Any) -> Node:
    if axis is None:
        return ops.reshape(roll(ops.flatten(x, 0), shift=(shift,), axis=(0,)), x.shape)
    for by, i in zip(shift, axis):
        x = ops.take(x, (ops.arange(x.shape[i]) - by) % x.shape[i], axis=i)
    return x


PARTS |= {OPS["slice_scatter"]: slice_scatter, OPS["roll"]: roll}

# -- numbers ---------------------------------------------------------------------------------------------------


row("full")(lambda out, node: out.filled(node.shape, np.asarray(node.attrs["fill_value"], node.dtype)))
row(zeros_like=0, ones_like=1)(lambda one, out, node, _: out.filled(node.shape, np.asarray(one, node.dtype)))
row("size")(lambda out, node: out.number(node.attrs["value"]))
row(tril=0, triu=1)(lambda upper, out, node, x: out("Trilu", x, out.number(node.attrs["k"]), upper=upper))


row("arange")(
    lambda out, node: out.cast(
        out("Range", *(out.number(node.attrs[name]) for name in ("start", "stop", "step"))),
        np.dtype("int64"),
        node.dtype,
    )
)

# -- reductions, and along an axis -----------------------------------------------------------------------------


@row(sum="ReduceSum", prod="ReduceProd", max="ReduceMax", min="ReduceMin", any="ReduceSum", all="ReduceMin")
def reduction(kind: str, out: Writer, node: Node, x: str) -> str:
    given, wide = node.inputs[0].dtype, out.takes(kind, node.dtype)
    axes, kept = out.sizes(node.attrs["axis"]), int(node.attrs["keepdims"])
    made = out(kind, out.cast(x, given, wide), axes, keepdims=kept, noop_with_empty_axes=1)
    return out.cast(made, wide, node.dtype)


row(argmax="ArgMax", argmin="ArgMin")(
    lambda kind, out, node, x: out(kind, x, axis=node.attrs["axis"], keepdims=int(node.attrs["keepdims"]))
)


row("cumsum")(
    lambda out, node, x: out(
        "CumSum", *alike(out, node, [x]), out.number(node.attrs["axis"]), reverse=int(node.attrs["reverse"])
    )
)


@row(topk=None, sort=0, argsort=1)
def topk(wanted: int | None, out: Writer, node: Node, x: str) -> Written:
    axis, count = node.attrs["axis"], node.attrs.get("k", node.inputs[0].shape[node.attrs["axis"]])
    falling = int(node.attrs.get("descending", True))
    given, taken = node.inputs[0].dtype, out.takes("TopK", node.inputs[0].dtype)
    values, ids = out.several(2, "TopK", out.cast(x, given, taken), out.sizes([count]), axis=axis, largest=falling)
    both = out.cast(values, taken, given), ids
    return both if wanted is None else both[wanted]


# -- by ids ----------------------------------------------------------------------------------------------------


def _whole_table(node: Node, used: set[int]) -> bool:
    return node.attrs.get("window") is None


row(take="Gather", take_along_axis="GatherElements", when=_whole_table)(
    lambda kind, out, node, x, ids: out(kind, x, out.ids(ids, node.inputs[1]), axis=node.attrs["axis"])
)


@row("put_along_axis_add", when=_whole_table)
def put_along_axis_add(out: Writer, node: Node, like: str, ids: str, values: str) -> str:
    zeros, ids = out.filled(node.shape, np.zeros((), node.dtype)), out.ids(ids, node.inputs[1])
    return out("ScatterElements", zeros, ids, values, axis=node.attrs["axis"], reduction="add")


@row(scatter_rows=("add", 0.0), row_maxima=("max", -np.inf), when=_whole_table)
def scattered(how: tuple[str, float], out: Writer, node: Node, *given: str) -> str:
    """Rows at ids of the first axis, joined with a number where none are."""
    (reduction, first), ids = how, out.cast(given[-2], node.inputs[-2].dtype, np.dtype("int64"))
    empty = out.filled(node.shape, np.asarray(first, node.dtype))
    return out("ScatterND", empty, out("Unsqueeze", ids, out.sizes([-1])), given[-1], reduction=reduction)


# -- layers ----------------------------------------------------------------------------------------------------


row("layer_norm", when=lambda node, used: len({i.dtype for i in node.inputs}) == 1)(
    lambda out, node, *names: out("LayerNormalization", *names, axis=-1, epsilon=node.attrs["epsilon"])
)


def _slid(node: Node, kernel: Any, **more: Any) -> dict[str, Any]:
    """The attributes of a window; a frame that is "same" is left where it follows from open sizes."""
    a = node.attrs
    same = {"auto_pad": "SAME_UPPER"} if a["padding"] == "same" else {"pads": np.transpose(a["padding"]).ravel()}
    dilated = {"dilations": a["dilation"], "group": a["groups"]} if "dilation" in a else {}
    return {"kernel_shape": kernel, "strides": a["stride"], **dilated, **same, **more}


row("conv2d")(lambda out, node, *names: out("Conv", *alike(out, node, names), **_slid(node, node.inputs[1].shape[2:])))
row("max_pool2d", when=lambda node, used: 1 not in used)(
    lambda out, node, x: (out("MaxPool", x, **_slid(node, node.attrs["kernel"])), "")
)
row("avg_pool2d", when=lambda node, used: node.attrs["padding"] != "same")(
    lambda out, node, x: out("AveragePool", x, **_slid(node, node.attrs["kernel"], count_include_pad=1))
)


def _rest(node: Node) -> tuple[Size, ...]:
    """Rows and columns of images at whose end no window of a convolution begins, which its adjoint has to add."""
    a = node.attrs
    window = Window(node.inputs[1].shape[2:], a["stride"], a["padding"], a["dilation"])
    least = [(n - 1) * s + e for n, s, e in zip(node.inputs[0].shape[2:], window.stride, window.extent)]
    return tuple(size - (n - sum(pair)) for size, n, pair in zip(a["size"], least, window.padding))


@row("conv2d_dx", when=lambda node, used: node.attrs["padding"] != "same" and not has_dim(_rest(node)))
def conv2d_dx(out: Writer, node: Node, *names: str) -> str:
    slid = _slid(node, node.inputs[1].shape[2:], output_padding=_rest(node))
    return out("ConvTranspose", *alike(out, node, names), **slid)


def recurrent(kind: str, gates: Sequence[int], out: Writer, node: Node, x: str, *given: str) -> Written:
    """ONNX has time first, transposed weights, one direction as an axis of size 1, and our `gates` in this order."""
    k, count = int(node.inputs[2].shape[0]), 2 if kind == "GRU" else 1  # the number of biases
    order = out.constant(np.concatenate([np.arange(k) + k * gate for gate in gates]))
    one_way = partial(out, "Unsqueeze")
    first, squeezed = out.sizes([0]), [out.sizes([axis]) for axis in (1, 0)]
    weights = [one_way(out("Transpose", out("Gather", name, order, axis=1)), first) for name in given[:2]]
    biases, states, lengths = given[2 : 2 + count], given[2 + count : 5], given[5:]
    both = [out("Gather", name, order) for name in biases]
    both += [out.filled((len(gates) * k,), np.zeros((), node.inputs[3].dtype))] * (2 - count)
    bias = one_way(out("Concat", *both, axis=0), first)
    ends = [out.cast(name, node.inputs[-1].dtype, np.dtype("int32")) for name in lengths] or [""]
    how = {"hidden_size": k, **({"linear_before_reset": 1} if kind == "GRU" else {})}
    time, began = out("Transpose", x, perm=(1, 0, 2)), [one_way(name, first) for name in states]
    made = out.several(1 + len(states), kind, time, *weights, bias, *ends, *began, **how)
    steps = out("Transpose", out("Squeeze", made[0], squeezed[0]), perm=(1, 0, 2))
    last = [out("Squeeze", name, squeezed[1]) for name in made[1:]]
    if lengths:  # runtimes forget the first state of a sequence without steps
        none = out("Unsqueeze", out("Equal", ends[0], out.constant(np.zeros((), np.int32))), out.sizes([1]))
        last = [out("Where", none, before, name) for before, name in zip(states, last)]
    return (steps, *last, "", "", "")


# Other outputs serve gradients.
row("lstm", when=lambda node, used: used <= {0, 1, 2})(partial(recurrent, "LSTM", (0, 3, 1, 2)))
row("gru", when=lambda node, used: used <= {0, 1})(partial(recurrent, "GRU", (1, 0, 2)))

"""What layers and losses of PyTorch mean: `torch.nn.functional`, and modules whose own `forward` asks for values.

A module is traced down to its functions. Those of `FORMS` are traced in another form: `record(function, args, options)`
notes a function, which may be one of nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import ops
from ..core.graph import Node
from ..onnx import images, layers, products, resampling
from .functions import F, Lacks, Only, means


def every(value: Any, count: int) -> tuple[Any, ...]:
    """A number for each axis."""
    return tuple(value) if isinstance(value, list | tuple) else (value,) * count


def vectors(weight: Any, bias: Any, *shape: Any) -> tuple[Node, Node]:
    """A scale and a bias, which may be left out."""
    scale = ops.full(shape=shape, fill_value=1.0, dtype="float32") if weight is None else weight
    return scale, ops.zeros_like(scale) if bias is None else bias


@means("linear")
def linear(input: Node, weight: Node, bias: Any = None) -> Node:
    w = ops.matrix_transpose(weight)
    return products.matmul(input, w) if bias is None else ops.linear(input, w, bias)


# -- images --------------------------------------------------------------------------------------------------------


@means("conv1d", "conv2d", "conv3d")
def conv(
    input: Node, weight: Node, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Node:
    n = weight.ndim - 2
    pads = every(0 if padding == "valid" else padding, n) * 2
    if padding == "same":
        lost = [d * (int(k) - 1) for d, k in zip(every(dilation, n), weight.shape[2:])]
        pads = (*(v // 2 for v in lost), *(v - v // 2 for v in lost))
    slide = {"strides": every(stride, n), "dilations": every(dilation, n), "pads": pads}
    return images.conv(input, weight, bias, group=groups, **slide)


@means("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def conv_transpose(
    input: Node, weight: Node, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    groups: int = 1, dilation: Any = 1,
) -> Node:  # fmt: skip
    n = weight.ndim - 2
    slide = {"strides": every(stride, n), "dilations": every(dilation, n), "pads": every(padding, n) * 2}
    return images.conv_transpose(input, weight, bias, group=groups, output_padding=every(output_padding, n), **slide)


def slides(input: Node, kernel: Any, stride: Any, padding: Any, ceil: bool) -> dict[str, Any]:
    n = input.ndim - 2
    steps = every(stride or kernel, n)
    return {"kernel_shape": every(kernel, n), "strides": steps, "pads": every(padding, n) * 2, "ceil_mode": ceil}


@means("max_pool1d", "max_pool2d", "max_pool3d")
def max_pool(
    input: Node, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: Only = False,
) -> Node:  # fmt: skip
    given = slides(input, kernel_size, stride, padding, ceil_mode)
    return images.max_pool(input, dilations=every(dilation, input.ndim - 2), **given)[0]


@means("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(
    input: Node, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: Only = None,
) -> Node:  # fmt: skip
    given = slides(input, kernel_size, stride, padding, ceil_mode)
    return images.average_pool(input, count_include_pad=int(count_include_pad), **given)


def adaptive(whole: Any, pool: Any) -> Callable[..., Node]:
    """To one number, or by windows of one size that do not overlap."""

    def pooled(input: Node, output_size: Any, return_indices: Only = False) -> Any:
        old = input.shape[2:]
        new = [o if n is None else n for o, n in zip(old, every(output_size, len(old)))]
        if all(n == 1 for n in new):
            return whole(input, axis=tuple(range(2, input.ndim)), keepdims=True)
        if any(int(o) % int(n) for o, n in zip(old, new)):
            raise Lacks(f"pools {old} to {(*new,)} by windows that overlap")
        return pool(input, tuple(int(o) // int(n) for o, n in zip(old, new)))

    return pooled


means("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")(adaptive(ops.mean, avg_pool))
means("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")(adaptive(ops.max, max_pool))
METHODS = {"bicubic": "cubic", "bilinear": "linear", "linear": "linear", "nearest": "nearest", "trilinear": "linear"}


@means("interpolate")
def interpolate(
    input: Node, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool | None = None,
    recompute_scale_factor: Only = None, antialias: Only = False,
) -> Node:  # fmt: skip
    n = input.ndim - 2
    places = "asymmetric" if mode == "nearest" else "align_corners" if align_corners else "half_pixel"
    ways: dict[str, Any] = {"coordinate_transformation_mode": places, "mode": METHODS[mode], "nearest_mode": "floor"}
    sizes, scales = (None if v is None else np.array(every(v, n)) for v in (size, scale_factor))
    return resampling.resize(input, None, scales, sizes, axes=tuple(range(2, n + 2)), **ways)


# -- norms, embeddings, attention ----------------------------------------------------------------------------------


@means("batch_norm")
def batch_norm(
    input: Node, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: bool = False,
    momentum: Any = 0.1, eps: float = 1e-5,
) -> Node:  # fmt: skip
    if running_mean is None or momentum is None:
        raise Lacks("keeps no running statistics, or counts steps for them")
    given = input, *vectors(weight, bias, *running_mean.shape), running_mean, running_var
    if training:
        return ops.batch_norm(*given, momentum=momentum, epsilon=eps)
    return layers.batch_norm(*given, epsilon=eps)[0]


@means("layer_norm")
def layer_norm(input: Node, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Node:
    given = vectors(weight, bias, *normalized_shape)
    return layers.layer_norm(input, *given, axis=-len(normalized_shape), epsilon=eps)[0]


@means("group_norm")
def group_norm(input: Node, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Node:
    return ops.group_norm(input, *vectors(weight, bias, input.shape[1]), groups=num_groups, epsilon=eps)


@means("rms_norm")
def rms_norm(input: Node, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Node:
    if len(normalized_shape) > 1:
        raise Lacks("is over several axes")
    epsilon = float(np.finfo(input.dtype).eps) if eps is None else eps
    return ops.rms_norm(input, vectors(weight, None, *normalized_shape)[0], epsilon=epsilon)


@means("embedding")
def embedding(
    input: Node, weight: Node, padding_idx: int | None = None, max_norm: Only = None, norm_type: float = 2.0,
    scale_grad_by_freq: Only = False, sparse: bool = False,
) -> Node:  # fmt: skip
    """The row of padding is read, but not trained."""
    rows = ops.embedding(weight, input)
    if padding_idx is None:
        return rows
    padding = ops.equal(input, padding_idx % int(weight.shape[0]))
    return ops.where(ops.expand_dims(padding, axis=-1), ops.stop_gradient(rows), rows)


@means("embedding_bag")
def embedding_bag(
    input: Node, weight: Node, offsets: Any = None, max_norm: Only = None, norm_type: float = 2.0,
    scale_grad_by_freq: Only = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Any = None,
    include_last_offset: Only = False, padding_idx: Only = None,
) -> Node:  # fmt: skip
    if mode == "max" or (offsets is None and per_sample_weights is not None):
        raise Lacks(f"of mode {mode!r}, or of weights without offsets")
    if offsets is None:
        return (ops.mean if mode == "mean" else ops.sum)(ops.embedding(weight, input), axis=1)
    total = ops.embedding_bag(weight, input, offsets, per_sample_weights)
    ones = ops.full(shape=(weight.shape[0], 1), fill_value=1.0, dtype=weight.dtype)
    return total / ops.maximum(ops.embedding_bag(ones, input, offsets), 1.0) if mode == "mean" else total


@means("scaled_dot_product_attention")
def attention(
    query: Node, key: Node, value: Node, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: Only = False,
) -> Node:  # fmt: skip
    """Step by step where it drops weights."""
    if not dropout_p:
        return ops.scaled_dot_product_attention(query, key, value, attn_mask, causal=is_causal, scale=scale)
    scores = ops.matmul(query, ops.matrix_transpose(key)) * (int(query.shape[-1]) ** -0.5 if scale is None else scale)
    if is_causal:
        seen = ops.arange(query.shape[-2])
        attn_mask = ops.expand_dims(seen, axis=1) >= ops.arange(key.shape[-2])
    if attn_mask is not None:
        scores = ops.where(attn_mask, scores, -math.inf) if attn_mask.dtype.kind == "b" else scores + attn_mask
    return ops.matmul(ops.dropout(ops.softmax(scores), dropout_p), value)


# -- losses --------------------------------------------------------------------------------------------------------


def reduced(loss: Node, reduction: str, counted: Any = None) -> Node:
    """All losses, their sum, or their mean over those that are counted."""
    if reduction == "none":
        return loss
    count = loss.tensor.size if counted is None else ops.sum(ops.astype(counted, loss.dtype))
    return ops.sum(loss) if reduction == "sum" else ops.sum(loss) / count


def paired(function: Callable[[Node, Node], Node]) -> Callable[..., Node]:
    def loss(
        input: Node, target: Node, weight: Only = None, size_average: Only = None, reduce: Only = None,
        reduction: str = "mean", pos_weight: Only = None, delta: Only = 1.0, beta: Only = 1.0,
    ) -> Node:  # fmt: skip
        return reduced(function(input, target), reduction)

    return loss


means("binary_cross_entropy_with_logits")(paired(ops.binary_cross_entropy_with_logits))
means("huber_loss", "smooth_l1_loss")(paired(ops.huber_loss))
means("l1_loss")(paired(ops.mae_loss))
means("mse_loss")(paired(ops.mse_loss))


def classes_last(x: Node) -> Node:
    """The second axis last."""
    return ops.permute_dims(x, (*(i for i in range(x.ndim) if i != 1), 1))


@means("cross_entropy")
def cross_entropy(
    input: Node, target: Node, weight: Only = None, size_average: Only = None, ignore_index: int = -100,
    reduce: Only = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Node:  # fmt: skip
    """Of class ids, or of distributions; a mean of the first is over the rows that are not ignored."""
    if target.ndim == input.ndim:
        labels, rest, counted = classes_last(target), {}, None
    else:
        labels, rest, counted = target, {"ignore_index": ignore_index}, ops.not_equal(target, ignore_index)
    loss = ops.softmax_cross_entropy(classes_last(input), labels, label_smoothing=label_smoothing, **rest)
    return reduced(loss, reduction, counted)


@means("nll_loss")
def nll_loss(
    input: Node, target: Node, weight: Only = None, size_average: Only = None, ignore_index: int = -100,
    reduce: Only = None, reduction: str = "mean",
) -> Node:  # fmt: skip
    counted = ops.not_equal(target, ignore_index)
    loss = ops.where(counted, ops.nll_loss(classes_last(input), ops.where(counted, target, 0)), 0.0)
    return reduced(loss, reduction, counted)


# -- modules in another form ---------------------------------------------------------------------------------------

FORMS: dict[str, Callable[..., Any]] = {}  # by the class in PyTorch that defines `forward`


def form(*names: str) -> Callable[[F], F]:
    def enter(function: F) -> F:
        FORMS.update(dict.fromkeys(names, function))
        return function

    return enter


@form("_BatchNorm")
def counted_norm(record: Any, m: Any, input: Any) -> Any:
    given = input, m.running_mean, m.running_var, m.weight, m.bias, True, m.momentum, m.eps
    return record(batch_norm, given, {})


@form("LSTM", "GRU")
def recurrent(record: Any, m: Any, input: Any, hx: Any = None) -> Any:
    if m.proj_size:
        raise Lacks(f"proj_size is {m.proj_size}")
    options = {"rows": m.batch_first, "layers": m.num_layers, "dropout": m.dropout, "both": m.bidirectional}
    y, last = record(sequence, (input, hx, [list(each) for each in m.all_weights], m.mode == "LSTM"), options)
    return y, ((last[0], last[1]) if m.mode == "LSTM" else last)


def sequence(x: Node, hx: Any, weights: Any, lstm: bool, *, rows: bool, layers: int, dropout: float, both: bool) -> Any:
    """All outputs, and the last states of all layers and directions, in this order."""
    x, lasts, given = x if rows else ops.permute_dims(x, (1, 0, 2)), list[Any](), iter(weights)
    for layer in range(layers):
        outputs = []
        for way in range(2 if both else 1):
            w, r, *b = next(given)
            w, r, at = ops.matrix_transpose(w), ops.matrix_transpose(r), len(lasts)
            b = b or [ops.full(shape=r.shape[1:], fill_value=0.0, dtype=r.dtype)] * 2
            zero = ops.full(shape=(x.shape[0], r.shape[0]), fill_value=0.0, dtype=x.dtype)
            state = [zero] * 2 if hx is None else [s[at] for s in (hx if lstm else (hx,))]
            read = ops.flip(x, 1) if way else x
            made: Any
            if lstm:
                made = ops.lstm(read, w, r, b[0] + b[1], tuple(state))
            else:
                made = ops.gru(read, w, r, b[0], b[1], state[0])
            y, last = made
            outputs.append(ops.flip(y, 1) if way else y)
            lasts.append(last)
        x = ops.concat(outputs, axis=-1)
        x = ops.dropout(x, dropout) if dropout and layer < layers - 1 else x
    states = tuple(map(ops.stack, zip(*lasts))) if lstm else ops.stack(lasts)
    return x if rows else ops.permute_dims(x, (1, 0, 2)), states


@form("MultiheadAttention")
def heads_form(
    record: Any, m: Any, query: Any, key: Any, value: Any, key_padding_mask: Any = None, need_weights: bool = True,
    attn_mask: Any = None, average_attn_weights: bool = True, is_causal: bool = False,
) -> Any:  # fmt: skip
    if m.bias_k is not None or m.add_zero_attn or (is_causal and attn_mask is None):
        raise Lacks("it has keys of its own, or is causal without a mask")
    w = (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight) if m.in_proj_weight is None else (m.in_proj_weight,)
    given = (query, key, value), w, m.in_proj_bias, m.out_proj.weight, m.out_proj.bias, m.num_heads
    options = {"rows": m.batch_first, "average": average_attn_weights, "dropout": m.dropout}
    y, weights = record(heads, (*given, attn_mask, key_padding_mask), options)
    return y, weights if need_weights else None


def heads(
    given: Any, w: Any, b: Any, out: Node, bias: Any, count: int, mask: Any, padding: Any, *, rows: bool,
    average: bool, dropout: float,
) -> tuple[Node, Node]:  # fmt: skip
    """What it sees, and the weights, which are computed for those alone who fetch them."""
    kernels = w if len(w) == 3 else ops.split(w[0], 3, axis=0)
    parts = []
    for x, kernel, own in zip(given, kernels, [None] * 3 if b is None else ops.split(b, 3, axis=0)):
        y = linear(x if rows else ops.permute_dims(x, (1, 0, 2)), kernel, own)
        y = ops.reshape(y, (*y.shape[:2], count, int(y.shape[2]) // count))
        parts.append(ops.permute_dims(y, (0, 2, 1, 3)))
    q, k, v = parts
    if mask is not None and mask.ndim == 3:
        mask = ops.reshape(mask, (-1, count, *mask.shape[1:]))
    padding = None if padding is None else ops.expand_dims(padding, axis=(1, 2))
    hidden = [hiding(each) for each in (mask, padding) if each is not None]
    seen = sum(hidden[1:], hidden[0]) if hidden else None
    y = ops.permute_dims(attention(q, k, v, seen, dropout), (0, 2, 1, 3))
    y = linear(ops.reshape(y, (*y.shape[:2], -1)), out, bias)
    scores = ops.matmul(q, ops.matrix_transpose(k)) * int(q.shape[-1]) ** -0.5
    weights = ops.softmax(scores if seen is None else scores + seen)
    return y if rows else ops.permute_dims(y, (1, 0, 2)), ops.mean(weights, axis=1) if average else weights


def hiding(mask: Node) -> Node:
    """What is added to scores; truths hide."""
    return ops.where(mask, -math.inf, ops.zeros_like(ops.astype(mask, "float32"))) if mask.dtype.kind == "b" else mask


@form("TransformerEncoderLayer")
def encoder_layer(
    record: Any, m: Any, src: Any, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False
) -> Any:
    masks = src_mask, src_key_padding_mask
    if m.norm_first:
        x = src + m._sa_block(m.norm1(src), *masks)
        return x + m._ff_block(m.norm2(x))
    x = m.norm1(src + m._sa_block(src, *masks))
    return m.norm2(x + m._ff_block(x))


@form("TransformerEncoder")
def encoder(
    record: Any, m: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool | None = None
) -> Any:
    for layer in m.layers:
        src = layer(src, mask, src_key_padding_mask)
    return src if m.norm is None else m.norm(src)


@form("TransformerDecoderLayer")
def decoder_layer(
    record: Any, m: Any, tgt: Any, memory: Any, tgt_mask: Any = None, memory_mask: Any = None,
    tgt_key_padding_mask: Any = None, memory_key_padding_mask: Any = None, tgt_is_causal: bool = False,
    memory_is_causal: bool = False,
) -> Any:  # fmt: skip
    own, other = (tgt_mask, tgt_key_padding_mask), (memory, memory_mask, memory_key_padding_mask)
    if m.norm_first:
        x = tgt + m._sa_block(m.norm1(tgt), *own)
        x = x + m._mha_block(m.norm2(x), *other)
        return x + m._ff_block(m.norm3(x))
    x = m.norm1(tgt + m._sa_block(tgt, *own))
    x = m.norm2(x + m._mha_block(x, *other))
    return m.norm3(x + m._ff_block(x))

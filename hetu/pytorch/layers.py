"""What layers of PyTorch mean that are ours as a whole: images, norms, embeddings, attention, recurrence."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import numpy as np

from .. import ops
from ..core.graph import OPS, Node
from ..core.operators import if_training
from ..core.types import product
from ..onnx import images, layers
from ..onnx.layers import States
from ..ops.batch_norm import both_ways
from ..ops.slicing import cut_along
from .meanings import Lacks, Refused, entered, means

SURE = 1000.0  # the sigmoid of it is 1, and of its negative 0


def every(value: Any, count: int) -> tuple[Any, ...]:
    """A number for each axis."""
    return tuple(value) * (count if len(value) == 1 else 1)


def vectors(weight: Any, bias: Any, shape: Any, dtype: Any) -> tuple[Node, Node]:
    """A scale and a bias, which may be left out."""
    scale = ops.full(shape=tuple(shape), fill_value=1.0, dtype=dtype) if weight is None else weight
    return scale, ops.zeros_like(scale) if bias is None else bias


@means("linear")
def linear(input: Node, weight: Node, bias: Any = None) -> Node:
    w = ops.matrix_transpose(weight)
    return ops.matmul(input, w) if bias is None else ops.linear(input, w, bias)


# -- images --------------------------------------------------------------------------------------------------------


@means("conv1d", "conv2d", "conv3d", "convolution")
def convolution(
    input: Node, weight: Node, bias: Any = None, stride: Any = (1,), padding: Any = (0,), dilation: Any = (1,),
    transposed: bool = False, output_padding: Any = (0,), groups: int = 1,
) -> Node:  # fmt: skip
    if input.ndim != weight.ndim or isinstance(padding, str):
        raise Lacks
    n = weight.ndim - 2
    slide = {"strides": every(stride, n), "dilations": every(dilation, n), "pads": every(padding, n) * 2}
    if transposed:
        more = every(output_padding, n)
        return images.conv_transpose(input, weight, bias, group=groups, output_padding=more, **slide)
    return images.conv(input, weight, bias, group=groups, **slide)


def slides(x: Node, kernel: Any, stride: Any, padding: Any, ceil: bool) -> tuple[Node, dict[str, Any]]:
    """Images in a batch, and how a window slides over them."""
    n = len(kernel) if len(kernel) > 1 else 1
    x = x if x.ndim == n + 2 else ops.expand_dims(x, axis=0)
    steps = every(stride or kernel, n)
    return x, {"kernel_shape": every(kernel, n), "strides": steps, "pads": every(padding, n) * 2, "ceil_mode": ceil}


def alike(y: Node, x: Node) -> Node:
    """A result for `x`, which had to become a batch."""
    return y if y.ndim == x.ndim else ops.squeeze(y, 0)


@means("max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool(
    x: Node, kernel_size: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False
) -> tuple[Node, Any]:
    n = 2 if x.ndim < 5 and len(kernel_size) < 3 else 3
    batch, given = slides(x, every(kernel_size, n), stride and every(stride, n), every(padding, n), ceil_mode)
    given["dilations"] = every(dilation, n)
    return alike(images.max_pool(batch, **given)[0], x), lambda: alike(
        images.max_pool(batch, outputs=2, **given)[1] % product(x.shape[-n:]), x
    )


@means("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(
    x: Node, kernel_size: Any, stride: Any = (), padding: Any = (0,), ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Node:  # fmt: skip
    batch, given = slides(x, kernel_size, stride, padding, ceil_mode)
    if divisor_override is None:
        return alike(images.average_pool(batch, count_include_pad=int(count_include_pad), **given), x)
    taps = images.taps(batch, images.window_of(batch.shape[2:], **given), 0)
    return alike(reduce(OPS["add"], taps) / divisor_override, x)


def adaptive(x: Node, output_size: Any, joined: Any) -> Node:
    """Axis by axis: place k of n is of the numbers from floor(k size / n) to ceil((k + 1) size / n)."""
    for axis, n in enumerate(output_size, x.ndim - len(output_size)):
        size = int(x.shape[axis])
        cuts = [slice(k * size // n, -(-(k + 1) * size // n)) for k in range(n)]
        x = ops.concat([joined(cut_along(x, axis, cut), axis=axis, keepdims=True) for cut in cuts], axis=axis)
    return x


means("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")(lambda x, output_size: adaptive(x, output_size, ops.mean))
means("adaptive_max_pool2d", "adaptive_max_pool3d")(lambda x, output_size: (adaptive(x, output_size, ops.max), None))


# -- norms, embeddings, attention ----------------------------------------------------------------------------------


@means("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training")
def batch_norm(
    input: Node, weight: Any, bias: Any, running_mean: Node, running_var: Node, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> tuple[Any, ...]:  # fmt: skip
    """A gradient passes through none of the running statistics."""
    running = running_mean, running_var
    y, fixed, *news = both_ways(
        input, *vectors(weight, bias, running_mean.shape, input.dtype), *running, momentum, eps, 1
    )
    if not training:
        return fixed, None, None
    return if_training(y, fixed), None, None, *(if_training(ops.stop_gradient(n), o) for n, o in zip(news, running))


@means("layer_norm")
def layer_norm(input: Node, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Node:
    given = vectors(weight, bias, normalized_shape, input.dtype)
    return layers.layer_norm(input, *given, axis=-len(normalized_shape), epsilon=eps)[0]


@means("group_norm")
def group_norm(input: Node, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Node:
    given = vectors(weight, bias, (input.shape[1],), input.dtype)
    return ops.group_norm(input, *given, groups=num_groups, epsilon=eps)


@means("rms_norm")
def rms_norm(input: Node, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Node:
    if len(normalized_shape) > 1:
        raise Lacks("is over several axes")
    epsilon = float(np.finfo(input.dtype).eps) if eps is None else eps
    return ops.rms_norm(input, vectors(weight, None, normalized_shape, input.dtype)[0], epsilon=epsilon)


@means("embedding")
def embedding(
    weight: Node, indices: Node, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Node:
    """The row of padding is read, but not trained."""
    if scale_grad_by_freq:
        raise Refused("its gradients go by how often an id comes")
    rows = ops.embedding(weight, indices)
    if padding_idx == -1:
        return rows
    padding = ops.equal(indices, padding_idx % int(weight.shape[0]))
    return ops.where(ops.expand_dims(padding, axis=-1), ops.stop_gradient(rows), rows)


@means("embedding_bag.padding_idx", "_embedding_bag")
def embedding_bag(
    weight: Node, indices: Node, offsets: Node, scale_grad_by_freq: bool = False, mode: int = 0, sparse: bool = False,
    per_sample_weights: Any = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """A sum, or a mean, of the rows of each bag; those of padding do not count."""
    if mode == 2 or scale_grad_by_freq:
        raise Refused("takes maxima, or gradients by how often an id comes")
    offsets = offsets[:-1] if include_last_offset else offsets
    if padding_idx not in (None, -1):
        counted = ops.astype(ops.not_equal(indices, padding_idx), weight.dtype)
        per_sample_weights = counted if per_sample_weights is None else per_sample_weights * counted
    total = ops.embedding_bag(weight, indices, offsets, per_sample_weights)
    if mode == 1:
        ones = ops.full(shape=(weight.shape[0], 1), fill_value=1.0, dtype=weight.dtype)
        total = total / ops.maximum(ops.embedding_bag(ones, indices, offsets, per_sample_weights), 1.0)
    return total, None, None, None


@means("scaled_dot_product_attention")
def attention(
    query: Node, key: Node, value: Node, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None,
) -> Node:  # fmt: skip
    """Step by step where it drops weights; the first query sees the first key alone, however many keys there are."""
    if is_causal and (dropout_p or query.shape[-2] != key.shape[-2]):
        attn_mask = ops.expand_dims(ops.arange(query.shape[-2]), axis=1) >= ops.arange(key.shape[-2])
    if not dropout_p:
        causal = is_causal and attn_mask is None
        return ops.scaled_dot_product_attention(query, key, value, attn_mask, causal=causal, scale=scale)
    scores = ops.matmul(query, ops.matrix_transpose(key)) * (int(query.shape[-1]) ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        scores = ops.where(attn_mask, scores, -math.inf) if attn_mask.dtype.kind == "b" else scores + attn_mask
    return ops.matmul(ops.dropout(ops.softmax(scores), dropout_p), value)


@means("cross_entropy_loss")
def cross_entropy(
    x: Node, target: Node, reduction: int = 1, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Node:
    """Of class ids, or of distributions; a mean of the first is over the rows that are not ignored."""
    ids, last = target.ndim < x.ndim, (0,) if x.ndim == 1 else (*(i for i in range(x.ndim) if i != 1), 1)
    logits, labels = ops.permute_dims(x, last), target if ids else ops.permute_dims(target, last)
    rest = {"ignore_index": ignore_index} if ids else {}
    loss = ops.softmax_cross_entropy(logits, labels, label_smoothing=label_smoothing, **rest)
    if reduction == 0:
        return loss
    counted = ops.astype(ops.not_equal(target, ignore_index), loss.dtype) if ids else ops.ones_like(loss)
    return ops.sum(loss) if reduction == 2 else ops.sum(loss) / ops.sum(counted)


# -- recurrence ----------------------------------------------------------------------------------------------------


def layered(one_way: Callable[..., tuple[Node, States]]) -> Callable[..., tuple[Node, ...]]:
    """All outputs, and the last states of all layers and directions, in this order."""

    def made(
        input: Node, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Node, ...]:  # fmt: skip
        if len(params) != num_layers * (1 + bidirectional) * (4 if has_biases else 2):
            raise Refused("has projections")
        x, lasts, given = input if batch_first else ops.permute_dims(input, (1, 0, 2)), list[Any](), iter(params)
        for layer in range(num_layers):
            outputs = []
            for way in range(2 if bidirectional else 1):
                w, r = (ops.matrix_transpose(next(given)) for _ in range(2))
                none = ops.full(shape=r.shape[1:], fill_value=0.0, dtype=r.dtype)
                b, other = (next(given) if has_biases else none for _ in range(2))
                read, states = ops.flip(x, 1) if way else x, tuple(each[len(lasts)] for each in hx)
                y, last = one_way(read, w, r, b, other, states)
                outputs.append(ops.flip(y, 1) if way else y)
                lasts.append(last)
            x = ops.concat(outputs, axis=-1)
            x = ops.dropout(x, dropout) if dropout and layer < num_layers - 1 else x
        ends = map(ops.stack, zip(*lasts))
        return (x if batch_first else ops.permute_dims(x, (1, 0, 2)), *ends)

    return made


def gru(x: Node, w: Node, r: Node, b: Node, other: Node, states: States) -> tuple[Node, States]:
    y, last = ops.gru(x, w, r, b, other, *states)
    return y, (last,)


def tanh(x: Node, w: Node, r: Node, b: Node, other: Node, states: States) -> tuple[Node, States]:
    """That of a gated layer whose gates are open, one for what was, and shut, for what remains: exactly 1 and 0."""
    none = ops.zeros_like(w), ops.zeros_like(r), ops.zeros_like(b)
    w, r, b, other = (ops.concat([zero, zero, n], axis=-1) for zero, n in zip((*none, none[2]), (w, r, b, other)))
    k = int(states[0].shape[-1])
    return gru(x, w, r, b + np.repeat(np.array([SURE, -SURE, 0], b.dtype), k), other, states)


def relu(x: Node, w: Node, r: Node, b: Node, other: Node, states: States) -> tuple[Node, States]:
    """Step by step, so that the length has to be known."""
    return layers.stepwise(partial(layers.after_rnn, [ops.relu], None), x, w, r, b, other, states, None)


entered(
    {
        "gru": gru, "rnn_relu": relu, "rnn_tanh": tanh,
        "lstm": lambda x, w, r, b, other, states: ops.lstm(x, w, r, b + other, states),
    },
    layered,
)  # fmt: skip

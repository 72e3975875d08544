"""The words of the benchmark's models in TensorFlow, and one step of it as a `tf.function`.

Written as one writes them by default: channels last, the only order that TensorFlow trains in on a CPU; recurrent
layers unrolled over their steps, gradients of embeddings as the slices that TensorFlow makes, its own fused updates.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # TensorFlow reads it when it is imported

import tensorflow as tf
from tensorflow import Tensor, nn, raw_ops
from workloads import Workload

OURS_TO_LAST, LAST_TO_OURS = (0, 2, 3, 1), (0, 3, 1, 2)


def make(workload: Workload, variant: str) -> Callable[[], Any]:
    """What makes one step and returns its loss or its outputs; the only `variant` is "default"."""
    tf.config.threading.set_intra_op_parallelism_threads(int(os.environ["OMP_NUM_THREADS"]))
    tf.config.threading.set_inter_op_parallelism_threads(1)
    words, first = Words(workload), workload.batches()[0]
    signature = {name: tf.TensorSpec((None, *array.shape[1:]), array.dtype) for name, array in first.items()}

    @tf.function(input_signature=[signature])
    def infer(batch: dict[str, Tensor]) -> Tensor:
        return workload.kind.model(words, workload.s, **batch, **words.fixed)

    @tf.function(input_signature=[signature])
    def train(batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name != "t"}
        with tf.GradientTape() as tape:
            outputs = workload.kind.model(words, workload.s, **inputs, **words.fixed)
            loss = LOSSES[workload.kind.loss](outputs, batch["t"])
        words.update(tape.gradient(loss, words.w))
        return loss

    batches = itertools.cycle([{k: tf.constant(v) for k, v in batch.items()} for batch in workload.batches()])
    step = train if workload.trains else infer
    return lambda: step(next(batches)).numpy()


def versions() -> dict[str, str]:
    return {"tensorflow": tf.__version__}


class Words:
    """Layers on the weights of a workload. TensorFlow stores kernels as (height, width, in, out)."""

    relu, tanh, softmax = staticmethod(nn.relu), staticmethod(tf.tanh), staticmethod(nn.softmax)
    sum, mean, gelu = staticmethod(tf.reduce_sum), staticmethod(tf.reduce_mean), staticmethod(nn.gelu)

    def __init__(self, workload: Workload) -> None:
        self.workload, self.training = workload, workload.trains
        weights, fixed = workload.weights(), workload.fixed()
        self.w = {n: tf.Variable(v.transpose(2, 3, 1, 0) if v.ndim == 4 else v) for n, v in weights.items()}
        moments = "mv" if workload.does == "Adam" else ""
        self.moments = {n: [tf.Variable(tf.zeros_like(v)) for _ in moments] for n, v in self.w.items()}
        self.count, self.running = tf.Variable(0.0), {}
        self.fixed = {"matrix": _sparse(**fixed)} if fixed else {}

    def update(self, gradients: dict[str, Any]) -> None:
        """SGD moves the rows of a table that the batch names; Adam, as in the other libraries, moves every row."""
        rate = self.workload.rate
        if self.workload.does == "SGD":
            for name, g in gradients.items():
                if isinstance(g, tf.IndexedSlices):
                    self.w[name].scatter_sub(tf.IndexedSlices(rate * g.values, g.indices))
                else:
                    raw_ops.ResourceApplyGradientDescent(var=self.w[name].handle, alpha=rate, delta=g)
            return
        count = self.count.assign_add(1.0)
        powers = {"beta1_power": 0.9**count, "beta2_power": 0.999**count}
        epsilon = 1e-8 * tf.sqrt(1 - powers["beta2_power"])  # TensorFlow adds it before it corrects the bias
        for name, g in gradients.items():
            m, v = (moment.handle for moment in self.moments[name])
            raw_ops.ResourceApplyAdam(var=self.w[name].handle, m=m, v=v, lr=rate, beta1=0.9, beta2=0.999,
                                      epsilon=epsilon, grad=tf.convert_to_tensor(g), **powers)  # fmt: skip

    def weight(self, name: str, *shape: int) -> Tensor:
        return self.w[name]

    def linear(self, x: Tensor, name: str, inputs: int, outputs: int, bias: bool = True) -> Tensor:
        y = tf.matmul(x, self.w[f"{name}.weight"])
        return nn.bias_add(y, self.w[f"{name}.bias"]) if bias else y

    def conv(self, x: Tensor, name: str, inputs: int, outputs: int, size: int, *, stride: int = 1, groups: int = 1,
             dilation: int = 1, padding: int | None = None, bias: bool = True) -> Tensor:  # fmt: skip
        kernel, side = self.w[f"{name}.weight"], dilation * (size // 2) if padding is None else padding
        sides: Any = [[0, 0], [side, side], [side, side], [0, 0]]
        if stride == 1 and padding is None:
            sides = "SAME"
        elif groups > 1:  # only then sides may not be named
            x, sides = tf.pad(x, sides), "VALID"
        if groups == inputs == outputs:
            y = nn.depthwise_conv2d(x, tf.transpose(kernel, (0, 1, 3, 2)), (1, stride, stride, 1), sides)
        elif groups > 1:  # such a convolution has no gradient on a CPU
            parts = zip(tf.split(x, groups, -1), tf.split(kernel, groups, -1))
            y = tf.concat([nn.conv2d(part, own, stride, sides) for part, own in parts], -1)
        else:  # nor has a dilated one, unless `convolution` rewrites it
            y = (
                nn.convolution(x, kernel, None, sides, dilations=dilation)
                if dilation > 1
                else nn.conv2d(x, kernel, stride, sides)
            )
        return nn.bias_add(y, self.w[f"{name}.bias"]) if bias else y

    def conv_transpose(
        self, x: Tensor, name: str, inputs: int, outputs: int, size: int, stride: int, padding: int = 0
    ) -> Tensor:
        grown = (x.shape[1] - 1) * stride + size - 2 * padding
        sides = [[0, 0], [padding, padding], [padding, padding], [0, 0]]
        shape = (tf.shape(x)[0], grown, grown, outputs)
        y = nn.conv2d_transpose(x, self.w[f"{name}.weight"], shape, stride, sides)
        return nn.bias_add(y, self.w[f"{name}.bias"])

    def batch_norm(self, x: Tensor, name: str, size: int) -> Tensor:
        if name not in self.running:
            with tf.init_scope():
                self.running[name] = tf.Variable(tf.zeros(size)), tf.Variable(tf.ones(size))
        images, running = (x if len(x.shape) == 4 else x[:, None, None]), self.running[name]
        weights = self.w[f"{name}.weight"], self.w[f"{name}.bias"]
        given = {} if self.training else {"mean": running[0], "variance": running[1]}
        y, *fresh = tf.compat.v1.nn.fused_batch_norm(images, *weights, epsilon=1e-5, is_training=self.training, **given)
        for old, new in zip(running, fresh) if self.training else ():
            old.assign(0.9 * old + 0.1 * new)
        return tf.reshape(y, tf.shape(x))

    def layer_norm(self, x: Tensor, name: str, size: int) -> Tensor:
        return _normalized(x, -1) * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def group_norm(self, x: Tensor, name: str, size: int, groups: int) -> Tensor:
        split = tf.reshape(x, (-1, x.shape[1] * x.shape[2], groups, size // groups))
        y = tf.reshape(_normalized(split, (1, 3)), tf.shape(x))
        return y * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def embedding(self, ids: Tensor, name: str, rows: int, size: int) -> Tensor:
        return nn.embedding_lookup(self.w[name], ids)

    def bag(self, ids: Tensor, name: str, rows: int, size: int) -> Tensor:
        return tf.reduce_sum(nn.embedding_lookup(self.w[name], ids), 1)

    def attention(self, qkv: Tensor, heads: int, causal: bool, mask: Tensor | None) -> Tensor:
        length = qkv.shape[1]
        q, k, v = tf.unstack(tf.transpose(tf.reshape(qkv, (-1, length, 3, heads, 64)), (2, 0, 3, 1, 4)))
        scores = tf.matmul(q, k, transpose_b=True) * 64**-0.5
        keys = mask[:, None, None] if mask is not None else None
        if causal:
            keys = tf.linalg.band_part(tf.ones((length, length), tf.bool), -1, 0)
        scores = scores if keys is None else tf.where(keys, scores, -1e9)
        attended = tf.transpose(tf.matmul(nn.softmax(scores), v), (0, 2, 1, 3))
        return tf.reshape(attended, (-1, length, 64 * heads))

    def lstm(self, x: Tensor, name: str, inputs: int, hidden: int, both: bool) -> tuple[Tensor, Tensor]:
        def cell(gates: Tensor, recurrent: Tensor, _: None, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            i, f, g, o = tf.split(gates + tf.matmul(h, recurrent), 4, -1)
            c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
            return tf.sigmoid(o) * tf.tanh(c), c

        return self._unrolled(cell, x, name, hidden, both, states=2)

    def gru(self, x: Tensor, name: str, inputs: int, hidden: int, both: bool) -> tuple[Tensor, Tensor]:
        def cell(gates: Tensor, recurrent: Tensor, bias: Tensor, h: Tensor) -> tuple[Tensor]:
            (xr, xz, xn), (hr, hz, hn) = tf.split(gates, 3, -1), tf.split(tf.matmul(h, recurrent) + bias, 3, -1)
            r, z = tf.sigmoid(xr + hr), tf.sigmoid(xz + hz)
            n = tf.tanh(xn + r * hn)
            return (n + z * (h - n),)

        return self._unrolled(cell, x, name, hidden, both, states=1)

    def _unrolled(self, cell: Callable[..., Any], x: Tensor, name: str, hidden: int, both: bool, states: int) -> Any:
        """The sequence and the last state of a cell, one way or both ways side by side."""
        sequences, last = [], []
        for way in ("forward", "backward") if both else ("forward",):
            parts, turn = ("inputs", "bias", "recurrent", "recurrent_bias"), 1 if way == "forward" else -1
            inputs, bias, recurrent, other = (self.w.get(f"{name}.{way}.{part}") for part in parts)
            carry, outputs = (tf.zeros((tf.shape(x)[0], hidden)),) * states, []
            for gates in tf.unstack(tf.matmul(x, inputs) + bias, axis=1)[::turn]:
                carry = cell(gates, recurrent, other, *carry)
                outputs.append(carry[0])
            sequences.append(tf.stack(outputs[::turn], 1))
            last.append(carry[0])
        return tf.concat(sequences, -1), tf.concat(last, -1)

    def spread(self, x: Tensor, matrix: tf.SparseTensor) -> Tensor:
        return tf.sparse.sparse_dense_matmul(matrix, x)

    def tanh_gelu(self, x: Tensor) -> Tensor:
        return nn.gelu(x, approximate=True)

    def max_pool(self, x: Tensor, size: int) -> Tensor:
        return nn.max_pool2d(x, size, size, "VALID")

    def images(self, x: Tensor) -> Tensor:
        return tf.transpose(x, OURS_TO_LAST)

    def grid(self, x: Tensor, channels: int, side: int) -> Tensor:
        return self.images(tf.reshape(x, (-1, channels, side, side)))

    def flat(self, x: Tensor) -> Tensor:
        x = tf.transpose(x, LAST_TO_OURS) if len(x.shape) == 4 else x
        return tf.reshape(x, (-1, x.shape[1:].num_elements()))

    def pooled(self, x: Tensor) -> Tensor:
        return tf.reduce_mean(x, (1, 2))

    def sequence(self, x: Tensor) -> Tensor:
        return tf.reshape(x, (-1, x.shape[1] * x.shape[2], x.shape[3]))

    def first(self, x: Tensor) -> Tensor:
        return x[:, 0]

    def joined(self, *images: Tensor) -> Tensor:
        return tf.concat(images, -1)

    concat = joined


def _normalized(x: Tensor, axes: int | tuple[int, ...]) -> Tensor:
    mean, variance = nn.moments(x, axes, keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-5)


def _sparse(rows: Any, columns: Any, values: Any) -> tf.SparseTensor:
    size = int(rows[-1]) + 1
    return tf.SparseTensor(tf.stack([rows, columns], 1), values, (size, size))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda x, t: tf.reduce_mean(nn.sparse_softmax_cross_entropy_with_logits(t, x)),
    "binary_cross_entropy": lambda x, t: tf.reduce_mean(nn.sigmoid_cross_entropy_with_logits(t, x)),
    "squared_error": lambda x, t: tf.reduce_mean(tf.square(x - t)),
}

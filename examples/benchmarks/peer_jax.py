"""The words of the benchmark's models in JAX, and one jitted step that gives its old state away.

Written as one writes them by default: `lax.scan` for recurrent layers, `segment_sum` for the sparse product, dense
gradients. Running statistics of batch norm go through the step as its other results do.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

if os.environ.get("OMP_NUM_THREADS") == "1":  # XLA reads it when it starts
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, nn
from workloads import Workload

Weights = dict[str, Array]
State = tuple[Weights, ...]
IMAGES = ("NCHW", "OIHW", "NCHW")


def make(workload: Workload, variant: str) -> Callable[[], Any]:
    """What makes one step and returns its loss or its outputs; the only `variant` is "default"."""
    weights = {name: jnp.array(value) for name, value in workload.weights().items()}
    fixed = {name: jnp.asarray(array) for name, array in workload.fixed().items()}
    moments = 2 if workload.does == "Adam" else 0
    state: State = (weights, *(jax.tree.map(jnp.zeros_like, weights) for _ in range(moments)))

    def outputs(weights: Weights, running: Weights, t: Any = None, **inputs: Array) -> tuple[Array, Weights]:
        words = Words(workload, weights, running)
        made = workload.kind.model(words, workload.s, **inputs, **fixed)
        return made if t is None else LOSSES[workload.kind.loss](made, t), words.running

    def advance(state: State, running: Weights, count: Array, batch: Weights) -> tuple[State, Weights, Array]:
        (loss, kept), gradients = jax.value_and_grad(outputs, has_aux=True)(state[0], running, **batch)
        return UPDATES[workload.does](state, gradients, count, workload.rate), kept, loss

    made = [{k: jnp.asarray(v) for k, v in batch.items()} for batch in workload.batches()]
    _, shapes = jax.eval_shape(outputs, weights, {}, **made[0])
    running = {name: jnp.full(kept.shape, float(name.endswith(".var"))) for name, kept in shapes.items()}
    batches = itertools.cycle(made)
    if not workload.trains:
        infer = jax.jit(outputs)
        return lambda: np.asarray(infer(weights, running, **next(batches))[0])
    compiled, count = jax.jit(advance, donate_argnums=(0, 1)), itertools.count(1)

    def step() -> float:
        nonlocal state, running
        state, running, loss = compiled(state, running, float(next(count)), next(batches))
        return float(loss)

    return step


def versions() -> dict[str, str]:
    return {"jax": jax.__version__}


def sgd(state: State, gradients: Weights, t: Array, rate: float) -> State:
    return (jax.tree.map(lambda p, g: p - rate * g, state[0], gradients),)


def adam(state: State, gradients: Weights, t: Array, rate: float) -> State:
    weights, m, v = state
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, gradients)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, gradients)
    root = jnp.sqrt(1 - 0.999**t)
    rate = rate * root / (1 - 0.9**t)
    return jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8 * root), weights, m, v), m, v


class Words:
    """Layers on these weights; `running` holds the statistics of batch norm: those given, then the new ones."""

    relu, tanh, softmax = staticmethod(nn.relu), staticmethod(jnp.tanh), staticmethod(nn.softmax)
    sum, mean = staticmethod(jnp.sum), staticmethod(jnp.mean)

    def __init__(self, workload: Workload, weights: Weights, running: Weights) -> None:
        self.w, self.running, self.training = weights, dict(running), workload.trains

    def weight(self, name: str, *shape: int) -> Array:
        return self.w[name]

    def linear(self, x: Array, name: str, inputs: int, outputs: int, bias: bool = True) -> Array:
        y = x @ self.w[f"{name}.weight"]
        return y + self.w[f"{name}.bias"] if bias else y

    def conv(self, x: Array, name: str, inputs: int, outputs: int, size: int, *, stride: int = 1, groups: int = 1,
             dilation: int = 1, padding: int | None = None, bias: bool = True) -> Array:  # fmt: skip
        sides = [(dilation * (size // 2) if padding is None else padding,) * 2] * 2
        y = lax.conv_general_dilated(x, self.w[f"{name}.weight"], (stride,) * 2, sides, rhs_dilation=(dilation,) * 2,
                                     dimension_numbers=IMAGES, feature_group_count=groups)  # fmt: skip
        return y + self.w[f"{name}.bias"][:, None, None] if bias else y

    def conv_transpose(
        self, x: Array, name: str, inputs: int, outputs: int, size: int, stride: int, padding: int = 0
    ) -> Array:
        kernel, sides = self.w[f"{name}.weight"], [(size - 1 - padding,) * 2] * 2
        flipped = jnp.flip(kernel, (2, 3)).swapaxes(0, 1)
        y = lax.conv_general_dilated(x, flipped, (1, 1), sides, lhs_dilation=(stride,) * 2, dimension_numbers=IMAGES)
        return y + self.w[f"{name}.bias"][:, None, None]

    def batch_norm(self, x: Array, name: str, size: int) -> Array:
        axes, shape = (0, *range(2, x.ndim)), (-1, *[1] * (x.ndim - 2))
        mean, var = self.running.get(f"{name}.mean", 0.0), self.running.get(f"{name}.var", 1.0)
        if self.training:
            count = x.size // size
            fresh = x.mean(axes), x.var(axes)
            self.running[f"{name}.mean"] = lax.stop_gradient(0.9 * mean + 0.1 * fresh[0])
            self.running[f"{name}.var"] = lax.stop_gradient(0.9 * var + 0.1 * fresh[1] * count / max(1, count - 1))
            mean, var = fresh
        scale = self.w[f"{name}.weight"] / jnp.sqrt(var + 1e-5)
        shift = self.w[f"{name}.bias"] - mean * scale
        return x * scale.reshape(shape) + shift.reshape(shape)

    def layer_norm(self, x: Array, name: str, size: int) -> Array:
        return _normalized(x) * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def group_norm(self, x: Array, name: str, size: int, groups: int) -> Array:
        y = _normalized(x.reshape(len(x), groups, -1)).reshape(x.shape)
        return y * self.w[f"{name}.weight"][:, None, None] + self.w[f"{name}.bias"][:, None, None]

    def embedding(self, ids: Array, name: str, rows: int, size: int) -> Array:
        return self.w[name][ids]

    def bag(self, ids: Array, name: str, rows: int, size: int) -> Array:
        return self.w[name][ids].sum(1)

    def attention(self, qkv: Array, heads: int, causal: bool, mask: Array | None) -> Array:
        batch, length, _ = qkv.shape
        q, k, v = (qkv.reshape(batch, length, 3, heads, 64)[:, :, i] for i in range(3))
        keys = None if mask is None else mask[:, None, None]
        return nn.dot_product_attention(q, k, v, mask=keys, is_causal=causal).reshape(batch, length, 64 * heads)

    def lstm(self, x: Array, name: str, inputs: int, hidden: int, both: bool) -> tuple[Array, Array]:
        def cell(carry: tuple[Array, ...], gates: Array, recurrent: Array, _: Array | None) -> tuple[Array, ...]:
            h, c = carry
            i, f, g, o = jnp.split(gates + h @ recurrent, 4, axis=-1)
            c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
            return nn.sigmoid(o) * jnp.tanh(c), c

        return self._scanned(cell, x, name, hidden, both, states=2)

    def gru(self, x: Array, name: str, inputs: int, hidden: int, both: bool) -> tuple[Array, Array]:
        def cell(carry: tuple[Array, ...], gates: Array, recurrent: Array, bias: Array) -> tuple[Array, ...]:
            (h,) = carry
            (xr, xz, xn), (hr, hz, hn) = jnp.split(gates, 3, axis=-1), jnp.split(h @ recurrent + bias, 3, axis=-1)
            r, z = nn.sigmoid(xr + hr), nn.sigmoid(xz + hz)
            n = jnp.tanh(xn + r * hn)
            return (n + z * (h - n),)

        return self._scanned(cell, x, name, hidden, both, states=1)

    def _scanned(self, cell: Callable[..., Any], x: Array, name: str, hidden: int, both: bool, states: int) -> Any:
        """The sequence and the last state of a cell, one way or both ways side by side."""
        sequences, last = [], []
        for way in ("forward", "backward") if both else ("forward",):
            parts = ("inputs", "bias", "recurrent", "recurrent_bias")
            inputs, bias, recurrent, other = (self.w.get(f"{name}.{way}.{part}") for part in parts)

            def advance(carry: Any, gates: Array, recurrent: Any = recurrent, other: Any = other) -> Any:
                carry = cell(carry, gates, recurrent, other)
                return carry, carry[0]

            zeros = (jnp.zeros((len(x), hidden), x.dtype),) * states
            gates = (x @ inputs + bias).swapaxes(0, 1)
            carry, outputs = lax.scan(advance, zeros, gates, reverse=way == "backward")
            sequences.append(outputs.swapaxes(0, 1))
            last.append(carry[0])
        return jnp.concatenate(sequences, -1), jnp.concatenate(last, -1)

    def spread(self, x: Array, rows: Array, columns: Array, values: Array) -> Array:
        return jax.ops.segment_sum(values[:, None] * x[columns], rows, len(x), indices_are_sorted=True)

    def gelu(self, x: Array) -> Array:
        return nn.gelu(x, approximate=False)

    def tanh_gelu(self, x: Array) -> Array:
        return nn.gelu(x, approximate=True)

    def max_pool(self, x: Array, size: int) -> Array:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, size, size), (1, 1, size, size), "VALID")

    def images(self, x: Array) -> Array:
        return x

    def grid(self, x: Array, channels: int, side: int) -> Array:
        return x.reshape(-1, channels, side, side)

    def flat(self, x: Array) -> Array:
        return x.reshape(len(x), -1)

    def pooled(self, x: Array) -> Array:
        return x.mean((2, 3))

    def sequence(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1).swapaxes(1, 2)

    def first(self, x: Array) -> Array:
        return x[:, 0]

    def joined(self, *images: Array) -> Array:
        return jnp.concatenate(images, 1)

    def concat(self, *xs: Array) -> Array:
        return jnp.concatenate(xs, -1)


def _normalized(x: Array) -> Array:
    centered = x - x.mean(-1, keepdims=True)
    return centered / jnp.sqrt(jnp.mean(centered * centered, -1, keepdims=True) + 1e-5)


def _cross_entropy(logits: Array, t: Array) -> Array:
    own = jnp.take_along_axis(logits, t[..., None], axis=-1)[..., 0]
    return jnp.mean(nn.logsumexp(logits, axis=-1) - own)


UPDATES: dict[str, Callable[[State, Weights, Array, float], State]] = {"SGD": sgd, "Adam": adam}
LOSSES: dict[str, Callable[[Array, Array], Array]] = {
    "cross_entropy": _cross_entropy,
    "binary_cross_entropy": lambda x, t: jnp.mean(jnp.maximum(x, 0) - x * t + jnp.log1p(jnp.exp(-jnp.abs(x)))),
    "squared_error": lambda x, t: jnp.mean((x - t) ** 2),
}

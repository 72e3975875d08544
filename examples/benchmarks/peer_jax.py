"""The benchmark's models in JAX: plain functions of the weights, and one jitted step that gives its old state away.

Written as one writes them by default: `lax.scan` for the LSTM, `segment_sum` for the sparse product, dense gradients.
Ignored on purpose: ResNet, whose running statistics would have to go round the gradient; kernels by hand.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

if os.environ.get("OMP_NUM_THREADS") == "1":  # XLA reads it when it starts
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax
import jax.numpy as jnp
from jax import lax, nn
from workloads import Workload

Weights = dict[str, jax.Array]
State = tuple[Weights, ...]


def make(workload: Workload, variant: str) -> Callable[[], float]:
    """A function that makes one training step and returns its loss; the only `variant` is "default"."""
    model, rate = MODELS[workload.name], workload.learning_rate
    fixed = {name: jnp.asarray(array) for name, array in workload.fixed.items()}
    update = {"sgd": sgd, "adam": adam}[workload.optimizer]

    def advance(state: State, t: jax.Array, batch: Weights) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda weights: model(weights, **batch, **fixed))(state[0])
        return update(state, gradients, t, rate), loss

    compiled = jax.jit(advance, donate_argnums=0)
    weights = {name: jnp.array(value) for name, value in workload.weights.items()}
    moments = 2 if workload.optimizer == "adam" else 0
    state: State = (weights, *(jax.tree.map(jnp.zeros_like, weights) for _ in range(moments)))
    batches = itertools.cycle([{k: jnp.asarray(v) for k, v in batch.items()} for batch in workload.batches])
    count = itertools.count(1)

    def step() -> float:
        nonlocal state
        state, loss = compiled(state, float(next(count)), next(batches))
        return float(loss)

    return step


def versions() -> dict[str, str]:
    return {"jax": jax.__version__}


def sgd(state: State, gradients: Weights, t: jax.Array, rate: float) -> State:
    return (jax.tree.map(lambda p, g: p - rate * g, state[0], gradients),)


def adam(state: State, gradients: Weights, t: jax.Array, rate: float) -> State:
    weights, m, v = state
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, gradients)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, gradients)
    root = jnp.sqrt(1 - 0.999**t)
    rate = rate * root / (1 - 0.9**t)
    return jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8 * root), weights, m, v), m, v


def mlp(weights: Weights, x: jax.Array, t: jax.Array) -> jax.Array:
    return _cross_entropy(_dense(weights, x), t)


def lenet(weights: Weights, x: jax.Array, t: jax.Array) -> jax.Array:
    for name, padding in (("conv.0", 2), ("conv.1", 0)):
        sides = [(padding, padding)] * 2
        layout = ("NCHW", "OIHW", "NCHW")
        x = lax.conv_general_dilated(x, weights[f"{name}.weight"], (1, 1), sides, dimension_numbers=layout)
        x = nn.relu(x + weights[f"{name}.bias"][:, None, None])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return _cross_entropy(_dense(weights, x.reshape(len(x), -1)), t)


def lstm(weights: Weights, x: jax.Array, t: jax.Array) -> jax.Array:
    hidden = weights["lstm.weight_hh"].shape[0]

    def cell(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        h, c = carry
        gates = x @ weights["lstm.weight_ih"] + h @ weights["lstm.weight_hh"] + weights["lstm.bias"]
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
        return (nn.sigmoid(o) * jnp.tanh(c), c), None

    zeros = jnp.zeros((len(x), hidden), x.dtype)
    (h, _), _ = lax.scan(cell, (zeros, zeros), x.swapaxes(0, 1))
    return _cross_entropy(_dense(weights, h), t)


def gpt(weights: Weights, x: jax.Array, t: jax.Array) -> jax.Array:
    h = weights["tokens"][x] + weights["positions"]
    for block in range(sum(name.endswith("qkv.weight") for name in weights)):
        h = _block(weights, f"blocks.{block}", h)
    return _cross_entropy(_norm(weights, "norm", h) @ weights["head.weight"], t)


def wide_deep(weights: Weights, ids: jax.Array, x: jax.Array, t: jax.Array) -> jax.Array:
    embedded = weights["table"][ids].reshape(len(ids), -1)
    logits = _dense(weights, jnp.concatenate([embedded, x], axis=1)) + _linear(weights, "wide", x)
    return jnp.mean(jnp.maximum(logits, 0) - logits * t + jnp.log1p(jnp.exp(-jnp.abs(logits))))


def gcn(weights: Weights, x: jax.Array, t: jax.Array, **matrix: jax.Array) -> jax.Array:
    h = _spread(x @ weights["layers.0.weight"], **matrix) + weights["layers.0.bias"]
    logits = _spread(nn.relu(h) @ weights["layers.1.weight"], **matrix) + weights["layers.1.bias"]
    return _cross_entropy(logits, t)


MODELS: dict[str, Callable[..., jax.Array]] = {
    "tiny_mlp": mlp,
    "mlp_sgd": mlp,
    "mlp_adam": mlp,
    "lenet": lenet,
    "lstm": lstm,
    "gpt": gpt,
    "gpt_256": gpt,
    "wide_deep": wide_deep,
    "gcn": gcn,
}


def _spread(h: jax.Array, rows: jax.Array, columns: jax.Array, values: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(values[:, None] * h[columns], rows, len(h), indices_are_sorted=True)


def _block(weights: Weights, name: str, h: jax.Array) -> jax.Array:
    batch, length, d = h.shape
    qkv = _linear(weights, f"{name}.qkv", _norm(weights, f"{name}.norm1", h))
    q, k, v = (qkv.reshape(batch, length, 3, d // 64, 64)[:, :, i] for i in range(3))
    attended = nn.dot_product_attention(q, k, v, is_causal=True).reshape(batch, length, d)
    h = h + _linear(weights, f"{name}.proj", attended)
    up = nn.gelu(_linear(weights, f"{name}.up", _norm(weights, f"{name}.norm2", h)), approximate=True)
    return h + _linear(weights, f"{name}.down", up)


def _norm(weights: Weights, name: str, x: jax.Array) -> jax.Array:
    centered = x - x.mean(-1, keepdims=True)
    deviation = jnp.sqrt(jnp.mean(centered * centered, -1, keepdims=True) + 1e-5)
    return centered / deviation * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _linear(weights: Weights, name: str, x: jax.Array) -> jax.Array:
    return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _dense(weights: Weights, x: jax.Array) -> jax.Array:
    depth = sum(name.startswith("layers.") for name in weights) // 2
    for layer in range(depth):
        x = _linear(weights, f"layers.{layer}", x)
        x = nn.relu(x) if layer < depth - 1 else x
    return x


def _cross_entropy(logits: jax.Array, t: jax.Array) -> jax.Array:
    own = jnp.take_along_axis(logits, t[..., None], axis=-1)[..., 0]
    return jnp.mean(nn.logsumexp(logits, axis=-1) - own)

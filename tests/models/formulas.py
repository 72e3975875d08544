"""What models are made of, as plain formulas of NumPy in float64: no line here comes from hetu."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

Weights = Iterator[np.ndarray]


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def linear(x: np.ndarray, weights: Weights, bias: bool = True) -> np.ndarray:
    y = x @ next(weights)
    return y + next(weights) if bias else y


def conv(x: np.ndarray, weights: Weights, *, padding: int = 0, stride: int = 1, bias: bool = True) -> np.ndarray:
    """Images (n, c, h, w), kernels (o, c / groups, k, k)."""
    w = next(weights)
    groups = x.shape[1] // w.shape[1]
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], axis=(2, 3))[:, :, ::stride, ::stride]
    parts = zip(np.split(windows, groups, axis=1), np.split(w, groups))
    y = np.concatenate([np.einsum("nchwij,ocij->nohw", *part) for part in parts], axis=1)
    return y + next(weights)[:, None, None] if bias else y


def max_pool(x: np.ndarray) -> np.ndarray:
    n, c, h, w = x.shape
    return x[:, :, : h // 2 * 2, : w // 2 * 2].reshape(n, c, h // 2, 2, w // 2, 2).max(axis=(3, 5))


def up(x: np.ndarray, weights: Weights) -> np.ndarray:
    """A transposed convolution of 2 x 2 with stride 2: each pixel becomes four."""
    w, bias = next(weights), next(weights)
    n, _, height, width = x.shape
    y = np.einsum("nchw,coij->nohiwj", x, w).reshape(n, w.shape[1], 2 * height, 2 * width)
    return y + bias[:, None, None]


def batch_norm(x: np.ndarray, weights: Weights) -> np.ndarray:
    """By the running statistics; axis 1 has the channels."""
    scale, bias, mean, var = (next(weights)[:, None, None] for _ in range(4))
    return (x - mean) / np.sqrt(var + 1e-5) * scale + bias


def layer_norm(x: np.ndarray, weights: Weights, epsilon: float = 1e-5) -> np.ndarray:
    scaled = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + epsilon)
    return scaled * next(weights) + next(weights)


def heads_of(x: np.ndarray, heads: int) -> np.ndarray:
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def mixed(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray | None = None) -> np.ndarray:
    """Values (n, heads, time, d) by how queries meet keys, heads in a row; causal unless told what is seen."""
    n, _, time, d = q.shape
    scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(d)
    seen = np.tril(np.ones((time, time), bool)) if seen is None else seen
    return (softmax(np.where(seen, scores, -np.inf)) @ v).transpose(0, 2, 1, 3).reshape(n, time, -1)


def attention(x: np.ndarray, weights: Weights, heads: int, seen: np.ndarray | None = None) -> np.ndarray:
    """Self-attention of (n, time, features), causal unless told what is seen."""
    return linear(mixed(*(heads_of(linear(x, weights), heads) for _ in range(3)), seen), weights)


def block(x: np.ndarray, weights: Weights, heads: int, seen: np.ndarray | None = None) -> np.ndarray:
    x = x + attention(layer_norm(x, weights), weights, heads, seen)
    return x + linear(gelu(linear(layer_norm(x, weights), weights)), weights)


def lstm(x: np.ndarray, weights: Weights) -> np.ndarray:
    """All outputs (n, time, units) from a state of zeros."""
    return lstm_states(x, weights)[0]


def lstm_states(x: np.ndarray, weights: Weights, first: tuple[np.ndarray, ...] = ()) -> tuple[np.ndarray, ...]:
    """All outputs, and the last h and c."""
    weight, bias = next(weights), next(weights)
    h, c = first or [np.zeros((len(x), len(bias) // 4))] * 2
    outputs = []
    for t in range(x.shape[1]):
        i, f, g, o = np.split(np.concatenate([x[:, t], h], axis=1) @ weight + bias, 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        outputs.append(h)
    return np.stack(outputs, axis=1), h, c


def dense(edges: np.ndarray, nodes: int, own: bool) -> np.ndarray:
    """The adjacency matrix of undirected edges, with ones on the diagonal if a node is its `own` neighbor."""
    a = np.eye(nodes) if own else np.zeros((nodes, nodes))
    for i, j in edges:
        a[i, j] += 1
        a[j, i] += 1
    return a

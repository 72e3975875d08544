"""What is trained in the benchmark: batches, initial weights and hyperparameters, from fixed seeds, in numpy alone.

Every peer builds the same model from these arrays, so that their first losses agree to 5 digits. Weights carry
dotted names; matrices are stored as (in, out), convolutions as (out, in, height, width). The data is random: speed
is measured here, never accuracy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

Arrays = dict[str, np.ndarray]
F32 = np.float32


@dataclass(frozen=True)
class Workload:
    """One model with its data. A batch is a dict of the inputs of one step; steps go round the batches."""

    name: str
    summary: str
    weights: Arrays
    batches: tuple[Arrays, ...]
    optimizer: str
    learning_rate: float
    fixed: Arrays = field(default_factory=dict)  # what is the same in all steps and not trained


def mlp_sgd() -> Workload:
    return _mlp("mlp_sgd", (784, 256, 256, 10), 128, "sgd", 0.1)


def mlp_adam() -> Workload:
    return _mlp("mlp_adam", (784, 256, 256, 10), 128, "adam", 1e-3)


def tiny_mlp() -> Workload:
    """So small that only the overhead per operation counts."""
    return _mlp("tiny_mlp", (32, 32, 32, 10), 16, "sgd", 0.1)


def lenet() -> Workload:
    """Two convolutions with relu and 2x2 max-pooling, then three linear layers, on images of 1x28x28."""
    rng = np.random.default_rng(1)
    weights = _convolution(rng, "conv.0", 1, 6, 5) | _convolution(rng, "conv.1", 6, 16, 5)
    weights |= _linear_stack(rng, (400, 120, 84, 10))
    batches = tuple({"x": rng.standard_normal((128, 1, 28, 28), F32), "t": rng.integers(0, 10, 128)} for _ in range(8))
    return Workload("lenet", "LeNet 1x28x28, batch 128, SGD", weights, batches, "sgd", 0.05)


def resnet(batch: int = 32) -> Workload:
    """ResNet-18 for images of 3x32x32: a 3x3 stem and four stages of two blocks. K. He et al., CVPR 2016."""
    rng = np.random.default_rng(5)
    weights = _conv_norm(rng, "stem", 3, 64, 3)
    for stage, (fan_in, fan_out) in enumerate(itertools.pairwise((64, 64, 128, 256, 512))):
        for block in range(2):
            prefix, before = f"stages.{stage}.{block}", fan_in if block == 0 else fan_out
            weights |= _conv_norm(rng, f"{prefix}.first", before, fan_out, 3)
            weights |= _conv_norm(rng, f"{prefix}.second", fan_out, fan_out, 3)
            if before != fan_out:
                weights |= _conv_norm(rng, f"{prefix}.shortcut", before, fan_out, 1)
    weights |= _linear_stack(rng, (512, 10))
    batches = tuple(
        {"x": rng.standard_normal((batch, 3, 32, 32), F32), "t": rng.integers(0, 10, batch)} for _ in range(8)
    )
    return Workload("resnet", f"ResNet-18 3x32x32, batch {batch}, SGD", weights, batches, "sgd", 1e-3)


def lstm() -> Workload:
    """The last hidden state of 28 steps of 28 features, classified. Gates lie in the order i, f, g, o; one bias."""
    rng, hidden, features = np.random.default_rng(2), 128, 28
    bound = hidden**-0.5
    weights = {
        "lstm.weight_ih": rng.uniform(-bound, bound, (features, 4 * hidden)).astype(F32),
        "lstm.weight_hh": rng.uniform(-bound, bound, (hidden, 4 * hidden)).astype(F32),
        "lstm.bias": np.zeros(4 * hidden, F32),
    } | _linear_stack(rng, (hidden, 10))
    batches = tuple(
        {"x": rng.standard_normal((128, 28, features), F32), "t": rng.integers(0, 10, 128)} for _ in range(8)
    )
    return Workload("lstm", "LSTM 128, 28 steps of 28, batch 128, SGD", weights, batches, "sgd", 0.1)


def gpt() -> Workload:
    return sized_gpt("gpt", 128)


def gpt_256() -> Workload:
    return sized_gpt("gpt_256", 256)


def sized_gpt(
    name: str, d: int, *, vocabulary: int = 1000, depth: int = 4, length: int = 128, batch: int = 16
) -> Workload:
    """Pre-norm blocks with causal attention (heads of 64) and a tanh-gelu MLP; the head has its own matrix, no bias."""
    rng = np.random.default_rng(3)
    weights = {"tokens": _normal(rng, (vocabulary, d)), "positions": _normal(rng, (length, d))}
    for block in range(depth):
        prefix = f"blocks.{block}"
        weights |= _norm(f"{prefix}.norm1", d) | _norm(f"{prefix}.norm2", d)
        for part, fan_in, fan_out in (("qkv", d, 3 * d), ("proj", d, d), ("up", d, 4 * d), ("down", 4 * d, d)):
            weights[f"{prefix}.{part}.weight"] = _normal(rng, (fan_in, fan_out))
            weights[f"{prefix}.{part}.bias"] = np.zeros(fan_out, F32)
    weights |= _norm("norm", d) | {"head.weight": _normal(rng, (d, vocabulary))}
    texts = rng.integers(0, vocabulary, (8, batch, length + 1))
    batches = tuple({"x": text[:, :-1].copy(), "t": text[:, 1:].copy()} for text in texts)
    return Workload(
        name, f"GPT d{d}, {depth} layers, {length} tokens, batch {batch}, Adam", weights, batches, "adam", 1e-3
    )


def wide_deep(rows: int = 1_000_000, batch: int = 1024) -> Workload:
    """Click prediction: an MLP over 26 embedded fields and 13 numbers, plus a linear term of the numbers.

    All fields share one table, each field its own range of them; ids follow a Pareto distribution, as in
    click logs, so that a few rows are in every batch.
    """
    rng, fields, dim, numbers = (np.random.default_rng(4), 26, 16, 13)
    weights = {"table": rng.standard_normal((rows, dim), F32) * F32(0.01)}
    weights |= _linear_stack(rng, (fields * dim + numbers, 256, 256, 256, 1)) | _linear(rng, "wide", numbers, 1)
    per_field = rows // fields

    def ids() -> np.ndarray:
        skewed = np.minimum(10 * rng.pareto(1.0, (batch, fields)), per_field - 1).astype(np.int64)
        return skewed + per_field * np.arange(fields)

    batches = tuple(
        {"ids": ids(), "x": rng.standard_normal((batch, numbers), F32), "t": rng.integers(0, 2, (batch, 1)).astype(F32)}
        for _ in range(8)
    )
    return Workload(
        "wide_deep", f"Wide&Deep, 26 fields x 16, {rows:,} rows, batch {batch}, SGD", weights, batches, "sgd", 0.1
    )


def gcn() -> Workload:
    """Two graph convolutions over all nodes of one graph, whose edges prefer some nodes, normalized symmetrically."""
    rng, nodes, edges, sizes = np.random.default_rng(6), 20_000, 100_000, (128, 64, 16)
    ends = (nodes * rng.random(edges) ** 2).astype(np.int64), rng.integers(0, nodes, edges)
    both = (ends[0] * nodes + ends[1], ends[1] * nodes + ends[0], np.arange(nodes) * (nodes + 1))
    rows, columns = np.divmod(np.unique(np.concatenate(both)), nodes)  # both directions and a loop at each node
    degree = np.bincount(rows).astype(F32)
    fixed = {"rows": rows, "columns": columns, "values": (degree[rows] * degree[columns]) ** F32(-0.5)}
    batch = {"x": rng.standard_normal((nodes, sizes[0]), F32), "t": rng.integers(0, sizes[-1], nodes)}
    summary = f"GCN {'-'.join(map(str, sizes))}, {nodes} nodes, {len(rows)} entries, Adam"
    return Workload("gcn", summary, _linear_stack(rng, sizes), (batch,), "adam", 1e-3, fixed)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    make.__name__: make for make in (tiny_mlp, mlp_sgd, mlp_adam, lenet, resnet, lstm, gpt, gpt_256, wide_deep, gcn)
}


def _mlp(name: str, sizes: tuple[int, ...], batch: int, optimizer: str, learning_rate: float) -> Workload:
    rng = np.random.default_rng(0)
    weights = _linear_stack(rng, sizes)
    batches = tuple(
        {"x": rng.standard_normal((batch, sizes[0]), F32), "t": rng.integers(0, sizes[-1], batch)} for _ in range(8)
    )
    label = {"sgd": "SGD", "adam": "Adam"}[optimizer]
    summary = f"MLP {'-'.join(map(str, sizes))}, batch {batch}, {label}"
    return Workload(name, summary, weights, batches, optimizer, learning_rate)


def _linear_stack(rng: np.random.Generator, sizes: tuple[int, ...]) -> Arrays:
    weights: Arrays = {}
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        weights |= _linear(rng, f"layers.{i}", fan_in, fan_out)
    return weights


def _linear(rng: np.random.Generator, name: str, fan_in: int, fan_out: int) -> Arrays:
    """He initialization, zero bias."""
    return {
        f"{name}.weight": rng.standard_normal((fan_in, fan_out), F32) * F32((2 / fan_in) ** 0.5),
        f"{name}.bias": np.zeros(fan_out, F32),
    }


def _convolution(rng: np.random.Generator, name: str, channels_in: int, channels_out: int, size: int) -> Arrays:
    scale = F32((2 / (channels_in * size * size)) ** 0.5)
    return {
        f"{name}.weight": rng.standard_normal((channels_out, channels_in, size, size), F32) * scale,
        f"{name}.bias": np.zeros(channels_out, F32),
    }


def _conv_norm(rng: np.random.Generator, name: str, channels_in: int, channels_out: int, size: int) -> Arrays:
    """A convolution without bias and the scale and bias of the batch normalization after it."""
    weights = _convolution(rng, f"{name}.conv", channels_in, channels_out, size)
    del weights[f"{name}.conv.bias"]
    return weights | _norm(f"{name}.norm", channels_out)


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape, F32) * F32(0.02)


def _norm(name: str, size: int) -> Arrays:
    return {f"{name}.weight": np.ones(size, F32), f"{name}.bias": np.zeros(size, F32)}

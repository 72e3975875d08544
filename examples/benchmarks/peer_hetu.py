"""The benchmark's models in hetu, written with plain operators on variables that hold the given initial weights.

Ignored on purpose: the layers of `hetu.nn`, which bring their own initial weights; the graphs come out the same.
"""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Callable
from queue import Queue
from threading import Thread

import numpy as np
from workloads import Workload

import hetu as ht
from hetu import optim
from hetu.cpu_kernels.openblas import kernels, set_threads
from hetu.dist.comm.comm import Comm
from hetu.passes import chosen_passes

Weights = dict[str, ht.Node]
PATIENCE, A_DAY = 300.0, 86400.0  # seconds until a step has failed, and until all must be over


def make(workload: Workload, variant: str) -> Callable[[], float]:
    """A function that makes one training step and returns its loss; `variant` is "default" or "split"."""
    return _split(workload) if variant == "split" else _trained(workload)


def _trained(workload: Workload, comm: Comm | None = None) -> Callable[[], float]:
    """With a communicator each rank takes its part of the batch and, as ZeRO does, updates its part of the weights."""
    weights = {name: ht.variable(name, value) for name, value in workload.weights.items()}
    inputs = {name: ht.placeholder(name, (None, *a.shape[1:]), a.dtype) for name, a in workload.batches[0].items()}
    fixed = {name: ht.constant(array) for name, array in workload.fixed.items()}
    loss = MODELS[workload.name](weights, **inputs, **fixed)
    optimizer = {"sgd": optim.SGD, "adam": optim.Adam}[workload.optimizer](workload.learning_rate)
    # Torch's Adam moves every row of an embedding on every step; the sparse form, which does less, is left out here.
    unwanted = "sparsify_updates" if workload.optimizer == "adam" else ""
    passes = [run.__name__ for run in chosen_passes(None) if run.__name__ != unwanted]
    strategy = ht.dist.ZeRO() if comm else None
    executor = ht.Executor({"train": [loss, optimizer.minimize(loss)]}, passes=passes, strategy=strategy, comm=comm)
    batches = itertools.cycle([{inputs[name]: array for name, array in batch.items()} for batch in workload.batches])

    def step() -> float:
        return float(executor.run("train", next(batches))[0])

    return step


def _split(workload: Workload) -> Callable[[], float]:
    """A rank in each of two threads of this process, which trains on half of the batch with one BLAS thread."""
    set_threads(1)
    orders, losses = [Queue(), Queue()], [Queue(), Queue()]

    def work(comm: Comm) -> None:
        step = _trained(workload, comm)
        while orders[comm.rank].get():
            losses[comm.rank].put(step())

    Thread(target=ht.dist.run_ranks, args=(2, work), kwargs={"deadline": A_DAY}, daemon=True).start()

    def step() -> float:
        for order in orders:
            order.put(True)
        mine, _ = (loss.get(timeout=PATIENCE) for loss in losses)
        return mine

    return step


def versions() -> dict[str, str]:
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    try:
        own = importlib.metadata.version("hetu-dl")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    named = f"{blas['name']} {blas['version']} for {kernels()}"
    return {"hetu": own, "numpy": np.__version__, "numpy BLAS": named}


def mlp(weights: Weights, x: ht.Node, t: ht.Node) -> ht.Node:
    return ht.mean(ht.softmax_cross_entropy(_dense(weights, x), t))


def lenet(weights: Weights, x: ht.Node, t: ht.Node) -> ht.Node:
    for name, padding in (("conv.0", 2), ("conv.1", 0)):
        x = ht.conv2d(x, weights[f"{name}.weight"], padding=padding)
        x = ht.max_pool2d(ht.relu(x + ht.reshape(weights[f"{name}.bias"], (-1, 1, 1))), 2)
    return ht.mean(ht.softmax_cross_entropy(_dense(weights, ht.flatten(x, 1)), t))


def resnet(weights: Weights, x: ht.Node, t: ht.Node) -> ht.Node:
    h = ht.relu(_conv_norm(weights, "stem", x))
    for name in dict.fromkeys(name.rpartition(".first")[0] for name in weights if ".first." in name):
        channels_out, channels = weights[f"{name}.first.conv.weight"].shape[:2]
        stride = channels_out // channels  # a stage that doubles the channels halves the image
        y = ht.relu(_conv_norm(weights, f"{name}.first", h, stride))
        y = _conv_norm(weights, f"{name}.second", y)
        h = ht.relu(y + (_conv_norm(weights, f"{name}.shortcut", h, stride) if stride > 1 else h))
    return ht.mean(ht.softmax_cross_entropy(_dense(weights, ht.global_avg_pool2d(h)), t))


def lstm(weights: Weights, x: ht.Node, t: ht.Node) -> ht.Node:
    names = ("weight_ih", "weight_hh", "bias")
    _, (h, _) = ht.lstm(x, *(weights[f"lstm.{name}"] for name in names))
    return ht.mean(ht.softmax_cross_entropy(_dense(weights, h), t))


def gpt(weights: Weights, x: ht.Node, t: ht.Node) -> ht.Node:
    h = ht.embedding(weights["tokens"], x) + weights["positions"]
    for block in range(sum(name.endswith("qkv.weight") for name in weights)):
        h = _block(weights, f"blocks.{block}", h)
    logits = _norm(weights, "norm", h) @ weights["head.weight"]
    return ht.mean(ht.softmax_cross_entropy(logits, t))


def wide_deep(weights: Weights, ids: ht.Node, x: ht.Node, t: ht.Node) -> ht.Node:
    embedded = ht.flatten(ht.embedding(weights["table"], ids), 1)
    logits = _dense(weights, ht.concat([embedded, x], axis=1)) + _linear(weights, "wide", x)
    return ht.mean(ht.binary_cross_entropy_with_logits(logits, t))


def gcn(weights: Weights, x: ht.Node, t: ht.Node, rows: ht.Node, columns: ht.Node, values: ht.Node) -> ht.Node:
    h = ht.sparse_matmul(rows, columns, values, x @ weights["layers.0.weight"], size=x.shape[0])
    h = ht.relu(h + weights["layers.0.bias"]) @ weights["layers.1.weight"]
    logits = ht.sparse_matmul(rows, columns, values, h, size=x.shape[0]) + weights["layers.1.bias"]
    return ht.mean(ht.softmax_cross_entropy(logits, t))


MODELS: dict[str, Callable[..., ht.Node]] = {
    "tiny_mlp": mlp,
    "mlp_sgd": mlp,
    "mlp_adam": mlp,
    "lenet": lenet,
    "resnet": resnet,
    "lstm": lstm,
    "gpt": gpt,
    "gpt_256": gpt,
    "wide_deep": wide_deep,
    "gcn": gcn,
}


def _block(weights: Weights, name: str, h: ht.Node) -> ht.Node:
    batch, length, d = h.shape
    qkv = _linear(weights, f"{name}.qkv", _norm(weights, f"{name}.norm1", h))
    qkv = ht.permute_dims(ht.reshape(qkv, (batch, length, 3, d // 64, 64)), (2, 0, 3, 1, 4))
    attended = ht.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], causal=True)
    attended = ht.reshape(ht.permute_dims(attended, (0, 2, 1, 3)), (batch, length, d))
    h = h + _linear(weights, f"{name}.proj", attended)
    up = _linear(weights, f"{name}.up", _norm(weights, f"{name}.norm2", h))
    return h + _linear(weights, f"{name}.down", ht.gelu(up, approximate="tanh"))


def _conv_norm(weights: Weights, name: str, x: ht.Node, stride: int = 1) -> ht.Node:
    kernel, scale, bias = (weights[f"{name}.{part}"] for part in ("conv.weight", "norm.weight", "norm.bias"))
    statistics = [
        ht.variable(f"{name}.running_{part}", np.full(scale.shape, start, np.float32), trainable=False)
        for part, start in (("mean", 0), ("var", 1))
    ]
    y = ht.conv2d(x, kernel, stride=stride, padding=kernel.shape[2] // 2)
    return ht.batch_norm(y, scale, bias, *statistics)


def _norm(weights: Weights, name: str, x: ht.Node) -> ht.Node:
    return ht.layer_norm(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _linear(weights: Weights, name: str, x: ht.Node) -> ht.Node:
    return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _dense(weights: Weights, x: ht.Node) -> ht.Node:
    depth = sum(name.startswith("layers.") for name in weights) // 2
    for layer in range(depth):
        x = _linear(weights, f"layers.{layer}", x)
        x = ht.relu(x) if layer < depth - 1 else x
    return x

"""The words of the benchmark's models in hetu, and a step of it.

Written with plain operators on variables that hold the given initial weights, instead of the layers of `hetu.nn`, which
bring their own; the graphs come out the same. A bag of ids is a sum of embeddings.
"""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Callable
from queue import Queue
from threading import Thread
from typing import Any

import numpy as np
from workloads import Workload

import hetu as ht
from hetu import optim
from hetu.cpu_kernels.openblas import kernels, set_threads
from hetu.dist.comm.comm import Comm
from hetu.passes import PASSES, chosen_passes

PATIENCE, A_DAY = 300.0, 86400.0  # seconds until a step has failed, and until all must be over


def make(workload: Workload, variant: str) -> Callable[[], Any]:
    """What makes one step and returns its loss or its outputs; `variant` is "default", "split" or "NumPy alone"."""
    return _split(workload) if variant == "split" else _step(workload)


def built(workload: Workload) -> tuple[ht.Node, dict[str, ht.Node]]:
    """The loss, or in inference the outputs, and the placeholders; axes whose size changes are open."""
    first, *others = workload.batches()
    open_axes = {
        n: [i == 0 or any(b[n].shape[i] != a.shape[i] for b in others) for i in range(a.ndim)] for n, a in first.items()
    }
    inputs = {
        name: ht.placeholder(name, tuple(None if o else d for o, d in zip(open_axes[name], a.shape)), a.dtype)
        for name, a in first.items()
    }
    fixed = {name: ht.constant(array) for name, array in workload.fixed().items()}
    words = Words(workload)
    outputs = workload.kind.model(words, workload.s, **{k: v for k, v in inputs.items() if k != "t"}, **fixed)
    return (LOSSES[workload.kind.loss](outputs, inputs["t"]) if workload.trains else outputs), inputs


def passes_of(workload: Workload, device: str | None = None) -> list[str]:
    """Torch's Adam moves every row of an embedding on every step; the sparse form, which does less, is left out."""
    chosen = chosen_passes(None, device) if device else chosen_passes(None)
    unwanted = "sparsify_updates" if workload.does == "Adam" else ""
    return [name for name, run in PASSES.items() if run in chosen and name != unwanted]


def optimizer_of(workload: Workload) -> Any:
    return {"SGD": optim.SGD, "Adam": optim.Adam}[workload.does](workload.rate)


def _step(workload: Workload, comm: Comm | None = None) -> Callable[[], Any]:
    """With a communicator each rank takes its part of the batch and, as ZeRO does, updates its part of the weights."""
    made, inputs = built(workload)
    fetched = [made, optimizer_of(workload).minimize(made)] if workload.trains else [made]
    strategy = ht.dist.ZeRO() if comm else None
    executor = ht.Executor({"step": fetched}, passes=passes_of(workload), strategy=strategy, comm=comm)
    batches = itertools.cycle([{inputs[name]: a for name, a in batch.items()} for batch in workload.batches()])
    return lambda: executor.run("step", next(batches))[0]


def _split(workload: Workload) -> Callable[[], Any]:
    """A rank in each of two threads of this process, which trains on half of the batch with one BLAS thread."""
    set_threads(1)
    orders, losses = [Queue(), Queue()], [Queue(), Queue()]

    def work(comm: Comm) -> None:
        step = _step(workload, comm)
        while orders[comm.rank].get():
            losses[comm.rank].put(step())

    Thread(target=ht.dist.run_ranks, args=(2, work), kwargs={"deadline": A_DAY}, daemon=True).start()

    def step() -> Any:
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


class Words:
    """Layers on the weights of a workload."""

    def __init__(self, workload: Workload) -> None:
        self.w = {name: ht.variable(name, value) for name, value in workload.weights().items()}
        self.relu, self.gelu, self.tanh, self.softmax = ht.relu, ht.gelu, ht.tanh, ht.softmax
        self.max_pool, self.pooled, self.sum, self.mean = ht.max_pool2d, ht.global_avg_pool2d, ht.sum, ht.mean
        self.spread = lambda x, **matrix: ht.sparse_matmul(**matrix, x=x, size=x.shape[0])

    def weight(self, name: str, *shape: int) -> ht.Node:
        return self.w[name]

    def linear(self, x: ht.Node, name: str, inputs: int, outputs: int, bias: bool = True) -> ht.Node:
        y = x @ self.w[f"{name}.weight"]
        return y + self.w[f"{name}.bias"] if bias else y

    def conv(self, x: ht.Node, name: str, inputs: int, outputs: int, size: int, *, bias: bool = True,
             dilation: int = 1, padding: int | None = None, **options: int) -> ht.Node:  # fmt: skip
        padding = dilation * (size // 2) if padding is None else padding
        y = ht.conv2d(x, self.w[f"{name}.weight"], padding=padding, dilation=dilation, **options)
        return y + ht.reshape(self.w[f"{name}.bias"], (-1, 1, 1)) if bias else y

    def conv_transpose(
        self, x: ht.Node, name: str, inputs: int, outputs: int, size: int, stride: int, padding: int = 0
    ) -> ht.Node:
        y = ht.conv_transpose2d(x, self.w[f"{name}.weight"], stride=stride, padding=padding)
        return y + ht.reshape(self.w[f"{name}.bias"], (-1, 1, 1))

    def batch_norm(self, x: ht.Node, name: str, size: int) -> ht.Node:
        running = [
            ht.variable(f"{name}.running_{part}", np.full(size, start, np.float32), trainable=False)
            for part, start in (("mean", 0), ("var", 1))
        ]
        return ht.batch_norm(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"], *running)

    def layer_norm(self, x: ht.Node, name: str, size: int) -> ht.Node:
        return ht.layer_norm(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def group_norm(self, x: ht.Node, name: str, size: int, groups: int) -> ht.Node:
        return ht.group_norm(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"], groups=groups)

    def embedding(self, ids: ht.Node, name: str, rows: int, size: int) -> ht.Node:
        return ht.embedding(self.w[name], ids)

    def bag(self, ids: ht.Node, name: str, rows: int, size: int) -> ht.Node:
        return ht.sum(ht.embedding(self.w[name], ids), 1)

    def attention(self, qkv: ht.Node, heads: int, causal: bool, mask: ht.Node | None) -> ht.Node:
        batch, length, _ = qkv.shape
        parts = ht.permute_dims(ht.reshape(qkv, (batch, length, 3, heads, 64)), (2, 0, 3, 1, 4))
        keys = None if mask is None else mask[:, None, None]
        attended = ht.scaled_dot_product_attention(parts[0], parts[1], parts[2], keys, causal=causal)
        return ht.reshape(ht.permute_dims(attended, (0, 2, 1, 3)), (batch, length, 64 * heads))

    def lstm(self, x: ht.Node, name: str, inputs: int, hidden: int, both: bool) -> tuple[ht.Node, ht.Node]:
        def run(x: ht.Node, inputs: ht.Node, recurrent: ht.Node, bias: ht.Node) -> tuple[ht.Node, ht.Node]:
            sequence, (last, _) = ht.lstm(x, inputs, recurrent, bias)
            return sequence, last

        return self._both(run, x, name, both)

    def gru(self, x: ht.Node, name: str, inputs: int, hidden: int, both: bool) -> tuple[ht.Node, ht.Node]:
        return self._both(ht.gru, x, name, both)

    def _both(self, run: Callable[..., tuple[ht.Node, ht.Node]], x: ht.Node, name: str, both: bool) -> Any:
        """One way or both ways, side by side."""
        ours = [[w for n, w in self.w.items() if n.startswith(f"{name}.{way}.")] for way in ("forward", "backward")]
        sequence, last = run(x, *ours[0])
        if not both:
            return sequence, last
        reverse, first = run(ht.flip(x, 1), *ours[1])
        return ht.concat([sequence, ht.flip(reverse, 1)], -1), ht.concat([last, first], -1)

    def tanh_gelu(self, x: ht.Node) -> ht.Node:
        return ht.gelu(x, approximate="tanh")

    def images(self, x: ht.Node) -> ht.Node:
        return x

    def grid(self, x: ht.Node, channels: int, side: int) -> ht.Node:
        return ht.reshape(x, (-1, channels, side, side))

    def flat(self, x: ht.Node) -> ht.Node:
        return ht.flatten(x, 1)

    def sequence(self, x: ht.Node) -> ht.Node:
        return ht.permute_dims(ht.reshape(x, (*x.shape[:2], -1)), (0, 2, 1))

    def first(self, x: ht.Node) -> ht.Node:
        return x[:, 0]

    def joined(self, *images: ht.Node) -> ht.Node:
        return ht.concat(images, axis=1)

    def concat(self, *xs: ht.Node) -> ht.Node:
        return ht.concat(xs, axis=-1)


LOSSES: dict[str, Callable[[ht.Node, ht.Node], ht.Node]] = {
    "cross_entropy": lambda x, t: ht.mean(ht.softmax_cross_entropy(x, t)),
    "binary_cross_entropy": lambda x, t: ht.mean(ht.binary_cross_entropy_with_logits(x, t)),
    "squared_error": lambda x, t: ht.mean(ht.mse_loss(x, t)),
}

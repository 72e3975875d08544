"""The words of the benchmark's models in PyTorch, and a step of it: by default, at its best, and the best one compiled.

At best it uses what PyTorch offers for the case: fused optimizers, channels-last convolutions (with an allocator that
keeps freed memory), LSTM and GRU as one operator, `scaled_dot_product_attention`, sparse gradients of embeddings,
`inference_mode`. By default it is what one writes first.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from workloads import Workload


def make(workload: Workload, variant: str) -> Callable[[], Any]:
    """What makes one step and returns its loss or its outputs; `variant` is "default", "best" or "compiled"."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    words = Words(workload, best=variant != "default")
    run = torch.compile(words.run) if variant == "compiled" else words.run
    batches = itertools.cycle([{k: torch.from_numpy(v) for k, v in batch.items()} for batch in workload.batches()])
    if not workload.trains:
        return torch.inference_mode()(lambda: run(**next(batches)).numpy())
    optimizer = words.optimizer()

    def step() -> float:
        loss = run(**next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def versions() -> dict[str, str]:
    blas = "MKL" if torch.backends.mkl.is_available() else "no MKL"
    return {"torch": torch.__version__, "torch BLAS": blas}


class Words:
    """Layers on the weights of a workload. Torch stores matrices as (out, in), and those of recurrent layers too."""

    def __init__(self, workload: Workload, best: bool, device: str = "cpu") -> None:
        self.workload, self.best, self.training = workload, best, workload.trains
        self.memory = torch.channels_last if best else torch.contiguous_format
        self.w: dict[str, Tensor] = {}
        self.running: dict[str, tuple[Tensor, Tensor]] = {}
        weights, fixed = workload.weights(), workload.fixed()
        for name, value in weights.items():
            transposed = value.ndim == 2 and name.endswith((".weight", ".inputs", ".recurrent"))
            tensor = torch.tensor(value.T if transposed else value, device=device).contiguous()
            if tensor.ndim == 4:
                tensor = tensor.contiguous(memory_format=self.memory)
                if best:
                    _keep_freed_memory()
            self.w[name] = tensor.requires_grad_(self.training)
        self.tables = weights.keys() & {"table", "single"}
        self.fixed = {"matrix": _sparse(**fixed).to(device)} if fixed else {}
        self.gelu, self.relu, self.tanh, self.sum, self.mean = F.gelu, F.relu, torch.tanh, torch.sum, torch.mean
        self.max_pool = F.max_pool2d

    def run(self, t: Tensor | None = None, **inputs: Tensor) -> Tensor:
        """The loss, or in inference the outputs."""
        outputs = self.workload.kind.model(self, self.workload.s, **inputs, **self.fixed)
        return outputs if t is None else LOSSES[self.workload.kind.loss](outputs, t)

    def optimizer(self) -> torch.optim.Optimizer:
        kind = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}[self.workload.does]
        # The fused SGD takes no sparse gradients.
        fused = {"fused": True} if self.best and not (self.tables and self.workload.does == "SGD") else {}
        return kind(self.w.values(), lr=self.workload.rate, **fused)

    def weight(self, name: str, *shape: int) -> Tensor:
        return self.w[name]

    def linear(self, x: Tensor, name: str, inputs: int, outputs: int, bias: bool = True) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"] if bias else None)

    def conv(self, x: Tensor, name: str, inputs: int, outputs: int, size: int, *, bias: bool = True, dilation: int = 1,
             padding: int | None = None, **options: int) -> Tensor:  # fmt: skip
        padding = dilation * (size // 2) if padding is None else padding
        weights = self.w[f"{name}.weight"], self.w[f"{name}.bias"] if bias else None
        return F.conv2d(x, *weights, padding=padding, dilation=dilation, **options)

    def conv_transpose(
        self, x: Tensor, name: str, inputs: int, outputs: int, size: int, stride: int, padding: int = 0
    ) -> Tensor:
        weights = self.w[f"{name}.weight"], self.w[f"{name}.bias"]
        return F.conv_transpose2d(x, *weights, stride=stride, padding=padding)

    def batch_norm(self, x: Tensor, name: str, size: int) -> Tensor:
        if name not in self.running:
            self.running[name] = torch.zeros(size, device=x.device), torch.ones(size, device=x.device)
        weights = self.w[f"{name}.weight"], self.w[f"{name}.bias"]
        return F.batch_norm(x, *self.running[name], *weights, self.training)

    def layer_norm(self, x: Tensor, name: str, size: int) -> Tensor:
        return F.layer_norm(x, (size,), self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def group_norm(self, x: Tensor, name: str, size: int, groups: int) -> Tensor:
        return F.group_norm(x, groups, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def embedding(self, ids: Tensor, name: str, rows: int, size: int) -> Tensor:
        return F.embedding(ids, self.w[name], sparse=self._sparse(name))

    def bag(self, ids: Tensor, name: str, rows: int, size: int) -> Tensor:
        if self.best:
            return F.embedding_bag(ids, self.w[name], mode="sum", sparse=self._sparse(name))
        return F.embedding(ids, self.w[name]).sum(1)

    def attention(self, qkv: Tensor, heads: int, causal: bool, mask: Tensor | None) -> Tensor:
        batch, length, _ = qkv.shape
        q, k, v = qkv.view(batch, length, 3, heads, 64).permute(2, 0, 3, 1, 4)
        keys = None if mask is None else mask[:, None, None]
        run = F.scaled_dot_product_attention if self.best else _attention
        return run(q, k, v, keys, is_causal=causal).transpose(1, 2).reshape(batch, length, 64 * heads)

    def lstm(self, x: Tensor, name: str, inputs: int, hidden: int, both: bool) -> tuple[Tensor, Tensor]:
        weights = self._ways(name, both)
        if not self.best:
            return _loop(x, lambda h, w, x: torch.lstm_cell(x, h, *w), weights, hidden, states=2)
        state = x.new_zeros(1 + both, len(x), hidden)
        flat = [w for way in weights for w in way]
        sequence, last, _ = torch.lstm(x, (state, state), flat, True, 1, 0.0, self.training, both, True)
        return sequence, torch.cat([*last], -1) if both else last[0]

    def gru(self, x: Tensor, name: str, inputs: int, hidden: int, both: bool) -> tuple[Tensor, Tensor]:
        weights = self._ways(name, both)
        if not self.best:
            return _loop(x, lambda h, w, x: (torch.gru_cell(x, h[0], *w),), weights, hidden, states=1)
        state = x.new_zeros(1 + both, len(x), hidden)
        flat = [w for way in weights for w in way]
        sequence, last = torch.gru(x, state, flat, True, 1, 0.0, self.training, both, True)
        return sequence, torch.cat([*last], -1) if both else last[0]

    def spread(self, x: Tensor, matrix: Tensor) -> Tensor:
        return Symmetric.apply(matrix, x)

    def tanh_gelu(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    def softmax(self, x: Tensor) -> Tensor:
        return F.softmax(x, -1)

    def images(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=self.memory)

    def grid(self, x: Tensor, channels: int, side: int) -> Tensor:
        return self.images(x.view(-1, channels, side, side))

    def flat(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def pooled(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))

    def sequence(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)

    def first(self, x: Tensor) -> Tensor:
        return x[:, 0]

    def joined(self, *images: Tensor) -> Tensor:
        return torch.cat(images, 1)

    def concat(self, *xs: Tensor) -> Tensor:
        return torch.cat(xs, -1)

    def _sparse(self, name: str) -> bool:
        """Whether the gradient of a table holds the rows of the batch alone; Adam moves every row on every step."""
        return self.best and name in self.tables and self.workload.does == "SGD"

    def _ways(self, name: str, both: bool) -> list[list[Tensor]]:
        """The four weights of each direction. Torch's second bias of an LSTM stays zero: one bias, as elsewhere."""
        parts = ("inputs", "recurrent", "bias", "recurrent_bias")
        ways = ("forward", "backward") if both else ("forward",)
        no_bias = torch.zeros_like(self.w[f"{name}.forward.bias"], requires_grad=False)
        return [[self.w.get(f"{name}.{way}.{part}", no_bias) for part in parts] for way in ways]


def _loop(
    x: Tensor, cell: Callable[..., tuple[Tensor, ...]], ways: list[list[Tensor]], hidden: int, states: int
) -> tuple[Tensor, Tensor]:
    """A cell step by step, one way or both ways side by side."""
    sequences, last = [], []
    for way, weights in enumerate(ways):
        h, outputs = (x.new_zeros(len(x), hidden),) * states, []
        for step in x.unbind(1)[:: -1 if way else 1]:
            h = cell(h, weights, step)
            outputs.append(h[0])
        sequences.append(torch.stack(outputs[:: -1 if way else 1], 1))
        last.append(h[0])
    return torch.cat(sequences, -1), torch.cat(last, -1)


def _attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, is_causal: bool) -> Tensor:
    length = q.shape[-2]
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    if is_causal:
        keys = torch.ones(length, length, dtype=torch.bool).tril()
    return (scores if keys is None else scores.masked_fill(~keys, -np.inf)).softmax(-1) @ v


def _sparse(rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> Tensor:
    starts = np.searchsorted(rows, np.arange(rows[-1] + 2))
    with warnings.catch_warnings(action="ignore"):  # that the layout is in beta
        return torch.sparse_csr_tensor(*map(torch.from_numpy, (starts, columns, values)))


class Symmetric(torch.autograd.Function):
    """The product with a symmetric sparse matrix, whose gradient torch would compute by transposing it every time."""

    @staticmethod
    def forward(context: torch.autograd.function.FunctionCtx, matrix: Tensor, x: Tensor) -> Tensor:
        context.matrix = matrix
        return matrix @ x

    @staticmethod
    def backward(context: torch.autograd.function.FunctionCtx, g: Tensor) -> tuple[None, Tensor]:
        return None, context.matrix @ g


def _keep_freed_memory() -> None:
    """Tell glibc not to return memory to the system: else every step page-faults on large activations anew."""
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 1 << 30)
        libc.mallopt(mmap_threshold, 1 << 25)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda x, t: F.cross_entropy(x.flatten(0, -2), t.flatten()),
    "binary_cross_entropy": F.binary_cross_entropy_with_logits,
    "squared_error": F.mse_loss,
}

"""The benchmark's models in PyTorch: as one writes them by default, at PyTorch's best, and the best one compiled.

The best variant uses what PyTorch offers for the case: fused optimizers, channels-last convolutions (with an
allocator that keeps freed memory), `nn.LSTM`, `scaled_dot_product_attention`, sparse embedding gradients.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from workloads import Arrays, Workload


def make(workload: Workload, variant: str) -> Callable[[], float]:
    """A function that makes one training step and returns its loss; `variant` is "default", "best" or "compiled"."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    best = variant != "default"
    model = MODELS[workload.name](workload.weights, best, **workload.fixed)
    _load(model, workload.weights)
    optimizer = _optimizer(workload, model, best)
    if variant == "compiled":
        model = torch.compile(model)
    batches = itertools.cycle([{k: torch.from_numpy(v) for k, v in batch.items()} for batch in workload.batches])

    def step() -> float:
        loss = model(**next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def versions() -> dict[str, str]:
    blas = "MKL" if torch.backends.mkl.is_available() else "no MKL"
    return {"torch": torch.__version__, "torch BLAS": blas}


def _optimizer(workload: Workload, model: nn.Module, best: bool) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    # The fused SGD takes no sparse gradients.
    fused = {"fused": True} if best and workload.name != "wide_deep" else {}
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[workload.optimizer]
    return kind(parameters, lr=workload.learning_rate, **fused)


def _load(model: nn.Module, weights: Arrays) -> None:
    """Copy the initial weights by name; torch stores matrices as (out, in), and calls those of an LSTM otherwise."""
    state, other_names = model.state_dict(), getattr(model, "other_names", {})
    for name, value in weights.items():
        module = model.get_submodule(name.rpartition(".")[0])
        transposed = isinstance(module, nn.Linear | nn.LSTM | nn.LSTMCell) and value.ndim == 2
        state[other_names.get(name, name)].copy_(torch.tensor(value.T if transposed else value))


def _keep_freed_memory() -> None:
    """Tell glibc not to return memory to the system: else every step page-faults on large activations anew."""
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 1 << 30)
        libc.mallopt(mmap_threshold, 1 << 25)


class Mlp(nn.Module):
    def __init__(self, weights: Arrays, best: bool) -> None:
        super().__init__()
        self.layers = _linear_stack(weights)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(_dense(self.layers, x), t)


class LeNet(nn.Module):
    def __init__(self, weights: Arrays, best: bool) -> None:
        super().__init__()
        self.conv = nn.ModuleList([nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)])
        self.layers = _linear_stack(weights)
        self.memory = torch.channels_last if best else torch.contiguous_format
        self.to(memory_format=self.memory)
        if best:
            _keep_freed_memory()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = x.contiguous(memory_format=self.memory)
        for convolution in self.conv:
            x = F.max_pool2d(F.relu(convolution(x)), 2)
        return F.cross_entropy(_dense(self.layers, x.flatten(1)), t)


class ResNet(nn.Module):
    def __init__(self, weights: Arrays, best: bool) -> None:
        super().__init__()
        self.stem = ConvNorm(3, 64, 3)
        channels = ((64, 64), (64, 128), (128, 256), (256, 512))
        self.stages = nn.ModuleList(nn.ModuleList([Residual(a, b), Residual(b, b)]) for a, b in channels)
        self.layers = _linear_stack(weights)
        self.memory = torch.channels_last if best else torch.contiguous_format
        self.to(memory_format=self.memory)
        if best:
            _keep_freed_memory()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = F.relu(self.stem(x.contiguous(memory_format=self.memory)))
        for stage in self.stages:
            for block in stage:
                h = block(h)
        return F.cross_entropy(_dense(self.layers, h.mean((2, 3))), t)


class ConvNorm(nn.Module):
    def __init__(self, channels: int, channels_out: int, size: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels_out, size, stride=stride, padding=size // 2, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class Residual(nn.Module):
    def __init__(self, channels: int, channels_out: int) -> None:
        super().__init__()
        stride = channels_out // channels
        self.first = ConvNorm(channels, channels_out, 3, stride)
        self.second = ConvNorm(channels_out, channels_out, 3)
        self.shortcut = ConvNorm(channels, channels_out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, h: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(h))) + self.shortcut(h))


class Lstm(nn.Module):
    """A loop over `nn.LSTMCell`, or `nn.LSTM` at best. Torch's second bias stays zero: one bias, as elsewhere."""

    def __init__(self, weights: Arrays, best: bool) -> None:
        super().__init__()
        features, hidden = (weights["lstm.weight_ih"].shape[0], weights["lstm.weight_hh"].shape[0])
        self.lstm = nn.LSTM(features, hidden, batch_first=True) if best else nn.LSTMCell(features, hidden)
        suffix = "_l0" if best else ""
        self.other_names = {f"lstm.weight_{kind}": f"lstm.weight_{kind}{suffix}" for kind in ("ih", "hh")}
        self.other_names["lstm.bias"] = f"lstm.bias_ih{suffix}"
        unused = getattr(self.lstm, f"bias_hh{suffix}")
        nn.init.zeros_(unused.requires_grad_(False))
        self.layers = _linear_stack(weights)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        if isinstance(self.lstm, nn.LSTM):
            h = self.lstm(x)[0][:, -1]
        else:
            h = c = x.new_zeros(len(x), self.lstm.hidden_size)
            for step in x.unbind(1):
                h, c = self.lstm(step, (h, c))
        return F.cross_entropy(_dense(self.layers, h), t)


class Gpt(nn.Module):
    def __init__(self, weights: Arrays, best: bool) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(weights["tokens"].shape))
        self.positions = nn.Parameter(torch.empty(weights["positions"].shape))
        d, vocabulary = weights["head.weight"].shape
        depth = sum(name.endswith("qkv.weight") for name in weights)
        self.blocks = nn.ModuleList([Block(d, best) for _ in range(depth)])
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocabulary, bias=False)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = F.embedding(x, self.tokens) + self.positions
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), t.flatten())


class Block(nn.Module):
    def __init__(self, d: int, best: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.attention = _fused_attention if best else _attention

    def forward(self, h: Tensor) -> Tensor:
        batch, length, d = h.shape
        q, k, v = self.qkv(self.norm1(h)).view(batch, length, 3, d // 64, 64).permute(2, 0, 3, 1, 4)
        h = h + self.proj(self.attention(q, k, v).transpose(1, 2).reshape(batch, length, d))
        return h + self.down(F.gelu(self.up(self.norm2(h)), approximate="tanh"))


class WideDeep(nn.Module):
    def __init__(self, weights: Arrays, best: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(weights["table"].shape))
        self.layers = _linear_stack(weights)
        self.wide = nn.Linear(*weights["wide.weight"].shape)
        self.sparse = best

    def forward(self, ids: Tensor, x: Tensor, t: Tensor) -> Tensor:
        embedded = F.embedding(ids, self.table, sparse=self.sparse).flatten(1)
        logits = _dense(self.layers, torch.cat([embedded, x], 1)) + self.wide(x)
        return F.binary_cross_entropy_with_logits(logits, t)


class Gcn(nn.Module):
    def __init__(self, weights: Arrays, best: bool, rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
        super().__init__()
        self.layers = _linear_stack(weights)
        starts = np.searchsorted(rows, np.arange(rows[-1] + 2))
        with warnings.catch_warnings(action="ignore"):  # that the layout is in beta
            self.matrix = torch.sparse_csr_tensor(*map(torch.from_numpy, (starts, columns, values)))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        first, second = self.layers
        h = F.relu(Symmetric.apply(self.matrix, x @ first.weight.T) + first.bias)
        return F.cross_entropy(Symmetric.apply(self.matrix, h @ second.weight.T) + second.bias, t)


class Symmetric(torch.autograd.Function):
    """The product with a symmetric sparse matrix, whose gradient torch would compute by transposing it every time."""

    @staticmethod
    def forward(context: torch.autograd.function.FunctionCtx, matrix: Tensor, x: Tensor) -> Tensor:
        context.matrix = matrix
        return matrix @ x

    @staticmethod
    def backward(context: torch.autograd.function.FunctionCtx, g: Tensor) -> tuple[None, Tensor]:
        return None, context.matrix @ g


MODELS: dict[str, type[nn.Module]] = {
    "tiny_mlp": Mlp,
    "mlp_sgd": Mlp,
    "mlp_adam": Mlp,
    "lenet": LeNet,
    "resnet": ResNet,
    "lstm": Lstm,
    "gpt": Gpt,
    "gpt_256": Gpt,
    "wide_deep": WideDeep,
    "gcn": Gcn,
}


def _linear_stack(weights: Arrays) -> nn.ModuleList:
    depth = sum(name.startswith("layers.") for name in weights) // 2
    return nn.ModuleList([nn.Linear(*weights[f"layers.{i}.weight"].shape) for i in range(depth)])


def _dense(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers[:-1]:
        x = F.relu(layer(x))
    return layers[-1](x)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    length = q.shape[-2]
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    return scores.masked_fill(~allowed, -np.inf).softmax(-1) @ v


def _fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

"""What `gpu.py` measures of single kernels: bandwidth beside that of a copy, and convolutions beside PyTorch's."""

from __future__ import annotations

import itertools
import statistics
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import hetu as ht
from hetu.core.graph import OPS
from hetu.look.profiler import seconds_on_device

LAUNCHES = 20
Row = dict[str, Any]
Calls = Sequence[Callable[[], object]]
# The share of a copy's bandwidth to reach, where one is asked for.
WANTED = dict.fromkeys(("gelu", "fused chain", "layer_norm", "rms_norm", "softmax", "batch_norm", "batch_norm_dx"), 0.8)
WANTED |= {"adam": 0.85, "cross entropy": 0.75, "its gradient, 16 bits": 0.8}


# -- kernels -----------------------------------------------------------------------------------------------------------


def bandwidths(kernels: dict[str, Callable[[], tuple[Calls, int]]], xp: Any, turns: Any) -> list[Row]:
    """Bytes that each kernel has to move, over its time; and the share of what a plain copy reaches.

    What was measured before an illegal access stays; after it the device is of no use to this process.
    """
    rows: list[Row] = []
    if turns:
        turns.take()
    for name, make in kernels.items():
        try:
            calls, nbytes = make()
            rate = nbytes / seconds(calls, xp) / 1e9
        except Exception as error:
            traceback.print_exc()
            rows.append({"kernel": name, "failed": f"{type(error).__name__}: {error}"})
            try:
                xp.cuda.runtime.deviceSynchronize()
            except xp.cuda.runtime.CUDARuntimeError:
                return rows
            continue
        share = rate / (rows[0]["GB/s"] if rows else rate)
        rows.append({"kernel": name, "GB/s": rate, "of a copy": share, "wanted": WANTED.get(name)})
        calls = None  # and with them their memory
        xp.get_default_memory_pool().free_all_blocks()
    return rows


def kernels(xp: Any, quick: bool) -> dict[str, Callable[[], tuple[Calls, int]]]:
    """What makes launches, and the bytes they move at least. A gathered row counts each time."""
    rng, (height, width, vocabulary) = np.random.default_rng(0), (64, 128, 100) if quick else (16384, 4096, 50257)
    x, vector = (rng.standard_normal(shape, np.float32) for shape in ((height, width), width))
    logits = {"x": rng.standard_normal((height // 4, vocabulary), np.float32)}
    logits["t"] = rng.integers(0, vocabulary, height // 4)

    def copy() -> tuple[Calls, int]:
        a, b = xp.asarray(x), xp.empty(x.shape, "float32")
        return [lambda: xp.copyto(b, a)], 2 * x.nbytes

    def chain(x: ht.Node, y: ht.Node, s: ht.Node) -> ht.Node:
        return ht.gelu(x * s + 1.0) * y + x

    def entropy_gradient(g: ht.Node, total: ht.Node, x: ht.Node, t: ht.Node) -> ht.Node:
        dx = OPS["softmax_cross_entropy_dx"](g, ht.astype(x, dtype="float32"), t, total)
        return ht.astype(dx, dtype="float16")

    rows = np.full(height // 4, 10, np.float32)
    return {
        "copy": copy,
        "gelu": lambda: (calls_of(ht.gelu, x=x), 2 * x.nbytes),
        "fused chain": lambda: (calls_of(chain, x=x, y=x, s=vector), 3 * x.nbytes),
        "layer_norm": lambda: (calls_of(ht.layer_norm, x=x, scale=vector, bias=vector), 2 * x.nbytes),
        "layer_norm, 16 bits": lambda: (calls_of(ht.layer_norm, x=half(x), scale=vector, bias=vector), x.nbytes),
        "rms_norm": lambda: (calls_of(ht.rms_norm, x=x, scale=vector), 2 * x.nbytes),
        "cross entropy": lambda: (calls_of(ht.softmax_cross_entropy, **logits), logits["x"].nbytes),
        "cross entropy, 16 bits": lambda: (
            calls_of(ht.softmax_cross_entropy, **logits | {"x": half(logits["x"])}),
            logits["x"].nbytes // 2,
        ),
        "its gradient, 16 bits": lambda: (
            calls_of(entropy_gradient, g=rows, total=rows, **logits | {"x": half(logits["x"])}),
            logits["x"].nbytes,
        ),
        "softmax": lambda: (calls_of(ht.softmax, x=x), 2 * x.nbytes),
        "adam": lambda: adam(xp, 1 << (10 if quick else 22)),
        **norm_kernels(x.reshape(-1, 64)),
        **sparse_kernels(quick),
    }


def half(x: np.ndarray) -> np.ndarray:
    return x.astype("float16")


def calls_of(build: Callable[..., ht.Node], *given: Any, **arrays: np.ndarray) -> Calls:
    """What a program runs for these operators, without the feed."""
    nodes = [ht.placeholder(name, a.shape, a.dtype) for name, a in arrays.items()]
    executor = ht.Executor([build(*nodes)], device="gpu")
    executor.run(arrays)
    return executor.program(arrays).calls


def adam(xp: Any, size: int) -> tuple[Calls, int]:
    """Eight parameters in one launch."""
    from hetu.gpu_kernels.device import gpu
    from hetu.gpu_kernels.update import Tensor, update_all

    rng = np.random.default_rng(0)
    parameters = [[xp.asarray(rng.random(size, np.float32)) for _ in range(4)] for _ in range(8)]
    tensors = [Tensor(p[:3], p[:3], p[3]) for p in parameters]
    attrs = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.0}
    rate, step = xp.full((), 1e-3, "float64"), xp.full((), 7, "int64")
    return update_all(gpu(), ht.optim.adam.update, tensors, rate, step, attrs), 7 * 8 * parameters[0][0].nbytes


def norm_kernels(x: np.ndarray) -> dict[str, Callable[[], tuple[Calls, int]]]:
    """Batch norm with the relu behind it, of channels that come last, and its gradient: both read twice."""
    from hetu.gpu_kernels.passes.batch_norm_relu import batch_norm_relu, batch_norm_relu_dx

    vector = np.random.default_rng(0).random(x.shape[1], np.float32)

    def forward(x: ht.Node, v: ht.Node) -> ht.Node:
        return batch_norm_relu(x, v, v, epsilon=1e-5)[0]

    def backward(g: ht.Node, x: ht.Node, v: ht.Node) -> ht.Node:
        return batch_norm_relu_dx(g, x, x, v, v, v, v, epsilon=1e-5)[0]

    return {
        "batch_norm": lambda: (calls_of(forward, x=x, v=vector), 3 * x.nbytes),
        "batch_norm_dx": lambda: (calls_of(backward, g=x, x=x, v=vector), 5 * x.nbytes),
    }


def sparse_kernels(quick: bool) -> dict[str, Callable[[], tuple[Calls, int]]]:
    """Embedding rows, a graph's product and the layout transform of a mixture of experts."""
    rng, features = np.random.default_rng(0), 64
    nodes, entries, tokens = (200, 2000, 64) if quick else (1 << 20, 1 << 24, 1 << 14)
    x = rng.standard_normal((nodes, features), np.float32)
    rows, columns = (nodes * rng.random(entries) ** 2).astype(np.int64), rng.integers(0, nodes, entries)
    values = rng.standard_normal(entries, np.float32)
    ids = rng.integers(0, nodes, nodes)
    experts, width = 32, 64 if quick else 2048
    capacity = 4 * tokens // experts
    chosen = np.argsort(rng.random((tokens, experts)))[:, :2]
    routing = {"x": rng.standard_normal((tokens, width), np.float32), "weights": rng.random((tokens, 2), np.float32)}
    routing["slots"] = ht.evaluate(ht.moe_slots(chosen, count=experts, capacity=capacity))

    def routed(x: ht.Node, weights: ht.Node, slots: ht.Node) -> ht.Node:
        y = ht.moe_dispatch(x, slots, weights, experts=experts, capacity=capacity)
        return ht.moe_combine(y, slots, weights)

    return {
        "embedding": lambda: (calls_of(ht.embedding, x=x, ids=ids), 2 * x.nbytes + ids.nbytes),
        "its gradient": lambda: (calls_of(OPS["scatter_rows"], like=x, ids=ids, rows=x), 3 * x.nbytes + ids.nbytes),
        "sparse_matmul (CSR)": lambda: (
            calls_of(lambda x: ht.sparse_matmul(rows, columns, values, x, size=nodes), x=x),
            entries * (8 + 4 * features) + x.nbytes,
        ),
        "sampled_matmul": lambda: (
            calls_of(lambda x: ht.sampled_matmul(rows, columns, x, x), x=x),
            entries * (20 + 8 * features),
        ),
        "experts and back": lambda: (
            calls_of(routed, **routing),
            (4 + experts * capacity / tokens) * routing["x"].nbytes,
        ),
    }


# -- convolutions -----------------------------------------------------------------------------------------------------

WINDOW = {"stride": (1, 1), "padding": ((1, 1), (1, 1)), "dilation": (1, 1), "groups": 1}
LAYERS = ((32, 64), (16, 128), (8, 256), (4, 512))  # of ResNet-18: rows of an image, and channels


def convolutions(xp: Any, turns: Any, others: Sequence[str]) -> list[Row]:
    """Each layer in both precisions, of hetu and of PyTorch as it ships ("eager") and without TF32 ("exact")."""
    made = []
    for (size, channels), precision in itertools.product(LAYERS if turns else [(4, 8)], ("float32", "float16")):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((size, size, 128 if turns else 2, channels)).astype(precision)
        w = rng.standard_normal((channels, channels, 3, 3)).astype(precision)
        sides = {"hetu": hetu_convolutions(x, w)}
        sides |= {side: torch_convolutions(x, w, side) for side in others if side in ("eager", "exact")}
        made.append(({"channels": channels, "precision": precision}, sides))
    if turns:
        turns.take()
    rows = []
    for row, sides in made:
        for side, calls in sides.items():
            row |= {side if k == "forward" else f"{side} {k}": 1e5 * seconds(c * 10, xp) for k, c in calls.items()}
        rows.append(row)
    return rows


def hetu_convolutions(x: np.ndarray, w: np.ndarray) -> dict[str, Calls]:
    """Images are (rows, columns, images, channels), as between layers."""
    ops = {name: OPS[f"conv2d_last{name}"] for name in ("", "_dx", "_dw")}
    return {
        "forward": calls_of(lambda x, w: ops[""](x, w, **WINDOW), x=x, w=w),
        "dx": calls_of(lambda g, w: ops["_dx"](g, w, size=x.shape[:2], **WINDOW), g=x, w=w),
        "dw": calls_of(lambda x, g: ops["_dw"](x, g, kernel=(3, 3), **WINDOW), x=x, g=x),
    }


def torch_convolutions(x: np.ndarray, w: np.ndarray, side: str) -> dict[str, Calls]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, weights = torch.from_numpy(x.transpose(2, 3, 0, 1).copy()).to(device), torch.from_numpy(w).to(device)
    images, weights = (a.to(memory_format=torch.channels_last) for a in (images, weights))
    window = (1, 1), (1, 1), (1, 1)

    def set_up(run: Callable[[], object]) -> Calls:
        def call() -> None:
            torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = True, side != "exact"
            run()

        call()  # looks for the best way
        return [call]

    def gradient(*wanted: bool) -> Calls:
        backward = torch.ops.aten.convolution_backward
        return set_up(lambda: backward(images, images, weights, None, *window, False, (0, 0), 1, wanted))

    forward = set_up(lambda: torch.nn.functional.conv2d(images, weights, None, *window))
    return {"forward": forward, "dx": gradient(True, False, False), "dw": gradient(False, True, False)}


def seconds(calls: Calls, xp: Any) -> float:
    """The median time of all calls."""
    return statistics.median(seconds_on_device(calls, xp) for _ in range(LAUNCHES))

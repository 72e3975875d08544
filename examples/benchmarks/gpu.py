"""On a GPU: training steps of hetu against PyTorch, the host's time for a replayed step, and kernels against memory.

    python examples/benchmarks/gpu.py [--workloads mlp_adam gpt] [--rounds 5] [--json results.json]

Steps of all sides are measured in turns, on data that lies on the device for PyTorch and is fed from the host for hetu;
the table shows medians and their ratio. Kernels are compared with the bandwidth that a plain copy reaches in the same
run. Without PyTorch its columns are left out; without a GPU the script says so and ends.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from workloads import WORKLOADS, Workload

import hetu as ht
from hetu.backend import Device
from hetu.errors import MissingDependencyError
from hetu.gpu_kernels.update import Tensor, update_all

WANTED = {"copy": 1.0, "gelu": 0.8, "layer_norm": 0.8, "adam": 0.85, "softmax_cross_entropy": 0.75}  # of a copy
STEPS, LAUNCHES = 50, 20
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--workloads", nargs="+", choices=[*WORKLOADS], default=["mlp_adam", "wide_deep", "gpt", "resnet"]
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often all sides take their turn")
    parser.add_argument("--json", type=Path, help="a file for the results")
    arguments = parser.parse_args()
    try:
        xp = Device("gpu").xp
    except MissingDependencyError as error:
        print(f"no GPU: {error.message}")
        return
    results = {
        "steps (ms)": [steps(WORKLOADS[name](), xp, arguments.rounds) for name in arguments.workloads],
        "host time of a replayed step (us)": [host_time(WORKLOADS["tiny_mlp"](), xp)],
        "bandwidth (GB/s)": bandwidths(xp),
    }
    for title, rows in results.items():
        print(f"\n{title}\n{table(rows)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


# -- steps -------------------------------------------------------------------------------------------------------------


def steps(workload: Workload, xp: Any, rounds: int) -> Row:
    """Milliseconds of a step of each side, and the ratio of hetu to the others in the same rounds."""
    sides = {"hetu": hetu_step(workload)[0]}
    if importlib.util.find_spec("torch"):
        sides |= {"eager": torch_step(workload, compiled=False), "compiled": torch_step(workload, compiled=True)}
    for step in sides.values():
        timed(step, xp)
    times = {name: [] for name in sides}
    for _ in range(rounds):
        for name, step in sides.items():
            times[name].append(timed(step, xp))
    row: Row = {"workload": workload.name} | {name: statistics.median(t) for name, t in times.items()}
    for other in [name for name in sides if name != "hetu"]:
        row[f"/{other}"] = statistics.median(a / b for a, b in zip(times["hetu"], times[other]))
    return row


def timed(step: Callable[[], object], xp: Any) -> float:
    """Milliseconds of one of many steps, from the first launch to the end of the last kernel."""
    xp.cuda.runtime.deviceSynchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    xp.cuda.runtime.deviceSynchronize()
    return (time.perf_counter() - begin) / STEPS * 1e3


def hetu_step(workload: Workload) -> tuple[Callable[[], object], ht.Executor]:
    from peer_hetu import MODELS

    weights = {name: ht.variable(name, value) for name, value in workload.weights.items()}
    inputs = {name: ht.placeholder(name, a.shape, a.dtype) for name, a in workload.batches[0].items()}
    loss = MODELS[workload.name](weights, **inputs, **{n: ht.constant(a) for n, a in workload.fixed.items()})
    optimizer = {"sgd": ht.optim.SGD, "adam": ht.optim.Adam}[workload.optimizer](workload.learning_rate)
    executor = ht.Executor([optimizer.minimize(loss)], device="gpu")  # nothing is fetched, so nothing has to wait
    batches = itertools.cycle(workload.batches)
    return lambda: executor.run(next(batches)), executor


def torch_step(workload: Workload, compiled: bool) -> Callable[[], object]:
    import peer_torch
    import torch

    model = peer_torch.MODELS[workload.name](workload.weights, True, **workload.fixed)
    peer_torch._load(model, workload.weights)
    model = model.cuda()
    optimizer = peer_torch._optimizer(workload, model, best=True)
    run = torch.compile(model) if compiled else model
    batches = itertools.cycle([{k: torch.from_numpy(v).cuda() for k, v in b.items()} for b in workload.batches])

    def step() -> None:
        loss = run(**next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def host_time(workload: Workload, xp: Any) -> Row:
    """What a step costs the host while the device has less to do: copying the feed, and one launch."""
    step, executor = hetu_step(workload)
    timed(step, xp)
    program = executor.program(workload.batches[0])
    return {
        "step": timed(step, xp) * 1e3,
        "wanted": 50.0,
        "instructions": len(program.steps),
        "capture": str(program.captured),
    }


# -- kernels -----------------------------------------------------------------------------------------------------------


def bandwidths(xp: Any) -> list[Row]:
    """Bytes that each kernel has to move, over its time; and the share of what a plain copy reaches."""
    rows = []
    for name, (calls, nbytes) in kernels(xp).items():
        rate = nbytes / seconds(calls, xp) / 1e9
        rows.append(
            {
                "kernel": name,
                "GB/s": rate,
                "of a copy": rate / (rows[0]["GB/s"] if rows else rate),
                "wanted": WANTED[name],
            }
        )
    return rows


def kernels(xp: Any) -> dict[str, tuple[Sequence[Callable[[], object]], int]]:
    """Launches and the bytes they move at least."""
    from hetu.gpu_kernels.device import gpu

    x, y = xp.ones((16384, 4096), "float32"), xp.empty((16384, 4096), "float32")
    vector, logits = xp.ones(4096, "float32"), xp.ones((4096, 50257), "float32")
    labels, losses = xp.zeros(4096, "int64"), tuple(xp.empty(4096, "float32") for _ in range(2))
    parameters = [[xp.ones(1 << 22, "float32") for _ in range(4)] for _ in range(8)]
    tensors = [Tensor(p[:3], p[:3], p[3]) for p in parameters]
    adam = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.0}
    rate, step = xp.full((), 1e-3, "float64"), xp.full((), 7, "int64")
    return {
        "copy": ([lambda: xp.copyto(y, x)], 2 * x.nbytes),
        "gelu": (launches(xp, ht.gelu, y, x), 2 * x.nbytes),
        "layer_norm": (launches(xp, ht.layer_norm, y, x, vector, vector), 2 * x.nbytes),
        "adam": (update_all(gpu(), "adam", tensors, rate, step, adam), 7 * 8 * parameters[0][0].nbytes),
        "softmax_cross_entropy": (launches(xp, ht.softmax_cross_entropy, losses, logits, labels), logits.nbytes),
    }


def launches(xp: Any, function: Callable[..., ht.Node], out: Any, *arrays: Any) -> Sequence[Callable[[], object]]:
    """What a program would run for one operator on these arrays."""
    node = function(*(ht.placeholder(f"x{k}", a.shape, a.dtype) for k, a in enumerate(arrays)))
    if node.op.name == "item":
        node = node.inputs[0]
    return node.op.bound(xp, out, arrays, node.attrs)


def seconds(calls: Sequence[Callable[[], object]], xp: Any) -> float:
    """The median time of the calls, by events of the device."""
    times = []
    for _ in range(LAUNCHES):
        begin, end = xp.cuda.Event(), xp.cuda.Event()
        begin.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        times.append(xp.cuda.get_elapsed_time(begin, end) / 1e3)
    return statistics.median(times)


def table(rows: Sequence[Row]) -> str:
    cells = [[*rows[0]], *([f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows)]
    widths = [max(len(line[k]) for line in cells) for k in range(len(cells[0]))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths)) for line in cells)


if __name__ == "__main__":
    sys.exit(main())

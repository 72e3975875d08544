"""On a GPU: training steps of hetu against PyTorch, the host's time for a replayed step, and kernels against memory.

    python examples/benchmarks/gpu.py [--rows mlp gpt2_small | --all] [--rounds 5] [--json results.json]

Each row is a process: those of a wave build and compile at once, as far as the memory of the device goes, then one
after the other has the device for itself. Rows that the file of results already holds are left out, but for those that
failed. Steps of all sides are measured in turns, on data that lies on the device for PyTorch and is fed from the host
for hetu; the table shows medians and, beside each ratio, the one to reach. PyTorch is there as it ships ("eager":
convolutions may round to TF32, which hetu never does), with TF32 off ("exact"), and at its best ("compiled":
`cudnn.benchmark` and `torch.compile(mode="reduce-overhead")`, or "inductor", without CUDA graphs, where those crash
it), always with its fused optimizers and attention; in bfloat16 under autocast. Kernels are compared with the
bandwidth that a plain copy reaches in the same process. Without PyTorch its columns are left out; without a GPU the
script says so and ends.
`--quick` tries every row at a small size, in one process.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gpu_kernels import bandwidths, convolutions, kernels
from rows import WORKLOADS
from workloads import Workload

import hetu as ht
from hetu.core.backend import Device
from hetu.core.errors import MissingDependencyError
from hetu.files import write_text
from hetu.gpu_kernels import KERNELS
from hetu.gpu_kernels.check import machine, most_processes

TURN_SECONDS = 0.25  # of one side: long enough for the clocks of the device to stay up
ROW_SECONDS = 300.0
BYTES_OF_ROW = 16 << 30  # of the device, on average: GPT-2 small on four sides takes about 50 GB, the others far less
HOST_MICROSECONDS = 50.0  # of a replayed step, at most
LOSSES_AGREE = {"float32": 1e-3, "bfloat16": 2e-2}
SIDES = ("eager", "exact", "compiled")
WITHOUT_GRAPHS = ("eager", "exact", "inductor")  # PyTorch 2.11 crashes while it records graphs of some networks
Row = dict[str, Any]


class Case(NamedTuple):
    """A row that is trained, with the sizes to measure if they are others, and the ratios to reach."""

    row: str
    size: dict[str, Any] = {}  # noqa: RUF012 - never written
    precision: str = "float32"
    eager: float | None = None
    compiled: float | None = None

    def workload(self, turns: Turns | None) -> Workload:
        sized = WORKLOADS[self.row].sized(**self.size)
        return sized if turns else sized.shrunk()


GPT2 = {"d": 768, "vocabulary": 50257, "depth": 12, "length": 1024, "batch": 8}
CASES = {
    "mlp": Case("mlp_adam", eager=0.25, compiled=0.8),
    "wide_deep_1e6": Case("wide_deep", {"rows": 10**6}, eager=0.3),
    "wide_deep_1e7": Case("wide_deep", {"rows": 10**7}, eager=0.3),
    "gpt2_small": Case("gpt", GPT2, "bfloat16", eager=0.9, compiled=1.2),
    "resnet18": Case("resnet", {"batch": 128}, eager=0.9),
    "resnet18_bf16": Case("resnet", {"batch": 128}, "bfloat16", eager=0.9),
}
PASSES_OF = {  # what each pass of the room gains, at sizes of which many programs have room beside each other
    "mlp passes": CASES["mlp"],
    "mlp_fp16 passes": CASES["mlp"]._replace(precision="float16"),
    "gpt2_small passes": Case("gpt", GPT2 | {"batch": 2}, "bfloat16"),
    "resnet18_bf16 passes": CASES["resnet18_bf16"],
}
WAVES = (  # what builds at once: the quickest first, which say most of kernels; then large models; then what takes long
    ("host", "kernels", "mlp", "convolutions"),
    ("gpt2_small", "resnet18", "resnet18_bf16"),
    ("wide_deep_1e6", "wide_deep_1e7"),
    tuple(PASSES_OF),
)
ROWS = [name for wave in WAVES for name in wave]
USUAL = [name for name in ROWS if name not in PASSES_OF]
STEPS = "a training step (ms)"
TITLES = {"host": "a replayed step of a tiny MLP (us)", "kernels": "bandwidth (GB/s)"}
TITLES["convolutions"] = "3x3 convolutions of 128 images, and both gradients (us)"
TITLES |= dict.fromkeys(PASSES_OF, "a step without a pass, times one with all")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=USUAL, help="what to measure")
    parser.add_argument("--all", action="store_const", const=ROWS, dest="rows", help="and what each pass gains")
    parser.add_argument("--rounds", type=int, default=5, help="how often all sides take their turn")
    parser.add_argument("--json", type=Path, help="a file of results, to which each row is added")
    parser.add_argument("--quick", action="store_true", help="small sizes and few steps, to see that every row runs")
    parser.add_argument("--sides", nargs="*", default=SIDES, help=argparse.SUPPRESS)  # for the process of one row
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.lock:
        print(json.dumps(rows_of(chosen.rows[0], chosen.rounds, Turns(chosen.lock), chosen.sides)))
        return
    try:
        found = machine()
    except MissingDependencyError as error:
        print(f"no GPU: {error.message}")
        return
    results = begun(chosen.json, found)
    rows, most = results["rows"], most_processes(found["bytes"], BYTES_OF_ROW)
    left = [name for name in chosen.rows if any("failed" in row for row in rows.get(name, [{"failed": ""}]))]
    for name, made in measured(left, chosen.rounds, chosen.quick, most):
        rows[name] = made
        title = TITLES.get(name, STEPS)
        alike = [row for other in rows if TITLES.get(other, STEPS) == title for row in rows[other]]
        print(f"\n{title}\n{table(alike)}", flush=True)
        if chosen.json:
            write_text(chosen.json, json.dumps(results, indent=1))


def begun(path: Path | None, found: dict[str, Any]) -> dict[str, Any]:
    """The machine, and the rows by name that a file has of one like it; a file of another is put aside.

    Two devices of one kind may differ by some bytes of their memory.
    """
    kept: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {}
    alike = kept.get("machine", {}) | {"bytes": found["bytes"]} == found
    if kept and not alike:
        path.replace(path.with_suffix(".before.json"))
    return {"machine": found, "rows": kept["rows"] if alike else {}}


def measured(names: Sequence[str], rounds: int, quick: bool, most: int) -> Iterator[tuple[str, list[Row]]]:
    """The rows under each name as they are done, `most` at once; one that fails says why, and leaves the others."""
    if quick:
        for name in names:
            try:
                yield name, rows_of(name, rounds, None)
            except Exception as error:
                traceback.print_exc()
                yield name, [{"row": name, "failed": f"{type(error).__name__}: {error}"}]
        return
    for wave in WAVES:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(most) as pool:
            futures = {pool.submit(apart, name, rounds, f"{folder}/lock"): name for name in wave if name in names}
            for future in as_completed(futures):
                yield futures[future], future.result()


def apart(name: str, rounds: int, lock: str) -> list[Row]:
    """The rows under a name, from a process; if PyTorch is the end of it, from another one without its CUDA graphs."""
    command = [sys.executable, __file__, "--lock", lock, "--rounds", str(rounds), "--rows", name]
    failed = []
    for sides in (SIDES, WITHOUT_GRAPHS):
        try:
            done = subprocess.run([*command, "--sides", *sides], stdout=subprocess.PIPE, text=True, timeout=ROW_SECONDS)
        except subprocess.TimeoutExpired as error:
            failed.append(str(error))
        else:
            if done.returncode == 0:
                return [
                    row | ({"compiled": failed[0]} if failed else {})
                    for row in json.loads(done.stdout.splitlines()[-1])
                ]
            failed.append(f"ends with status {done.returncode}")
    return [{"row": name, "failed": failed[-1]}]


class Turns:
    """Who builds shares a lock with all who do; who measures has it alone, once the others have built."""

    def __init__(self, path: Path) -> None:
        import fcntl  # of POSIX only

        self.file, self.fcntl = path.open("w"), fcntl
        fcntl.flock(self.file, fcntl.LOCK_SH)

    def take(self) -> None:
        self.fcntl.flock(self.file, self.fcntl.LOCK_UN)
        self.fcntl.flock(self.file, self.fcntl.LOCK_EX)


def rows_of(name: str, rounds: int, turns: Turns | None, sides: Sequence[str] = SIDES) -> list[Row]:
    """What is measured under a name, a model, the host or the kernels; without `turns` at a small size and at once."""
    xp, others = Device("gpu").xp, sides if has_torch(quick=turns is None) else ()
    if name == "kernels":
        return bandwidths(kernels(xp, quick=turns is None), xp, turns)
    if name == "convolutions":
        return convolutions(xp, turns, others)
    if name == "host":
        return [host_time(WORKLOADS["tiny_mlp"], xp, turns)]
    if name in PASSES_OF:
        return [{"row": name, **gains(PASSES_OF[name], xp, rounds, turns)}]
    return [steps(name, xp, rounds, turns, others)]


# -- steps -------------------------------------------------------------------------------------------------------------


def steps(name: str, xp: Any, rounds: int, turns: Turns | None, others: Sequence[str]) -> Row:
    """Milliseconds of a step of each side, and the ratio of hetu to the others in the same rounds."""
    case = CASES[name]
    workload = case.workload(turns)
    sides, failed = {"hetu": hetu_step(workload, case.precision)[:2]}, {}
    for side in others:
        try:
            sides[side] = torch_step(workload, case.precision, side)
        except Exception as error:
            failed[side] = type(error).__name__
            print(f"{name}: PyTorch {side} fails: {failed[side]}: {error}", file=sys.stderr)
    times: dict[str, list[float]] = {side: [] for side in sides}
    if turns:
        turns.take()
    for turn in range(rounds + 1):
        for side, (_, step) in sides.items():
            elapsed = timed(step, xp, turns)
            if turn:  # the first is for warming up
                times[side].append(elapsed)
    losses = [loss for loss, _ in sides.values()]
    row: Row = {"row": name, "precision": case.precision, "hetu": statistics.median(times["hetu"])}
    wanted = {"eager": case.eager, "compiled": case.compiled}
    for side in [s for s in times if s != "hetu"]:
        ratio = statistics.median(a / b for a, b in zip(times["hetu"], times[side]))
        row |= {side: statistics.median(times[side]), f"/{side}": ratio, f"{side} wanted": wanted.get(side)}
    agree = bool(np.allclose(losses, losses[0], rtol=LOSSES_AGREE[case.precision]))
    return row | failed | {"losses agree": agree if len(losses) > 1 else None}


def timed(step: Callable[[], object], xp: Any, turns: Turns | None) -> float:
    """Milliseconds of a step, from the first launch of many to the end of the last kernel."""
    step()
    xp.cuda.runtime.deviceSynchronize()
    begin, count = time.perf_counter(), 0
    while count < 3 or (turns and time.perf_counter() - begin < TURN_SECONDS):
        for _ in range(5 if turns else 1):
            step()
        count += 5 if turns else 1
        xp.cuda.runtime.deviceSynchronize()
    return (time.perf_counter() - begin) / count * 1e3


def gains(case: Case, xp: Any, rounds: int, turns: Turns | None) -> dict[str, float]:
    """The time of a step without each pass of the room of GPUs by that with all, in turns."""
    names = [run.__name__ for run in KERNELS.passes]
    made = [hetu_step(case.workload(turns), case.precision, without=name)[1] for name in ("", *names)]
    if turns:
        turns.take()
    times = np.array([[timed(step, xp, turns) for step in made] for _ in range(rounds + 1)])[1:]
    return dict(zip(names, np.median(times[:, 1:] / times[:, :1], axis=0).tolist()))


def hetu_step(
    workload: Workload, precision: str = "float32", without: str = ""
) -> tuple[float, Callable[[], object], ht.Executor]:
    """The loss of a first step, and what makes another one; `without` one pass."""
    import peer_hetu

    loss, _ = peer_hetu.built(workload)
    updates = peer_hetu.optimizer_of(workload).minimize(loss)
    entries = {"first": [loss, updates], "train": [updates]}  # nothing is fetched later, so nothing has to wait
    passes = [name for name in peer_hetu.passes_of(workload, "gpu") if name != without]
    executor = ht.Executor(entries, device="gpu", precision=precision, passes=passes)
    made = workload.batches()
    first, batches = float(executor.run("first", made[0])[0]), itertools.cycle(made)
    step = lambda: executor.run("train", next(batches))  # noqa: E731
    for _ in range(3):  # the second run of a program records its graph
        step()
    return first, step, executor


def has_torch(quick: bool) -> bool:
    """Whether PyTorch is there, with a GPU; to try the rows, the CPU does."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return quick or torch.cuda.is_available()


def torch_step(workload: Workload, precision: str, side: str) -> tuple[float, Callable[[], object]]:
    """As `hetu_step`, of one of SIDES."""
    import peer_torch
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = peer_torch.Words(workload, best=True, device=device)
    optimizer = words.optimizer()
    compiled, mode = side in ("compiled", "inductor"), "reduce-overhead" if side == "compiled" else "default"
    run = torch.compile(words.run, mode=mode) if compiled else words.run
    there = [{k: torch.from_numpy(v).to(device) for k, v in batch.items()} for batch in workload.batches()]
    batches = itertools.chain(there[:1], itertools.cycle(there))
    cudnn = torch.backends.cudnn

    def step() -> Any:
        cudnn.benchmark, cudnn.allow_tf32 = compiled, side != "exact"
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
            loss = run(**next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    first = step().item()
    for _ in range(3):  # the compiled side records its graphs
        step()
    return first, step


def host_time(workload: Workload, xp: Any, turns: Turns | None) -> Row:
    """What a step costs the host, by the clock of its thread: copying the feed, and one launch; and the whole of it."""
    _, step, executor = hetu_step(workload)
    if turns:
        turns.take()
    whole, hosts, count = [timed(step, xp, turns) for _ in range(5)], [], 100 if turns else 2
    for _ in range(5):
        begin = time.thread_time()
        for _ in range(count):
            step()
        hosts.append((time.thread_time() - begin) / count * 1e6)
        xp.cuda.runtime.deviceSynchronize()
    program = executor.program("train", workload.batches()[0])
    return {
        "host": statistics.median(hosts),
        "wanted": HOST_MICROSECONDS,
        "with the device": statistics.median(whole) * 1e3,
        "instructions": len(program.steps),
        "capture": str(program.captured),
    }


def table(rows: Sequence[Row]) -> str:
    """The rows under the names of all their columns; what a row does not have is a dash."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_shown(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[k]) for line in cells) for k in range(len(names))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths)) for line in cells)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())

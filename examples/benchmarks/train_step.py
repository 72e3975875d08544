"""How long one training step takes on a CPU: hetu beside PyTorch and JAX, from the same data and initial weights.

    python examples/benchmarks/train_step.py --json result.json

Each peer works in a process of its own, and they take turns (A B C, C B A, ...) in making equally many steps. A ratio
is the median over the rounds of hetu's time by the peer's time in the same round, with the least and the greatest. A
row counts only if the first four losses of all peers agree to 5 digits.

With 1 thread the CPU time of the process is measured, which other programs hardly change. With 2 threads it is wall
time, and a round counts only if the machine was idle before it and no thread had to wait for a core; "rounds" says
how many did. "start s" is the CPU time from the weights to the first loss, less that of a step: building, optimizing
and compiling. "MB" is the most memory of the training process above what it held before, libraries and data apart.
With --split hetu uses its 2 threads in another way: either trains on half of the batch, with one BLAS thread.
Each library chooses its kernels itself: `OPENBLAS_CORETYPE` and `OPENBLAS_L2_SIZE`, which may halve the speed of
NumPy's BLAS, are kept from the peers, and the last line says what it chose. Peers that are not installed are left out.
With --compiled also the best PyTorch variant under torch.compile; the time to compile is in nobody's step.
Ignored on purpose: GPUs, accuracy, JAX at its best (its peer is what one writes by default, without ResNet).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sampling import Peer, PeerError, Sample
from tqdm import tqdm
from workloads import WORKLOADS

SAMPLE_SECONDS = 0.15
LOSS_TOLERANCE = 1e-5
WARM_UP_STEPS = 4
TORCH, TORCH_BEST, COMPILED = ("torch", "default"), ("torch", "best"), ("torch", "compiled")
JAX, NOT_IN_JAX = ("jax", "default"), ("resnet",)
TORCH_AT_ITS_BEST = {
    "tiny_mlp": "fused SGD",
    "mlp_sgd": "fused SGD",
    "mlp_adam": "fused Adam",
    "lenet": "channels last, fused SGD, malloc told to keep freed memory",
    "resnet": "channels last, fused SGD, malloc told to keep freed memory",
    "lstm": "nn.LSTM instead of a loop over nn.LSTMCell, fused SGD",
    "gpt": "scaled_dot_product_attention, fused Adam",
    "gpt_256": "scaled_dot_product_attention, fused Adam",
    "wide_deep": "sparse embedding gradients",
    "gcn": "CSR products with a symmetric gradient (by default too), fused Adam",
}
Row = dict[str, Any]


def main() -> None:
    arguments = parse_arguments()
    others = peers_installed(arguments.compiled)
    if not others:
        print("Neither PyTorch nor JAX is installed: timing hetu alone.")
    rows: list[Row] = []
    for threads in [arguments.threads] if arguments.threads else [1, 2]:
        for name in arguments.workloads:
            hetu = ("hetu", "split" if arguments.split and threads == 2 else "default")
            kinds = [hetu, *(kind for kind in others if kind != JAX or name not in NOT_IN_JAX)]
            rows.append(measure(name, threads, arguments.rounds, kinds))
            result = {"machine": machine(rows), "rows": rows}
            if arguments.json:  # after each row, so that an interruption loses little
                arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(report(result))


def peers_installed(compiled: bool) -> list[tuple[str, str]]:
    torch, jax = (importlib.util.find_spec(name) is not None for name in ("torch", "jax"))
    return [
        *([TORCH, TORCH_BEST] if torch else []),
        *([COMPILED] if torch and compiled else []),
        *([JAX] if jax else []),
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), metavar="NAME",
                        help=f"which of: {' '.join(WORKLOADS)} (default: all)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7, help="samples of each peer (default: 7)")
    parser.add_argument("--threads", type=int, choices=(1, 2), help="CPU time with 1, wall time with 2 (default: both)")
    parser.add_argument("--split", action="store_true", help="let hetu divide batches between the 2 threads")
    parser.add_argument("--compiled", action="store_true", help="also time torch.compile, which needs a C++ compiler")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all samples, losses and versions here")
    return parser.parse_args()


def measure(workload: str, threads: int, rounds: int, kinds: Sequence[tuple[str, str]]) -> Row:
    """One row of the table: all peers on one workload, in turns. A peer that fails is noted and left out."""
    row: Row = {"workload": workload, "threads": threads, "summary": WORKLOADS[workload]().summary, "errors": []}
    with contextlib.ExitStack() as stack:
        peers: list[Peer] = []
        for kind in kinds:
            try:
                peers.append(Peer(*kind, workload, threads))
                stack.callback(peers[-1].close)
            except PeerError as error:
                row["errors"].append(str(error))
        row["losses"] = {peer.title: peer.first["losses"] for peer in peers}
        row["start"] = {peer.title: peer.first["start"] for peer in peers}
        row["peak"] = {peer.title: peer.first["peak"] for peer in peers}
        row["versions"] = {k: v for peer in peers for k, v in peer.first["versions"].items()}
        row["valid"] = losses_agree(list(row["losses"].values()))
        row["samples"] = {peer.title: [] for peer in peers}
        row["steps"] = steps_per_sample(peers, threads)
        for i in tqdm(range(rounds if peers else 0), desc=f"{workload}, {threads} thread(s)", leave=False):
            for peer in peers if i % 2 == 0 else reversed(peers):
                sample = peer.cpu_sample(row["steps"]) if threads == 1 else peer.wall_sample(row["steps"])
                row["samples"][peer.title].append(vars(sample))
    return row


def steps_per_sample(peers: Sequence[Peer], threads: int) -> int:
    """Steps after which the fastest peer has worked for SAMPLE_SECONDS. All make the same number, also to warm up."""
    steps, clock = WARM_UP_STEPS, "cpu" if threads == 1 else "wall"
    while peers:
        fastest = min(peer.run(steps)[clock] for peer in peers)
        if fastest >= SAMPLE_SECONDS:
            break
        steps = math.ceil(steps * min(10.0, 1.2 * SAMPLE_SECONDS / max(fastest, 1e-9)))
    return steps


def losses_agree(losses: Sequence[Sequence[float]]) -> bool:
    """Whether all peers report the same losses, to 5 digits."""
    return all(np.allclose(other, losses[0], rtol=LOSS_TOLERANCE, atol=0.0) for other in losses[1:])


def machine(rows: Sequence[Row]) -> dict[str, str]:
    """What the figures depend on: processor, system, versions."""
    processor = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), processor)
    versions = {k: v for row in rows for k, v in row["versions"].items()}
    return {"processor": processor, "system": platform.platform(), "python": platform.python_version()} | versions


def report(result: dict[str, Any]) -> str:
    """The table in Markdown, and below it what it depends on."""
    best = "; ".join(f"{name}: {what}" for name, what in TORCH_AT_ITS_BEST.items())
    others = list(dict.fromkeys(title for row in result["rows"] for title in row["losses"] if title != "hetu"))
    heads = ["workload", "threads", "hetu ms", *(head for o in others for head in (f"{o} ms", f"hetu / {o}"))]
    heads += ["rounds", "start s", *(f"{title} MB" for title in ("hetu", *others))]
    lines = [
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
        *(table_row(row, others) for row in result["rows"]),
        "",
        *(f"{row['workload']}: {error}" for row in result["rows"] for error in row["errors"]),
        "1 thread: CPU time of the process; 2 threads: wall time. Median of paired ratios (least - greatest).",
        *([f"Torch at its best: {best}."] if "torch" in result["machine"] else []),
        ", ".join(f"{key} {value}" for key, value in result["machine"].items()),
    ]
    return "\n".join(lines)


def table_row(row: Row, others: Sequence[str]) -> str:
    samples = {title: [Sample(**sample) for sample in taken] for title, taken in row["samples"].items()}
    clean = [i for i in range(min(map(len, samples.values()), default=0)) if all(s[i].clean for s in samples.values())]
    times = {title: [taken[i].seconds for i in clean] for title, taken in samples.items()}
    mine = times.get("hetu", [])
    cells = [row["summary"], row["threads"], milliseconds(mine)]
    for other in others:
        cells += [milliseconds(times.get(other, [])), ratio(mine, times.get(other, []))]
        cells[-1] = cells[-1] if row["valid"] else "void: losses differ"
    start = row["start"].get("hetu")
    cells += [len(clean), f"{max(0.0, start - statistics.median(mine)):.2f}" if start and mine else "-"]
    cells += [f"{peak / 1e6:.0f}" if (peak := row["peak"].get(title)) else "-" for title in ("hetu", *others)]
    return f"| {' | '.join(map(str, cells))} |"


def milliseconds(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.3g}" if seconds else "-"


def ratio(mine: Sequence[float], others: Sequence[float]) -> str:
    """Median of the paired ratios with the least and the greatest."""
    ratios = [a / b for a, b in zip(mine, others, strict=False)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})" if ratios else "-"


if __name__ == "__main__":
    sys.exit(main())

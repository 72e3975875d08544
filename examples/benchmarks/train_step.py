"""How long a step takes on a CPU: hetu beside PyTorch, JAX and TensorFlow, from the same data and initial weights.

    python examples/benchmarks/train_step.py --quick --family cnn recurrent

Rows are families of models in several shapes and batch sizes, training and inference (`rows.py`). Each peer works in a
process of its own, and they take turns (A B C, C B A, ...) in making equally many steps. A ratio is the median over
the rounds of hetu's time by the peer's time in the same round, with the least and the greatest. A row counts only if
the first losses of all peers, or their outputs in inference, agree to 5 digits.

With 1 thread the CPU time of the process is measured, which other programs hardly change. With 2 threads it is wall
time, and a round counts only if the machine was idle before it and no thread had to wait for a core; "rounds" says
how many did. "start s" is the CPU time from the weights to the first result, less that of a step: building, optimizing
and compiling. "MB" is the most memory of the process above what it held before, libraries and data apart.
All rows with everything take hours. With --quick each takes a few seconds, all about 6 minutes on an idle machine: 1
thread, PyTorch at its best only, short rounds. --save keeps rows in `results/`, a file for each kind of CPU; --saved
shows these side by side.
"hetu, NumPy alone" is hetu without a C compiler (`HETU_CC=0`). With --split hetu uses its 2 threads in another way:
either trains on half of the batch, with one BLAS thread.
Each library chooses its kernels itself: `OPENBLAS_CORETYPE` and `OPENBLAS_L2_SIZE`, which may halve the speed of
NumPy's BLAS, are kept from the peers, and the last line says what it chose. Peers that are not installed are left out.
With --compiled also the best PyTorch variant under torch.compile; the time to compile is in nobody's step.
Ignored on purpose: GPUs, accuracy, JAX and TensorFlow at their best (their peers are what one writes by default).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import sys
from collections.abc import Sequence

import numpy as np
from rows import FAMILIES, WORKLOADS
from sampling import ALONE, Peer, PeerError
from standings import Row, machine, save, side_by_side, summary, table
from tqdm import tqdm

SAMPLE_SECONDS, QUICK_SECONDS = 0.15, 0.05
ROUNDS, QUICK_ROUNDS = 7, 5
TOLERANCE = 1e-5
TORCH, TORCH_BEST, COMPILED = ("torch", "default"), ("torch", "best"), ("torch", "compiled")
NUMPY = ("hetu", ALONE)
JAX, TENSORFLOW = ("jax", "default"), ("tensorflow", "default")


def main() -> None:
    arguments = parse_arguments()
    if arguments.saved:
        print(side_by_side())
        return
    others = peers_installed(arguments)
    rows: list[Row] = []
    for threads in [arguments.threads] if arguments.threads else [1] if arguments.quick else [1, 2]:
        for name in chosen(arguments):
            hetu = ("hetu", "split" if arguments.split and threads == 2 else "default")
            rows.append(measure(name, threads, [hetu, *others], arguments.rounds, arguments.quick))
            if arguments.save:  # after each row, so that an interruption loses little
                save(about(rows), rows)
    print(table(rows), summary(rows), about_text(rows), sep="\n\n")


def chosen(arguments: argparse.Namespace) -> list[str]:
    named = arguments.workloads or [name for name, row in WORKLOADS.items() if row.family in arguments.family]
    return [name for name in named if not arguments.split or WORKLOADS[name].trains]


def peers_installed(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    torch, jax, tensorflow = (importlib.util.find_spec(name) is not None for name in ("torch", "jax", "tensorflow"))
    return [
        *([NUMPY] if not arguments.quick else []),
        *([TORCH] if torch and not arguments.quick else []),
        *([TORCH_BEST] if torch else []),
        *([COMPILED] if torch and arguments.compiled else []),
        *([JAX] if jax and not arguments.quick else []),
        *([TENSORFLOW] if tensorflow and not arguments.quick else []),
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), metavar="NAME",
                        help=f"which of: {' '.join(WORKLOADS)} (default: all)")  # fmt: skip
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=FAMILIES, metavar="FAMILY",
                        help=f"all rows of: {', '.join(FAMILIES)} (default: all)")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="1 thread, PyTorch's best only, short rounds")
    parser.add_argument("--rounds", type=int, help=f"samples of each peer (default: {ROUNDS}, quick: {QUICK_ROUNDS})")
    parser.add_argument("--threads", type=int, choices=(1, 2), help="CPU time with 1, wall time with 2 (default: both)")
    parser.add_argument("--split", action="store_true", help="let hetu divide batches between the 2 threads")
    parser.add_argument("--compiled", action="store_true", help="also time torch.compile, which needs a C++ compiler")
    parser.add_argument("--save", action="store_true", help="keep the rows in the file of this CPU in results/")
    parser.add_argument("--saved", action="store_true", help="only show the results of all CPUs that are in results/")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    return arguments


def measure(name: str, threads: int, kinds: Sequence[tuple[str, str]], rounds: int, quick: bool) -> Row:
    """One row of the table: all peers on one workload, in turns. A peer that fails is noted and left out."""
    workload = WORKLOADS[name]
    row: Row = {"workload": name, "family": workload.family, "threads": threads, "summary": workload.summary}
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(contextlib.closing(Peer(*kind, name, threads))) for kind in kinds]
        peers, row["errors"] = answering(started)
        row |= {part: {p.title: p.first[part] for p in peers} for part in ("results", "start", "peak")}
        row["versions"] = {k: v for peer in peers for k, v in peer.first["versions"].items()}
        row["valid"] = agree(list(row["results"].values()))
        row["steps"] = steps_per_sample(peers, threads, QUICK_SECONDS if quick else SAMPLE_SECONDS)
        taken = []
        for i in tqdm(range(rounds if peers else 0), desc=f"{name}, {threads} thread(s)", leave=False):
            turns = [(p, p.sample(row["steps"], wall=threads > 1)) for p in (peers if i % 2 == 0 else peers[::-1])]
            if all(sample.clean for _, sample in turns):
                taken.append({peer.title: sample.seconds for peer, sample in turns})
    row["seconds"] = {peer.title: [float(f"{times[peer.title]:.4g}") for times in taken] for peer in peers}
    return row


def answering(started: Sequence[Peer]) -> tuple[list[Peer], list[str]]:
    """The peers that made their first steps, and what kept the others from it."""
    peers, errors = [], []
    for peer in started:
        try:
            assert peer.first
            peers.append(peer)
        except PeerError as error:
            errors.append(str(error))
    return peers, errors


def steps_per_sample(peers: Sequence[Peer], threads: int, seconds: float) -> int:
    """Steps after which the fastest peer has worked that long. All make the same number, also to warm up."""
    steps, clock = 1, "cpu" if threads == 1 else "wall"
    while peers:
        fastest = min(peer.run(steps)[clock] for peer in peers)
        if fastest >= seconds:
            break
        steps = math.ceil(steps * min(10.0, 1.2 * seconds / max(fastest, 1e-9)))
    return steps


def agree(results: Sequence[Sequence[float]]) -> bool:
    """Whether all peers report the same losses or outputs, to 5 digits."""
    return all(np.allclose(other, results[0], rtol=TOLERANCE, atol=0.0) for other in results[1:])


def about(rows: Sequence[Row]) -> dict[str, str]:
    """What the figures depend on: processor, system, versions."""
    return machine() | {k: v for row in rows for k, v in row["versions"].items()}


def about_text(rows: Sequence[Row]) -> str:
    return (
        "1 thread: CPU time of the process; 2 threads: wall time. Median of paired ratios (least - greatest).\n"
        + ", ".join(f"{key} {value}" for key, value in about(rows).items())
    )


if __name__ == "__main__":
    sys.exit(main())

"""The end of the cumulative track: LeNet by the student's own system on four ranks, in a table beside hetu's.

The student's files run as they would without this command, by their own `transport.py` and `train.py`, with the rights
of the person who asks. Nothing is graded here; `beside.py` is what hetu does with the same weights and batches.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import ArgumentError
from ...look.columns import in_columns
from .beside import WAYS, bytes_a_step, digits

RANKS = {"one": 1, "server": 5}  # of the student's system; the others have four
PATIENCE = 600  # seconds, for one way
HEAD = ("way", "loss", "hetu's", "right", "hetu's", "kB", "hetu's", "ms", "hetu's", "foretold")  # 80 columns

Figures = dict[str, Any]


def figures(folder: Path, epochs: int, ways: Sequence[str] = tuple(WAYS)) -> str:
    """Train LeNet by the files in `folder` and by hetu in each of `ways`, and write both in one table.

    Bytes are those of a step, of all ranks together; milliseconds those of a step as a clock on the wall saw it. The
    last column is what the student's planner foretold. ArgumentError where the track's files do not stand in `folder`.
    """
    for name in ("transport.py", "train.py"):
        if not (folder / name).is_file():
            raise ArgumentError(f"there is no {folder / name}", fix="name the folder of the track: --labs FOLDER")
    with tempfile.TemporaryDirectory() as made:
        images, result = Path(made, "digits.npz"), Path(made, "result.json")
        with open(images, "wb") as file:
            np.savez(file, allow_pickle=False, **digits())
        told = own(folder, "plan", images, result, epochs)
        rows: list[tuple[str, ...]] = [HEAD]
        for way in ways:
            mine, hetus = own(folder, way, images, result, epochs), hetu(way, images, result, epochs)
            rows.append(row(way, mine, hetus | {"bytes_a_step": bytes_a_step(way)}, told["ms"].get(way)))
    chosen = ", ".join(f"{name} {size}" for name, size in told["chosen"].items())
    table = in_columns(rows, right=set(range(1, len(HEAD))))
    return "\n".join([*table, "kB and ms are those of a step", f"your planner chooses {chosen}"])


def row(way: str, mine: Figures, hetus: Figures, foretold: float | None) -> tuple[str, ...]:
    """A line of the table."""
    cells = [way]
    both = (mine, hetus)
    cells += [f"{each['losses'][-1]:.4f}" for each in both]
    cells += [f"{each['accuracy']:.1%}" for each in both]
    cells += [f"{each['bytes_a_step'] / 1e3:,.0f}" for each in both]
    cells += [f"{each['ms_a_step']:.1f}" for each in both]
    return (*cells, "-" if foretold is None else f"{foretold:.1f}")


def own(folder: Path, way: str, images: Path, result: Path, epochs: int) -> Figures:
    """What the student's system comes to."""
    here = folder.resolve()
    command = [here / "transport.py", RANKS.get(way, 4), here / "train.py", way, images, result, epochs]
    return read(f"your system, {way}", [sys.executable, *map(str, command)], result)


def hetu(way: str, images: Path, result: Path, epochs: int) -> Figures:
    """What hetu comes to, on as many ranks."""
    script = [sys.executable, "-m", "hetu.teach.labs.beside", way, str(images), str(result), str(epochs)]
    if way != "one":
        servers = ["-s", "1"] if way == "server" else []
        script = [sys.executable, "-m", "hetu.dist.launch.heturun", "-w", "4", *servers, *script]
    return read(f"hetu, {way}", script, result)


def read(what: str, command: Sequence[str], result: Path) -> Figures:
    """Run a command that writes `result`. ArgumentError with its last words if it fails or is too slow."""
    result.unlink(missing_ok=True)
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise ArgumentError(f"{what} has not ended in {PATIENCE} s", fix="check the labs first: check all") from None
    if ran.returncode or not result.is_file():
        words = (ran.stderr or ran.stdout).strip().split("\n")[-1]
        raise ArgumentError(f"{what}: {words}", fix="check the labs first: `hetu lab track check all`")
    return json.loads(result.read_text("utf-8"))

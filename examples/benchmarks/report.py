"""The parts of a benchmark, one after the other: a title, a table of its rows, and all rows as JSON at the end.

Ignored on purpose: what is measured, and how.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Parts = Mapping[str, tuple[str, Callable[[argparse.Namespace], list[Row]]]]


def add_arguments(parser: argparse.ArgumentParser, parts: Parts, rounds: int) -> None:
    """`--parts`, `--rounds` and `--json`, which all such benchmarks have."""
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts), metavar="PART",
                        help=f"which of: {' '.join(parts)} (default: all)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=rounds, help=f"samples of each side (default: {rounds})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all rows here")


def report(arguments: argparse.Namespace, parts: Parts) -> None:
    """Measure the parts that are asked for, and show each as soon as it is there."""
    result = {}
    for name in arguments.parts:
        title, measure = parts[name]
        print(f"\n{title}")
        rows = result[name] = measure(arguments)
        print_table(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def print_table(rows: Iterable[Row], *, widest: int = 0) -> None:
    """Left-aligned columns; the names come from the first row.

    Of rows that are still to come each is shown when it is there, in columns as wide as those before it; the first has
    `widest` letters at least.
    """
    widths, parts = [widest], [rows] if isinstance(rows, Sequence) else ([row] for row in rows)
    for part in parts:
        cells = [[*map(format_cell, row.values())] for row in part]
        if len(widths) == 1:
            cells.insert(0, [*part[0]])
        widths = [max(pair) for pair in zip_longest(widths, *([*map(len, line)] for line in cells), fillvalue=0)]
        for line in cells:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip(), flush=True)


def format_cell(value: object) -> str:
    """A list is one of quartiles: the median comes first."""
    if isinstance(value, list):
        low, middle, high = (f"{v:.2f}" if isinstance(v, float) else v for v in value)
        return f"{middle} ({low}-{high})"
    return f"{value:.3g}" if isinstance(value, float) else str(value)

"""What measured rows say: ratios, the geometric mean, how many are won, the worst; and results of several CPUs.

A row holds, for each peer, the seconds of a step in every round. Its ratio is hetu's time by the time of PyTorch's
fastest variant in that row, the median over the rounds. Ignored on purpose: how the times were taken.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
WORST = 20
Row = dict[str, Any]


def ratios(row: Row, other: str) -> list[float]:
    """Hetu's time by that of `other`, round by round; none if the row is void or a peer failed."""
    times = row["seconds"]
    return [a / b for a, b in zip(times.get("hetu", []), times.get(other, []))] if row["valid"] else []


def best_of_torch(row: Row) -> str | None:
    """The fastest variant of PyTorch in this row."""
    variants = {title: taken for title, taken in row["seconds"].items() if title.startswith("torch") and taken}
    return min(variants, key=lambda title: statistics.median(variants[title]), default=None)


def standing(row: Row) -> float | None:
    """The median ratio to PyTorch's best."""
    found = ratios(row, best_of_torch(row) or "")
    return statistics.median(found) if found else None


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def summary(rows: Sequence[Row]) -> str:
    """Rows won, rows left out (void, or a peer failed), the geometric mean; also by family; and the worst rows."""
    families = dict.fromkeys(row["family"] for row in rows)
    parts = {"all": list(rows)} | {name: [row for row in rows if row["family"] == name] for name in families}
    lines = ["| hetu / PyTorch's best | rows | won | left out | geometric mean | worst |", "|---" * 6 + "|"]
    for name, part in parts.items():
        known = [(s, row["workload"]) for row in part if (s := standing(row)) is not None]
        cells = [name, len(part), sum(s < 1 for s, _ in known), len(part) - len(known)]
        cells += (
            [f"{geometric_mean([s for s, _ in known]):.2f}", "{:.2f} ({})".format(*max(known))] if known else ["-", "-"]
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    known = [(s, row) for row in rows if (s := standing(row)) is not None]
    worst = sorted(known, key=lambda pair: -pair[0])[:WORST]
    names = "; ".join(f"{row['workload']} ({row['family']}) {s:.2f}" for s, row in worst)
    others = dict.fromkeys(title for row in rows for title in row["seconds"] if title != "hetu")
    against = {title: [statistics.median(r) for row in rows if (r := ratios(row, title))] for title in others}
    means = "; ".join(f"{title} {geometric_mean(found):.2f}" for title, found in against.items() if found)
    return "\n".join([*lines, "", f"Geometric means against {means}.", f"Slowest against PyTorch: {names}."])


def table(rows: Sequence[Row]) -> str:
    """All rows in Markdown."""
    others = list(dict.fromkeys(title for row in rows for title in row["seconds"] if title != "hetu"))
    heads = [
        "family",
        "row",
        "what",
        "threads",
        "hetu ms",
        *(head for o in others for head in (f"{o} ms", f"hetu / {o}")),
    ]
    heads += ["rounds", "start s", *(f"{title} MB" for title in ("hetu", *others))]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(_line(row, others) for row in rows)]
    return "\n".join([*lines, *(f"{row['workload']}: {error}" for row in rows for error in row["errors"])])


def _line(row: Row, others: Sequence[str]) -> str:
    mine = row["seconds"].get("hetu", [])
    cells = [row["family"], row["workload"], row["summary"], row["threads"], _milliseconds(mine)]
    for other in others:
        found = ratios(row, other)
        spread = f"{statistics.median(found):.2f} ({min(found):.2f} - {max(found):.2f})" if found else "-"
        cells += [_milliseconds(row["seconds"].get(other, [])), spread if row["valid"] else "void: results differ"]
    start = row["start"].get("hetu")
    cells += [len(mine), f"{max(0.0, start - statistics.median(mine)):.2f}" if start and mine else "-"]
    cells += [f"{peak / 1e6:.0f}" if (peak := row["peak"].get(title)) else "-" for title in ("hetu", *others)]
    return f"| {' | '.join(map(str, cells))} |"


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.3g}" if seconds else "-"


def machine() -> dict[str, str]:
    """Processor and system."""
    processor = platform.processor()
    with contextlib.suppress(OSError):
        found = dict(
            re.findall(r"^(model name|cpu family|model)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        )
        processor = "{model name} ({cpu family}, {model})".format(**found)
    return {"processor": processor, "system": platform.platform(), "python": platform.python_version()}


def save(about: dict[str, str], rows: Sequence[Row], folder: Path = RESULTS) -> Path:
    """Keep rows in the file of this processor; older ones of the same name and number of threads are replaced."""
    path = folder / f"cpu_{re.sub('[^a-z0-9]+', '_', about['processor'].lower()).strip('_')}.json"
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    merged = {(row["workload"], row["threads"]): row for row in (*old, *rows)}
    lines = ",\n".join(json.dumps(row) for row in merged.values())
    path.write_text(f'{{"machine": {json.dumps(about)},\n"rows": [\n{lines}\n]}}\n')
    return path


def side_by_side(folder: Path = RESULTS) -> str:
    """The saved ratios to PyTorch's best of every processor, a column each."""
    saved = [json.loads(path.read_text()) for path in sorted(folder.glob("cpu_*.json"))]
    columns = [{(r["workload"], r["threads"]): standing(r) for r in result["rows"]} for result in saved]
    heads = ["row", "threads", *(result["machine"]["processor"] for result in saved)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for key in dict.fromkeys(key for column in columns for key in column):
        cells = [f"{s:.2f}" if (s := column.get(key)) is not None else "-" for column in columns]
        lines.append(f"| {' | '.join(map(str, [*key, *cells]))} |")
    known = [[s for s in column.values() if s is not None] for column in columns]
    means = [f"{geometric_mean(ratios):.2f}" if ratios else "-" for ratios in known]
    return "\n".join([*lines, f"| geometric mean | | {' | '.join(means)} |"])

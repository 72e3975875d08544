"""Two looks at the servers of a job as text and as HTML: each server with its clocks, then the tables of all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from ...look.columns import in_columns
from ...look.html_table import rows_html
from ..store.consistency import consistency
from ..store.partition import ids_of
from ..store.seen import HOTTEST, quantile

Look = dict[str, Any]  # what a server tells of itself, and what has happened since the look before
HEAD = ("table", "size", "rule", "memory", "servers", "fresh", "updated most")
GROWN = ("without a bound", "rows", "full", "found", "in memory", "made", "gone", "dropped")


def looks_at(addresses: Sequence[str], old: Sequence[Look], new: Sequence[Look]) -> list[Look]:
    """Each server's state, and what has happened since the look before."""
    return [{"address": a, **later, **since(before, later)} for a, before, later in zip(addresses, old, new)]


def since(old: Look, new: Look) -> Look:
    """What has happened between two looks at one server; after a restart, since its start.

    >>> first = {"seconds": 1.0, "requests": {"push": 5}, "received": 0, "sent": 100, "handled": {"20": 5}}
    >>> later = {"seconds": 3.0, "requests": {"push": 9, "pull": 6}, "received": 8, "sent": 100, "handled": {"20": 15}}
    >>> found = since(first, later)
    >>> found["requests_per_second"], found["received_per_second"], found["median_seconds"]
    (5.0, 4.0, 3.2e-05)
    """
    if new["seconds"] < old["seconds"]:
        old = {"seconds": 0.0, "requests": {}, "received": 0, "sent": 0, "handled": {}}
    passed = max(new["seconds"] - old["seconds"], 1e-9)
    handled = {step: n - old["handled"].get(step, 0) for step, n in new["handled"].items()}
    return {
        "requests_per_second": (sum(new["requests"].values()) - sum(old["requests"].values())) / passed,
        "received_per_second": (new["received"] - old["received"]) / passed,
        "sent_per_second": (new["sent"] - old["sent"]) / passed,
        "median_seconds": quantile(handled, 0.5),
        "most_seconds": quantile(handled, 0.99),
    }


def as_text(looks: Sequence[Look]) -> str:
    """All servers of a job, and their tables."""
    parts = []
    for look in looks:
        lines = *in_columns(_workers(look), {0, 1, 2, 3}), *_traffic(look)
        parts.append("\n".join([_title(look), *(f"  {line}" for line in lines)]))
    if len(rows := table_rows(looks)) > 1:
        parts.append("\n".join(in_columns(rows, {1, 3, 4, 5})))
    if len(rows := grown_rows(looks)) > 1:
        parts.append("\n".join(in_columns(rows, {1, 2, 3, 4, 5, 6, 7})))
    return "\n\n".join(parts)


def as_html(looks: Sequence[Look]) -> str:
    """The same for a notebook."""
    parts = []
    for look in looks:
        lines = "<br>".join(map(escape, _traffic(look)))
        parts.append(f"<b>{escape(_title(look))}</b>{rows_html(_workers(look))}<small>{lines}</small>")
    parts += [rows_html(rows) for rows in (table_rows(looks), grown_rows(looks)) if len(rows) > 1]
    return "<br>".join(parts)


def _title(look: Look) -> str:
    mode, tables = consistency(look["consistency"]), f"{look['tables']} table{'s' * (look['tables'] != 1)}"
    return f"{look['address']}  {mode}, up {look['seconds']:.0f} s, {tables}, {size(look['bytes'])}"


def _workers(look: Look) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("worker", "clock", "behind", "silent")]
    foremost = max(look["clocks"].values(), default=0)
    for worker, clock in look["clocks"].items():
        seen = "not here yet" if (silent := look["silent"][worker]) is None else f"{silent:.1f} s"
        rows.append((worker, f"{clock:,}", str(foremost - clock), seen))
    return rows


def _traffic(look: Look) -> list[str]:
    allowed, restored = consistency(look["consistency"]).staleness + 1, look["restored"]
    first = "goes on from a snapshot at clock {clock}, which was {age:g} s old"
    return [
        *([first.format(**restored)] if restored else []),
        *map(_partners, look["partners"]),
        f"lead {look['lead']}, largest {look['widest']} (allowed {allowed:g}); {look['parked']} requests wait",
        f"{look['requests_per_second']:,.0f} requests/s, {size(look['received_per_second'])}/s in, "
        f"{size(look['sent_per_second'])}/s out",
        f"a request takes {time_of(look['median_seconds'])}, 99 % at most {time_of(look['most_seconds'])}",
    ]


def _partners(model: Look) -> str:
    """
    >>> _partners({"waiting": {"0": 0.5, "2": 0.25}, "for": [1, 3]})
    'worker 0 waits 500 ms, worker 2 waits 250 ms for partners: worker 1 or 3'
    """
    waits = ", ".join(f"worker {worker} waits {time_of(seconds)}" for worker, seconds in model["waiting"].items())
    return f"{waits} for partners: worker {' or '.join(map(str, model['for']))}"


def table_rows(looks: Sequence[Look]) -> list[tuple[str, ...]]:
    """A head, and a row for each of the largest tables, over all servers that hold a part of it."""
    return [HEAD, *map(_table_row, _tables(looks))]


def grown_rows(looks: Sequence[Look]) -> list[tuple[str, ...]]:
    """A head, and for each table without a bound how its rows come and go."""
    return [GROWN, *(_grown_row(parts) for parts in _tables(looks) if parts[0]["grown"])]


def _tables(looks: Sequence[Look]) -> list[list[Look]]:
    """The parts of each table, the largest table first."""
    parts = defaultdict[str, list[Look]](list)
    for look in looks:
        for part in look["largest"]:
            parts[part["name"]].append(part)
    found = [sorted(some, key=lambda part: part["start"]) for some in parts.values()]
    return sorted(found, key=lambda some: -sum(part["bytes"] for part in some))


def _grown_row(parts: Sequence[Look]) -> tuple[str, ...]:
    total = {name: sum(part["grown"][name] for part in parts) for name in parts[0]["grown"]}
    reads, room = total["hits"] + total["misses"], sum(part["rows"] for part in parts)
    found = f"{total['hits'] / reads:.1%}" if reads else ""
    here = f"{1 - total['on_disk'] / total['hits']:.1%}" if total["hits"] else ""
    flow = (f"{total[name]:,}" for name in ("made", "evicted", "dropped"))
    return (parts[0]["name"], f"{total['held']:,}", f"{total['held'] / room:.0%}", found, here, *flow)


def _table_row(parts: Sequence[Look]) -> tuple[str, ...]:
    rows, columns = sum(part["rows"] for part in parts), parts[0]["columns"]
    sparse = len({part["columns"] for part in parts}) == 1 and parts[0]["rows"] > 1
    hot = [(part["start"] + row, count) for part in parts for row, count in part["hot"]]
    hot = sorted(hot, key=lambda row: -row[1])[:HOTTEST]
    places = np.array([place for place, _ in hot], int)
    ids = places if parts[0]["placed"] else ids_of(places, rows, len(parts))
    asked, fetched = (sum(part[name] for part in parts) for name in ("asked", "fetched"))
    return (
        parts[0]["name"],
        f"{rows:,} x {columns:,}" if sparse else f"{sum(part['columns'] for part in parts):,}",
        parts[0]["rule"],
        size(sum(part["bytes"] for part in parts)),
        str(len(parts)) if sparse else "",
        f"{1 - fetched / asked:.1%}" if asked else "",
        ", ".join(f"{_row(row, parts[0])} ({count:,})" for row, (_, count) in zip(ids.tolist(), hot)),
    )


def _row(row: int, table: Look) -> str:
    """What a row is called; of tables that are joined, that of its own table. Of one whose rows are placed by its
    workers, servers know places only.

    >>> both = {"joined": [("a", 5), ("b", 3)], "placed": False}
    >>> _row(7, {"joined": [], "placed": False}), _row(7, both), _row(9, both), _row(7, {**both, "placed": True})
    ('7', 'b 2', '9', 'place 7')
    """
    if table["placed"]:
        return f"place {row}"
    before = 0
    for name, rows in table["joined"]:
        if row < before + rows:
            return f"{name} {row - before}"
        before += rows
    return str(row)


def size(nbytes: float) -> str:
    """
    >>> size(123), size(4_500_000)
    ('123 B', '4.5 MB')
    """
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"


def time_of(seconds: float) -> str:
    """
    >>> time_of(3.2e-5), time_of(0.0123), time_of(2)
    ('32 us', '12 ms', '2 s')
    """
    for unit, scale in (("us", 1e-6), ("ms", 1e-3)):
        if seconds < 1000 * scale:
            return f"{seconds / scale:.2g} {unit}" if seconds < 100 * scale else f"{seconds / scale:.0f} {unit}"
    return f"{seconds:.3g} s"

"""Texts in columns, as `print` shows tables, and sizes for people."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def in_columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """A line per row; the columns `right`, counted from 0, stand at their right ends.

    >>> print(*in_columns([("epoch", "loss"), ("1", "0.25")], right={0}), sep="\\n")
    epoch  loss
        1  0.25
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    cells = ([c.rjust(w) if k in right else c.ljust(w) for k, (c, w) in enumerate(zip(row, widths))] for row in rows)
    return ["  ".join(row).rstrip() for row in cells]


def show_bytes(nbytes: float) -> str:
    """
    >>> show_bytes(999), show_bytes(999_999), show_bytes(45_200_000_000)
    ('999 bytes', '1 MB', '45.2 GB')
    """
    units = iter(("kB", "MB", "GB", "TB"))
    size, unit = float(nbytes), "bytes"
    while size >= 999.5 and (larger := next(units, "")):
        size, unit = size / 1000, larger
    return f"{nbytes:.0f} bytes" if unit == "bytes" else f"{size:,.3g} {unit}"

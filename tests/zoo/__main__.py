"""`python -m tests.zoo [PATTERN ...]`: what is left of each callable, and its row in `left.txt`, which may only fall.

A row: the callable, how many mistakes are made with it, and how many of them are not answered. `--raise` lets rows
rise, for callables that are new.
"""

from __future__ import annotations

import os
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path

from .calls import calls_of, owners, targets
from .judge import verdict
from .wrong import wrong_calls

LEFT = Path(__file__).parent / "left.txt"


def rows() -> dict[str, tuple[int, int]]:
    """Committed: the number of cases and of those that are left, by callable."""
    lines = map(str.split, LEFT.read_text("utf-8").splitlines()) if LEFT.exists() else ()
    return {label: (int(cases), int(left)) for label, cases, left in lines}


def cases_of(label: str) -> list[str]:
    """Verdicts on all wrong calls of a callable: what it was, and what became of it."""
    found = targets()
    return [
        f"{call.target.label}({argument}) {kind} {verdict(bad, argument, kind)}"
        for call in calls_of(owners(found)[label], found)
        for argument, kind, bad in wrong_calls(call)
    ]


def write(table: dict[str, tuple[int, int]]) -> None:
    ordered = {label: table[label] for label in owners(targets()) if label in table}
    LEFT.write_text("".join(f"{label} {cases} {left}\n" for label, (cases, left) in ordered.items()), "utf-8")


def main(patterns: list[str]) -> None:
    os.environ["HETU_KERNELS"] = "0"  # compilers would take most of the time
    table, may_rise = rows(), "--raise" in patterns
    patterns = [p for p in patterns if not p.startswith("--")] or ["*"]
    chosen = [label for label in owners(targets()) if any(fnmatch(label, p) for p in patterns)]
    if not chosen:
        sys.exit(
            f"{' '.join(patterns)} is no callable: give whole labels, such as ht.fit, or patterns, such as 'ht.nn.*'"
        )
    os.chdir(tempfile.mkdtemp())
    found_left = 0
    for label in chosen:
        print(label, file=sys.stderr, flush=True)
        cases = cases_of(label)
        left = [case for case in cases if " left: " in case]
        print(*left, sep="\n", flush=True)
        found_left += len(left)
        if label not in table or may_rise or len(left) <= table[label][1]:
            table[label] = len(cases), len(left)
            write(table)
    print(sum(n for n, _ in table.values()), "cases in all;", found_left, "left of those looked at", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])

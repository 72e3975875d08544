"""The page that a student sees: what passes, what does not, what was seen, and a hint. It never gives the answer."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from .checks import Lab, Outcome

WIDTH = 80  # of a terminal
INDENT = " " * 9
RANK = re.compile(r"^rank \d+: ")
STUCK = "nobody can go on"


def report(lab: Lab, outcomes: Sequence[Outcome]) -> str:
    """The outcomes of a lab; what several checks saw alike is told once.

    >>> lab = Lab("9", "double", "lab9_double.py")
    >>> twice = lab.check("twice as much", hint="add it to itself")(lambda student: "")
    >>> print(report(lab, [Outcome(lab.checks[0], "FAIL", "got 3., wanted 4.")]))
    lab 9: double
      FAIL   twice as much
             got 3., wanted 4.
             hint: add it to itself
    0 of 1 points
    """
    lines, told = [f"lab {lab.number}: {lab.title}"], dict[str, str]()
    for outcome in outcomes:
        lines.append(f"  {outcome.state:5}  {outcome.check.wanted}")
        if outcome.state in ("FAIL", "error"):
            # Which rank is the first to say it may differ, and how many wait for each other.
            reason = STUCK if outcome.seen.startswith(STUCK) else RANK.sub("", outcome.seen)
            if reason in told:
                lines.append(f"{INDENT}the same as under: {told[reason]}")
                continue
            told[reason] = outcome.check.wanted
            lines += [row for line in outcome.seen.splitlines() for row in _indented(line)]
            if outcome.state == "FAIL" or reason == STUCK:
                lines += _indented(f"hint: {outcome.check.hint}")
    got, blank = sum(o.points for o in outcomes), sum(o.state == "blank" for o in outcomes)
    rest = f", {blank} of {len(outcomes)} checks not written yet" if blank else ""
    return "\n".join([*lines, f"{got:g} of {lab.points:g} points{rest}"])


def _indented(line: str) -> list[str]:
    return [INDENT + row for row in textwrap.wrap(line, WIDTH - len(INDENT), break_on_hyphens=False)]

"""The page that a student sees: what passes, what does not, what was seen, and a hint. It never gives the answer."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from .checks import Lab, Outcome

WIDTH = 100
INDENT = " " * 9
RANK = re.compile(r"^rank \d+: ")


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
            reason = RANK.sub("", outcome.seen)  # which rank is the first to say it may differ
            if reason in told:
                lines.append(f"{INDENT}the same as under: {told[reason]}")
                continue
            told[reason] = outcome.check.wanted
            lines.append(textwrap.indent(outcome.seen, INDENT))
            if outcome.state == "FAIL" or outcome.seen.startswith("nobody can go on"):
                lines += [INDENT + row for row in textwrap.wrap(f"hint: {outcome.check.hint}", WIDTH - len(INDENT))]
    got, blank = sum(o.points for o in outcomes), sum(o.state == "blank" for o in outcomes)
    rest = f", {blank} of {len(outcomes)} checks not written yet" if blank else ""
    return "\n".join([*lines, f"{got:g} of {lab.points:g} points{rest}"])

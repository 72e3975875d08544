"""Why a plan was chosen, in words and numbers: for `print`, and as a table with a picture in notebooks.

The timeline of a candidate shows where its time goes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from ..look.columns import in_columns
from ..look.html_table import bar_html, table_html
from ..look.svg import Svg
from ..ranges import AtLeast1, Endless
from .simulation.simulate import Cost
from .simulation.timeline import Spent, draw

MOST_ROWS = 8  # of candidates in a notebook
WIDTH = 100  # columns
NOTHING = Spent(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Candidate:
    """A builder, what people call it, and what it decides for single variables."""

    name: str
    builder: Any
    detail: str = ""


@dataclass(frozen=True)
class Rated(Candidate):
    """A candidate with its seconds per step, the most bytes of a rank, and what the seconds are spent on.

    `problem` says why it is impossible.
    """

    seconds: float = 0.0
    peak: int = 0
    problem: str = ""
    spent: Spent = NOTHING

    @property
    def valid(self) -> bool:
        return self.seconds >= 0


@dataclass(frozen=True)
class Why:
    """The reasons for `best` among `rated`, with its `cost` and the `budget` in bytes per rank.

    >>> from hetu.plan.simulation.timeline import Timeline
    >>> slow, fast = Rated("dp2", None, seconds=3e-3, peak=400), Rated("tp2", None, seconds=1e-3, peak=900)
    >>> print(Why(slow, (slow, fast), Cost(3e-3, (400,), {}, Timeline(())), 500, 2))
    dp2, 2 ranks: 3.000 ms per step, 400 bytes on the fullest rank (80 % of the budget)
      the busiest rank computes 0.000 ms; nothing is sent
    decided by memory: tp2 would take 1.000 ms (-67 %), but needs 900 bytes, 400 more than the budget
    """

    best: Rated
    rated: tuple[Rated, ...]
    cost: Cost
    budget: Endless
    ranks: AtLeast1
    speeds: Mapping[int, float] = field(default_factory=dict)  # factors on the time of slow ranks
    play: Callable[[Any], Cost] | None = field(default=None, compare=False, repr=False)  # the cost of another builder
    tried: tuple[tuple[Rated, float], ...] = ()  # plans that were run, and what a step took

    @property
    def others(self) -> list[Rated]:
        """The other possible plans, the fastest first; one of those that cost the same."""
        found = {(r.seconds, r.peak): r for r in reversed(self.rated) if r.valid}
        found.pop((self.best.seconds, self.best.peak), None)
        return sorted(found.values(), key=lambda r: r.seconds)

    @property
    def next_best(self) -> list[Rated]:
        """Those of the others that fit."""
        return [r for r in self.others if r.peak <= self.budget]

    @property
    def decided(self) -> str:
        """The constraint without which the choice would have been another."""
        if self.tried:
            return f"trial runs: it was the fastest of {len(self.tried)} plans that were run"
        if large := [r for r in self.others if r.peak > self.budget and r.seconds < self.best.seconds]:
            r = large[0]
            return (
                f"memory: {r.name} would take {self._time(r)}, but needs {r.peak:,} bytes, "
                f"{r.peak - self.budget:,.0f} more than the budget"
            )
        if not self.next_best:
            return "the lack of others: no other plan is possible"
        return f"time: it is the fastest of {1 + len(self.next_best)} different plans that fit"

    def _slow(self) -> str:
        factors = {rank: self.speeds.get(rank, 1.0) for rank in range(self.ranks)}
        least = min(factors.values())
        return ", ".join(f"{rank} ({f / least:.2f} times)" for rank, f in factors.items() if f > 1.05 * least)

    def _time(self, r: Rated) -> str:
        return f"{1e3 * r.seconds:.3f} ms ({100 * (r.seconds / self.best.seconds - 1):+.0f} %)"

    def _more(self, r: Rated) -> str:
        """What another plan spends more, or less, and needs, than the best."""
        found = {name: f"{1e3 * (its - ours):+.3f}" for name, its, ours in zip(Spent._fields, r.spent, self.best.spent)}
        told = [f"{name} {more} ms" for name, more in found.items() if float(more)]
        return ", ".join([*told, f"memory {r.peak - self.best.peak:+,} bytes"])

    def __str__(self) -> str:
        share = f" ({100 * self.best.peak / self.budget:.0f} % of the budget)" if self.budget < float("inf") else ""
        spent, sent = self.cost.timeline.spent, sum(self.cost.sent.values())
        waits = f", waits {1e3 * spent.communication:.3f} ms for communication and idles {1e3 * spent.idling:.3f} ms"
        lines = [
            f"{self.best.name}, {self.ranks} rank{'s' if self.ranks > 1 else ''}: {1e3 * self.best.seconds:.3f} ms "
            f"per step, {self.best.peak:,} bytes on the fullest rank{share}",
            *([f"  {self.best.detail}"] if self.best.detail else []),
            f"  the busiest rank computes {1e3 * spent.computing:.3f} ms"
            + (f"{waits}; {sent:,} bytes are sent" if sent else "; nothing is sent"),
            *([f"  {self.cost.note}"] if self.cost.note else []),
        ]
        if slow := self._slow():
            lines.append(f"slower than the fastest rank: {slow}")
        lines += [
            f"next best: {r.name}, {self._time(r)}, {r.peak:,} bytes: {self._more(r)}" for r in self.next_best[:2]
        ]
        lines.append(f"decided by {self.decided}")
        tried = [(f"  {r.name}", f"{1e3 * r.seconds:.3f} ms", f"{1e3 * took:.3f} ms") for r, took in self.tried]
        lines += in_columns([("  plan", "predicted", "measured"), *tried], right={1, 2}) if tried else []
        if problems := [r for r in self.rated if not r.valid]:
            lines.append(f"{len(problems)} not possible, such as {problems[0].name}: {problems[0].problem}")
        return "\n".join(map(_wrapped, lines))

    def to_svg(self) -> Svg:
        """What ranks do and hold in a step of the plan, and below it in one of the next best."""
        steps = {self.best.name: self.cost.timeline}
        if self.play is not None:
            steps |= {r.name: self.play(r.builder).timeline for r in self.next_best[:1]}
        return draw(steps)

    def __repr__(self) -> str:
        return f"<why {self.best.name}: decided by {self.decided.partition(':')[0]}>"

    def _repr_html_(self) -> str:
        """The words, a row with a bar for each of the best candidates, and the picture of `to_svg`."""
        shown = [self.best, *self.others][:MOST_ROWS]
        longest = max(r.seconds for r in shown) or 1.0
        rows = [("plan", "step", "", "bytes per rank", ""), *(self._row(r, longest) for r in shown)]
        table = table_html(rows, right={1, 3})
        return f"<pre>{escape(str(self))}</pre>{table}{self.to_svg()}"

    def _row(self, r: Rated, longest: float) -> tuple[str, ...]:
        note, family = ("", "variable") if r.peak <= self.budget else ("too large", "gradient")
        if r is self.best:
            note, family = "chosen", "update"
        bar = bar_html(180 * r.seconds / longest, family)
        return escape(r.name), f"{1e3 * r.seconds:.3f} ms", bar, f"{r.peak:,}", note


def _wrapped(line: str) -> str:
    """A line cut into lines of `WIDTH` columns, the later ones indented; of a long list the beginning."""
    return textwrap.fill(line, WIDTH, subsequent_indent="    ", max_lines=4, placeholder=" ...", break_on_hyphens=False)

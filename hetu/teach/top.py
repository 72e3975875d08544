"""`hetu top`: a running job as a live page: what each rank does, its steps, what it communicates, how long it waits.

It asks the ranks through the job's directory, as they ask each other when one is late (`dist/comm/recorder.py`); a
thread of theirs answers, so no step waits for it. The newest job of this user is shown, or that of `--job`; its
servers, if it has some, follow as `hetu ps status` shows them. Left out: what was before the page was opened.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from html import escape
from pathlib import Path
from typing import Any

from ..answers import LONGEST
from ..core.errors import ArgumentError
from ..dist.comm.guard import LOST
from ..dist.comm.recorder import RankState, ask
from ..dist.launch.watch import ranks
from ..look.columns import in_columns, show_bytes
from ..look.html_table import rows_html
from ..ps.wire import status
from ..ps.wire.transport import ServerTimeoutError
from ..ps.wire.view import as_html, as_text, looks_at

HEAD = ("rank", "steps", "a step", "given", "waits", "busy", "now")
NUMBERS = range(6)  # columns
DOING = 64  # characters of what a rank does


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words after `hetu top`."""
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--job", type=Path, metavar="DIR", help="the job's directory (default: the newest)")
    parser.add_argument("--once", action="store_true", help="print one look, and end")
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="SECONDS", help="time between two looks (default: %(default)s)"
    )


def main(args: argparse.Namespace) -> int:
    """Show the page until the job ends, or Ctrl-C."""
    if not 0 < args.every <= LONGEST:
        raise ArgumentError(f"--every {args.every:g}", fix="use a time above 0 seconds")
    job = find_job(args.job)
    with contextlib.suppress(KeyboardInterrupt):
        before = JobView(job)
        while True:
            time.sleep(args.every)
            try:
                now = JobView(job)
            except OSError:  # its directory goes with it
                print("the job has ended")
                break
            clear = status.CLEAR if sys.stdout.isatty() and not args.once else ""
            print(clear + page(before, now), end="\n" if clear or args.once else "\n\n", flush=True)
            if args.once:
                break
            before = now
    return 0


def find_job(directory: Path | None) -> Path:
    """A job's directory, by default the newest of this user here. ArgumentError where none runs."""
    if directory is None:
        folders = [*Path(tempfile.gettempdir()).glob("heturun-*"), *Path().glob(".heturun-*")]
        mine = (d for d in folders if os.access(d, os.W_OK | os.X_OK))  # others' cannot be looked into
        found = [d for d in mine if (d / "started.0").is_file()]
        if not found:
            raise ArgumentError("no job runs here", fix="start one with heturun -w 2 python train.py, or give --job")
        directory = max(found, key=lambda path: path.stat().st_mtime)
        if len(found) > 1:
            print(f"{len(found)} jobs run here, this is the newest; the others: --job DIR", file=sys.stderr)
    if not (directory / "started.0").is_file():
        fix = "name one that heturun made for a job that still runs"
        raise ArgumentError(f"{str(directory)!r} is no job's directory", fix=fix)
    return directory


class JobView:
    """What the ranks of a job, and its servers, say of themselves, and when they were asked."""

    def __init__(self, job: Path) -> None:
        self.since = time.time() - (job / "started.0").stat().st_mtime
        self.lost, self.over = ranks(job, LOST), ranks(job, "done")
        self.ranks = sorted(ranks(job, "started") - self.lost)
        self.at, self.states = time.monotonic(), ask(job, [r for r in self.ranks if r not in self.over])
        self.addresses: tuple[str, ...] = ()
        self.servers: list[dict[str, Any]] = []
        with contextlib.suppress(ArgumentError, ServerTimeoutError):  # there are none, or they have ended
            servers = status.find_job(job / "servers.json")
            self.addresses, self.servers = servers.addresses, status.ask(servers)


def page(before: JobView, now: JobView) -> str:
    """Two looks at a job as text."""
    title, rows, events = _told(before, now)
    parts = ["\n".join([title, *in_columns(rows, NUMBERS), *events])]
    if now.servers and before.servers:
        parts.append(as_text(looks_at(now.addresses, before.servers, now.servers)))
    return "\n\n".join(parts)


def page_html(before: JobView, now: JobView) -> str:
    """Two looks at a job for a notebook."""
    title, rows, events = _told(before, now)
    parts = [f"<b>{escape(title)}</b>{rows_html(rows)}<small>{'<br>'.join(map(escape, events))}</small>"]
    if now.servers and before.servers:
        parts.append(as_html(looks_at(now.addresses, before.servers, now.servers)))
    return "".join(parts)


def _told(before: JobView, now: JobView) -> tuple[str, list[tuple[str, ...]], list[str]]:
    """A title, the rows of a table, and what has happened that is worth a line."""
    passed, both = now.at - before.at, now.states.keys() & before.states.keys()
    steps = sum(now.states[r].runs - before.states[r].runs for r in both) / max(1, len(both))
    lost = f", {len(now.lost)} lost" if now.lost else ""
    title = f"{len(now.ranks)} ranks{lost}, up {now.since:.0f} s, {steps / passed:.3g} steps a second"
    rows = [HEAD, *(_row(rank, before.states.get(rank), now, passed) for rank in now.ranks)]
    return title, rows, [*dict.fromkeys(state.event for state in now.states.values() if state.event)]


def _row(rank: int, before: RankState | None, now: JobView, passed: float) -> tuple[str, ...]:
    """A line of the table; of a rank that does not answer there is nothing to say but that."""
    state = now.states.get(rank)
    if state is None or before is None:
        said = "has ended" if rank in now.over else "does not answer: stopped, or in C code that keeps Python's lock"
        return (str(rank), *[""] * 5, said if state is None else "has just come")
    runs, busy, waited = state.runs - before.runs, state.cpu - before.cpu, state.waited - before.waited
    each = f"{1000 * passed / runs:,.3g} ms" if runs > 0 else "-"
    given = f"{show_bytes(max(0, state.given - before.given) / passed)}/s"
    doing = f"waits: {state.waiting}" if state.waiting is not None else state.where
    return (
        str(rank), f"{state.runs:,}", each, given, f"{min(1.0, waited / passed):.0%}", f"{busy / passed:.0%}",
        doing if len(doing) <= DOING else doing[: DOING - 3] + "...",
    )  # fmt: skip

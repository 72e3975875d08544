"""`hetu search`: a search by several processes of a script, and how one stands that is going on or has ended.

The processes know of each other by the log alone that the script names, so one that is killed takes nothing but its
time. The first one's output is shown, or if it was killed that of the script once more, which then finds all done.
Left out: processes on other hosts; start the script there as well, with the same log.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ..core.errors import ArgumentError
from ..files import write_text
from ..system import apart, kill_group
from .result import Search
from .space import Space
from .trials import Log

CLEAR = "\x1b[H\x1b[2J"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words after `hetu search`."""
    below = parser.add_subparsers(dest="search_command", required=True)
    said = "run a script in several processes, which share its search by its log"
    run = below.add_parser("run", help=said, description=said)
    run.add_argument(
        "-w", "--workers", type=int, default=os.cpu_count() or 1, metavar="N",
        help="processes (default: one a core, %(default)s)",
    )  # fmt: skip
    run.add_argument("script", type=Path, help="calls ht.automl.search(..., log=...)")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    said = "the best trials in a log, while it is written or later"
    show = below.add_parser("show", help=said, description=said)
    show.add_argument("log", type=Path, help="the file that is log= of the search")
    show.add_argument("--watch", action="store_true", help="look again until Ctrl-C")
    show.add_argument(
        "--every", type=float, default=1.0, metavar="SECONDS", help="between looks (default: %(default)s)"
    )
    show.add_argument("--why", action="store_true", help="also tell what mattered")
    show.add_argument("--svg", type=Path, metavar="FILE", help="also write a picture of the best so far")


def main(args: argparse.Namespace) -> int:
    """Run `hetu search run` or `hetu search show`; the exit code."""
    try:
        return run(args.script, args.arguments, args.workers) if args.search_command == "run" else show(args)
    except KeyboardInterrupt:
        return 130


def run(script: Path, arguments: list[str], workers: int) -> int:
    """Run a script in so many processes, and return its exit code; ArgumentError for a script that is not there."""
    if not script.is_file():
        raise ArgumentError(f"no script {str(script)!r}", fix="pass the path of a Python file")
    if workers < 1:
        raise ArgumentError(f"{workers} workers", fix="start one at least")
    command = [sys.executable, str(script), *arguments]
    threads = {name: os.environ.get(name, "1") for name in THREADS} if workers > 1 else {}
    first = subprocess.Popen(command, env=os.environ | threads, **apart())
    quiet = {"stdout": subprocess.DEVNULL, "env": os.environ | threads}
    others: list[Any] = [subprocess.Popen(command, **quiet, **apart()) for _ in range(workers - 1)]  # type: ignore[call-overload]
    try:
        codes: list[int] = [process.wait() for process in (first, *others)]
    finally:
        for process in (first, *others):
            if process.poll() is None:
                kill_group(process)
    for number, code in enumerate(codes):
        if code:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
            print(f"hetu search: process {number} {how}", file=sys.stderr)
    if codes[0] < 0 and 0 in codes:
        return int(subprocess.run(command, check=False).returncode)
    return abs(codes[0])


def show(args: argparse.Namespace) -> int:
    """Print the table of a log."""
    while True:
        log = Log.opened(args.log)
        found = Search(Space.parse(log.facts["space"]), log, bool(log.facts.get("maximize")))
        print(f"{CLEAR if args.watch and sys.stdout.isatty() else ''}{found}")
        if args.why:
            print("\n".join(f"{share:6.1%}  {name}" for name, share in found.why().items()))
        if args.svg:
            write_text(args.svg, found.svg())
        if not args.watch:
            return 0
        time.sleep(args.every)

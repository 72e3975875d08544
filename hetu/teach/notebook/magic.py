"""`%%ranks`, `%servers` and `%lab`: what is typed above or in a cell, and what is seen below it.

Each rank's lines begin with its number; a line that is written over (a progress bar) stays in its place, one for each
rank.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser
from IPython.display import HTML, display

from ...core.errors import HetuError
from ...ps.wire.status import ask
from ...ps.wire.view import as_html, looks_at
from ..top import JobView, find_job, page_html
from .labs import Cells
from .live import Live, job_in
from .pool import CellOutcome, Pool

TRACEBACK_LINES = 15
WATCH_EVERY = 1.0  # seconds


class Screen:
    """Lines of all ranks as they come, and below them the line that each rank is writing over."""

    def __init__(self) -> None:
        self.open: dict[int, str] = {}
        self.handle: Any = None

    def say(self, rank: int, text: str) -> None:
        *lines, last = (line.rstrip("\r").rpartition("\r")[2] for line in (self.open.get(rank, "") + text).split("\n"))
        self.open[rank] = last
        for line in lines:
            print(f"[rank {rank}] {line}")
        if self.handle is not None or "\r" in text:
            self.update()

    def update(self) -> None:
        bars = "\n".join(f"[rank {rank}] {line}" for rank, line in sorted(self.open.items()) if line)
        if self.handle is None:
            self.handle = display({"text/plain": bars}, raw=True, display_id=True)
        else:
            self.handle.update({"text/plain": bars}, raw=True)

    def end(self) -> None:
        """What was written without a line's end."""
        if self.handle is None:
            for rank, line in sorted(self.open.items()):
                if line:
                    print(f"[rank {rank}] {line}")


PARSER = MagicArgumentParser(prog="%%ranks")
PARSER.add_argument("workers", type=int, help="how many ranks run the cell")
PARSER.add_argument("-s", "--servers", type=int, default=0, help="how many parameter servers they have")
PARSER.add_argument("--consistency", default=None, help="of the servers: bsp, asp or ssp:3")


SERVERS = MagicArgumentParser(prog="%servers")
SERVERS.add_argument("name", nargs="?", default="", help="a variable that holds servers (default: the newest job here)")
SERVERS.add_argument("--every", type=float, default=2.0, help="seconds between two looks")
SERVERS.add_argument("--stop", action="store_true", help="look no more")


class RankMagics:
    """The magics `%%ranks`, `%ranks`, `%servers` and `%lab` of an IPython shell."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.pool: Pool | None = None
        self.live: Live | None = None
        self.cells = Cells(shell)

    def run(self, line: str, cell: str) -> None:
        """Run the cell on a persistent pool of real MPI ranks; rank 0's variables come back.

        `%%ranks 4` runs it on 4 ranks, `%%ranks 4 --servers 2 --consistency ssp:3` gives them 2 parameter servers too;
        the consistency is bsp, asp or ssp with a bound.
        """
        options = PARSER.parse_argstring(line)
        if options.workers < 1 or options.servers < 0:
            raise UsageError(f"%%ranks {line}: at least one rank, and no negative number of servers")
        further = ("--consistency", options.consistency) if options.consistency else ()
        pool, screen = self._pool(options.workers, options.servers, further), Screen()
        try:
            outcome = pool.run(cell, self.shell.user_ns, screen.say)
        finally:
            screen.end()
        for data in outcome.shown:
            display(data, raw=True)
        self.shell.push(outcome.values)
        if outcome.failures:
            self._explain(outcome)

    def manage(self, line: str) -> None:
        """`%ranks` says what runs; `%ranks watch` shows it as a live page below the cell; `%ranks stop` ends it."""
        if line.strip() == "watch":
            return self._watch(lambda show: Live(partial(JobView, find_job(None)), page_html, show, WATCH_EVERY))
        if line.strip() == "stop":
            self._close()
        elif line.strip():
            raise UsageError(f"%ranks {line}: use %ranks, %ranks watch, %ranks stop, or %%ranks N above a cell")
        pool = self.pool
        print(f"{pool.workers} ranks, {pool.servers} servers" if pool is not None and pool.is_alive else "no ranks run")

    def watch(self, line: str) -> None:
        """Show clocks, traffic, latencies and tables of parameter servers below the cell, renewed every two seconds.

        `%servers` shows the newest job on this machine, that of `%%ranks N --servers M` too; `%servers name` the
        `ServerProcess`, or the list of them, that a variable holds; `%servers --stop` looks no more.
        """
        options = SERVERS.parse_argstring(line)
        if options.stop:
            return self._look_no_more()
        if not options.every > 0:
            raise UsageError(f"%servers --every {options.every:g}: use a time above 0 seconds")

        def begin(show: Callable[[str], None]) -> Live:
            job = job_in(self.shell.user_ns, options.name)
            return Live(partial(ask, job), lambda a, b: as_html(looks_at(job.addresses, a, b)), show, options.every)

        self._watch(begin)

    def _watch(self, begin: Callable[[Callable[[str], None]], Live]) -> None:
        """Show a live page below the cell in place of the one that is shown."""
        self._look_no_more()
        try:
            handle = display(HTML("..."), display_id=True)
            self.live = begin(lambda html: handle.update(HTML(html)))
        except HetuError as error:
            raise UsageError(error.text(where=False)) from None

    def _look_no_more(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def lab(self, line: str) -> None:
        """`%lab check 4`: what the checks of a lab say about the cells that have run."""
        match line.split():
            case ["check", number]:
                try:
                    print(self.cells.check(number))
                except HetuError as error:
                    raise UsageError(error.text(where=False)) from None
            case _:
                raise UsageError(f"%lab {line}: use %lab check N, with the number of a lab")

    def _pool(self, workers: int, servers: int, options: tuple[str, ...]) -> Pool:
        """The pool that runs, if it is of this kind, else a new one."""
        old = self.pool
        if old is not None and old.is_alive and (old.workers, old.servers, old.options) == (workers, servers, options):
            return old
        self._close()
        self.pool = made = Pool(workers, servers, options)
        atexit.register(made.close)
        return made

    def _close(self) -> None:
        if self.pool is not None:
            atexit.unregister(self.pool.close)
            self.pool.close()
            self.pool = None

    def _explain(self, outcome: CellOutcome) -> None:
        """The one traceback that matters, and where the others were; the cell counts as failed."""
        rank, (text, _) = next(iter(outcome.failures.items()))
        print(*text.rstrip().splitlines()[-TRACEBACK_LINES:], sep="\n", file=sys.stderr)
        for name, reason in outcome.stayed.items():
            if f"name {name!r} is not defined" in text:
                print(f"{name} stays in the notebook ({reason}): make it in a cell of %%ranks", file=sys.stderr)
        for other, where in sorted(outcome.waiting.items()):
            print(f"meanwhile rank {other} was at {where}", file=sys.stderr)
        also = sorted(set(outcome.failures) - {rank})
        said = f"the cell failed on rank {rank}" + (f", and on {also}" if also else "")
        if outcome.waiting or self.pool is None or not self.pool.is_alive:
            said += "; its ranks were ended, the next cell starts new ones"
        raise UsageError(said)

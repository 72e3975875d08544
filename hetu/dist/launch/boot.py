"""What each rank runs under `heturun`: the user's script, watched, so that no failure leaves other ranks waiting.

A failure is first written to the run directory, so that the launcher learns of it even before MPI runs. Then it ends
the whole job through MPI; `guard.py` handles a process that dies without a word. Lines of output begin with the rank;
only rank 0 shows progress bars. Output of C code has no prefix.
"""

from __future__ import annotations

import faulthandler
import functools
import io
import itertools
import os
import re
import runpy
import sys
import traceback
from pathlib import Path

from ...core.errors import PACKAGE, HetuError
from ...job import RANK_PROCESS, endings, is_child, job_size
from ..comm.guard import ELASTIC, RUN_DIRECTORY, TERMINALS, fail, own_rank, until_read
from ..comm.process import abort, process
from ..comm.recorder import answer, write

LINE_START = re.compile(r"(?<=[\n\r])(?=.)", re.DOTALL)


class Prefixed(io.TextIOWrapper):
    """A stream whose lines begin with the rank, also those that a progress bar writes over each other."""

    def __init__(self, stream: io.TextIOWrapper, prefix: str, is_terminal: bool) -> None:
        # Whole lines, even if the environment asks for no buffer: so lines of ranks alternate and do not mix.
        super().__init__(stream.detach(), stream.encoding, stream.errors, line_buffering=True)
        self.prefix, self.at_start, self.is_terminal = prefix, True, is_terminal

    def isatty(self) -> bool:
        """Whether the launcher writes to a terminal: mpiexec, between them, passes everything on at once."""
        return self.is_terminal

    def write(self, text: str) -> int:
        if text:
            marked = LINE_START.sub(self.prefix, text)
            super().write(self.prefix + marked if self.at_start and text[0] not in "\r\n" else marked)
            self.at_start = text[-1] in "\r\n"
        return len(text)


def run_script(arguments: list[str]) -> None:
    """`script.py args` or `-m module args`, as Python itself would run it."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


def user_traceback(error: BaseException) -> str:
    """The traceback from the first frame of the user's script on; with hetu's own frames only if hetu is at fault."""
    report = traceback.TracebackException.from_exception(error)
    ours = (PACKAGE, "<frozen runpy>")
    frames = list(itertools.dropwhile(lambda frame: frame.filename.startswith(ours), report.stack))
    if isinstance(error, HetuError):
        frames = [frame for frame in frames if not frame.filename.startswith(PACKAGE)]
    report.stack = traceback.StackSummary.from_list(frames)
    return "".join(report.format())


def prepare(directory: Path | None, rank: int) -> None:
    """Make this process a good rank of its job: output, crash report, answers about where it is."""
    os.environ[RANK_PROCESS] = str(os.getpid())
    terminals = os.environ.get(TERMINALS, "").split()
    for name in ("stdout", "stderr"):
        prefix = f"[rank {rank}] " if job_size() > 1 else ""
        setattr(sys, name, Prefixed(getattr(sys, name), prefix, name in terminals))
    if len(terminals) == 2:  # which is one: two ways there would not keep the order
        sys.stderr = sys.stdout
    if rank:
        os.environ.setdefault("TQDM_DISABLE", "1")
    if directory is not None:
        write(directory / f"started.{rank}", str(os.getpid()))
        faulthandler.enable((directory / f"crash.{rank}").open("w"), all_threads=False)
        answer(directory, rank, process)


def run(arguments: list[str]) -> tuple[int, str]:
    """The exit code and, of a failure, what to print last."""
    try:
        if "HETU_RECORD" in os.environ:
            from ..replay.record import begin_as_told  # which no other job loads

            begin_as_told(arguments)
        run_script(arguments)
    except SystemExit as exit_:
        if isinstance(exit_.code, int) and exit_.code:  # of which a system keeps 8 bits
            return exit_.code % 256 or 1, f"sys.exit({exit_.code})"
        if exit_.code:
            return 1, str(exit_.code)
    except BaseException as error:
        return 1, user_traceback(error)
    return 0, ""


def give_up(directory: Path | None, rank: int, code: int, text: str) -> None:
    """Say how this rank has failed, and end the others; a process that it has forked speaks for itself alone."""
    endings.clear()
    if directory is not None and not is_child():
        fail(str(directory), rank, code, text)
    else:
        print(text, file=sys.stderr, flush=True)
        until_read()
    abort(code)


def end_well(directory: Path | None, rank: int) -> None:
    """The last that is done, behind the script's threads, what it has left to `atexit`, and the end of MPI."""
    if not getattr(sys.stdout, "closed", True):
        sys.stdout.flush()
    if directory is not None:
        write(directory / f"done.{rank}", "")


def main() -> None:
    """Run the script and report how it ended. Without a run directory a foreign mpiexec has started this rank."""
    directory = Path(os.environ[RUN_DIRECTORY]) if RUN_DIRECTORY in os.environ else None
    rank = own_rank()
    if ELASTIC in os.environ:  # the last one that mpirun starts is no rank
        os.environ["OMPI_COMM_WORLD_SIZE"] = str(int(os.environ["OMPI_COMM_WORLD_SIZE"]) - 1)
        if rank == job_size():
            from ..comm.survivors import keep

            keep()
    prepare(directory, rank)
    endings.append(functools.partial(end_well, directory, rank))
    sys.excepthook = lambda kind, error, trace: give_up(directory, rank, 1, user_traceback(error))
    code, text = run(sys.argv[1:])
    if code:
        give_up(directory, rank, code, text)
    sys.exit(code)

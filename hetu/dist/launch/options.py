"""What `heturun` is told on its command line, and the job that follows from it."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...answers import LONGEST, seconds
from ...core.errors import ArgumentError
from ..comm.patience import ARRIVE, DEADLINE, LEAVE, SILENCE
from .cluster import Host, dealt, read_cluster

EPILOG = """\
cluster.yml, read on the chief, where rank 0 runs:
  hosts:
    - {name: node1, workers: 4, servers: 1, chief: true}
    - {name: node2, workers: 4}
Other hosts are reached by mpiexec over ssh (without a password), or by what it knows of a Slurm allocation; they see
the same working directory and Python. Under mpiexec or srun heturun is a rank itself: mpiexec -n 2 heturun train.py.

Ends when all ranks have ended, or soon after the first one fails, with a non-zero exit code."""
WAITS = {
    "arrive": "seconds that ranks wait for one that does not get on, and servers may take, at the start (default: 30)",
    "deadline": "and in what they communicate (default: 300)",
    "leave": "and at the end of the script (default: twice the deadline)",
    "silence": "seconds after which a server that gives no sign of life is gone (default: 60)",
}


class Told(NamedTuple):
    """An option that servers are told as it is: how its text is read (none if it has none), what `--help` shows."""

    read: Callable[[str], Any] | None
    shown: str
    help: str


def _bytes(text: str) -> int:
    """A number of bytes, such as 500M or 16G; ValueError for what is none.

    >>> _bytes("16G") == 16 << 30
    True
    """
    number, unit = (text[:-1], text[-1]) if text[-1:].upper() in tuple("KMGT") else (text, "")
    if not 0 <= (found := float(number) * (1 << 10 * ("KMGT".index(unit.upper()) + 1 if unit else 0))) < math.inf:
        raise ValueError(text)
    return int(found)


def _limits(text: str) -> tuple[int, int]:
    """The least and the most ranks; ValueError for what is none.

    >>> _limits("2:4")
    (2, 4)
    """
    least, most = map(int, text.split(":"))
    if not 1 <= least <= most or most < 2:
        raise ValueError(text)
    return least, most


def _modules(text: str) -> list[str]:
    return text.split(",")


SWITCH: Mapping[str, Any] = {"action": "store_const", "const": True}
# As argparse names them in errors.
_bytes.__name__, _modules.__name__ = "number of bytes", "list of modules"
_limits.__name__ = "MIN:MAX with 1 <= MIN <= MAX and 2 <= MAX"
SERVED = {  # fields of `hetu.ps.Options`, which checks them
    "consistency": Told(str, "MODE", "of the servers: bsp (default), asp, or ssp:3"),
    "snapshot_every": Told(float, "S", "seconds between snapshots (default: 30)"),
    "lease": Told(float, "S", "a worker without a sign of life for so many seconds is lost (default: 60)"),
    "on_loss": Told(str, "WHAT", "evict (default): go on without a lost worker; fail: end the job"),
    "memory_limit": Told(_bytes, "BYTES", "of tables and pushes on one server, such as 500M (default: 8G)"),
    "finite": Told(None, "", "refuse pushes that hold NaN or infinities (default: they are added)"),
    "imports": Told(_modules, "A,B", "modules with update rules and server functions of your own"),
    "group": Told(int, "N", "ranks that meet in a partial reduce, at least (default: 2)"),
    "wait": Told(float, "S", "seconds that the first of them waits for more (default: until they are there)"),
    "decay": Told(float, "D", "the weight of a rank in it, for each iteration that it is behind (default: 0.5)"),
}


@dataclass(frozen=True)
class Job:
    """What runs where. `hosts` is empty for this machine alone."""

    workers: int
    command: tuple[str, ...]
    servers: int = 0
    hosts: tuple[Host, ...] = ()
    snapshots: Path | None = None  # where the servers keep their state
    served: Mapping[str, Any] = field(default_factory=dict)  # what servers are told besides
    elastic: tuple[int, int] | None = None  # the least and the most ranks, if it goes on when one is lost
    strategy: str | None = None  # of executors that are given none
    trials: int = 0  # plans that are run before one is taken
    arrive: float = 30.0  # seconds that ranks may let the others wait at the start
    deadline: float | None = None  # and later, and at the end; None leaves it to the ranks
    leave: float | None = None
    silence: float | None = None  # of a server
    record: Path | None = None  # where ranks keep what they do, and so many bytes of it
    record_limit: int | None = None

    @property
    def is_remote(self) -> bool:
        """Whether it reaches other hosts: those of a file, or those that mpiexec knows of a Slurm allocation."""
        if not self.hosts:
            return self.workers > 1 and int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) > 1
        return not all(host.is_local for host in self.hosts)

    @property
    def places(self) -> list[str]:
        """The host of each server, "" for this one."""
        if not self.hosts:
            return [""] * self.servers
        return ["" if host.is_local else host.name for host in self.hosts for _ in range(host.servers)]


def told(given: Job | argparse.Namespace) -> dict[str, str]:
    """The variables for what the command line says; `comm.world`, `ps.wire.client` and `core.placement` read them."""
    waits = {DEADLINE: given.deadline, LEAVE: given.leave, SILENCE: given.silence}
    variables = {name: f"{value:g}" for name, value in waits.items() if value is not None}
    planned = {"HETU_STRATEGY": given.strategy, "HETU_TRIALS": given.trials}
    planned |= {"HETU_RECORD": given.record and given.record.resolve(), "HETU_RECORD_LIMIT": given.record_limit}
    return variables | {name: str(value) for name, value in planned.items() if value}


def parse(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The options on the command line, and their parser."""
    parser = argparse.ArgumentParser(
        prog="heturun",
        description="Run a training script as several ranks, on this machine or on the hosts of a cluster file.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-w", "-n", "--workers", type=int, metavar="N", help="number of ranks (default: 1)")
    parser.add_argument(
        "-s", "--servers", type=int, default=0, metavar="N", help="number of parameter servers (default: 0)"
    )
    parser.add_argument("-H", "--hosts", metavar="A,B", help="hosts to deal ranks and servers to, this one first")
    parser.add_argument("-c", "--cluster", metavar="FILE", help="cluster.yml: hosts with workers, servers, a chief")
    chosen: Mapping[str, Any] = {"action": "store_const", "dest": "strategy"}
    parser.add_argument(
        "--auto", const="auto", help="let the planner choose the strategy, where none is given", **chosen
    )
    parser.add_argument("--auto-inexact", const="auto-inexact", help="so, and let it choose what trains otherwise than "
                        "one process: partial reduce, if some ranks are slow", **chosen)  # fmt: skip
    parser.add_argument("--trials", type=int, default=0, metavar="N", help="with --auto: run the N plans that are "
                        "predicted to be the fastest for some steps each, and take the fastest")  # fmt: skip
    parser.add_argument("--elastic", type=_limits, metavar="MIN:MAX", help="go on when ranks are lost while MIN are "
                        "left, and start new ones up to MAX; -w of them at first (default: MAX)")  # fmt: skip
    parser.add_argument("--record", type=Path, metavar="DIR", help="keep what ranks do in a new folder, for hetu "
                        "replay and hetu compare")  # fmt: skip
    parser.add_argument("--record-limit", type=_bytes, metavar="BYTES", help="of each rank's record, of which the "
                        "oldest steps go (default: 1G)")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the command and its environment, start nothing")
    waits = parser.add_argument_group("how long one waits for another")
    for name, what in WAITS.items():
        waits.add_argument(f"--{name}", type=float, metavar="S", help=what)
    servers = parser.add_argument_group("parameter servers")
    servers.add_argument("--snapshots", type=Path, metavar="DIR", help="where servers keep their state, a folder each: "
                         "one that is killed runs again from there, a later job on any number of servers")  # fmt: skip
    for name, option in SERVED.items():
        takes: Mapping[str, Any] = {"type": option.read, "metavar": option.shown}
        servers.add_argument(_flag(name), help=option.help, **takes if option.read else SWITCH)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="python train.py and its arguments")
    options = parser.parse_args(arguments)
    if options.cluster and (options.workers is not None or options.servers or options.hosts):
        parser.error("the cluster file says how many workers and servers there are: leave -w, -s and -H out")
    if options.workers is not None and options.workers < 1:
        parser.error(f"-w {options.workers}: at least one worker is needed")
    for name in WAITS:
        if (given := getattr(options, name)) is not None and not 0 < given <= LONGEST:
            parser.error(f"--{name} {given:g}: give seconds above 0, at most {LONGEST:g}")
    if options.trials and (options.trials < 2 or not options.strategy):
        parser.error(f"--trials {options.trials}: try 2 plans at least, those of --auto")
    if options.servers < 0:
        parser.error(f"-s {options.servers}: the number of servers cannot be negative")
    return parser, options


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def job_of(options: argparse.Namespace) -> Job:
    """The job that the options describe."""
    least, most = options.elastic or (1, 1)
    workers, servers, hosts = options.workers or most, options.servers, tuple[Host, ...]()
    if options.cluster:
        hosts = read_cluster(options.cluster)
    elif options.hosts:
        hosts = dealt(options.hosts.split(","), workers, servers)
    if hosts:
        workers, servers = (sum(getattr(host, kind) for host in hosts) for kind in ("workers", "servers"))
    if options.elastic and (servers or not max(2, least) <= workers <= most):
        what = "with servers" if servers else f"from {workers} workers"
        fix = f"leave -s out; start with {max(2, least)} to {most} workers"
        raise ArgumentError(f"--elastic {least}:{most} {what}", fix=fix)
    served = {name: value for name in SERVED if (value := getattr(options, name)) is not None}
    for name in ("snapshots", *served):
        if (value := getattr(options, name)) is not None and not servers:
            raise ArgumentError(f"{_flag(name)} {value} without a server", fix="add -s 1")
    if options.strategy == "auto-inexact" and not servers:  # partners find each other on one
        raise ArgumentError("--auto-inexact without a server", fix="add -s 1, or use --auto")
    if options.trials and servers:  # those would keep what trial runs leave there
        raise ArgumentError(f"--trials {options.trials} with servers", fix="leave out -s, or --trials")
    if options.record and (servers or options.elastic):
        raise ArgumentError(
            "--record with servers, or ranks that change", fix="leave out -s and --elastic, or --record"
        )
    if options.record_limit is not None and not options.record:
        raise ArgumentError(f"--record-limit {options.record_limit} without a folder", fix="add --record DIR")
    if "snapshot_every" in served and not options.snapshots:
        raise ArgumentError(f"--snapshot-every {options.snapshot_every:g} without a folder", fix="add --snapshots DIR")
    arrive = options.arrive or seconds(ARRIVE, Job.arrive)
    waits = {"arrive": arrive, "deadline": options.deadline, "leave": options.leave, "silence": options.silence}
    planned = options.elastic, options.strategy, options.trials
    waits |= {"record": options.record, "record_limit": options.record_limit}
    job = Job(workers, tuple(options.command), servers, hosts, options.snapshots, served, *planned, **waits)
    if job.is_remote and os.name == "nt":  # neither ssh nor files that one user alone may read, as keys must be
        raise ArgumentError("hosts cannot be reached from Windows", fix="start the job on Linux, macOS or in WSL")
    if job.is_remote and job.elastic:  # its launcher ends ranks that stand still, and sees those of its own host
        where = ", ".join(host.name for host in hosts) or f"{os.environ['SLURM_JOB_NUM_NODES']} nodes of Slurm"
        raise ArgumentError(
            f"--elastic {least}:{most} on {where}: ranks that come and go run on one host",
            fix="run it on this one, with -H localhost and without -c; or leave --elastic out and train with "
            "fit(..., resume=True): started again, it goes on from the last save",
        )
    return job

"""The process above each rank: it forks the rank before anything is imported, waits, and writes down how it ended.

Only its parent learns which signal ended a process, and mpiexec as the parent would not say which rank it was; if the
guard itself is killed, a process beside it says so. The first failure that is written down counts: mpiexec ends other
ranks because of it. MPI gives its shared memory back only at an orderly end, so a rank writes down which files that is,
for its guard and `sweep.py`; where all ranks have met, those of MPICH need no name any more. The guard is run by its
path, because importing hetu takes longer than all of its work. Windows has no fork and so no guard.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator

RUN_DIRECTORY, TERMINALS = "HETU_RUN_DIRECTORY", "HETU_TERMINALS"
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")  # those of `job.py`, which is not there yet
FAILED, RC_SILENT = "failed", 71
# Of an elastic job: the least and most ranks, and files: of those that it goes on with, written once all have met; how
# one of them was lost; and of one that does not belong to it any more, which the launcher ends.
ELASTIC, MEMBERS, LOST, GONE = "HETU_ELASTIC", "members", "lost", "gone"
SHARED, JOINING = "shared", "joining"
SHARED_FILES = (
    "/dev/shm/",
    HOST_FILE := "/tmp/hydra_hwloc_xmlfile_",
)  # MPICH's proxy describes its host to ranks in one
# `platform.node()` would import half of the library, and Windows has no `uname`.
HOST = os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")
_made: set[str] = set()  # the files of shared memory that this rank has noted
HINTS = {"SIGKILL": " (kill -9, or the system when memory ran out)"}
CRASH_LINES = 14
# Lines of a crash report that are not about the user's script.
NOT_THE_USERS = ("<frozen ", "Extension modules:", os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")))


def own_rank() -> int:
    """This process' rank as its launcher told it, without starting MPI; 0 without a launcher."""
    return int(next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), 0))


def fail(directory: str, rank: int, code: int, text: str, what: str = FAILED) -> None:
    """Write down how this rank ended, whole or not at all, unless another one has failed before.

    The end of a rank that the others go on without is no failure: `what` is then LOST.
    """
    mine = os.path.join(directory, f".{FAILED}.{rank}.{os.getpid()}")
    with contextlib.suppress(OSError):
        os.unlink(mine)  # what this process has written before stays as it is
    with contextlib.suppress(OSError):
        with open(mine, "w", encoding="utf-8") as file:
            file.write(f"{rank}\n{code}\n{text}")
        os.link(mine, os.path.join(directory, FAILED if what == FAILED else f"{what}.{rank}"))


def members(directory: str) -> list[int]:
    """The ranks that an elastic job goes on with; none before all have met."""
    with contextlib.suppress(OSError), open(os.path.join(directory, MEMBERS), encoding="utf-8") as file:
        return [int(rank) for rank in file.read().split()]
    return []


def killed(directory: str) -> str:
    """What a rank is that was killed: a failure of the job, or lost, if the others have met and can go on."""
    return LOST if ELASTIC in os.environ and members(directory) else FAILED


def shared_files(process: int | str = "self") -> set[str]:
    """The files of shared memory that a process has in use, as Linux lists them, and those of proxies above it."""
    found, memory = set[str](), SHARED_FILES[0]
    with contextlib.suppress(OSError), open(f"/proc/{process}/maps", encoding="utf-8") as file:
        found = {line[line.index(memory) :].rstrip("\n") for line in file if memory in line}
    with contextlib.suppress(OSError):  # up to a process of another user
        while process != "0":
            opened = f"/proc/{process}/fd"
            links = (os.path.join(opened, number) for number in os.listdir(opened))
            found |= {name for link in links if (name := _target(link)).startswith(HOST_FILE)}
            with open(f"/proc/{process}/stat", encoding="utf-8") as file:
                process = file.read().rpartition(")")[2].split()[1]  # its parent
    return found


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return ""


@contextlib.contextmanager
def noting_shared_files() -> Iterator[None]:
    """Write down which files of shared memory are new at the end of the block, and before how to find them."""
    before, directory = shared_files(), os.environ.get(RUN_DIRECTORY, "")
    joining = _note(directory, JOINING, own_rank(), str(os.getpid()), *before)
    yield
    made = shared_files() - before
    _made.update(made)
    _note(directory, SHARED, own_rank(), *made)
    with contextlib.suppress(OSError):
        os.unlink(joining)


def _note(directory: str, what: str, rank: int | str, *words: str) -> str:
    """Write words down for those who end the job, each beside the name of this host; the file, if there is a job."""
    path = os.path.join(directory, f"{what}.{rank}") if directory else ""
    with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
        file.writelines(f"{HOST} {word}\n" for word in words)
    return path


def _noted(directory: str, what: str, rank: int | None = None) -> dict[str, list[str]]:
    """What a rank, or all, have written down on this host, by rank."""
    found: dict[str, list[str]] = {}
    for file in os.listdir(directory):
        kind, _, number = file.partition(".")
        if kind == what and rank in (None, int(number)):
            with contextlib.suppress(OSError), open(os.path.join(directory, file), encoding="utf-8") as lines:
                words = (line.rstrip("\n").partition(" ") for line in lines)
                found[number] = [word for host, _, word in words if host == HOST]
    return found


def note_joining(directory: str) -> None:
    """Write down what ranks share so far that are still on their way into MPI, before they are ended."""
    for rank, words in _noted(directory, JOINING).items():
        if words:
            _note(directory, SHARED, rank, *shared_files(words[0]) - {*words[1:]})


def unname_shared_files() -> None:
    """Remove the names of MPI's files, which serve to find them: once all ranks have, no end leaves one behind."""
    for name in _made:
        with contextlib.suppress(OSError):
            os.unlink(name)


def forget_shared_files() -> None:
    """MPI has removed them, and other jobs may use their names."""
    with contextlib.suppress(KeyError, OSError):
        os.unlink(os.path.join(os.environ[RUN_DIRECTORY], f"{SHARED}.{own_rank()}"))


def remove_shared_files(directory: str, rank: int | None = None) -> None:
    """Remove those that a rank, or all, which have ended, have left on this host."""
    for names in _noted(directory, SHARED, rank).values():
        for name in names:
            if name.startswith(SHARED_FILES):
                with contextlib.suppress(OSError):
                    os.unlink(name)


def until_read(seconds: float = 5.0) -> None:
    """Wait until what was written so far has been read from a pipe: mpiexec drops at an abort what it has not."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # Windows, or no pipe
        import fcntl
        import termios

        until = time.monotonic() + seconds
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            while any(fcntl.ioctl(stream.fileno(), termios.FIONREAD, bytes(4))) and time.monotonic() < until:
                time.sleep(0.01)


def die_with_parent() -> None:
    """Have Linux kill this process when its parent dies, however that happens."""
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def witnessed(directory: str, rank: int) -> int:
    """Have another process say so if this one is killed: mpiexec then kills all guards. A byte tells it to go."""
    guard, (hears, tells) = os.getpid(), os.pipe()
    if os.fork():
        os.close(hears)
        return tells
    os.setsid()  # mpiexec kills groups
    os.dup2(hears, 0)
    os.closerange(1, tells + 1)  # mpiexec waits while its pipes are open
    if not os.read(0, 1):
        text = f"its guard, process {guard}, was killed{HINTS['SIGKILL']}, and the rank with it"
        fail(directory, rank, 137, text, killed(directory))
    os._exit(0)


def wait_for(child: int) -> int:
    """The exit code of the rank, negative for a signal. Signals to end that reach this process go on to the rank."""

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def report(directory: str, rank: int, code: int) -> int:
    """Say how a rank ended that could not say so itself; the exit code for it."""
    what, done = FAILED, bool(directory) and os.path.exists(os.path.join(directory, f"done.{rank}"))
    if done and ELASTIC in os.environ:  # mpirun ends all when the first one ends
        return 0
    if code < 0:
        what = killed(directory)
        name = {s.value: s.name for s in signal.Signals}.get(-code, f"signal {-code}")
        text, code = f"killed by {name}{HINTS.get(name, '')}", 128 - code
    elif directory and not (done or os.path.exists(os.path.join(directory, f"{LOST}.{rank}"))):
        text, code = f"ended with code {code} before its script did, as os._exit does", code or RC_SILENT
        what = LOST if rank not in members(directory) and killed(directory) == LOST else FAILED  # on its way
    else:
        return code
    if directory:
        remove_shared_files(directory, rank)
        fail(directory, rank, code, "\n".join([text, *crash(directory, rank)]), what)
    else:
        print(f"[rank {rank}] {text}", file=sys.stderr)
    return code


def crash(directory: str, rank: int) -> list[str]:
    """The user's lines of the crash report that Python leaves on a signal such as a segmentation fault."""
    with contextlib.suppress(OSError), open(os.path.join(directory, f"crash.{rank}"), encoding="utf-8") as file:
        lines = [line for line in file.read().splitlines() if line and not any(n in line for n in NOT_THE_USERS)]
        return lines[:CRASH_LINES]
    return []


def main() -> None:
    """Run `hetu.dist.launch.boot` with the arguments of this process."""
    directory, rank = os.environ.get(RUN_DIRECTORY, ""), own_rank()
    if directory and not os.path.isdir(directory):
        import socket  # here, because each rank pays for what is imported above

        sys.exit(f"[rank {rank}] {socket.gethostname()} has no {directory}: hosts must share the working directory")
    forks = hasattr(os, "fork")
    witness = witnessed(directory, rank) if forks and directory else 0
    child = os.fork() if forks else 0
    if child:
        code = report(directory, rank, wait_for(child))
        _note(directory, "over", rank)
        if witness:
            os.write(witness, b"!")
        if code > 128 and killed(directory) == LOST:  # mpirun takes an exit code for an error of the job
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(code)
    if witness:
        os.close(witness)
    die_with_parent()
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # as for `python -m hetu.dist.launch.boot`
    from hetu.dist.launch.boot import main

    main()


if __name__ == "__main__":
    main()

"""What systems do differently, in one place: what is kept apart, ended, interrupted and locked there, and their load.

A system is known by what Python has there, not by its name, but for Windows where `os` alone does not tell. Nothing of
hetu is imported, so that `sweep.py` can run this file by its path. Left out: what only Linux has (memory without a
name, files of shared memory, the bytes of a connection); those files say what happens elsewhere.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any, NoReturn

PAUSE, TRIES = 0.05, 100  # seconds, and how often one looks whether those who were asked to end have ended
TASKKILL = 10.0  # seconds for the command that ends a tree of processes on Windows


# -- processes ---------------------------------------------------------------------------------------------------------


def apart() -> dict[str, Any]:
    """Options of `Popen` for a process in a group of its own, which a Ctrl-C in the terminal does not reach.

    >>> sorted(apart())  # doctest: +SKIP
    ['start_new_session']
    """
    new_group = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", None)  # of Windows, where the session means nothing
    return {"start_new_session": True} if new_group is None else {"creationflags": new_group}


def terminate(process: subprocess.Popen[Any]) -> None:
    """Ask a process to end. Windows asks nobody: there it ends at once, with all that it has started."""
    if hasattr(os, "killpg"):
        process.terminate()
    else:
        _end_tree(process.pid)


def end_group(leader: int) -> None:
    """End the processes of a group: first as asked, since Open MPI's launcher has its ranks in groups of their own."""
    if not hasattr(os, "killpg"):
        return _end_tree(leader)
    with contextlib.suppress(OSError):  # as soon as nobody is left
        os.killpg(leader, signal.SIGTERM)
        for _ in range(TRIES):
            time.sleep(PAUSE)
            os.killpg(leader, 0)
        os.killpg(leader, signal.SIGKILL)


def kill_group(process: subprocess.Popen[Any]) -> None:
    """End a process that leads its group, and those that it has started, at once, and wait for it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the second where all have ended
        os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else _end_tree(process.pid)
    process.wait()


def _end_tree(process: int) -> None:
    """End a process of Windows and those that it has started: without groups the system finds them by their parents."""
    command = ["taskkill", "/F", "/T", "/PID", str(process)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, capture_output=True, timeout=TASKKILL, check=False)


def become(command: list[str]) -> NoReturn:
    """Go on as another program; on Windows as its parent, since whoever waits there would take this for its end."""
    if sys.platform != "win32":
        os.execv(command[0], command)
    sys.exit(subprocess.run(command, check=False).returncode)


def interrupt(thread: int) -> None:
    """Have a thread, the main one, raise KeyboardInterrupt, also where it waits in the system, if that is possible."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(thread, signal.SIGINT)
    else:
        signal.raise_signal(signal.SIGINT)  # Python hands it to the main thread


def marked(mark: str) -> tuple[dict[int, str], dict[int, int]]:
    """The commands of processes with `mark` in their environment, and all parents, by process; none on Windows."""
    commands, parents = dict[int, str](), dict[int, int]()
    proc = Path("/proc")
    if not (proc / "self" / "environ").exists():
        return _marked_by_ps(mark)
    for folder in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            process = int(folder.name)
            parents[process] = int((folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1])
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                line = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                commands[process] = line.strip()
    return commands, parents


def _marked_by_ps(mark: str) -> tuple[dict[int, str], dict[int, int]]:
    """The same as `ps` of macOS and BSD tells it, which writes the environment behind the command."""
    commands, parents = dict[int, str](), dict[int, int]()
    told = ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        line = ["ps", "axeww", "-o", "pid=,ppid=,command="]
        told = subprocess.run(line, capture_output=True, text=True, errors="replace", timeout=TASKKILL).stdout
    for row in told.splitlines():
        process, parent, command = row.split(None, 2)
        parents[int(process)] = int(parent)
        if f" {mark} " in f"{command} ":
            commands[int(process)] = command.partition(f" {mark} ")[0][:200].strip()
    return commands, parents


# -- files -------------------------------------------------------------------------------------------------------------


def lock(file: IO[str]) -> bool:
    """Lock an open file for this process, until `unlock` or its end; False if another has it.

    True without a lock where the system or the disk knows none.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)  # the lock is one of bytes, from the place in the file on
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # Windows says the second
        return False
    except (ImportError, OSError):
        return True
    return True


def unlock(file: IO[str]) -> None:
    """Give a file back that is locked, also for processes that were forked meanwhile; nothing if it is not."""
    with contextlib.suppress(ImportError, OSError):
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_UN)


# -- the machine -------------------------------------------------------------------------------------------------------


def crowd() -> float:
    """How many processes want each core of the machine, over the last minute; 0 where the system does not say.

    >>> crowd() >= 0
    True
    """
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):  # Windows
        return 0.0


def memory() -> float:
    """Bytes of memory that this machine has; infinitely many where the system does not say.

    >>> memory() > 2**20
    True
    """
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) if hasattr(os, "sysconf") else math.inf

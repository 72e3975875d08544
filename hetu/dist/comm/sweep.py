"""The process that cleans up after a launcher, or after rank 0: when it ends, ranks end and what they left goes.

It waits for its standard input to close, which any end of the launcher does. By then it has read the process group of
the ranks, if they were started, and "ended" if they have ended. It is run by its path, without site packages. Servers
watch their own standard input instead. A rank that no launcher watches has one of its own on its way into MPI.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import select
import shutil
import signal
import sys
import time

TRIES, PAUSE = 100, 0.05  # seconds: ranks that are about to end may still write


def main(directory: str, guard: str) -> None:
    """End the ranks, unless they have ended, and remove their shared memory and the directory. `guard` is a path."""
    group, _, state = sys.stdin.read().partition(" ")
    files = runpy.run_path(guard)
    if group and state != "ended":
        with contextlib.suppress(OSError):
            files["note_joining"](directory)
        end(int(group))
    with contextlib.suppress(OSError):
        files["remove_shared_files"](directory)
    for _ in range(TRIES):
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.exists(directory):
            return
        time.sleep(PAUSE)


def watch(process: str, guard: str, *before: str) -> None:
    """Look at what a process shares until it says that all have met; if it ends, what was not there `before` goes."""
    files, made = runpy.run_path(guard), set[str]()
    while not select.select([sys.stdin], [], [], PAUSE)[0]:
        made |= files["shared_files"](process) - {*before}
    for name in made if not sys.stdin.read() else ():
        with contextlib.suppress(OSError):
            os.unlink(name)


def end(group: int) -> None:
    """End the processes of a group: first as asked, since Open MPI's launcher has its ranks in groups of their own."""
    kill = getattr(os, "killpg", os.kill)
    with contextlib.suppress(OSError):  # as soon as nobody is left
        kill(group, signal.SIGTERM)
        for _ in range(TRIES):
            time.sleep(PAUSE)
            kill(group, 0)
        kill(group, getattr(signal, "SIGKILL", signal.SIGTERM))


if __name__ == "__main__":
    (main if sys.argv[1] == "main" else watch)(*sys.argv[2:])

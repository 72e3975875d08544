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
import sys
import time

TRIES, PAUSE = 100, 0.05  # seconds: ranks that are about to end may still write


def main(directory: str, guard: str, system: str) -> None:
    """End the ranks, unless they have ended, and remove their shared memory and the directory. The others are paths."""
    group, _, state = sys.stdin.read().partition(" ")
    files = runpy.run_path(guard)
    if group and state != "ended":
        with contextlib.suppress(OSError):
            files["note_joining"](directory)
        runpy.run_path(system)["end_group"](int(group))
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


if __name__ == "__main__":
    (main if sys.argv[1] == "main" else watch)(*sys.argv[2:])

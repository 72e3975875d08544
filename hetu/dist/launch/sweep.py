"""The process that cleans up after a launcher: however this ends, its ranks end and what they left is removed.

It waits for its standard input to close, which any end of the launcher does. By then it has read the process group of
the ranks, if they were started, and "ended" if they have ended. It is run by its path, without site packages. Servers
watch their own standard input instead.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import shutil
import signal
import sys
import time

TRIES, PAUSE = 100, 0.05  # seconds: ranks that are about to end may still write


def main(directory: str, guard: str) -> None:
    """End the ranks, unless they have ended, and remove their shared memory and the directory. `guard` is a path."""
    group, _, state = sys.stdin.read().partition(" ")
    if group and state != "ended":
        with contextlib.suppress(OSError):
            kill = getattr(os, "killpg", os.kill)
            kill(int(group), getattr(signal, "SIGKILL", signal.SIGTERM))
    with contextlib.suppress(OSError):
        runpy.run_path(guard)["remove_shared_files"](directory)
    for _ in range(TRIES):
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.exists(directory):
            return
        time.sleep(PAUSE)


if __name__ == "__main__":
    main(*sys.argv[1:])

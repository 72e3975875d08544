"""What a server does beside serving: a function in a thread, or in a forked child that has the memory of that moment.

A child costs the server a millisecond or two, whatever it then takes: pages are copied when one of both writes to them.
Linux only, as other systems' libraries do not bear a fork of a process with threads; and only the process's own thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable


class Threaded:
    """A function that runs in a thread and says what went wrong."""

    def __init__(self, clock: int, run: Callable[[], str]) -> None:
        self.clock, self.run, self.said = clock, run, ""
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def _work(self) -> None:
        self.said = self.run()

    def is_alive(self) -> bool:
        return self.thread.is_alive()

    def wait(self) -> str:
        self.thread.join()
        return self.said


class Forked:
    """The same in a child, which has the memory of this moment. It ends with its parent."""

    def __init__(self, clock: int, run: Callable[[], str]) -> None:
        self.clock, self.code = clock, 1
        (self.reader, writer), parent = os.pipe(), os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of other threads, which the child leaves alone
            try:
                self.child = os.fork()
            except OSError:
                os.close(self.reader)
                os.close(writer)
                raise
        if self.child == 0:
            try:
                _end_with(parent)
                os.write(writer, run().encode()[:4096])  # a pipe holds so much
                self.code = 0
            except Exception:
                traceback.print_exc()  # nobody above would, as the child must not go on
            finally:
                os._exit(self.code)
        os.close(writer)

    def is_alive(self) -> bool:
        if self.child and (done := os.waitpid(self.child, os.WNOHANG))[0]:
            self.child, self.code = 0, os.waitstatus_to_exitcode(done[1])
        return bool(self.child)

    def wait(self) -> str:
        if self.child:
            self.child, self.code = 0, os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])
        with open(self.reader, "rb") as said:
            return said.read().decode() or (f"its writer ended with code {self.code}" if self.code else "")


def _end_with(parent: int) -> None:
    """A child that went on would leave a snapshot beside those of the server's next life."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)

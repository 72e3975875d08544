"""Lanes: independent pieces of one instruction run side by side, each in a thread of its own with one BLAS thread.

NumPy and BLAS release the interpreter while they compute, so threads that make few long calls are as good as threads in
C. A recipe says what may be cut (`over`); there are as many lanes as BLAS has threads, and one of them is the calling
thread. Others sleep between pieces: handing over costs 15 us, which only work of more than 100 us repays. Which lane
runs a piece changes no bit of it, but a sum over the axis that is cut is made of as many partial sums as there are
lanes, added in their order. `HETU_LANES=0` in the environment leaves all work in the calling thread, except what BLAS
divides itself. More than 4 threads are not used, as all share one interpreter (the gain was measured with 2). For the
same reason calls of a few microseconds, such as those of a recurrent layer, are not divided. Unequal pieces are not
balanced.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from ..core.kernels import Call, switched_off
from . import openblas

MOST = 4  # threads of BLAS
LEAST_PRODUCT = 5 << 19  # multiplications of a lane


def count() -> int:
    """How many parts `over` makes now: 1 within its `build`, where BLAS has one thread or many, and if switched off."""
    if _here.building or switched_off("HETU_LANES"):
        return 1
    threads = session.threads or openblas.get_threads() or 1
    return threads if threads <= MOST else 1


def over(size: int, build: Callable[[slice], Sequence[Call] | None], least: int = 1) -> list[Call] | None:
    """Calls that do what `build(part)` returns for all parts of `range(size)`, side by side; None if a `build` does.

    With one lane, or where the parts would be smaller than `least`, it is `build(slice(0, size))` as it stands.
    What is written may not be shared: a `build` makes the working memory of its part itself.

    >>> x, y = np.arange(6.0), np.empty(6)
    >>> calls = over(6, lambda part: [partial(np.sqrt, x[part], y[part])])
    >>> _ = [call() for call in calls]; print(y[4])
    2.0
    """
    parts = min(count(), size // least)
    if parts < 2:
        made = build(slice(0, size))
        return None if made is None else list(made)
    bounds = [size * i // parts for i in range(parts + 1)]
    _here.building = True
    try:
        pieces = [build(slice(low, high)) for low, high in pairwise(bounds)]
    finally:
        _here.building = False
    whole = tuple(tuple(calls) for calls in pieces if calls is not None)
    return [partial(_together, whole)] if len(whole) == parts else None


def is_divided(call: Call) -> bool:
    """Whether it is a call that `over` made for several lanes."""
    return getattr(call, "func", None) is _together


class _Here(threading.local):
    building = False


class _Session:
    """While anyone is inside, BLAS has one thread; `threads` is how many it had before, None outside."""

    def __init__(self) -> None:
        self.lock, self.inside = threading.Lock(), 0
        self.threads: int | None = None

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.threads = openblas.get_threads()
                openblas.set_threads(1)
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                openblas.set_threads(self.threads or 1)
                self.threads = None


_here, session = _Here(), _Session()


def _run(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _together(pieces: Sequence[Sequence[Call]]) -> None:
    """Run the pieces at once and wait for all; the first error is raised.

    One caller at a time has the lanes. Where BLAS was told meanwhile to use one thread, the caller does it all.
    """
    with session:
        if session.threads == 1:
            for calls in pieces:
                _run(calls)
            return
        with _pool.lock:
            others = _pool.take(len(pieces) - 1)
            try:
                for lane, calls in zip(others, pieces[1:]):
                    lane.start(calls)
                _run(pieces[0])
            finally:
                for lane in others:
                    lane.wait()
            for lane in others:
                if lane.error is not None:
                    raise lane.error


class _Lane:
    """A thread that runs what it is given; without work it sleeps."""

    def __init__(self, number: int) -> None:
        self.calls: Sequence[Call] = ()
        self.error: BaseException | None = None
        self.busy, self.go, self.done = False, threading.Lock(), _Signal()
        self.go.acquire()
        threading.Thread(target=self._serve, name=f"hetu lane {number}", daemon=True).start()

    def start(self, calls: Sequence[Call]) -> None:
        self.wait()  # if an interrupt took the caller away before the last piece was done
        self.error, self.calls, self.busy = None, calls, True
        self.go.release()

    def wait(self) -> None:
        if self.busy:
            self.done.wait()
            self.busy = False

    def _serve(self) -> None:
        with np.errstate(all="ignore"):  # as in the thread of the executor
            np.setbufsize(2048)  # as there, too
            while self.go.acquire():
                try:
                    _run(self.calls)
                except BaseException as error:
                    self.error = error
                self.calls = ()  # holds the arrays of a program
                self.done.set()


class _Signal:
    """What `set` says, one `wait` hears: spinning in C where POSIX spin locks exist, since waking up takes 35 us."""

    def __init__(self) -> None:
        try:
            library, word = ctypes.CDLL(None), ctypes.c_int()
            library.pthread_spin_init(ctypes.byref(word), 0)
            self.wait: Call = partial(library.pthread_spin_lock, ctypes.byref(word))
            self.set: Call = partial(library.pthread_spin_unlock, ctypes.byref(word))
        except (AttributeError, TypeError):  # macOS and Windows
            lock = threading.Lock()
            self.wait, self.set = lock.acquire, lock.release
        self.wait()


class _Pool:
    """The lanes beside the calling thread, made when they are first needed."""

    def __init__(self) -> None:
        self.lock, self.lanes = threading.Lock(), list[_Lane]()

    def take(self, number: int) -> list[_Lane]:
        while len(self.lanes) < number:
            self.lanes.append(_Lane(len(self.lanes) + 1))
        return self.lanes[:number]


_pool = _Pool()


def _forget() -> None:
    """Threads do not survive a fork."""
    global _pool
    _pool = _Pool()
    session.__init__()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

"""Streams, events and graphs of a stand-in for CuPy: queues that run as late as they may.

An item runs only when somebody needs its result, so that a missing wait, an early read or a buffer that is overwritten
too soon gives wrong numbers every time, not sometimes (`EARLY` is the other extreme, for a wait that is missing on the
other side). Capture records a queue in place of running it, and refuses what CUDA refuses. Ignored on purpose: speed
and real concurrency; several ranks are several threads, each with streams of its own, under one lock.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable

LOCK = threading.Condition(threading.RLock())
HERE = threading.local()  # the current stream, allocator and group of a thread, which stands for a device
EARLY = [False]  # whether non-blocking streams run as early as they may, which finds what else runs too late
EVERY: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()  # by what CUDA calls it
LOG: list[str] = []  # what the host asked of the device


class CUDARuntimeError(RuntimeError):
    """What CUDA refuses."""


class StuckError(AssertionError):
    """Streams that wait for each other: on a device, a hang."""


class NotYetError(Exception):
    """Who only asks does not wait for another rank."""


def wait_for_others() -> None:
    if HERE.__dict__.get("asking"):
        raise NotYetError
    LOCK.wait(5.0)


class Item:
    """Something in a queue. `needs` are items that have to be done before it may run."""

    def __init__(self, work: Callable[[], None], needs: tuple[Item, ...] = ()) -> None:
        self.work, self.needs, self.done, self.stream = work, needs, False, None
        self.thread = threading.get_ident()

    def ready(self) -> None:
        for need in self.needs:
            force(need)

    def again(self) -> Item:
        return Item(self.work, self.needs)


def force(item: Item) -> None:
    """Run what has to run so that `item` is done; it waits while another rank has not come yet."""
    under_way = HERE.__dict__.setdefault("forced", [])
    if item in under_way:
        raise StuckError("streams wait for each other")
    under_way.append(item)
    try:
        with LOCK:
            while not item.done:
                head = item.stream.queue[0]
                if head is not item:
                    force(head)
                    continue
                item.ready()
                if not item.done:
                    item.work()
                    finish(item)
    finally:
        under_way.remove(item)


def ask(item: Item) -> None:
    """As `force`, as far as it goes without waiting for another rank."""
    HERE.asking = True
    with contextlib.suppress(NotYetError):
        force(item)
    HERE.asking = False


def finish(item: Item) -> None:
    item.done = True
    item.stream.queue.remove(item)
    LOCK.notify_all()


class Stream:
    """A queue. The null stream (`Stream.null`) waits for all blocking streams of its device and they for it."""

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self.queue: list[Item] = []
        self.capturing: list[Item] | None = None
        self.valid, self.is_null, self.non_blocking, self.ptr = True, null, non_blocking, id(self)
        EVERY[self.ptr] = self
        if not null and not non_blocking:
            streams().append(self)

    def add(self, item: Item) -> None:
        with LOCK:
            if self.capturing is not None:
                self.capturing.append(item)
                return
            if self.is_null:
                for other in streams():
                    other.refuse_capture()
                    other.synchronize()
            item.stream = self
            self.queue.append(item)
            LOCK.notify_all()
        if self.is_null:
            force(item)
        elif self.non_blocking and EARLY[0]:
            ask(item)

    def refuse_capture(self) -> None:
        if self.capturing is not None:
            self.valid = False
            raise CUDARuntimeError(
                "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing"
            )

    def synchronize(self) -> None:
        self.refuse_capture()
        LOG.append("synchronize")
        for other in streams() if self.is_null else ():
            other.synchronize()
        if self.queue:
            force(self.queue[-1])

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.item = Item(lambda: None)
        self.add(event.item)
        return event

    def wait_event(self, event: Event) -> None:
        self.add(Item(lambda: None, (event.item,)))

    def begin_capture(self) -> None:
        if self.is_null:
            raise RuntimeError("cannot capture on the default (legacy) stream")
        self.capturing, self.valid, HERE.allocated = [], True, 0
        LOG.append("begin_capture")

    def end_capture(self) -> Graph:
        items, self.capturing = self.capturing, None
        if not self.valid:
            raise CUDARuntimeError("cudaErrorStreamCaptureInvalidated")
        assert not HERE.allocated, "a graph uses memory that the default pool will give to others"
        return Graph(items)

    def is_capturing(self) -> bool:
        return self.capturing is not None

    def __enter__(self) -> Stream:
        stack().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        stack().pop()


class Graph:
    def __init__(self, items: list[Item]) -> None:
        self.items = items

    def launch(self, stream: Stream) -> None:
        LOG.append("launch graph")
        for item in self.items:
            stream.add(item.again())


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self.item: Item | None = None

    def record(self, stream: Stream | None = None) -> None:
        (stream or current()).record(self)

    @property
    def done(self) -> bool:
        """On a device work goes on by itself; here it goes on when somebody asks, as far as it can without waiting."""
        if self.item is not None and not self.item.done and self.item.thread == threading.get_ident():
            ask(self.item)
        return self.item is None or self.item.done

    def synchronize(self) -> None:
        if self.item is not None:
            force(self.item)


def streams() -> list[Stream]:
    return HERE.__dict__.setdefault("streams", [])


def stack() -> list[Stream]:
    return HERE.__dict__.setdefault("stack", [HERE.__dict__.setdefault("null", Stream(null=True))])


def current() -> Stream:
    return stack()[-1]


def stream_at(pointer: int) -> Stream:
    return EVERY[pointer]

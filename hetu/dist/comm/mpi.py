"""Ranks as processes over MPI, of which `process.py` has the start and the end.

All calls take buffers (never pickled objects). Every operation is started without blocking and then polled: this costs
no more than a blocking call, ends the wait at its deadline, and gives the core away meanwhile. The ranks compare what
they call on a second communicator (`agreement.py`), because MPI takes what does not fit without a word. The death of a
rank ends the job, unless it is elastic (`survivors.py`). Left out: GPU buffers.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...answers import seconds
from .agreement import Agreement, CallHistory, Telling, compare_messages
from .alike import WeighedFeed
from .bound import MOST, BoundCollective, BoundMessages, SmallCalls, begun, is_small, message_requests, message_tag
from .call import CollectiveCall, PeerMessage, is_half
from .comm import Comm, CommError, Handle, disagreement
from .guard import RUN_DIRECTORY, noting_shared_files
from .patience import AWHILE, LEAVE, Patience
from .process import start
from .recorder import PATIENT, RankState, Raw, Recorder, ask, readable, write
from .shared import FROM_BYTES, SharedMemory

SOON = 5.0  # seconds after which one that waits asks whether what the ranks call fits
LOOK = 0.5  # seconds between checks whether a rank that others wait for has ended

_yield_core = getattr(os, "sched_yield", lambda: time.sleep(0))


class MPIComm(Comm):
    """A group of processes. `deadline` is in seconds, for each wait."""

    answers = PATIENT  # seconds for them
    widens = True  # MPI has no sum of floats of 16 bits

    def __init__(
        self, comm: Any, ranks: Sequence[int], deadline: float, recorder: Recorder, whole: Comm | None = None
    ) -> None:
        super().__init__(comm.rank, ranks, deadline, recorder)
        self.whole = whole or self
        self.transport = comm  # mpi4py's; `control` is a second one, for what ranks tell each other about their calls
        self.open: list[_Request] = []
        # A yield gives a core away that nobody needs, unless there are more ranks than cores.
        self._spins = 10 if self.whole.world_size > (os.cpu_count() or 1) else 200
        self._memory: list[SharedMemory | None] = []  # empty until it is first wanted
        self.control, request = comm.Idup()
        self.finish(request, (), "a group to form")
        self.history, self._small = CallHistory(self), 0

    def progress(self) -> None:
        """Let MPI work on open operations: without calls into it, most of a transfer stands still."""
        if self.open:
            start().Request.Testall([handle.request for handle in self.open])

    def bind(self, call: CollectiveCall) -> Callable[[], None]:
        if _is_large(call) or (call.op and is_half(call.x.dtype)):
            return functools.partial(self.run, call)
        call.check(self.world_size)
        return BoundCollective(start(), self, call).run

    def run(self, call: CollectiveCall) -> None:
        x, out = call.x, call.out
        if not type(x) is type(out) is np.ndarray:
            call.check_buffers()
        kind = self.history.kinds.get(call.signature)
        known = kind is not None and kind.fits == (out.size, out.dtype) and not call.counts
        if not (known and out.flags.carray and (x is out or ((flags := x.flags).c_contiguous and flags.aligned))):
            call.check(self.world_size)
        self._noted(call, kind.what if kind else "")
        if kind is not None:  # the first of its kind may not fit those of other ranks
            if kind.small is None and is_small(call) and self._small < MOST:
                kind.small, self._small = SmallCalls(start(), self, call), self._small + 1
            if kind.small is not None:
                self.history.add(kind, call)
                kind.small.run(call)
                return
        if _is_large(call):
            self._through_memory(call)
        else:
            self._start(call).wait()

    def _through_memory(self, call: CollectiveCall) -> None:
        """A large all_reduce, through memory of the host if that serves."""
        entry, x, out, op = call.noted, call.x, call.out, call.op
        if agreement := self.agree(call):
            agreement.wait()
        if not self._memory:
            with noting_shared_files():
                self._memory = [self._in_time(lambda: SharedMemory.over(start(), self.transport), entry)]
        if (shared := self._memory[0]) is None:
            return self._start(call).wait()
        shared.all_reduce(x, out, op, lambda: self.finish(self.control.Ibarrier(), entry, ()))

    def _start(self, call: CollectiveCall) -> Handle:
        x, out = call.x, call.out
        if call.op and is_half(out.dtype):  # MPI has no sum of these
            x = x.astype(np.float32)
            out = x if call.kind == "all_reduce" else np.empty(out.shape, np.float32)
        if x is not out and np.may_share_memory(x, out):
            x = x.copy()
        agreement = self.agree(call)
        handle = _Request(self, begun(start(), self.transport, call, x, out), call, (x, out), agreement)
        self.open.append(handle)
        return handle

    def agree(self, call: CollectiveCall) -> Agreement | None:
        return self.history.note(call)

    def tell(self, text: str) -> Telling:
        """Begin to tell all ranks of the group a short text, which all do in the same order."""
        return Telling(self, text)

    def compare_feeds(self, noted: Sequence[WeighedFeed]) -> None:
        self.history.note_feeds(noted)

    def _exchange(self, sends: Sequence[PeerMessage], recvs: Sequence[PeerMessage], noted: Sequence[Raw]) -> None:
        messages = [*sends, *recvs]
        self.finish_messages(message_requests(start(), self.transport, sends, recvs), messages, noted, len(sends))

    def bind_exchange(self, sends: Sequence[PeerMessage], recvs: Sequence[PeerMessage]) -> Callable[[], None]:
        self.check_messages(sends, recvs)
        return BoundMessages(start(), self, sends, recvs).run

    def finish_messages(
        self, requests: Sequence[Any], messages: Sequence[PeerMessage], noted: Sequence[Raw], sent: int
    ) -> None:
        """Wait for messages, the first of which are `sent`. CommError if another array has arrived."""
        MPI = start()
        for request, entry, (_, out) in zip(requests[sent:], noted[sent:], messages[sent:]):
            status = MPI.Status()
            self.finish(request, entry, (requests, messages), status=status)
            if status.Get_tag() != message_tag(out.dtype, out.size):
                raise self._mistaken(entry, f"another array, of {status.Get_count(MPI.BYTE)} bytes")
        for request, entry in zip(requests[:sent], noted):
            self.finish(request, entry, (requests, messages))

    def _split(self, group: tuple[int, ...]) -> Comm:
        # Only members call this. The tag keeps groups apart that are made at the same time.
        tag = zlib.crc32(repr(group).encode()) % 32768
        members = [self.ranks[r] for r in group]
        entry = self.recorder.note(tuple(members), "split", np.empty(0), series="split")
        made = self._in_time(lambda: self.transport.Create_group(self.transport.group.Incl(group), tag), entry)
        return type(self)(made, members, self.deadline, self.recorder, self.whole)

    def _in_time(self, blocking: Callable[[], Any], entry: Raw) -> Any:
        """The result of a call for which MPI has no form that can be polled: it blocks a thread instead."""
        results: list[Any] = []
        errors: list[Exception] = []

        def call() -> None:
            try:
                results.append(blocking())
            except start().Exception as error:
                errors.append(error)

        thread = threading.Thread(target=call, daemon=True)
        self.recorder.waiting = entry
        thread.start()
        begin, waited, patience = time.monotonic(), 0.0, self._patience()
        while thread.is_alive() and not patience.is_over(waited := time.monotonic() - begin):
            thread.join(min(LOOK, self.deadline / 4))
            self.look_for_losses()
        if errors:
            raise self.met(errors[0], entry)
        if not results:
            raise self.late(entry, waited)
        self.recorder.waiting = ()
        return results[0]

    def leave(self) -> None:
        """Wait until all ranks leave; DeadlineError, as everywhere, if one does not.

        Without it mpiexec may take a rank that ends first for a lost one, and kill the others. A file tells the others
        that this one has come here, so that they do not wait in vain.
        """
        self.recorder.ended = "the end of its script"
        if (directory := Path(os.environ.get(RUN_DIRECTORY, ""))).is_dir():
            write(directory / f"ended.{self.ranks[self.rank]}", "")
        # By itself it is longer: ranks that wait inside the script speak first, as they have a line to show.
        self.deadline = seconds(LEAVE, 2 * self.deadline)
        script = os.path.basename(sys.argv[0])
        entry = self.recorder.note(self.ranks, "end of the script", np.empty(0), script, series="end")
        Agreement(self, entry).wait()
        compare_messages(self, entry)
        for _, comm in sorted(self._groups.items()):  # this waits for the members: one order for all
            comm.end(entry)

    def end(self, entry: Raw) -> None:
        """Compare what has been called, and give the memory back that the ranks of this group share."""
        self.history.end(entry)
        for shared in self._memory:
            if shared is not None:
                shared.free()

    def finish(self, request: Any, entry: Raw, buffers: Any, patient: bool = False, status: Any = None) -> None:
        """Poll `request` until it is done. A `patient` wait, or a long one, sleeps up to 1 ms between two tries."""
        try:
            if not request.Test(status):
                self._poll(request, entry, buffers, patient, status)
        except start().Exception as error:
            abandoned.append((request, buffers))
            raise self.met(error, entry) from None

    def _poll(self, request: Any, entry: Raw, buffers: Any, patient: bool, status: Any) -> None:
        begin, tries, delay, looked, patience, asked = time.monotonic(), 1, 20e-6, 0.0, None, False
        self.recorder.waiting = entry
        while not request.Test(status):
            tries += 1
            if patient and tries > 20 * self._spins:  # not at once: a rank that oversleeps lets the next one sleep
                time.sleep(delay)
                delay = min(delay * 1.5, 1e-3)
            elif tries > self._spins:
                _yield_core()
            if tries % 64:
                continue
            self.look_for_losses()
            waited = time.monotonic() - begin
            if waited > AWHILE:
                patient = True
                self.recorder.waits()
            if waited > looked + min(LOOK, self.deadline / 4):
                looked, patience = waited, patience or self._patience()
                if not asked and waited > min(SOON, self.deadline / 4):
                    asked = True
                    self._refuse_differences(entry)
                if patience.is_over(waited) or self._in_vain(entry):
                    abandoned.append((request, buffers))
                    raise self.late(entry, waited)
        self.recorder.waiting = ()

    def look_for_losses(self) -> None:
        """RankLostError while this rank waits, if MPI does not say so by itself that it waits in vain."""

    def met(self, error: Any, entry: Raw) -> CommError:
        """What an error of MPI means: more has arrived than there is room for."""
        return self._mistaken(entry, f"something else (MPI: {error})")

    def _refuse_differences(self, entry: Raw) -> None:
        """CommError if the ranks of a group have called what does not meet: there is nothing to wait for."""
        if entry and not readable(entry).series:
            made = self.remembered(0)
            for number in sorted({number for entries in made.values() for number in entries}):
                if len({entries[number].common for entries in made.values() if number in entries}) > 1:
                    raise disagreement({r: {n: e for n, e in es.items() if n >= number} for r, es in made.items()})

    def _patience(self) -> Patience:
        return Patience(self.deadline, lambda: self.asked(self.whole.ranks))

    def _in_vain(self, entry: Raw) -> bool:
        """Whether a rank that others wait for has ended its script without taking part in this."""
        directory = os.environ.get(RUN_DIRECTORY, "")
        ended = [r for r in self.ranks if os.path.exists(os.path.join(directory, f"ended.{r}"))]
        if not entry or not ended or self.recorder.ended:
            return False
        wanted = readable(entry)
        return any(not any(e[:3] == wanted[:3] for e in state.entries) for state in ask(directory, ended).values())

    def asked(self, ranks: Sequence[int]) -> dict[int, RankState]:
        directory = os.environ.get(RUN_DIRECTORY, "")
        return ask(directory, ranks, self.answers) if os.path.isdir(directory) else {}

    def _mistaken(self, entry: Raw, got: str) -> CommError:
        """The error for an operation in which another rank did something else."""
        mine = readable(entry)
        made = {r: s.made(mine.group, mine.series) for r, s in self.asked(mine.group).items()}
        others = [f"  rank {r}: {es[mine.number]}" for r, es in sorted(made.items()) if mine.number in es]
        return CommError(
            "\n".join([f"rank {self.ranks[self.rank]} met {got} in {mine}", *others]),
            fix="all ranks must communicate in the same order, with the same size and dtype",
        )


def _is_large(call: CollectiveCall) -> bool:
    return call.kind == "all_reduce" and call.x.nbytes >= FROM_BYTES and not is_half(call.x.dtype)


abandoned: list[Any] = []  # MPI may still write into the buffers of an operation that was given up


class _Request(Handle):
    """A collective that MPI works on."""

    def __init__(
        self,
        comm: MPIComm,
        request: Any,
        call: CollectiveCall,
        buffers: tuple[np.ndarray, np.ndarray],
        agreement: Agreement | None,
    ) -> None:
        self.comm, self.request, self.call, self.buffers = comm, request, call, buffers
        self.agreement, self.finished = agreement, False

    def wait(self) -> None:
        if self.finished:
            return
        if self.agreement:
            self.agreement.wait()
        self.comm.finish(self.request, self.call.noted, self.buffers, patient=self.call.kind == "barrier")
        if self.buffers[1] is not self.call.out:
            self.call.out[...] = self.buffers[1]
        self.comm.open.remove(self)
        self.finished = True

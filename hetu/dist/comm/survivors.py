"""Ranks as processes that go on when some are lost, and ranks that join them: Open MPI's fault mitigation (ULFM).

Open MPI tells a rank that waits for one whose process has ended; the others learn it from whoever revokes the group. A
rank that does not get on for the deadline is ended by the launcher, as is one that was stopped. What was under way
keeps its buffers until the next loss, as MPI may still write there. A new rank is called by the first one of the group
beside its work, and comes in once it has reached its own `world()`. MPI is not ended in order, which may hang after a
loss: the last of a rank's endings is a vote, and then its process ends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np

from ...answers import seconds
from ...job import end, endings, job_size
from .bound import keep_all
from .call import CollectiveCall, PeerMessage
from .comm import CommError, RankLostError
from .guard import ELASTIC, GONE, LOST, MEMBERS, RUN_DIRECTORY, fail, members, own_rank, until_read
from .mpi import MPIComm, abandoned
from .patience import ARRIVE, DEADLINE
from .process import look_around, process, start
from .recorder import Raw, Recorder, ask, readable, write

TAG, PAUSE = 7, 5.0  # of messages; seconds before a new rank is called again that could not be started
_now: list[SurvivingComm] = []  # the group of all ranks, as it is by now
_calling: list[Newcomer] = []
_before: list[Any] = []  # what was under way at the last loss


def job() -> SurvivingComm:
    """The group of all ranks of the job that are left."""
    if not _now:
        endings[:0] = [_go]  # the last
        _now[:] = [_begun()]
        endings.append(lambda: _now[0].leave())
    return _now[0]


def keep() -> NoReturn:
    """Be the process that is no rank: mpirun ends when all that it has started itself have ended, so this one lasts."""
    start()
    while _directory().is_dir():
        time.sleep(PAUSE)
    os._exit(0)


def _begun() -> SurvivingComm:
    """The first group of this rank: that of all which were started, or the one that it joins."""
    MPI = start()
    parent, deadline = MPI.Comm.Get_parent(), seconds(DEADLINE, 300.0)
    if parent != MPI.COMM_NULL:
        return _joined(MPI, parent, deadline)
    first = range(job_size())
    whole = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.group.Incl(first))
    comm = SurvivingComm(whole, first, deadline, process)
    comm._in_time(lambda: look_around(MPI, whole), ())
    comm.barrier()
    comm._over()
    with contextlib.suppress(RankLostError):  # which the next communication meets, too
        comm.barrier()  # whoever dies behind it dies in a job whose members are written down
    return comm


def _joined(MPI: Any, parent: Any, deadline: float) -> SurvivingComm:
    """That of a newcomer, which must not go on if the others did not take it in."""
    try:
        between = MPI.COMM_WORLD.Create_intercomm(0, parent.Merge(high=True), 0, TAG)
        comm = _told(between.Merge(high=True), own_rank(), deadline, process)
        comm.barrier()
    except (MPI.Exception, RankLostError):
        if own_rank() not in members(os.environ[RUN_DIRECTORY]):
            fail(os.environ[RUN_DIRECTORY], own_rank(), 0, "the others have gone on without it", LOST)
            os._exit(0)
    comm.regrouped = True
    return comm


def _told(whole: Any, number: int, deadline: float, recorder: Recorder) -> SurvivingComm:
    """A group over MPI's communicator, in which all tell their numbers; the last one is new."""
    numbers = np.empty(whole.size, np.int64)
    request = whole.Iallgather(np.array([number]), numbers)
    while not request.Test():  # blocking collectives with newcomers do not end
        time.sleep(1e-4)
    comm = SurvivingComm(whole, numbers.tolist(), deadline, recorder)
    comm.newcomers = comm.ranks[-1:]
    return comm


def _directory() -> Path:
    return Path(os.environ[RUN_DIRECTORY])


def _limits() -> list[int]:
    """The least and the most ranks."""
    return [int(number) for number in os.environ[ELASTIC].split(":")]


def _go() -> NoReturn:
    """End this process, as all that are left have said that they have ended well."""
    if _now:
        _now[0].agreed(True)
    end()  # what is left to do
    until_read()
    time.sleep(0.1)  # until it is passed on
    os._exit(0)


def _surviving(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that does not begin in a revoked group, and whose errors of MPI may be losses."""

    @functools.wraps(method)
    def call(self: SurvivingComm, *args: Any, **kwargs: Any) -> Any:
        self.look_for_losses()
        try:
            return method(self, *args, **kwargs)
        except start().Exception as error:
            raise self.met(error, self.recorder.waiting) from None

    return call


class SurvivingComm(MPIComm):
    """A group of processes that go on without those that are lost. `deadline` is in seconds, for each wait."""

    survives = elastic = True
    answers = 0.3  # seconds, as this rank does not see a loss meanwhile
    _settles = False  # while this rank meets the others about a loss, the group may be revoked

    run, progress = _surviving(MPIComm.run), _surviving(MPIComm.progress)
    compare_feeds, _start = _surviving(MPIComm.compare_feeds), _surviving(MPIComm._start)
    _exchange, _split = _surviving(MPIComm._exchange), _surviving(MPIComm._split)
    _do = _surviving(lambda self, bound: bound())

    def bind(self, call: CollectiveCall) -> Callable[[], None]:
        return functools.partial(self._do, super().bind(call))

    def bind_exchange(self, sends: Sequence[PeerMessage], recvs: Sequence[PeerMessage]) -> Callable[[], None]:
        return functools.partial(self._do, super().bind_exchange(sends, recvs))

    def _through_memory(self, call: CollectiveCall) -> None:
        self._start(call).wait()  # windows of Open MPI are not made for losses

    def look_for_losses(self) -> None:
        """A group that another rank has revoked may be waited for in one that this rank does not know of."""
        whole = cast("SurvivingComm", self.whole)
        if not whole._settles and whole.revoked:
            raise self._loss(self.recorder.waiting)

    def met(self, error: Any, entry: Raw) -> CommError:
        """What an error of MPI means. After a loss, what was prepared may end in errors of other classes."""
        MPI, whole = start(), cast("SurvivingComm", self.whole)
        lost = error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
        if lost or whole.revoked or whole.transport.Get_failed().size:
            return self._loss(entry)
        return super().met(error, entry)

    def _loss(self, entry: Raw) -> RankLostError:
        """The error for a loss met in `entry`."""
        self.recorder.waiting = ()
        whole = cast("SurvivingComm", self.whole)
        failed = whole._ranks_of(whole.transport.Get_failed())
        me = self.ranks[self.rank]
        return RankLostError(f"rank {me} in {entry[3]}" if entry else f"rank {me}", sorted(failed))

    def _ranks_of(self, group: Any) -> list[int]:
        """Those of MPI's group, in its order."""
        return [self.ranks[place] for place in start().Group.Translate_ranks(group, None, self.transport.group)]

    def late(self, entry: Raw, seconds: float) -> CommError:
        """Those who neither come nor wait for anybody themselves are lost from now on."""
        late, wanted = super().late(entry, seconds), readable(entry) if entry else None
        if wanted is None or self.recorder.ended:
            return late
        states = ask(_directory(), wanted.group)
        made = {r: state.waiting or wanted.number in state.made(*wanted[:2]) for r, state in states.items()}
        out = [r for r in wanted.group if not made.get(r)]
        out = [r for r in out if not (_directory() / f"ended.{r}").exists()]
        for rank in out:
            write(_directory() / f"{GONE}.{rank}", "")
        return RankLostError(late.message, out) if out else late

    def revoke_all(self) -> None:
        """See `revoke`."""
        for group in [*self._groups.values()]:
            for comm in (group.transport, group.control):  # type: ignore[attr-defined]
                comm.Revoke()

    @property
    def revoked(self) -> bool:
        """See `revoke`."""
        found: bool = self.transport.Is_revoked()
        return found

    def agreed(self, word: int) -> int:
        """The bits that the words of all members have in common; 0 if one is lost."""
        said = np.array([word], np.int32)
        entry = self.recorder.note(self.ranks, "vote", np.empty(0), series="vote")
        self._settles = True
        try:
            self.finish(self.transport.Iagree(said), entry, said)
            return int(said[0])
        except RankLostError:
            return 0
        finally:
            self._settles = False

    def shrunken(self) -> SurvivingComm:
        """See `shrink`."""
        entry, transport = self.recorder.note(self.ranks, "shrink", np.empty(0), series="shrink"), self.transport
        self._settles = True
        self._abandon()
        while True:
            try:
                transport = self._in_time(transport.Shrink, entry)
                left = SurvivingComm(transport, self._ranks_of(transport.group), self.deadline, self.recorder)._over()
                if left.world_size < _limits()[0]:
                    time.sleep(self.deadline)  # to no further step: the launcher, which learns it from guards, ends all
                return left
            except RankLostError:  # another one was lost
                transport.Revoke()

    def _abandon(self) -> None:
        """Keep what was under way, and drop what was at the last loss. What was prepared is not given back to MPI."""
        self.recorder.rings.clear()
        keep_all()
        for group in self._groups.values():
            abandoned.extend((handle.request, handle) for handle in group.open)  # type: ignore[attr-defined]
        _before[:] = abandoned
        abandoned.clear()

    def _over(self) -> SurvivingComm:
        """From now on the job is these ranks."""
        if self.rank == 0:
            write(_directory() / MEMBERS, " ".join(map(str, self.ranks)))
        _now[:] = [self]
        return self

    def leave(self) -> None:
        """See `MPIComm.leave`; whoever is lost meanwhile is not waited for."""
        try:
            super().leave()
        except RankLostError:
            self.shrink().leave()  # type: ignore[attr-defined]

    def somebody_comes(self) -> bool:
        """Whether somebody can be let in now, as far as this rank knows: the first one, who calls them, knows best."""
        if self.rank > 0:
            return True
        if _calling and _calling[0].is_late():
            _calling.clear()
        if self.world_size < _limits()[1] and not _calling:
            _calling.append(Newcomer())
        return bool(_calling) and _calling[0].peer is not None

    def grown(self) -> SurvivingComm:
        """See `grow`."""
        entry = self.recorder.note(self.ranks, "grow", np.empty(0), series="grow")
        peer = _calling.pop().peer if self.rank == 0 else start().COMM_SELF
        made: SurvivingComm | None = None
        with contextlib.suppress(RankLostError):
            made = self._in_time(lambda: self._with(peer), entry)
        agreed = self.agreed(made is not None)
        if made is None or not agreed:
            if made is not None:
                made.revoke_all()  # who has joined it must not wait, and take the others for lost
            raise RankLostError(f"rank {self.ranks[self.rank]} in grow")
        made._over()
        self._abandon()
        with contextlib.suppress(RankLostError):  # which the next communication meets, too
            made.barrier()
        return made

    def _with(self, peer: Any) -> SurvivingComm:
        between = self.transport.Create_intercomm(0, peer, 1, TAG)
        return _told(between.Merge(high=False), self.ranks[self.rank], self.deadline, self.recorder)


class Newcomer:
    """A process that this rank has called, on its way into MPI; once it is there, `peer` joins it and this rank.

    One at a time, as Open MPI ends those that were called together with the first of them.
    """

    def __init__(self) -> None:
        self.peer: Any = None
        self.number, self.until = _free_number(), time.monotonic() + seconds(ARRIVE, 30.0)
        threading.Thread(target=self._call, name="newcomer", daemon=True).start()

    def is_late(self) -> bool:
        """Whether it is given up, and made to end: after a loss at its start MPI may wait forever."""
        if self.peer is not None or time.monotonic() < self.until:
            return False
        write(_directory() / f"{GONE}.{self.number}", "")
        return True

    def _call(self) -> None:
        MPI, number = start(), self.number
        told = [f"OMPI_COMM_WORLD_RANK={number}", f"OMPI_COMM_WORLD_SIZE={number + 2}"]  # as if a last one were no rank
        try:
            self.peer = MPI.COMM_SELF.Spawn("env", [*told, *sys.orig_argv]).Merge(high=False)
        except MPI.Exception as error:
            print(f"hetu: a new rank could not be started ({error})", file=sys.stderr)
            self.until = time.monotonic() + PAUSE


def _free_number() -> int:
    """A number that no rank of the job has had, nor what keeps mpirun, which has that of the size at first."""
    had = (int(path.suffix[1:]) for path in _directory().glob("started.*"))
    number = 1 + max(job_size(), *had)
    (_directory() / f"started.{number}").touch()
    return number

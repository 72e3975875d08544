"""Communicators: how the ranks of one job move arrays, behind one interface for every transport.

A `Comm` is a rank's view of a group of ranks. Collectives, which all ranks of the group call in the same order, and
point-to-point messages take NumPy buffers in and out; objects are never pickled. A transport writes three methods:
`_start` one collective, `_exchange` messages, `_split` off a sub-group. Names and meanings follow MPI. Every wait gives
up after `deadline` seconds, because a lost rank must end a job, not hang it. There are no message tags: messages
between two ranks arrive in order. Where a transport `survives` the loss of a rank, the others get a RankLostError, and
`revoke`, `shrink`, `vote` and `grow` let them go on (after ULFM: W. Bland et al., "Post-failure recovery of MPI
communication capability", 2013). Left out: reduce and gather to one rank.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from ...core.errors import ArgumentError, HetuError, Site
from ...core.graph import Node
from .alike import WeighedFeed, compile_alike
from .call import CollectiveCall, PeerMessage, check_buffer
from .line import CallLine, OperandSite, calling_line
from .recorder import Entry, LastCalls, RankState, Raw, Recorder, differences, explain, named, readable


class CommError(HetuError, RuntimeError):
    """Ranks that do not agree on what to communicate, or a rank that is gone."""


class DeadlineError(CommError, TimeoutError):
    """A wait that passed its deadline, because some rank never came."""


class RankLostError(CommError):
    """A rank of the group is lost, or another one has revoked it. `lost` are those known to be, as ranks of the job."""

    def __init__(self, what: str, lost: Sequence[int] = ()) -> None:
        why = "another rank has revoked the group, as one does that has seen a loss"
        if lost:
            why = f"{named(lost)} {'is' if len(lost) == 1 else 'are'} lost"
        super().__init__(f"{what}: {why}", fix="go on with the ranks that are left, which comm.shrink() joins")
        self.lost = tuple(lost)


def disagreement(made: Mapping[int, Mapping[int, Entry]]) -> CommError:
    """The error for ranks whose collectives differ, from each rank's {index: entry}."""
    return CommError(
        "\n".join(["the ranks of a group call different collectives", *differences(made)]),
        fix="all ranks must call the same collectives, in the same order, on like arrays",
    )


HERE, COMES = 2, 1  # bits of what ranks agree on where others can join: nobody is lost, and somebody joins


class Handle(ABC):
    """An operation that has started; its buffers belong to it until `wait` returns."""

    @abstractmethod
    def wait(self) -> None:
        """Return when it is finished. DeadlineError when that takes too long."""


class Done(Handle):
    """The handle of an operation that is already finished."""

    def wait(self) -> None:
        pass


class Comm(ABC):
    """`rank` is the place of this process in the group, `ranks` are the members' ranks in the job, `deadline` seconds.

    >>> import numpy as np
    >>> from hetu.dist import run_ranks
    >>> def mean_of_ranks(comm):
    ...     x = np.full(2, comm.rank, np.float32)
    ...     comm.all_reduce(x, x)
    ...     return x / comm.world_size
    >>> run_ranks(3, mean_of_ranks)[0]
    array([1., 1.], dtype=float32)
    """

    compiles: bool | None = None  # whether the ranks do, as they last agreed
    survives = False  # whether the others can go on when a rank is lost
    elastic = False  # whether they are to: executors on it make steps that survive
    regrouped = False  # whether ranks were lost or have come since the job began
    newcomers: tuple[int, ...] = ()  # of `ranks`, those that came by the `grow` which has made this group
    widens = False  # whether it adds floats of 16 bits in an array of 32, for which there had better be a place

    def __init__(self, rank: int, ranks: Sequence[int], deadline: float, recorder: Recorder | None = None) -> None:
        self.rank, self.ranks, self.deadline = rank, tuple(ranks), deadline
        self.recorder = recorder or Recorder()
        self.made = self.recorder.ring(self.ranks)
        self._ways: dict[tuple[int, bool], tuple[LastCalls, str]] = {}
        self.whole: Comm = self  # what this group was split off from, in however many steps
        self._groups: dict[tuple[int, ...], Comm] = {self.ranks: self}
        self._splits: dict[tuple[int, ...], Comm] = {}  # the same by places in this group: a large one is long to check

    @property
    def world_size(self) -> int:
        """The number of ranks of this group."""
        return len(self.ranks)

    def clock(self) -> float:
        """Seconds on the clock of this rank, of which differences count: how long it has computed, or waited."""
        return time.perf_counter()

    def all_reduce(self, x: np.ndarray, out: np.ndarray, op: str = "sum") -> None:
        """`out` = sum (max, min) of every rank's `x`, on all ranks. `out` may be `x`."""
        self.run(CollectiveCall("all_reduce", x, out, op=op))

    def all_reduce_async(self, x: np.ndarray, out: np.ndarray, op: str = "sum") -> Handle:
        """Start an `all_reduce` and return at once, so that computing goes on while it runs."""
        return self._begin(CollectiveCall("all_reduce", x, out, op=op))

    def bind(self, call: CollectiveCall) -> Callable[[], None]:
        """A function without arguments that does a collective on fixed arrays, prepared as far as possible.

        All ranks of the group bind it; what they have bound they run in the same order.
        """
        call.check(self.world_size)
        return lambda: self._start(self._noted(call)).wait()

    def all_gather(self, x: np.ndarray, out: np.ndarray) -> None:
        """`out[r]` = rank r's `x`, on all ranks; `out` has world_size times the elements of `x`."""
        self.run(CollectiveCall("all_gather", x, out))

    def all_gather_async(self, x: np.ndarray, out: np.ndarray) -> Handle:
        """Start an `all_gather` and return at once."""
        return self._begin(CollectiveCall("all_gather", x, out))

    def reduce_scatter(self, x: np.ndarray, out: np.ndarray, op: str = "sum") -> None:
        """`out` = this rank's block of the reduced `x`, which has world_size blocks of the size of `out`."""
        self.run(CollectiveCall("reduce_scatter", x, out, op=op))

    def reduce_scatter_async(self, x: np.ndarray, out: np.ndarray, op: str = "sum") -> Handle:
        """Start a `reduce_scatter` and return at once."""
        return self._begin(CollectiveCall("reduce_scatter", x, out, op=op))

    def broadcast(self, x: np.ndarray, root: int = 0) -> None:
        """Overwrite `x` on every rank with the `x` of rank `root`."""
        self.run(CollectiveCall("broadcast", x, x, root=root))

    def all_to_all(
        self, x: np.ndarray, out: np.ndarray, counts: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> None:
        """Block j of `x` goes to rank j, block i of `out` comes from rank i.

        Blocks are equal unless `counts` = (elements sent to each rank, elements received from each rank).
        """
        self.run(CollectiveCall("all_to_all", x, out, counts=counts and (tuple(counts[0]), tuple(counts[1]))))

    def barrier(self) -> None:
        """Return when every rank of the group has come here."""
        self.run(CollectiveCall("barrier", _NOTHING, _NOTHING))

    def send(self, x: np.ndarray, to: int) -> None:
        """Send `x` to rank `to`; it may return before `x` has arrived, or may wait for the receiver."""
        self.exchange([(to, x)], [])

    def recv(self, out: np.ndarray, source: int) -> None:
        """Overwrite `out` with the next message of rank `source`, of the same size and dtype."""
        self.exchange([], [(source, out)])

    def exchange(self, sends: Sequence[PeerMessage], recvs: Sequence[PeerMessage]) -> None:
        """Batched send and receive: all (rank, array) messages at once, so no order among them can deadlock."""
        self.check_messages(sends, recvs)
        self._exchange(sends, recvs, self.note_messages(sends, recvs, self.recorder.site or calling_line()))

    def bind_exchange(self, sends: Sequence[PeerMessage], recvs: Sequence[PeerMessage]) -> Callable[[], None]:
        """A function without arguments that does `exchange(sends, recvs)`, prepared as far as possible."""
        self.check_messages(sends, recvs)
        line = self.recorder.site or calling_line()
        return lambda: self._exchange(sends, recvs, self.note_messages(sends, recvs, line))

    def check_messages(self, sends: Sequence[PeerMessage], recvs: Sequence[PeerMessage]) -> None:
        """Refuse what no transport can send or receive."""
        size = len(self.ranks)
        for messages, written in ((sends, False), (recvs, True)):
            for peer, array in messages:
                if not 0 <= peer < size or peer == self.rank:
                    raise ArgumentError(
                        f"rank {self.rank} exchanges with rank {peer} in a group of {size}",
                        fix="name another rank of the group; copy what stays on this rank",
                    )
                check_buffer(array, written)

    def note_messages(self, sends: Sequence[PeerMessage], recvs: Sequence[PeerMessage], line: CallLine) -> list[Raw]:
        """Their entries in the recorder, sends first."""
        noted = []
        for messages, sent in ((sends, True), (recvs, False)):
            for peer, x in messages:
                way = self._ways.get((peer, sent)) or self._way(peer, sent)
                noted.append(way[0].add(way[1], x, x.size, line))
        return noted

    def _way(self, peer: int, sent: bool) -> tuple[LastCalls, str]:
        """The messages to a peer, or from it, and what the next one is called."""
        source, to = (self.ranks[rank] for rank in ((self.rank, peer) if sent else (peer, self.rank)))
        self._ways[peer, sent] = found = self.recorder.ring((source, to), "message"), f"message from {source} to {to}"
        return found

    def split(self, ranks: Sequence[int]) -> Comm:
        """The group of these ranks of this group, in this order; only they call it. Made once, then remembered."""
        group = tuple(ranks)
        if (found := self._splits.get(group)) is not None:
            return found
        if self.rank not in group or len(set(group)) != len(group) or not all(0 <= r < self.world_size for r in group):
            raise ArgumentError(
                f"rank {self.rank} of {self.world_size} splits off the group {group}",
                fix="name each member once; only members call split",
            )
        members = tuple(self.ranks[r] for r in group)
        if members not in self._groups:
            self._groups[members] = made = self._split(group)
            made._groups, made.whole = self._groups, self.whole  # one family: a group's collectives count once
        self._splits[group] = self._groups[members]
        return self._groups[members]

    def revoke(self) -> None:
        """End what all groups of the `whole` of this one communicate: on every rank that raises RankLostError.

        No collective: one rank calls it when it has met an error that others may not see, so that none waits in vain.
        """
        self._that_survives("revoke").revoke_all()

    def shrink(self) -> Comm:
        """The group of those that are left, in their order: revoke this one, and meet all others who call this.

        They keep their numbers in the job: `ranks` of the new group are those of this one without the lost, whose
        numbers never come back. Ranks that are lost meanwhile are left out as well. Groups are split off anew.
        """
        whole = self._that_survives("shrink")
        whole.revoke_all()
        made: Comm = whole.shrunken()
        made.regrouped = True
        return made

    def vote(self, yes: bool) -> bool:
        """Whether all members have said yes, which has the same answer on all that are left, even in a revoked group.

        A collective that raises no RankLostError: who is lost without having voted has said no. Whoever comes here from
        an error revokes the group first, as others may wait for it elsewhere.
        """
        return bool(self._that_survives("vote").agreed(int(yes)))

    def grow(self) -> Comm:
        """This group and the ranks that wait to join the job, behind each other; the group itself if none does.

        A collective, which all members call where a new rank can come in, such as between two steps. A newcomer gets
        the same group from `world()`, or as the argument of `run_ranks`; `newcomers` tells who they are. Either all
        members get it, or all a RankLostError.
        """
        whole = self._that_survives("grow")
        common = whole.agreed(HERE * (not whole.revoked) + COMES * whole.somebody_comes())
        if common < HERE:
            raise RankLostError(f"rank {self.ranks[self.rank]} in grow")
        if common == HERE:
            return self
        made: Comm = whole.grown()
        made.regrouped = True
        return made

    def _that_survives(self, what: str) -> Any:
        if not self.survives:
            raise CommError(
                f"{what}: the ranks of a {type(self).__name__} cannot go on when one is lost",
                fix="start them with heturun --elastic MIN:MAX, or as threads: run_ranks(..., die_at={rank: when})",
            )
        if self is not self.whole and what != "revoke":
            raise ArgumentError(
                f"{what} of {self.world_size} ranks split off from {self.whole.world_size}",
                fix=f"call comm.{what}() of the whole group, on all of its ranks",
            )
        return self.whole  # with what transports that survive have besides, as `ThreadComm` does

    def line_of(self, node: Node) -> Site | None:
        """The user's line of an operator that communicates. The order of a strategy's has been compared by then."""
        site = node.site
        return site if site is None or "order" in node.attrs else OperandSite.of(site, node.inputs[0])

    def at(self, site: Site | str | None) -> None:
        """What follows belongs to this line, or to these words; None: to the line that calls. See `recorder.py`."""
        self.recorder.site = site

    def compile_alike(self, failed: bytes = b"") -> bool:
        """All ranks compile the same kernels for their CPUs, or none does: what they keep alike must stay alike.

        A collective, which an executor calls before its first step and for each program; `failed` are 8 bytes that
        stand for what could not be compiled for it. False where none compiles from now on.
        """
        return compile_alike(self, failed)

    def end(self, entry: Raw) -> None:  # noqa: B027 - most transports hold nothing
        """Give back what the group holds in the transport, when all its members call this, in their `entry`."""

    def progress(self) -> None:  # noqa: B027 - most transports need no help
        """Give asynchronous operations a moment; an executor calls this between its instructions."""

    def agree(self, call: CollectiveCall) -> Any:
        """Note a call, to compare it with those of other ranks, where the transport would not notice that they differ.

        What it returns for the first call of a kind is awaited before the result is used.
        """
        return None

    def compare_feeds(self, noted: Sequence[WeighedFeed]) -> None:  # noqa: B027 - one rank has nobody to compare with
        """Compare what this rank is fed in a step. FeedError, now or some steps later, if others are fed otherwise."""

    def late(self, entry: Raw, seconds: float) -> CommError:
        """The error for a wait of `seconds` for `entry`, with what all ranks say about themselves."""
        what = readable(entry).short if entry else "the others"
        option = "leave" if entry and readable(entry).series == "end" else "deadline"
        return DeadlineError(
            f"rank {self.ranks[self.rank]} waited {seconds:.3g} s for {what}\n{self.report()}".rstrip(),
            fix="all ranks must call the same collectives, in the same order; if one only takes long, "
            f"heturun --{option} S waits for S seconds",
        )

    def asked(self, ranks: Sequence[int]) -> Mapping[int, RankState]:
        """What these ranks of the job say about themselves, as far as they answer."""
        return {}

    def remembered(self, first: int) -> dict[int, dict[int, Entry]]:
        """The collectives of this group behind number `first` by rank, as far as the ranks remember and answer."""
        made = {rank: state.made(self.ranks, "") for rank, state in self.asked(self.ranks).items()}
        return {r: {n: e for n, e in entries.items() if n > first} for r, entries in sorted(made.items())}

    def report(self) -> str:
        """Who keeps this rank waiting, as far as the ranks can tell; see `recorder.explain`."""
        return explain(self.asked(self.whole.ranks), self.ranks[self.rank])

    def run(self, call: CollectiveCall) -> None:
        """Do a collective, and wait for it."""
        self._begin(call).wait()

    def _begin(self, call: CollectiveCall) -> Handle:
        call.check(self.world_size)
        return self._start(self._noted(call))

    def _noted(self, call: CollectiveCall, what: str = "") -> CollectiveCall:
        call.noted = self.made.add(what or call.what, call.x, call.size, self.recorder.site or calling_line(3))
        return call

    @abstractmethod
    def _start(self, call: CollectiveCall) -> Handle:
        """Start a checked collective."""

    @abstractmethod
    def _exchange(self, sends: Sequence[PeerMessage], recvs: Sequence[PeerMessage], noted: Sequence[Raw]) -> None:
        """Run a checked batch of messages to its end; `noted` are its entries in the recorder, sends first."""

    @abstractmethod
    def _split(self, group: tuple[int, ...]) -> Comm:
        """Make the communicator of a checked sub-group."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.world_size}>"


_NOTHING = np.empty(0, np.uint8)
of_thread: ContextVar[Comm | None] = ContextVar("of_thread", default=None)  # all ranks, for a rank that is a thread


class SerialComm(Comm):
    """The group of one rank: every collective is a copy."""

    def __init__(self) -> None:
        super().__init__(0, (0,), deadline=0.0)

    def _start(self, call: CollectiveCall) -> Handle:
        if call.out is not call.x:
            call.out.reshape(-1)[:] = call.x.reshape(-1)
        return Done()

    def _exchange(self, sends: Sequence[PeerMessage], recvs: Sequence[PeerMessage], noted: Sequence[Raw]) -> None:
        pass  # there is nobody else, so a checked batch is empty

    def _split(self, group: tuple[int, ...]) -> Comm:
        raise AssertionError("a group of one has no other group")

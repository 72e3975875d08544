"""Whether the ranks of a group call the same: at once for the first call of a kind, and a little later for every call.

MPI would add arrays of different dtypes, or one rank's gradients to another's weights, without a word. So the ranks
compare their first calls of each kind, and then, every `TOGETHER` calls, a hash of what they called: the exchange runs
beside what follows, and who is two of them ahead waits for the others. Like calls that come from the same places of the
source in another order count as different, and so do operators of one line (`line.py` says which are told apart). Other
lines on other ranks may be a branch, so they are only warned of, and only where they reduce. What ranks are fed is
compared along (`alike.py`). At the end of the script all messages must have been received, and what was begun awaited.
"""

from __future__ import annotations

import functools
import warnings
import zlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .alike import WeighedFeed, drifted
from .call import CollectiveCall
from .comm import CommError, disagreement
from .line import CallLine, CallPath, mixed, numbers
from .recorder import KEPT, Entry, RankState, Raw, differences, readable

LINE = 256  # bytes of a rank's description of its calls: one size, so that no exchange overruns another
STEPS = 16  # whose feeds are compared together, and at first after 1, 2, 4 and 8
TOGETHER = KEPT // 4  # calls; those that a hash is made of are still in the recorder when it is looked at
WORD = (1 << 64) - 1
NONE: tuple[Sequence[int], ...] = ((), (), ())


def pack(text: str) -> np.ndarray:
    """A text as bytes of a fixed number."""
    return np.frombuffer(text.encode()[:LINE].ljust(LINE, b"\0"), np.uint8).copy()


def unpack(line: np.ndarray) -> str:
    """The text that was packed."""
    return line.tobytes().rstrip(b"\0").decode(errors="replace")


class Telling:
    """A short text of every rank of a group, on its way over the group's second communicator; `comm` is an MPIComm."""

    def __init__(self, comm: Any, text: str) -> None:
        self.comm, self.sent = comm, pack(text)
        self.all = np.empty((comm.world_size, LINE), np.uint8)
        self.request = comm.control.Iallgather(self.sent, self.all)

    def has_come(self) -> bool:
        """Whether there is nothing to wait for."""
        return bool(self.request.Test())

    def texts(self, entry: Raw) -> list[str]:
        """Wait for the texts, in the order of the ranks."""
        self.comm.finish(self.request, entry, self, patient=True)
        return [unpack(line) for line in self.all]


class Agreement:
    """The comparison of one call with those of the other ranks."""

    def __init__(self, comm: Any, entry: Raw) -> None:
        self.comm, self.entry = comm, entry
        mine = readable(entry)
        self.exchange = Telling(comm, "\n".join([mine.what, mine.type, str(mine.size), mine.line]))

    def wait(self) -> None:
        """CommError if the ranks call different things."""
        group, series, index, *_ = readable(self.entry)
        calls = {}
        for rank, text in zip(self.comm.ranks, self.exchange.texts(self.entry)):
            what, type_, size, line = text.split("\n") if "\n" in text else ("what it has called before", "", "0", "")
            calls[rank] = Entry(group, series, index, what, type_, line, int(size))
        if len({call.common for call in calls.values()}) > 1:
            raise disagreement({rank: {0: call} for rank, call in calls.items()})


class KnownCall:
    """Calls like one: their `number`, the same on all ranks, and what the transport prepared for them.

    Those are compared by line too that must not change places: who has nothing to give may well branch.
    """

    def __init__(self, call: CollectiveCall) -> None:
        self.number = zlib.crc32(repr(readable(call.noted).common).encode())
        self.what, self.fits = call.what, (call.out.size, call.out.dtype)
        self.reduces, self.small = bool(call.op), None
        self.spreads = not call.op and call.kind != "barrier"

    small: Any


def _compared(kind: KnownCall, line: CallLine) -> tuple[int, int, int, int]:
    """Numbers of a call from a line: of its kind, of the place and the way if it reduces, of the way if it spreads."""
    place, way = numbers(line)
    return kind.number, place * kind.reduces, way * kind.reduces, way * kind.spreads


_compared_before = functools.lru_cache(512)(_compared)


class CallHistory:
    """The calls of one rank in a group since they were last compared."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.kinds: dict[tuple[object, ...], KnownCall] = {}  # by signature
        self.calls: list[tuple[int, int, int, int]] = []  # what is compared of each
        self.moved: list[tuple[int, Any]] = []  # how much some of them, by number, send and receive
        self.fed, self.steps = 0, 0
        self.open: deque[Any] = deque()  # what `comm.tell` returns: a Telling
        self.before: tuple[Sequence[int], ...] = NONE  # the sums of the last calls, if they differed
        self.compared, self.warned = 0, False

    def note(self, call: CollectiveCall) -> Agreement | None:
        """Add a call; the comparison that has begun with it if it is the first of its kind."""
        agreement, kind = None, self.kinds.get(call.signature)
        if kind is None:
            agreement, kind = Agreement(self.comm, call.noted), self.learn(call)
        self.add(kind, call)
        return agreement

    def learn(self, call: CollectiveCall) -> KnownCall:
        """Know calls like this one from now on."""
        kind = self.kinds[call.signature] = KnownCall(call)
        return kind

    def add(self, kind: KnownCall, call: CollectiveCall) -> None:
        """Add a call of a kind that is known."""
        if call.counts is not None:
            self.moved.append((call.noted[2], call.counts))
        line = call.noted[6]
        self.calls.append((_compared_before if type(line) is CallPath else _compared)(kind, line))
        if len(self.calls) == TOGETHER:
            self.roll()
            self._judge_those_told(call.noted)

    def note_feeds(self, noted: Sequence[WeighedFeed]) -> None:
        """Add what a step is fed."""
        for weighed, _ in noted:
            self.fed += weighed
        self.steps += 1
        if self.steps % STEPS == 0 or not self.steps & self.steps - 1:
            self.roll()
        self._judge_those_told(())

    def _judge_those_told(self, entry: Raw) -> None:
        while self.open and (len(self.open) > 2 or self.open[0].has_come()):
            self._judge_first(entry)

    def end(self, entry: Raw) -> None:
        """Compare what is left, as this rank leaves. CommError if any calls differed, or if one was not awaited."""
        if begun := self.comm.open:
            fix = "call wait() on what the asynchronous call has returned"
            raise CommError(f"the script has ended, but nobody has waited for {readable(begun[0].call.noted)}", fix=fix)
        self.roll()
        self.judge_last(entry)
        if self.warned:  # the one that warns asks the others, which must not be gone
            self.comm.finish(self.comm.control.Ibarrier(), entry, self)

    def judge_last(self, entry: Raw) -> None:
        """Wait for all comparisons that have begun."""
        while self.open:
            self._judge_first(entry)

    def roll(self) -> None:
        """Begin to compare the calls so far: what was called, from which lines, and these whatever their order.

        The same again with the calls that led to each line: they tell the users of a helper apart.
        """
        counted = Counter(self.calls).items()  # most come many times
        kinds, *columns = [*zip(*self.calls)] or [()] * 4
        hashes = [hash(kinds)]
        for at, column in enumerate(columns, 1):
            hashes += [hash(column), sum(count * mixed((call[0], call[at])) for call, count in counted)]
        hashes += [sum((2 * at + 1) * _balance(self.comm.rank, *counts) for at, counts in self.moved), self.fed]
        self.open.append(self.comm.tell(" ".join(str(h & WORD) for h in (len(kinds), *hashes))))
        self.calls.clear()
        self.moved.clear()
        self.fed = 0

    def _judge_first(self, entry: Raw) -> None:
        texts = self.open.popleft().texts(entry)
        rows = [tuple(map(int, text.split())) if "\n" not in text else () for text in texts]
        if len({row[:2] for row in rows}) > 1:
            raise differed(self.comm.remembered(self.compared), "different collectives")
        _, _, lines, line_sums, ways, way_sums, spread, spread_sums, balances, fed = zip(*rows)
        if sum(balances) & WORD:
            what = "all_to_all with counts that differ: one rank sends another number than the other receives"
            raise differed(self.comm.remembered(self.compared), what)
        if sum(fed) & WORD:
            states = self.comm.asked(self.comm.ranks)
            raise drifted((rank, entry) for rank, state in sorted(states.items()) for entry in state.entries)
        before, self.before = self.before, NONE
        if len(set(lines)) > 1:
            self._refuse_another_order("line", line_sums, before[0])
            self._warn()
        elif len(set(ways)) > 1:
            self._refuse_another_order("way", way_sums, before[1], " through one helper")
        if len(set(spread)) > 1:
            self._refuse_another_order("way", spread_sums, before[2])
        if len({*ways}) > 1 or len({*spread}) > 1:
            self.before = line_sums, way_sums, spread_sums
        self.compared += rows[0][0]

    def _refuse_another_order(self, by: str, sums: Sequence[int], before: Sequence[int], through: str = "") -> None:
        """CommError if only the order differs, in these calls or together with those before them."""
        if 1 in (len(set(sums)), len({(a + b) & WORD for a, b in zip(sums, before)})):  # one set of lines
            raise differed(
                self.comm.remembered(self.compared - TOGETHER),
                f"like collectives from lines{through} in another order",
                fix="; if ranks take turns, call in one place of the source",
                by=by,
            )

    def _warn(self) -> None:
        """Say once that lines differ; behind a loss some ranks make a step again that is not that of their line."""
        if self.comm.rank == 0 and not (self.warned or self.comm.whole.regrouped):
            found = differences(self.comm.remembered(self.compared))
            warnings.warn(
                "\n".join(["ranks reduce arrays from different lines, which must mean the same", *found]),
                RuntimeWarning,
                stacklevel=2,
            )
        self.warned = True


@functools.lru_cache(256)
def _balance(rank: int, sent: Sequence[int], received: Sequence[int]) -> int:
    """A number of a call's counts; those of all ranks of the group add up to 0 if what is sent is what is received."""
    gone = sum(mixed((rank, other, int(number))) for other, number in enumerate(sent))  # NumPy's look otherwise
    return gone - sum(mixed((other, rank, int(number))) for other, number in enumerate(received))


def compare_messages(comm: Any, entry: Raw) -> None:
    """CommError if one to this rank was never received; `comm`, an MPIComm, has all ranks, which all call this."""
    counts = np.zeros((3, comm.world_size), np.int64)  # sent to each rank, received from it, and sent by it
    me = comm.ranks[comm.rank]
    for (ranks, series), ring in comm.recorder.rings.items():
        if series == "message":
            sent = ranks[0] == me
            counts[1 - sent, comm.ranks.index(ranks[sent])] = ring.made
    comm.finish(comm.control.Ialltoall(counts[0], counts[2]), entry, counts)
    for place in np.flatnonzero(counts[2] > counts[1]).tolist():
        source = comm.ranks[place]
        made = comm.asked([source]).get(source, RankState()).made((source, me), "message")
        lost = [f"  rank {source}: {e}" for number, e in made.items() if number > counts[1, place]]
        raise CommError(
            "\n".join([f"rank {me} has received {counts[1, place]} of {counts[2, place]} messages", *lost[:1]]),
            fix="receive what is sent",
        )


def differed(made: Mapping[int, Mapping[int, Entry]], what: str, fix: str = "", by: str = "line") -> CommError:
    """The error for calls that were seen to differ after they had ended, as far as the ranks remember them."""
    found = differences(made, by)
    last = [f"  rank {r}: {e.number} calls, the last {e}" for r, es in made.items() for e in [*es.values()][-1:]]
    return CommError(
        "\n".join([f"the ranks of a group have called {what}, so results may be wrong", *(found or last)]),
        fix="all ranks must call the same collectives, in the same order, on like arrays" + fix,
    )

"""A flight recorder: the last collectives of each rank and group, and an explanation when ranks wait for each other.

Every rank notes in rings what it communicates, and for which line of the user. When a wait takes too long, ranks that
are threads look at each other's rings; processes ask through files of the job's run directory, and a thread of its own
answers for each, because the rank itself may be stuck. `explain` is a pure function of the answers. A rank that cannot
run this thread (stopped, or in C code that keeps the interpreter's lock) is reported as not answering.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import math
import os
import sys
import sysconfig
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from ...core.errors import PACKAGE, Site
from ...core.types import TensorType
from .line import CallLine, calling_line, show, show_way

PLAIN = ("barrier", "split", "vote", "shrink", "grow", "end of the script")  # without an array
KEPT = 512  # collectives of each group
POLL = 0.1  # seconds between two looks for a question
PATIENT = 3.0  # seconds for an answer, which on a busy machine may take long
Ranks = tuple[int, ...]
Raw = tuple[Any, ...]  # an Entry before it is made readable


class Entry(NamedTuple):
    """The `number`-th collective of `group` on one rank, or message from `group[0]` to `group[1]`, and its line.

    `size` counts the elements that all ranks have alike, `way` are the lines of the calls that led to the line.
    """

    group: Ranks
    series: str
    number: int
    what: str
    type: str
    line: str
    size: int = 0
    way: str = ""

    @property
    def common(self) -> tuple[str, str, int]:
        """What the ranks of a group must have in common: not the shape, only how many elements there are."""
        return self.what, self.type.partition("[")[0], self.size

    @property
    def short(self) -> str:
        """Without the line."""
        return f"{self.what} {self.type}".rstrip()

    def __str__(self) -> str:
        return f"{self.short} at {self.line}{' < ' * bool(self.way)}{self.way}"


class RankState(NamedTuple):
    """What one rank answers: its last collectives, the one that it waits for, and where its code is.

    `cpu` is the time in seconds that it has computed, `steps` how often it has communicated, and `inside` whether it is
    in a call of hetu. `runs` counts the steps of executors, `given` the bytes that it has given to all that it
    communicated, `waited` the seconds for which it was seen to wait, and `event` is the last that is worth telling.
    """

    entries: tuple[Entry, ...] = ()
    waiting: Entry | None = None
    where: str = ""
    cpu: float = 0.0
    steps: int = 0
    inside: bool = False
    runs: int = 0
    given: int = 0
    waited: float = 0.0
    event: str = ""

    @classmethod
    def from_json(cls, text: str) -> RankState:
        entries, waiting, *more = json.loads(text)
        made = [Entry(tuple(group), *rest) for group, *rest in (*entries, *([waiting] if waiting else []))]
        return cls(tuple(made[: len(entries)]), made[-1] if waiting else None, *more)

    def made(self, group: Ranks, series: str) -> dict[int, Entry]:
        """The entries of one series by their number."""
        return {entry.number: entry for entry in self.entries if entry[:2] == (group, series)}


class LastCalls(deque[Raw]):
    """The last entries of one series of a group, and how many there have been."""

    def __init__(self, group: Ranks, series: str, kept: int) -> None:
        super().__init__(maxlen=kept)
        self.group, self.series, self.made = group, series, 0
        self.weighed, self.nbytes = 0, 0.0

    def weigh(self) -> float:
        """The bytes of all entries so far; of those that nobody has looked at before they went, as many as of others.

        Called by whoever looks, so that it costs the calls nothing.
        """
        new = [e for e in [*self] if e[2] > self.weighed]
        if new:
            nbytes = sum(math.prod(shape) * dtype.itemsize for *_, shape, dtype, _, _ in new)
            self.nbytes += nbytes * (new[-1][2] - self.weighed) / len(new)
            self.weighed = new[-1][2]
        return self.nbytes

    def add(self, what: str, x: np.ndarray, size: int, line: CallLine) -> Raw:
        """Write down one call; `readable` formats it when somebody asks."""
        self.made = index = self.made + 1
        entry = self.group, self.series, index, what, x.shape, x.dtype, line, size
        self.append(entry)
        return entry


class Recorder:
    """The rings of one rank, shared by all its groups. `site` is the user's line that a program communicates for."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.rings: dict[tuple[Ranks, str], LastCalls] = {}
        self.waiting: Raw = ()
        self.ended, self.event = "", ""
        self.runs, self.waited = 0, 0.0
        self.site: Site | str | None = None
        self.absent: dict[Any, Callable[[], None]] = {}  # called once the rank has waited for a while

    def waits(self) -> None:
        """The rank has waited for a while: whoever else waits for it shall no longer."""
        while self.absent and not self.ended:
            self.absent.popitem()[1]()

    def ring(self, group: Ranks, series: str = "", kept: int = KEPT) -> LastCalls:
        """The calls of a group, the messages from one rank to another, or what is fed."""
        found = self.rings.get((group, series))
        if found is None:
            found = self.rings[group, series] = LastCalls(group, series, kept)
        return found

    def note(self, group: Ranks, what: str, x: np.ndarray, line: CallLine = None, series: str = "") -> Raw:
        """Write down one collective or message."""
        return self.ring(group, series).add(what, x, x.size, line or self.site or calling_line())

    def refuse(self, raises: Callable[[], None]) -> None:
        """From now on this rank does not communicate: what is to be noted `raises`."""
        for ring in self.rings.values():
            vars(ring).update(add=lambda *_: raises())
        vars(self).update(ring=lambda *_: raises())

    @property
    def count(self) -> int:
        """How much this rank has communicated."""
        return sum(ring.made for ring in [*self.rings.values()])

    def state(self) -> RankState:
        """An answer; called by other threads while this rank runs."""
        waiting, frame = self.waiting, sys._current_frames().get(self.thread)
        return RankState(
            tuple(readable(entry) for ring in [*self.rings.values()] for entry in [*ring]),
            readable(waiting) if waiting else None,
            self.ended or place(frame),
            time.process_time(),
            self.count,
            not self.ended and inside(frame),
            self.runs,
            round(sum(ring.weigh() for ring in [*self.rings.values()])),
            self.waited,
            self.event,
        )


def readable(raw: Raw) -> Entry:
    """An entry as `explain` shows it."""
    group, series, index, what, shape, dtype, line, size = raw
    type_ = "" if what in PLAIN else str(TensorType(shape, dtype))
    return Entry(group, series, index, what, type_, show(line), size, show_way(line))


OUTSIDE = (PACKAGE, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")


def inside(frame: FrameType | None) -> bool:
    """Whether a frame belongs to a call of hetu that the user has made."""
    while frame is not None and frame.f_code.co_filename.startswith(OUTSIDE):
        if frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


def place(frame: FrameType | None) -> str:
    """`train.py:12: while True:`, the innermost line of a frame's stack that is neither hetu's nor the library's."""
    while frame is not None and frame.f_code.co_filename.startswith(OUTSIDE):
        frame = frame.f_back
    if frame is None:
        return "no line of the script, which has not begun or goes on in threads"
    path = frame.f_code.co_filename
    return f"{os.path.basename(path)}:{frame.f_lineno}: {linecache.getline(path, frame.f_lineno).strip()}"


# -- questions and answers between processes -------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    """Write a file in one step, so that no reader sees half of it."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(text, "utf-8")
    partial.replace(path)


def answer(directory: str | Path, rank: int, recorder: Recorder) -> None:
    """Answer the questions in `directory`, from now until the process ends."""
    folder, answered = Path(directory), set()

    def run() -> None:
        while folder.is_dir():
            recorder.waited += POLL * bool(recorder.waiting)
            for question in folder.glob("ask.*"):
                if question not in answered:
                    answered.add(question)
                    write(folder / f"state.{question.suffix[1:]}.{rank}", json.dumps(recorder.state()))
            time.sleep(POLL)

    threading.Thread(target=_until_the_directory_goes, args=(run,), name="recorder", daemon=True).start()


def _until_the_directory_goes(run: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):  # the launcher has ended and taken the directory with it
        run()


def ask(directory: str | Path, ranks: Sequence[int], seconds: float = PATIENT) -> dict[int, RankState]:
    """The states of `ranks`; those that do not answer within `seconds` are left out."""
    folder, name = Path(directory), f"{os.getpid()}-{time.monotonic_ns()}"
    write(folder / f"ask.{name}", "")
    until, found = time.monotonic() + seconds, dict[int, RankState]()
    while len(found) < len(ranks) and time.monotonic() < until:
        time.sleep(POLL / 5)
        for rank in set(ranks) - set(found):
            path = folder / f"state.{name}.{rank}"
            if path.exists():
                found[rank] = RankState.from_json(path.read_text("utf-8"))
                path.unlink(missing_ok=True)
    (folder / f"ask.{name}").unlink(missing_ok=True)  # nobody reads what comes later
    return found


# -- the explanation -------------------------------------------------------------------------------------------


def explain(states: Mapping[int, RankState], rank: int) -> str:
    """Who keeps `rank` waiting: the ranks that are missing and where they are, or the first calls that differ.

    >>> line = Entry((0, 1), "", 1, "all_reduce sum", "f32[4]", "train.py:7")
    >>> print(explain({0: RankState((line,), line), 1: RankState(where="train.py:5: while True:")}, rank=0))
    missing: rank 1 is at train.py:5: while True:
    waiting: rank 0 in all_reduce sum f32[4] at train.py:7
    """
    wanted = states[rank].waiting if rank in states else None
    if wanted is None:
        return ""
    members = {r: states[r] for r in wanted.group if r in states}
    made = {r: state.made(wanted.group, wanted.series) for r, state in members.items()}
    lines = [f"missing: rank {r} does not answer" for r in wanted.group if r not in states]
    lines += [f"missing: {_doing(r, members[r])}" for r in members if wanted.number not in made[r]]
    lines += differences(made)
    waiting = defaultdict(list)
    for r, state in members.items():
        if state.waiting is not None and wanted.number in made[r]:
            waiting[str(state.waiting)].append(r)
    return "\n".join([*lines, *(f"waiting: {named(who)} in {what}" for what, who in waiting.items())])


def _doing(rank: int, state: RankState) -> str:
    if state.waiting is not None and state.waiting.series != "end":
        others = [r for r in state.waiting.group if r != rank]
        return f"rank {rank} waits for {named(others)} in {state.waiting}"
    return f"rank {rank} is at {state.where}"


def named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def differences(made: Mapping[int, Mapping[int, Entry]], by: str = "line") -> list[str]:
    """The first collective in which some rank differs from most others of its group, from each rank's {number: entry}.

    If two sides are equally large, either may be wrong. Ranks may come to a line on different ways, unless those are
    what is asked for (`by`).
    """
    if by != "way":
        made = {rank: {n: entry._replace(way="") for n, entry in entries.items()} for rank, entries in made.items()}
    for index in sorted({i for entries in made.values() for i in entries}):
        here = {r: entries[index] for r, entries in made.items() if index in entries}
        for same in (attrgetter("common"), attrgetter("line", *{by} - {"line"})):
            most, _ = Counter(map(same, here.values())).most_common(1)[0]
            odd = [r for r, e in here.items() if same(e) != most]
            if odd:
                return _difference(index, made, [r for r in here if r not in odd], odd)
    return []


def _difference(
    index: int, made: Mapping[int, Mapping[int, Entry]], most: Sequence[int], odd: Sequence[int]
) -> list[str]:
    first, other = made[most[0]], made[odd[0]]
    a, b = first[index], other[index]
    cause = _cause(first, other, index)
    if len(most) == len(odd):
        cause = f"{cause}; either side may be wrong"
    return [f"differs: {cause}", f"  {named(odd)}: {b}", f"  {named(most)}: {a}"]


def _cause(usual: Mapping[int, Entry], odd: Mapping[int, Entry], index: int) -> str:
    """What differs from `index` on, as far as the later calls tell."""
    causes = []
    if _follow(odd, index, usual, index + 1):
        causes.append(f"{usual[index].line} was left out")
    if _follow(usual, index, odd, index + 1):
        causes.append(f"{odd[index].line} is one call too many")
    swapped = {index: index + 1, index + 1: index}
    if all(i in usual and j in odd and usual[i][3:] == odd[j][3:] for i, j in swapped.items()):
        tail = [i for i in usual if i > index + 1 and i in odd]
        if all(usual[i][3:] == odd[i][3:] for i in tail):
            causes.append("two calls are swapped")
    if causes:
        return ", or ".join(causes)
    if usual[index].what != odd[index].what:
        return "the collective; one was left out, or the order is another"
    if usual[index].common == odd[index].common:
        return "the line"
    (dtype, shape), (other_dtype, other_shape) = (e[index].type.split("[", 1) for e in (usual, odd))
    return " and ".join(["dtype"] * (dtype != other_dtype) + ["shape"] * (shape != other_shape))


def _follow(a: Mapping[int, Entry], i: int, b: Mapping[int, Entry], j: int) -> bool:
    """Whether the known calls of `a` from i on and of `b` from j on agree."""
    both = [(a[i + k], b[j + k]) for k in range(len(a)) if i + k in a and j + k in b]
    return bool(both) and all(x[3:] == y[3:] for x, y in both)

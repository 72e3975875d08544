"""Snapshots of servers: checkpoint folders, written while they serve, from which their next lives go on.

A snapshot of clock c holds values, optimizer state, versions, clocks, and which requests have taken effect, so a push
that is sent again after the restart still counts once. A server takes it as soon as it knows that all workers have
ended the clocks below c. When one is due, the server says so in its answer to the end of a clock; a worker then ends
its next clock with the wish for a snapshot. No clock is over before every server has heard all workers, so every server
knows of the wish in time (a marker, as in K. Chandy, L. Lamport, "Distributed Snapshots", TOCS 1985).

*Guaranteed*: every shard of clock c holds all pushes of the clocks below c and none of the clocks from c + s on, where
s is the staleness. Under BSP and SSP(0) the shards are therefore one moment, that of one process after c steps. *Not
guaranteed*, under SSP(s) and ASP: that a push of the clocks between, or one gradient of several parameters, is in all
of the shards or in none. A reader at clock c + s may see the same mixture.

With `forks` a server forks between two messages, and the child writes the memory as it was then, of which only what
changes meanwhile is copied. Else arrays are copied, and a thread writes them. Rows that lie in a file (`tiers.py`) a
child would see change, and no memory holds: with such, the server only gives signs of life until they are written. Each
server keeps its last `KEPT` snapshots and writes one at a time. A worker's clock differs by at most one between
servers, so when one server takes a third snapshot, the others have written the first: there is always a clock that all
have, and servers that start together go on from the newest such clock. A server that was killed alone goes on from its
own newest, because the others have gone on too. Nothing is logged in between: what came after the snapshot is lost, and
workers that are still there go on from their clock (M. Li et al., "Scaling Distributed Machine Learning with the
Parameter Server", OSDI 2014). Left out: replication, one moment for servers of which only some were killed, workers'
own state (checkpoints have it), and workers that wait for a partial reduce.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ...answers import OF_VALUES
from ...checkpoint import Checkpoint, generations, remove, whole
from ...core.errors import CheckpointError, HetuError
from ...saving import begin_folder
from ..store.consistency import consistency
from ..store.growing import table_of
from ..store.member import Member
from ..store.messages import Kind, Message, RefusedError
from ..store.server_table import FAR, ReadPart
from ..store.store import ParameterStore
from ..store.table_spec import TableSpec
from .beside import Forked, Threaded

KEPT = 3
LONGEST = 8  # snapshots, of which the first holds all, and each other one the rows of growing tables that have changed
VERSION_JUMP = FAR**2  # above any version of the life before, so that what caches hold of it counts as stale
FORMAT = 4  # of what a snapshot holds
Tensors = dict[str, Any]  # arrays, or what is read as one


class Snapshots:
    """The snapshots of one store, each in a folder of `folder` that is named by its clock, every `every` seconds.

    >>> import tempfile
    >>> from hetu.ps import ASP
    >>> folder = Path(tempfile.mkdtemp())
    >>> snapshots = Snapshots(ParameterStore(1, ASP()), folder, every=30.0)
    >>> snapshots.take(clock=7)
    >>> snapshots.finish()
    >>> later = ParameterStore(1, ASP())
    >>> Snapshots(later, folder, every=30.0).restore(), later.restored["clock"]
    (True, 7)
    """

    def __init__(self, store: ParameterStore, folder: Path, every: float, forks: bool = False) -> None:
        self.store, self.folder, self.every, self.forks, self.life = store, folder, every, forks, 1
        self.writer: Forked | Threaded | None = None
        self.meanwhile: Callable[[], None] | None = None  # called again and again while no table may change
        self.ended: tuple[int, RefusedError | None] = -1, None  # the last one, and why it is not there
        self.chain: list[int] = []  # clocks of snapshots that the next one goes on from, each from those before it
        self.held, self.taken = set[int](), set[int]()  # the tables of the last of these, and of that being written
        store.moments.keep, store.moments.due = self.take, store.now

    def restore(self, clock: int | None = None) -> bool:
        """Load the snapshot of `clock`, by default the newest, into the new store. Later ones are deleted."""
        if not (found := generations(self.folder)):
            return False
        clock = found[-1] if clock is None else clock
        self.life = load(self.folder, clock, self.store)
        self._save(clock, *self._dump(clock))  # or the versions of two lives after one snapshot could be confused
        self.taken = {*self.store.tables}
        self._go_on_from(clock, [])
        self._drop([number for number in found if number > clock])
        moments = self.store.moments
        moments.due, moments.last, self.ended = self.store.now + self.every, clock, (clock, None)
        return True

    def give_up(self) -> None:
        """Remove all snapshots: they are of an older time than what servers of another number have kept."""
        self._drop(generations(self.folder))

    def take(self, clock: int) -> None:
        """Begin to write the state at the beginning of `clock`, once the previous snapshot is written."""
        self.finish()
        self.store.moments.due = self.store.now + self.every
        self.taken = {*self.store.tables}
        if any(table.tiers for table in self.store.tables.values()):
            self.writer = Threaded(clock, partial(self._write, clock))
            self.finish()
            return
        try:
            if self.forks:
                self.writer = Forked(clock, partial(self._write, clock))
                return
            tensors, state = self._dump(clock)
            copies = {name: array.copy() for name, array in tensors.items()}
            self.writer = Threaded(clock, partial(self._write, clock, (copies, state)))
        except (OSError, MemoryError) as error:  # the system has no room for another process, or the copies
            self._over(clock, f"no snapshot in {self.folder}: {str(error) or 'no memory'}")

    def tick(self) -> list[Message]:
        """The answers to requests that wait for a snapshot which is now on disk."""
        if self.writer is not None and not self.writer.is_alive():
            self.finish()
        clock, failure = self.ended
        waiting = self.store.moments.awaited
        awaited = [waiting.pop(name) for name, message in list(waiting.items()) if message.step <= clock]
        return [message.refusal(failure) if failure else message.reply(step=clock) for message in awaited]

    def finish(self) -> None:
        """Wait until the snapshot that is being written is on disk."""
        if self.writer is not None:
            while self.meanwhile is not None and self.writer.is_alive():
                self.meanwhile()
            writer, self.writer = self.writer, None
            self._over(writer.clock, writer.wait())

    def _over(self, clock: int, said: str) -> None:
        """The snapshot of a clock is on disk, or not, as `said`."""
        if said:
            print(f"hetu server: {said}", file=sys.stderr)
        self.ended = clock, RefusedError("snapshot", said, fix="is the disk, or the memory, full?") if said else None
        if not said:
            self._go_on_from(clock, self.chain)

    def _go_on_from(self, clock: int, chain: list[int]) -> None:
        """Have the next snapshot hold only what has changed from this one on, if the chain is short, where it can."""
        grows = any(table.spec.growth for table in self.store.tables.values())
        self.chain, self.held = [*chain, clock] if grows and len(chain) < LONGEST else [], self.taken

    def _dump(self, clock: int) -> tuple[Tensors, dict[str, Any]]:
        while self.store.givers.drawing:  # or nobody would draw what a restored server lacks
            self.store.givers.draw()
        tensors, state = dump(self.store, dict.fromkeys(self.held, self.chain[-1]) if self.chain else {})
        return tensors, {**state, "clock": clock, "life": self.life, "time": time.time(), "chain": self.chain}

    def _write(self, clock: int, dumped: tuple[Tensors, dict[str, Any]] | None = None) -> str:
        """Why it failed, if it did."""
        try:
            self._save(clock, *(dumped or self._dump(clock)))
            found = generations(self.folder)
            first = min([*found[-KEPT:], *snapshot_in(self.folder / str(found[-KEPT:][0])).extra["chain"]])
            self._drop([number for number in found if number < first])
        except (OSError, HetuError, MemoryError) as error:
            return f"no snapshot in {self.folder}: {str(error) or 'no memory'}"
        return ""

    def _save(self, clock: int, tensors: Tensors, state: dict[str, Any]) -> None:
        self.folder.mkdir(exist_ok=True)
        begin_folder(self.folder / str(clock), tensors, state).finish()

    def _drop(self, clocks: list[int]) -> None:
        for clock in clocks:
            remove(self.folder / str(clock))


def dump(store: ParameterStore, since: Mapping[int, int] = MappingProxyType({})) -> tuple[Tensors, dict[str, Any]]:
    """All arrays of a store that holds no push back, but for rows of tables without a bound that have not changed
    `since` a clock, of each that has one, and the rest of its state as plain data."""
    tensors: Tensors = {}
    tables = {}
    for key, table in store.tables.items():
        tensors |= {f"{key}.{name}": array for name, array in table.kept(since.get(key)).items()}
        tables[str(key)] = table.spec.meta()
    clocks = {str(worker): clock for worker, clock in store.clocks.of.items()}
    return tensors, {
        "format": FORMAT,
        "workers": len(store.members),
        "consistency": str(store.consistency),
        "clocks": clocks,
        "slowest": store.clocks.slowest,
        "members": [_member(member) for member in store.members],
        "groups": store.partial.formed,
        "tables": tables,
        "users": {str(key): sorted(table.users) for key, table in store.tables.items()},
    }


def load(folder: Path, clock: int, store: ParameterStore) -> int:
    """Load the snapshot of `clock` in a folder into a new store; returns the number of the server's life.

    CheckpointError if the snapshot is of another kind of job, or damaged.
    """
    chain = chain_of(folder, clock)
    with damage_in(chain[-1].path):
        state = chain[-1].extra
        check_workers(chain[-1], store)
        life: int = 1 + max(snapshot_in(folder / str(known)).extra["life"] for known in generations(folder))
        store.consistency = consistency(state["consistency"])
        jump = VERSION_JUMP * (life - state["life"])
        for key, spec in state["tables"].items():
            store.tables[int(key)] = table = table_of(TableSpec.parse(spec), store.gradients)
            table.resume(parts_of(chain, key), jump)
            table.users = {*state["users"][key]}
        store.clocks.of = {int(worker): int(clock) for worker, clock in state["clocks"].items()}
        store.clocks.slowest = int(state["slowest"])
        store.members[:] = [_joined(entry, store.now) for entry in state["members"]]
        store.partial.formed_before = int(state["groups"])
        store.restored = {"clock": state["clock"], "age": round(max(0.0, time.time() - state["time"]), 3)}
    store.bytes_used = sum(table.spec.footprint for table in store.tables.values())
    store.returning, store.afresh = {*range(len(store.members))}, True
    return life


@contextmanager
def damage_in(path: Path) -> Iterator[None]:
    """CheckpointError where what is read of a snapshot, or of those in a folder, is not what servers write."""
    try:
        yield
    except CheckpointError:
        raise
    except OF_VALUES as error:
        lacks = f"lacks {error}" if type(error) is KeyError else f"{error!r:.200}"
        raise CheckpointError(
            f"{str(path)!r} is no snapshot of a server, or damaged: {lacks}", fix="go on from an earlier one, or a copy"
        ) from error


def snapshot_in(folder: Path) -> Checkpoint:
    """A snapshot, of which nothing but what it says of itself is read; CheckpointError unless this version wrote it."""
    with damage_in(folder):
        found = Checkpoint(folder)
        if (written := found.extra.get("format")) != FORMAT:
            raise CheckpointError(
                f"{str(folder)!r} is a snapshot of format {written}, this version of hetu writes {FORMAT}",
                fix="go on with the version that wrote it, or begin with a new folder of snapshots",
            )
        return found


def check_workers(snapshot: Checkpoint, store: ParameterStore) -> None:
    """CheckpointError if it is of a job of another number of workers."""
    if (count := snapshot.extra["workers"]) != len(store.members):
        text = f"the snapshot in {str(snapshot.path)!r} is of {count} workers, this job has {len(store.members)}"
        raise CheckpointError(text, fix="give each job a folder of its own")


def chain_of(folder: Path, clock: int) -> list[Checkpoint]:
    """The snapshots that hold what the one of `clock` does not hold again, and itself; CheckpointError if one lacks."""
    if clock not in (there := generations(folder)):
        raise CheckpointError(f"no snapshot of clock {clock} in {str(folder)!r}", fix=f"there are {there}")
    last = snapshot_in(folder / str(clock))
    with damage_in(last.path):
        if missing := [other for other in last.extra["chain"] if other not in there]:
            text = f"the snapshot of clock {clock} in {str(folder)!r} goes on from that of {missing[0]}"
            fix = "copy the whole folder, or go on from an earlier clock"
            raise CheckpointError(f"{text}, which is not there", fix=fix)
        return [*(snapshot_in(folder / str(other)) for other in last.extra["chain"]), last]


def read_part(
    snapshot: Checkpoint, key: str, part: str, like: Any = None, rows: tuple[int, int] | None = None
) -> np.ndarray:
    """A part of a table, all of it or from one row to another; CheckpointError if it does not fit an array."""
    name = f"{key}.{part}"
    box = whole(snapshot.variables[name]["shape"])
    found = snapshot.read(name, box if rows is None else (rows, *box[1:]))
    axes = slice(rows is not None, None)
    if like is not None and (found.shape[axes], found.dtype) != (like.shape[axes], like.dtype):
        raise CheckpointError(f"{part} is {found.dtype}{found.shape}, wanted {like.dtype}{like.shape}")
    return found


def parts_of(chain: Sequence[Checkpoint], key: str) -> list[ReadPart]:
    """What reads a table's parts of each snapshot that has some."""
    return [partial(read_part, snapshot, key) for snapshot in chain if key in snapshot.extra["tables"]]


def _member(member: Member) -> dict[str, Any]:
    return {
        "incarnation": member.incarnation,
        "lost": member.lost,
        "done": member.done,
        "ahead": sorted(member.ahead),
        "refused": [{"seq": m.seq, "key": m.key, "worker": m.worker, "meta": m.meta} for m in member.refused.values()],
    }


def _joined(entry: dict[str, Any], now: float) -> Member:
    """A worker as in the snapshot; its lease begins anew."""
    refused = {m["seq"]: Message(Kind.ERROR, **m) for m in entry["refused"]}
    handled = entry["done"], set(entry["ahead"])
    return Member(now, entry["incarnation"], *handled, refused, entry["lost"])

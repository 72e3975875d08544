"""What a server has to have on disk so that its next life can go on: a checkpoint folder, written while it serves.

A snapshot holds values, optimizer state, versions, clocks, pushes held back, and which requests have taken effect, so
a push that is sent again after the restart still counts once. The arrays are copied between two messages and written
by a thread of their own. Nothing is logged in between: a server that is killed loses what it took since its last
snapshot, and its workers go on from there (after the checkpoints of M. Li et al., "Scaling Distributed Machine
Learning with the Parameter Server", OSDI 2014). Ignored on purpose: replication, one moment for several servers
(take the snapshot where no push is under way), and partners that wait for a partial reduce.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint import MANIFEST, Checkpoint, begin, finish, whole, write_part
from ..errors import CheckpointError, HetuError
from .consistency import consistency
from .member import Member
from .messages import Kind, Message, RefusedError
from .store import ParameterStore
from .table import Table, TableSpec

VERSION_JUMP = 1 << 32  # above any version of the life before, so that what caches hold of it counts as stale
Tensors = dict[str, np.ndarray]


class Snapshots:
    """The snapshots of one store in `folder`: every `every` seconds from the first push on, and on demand.

    >>> import tempfile
    >>> from hetu.ps import ASP
    >>> folder, asked = Path(tempfile.mkdtemp()), Message(Kind.SNAPSHOT)
    >>> snapshots, store = Snapshots(folder, every=30.0), ParameterStore(1, ASP())
    >>> snapshots.write(store, [asked]), snapshots.finish()[0].step
    (None, 1)
    >>> snapshots.restore(ParameterStore(1, ASP()))
    True
    """

    def __init__(self, folder: Path, every: float) -> None:
        self.folder, self.every = folder, every
        self.last: float | None = None
        self.thread: threading.Thread | None = None
        self.answers: list[Message] = []

    def restore(self, store: ParameterStore) -> bool:
        """Put the latest snapshot, if there is one, into a new store."""
        store.snapshot_wanted = {}
        if not (self.folder / MANIFEST).exists():
            return False
        load(Checkpoint(self.folder), store)
        self._save(*dump(store))  # or else the versions of two lives after one snapshot could be mistaken
        return True

    def tick(self, store: ParameterStore, now: float) -> list[Message]:
        """Start a snapshot if one is due or wanted; returns the answers to those who wanted the last one."""
        answers = [] if self.thread is not None and self.thread.is_alive() else self.finish()
        if self.thread is None and (store.snapshot_wanted or self._due(store, now)):
            self.last = now
            asked, store.snapshot_wanted = list(store.snapshot_wanted.values()), {}
            self.write(store, asked)
        return answers

    def _due(self, store: ParameterStore, now: float) -> bool:
        """The first comes with the first push or clock, before which the tables are still being made."""
        if self.last is not None:
            return now - self.last >= self.every
        return any(store.counts[kind] for kind in (Kind.PUSH, Kind.PUSH_PULL, Kind.CLOCK))

    def write(self, store: ParameterStore, asked: list[Message]) -> None:
        """Copy the state now and begin to write it."""
        tensors, state = dump(store)
        self.thread = threading.Thread(target=self._write, args=(tensors, state, asked))
        self.thread.start()

    def _write(self, tensors: Tensors, state: dict[str, Any], asked: list[Message]) -> None:
        try:
            number = self._save(tensors, state)
            self.answers = [message.reply(step=number) for message in asked]
        except (OSError, HetuError) as error:
            failure = RefusedError("snapshot", f"no snapshot in {self.folder}: {error}", fix="is the disk full?")
            print(f"hetu server: {failure.message}", file=sys.stderr)
            self.answers = [message.refusal(failure) for message in asked]

    def _save(self, tensors: Tensors, state: dict[str, Any]) -> int:
        """The number of the snapshot that is now the latest."""
        number = begin(self.folder)
        nbytes = write_part(self.folder, number, 0, tensors)
        variables = {
            name: {"shape": a.shape, "dtype": a.dtype.name, "pieces": [(0, whole(a.shape))]}
            for name, a in tensors.items()
        }
        finish(self.folder, number, [nbytes], variables, state)
        return number

    def finish(self) -> list[Message]:
        """Wait for the snapshot under way; returns the answers to those who wanted it."""
        if self.thread is not None:
            self.thread.join()
        answers, self.answers, self.thread = self.answers, [], None
        return answers


def dump(store: ParameterStore) -> tuple[Tensors, dict[str, Any]]:
    """Copies of all arrays of a store, and the rest of its state as plain data."""
    tensors, tables = {}, {}
    for key, table in store.tables.items():
        arrays = _arrays(table)
        held = [{"worker": push.worker, "seq": push.seq, "step": push.step} for push in table.pending]
        for i, push in enumerate(table.pending):
            arrays |= {f"pending{i}.{p}": a for p in ("ids", "counts", "values") if (a := getattr(push, p)) is not None}
        tensors |= {f"{key}.{name}": array.copy() for name, array in arrays.items()}
        tables[str(key)] = {"spec": table.spec.meta(), "pending": held}
    clocks = {str(worker): clock for worker, clock in store.clocks.of.items()}
    return tensors, {
        "workers": len(store.members),
        "consistency": str(store.consistency),
        "clocks": clocks,
        "slowest": store.clocks.slowest,
        "members": [_member(member) for member in store.members],
        "groups": store.partial.formed,
        "tables": tables,
        "time": time.time(),
    }


def load(snapshot: Checkpoint, store: ParameterStore) -> None:
    """Put a snapshot into a new store. CheckpointError if it is of another kind of job, or damaged."""
    try:
        state = snapshot.extra
        if state["workers"] != len(store.members):
            raise CheckpointError(
                f"the snapshot in {str(snapshot.path)!r} is of {state['workers']} workers, this job has "
                f"{len(store.members)}",
                fix="give each job a folder of its own",
            )
        store.consistency = consistency(state["consistency"])
        store.tables = {int(key): _table(snapshot, key, entry) for key, entry in state["tables"].items()}
        store.clocks.of = {int(worker): int(clock) for worker, clock in state["clocks"].items()}
        store.clocks.slowest = int(state["slowest"])
        store.members = [_joined(entry, store.now) for entry in state["members"]]
        store.partial.formed = int(state["groups"])
        age = max(0.0, time.time() - state["time"])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{str(snapshot.path)!r} is no snapshot of a server: {error!r}") from error
    held = [push for table in store.tables.values() for push in table.pending]
    store.bytes_used = sum(t.spec.footprint for t in store.tables.values()) + sum(push.nbytes for push in held)
    store.returning = {*range(len(store.members))}
    store.restored = {"clock": store.clocks.slowest, "age": round(age, 3)}


def _arrays(table: Table) -> Tensors:
    """What makes up a table, without the pushes held back."""
    states = {f"state{i}": state for i, state in enumerate(table.rule.states)}
    fixed = {"values": table.values, "versions": table.versions, "filled": table.filled}
    return {**fixed, **states, "rate": table.rule.rate, "step": table.rule.step}


def _table(snapshot: Checkpoint, key: str, entry: dict[str, Any]) -> Table:
    def read(name: str) -> np.ndarray:
        return snapshot.read(f"{key}.{name}", whole(snapshot.variables[f"{key}.{name}"]["shape"]))

    table = Table(TableSpec.parse(entry["spec"]))
    for name, array in _arrays(table).items():
        saved = read(name)
        if (saved.shape, saved.dtype) != (array.shape, array.dtype):
            raise CheckpointError(f"{key}.{name} is {saved.dtype}{saved.shape}, wanted {array.dtype}{array.shape}")
        array[...] = saved
    table.versions += VERSION_JUMP
    for i, push in enumerate(entry["pending"]):
        parts = [p for p in ("ids", "counts", "values") if f"{key}.pending{i}.{p}" in snapshot.variables]
        held = Message(Kind.PUSH, key=int(key), **push, **{p: read(f"pending{i}.{p}") for p in parts})
        table.check(held)
        table.pending.append(held)
    return table


def _member(member: Member) -> dict[str, Any]:
    return {
        "incarnation": member.incarnation,
        "retired": sorted(member.retired),
        "done": member.done,
        "ahead": sorted(member.ahead),
        "refused": [{"seq": m.seq, "key": m.key, "worker": m.worker, "meta": m.meta} for m in member.refused.values()],
    }


def _joined(entry: dict[str, Any], now: float) -> Member:
    """A worker as the snapshot knows it; its lease begins anew."""
    refused = {m["seq"]: Message(Kind.ERROR, **m) for m in entry["refused"]}
    return Member(now, entry["incarnation"], set(entry["retired"]), entry["done"], set(entry["ahead"]), refused)

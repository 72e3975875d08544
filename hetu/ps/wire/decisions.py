"""What partners must not forget when their server is killed: who takes part, and which group answers whom.

A server that died between its answers to one group would leave a member waiting for others, which a later life puts
into other groups. So it writes down a group before it answers anyone, a line of some hundred bytes; the last whole line
counts. No clock ends in a job that only averages, so there need be no snapshot beside; but what tables hold only
snapshots keep: beside tables there is a record if partners have met and a snapshot is there. It outlives the process,
not the host: nothing is flushed. Records of other jobs count for nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from ...checkpoint import generations
from ..store.member import Member
from ..store.store import ParameterStore

FILE, LONGEST = "partners.json", 1 << 20  # bytes, before it begins anew


class Decisions:
    """The record of one store in `folder`, for servers of the job that has this `token`."""

    def __init__(self, store: ParameterStore, folder: Path, token: str) -> None:
        self.store, self.folder = store, folder
        self.job = hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()
        self.size = LONGEST + 1  # of the file, which begins anew in each life, and where a line may have been cut
        self.said = ""  # why there is none
        store.partial.keep = self.keep

    def keep(self, record: dict[str, Any]) -> None:
        """Write it down: it counts instead of what was written before."""
        lives = [[m.incarnation, m.lost] for m in self.store.members]
        found = {"job": self.job, "time": time.time(), "lives": lives}
        found |= {"left": sorted({*range(len(lives))} - self.store.clocks.of.keys()), "partners": record}
        try:
            if self.store.tables and not (record["formed"] and generations(self.folder)):
                (self.folder / FILE).unlink(missing_ok=True)
                self.size = LONGEST + 1
            else:
                self._write(json.dumps(found) + "\n")
            self.said = ""
        except OSError as error:
            self.size, before = LONGEST + 1, self.said
            self.said = f"hetu server: no record of groups in {self.folder}: {error}"
            if self.said != before:
                print(self.said, file=sys.stderr)

    def _write(self, line: str) -> None:
        path, beside = self.folder / FILE, self.folder / f".{FILE}"
        if self.size <= LONGEST:
            with open(path, "a", encoding="utf-8") as file:
                file.write(line)
        else:
            self.folder.mkdir(exist_ok=True)
            beside.write_text(line, "utf-8")
            os.replace(beside, path)
            self.size = 0
        self.size += len(line)

    def _last(self) -> dict[str, Any]:
        """The last whole line; an empty one if there is none."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            for line in reversed((self.folder / FILE).read_text("utf-8").splitlines()):
                with contextlib.suppress(ValueError):
                    return found if isinstance(found := json.loads(line), dict) else {}
        return {}

    def recall(self) -> None:
        """Go on from the record, beside a snapshot or without one."""
        store, found = self.store, self._last()
        if found.get("job") != self.job or len(found["lives"]) != len(store.members):
            return
        age = round(max(0.0, time.time() - found["time"]), 3)
        newer = store.restored is None or age < store.restored["age"]
        if store.restored is None:
            store.restored, store.returning = {"clock": 0, "age": age}, {*range(len(store.members))}
        for worker, (incarnation, lost) in enumerate(found["lives"] if newer else ()):
            if store.members[worker].incarnation != incarnation:  # what it has done since the snapshot is lost
                store.members[worker] = Member(store.now, incarnation, lost=lost)
            takes_part = store.clocks.remove if worker in found["left"] else store.clocks.join
            takes_part(worker)
        store.partial.recall(found["partners"])

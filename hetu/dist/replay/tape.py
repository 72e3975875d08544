"""What a record is on disk: for each rank a folder with the start of its job, and chapters of steps.

All are files as of checkpoints, `extra` of which tells what belongs to the arrays. A chapter is `from000812`, which has
the values of all variables, and a file for each step from there on, so that any step is reached by running those of its
chapter; of a record that would grow too large the oldest chapters go. A process that is killed may leave a last file
that is not whole, which is none; nothing waits for the disk, so a machine that fails may leave others, which are told.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ... import checkpoint
from ...core.errors import ArgumentError, CheckpointError, HetuError
from ...promises import check_of
from ...ranges import Count

VERSION = "hetu-record-2"
LIMIT = 1 << 30  # bytes of the record of one rank
BLOCK = 1 << 12  # bytes that files are counted in, as disks give them
RANKS = 1 << 20  # at most, as they are listed
PART, STEPS = 3, 1000  # a chapter ends with a third of the bytes, or so many steps: no more are run to reach one
NOTHING = np.empty(0, np.uint8)
DIGESTS = dict[str, Count]
FROM = {"digests": DIGESTS}
START = {"version": str, "rank": Count, "size": Count, "command": list[str], "folder": str, "made": str,
         "environment": dict[str, str], "boxes": dict[str, str], **FROM}  # fmt: skip
STEP = {"name": str, "shapes": list[list[Count]], "shown": str, "failed": str, "ended": DIGESTS, **FROM}


class RecordError(HetuError, ValueError):
    """A record that cannot be read, or that a script does not fit."""

    def __init__(self, message: str, *, fix: str) -> None:
        super().__init__(plain(message), fix=fix)


def plain(text: str) -> str:
    """Without what a terminal would obey, as a text out of a record may have been written by anyone."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def digest(array: Any) -> int:
    """A number that differs where the bits of arrays do: a CRC of sums of 8 bytes each, as fast as memory is read.

    Sums of columns are alike in whatever order rows lie, so rows have a prime number of them, as samples have not.
    """
    if array.nbytes < 8192:
        return zlib.crc32(array.tobytes())
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    even = raw.size // (8 * 1021) * 8 * 1021
    sums = np.add.reduce(raw[:even].view(np.uint64).reshape(-1, 1021), axis=0)
    return zlib.crc32(raw[even:].data, zlib.crc32(sums.data))


class Tape:
    """Writes the record of one rank into a folder, of at most `limit` bytes. ArgumentError if that is there."""

    def __init__(self, folder: Path, limit: int) -> None:
        if folder.exists():
            raise ArgumentError(f"{str(folder)!r} holds a record", fix="remove it, or record into another folder")
        checkpoint.make_folder(folder.parent)
        checkpoint.make_folder(folder)
        self.folder, self.limit = folder, limit
        self.files, self.nbytes = [list[Path]()], [0]  # of the start, and of each chapter

    @property
    def full(self) -> bool:
        """Whether the next step shall begin a chapter."""
        return len(self.files) == 1 or len(self.files[-1]) > STEPS or self.nbytes[-1] * PART >= self.limit

    def begin(self, step: int, arrays: Mapping[str, np.ndarray]) -> None:
        """A chapter, whose first step is this one."""
        self.files.append([])
        self.nbytes.append(0)
        self.add(f"from{step:09d}", arrays, {})

    def add(self, name: str, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        """Write a file. ArgumentError if the record cannot hold this chapter with it."""
        told = {**facts, "digests": {name: digest(array) for name, array in arrays.items()}}
        size, buffers = checkpoint.content(arrays, {"extra": json.dumps(told)})
        size = -(-size // BLOCK) * BLOCK
        if (need := self.nbytes[0] + self.nbytes[-1] * (len(self.nbytes) > 1) + size) > self.limit:
            said = f"a chapter with this step takes {need:,} bytes, and the record {self.limit:,} at most"
            raise ArgumentError(said, fix=f"heturun --record-limit {PART * need}")
        while sum(self.nbytes) + size > self.limit:
            self.nbytes.pop(1)
            for path in self.files.pop(1):
                path.unlink()
        self.files[-1].append(self.folder / f"{name}.safetensors")
        self.nbytes[-1] += size
        with self.files[-1][-1].open("xb") as file:  # not renamed: that takes as long again, and more on some systems
            file.writelines(buffers)


class TapeFile(NamedTuple):
    """A file of a record: what it tells; its arrays are read when they are asked for."""

    path: Path
    facts: dict[str, Any]

    @classmethod
    def of(cls, path: Path, wanted: Mapping[str, Any]) -> TapeFile:
        """RecordError unless it tells what is `wanted`."""
        try:
            facts = checkpoint.Checkpoint(path).extra
            for name, hint in wanted.items():
                if not check_of(hint)(facts[name]):
                    raise ValueError(f"{name} is {facts[name]!r:.80}")
        except (CheckpointError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise damaged(path, error) from None
        return cls(path, facts)

    def arrays(self, kind: str = "") -> dict[str, np.ndarray]:
        """Those whose names begin so, by the rest of their names. RecordError if a bit has changed."""
        try:
            file = checkpoint.Checkpoint(self.path)
            found = {n: file.read(n, checkpoint.whole(a["shape"])) for n, a in file.variables.items()
                     if n.startswith(kind)}  # fmt: skip
        except (CheckpointError, ValueError, KeyError) as error:
            raise damaged(self.path, error) from None
        then = {name: number for name, number in self.facts["digests"].items() if name.startswith(kind)}
        if differ := {name: digest(array) for name, array in found.items()}.items() ^ then.items():
            raise damaged(self.path, f"the bits of {min(differ)[0]!r} have changed")
        return {name.removeprefix(kind): array for name, array in found.items()}


def damaged(path: Path, why: object) -> RecordError:
    said = f"{path.parent.name}/{path.name} is damaged: {why}"
    return RecordError(said, fix="copy the record again, or replay another chapter")


class Record:
    """The record of one rank: what is told of its `start`, and its `first` and `last` steps that can be reached."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "start.safetensors").is_file():
            said = f"{str(folder)!r} is no record of a rank: it has no start.safetensors"
            raise RecordError(said, fix="give a folder that heturun --record has made")
        self.start = TapeFile.of(folder / "start.safetensors", START)
        facts = self.start.facts
        possible = facts["rank"] < facts["size"] <= RANKS and facts["command"] not in ([], ["-m"])
        if facts["version"] != VERSION or not possible:
            said = "rank {rank} of {size}, command {command}, {version}; this hetu reads {wanted}"
            raise damaged(self.start.path, said.format(**facts, wanted=VERSION))
        self.chapters = numbered(folder, "from")
        self.first = min(self.chapters, default=0)
        ended = [step for step in numbered(folder, "step") if self.chapters and step >= self.first]
        for self.last in ended[:-3:-1]:  # the last may not be whole
            with suppress(RecordError):
                self.step(self.last)
                return
        said = f"{str(folder)!r} has no step that can be reached"
        raise RecordError(said, fix="record for longer, or copy all of it")

    def step(self, number: int) -> TapeFile:
        """What is told of a step."""
        return TapeFile.of(self.folder / f"step{number:09d}.safetensors", STEP)

    def way(self, step: int) -> tuple[TapeFile, dict[int, TapeFile]]:
        """The values before a chapter, and its steps up to this one. RecordError if it is not kept."""
        if not self.first <= step <= self.last:
            said = f"step {step} is not in the record of {self.folder.name}, which has {self.window}"
            raise RecordError(said, fix="take one of those; heturun --record-limit keeps more")
        begun = max(number for number in self.chapters if number <= step)
        steps = {number: self.step(number) for number in range(begun, step + 1)}
        return TapeFile.of(self.chapters[begun], FROM), steps

    @property
    def window(self) -> str:
        """`steps 812 to 1199`."""
        return f"steps {self.first} to {self.last}"


def numbered(folder: Path, name: str) -> dict[int, Path]:
    """What is called `name` and a number in a folder, in the order of the numbers."""
    found = {path.stem.removeprefix(name): path for path in folder.glob(f"{name}*")}
    return dict(sorted((int(number), path) for number, path in found.items() if number.isdecimal()))


def record_of(path: Path, rank: int) -> Record:
    """The record of a rank. RecordError if there is none."""
    folders = numbered(path, "rank")
    if rank not in folders:
        has = f"has ranks {', '.join(map(str, folders))}" if folders else "has none"
        fix = "name a rank that it has" if folders else "give a folder that heturun --record has made"
        raise RecordError(f"no record of rank {rank} in {str(path)!r}, which {has}", fix=fix)
    return Record(folders[rank].resolve())

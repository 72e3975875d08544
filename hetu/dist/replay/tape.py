"""What a record is on disk: for each rank a folder with the start of its job, and chapters of steps.

All are checkpoints, `extra` of which tells what belongs to the arrays. A chapter is `from000812.safetensors`, which has
the values of all variables, and `steps000812`, which has the steps from there on, one checkpoint behind the other, as
to make a file for each would take longer than small steps do. So any step is reached by running those of its chapter;
of a record that would grow too large the oldest chapters go. A process that is killed may leave a last step that is not
whole, which is none; nothing waits for the disk, so a machine that fails may leave others, which are told.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ... import checkpoint
from ...core.errors import ArgumentError, HetuError
from ...core.types import as_dtype
from ...promises import check_of
from ...ranges import Count

VERSION = "hetu-record-3"
LIMIT = 1 << 30  # bytes of the record of one rank
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
        self.started, self.nbytes, self.steps = list[int](), [0], 0  # chapters; bytes of the start, and of each; steps

    @property
    def full(self) -> bool:
        """Whether the next step shall begin a chapter."""
        return not self.started or self.steps >= STEPS or self.nbytes[-1] * PART >= self.limit

    def begin(self, step: int, arrays: Mapping[str, np.ndarray]) -> None:
        """A chapter, whose first step is this one."""
        self.started.append(step)
        self.nbytes.append(0)
        self.steps = 0
        self.add(f"from{step:09d}.safetensors", arrays, {})

    def add_step(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        """The next step of the chapter."""
        self.steps += 1
        self.add(f"steps{self.started[-1]:09d}", arrays, facts)

    def add(self, name: str, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        """Write to the end of a file. ArgumentError if the record cannot hold this chapter with it."""
        told = {**facts, "digests": {name: digest(array) for name, array in arrays.items()}}
        size, buffers = checkpoint.content(arrays, {"extra": json.dumps(told)})
        if (need := self.nbytes[0] + self.nbytes[-1] * (len(self.nbytes) > 1) + size) > self.limit:
            said = f"a chapter with this step takes {need:,} bytes, and the record {self.limit:,} at most"
            raise ArgumentError(said, fix=f"heturun --record-limit {PART * need}")
        while sum(self.nbytes) + size > self.limit:
            self.nbytes.pop(1)
            first = self.started.pop(0)
            for old in (f"from{first:09d}.safetensors", f"steps{first:09d}"):
                (self.folder / old).unlink()
        self.nbytes[-1] += size
        with (self.folder / name).open("ab") as file:
            file.writelines(buffers)


class Frame(NamedTuple):
    """A checkpoint in a file: where it lies, and what it tells; its arrays are read when they are asked for."""

    path: Path
    at: int
    nbytes: int
    facts: dict[str, Any]

    def arrays(self, kind: str = "") -> dict[str, np.ndarray]:
        """Those whose names begin so, by the rest of their names. RecordError if a bit has changed."""
        from safetensors import SafetensorError, deserialize

        parsed: Any = deserialize
        with self.path.open("rb") as file:
            file.seek(self.at)
            raw = file.read(self.nbytes)
        try:
            read = [
                (name, as_dtype(checkpoint.DTYPES[a["dtype"]]), a) for name, a in parsed(raw) if name.startswith(kind)
            ]
            found = {name: np.ndarray(a["shape"], dtype, a["data"]) for name, dtype, a in read}
        except (SafetensorError, KeyError, ValueError) as error:
            raise damaged(self.path, error) from None
        then = {name: number for name, number in self.facts["digests"].items() if name.startswith(kind)}
        if differ := {name: digest(array) for name, array in found.items()}.items() ^ then.items():
            raise damaged(self.path, f"the bits of {min(differ)[0]!r} have changed")
        return {name.removeprefix(kind): array for name, array in found.items()}


def frames(path: Path, wanted: Mapping[str, Any], at: int = 0, torn: bool = False) -> Iterator[Frame]:
    """The checkpoints in a file, from one on. RecordError unless they tell what is `wanted`, and are whole; the last
    one, of which there is nothing then, may be `torn`."""
    with path.open("rb") as file:
        size = path.stat().st_size
        while at < size:
            file.seek(at)
            nbytes = 8 + int.from_bytes(file.read(8), "little")
            try:
                if at + nbytes <= size:
                    told = json.loads(file.read(nbytes - 8))
                    facts = json.loads(told.pop("__metadata__")["extra"])
                    sizes = {"bytes": max((a["data_offsets"][1] for a in told.values()), default=0)}
                    for (name, hint), of in [*((w, facts) for w in wanted.items()), (("bytes", Count), sizes)]:
                        if not check_of(hint)(of[name]):
                            raise ValueError(f"{name} is {of[name]!r:.80}")
                    nbytes += sizes["bytes"]
                if at + nbytes > size and not torn:
                    raise ValueError(f"{nbytes:,} bytes from {at:,} on are not there")
            except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
                raise damaged(path, error) from None
            if at + nbytes > size:
                return
            yield Frame(path, at, nbytes, facts)
            at += nbytes


def only(path: Path, wanted: Mapping[str, Any]) -> Frame:
    """The one checkpoint of a file."""
    found = [*frames(path, wanted)]
    if len(found) != 1:
        raise damaged(path, f"it has {len(found)} checkpoints")
    return found[0]


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
        self.start = only(folder / "start.safetensors", START)
        facts = self.start.facts
        possible = facts["rank"] < facts["size"] <= RANKS and facts["command"] not in ([], ["-m"])
        if facts["version"] != VERSION or not possible:
            said = "rank {rank} of {size}, command {command}, {version}; this hetu reads {wanted}"
            raise damaged(self.start.path, said.format(**facts, wanted=VERSION))
        self.chapters, kept = numbered(folder, "from"), numbered(folder, "steps")
        self.steps = {
            first + k: (path, frame.at)
            for first, path in kept.items()
            if first in self.chapters
            for k, frame in enumerate(frames(path, STEP, torn=first == max(kept)))
        }
        if not self.steps:
            said = f"{str(folder)!r} has no step that can be reached"
            raise RecordError(said, fix="record for longer, or copy all of it")
        self.first, self.last = min(self.steps), max(self.steps)

    def step(self, number: int) -> Frame:
        """What is told of a step. RecordError if it is not kept."""
        if number not in self.steps:
            said = f"step {number} is not in the record of {self.folder.name}, which has {self.window}"
            raise RecordError(said, fix="take one of those; heturun --record-limit keeps more")
        path, at = self.steps[number]
        return next(frames(path, STEP, at))

    def way(self, step: int) -> tuple[Frame, dict[int, Frame]]:
        """The values before a chapter, and its steps up to this one. RecordError if it is not kept."""
        self.step(step)
        begun = max(number for number in self.chapters if number <= step)
        steps = {number: self.step(number) for number in range(begun, step + 1)}
        return only(self.chapters[begun], FROM), steps

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

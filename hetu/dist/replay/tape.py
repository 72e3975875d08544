"""What a record is on disk: for each rank a folder with the start of its job, and chapters of steps.

A file has frames, one behind the other, as to make a file for each step would take longer than small steps do. A frame
is a line of JSON and a checkpoint of the arrays that it tells of. `start` has one. A chapter, such as `steps000000812`,
begins with the values of all variables, as a step would leave them, and has the steps from 812 on: so any step is
reached by running those of its chapter. Of a record that would grow too large the oldest chapters go. A process that is
killed may leave a last frame that is not whole, which is none; nothing waits for the disk, so a machine that fails may
leave others, which are told.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ... import checkpoint
from ...core.errors import ArgumentError, HetuError
from ...core.types import as_dtype
from ...ranges import Count

VERSION = "hetu-record-4"
LIMIT = 1 << 30  # bytes of the record of one rank
RANKS = 1 << 20  # at most, as they are listed
LINE = 1 << 26  # bytes of what a frame tells, at most
PART, STEPS = 3, 1000  # a chapter ends with a third of the bytes, or so many steps: no more are run to reach one
FRAME = {"nbytes": Count, "digests": dict[str, Count]}  # what each tells of its arrays
START = {"version": str, "size": Count, "command": list[str], "folder": str, "made": str,
         "environment": dict[str, str], "boxes": dict[str, str], **FRAME}  # fmt: skip
STEP = {"name": str, "feeds": dict[str, list[Count]], "shown": str, "ended": dict[str, Count], **FRAME}


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
        self.folder, self.limit, self.frames = folder, limit, 0  # of the last file
        self.files, self.nbytes = [folder / "start"], [0]  # the start and the chapters, and bytes of each

    @property
    def full(self) -> bool:
        """Whether the next step shall begin a chapter."""
        return len(self.files) == 1 or self.frames > STEPS or self.nbytes[-1] * PART >= self.limit

    def begin(self, step: int, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        """A chapter, whose first step is this one, with what it begins with."""
        self.files.append(self.folder / f"steps{step:09d}")
        self.nbytes.append(0)
        self.frames = 0
        self.add(arrays, facts)

    def add(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        """Write to the end of the last file. ArgumentError if the record cannot hold this chapter with it."""
        size, buffers = checkpoint.content(arrays, {})
        told = {**facts, "nbytes": size, "digests": {name: digest(array) for name, array in arrays.items()}}
        line = json.dumps(told).encode() + b"\n"
        self.check(size := size + len(line))
        while sum(self.nbytes) + size > self.limit:
            self.nbytes.pop(1)
            self.files.pop(1).unlink()
        self.nbytes[-1] += size
        self.frames += 1
        with self.files[-1].open("ab") as file:
            file.writelines([line, *buffers])

    def check(self, nbytes: int) -> None:
        """ArgumentError if the record cannot hold the last chapter with so many bytes more."""
        if (need := self.nbytes[0] + self.nbytes[-1] + nbytes) > self.limit:
            said = f"a chapter with this step takes {need:,} bytes, and the record {self.limit:,} at most"
            raise ArgumentError(said, fix=f"heturun --record-limit {PART * need}")


class Frame(NamedTuple):
    """What a file tells of some arrays, and where they lie; they are read when they are asked for."""

    path: Path
    at: int
    facts: dict[str, Any]

    def arrays(self) -> dict[str, np.ndarray]:
        """In their order. RecordError if a bit has changed."""
        from safetensors import SafetensorError, deserialize

        parsed: Any = deserialize
        with self.path.open("rb") as file:
            file.seek(self.at)
            raw = file.read(self.facts["nbytes"])
        try:
            read = [(name, as_dtype(checkpoint.DTYPES[a["dtype"]]), a) for name, a in parsed(raw)]
            found = {name: np.ndarray(a["shape"], dtype, a["data"]) for name, dtype, a in read}
        except (SafetensorError, KeyError, ValueError) as error:
            raise damaged(self.path, error) from None
        if differ := {name: digest(array) for name, array in found.items()}.items() ^ self.facts["digests"].items():
            raise damaged(self.path, f"the bits of {min(name for name, _ in differ)!r} have changed")
        return {name: found[name] for name in self.facts["digests"]}


def frames(path: Path, wanted: Mapping[str, Any]) -> Iterator[Frame]:
    """The frames of a file, as far as they are whole. RecordError unless they tell what is `wanted`."""
    size = path.stat().st_size
    with path.open("rb") as file:
        while (line := file.readline(LINE)).endswith(b"\n"):
            try:
                checkpoint.check_has(facts := json.loads(line), "it", wanted)
            except (ValueError, RecursionError) as error:
                raise damaged(path, error) from None
            found = Frame(path, file.tell(), facts)
            if found.at + facts["nbytes"] > size:
                return
            yield found
            file.seek(facts["nbytes"], os.SEEK_CUR)


def damaged(path: Path, why: object) -> RecordError:
    said = f"{path.parent.name}/{path.name} is damaged: {why}"
    return RecordError(said, fix="copy the record again, or replay another chapter")


class Record:
    """The record of one rank: what is told of its `start`, and its `first` and `last` steps that can be reached."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank, self.folder = path, rank, path.resolve() / f"rank{rank}"
        start = self.folder / "start"
        if not start.is_file():
            there = ", ".join(map(str, numbered(path, "rank"))) or "none"
            said = f"no record of rank {rank} in {str(path)!r}; ranks there: {there}"
            raise RecordError(said, fix="name one of them, in a folder that heturun --record has made")
        told = [*frames(start, START)]
        if len(told) != 1 or told[0].facts["version"] != VERSION or not rank < told[0].facts["size"] <= RANKS:
            about = [{key: frame.facts[key] for key in ("version", "size")} for frame in told]
            raise damaged(start, f"it tells {about} of rank {rank}; this hetu reads {VERSION}")
        self.start, self.chapters = told[0], numbered(self.folder, "steps")
        self.first, newest = min(self.chapters, default=0), max(self.chapters, default=0)
        count = len([*frames(self.chapters[newest], STEP)]) if self.chapters else 0
        self.last = newest + max(count, 1) - 2  # its first frame is no step, and may be lacking
        if self.last < self.first:
            said = f"{str(self.folder)!r} has no step that can be reached"
            raise RecordError(said, fix="record for longer, or copy all of it")

    def way(self, step: int) -> list[Frame]:
        """What a chapter begins with, and its steps up to this one. RecordError if it is not kept."""
        begun = max((number for number in self.chapters if number <= step), default=self.first)
        count = max(0, step - begun + 2)
        found = [*islice(frames(self.chapters[begun], STEP), count)]
        if len(found) < max(2, count):
            said = f"step {step} is not in the record of {self.folder.name}, which has {self.window}"
            raise RecordError(said, fix="take one of those; heturun --record-limit keeps more")
        return found

    def steps(self, first: int) -> Iterator[Frame]:
        """The steps from one on. RecordError if one is not kept."""
        ends = [*self.chapters][1:] + [self.last + 1]
        for begun, end in zip(self.chapters, ends):
            if end > max(first, begun):
                yield from self.way(end - 1)[1 + max(0, first - begun) :]

    @property
    def window(self) -> str:
        """`steps 812 to 1199`."""
        return f"steps {self.first} to {self.last}"


def numbered(folder: Path, name: str) -> dict[int, Path]:
    """What is called `name` and a number in a folder, in the order of the numbers."""
    found = {path.name.removeprefix(name): path for path in folder.glob(f"{name}*")}
    return dict(sorted((int(number), path) for number, path in found.items() if number.isdecimal()))

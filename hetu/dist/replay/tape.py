"""What a record is on disk: a folder for each rank, with the start of its job, and chapters of steps.

A chapter is a checkpoint, `from000812.safetensors`, and the steps that follow, so that each of them can be reached; of
a record that would grow too large the oldest chapters go. Steps are frames, one behind the other: 8 bytes that say how
long a frame is, and a safetensors file with what is told of it as metadata. A process that is killed leaves a torn
frame at the end, which is none.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ... import checkpoint
from ...core.errors import ArgumentError, HetuError
from ...core.state import State
from ...core.types import as_dtype
from ...promises import check_of
from ...ranges import Count

VERSION = "hetu-record-1"
LIMIT = 1 << 30  # bytes of the record of one rank
RANKS = 1 << 20  # at most, as they are listed
CHAPTER, FRAME = 3, 6  # a third of them ends a chapter, and what is written at once takes a sixth: a third is of before
HEADER, ENTRY = 1 << 27, 1 << 8  # bytes of a header, and of what it says of an array, at most
SHAPES, MESSAGES = list[list[Count]], list[list[str]]  # of each message what it was, and for which line
DIGESTS = dict[str, Count]
START = {"version": str, "rank": Count, "size": Count, "command": list[str], "folder": str, "made": str,
         "environment": dict[str, str], "boxes": dict[str, str], "messages": MESSAGES, "digests": DIGESTS}  # fmt: skip
STEP = {"step": Count, "name": str, "shapes": SHAPES, "random": list[str], "messages": MESSAGES, "results": list[Count],
        "shown": list[str], "before": DIGESTS, "variables": DIGESTS, "failed": str, "digests": DIGESTS}  # fmt: skip


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
    """Writes the record of one rank, of at most `limit` bytes, into a folder. ArgumentError if that is there."""

    def __init__(self, folder: Path, limit: int) -> None:
        if folder.exists():
            raise ArgumentError(f"{str(folder)!r} holds a record", fix="remove it, or record into another folder")
        checkpoint.make_folder(folder.parent)
        checkpoint.make_folder(folder)
        self.folder, self.limit = folder, limit
        self.path = folder / "start"
        self.sizes = {self.path: 0}  # and of the steps of each chapter with its checkpoint, the oldest first

    @property
    def full(self) -> bool:
        """Whether the next step shall begin a chapter."""
        return len(self.sizes) == 1 or self.sizes[self.path] * CHAPTER >= self.limit

    def begin(self, step: int, state: State) -> None:
        """A chapter, whose first step is this one."""
        nbytes = sum(ENTRY + len(name) + array.nbytes for name, array in state.arrays.items())
        self._make_room(nbytes, "all variables take")
        self.path = self.folder / f"from{step:09d}"
        self.sizes[self.path] = nbytes
        state.save(self.path.with_suffix(".safetensors"))

    def _make_room(self, nbytes: int, what: str) -> None:
        """Remove the oldest chapters, but not the last one. ArgumentError for what is too large."""
        if nbytes * FRAME > self.limit:
            said = f"{what} {nbytes:,} bytes of a record of {self.limit:,}, which is more than a sixth"
            raise ArgumentError(said, fix=f"heturun --record-limit {FRAME * nbytes}")
        for chapter in [*self.sizes][1:-1]:
            if sum(self.sizes.values()) + nbytes > self.limit:
                chapter.unlink()
                chapter.with_suffix(".safetensors").unlink()
                del self.sizes[chapter]

    def add(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        """Write a frame."""
        told = {**facts, "digests": {name: digest(array) for name, array in arrays.items()}}
        size, buffers = checkpoint.content(arrays, {"facts": json.dumps(told)})
        self._make_room(size + 8, "a step takes")
        with self.path.open("ab", buffering=0) as file:  # of which a kill loses nothing
            for buffer in chain([size.to_bytes(8, "little")], buffers):
                piece = memoryview(buffer).cast("B") if len(buffer) else b""
                while piece:  # the system may take a part of it
                    piece = piece[file.write(piece) :]
        self.sizes[self.path] += size + 8


class Frame(NamedTuple):
    """A frame of a file: where it lies, and what it tells; its arrays are read when they are asked for."""

    path: Path
    at: int
    nbytes: int
    facts: dict[str, Any]

    def arrays(self, kind: str = "") -> dict[str, np.ndarray]:
        """The arrays whose names begin so, by the rest of their names. RecordError if a bit has changed."""
        from safetensors import SafetensorError, deserialize

        parsed: Any = deserialize
        with self.path.open("rb") as file:
            file.seek(self.at)
            raw = file.read(self.nbytes)
        try:
            read = [(name, as_dtype(checkpoint.DTYPES[a["dtype"]]), a) for name, a in parsed(raw)]
            found = {name: np.frombuffer(a["data"], dtype).reshape(a["shape"]) for name, dtype, a in read}
        except (SafetensorError, KeyError, ValueError) as error:
            raise damaged(self.path, self.at, error) from None
        now, then = {name: digest(array) for name, array in found.items()}, self.facts["digests"]
        if now != then:
            raise damaged(self.path, self.at, f"the bits of {min(now.items() ^ then.items())[0]!r} have changed")
        return {name.removeprefix(kind): array for name, array in found.items() if name.startswith(kind)}


def damaged(path: Path, at: int, why: object) -> RecordError:
    said = f"{path.parent.name}/{path.name} is damaged behind byte {at:,}: {why}"
    return RecordError(said, fix="copy the record again, or remove both files of the chapter")


def frames(path: Path, wanted: Mapping[str, Any], last: bool = False) -> Iterator[Frame]:
    """The frames of a file, which tell what is `wanted`; only the `last` file may have a torn one at its end."""
    with path.open("rb") as file:
        at, size = 0, path.stat().st_size
        while at < size:
            file.seek(at)
            nbytes, header = (int.from_bytes(file.read(8), "little") for _ in range(2))
            if at + max(nbytes, 8) + 8 > size and last:
                return
            try:
                if at + nbytes + 8 > size or header > min(nbytes - 8, HEADER):
                    raise ValueError(f"a frame of {nbytes:,} bytes, of which {header:,} are its header")
                facts = json.loads(json.loads(file.read(header))["__metadata__"]["facts"])
                for name, hint in wanted.items():
                    if not check_of(hint)(facts[name]):
                        raise ValueError(f"{name} is {facts[name]!r:.80}")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise damaged(path, at, f"{type(error).__name__}: {error}") from None
            yield Frame(path, at + 8, nbytes, facts)
            at += nbytes + 8


class Record:
    """The record of one rank: what is told of its `start`, and by number the `steps` that can be reached."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.steps = folder, dict[int, Frame]()
        try:
            begun = [*frames(folder / "start", START)]
            paths = sorted(path for path in folder.glob("from*") if not path.suffix)
            found = [frame for path in paths for frame in frames(path, STEP, path == paths[-1])]
        except OSError as error:
            said = f"{str(folder)!r} is no record of a rank: {error.strerror}: {Path(error.filename).name!r}"
            raise RecordError(said, fix="give a folder that heturun --record has made") from None
        if len(begun) != 1 or begun[0].facts["version"] != VERSION:
            raise damaged(folder / "start", 0, f"this hetu reads records of {VERSION}")
        facts = begun[0].facts
        if not (facts["rank"] < facts["size"] <= RANKS and facts["command"] not in ([], ["-m"])):
            said = f"rank {facts['rank']} of {facts['size']}, and command {facts['command']}, cannot be"
            raise damaged(folder / "start", 0, said)
        if not found:
            raise RecordError(f"{str(folder)!r} has no step that has ended", fix="record for longer")
        self.start = begun[0]
        self.steps = {frame.facts["step"]: frame for frame in found}

    def way(self, step: int) -> tuple[Path, list[Frame]]:
        """The checkpoint before a step, and the steps from there to it. RecordError if it is not kept."""
        if step not in self.steps:
            said = f"step {step} is not in the record of {self.folder.name}, which has {self.window}"
            raise RecordError(said, fix="take one of those; heturun --record-limit keeps more")
        path = self.steps[step].path
        chapter = [frame for number, frame in sorted(self.steps.items()) if frame.path == path and number <= step]
        if chapter[0].facts["step"] + len(chapter) - 1 != step or not chapter[0].facts["before"]:
            raise damaged(path, 0, "a step is missing")
        return path.with_suffix(".safetensors"), chapter

    @property
    def window(self) -> str:
        """`steps 812 to 1199`."""
        return f"steps {min(self.steps)} to {max(self.steps)}"


def ranks_of(path: Path) -> dict[int, Path]:
    """The folders of the ranks in a record."""
    found = {int(folder.name[4:]): folder for folder in path.glob("rank*") if folder.name[4:].isdecimal()}
    return dict(sorted(found.items()))


def record_of(path: Path, rank: int) -> Record:
    """The record of a rank. RecordError if there is none."""
    folders = ranks_of(path)
    if rank not in folders:
        has = f"has ranks {', '.join(map(str, folders))}" if folders else "has none"
        fix = "name a rank that it has" if folders else "give a folder that heturun --record has made"
        raise RecordError(f"no record of rank {rank} in {str(path)!r}, which {has}", fix=fix)
    return Record(folders[rank].resolve())

"""Checkpoints: one file, or a folder of parts that ranks wrote; any box of any variable can be read from either.

A folder has a manifest `manifest.json` that names the part files of one save and which box of which variable each
holds. Parts are written first, under new names; the manifest is renamed over the old one last, so a reader sees all of
the old save or all of the new one. Whoever writes the last part renames it: it lies ready under another name, and the
sizes of all parts are known before, so ranks need not talk to each other to know that all have written.

A folder may also hold numbered saves, `run/1`, `run/2`, each a file or a folder as above; the newest whole one is read.
What a save does with an executor's values, and when it writes, `saving.py` decides.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .core.backend import to_numpy
from .core.errors import CheckpointError
from .core.state import FilePath
from .core.types import Box
from .files import check_place, flush, replace_atomically
from .promises import check_of
from .ranges import Count

FORMAT = "hetu-1"
MANIFEST, READY = "manifest.json", "manifest.ready"  # and its name until all parts are there
PARTS_FORMAT = "hetu-parts-1"
PART = re.compile(r"(\.?)save(\d+)-part\d+\.safetensors(?:\.part)?")  # with a dot, what was not written to its end
PIECE = 1 << 24  # bytes
NAMES = {"bool": "BOOL", "bfloat16": "BF16", "complex64": "C64"}  # of dtypes, in a file
NAMES |= {f"float{bits}": f"F{bits}" for bits in (16, 32, 64)}
NAMES |= {f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
DTYPES = {code: name for name, code in NAMES.items()}
# What a manifest has, and of each variable, and beside of a table without a bound.
MANIFEST_HAS = {"format": str, "save": Count, "bytes": list[Count], "extra": dict, "variables": dict}
ENTRY_HAS = {"shape": list[Count], "dtype": str, "pieces": list[tuple[Count, list[tuple[Count, Count]]]]}
ROWS_HAVE = {"parts": list[Count], "ids": str}


def ids_name(table: str) -> str:
    """The name in a part of the ids of rows of a table without a bound."""
    return f"{table}:ids"


def whole(shape: Sequence[int]) -> Box:
    """The box of all of an array."""
    return tuple((0, size) for size in shape)


def exists(path: str | os.PathLike[str] | None) -> bool:
    """Whether a save was finished there, as a file or a folder."""
    return path is not None and (Path(path).is_file() or (Path(path) / MANIFEST).is_file())


def remove(save: Path) -> None:
    """Remove a save, its manifest first, so that what a killed process leaves behind is no save."""
    if not save.is_dir():
        save.unlink(missing_ok=True)
        return
    for path in sorted(save.iterdir(), key=lambda path: path.name != MANIFEST):
        path.unlink(missing_ok=True)
    save.rmdir()


def generations(folder: Path) -> list[int]:
    """The numbers, in order, of the finished saves in `folder`, each a file or folder named by its number."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal() and exists(path))


def newest_number(path: FilePath) -> int:
    """The number of the last finished save at `path`; 0 where saves have no numbers."""
    return 0 if exists(path) else max(generations(Path(path)), default=0)


def newest(path: FilePath) -> Path:
    """What is read at `path`."""
    return Path(path, str(number)) if (number := newest_number(path)) else Path(path)


def check_paths(paths: Iterable[FilePath | None], in_parts: bool) -> None:
    """CheckpointError where none can be written, one of parts as a folder, as far as can be told before."""
    for path in (Path(path) for path in paths if path is not None):
        check_place(path, CheckpointError)
        if in_parts:
            _check_folder(path)


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{str(folder)!r} is a file, ranks save to a folder", fix="choose another path")
    if generations(folder):
        said = f"{str(folder)!r} holds numbered checkpoints, the newest of which is read there"
        raise CheckpointError(said, fix="choose another path, or go on with ht.Checkpoints, or keep= of ht.fit")


# -- files ----------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """A safetensors file, as a whole or not at all: a header in JSON, and the arrays as they lie in memory.

    Not by the library, which holds a file of arrays in memory twice before it writes it.
    """
    replace_atomically(path, content(tensors, metadata)[1], CheckpointError)


def content(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> tuple[int, Iterator[Any]]:
    """How many bytes such a file has, and the buffers that make it; arrays are of any device."""
    arrays = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))  # so that each is aligned
    if strange := [f"{name} of {a.dtype}" for name, a in arrays.items() if a.dtype.name not in NAMES]:
        raise CheckpointError(f"no file can hold {', '.join(strange)}", fix=f"convert it to one of {', '.join(NAMES)}")
    ends = [*accumulate((a.nbytes for a in arrays.values()), initial=0)]
    header = {
        name: {"dtype": NAMES[a.dtype.name], "shape": a.shape, "data_offsets": offsets}
        for (name, a), offsets in zip(arrays.items(), pairwise(ends))
    }
    text = json.dumps({"__metadata__": {"format": FORMAT, **metadata}, **header}).encode()
    text += b" " * (-len(text) % 8)
    pieces = (a if isinstance(a, np.ndarray) else to_numpy(a) for array in arrays.values() for a in _pieces(array))
    buffers = (np.asarray(a, a.dtype.newbyteorder("<"), order="C").reshape(-1).view(np.uint8) for a in pieces)
    return 8 + len(text) + ends[-1], chain([len(text).to_bytes(8, "little"), text], buffers)


def _pieces(array: Any) -> Iterator[Any]:
    """An array as it lies, or of what is read as one some rows at a time, so that not all of them are in memory."""
    if isinstance(array, np.ndarray) or not array.shape:
        yield array
        return
    rows = array.shape[0]
    each = max(1, PIECE * rows // max(1, array.nbytes))
    for first in range(0, rows, each):
        yield array[first : first + each]


def opened(path: Path) -> Any:
    """A checkpoint file, of which nothing is in memory yet; CheckpointError for a missing, truncated or foreign one."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {str(path)!r}", fix="check the path")
    try:
        file: Any = safe_open(path, framework="np")
    except (SafetensorError, OSError, ValueError) as error:
        said = f"{path.name} is not a whole checkpoint file: {error}"
        raise CheckpointError(said, fix="use an earlier checkpoint") from None
    if (file.metadata() or {}).get("format") != FORMAT:
        raise CheckpointError(
            f"{path.name} was not written by hetu",
            fix="say what is what there: ht.load_weights(executor, path, names=...)",
        )
    return file


def make_folder(folder: Path) -> None:
    """Make it unless it is there; CheckpointError if that cannot be done."""
    check_place(folder, CheckpointError)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        said = f"folder {str(folder)!r} cannot be made: {error.strerror}"
        raise CheckpointError(said, fix="make room, or save elsewhere") from error


def as_json(data: Mapping[str, Any]) -> str:
    """As text; CheckpointError for what a user wants to save beside the variables, if JSON cannot hold it."""
    try:
        return json.dumps(data)
    except (TypeError, ValueError) as error:
        fix = "pass as extra what JSON has: numbers, texts, lists, dictionaries of these"
        raise CheckpointError(f"extra cannot be saved: {error}", fix=fix) from None


# -- writing a folder ---------------------------------------------------------------------------------------------


def begin(folder: Path) -> int:
    """Make the folder for a save and number it, one more than the last. CheckpointError where a file is."""
    _check_folder(folder)
    make_folder(folder)
    last = _manifest(folder)["save"] if (folder / MANIFEST).exists() else 0
    begun = [int(found[2]) for path in folder.iterdir() if (found := PART.fullmatch(path.name)) and not found[1]]
    _clear(folder, last)
    return max([last, *begun]) + 1  # a name that was never used: hosts may still see what another has removed


def part_name(number: int, part: int) -> str:
    """The file of one part of one save."""
    return f"save{number}-part{part}.safetensors"


def write_part(folder: Path, number: int, part: int, tensors: Mapping[str, Any]) -> int:
    """Write one part, atomically; the number of its bytes."""
    path = folder / part_name(number, part)
    write_atomically(path, tensors, {"save": str(number)})
    return path.stat().st_size


def part_size(number: int, tensors: Mapping[str, Any]) -> int:
    """The number of bytes that such a part will have."""
    return content(tensors, {"save": str(number)})[0]


def manifest(
    number: int, nbytes: Sequence[int], variables: Mapping[str, Any], extra: Mapping[str, Any] | None
) -> bytes:
    """What is written last of save `number`, whose parts have these sizes.

    `variables` gives for each name its shape, dtype, and (part, box) of each piece.
    """
    told = {"format": PARTS_FORMAT, "save": number, "bytes": list(nbytes), "extra": dict(extra or {})}
    return as_json({**told, "variables": dict(variables)}).encode()


def write_one(
    folder: Path, number: int, nbytes: Sequence[int], part: int, last: bytes | None, tensors: Mapping[str, Any]
) -> bool:
    """Write one of the parts, of these sizes, and if all are there then make them the checkpoint; whether it did so.

    Whoever writes part 0 gives the manifest as `last`, which waits beside that of the save before.
    """
    if last is not None:
        replace_atomically(folder / READY, [last], CheckpointError)
    try:
        write_part(folder, number, part, tensors)
    except CheckpointError:
        (folder / READY).unlink(missing_ok=True)
        raise
    paths = (folder / part_name(number, part) for part in range(len(nbytes)))
    there = all(path.is_file() and path.stat().st_size == size for path, size in zip(paths, nbytes))
    return there and finish(folder, number)


def finish(folder: Path, number: int) -> bool:
    """Make save `number`, all of whose parts are there, the checkpoint; False where another process has done so."""
    try:
        os.replace(folder / READY, folder / MANIFEST)
    except FileNotFoundError:
        return False
    if os.name == "posix":
        flush(folder)
    _clear(folder, number)
    return True


def _clear(folder: Path, number: int) -> None:
    """Remove what saves have left, but for the parts of one; the folder may have other files."""
    for path in [*folder.iterdir()]:
        found = PART.fullmatch(path.name)
        if (path.name == READY or (found and found.groups() != ("", str(number)))) and path.is_file():
            path.unlink(missing_ok=True)


# -- reading ------------------------------------------------------------------------------------------------------


class Checkpoint:
    """An opened file or folder; `variables` has shape, dtype and pieces by name. CheckpointError if it is not whole.

    Only what is asked for is read, and kept by nobody here. Of a file all is of one save, whatever replaces it. Of
    numbered saves it is the newest.
    """

    fix = "build the model as it was saved; names come from layers and ht.scope(...)"  # where nothing of it fits

    def __init__(self, path: FilePath) -> None:
        self.path, self.file = (path := newest(path)), None
        self.extra: dict[str, Any]
        if path.is_dir():
            told = _manifest(path)
            self.number, self.bytes, self.extra = told["save"], told["bytes"], told["extra"]
            self.variables = told["variables"]
            return
        self.file = file = opened(path)
        self.extra = json.loads(file.metadata().get("extra", "{}"))
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        self.variables = {
            name: {
                "shape": (shape := tuple(a.get_shape())),
                "dtype": DTYPES[a.get_dtype()],
                "pieces": [(0, whole(shape))],
            }
            for name, a in slices.items()
        }

    def read(self, name: str, box: Box) -> np.ndarray:
        """The values of `box` of a variable, put together from the pieces that meet it."""
        entry = self.variables[name]
        out, found = np.empty([high - low for low, high in box], entry["dtype"]), 0
        for part, piece in entry["pieces"]:
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(piece, box)]
            if all(low < high for low, high in common):
                file = self.file or self._part(part)
                with self._as_told(name):
                    held, told = file.get_slice(name), (NAMES[entry["dtype"]], [high - low for low, high in piece])
                    if (here := (held.get_dtype(), held.get_shape())) != told:
                        raise ValueError(f"part {part} has {here}, not {told}")
                    out[_within(common, box)] = held[_within(common, piece)]
                found += math.prod(high - low for low, high in common)
        if found < out.size:
            with self._as_told(name):
                raise ValueError(f"its pieces hold {found} of {out.size} numbers")
        return out

    def beside(self, part: int, names: re.Pattern[str]) -> dict[str, np.ndarray]:
        """What a part of a folder has beside pieces of variables, under names of this form."""
        files = [] if self.file or part >= len(self.bytes) else [self._part(part)]
        return {n: file.get_tensor(n) for file in files for n in file.keys() if names.fullmatch(n)}  # noqa: SIM118

    def rows(self, names: Sequence[str]) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """Of tables without a bound, a part at a time, the ids of the rows that all of them have, and rows of each."""
        entry = self.variables[names[0]]
        for part in entry["parts"]:
            file = self._part(part)
            with self._as_told(names[0]):
                found = file.get_tensor(ids_name(entry["ids"])), [file.get_tensor(name) for name in names]
            yield found

    def check_rows(self, names: Sequence[str]) -> None:
        """CheckpointError unless all parts of `rows` are there, as far as their headers tell."""
        entry = self.variables[names[0]]
        for part in entry["parts"]:
            file = self._part(part)
            with self._as_told(names[0]):
                count = file.get_slice(ids_name(entry["ids"])).get_shape()[0]
                if any(file.get_slice(name).get_shape()[0] != count for name in names):
                    raise ValueError(f"{count} ids have another number of rows")

    @contextmanager
    def _as_told(self, name: str) -> Iterator[None]:
        """CheckpointError where a file has not what the manifest says."""
        from safetensors import SafetensorError

        try:
            yield
        except (SafetensorError, ValueError) as error:
            text = f"{name} in {str(self.path)!r} is not as its manifest says: {error}"
            raise CheckpointError(text, fix="use an earlier checkpoint") from None

    def _part(self, part: int) -> Any:
        path = self.path / part_name(self.number, part)
        if not path.is_file():
            said = f"{self.path.name} lacks its part {path.name}"
            raise CheckpointError(said, fix="copy the whole folder, or use another one")
        if path.stat().st_size != self.bytes[part]:
            raise CheckpointError(
                f"{path.name} has {path.stat().st_size} bytes, it was written with {self.bytes[part]}",
                fix="copy the folder again, or use another one",
            )
        return opened(path)


def _within(box: Sequence[Sequence[int]], outer: Sequence[Sequence[int]]) -> tuple[slice, ...]:
    return tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(box, outer))


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text("utf-8"))
        _check(manifest)
        return manifest
    except FileNotFoundError:
        said = f"{str(folder)!r} has no {MANIFEST}, so no save was finished in it"
        raise CheckpointError(said, fix="check the path") from None
    except (ValueError, TypeError) as error:
        said = f"{folder / MANIFEST} is no manifest of a checkpoint: {error}"
        raise CheckpointError(said, fix="use an earlier checkpoint") from None


def _check(manifest: Any) -> None:
    """ValueError or TypeError unless a manifest has all that readers ask it for, and of the right kinds."""
    check_has(manifest, "it", MANIFEST_HAS)
    if manifest["format"] != PARTS_FORMAT:
        raise ValueError(f"its format is {manifest['format']!r}")
    parts = range(len(manifest["bytes"]))
    for name, entry in manifest["variables"].items():
        check_has(entry, name, ENTRY_HAS)
        check_has(entry, name, ROWS_HAVE if entry.keys() & ROWS_HAVE.keys() else {})
        boxes = [(box, entry["shape"]) for _, box in entry["pieces"] if len(box) == len(entry["shape"])]
        inside = all(low <= high <= size for box, shape in boxes for (low, high), size in zip(box, shape))
        there = all(part in parts for part in (*(part for part, _ in entry["pieces"]), *entry.get("parts", ())))
        if not (inside and there and len(boxes) == len(entry["pieces"]) and entry["dtype"] in NAMES):
            raise ValueError(f"{name} has a shape, dtype, pieces or parts that cannot be: {entry!r:.200}")


def check_has(found: Any, name: str, wanted: Mapping[str, Any]) -> None:
    """ValueError unless it is a dictionary with all that is wanted, each of its kind."""
    if type(found) is not dict:
        raise ValueError(f"{name} is {found!r:.80}")
    if lacks := [key for key, hint in wanted.items() if key not in found or not check_of(hint)(found[key])]:
        told = ", ".join(f"{key}={found[key]!r:.80}" if key in found else f"no {key}" for key in lacks)
        raise ValueError(f"{name} has {told}")

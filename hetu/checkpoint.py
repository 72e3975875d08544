"""Checkpoints: one file, or a folder of parts that ranks wrote; any box of any variable can be read from either.

A folder has a manifest `manifest.json` that names the part files of one save and which box of which variable each
holds. Parts are written first, under new names; the manifest is renamed over the old one last, so a reader sees all of
the old save or all of the new one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .arguments import check_of
from .core.errors import ArgumentError, CheckpointError, UnknownNameError, did_you_mean
from .core.graph import Node
from .core.state import FILES, FilePath, State
from .core.types import Box, show_shape
from .files import check_place, replace_atomically
from .ranges import Count

FORMAT = "hetu-1"
MANIFEST = "manifest.json"
PARTS_FORMAT = "hetu-parts-1"
PIECE = 1 << 24  # bytes
NAMES = {
    "bool": "BOOL",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
} | {
    f"{kind}int{bits}": f"{letter}{bits}" for kind, letter in (("", "I"), ("u", "U")) for bits in (8, 16, 32, 64)
}  # of dtypes, in a file
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


def remove(folder: Path) -> None:
    """Remove a save, its manifest first, so that what a killed process leaves behind is no save."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name != MANIFEST):
        path.unlink(missing_ok=True)
    folder.rmdir()


def generations(folder: Path) -> list[int]:
    """The numbers, in order, of the finished saves in `folder`, each in a folder named by its number."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal() and exists(path))


def check_paths(paths: Iterable[FilePath | None], in_parts: bool) -> None:
    """CheckpointError where none can be written, one of parts as a folder, as far as can be told before."""
    for path in (Path(path) for path in paths if path is not None):
        check_place(path, CheckpointError)
        if in_parts:
            _check_folder(path)


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{str(folder)!r} is a file, ranks save to a folder", fix="choose another path")


# -- files ----------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """A safetensors file, as a whole or not at all: a header in JSON, and the arrays as they lie in memory.

    Not by the library, which holds a file of arrays in memory twice before it writes it.
    """
    arrays = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))  # so that each is aligned
    if strange := [f"{name} of {a.dtype}" for name, a in arrays.items() if a.dtype.name not in NAMES]:
        raise CheckpointError(f"no file can hold {', '.join(strange)}", fix=f"convert it to one of {', '.join(NAMES)}")
    ends = accumulate((a.nbytes for a in arrays.values()), initial=0)
    header = {
        name: {"dtype": NAMES[a.dtype.name], "shape": a.shape, "data_offsets": offsets}
        for (name, a), offsets in zip(arrays.items(), pairwise(ends))
    }
    text = json.dumps({"__metadata__": {"format": FORMAT, **metadata}, **header}).encode()
    text += b" " * (-len(text) % 8)
    pieces = (piece for a in arrays.values() for piece in _pieces(a))
    content = (np.asarray(a, a.dtype.newbyteorder("<"), order="C").reshape(-1).view(np.uint8) for a in pieces)
    replace_atomically(path, chain([len(text).to_bytes(8, "little"), text], content), CheckpointError)


def _pieces(array: Any) -> Iterator[np.ndarray]:
    """An array as it lies, or of what is read as one some rows at a time, so that not all of them are in memory."""
    if isinstance(array, np.ndarray):
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
        raise CheckpointError(
            f"{path.name} is not a whole checkpoint file: {error}", fix="use an earlier checkpoint"
        ) from None
    if (file.metadata() or {}).get("format") != FORMAT:
        raise CheckpointError(f"{path.name} was not written by hetu", fix="load files made with Executor.save")
    return file


# -- writing a folder ---------------------------------------------------------------------------------------------


def begin(folder: Path) -> int:
    """Make the folder for a save and number it, one more than the last. CheckpointError where a file is."""
    _check_folder(folder)
    check_place(folder, CheckpointError)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        said = f"folder {str(folder)!r} cannot be made: {error.strerror}"
        raise CheckpointError(said, fix="make room, or save elsewhere") from error
    return _manifest(folder)["save"] + 1 if (folder / MANIFEST).exists() else 1


def part_name(number: int, part: int) -> str:
    """The file of one part of one save."""
    return f"save{number}-part{part}.safetensors"


def write_part(folder: Path, number: int, part: int, tensors: Mapping[str, np.ndarray]) -> int:
    """Write one part, atomically; the number of its bytes."""
    path = folder / part_name(number, part)
    write_atomically(path, tensors, {"save": str(number)})
    return path.stat().st_size


def finish(
    folder: Path, number: int, nbytes: Sequence[int], variables: Mapping[str, Any], extra: Mapping[str, Any] | None
) -> None:
    """Make the parts of save `number` the checkpoint, and remove those of older ones.

    `variables` gives for each name its shape, dtype, and (part, box) of each piece.
    """
    manifest = {"format": PARTS_FORMAT, "save": number, "bytes": list(nbytes), "extra": dict(extra or {})}
    text = json.dumps({**manifest, "variables": dict(variables)})
    replace_atomically(folder / MANIFEST, [text.encode()], CheckpointError)
    for old in folder.glob("save*-part*.safetensors"):
        if not old.name.startswith(f"save{number}-"):
            old.unlink(missing_ok=True)


def save_alone(folder: Path, tensors: Mapping[str, np.ndarray], extra: Mapping[str, Any] | None) -> None:
    """A save of one part."""
    number = begin(folder)
    nbytes = write_part(folder, number, 0, tensors)
    entries = {
        name: {"shape": a.shape, "dtype": a.dtype.name, "pieces": [(0, whole(a.shape))]} for name, a in tensors.items()
    }
    finish(folder, number, [nbytes], entries, extra)


# -- reading ------------------------------------------------------------------------------------------------------


class Checkpoint:
    """An opened file or folder; `variables` has shape, dtype and pieces by name. CheckpointError if it is not whole.

    Only what is asked for is read, and kept by nobody here. Of a file all is of one save, whatever replaces it.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, None
        self.extra: dict[str, Any]
        if path.is_dir():
            manifest = _manifest(path)
            self.number, self.bytes, self.extra = manifest["save"], manifest["bytes"], manifest["extra"]
            self.variables = manifest["variables"]
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
            raise CheckpointError(
                f"{self.path.name} lacks its part {path.name}", fix="copy the whole folder, or use another one"
            )
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
        raise CheckpointError(
            f"{str(folder)!r} has no {MANIFEST}, so no save was finished in it", fix="check the path"
        ) from None
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{folder / MANIFEST} is no manifest of a checkpoint: {error}", fix="use an earlier checkpoint"
        ) from None


def _check(manifest: Any) -> None:
    """ValueError or TypeError unless a manifest has all that readers ask it for, and of the right kinds."""
    _has(manifest, "it", MANIFEST_HAS)
    if manifest["format"] != PARTS_FORMAT:
        raise ValueError(f"its format is {manifest['format']!r}")
    parts = range(len(manifest["bytes"]))
    for name, entry in manifest["variables"].items():
        _has(entry, name, ENTRY_HAS)
        _has(entry, name, ROWS_HAVE if entry.keys() & ROWS_HAVE.keys() else {})
        boxes = [(box, entry["shape"]) for _, box in entry["pieces"] if len(box) == len(entry["shape"])]
        inside = all(low <= high <= size for box, shape in boxes for (low, high), size in zip(box, shape))
        there = all(part in parts for part in (*(part for part, _ in entry["pieces"]), *entry.get("parts", ())))
        if not (inside and there and len(boxes) == len(entry["pieces"]) and entry["dtype"] in NAMES):
            raise ValueError(f"{name} has a shape, dtype, pieces or parts that cannot be: {entry!r:.200}")


def _has(found: Any, name: str, wanted: Mapping[str, Any]) -> None:
    """ValueError unless it is a dictionary with all that is wanted, each of its kind."""
    if type(found) is not dict:
        raise ValueError(f"{name} is {found!r:.80}")
    if lacks := [key for key, hint in wanted.items() if key not in found or not check_of(hint)(found[key])]:
        told = ", ".join(f"{key}={found[key]!r:.80}" if key in found else f"no {key}" for key in lacks)
        raise ValueError(f"{name} has {told}")


# -- the values of an executor -----------------------------------------------------------------------------------


class Wanted(NamedTuple):
    """A variable that is read from a checkpoint: its whole shape and dtype, and the box to read here, if any."""

    shape: tuple[int, ...]
    dtype: str
    box: Box | None


def fitting(
    checkpoint: Checkpoint, wanted: Mapping[str, Wanted], only: Any = None, strict: bool = True
) -> dict[str, Wanted]:
    """What is to be read. CheckpointError with a table of missing, unexpected and mis-shaped entries."""
    chosen = dict(wanted) if only is None else {name: wanted[name] for name in among(wanted, only)}
    rows = [f"  missing     {name}" for name in chosen if strict and name not in checkpoint.variables]
    if only is None and strict:
        rows += [f"  unexpected  {name}" for name in checkpoint.variables if name not in chosen]
    there = {name: w for name, w in chosen.items() if name in checkpoint.variables}
    for name, (shape, dtype, _) in there.items():
        entry = checkpoint.variables[name]
        if (tuple(entry["shape"]), entry["dtype"]) != (shape, dtype):
            here, saved = f"{dtype}{show_shape(shape)}", f"{entry['dtype']}{show_shape(tuple(entry['shape']))}"
            rows.append(f"  different   {name}: the file has {saved}, the model {here}")
    if rows:
        shown = rows[:8] + ([f"  ... and {len(rows) - 8} more"] if len(rows) > 8 else [])
        raise CheckpointError(
            "\n".join([f"{checkpoint.path.name} belongs to another model; nothing was loaded", *shown]),
            fix="build the model as it was saved; names come from layers and ht.scope(...)"
            if there.keys() != chosen.keys() or only is not None
            else "take the weights alone: ht.load_weights(executor, path)",
        )
    return there


def among(names: Collection[str], only: Any) -> list[str]:
    """The names that `only` says: patterns, variables, and what has variables, as layers do; one or a list of them.

    >>> among(["encoder/weight", "encoder/bias", "head/weight"], ["encoder/*"])
    ['encoder/weight', 'encoder/bias']
    """
    one = isinstance(only, str | Node) or hasattr(only, "variables")
    if not (one or isinstance(only, Iterable)):
        raise ArgumentError(f"only={only!r}", fix="pass variables, layers or patterns of names, one or a list")
    found = dict[str, None]()
    for each in [only] if one else only:
        own = [v.name for v in getattr(each, "variables", [each])] if not isinstance(each, str) else []
        fitting = [name for name in names if name in own or (isinstance(each, str) and fnmatchcase(name, each))]
        if not fitting:
            wanted = own[0] if own else each
            raise UnknownNameError(f"there is no variable {wanted!r}", fix=did_you_mean(wanted, names))
        found |= dict.fromkeys(fitting)
    return list(found)


def save(state: State, path: FilePath, extra: Mapping[str, Any] | None = None) -> None:
    """Write all variables and `extra` to one file, atomically; where a folder is, as that of one rank."""
    tensors, path = {name: state.contiguous(name) for name in state.arrays}, Path(path)
    if not path.is_dir():
        write_atomically(path, tensors, {"extra": json.dumps(dict(extra or {}))})
        return
    save_alone(path, tensors, extra)  # it goes on with what ranks have saved


def load(state: State, path: FilePath, only: Any, strict: bool) -> dict[str, Any]:
    """Set the chosen variables from a file or a folder, and return its `extra`."""
    checkpoint = Checkpoint(Path(path))
    wanted = {n: Wanted(a.shape, a.dtype.name, whole(a.shape)) for n, a in state.arrays.items()}
    read = fitting(checkpoint, wanted, only, strict)
    state.assign({name: checkpoint.read(name, box) for name, (_, _, box) in read.items() if box is not None})
    return checkpoint.extra


FILES |= {"save": save, "load": load}

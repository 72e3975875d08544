"""Published weights: safetensors files of others, alone or many with an index, and the settings that lie beside them.

Names and shapes are read first. Numbers are read when an executor makes the variables, one array at a time, so that no
checkpoint lies in memory twice. Left out: files of pickles, quantized weights.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import CheckpointError, did_you_mean
from ..core.types import show_shape

INDEX = "model.safetensors.index.json"
SHOWN = 8  # rows of what does not fit
FLOATS = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": "<u2"}  # how they lie in a file


class PublishedWeights(Mapping[str, tuple[int, ...]]):
    """The shape of every array by name; `read` gives its numbers, `settings` what `config.json` beside the file says.

    `path` is a file, or a folder with `model.safetensors` or an index of several. CheckpointError for what is missing
    or not whole.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path = Path(path)
        folder = path if path.is_dir() else path.parent
        index = folder / INDEX
        if path.is_dir() and index.is_file():
            where = _json(index).get("weight_map")
            where = {name: str(file) for name, file in where.items()} if isinstance(where, dict) else {"": str(where)}
            names = [*dict.fromkeys(where.values())]
            if strange := [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]:
                raise CheckpointError(
                    f"{INDEX} names {strange[0]!r:.60}, wanted files beside it", fix="use the folder as published"
                )
            within = {name: dict(_arrays(folder / name)) for name in names}
            if lost := [name for name in where if name not in within[where[name]]]:
                said = f"{INDEX} says that {lost[0]!r} lies in {where[lost[0]]}, which lacks it"
                raise CheckpointError(said, fix="copy the whole folder again")
            self.files = {name: within[file][name] for name, file in where.items()}
        else:
            self.files = dict(_arrays(folder / "model.safetensors" if path.is_dir() else path))
        self.settings = _json(folder / "config.json") if (folder / "config.json").is_file() else {}

    def __getitem__(self, name: str) -> tuple[int, ...]:
        return tuple(self.files[name][2]["shape"])

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, name: str) -> np.ndarray:
        """An array of floats as float32, from the mapped file; those of 16 bits need no other package for that."""
        path, start, entry = self.files[name]
        if (code := entry["dtype"]) not in FLOATS:
            raise CheckpointError(f"{name!r} holds numbers of {code}, wanted floats", fix="convert the file first")
        out = np.empty(shape := self[name], np.float32)
        if out.size:
            found = np.memmap(path, FLOATS[code], "r", start + entry["data_offsets"][0], shape or (1,)).reshape(shape)
            (out.view(np.uint32) if code == "BF16" else out)[...] = found
        if code == "BF16":  # the upper half of a float32
            out.view(np.uint32)[...] <<= 16
        return out

    def called(self, name: str, prefix: str) -> str:
        """What this file calls a weight: with the prefix if it has that, and in older words for scale and bias."""
        older = re.sub(r"LayerNorm\.weight$", "LayerNorm.gamma", re.sub(r"LayerNorm\.bias$", "LayerNorm.beta", name))
        return next((n for n in (name, prefix + name, older, prefix + older) if n in self.files), name)

    def shape(self, name: str, prefix: str) -> tuple[int, ...]:
        """The shape of a weight that the family is known by."""
        if (found := self.called(name, prefix)) not in self.files:
            said = f"{self.path.name} has no {name!r}; it has {', '.join([*self.files][:3]) or 'nothing'}, ..."
            raise CheckpointError(said, fix="load it with the family that it belongs to")
        return self[found]

    def layers(self, pattern: str) -> int:
        """How many layers there are, given how names tell the number of one."""
        return len({m[1] for name in self.files if (m := re.search(pattern, name))})

    def sizes(self, known: Mapping[str, str], usual: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
        """What shapes do not tell: as `asked`, as the settings say under their `known` words, or as is `usual`."""
        said = {size: self.settings[word] for size, word in known.items() if self.settings.get(word) is not None}
        found = {**usual, **said, **asked}
        if missing := [size for size in known if size not in found]:
            raise CheckpointError(
                f"shapes do not tell {', '.join(missing)}, and no config.json beside {self.path.name} does",
                fix=f"copy config.json beside it, or pass {missing[0]}=...",
            )
        return found

    def fitting(self, wanted: Mapping[str, tuple[int, ...]], drawn: set[str], left: list[str]) -> None:
        """CheckpointError with a table of what is missing (but for `drawn`), left over, or of another shape."""
        rows = [f"  missing     {n}: wanted {show_shape(s)}" for n, s in wanted.items() if n not in {*self, *drawn}]
        lacking = [name for name in wanted if name not in self]
        near = {name: did_you_mean(name, lacking) for name in left[:SHOWN] if lacking}
        told = {name: f", {fix}" if fix.startswith("did") else "" for name, fix in near.items()}
        rows += [f"  unexpected  {name}: got {show_shape(self[name])}{told.get(name, '')}" for name in left]
        rows += [
            f"  different   {name}: got {show_shape(self[name])}, wanted {show_shape(shape)}"
            for name, shape in wanted.items()
            if name in self and self[name] != shape
        ]
        if rows:
            shown = rows[:SHOWN] + ([f"  ... and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else [])
            raise CheckpointError(
                "\n".join([f"{self.path.name} holds another model; nothing was loaded", *shown]),
                fix="load it with the family that it belongs to, in the sizes of its config.json",
            )


def _arrays(path: Path) -> Iterator[tuple[str, tuple[Path, int, Any]]]:
    """The name of every array in a file, where numbers begin, and its entry in the header. No number is read."""
    from safetensors import SafetensorError, safe_open

    fix = "copy it again"
    try:
        if not path.is_file():
            raise CheckpointError(f"there is no file of weights {str(path)!r}", fix="check the path")
        with open(path, "rb") as file:
            if (start := file.read(8))[:2] in (b"PK", b"\x80\x02"):  # or one of so many bytes
                fix = (
                    "pass the arrays of a file of PyTorch or NumPy: torch.load(path, weights_only=True), np.load(path)"
                )
            with safe_open(path, framework="np"):  # which looks whether header and file agree
                size = int.from_bytes(start, "little")
                header = json.loads(file.read(size))
    except CheckpointError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path.name:.80} is no whole safetensors file: {error}", fix=fix) from None
    return ((name, (path, 8 + size, entry)) for name, entry in header.items() if name != "__metadata__")


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}")
        return found
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is no JSON of names and values: {error}", fix="copy it again") from None

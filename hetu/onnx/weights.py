"""Files of ONNX: the model, and the numbers in it or beside it. Sizes are compared before memory is taken."""

from __future__ import annotations

import importlib
import math
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ..core.errors import ArgumentError, DataError, DTypeError, MissingDependencyError
from ..core.types import as_dtype

LARGEST = (1 << 31) - 1  # bytes of a message of protobuf
NARROW = {  # numbers for which there are no arrays, and the dtype in which they are kept as they are
    **dict.fromkeys(("INT4", "INT2"), "int8"),
    **dict.fromkeys(("UINT4", "UINT2"), "uint8"),
    **dict.fromkeys(("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "FLOAT8E8M0"), "float32"),
    "FLOAT4E2M1": "float32",
}


def package() -> ModuleType:
    """The package onnx, which nothing else of hetu needs."""
    try:
        return importlib.import_module("onnx")
    except ImportError:
        raise MissingDependencyError("files of ONNX need the package onnx", fix="pip install onnx") from None


def read(path: str | os.PathLike[str] | Any) -> tuple[Any, Path | None]:
    """The model in a file, or given, and the folder in which its numbers may lie."""
    onnx = package()
    if isinstance(path, onnx.ModelProto):
        return path, None
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(f"got {path!r:.60}", fix="pass the path of a file, or an onnx.ModelProto")
    file = Path(path)
    if not file.is_file():
        raise DataError(f"there is no file {str(file)!r}", fix="pass the path of a file that onnx wrote")
    if (length := file.stat().st_size) > LARGEST:
        raise DataError(
            f"{str(file)!r} has {length} bytes, a model at most {LARGEST}", fix="keep its numbers beside it"
        )
    from google.protobuf.message import DecodeError

    model = onnx.ModelProto()
    try:
        model.ParseFromString(file.read_bytes())
    except DecodeError as error:
        raise DataError(f"{str(file)!r} is no whole model of ONNX: {error}", fix="write or copy it again") from None
    if not model.HasField("graph"):
        raise DataError(f"{str(file)!r} holds no graph", fix="pass the path of a file that onnx wrote")
    return model, file.parent


def dtype_of(number: int, what: str) -> np.dtype:
    """The dtype that ONNX has a number for; DTypeError for what hetu has no arrays of."""
    onnx = package()
    try:
        name = onnx.TensorProto.DataType.Name(number)
        return as_dtype(onnx.helper.tensor_dtype_to_np_dtype(number).name)
    except (ValueError, KeyError, DTypeError):
        shown = name if number in onnx.TensorProto.DataType.values() else number
        raise DTypeError(f"{what} is of {shown}", fix="export it in floats or integers of 8 to 64 bits") from None


def narrow(number: int) -> str:
    """What ONNX calls numbers of fewer bits than ours have, or "" for others."""
    kinds = package().TensorProto.DataType
    name = kinds.Name(number) if number in kinds.values() else ""
    return name if name in NARROW else ""


def stored_dtype(number: int, what: str) -> np.dtype:
    """As `dtype_of`, and the dtype in which narrower numbers are kept."""
    return np.dtype(NARROW[name]) if (name := narrow(number)) else dtype_of(number, what)


def array_of(tensor: Any, folder: Path | None) -> np.ndarray:
    """The numbers of a tensor, of which there are as many as its sizes say."""
    onnx, what = package(), f"the tensor {tensor.name!r}"
    dtype, shape = stored_dtype(tensor.data_type, what), tuple(tensor.dims)
    if any(size < 0 for size in shape):
        raise DataError(f"{what} has the sizes {shape}", fix="write the model again")
    bits = int(re.findall(r"[A-Z]+(\d+)", name)[0]) if (name := narrow(tensor.data_type)) else 8 * dtype.itemsize
    wanted = (bits * math.prod(shape) + 7) // 8
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raw = _beside(tensor, folder, wanted)
        tensor = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=shape, raw_data=raw)
    if tensor.HasField("raw_data") and len(tensor.raw_data) != wanted:
        said = f"{what} has {len(tensor.raw_data)} bytes, of sizes {shape} there are {wanted}"
        raise DataError(said, fix="write or copy the model again")
    try:
        return np.asarray(onnx.numpy_helper.to_array(tensor).astype(dtype, copy=False)).reshape(shape)
    except (ValueError, TypeError) as error:
        raise DataError(f"{what} does not hold what it says: {error}", fix="write the model again") from None


def _beside(tensor: Any, folder: Path | None, wanted: int) -> bytes:
    """The bytes of numbers in a file in the folder of the model, or below it."""
    told = {entry.key: entry.value for entry in tensor.external_data}
    what, location = f"the tensor {tensor.name!r}", told.get("location", "")
    if folder is None:
        raise DataError(f"{what} lies in the file {location!r}", fix="pass the path of the model, not the model")
    file = (folder / location).resolve()
    if not location or not file.is_relative_to(folder.resolve()):
        raise DataError(f"{what} lies in {location!r}, outside of the model's folder", fix="write the model again")
    offset, length = (_number(told.get(key, default), what) for key, default in (("offset", 0), ("length", wanted)))
    there = file.stat().st_size if file.is_file() else -1
    if length != wanted or offset + length > there:
        said = f"{what} takes {wanted} bytes, {length} from {offset} on in {location!r}, which has {max(there, 0)}"
        raise DataError(
            said, fix="put the whole file beside the model" if there >= 0 else "put the file beside the model"
        )
    with open(file, "rb") as opened:
        opened.seek(offset)
        return opened.read(wanted)


def _number(value: Any, what: str) -> int:
    if not str(value).isdecimal():
        raise DataError(f"{what} lies at {value!r}", fix="write the model again")
    return int(value)

"""Files of ONNX: the model, and the numbers in it or beside it. Sizes are compared before memory is taken."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ..core.errors import ArgumentError, DataError, DTypeError, MissingDependencyError
from ..core.types import as_dtype

LARGEST = (1 << 31) - 1  # bytes of a message of protobuf


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


def array_of(tensor: Any, folder: Path | None) -> np.ndarray:
    """The numbers of a tensor, of which there are as many as its sizes say."""
    onnx, what = package(), f"the tensor {tensor.name!r}"
    dtype, shape = dtype_of(tensor.data_type, what), tuple(tensor.dims)
    if any(size < 0 for size in shape):
        raise DataError(f"{what} has the sizes {shape}", fix="write the model again")
    wanted = dtype.itemsize
    for size in shape:
        wanted *= size
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return _beside(tensor, folder, dtype, shape, wanted)
    if tensor.HasField("raw_data") and len(tensor.raw_data) != wanted:
        said = f"{what} has {len(tensor.raw_data)} bytes, of sizes {shape} there are {wanted}"
        raise DataError(said, fix="write or copy the model again")
    try:
        return np.asarray(onnx.numpy_helper.to_array(tensor), dtype).reshape(shape)
    except (ValueError, TypeError) as error:
        raise DataError(f"{what} does not hold what it says: {error}", fix="write the model again") from None


def _beside(tensor: Any, folder: Path | None, dtype: np.dtype, shape: tuple[int, ...], wanted: int) -> np.ndarray:
    """Numbers in a file in the folder of the model, or below it."""
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
    return (
        np.fromfile(file, dtype.newbyteorder("<"), wanted // dtype.itemsize, offset=offset).astype(dtype).reshape(shape)
    )


def _number(value: Any, what: str) -> int:
    if not str(value).isdecimal():
        raise DataError(f"{what} lies at {value!r}", fix="write the model again")
    return int(value)

"""What the package onnx says: files, the numbers in them or beside, and of operators since when they mean what, dtypes
of results, and which others some consist of. Sizes of files are compared before memory is taken.
"""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ..core.errors import ArgumentError, DataError, DTypeError, MissingDependencyError
from ..core.graph import Node
from ..core.operators import cast_to
from ..core.types import Dim, as_dtype
from .meaning import MEANINGS, Meaning

LARGEST = (1 << 31) - 1  # bytes of a message of protobuf
NARROW = {  # numbers for which there are no arrays, and the dtype in which they are kept as they are
    **dict.fromkeys(("INT4", "INT2"), "int8"),
    **dict.fromkeys(("UINT4", "UINT2"), "uint8"),
    **dict.fromkeys(("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "FLOAT8E8M0"), "float32"),
    "FLOAT4E2M1": "float32",
}
OLDEST = 13  # of the standard operators; older ones are read where they mean the same
NEWER = "export the model without them, in opset 13 or later (onnx.version_converter.convert_version(model, 13))"
STANDARD = ("", "ai.onnx")
KINDS = {"seq(": "sequences", "optional(": "optionals", "tensor(string)": "strings"}  # of values that are not read


def broken(said: str) -> DataError:
    return DataError(said, fix="write the model again; onnx.checker.check_model says more")


class FixedInputsError(ArgumentError):
    """Inputs whose values decide shapes; `inputs` has their names."""

    def __init__(self, inputs: Iterable[str]) -> None:
        self.inputs = tuple(inputs)
        names, given = (", ".join(f"{name!r}{tail}" for name in self.inputs) for tail in ("", ": array"))
        said = f"the values of the inputs {names} decide shapes, and must be known"
        super().__init__(said, fix=f"give each a value: ht.onnx.load(path, fixed={{{given}}})")


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
        said = f"{str(file)!r} has {length} bytes, a model at most {LARGEST}"
        raise DataError(said, fix="keep its numbers beside it")
    from google.protobuf.message import DecodeError

    model = onnx.ModelProto()
    try:
        model.ParseFromString(file.read_bytes())
    except DecodeError as error:
        raise broken(f"{str(file)!r} is no whole model of ONNX: {error}") from None
    if not model.HasField("graph"):
        raise DataError(f"{str(file)!r} holds no graph", fix="pass the path of a file that onnx wrote")
    return model, file.parent


def dtype_of(number: int, what: str = "its result") -> np.dtype:
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
        raise broken(f"{what} has the sizes {shape}")
    bits = int(re.findall(r"[A-Z]+(\d+)", name)[0]) if (name := narrow(tensor.data_type)) else 8 * dtype.itemsize
    wanted = (bits * math.prod(shape) + 7) // 8
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raw = _beside(tensor, folder, wanted)
        tensor = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=shape, raw_data=raw)
    if tensor.HasField("raw_data") and len(tensor.raw_data) != wanted:
        raise broken(f"{what} has {len(tensor.raw_data)} bytes, of sizes {shape} there are {wanted}")
    try:
        return np.asarray(onnx.numpy_helper.to_array(tensor).astype(dtype, copy=False)).reshape(shape)
    except (ValueError, TypeError) as error:
        raise broken(f"{what} does not hold what it says: {error}") from None


def _beside(tensor: Any, folder: Path | None, wanted: int) -> bytes:
    """The bytes of numbers in a file in the folder of the model, or below it."""
    told = {entry.key: entry.value for entry in tensor.external_data}
    what, location = f"the tensor {tensor.name!r}", told.get("location", "")
    if folder is None:
        raise DataError(f"{what} lies in the file {location!r}", fix="pass the path of the model, not the model")
    file = (folder / location).resolve()
    if not location or not file.is_relative_to(folder.resolve()):
        raise broken(f"{what} lies in {location!r}, outside of the model's folder")
    offset, length = (_number(told.get(key, default), what) for key, default in (("offset", 0), ("length", wanted)))
    there = file.stat().st_size if file.is_file() else -1
    if length != wanted or offset + length > there:
        said = f"{what} takes {wanted} bytes, {length} from {offset} on in {location!r}, which has {max(there, 0)}"
        raise DataError(said, fix=f"put the {'whole ' if there >= 0 else ''}file beside the model")
    with open(file, "rb") as opened:
        opened.seek(offset)
        return opened.read(wanted)


def _number(value: Any, what: str) -> int:
    if not str(value).isdecimal():
        raise broken(f"{what} lies at {value!r}")
    return int(value)


# -- operators ---------------------------------------------------------------------------------------------------------


def shown(node: Any) -> str:
    """An operator as messages name it."""
    name = node.name or (f"that makes {node.output[0]}" if node.output else "")
    return f"{'' if node.domain in STANDARD else f'{node.domain}::'}{node.op_type} {name!r}"


def every(nodes: Iterable[Any]) -> Iterator[Any]:
    """Operators, and those of graphs within."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            yield from every(attribute.g.node)


def key_of(node: Any) -> tuple[str, str, str]:
    """What names the function that a node calls."""
    return node.domain, node.op_type, node.overload


def opsets_of(imports: Iterable[Any]) -> dict[str, int]:
    """The version of each domain of operators."""
    return {"" if o.domain in STANDARD else o.domain: o.version for o in imports}


class Definition:
    """What ONNX says of an operator, and what makes it here: a meaning, or the function by which ONNX defines it."""

    def __init__(self, schema: Any, meaning: Meaning | None, body: Any = None) -> None:
        self.meaning, self.body, self.results = meaning, body, [*schema.outputs]
        self.inputs = meaning.inputs if meaning else [i.name for i in body.inputs]
        self.types = [i.type_str for i in schema.inputs]
        self.defaults = {k: a.default_value for k, a in schema.attributes.items() if a.default_value.name}

    def like(self, given: Sequence[Any], position: int) -> Node | None:
        """The input whose dtype a result has, if ONNX declares so."""
        wanted = self.results[min(position, len(self.results) - 1)].type_str
        types = (*self.types, *self.types[-1:] * len(given))
        return next((v for v, type_ in zip(given, types) if isinstance(v, Node) and type_ == wanted), None)

    def as_declared(self, made: Any, given: Sequence[Any], position: int) -> Any:
        """A result in the dtype that ONNX declares: of an input, or a fixed one."""
        formal = self.results[min(position, len(self.results) - 1)] if self.results else None
        if not isinstance(made, Node) or formal is None or not formal.is_homogeneous:  # those are of any dtypes
            return made
        if len(formal.types) == 1:
            (type_,) = formal.types
            return cast_to(made, dtype_of(package().TensorProto.DataType.Value(type_[len("tensor(") : -1].upper())))
        return cast_to(made, like.dtype) if (like := self.like(given, position)) is not None else made


@cache
def definition(domain: str, name: str, version: int | None) -> Definition | str:
    """Of an operator in a version of its opset; or why it is not read."""
    if version is None:
        return f" (of {domain!r}, of which the model names no version)"
    if not domain and version > (newest := package().defs.onnx_opset_version()):
        raise DataError(f"the model is of opset {version}, the package onnx knows {newest}", fix="pip install -U onnx")
    if (schema := _schema(name, version, domain)) is None:
        return f" (unknown in opset {version})"
    if not domain and version < OLDEST and not _alike(schema, _schema(name, OLDEST)):
        return f" (of opset {version}, which means something else than in {OLDEST})"
    if not domain and name in MEANINGS:
        return Definition(schema, MEANINGS[name])
    types = [formal.types for formal in (*schema.inputs, *schema.outputs)]
    kinds = [kind for start, kind in KINDS.items() if any(all(t.startswith(start) for t in each) for each in types)]
    alike = (s for s in (schema, _schema(name, domain)) if s is schema or _alike(schema, s))
    body = next((s for s in alike if s.has_function or s.has_context_dependent_function), None)
    return f" ({kinds[0]})" if kinds else Definition(schema, None, body) if body else ""


def _schema(name: str, *version: int | str) -> Any:
    """What ONNX says of an operator in a version of its opset, or in the newest one, if it does."""
    defs = package().defs
    try:
        return defs.get_schema(name, *version)
    except defs.SchemaError:
        return None


def _alike(old: Any, now: Any) -> bool:
    """Whether an operator of an older opset is read rightly: what were attributes may have become inputs."""
    if now is None or now.deprecated:
        return False
    inputs = [i.name for i in now.inputs]
    shared = old.attributes.keys() & now.attributes.keys()
    same = all(old.attributes[k].default_value == now.attributes[k].default_value for k in shared)
    return same and [i.name for i in old.inputs] == inputs[: len(old.inputs)]


def body_of(schema: Any, node: Any, given: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    """The function that ONNX defines an operator by, for inputs of these types."""
    function, own = package().FunctionProto(), package().NodeProto()
    if schema.has_function:
        function.ParseFromString(schema.get_function_with_opset_version(schema.function_opset_versions[-1]))
        return function
    own.CopyFrom(node)
    del own.attribute[:]
    own.attribute.extend(attributes.values())
    version, types = schema.context_dependent_function_opset_versions[-1], [_type_of(v) for v in given]
    try:
        made = schema.get_context_dependent_function_with_opset_version(version, own.SerializeToString(), types)
    except package().shape_inference.InferenceError as error:
        raise broken(f"ONNX does not define it for these inputs: {error}") from None
    function.ParseFromString(made)
    if not function.node:
        said = "ONNX defines it for inputs of known sizes alone"
        raise DataError(said, fix='fix them: fixed={"name of the size": 8}')
    return function


def _type_of(value: Any) -> bytes:
    if not isinstance(value, Node):
        return b""  # of none
    helper = package().helper
    sizes = [None if isinstance(s, Dim) else s for s in value.shape]
    type_ = helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(value.dtype), sizes)
    return bytes(type_.SerializeToString())

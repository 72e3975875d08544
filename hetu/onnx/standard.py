"""What ONNX itself says of its operators: since when they mean it, dtypes of results, and what some consist of."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..core.errors import DataError
from ..core.graph import Node
from ..core.operators import cast_to
from ..core.types import Dim
from .meaning import MEANINGS, Meaning
from .weights import dtype_of, package

OLDEST = 13  # of the standard operators; older ones are read where they mean the same
NEWER = "export the model without them, in opset 13 or later (onnx.version_converter.convert_version(model, 13))"
STANDARD = ("", "ai.onnx")
KINDS = {"seq(": "sequences", "optional(": "optionals", "tensor(string)": "strings"}  # of values that are not read


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


def meaning_of(node: Any) -> Meaning | None:
    return MEANINGS.get(node.op_type) if node.domain in STANDARD else None


def schema_of(node: Any, opsets: Mapping[str, int]) -> Any:
    """What ONNX says of an operator in a version of its opset, if it does."""
    defs, domain = package().defs, "" if node.domain in STANDARD else node.domain
    newest, version = defs.onnx_opset_version(), opsets[domain]
    if not domain and version > newest:
        said = f"the model is of opset {version}, the package onnx knows {newest}"
        raise DataError(said, fix="pip install -U onnx")
    try:
        return defs.get_schema(node.op_type, version, domain)
    except defs.SchemaError:
        return None


def refused(node: Any, opsets: Mapping[str, int], functions: Container[tuple[str, str, str]]) -> str | None:
    """Why an operator is not read, or None."""
    standard = node.domain in STANDARD
    if key_of(node) in functions:
        return None
    version = opsets.get("" if standard else node.domain)
    if version is None:
        return f" (of {node.domain!r}, of which the model names no version)"
    schema = schema_of(node, opsets)
    if schema is None:
        return f" (unknown in opset {version})"
    if standard and version < OLDEST and not _alike(schema, schema_of(node, {"": OLDEST})):
        return f" (of opset {version}, which means something else than in {OLDEST})"
    if meaning_of(node):
        return None
    types = [formal.types for formal in (*schema.inputs, *schema.outputs)]
    kinds = [kind for start, kind in KINDS.items() if any(all(t.startswith(start) for t in each) for each in types)]
    return f" ({kinds[0]})" if kinds else None if defining(schema) else ""


def defining(schema: Any) -> Any:
    """Itself, or its newest version, if that is a function of other operators and is called alike."""
    versions = [schema]
    with contextlib.suppress(package().defs.SchemaError):
        versions.append(package().defs.get_schema(schema.name, schema.domain))
    bodies = (s for s in versions if s.has_function or s.has_context_dependent_function)
    return next((s for s in bodies if s.since_version == schema.since_version or _alike(schema, s)), None)


def _alike(old: Any, now: Any) -> bool:
    """Whether an operator of an older opset is read rightly: what were attributes may have become inputs."""
    if now is None or now.deprecated:
        return False
    inputs = [i.name for i in now.inputs]
    shared = old.attributes.keys() & now.attributes.keys()
    same = all(old.attributes[k].default_value == now.attributes[k].default_value for k in shared)
    return same and [i.name for i in old.inputs] == inputs[: len(old.inputs)]


def as_declared(schema: Any, given: Sequence[Any], position: int, made: Any) -> Any:
    """A result in the dtype that ONNX declares: of an input, or a fixed one."""
    if not isinstance(made, Node) or not schema.outputs:
        return made
    formal = schema.outputs[min(position, len(schema.outputs) - 1)]
    if not formal.is_homogeneous:  # of any dtypes
        return made
    if len(formal.types) == 1:
        (type_,) = formal.types
        number = package().TensorProto.DataType.Value(type_[len("tensor(") : -1].upper())
        return cast_to(made, dtype_of(number, "a result"))
    return cast_to(made, like.dtype) if (like := same_dtype(schema, given, position)) is not None else made


def same_dtype(schema: Any, given: Sequence[Any], position: int) -> Node | None:
    """The input whose dtype a result has, if ONNX declares so."""
    type_ = schema.outputs[min(position, len(schema.outputs) - 1)].type_str
    names = [formal.type_str for formal in schema.inputs]
    return next(
        (v for i, v in enumerate(given) if isinstance(v, Node) and names[min(i, len(names) - 1)] == type_), None
    )


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
        raise DataError(f"ONNX does not define it for these inputs: {error}", fix="write the model again") from None
    function.ParseFromString(made)
    if not function.node:
        raise DataError(
            "ONNX defines it for inputs of known sizes alone", fix='fix them: fixed={"name of the size": 8}'
        )
    return function


def _type_of(value: Any) -> bytes:
    if not isinstance(value, Node):
        return b""  # of none
    helper = package().helper
    sizes = [None if isinstance(s, Dim) else s for s in value.shape]
    type_ = helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(value.dtype), sizes)
    return bytes(type_.SerializeToString())

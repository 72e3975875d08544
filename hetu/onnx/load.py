"""`ht.onnx.load`: a model of ONNX as a graph, node by node, each made by the meaning of its operator.

What decides shapes must be known when the graph is built: an operator says which of its inputs do, and those are
computed from constants, initial values and sizes, or are given by `fixed=`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import ArgumentError, DataError, HetuError, did_you_mean, public
from ..core.graph import Graph, Node, topological
from ..core.leaf import constant, placeholder, variable
from ..core.op import Role
from ..core.operators import cast_to
from ..core.types import Dim, is_float
from .known import known
from .meaning import MEANINGS, Meaning
from .weights import array_of, dtype_of, package, read

OLDEST = 13  # of the standard operators; older ones are read where they mean the same
OURS = ("", "ai.onnx")
REFUSED = {
    "sequences": ("SequenceMap", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert"),
    "optionals": ("Optional", "OptionalGetElement", "OptionalHasElement"),
    "strings": ("StringConcat", "StringNormalizer", "StringSplit", "RegexFullMatch"),
}
MOST_NODES = 1 << 17  # that are built of one model, functions and loops unfolded
MALFORMED = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    MemoryError,
    RecursionError,
    StopIteration,
)  # what functions of meaning raise of operators whose inputs or attributes are not what ONNX wants
NEWER = "export the model without them, in opset 13 or later (onnx.version_converter.convert_version(model, 13))"
KINDS = {name: kind for kind, names in REFUSED.items() for name in names}


@dataclass(frozen=True)
class Imported:
    """A model as a graph: what it is fed, what it gives, and its variables, each by its name in the file."""

    inputs: dict[str, Node]
    outputs: dict[str, Node]
    variables: dict[str, Node]


class FixedInputsError(ArgumentError):
    """Inputs whose values decide shapes; `inputs` has their names."""

    inputs: tuple[str, ...] = ()


@public
def load(path: str | os.PathLike[str] | Any, fixed: Mapping[str, Any] | None = None) -> Imported:
    """The graph of a file of ONNX, or of an `onnx.ModelProto`, opset 13 or later.

    Its inputs are placeholders (those on which an output depends), its initial values of floats variables, which can
    be trained, saved and loaded.
    `fixed` gives inputs a value once and for all, as those need that decide shapes, and open sizes that have a name a
    number. DataError for a file that is not whole, or has operators that are not read; all of them are named.

    >>> import numpy as np
    >>> import onnx.parser
    >>> import hetu as ht
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 13]>
    ...     line (float[n, 2] x) => (float[n, 1] y) <float[2, 1] w = {1, 3}> { y = MatMul(x, w) }''')
    >>> loaded = load(model)
    >>> ex = ht.Executor([loaded.outputs["y"]])
    >>> ex.run({loaded.inputs["x"]: [[1.0, 1.0]]})[0].tolist(), list(loaded.variables)
    ([[4.0]], ['w'])
    """
    model, folder = read(path)
    reader = Reader(model, folder, dict(fixed or {}))
    return reader.loaded()


@dataclass(frozen=True)
class Lacking:
    """In place of a node that cannot be made, as the values of some inputs are not known; all that it depends on."""

    inputs: frozenset[str]


@dataclass
class Names:
    """Where names have values: the graph, or the body of a function."""

    opsets: dict[str, int]
    values: dict[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)  # those that a function was called with


class Reader:
    """One model on its way to a graph."""

    def __init__(self, model: Any, folder: Path | None, fixed: dict[str, Any]) -> None:
        self.onnx, self.model, self.folder, self.fixed = package(), model, folder, fixed
        self.functions = {(f.domain, f.name): f for f in model.functions}
        self.lacking: dict[str, None] = {}
        self.known: dict[Node, Any] = {}
        self.built, self.called_now = 0, set[tuple[str, str]]()

    def loaded(self) -> Imported:
        graph, scope = self.model.graph, Names(_opsets(self.model.opset_import))
        self.check(graph.node, scope)
        statistics = self.statistics(graph.node)
        initial = {t.name: array_of(t, self.folder) for t in graph.initializer}
        for name, array in initial.items():
            trained = is_float(array.dtype)
            made = variable(name, array, trainable=name not in statistics) if trained else constant(value=array)
            scope.values[name] = made
        inputs = {i.name: self.input(i) for i in graph.input if i.name not in initial}
        scope.values |= inputs
        self.run(graph.node, scope)
        if self.lacking:
            self.explain()
        outputs = {o.name: self.value(scope, o.name) for o in graph.output}
        found = {*Graph(tuple(outputs.values())).nodes}
        fed, kept = ({k: scope.values[k] for k in names if scope.values[k] in found} for names in (inputs, initial))
        return Imported(
            {name: node for name, node in fed.items() if node.role is Role.PLACEHOLDER},
            outputs,
            {name: node for name, node in kept.items() if node.role is Role.VARIABLE},
        )

    # -- leaves ----------------------------------------------------------------------------------------------------

    def input(self, info: Any) -> Node:
        """A placeholder, or a constant if it is given."""
        if info.type.WhichOneof("value") != "tensor_type":
            kind = info.type.WhichOneof("value") or "nothing"
            raise DataError(f"the input {info.name!r} is a {kind}, wanted a tensor", fix="export tensors alone")
        type_ = info.type.tensor_type
        dtype = dtype_of(type_.elem_type, f"the input {info.name!r}")
        if info.name in self.fixed:
            return constant(value=np.asarray(self.fixed[info.name], dtype))
        if not type_.HasField("shape"):
            raise DataError(f"the input {info.name!r} has any number of axes", fix="export it with a shape")
        sizes = [d.dim_value if d.HasField("dim_value") else self.fixed.get(d.dim_param) for d in type_.shape.dim]
        return placeholder(info.name, tuple(sizes), dtype)

    def statistics(self, nodes: Iterable[Any]) -> set[str]:
        """The names of values that no optimizer changes."""
        read = ((n, MEANINGS[n.op_type]) for n in nodes if n.domain in OURS and n.op_type in MEANINGS)
        return {name for n, m in read for i, name in enumerate(n.input) if m.kind(i) == "Statistic"}

    def value(self, scope: Names, name: str) -> Any:
        if name not in scope.values:
            raise DataError(f"nothing makes {name!r}", fix="write the model again")
        return scope.values[name]

    # -- operators ---------------------------------------------------------------------------------------------------

    def wrong(self, nodes: Iterable[Any], scope: Names) -> Iterator[str]:
        """Operators that are not read, those of graphs within too."""
        for node in nodes:
            if (reason := self.refused(node, scope)) is not None:
                yield f"{_shown(node)}{reason}"
            for attribute in node.attribute:
                yield from self.wrong(attribute.g.node, scope)

    def check(self, nodes: Iterable[Any], scope: Names) -> None:
        """DataError that names all operators which are not read."""
        if wrong := [*self.wrong(nodes, scope)]:
            known = did_you_mean(wrong[0].split(" ")[0], MEANINGS) if len(wrong) == 1 else ""
            said = f"{len(wrong)} operators of the model are not read: {'; '.join(dict.fromkeys(wrong))}"
            raise DataError(said, fix=known or NEWER)

    def refused(self, node: Any, scope: Names) -> str | None:
        """Why an operator is not read."""
        if node.op_type in KINDS and node.domain in OURS:
            return f" ({KINDS[node.op_type]})"
        if (node.domain, node.op_type) in self.functions:
            return None
        version = scope.opsets.get("" if node.domain in OURS else node.domain)
        if version is None:
            return f" (of {node.domain!r}, of which the model names no version)"
        schema = self.schema(node, version)
        if schema is None:
            return f" (unknown in opset {version})"
        if node.domain in OURS and version < OLDEST and not _alike(schema, self.schema(node, OLDEST)):
            return f" (of opset {version}, which means something else than in {OLDEST})"
        has_meaning = node.domain in OURS and node.op_type in MEANINGS
        return None if has_meaning or schema.has_function or schema.has_context_dependent_function else ""

    def schema(self, node: Any, version: int) -> Any:
        """What ONNX says of an operator in a version of its opset, if it does."""
        newest = self.onnx.defs.onnx_opset_version()
        if node.domain in OURS and version > newest:
            said = f"the model is of opset {version}, the package onnx knows {newest}"
            raise DataError(said, fix="pip install -U onnx")
        try:
            return self.onnx.defs.get_schema(node.op_type, version, "" if node.domain in OURS else node.domain)
        except self.onnx.defs.SchemaError:
            return None

    def run(self, nodes: Iterable[Any], scope: Names) -> None:
        """Give the outputs of nodes their values, in the order of the file, in which inputs come first."""
        for node in nodes:
            self.built += 1
            if self.built > MOST_NODES:
                raise DataError(f"the model unfolds to more than {MOST_NODES} operators", fix="export a smaller one")
            given = [self.value(scope, name) if name else None for name in node.input]
            try:
                made = self.made(node, given, scope)
            except HetuError as error:
                error.message = f"{_shown(node)}: {error.message}"
                raise
            except MALFORMED as error:
                said = f"{_shown(node)} cannot be built: {error}"
                raise DataError(said, fix="check the model: onnx.checker.check_model") from error
            scope.values.update((name, value) for name, value in zip(node.output, made) if name)

    def made(self, node: Any, given: Sequence[Any], scope: Names) -> Sequence[Any]:
        """The outputs of one node."""
        attributes = {a.name: scope.attributes.get(a.ref_attr_name) if a.ref_attr_name else a for a in node.attribute}
        written = {name: a for name, a in attributes.items() if a is not None}
        if (function := self.functions.get((node.domain, node.op_type))) is not None:
            return self.called_once(function, given, {**{a.name: a for a in function.attribute_proto}, **written})
        schema = self.schema(node, scope.opsets["" if node.domain in OURS else node.domain])
        if node.domain not in OURS or node.op_type not in MEANINGS:
            return self.called(self.body(schema, node, given, written), given, self.defaults(schema, written))
        meaning = MEANINGS[node.op_type]
        declared = self.defaults(schema, written)
        arguments = self.arguments(meaning, given, declared)
        if isinstance(arguments, Lacking):
            return [arguments] * len(node.output)
        options = {
            name: self.plain(a, scope, meaning.is_dtype(name))
            for name, a in declared.items()
            if name in meaning.attributes
        }
        if other := [name for name in written if name not in {*meaning.attributes, *meaning.inputs}]:
            raise DataError(f"its attribute {other[0]!r} is not read", fix="export the model without it")
        if count := meaning.count():
            options[count] = len(node.output)
        meaning.signature.bind(*arguments, **options)  # whose TypeError names what is missing
        result = meaning.function(*arguments, **options)
        results = result if isinstance(result, tuple | list) else (result,)
        return [_as_declared(schema, given, i, part) for i, part in enumerate(results)]

    def arguments(self, meaning: Meaning, given: Sequence[Any], written: Mapping[str, Any]) -> list[Any] | Lacking:
        """Inputs as the meaning wants them; attributes of older opsets that are inputs now stand in their places."""
        if not meaning.holds(len(given)):
            raise DataError(
                f"has {len(given)} inputs, of which {len(meaning.inputs)} are read", fix="export without them"
            )
        found = list(given) + [None] * (len(meaning.inputs) - len(given))
        lacking: set[str] = set()
        for position, value in enumerate(found):
            name = meaning.inputs[min(position, len(meaning.inputs) - 1)]
            if value is None and name in written:
                value = found[position] = constant(value=np.array(self.plain(written[name], Names({}))))
            if isinstance(value, Lacking):
                lacking |= value.inputs
                continue
            if meaning.kind(position) != "KnownArray" or value is None:
                continue
            found[position] = known(value, self.known)
            if found[position] is None:
                if not (below := self.below([value])):
                    said = f"its input {name!r} follows from sizes that are open, but not by + - * // %"
                    raise DataError(said, fix='give these a number: ht.onnx.load(path, fixed={"name of the size": 8})')
                lacking |= below
                self.lacking.update(dict.fromkeys(sorted(below)))
        if lacking:
            return Lacking(frozenset(lacking | self.below([v for v in given if isinstance(v, Node)])))
        while found and found[-1] is None:
            found.pop()
        return found

    def below(self, nodes: Sequence[Node]) -> set[str]:
        """The names of the inputs that nodes depend on."""
        return {n.name for n in topological(nodes) if n.role is Role.PLACEHOLDER}

    def explain(self) -> None:
        names = ", ".join(map(repr, self.lacking))
        fix = f"give each a value: ht.onnx.load(path, fixed={{{next(iter(self.lacking))!r}: array}})"
        error = FixedInputsError(f"the values of the inputs {names} decide shapes, and must be known", fix=fix)
        error.inputs = tuple(self.lacking)
        raise error

    def plain(self, attribute: Any, scope: Names, is_dtype: bool = False) -> Any:
        """The value of an attribute; a graph becomes a function of its inputs."""
        value = self.onnx.helper.get_attribute_value(attribute)
        if isinstance(value, self.onnx.GraphProto):
            return lambda *given: self.inner(value, scope, given)
        if isinstance(value, self.onnx.TensorProto):
            return array_of(value, self.folder)
        if isinstance(value, bytes):
            return value.decode()
        if is_dtype:
            return dtype_of(value, f"the attribute {attribute.name!r}") if value else None
        if isinstance(value, int | float):
            return value
        if not isinstance(value, Sequence) and not hasattr(value, "__iter__"):
            raise DataError(f"its attribute {attribute.name!r} is a {type(value).__name__}", fix="export without it")
        return tuple(v.decode() if isinstance(v, bytes) else v for v in value)

    def inner(self, graph: Any, scope: Names, given: Sequence[Any]) -> list[Any]:
        """The outputs of a graph within, which reads what stands around it."""
        own = {t.name: constant(value=array_of(t, self.folder)) for t in graph.initializer}
        own |= dict(zip((i.name for i in graph.input), given))
        within = Names(scope.opsets, {**scope.values, **own}, scope.attributes)
        self.run(graph.node, within)
        return [self.value(within, o.name) for o in graph.output]

    # -- functions -----------------------------------------------------------------------------------------------------

    def called_once(self, function: Any, given: Sequence[Any], attributes: Mapping[str, Any]) -> list[Any]:
        """As `called`, for a function of the model, which must not call itself."""
        if (name := (function.domain, function.name)) in self.called_now:
            raise DataError("the function calls itself", fix="write the model again")
        self.called_now.add(name)
        try:
            return self.called(function, given, attributes)
        finally:
            self.called_now.remove(name)

    def called(self, function: Any, given: Sequence[Any], attributes: Mapping[str, Any]) -> list[Any]:
        """The outputs of a function, whose body is built for these inputs."""
        padded = [*given, *[None] * (len(function.input) - len(given))]
        if any(isinstance(value, Lacking) for value in padded):
            found = {name for value in padded if isinstance(value, Lacking) for name in value.inputs}
            return [Lacking(frozenset(found))] * len(function.output)
        opsets = {"": self.onnx.defs.onnx_opset_version(), **_opsets(function.opset_import)}
        scope = Names(opsets, dict(zip(function.input, padded)), attributes)
        self.check(function.node, scope)
        self.run(function.node, scope)
        return [scope.values.get(name) for name in function.output]

    def body(self, schema: Any, node: Any, given: Sequence[Any], written: Mapping[str, Any]) -> Any:
        """What ONNX defines an operator by, for inputs of these types."""
        function, own = self.onnx.FunctionProto(), self.onnx.NodeProto()
        if schema.has_function:
            function.ParseFromString(schema.get_function_with_opset_version(schema.function_opset_versions[-1]))
            return function
        own.CopyFrom(node)
        del own.attribute[:]
        own.attribute.extend(self.defaults(schema, written).values())
        types = [self.type(v) for v in given]
        version = schema.context_dependent_function_opset_versions[-1]
        made = schema.get_context_dependent_function_with_opset_version(version, own.SerializeToString(), types)
        function.ParseFromString(made)
        return function

    def defaults(self, schema: Any, written: Mapping[str, Any]) -> dict[str, Any]:
        """Attributes, those that are left out as ONNX says."""
        declared = {name: a.default_value for name, a in schema.attributes.items() if a.default_value.name}
        return {**declared, **written}

    def type(self, value: Any) -> bytes:
        if not isinstance(value, Node):
            return b""  # of none
        number = self.onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
        sizes = [None if isinstance(s, Dim) else s for s in value.shape]
        return bytes(self.onnx.helper.make_tensor_type_proto(number, sizes).SerializeToString())


def _alike(old: Any, now: Any) -> bool:
    """Whether an operator of an older opset is read rightly: what were attributes may have become inputs."""
    if now is None or now.deprecated:
        return False
    inputs = [i.name for i in now.inputs]
    shared = old.attributes.keys() & now.attributes.keys()
    same = all(old.attributes[k].default_value == now.attributes[k].default_value for k in shared)
    return same and [i.name for i in old.inputs] == inputs[: len(old.inputs)]


def _as_declared(schema: Any, given: Sequence[Any], position: int, made: Any) -> Any:
    """A result in the dtype that ONNX declares: of an input, or a fixed one."""
    if not isinstance(made, Node) or not schema.outputs:
        return made
    formal = schema.outputs[min(position, len(schema.outputs) - 1)]
    if not formal.is_homogeneous:  # of any dtypes
        return made
    type_ = formal.type_str
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}.get(type_, [type_])
    type_ = allowed[0] if len(allowed) == 1 else type_
    if type_.startswith("tensor("):
        number = package().TensorProto.DataType.Value(type_[len("tensor(") : -1].upper())
        return cast_to(made, dtype_of(number, "a result"))
    names = [formal.type_str for formal in schema.inputs]
    alike = (v for i, v in enumerate(given) if isinstance(v, Node) and names[min(i, len(names) - 1)] == type_)
    return cast_to(made, like.dtype) if (like := next(alike, None)) is not None else made


def _opsets(imports: Iterable[Any]) -> dict[str, int]:
    return {"" if o.domain in OURS else o.domain: o.version for o in imports}


def _shown(node: Any) -> str:
    domain = "" if node.domain in OURS else f"{node.domain}::"
    name = node.name or (f"that makes {node.output[0]}" if node.output else "")
    return f"{domain}{node.op_type} {name!r}"

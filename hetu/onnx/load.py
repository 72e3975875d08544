"""`ht.onnx.load`: a model of ONNX as a graph, node by node, each made by the meaning of its operator.

What decides shapes must be known when the graph is built: an operator says which of its inputs do, and those are
computed from constants, initial values and sizes, or are given by `fixed=`.
"""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..core.backend import fitting
from ..core.errors import DataError, DTypeError, HetuError, NodeUseError, UnknownNameError, did_you_mean, public
from ..core.graph import Graph, Node, replace, topological
from ..core.leaf import constant, placeholder, variable
from ..core.op import Role
from ..core.types import is_float
from . import standard
from .meaning import IGNORED, Meaning, known
from .standard import FixedInputsError, array_of, broken, narrow, package, read, shown, stored_dtype

MOST_NODES = 1 << 17  # that are built of one model, functions and loops unfolded
OPEN = 'give open sizes a number: ht.onnx.load(path, fixed={"name of the size": 8})'
LACKING = object()  # in place of a node that cannot be made, as the values of some inputs are not known
MALFORMED = (  # what functions of meaning raise of operators whose inputs or attributes are not what ONNX wants
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, StopIteration, TypeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True)
class Imported:
    """A model as a graph: what it is fed, what it gives, and its variables, each by the name that it had."""

    inputs: dict[str, Node]
    outputs: dict[str, Node]
    variables: dict[str, Node]


@public
def load(path: str | os.PathLike[str] | Any, fixed: Mapping[str, Any] | None = None) -> Imported:
    """The graph of a file of ONNX, or of an `onnx.ModelProto`, opset 13 or later.

    Its inputs are placeholders (those on which an output depends), its initial values of floats variables, which can
    be trained, saved and loaded; those without axes are trained only by a `minimize` that names them.
    `fixed` gives inputs a value once and for all, as those need that decide shapes, or a node of yours in their place,
    and open sizes that have a name a number. DataError for a file that is not whole, or has operators that are not
    read; all of them are named.

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


@dataclass
class Names:
    """Where names have values: the graph, or the body of a function."""

    opsets: dict[str, int]
    values: ChainMap[str, Any] = field(default_factory=ChainMap)  # of itself, then of what stands around it
    attributes: Mapping[str, Any] = field(default_factory=dict)  # those that a function was called with


class Reader:
    """One model on its way to a graph."""

    def __init__(self, model: Any, folder: Path | None, fixed: dict[str, Any]) -> None:
        self.onnx, self.model, self.folder, self.fixed = package(), model, folder, fixed
        self.functions = {(f.domain, f.name, f.overload): f for f in model.functions}
        self.lacking: dict[str, None] = {}
        self.known: dict[Node, Any] = {}
        self.follows: DataError | None = None  # what else cannot be known
        self.narrow: dict[Any, str] = {}  # what nodes keep in a wider dtype
        self.untrained: set[Node] = set()  # variables at places where operators read what no optimizer changes
        self.built, self.called_now = 0, set[tuple[str, str, str]]()

    def loaded(self) -> Imported:
        graph, scope = self.model.graph, Names(standard.opsets_of(self.model.opset_import))
        sizes = (d.dim_param for i in graph.input for d in i.type.tensor_type.shape.dim)
        names = {i.name for i in graph.input} | {*sizes}
        if strange := [name for name in self.fixed if name not in names]:
            said = f"the model has no input and no open size {strange[0]!r}, which is to be fixed"
            raise UnknownNameError(said, fix=did_you_mean(strange[0], names - {""}))
        if graph.sparse_initializer:
            raise DataError("the model keeps sparse tensors", fix="export it with dense ones")
        self.check(graph.node, scope)
        initial = {t.name: self.initial(t) for t in graph.initializer if t.name not in self.fixed}
        inputs = {i.name: self.input(i) for i in graph.input if i.name not in initial}
        scope.values.update({**initial, **inputs})
        self.run(graph.node, scope)
        if self.lacking:
            raise FixedInputsError(self.lacking)
        if self.follows is not None:
            raise self.follows
        outputs = tuple(self.value(scope, o.name) for o in graph.output)
        kept = {
            n: variable(name, n.attrs["init"], trainable=False) for name, n in initial.items() if n in self.untrained
        }
        outputs = replace(outputs, kept)
        found = {*Graph(outputs).nodes}
        return Imported(
            {name: n for name, n in inputs.items() if n in found and name not in self.fixed},
            dict(zip((o.name for o in graph.output), outputs)),
            {k: v for k, n in initial.items() if (v := kept.get(n, n)) in found and v.role is Role.VARIABLE},
        )

    # -- leaves ----------------------------------------------------------------------------------------------------

    def input(self, info: Any) -> Node:
        """A placeholder, or a constant if it is given."""
        if info.type.WhichOneof("value") != "tensor_type":
            kind = info.type.WhichOneof("value") or "nothing"
            raise DataError(f"the input {info.name!r} is a {kind}, wanted a tensor", fix="export tensors alone")
        type_ = info.type.tensor_type
        dtype = stored_dtype(type_.elem_type, f"the input {info.name!r}")
        if info.name in self.fixed:
            what, value = f"the fixed value of {info.name!r}", self.fixed[info.name]
            if isinstance(value, Node):
                if value.dtype == dtype and value.ndim == len(type_.shape.dim):
                    return value
                wanted = f"{dtype} of {len(type_.shape.dim)} axes"
                raise DTypeError(f"{what} is {value.type}, wanted {wanted}", fix="cast it")
            given = fitting(value, dtype, lambda said, fix: DTypeError(f"{what} {said}", fix=fix))
            return self.marked(constant(value=given.astype(dtype)), type_.elem_type)
        if not type_.HasField("shape"):
            raise DataError(f"the input {info.name!r} has any number of axes", fix="export it with a shape")
        written = [(d.HasField("dim_value") and d.dim_value >= 0, d) for d in type_.shape.dim]
        sizes = [d.dim_value if known else self.fixed.get(d.dim_param) for known, d in written]
        return self.marked(placeholder(info.name, tuple(sizes), dtype), type_.elem_type)

    def initial(self, tensor: Any) -> Node:
        """A variable, if it is of floats. Numbers without axes are not trained unless they are named: as such do
        exporters write what is fixed in a formula, an epsilon or a scale."""
        node = self.constant(tensor)
        if not is_float(node.dtype) or node in self.narrow:
            return node
        return variable(tensor.name, node.attrs["value"], trainable=node.ndim > 0)

    def constant(self, tensor: Any) -> Node:
        return self.marked(constant(value=array_of(tensor, self.folder)), tensor.data_type)

    def marked(self, node: Node, number: int) -> Node:
        """The node, of which it is remembered if it keeps numbers of fewer bits than ours have."""
        if name := narrow(number):
            self.narrow[node] = name
        return node

    def value(self, scope: Names, name: str) -> Any:
        if name not in scope.values:
            raise broken(f"nothing makes {name!r}")
        return scope.values[name]

    # -- operators ---------------------------------------------------------------------------------------------------

    def check(self, nodes: Iterable[Any], scope: Names) -> None:
        """DataError that names all operators which are not read, those of graphs within too."""
        found = ((node, self.definition(node, scope)) for node in standard.every(nodes) if not self.function(node))
        if wrong := dict.fromkeys(f"{shown(node)}{reason}" for node, reason in found if isinstance(reason, str)):
            raise DataError(f"{len(wrong)} operators of the model are not read: {'; '.join(wrong)}", fix=standard.NEWER)

    def function(self, node: Any) -> Any:
        """That of the model which a node calls."""
        return self.functions.get((node.domain, node.op_type, node.overload))

    def definition(self, node: Any, scope: Names) -> Any:
        domain = "" if node.domain in standard.STANDARD else node.domain
        return standard.definition(domain, node.op_type, scope.opsets.get(domain))

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
                error.fix = OPEN if isinstance(error, NodeUseError) else error.fix
                error.message = f"{shown(node)}: {error.message}"
                raise
            except MALFORMED as error:
                raise broken(f"{shown(node)} cannot be built: {error}") from error
            for name, value in zip(node.output, made):
                if name in scope.values.maps[0]:
                    raise broken(f"{shown(node)} makes {name!r} again")
                if name and value is not None:  # functions may lack what they are not asked for
                    scope.values[name] = value

    def made(self, node: Any, given: Sequence[Any], scope: Names) -> Sequence[Any]:
        """The outputs of one node."""
        attributes = {a.name: scope.attributes.get(a.ref_attr_name) if a.ref_attr_name else a for a in node.attribute}
        written = {name: a for name, a in attributes.items() if a is not None}
        if (function := self.function(node)) is not None:
            return self.called(function, given, {**{a.name: a for a in function.attribute_proto}, **written})
        found = self.definition(node, scope)
        declared, meaning = found.defaults | written, found.meaning
        given = self.with_inputs(given, found.inputs, declared)
        if meaning is None:
            return self.called(standard.body_of(found.body, node, given, declared), given, declared)
        if (arguments := self.arguments(node, meaning, given)) is None:
            return [LACKING] * len(node.output)
        options = {name: self.plain(a, scope) for name, a in declared.items() if name in meaning.attributes}
        if other := [name for name in written if name not in meaning.attributes | {*meaning.inputs} | IGNORED]:
            raise DataError(f"its attribute {other[0]!r} is not read", fix="export the model without it")
        if meaning.count:
            options[meaning.count] = len(node.output)
        meaning.signature.bind(*arguments, **options)  # whose TypeError names what is missing
        result = meaning.function(*arguments, **options)
        results = result if isinstance(result, tuple | list) else (result,)
        made = [found.as_declared(part, given, i) for i, part in enumerate(results)]
        for i, part in enumerate(made):
            if (like := found.like(given, i)) in self.narrow:
                self.narrow[part] = self.narrow[like]
            for attribute in written.values():
                self.marked(part, attribute.t.data_type)
        return made

    def with_inputs(self, given: Sequence[Any], names: Sequence[str], declared: Mapping[str, Any]) -> list[Any]:
        """Inputs, in whose places stand attributes of older opsets that are inputs now."""
        found = list(given)
        for place, name in enumerate(names):
            if name in declared and (place >= len(found) or found[place] is None):
                found += [None] * (place + 1 - len(found))
                found[place] = constant(value=np.array(self.plain(declared[name], Names({}))))
        return found

    def arguments(self, node: Any, meaning: Meaning, given: Sequence[Any]) -> list[Any] | None:
        """Inputs as the meaning wants them, or None where some lack; what they follow from is remembered."""
        if len(given) > len(meaning.inputs) and not meaning.any_number:
            said = f"has {len(given)} inputs, of which {len(meaning.inputs)} are read"
            raise DataError(said, fix="export without them")
        found = [*given]
        for position, value in enumerate(given):
            kind = meaning.kind(position) if isinstance(value, Node) else ""
            if kind == "Exact" and value in self.narrow:
                raise DTypeError(f"its result is of {self.narrow[value]}", fix="export it in 8 bits or more")
            if kind == "Untrained" and value.role is Role.VARIABLE:
                self.untrained.add(value)
            if kind == "KnownArray" and (made := known(value, self.known)) is not None:
                found[position] = made
            elif kind == "KnownArray":
                found[position] = LACKING
                below = sorted(n.name for n in topological([value]) if n.role is Role.PLACEHOLDER)
                self.lacking.update(dict.fromkeys(below))
                if not below and self.follows is None:
                    name = meaning.inputs[min(position, len(meaning.inputs) - 1)]
                    said = f"its input {name!r} follows from sizes that are open, but not by + - * // %"
                    self.follows = DataError(f"{shown(node)}: {said}", fix=OPEN)
        return None if any(value is LACKING for value in found) else found

    def plain(self, attribute: Any, scope: Names) -> Any:
        """The value of an attribute; a graph becomes a function of its inputs."""
        value = self.onnx.helper.get_attribute_value(attribute)
        if isinstance(value, self.onnx.GraphProto):
            return lambda *given: self.inner(value, scope, given)
        if isinstance(value, self.onnx.TensorProto):
            return array_of(value, self.folder)
        if isinstance(value, bytes):
            return value.decode()
        if isinstance(value, int | float):
            return value
        return tuple(v.decode() if isinstance(v, bytes) else v for v in value)

    def inner(self, graph: Any, scope: Names, given: Sequence[Any]) -> list[Any]:
        """The outputs of a graph within, which reads what stands around it."""
        own = {t.name: self.constant(t) for t in graph.initializer}
        own |= dict(zip((i.name for i in graph.input), given))
        within = Names(scope.opsets, scope.values.new_child(own), scope.attributes)
        self.run(graph.node, within)
        return [self.value(within, o.name) for o in graph.output]

    # -- functions -----------------------------------------------------------------------------------------------------

    def called(self, function: Any, given: Sequence[Any], attributes: Mapping[str, Any]) -> list[Any]:
        """The outputs of a function, which must not call itself; its body is built for these inputs."""
        padded = [*given, *[None] * (len(function.input) - len(given))]
        if any(value is LACKING for value in padded):
            return [LACKING] * len(function.output)
        if (name := (function.domain, function.name, function.overload)) in self.called_now:
            raise broken("the function calls itself")
        opsets = {"": self.onnx.defs.onnx_opset_version(), **standard.opsets_of(function.opset_import)}
        scope = Names(opsets, ChainMap(dict(zip(function.input, padded))), attributes)
        self.check(function.node, scope)
        self.called_now.add(name)
        try:
            self.run(function.node, scope)
        finally:
            self.called_now.remove(name)
        return [scope.values.get(name) for name in function.output]

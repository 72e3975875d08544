"""`ht.onnx.save`: a graph with the values of its variables as a file of ONNX, for its runtimes and for other libraries.

What is written is the graph of a sub-graph that does not train. It is taken apart until each operator has a row
(`rows.py`), then written node by node. Sizes that are open stay so, and what follows from them is computed in the file.
Variables are initial values, by their names; other arrays are constants. Left out: training steps, random numbers.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from ..core.backend import fitting
from ..core.errors import ArgumentError, DTypeError, GraphError, ShapeError, UnknownNameError, did_you_mean, public
from ..core.graph import Graph, Node, remade, rewrite, topological
from ..core.leaf import filling
from ..core.op import LEAVES, Role, as_node
from ..core.operators import cast_to
from ..core.passes import resolve_training, specialize
from ..core.simplify import simplify
from ..core.types import Atom, Dim, Shape, Size, compatible, has_dim, is_float, show_shape
from ..files import check_file, replace_atomically
from .rows import PARTS, ROWS
from .standard import LARGEST, package
from .traced import meaning

OPSET, IR = 18, 8  # read by everything since 2023
ROUNDS = 16  # in which operators are taken apart; what is left then is made of itself
Outputs = Mapping[str, Node] | Sequence[Node] | Node


@public
def save(
    path: str | os.PathLike[str],
    outputs: Outputs,
    state: Mapping[str, Any] | None = None,
    *,
    fixed: Mapping[str, int] | None = None,
) -> None:
    """Write `outputs`, by names or in order, as a file of ONNX (opset 18) whose inputs are the placeholders they need.

    `state` has the values of the variables, such as `executor.state`. Open sizes stay open, each called by its input
    and axis, as "x_0"; `fixed` gives some a number. A large model lies in two files: beside PATH is one with the
    numbers. GraphError names all operators that cannot be written, and why.

    >>> import tempfile
    >>> import hetu as ht
    >>> x, w = ht.placeholder("x", (None, 2)), ht.variable("w", np.ones((2, 1), "float32"))
    >>> ex = ht.Executor([x @ w])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/line.onnx", {"y": x @ w}, ex.state)
    ...     [*ht.onnx.load(f"{folder}/line.onnx").outputs]
    ['y']
    """
    named = _named(outputs)
    whole, _ = resolve_training(tuple(named.values()), {})
    Graph(whole).verify()
    whole = specialize(whole, _sizes(whole, fixed or {}))
    graph = apart(whole)
    values = {n.name: _value(n, state) for n in topological(graph) if n.role is Role.VARIABLE}
    writer = Writer(n for n in topological(whole) if n.role is Role.PLACEHOLDER)
    writer.write(graph, [*named])
    _to_file(Path(path), writer, values)


def _sizes(outputs: Sequence[Node], fixed: Mapping[str, int]) -> dict[Atom, int]:
    """The numbers of open sizes that are given one."""
    inputs = [n for n in topological(outputs) if n.role is Role.PLACEHOLDER]
    known = {_called(atom): atom for n in inputs for size in n.shape for atom in getattr(size, "atoms", ())}
    for name in fixed:
        if name not in known:
            raise UnknownNameError(f"there is no open size {name!r}", fix=did_you_mean(name, known))
    return {known[name]: size for name, size in fixed.items()}


def _called(atom: Atom) -> str:
    return f"{atom[0]}_{atom[1]}"


def _named(outputs: Outputs) -> dict[str, Node]:
    """Outputs by names: those given, else those of their operators."""
    names = dict(outputs) if isinstance(outputs, Mapping) else dict[str, Node]()
    listed: Iterable[Any] = [outputs] if isinstance(outputs, Node) else [] if names else outputs
    for node in listed:
        base = f"{node.name}_out" if isinstance(node, Node) and node.role in LEAVES else getattr(node, "name", "")
        names[next(n for k in count() if (n := f"{base}_{k}" if k else base) not in names)] = node
    for name, node in names.items():
        if not isinstance(node, Node) or not isinstance(name, str) or not name:
            raise ArgumentError(f"an output is {name!r}: {node!r:.60}", fix='pass nodes, by names: {"y": y}')
    if not names:
        raise ArgumentError("there are no outputs", fix='pass nodes, by names: {"y": y}')
    return names


def _value(node: Node, state: Mapping[str, Any] | None) -> np.ndarray:
    """What the file holds for a variable."""
    what = f"variable {node.name!r}"
    if state is None:
        raise ArgumentError(f"{what} needs a value", fix="pass an executor's: ht.onnx.save(path, outputs, ex.state)")
    if node.name not in state:
        raise UnknownNameError(f"the state has no {what}", fix=did_you_mean(node.name, state))
    value = fitting(state[node.name], node.dtype, lambda said, fix: DTypeError(f"{what} {said}", fix=fix))
    if value.shape != node.shape:
        said = f"{what} has shape {show_shape(node.shape)}, got {show_shape(value.shape)}"
        raise ShapeError(said, fix="pass the state of an executor of this graph")
    return np.asarray(value, node.dtype, order="C")


# -- taking apart ----------------------------------------------------------------------------------------------


def apart(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """The same of operators that all have rows; GraphError for those of which it cannot be made."""
    for _ in range(ROUNDS):
        outputs = simplify(outputs)
        if not (left := _without_row(outputs)):
            return tuple(outputs)
        failed: dict[Node, str] = {}
        outputs = _opened(outputs, {*left}, failed)
        if failed:
            break
    failed = failed or dict.fromkeys(left, "is made of itself")
    reasons = dict.fromkeys(f"{node.op.name} at {node.site}: {why}" for node, why in failed.items())
    fix = "give each a `decompose` rule, or a forward function of the array API's functions"
    raise GraphError(f"{len(reasons)} operators cannot be written as ONNX: {'; '.join(reasons)}", fix=fix)


def _without_row(outputs: Sequence[Node]) -> list[Node]:
    """The nodes that are not leaves, and that no row writes."""
    nodes, used = topological(outputs), dict[Node, set[int]]()
    for node in nodes:
        if node.role is Role.ITEM:
            used.setdefault(node.inputs[0], set()).add(node.attrs["index"])
    known = LEAVES | {Role.ITEM}
    return [
        node
        for node in nodes
        if node.role not in known and not ((row := ROWS.get(node.op)) and row.when(node, used.get(node, set())))
    ]


def _opened(outputs: Sequence[Node], left: Set[Node], failed: dict[Node, str]) -> tuple[Node, ...]:
    """Each node that is left made of others once; `failed` are those for which there is no way."""
    opened: dict[Node, tuple[Node, ...]] = {}

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node.role is Role.ITEM and (parts := opened.get(node.inputs[0])):
            index: int = node.attrs["index"]
            return parts[index]
        if node in left:
            try:
                opened[node] = _parts(remade(node, inputs))
                return opened[node][0]
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                failed[node] = getattr(error, "message", str(error))
        return None

    return rewrite(outputs, rule)


def _parts(node: Node) -> tuple[Node, ...]:
    """The outputs of a node, made of others."""
    types = node.type if isinstance(node.type, tuple) else (node.type,)
    if parts := PARTS.get(node.op):
        whole = is_float(types[0].dtype) and [
            cast_to(i, types[0].dtype) if i.dtype.kind in "iu" else i for i in node.inputs
        ]
        made = parts(*(whole or node.inputs), **node.attrs)
    elif not (node.op.decompose_rule and (made := node.op.decompose_rule(*node.inputs, **node.attrs)) is not None):
        made = meaning(node, node.inputs)
    found = [as_node(value) for value in (made if isinstance(made, tuple | list) else (made,))]
    fits = (n.ndim == t.ndim and all(map(compatible, n.shape, t.shape)) for n, t in zip(found, types))
    if len(found) != len(types) or not all(fits):
        raise TypeError(f"gives {', '.join(str(n.type) for n in found)} where {', '.join(map(str, types))} is declared")
    return tuple(cast_to(value, type_.dtype) for value, type_ in zip(found, types))


# -- writing ---------------------------------------------------------------------------------------------------


class Writer:
    """Nodes of ONNX, written one after the other: `writer("Add", a, b)` gives the name of a new value."""

    def __init__(self, placeholders: Iterable[Node]) -> None:
        self.onnx, self.nodes, self.layer = package(), list[Any](), ""
        self.placeholders = {n.name: n for n in placeholders}
        self.inputs, self.outputs = dict[str, Node](), list[Any]()
        self.taken, self.counts, self.constants = set[str](), dict[str, int](), dict[Any, str]()

    def __call__(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """The name of what an operator makes."""
        return self.several(1, kind, *inputs, **attributes)[0]

    def several(self, count: int, kind: str, *inputs: str, **attributes: Any) -> tuple[str, ...]:
        """The names of its outputs."""
        names = tuple(self.fresh(kind.lower()) for _ in range(count))
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, names, name=names[0], **attributes))
        return names

    def fresh(self, base: str) -> str:
        """A name that no value has."""
        base = f"{self.layer}/{base}" if self.layer else base
        name = next(name for k in count(self.counts.get(base, 0)) if (name := f"{base}_{k}") not in self.taken)
        self.counts[base] = int(name[len(base) + 1 :]) + 1
        self.taken.add(name)
        return name

    def constant(self, array: np.ndarray) -> str:
        array = np.asarray(array, order="C")
        key = (array.shape, array.dtype, array.tobytes())
        if key not in self.constants:
            value = self.onnx.numpy_helper.from_array(array)
            self.constants[key] = self("Constant", value=value)
        return self.constants[key]

    def filled(self, shape: Shape, value: np.ndarray) -> str:
        """An array of one value."""
        return self("Expand", self.constant(value), self.sizes(shape)) if shape else self.constant(value)

    def takes(self, kind: str, dtype: np.dtype) -> np.dtype:
        """The dtype itself, or a wider one where ONNX has no such operator of it."""
        schema, helper = self.onnx.defs.get_schema(kind, OPSET), self.onnx.helper
        name = helper.tensor_dtype_to_string(helper.np_dtype_to_tensor_dtype(dtype)).split(".")[-1].lower()
        if f"tensor({name})" in schema.inputs[0].types:
            return dtype
        return np.dtype("float32" if is_float(dtype) else "int64" if dtype.itemsize > 2 else "int32")

    def cast(self, name: str, given: np.dtype, wanted: np.dtype) -> str:
        if given == wanted:
            return name
        return self("Cast", name, to=self.onnx.helper.np_dtype_to_tensor_dtype(wanted))

    def ids(self, name: str, node: Node) -> str:
        """Indices, which ONNX takes in two dtypes."""
        return name if node.dtype.name in ("int32", "int64") else self.cast(name, node.dtype, np.dtype("int64"))

    # -- sizes, which may be open

    def sizes(self, values: Iterable[Size]) -> str:
        """A vector of sizes."""
        values = [*values]
        if not has_dim(tuple(values)):
            return self.constant(np.asarray(values, np.int64))
        parts = [self.length(v) for v in values]
        return parts[0] if len(parts) == 1 else self("Concat", *parts, axis=0)

    def number(self, value: Size) -> str:
        """A size without axes."""
        if not isinstance(value, Dim):
            return self.constant(np.asarray(value, np.int64))
        return self("Squeeze", self.length(value), self.constant(np.asarray([0], np.int64)))

    def length(self, size: Size) -> str:
        """A vector of one size, computed where it is open of the sizes of inputs."""
        if not isinstance(size, Dim):
            return self.constant(np.asarray([size], np.int64))
        made = "" if size.coef == 1 else self.length(size.coef)
        for atom in size.atoms:
            part = self.measured(*atom) if len(atom) == 2 else self.computed(*atom)
            made = self("Mul", made, part) if made else part
        return made or self.length(1)

    def measured(self, name: str, axis: int) -> str:
        """The size of an input, which it is then even if nothing else reads it."""
        if name not in self.placeholders:
            said = f"a size is that of axis {axis} of {name!r}, which is no input of the outputs"
            raise GraphError(said, fix=f"give {name!r} a fixed shape, or add an output that reads it")
        self.inputs[name] = self.placeholders[name]
        if (name, axis) not in self.constants:
            self.constants[name, axis] = self("Shape", name, start=axis, end=axis + 1)
        return self.constants[name, axis]

    def computed(self, operator: str, *sizes: Size) -> str:
        a, b = map(self.length, sizes)
        if operator == "//":  # that of ONNX goes towards 0
            return self("Div", self("Sub", a, self("Mod", a, b)), b)
        return self("Add", a, b) if operator == "+" else self("Where", self("Equal", a, self.length(1)), b, a)

    # -- the graph

    def write(self, outputs: Sequence[Node], names: Sequence[str]) -> None:
        made, order = dict[Node, Any](), topological(outputs)
        variables = [n.name for n in order if n.role is Role.VARIABLE]
        for name in (*self.placeholders, *variables, *names):
            if name in self.taken:
                said = f"two of its inputs, variables and outputs are called {name!r}"
                raise ArgumentError(said, fix='give one another name; outputs have those given: {"y": node}')
            self.taken.add(name)
        for node in order:
            self.layer = str(node.tags.get("layer", ""))
            made[node] = self.written(node, [made[i] for i in node.inputs])
        self.layer = ""
        for name, node in zip(names, outputs):
            self.nodes.append(self.onnx.helper.make_node("Identity", [made[node]], [name], name=name))
        self.outputs = [self.info(name, node) for name, node in zip(names, outputs)]

    def written(self, node: Node, given: Sequence[Any]) -> Any:
        """The names of the outputs of a node, whose inputs have been written."""
        if node.role is Role.ITEM:
            return given[0][node.attrs["index"]]
        if node.role is Role.PLACEHOLDER:
            self.inputs[node.name] = node
        if node.role is not Role.CONSTANT:
            return node.name if node.role in LEAVES else ROWS[node.op].write(self, node, *given)
        array = node.attrs["value"]
        one = array.size > 1 and filling(node) is not None
        return self.filled(array.shape, array.flat[0]) if one else self.constant(array)

    def info(self, name: str, node: Node) -> Any:
        """The type of an input or output; open sizes have names where they are those of inputs."""
        sizes = [
            d if not isinstance(d, Dim) else _called(d.atoms[0]) if d == Dim.of(*d.atoms[0][:2]) else None
            for d in node.shape
        ]
        helper = self.onnx.helper
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(node.dtype), sizes)

    def model(self, initial: Iterable[Any]) -> Any:
        helper = self.onnx.helper
        inputs = [self.info(name, node) for name, node in self.inputs.items()]
        graph = helper.make_graph(self.nodes, "hetu", inputs, self.outputs, [*initial])
        opset = helper.make_opsetid("", OPSET)
        return helper.make_model(graph, producer_name="hetu", opset_imports=[opset], ir_version=IR)


def _to_file(path: Path, writer: Writer, values: Mapping[str, np.ndarray]) -> None:
    """The model in one file, or with its numbers in another, named by them: an older pair stays whole."""
    check_file(path)
    helper, beside = writer.onnx.numpy_helper, ""
    if sum(v.nbytes for v in values.values()) + sum(n.ByteSize() for n in writer.nodes) < LARGEST // 2:
        model = writer.model(helper.from_array(v, name) for name, v in values.items())
    else:
        digest, content = 0, [v.reshape(-1).view(np.uint8) for v in values.values()]
        for part in content:
            digest = zlib.crc32(part.data, digest)
        beside = f"{path.name}.{digest:08x}.data"
        replace_atomically(path.with_name(beside), content)
        model = writer.model(_lying_beside(writer.onnx, beside, values))
    replace_atomically(path, [model.SerializeToString()])
    for old in path.parent.iterdir():
        if old.name != beside and re.fullmatch(rf"{re.escape(path.name)}\.[0-9a-f]{{8}}\.data", old.name):
            old.unlink()


def _lying_beside(onnx: Any, location: str, values: Mapping[str, np.ndarray]) -> Iterator[Any]:
    """Tensors whose numbers lie one behind the other in a file."""
    offset, kind_of = 0, onnx.helper.np_dtype_to_tensor_dtype
    for name, value in values.items():
        tensor = onnx.TensorProto(name=name, data_type=kind_of(value.dtype), dims=value.shape, raw_data=b"")
        onnx.external_data_helper.set_external_data(tensor, location, offset, value.nbytes)
        tensor.ClearField("raw_data")
        offset += value.nbytes
        yield tensor

"""A model as one file: its values as safetensors, and beside them, as JSON in the header, its graph.

The graph is a list of lines [operator, [places of its inputs], {attribute: value}], each with a place of its own, and
which place each output has. So the file is a checkpoint as well, which `ht.load_weights` and other libraries open, and
nothing in it is code: an operator that this process has not is an error. Left out: updates, so what is loaded predicts;
operators that talk to other ranks or to servers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextvars import Context
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..checkpoint import Checkpoint, whole, write_atomically
from ..core.errors import ArgumentError, CheckpointError, HetuError, UnknownNameError, public
from ..core.graph import OPS, Node
from ..core.leaf import constant, placeholder, random_state, variable
from ..core.memory import types_of
from ..core.op import LEAVES, Role
from ..core.state import FilePath
from ..core.subgraph import SubGraph
from ..core.types import Atom, Dim, show_shape
from ..ops.composition import at_place, require_known

MOST_LINES = 1 << 17
MOST_NUMBERS = 1 << 40  # of one value, open sizes left out
OF_A_VARIABLE = ("name", "trainable")  # what is written of it; the file has its sizes
AGAIN = "write it again: ht.save_model(path, outputs, executor.state)"
WORDS: dict[str, Callable[[], Any]] = {"...": lambda: ...} | {w: partial(float, w) for w in ("nan", "inf", "-inf")}


class ModelGraph(NamedTuple):
    """What a model is fed and what it gives, by name."""

    inputs: dict[str, Node]
    outputs: dict[str, Node]


@public
def save_model(path: FilePath, outputs: Mapping[str, Node], state: Mapping[str, np.ndarray]) -> None:
    """Write what the outputs need, as a graph and values, to one file, atomically: `ht.Predictor` opens it.

    `outputs` are nodes by the names that predictions will have; inputs have those of their placeholders. `state` has
    the values of variables, such as `executor.state`. Dropout drops nothing there, and statistics stand still.
    ArgumentError for operators that talk to other processes, and for values of which there is a part here, or nothing.

    >>> import hetu as ht, tempfile
    >>> x = ht.placeholder("x", (None, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(f"{folder}/double.hetu", {"y": 2 * x}, ht.Executor([2 * x]).state)
    ...     ht.Predictor(f"{folder}/double.hetu")(x=[[1.0, 2.0]])["y"].tolist()
    [[2.0, 4.0]]
    """
    if not outputs or not all(isinstance(n, Node) and not isinstance(n.type, tuple) for n in outputs.values()):
        raise ArgumentError(f"outputs are {outputs!r:.80}", fix='name the nodes: {"y": y}')
    sub = SubGraph("model", [*outputs.values()])
    place, lines = dict[Node, int](), list[Any]()
    leaves = sub.written.leaves("variable")
    tensors = {node.name: _value(node, state) for node in leaves if node is not random_state}
    for node in sub.written.nodes:
        if node.role is Role.HINT:
            place[node] = place[node.inputs[0]]
            continue
        require_known(node)
        if node.role is Role.COMMUNICATION:
            raise ArgumentError(f"{node!r} talks to other processes", fix="save the model as one process has it")
        keys = OF_A_VARIABLE if node.role is Role.VARIABLE else [*node.attrs]
        written = {key: _written(node, node.attrs[key], tensors) for key in keys}
        place[node] = len(lines)
        lines.append([node.op.name, [place[i] for i in node.inputs], written])
    told = {"lines": lines, "outputs": {name: place[n] for name, n in zip(outputs, sub.fetches)}}
    write_atomically(Path(path), tensors, {"model": json.dumps(told, allow_nan=False)})


def _value(node: Node, state: Mapping[str, np.ndarray]) -> np.ndarray:
    found = state.get(node.name)
    if found is None or found.shape != node.shape:
        here = "nothing of it" if found is None else show_shape(found.shape)
        said = f"{node.name!r} has shape {show_shape(node.shape)}, here lies {here}"
        raise ArgumentError(
            said, fix="pass the state of the executor that has it; of parts, load a checkpoint in one process"
        )
    return np.asarray(found)


def _written(node: Node, value: Any, tensors: dict[str, np.ndarray]) -> Any:
    """An attribute as JSON has it; arrays go beside it."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"is": str(value)}
    if isinstance(value, tuple):
        return [_written(node, each, tensors) for each in value]
    if value is ...:
        return {"is": "..."}
    if isinstance(value, Dim):
        atoms = tuple((atom[0], *atom[1:]) for atom in value.atoms)
        return {"size": [value.coef, _written(node, atoms, tensors)]}
    if isinstance(value, slice):
        return {"slice": _written(node, (value.start, value.stop, value.step), tensors)}
    if isinstance(value, np.ndarray):
        name = next(n for k in count(len(tensors)) if (n := f"constant {k}") not in tensors)  # variables have theirs
        tensors[name] = value
        return {"array": name}
    raise ArgumentError(
        f"{node!r} has an attribute {value!r:.60}, which no file holds", fix="make it of other operators"
    )


# -- reading ---------------------------------------------------------------------------------------------------------


def load_model(path: FilePath) -> ModelGraph:
    """The graph in a file; its variables read their values there. CheckpointError for a file that is not whole."""
    file = Checkpoint(path)
    text = None if file.file is None else file.file.metadata().get("model")
    if text is None:
        raise CheckpointError(f"{str(path)!r} holds values, and no graph", fix=AGAIN)
    try:
        return Context().run(_GraphReader(file).model, json.loads(text))  # in which no scope changes names
    except HetuError as error:
        raise CheckpointError(f"{str(path)!r} cannot be built: {error.message:.400}", fix=error.fix or AGAIN) from None
    except Exception as error:  # of whatever operator it names: what they check is not written for strangers
        raise CheckpointError(f"{str(path)!r} is no model: {error!r:.200}", fix=AGAIN) from None


class _GraphReader:
    """One file, from a sender that nobody trusts, on its way to a graph."""

    def __init__(self, file: Checkpoint) -> None:
        self.file, self.inputs = file, dict[str, Node]()

    def model(self, told: Any) -> ModelGraph:
        lines = told["lines"]
        if type(lines) is not list or len(lines) > MOST_LINES:
            raise ValueError(f"it has {len(lines)} lines, of which {MOST_LINES} are read")
        if strange := [repr(name) for name in dict.fromkeys(name for name, _, _ in lines) if name not in OPS]:
            said = f"this process does not have the operators {', '.join(strange)}"
            raise UnknownNameError(said, fix="have it import the module that defines them")
        values: list[Node] = []
        for name, places, attrs in lines:
            values.append(self.node(name, [at_place(values, k) for k in places], attrs))
        outputs = {name: at_place(values, k) for name, k in told["outputs"].items()}
        found = SubGraph("model", [*outputs.values()])  # which refuses two leaves of one name
        if not outputs or any(isinstance(node.type, tuple) for node in values if node in outputs.values()):
            raise ValueError("it has no output that is an array")
        return ModelGraph({name: node for name, node in self.inputs.items() if name in found.placeholders}, outputs)

    def node(self, name: Any, inputs: list[Node], written: dict[str, Any]) -> Node:
        op = OPS[name]
        attrs = {key: self.value(value) for key, value in written.items()}
        if op.role in LEAVES:
            return self.leaf(op.role, **attrs)
        if op.role is Role.COMMUNICATION or set(attrs) != set(op.defaults):
            raise ValueError(f"{name} with {sorted(attrs)}")
        if not op.variadic and len(inputs) != len(op.inputs):
            raise ValueError(f"{name} of {len(inputs)} inputs")
        made = op.make(tuple(inputs), attrs)
        if max(math.prod(s for s in t.shape if not isinstance(s, Dim)) for t in types_of(made)) > MOST_NUMBERS:
            raise ValueError(f"{name} gives {made!r}, too large for any machine")
        return made

    def leaf(self, role: Any, **attrs: Any) -> Node:
        if role is Role.CONSTANT:
            return constant(value=attrs["value"])
        name = attrs["name"]
        if role is Role.PLACEHOLDER:
            if any(isinstance(s, Dim) and s != Dim.of(name, axis) for axis, s in enumerate(attrs["shape"])):
                raise ValueError(f"the input {name!r} has the sizes {attrs['shape']}")
            sizes = tuple(None if isinstance(s, Dim) else s for s in attrs["shape"])
            return self.inputs.setdefault(name, placeholder(name, sizes, attrs["dtype"]))
        if name not in self.file.variables and name == random_state.name:
            return random_state
        entry = self.file.variables[name]
        return variable(name, self.read(name), tuple(entry["shape"]), entry["dtype"], trainable=attrs["trainable"])

    def read(self, name: str) -> Callable[..., np.ndarray]:
        """What reads a variable when an executor makes it."""
        return lambda shape, dtype, rng: self.file.read(name, whole(shape))

    def value(self, data: Any) -> Any:
        """What `_written` made this of."""
        if isinstance(data, list):
            return tuple(map(self.value, data))
        if not isinstance(data, dict):
            return data
        ((kind, inside),) = data.items()
        if kind == "is":
            return WORDS[inside]()
        if kind == "array":
            return self.file.read(inside, whole(self.file.variables[inside]["shape"]))
        parts = self.value(inside)
        if kind == "slice":
            return slice(*parts)
        if kind == "size":
            return Dim(_whole(parts[0]), tuple(map(_atom, parts[1])))
        raise ValueError(f"an attribute that is a {kind!r:.40}")


def _whole(number: Any) -> int:
    if type(number) is not int:
        raise ValueError(f"{number!r:.40} is no whole number")
    return number


def _atom(parts: tuple[Any, ...]) -> Atom:
    """A symbol of a size: an axis of an input, or what is computed of two sizes."""
    if len(parts) == 2 and isinstance(parts[0], str):
        return parts[0], _whole(parts[1])
    operator, *sizes = parts
    if operator not in ("+", "//", "bc") or len(sizes) != 2:
        raise ValueError(f"{parts!r:.60} is no size")
    return operator, *(size if isinstance(size, Dim) else _whole(size) for size in sizes)

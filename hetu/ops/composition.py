"""A function of arrays and scalars as a composition of operators: traced once, run on any arrays, sent as plain data.

Tracing calls a function of graph functions on stand-ins. What follows from the scalars alone is computed in float64,
and all else in the dtype of the arrays. Where every operator that an array reaches acts on each element by itself, the
composition does so too: it then means the same on a block, on some rows, or in one loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from ..core.errors import ArgumentError, HetuError, UnknownNameError
from ..core.graph import OPS, Node, topological
from ..core.op import Op, Role
from ..core.operators import cast_to
from ..core.types import Shape

WIDE = np.dtype("float64")  # of the stand-ins
LONGEST = 256  # operators of a composition that another process sent
Scalars = dict[tuple[Any, ...], Node]  # what compositions made of the same scalars, which they share


class Composition:
    """Operators between stand-ins, the first `arrays` of which are arrays of one type and the others scalars.

    `outputs` are nodes of the arrays' type. Two results may be one node; a result may be its own array, unchanged.

    >>> import hetu as ht
    >>> c = traced(lambda x, y, s: (s * x + y, ht.maximum(x, y)), 2, 1, (3,), {})
    >>> [a.tolist() for a in c.run(np, [np.ones(3), np.arange(3.0), 0.5])]
    [[0.5, 1.5, 2.5], [1.0, 1.0, 2.0]]
    """

    def __init__(self, inputs: Sequence[Node], arrays: int, outputs: Sequence[Node]) -> None:
        self.inputs, self.arrays, self.outputs = tuple(inputs), arrays, tuple(outputs)
        for k, node in enumerate(self.outputs):
            if not isinstance(node, Node) or node.type != self.inputs[0].type:
                raise ArgumentError(f"result {k} is {node!r}", fix=f"return a value of type {self.inputs[0].type}")
            if node in self.inputs and node is not self.inputs[k]:
                raise ArgumentError(f"result {k} is another input as it is", fix="return a value that is computed")

    @cached_property
    def nodes(self) -> list[Node]:
        """The operators, in an order in which they can run."""
        return [n for n in topological(self.outputs) if n not in self.inputs]

    @cached_property
    def full(self) -> set[Node]:
        """What depends on an array: the arrays, and all that has to be computed for every element."""
        found = set(self.inputs[: self.arrays])
        for node in self.nodes:
            if not found.isdisjoint(node.inputs):
                found.add(node)
        return found

    @cached_property
    def whole(self) -> str:
        """Why this needs whole arrays; nothing where it acts on each element by itself."""
        for node in self.nodes:
            if node in self.full and not acts_on_elements(node.op):
                return f"{node.op.name} at {node.site} is not an operator of single elements"
            if node not in self.full and node.ndim:
                return f"{node!r} is an array of numbers"
        return ""

    def scaled(self, node: Node) -> tuple[Node, Node] | None:
        """(scalar, array) where a node is the product of both."""
        if node.op is not OPS["multiply"] or any(i.dtype != WIDE for i in node.inputs):
            return None
        a, b = sorted(node.inputs, key=self.full.__contains__)
        return (a, b) if a not in self.full and b in self.full else None

    @cached_property
    def descent(self) -> Node | None:
        """The scalar s where this is `x - s y` of its two arrays x and y and nothing else."""
        (first, *more), arrays = self.outputs, self.inputs[: self.arrays]
        if more or len(arrays) != 2 or first.op is not OPS["subtract"] or first.inputs[0] is not arrays[0]:
            return None
        found = self.scaled(first.inputs[1])
        return found[0] if found is not None and found[1] is arrays[1] else None

    def run(self, xp: ModuleType, values: Sequence[Any]) -> list[Any]:
        """The results for arrays of any one dtype, and scalars, in plain array code."""
        dtype, known = values[0].dtype, dict(zip(self.inputs, values))
        for scalar in self.inputs[self.arrays :]:
            known[scalar] = xp.asarray(known[scalar], dtype=xp.float64)
        for node, narrow, last in self._order:
            arrays = [xp.asarray(known[i], dtype=dtype) if n else known[i] for i, n in zip(node.inputs, narrow)]
            known[node] = node.op.forward(xp, *arrays, **node.attrs)
            for value in last:
                del known[value]
        return [xp.astype(known[o], dtype, copy=False) for o in self.outputs]

    @cached_property
    def _order(self) -> list[tuple[Node, list[bool], set[Node]]]:
        """Each operator, which of its inputs are scalars that meet arrays, and what nobody reads afterward."""
        order, kept = [], {*self.outputs}
        for node in reversed(self.nodes):
            narrow = [node in self.full and i not in self.full and i.dtype == WIDE for i in node.inputs]
            order.append((node, narrow, {*node.inputs} - kept))
            kept |= {*node.inputs}
        return order[::-1]

    def on(self, inputs: Sequence[Node], shared: Scalars) -> tuple[Node, ...]:
        """The results as nodes, for arrays of any one dtype and scalars: `run` as a graph."""
        known, given, dtype = dict(zip(self.inputs, inputs)), tuple(inputs[self.arrays :]), inputs[0].dtype
        for n, narrow, _ in self._order:
            values = tuple(known[i] for i in n.inputs)
            if n in self.full:
                triples = zip(narrow, n.inputs, values)
                values = tuple(_once(shared, (i, given, dtype), narrowed, x, dtype) if s else x for s, i, x in triples)
                known[n] = n.op.make(values, n.attrs)
            else:
                known[n] = _once(shared, (n, given), n.op.make, values, n.attrs) if values else n
        return tuple(cast_to(known[o], dtype) for o in self.outputs)

    def interned(self) -> Composition:
        """The one of those that do the same to arrays of any shape, so that what is derived from it is derived once."""
        return _interned.setdefault(self._key(), self)

    def _key(self) -> tuple[Any, ...]:
        number = {node: k for k, node in enumerate((*self.inputs, *self.nodes))}
        lines = [
            (n.op, n.dtype, tuple(number[i] for i in n.inputs), *sorted(_plain(n.attrs).items())) for n in self.nodes
        ]
        return self.arrays, len(self.inputs), tuple(lines), tuple(number[o] for o in self.outputs)

    # -- as plain data ---------------------------------------------------------------------------------------------

    def data(self) -> dict[str, Any]:
        """What JSON can hold, of a composition that acts on elements: operators by name, values by number."""
        for node in self.nodes:
            require_known(node)
        number = {node: k for k, node in enumerate((*self.inputs, *self.nodes))}
        lines = [[n.op.name, [number[i] for i in n.inputs], _plain(n.attrs)] for n in self.nodes]
        return {"arrays": self.arrays, "scalars": len(self.inputs) - self.arrays, "lines": lines,
                "outputs": [number[o] for o in self.outputs]}  # fmt: skip


_interned: WeakValueDictionary[tuple[Any, ...], Composition] = WeakValueDictionary()


def _once(made: Scalars, key: tuple[Any, ...], make: Callable[..., Node], *args: Any) -> Node:
    if key not in made:
        made[key] = make(*args)
    return made[key]


def narrowed(x: Node, dtype: np.dtype) -> Node:
    """A scalar in another dtype; a constant is one then too."""
    value = x.attrs["value"].astype(dtype) if x.role is Role.CONSTANT else None
    return cast_to(x, dtype) if value is None else OPS["constant"](value=value)


def traced(
    function: Callable[..., Any], arrays: int, scalars: int, shape: Shape, attrs: Mapping[str, Any]
) -> Composition:
    """What `function` makes of stand-ins: so many arrays of a shape, so many scalars, and the attributes by name."""
    inputs = _stand_ins(arrays, scalars, shape)
    made = function(*inputs, **attrs)
    return Composition(inputs, arrays, made if isinstance(made, tuple) else (made,))


def acts_on_elements(op: Op[..., Any]) -> bool:
    """Whether every element of the result follows from the elements at its place, as the sharding rule says."""
    return op.role is Role.COMPUTE and isinstance(op.dims, str) and set(re.split(",|->", op.dims)) == {"..."}


def parsed(data: Any) -> Composition:
    """The composition that `data()` described, from a sender that nobody trusts.

    ArgumentError unless it is short and made of operators of single elements; UnknownNameError for an operator that
    this process does not have.
    """
    try:
        arrays, scalars, lines = data["arrays"], data["scalars"], data["lines"]
        if type(arrays) is not int or type(scalars) is not int or not 0 < arrays + scalars + len(lines) <= LONGEST:
            raise ValueError("too many values")
        values = _stand_ins(arrays, scalars, (1,))
        inputs = tuple(values)
        for name, places, attrs in lines:
            values.append(_line(name, [at_place(values, k) for k in places], attrs))
        found = Composition(inputs, arrays, [at_place(values, k) for k in data["outputs"]])
    except HetuError:
        raise
    except Exception as error:  # of whatever operator it names: what they check is not written for strangers
        raise ArgumentError(f"a composition that cannot be read: {error!r:.200}") from None
    if found.whole:
        raise ArgumentError(found.whole)
    return found.interned()


def _stand_ins(arrays: int, scalars: int, shape: Shape) -> list[Node]:
    make, shapes = OPS["placeholder"].make, [shape] * arrays + [()] * scalars
    return [make((), {"name": f"x{k}", "shape": s, "dtype": WIDE.name}) for k, s in enumerate(shapes)]


def _plain(attrs: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.item() if isinstance(v, np.ndarray) else v for k, v in attrs.items()}


# What is written of an operator, and read again from a sender that nobody trusts; `serving/model_file.py` does so too.


def require_known(node: Node) -> None:
    """ArgumentError unless its operator is found by its name."""
    if OPS.get(node.op.name) is not node.op:
        said = f"{node.op.name} at {node.site} is another operator than that known by this name"
        raise ArgumentError(said, fix="give it a name of its own")


def operator_of(name: Any) -> Op[..., Any]:
    """The operator of a name; UnknownNameError where this process has none."""
    if not isinstance(name, str) or name not in OPS:
        fix = "have this process import the module that defines it"
        raise UnknownNameError(f"there is no operator {name!r:.40} here", fix=fix)
    return OPS[name]


def at_place(values: Sequence[Node], place: Any) -> Node:
    """The value of a line; ValueError unless it stands before that which reads it."""
    if type(place) is not int or not 0 <= place < len(values):
        raise ValueError(f"no value {place!r:.40} before it is used")
    return values[place]


def _line(name: Any, inputs: list[Node], attrs: dict[str, Any]) -> Node:
    """One operator of single elements, or a number, with every attribute it needs and no other."""
    op = operator_of(name)
    if any(not isinstance(v, bool | int | float | str | None) for v in attrs.values()):
        raise ValueError(f"attributes of {name} that are no numbers")
    if op.role is Role.CONSTANT and not inputs:
        return op.make((), {"value": np.asarray(attrs["value"], None if isinstance(attrs["value"], bool) else WIDE)})
    if not acts_on_elements(op) or len(inputs) != len(op.inputs) or set(attrs) != set(op.defaults):
        raise ValueError(f"{name} of {len(inputs)} inputs with {sorted(attrs)}")
    return op.make(tuple(inputs), attrs)

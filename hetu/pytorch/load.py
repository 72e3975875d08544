"""`ht.from_torch`: what PyTorch exports of a module (`exported.py`), each function made by its meaning (`meanings.py`).

What has no meaning PyTorch takes apart into other functions; what cannot be taken apart either is named at once, with
its place in the module. What a module does otherwise in evaluation is made as well, and chosen where a graph trains.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from ..core.backend import array_from
from ..core.errors import ArgumentError, DataError, HetuError, MissingDependencyError, public
from ..core.graph import Graph, Node
from ..core.leaf import constant, placeholder, variable
from ..core.operators import cast_to, if_training, with_updates
from ..core.types import Dim, as_dtype, compatible
from ..onnx.load import MALFORMED, Imported
from .exported import TorchRun, alike, decomposed, decompositions, exported, functions, line_of
from .meanings import Lacks, Refused, called, meaning_of


@public
def from_torch(module: Any, /, *inputs: Any, **named: Any) -> Imported:
    """The graph of a `torch.nn.Module`, whose parameters are variables of the same names, shapes and first values.

    `inputs` are what its `forward` takes, in order, and `named` by name: a shape with None for sizes that stay open, of
    float32; an example tensor, whose first axis stays open; a node; tuples and dicts of these; or what is the same in
    every step.
    Parameters of which it wants no gradient, and buffers, are not trained; tied parameters are one variable. Whether
    dropout drops, a batch norm has the statistics of its batch, and `self.training` holds in `forward`, is decided as
    ever: by whether the sub-graph trains. Open sizes are at least 2 where a size of 1 would mean something else.
    DataError that names all parts which have no counterpart; ArgumentError for inputs that `forward` does not take.

    >>> import torch
    >>> import hetu as ht
    >>> loaded = ht.from_torch(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU()), (None, 4))
    >>> list(loaded.variables), loaded.outputs["output"].shape[1:]
    (['0.weight', '0.bias'], (2,))
    """
    torch = _package()
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"got a {type(module).__name__}", fix="pass a torch.nn.Module, and its inputs")
    given = _given(module, inputs, named)
    if hooked := [name for name, each in module.named_parameters() if each._backward_hooks]:
        said = f"a hook changes the gradient of {hooked[0]!r}, by code that is not read"
        raise DataError(said, fix="change the gradient of a parameter where it is trained")
    variables: dict[int, tuple[str, Node]] = {}
    trains, rests = (TorchRun(torch, module, given, training) for training in (True, False))
    trained, resting = exported(trains), exported(rests)
    outputs = _made(trains, trained, variables)
    if not alike(trained, resting):
        others = _made(rests, resting, variables)
        outputs = {n: _either(n, outputs.get(n), others.get(n)) for n in {**others, **outputs}}
    found = {*Graph(tuple(outputs.values())).nodes}
    return Imported(
        by_name("", dict(given.arguments)), outputs, {name: node for name, node in variables.values() if node in found}
    )


def _either(name: str, trained: Node | None, resting: Node | None) -> Node:
    """What it gives in training, and otherwise."""
    if trained is None or resting is None:
        return resting if trained is None else trained  # type: ignore[return-value]
    if trained.type != resting.type:
        said = f"{name!r} is {trained.type} in training, {resting.type} otherwise"
        raise DataError(said, fix="return a dictionary, in which they have names of their own")
    return if_training(trained, resting)


def _package() -> Any:
    try:
        importlib.import_module("torch.export")
        return importlib.import_module("torch")
    except ImportError:
        raise MissingDependencyError("from_torch needs PyTorch", fix="pip install torch") from None


# -- what is fed ---------------------------------------------------------------------------------------------------


def _given(module: Any, given: tuple[Any, ...], keywords: Mapping[str, Any]) -> inspect.BoundArguments:
    """What `forward` takes: nodes, what holds some, and what is the same in every step."""
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(*given, **keywords)
    except TypeError as error:
        known = ", ".join(map(str, signature.parameters.values()))
        said = f"forward of {type(module).__name__} takes {known}: {error}"
        raise ArgumentError(said, fix="pass a shape, an example or a node for each that has no default") from None
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:  # which PyTorch does not export
            said = f"forward of {type(module).__name__} has no {', '.join(map(repr, value))}, but **{name}"
            raise ArgumentError(said, fix="write a forward that has a parameter for each")
        bound.arguments[name] = (_tuple if kind is inspect.Parameter.VAR_POSITIONAL else _input)(name, value)
    return bound


def _tuple(name: str, values: Any) -> tuple[Any, ...]:
    return tuple(_input(f"{name}_{k}", each) for k, each in enumerate(values))


def _input(name: str, given: Any) -> Any:
    if given is None or isinstance(given, Node | bool | int | float | str):
        return given
    if isinstance(given, Mapping):
        return {key: _input(str(key), each) for key, each in given.items()}
    if isinstance(given, list | tuple):
        is_shape = all(isinstance(size, int | Dim | None) for size in given)
        return placeholder(name, tuple(given)) if is_shape else _tuple(name, given)
    example = _array(given)
    return placeholder(name, (None, *example.shape[1:])[: example.ndim], example.dtype)


def _array(given: Any) -> Any:
    """The numbers of a tensor; NumPy is given the bits of those of which it does not know the dtype."""
    if (tensor := getattr(given, "detach", lambda: given)()) is not given:
        tensor = tensor.cpu()
    if str(getattr(given, "dtype", "")) != "torch.bfloat16":
        return array_from(tensor)
    return array_from(tensor.view(importlib.import_module("torch").uint16)).view(as_dtype("bfloat16"))


def named(name: str, value: Any) -> Iterator[tuple[str, Node]]:
    """The nodes of a value, with a name for each that tells where in it they stand."""
    if isinstance(value, Node):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from named(str(key), each)
    elif isinstance(value, list | tuple):
        for k, each in enumerate(value):
            yield from named(f"{name}_{k}", each)


def by_name(name: str, value: Any) -> dict[str, Node]:
    """The nodes of a value by name."""
    found = [*named(name, value)]
    if twice := {each for each, _ in found if [n for n, _ in found].count(each) > 1}:
        said = f"several nodes of forward are called {', '.join(sorted(twice))}"
        raise DataError(said, fix="name the keys of dictionaries in others differently")
    return dict(found)


# -- what it means -------------------------------------------------------------------------------------------------

MISSING = object()  # in place of what could not be made


class _Above(Exception):
    """Something that it needs is missing."""


def _made(asked: TorchRun, program: Any, variables: dict[int, tuple[str, Node]]) -> dict[str, Node]:
    """The outputs of a program by name; functions are taken apart until what is left has a meaning."""
    known, schemas = decompositions(asked.torch), functions(program)
    found = {each for each, schema in schemas.items() if not schema or schema.is_mutable or meaning_of(schema) is None}
    taken = {each: known[each] for each in found if each in known and not schemas[each].is_mutable}
    apart = None if found else program
    while True:
        apart = decomposed(program, taken) if apart is None else apart
        translation = Translation(asked, apart, variables)
        outputs = translation.outputs()
        found = {*translation.lacking.values(), *translation.unmeant}
        more = {target: known[target] for target in found if target in known}
        if more.keys() <= taken.keys() and not (found and apart is program):
            translation.complain()
            return outputs
        taken |= more
        apart = None


class Translation:
    """A program of PyTorch on its way to a graph."""

    def __init__(self, asked: TorchRun, program: Any, variables: dict[int, tuple[str, Node]]) -> None:
        self.asked, self.torch, self.program, self.variables = asked, asked.torch, program, variables
        self.inside = str(Path(self.torch.__file__).parent), str(Path(__file__).parent)
        self.given = iter(asked.leaves())
        self.values: dict[Any, Any] = {}
        self.lacking: dict[str, Any] = {}  # what is said, and the function, if it may be taken apart
        self.unmeant: set[Any] = set()
        self.wrong: list[HetuError] = []

    def outputs(self) -> dict[str, Node]:
        """The outputs by name, all of which there are if nothing lacks."""
        signature, kinds = self.program.graph_signature, self.torch.export.graph_signature
        *nodes, last = self.program.graph.nodes
        told = {spec.arg.name: spec for spec in signature.input_specs}
        results = [*zip(signature.output_specs, last.args[0])]
        written = {node: s.target for s, node in results if s.kind is kinds.OutputKind.BUFFER_MUTATION}
        if others := [s.target for s, _ in results if s.kind is kinds.OutputKind.PARAMETER_MUTATION]:
            raise DataError(f"forward writes into the parameter {others[0]!r}", fix="make it a buffer")
        user = [node for spec, node in results if spec.kind is kinds.OutputKind.USER_OUTPUT]
        if not self.asked.training:
            self.forgotten({*written.values()}, told, user)
            written = {}
        for node in nodes:
            if node.op == "placeholder":
                spec = told[node.name]
                self.tried(node, partial(self.leaf, spec, spec.target in written.values()))
            elif [u for u in node.users if u is not last] or node in written or node in user:
                self.tried(node, partial(self.made, node))
        found = [self.values[node] if isinstance(node, self.torch.fx.Node) else node for node in user]
        tree = self.torch.utils._pytree.tree_unflatten(found, self.program.call_spec.out_spec)
        news = {self.variable(target): self.values[node] for node, target in written.items()}
        if not news or MISSING in news.values():
            return by_name("output", tree)
        return {name: with_updates(node, news) for name, node in by_name("output", tree).items()}

    def complain(self) -> None:
        """DataError that names all that lacks."""
        if self.lacking:
            said = f"steps of the module have no counterpart ({len(self.lacking)}): {'; '.join(self.lacking)}"
            raise DataError(said, fix="write them by functions that have one, or export the module: ht.onnx.load")
        if self.wrong:
            raise self.wrong[0]

    def forgotten(self, written: Collection[str], told: Mapping[str, Any], user: Any) -> None:
        """DataError where evaluation gives what follows from buffers that it writes, which stay there."""
        behind = set[Any]()
        for node in self.program.graph.nodes:
            if getattr(told.get(node.name), "target", None) in written or not behind.isdisjoint(node.all_input_nodes):
                behind.add(node)
        if not behind.isdisjoint(user):
            said = (
                f"in evaluation too, forward gives what follows from buffers into which it writes: {', '.join(written)}"
            )
            raise DataError(
                said, fix="write into them if self.training, or take them as inputs and return the new ones"
            )

    def tried(self, node: Any, make: Callable[[], Any]) -> None:
        """Keep what `make` gives; MISSING, and the reason, where it cannot."""
        self.values[node] = MISSING
        try:
            self.values[node] = make()
        except _Above:
            if (schema := getattr(node.target, "_schema", None)) and meaning_of(schema) is None:
                self.unmeant.add(node.target)  # so that all such are taken apart at once
        except Lacks as error:
            self.lacking[f"{self.shown(node)}{f': {error}' if str(error) else ''}"] = (
                None if isinstance(error, Refused) else node.target
            )
        except HetuError as error:
            error.message = f"{self.shown(node)}: {error.message}"
            self.wrong.append(error)
        except (*MALFORMED, AssertionError) as error:
            self.lacking[f"{self.shown(node)}: {line_of(error)}"] = node.target

    def shown(self, node: Any) -> str:
        """What a step is called, the module that it stands in, and the line of it."""
        stack = [*(node.meta.get("nn_module_stack") or {}).values()]
        path, cls = stack[-1] if stack else ("", type(self.asked.module))
        cls = (cls if isinstance(cls, str) else cls.__name__).rpartition(".")[2]
        name = getattr(node.meta.get("original_aten") or node.target, "__name__", node.name).partition(".")[0]
        frames = re.findall(r'File "(.*)", line (\d+)', node.stack_trace or "")
        own = [(Path(file).name, line) for file, line in frames if not file.startswith(self.inside)]
        return f"{name} in {cls}{f' {path!r}' if path else ''}{' ({}:{})'.format(*own[-1]) if own else ''}"

    # -- leaves

    def leaf(self, spec: Any, changes: bool) -> Any:
        """An input, a variable, or the constant that a tensor is which is not of floats, or has no name."""
        kinds = self.torch.export.graph_signature.InputKind
        if spec.kind is kinds.USER_INPUT:
            return next(self.given)
        if spec.kind is kinds.CONSTANT_TENSOR:
            return constant(value=_array(self.program.constants[spec.target]))
        tensor = attrgetter(spec.target)(self.asked.module)
        if changes or tensor.is_floating_point() or id(tensor) in self.variables:
            return self.variable(spec.target)
        return constant(value=_array(tensor))

    def variable(self, path: str) -> Node:
        tensor = attrgetter(path)(self.asked.module)
        if id(tensor) not in self.variables:
            made = variable(path, _array(tensor), trainable=tensor.requires_grad)
            self.variables[id(tensor)] = path, made
        return self.variables[id(tensor)][1]

    # -- functions

    def value(self, traced: Any) -> Any:
        """An argument: what stands in it for results are these, and dtypes their names."""
        if isinstance(traced, self.torch.fx.Node):
            if self.values[traced] is MISSING:
                raise _Above
            return self.values[traced]
        if isinstance(traced, list | tuple):
            return tuple(map(self.value, traced))
        return str(traced).removeprefix("torch.") if isinstance(traced, self.torch.dtype) else traced

    def made(self, node: Any) -> Any:
        """The result of one function, in the dtypes that PyTorch gives it."""
        args, options = self.value(tuple(node.args)), {name: self.value(v) for name, v in node.kwargs.items()}
        told, schema = node.meta.get("val"), getattr(node.target, "_schema", None)
        if isinstance(node.target, str):  # what a function is told to do under a condition, or again
            return None
        if isinstance(node.target, self.torch._ops.HigherOrderOperator):
            raise Lacks
        if schema is None:  # of sizes, or an item
            result = node.target(*args, **options)
            return result() if callable(result) else result  # what is made if it is asked for
        named_args = {**dict(zip((a.name for a in schema.arguments), args)), **options}
        if not self.asked.training and (named_args.get("train") or named_args.get("training")):
            raise Lacks("it trains in evaluation as well")
        result = called(schema, named_args)
        if isinstance(told, list | tuple):
            return tuple(self.as_told(*pair) for pair in zip(result, told, strict=True))
        return self.as_told(result, told)

    def as_told(self, result: Any, told: Any) -> Any:
        """A result in its dtype; its sizes are known to PyTorch as well."""
        if not isinstance(result, Node) or not isinstance(told, self.torch.Tensor):
            return result
        sizes = [int(s) if isinstance(s, int) else None for s in told.shape]
        if len(sizes) != result.ndim or not all(s is None or compatible(s, own) for s, own in zip(sizes, result.shape)):
            raise Lacks(f"gives {result.type} where PyTorch has the shape {tuple(told.shape)}")
        return cast_to(result, as_dtype(str(told.dtype).removeprefix("torch.")))

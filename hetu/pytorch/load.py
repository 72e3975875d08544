"""`ht.from_torch`: what PyTorch traces of a module, function by function, each made by its meaning.

All that has no meaning here is collected first, and named at once with its place in the module.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

from ..core.backend import array_from
from ..core.errors import ArgumentError, DataError, HetuError, MissingDependencyError, public
from ..core.graph import Graph, Node
from ..core.leaf import constant, placeholder, variable
from ..core.types import is_float
from ..onnx.load import MALFORMED, Imported
from .functions import FUNCTIONS, IN_PLACE, VIEWS, Lacks
from .layers import FORMS

IGNORED = set("_stacklevel copy device inplace layout memory_format non_blocking pin_memory requires_grad".split())
PLAIN = ("_operator", "builtins", "math")  # modules whose functions also compute sizes
COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
MISSING = object()  # stands for what could not be made


@public
def from_torch(module: Any, *inputs: Any) -> Imported:
    """The graph of a `torch.nn.Module`, whose parameters are variables of the same names, shapes and first values.

    `inputs` are what its `forward` takes, in order: a shape with None for sizes that stay open, of float32; an example
    tensor, whose first axis stays open; or a node. Parameters of which it wants no gradient, and buffers, are not
    trained; tied parameters are one variable. Whether dropout drops, and a batch norm has the statistics of its batch,
    is decided as ever: by whether the sub-graph trains. What is done in place makes a new value. Nothing is
    asserted of sizes.
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
    fed, fixed = _asked(module, inputs)
    own = {*vars(module)}
    try:
        return Translation(torch, module, fed, *_traced(torch, module, fixed)).built()
    finally:
        for name in {*vars(module)} - own:  # constants that tracing leaves
            delattr(module, name)


def _package() -> Any:
    try:
        importlib.import_module("torch.fx")
        return importlib.import_module("torch")
    except ImportError:
        raise MissingDependencyError("from_torch needs PyTorch", fix="pip install torch") from None


def _asked(module: Any, given: tuple[Any, ...]) -> tuple[dict[str, Node], dict[str, Any]]:
    """What `forward` takes, by name: what is fed, and what is the same in every step."""
    known = [*inspect.signature(module.forward).parameters.values()]
    if len(given) > len(known) or any(p.default is p.empty for p in known[len(given) :]):
        said = f"forward of {type(module).__name__} takes {', '.join(map(str, known))}; got {len(given)} inputs"
        raise ArgumentError(said, fix="pass a shape, an example or a node for each that has no default")
    asked = {p.name: value for p, value in zip(known, given)} | {p.name: p.default for p in known[len(given) :]}
    fixed = {name: value for name, value in asked.items() if isinstance(value, bool | int | float | str | None)}
    return {name: _input(name, value) for name, value in asked.items() if name not in fixed}, fixed


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().partition("\n")[0]


def _tracer(torch: Any, fixed: Mapping[str, Any], failed: dict[str, str]) -> Any:
    """What traces a module down to its functions; `failed` is told why not, by the paths of modules in it."""

    class Tracer(torch.fx.Tracer):  # type: ignore[misc]
        record_stack_traces = proxy_buffer_attributes = True

        def is_leaf_module(self, inner: Any, path: str) -> bool:
            return False

        def to_bool(self, asked: Any) -> bool:
            """What `forward` asserts of a comparison is not looked at."""
            frame, compares = sys._getframe(2), asked.node.target in COMPARISONS
            ahead = (each for each in dis.get_instructions(frame.f_code) if each.offset > frame.f_lasti)
            if compares and any("ASSERTION" in f"{i.opname}{i.argrepr}".upper() for i in islice(ahead, 3)):
                self.graph.erase_node(asked.node)
                return True
            return bool(super().to_bool(asked))

        def form(self, inner: Any) -> Any:
            owner = next(cls for cls in type(inner).__mro__ if "forward" in vars(cls))
            form = FORMS.get(owner.__name__) if owner.__module__.startswith("torch.") else None
            return form and partial(form, partial(self.create_proxy, "call_function"), inner)

        def create_args_for_root(self, root_fn: Any, *given: Any) -> Any:
            function, args = super().create_args_for_root(root_fn, *given)
            for node in [*self.graph.nodes]:
                if node.target in fixed:
                    self.graph.erase_node(node)
            args = [fixed.get(a.node.target, a) if isinstance(a, torch.fx.Proxy) else a for a in args]
            form = self.form(self.root)
            return (lambda root, *args: form(*args)) if form else function, args

        def call_module(self, inner: Any, forward: Any, args: Any, kwargs: Any) -> Any:
            known, depth = len(self.graph.nodes), len(self.module_stack)
            try:
                return super().call_module(inner, self.form(inner) or forward, args, kwargs)
            except Exception as error:  # it asks for values: it is one part that has no counterpart
                for node in [*self.graph.nodes][: known - 1 : -1]:
                    self.graph.erase_node(node)
                while len(self.module_stack) > depth:
                    self.module_stack.popitem()
                failed[path := self.path_of_module(inner)] = _line(error)
                return self.create_proxy("call_module", path, (), {})

    return Tracer()


def _traced(torch: Any, module: Any, fixed: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """What it does as a graph of functions, as it trains, and why modules in it could not be traced, by their paths."""
    failed, trained = dict[str, str](), [(each, each.training) for each in module.modules()]
    try:
        for each, _ in trained:
            each.training = True
        return _tracer(torch, fixed, failed).trace(module), failed
    except Exception as error:
        said = f"forward of {type(module).__name__} cannot be traced: {_line(error)}"
        raise DataError(said, fix="decide by sizes and attributes in it, not by values of tensors") from error
    finally:
        for each, training in trained:
            each.training = training


class Translation:
    """One traced module on its way to a graph."""

    def __init__(self, torch: Any, module: Any, fed: dict[str, Node], traced: Any, failed: Mapping[str, str]) -> None:
        self.torch, self.module, self.fed, self.traced, self.failed = torch, module, fed, traced, failed
        self.inside = str(Path(torch.__file__).parent), str(Path(__file__).parent)
        self.values: dict[Any, Any] = {}
        self.variables: dict[str, Node] = {}
        self.lacking: dict[str, None] = {}
        self.wrong: list[HetuError] = []

    def built(self) -> Imported:
        outputs = dict[str, Node]()
        for node in self.traced.nodes:
            if node.op == "get_attr":
                self.values[node] = self.tried(node, self.leaf, node.target)
            elif node.op == "output":
                outputs = dict(self.named("output", self.tried(node, self.value, node.args[0])))
            else:
                self.values[node] = (
                    self.fed[node.target] if node.op == "placeholder" else self.tried(node, self.made, node)
                )
        if self.lacking:
            said = f"steps of the module have no counterpart ({len(self.lacking)}): {'; '.join(self.lacking)}"
            raise DataError(said, fix="write them by functions that have one, or export the module: ht.onnx.load")
        if self.wrong:
            raise self.wrong[0]
        found = {*Graph(tuple(outputs.values())).nodes}
        return Imported(self.fed, outputs, {name: node for name, node in self.variables.items() if node in found})

    def tried(self, node: Any, make: Callable[[Any], Any], given: Any) -> Any:
        """What `make` gives; MISSING, and the reason is kept, where it cannot."""
        try:
            return make(given)
        except _Above:
            return MISSING
        except Lacks as error:
            self.lacking[f"{self.shown(node)}{_said(error)}"] = None
        except HetuError as error:
            error.message = f"{self.shown(node)}: {error.message}"
            self.wrong.append(error)
        except MALFORMED as error:
            self.lacking[f"{self.shown(node)}: {_line(error)}"] = None
        return MISSING

    def shown(self, node: Any) -> str:
        """What a step is called, the module that it stands in, and the line of it."""
        stack = [*node.meta.get("nn_module_stack", {}).values()]
        path, cls = stack[-1] if stack else ("", type(self.module))
        name = node.target if isinstance(node.target, str) else node.target.__name__
        frames = re.findall(r'File "(.*)", line (\d+)', node.stack_trace or "")
        own = [(Path(file).name, line) for file, line in frames if not file.startswith(self.inside)]
        at = f" ({own[-1][0]}:{own[-1][1]})" if own else ""
        return f"{name} in {cls.__name__}{f' {path!r}' if path else ''}{at}"

    # -- leaves --------------------------------------------------------------------------------------------------------

    def leaf(self, path: str) -> Node:
        """A variable, or the constant that a buffer of no floats is."""
        if path not in self.variables:
            tensor = attrgetter(path)(self.module)
            if not tensor.is_leaf:
                raise Lacks("is computed of parameters while it is traced")
            array = array_from(tensor.detach().cpu())
            if not is_float(array.dtype) or path.startswith("_tensor_constant"):
                return constant(value=array)
            self.variables[path] = variable(path, array, trainable=tensor.requires_grad)
        return self.variables[path]

    # -- functions -----------------------------------------------------------------------------------------------------

    def value(self, traced: Any) -> Any:
        """An argument: what stands in it for results are these, and dtypes their names."""
        if isinstance(traced, self.torch.fx.Node):
            if self.values[traced] is MISSING:
                raise _Above
            return self.values[traced]
        if isinstance(traced, list | tuple):
            return tuple(map(self.value, traced))
        if isinstance(traced, dict):
            return {name: self.value(each) for name, each in traced.items()}
        if isinstance(traced, slice):
            return slice(*map(self.value, (traced.start, traced.stop, traced.step)))
        return str(traced).removeprefix("torch.") if isinstance(traced, self.torch.dtype) else traced

    def made(self, node: Any) -> Any:
        """The result of one function, of which is first asked whether it has a meaning when called so."""
        if node.op == "call_module":
            raise Lacks(self.failed[node.target])
        name = node.target if isinstance(node.target, str) else node.target.__name__
        home = "torch" if isinstance(node.target, str) else getattr(node.target, "__module__", None) or "torch"
        known = home.split(".")[0] in ("torch", *PLAIN)
        function = node.target if home.startswith(__package__) else FUNCTIONS.get(name.rstrip("_")) if known else None
        if function is None and home not in PLAIN:
            raise Lacks
        options = {n: v for n, v in node.kwargs.items() if n not in IGNORED}
        if function is not None:
            bound = inspect.signature(function).bind(*node.args, **options)
            for p in bound.signature.parameters.values():
                if p.annotation == "Only" and bound.arguments.get(p.name, p.default) != p.default:
                    raise Lacks(f"its {p.name} is not {p.default}")
        args, options = self.value(node.args), self.value(options)
        if home in PLAIN and not _holds_nodes((*args, *options.values())):
            return node.target(*args, **options)  # of sizes
        if function is None:
            raise Lacks
        result = function(*args, **options)
        if node.kwargs.get("inplace") or name in IN_PLACE or (node.op == "call_method" and name.endswith("_")):
            self.written(node, result)
        return result

    def written(self, node: Any, result: Any) -> None:
        """Who reads later what is written in place reads the result; not so who reads a view of it, or beside one."""
        place = written = node.args[0]
        while self.is_view(place):
            place = place.args[0]
            if len(place.users) > 1:
                raise Lacks("writes into a view of what others read")
        if place.op == "get_attr" or any(map(self.is_view, written.users)):
            raise Lacks("writes into a variable, or into what others read as a view")
        self.values[written] = result

    def is_view(self, node: Any) -> bool:
        return node.op.startswith("call") and getattr(node.target, "__name__", node.target) in VIEWS

    def named(self, name: str, value: Any) -> Iterator[tuple[str, Node]]:
        """The nodes of a result, with a name for each that tells where in it they stand."""
        if isinstance(value, Node):
            yield name, value
        elif isinstance(value, Mapping):
            for key, each in value.items():
                yield from self.named(str(key), each)
        elif isinstance(value, tuple):
            for k, each in enumerate(value):
                yield from self.named(f"{name}_{k}", each)


class _Above(Exception):
    """Something that it needs is missing."""


def _holds_nodes(value: Any) -> bool:
    return isinstance(value, Node) or (isinstance(value, tuple) and any(map(_holds_nodes, value)))


def _said(error: Lacks) -> str:
    return f": {error}" if str(error) else ""


def _input(name: str, given: Any) -> Node:
    if isinstance(given, Node):
        return given
    if isinstance(given, list | tuple):
        return placeholder(name, tuple(given))
    example = array_from(given)
    return placeholder(name, (None, *example.shape[1:])[: example.ndim], example.dtype)

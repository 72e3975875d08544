"""What PyTorch exports of a module: functions without anything in place, for any numbers in place of open sizes.

While it runs for that, recurrences are one function for sequences of any length, where PyTorch would write down each
step, and whether a mask hides what is later is not asked of its numbers, as that is a hint alone. What changes
gradients by code of its own is refused, as it would not be seen.
"""

from __future__ import annotations

import inspect
import logging
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from ..core.errors import DataError
from ..core.graph import Node
from ..core.types import Atom, Dim, substitute

TRIED = (64, 8, 4, 3)  # numbers that stand for open sizes while PyTorch runs; the first axes are shorter
FIRST = 6
ANY, FAR = 2, 1 << 30  # the numbers that PyTorch takes an open size for lie between
CHOOSE = "aten.batch_norm.default", "aten.dropout.default"  # their meanings choose what they do where a graph trains
SCHEMA = """(Tensor input, Tensor[] hx, Tensor[] params, bool has_biases, int num_layers, float dropout,
    bool bidirectional, bool batch_first) -> Tensor[]"""


class TorchRun(NamedTuple):
    """A module, what it takes, as nodes and what is the same in every step, and whether it trains."""

    torch: Any
    module: Any
    inputs: inspect.BoundArguments
    training: bool

    def leaves(self) -> list[Any]:
        return self.torch.utils._pytree.tree_leaves((self.inputs.args, self.inputs.kwargs))


class _Refuses(Exception):
    """What PyTorch, or the module, says of one set of numbers."""


def exported(asked: TorchRun) -> Any:
    """The module as PyTorch exports it, for all numbers in place of open sizes that it takes at all."""
    nodes = [leaf for leaf in asked.leaves() if isinstance(leaf, Node)]
    axes = {atom: axis for node in nodes for axis, size in enumerate(node.shape) for atom in atoms(size)}
    for number in TRIED if any(axes.values()) else TRIED[:1]:
        numbers = {atom: number if axis else FIRST for atom, axis in axes.items()}
        try:
            made = _run(asked, numbers)
            break
        except _Refuses as error:
            last = error
    else:
        fix = "decide by sizes and attributes, not by values of tensors; give a number to sizes that must be one"
        said = f"forward of {type(asked.module).__name__} cannot be exported: {last}"
        raise DataError(said, fix=fix) from last.__cause__
    _is_the_same(asked, made, numbers)
    return made


def atoms(size: Any) -> Iterator[Atom]:
    """The axes of inputs from which a size follows."""
    for atom in size.atoms if isinstance(size, Dim) else ():
        yield from (atom,) if len(atom) == 2 else (a for part in atom[1:] for a in atoms(part))


def _is_the_same(asked: TorchRun, made: Any, numbers: Mapping[Atom, int]) -> None:
    """DataError where the module does something else for other numbers; what it refuses itself is not looked at."""
    alike = defaultdict[Any, set[Atom]](set)  # sizes that PyTorch has found to be one number
    for *_, size, own in _open_sizes(asked, made):
        alike[size.node.expr] |= {*atoms(own)}
    for size in alike.keys() & made.range_constraints.keys():
        known = made.range_constraints[size]
        for other in (int(known.lower) - 1, int(min(known.upper, FAR)) + 1):
            if not ANY <= other < FAR:
                continue
            try:
                _run(asked, {**numbers, **dict.fromkeys(alike[size], other)})
            except _Refuses:
                continue
            said = f"forward of {type(asked.module).__name__} does something else where an open size is {other}"
            raise DataError(said, fix="give that size a number: (8, 4) in place of (None, 4)")


def _open_sizes(asked: TorchRun, made: Any) -> Iterator[tuple[str, int, Any, Dim]]:
    """The sizes that are open: of which input, and axis, as PyTorch knows it, and ours."""
    of_user = asked.torch.export.graph_signature.InputKind.USER_INPUT
    fed = {spec.arg.name for spec in made.graph_signature.input_specs if spec.kind is of_user}
    for node, leaf in zip((node for node in made.graph.nodes if node.name in fed), asked.leaves()):
        for axis, own in enumerate(leaf.shape if isinstance(leaf, Node) else ()):
            if isinstance(own, Dim):
                yield node.name, axis, node.meta["val"].shape[axis], own


def _run(asked: TorchRun, numbers: Mapping[Atom, int]) -> Any:
    torch, tree_map = asked.torch, asked.torch.utils._pytree.tree_map

    def example(leaf: Any) -> Any:
        if not isinstance(leaf, Node):
            return leaf
        return torch.zeros([substitute(s, numbers) for s in leaf.shape], dtype=getattr(torch, leaf.dtype.name))

    def axes(leaf: Any) -> Any:
        shape = leaf.shape if isinstance(leaf, Node) else ()
        return {axis: torch.export.Dim.AUTO for axis, size in enumerate(shape) if isinstance(size, Dim)} or None

    shapes = {name: tree_map(axes, value) for name, value in asked.inputs.arguments.items()}
    with _recorded(torch, asked.module, asked.training), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given, named = (tree_map(example, part) for part in (asked.inputs.args, asked.inputs.kwargs))
        try:
            made = torch.export.export(asked.module, given, named, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            raise _Refuses(f"{line_of(error)}{_place(asked, error)}") from error
    for name, axis, size, _ in _open_sizes(asked, made):
        if isinstance(size, int) or size.node.expr.is_number:
            raise _Refuses(f"it goes by the number of axis {axis} of {name!r}, which is open")
    _keep(torch, made.graph_module)
    return made


def decomposed(program: Any, taken: Mapping[Any, Any]) -> Any:
    """The same without anything in place, and with functions taken apart."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return program.run_decompositions(dict(taken))
    except Exception as error:
        fix = "write what it does in another way, or export the module: ht.onnx.load"
        raise DataError(f"PyTorch cannot take the module apart: {line_of(error)}", fix=fix) from error


def decompositions(torch: Any) -> dict[Any, Any]:
    """What PyTorch knows to take apart, and how."""
    return {**torch._decomp.decomposition_table, **torch.export.default_decompositions()}


def functions(program: Any) -> dict[Any, Any]:
    """What a program calls of PyTorch, also in its parts, for a result or to change something in place: its schemas."""
    parts = (part.graph for part in program.graph_module.modules() if hasattr(part, "graph"))
    nodes = (node for graph in parts for node in graph.nodes if hasattr(node.target, "namespace"))
    schemas = ((node, getattr(node.target, "_schema", None)) for node in nodes)
    return {node.target: schema for node, schema in schemas if node.users or not schema or schema.is_mutable}


def _keep(torch: Any, graph_module: Any) -> None:
    """What PyTorch would forget as it takes functions apart: where no gradient passes."""
    graph = graph_module.graph
    for node in [*graph.nodes]:
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and not node.args[0]:
            for part in [*node.users]:
                with graph.inserting_after(part):
                    stopped = graph.call_function(torch.ops.aten.detach.default, (part,))
                part.replace_all_uses_with(stopped, delete_user_cb=lambda user, own=stopped: user is not own)
                stopped.meta = part.meta
    graph_module.recompile()


def alike(trained: Any, resting: Any) -> bool:
    """Whether a module does the same when it does not train, but for functions that ask whether it does."""
    (one, _), (other, flags) = _steps(trained.graph_module), _steps(resting.graph_module)
    return one == other and not any(flags)


def _steps(graph_module: Any) -> tuple[list[Any], list[bool]]:
    """What is done, equal for equal programs, and what functions are told that ask whether a module trains.

    A buffer that counts steps, which nothing else reads, is left out. What is written into others is told as well.
    """
    place, found, flags, leaves = dict[Any, int](), list[Any](), list[bool](), set[Any]()
    for node in graph_module.graph.nodes:
        if is_counter(node) or (node.op == "placeholder" and all(map(is_counter, node.users))):
            continue
        place[node] = len(place)
        schema = getattr(node.target, "_schema", None)
        names = [a.name for a in schema.arguments] if schema else [""] * len(node.args)
        alias = schema.arguments[0].alias_info if schema and schema.arguments else None
        if node.op == "placeholder" or (alias and node.args[0] in leaves):  # or a view of one
            leaves.add(node)
            flags.append(alias.is_write if alias else False)
        given = [*zip(names, node.args), *node.kwargs.items()]
        asks = ("train", "training") if str(node.target) in CHOOSE else ()
        flags += [value for name, value in given if name in asks]
        shown = [place.get(v) if hasattr(v, "op") else str(v) for name, v in given if name not in asks]
        inner = attrgetter(node.target)(graph_module) if node.op == "get_attr" else None
        if hasattr(inner, "graph"):  # of what is done without gradients
            shown, more = _steps(inner)
            flags += more
        found.append((str(node.target) if node.op == "call_function" else node.op, shown))
    return found, flags


def is_counter(node: Any) -> bool:
    """Whether a step adds to a buffer that nothing reads but what adds to it."""
    only = str(node.target) == "aten.add_.Tensor" and {*getattr(node.args[0], "users", ())} == {node}
    return only and all(map(is_counter, node.users))


def line_of(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().partition("\n")[0]


def _place(asked: TorchRun, error: BaseException) -> str:
    """The module in which an error is raised, and the last line that is neither PyTorch's nor ours."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    paths = {id(part): f" in {type(part).__name__} {path!r}" for path, part in asked.module.named_modules() if path}
    within = [paths[id(f.f_locals["self"])] for f in frames if id(f.f_locals.get("self")) in paths]
    inside = tuple(str(Path(file).parent) for file in (asked.torch.__file__, __file__, inspect.__file__))
    lines = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*inside, "<"))]
    return f"{within[-1] if within else ''}{f' ({Path(lines[-1].filename).name}:{lines[-1].lineno})' if lines else ''}"


# -- how it is run -------------------------------------------------------------------------------------------------


@contextmanager
def _recorded(torch: Any, module: Any, training: bool) -> Iterator[None]:
    """A module as it trains or does not, its recurrences whole."""

    def refused(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("it changes gradients by code of its own, which is not read")

    before = [(each, each.training) for each in module.modules()]
    fast = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)  # it would print what it cannot export
        for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            stack.enter_context(patch.object(torch._VF, kind, _whole(torch, kind), create=True))
        layers = torch.nn.modules.transformer
        stack.enter_context(patch.object(layers, "_detect_is_causal_mask", lambda mask, causal, size: bool(causal)))
        stack.enter_context(patch.object(torch.distributions.Distribution, "_validate_args", False))
        stack.enter_context(patch.object(torch.autograd.Function, "apply", refused))
        stack.enter_context(patch.object(torch.Tensor, "register_hook", refused))
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            module.train(training)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            for each, was in before:
                each.training = was


@cache
def _whole(torch: Any, kind: str) -> Any:
    """A recurrence as a function that PyTorch does not look into; its arguments are those of `torch.lstm`."""

    def run(
        input: Any, hx: Any, params: Any, has_biases: Any, num_layers: int, dropout: Any, both: bool, _: Any
    ) -> Any:
        ways = 1 + both
        y = input.new_empty((*input.shape[:2], hx[0].shape[-1] * ways))
        return [y, *(input.new_empty((num_layers * ways, *h.shape[1:])) for h in hx)]

    made = torch.library.custom_op(f"hetu::{kind}", run, mutates_args=(), schema=SCHEMA)
    made.register_fake(run)

    def called(x: Any, hx: Any, params: Any, *how: Any) -> Any:
        if not isinstance(params, list | tuple):
            raise NotImplementedError("packed sequences have no counterpart")
        biases, layers, dropout, training, both, rows = how
        states = [*hx] if kind == "lstm" else [hx]
        return tuple(made(x, states, [*params], biases, layers, dropout if training else 0.0, both, rows))

    return called

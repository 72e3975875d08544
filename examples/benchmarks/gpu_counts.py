"""What each pass and kernel for GPUs saves in a step of common models: launches and bytes, counted without a GPU.

    python examples/benchmarks/gpu_counts.py [--models mlp gpt2_small ...]

The graph goes through the passes of a GPU, and each operator is bound to arrays that are never touched, so nothing is
computed. A launch is a call; its bytes are those of the arrays among its arguments, of a table those of as many rows as
there are ids. What CuPy computes is followed on zeros, which takes minutes for some: each function of arrays is a
launch, which reads its operands and writes its result. Then each pass and each kernel is taken away in turn: what it
did falls to the generated form, or to CuPy. Not counted: what caches spare, rows that a kernel reads again, arithmetic.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import peer_hetu
from rows import WORKLOADS

from hetu.core.graph import Node, topological
from hetu.core.memory import types_of
from hetu.core.op import LEAVES, Op, Role
from hetu.core.passes import chosen_passes
from hetu.core.subgraph import SubGraph
from hetu.gpu_kernels.groups import launched
from hetu.gpu_kernels.launchers import KERNELS

GPT2 = {"d": 768, "vocabulary": 50257, "depth": 12, "length": 1024, "batch": 8}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {  # row, sizes that are not its own, precision
    "mlp": ("mlp_adam", {}, "float32"),
    "mlp_fp16": ("mlp_adam", {}, "float16"),
    "resnet18": ("resnet", {"batch": 128}, "float32"),
    "resnet18_bf16": ("resnet", {"batch": 128}, "bfloat16"),
    "gpt2_small": ("gpt", GPT2, "bfloat16"),
    "wide_deep": ("wide_deep", {}, "float32"),
    "bert_mask": ("bert_mask", {}, "bfloat16"),
    "lenet": ("lenet", {}, "float32"),
    "mobilenet": ("mobilenet", {"batch": 64}, "float32"),
    "deepfm": ("deepfm", {}, "float32"),
    "gcn": ("gcn", {}, "float32"),
}


class Count(NamedTuple):
    """Launches, and bytes that they read and write."""

    launches: int = 0
    nbytes: int = 0

    def __add__(self, other: Any) -> Count:
        return Count(self.launches + other.launches, self.nbytes + other.nbytes)


# -- a step ------------------------------------------------------------------------------------------------------------


def step_of(model: str, passes: Sequence[Any]) -> list[Node]:
    """What a GPU is given to do in a step."""
    row, size, precision = MODELS[model]
    workload = WORKLOADS[row].sized(**size)
    loss, _ = peer_hetu.built(workload)
    sub = SubGraph("train", [loss, peer_hetu.optimizer_of(workload).minimize(loss)], precision)
    shapes = {name: array.shape for name, array in workload.batches()[0].items()}
    fetches, updates, _ = sub.lower(shapes, passes)
    return topological((*fetches, *updates.values()))


def counted(nodes: Sequence[Node]) -> dict[str, Count]:
    """By operator; nodes alike are counted once."""
    arrays, found, known = dict[Node, Any](), dict[str, Count](), dict[Any, Count]()
    for node in nodes:
        inputs, view = [arrays[i] for i in node.inputs], node.op.view_rule
        if node.role in LEAVES:
            arrays[node] = node.attrs["value"] if node.role is Role.CONSTANT else empty(node)
        elif node.role is Role.ITEM:
            arrays[node] = inputs[0][node.attrs["index"]]
        elif view is not None and (seen := view(np, *inputs, **node.attrs)) is not None:
            arrays[node] = seen
        else:
            out = arrays[node] = empty(node)
            if node.role in (Role.UPDATE, Role.SCATTER):  # which overwrite what they may
                over = [inputs[node.op.inplace[k][0]] if k in node.op.inplace else o for k, o in enumerate(listed(out))]
                out = arrays[node] = tuple(over) if isinstance(out, tuple) else over[0]
            key = node.op, repr(node.attrs), *((a.shape, a.strides, a.dtype.name) for a in (*inputs, *listed(out)))
            if key not in known:
                known[key] = bound(node, inputs, out)
            found[node.op.name] = known[key] + found.get(node.op.name, Count())
    return found


def empty(node: Node) -> Any:
    made = tuple(np.empty(t.shape, t.dtype) for t in types_of(node))
    return made if isinstance(node.type, tuple) else made[0]


def listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple) else [value]


def bound(node: Node, inputs: Sequence[Any], out: Any) -> Count:
    """Of one operator, as `Op.bound` chooses what computes it."""
    op, calls = node.op, KERNELS.bound(node.op, np, out, inputs, node.attrs, None)
    if calls is None and op.bind_rule and not op.scratch:
        made: Any = op.bind_rule(np, out, *inputs, **node.attrs)
        calls = [made] if callable(made) else made
    if calls is None:
        return followed(node, inputs, out)
    both = {id(o) for o in listed(out)} & set(map(id, inputs))
    return sum((of_call(call, both) for call in calls), Count())


def of_call(call: Any, both: set[int]) -> Count:
    """One launch, and the bytes of its arrays; those of `both` are read and written."""
    if hasattr(call, "arrays"):  # whose addresses lie in a table
        return Count(1, sum(a.nbytes for row in call.arrays for a in row))
    cells = [cell.cell_contents for cell in getattr(call, "__closure__", None) or ()]
    given = [call.func, *call.args, *call.keywords.values()] if isinstance(call, partial) else cells
    given += [getattr(g, "__self__", None) for g in given]
    found = {id(a): a for g in given for a in listed(g) if isinstance(a, np.ndarray)}
    rows, total = max((a.size for a in found.values() if a.dtype.kind in "iu"), default=0), 0
    for key, a in found.items():
        own = math.prod(n for n, step in zip(a.shape, a.strides) if step) * a.itemsize  # what lies in memory
        own = own if not rows or not a.ndim or len(a) <= rows else own // len(a) * rows
        total += own * (2 if key in both else 1)
    return Count(1, total)


# -- what CuPy computes ------------------------------------------------------------------------------------------------


class Followed(np.ndarray):
    """An array of which each function is counted as one launch."""

    count = Count()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **options: Any) -> Any:
        into = {"out": tuple(map(plain, out))} if out else {}
        return noted(getattr(ufunc, method)(*map(plain, inputs), **options, **into), (*inputs, *options.values()))

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        made = function(*map(plain, arguments), **{k: plain(v) for k, v in options.items()})
        if function in (np.shares_memory, np.may_share_memory, np.shape, np.ndim, np.result_type):
            return made
        return noted(arguments[0] if made is None else made, (*arguments, *options.values()))

    def __getitem__(self, key: Any) -> Any:
        made = self.view(np.ndarray)[plain(key)]
        moved = any(isinstance(k, np.ndarray | list) for k in listed(key))
        return noted(made, (made, *listed(key))) if moved else np.asarray(made).view(Followed)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.view(np.ndarray)[plain(key)] = plain(value)
        noted(self.view(np.ndarray)[plain(key)], (value,))

    def astype(self, dtype: Any, *arguments: Any, **options: Any) -> Any:
        return noted(self.view(np.ndarray).astype(dtype), (self,))

    def copy(self, order: Any = "C") -> Any:
        return noted(self.view(np.ndarray).copy(), (self,))


def plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(plain, value))
    return value.view(np.ndarray) if isinstance(value, Followed) else value


def noted(made: Any, given: Sequence[Any]) -> Any:
    """What was made, counted unless it is a view of an operand."""
    flat = [a for g in given for a in (g if isinstance(g, tuple | list) else [g])]
    read = [a for a in flat if isinstance(a, np.ndarray)]
    results = [np.asarray(m) for m in listed(made)]
    views = any(np.may_share_memory(r, a) for r in results for a in map(plain, read))
    if not views or isinstance(made, Followed):
        Followed.count += Count(1, sum(a.nbytes for a in (*read, *results)))
    return tuple(r.view(Followed) for r in results) if isinstance(made, tuple) else results[0].view(Followed)


def followed(node: Node, inputs: Sequence[Any], out: Any) -> Count:
    """What CuPy launches for an operator."""
    op, zeros = node.op, [np.zeros(a.shape, a.dtype).view(Followed) for a in inputs]
    Followed.count = Count()
    with np.errstate(all="ignore"):
        if op.into_rule:
            places = tuple(np.zeros(o.shape, o.dtype).view(Followed) for o in listed(out))
            op.into_rule(np, places if isinstance(out, tuple) else places[0], *zeros, **node.attrs)
        else:
            op.forward(np, *zeros, **node.attrs)
    copied = [] if op.ufunc or op.into_rule else listed(out)
    return Followed.count + Count(len(copied), 2 * sum(o.nbytes for o in copied))


# -- without one of them -----------------------------------------------------------------------------------------------


@contextmanager
def without(op: Any) -> Iterator[None]:
    """Inside, the room has no kernel for the operator."""
    taken = KERNELS.functions.pop(op)
    try:
        yield
    finally:
        KERNELS.functions[op] = taken


def of_step(model: str, passes: Sequence[Any]) -> Count:
    return sum(counted(step_of(model, passes)).values(), Count())


def variants(model: str) -> Iterator[tuple[str, Count]]:
    """A step with all there is, then without each pass and each kernel that it has a use for."""
    passes = chosen_passes(None, "gpu")
    yield "", of_step(model, passes)
    for run in KERNELS.passes:
        yield f"pass {run.__name__}", of_step(model, [p for p in passes if p is not run])
    apart = [p for p in passes if p.__name__ != "fuse_kernels"]
    met = {n.op for chosen in (passes, apart) for n in step_of(model, chosen)}
    own = {op for op, launch in KERNELS.functions.items() if isinstance(op, Op) and launch is not launched}
    for op in sorted(met & own, key=lambda op: op.name):
        if op.role is not Role.UPDATE:  # which its pass makes
            with without(op):
                yield op.name, of_step(model, passes)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="*", choices=[*MODELS], default=[*MODELS], help="whose steps are counted")
    for model in parser.parse_args(arguments).models:
        whole = Count()
        for name, found in variants(model):
            if not name:
                whole = found
                print(f"{model}: {whole.launches} launches, {whole.nbytes / 1e6:,.1f} MB", flush=True)
            elif found != whole:
                more = 100 * (found.nbytes / whole.nbytes - 1)
                print(f"  without {name:28}{found.launches - whole.launches:+6} launches{more:+9.2f} %", flush=True)


if __name__ == "__main__":
    main()

"""The CUDA C text of kernels: hand-written files put together with their dtypes, elementwise kernels generated.

A generated kernel evaluates a list of steps, each the `cuda=` expression of one operator (`y = a + b`), on every
element. Types are strict: an expression computes in `T`, which follows from the dtypes of the operator, and a 16-bit
float is rounded after every step, so that a fused chain gives exactly what its operators give one by one. Ignored on
purpose: launching (`elementwise.py`), and what to fuse, which a graph pass decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from ..errors import HetuError

CTYPES = {
    "bool": "bool",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned int",
    "int64": "long long",
    "uint64": "unsigned long long",
    "float16": "half16",
    "bfloat16": "bfloat16",
    "float32": "float",
    "float64": "double",
}


class KernelError(HetuError, RuntimeError):
    """A kernel that does not compile, is launched wrongly, or breaks a rule of CUDA while it is emulated."""


def compute_dtype(dtype: str) -> str:
    """The dtype in which values of `dtype` are computed: 16-bit floats are stored, not computed with."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def common_dtype(dtypes: Iterable[str]) -> str:
    """The dtype in which values meet: floats win over integers without growing, booleans stay out of it.

    >>> common_dtype(["int64", "float32"]), common_dtype(["bool", "int8"])
    ('float32', 'int8')
    """
    names = [d for d in dtypes if d != "bool"]
    floats = [d for d in names if "float" in d]
    if not names:
        return "bool"
    return names[0] if len(set(floats or names)) == 1 and not floats else _widest(floats or names)


def _widest(names: Sequence[str]) -> str:
    if "bfloat16" in names:  # NumPy does not know it
        others = {n for n in names if n != "bfloat16"}
        return "bfloat16" if not others else "float64" if "float64" in others else "float32"
    return np.result_type(*names).name


# -- files -----------------------------------------------------------------------------------------------------------


@cache
def file_text(name: str) -> str:
    """A hand-written file as it is."""
    return files(__package__).joinpath(f"{name}.cu").read_text("utf-8")


def assemble(body: str, name: str, **dtypes: str) -> str:
    """A compilable text: the given dtypes as type names, the prelude, then `body`, which errors call `name`.

    `S` is the dtype in memory of most kernels; `T`, in which they compute, follows from it unless given.

    >>> assemble("// nothing", "example.cu", S="float16").splitlines()[2:4]
    ['typedef half16 S;', 'typedef float T;']
    """
    dtypes.setdefault("T", compute_dtype(dtypes.get("S", "float32")))
    names = "".join(f"typedef {CTYPES[dtype]} {name};\n" for name, dtype in dtypes.items())
    head = f"namespace hetu {{  // hides CUDA's own functions\nstruct half16; struct bfloat16;\n{names}"
    return f'{head}#line 1 "prelude.cu"\n{file_text("prelude")}#line 1 "{name}"\n{body}\n}}\n'


@cache
def kernel_file(name: str, **dtypes: str) -> str:
    """The text of the hand-written file `name` at the given dtypes."""
    return assemble(file_text(name), f"{name}.cu", **dtypes)


# -- generated elementwise kernels -----------------------------------------------------------------------------------


class Step(NamedTuple):
    """One expression of an elementwise kernel. Plain hashable data.

    `inputs` pairs its variables with values: 0, 1, ... are the arrays of the kernel, and after them come the results
    of earlier steps. `numbers` are its other variables. The inputs meet in the dtype `meet`; `dtype` is the result's.
    """

    expression: str
    inputs: tuple[tuple[str, int], ...]
    numbers: tuple[tuple[str, float], ...]
    meet: str
    dtype: str


class Layout(NamedTuple):
    """What of the arrays' geometry is compiled in: per array which axes it moves along, the pack and the index type.

    `moves[k][axis]` says whether array k has a stride on that (merged) axis. With one axis the strides are 1 and
    `pack` neighbours are handled by one thread; with more, sizes and strides are arguments of the kernel.
    """

    moves: tuple[tuple[bool, ...], ...]
    pack: int
    index: str


def elementwise_text(steps: Sequence[Step], dtypes: Sequence[str], layout: Layout) -> str:
    """The text of the kernel `elementwise(arrays..., out, n, sizes and strides...)` that evaluates the steps.

    Bytes: each array and the result once. FLOP: those of the expressions, far below what memory lets pass.
    Launch: a grid-stride loop, one pack a thread.

    >>> square = Step("y = x * x", (("x", 0),), (), "float32", "float32")
    >>> "y = x * x;" in elementwise_text([square], ["float32"], Layout(((True,),), 1, "int32"))
    True
    """
    axes = len(layout.moves[0]) if layout.moves else 1
    sizes = [f"size{a}" for a in range(1, axes)]
    strides = [f"stride{k}_{a}" for k, moves in enumerate(layout.moves) for a in range(axes) if axes > 1 and moves[a]]
    arrays = [f"const {CTYPES[d]}* a{k}" for k, d in enumerate(dtypes)]
    parameters = [*arrays, "O* out", "Index n", *(f"Index {name}" for name in (*sizes, *strides))]
    body = _flat_loop(dtypes, layout) if axes == 1 else _strided_loop(dtypes, layout, axes)
    return assemble(
        f'{_evaluate(steps, dtypes)}\nextern "C" __global__ void elementwise({", ".join(parameters)}) {{\n{body}}}\n',
        "elementwise.cu",
        O=steps[-1].dtype,
        Index=layout.index,
    )


def _evaluate(steps: Sequence[Step], dtypes: Sequence[str]) -> str:
    """The device function that computes one element of the result from one element of each array."""
    parameters = ", ".join(f"{CTYPES[d]} v{k}" for k, d in enumerate(dtypes))
    lines = [f"__device__ inline O evaluate({parameters}) {{"]
    known = list(dtypes)
    for step in steps:
        lines += [f"    {CTYPES[step.dtype]} v{len(known)}; {{", *_step_lines(step, known), "    }"]
        known.append(step.dtype)
    return "\n".join([*lines, f"    return v{len(known) - 1};", "}"])


def _step_lines(step: Step, known: Sequence[str]) -> list[str]:
    """One expression in a block of its own, with its variables in the dtypes in which they meet."""
    meet = CTYPES[compute_dtype(step.meet)]
    result = CTYPES[compute_dtype(step.dtype)]
    real = meet if "float" in step.meet or step.dtype != "bool" else "float"  # predicates test `(T)x`
    rows = [f"typedef {real if step.dtype == 'bool' else result} T;"]
    for name, value in step.inputs:
        rows.append(f"const {meet} {name} = ({meet})v{value};")
    for name, value in step.numbers:
        rows.append(f"const {meet} {name} = ({meet}){number_text(_saturated(value, step.meet))};")
    rows += [f"{result} y;", f"{step.expression};", f"v{len(known)} = y;"]
    return [f"        {row}" for row in rows]


def _saturated(value: float, dtype: str) -> float:
    """The nearest number that an integer dtype has: no uint8 lies below -1, so a bound of -1 acts as 0."""
    if isinstance(value, bool) or "int" not in dtype:
        return value
    limits = np.iinfo(dtype)
    return min(max(value, int(limits.min)), int(limits.max))


def number_text(value: float) -> str:
    """A number in C, exactly."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        if value == -(1 << 63):
            return "(-9223372036854775807LL - 1)"
        return f"{value}ULL" if value >= 1 << 63 else f"{value}LL"
    if value != value:
        return "(infinite() - infinite())"
    if value in (float("inf"), float("-inf")):
        return "infinite()" if value > 0 else "-infinite()"
    return repr(float(value))


def _flat_loop(dtypes: Sequence[str], layout: Layout) -> str:
    """All arrays lie alike in memory, or are single numbers: whole packs move at once."""
    pack = layout.pack
    loads, values = [], []
    for k, (dtype, moves) in enumerate(zip(dtypes, layout.moves)):
        ctype = f"Pack<{CTYPES[dtype]}, {pack}>"
        loads.append(f"        const {ctype} p{k} = *(const {ctype}*)(a{k} + i);\n" if moves[0] else "")
        values.append(f"p{k}.v[j]" if moves[0] else f"a{k}[0]")
    return (
        f"    const Index step = (Index)gridDim.x * blockDim.x * {pack};\n"
        f"    for (Index i = ((Index)blockIdx.x * blockDim.x + threadIdx.x) * {pack}; i < n; i += step) {{\n"
        f"{''.join(loads)}        Pack<O, {pack}> result;\n"
        f"        for (int j = 0; j < {pack}; j++) result.v[j] = evaluate({', '.join(values)});\n"
        f"        *(Pack<O, {pack}>*)(out + i) = result;\n    }}\n"
    )


def _strided_loop(dtypes: Sequence[str], layout: Layout, axes: int) -> str:
    """The position in the result is taken apart into one coordinate an axis, the last varying fastest."""
    apart = "".join(f"        const Index c{a} = rest % size{a}; rest /= size{a};\n" for a in range(axes - 1, 0, -1))
    places = []
    for k, moves in enumerate(layout.moves):
        terms = [f"c{a} * stride{k}_{a}" for a in range(axes) if moves[a]]
        places.append(f"a{k}[{' + '.join(terms) or '0'}]")
    return (
        "    const Index step = (Index)gridDim.x * blockDim.x;\n"
        "    for (Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {\n"
        f"        Index rest = i;\n{apart}        const Index c0 = rest;\n"
        f"        out[i] = evaluate({', '.join(places)});\n    }}\n"
    )

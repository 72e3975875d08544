"""The CUDA C text of kernels: hand-written files put together with their dtypes.

`generated.py` makes kernels from the expressions of operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files

import numpy as np

from ..core.errors import HetuError

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

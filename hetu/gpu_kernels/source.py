"""The CUDA C text of kernels: hand-written files put together with their dtypes.

`group_text.py` makes kernels from the expressions of operators.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from ..core.errors import HetuError
from ..fuse.line_text import compute_dtype

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


def shown(text: str, kernel: str) -> str:
    """A text as a reader wants to see it: what was generated, without the prelude, and where the rest stands."""
    _, *parts = re.split(r'^#line 1 "(.+)"\n', text, flags=re.MULTILINE)
    pairs = [*zip(parts[::2], parts[1::2])]
    name, body = next((pair for pair in reversed(pairs) if f"{kernel}(" in pair[1]), pairs[-1])
    if files(__package__).joinpath(name).is_file():
        return f"// {kernel}, which stands in hetu/gpu_kernels/{name}\n"
    return body.removesuffix("\n}\n")


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

"""The C compilers that tests compare: all that are here, and one of them for lesser vectors."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from hetu.cpu_kernels.compiler import compiler

VECTORS = {"x86-64": "__SSE2__", "haswell": "__AVX2__", "skylake-avx512": "__AVX512F__"}


def commands() -> Iterator[str]:
    """What `HETU_CC` may be on this machine, without other names of the usual one."""
    yield from compilers()
    yield from lesser_vectors()


def compilers() -> Iterator[str]:
    """All but the usual one."""
    usual, clangs = os.path.realpath(shutil.which("cc") or ""), ["clang", *(f"clang-{n}" for n in range(40, 9, -1))]
    for names in (["gcc"], clangs):
        found = next(filter(shutil.which, names), None)
        if found is not None and os.path.realpath(str(shutil.which(found))) != usual:
            yield found
    if find_spec("ziglang") is not None:
        yield f"{sys.executable} -m ziglang cc"


def lesser_vectors() -> Iterator[str]:
    """The usual one for CPUs with lesser vectors than this one has."""
    made_by = compiler()
    if platform.machine() == "x86_64" and made_by is not None:
        here = [name for name, macro in VECTORS.items() if f"#define {macro} 1" in made_by.macros]
        yield from (f"cc -march={name}" for name in here[:-1])  # the usual one has the greatest


# In the usual run lesser vectors compute all functions (`test_prelude.py`), and nightly whole steps; convolutions are
# compared nightly alone.
others = pytest.mark.parametrize(
    "others", [compilers, pytest.param(lesser_vectors, marks=pytest.mark.nightly)], ids=lambda found: found.__name__
)

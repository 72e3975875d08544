"""No kernel computes with vectors that a CPU does not have: compilers take those apart, through memory."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

import hetu.cpu_kernels
from hetu.cpu_kernels.compiled import text_of

from .every_compiler import VECTORS

NAMES = sorted(f.name for f in Path(hetu.cpu_kernels.__file__).parent.glob("*.c"))
# Compilers have no instruction that makes bytes of floats' masks; that is done once for 16 windows.
FILES = [name for name in NAMES if "vector_size" in text_of(name) and name != "pooling.c"]
LONG = "typedef T Long __attribute__((vector_size(128))); Long twice(Long x) { return x + x; }"

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the names are those of x86 CPUs"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="only gcc says what it takes apart"),
]


def taken_apart(text: str, vectors: str) -> list[str]:
    source = "\n".join((text_of("prelude.h"), "#define T float\n#define BETTER >", text))
    command = ["gcc", f"-march={vectors}", "-Wvector-operation-performance", "-S", "-o", "/dev/null", "-x", "c", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=100, check=True)
    return [line for line in done.stderr.splitlines() if "vector-operation-performance" in line]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("vectors", VECTORS)
def test_no_vector_is_longer_than_those_of_the_cpu(vectors):
    assert {name: said for name in FILES if (said := taken_apart(text_of(name), vectors))} == {}
    assert len(taken_apart(LONG, vectors)) == 1

"""What a reader is shown of the kernels of an operator, a group and a program: the text that runs, and no more."""

from __future__ import annotations

import re

import pytest

import hetu as ht
from hetu.core.errors import ArgumentError
from hetu.core.graph import topological
from hetu.gpu_kernels.launchers import KERNELS
from hetu.gpu_kernels.passes.fuse_kernels import fuse_kernels
from hetu.gpu_kernels.source import file_text
from hetu.look import cuda_text

from . import fake_cupy
from .cases import uncompiled_cases
from .proofs import shown_kernels, soft

STANDS = re.compile(r"// (\w+), which stands in hetu/gpu_kernels/(\w+)\.cu\n")


def test_the_operator_of_a_student_is_a_few_lines_with_its_expression():
    x, scale = ht.placeholder("x", (4, 8)), ht.placeholder("scale", (8,))
    assert cuda_text(soft(x, scale)).splitlines() == [
        'extern "C" __global__ void places(const float* x0, const float* x1, float* y0, Index n, Index size1, '
        "Index stride0_0) {",
        "    const Index step = (Index)gridDim.x * blockDim.x * 4;",
        "    for (Index i = ((Index)blockIdx.x * blockDim.x + threadIdx.x) * 4; i < n; i += step) {",
        "        const Index i1 = i % size1, rest1 = i / size1;",
        "        const Index i0 = rest1;",
        "        const auto p0 = load<4>(x0 + i0 * stride0_0 + i1);",
        "        const auto p1 = load<4>(x1 + i1);",
        "        Pack<float, 4> r0;",
        "        for (int at = 0; at < 4; at++) {",
        "            const float v0 = p0.v[at];",
        "            const float v1 = p1.v[at];",
        "            const float v2 = v0 / (1 + fabs(v0)) * v1;  // soft",
        "            r0.v[at] = v2;",
        "        }",
        "        store(y0 + i, r0);",
        "    }",
        "}",
    ]


def stands_in(kernel: str, file: str) -> bool:
    """Whether a file names a kernel, or a macro of it puts the name together."""
    return kernel in file_text(file) or "##" in file_text(file)


def test_every_operator_shows_the_text_that_runs_or_where_it_stands():
    """Of the table of samples; a kernel of one line fits on a page."""
    kinds = set()
    for case in (case for (_, dtype), cases in uncompiled_cases().items() if dtype == "float32" for case in cases):
        shown = cuda_text(case.node)
        if shown.endswith(": computed by CuPy\n"):
            kinds.add("CuPy")
        elif KERNELS.function(case.node.op) is None:
            kinds.add("generated")
            assert f"// {case.node.op.name}\n" in shown and len(shown.splitlines()) < 30, shown
        else:
            kinds.add("written")
            assert STANDS.search(shown) or shown.startswith('extern "C"'), shown
            assert all(stands_in(*found) for found in STANDS.findall(shown)), shown
    assert kinds == {"CuPy", "generated", "written"}


def test_a_group_shows_its_lines():
    h = ht.placeholder("h", (32, 64))
    *_, node = topological(fuse_kernels([ht.tanh(h * 2 + 1) * ht.sigmoid(h)]))
    assert node.op.name != "multiply"
    assert re.findall("// (\\w+)", cuda_text(node)) == ["multiply", "add", "tanh", "sigmoid", "multiply"]
    *_, node = topological(fuse_kernels([ht.exp(h - ht.max(h, axis=1, keepdims=True))]))  # by rows
    assert re.findall("// (\\w+)", cuda_text(node)) == ["subtract", "exp"]


def test_what_a_program_takes_apart_is_shown_as_it_runs():
    h = ht.placeholder("h", (32, 64))
    norm = cuda_text(ht.rms_norm(ht.exp(h), ht.placeholder("scale", (64,))))
    assert norm.count('extern "C"') == 1 and re.findall("// (\\w+)", norm)[-1] == "multiply"
    assert "// exp" not in norm  # which is another node


def test_a_size_that_is_open_is_refused():
    with pytest.raises(ArgumentError, match="cuda_text got node='exp'(?s:.*)pass node as Node"):
        ht.look.cuda_text("exp")
    with pytest.raises(ArgumentError, match="open size(?s:.*)give its placeholders sizes"):
        cuda_text(ht.exp(ht.placeholder("x", (None, 8))))


def test_a_program_on_a_gpu_shows_what_was_compiled_for_it():
    with fake_cupy.installed():
        shown_kernels()

"""Every kernel, generated ones included, compiles to machine code for the GPUs we aim at."""

from __future__ import annotations

import pytest

from hetu.gpu_kernels import attention, nvrtc, sparse
from hetu.gpu_kernels.machine import Recorder
from hetu.gpu_kernels.source import KernelError, kernel_file

from .cases import uncompiled_cases

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason='no NVRTC: pip install "hetu-dl[cuda-check]"')
PARTS = 8
FILES = ("rows", "tables", "random", "images", "channels", "scatter")
DTYPES = ("float64", "float32", "float16", "bfloat16")
HEADS = {  # features of queries and values, rows of a warp
    "attention": [("float64", 28, 28, 4), ("float64", 64, 64, 1), ("float32", 128, 100, 1), ("bfloat16", 33, 64, 4)],
    "attention_tensor": [("float16", 64, 64, 2), ("float16", 128, 128, 1), ("bfloat16", 16, 112, 2)],
}


def texts() -> list[str]:
    """Those of all samples, and the files whose kernels no sample reaches."""
    recorder = Recorder()
    for cases in uncompiled_cases().values():
        for case in cases:
            case.calls(recorder)
    files = (kernel_file(file, S=dtype, I="int64", Index="int32") for dtype in DTYPES for file in FILES)
    heads = (attention.text(file, *sizes) for file, rows in HEADS.items() for sizes in rows)
    return list(recorder.texts | dict.fromkeys((*files, *heads, sparse.text("bfloat16", "int32", 32, 8))))


def together(texts: list[str]) -> str:
    """One text for many, as the compiler takes longer to start than to compile a kernel."""
    whole = ""
    for k, text in enumerate(texts):
        assert text.startswith("namespace hetu {")
        whole += text.replace("namespace hetu {", f"namespace hetu_{k} {{", 1).replace('extern "C" ', "")
    return whole


@pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
@pytest.mark.parametrize("part", range(PARTS))
def test_all_texts_compile(part, architecture):
    assert nvrtc.cubin(together(texts()[part::PARTS]), architecture).startswith(b"\x7fELF")


def test_an_error_names_file_and_line():
    with pytest.raises(KernelError, match=r"broken\.cu\(2\).*oops"):
        nvrtc.cubin('#line 1 "broken.cu"\nextern "C" __global__ void k(float* y) {\n y[0] = oops; }')

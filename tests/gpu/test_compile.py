"""Every kernel, generated ones included, compiles to machine code for the GPUs we aim at."""

from __future__ import annotations

import pytest

from hetu.gpu_kernels import nvrtc
from hetu.gpu_kernels.machine import Recorder
from hetu.gpu_kernels.source import KernelError, kernel_file

from .cases import uncompiled_cases

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason='no NVRTC: pip install "hetu-dl[cuda-check]"')
PARTS = 8
FILES = ("rows", "tables", "random", "images", "channels", "scatter", "attention")
DTYPES = ("float64", "float32", "float16", "bfloat16")


def texts() -> list[str]:
    """Those of all samples, and the files whose kernels no sample reaches."""
    recorder = Recorder()
    for cases in uncompiled_cases().values():
        for case in cases:
            case.calls(recorder)
    files = (kernel_file(file, S=dtype, I="int64") for dtype in DTYPES for file in FILES)
    return list(recorder.texts | dict.fromkeys(files))


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

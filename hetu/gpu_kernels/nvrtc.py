"""Compiles kernels for a GPU that need not be there: NVRTC makes real machine code without a driver.

Needs the packages of the extra `cuda-check` (CuPy for its binding, NVRTC, the CUDA headers). A kernel that compiles may
still be wrong; the emulator shows that.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from ..core.errors import MissingDependencyError
from .source import KernelError

ARCHITECTURES = ("sm_75", "sm_80", "sm_90a")  # T4; A100 and newer; H100 and H200, with what Hopper alone has
OPTIONS = ("--std=c++17", "--fmad=true")
BY_CUPY = ("-ftz=true", "--device-as-default-execution-space")  # which it adds: NVRTC 13.0 takes no lambda without them


@cache
def _binding() -> Any:
    try:
        binding = importlib.import_module("cupy.cuda").nvrtc
        binding.getVersion()
    except Exception as error:
        raise MissingDependencyError(
            f"the compile check needs CuPy and NVRTC ({type(error).__name__}: {error})",
            fix='pip install "hetu-dl[cuda-check]"',
        ) from None
    return binding


def available() -> bool:
    """Whether this machine can compile for a GPU."""
    try:
        _binding()
    except MissingDependencyError:
        return False
    return True


def cubin(text: str, architecture: str = "sm_90a", name: str = "kernel.cu") -> bytes:
    """The machine code (an ELF file) of a text for one architecture; KernelError with the compiler's log."""
    nvrtc = _binding()
    program = nvrtc.createProgram(text, name, (), ())
    try:
        nvrtc.compileProgram(program, (*OPTIONS, *BY_CUPY, f"-arch={architecture}"))
        return nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError:
        raise KernelError(f"NVRTC, {architecture}:\n{nvrtc.getProgramLog(program)}") from None
    finally:
        nvrtc.destroyProgram(program)

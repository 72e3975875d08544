"""Every kernel, generated ones included, compiles to machine code for the GPUs we aim at.

`.ci/run` compiles all of them; each run of the tests one of each file.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from hetu.fuse.line_text import compute_dtype
from hetu.gpu_kernels import attention, channels, convolution, many, nvrtc, rows, sparse, tables
from hetu.gpu_kernels.machine import HOPPER, TENSOR, RecordingMachine
from hetu.gpu_kernels.source import KernelError, kernel_file

from .cases import uncompiled_cases

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason='no NVRTC: pip install "hetu-dl[cuda-check]"')
FOLDER, PARTS = Path(nvrtc.__file__).parent, 8
FILES = ("tables", "random", "images", "fit")
DTYPES = ("float64", "float32", "float16", "bfloat16")
HEADS = {  # features of queries and values, rows of a warp
    "attention": [("float64", 28, 28, 4), ("float64", 64, 64, 1), ("float32", 128, 100, 1), ("bfloat16", 33, 64, 4)],
    "attention_tensor": [("float16", 64, 64, 2), ("float16", 128, 128, 1), ("bfloat16", 16, 112, 2)],
}
TILES = [
    *(("bfloat16", tile) for tile in convolution.TILES[::2]),
    *(("float16", tile) for tile in convolution.TILES[1:2]),
    *(("float32", tile) for tile in (convolution.TILES[0], *convolution.GROUP_TILES)),
]
TEAMS = [rows.team(width, np.zeros(1, "float64")) for width in (64, 1000, 5001)]  # of packs of 2 elements
NORMS = [  # dtypes of images and of vectors, elements of a pack; channels last, a relu, one more array
    ("float64", "float64", 2, True, False, False),
    ("float32", "float32", 4, False, False, False),
    ("float16", "float32", 8, True, True, False),
    ("bfloat16", "float32", 8, True, True, True),
]


@cache
def texts(architecture: str) -> tuple[list[str], list[str]]:
    """Of each sample those of one dtype, in turn, and what no sample reaches; those of all dtypes."""
    capability = int(architecture[3:5])
    samples: dict[str, list[list[str]]] = {}
    for (row, _), cases in uncompiled_cases().items():
        recorder = RecordingMachine()
        recorder.capability = capability
        for case in cases:
            case.calls(recorder)
        samples.setdefault(row, []).append([*recorder.texts])
    usual = [text for k, found in enumerate(samples.values()) for text in found[k % len(found)]]
    usual = [*dict.fromkeys((*usual, *others(capability)))]
    return usual, [*dict.fromkeys((*usual, *(text for found in samples.values() for some in found for text in some)))]


def others(capability: int) -> tuple[str, ...]:
    """What no sample reaches."""
    files = (kernel_file(file, S=dtype, I="int64", Index="int32") for dtype in DTYPES for file in FILES)
    entropies = (
        rows.text(x, "float64" if x == "float64" else "float32", team=team) for x, team in zip(DTYPES, cycle(TEAMS))
    )
    tensor = capability >= TENSOR
    heads = (attention.text(file, *s) for file in HEADS if tensor or file == "attention" for s in HEADS[file])
    norms = (
        channels.text(images, vectors, compute_dtype(images), "int32", *flags) for images, vectors, *flags in NORMS
    )
    convolutions = (
        convolution.text(dtype, "int32", tile)
        for dtype, tile in (TILES if tensor else ())
        if capability == HOPPER or not tile.by_groups
    )
    scatters = (tables.scatter_text(2, S=dtype, I="int64", Index="int32") for dtype in DTYPES)
    return (
        *files,
        *entropies,
        *norms,
        *scatters,
        *heads,
        *convolutions,
        *(many.text("float32", pack) for pack in (1, 4)),
        sparse.text("bfloat16", "int32", 32, 8),
    )


def together(texts: list[str]) -> str:
    """One text for many, as the compiler takes longer to start than to compile a kernel."""
    whole = ""
    for k, text in enumerate(texts):
        assert text.startswith("namespace hetu {")
        whole += text.replace("namespace hetu {", f"namespace hetu_{k} {{", 1).replace('extern "C" ', "")
    return whole


@pytest.mark.parametrize("part", range(len(nvrtc.ARCHITECTURES)))
def test_every_file_compiles(part):
    """A text of each, each for one of the architectures."""
    architecture = nvrtc.ARCHITECTURES[part]
    of_files = {re.findall('#line 1 "(.*)"', text)[-1]: text for text in texts(architecture)[0]}
    some = [*of_files.values()][part :: len(nvrtc.ARCHITECTURES)]
    assert nvrtc.cubin(together(some), architecture).startswith(b"\x7fELF")


def test_no_file_of_kernels_is_left_out():
    compiled = {file for text in texts(nvrtc.ARCHITECTURES[-1])[0] for file in re.findall('#line 1 "(.*)"', text)}
    assert {f.name for f in FOLDER.glob("*.cu") if "__global__" in f.read_text("utf-8")} <= compiled


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
@pytest.mark.parametrize("part", range(PARTS))
def test_all_texts_compile(part, architecture):
    assert nvrtc.cubin(together(texts(architecture)[1][part::PARTS]), architecture).startswith(b"\x7fELF")


def test_words_of_random_numbers_stay_in_registers():
    """An array that is indexed by what is known only to a thread lies in local memory: the kernel has a frame."""
    texts = [kernel_file("random", S=dtype) for dtype in DTYPES]
    frames = re.findall(rb"\x04\x11\x08\x00.{4}(.{4})", nvrtc.cubin(together(texts)), re.DOTALL)  # EIATTR_FRAME_SIZE
    assert len(frames) >= sum(text.count("__global__") for text in texts)
    assert set(frames) == {bytes(4)}


def test_what_cupy_compiles_compiles():
    """CuPy takes a function for one of the device, whatever it says of itself, and a lambda is such a function."""
    text = (
        'float two() { return 2; }\nextern "C" __global__ void k(float* y) { y[0] = [](auto v) { return v; }(two()); }'
    )
    assert nvrtc.cubin(text).startswith(b"\x7fELF")


def test_an_error_names_file_and_line():
    with pytest.raises(KernelError, match=r"broken\.cu\(2\).*oops"):
        nvrtc.cubin('#line 1 "broken.cu"\nextern "C" __global__ void k(float* y) {\n y[0] = oops; }')

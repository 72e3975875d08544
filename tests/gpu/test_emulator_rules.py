"""What the emulator refuses: each rule of CUDA, broken by a kernel of a line or two, and kept by one much like it."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from hetu.gpu_kernels import emulator
from hetu.gpu_kernels.emulator import LIMITS, ORDERS, Emulator
from hetu.gpu_kernels.source import KernelError

from .test_emulator import BLOCK_SUM, WARP, block_sum, numbers

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")


class Rule(NamedTuple):
    """Statements of a kernel `k(const float* x, float* y)` of two blocks of 64 threads; x and y have 64 elements."""

    broken: str
    kept: str  # what y becomes must not depend on the block
    words: str


PACK = "struct alignas(16) Pack { float v[4]; };"
RULES = {
    "a read behind an array": Rule("y[t] = x[t + 1];", "y[t] = x[t];", "a read .* 4 bytes, 0 bytes behind argument 0"),
    "a read before an array": Rule("y[t] = x[t - 1];", "y[t] = x[t];", "a read .* 4 bytes before argument 0"),
    "a read far away": Rule("y[t] = x[t + (1LL << 40)];", "y[t] = x[t + (0LL << 40)];", "a read outside"),
    "a write behind an array": Rule("y[t + 1] = 0;", "y[t] = 0;", "a write .* 0 bytes behind argument 1"),
    "a write before an array": Rule("y[t - 1] = 0;", "y[t] = 0;", "a write .* 4 bytes before argument 1"),
    "an atomic outside": Rule("atomicMax(&y[64], 1.f);", "atomicMax(&y[63], 1.f);", "a read outside an array"),
    "NaN from NaN": Rule("y[t + 1] = 2 * y[t + 1];", "y[t] = y[t];", "outside an array"),
    "an index of registers": Rule(
        "float v[4]; v[t % 5] = 1;", "float v[5]; v[t % 5] = 1;", "an index outside an array"
    ),
    "a pack anywhere": Rule(
        f"{PACK} y[t] = ((const Pack*)(x + 1))->v[0];", f"{PACK} y[t] = ((const Pack*)(x + 4))->v[0];", "not aligned"
    ),
    "a pack in floats": Rule(
        f"{PACK} __shared__ float s[8]; if (t == 5) ((Pack*)s)->v[1] = 1;",
        f"{PACK} __shared__ Pack s[2]; if (t == 5) s[0].v[1] = 1;",
        "not aligned",
    ),
    "a read behind a shared array": Rule(
        "__shared__ float s[64]; s[t] = 1; __syncthreads(); y[t] = *(s + t + 1);",
        "__shared__ float s[64]; s[t] = 1; __syncthreads(); y[t] = *(s + t);",
        "a read outside a shared array",
    ),
    "a write behind a shared array": Rule(
        "__shared__ float s[63]; *(s + t) = 1;",
        "__shared__ float s[64]; *(s + t) = 1;",
        "a write outside a shared array",
    ),
    "another row of a shared array": Rule(
        "__shared__ float s[2][64]; s[0][t + 1] = 1;", "__shared__ float s[2][65]; s[0][t + 1] = 1;", "an index outside"
    ),
    "shared memory that nobody wrote": Rule(
        "__shared__ float s[64]; if (t < 63) s[t] = 1; y[t] = s[t];",
        "__shared__ float s[64]; if (t < 64) s[t] = 1; y[t] = s[t];",
        "nobody has written",
    ),
    "shared memory of the block before": Rule(
        "__shared__ float s[64]; if (blockIdx.x == 0) s[t] = 1; y[t] = s[t];",
        "__shared__ float s[64]; if (blockIdx.x < 2) s[t] = 1; y[t] = s[t];",
        "nobody has written",
    ),
    "two writers": Rule(
        "__shared__ float s[64]; s[t / 2] = 1;", "__shared__ float s[64]; if (t % 2) s[t / 2] = 1;", "without a barrier"
    ),
    "a warp ahead of the others": Rule(
        "__shared__ float s[1]; if (t == 63) s[0] = 1; __shfl_sync(~0u, 1, 0); if (t == 0) y[0] = s[0];",
        "__shared__ float s[1]; if (t == 31) s[0] = 1; __shfl_sync(~0u, 1, 0); if (t == 0) y[0] = s[0];",
        "without a barrier|nobody has written",
    ),
    "a mask without the lane itself": Rule(
        "y[t] = __shfl_xor_sync(~1u, x[t], 2);",
        "y[t] = __shfl_xor_sync(~0u, x[t], 2);",
        "does not name the lane itself",
    ),
    "a lane that the mask does not name": Rule(
        "if (t % 32 < 16) y[t] = __shfl_xor_sync(0xffffu, x[t], 16);",
        "if (t % 32 < 16) y[t] = __shfl_xor_sync(0xffffu, x[t], 8);",
        "a lane that its mask does not name",
    ),
    "lanes of different masks": Rule(
        "y[t] = __shfl_sync(t % 32 < 16 ? 0xffffu : ~0u, x[t], 0);", "y[t] = __shfl_sync(~0u, x[t], 0);", "has ended"
    ),
    "static shared memory": Rule(
        "__shared__ float s[12289]; s[t] = 1;", "__shared__ float s[12288]; s[t] = 1;", "more than 48 KB"
    ),
    "all shared memory": Rule(
        "extern __shared__ float d[]; __shared__ float s[128]; s[t] = d[t] = 1;",
        "extern __shared__ float d[]; d[t] = 1;",
        "227 KB",
    ),
}


def text_of(body: str, bounds: str = "") -> str:
    return f'extern "C" __global__ void {bounds} k(const float* x, float* y) {{ int t = threadIdx.x; {body} }}'


def run(body: str, arguments: tuple[np.ndarray, ...], orders=ORDERS) -> None:
    dynamic = 227 << 10 if "extern" in body else 0
    Emulator(orders).kernel(text_of(body), "k")((2,), (64,), arguments, shared_mem=dynamic)


@cache
def compiled() -> None:
    emulator.prepare(text_of(body) for rule in RULES.values() for body in (rule.broken, rule.kept))


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_is_broken(name):
    compiled()
    rule, arguments = RULES[name], (numbers(64), numbers(64))
    for order in ORDERS:
        with pytest.raises(KernelError, match=rule.words):
            run(rule.broken, arguments, [order])
    np.testing.assert_array_equal(arguments[1], numbers(64))


@pytest.mark.parametrize("name", RULES)
def test_one_that_is_kept(name):
    compiled()
    run(RULES[name].kept, (numbers(64), numbers(64)))


# -- limits of a launch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", range(6))
def test_a_grid_and_a_block_have_limits(axis):
    """Of what is too large not even a block runs."""
    kernel, arguments = Emulator(blocks=0).kernel(text_of("y[t] = 1;"), "k"), (numbers(64), numbers(64))
    shape = [1] * 6
    shape[axis] = LIMITS[axis]
    kernel(shape[:3], shape[3:], arguments)
    for wrong in (0, LIMITS[axis] + 1):
        shape[axis] = wrong
        with pytest.raises(KernelError, match="cannot be launched"):
            kernel(shape[:3], shape[3:], arguments)
    with pytest.raises(KernelError, match="cannot be launched"):
        kernel((1,), (32, 33), arguments)


@pytest.mark.parametrize("bounds", ["__launch_bounds__(32)", "__launch_bounds__(MOST, 2)"])
def test_launch_bounds(bounds):
    kernel = Emulator().kernel(f"const int MOST = 32;{text_of('y[t] = 1;', bounds)}", "k")
    kernel((1,), (32,), (numbers(64), numbers(64)))
    with pytest.raises(KernelError, match="more threads than its launch bounds allow"):
        kernel((1,), (33,), (numbers(64), numbers(64)))


# -- tables of addresses -----------------------------------------------------------------------------------------------

TABLE = """extern "C" __global__ void many(float* const* table) {
    table[blockIdx.x][threadIdx.x] += 1;
}"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("+ 1] += 1", "a read outside an array: 4 bytes, 0 bytes behind what a table names, 0"),
        ("+ 1] = 1", "a write outside an array"),
        (" / 33] = threadIdx.x", "what a table names, 0 depends on the order of threads"),
        ("] = table[2][0]", "a read outside an array: 8 bytes, 0 bytes behind argument 0"),
    ],
)
def test_what_a_table_names_is_looked_at_too(wrong, words):
    arrays, kernel = numbers(3, 40)[:2], Emulator().kernel(TABLE, "many")
    before = arrays.copy()
    kernel((2,), (40,), (Emulator().table([[a] for a in arrays]),))
    np.testing.assert_allclose(arrays, before + 1)
    kept = arrays.copy()
    with pytest.raises(KernelError, match=words):
        kernel = Emulator().kernel(TABLE.replace("] += 1", wrong), "many")
        kernel((2,), (40,), (Emulator().table([[a] for a in arrays]),))
    np.testing.assert_array_equal(arrays, kept)


def test_what_it_names_without_saying_so_is_not():
    arrays = numbers(2, 40)
    table = np.array([a.ctypes.data for a in arrays], np.uint64)
    Emulator().kernel(TABLE, "many")((2,), (40,), (table,))
    np.testing.assert_allclose(arrays, numbers(2, 40) + 1)
    with pytest.raises(KernelError, match="behind argument 0"):
        Emulator().kernel(TABLE.replace("] += 1", "] = table[2][0]"), "many")((2,), (40,), (table,))


# -- barriers ----------------------------------------------------------------------------------------------------------


def without(text: str, part: str, place: int = 0) -> str:
    """The text without one of the places where `part` stands in it."""
    before, after = text.split(part)[: place + 1], text.split(part)[place + 1 :]
    assert after
    return part.join(before) + part.join(after)


REUSED = """
extern "C" __global__ void twice(const float* x, float* y) {
    __shared__ float part[64];
    part[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    float other = part[63 - threadIdx.x];
    __syncthreads();
    part[threadIdx.x] = 2 * x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = other + part[63 - threadIdx.x];
}
"""


def twice(text=REUSED, orders=ORDERS):
    x, y = numbers(64), np.zeros(64, np.float32)
    Emulator(orders).kernel(text, "twice")((1,), (64,), (x, y))
    return y, 3 * x[::-1]


def test_shared_memory_is_used_again():
    np.testing.assert_allclose(*twice(), rtol=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("barrier", range(3))
def test_a_missing_barrier_is_noticed_in_every_order(barrier, order):
    with pytest.raises(KernelError, match="without a barrier|nobody has written"):
        twice(without(REUSED, "__syncthreads();", barrier), [order])


IN_A_WARP = """
extern "C" __global__ void twice(const float* x, float* y) {
    __shared__ float part[64];
    part[threadIdx.x] = x[63 - threadIdx.x];
    __syncwarp();
    const float other = part[threadIdx.x ^ 7];
    __syncwarp();
    part[threadIdx.x ^ 3] = 3 * other;
    __syncwarp();
    y[threadIdx.x ^ 3] = part[threadIdx.x ^ 7];
}
"""


def test_a_warp_needs_no_barrier_but_its_own():
    np.testing.assert_allclose(*twice(IN_A_WARP), rtol=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("barrier", range(3))
def test_a_missing_barrier_of_a_warp(barrier):
    with pytest.raises(KernelError, match="without a barrier|nobody has written"):
        twice(without(IN_A_WARP, "__syncwarp();", barrier))


def test_a_barrier_of_a_warp_is_not_enough_for_two():
    text = IN_A_WARP.replace("part[threadIdx.x ^ 7];", "part[threadIdx.x ^ 39];")
    np.testing.assert_allclose(*twice(text.replace("__syncwarp", "__syncthreads")), rtol=1e-6)
    with pytest.raises(KernelError, match="without a barrier|nobody has written"):
        twice(text)


def test_a_barrier_inside_a_divergent_branch():
    text = BLOCK_SUM.replace(
        "if (threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];\n        __syncthreads();",
        "if (threadIdx.x < step) { part[threadIdx.x] += part[threadIdx.x + step]; __syncthreads(); }",
    )
    assert text != BLOCK_SUM
    text = text.replace("    if (threadIdx.x == 0) y", "    __syncthreads();\n    if (threadIdx.x == 0) y")
    with pytest.raises(KernelError, match=r"divergent __syncthreads .* lines 9 and 11"):
        block_sum(text)


def test_barriers_in_both_arms_of_a_branch_do_not_match():
    text = """extern "C" __global__ void arms(float* y) {
        if (threadIdx.x % 2) {
            __syncthreads();
        } else {
            __syncthreads();
        }
        y[threadIdx.x] = 1;
    }"""
    with pytest.raises(KernelError, match="lines 3 and 5"):
        Emulator().kernel(text, "arms")((1,), (32,), (np.zeros(32, np.float32),))


def test_a_warp_operation_without_all_its_lanes():
    text = WARP.replace("    float v = x", "    if (threadIdx.x == 5) return; float v = x")
    arrays = (numbers(64), np.zeros(64, np.float32), np.zeros(64, np.int32))
    with pytest.raises(KernelError, match="names lane 5, which has ended"):
        Emulator().kernel(text, "warp")((1,), (64,), arrays)
    with pytest.raises(KernelError, match="which does not exist"):
        Emulator().kernel(WARP, "warp")((1,), (48,), arrays)

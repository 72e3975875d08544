"""The emulator runs CUDA C rightly; `test_emulator_rules.py` shows what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from hetu.core.errors import MissingDependencyError
from hetu.core.types import as_dtype
from hetu.gpu_kernels import emulator
from hetu.gpu_kernels.emulator import Emulator
from hetu.gpu_kernels.source import KernelError, assemble

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")

BLOCK_SUM = """
extern "C" __global__ void block_sum(const float* x, float* y, long long n) {
    __shared__ float part[64];
    float v = 0;
    for (long long i = threadIdx.x; i < n; i += blockDim.x) v += x[blockIdx.x * n + i];
    part[threadIdx.x] = v;
    __syncthreads();
    for (int step = 32; step; step /= 2) {
        if (threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0) y[blockIdx.x] = part[0];
}
"""

WARP = """
extern "C" __global__ void warp(const float* x, float* sums, int* votes) {
    float v = x[threadIdx.x], down = v, spread;
    for (int step = 16; step; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
    for (int step = 16; step; step /= 2) down += __shfl_down_sync(0xffffffffu, down, step);
    spread = __shfl_sync(0xffffffffu, down, 0);
    sums[threadIdx.x] = v + spread;
    votes[threadIdx.x] = __popc(__ballot_sync(0xffffffffu, x[threadIdx.x] > 0));
    votes[threadIdx.x] += 100 * __any_sync(0xffffffffu, v > 1e9f);
}
"""

HISTOGRAM = """
extern "C" __global__ void histogram(const long long* ids, float* counts, long long n) {
    extern __shared__ float own[];
    own[threadIdx.x] = 0;
    __syncthreads();
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&own[ids[i]], 1.f);
    __syncthreads();
    atomicAdd(&counts[threadIdx.x], own[threadIdx.x]);
}
"""


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def block_sum(text: str = BLOCK_SUM) -> tuple[np.ndarray, np.ndarray]:
    x, y = numbers(3, 100), np.zeros(3, np.float32)
    Emulator().kernel(text, "block_sum")((3,), (64,), (x, y, 100))
    return y, x.sum(axis=1)


def test_barriers_and_shared_memory():
    np.testing.assert_allclose(*block_sum(), rtol=1e-5)


def test_warp_operations():
    x, sums, votes = numbers(64), np.zeros(64, np.float32), np.zeros(64, np.int32)
    Emulator().kernel(WARP, "warp")((1,), (64,), (x, sums, votes))
    warps = x.reshape(2, 32)
    np.testing.assert_allclose(sums.reshape(2, 32), 2 * warps.sum(1, keepdims=True).repeat(32, 1), rtol=1e-4, atol=1e-4)
    assert (votes.reshape(2, 32) == (warps > 0).sum(1, keepdims=True)).all()


def test_atomics_and_dynamic_shared_memory():
    ids, counts = np.random.default_rng(0).integers(0, 32, 500), np.zeros(32, np.float32)
    Emulator().kernel(HISTOGRAM, "histogram")((4,), (32,), (ids, counts, 500), shared_mem=32 * 4)
    assert (counts == np.bincount(ids, minlength=32)).all()


def test_a_sum_whose_digits_depend_on_the_order_of_threads_is_refused():
    """Atomics add whole numbers exactly, others in the order in which the threads come."""
    text = """extern "C" __global__ void total(const float* x, float* y) { atomicAdd(y, x[threadIdx.x]); }"""
    total, kernel = np.zeros(1, np.float32), Emulator().kernel(text, "total")
    kernel((1,), (64,), (np.arange(64, dtype=np.float32), total))
    assert total == 2016
    total[:] = 0
    with pytest.raises(KernelError, match="argument 1 depends on the order of threads"):
        kernel((1,), (64,), (numbers(64), total))


PRODUCT = """
struct half16 {
    unsigned short bits;
    half16() = default;
    half16(float v) : bits(float_to_half(v)) {}
    operator float() const { return half_to_float(bits); }
};
struct alignas(16) Chunk { half16 v[8]; };
extern "C" __global__ void product(const half16* a, const half16* b, float* y) {
    __shared__ Chunk left[16][2];
    __shared__ Chunk right[16][2];
    const int lane = threadIdx.x;
    copy_async(&left[lane / 2][lane % 2], (const Chunk*)a + lane, true);
    copy_async(&right[lane / 2][lane % 2], (const Chunk*)b + lane, lane != 31);
    wait_for_copies();
    __syncthreads();
    unsigned one[4], other[4];
    float sum[2][4] = {};
    load_matrices(one, &left[lane % 16][lane / 16]);
    load_matrices_transposed(other, &right[lane % 16][lane / 16]);
    for (int n = 0; n < 2; n++) multiply_add(sum[n], one, other + 2 * n, half16());
    for (int n = 0; n < 2; n++)
        for (int i = 0; i < 4; i++) y[(lane / 4 + i / 2 * 8) * 16 + n * 8 + lane % 4 * 2 + i % 2] = sum[n][i];
}
"""


def product(text=PRODUCT):
    a, b = numbers(2, 16, 16).astype(np.float16)
    y = np.zeros((16, 16), np.float32)
    Emulator().kernel(text, "product")((1,), (32,), (a, b, y))
    b[15, 8:] = 0  # what lane 31 did not copy
    return y, a.astype(np.float32) @ b.astype(np.float32)


def test_matrices_of_a_warp_and_asynchronous_copies():
    np.testing.assert_allclose(*product(), rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ("    wait_for_copies();\n", "", "depends on the order of threads"),
        ("&left[lane % 16][lane / 16]", "&left[lane % 16][lane / 16].v[1]", "does not lie at 16 bytes"),
        ("(const Chunk*)a + lane", "(const Chunk*)(a + 1) + lane", "are not aligned"),
        ("    load_matrices(one", "    if (lane < 16) load_matrices(one", "deadlock"),
    ],
)
def test_what_they_ask_for(right, wrong, words):
    assert right in PRODUCT
    with pytest.raises(KernelError, match=words):
        product(PRODUCT.replace(right, wrong))


GROUPS = PRODUCT.replace("true);", "true);\n    end_group();").replace(
    "    wait_for_copies();", "    end_group();\n    wait_for_groups<0>();"
)


def test_copies_are_waited_for_in_groups():
    np.testing.assert_allclose(*product(GROUPS), rtol=1e-5, atol=1e-5)
    with pytest.raises(KernelError, match="depends on the order of threads"):
        product(GROUPS.replace("wait_for_groups<0>", "wait_for_groups<1>"))


def test_products_of_floats_take_11_bits():
    text = """
    extern "C" __global__ void product(const float* a, const float* b, float* y) {
        const int g = threadIdx.x / 4, t = threadIdx.x % 4;
        unsigned left[4], right[2];
        float sum[4] = {};
        for (int i = 0; i < 4; i++) left[i] = __float_as_uint(a[(g + i % 2 * 8) * 8 + t + i / 2 * 4]);
        for (int i = 0; i < 2; i++) right[i] = __float_as_uint(b[(t + i * 4) * 8 + g]);
        multiply_add(sum, left, right, 0.f);
        for (int i = 0; i < 4; i++) y[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sum[i];
    }"""
    a, b, y = numbers(16, 8), numbers(8, 8), np.zeros((16, 8), np.float32)
    Emulator().kernel(text, "product")((1,), (32,), (a, b, y))
    short = [(x.view(np.uint32) & 0xFFFFE000).view(np.float32) for x in (a, b)]
    np.testing.assert_allclose(y, short[0] @ short[1], rtol=1e-5, atol=1e-5)
    assert np.abs(y - a @ b).max() > 1e-4


def test_blocks_and_threads_have_three_axes():
    text = """extern "C" __global__ void where(int* y) {
        long long block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        long long thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
        y[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 1000 + thread;
    }"""
    y = np.full((24, 24), -1, np.int32)
    Emulator().kernel(text, "where")((2, 3, 4), (4, 3, 2), (y,))
    assert (y == np.arange(24)[:, None] * 1000 + np.arange(24)).all()


def test_strided_and_overlapping_arrays_share_memory():
    text = 'extern "C" __global__ void shift(const float* a, float* b) { b[2 * threadIdx.x] = a[2 * threadIdx.x] + 1; }'
    both = np.zeros(8, np.float32)
    Emulator().kernel(text, "shift")((1,), (4,), (both[::2], both[1::2]))
    assert both.tolist() == [0, 1, 0, 1, 0, 1, 0, 1]


ARRIVAL = """
extern "C" __global__ void arrival(int* count, int* thread, int* block) {
    if (threadIdx.x == 0) block[blockIdx.x] = count[64]++;
    __syncthreads();
    thread[blockIdx.x * 64 + threadIdx.x] = count[blockIdx.x]++;
}
"""


def arrival(order: str, seed: int) -> tuple[list[int], ...]:
    """When each thread came within its block, and each block."""
    thread, block = np.zeros((16, 64), np.int32), np.zeros(16, np.int32)
    Emulator([order], seed=seed).kernel(ARRIVAL, "arrival")((16,), (64,), (np.zeros(65, np.int32), thread, block))
    return *map(tuple, thread.tolist()), tuple(block.tolist())


def test_a_seed_chooses_the_order_of_blocks_and_threads():
    shuffled = [arrival("shuffled", seed) for seed in range(4)]
    assert all(sorted(came) == [*range(len(came))] for found in shuffled for came in found)
    assert len({came for found in shuffled for came in found}) == 4 * 17
    assert shuffled[0] == arrival("shuffled", 0)
    assert arrival("ascending", 1) == arrival("ascending", 2) != arrival("descending", 1)


FILL = """extern "C" __global__ void fill(unsigned char* y, long long n) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 7;
}"""


def test_the_ends_of_a_large_array():
    """Of which no page is there but those that are written. Its last position has 33 bits."""
    count = (1 << 32) + 5
    y, grid = np.zeros(count, np.uint8), (-(-count // 256),)
    emulator.prepare([FILL, FILL.replace("const long long", "const int")])
    Emulator(blocks=4).kernel(FILL, "fill")(grid, (256,), (y, count))
    assert (
        (y[:512] == 7).all() and not y[512:1024].any() and not y[-1024 : -256 - 5].any() and (y[-256 - 5 :] == 7).all()
    )
    with pytest.raises(KernelError, match="a write outside an array"):
        Emulator(blocks=4).kernel(FILL.replace("const long long", "const int"), "fill")(grid, (256,), (y, count))
    with pytest.raises(KernelError, match="0 bytes behind argument 0"):
        Emulator(blocks=4).kernel(FILL, "fill")(grid, (256,), (y, count + 1))


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "bool"])
def test_what_nobody_wrote_shows(dtype):
    made = Emulator().xp.empty((2, 3), dtype)
    assert made.shape == (2, 3) and made.dtype == dtype
    assert (np.isnan(made) if "float" in dtype else made >= np.array(0x55555555).astype(dtype)).all()
    assert np.array_equal(Emulator().xp.empty_like(made), made, equal_nan="float" in dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_nan_is_the_same_in_every_order_of_threads(dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    y = np.zeros(1, as_dtype(dtype))
    fill = assemble('extern "C" __global__ void fill(S* y) { y[0] = infinite() - infinite(); }', "fill.cu", S=dtype)
    Emulator().kernel(fill, "fill")((1,), (1,), (y,))
    assert np.isnan(y[0])


def test_what_a_launch_refuses():
    kernel = Emulator().kernel(BLOCK_SUM, "block_sum")
    x, y = numbers(3, 100), np.zeros(3, np.float32)
    for arguments, block, words in [
        ((x, y), (64,), "got 2 arguments, takes 3"),
        ((x.astype(np.float64), y, 100), (64,), "is float64, the kernel takes float32"),
        ((x, y, 100.0), (64,), "the kernel takes int64"),
        ((x, y, np.int32(100)), (64,), "the kernel takes int64"),
        ((x, np.broadcast_to(y, (3,)), 100), (64,), "read-only"),
        ((x, y, 100), (2048,), "cannot be launched"),
    ]:
        with pytest.raises(KernelError, match=words):
            kernel((3,), block, arguments)
    with pytest.raises(KernelError, match="has no kernel 'sum'"):
        Emulator().kernel(BLOCK_SUM, "sum")


def test_a_text_that_does_not_compile():
    with pytest.raises(KernelError, match="oops"):
        Emulator().kernel('extern "C" __global__ void k(float* y) { y[0] = oops; }', "k")


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(emulator, "compiler", lambda: None)
    with pytest.raises(MissingDependencyError, match="install g"):
        Emulator().kernel('extern "C" __global__ void never_compiled(float* y) { y[0] = 123; }', "never_compiled")


def test_the_header_is_read_once_and_one_that_is_not_whole_is_read_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(emulator, "_cache", lambda: tmp_path)
    monkeypatch.setattr(emulator, "_libraries", {})
    for k in range(3):
        y = np.zeros(3, np.float32)
        kernel = Emulator().kernel(f'extern "C" __global__ void k(float* y) {{ y[threadIdx.x] = {k}; }}', "k")
        kernel((1,), (3,), (y,))
        assert y.tolist() == [k] * 3
        (header,) = tmp_path.glob("header-*")
        (read,) = header.glob("*.gch")
        if k == 1:
            read.write_bytes(b"garbage")
    assert len([*tmp_path.glob("*.so")]) == 3 and read.read_bytes() == b"garbage"

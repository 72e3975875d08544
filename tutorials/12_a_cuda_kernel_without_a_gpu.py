# %% [markdown]
# # 12. Write a CUDA kernel and prove it without a GPU
#
# **After this notebook you can** write a small CUDA kernel, run it without a GPU, let an emulator find the bugs that
# usually cost a night, give your own operator a kernel in one line, and say whether it can be fast.
#
# The emulator needs a C++ compiler (`g++` or `clang++`). Without one, its cells say so and go on.

# %%
import numpy as np

import hetu as ht
from hetu.core.graph import OPS
from hetu.gpu_kernels import emulator, nvrtc
from hetu.gpu_kernels.emulator import Emulator
from hetu.gpu_kernels.launchers import bound
from hetu.gpu_kernels.passes.fuse_kernels import fuse_kernels
from hetu.gpu_kernels.source import KernelError
from hetu.look.profiler import flops, traffic
from hetu.teach.try_it import try_it

print("C++ compiler:", "found" if emulator.compiler() else "none, emulated cells are skipped")

# %% [markdown]
# ## A kernel is what one thread does
#
# A GPU runs the same function on thousands of threads. Each finds its own index (`blockIdx`, `threadIdx`) and takes
# its element. A launch has `grid` blocks of `block` threads. That is rarely exactly n, so a thread must check whether
# it has an element at all. Here is $y \leftarrow a x + y$:

# %%
AXPY = """
extern "C" __global__ void axpy(const float* x, float* y, float a, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
"""
rng = np.random.default_rng(0)


def emulate(text, name, grid, block, *arguments):
    """Run a kernel on NumPy arrays; say what is wrong with it, if anything."""
    try:
        Emulator().kernel(text, name)((grid,), (block,), arguments)
        print(f"{name}: ran on {grid} x {block} threads, no rule of CUDA broken")
    except ht.errors.MissingDependencyError as error:
        print("skipped:", error)
    except KernelError as error:
        print(str(error).splitlines()[0])


x, y = rng.normal(size=100).astype(np.float32), np.ones(100, np.float32)
emulate(AXPY, "axpy", 4, 32, x, y, np.float32(3), 100)
print("largest difference:", np.abs(y - (3 * x + 1)).max() if emulator.compiler() else "unknown")

# %% [markdown]
# A GPU would get this very *text*. The emulator turns each CUDA thread into a fiber and runs them all. But one right
# result proves little on a machine where threads run in any order. Let us plant bugs.
#
# **Try it:** launch `axpy` on 3 blocks. No rule is broken; how many elements of y stay as they were?

# %%
try_it(None, b"NA==", "how many threads are there?")

# %% [markdown]
# ## Bug 1: the missing `if`
#
# There are 100 elements and 128 threads: without the check, 28 threads read and write past the end. That destroys
# other numbers, and shows an hour later somewhere else. The emulator looks at every address before it is used:

# %%
emulate(AXPY.replace("if (i < n) ", ""), "axpy", 4, 32, x, y, np.float32(3), 100)

# %% [markdown]
# **Try it:** which is the first index that no thread may touch?

# %%
try_it(None, b"MTAw", "they are counted from 0")

# %% [markdown]
# ## Threads that work together
#
# Many threads sum many numbers: each block adds its part in *shared memory*, with half as many threads in each round.
# `__syncthreads()` is a barrier: no thread goes on before all are there. The result is one number per block.

# %%
SUM = """
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
rows, sums = rng.normal(size=(3, 1000)).astype(np.float32), np.zeros(3, np.float32)
emulate(SUM, "block_sum", 3, 64, rows, sums, 1000)
print(sums, "by NumPy:", rows.sum(axis=1))

# %% [markdown]
# **Try it:** how many rounds does the loop over `step` have for 64 threads?

# %%
try_it(None, b"Ng==", "32, 16, 8, ...")

# %% [markdown]
# ## Bug 2: the missing barrier
#
# Remove the first `__syncthreads()`. Now a thread may add a neighbor's part before the neighbor has written it. On a
# GPU this is *usually* right, the worst kind of wrong. The emulator knows which thread wrote what, and after which
# barrier; and it runs every launch with its threads ascending, descending and shuffled, and all must agree:

# %%
emulate(SUM.replace("__syncthreads();", "", 1), "block_sum", 3, 64, rows, sums, 1000)

# %% [markdown]
# **Try it:** a test on a GPU passes a thousand times. Is the kernel right? Answer True or False.

# %%
try_it(None, b"ZmFsc2U=", "usually is not always")

# %% [markdown]
# ## Bug 3: the barrier that some never reach
#
# Somebody moves the second barrier into the `if`, "because only those threads need it", and puts one after the loop
# to be safe. Now half of the block waits at one barrier and half at the other. A GPU hangs or does something
# undefined. The emulator knows the line of every barrier:

# %%
inside = SUM.replace("{\n        if (threadIdx.x < step)", "if (threadIdx.x < step) {")
inside = inside.replace("    if (threadIdx.x == 0)", "    __syncthreads();\n    if (threadIdx.x == 0)")
emulate(inside, "block_sum", 3, 64, rows, sums, 1000)

# %% [markdown]
# **Try it:** how many of the 64 threads wait at the barrier within the `if` in the first round?

# %%
try_it(None, b"MzI=", "those below `step`")

# %% [markdown]
# ## Bug 4: memory that nobody wrote
#
# Shared memory starts with arbitrary contents, often those of another block, so that the result may even be right. Here
# the last thread forgets its part:

# %%
forgetful = SUM.replace("part[threadIdx.x] = v", "if (threadIdx.x < 63) part[threadIdx.x] = v")
emulate(forgetful, "block_sum", 3, 64, rows, sums, 1000)

# %% [markdown]
# **Try it:** how many of the 64 parts are written?

# %%
try_it(None, b"NjM=", "all but that of the last thread")

# %% [markdown]
# ## One line for an operator of your own
#
# Most operators treat each element alone and need no hand-written kernel. Give the expression in C, and hetu writes
# the rest: index arithmetic, broadcasting, packs of 16 bytes, half precision. `cuda_text` shows it, and the emulator
# runs it:


# %%
@ht.op(dims="...,...->...", code="y = x / (1 + fabs(x)) * scale")
def soft(xp, x, scale):
    """x / (1 + |x|) * scale"""
    return x / (1 + xp.abs(x)) * scale


print(ht.look.cuda_text(soft(ht.placeholder("x", (4, 8)), ht.placeholder("scale", (8,)))))

out, scale = np.empty((4, 8), np.float32), rng.normal(size=8).astype(np.float32)
values = rng.normal(size=(4, 8)).astype(np.float32)
if emulator.compiler():
    calls = bound(Emulator(), soft, out, [values, scale], {})
    for call in calls:
        call()
    print("kernels launched:", len(calls), " largest difference:", np.abs(out - soft.forward(np, values, scale)).max())
else:
    print("skipped")

# %% [markdown]
# This is what a GPU runs, and you know all of it but two words. A `Pack<float, 4>` is four neighbors: `load` and
# `store` move 16 bytes by one instruction, so a thread takes four numbers and not one. `Index` is an integer of 32
# bits, or of 64 where numbers are many. The loop lets few threads do much: each goes on one `step` further until there
# is nothing left. The scale moves along the last axis only, so its index has no `i0`; that is all there is to
# broadcasting. And your expression is the line with your operator's name.
#
# CuPy has an `ElementwiseKernel` for such expressions. hetu does without, as its text exists only when a GPU has
# launched it, so that nobody could read or prove it here. On a machine with a GPU `print(program.c)` shows the kernels
# of a whole program.
#
# All of hetu's kernels are tested like this: the text and the launch that a device would get, against NumPy, in
# several orders. So are the hand-written ones, for instance the cross entropy of a softmax, whose threads exchange
# their maxima and sums within a warp:

# %%
if emulator.compiler():
    scores, labels = rng.normal(size=(5, 300)).astype(np.float16), np.arange(5)
    losses, totals = np.empty((2, 5), np.float32)
    options = {"ignore_index": None, "label_smoothing": 0.0}
    for call in bound(Emulator(), OPS["softmax_cross_entropy"], (losses, totals), [scores, labels], options):
        call()
    exact = np.log(np.exp(scores.astype(float)).sum(1))
    print(f"half precision, largest difference {np.abs(totals - exact).max():.1e}")
else:
    print("skipped")

# %% [markdown]
# Does NVIDIA's compiler accept the text? It needs no GPU either, only installation (`pip install
# "hetu-dl[cuda-check]"`); then it makes real machine code for a real chip:

# %%
if nvrtc.available():
    print(f"sm_90: {len(nvrtc.cubin(SUM, 'sm_90')):,} bytes of machine code")
else:
    print("NVRTC is not installed: skipped")

# %% [markdown]
# **Try it:** how many threads does `soft` need for 4 times 8 numbers, if each takes a pack of four?

# %%
try_it(None, b"OA==", "numbers divided by four")

# %% [markdown]
# ## Right; but fast?
#
# Only a device can tell. But you can compute the *best* possible speed. A kernel moves bytes and does operations; the
# *roofline* ([S. Williams et al., 2009](https://doi.org/10.1145/1498765.1498785)) is the most operations per second
# that either allows. Here are the instructions of a training step on the roof of an H100 by its data sheet (67
# Tflop/s in float32, 3.35 TB/s):

# %%
batch = ht.placeholder("batch", (4096, 1024))
hidden = ht.gelu(ht.nn.Linear(1024, 1024, name="up")(batch))
loss = ht.mean(ht.softmax(hidden) ** 2)
step = ht.Executor([loss, ht.optim.Adam(1e-3).minimize(loss)], passes=[])
feeds = {batch: np.zeros((4096, 1024), np.float32)}
nodes = {s.node.op.name: s.node for s in step.program(feeds).steps if traffic(s.node) > 1e6}
points = [(name, flops(node), traffic(node), 0.0) for name, node in nodes.items()]
ht.look.roofline_svg(points, flops=67e12, bandwidth=3.35e12)

# %% [markdown]
# The matrix products are far to the right: arithmetic limits them. The rest climbs the slope: it waits for memory,
# and clever arithmetic does not help. Moving less helps: do several such operators in *one* kernel, so that the
# values between them never go to memory. For GPUs a pass does this to chains of elementwise operators:

# %%
h = ht.placeholder("h", (4096, 1024))
chain = ht.tanh(h * 2 + 1) * ht.sigmoid(h)
for outputs in ([chain], fuse_kernels([chain])):
    kernels = [node for node in ht.Graph(outputs).nodes if node.inputs]
    names = ", ".join(node.op.name for node in kernels)
    print(f"{len(kernels)} kernels, {sum(map(traffic, kernels)) / 1e6:4.0f} MB: {names}")
print(ht.look.cuda_text(kernels[-1]))

# %% [markdown]
# It is the kernel of one line with five lines in it. What lies between them are variables, which a compiler keeps in
# registers. The numbers 2 and 1 are arguments, so that other numbers need no other kernel.
#
# Whole rows go the same way. A norm is taken apart into lines, one of which adds up a row. The threads that share the
# row fold what each of them has, as `block_sum` did, wait for the sum, and visit the row again, which lies in a cache:

# %%
(norm,) = fuse_kernels([ht.rms_norm(h, ht.placeholder("weights", (1024,)))])
print(ht.look.cuda_text(norm))

# %% [markdown]
# Nobody wrote this kernel. It moves the same bytes as one written for this norm would, so there is none. What is
# written by hand saves something that lines cannot: attention its matrix of scores, a cross entropy two more readings
# of rows as long as a vocabulary, the update of all weights its hundred launches.
# `python examples/benchmarks/gpu_counts.py` takes each of them away in turn and counts what a step then costs.
#
# **Try it:** write `row_max` after the pattern of `block_sum`, and prove it. From which value does `v` start? Then
# change `part[64]` to `part[32]` and see what the emulator says.

# %%
try_it(None, b"LUluZmluaXR5", "all numbers may be negative")

# %% [markdown]
# **What to remember.** The text is the kernel: the same for the emulator, the compile check and the device. Orders and
# a look at every address find what tests on a GPU overlook. Correctness is proven here and speed measured there; the
# roofline predicts the best speed.
# In lab 11 you write kernels for a machine that sees every access.
#
# Next: [what becomes of all this on a CPU](13_from_python_to_a_c_program.ipynb).

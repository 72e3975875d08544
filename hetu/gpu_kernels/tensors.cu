// What the kernels share that visit many tensors in one launch, as NVIDIA Apex's multi_tensor_apply does.
//
// A block of 256 threads has a chunk of one tensor: `tensor` and `start` say which, and where in it. `table` has for
// every tensor a row of addresses of arrays of its size. They hold S, but for the last of a row, whose dtype is known
// only when the kernel runs: gradients of one model come in float32 and in 16 bits.
#define TENSORS                                                                                           \
    S *const *table, const int *kinds, const long long *sizes, const int *tensor, const long long *start, \
        long long chunk
#define CHUNK_OF(k, begin, end)       \
    const int k = tensor[blockIdx.x]; \
    const long long begin = start[blockIdx.x], end = begin + chunk < sizes[k] ? begin + chunk : sizes[k]

// Calls `visit` with an array in its own dtype, whose number is `kind`, as `many.KINDS` has it.
template <class Visit>
__device__ inline void in_own_dtype(const void* x, int kind, Visit visit) {
    if (kind == 1) visit((const half16*)x);
    else if (kind == 2) visit((const bfloat16*)x);
    else visit((const S*)x);
}


// Calls `visit(neighbors, i)` for what this thread has of a chunk: packs of PACK elements from i on, and a rest of single
// ones. Chunks begin at multiples of PACK, and so do arrays, as the host has looked.
template <class Visit>
__device__ inline void each_pack(long long begin, long long end, Visit visit) {
    const long long packed = end - (end - begin) % PACK, step = blockDim.x;
    for (long long i = begin + threadIdx.x * PACK; i < packed; i += step * PACK) visit(Neighbors<PACK>(), i);
    for (long long i = packed + threadIdx.x; i < end; i += step) visit(Neighbors<1>(), i);
}

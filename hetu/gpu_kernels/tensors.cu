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

// Element i of an array whose dtype has the number `kind` of `many.KINDS`.
__device__ inline T load(const void* x, int kind, long long i) {
    if (kind == 1) return ((const half16*)x)[i];
    if (kind == 2) return ((const bfloat16*)x)[i];
    return ((const S*)x)[i];
}

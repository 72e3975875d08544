// A reduction over the threads of a team, as those of `prelude.cu`, by the `combine` and `identity` in front of it. Every
// thread gets the result, which does not depend on timing.

__device__ inline T warp_combine(T v) {
    for (int step = 16; step; step /= 2) v = combine(v, __shfl_xor_sync(0xffffffffu, v, step));
    return v;
}

__device__ inline T team_combine(T v) {
    v = warp_combine(v);
    if (blockDim.x == 32) return v;
    __shared__ T partial[32];
    __syncthreads();
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_combine(threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : identity());
}

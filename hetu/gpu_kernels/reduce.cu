// Reductions of arrays seen as (outer, n, inner) over n. `combine` and `identity` are put in front by
// `reduce.py`. Long reductions with few results are cut into `chunks`, whose results a second launch reduces; the
// order of additions is fixed. Bytes: x once. FLOP: one an element.

// inner = 1: a team of threads reads along a row. Launch: (32, 8) threads for n up to 1024 a chunk, else (256, 1).
extern "C" __global__ void reduce_rows(const S* x, O* y, long long rows, long long n, long long chunks) {
    const long long each = (n + chunks - 1) / chunks;
    for (long long k = (long long)blockIdx.x * blockDim.y + threadIdx.y; k < rows * chunks;
         k += (long long)gridDim.x * blockDim.y) {
        const long long begin = k % chunks * each, end = begin + each < n ? begin + each : n;
        T total = identity();
        for (long long i = begin + threadIdx.x; i < end; i += blockDim.x) total = combine(total, (T)x[k / chunks * n + i]);
        total = team_fold(total, identity(), combine);
        if (threadIdx.x == 0) y[k] = total;
    }
}

// inner > 1: 32 neighboring columns a block, its 8 warps share the n rows. Grid (inner / 32, outer chunks).
extern "C" __global__ void reduce_columns(const S* x, O* y, long long outer, long long n, long long inner, long long chunks) {
    __shared__ T part[8][33];
    const long long c = (long long)blockIdx.x * 32 + threadIdx.x, each = (n + chunks - 1) / chunks;
    for (long long k = blockIdx.y; k < outer * chunks; k += gridDim.y) {
        const long long begin = k % chunks * each, end = begin + each < n ? begin + each : n;
        T total = identity();
        if (c < inner)
            for (long long i = begin + threadIdx.y; i < end; i += 8)
                total = combine(total, (T)x[(k / chunks * n + i) * inner + c]);
        part[threadIdx.y][threadIdx.x] = total;
        __syncthreads();
        if (threadIdx.y == 0 && c < inner) {
            for (int j = 1; j < 8; j++) total = combine(total, part[j][threadIdx.x]);
            y[k * inner + c] = total;
        }
        __syncthreads();
    }
}

// The product of a sparse matrix (size, nodes) and a dense one: y[i] = sum of weights[e] x[columns[e]] over the entries e
// of row i, and the product of two dense ones at the entries. `sparse.py` puts constants in front: LANES threads lie side
// by side on the features of an entry, each on PACK neighbors, so a warp has 32 / LANES entries under way at a time.
// All blocks are (32, 8).
//
// Bytes of the first: each entry's column and weight once, y once, and a row of x for each entry, of which all but the
// first reading may come from the second-level cache. FLOP: 2 an entry and feature. One warp a segment; grid.y goes over
// the features where they exceed LANES PACK.

// Entries sorted by row, rows cut into segments of bounded length, so that no warp has far more to do than the others: C.
// Yang, A. Buluc, J. Owens, "Design Principles for Sparse Matrix Multiplication on the GPU", Euro-Par 2018, section 4.
// Segment s is the entries from starts[s] to starts[s + 1]. target[s] is its row or, for one of several of a row, -1 - p
// with the place p in `parts`. A column that names no node is left out.
extern "C" __global__ void segments_product(const long long* starts, const long long* target, const I* columns,
                                            const S* weights, const S* x, S* y, T* parts, long long segments,
                                            long long features, long long nodes) {
    const long long s = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (s >= segments) return;
    const int group = threadIdx.x / LANES;
    const long long k = ((long long)blockIdx.y * LANES + threadIdx.x % LANES) * PACK, end = starts[s + 1];
    T sum[PACK] = {};
#pragma unroll 4
    for (long long e = starts[s] + group; e < end; e += 32 / LANES) {
        const long long column = columns[e];
        if (column < 0 || column >= nodes || k >= features) continue;
        const auto v = load<PACK>(x + column * features + k);
        const T weight = weights[e];
        for (int j = 0; j < PACK; j++) sum[j] += weight * (T)v.v[j];
    }
    for (int step = 16; step >= LANES; step /= 2)
        for (int j = 0; j < PACK; j++) sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], step);
    if (group > 0 || k >= features) return;
    const long long place = target[s];
    for (int j = 0; j < PACK; j++)
        if (place < 0) parts[(-1 - place) * features + k + j] = sum[j];
    Pack<S, PACK> row;
    for (int j = 0; j < PACK; j++) row.v[j] = sum[j];
    if (place >= 0) store(y + place * features + k, row);
}

// The rows of several segments: parts from first[i] to first[i + 1] are row rows[i]. One thread an element.
extern "C" __global__ void join_segments(const T* parts, const long long* rows, const long long* first, S* y, long long n,
                                         long long features) {
    for (long long e = (long long)blockIdx.x * blockDim.x + threadIdx.x; e < n; e += (long long)gridDim.x * blockDim.x) {
        const long long i = e / features, k = e % features;
        T sum = 0;
        for (long long p = first[i]; p < first[i + 1]; p++) sum += parts[p * features + k];
        y[rows[i] * features + k] = sum;
    }
}

// y[e] = a[rows[e]] . b[columns[e]], a product sampled at the entries (SDDMM): LANES threads an entry, a warp EACH times
// 32 / LANES entries that follow each other, for in a sorted matrix those share a row of a. 0 outside the matrix. Bytes:
// row, column and y of each entry once, and for each a row of a and one of b, of which all but the first reading may
// come from the second-level cache. FLOP: 2 an entry and feature.
extern "C" __global__ void entries_sampled(const I* rows, const I* columns, const S* a, const S* b, S* y,
                                           long long entries, long long size, long long features, long long nodes) {
    const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const long long start = ((long long)blockIdx.x * blockDim.y + threadIdx.y) * (EACH * 32 / LANES) + group;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const long long e = start + i * (32 / LANES);
        const long long row = e < entries ? rows[e] : -1, column = e < entries ? columns[e] : -1;
        const bool inside = row >= 0 && row < size && column >= 0 && column < nodes;
        T sum = 0;
        for (long long k = lane * PACK; inside && k < features; k += LANES * PACK) {
            const auto u = load<PACK>(a + row * features + k);
            const auto v = load<PACK>(b + column * features + k);
            for (int j = 0; j < PACK; j++) sum += (T)u.v[j] * (T)v.v[j];
        }
        for (int step = LANES / 2; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (lane == 0 && e < entries) y[e] = sum;
    }
}

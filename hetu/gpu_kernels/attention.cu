// Scaled dot-product attention without the matrix of scores: T. Dao et al., "FlashAttention", 2022, algorithms 1 and 4.
//
// Arrays are (batch, queries or keys, features). A warp owns one query (one key in `attention_dkv`) and a block of 8
// warps shares tiles of 32 keys (queries) in shared memory: lanes are keys while scores are made, features while they
// are used. Block (32, 8), grid (queries / 8, batch). Bytes: q, y and total once, k and v once for 8 queries, against
// three times the whole matrix of scores for the composition. FLOP: 4 d a score forward, 14 d backward (the scores are
// computed again), by the plain arithmetic units: no tensor cores, so this saves memory before time.

const int MOST = 512 / sizeof(T);  // features: 128 of float, 64 of double, so that the tiles fit 48 KB

// rows[j] = source[start + j] for 32 rows of `width` features, 0 beyond the last row.
__device__ inline void load_tile(T (*rows)[MOST + 1], const S* source, long long start, long long count, long long width) {
    for (long long t = threadIdx.y * 32 + threadIdx.x; t < 32 * width; t += 256) {
        const long long j = t / width;
        rows[j][t % width] = start + j < count ? (T)source[(start + j) * width + t % width] : (T)0;
    }
}

__device__ inline T dot(const T* a, const T* b, long long width) {
    T sum = 0;
    for (long long f = 0; f < width; f++) sum += a[f] * b[f];
    return sum;
}

extern "C" __global__ void attention(const S* q, const S* k, const S* v, S* y, T* total, long long queries, long long keys,
                                     long long d, long long e, double scale, bool causal) {
    __shared__ T key[32][MOST + 1];
    __shared__ T value[32][MOST + 1];
    __shared__ T query[8][MOST];
    const long long row = (long long)blockIdx.x * 8 + threadIdx.y, batch = blockIdx.y, lane = threadIdx.x;
    const bool exists = row < queries;
    for (long long f = lane; f < d; f += 32)
        query[threadIdx.y][f] = exists ? (T)q[(batch * queries + row) * d + f] * (T)scale : (T)0;
    T top = -infinite(), sum = 0, result[MOST / 32] = {0};
    const long long block_end = (long long)(blockIdx.x + 1) * 8, end = causal && block_end < keys ? block_end : keys;
    for (long long start = 0; start < end; start += 32) {
        __syncthreads();
        load_tile(key, k + batch * keys * d, start, keys, d);
        load_tile(value, v + batch * keys * e, start, keys, e);
        __syncthreads();
        const bool seen = start + lane < keys && (!causal || start + lane <= row);
        const T score = seen ? dot(query[threadIdx.y], key[lane], d) : (T)-infinite();
        const T highest = fmax(top, warp_max(score)), shrink = exp(top - highest);
        const T power = seen ? exp(score - highest) : (T)0;
        sum = sum * shrink + warp_sum(power), top = highest;
        for (int slot = 0; slot < MOST / 32; slot++) result[slot] *= shrink;
        for (int j = 0; j < 32; j++) {
            const T weight = __shfl_sync(0xffffffffu, power, j);
            for (int slot = 0; slot * 32 + lane < e; slot++) result[slot] += weight * value[j][slot * 32 + lane];
        }
    }
    if (!exists) return;
    for (int slot = 0; slot * 32 + lane < e; slot++) y[(batch * queries + row) * e + slot * 32 + lane] = result[slot] / sum;
    if (lane == 0) total[batch * queries + row] = top + log(sum);
}

// dq, and shift = sum(g y) of each query, which `attention_dkv` uses again.
extern "C" __global__ void attention_dq(const S* g, const S* q, const S* k, const S* v, const S* y, const T* total, S* dq,
                                        T* shift, long long queries, long long keys, long long d, long long e,
                                        double scale, bool causal) {
    __shared__ T key[32][MOST + 1];
    __shared__ T value[32][MOST + 1];
    __shared__ T query[8][MOST];
    __shared__ T slope[8][MOST];
    const long long row = (long long)blockIdx.x * 8 + threadIdx.y, batch = blockIdx.y, lane = threadIdx.x;
    const bool exists = row < queries;
    const long long place = batch * queries + row;
    T along = 0, result[MOST / 32] = {0};
    for (long long f = lane; f < d; f += 32) query[threadIdx.y][f] = exists ? (T)q[place * d + f] * (T)scale : (T)0;
    for (long long f = lane; f < e; f += 32) {
        slope[threadIdx.y][f] = exists ? (T)g[place * e + f] : (T)0;
        along += exists ? (T)g[place * e + f] * (T)y[place * e + f] : (T)0;
    }
    along = warp_sum(along);
    const T logsum = exists ? total[place] : (T)0;
    const long long block_end = (long long)(blockIdx.x + 1) * 8, end = causal && block_end < keys ? block_end : keys;
    for (long long start = 0; start < end; start += 32) {
        __syncthreads();
        load_tile(key, k + batch * keys * d, start, keys, d);
        load_tile(value, v + batch * keys * e, start, keys, e);
        __syncthreads();
        const bool seen = exists && start + lane < keys && (!causal || start + lane <= row);
        const T power = seen ? exp(dot(query[threadIdx.y], key[lane], d) - logsum) : (T)0;
        const T change = seen ? power * (dot(slope[threadIdx.y], value[lane], e) - along) : (T)0;
        for (int j = 0; j < 32; j++) {
            const T weight = __shfl_sync(0xffffffffu, change, j);
            for (int slot = 0; slot * 32 + lane < d; slot++) result[slot] += weight * key[j][slot * 32 + lane];
        }
    }
    if (!exists) return;
    for (int slot = 0; slot * 32 + lane < d; slot++) dq[place * d + slot * 32 + lane] = result[slot] * (T)scale;
    if (lane == 0) shift[place] = along;
}

// dk and dv: a warp owns a key and meets all queries, so nothing is added by atomics.
extern "C" __global__ void attention_dkv(const S* g, const S* q, const S* k, const S* v, const T* total, const T* shift,
                                         S* dk, S* dv, long long queries, long long keys, long long d, long long e,
                                         double scale, bool causal) {
    __shared__ T query[32][MOST + 1];
    __shared__ T slope[32][MOST + 1];
    __shared__ T key[8][MOST];
    __shared__ T value[8][MOST];
    const long long row = (long long)blockIdx.x * 8 + threadIdx.y, batch = blockIdx.y, lane = threadIdx.x;
    const bool exists = row < keys;
    for (long long f = lane; f < d; f += 32)
        key[threadIdx.y][f] = exists ? (T)k[(batch * keys + row) * d + f] * (T)scale : (T)0;
    for (long long f = lane; f < e; f += 32) value[threadIdx.y][f] = exists ? (T)v[(batch * keys + row) * e + f] : (T)0;
    T for_key[MOST / 32] = {0}, for_value[MOST / 32] = {0};
    for (long long start = causal ? (long long)blockIdx.x * 8 / 32 * 32 : 0; start < queries; start += 32) {
        __syncthreads();
        load_tile(query, q + batch * queries * d, start, queries, d);
        load_tile(slope, g + batch * queries * e, start, queries, e);
        __syncthreads();
        const bool seen = exists && start + lane < queries && (!causal || row <= start + lane);
        const long long place = batch * queries + start + lane;
        const T power = seen ? exp(dot(key[threadIdx.y], query[lane], d) - total[place]) : (T)0;
        const T change = seen ? power * (dot(value[threadIdx.y], slope[lane], e) - shift[place]) : (T)0;
        for (int j = 0; j < 32; j++) {
            const T weight = __shfl_sync(0xffffffffu, power, j), turn = __shfl_sync(0xffffffffu, change, j);
            for (int slot = 0; slot * 32 + lane < e; slot++) for_value[slot] += weight * slope[j][slot * 32 + lane];
            for (int slot = 0; slot * 32 + lane < d; slot++) for_key[slot] += turn * query[j][slot * 32 + lane];
        }
    }
    if (!exists) return;
    for (int slot = 0; slot * 32 + lane < d; slot++)
        dk[(batch * keys + row) * d + slot * 32 + lane] = for_key[slot] * (T)scale;
    for (int slot = 0; slot * 32 + lane < e; slot++) dv[(batch * keys + row) * e + slot * 32 + lane] = for_value[slot];
}

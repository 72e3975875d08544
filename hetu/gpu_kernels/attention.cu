// Scaled dot-product attention without the matrix of scores: T. Dao et al., "FlashAttention", 2022.
//
// Arrays are (batch, queries or keys, heads, features), D features of queries and keys, E of values; what belongs to a
// query is (batch, heads, queries). A warp owns R queries (keys in `attention_dkv`) and a block of 8 warps shares
// tiles of 32 keys (queries) in shared memory: lanes are keys while scores are made, features while they are used.
// What is read from a tile serves R rows: with 4 of them shared memory takes about twice as long as arithmetic, with 1
// five times. Blocks with most work under a causal mask start first. Block (32, 8), grid (rows / 8 R, heads, batch).
// Bytes: queries and results once, the other side once for each block, against three times the whole matrix of scores
// for the composition. FLOP: 2 (D + E) a score forward, 4 D + 2 E for dq, 4 (D + E) for dk and dv, by the plain units;
// 16-bit floats go to the tensor cores, see `attention_tensor.cu`.

typedef Pack<T, 4> Four;
typedef Pack<T, R> Weights;

#define FOURS(width) ((width + 3) / 4)
#define ROW(width) FOURS(width) + 1  // a pack of padding: the 32 rows that lanes read lie in different banks
#define SLOTS(width) ((width + 31) / 32)

// rows[j] = source[first + j] * factor, 0 beyond the last row and the last feature.
template <int WIDTH, int COUNT>
__device__ inline void load_rows(Four (&rows)[COUNT][ROW(WIDTH)], const S* source, long long step, long long first,
                                 long long count, T factor) {
    const int padded = 4 * FOURS(WIDTH);
    for (int t = threadIdx.y * 32 + threadIdx.x; t < COUNT * padded; t += 256) {
        const int j = t / padded, f = t % padded;
        ((T*)rows[j])[f] = first + j < count && f < WIDTH ? (T)source[(first + j) * step + f] * factor : (T)0;
    }
}

// The products of the R rows that the warp owns with the row of this lane.
template <int WIDTH> __device__ inline void dots(T (&sum)[R], const Four (*own)[ROW(WIDTH)], const Four* other) {
    for (int r = 0; r < R; r++) sum[r] = 0;
    for (int f = 0; f < FOURS(WIDTH); f++) {
        const Four b = other[f];
        for (int r = 0; r < R; r++) {
            const Four a = own[threadIdx.y * R + r][f];
            for (int i = 0; i < 4; i++) sum[r] += a.v[i] * b.v[i];
        }
    }
}

// result[r] += the sum of 32 rows, weighted; a lane holds every 32nd feature.
template <int WIDTH>
__device__ inline void add_rows(T (&result)[R][SLOTS(WIDTH)], const Weights* weights, const Four (*rows)[ROW(WIDTH)]) {
    for (int j = 0; j < 32; j++) {
        const Weights weight = weights[j];
        for (int slot = 0; slot < SLOTS(WIDTH); slot++) {
            if (slot * 32 + 32 > WIDTH && slot * 32 + threadIdx.x >= WIDTH) continue;
            const T value = ((const T*)rows[j])[slot * 32 + threadIdx.x];
            for (int r = 0; r < R; r++) result[r][slot] += weight.v[r] * value;
        }
    }
}

template <int WIDTH>
__device__ inline void store_row(S* target, const T (&result)[SLOTS(WIDTH)], T factor) {
    for (int slot = 0; slot < SLOTS(WIDTH); slot++)
        if (slot * 32 + threadIdx.x < WIDTH) target[slot * 32 + threadIdx.x] = result[slot] * factor;
}

extern "C" __global__ void __launch_bounds__(256) attention(
    STRIDED(const S, q), STRIDED(const S, k), STRIDED(const S, v), STRIDED(S, y), T* total, long long queries,
    long long keys, double scale, bool causal) {
    __shared__ Four key[32][ROW(D)];
    __shared__ Four value[32][ROW(E)];
    __shared__ Four query[8 * R][ROW(D)];
    __shared__ Weights weights[8][32];
    const long long block = (gridDim.x - 1 - blockIdx.x) * 8LL * R, first = block + threadIdx.y * R;
    const long long end = causal && block + 8 * R < keys ? block + 8 * R : keys;
    T top[R], sum[R] = {0}, result[R][SLOTS(E)] = {0};
    for (int r = 0; r < R; r++) top[r] = -infinite();
    load_rows<D>(query, HEAD(q), q_row, block, queries, (T)scale);
    for (long long start = 0; start < end; start += 32) {
        __syncthreads();
        load_rows<D>(key, HEAD(k), k_row, start, keys, (T)1);
        load_rows<E>(value, HEAD(v), v_row, start, keys, (T)1);
        __syncthreads();
        const long long place = start + threadIdx.x;
        T score[R];
        Weights weight;
        dots<D>(score, query, key[threadIdx.x]);
        for (int r = 0; r < R; r++) {
            const T own = place < keys && (!causal || place <= first + r) ? score[r] : (T)-infinite();
            const T highest = fmax(top[r], warp_max(own)), shrink = exp(top[r] - highest);
            weight.v[r] = exp(own - highest);
            sum[r] = sum[r] * shrink + weight.v[r], top[r] = highest;
            for (int slot = 0; slot < SLOTS(E); slot++) result[r][slot] *= shrink;
        }
        weights[threadIdx.y][threadIdx.x] = weight;
        __syncwarp();
        add_rows<E>(result, weights[threadIdx.y], value);
    }
    for (int r = 0; r < R; r++) {
        const T whole = warp_sum(sum[r]);
        if (first + r >= queries) continue;
        store_row<E>(HEAD(y) + (first + r) * y_row, result[r], 1 / whole);
        if (threadIdx.x == 0) total[HEAD_NUMBER * queries + first + r] = top[r] + log(whole);
    }
}

// dq, and shift = sum(g y) of each query, which `attention_dkv` uses again.
extern "C" __global__ void __launch_bounds__(256) attention_dq(
    STRIDED(const S, g), STRIDED(const S, q), STRIDED(const S, k), STRIDED(const S, v), STRIDED(const S, y),
    const T* total, STRIDED(S, dq), T* shift, long long queries, long long keys, double scale, bool causal) {
    __shared__ Four key[32][ROW(D)];
    __shared__ Four value[32][ROW(E)];
    __shared__ Four query[8 * R][ROW(D)];
    __shared__ Four slope[8 * R][ROW(E)];
    __shared__ Weights changes[8][32];
    const long long block = (gridDim.x - 1 - blockIdx.x) * 8LL * R, first = block + threadIdx.y * R;
    const long long end = causal && block + 8 * R < keys ? block + 8 * R : keys;
    T along[R], logs[R], result[R][SLOTS(D)] = {0};
    load_rows<D>(query, HEAD(q), q_row, block, queries, (T)scale);
    load_rows<E>(slope, HEAD(g), g_row, block, queries, (T)1);
    for (int r = 0; r < R; r++) {
        const long long row = first + r, place = HEAD_NUMBER * queries + row;
        const S *one = HEAD(g) + row * g_row, *other = HEAD(y) + row * y_row;
        T sum = 0;
        for (int f = threadIdx.x; f < E && row < queries; f += 32) sum += (T)one[f] * (T)other[f];
        along[r] = warp_sum(sum), logs[r] = row < queries ? total[place] : (T)0;
        if (threadIdx.x == 0 && row < queries) shift[place] = along[r];
    }
    for (long long start = 0; start < end; start += 32) {
        __syncthreads();
        load_rows<D>(key, HEAD(k), k_row, start, keys, (T)1);
        load_rows<E>(value, HEAD(v), v_row, start, keys, (T)1);
        __syncthreads();
        const long long place = start + threadIdx.x;
        T score[R], slopes[R];
        Weights change;
        dots<D>(score, query, key[threadIdx.x]);
        dots<E>(slopes, slope, value[threadIdx.x]);
        for (int r = 0; r < R; r++) {
            const bool seen = place < keys && (!causal || place <= first + r);
            change.v[r] = seen ? exp(score[r] - logs[r]) * (slopes[r] - along[r]) : (T)0;
        }
        changes[threadIdx.y][threadIdx.x] = change;
        __syncwarp();
        add_rows<D>(result, changes[threadIdx.y], key);
    }
    for (int r = 0; r < R; r++)
        if (first + r < queries) store_row<D>(HEAD(dq) + (first + r) * dq_row, result[r], (T)scale);
}

// dk and dv: a warp owns keys and meets all queries, so nothing is added by atomics.
extern "C" __global__ void __launch_bounds__(256) attention_dkv(
    STRIDED(const S, g), STRIDED(const S, q), STRIDED(const S, k), STRIDED(const S, v), const T* total, const T* shift,
    STRIDED(S, dk), STRIDED(S, dv), long long queries, long long keys, double scale, bool causal) {
    __shared__ Four query[32][ROW(D)];
    __shared__ Four slope[32][ROW(E)];
    __shared__ Four key[8 * R][ROW(D)];
    __shared__ Four value[8 * R][ROW(E)];
    __shared__ Weights weights[8][32];
    __shared__ Weights changes[8][32];
    const long long block = blockIdx.x * 8LL * R, first = block + threadIdx.y * R;
    T for_key[R][SLOTS(D)] = {0}, for_value[R][SLOTS(E)] = {0};
    load_rows<D>(key, HEAD(k), k_row, block, keys, (T)scale);
    load_rows<E>(value, HEAD(v), v_row, block, keys, (T)1);
    for (long long start = causal ? block / 32 * 32 : 0; start < queries; start += 32) {
        __syncthreads();
        load_rows<D>(query, HEAD(q), q_row, start, queries, (T)1);
        load_rows<E>(slope, HEAD(g), g_row, start, queries, (T)1);
        __syncthreads();
        const long long row = start + threadIdx.x, place = HEAD_NUMBER * queries + row;
        const T log_sum = row < queries ? total[place] : (T)0, along = row < queries ? shift[place] : (T)0;
        T score[R], slopes[R];
        Weights weight, change;
        dots<D>(score, key, query[threadIdx.x]);
        dots<E>(slopes, value, slope[threadIdx.x]);
        for (int r = 0; r < R; r++) {
            const bool seen = row < queries && (!causal || first + r <= row);
            weight.v[r] = seen ? exp(score[r] - log_sum) : (T)0;
            change.v[r] = seen ? weight.v[r] * (slopes[r] - along) : (T)0;
        }
        weights[threadIdx.y][threadIdx.x] = weight, changes[threadIdx.y][threadIdx.x] = change;
        __syncwarp();
        add_rows<E>(for_value, weights[threadIdx.y], slope);
        add_rows<D>(for_key, changes[threadIdx.y], query);
    }
    for (int r = 0; r < R; r++) {
        if (first + r >= keys) continue;
        store_row<D>(HEAD(dk) + (first + r) * dk_row, for_key[r], (T)scale);
        store_row<E>(HEAD(dv) + (first + r) * dv_row, for_value[r], (T)1);
    }
}

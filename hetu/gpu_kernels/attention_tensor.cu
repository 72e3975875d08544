// Attention of 16-bit floats on tensor cores: T. Dao, "FlashAttention-2", 2023, algorithms 1 and 2, by mma.sync.
//
// Arrays as in `attention.cu`; D features of queries and keys, E of values, multiples of 16 up to 128. A block of 4
// warps owns 64 R queries (64 keys in `attention_dkv`), each warp 16 R of them, and walks over tiles of the other side
// in shared memory, each copied while the one before it is worked on. Scores, weights and results stay in registers:
// what a lane holds of a product is what it must bring to the next. Blocks that a causal mask hides are skipped, those
// with most work start first, and nothing is added by atomics. Block 128, grid (rows / 64 R, heads, batch).
// Bytes: queries and results once, the other side once for each block, mostly from the second-level cache. FLOP:
// 2 (D + E) a score forward, 4 D + 2 E for dq, 4 (D + E) for dk and dv, half of it where causal; below about 300
// positions (600 where causal) memory takes longer. Shared memory: two tiles, each row with a chunk of padding, so that
// the 8 rows that are read together lie in different banks: 37 KB for 64 features, 35 KB for 128. Registers: at most
// 255 without spilling, so that two blocks share a multiprocessor.

const int WARPS = 4, LANES = 32 * WARPS;
const int ROWS = D + E <= 128 ? 64 : 32;  // of a tile: two of each side fit 48 KB
const float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

__device__ inline float half_of(unsigned both, int i) {
    S value;
    value.bits = (unsigned short)(both >> 16 * i);
    return value;
}

// What a lane holds of 16 columns of weights, as the left operand of a product with 16 rows.
__device__ inline void as_left(unsigned (&left)[4], const float (&sum)[2][4]) {
    for (int i = 0; i < 4; i++) left[i] = rounded_pair(sum[i / 2][i % 2 * 2], sum[i / 2][i % 2 * 2 + 1], S());
}

template <int WIDTH>
__device__ inline void load_tile(Chunk (*tile)[WIDTH / 8 + 1], const S* source, long long step, long long first,
                                 long long count) {
    for (int i = threadIdx.x; i < ROWS * (WIDTH / 8); i += LANES) {
        const int row = i / (WIDTH / 8), column = i % (WIDTH / 8);
        const bool exists = first + row < count;
        copy_async(&tile[row][column], (const Chunk*)(source + (exists ? first + row : 0) * step) + column, exists);
    }
}

// 16 rows as left operands, straight from global memory: each is read once.
template <int WIDTH>
__device__ inline void load_left(unsigned (&left)[WIDTH / 16][4], const S* source, long long step, long long first,
                                 long long count) {
    const int lane = threadIdx.x % 32;
    for (int k = 0; k < WIDTH / 16; k++)
        for (int i = 0; i < 4; i++) {
            const long long row = first + lane / 4 + i % 2 * 8;
            left[k][i] = row < count ? *(const unsigned*)(source + row * step + k * 16 + i / 2 * 8 + lane % 4 * 2) : 0;
        }
}

// sum = left rows^T for 16 rows of a tile from `first`.
template <int COUNT, int WIDTH>
__device__ inline void multiply_rows(float (&sum)[COUNT][2][4], const unsigned (&left)[COUNT][WIDTH / 16][4],
                                     Chunk (*tile)[WIDTH / 8 + 1], int first) {
    const int lane = threadIdx.x % 32;
    for (int m = 0; m < COUNT; m++)
        for (int i = 0; i < 8; i++) sum[m][i / 4][i % 4] = 0;
    for (int k = 0; k < WIDTH / 16; k++) {
        unsigned right[4];
        load_matrices(right, &tile[first + lane / 16 * 8 + lane % 8][k * 2 + lane / 8 % 2]);
        for (int m = 0; m < COUNT; m++)
            for (int n = 0; n < 2; n++) multiply_add(sum[m][n], left[m][k], right + 2 * n, S());
    }
}

// sum += left rows for the same rows.
template <int COUNT, int WIDTH>
__device__ inline void multiply_columns(float (&sum)[COUNT][WIDTH / 8][4], const unsigned (&left)[COUNT][4],
                                        Chunk (*tile)[WIDTH / 8 + 1], int first) {
    const int lane = threadIdx.x % 32;
    for (int f = 0; f < WIDTH / 16; f++) {
        unsigned right[4];
        load_matrices_transposed(right, &tile[first + lane % 16][f * 2 + lane / 16]);
        for (int m = 0; m < COUNT; m++)
            for (int n = 0; n < 2; n++) multiply_add(sum[m][2 * f + n], left[m], right + 2 * n, S());
    }
}

// The rows g and g + 8 that a lane holds of a result, times `factor` of each.
template <int WIDTH>
__device__ inline void store_rows(S* target, long long step, long long first, long long count,
                                  const float (&sum)[WIDTH / 8][4], const float (&factor)[2]) {
    const int lane = threadIdx.x % 32;
    for (int h = 0; h < 2; h++) {
        const long long row = first + lane / 4 + h * 8;
        if (row >= count) continue;
        for (int f = 0; f < WIDTH / 8; f++)
            *(unsigned*)(target + row * step + f * 8 + lane % 4 * 2) =
                rounded_pair(sum[f][2 * h] * factor[h], sum[f][2 * h + 1] * factor[h], S());
    }
}

// Whether 16 R queries from `first` on may see the whole tile of keys from `start` on: most tiles need no mask.
__device__ inline bool sees_all(long long first, long long start, long long keys, bool causal) {
    return start + ROWS <= (causal && first < keys ? first + 1 : keys);
}

// Their scores with 16 keys of a tile, from `column` on, become -infinity where they are hidden or do not exist.
__device__ inline void hide(float (&score)[R][2][4], int column, long long first, long long start, long long keys,
                            bool causal) {
    for (int i = 0; i < 2 * R; i++) {
        const long long row = first + 8 * i + threadIdx.x % 32 / 4, last = causal && row < keys ? row : keys - 1;
        const int seen = (int)(last - start < ROWS ? last - start : ROWS) - column - threadIdx.x % 4 * 2;
        for (int n = 0; n < 4; n++)
            if (n / 2 * 8 + n % 2 > seen) score[i / 2][n / 2][i % 2 * 2 + n % 2] = -infinite();
    }
}

__device__ inline float quad_sum(float v) {  // over the lanes that share a row
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

__device__ inline float quad_max(float v) {  // a NaN loses here, and makes the sum one
    v = ::fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 1));
    return ::fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 2));
}

// Scores of a row become weights, of which this lane holds some: 2^(factor score - top). The highest score so far, times
// `factor`, and the sum follow; returns what earlier weights are to be multiplied by.
__device__ inline float weigh(float (&score)[ROWS / 16][R][2][4], int m, int h, float factor, float& top, float& sum) {
    float most = -infinite();
    for (int j = 0; j < ROWS / 8; j++)
        for (int i = 0; i < 2; i++) most = ::fmaxf(most, score[j / 2][m][j % 2][2 * h + i]);
    const float before = top;
    top = ::fmaxf(before, quad_max(most) * factor);
    const float shrink = power_of_two(before - top);
    sum *= shrink;
    for (int j = 0; j < ROWS / 8; j++)
        for (int i = 0; i < 2; i++) {
            float& s = score[j / 2][m][j % 2][2 * h + i];
            s = power_of_two(s * factor - top);
            sum += s;
        }
    return shrink;
}

extern "C" __global__ void __launch_bounds__(128) attention(
    STRIDED(const S, q), STRIDED(const S, k), STRIDED(const S, v), STRIDED(S, y), float* total, long long queries,
    long long keys, double scale, bool causal) {
    __shared__ Chunk key[2][ROWS][D / 8 + 1];
    __shared__ Chunk value[2][ROWS][E / 8 + 1];
    const long long block = (gridDim.x - 1 - blockIdx.x) * 64LL * R, first = block + threadIdx.x / 32 * 16 * R;
    const long long end = causal && block + 64 * R < keys ? block + 64 * R : keys;
    const float factor = (float)scale * LOG2_E;
    unsigned query[R][D / 16][4];
    float result[R][E / 8][4] = {}, top[R][2], sum[R][2] = {};
    auto load = [&](int place, long long start) {
        load_tile<D>(key[place], HEAD(k), k_row, start, keys);
        load_tile<E>(value[place], HEAD(v), v_row, start, keys);
    };
    load(0, 0);
    for (int m = 0; m < R; m++) {
        load_left<D>(query[m], HEAD(q), q_row, first + 16 * m, queries);
        top[m][0] = top[m][1] = -infinite();
    }
    int now = 0;
    for (long long start = 0; start < end; start += ROWS, now = 1 - now) {
        wait_for_copies();
        __syncthreads();  // this tile is there, and nobody works on the one before it
        if (start + ROWS < end) load(1 - now, start + ROWS);
        float score[ROWS / 16][R][2][4];
        for (int j = 0; j < ROWS / 16; j++) multiply_rows<R, D>(score[j], query, key[now], 16 * j);
        if (!sees_all(first, start, keys, causal))
            for (int j = 0; j < ROWS / 16; j++) hide(score[j], 16 * j, first, start, keys, causal);
        for (int m = 0; m < R; m++)
            for (int h = 0; h < 2; h++) {
                const float shrink = weigh(score, m, h, factor, top[m][h], sum[m][h]);
                for (int f = 0; f < E / 8; f++)
                    for (int i = 0; i < 2; i++) result[m][f][2 * h + i] *= shrink;
            }
        for (int j = 0; j < ROWS / 16; j++) {
            unsigned weight[R][4];
            for (int m = 0; m < R; m++) as_left(weight[m], score[j][m]);
            multiply_columns<R, E>(result, weight, value[now], 16 * j);
        }
    }
    for (int m = 0; m < R; m++) {
        float inverse[2];
        for (int h = 0; h < 2; h++) {
            const long long row = first + 16 * m + threadIdx.x % 32 / 4 + 8 * h;
            const float whole = quad_sum(sum[m][h]);
            inverse[h] = 1 / whole;
            if (threadIdx.x % 4 == 0 && row < queries)
                total[HEAD_NUMBER * queries + row] = top[m][h] * LN_2 + log(whole);
        }
        store_rows<E>(HEAD(y), y_row, first + 16 * m, queries, result[m], inverse);
    }
}

// The products along the rows g and g + 8 of a left operand with the same rows in memory.
__device__ inline void dot_rows(float (&dot)[2], const unsigned (&left)[E / 16][4], const S* source, long long step,
                                long long first, long long count) {
    unsigned other[E / 16][4];
    load_left<E>(other, source, step, first, count);
    dot[0] = dot[1] = 0;
    for (int f = 0; f < E / 16; f++)
        for (int i = 0; i < 8; i++) dot[i / 2 % 2] += half_of(left[f][i / 2], i % 2) * half_of(other[f][i / 2], i % 2);
    for (int h = 0; h < 2; h++) dot[h] = quad_sum(dot[h]);
}

// dq, and shift = sum(g y) of each query, which `attention_dkv` uses again.
extern "C" __global__ void __launch_bounds__(128) attention_dq(
    STRIDED(const S, g), STRIDED(const S, q), STRIDED(const S, k), STRIDED(const S, v), STRIDED(const S, y),
    const float* total, STRIDED(S, dq), float* shift, long long queries, long long keys, double scale, bool causal) {
    __shared__ Chunk key[2][ROWS][D / 8 + 1];
    __shared__ Chunk value[2][ROWS][E / 8 + 1];
    const long long block = (gridDim.x - 1 - blockIdx.x) * 64LL * R, first = block + threadIdx.x / 32 * 16 * R;
    const long long end = causal && block + 64 * R < keys ? block + 64 * R : keys;
    const float factor = (float)scale * LOG2_E;
    unsigned query[R][D / 16][4], slope[R][E / 16][4];
    float result[R][D / 8][4] = {}, along[R][2], logs[R][2];
    auto load = [&](int place, long long start) {
        load_tile<D>(key[place], HEAD(k), k_row, start, keys);
        load_tile<E>(value[place], HEAD(v), v_row, start, keys);
    };
    load(0, 0);
#pragma unroll
    for (int m = 0; m < R; m++) {
        load_left<D>(query[m], HEAD(q), q_row, first + 16 * m, queries);
        load_left<E>(slope[m], HEAD(g), g_row, first + 16 * m, queries);
        dot_rows(along[m], slope[m], HEAD(y), y_row, first + 16 * m, queries);
        for (int h = 0; h < 2; h++) {
            const long long row = first + 16 * m + threadIdx.x % 32 / 4 + 8 * h, place = HEAD_NUMBER * queries + row;
            logs[m][h] = row < queries ? total[place] * LOG2_E : 0;
            if (threadIdx.x % 4 == 0 && row < queries) shift[place] = along[m][h];
        }
    }
    int now = 0;
    for (long long start = 0; start < end; start += ROWS, now = 1 - now) {
        wait_for_copies();
        __syncthreads();
        if (start + ROWS < end) load(1 - now, start + ROWS);
        for (int j = 0; j < ROWS / 16; j++) {
            float score[R][2][4], change[R][2][4];
            unsigned left[R][4];
            multiply_rows<R, D>(score, query, key[now], 16 * j);
            multiply_rows<R, E>(change, slope, value[now], 16 * j);
            if (!sees_all(first, start, keys, causal)) hide(score, 16 * j, first, start, keys, causal);
            for (int m = 0; m < R; m++) {
                for (int i = 0; i < 8; i++) {
                    const int h = i / 2 % 2;
                    float& c = change[m][i / 4][i % 4];
                    c = power_of_two(score[m][i / 4][i % 4] * factor - logs[m][h]) * (c - along[m][h]);
                }
                as_left(left[m], change[m]);
            }
            multiply_columns<R, D>(result, left, key[now], 16 * j);
        }
    }
    const float factors[2] = {(float)scale, (float)scale};
    for (int m = 0; m < R; m++) store_rows<D>(HEAD(dq), dq_row, first + 16 * m, queries, result[m], factors);
}

// dk and dv: a warp owns 16 keys. A query beyond the last has slope and shift 0, so its weight of 1 adds nothing.
extern "C" __global__ void __launch_bounds__(128) attention_dkv(
    STRIDED(const S, g), STRIDED(const S, q), STRIDED(const S, k), STRIDED(const S, v), const float* total,
    const float* shift, STRIDED(S, dk), STRIDED(S, dv), long long queries, long long keys, double scale, bool causal) {
    __shared__ Chunk query[2][ROWS][D / 8 + 1];
    __shared__ Chunk slope[2][ROWS][E / 8 + 1];
    __shared__ float logs[2][ROWS];
    __shared__ float shifts[2][ROWS];
    const int lane = threadIdx.x % 32;
    const long long block = blockIdx.x * 64LL, first = block + threadIdx.x / 32 * 16;
    const float factor = (float)scale * LOG2_E;
    unsigned key[1][D / 16][4], value[1][E / 16][4];
    float for_key[1][D / 8][4] = {}, for_value[1][E / 8][4] = {};
    auto load = [&](int place, long long start) {
        load_tile<D>(query[place], HEAD(q), q_row, start, queries);
        load_tile<E>(slope[place], HEAD(g), g_row, start, queries);
        for (int i = threadIdx.x; i < 2 * ROWS; i += LANES) {
            const bool exists = start + i % ROWS < queries;
            const float* source = (i < ROWS ? total : shift) + HEAD_NUMBER * queries + (exists ? start + i % ROWS : 0);
            copy_async((i < ROWS ? logs : shifts)[place] + i % ROWS, source, exists);
        }
    };
    long long start = causal ? block : 0;
    if (start < queries) load(0, start);
    load_left<D>(key[0], HEAD(k), k_row, first, keys);
    load_left<E>(value[0], HEAD(v), v_row, first, keys);
    for (int now = 0; start < queries; start += ROWS, now = 1 - now) {
        wait_for_copies();
        __syncthreads();
        if (start + ROWS < queries) load(1 - now, start + ROWS);
        const bool diagonal = causal && start < first + 15;  // else all of these queries see all of these keys
        for (int j = 0; j < ROWS / 16; j++) {
            float weight[1][2][4], change[1][2][4];
            unsigned left[1][4];
            multiply_rows<1, D>(weight, key, query[now], 16 * j);
            multiply_rows<1, E>(change, value, slope[now], 16 * j);
            if (diagonal)
                for (int i = 0; i < 8; i++)
                    if (start + 16 * j + i / 4 * 8 + lane % 4 * 2 + i % 2 < first + lane / 4 + i / 2 % 2 * 8)
                        weight[0][i / 4][i % 4] = -infinite();
            for (int i = 0; i < 8; i++) {
                const int column = 16 * j + i / 4 * 8 + lane % 4 * 2 + i % 2;
                float &w = weight[0][i / 4][i % 4], &c = change[0][i / 4][i % 4];
                w = power_of_two(w * factor - logs[now][column] * LOG2_E);
                c = w * (c - shifts[now][column]);
            }
            as_left(left[0], weight[0]);
            multiply_columns<1, E>(for_value, left, slope[now], 16 * j);
            as_left(left[0], change[0]);
            multiply_columns<1, D>(for_key, left, query[now], 16 * j);
        }
    }
    const float factors[2] = {(float)scale, (float)scale}, ones[2] = {1, 1};
    store_rows<D>(HEAD(dk), dk_row, first, keys, for_key[0], factors);
    store_rows<E>(HEAD(dv), dv_row, first, keys, for_value[0], ones);
}

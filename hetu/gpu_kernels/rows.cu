// Functions of whole rows: softmax, its cross entropy, layer and RMS norm, and their gradients.
//
// Arrays are (rows, width) in C order. A team of TEAM threads owns a row; reductions are those of the prelude. Launch:
// teams of 32 are 8 to a block, (32, 8); a larger one is a block, (TEAM, 1). Cross entropies and norms may store in other
// dtypes than x in S: vectors in V, gradients that come in in G, results in Y.
//
// `rows.py` puts in front what depends on the width. Threads move PACK neighbors at once, and load KEPT packs before they
// work on the first, so that memory is waited for once. If WHOLE, these are all there are: the row stays in registers and
// is read from memory once; a longer one is read again from the cache. If RAGGED, the width is no multiple of PACK: rows
// begin anywhere, and a few elements before and behind the packs of a row go one by one.

#define FOR_ROWS                                                                      \
    for (long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y; row < rows; \
         row += (long long)gridDim.x * blockDim.y)
const int BLOCK = TEAM == 32 ? 256 : TEAM;

struct Span {  // which columns of a row are this thread's: packs from `first`, and the element `edge` if it is not -1
    int first, end, edge;
    __device__ Span(long long row, long long width) {
        const int misses = -(row * width) & PACK - 1, head = misses < width ? misses : (int)width, i = threadIdx.x;
        const int tail = (width - head) % PACK;
        end = width - tail, first = head + i * PACK;
        edge = !RAGGED ? -1 : i < head ? i : i - head < tail ? end + i - head : -1;
    }
};

template <class V>
struct Row {  // what a thread has of a row of an array; only where packs are single elements they lie `stride` apart
    const V* x;
    const long long stride;
    Pack<V, 1> single;
    Pack<V, PACK> kept[KEPT];

    __device__ Row(const V* x, const Span& span, long long stride = 1) : x(x), stride(PACK == 1 ? stride : 1) {
        if (span.edge >= 0) single.v[0] = x[span.edge];
        if (WHOLE) read(span, span.first);
    }
    __device__ void read(const Span& span, int first) {
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            const int c = first + k * TEAM * PACK;
            if (c < span.end) kept[k] = load<PACK>(x + c * stride);
        }
    }
};

// Calls `visit(column, packs...)` for whatever this thread has of the rows.
template <class Visit, class... V>
__device__ inline void each(const Span& span, Visit visit, Row<V>&... rows) {
    if (span.edge >= 0) visit(span.edge, rows.single...);
    for (int first = span.first; first < span.end; first += KEPT * TEAM * PACK) {
        if (!WHOLE) (rows.read(span, first), ...);
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            const int c = first + k * TEAM * PACK;
            if (c < span.end) visit(c, rows.kept[k]...);
        }
        if (WHOLE) break;
    }
}

// N elements of a vector that lies beside every row, whose packs are not those of a ragged row.
template <int N, class V>
__device__ inline Pack<V, N> beside(const V* vector, int c) {
    if (!RAGGED) return load<N>(vector + c);
    Pack<V, N> values;
    for (int i = 0; i < N; i++) values.v[i] = vector[c + i];
    return values;
}

// -- softmax -----------------------------------------------------------------------------------------------------------

__device__ inline float larger(float a, float b) { return ::fmaxf(a, b); }  // a NaN loses
__device__ inline double larger(double a, double b) { return ::fmax(a, b); }
__device__ inline float weight(float v) { return power_of_two(v * 1.4426950408889634f); }  // exp(v) of a v up to 0
__device__ inline double weight(double v) { return exp(v); }

// The maximum of a row and the sum of exp(x - maximum), in one pass over the row: M. Milakov, N. Gimelshein, "Online
// normalizer calculation for softmax", 2018, algorithm 3, a pack at a time.
__device__ inline void exponential_sum(Row<S>& x, const Span& span, T& top, T& total) {
    T most = -infinite(), sum = 0;
    each(span, [&](int, auto v) {
        T highest = most;
        for (int i = 0; i < v.count; i++) highest = larger(highest, v.v[i]);
        const T shift = isfinite(highest) ? highest : (T)0;  // infinity minus infinity is NaN
        sum *= weight(most - shift);
        for (int i = 0; i < v.count; i++) sum += weight((T)v.v[i] - shift);
        most = highest;
    }, x);
    top = team_max(most);
    total = team_sum(most == top ? sum : sum * weight(most - top));
}

// softmax along an axis with `inner` elements between neighbors. Bytes: x and y once. FLOP: about 6 an element.
extern "C" __global__ void __launch_bounds__(BLOCK) softmax(
    const S* x, S* y, long long rows, long long width, long long inner) {
    FOR_ROWS {
        const long long start = row / inner * width * inner + row % inner;
        const Span span(row, width);
        Row<S> own(x + start, span, inner);
        T top, total;
        exponential_sum(own, span, top, total);
        const T scale = 1 / total;
        each(span, [&](int c, auto v) {
            for (int i = 0; i < v.count; i++) v.v[i] = weight((T)v.v[i] - top) * scale;
            store(y + start + c * own.stride, v);
        }, own);
    }
}

// Its logarithm. Bytes: x and y once.
extern "C" __global__ void __launch_bounds__(BLOCK) log_softmax(
    const S* x, S* y, long long rows, long long width, long long inner) {
    FOR_ROWS {
        const long long start = row / inner * width * inner + row % inner;
        const Span span(row, width);
        Row<S> own(x + start, span, inner);
        T top, total;
        exponential_sum(own, span, top, total);
        const T shift = log(total);  // added to the maximum, it would lose its digits beside a large one
        each(span, [&](int c, auto v) {
            for (int i = 0; i < v.count; i++) v.v[i] = (T)v.v[i] - top - shift;
            store(y + start + c * own.stride, v);
        }, own);
    }
}

// loss = log(sum(exp(row))) - row[label], with label smoothing toward the mean of the row; total = log(sum(exp(row))).
// Bytes: the logits once, with smoothing a long row twice; the rest is a number a row. FLOP: about 5 an element.
extern "C" __global__ void __launch_bounds__(BLOCK) softmax_cross_entropy(
    const S* logits, const I* labels, V* loss, V* total, long long rows, long long width, bool skips,
    long long skipped, double smoothing) {
    FOR_ROWS {
        const Span span(row, width);
        Row<S> x(logits + row * width, span);
        T top, sum, all = 0;
        exponential_sum(x, span, top, sum);
        if (smoothing > 0) {
            each(span, [&](int, auto v) { for (int i = 0; i < v.count; i++) all += (T)v.v[i]; }, x);
            all = team_sum(all);
        }
        if (threadIdx.x == 0) {
            const long long label = labels[row];
            const T logsum = top + log(sum), own = label >= 0 && label < width ? (T)x.x[label] : (T)0;
            total[row] = logsum;
            const T smoothed = smoothing > 0 ? (T)smoothing * (own - all / width) : (T)0;  // 0 infinity would be NaN
            loss[row] = skips && label == skipped ? (T)0 : logsum - own + smoothed;
        }
    }
}

// dx = g (exp(row - total) - target). Bytes: logits and dx once. FLOP: about 4 an element. No reduction.
extern "C" __global__ void __launch_bounds__(BLOCK) softmax_cross_entropy_dx(
    const V* g, const S* logits, const I* labels, const V* total, Y* dx, long long rows, long long width, bool skips,
    long long skipped, double smoothing) {
    FOR_ROWS {
        const Span span(row, width);
        Row<S> x(logits + row * width, span);
        const long long label = labels[row];
        const T slope = skips && label == skipped ? (T)0 : (T)g[row], shift = total[row];
        const T own = (T)(1 - smoothing), others = (T)(smoothing / width);
        each(span, [&](int c, auto v) {
            Pack<T, v.count> change;
            Pack<Y, v.count> result;
            for (int i = 0; i < v.count; i++) change.v[i] = weight((T)v.v[i] - shift) - others;
            if (c <= label && label < c + v.count)
                for (int i = 0; i < v.count; i++) change.v[i] -= c + i == label ? own : (T)0;
            for (int i = 0; i < v.count; i++) result.v[i] = slope * change.v[i];
            store(dx + row * width + c, result);
        }, x);
    }
}

// -- normalization ---------------------------------------------------------------------------------------------------

// Mean and 1 / sqrt(variance + epsilon) of a row; the second pass over the cached row keeps the variance exact.
__device__ inline void moments(Row<S>& x, const Span& span, long long width, double epsilon, T& mean, T& inverse) {
    T sum = 0, squares = 0;
    each(span, [&](int, auto v) { for (int i = 0; i < v.count; i++) sum += (T)v.v[i]; }, x);
    const T middle = team_sum(sum) / width;
    each(span, [&](int, auto v) {
        for (int i = 0; i < v.count; i++) {
            const T d = (T)v.v[i] - middle;
            squares += d * d;
        }
    }, x);
    mean = middle, inverse = 1 / sqrt(team_sum(squares) / width + (T)epsilon);
}

// J. L. Ba et al., "Layer Normalization", 2016. Bytes: x and y once, two vectors from the cache. FLOP: 8 an element.
extern "C" __global__ void __launch_bounds__(BLOCK) layer_norm(
    const S* x, const V* scale, const V* bias, Y* y, long long rows, long long width, double epsilon) {
    FOR_ROWS {
        const Span span(row, width);
        Row<S> own(x + row * width, span);
        T mean, inverse;
        moments(own, span, width, epsilon, mean, inverse);
        each(span, [&](int c, auto v) {
            const auto a = beside<v.count>(scale, c), b = beside<v.count>(bias, c);
            Pack<Y, v.count> result;
            for (int i = 0; i < v.count; i++) result.v[i] = ((T)v.v[i] - mean) * inverse * (T)a.v[i] + (T)b.v[i];
            store(y + row * width + c, result);
        }, own);
    }
}

// The gradient of x, and (mean, inverse) of each row for `norm_columns`. Bytes: g, x and dx once. FLOP: 16 an element.
extern "C" __global__ void __launch_bounds__(BLOCK) layer_norm_dx(
    const G* g, const S* x, const V* scale, Y* dx, T* statistics, long long rows, long long width, double epsilon) {
    FOR_ROWS {
        const Span span(row, width);
        Row<G> slopes(g + row * width, span);
        Row<S> own(x + row * width, span);
        T mean, inverse, sum = 0, along = 0;
        moments(own, span, width, epsilon, mean, inverse);
        each(span, [&](int c, auto u, auto v) {
            const auto a = beside<v.count>(scale, c);
            for (int i = 0; i < v.count; i++) {
                const T scaled = (T)u.v[i] * (T)a.v[i];
                sum += scaled, along += scaled * (((T)v.v[i] - mean) * inverse);
            }
        }, slopes, own);
        sum = team_sum(sum) / width, along = team_sum(along) / width;
        each(span, [&](int c, auto u, auto v) {
            const auto a = beside<v.count>(scale, c);
            Pack<Y, v.count> result;
            for (int i = 0; i < v.count; i++) {
                const T normal = ((T)v.v[i] - mean) * inverse;
                result.v[i] = ((T)u.v[i] * (T)a.v[i] - sum - normal * along) * inverse;
            }
            store(dx + row * width + c, result);
        }, slopes, own);
        if (threadIdx.x == 0) statistics[2 * row] = mean, statistics[2 * row + 1] = inverse;
    }
}

// B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019. Bytes: x and y once. FLOP: 4 an element.
extern "C" __global__ void __launch_bounds__(BLOCK) rms_norm(
    const S* x, const V* scale, Y* y, long long rows, long long width, double epsilon) {
    FOR_ROWS {
        const Span span(row, width);
        Row<S> own(x + row * width, span);
        T squares = 0;
        each(span, [&](int, auto v) { for (int i = 0; i < v.count; i++) squares += (T)v.v[i] * (T)v.v[i]; }, own);
        const T inverse = 1 / sqrt(team_sum(squares) / width + (T)epsilon);
        each(span, [&](int c, auto v) {
            const auto a = beside<v.count>(scale, c);
            Pack<Y, v.count> result;
            for (int i = 0; i < v.count; i++) result.v[i] = (T)v.v[i] * inverse * (T)a.v[i];
            store(y + row * width + c, result);
        }, own);
    }
}

// Its gradient of x, with (0, inverse) of each row for `norm_columns`. Bytes: g, x and dx once. FLOP: 10 an element.
extern "C" __global__ void __launch_bounds__(BLOCK) rms_norm_dx(
    const G* g, const S* x, const V* scale, Y* dx, T* statistics, long long rows, long long width, double epsilon) {
    FOR_ROWS {
        const Span span(row, width);
        Row<G> slopes(g + row * width, span);
        Row<S> own(x + row * width, span);
        T squares = 0, along = 0;
        each(span, [&](int c, auto u, auto v) {
            const auto a = beside<v.count>(scale, c);
            for (int i = 0; i < v.count; i++) {
                squares += (T)v.v[i] * (T)v.v[i], along += (T)u.v[i] * (T)a.v[i] * (T)v.v[i];
            }
        }, slopes, own);
        const T inverse = 1 / sqrt(team_sum(squares) / width + (T)epsilon);
        along = team_sum(along) / width * inverse * inverse;
        each(span, [&](int c, auto u, auto v) {
            const auto a = beside<v.count>(scale, c);
            Pack<Y, v.count> result;
            for (int i = 0; i < v.count; i++) result.v[i] = ((T)u.v[i] * (T)a.v[i] - (T)v.v[i] * along) * inverse;
            store(dx + row * width + c, result);
        }, slopes, own);
        if (threadIdx.x == 0) statistics[2 * row] = 0, statistics[2 * row + 1] = inverse;
    }
}

// Sums of g normal and of g over a part of the rows, for the gradients of scale and bias: parts[part][2][width].
// Block (32, 8): a warp reads 32 neighboring packs of one row, single elements where rows are ragged. Grid (packs / 32,
// parts). Bytes: g and x once; the parts, added up by the next kernel in a fixed order, keep the result independent of
// timing.
extern "C" __global__ void norm_columns(const G* g, const S* x, const T* statistics, T* parts, long long rows,
                                        long long width) {
    const int COUNT = RAGGED ? 1 : PACK;
    __shared__ T sums[2][8][33];
    const long long c = ((long long)blockIdx.x * 32 + threadIdx.x) * COUNT, each = (rows + gridDim.y - 1) / gridDim.y;
    const long long end = (blockIdx.y + 1) * each < rows ? (blockIdx.y + 1) * each : rows;
    T weighed[COUNT] = {}, plain[COUNT] = {};
    if (c < width)
#pragma unroll 4
        for (long long row = blockIdx.y * each + threadIdx.y; row < end; row += 8) {
            const auto u = load<COUNT>(g + row * width + c);
            const auto v = load<COUNT>(x + row * width + c);
            const T mean = statistics[2 * row], inverse = statistics[2 * row + 1];
            for (int i = 0; i < COUNT; i++)
                weighed[i] += (T)u.v[i] * (((T)v.v[i] - mean) * inverse), plain[i] += (T)u.v[i];
        }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {  // one column of each pack at a time
        sums[0][threadIdx.y][threadIdx.x] = weighed[i], sums[1][threadIdx.y][threadIdx.x] = plain[i];
        __syncthreads();
        if (threadIdx.y < 2 && c < width) {
            T total = 0;
            for (int k = 0; k < 8; k++) total += sums[threadIdx.y][k][threadIdx.x];
            parts[(2 * blockIdx.y + threadIdx.y) * width + c + i] = total;
        }
        __syncthreads();
    }
}

// first = sum of parts[.][0], second = sum of parts[.][1]. Block (32, 8), whose warps share the parts of 32 columns; grid
// (width / 32, 2).
extern "C" __global__ void add_parts(const T* parts, V* first, V* second, long long count, long long width) {
    __shared__ T sums[8][32];
    const long long c = (long long)blockIdx.x * 32 + threadIdx.x;
    T total = 0;
    if (c < width)
#pragma unroll 8
        for (long long k = threadIdx.y; k < count; k += 8) total += parts[(2 * k + blockIdx.y) * width + c];
    sums[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y || c >= width) return;
    for (int k = 1; k < 8; k++) total += sums[k][threadIdx.x];
    (blockIdx.y ? second : first)[c] = total;
}

// -- selection -------------------------------------------------------------------------------------------------------

__device__ inline bool before(T a, long long i, T b, long long j) {  // falling, a NaN first, of equal ones the first
    if (a > b || (a != a && b == b)) return true;
    return (a == b || (a != a && b != b)) && i < j;
}

// The k largest of each row, one after the other: the best of those that come after the last. A warp a row, (32, 8).
// Bytes: x once (k readings of a cached row), so for small k: experts of a mixture, beams, classes.
extern "C" __global__ void topk(const S* x, S* values, long long* places, long long rows, long long width, long long k) {
    FOR_ROWS {
        T last = 0;
        long long last_place = -1;
        for (long long n = 0; n < k; n++) {
            T best = 0;
            long long place = width;
            for (long long c = threadIdx.x; c < width; c += 32) {
                const T v = x[row * width + c];
                const bool open = n == 0 || before(last, last_place, v, c);
                if (open && (place == width || before(v, c, best, place))) best = v, place = c;
            }
            for (int step = 16; step; step /= 2) {
                const T v = __shfl_xor_sync(0xffffffffu, best, step);
                const long long other = __shfl_xor_sync(0xffffffffu, place, step);
                if (other < width && (place == width || before(v, other, best, place))) best = v, place = other;
            }
            last = best, last_place = place;
            if (threadIdx.x == 0) values[row * k + n] = x[row * width + place], places[row * k + n] = place;
        }
    }
}

// Functions of whole rows: softmax, its cross entropy, layer and RMS norm, and their gradients.
//
// Arrays are (rows, width) in C order. A team of blockDim.x threads owns a row; reductions are those of the prelude.
// Launch: widths up to 1024 take warps, (32, 8) threads and 8 rows a block; wider rows a block each, (256..1024, 1).
// A row is read from memory once: its second reading finds it in the cache (L1 to 200 KB, else L2).
// Cross entropies and norms may store in other dtypes than x in S: vectors in V, gradients that come in in G, results
// in Y.

#define FOR_ROWS \
    for (long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += (long long)gridDim.x * blockDim.y)
#define FOR_COLUMNS for (long long c = threadIdx.x; c < width; c += blockDim.x)

// The maximum of a row and the sum of exp(x - maximum), in one pass over the row: M. Milakov, N. Gimelshein, "Online
// normalizer calculation for softmax", 2018, algorithm 3. Elements are `stride` apart.
__device__ inline void exponential_sum(const S* x, long long width, long long stride, T& top, T& total) {
    top = -infinite(), total = 0;
    FOR_COLUMNS {
        const T v = x[c * stride];
        total = v > top ? total * exp(top - v) + 1 : total + (v == top ? (T)1 : exp(v - top));
        top = v > top ? v : top;
    }
    const T highest = team_max(top);
    total = team_sum(top == highest ? total : total * exp(top - highest));
    top = highest;
}

// softmax along an axis with `inner` elements between neighbors. Bytes: x and y once. FLOP: about 6 an element.
extern "C" __global__ void softmax(const S* x, S* y, long long rows, long long width, long long inner) {
    FOR_ROWS {
        const long long start = row / inner * width * inner + row % inner;
        T top, total;
        exponential_sum(x + start, width, inner, top, total);
        const T scale = 1 / total;
        FOR_COLUMNS y[start + c * inner] = exp((T)x[start + c * inner] - top) * scale;
    }
}

// Its logarithm. Bytes: x and y once.
extern "C" __global__ void log_softmax(const S* x, S* y, long long rows, long long width, long long inner) {
    FOR_ROWS {
        const long long start = row / inner * width * inner + row % inner;
        T top, total;
        exponential_sum(x + start, width, inner, top, total);
        const T shift = top + log(total);
        FOR_COLUMNS y[start + c * inner] = (T)x[start + c * inner] - shift;
    }
}

// loss = log(sum(exp(row))) - row[label], with label smoothing toward the mean of the row; total = log(sum(exp(row))).
// Bytes: the logits once; the rest is a number a row. FLOP: about 5 an element.
extern "C" __global__ void softmax_cross_entropy(const S* logits, const I* labels, V* loss, V* total, long long rows,
                                                 long long width, bool skips, long long skipped, double smoothing) {
    FOR_ROWS {
        const S* x = logits + row * width;
        T top, sum, all = 0;
        exponential_sum(x, width, 1, top, sum);
        if (smoothing > 0) {
            FOR_COLUMNS all += (T)x[c];
            all = team_sum(all);
        }
        if (threadIdx.x == 0) {
            const long long label = labels[row];
            const T logsum = top + log(sum), own = label >= 0 && label < width ? (T)x[label] : (T)0;
            total[row] = logsum;
            loss[row] = skips && label == skipped ? (T)0 : logsum - own + (T)smoothing * (own - all / width);
        }
    }
}

// dx = g (exp(row - total) - target). Bytes: logits and dx once. FLOP: about 4 an element. No reduction.
extern "C" __global__ void softmax_cross_entropy_dx(const V* g, const S* logits, const I* labels, const V* total, Y* dx,
                                                    long long rows, long long width, bool skips, long long skipped,
                                                    double smoothing) {
    FOR_ROWS {
        const long long label = labels[row];
        const T slope = skips && label == skipped ? (T)0 : (T)g[row], shift = total[row];
        const T own = (T)(1 - smoothing), others = (T)(smoothing / width);
        FOR_COLUMNS {
            const T power = exp((T)logits[row * width + c] - shift);
            dx[row * width + c] = slope * (power - (c == label ? own : (T)0) - others);
        }
    }
}

// -- normalization ---------------------------------------------------------------------------------------------------

// Mean and 1 / sqrt(variance + epsilon) of a row; the second pass over the cached row keeps the variance exact.
__device__ inline void moments(const S* x, long long width, double epsilon, T& mean, T& inverse) {
    T sum = 0, squares = 0;
    FOR_COLUMNS sum += (T)x[c];
    mean = team_sum(sum) / width;
    FOR_COLUMNS {
        const T d = (T)x[c] - mean;
        squares += d * d;
    }
    inverse = 1 / sqrt(team_sum(squares) / width + (T)epsilon);
}

// J. L. Ba et al., "Layer Normalization", 2016. Bytes: x and y once, two vectors from the cache. FLOP: 8 an element.
extern "C" __global__ void layer_norm(const S* x, const V* scale, const V* bias, Y* y, long long rows, long long width,
                                      double epsilon) {
    FOR_ROWS {
        T mean, inverse;
        moments(x + row * width, width, epsilon, mean, inverse);
        FOR_COLUMNS y[row * width + c] = ((T)x[row * width + c] - mean) * inverse * (T)scale[c] + (T)bias[c];
    }
}

// The gradient of x, and (mean, inverse) of each row for `norm_columns`. Bytes: g, x and dx once. FLOP: 16 an element.
extern "C" __global__ void layer_norm_dx(const G* g, const S* x, const V* scale, Y* dx, T* statistics, long long rows,
                                         long long width, double epsilon) {
    FOR_ROWS {
        const G* gr = g + row * width;
        const S* xr = x + row * width;
        T mean, inverse, sum = 0, along = 0;
        moments(xr, width, epsilon, mean, inverse);
        FOR_COLUMNS {
            const T scaled = (T)gr[c] * (T)scale[c];
            sum += scaled, along += scaled * ((T)xr[c] - mean) * inverse;
        }
        sum = team_sum(sum) / width, along = team_sum(along) / width;
        FOR_COLUMNS {
            const T normal = ((T)xr[c] - mean) * inverse;
            dx[row * width + c] = ((T)gr[c] * (T)scale[c] - sum - normal * along) * inverse;
        }
        if (threadIdx.x == 0) statistics[2 * row] = mean, statistics[2 * row + 1] = inverse;
    }
}

// B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019. Bytes: x and y once. FLOP: 4 an element.
extern "C" __global__ void rms_norm(const S* x, const V* scale, Y* y, long long rows, long long width, double epsilon) {
    FOR_ROWS {
        T squares = 0;
        FOR_COLUMNS squares += (T)x[row * width + c] * (T)x[row * width + c];
        const T inverse = 1 / sqrt(team_sum(squares) / width + (T)epsilon);
        FOR_COLUMNS y[row * width + c] = (T)x[row * width + c] * inverse * (T)scale[c];
    }
}

// Its gradient of x, with (0, inverse) of each row for `norm_columns`. Bytes: g, x and dx once. FLOP: 10 an element.
extern "C" __global__ void rms_norm_dx(const G* g, const S* x, const V* scale, Y* dx, T* statistics, long long rows,
                                       long long width, double epsilon) {
    FOR_ROWS {
        const G* gr = g + row * width;
        const S* xr = x + row * width;
        T squares = 0, along = 0;
        FOR_COLUMNS {
            const T v = xr[c];
            squares += v * v, along += (T)gr[c] * (T)scale[c] * v;
        }
        const T inverse = 1 / sqrt(team_sum(squares) / width + (T)epsilon);
        along = team_sum(along) / width * inverse * inverse;
        FOR_COLUMNS dx[row * width + c] = ((T)gr[c] * (T)scale[c] - (T)xr[c] * along) * inverse;
        if (threadIdx.x == 0) statistics[2 * row] = 0, statistics[2 * row + 1] = inverse;
    }
}

// Sums of g normal and of g over a part of the rows, for the gradients of scale and bias: parts[part][2][width].
// Block (32, 8): a warp reads 32 neighboring columns of one row. Grid (width / 32, parts). Bytes: g and x once; the
// parts, added up by the next kernel in a fixed order, keep the result independent of timing.
extern "C" __global__ void norm_columns(const G* g, const S* x, const T* statistics, T* parts, long long rows,
                                        long long width) {
    __shared__ T sums[2][8][33];
    const long long c = (long long)blockIdx.x * 32 + threadIdx.x, each = (rows + gridDim.y - 1) / gridDim.y;
    const long long end = (blockIdx.y + 1) * each < rows ? (blockIdx.y + 1) * each : rows;
    T weighed = 0, plain = 0;
    if (c < width)
        for (long long row = blockIdx.y * each + threadIdx.y; row < end; row += 8) {
            const T v = g[row * width + c];
            weighed += v * ((T)x[row * width + c] - statistics[2 * row]) * statistics[2 * row + 1], plain += v;
        }
    sums[0][threadIdx.y][threadIdx.x] = weighed, sums[1][threadIdx.y][threadIdx.x] = plain;
    __syncthreads();
    if (threadIdx.y < 2 && c < width) {
        T total = 0;
        for (int k = 0; k < 8; k++) total += sums[threadIdx.y][k][threadIdx.x];
        parts[(2 * blockIdx.y + threadIdx.y) * width + c] = total;
    }
}

// first = sum of parts[.][0], second = sum of parts[.][1]. One thread a column and output; grid (width / 256, 2).
extern "C" __global__ void add_parts(const T* parts, V* first, V* second, long long count, long long width) {
    const long long c = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= width) return;
    T total = 0;
    for (long long k = 0; k < count; k++) total += parts[(2 * k + blockIdx.y) * width + c];
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
            FOR_COLUMNS {
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

// Functions of whole rows: the cross entropy of a softmax, and the largest elements.
//
// Arrays are (rows, width) in C order. A team of TEAM threads owns a row; reductions are those of the prelude. Launch:
// teams of 32 are 8 to a block, (32, 8); a larger one is a block, (TEAM, 1). Losses are stored in V, logits in S.
//
// `rows.py` puts in front what depends on the width. Threads move PACK neighbors at once, and load TOGETHER packs before
// they work on the first, so that memory is waited for once. If RAGGED, the width is no multiple of PACK: rows begin
// anywhere, and a few elements before and behind the packs of a row go one by one.

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

// Calls `visit(packs)` for whatever this thread has of the row at `x`.
template <class Visit> __device__ inline void each(const S* x, const Span& span, Visit visit) {
    if (span.edge >= 0) visit(load<1>(x + span.edge));
    for (int first = span.first; first < span.end; first += TOGETHER * TEAM * PACK) {
        Pack<S, PACK> own[TOGETHER];
#pragma unroll
        for (int k = 0; k < TOGETHER; k++)
            if (first + k * TEAM * PACK < span.end) own[k] = load<PACK>(x + first + k * TEAM * PACK);
#pragma unroll
        for (int k = 0; k < TOGETHER; k++)
            if (first + k * TEAM * PACK < span.end) visit(own[k]);
    }
}

// -- softmax -----------------------------------------------------------------------------------------------------------

__device__ inline float larger(float a, float b) { return ::fmaxf(a, b); }  // a NaN loses
__device__ inline double larger(double a, double b) { return ::fmax(a, b); }
__device__ inline float weight(float v) { return power_of_two(v * 1.4426950408889634f); }  // exp(v) of a v up to 0
__device__ inline double weight(double v) { return exp(v); }

// loss = log(sum(exp(row))) - row[label], with label smoothing toward the mean of the row; total = log(sum(exp(row))).
// Maximum and sum in one pass over the row: M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018,
// algorithm 3, a pack at a time. Bytes: the logits once; the rest is a number a row. FLOP: about 6 an element.
extern "C" __global__ void __launch_bounds__(BLOCK) softmax_cross_entropy(
    const S* logits, const I* labels, V* loss, V* total, long long rows, long long width, bool skips,
    long long skipped, double smoothing) {
    FOR_ROWS {
        const S* x = logits + row * width;
        T most = -infinite(), sum = 0, all = 0;
        each(x, Span(row, width), [&](auto v) {
            T highest = most;
            for (int i = 0; i < v.count; i++) highest = larger(highest, v.v[i]);
            const T shift = isfinite(highest) ? highest : (T)0;  // infinity minus infinity is NaN
            sum *= weight(most - shift);
            for (int i = 0; i < v.count; i++) sum += weight((T)v.v[i] - shift), all += (T)v.v[i];
            most = highest;
        });
        const T top = team_max(most);
        sum = team_sum(most == top ? sum : sum * weight(most - top)), all = team_sum(all);
        if (threadIdx.x == 0) {
            const long long label = labels[row];
            const T logsum = top + log(sum), own = label >= 0 && label < width ? (T)x[label] : (T)0;
            total[row] = logsum;
            const T smoothed = smoothing > 0 ? (T)smoothing * (own - all / width) : (T)0;  // 0 infinity would be NaN
            loss[row] = skips && label == skipped ? (T)0 : logsum - own + smoothed;
        }
    }
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

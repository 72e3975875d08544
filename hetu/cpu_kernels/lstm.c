// The long short-term memory over all its steps: rows of the batch are apart, so a few of them go through all steps
// while what is theirs stays in the cache. A row of `joined` is [1, x, h], which times the weights [b; w; u], packed
// once per call, is the gates before their functions.

#pragma STDC FP_CONTRACT ON

static inline T logistic(T z) { return 1 / (1 + exp(-z)); }

// What `lstm` computes. States are (n, time, k), gates (n, time, 4 k).
void lstm_plainly(const Word* a, long long first, long long last, char* scratch) {
    T *hs = a[0].p, *h_last = a[1].p, *c_last = a[2].p, *cs = a[3].p, *tops = a[4].p, *gates = a[5].p;
    const T *const x = a[6].p, *const w = a[7].p, *const u = a[8].p, *const b = a[9].p;
    const T *const h_first = a[10].p, *const c_first = a[11].p;
    const long long steps = a[12].n, inputs = a[13].n, k = a[14].n;
    for (long long n = first; n < last; n++) {
        const T *h = h_first + n * k, *c = c_first + n * k;
        for (long long t = n * steps; t < (n + 1) * steps; h = hs + t * k, c = cs + t * k, t++) {
            T* const z = gates + t * 4 * k;
            for (long long j = 0; j < 4 * k; j++) {
                z[j] = b[j];
                for (long long l = 0; l < inputs; l++) z[j] += x[t * inputs + l] * w[l * 4 * k + j];
                for (long long l = 0; l < k; l++) z[j] += h[l] * u[l * 4 * k + j];
                z[j] = j / k == 2 ? tanh(z[j]) : logistic(z[j]);
            }
            for (long long j = 0; j < k; j++) {
                cs[t * k + j] = z[k + j] * c[j] + z[j] * z[2 * k + j];
                tops[t * k + j] = tanh(cs[t * k + j]);
                hs[t * k + j] = z[3 * k + j] * tops[t * k + j];
            }
        }
        for (long long j = 0; j < k; j++) h_last[n * k + j] = h[j], c_last[n * k + j] = c[j];
    }
}

// -- the tile ---------------------------------------------------------------------------------------------------------
// out = a b, or out += a b, for a few rows of `a` and a panel of `b`, WIDE numbers for each number of depth. The sums
// stay in registers, two vectors a row, each summed in order of depth: a number's bits do not depend on its tile.

#if defined(__AVX512F__)
enum { BYTES = 64, SOME = 4 };
#define SOME_ROWS(DO) DO(0) DO(1) DO(2) DO(3)
#define MORE_ROWS(DO) SOME_ROWS(DO) DO(4) DO(5) DO(6) DO(7)
#define MOST_ROWS(DO) MORE_ROWS(DO) DO(8) DO(9) DO(10) DO(11)
#else
enum { BYTES = 32, SOME = 2 };
#define SOME_ROWS(DO) DO(0) DO(1)
#define MORE_ROWS(DO) SOME_ROWS(DO) DO(2) DO(3)
#define MOST_ROWS(DO) MORE_ROWS(DO) DO(4) DO(5)
#endif

typedef T Vector __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
enum { LANES = BYTES / sizeof(T), WIDE = 2 * LANES, MOST = 3 * SOME, STRIP = 32 };  // columns of a job

#define START(r) Vector s##r = {}, t##r = {};
#define ADD(r) const T v##r = a[r * row]; s##r += v##r * x, t##r += v##r * y;
#define STORE(r) { \
    Vector* const to = (Vector*)(out + r * pitch); \
    if (add) s##r += to[0], t##r += to[1]; \
    to[0] = s##r, to[1] = t##r; \
}
#define TILE(name, ROWS, ROW, STEP) \
    static __attribute__((noinline)) void name( \
        long long depth, const T* a, long long pitch_a, const T* b, T* out, long long pitch, bool add) { \
        const long long row = ROW, step = STEP; \
        ROWS(START) \
        for (const T* const end = b + depth * WIDE; b < end; b += WIDE, a += step) { \
            const Vector x = *(const Vector*)b, y = *(const Vector*)(b + LANES); \
            __asm__("" : "+r"(a)); /* one address that moves */ \
            ROWS(ADD) \
        } \
        ROWS(STORE) \
    }
TILE(some, SOME_ROWS, pitch_a, 1)
TILE(more, MORE_ROWS, pitch_a, 1)
TILE(most, MOST_ROWS, pitch_a, 1)
TILE(some_turned, SOME_ROWS, 1, pitch_a)  // `a` lies with its columns as rows
TILE(more_turned, MORE_ROWS, 1, pitch_a)
TILE(most_turned, MOST_ROWS, 1, pitch_a)

static inline long long up(long long n, long long unit) { return (n + unit - 1) / unit * unit; }
static inline long long less(long long n, long long m) { return n < m ? n : m; }

static inline void copy(T* to, const T* from, long long count, long long stride) {
    if (stride == 1) for (long long j = 0; j < count; j++) to[j] = from[j];
    else for (long long j = 0; j < count; j++) to[j] = from[j * stride];
}

// A panel of b is `count` columns of it and zeros after them.
static inline void copy_panel(T* to, const T* from, long long count, long long stride) {
    count = count < 0 ? 0 : less(count, WIDE);
    copy(to, from, count, stride);
    for (long long j = count; j < WIDE; j++) to[j] = 0;
}

// out = a b for all panels of b. Rows of `a` and `out` are there up to a multiple of SOME.
static void product(
    long long rows, long long depth, long long columns, const T* a, long long pitch_a, const T* b, T* out,
    long long pitch) {
    for (long long j = 0; j < columns; j += WIDE, b += depth * WIDE)
        for (long long r = 0; r < rows; r += MOST)
            (rows - r > 2 * SOME ? most : rows - r > SOME ? more : some)(
                depth, a + r * pitch_a, pitch_a, b, out + r * pitch + j, pitch, false);
}

// Makes the rows of a matrix the rows from `start` on of panels of `depth` rows. Jobs are strips of columns.
void lstm_pack(const Word* a, long long first, long long last, char* scratch) {
    T* const panels = a[0].p;
    const T* const from = a[1].p;
    const long long rows = a[2].n, columns = a[3].n, row = a[4].n, column = a[5].n, depth = a[6].n, start = a[7].n;
    for (long long p = first * STRIP / WIDE; p < last * STRIP / WIDE; p++)
        for (long long l = 0; l < rows; l++)
            copy_panel(
                panels + (p * depth + start + l) * WIDE, from + l * row + p * WIDE * column, columns - p * WIDE,
                column);
}

// -- forward ----------------------------------------------------------------------------------------------------------

enum { BLOCK = 48 };  // rows that go through all steps together

// 1 + e^x with |x| <= most, so that the product of three is finite, and one division makes the inverse of each. Gates
// are then e^-most at least, which is far below the rounding of what they are added to.
static inline float grown_float(float x, float most) {
    x = most < x ? most : x;  // a NaN stays
    x = -most > x ? -most : x;
    const float n = rintf(x * 1.44269504f);
    const Float power = {.bits = ((int)n + 127) << 23};
    return 1.0f + exp_rest(x, n) * power.number;
}
static inline double grown_double(double x, double most) { return 1 + exp(fmin(x, most)); }
static inline double tanh_with_double(double x, double q) { return tanh(x); }
#define grown(x, most) _Generic((x), float: grown_float, double: grown_double)(x, most)
#define tanh_with(x, q) _Generic((x), float: tanh_with, double: tanh_with_double)(x, q)

// One step of one row: from z the gates, then c and h, which also goes into the row of `joined`. In two loops the
// iterations are short enough for a CPU to have several under way.
static void step(long long k, const T* z, T* c, T* joined, T* h, T* cs, T* tops, T* gates) {
    T most = sizeof(T) == 4 ? 29 : 230;
    __asm__("" : "+r"(most));  // a bound that is known becomes branches
    EACH for (long long j = 0; j < k; j++) {
        const T x = z[2 * k + j], a = grown(-z[j], most), b = grown(-z[k + j], most), d = grown(2 * fabs(x), most);
        const T inverse = 1 / (a * b * d), i = b * d * inverse, f = a * d * inverse, g = tanh_with(x, a * b * inverse);
        gates[j] = i, gates[k + j] = f, gates[2 * k + j] = g;
        c[j] = cs[j] = f * c[j] + i * g;
    }
    EACH for (long long j = 0; j < k; j++) {
        const T a = grown(-z[3 * k + j], most), b = grown(2 * fabs(c[j]), most), inverse = 1 / (a * b);
        const T o = b * inverse, top = tanh_with(c[j], a * inverse);
        gates[3 * k + j] = o, tops[j] = top;
        joined[j] = h[j] = o * top;
    }
}

// Jobs are rows of the batch.
void lstm(const Word* a, long long first, long long last, char* scratch) {
    T *const hs = a[0].p, *const h_last = a[1].p, *const c_last = a[2].p, *const cs = a[3].p, *const tops = a[4].p;
    T* const gates = a[5].p;
    const T *const x = a[6].p, *const weights = a[7].p, *const h = a[8].p, *const c = a[9].p;
    const long long steps = a[10].n, inputs = a[11].n, k = a[12].n;
    const long long x_row = a[13].n, x_step = a[14].n, x_column = a[15].n;
    const long long h_row = a[16].n, h_column = a[17].n, c_row = a[18].n, c_column = a[19].n;
    const long long depth = 1 + inputs + k, pitch = up(depth, LANES) + LANES, pitch_z = up(4 * k, WIDE) + LANES;
    T *const joined = (T*)scratch, *const joined_x = joined + 1, *const joined_h = joined_x + inputs;
    T *const z = joined + BLOCK * pitch, *const state = z + BLOCK * pitch_z;
    for (long long begin = first; begin < last; begin += BLOCK) {
        const long long rows = less(BLOCK, last - begin);
        for (long long l = 0; l < BLOCK * pitch; l++) joined[l] = 0;
        for (long long r = 0; r < rows; r++) {
            joined[r * pitch] = 1;
            copy(joined_h + r * pitch, h + (begin + r) * h_row, k, h_column);
            copy(state + r * k, c + (begin + r) * c_row, k, c_column);
        }
        for (long long t = 0; t < steps; t++) {
            for (long long r = 0; r < rows; r++)
                copy(joined_x + r * pitch, x + (begin + r) * x_row + t * x_step, inputs, x_column);
            product(rows, depth, 4 * k, joined, pitch, weights, z, pitch_z);
            for (long long r = 0; r < rows; r++) {
                const long long at = ((begin + r) * steps + t) * k;
                T *const now = z + r * pitch_z, *const next = joined_h + r * pitch;
                step(k, now, state + r * k, next, hs + at, cs + at, tops + at, gates + 4 * at);
            }
        }
        for (long long r = 0; r < rows; r++) {
            copy(h_last + (begin + r) * k, joined_h + r * pitch, k, 1);
            copy(c_last + (begin + r) * k, state + r * k, k, 1);
        }
    }
}

// -- backward ---------------------------------------------------------------------------------------------------------

// One step of one row: z, the gradients of the gates before their functions, from dh + gh and dc, which becomes that of
// the step before.
static inline __attribute__((always_inline)) void step_back(
    long long k, T* z, const T* gates, const T* c, long long c_column, const T* tops, const T* dh, const T* gh,
    long long gh_column, T* dc) {
    EACH for (long long j = 0; j < k; j++) {
        const T i = gates[j], f = gates[k + j], g = gates[2 * k + j], o = gates[3 * k + j], top = tops[j];
        const T slope = dh[j] + gh[j * gh_column], d = dc[j] + slope * o * (1 - top * top);
        z[j] = d * g * i * (1 - i);
        z[k + j] = d * c[j * c_column] * f * (1 - f);
        z[2 * k + j] = d * i * (1 - g * g);
        z[3 * k + j] = slope * top * o * (1 - o);
        dc[j] = d * f;
    }
}

// dz, and dh and dc before the first step; `weights` are those of h, turned. Jobs are rows of the batch.
void lstm_back(const Word* a, long long first, long long last, char* scratch) {
    T *const dz = a[0].p, *const dh = a[1].p, *const dc = a[2].p;
    const T *const gh = a[3].p, *const dh_last = a[4].p, *const dc_last = a[5].p, *const c = a[6].p;
    const T *const cs = a[7].p, *const tops = a[8].p, *const gates = a[9].p, *const weights = a[10].p;
    const long long steps = a[11].n, k = a[12].n, gh_row = a[13].n, gh_step = a[14].n, gh_column = a[15].n;
    const long long dh_row = a[16].n, dh_column = a[17].n, dc_row = a[18].n, dc_column = a[19].n;
    const long long c_row = a[20].n, c_column = a[21].n;
    const long long pitch = up(4 * k, LANES) + LANES, pitch_h = up(k, WIDE) + LANES;
    T *const z = (T*)scratch, *const slopes = z + BLOCK * pitch;
    for (long long begin = first; begin < last; begin += BLOCK) {
        const long long rows = less(BLOCK, last - begin);
        for (long long l = rows * pitch; l < BLOCK * pitch; l++) z[l] = 0;
        for (long long r = 0; r < rows; r++) {
            copy(slopes + r * pitch_h, dh_last + (begin + r) * dh_row, k, dh_column);
            copy(dc + (begin + r) * k, dc_last + (begin + r) * dc_row, k, dc_column);
        }
        for (long long t = steps - 1; t >= 0; t--) {
            for (long long r = 0; r < rows; r++) {
                const long long row = begin + r, at = (row * steps + t) * k, column = t ? 1 : c_column;
                const T* const before = t ? cs + at - k : c + row * c_row;
                const T* const added = gh + row * gh_row + t * gh_step;
                T *const to = z + r * pitch, *const slope = slopes + r * pitch_h, *const after = dc + row * k;
                if (column == 1 && gh_column == 1)
                    step_back(k, to, gates + 4 * at, before, 1, tops + at, slope, added, 1, after);
                else step_back(k, to, gates + 4 * at, before, column, tops + at, slope, added, gh_column, after);
                copy(dz + 4 * at, to, 4 * k, 1);  // which may be where the gates are
            }
            product(rows, 4 * k, k, z, pitch, weights, slopes, pitch_h);
        }
        for (long long r = 0; r < rows; r++) copy(dh + (begin + r) * k, slopes + r * pitch_h, k, 1);
    }
}

enum { DEEP = 192 };  // rows of the batch at their steps that are summed in registers

// The gradients of the weights, [1, x, h before]^T dz: sums over the steps of one row after the other. Jobs are strips
// of columns.
void lstm_weights(const Word* a, long long first, long long last, char* scratch) {
    T *const dw = a[0].p, *const du = a[1].p, *const db = a[2].p, *const sums = a[3].p;
    const T *const dz = a[4].p, *const x = a[5].p, *const h = a[6].p, *const hs = a[7].p;
    const long long batch = a[8].n, steps = a[9].n, inputs = a[10].n, k = a[11].n;
    const long long x_row = a[12].n, x_step = a[13].n, x_column = a[14].n, h_row = a[15].n, h_column = a[16].n;
    const long long features = 1 + inputs + k, high = up(features, SOME), pitch = high + LANES;
    T *const joined = (T*)scratch, *const panel = joined + DEEP * pitch;
    first *= STRIP / WIDE, last *= STRIP / WIDE;
    for (long long l = first * high * WIDE; l < last * high * WIDE; l++) sums[l] = 0;
    for (long long l = 0; l < DEEP * pitch; l++) joined[l] = 0;
    for (long long begin = 0; begin < batch * steps; begin += DEEP) {
        const long long depth = less(DEEP, batch * steps - begin);
        for (long long l = 0; l < depth; l++) {
            const long long row = (begin + l) / steps, t = (begin + l) % steps;
            T* const to = joined + l * pitch;
            to[0] = 1;
            copy(to + 1, x + row * x_row + t * x_step, inputs, x_column);
            if (t) copy(to + 1 + inputs, hs + (begin + l - 1) * k, k, 1);
            else copy(to + 1 + inputs, h + row * h_row, k, h_column);
        }
        for (long long p = first; p < last; p++) {
            for (long long l = 0; l < depth; l++)
                copy_panel(panel + l * WIDE, dz + (begin + l) * 4 * k + p * WIDE, 4 * k - p * WIDE, 1);
            for (long long l = 0; l < high; l += MOST)
                (high - l > 2 * SOME ? most_turned : high - l > SOME ? more_turned : some_turned)(
                    depth, joined + l, pitch, panel, sums + (p * high + l) * WIDE, WIDE, true);
        }
    }
    for (long long p = first; p < last; p++)
        for (long long l = 0; l < features; l++) {
            T* const to = l == 0 ? db : l <= inputs ? dw + (l - 1) * 4 * k : du + (l - 1 - inputs) * 4 * k;
            copy(to + p * WIDE, sums + (p * high + l) * WIDE, less(WIDE, 4 * k - p * WIDE), 1);
        }
}

// Recurrent layers over all their steps: the long short-term memory and the gated recurrent unit. Rows of the batch are
// apart, so a few of them go through all steps while what is theirs stays in the cache. A row of `joined` is an input, a
// one for each bias and a state; times the weights, packed once per call, it is the gates before their functions. Of rows
// of several lengths each step takes those that still go on.

#include <string.h>

#include "panels.h"

static inline T logistic(T z) { return 1 / (1 + exp(-z)); }

// -- what is computed -------------------------------------------------------------------------------------------------

// `lstm`. States are (n, time, k), gates (n, time, 4 k); a row that has lengths ends before others.
void lstm_plainly(const Word* a, long long first, long long last, char* scratch) {
    T *hs = a[0].p, *h_last = a[1].p, *c_last = a[2].p, *cs = a[3].p, *tops = a[4].p, *gates = a[5].p;
    const T *const x = a[6].p, *const w = a[7].p, *const u = a[8].p, *const b = a[9].p;
    const T *const h_first = a[10].p, *const c_first = a[11].p;
    const long long steps = a[12].n, inputs = a[13].n, k = a[14].n, *const lengths = a[15].p;
    for (long long n = first; n < last; n++) {
        const T *h = h_first + n * k, *c = c_first + n * k;
        const long long all = (n + 1) * steps, end = lengths ? n * steps + lengths[n] : all;
        for (long long t = n * steps; t < end; h = hs + t * k, c = cs + t * k, t++) {
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
        for (long long j = end * k; j < all * k; j++) hs[j] = cs[j] = tops[j] = 0;
        for (long long j = end * 4 * k; j < all * 4 * k; j++) gates[j] = 0;
    }
}

// `gru`. Gates are r, z, n and what r scales, (n, time, 4 k).
void gru_plainly(const Word* a, long long first, long long last, char* scratch) {
    T *hs = a[0].p, *h_last = a[1].p, *gates = a[2].p;
    const T *const x = a[3].p, *const w = a[4].p, *const u = a[5].p, *const b = a[6].p, *const d = a[7].p;
    const T* const h_first = a[8].p;
    const long long steps = a[9].n, inputs = a[10].n, k = a[11].n, *const lengths = a[12].p;
    for (long long n = first; n < last; n++) {
        const T* h = h_first + n * k;
        const long long all = (n + 1) * steps, end = lengths ? n * steps + lengths[n] : all;
        for (long long t = n * steps; t < end; h = hs + t * k, t++) {
            T* const z = gates + t * 4 * k;
            for (long long j = 0; j < 3 * k; j++) {
                T from_x = b[j], from_h = d[j];
                for (long long l = 0; l < inputs; l++) from_x += x[t * inputs + l] * w[l * 3 * k + j];
                for (long long l = 0; l < k; l++) from_h += h[l] * u[l * 3 * k + j];
                if (j < 2 * k) z[j] = logistic(from_x + from_h);
                else z[j] = tanh(from_x + z[j - 2 * k] * from_h), z[j + k] = from_h;
            }
            for (long long j = 0; j < k; j++) hs[t * k + j] = z[2 * k + j] + z[k + j] * (h[j] - z[2 * k + j]);
        }
        for (long long j = 0; j < k; j++) h_last[n * k + j] = h[j];
        for (long long j = end * k; j < all * k; j++) hs[j] = 0;
        for (long long j = end * 4 * k; j < all * 4 * k; j++) gates[j] = 0;
    }
}

// -- products ---------------------------------------------------------------------------------------------------------

#define FOR_PANELS(DO) DO(0) DO(1) DO(2) DO(3)
#define START_PANEL(p) \
    const T* const b##p = b + p * depth * WIDE; \
    Vector s##p = *(const Vector*)(from + p * step), t##p = *(const Vector*)(from + p * step + LANES);
#define ADD_PANEL(p) \
    s##p += v * *(const Vector*)(b##p + k * WIDE), t##p += v * *(const Vector*)(b##p + k * WIDE + LANES);
#define STORE_PANEL(p) *(Vector*)(out + p * WIDE) = s##p, *(Vector*)(out + p * WIDE + LANES) = t##p;

// out = from + a b for one row and four panels: with one, each sum would wait for the last.
static void row_of_tiles(long long depth, const T* a, const T* b, const T* from, long long step, T* out) {
    FOR_PANELS(START_PANEL)
    for (long long k = 0; k < depth; k++) {
        const T v = a[k];
        FOR_PANELS(ADD_PANEL)
    }
    FOR_PANELS(STORE_PANEL)
}

// out = a b, or out += a b, for all panels of b. Rows of `a` and `out` are there up to a multiple of SOME.
static void product(
    long long rows, long long depth, long long columns, const T* a, long long pitch_a, const T* b, T* out,
    long long pitch, bool add) {
    long long j = 0;
    for (; rows == 1 && j + 3 * WIDE < columns; j += 4 * WIDE, b += 4 * depth * WIDE)
        row_of_tiles(depth, a, b, add ? out + j : zeros, add ? WIDE : 0, out + j);
    for (; j < columns; j += WIDE, b += depth * WIDE)
        for (long long r = 0; r < rows; r += MOST) {
            T* const to = out + r * pitch + j;
            tile(false, rows - r, depth, a + r * pitch_a, pitch_a, b, add ? to : zeros, add ? pitch : 0, to, pitch);
        }
}

// A panel of a matrix whose columns lie in order: each line of memory is read once, as columns may be so far apart that
// they meet in the same place of a cache.
static void copy_turned(T* to, const T* from, long long rows, long long count, long long column) {
    if (count < WIDE) memset(to, 0, rows * WIDE * sizeof(T));
    for (long long begin = 0; begin < rows; begin += LANES)
        for (long long j = 0; j < count; j++)
            for (long long l = begin; l < less(begin + LANES, rows); l++) to[l * WIDE + j] = from[j * column + l];
}

// Makes the rows of a matrix the rows from `start` on of panels of `depth` rows. Jobs are strips of columns.
void pack(const Word* a, long long first, long long last, char* scratch) {
    T* const panels = a[0].p;
    const T* const from = a[1].p;
    const long long rows = a[2].n, columns = a[3].n, row = a[4].n, column = a[5].n, depth = a[6].n, start = a[7].n;
    for (long long p = first * STRIP / WIDE; p < last * STRIP / WIDE; p++) {
        T* const to = panels + (p * depth + start) * WIDE;
        const T* const begin = from + p * WIDE * column;
        const long long count = columns - p * WIDE < 0 ? 0 : less(WIDE, columns - p * WIDE);
        if (row == 1) copy_turned(to, begin, rows, count, column);
        else for (long long l = 0; l < rows; l++) copy_panel(to + l * WIDE, begin + l * row, count, column);
    }
}

enum { BLOCK = 48 };  // rows that go through all steps together

// How many steps a row has; a row without lengths has them all.
static inline long long end_of(const long long* lengths, long long row, long long steps) {
    return lengths ? lengths[row] : steps;
}

// The rows of a block, the longest first: those that still go on stand together, and products take them alone.
static void in_turn(long long* row, long long begin, long long rows, const long long* lengths, long long steps) {
    for (long long r = 0, to; r < rows; row[to] = begin + r++)
        for (to = r; to && end_of(lengths, row[to - 1], steps) < end_of(lengths, begin + r, steps); to--)
            row[to] = row[to - 1];
}

// How many of them have a step t.
static long long going(const long long* row, long long rows, const long long* lengths, long long t, long long steps) {
    while (rows && end_of(lengths, row[rows - 1], steps) <= t) rows--;
    return rows;
}

// Zeros for a row of (n, time, count) from its end on.
static void clear_rest(T* of, const long long* lengths, long long row, long long steps, long long count) {
    const long long end = end_of(lengths, row, steps);
    memset(of + (row * steps + end) * count, 0, (steps - end) * count * sizeof(T));
}

// -- gates ------------------------------------------------------------------------------------------------------------

// 1 + e^x with |x| <= most, so that the product of three is finite, and one division makes the inverse of each. Gates
// are then e^-most at least, which is far below the rounding of what they are added to.
static inline float grown_float(float x, float most) {
    x = most < x ? most : x;  // a NaN stays
    x = -most > x ? -most : x;
    const float n = rintf(x * 1.44269504f);
    const Float power = {.bits = ((int)n + 127) << 23};
    return fmaf(exp_rest(without(x, n)), power.number, 1.0f);
}
static inline double grown_double(double x, double most) { return 1 + exp(fmin(x, most)); }
static inline double tanh_with_double(double x, double q) { return tanh(x); }
#define grown(x, most) _Generic((x), float: grown_float, double: grown_double)(x, most)
#define tanh_with(x, q) _Generic((x), float: tanh_with, double: tanh_with_double)(x, q)

// -- long short-term memory -------------------------------------------------------------------------------------------

// One step of one row: from z the gates, then c and h, which also goes into the row of `joined`. In two loops the
// iterations are short enough for a CPU to have several under way.
static void lstm_step(long long k, const T* z, T* c, T* joined, T* h, T* cs, T* tops, T* gates) {
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
    const long long* const lengths = a[20].p;
    const long long depth = 1 + inputs + k, pitch = up(depth, LANES) + LANES, pitch_z = up(4 * k, WIDE) + LANES;
    T *const joined = (T*)scratch, *const joined_h = joined + inputs + 1;
    T *const z = joined + BLOCK * pitch, *const state = z + BLOCK * pitch_z;
    for (long long begin = first, row[BLOCK]; begin < last; begin += BLOCK) {
        const long long rows = less(BLOCK, last - begin);
        in_turn(row, begin, rows, lengths, steps);
        for (long long l = 0; l < BLOCK * pitch; l++) joined[l] = 0;
        for (long long r = 0; r < rows; r++) {
            joined[r * pitch + inputs] = 1;
            copy(joined_h + r * pitch, h + row[r] * h_row, k, h_column);
            copy(state + r * k, c + row[r] * c_row, k, c_column);
            for (int p = 0; p < 3; p++) clear_rest((T*[]){hs, cs, tops}[p], lengths, row[r], steps, k);
            clear_rest(gates, lengths, row[r], steps, 4 * k);
        }
        for (long long t = 0, live; (live = going(row, rows, lengths, t, steps)); t++) {
            for (long long r = 0; r < live; r++)
                copy(joined + r * pitch, x + row[r] * x_row + t * x_step, inputs, x_column);
            product(live, depth, 4 * k, joined, pitch, weights, z, pitch_z, false);
            for (long long r = 0; r < live; r++) {
                const long long at = (row[r] * steps + t) * k;
                T *const now = z + r * pitch_z, *const next = joined_h + r * pitch;
                lstm_step(k, now, state + r * k, next, hs + at, cs + at, tops + at, gates + 4 * at);
            }
        }
        for (long long r = 0; r < rows; r++) {
            copy(h_last + row[r] * k, joined_h + r * pitch, k, 1);
            copy(c_last + row[r] * k, state + r * k, k, 1);
        }
    }
}

// One step of one row: z, the gradients of the gates before their functions, from dh + gh and dc, which becomes that of
// the step before; all of dh goes through the gates.
static inline __attribute__((always_inline)) void lstm_step_back(
    long long k, T* z, const T* gates, const T* c, long long c_column, const T* tops, T* dh, const T* gh,
    long long gh_column, T* dc) {
    EACH for (long long j = 0; j < k; j++) {
        const T i = gates[j], f = gates[k + j], g = gates[2 * k + j], o = gates[3 * k + j], top = tops[j];
        const T slope = dh[j] + gh[j * gh_column], d = dc[j] + slope * o * (1 - top * top);
        z[j] = d * g * i * (1 - i);
        z[k + j] = d * c[j * c_column] * f * (1 - f);
        z[2 * k + j] = d * i * (1 - g * g);
        z[3 * k + j] = slope * top * o * (1 - o);
        dc[j] = d * f;
        dh[j] = 0;
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
    const long long* const lengths = a[22].p;
    const long long pitch = up(4 * k, LANES) + LANES, pitch_h = up(k, WIDE) + LANES;
    T *const z = (T*)scratch, *const slopes = z + BLOCK * pitch;
    for (long long begin = first, row[BLOCK]; begin < last; begin += BLOCK) {
        const long long rows = less(BLOCK, last - begin);
        in_turn(row, begin, rows, lengths, steps);
        for (long long l = 0; l < BLOCK * (pitch + pitch_h); l++) z[l] = 0;
        for (long long r = 0; r < rows; r++) {
            copy(slopes + r * pitch_h, dh_last + row[r] * dh_row, k, dh_column);
            copy(dc + row[r] * k, dc_last + row[r] * dc_row, k, dc_column);
            clear_rest(dz, lengths, row[r], steps, 4 * k);
        }
        for (long long t = end_of(lengths, row[0], steps) - 1; t >= 0; t--) {
            const long long live = going(row, rows, lengths, t, steps);
            for (long long r = 0; r < live; r++) {
                const long long at = (row[r] * steps + t) * k, column = t ? 1 : c_column;
                const T* const before = t ? cs + at - k : c + row[r] * c_row;
                const T* const added = gh + row[r] * gh_row + t * gh_step;
                T *const to = z + r * pitch, *const slope = slopes + r * pitch_h, *const after = dc + row[r] * k;
                if (column == 1 && gh_column == 1)
                    lstm_step_back(k, to, gates + 4 * at, before, 1, tops + at, slope, added, 1, after);
                else lstm_step_back(k, to, gates + 4 * at, before, column, tops + at, slope, added, gh_column, after);
                copy(dz + 4 * at, to, 4 * k, 1);  // which may be where the gates are
            }
            product(live, 4 * k, k, z, pitch, weights, slopes, pitch_h, true);
        }
        for (long long r = 0; r < rows; r++) copy(dh + row[r] * k, slopes + r * pitch_h, k, 1);
    }
}

// -- gated recurrent unit ---------------------------------------------------------------------------------------------

static inline void gru_step(long long k, long long wide, T* z, T* joined, T* h, T* gates) {
    const T *const x = z + 2 * wide, *const y = x + wide;
    T most = sizeof(T) == 4 ? 29 : 230;
    __asm__("" : "+r"(most));
    EACH for (long long j = 0; j < k; j++) {
        const T a = grown(-z[j], most), b = grown(-z[k + j], most), inverse = 1 / (a * b);
        gates[j] = b * inverse, gates[k + j] = a * inverse, gates[3 * k + j] = y[j];
    }
    EACH for (long long j = 0; j < k; j++) {
        const T n = tanh(x[j] + gates[j] * y[j]);
        gates[2 * k + j] = n;
        joined[j] = h[j] = n + gates[k + j] * (joined[j] - n);
    }
}

// Jobs are rows of the batch; of the weights, those of r and z take all of [x, 1, 1, h], those of n its two halves.
void gru(const Word* a, long long first, long long last, char* scratch) {
    T *const hs = a[0].p, *const h_last = a[1].p, *const gates = a[2].p;
    const T *const x = a[3].p, *const of_both = a[4].p, *const of_x = a[5].p, *const of_h = a[6].p, *const h = a[7].p;
    const long long steps = a[8].n, inputs = a[9].n, k = a[10].n;
    const long long x_row = a[11].n, x_step = a[12].n, x_column = a[13].n, h_row = a[14].n, h_column = a[15].n;
    const long long* const lengths = a[16].p;
    const long long depth = inputs + 2 + k, wide = up(k, WIDE);
    const long long pitch = up(depth, LANES) + LANES, pitch_z = 4 * wide + LANES;
    T *const joined = (T*)scratch, *const joined_h = joined + inputs + 2, *const z = joined + BLOCK * pitch;
    for (long long begin = first, row[BLOCK]; begin < last; begin += BLOCK) {
        const long long rows = less(BLOCK, last - begin);
        in_turn(row, begin, rows, lengths, steps);
        for (long long l = 0; l < BLOCK * pitch; l++) joined[l] = 0;
        for (long long r = 0; r < rows; r++) {
            joined_h[r * pitch - 1] = joined_h[r * pitch - 2] = 1;
            copy(joined_h + r * pitch, h + row[r] * h_row, k, h_column);
            clear_rest(hs, lengths, row[r], steps, k);
            clear_rest(gates, lengths, row[r], steps, 4 * k);
        }
        for (long long t = 0, live; (live = going(row, rows, lengths, t, steps)); t++) {
            for (long long r = 0; r < live; r++)
                copy(joined + r * pitch, x + row[r] * x_row + t * x_step, inputs, x_column);
            product(live, depth, 2 * k, joined, pitch, of_both, z, pitch_z, false);
            product(live, inputs + 1, k, joined, pitch, of_x, z + 2 * wide, pitch_z, false);
            product(live, 1 + k, k, joined_h - 1, pitch, of_h, z + 3 * wide, pitch_z, false);
            for (long long r = 0; r < live; r++) {
                const long long at = (row[r] * steps + t) * k;
                gru_step(k, wide, z + r * pitch_z, joined_h + r * pitch, hs + at, gates + 4 * at);
            }
        }
        for (long long r = 0; r < rows; r++) copy(h_last + row[r] * k, joined_h + r * pitch, k, 1);
    }
}

// One step of one row: the gradients of r, z and n before their functions and of what r scales, of which z takes those
// that come from h; dh becomes what does not go through the gates.
static inline __attribute__((always_inline)) void gru_step_back(
    long long k, T* z, T* to, const T* gates, const T* h, long long h_column, T* dh, const T* gh, long long gh_column) {
    EACH for (long long j = 0; j < k; j++) {
        const T r = gates[j], keep = gates[k + j], n = gates[2 * k + j], scaled = gates[3 * k + j];
        const T slope = dh[j] + gh[j * gh_column], dn = slope * (1 - keep) * (1 - n * n);
        to[j] = z[j] = dn * scaled * r * (1 - r);
        to[k + j] = z[k + j] = slope * (h[j * h_column] - n) * keep * (1 - keep);
        to[2 * k + j] = dn;
        to[3 * k + j] = z[2 * k + j] = dn * r;
        dh[j] = slope * keep;
    }
}

// dz, and dh before the first step; `weights` are those of h, turned. Jobs are rows of the batch.
void gru_back(const Word* a, long long first, long long last, char* scratch) {
    T *const dz = a[0].p, *const dh = a[1].p;
    const T *const gh = a[2].p, *const dh_last = a[3].p, *const h = a[4].p;
    const T *const hs = a[5].p, *const gates = a[6].p, *const weights = a[7].p;
    const long long steps = a[8].n, k = a[9].n, gh_row = a[10].n, gh_step = a[11].n, gh_column = a[12].n;
    const long long dh_row = a[13].n, dh_column = a[14].n, h_row = a[15].n, h_column = a[16].n;
    const long long* const lengths = a[17].p;
    const long long pitch = up(3 * k, LANES) + LANES, pitch_h = up(k, WIDE) + LANES;
    T *const z = (T*)scratch, *const slopes = z + BLOCK * pitch;
    for (long long begin = first, row[BLOCK]; begin < last; begin += BLOCK) {
        const long long rows = less(BLOCK, last - begin);
        in_turn(row, begin, rows, lengths, steps);
        for (long long l = 0; l < BLOCK * (pitch + pitch_h); l++) z[l] = 0;
        for (long long r = 0; r < rows; r++) {
            copy(slopes + r * pitch_h, dh_last + row[r] * dh_row, k, dh_column);
            clear_rest(dz, lengths, row[r], steps, 4 * k);
        }
        for (long long t = end_of(lengths, row[0], steps) - 1; t >= 0; t--) {
            const long long live = going(row, rows, lengths, t, steps);
            for (long long r = 0; r < live; r++) {
                const long long at = (row[r] * steps + t) * k, column = t ? 1 : h_column;
                const T* const before = t ? hs + at - k : h + row[r] * h_row;
                const T* const added = gh + row[r] * gh_row + t * gh_step;
                T *const now = z + r * pitch, *const to = dz + 4 * at, *const slope = slopes + r * pitch_h;
                if (column == 1 && gh_column == 1)
                    gru_step_back(k, now, to, gates + 4 * at, before, 1, slope, added, 1);
                else gru_step_back(k, now, to, gates + 4 * at, before, column, slope, added, gh_column);
            }
            product(live, 3 * k, k, z, pitch, weights, slopes, pitch_h, true);
        }
        for (long long r = 0; r < rows; r++) copy(dh + row[r] * k, slopes + r * pitch_h, k, 1);
    }
}

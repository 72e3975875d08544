// Pooling of images: windows slide over the rows and columns of planes, a plane per channel of each image.
//
// Jobs are planes, of images and windows with any strides. Numbers are computed side by side: a window of all planes
// where these are neighbors in memory, else the windows of a row. `pool_plainly` says what they mean.

#include <string.h>

#include "vectors.h"

typedef struct {
    long long image, plane, row, column;
} Strides;

typedef struct {
    T* image;
    T* windows;
    unsigned char* taps;  // the tap of each window that was the greatest; none for means
    long long channels, height, width, rows, columns;  // of images, and of windows
    long long kernel_rows, kernel_columns, down, right, top, left;
    Strides x, y, t;  // of images, windows and taps
    bool together;  // whether planes of an image are neighbors
    bool whole;  // whether those of all images go on so
} Pooling;

static inline Strides strides_of(const Word* a) { return (Strides){a[0].n, a[1].n, a[2].n, a[3].n}; }

static inline Pooling pooling_of(const Word* a) {
    Pooling g = {a[0].p, a[1].p, a[2].p, a[3].n, a[4].n, a[5].n, a[6].n, a[7].n, a[8].n,
                 a[9].n, a[10].n, a[11].n, a[12].n, a[13].n};
    g.x = strides_of(a + 14), g.y = strides_of(a + 18), g.t = strides_of(a + 22);
    g.together = g.x.plane == 1;
    g.whole = g.x.image == g.channels * g.x.plane && g.y.image == g.channels * g.y.plane &&
              g.t.image == g.channels * g.t.plane;
    return g;
}

static inline long long least(long long a, long long b) { return a < b ? a : b; }
static inline long long most(long long a, long long b) { return a > b ? a : b; }

// Where plane p begins.
static inline long long plane_at(const Pooling* g, const Strides* s, long long p) {
    return p / g->channels * s->image + p % g->channels * s->plane;
}

// The planes from p on that are computed together.
static inline long long planes_from(const Pooling* g, long long p, long long last) {
    return !g->together ? 1 : g->whole ? last - p : least(last, (p / g->channels + 1) * g->channels) - p;
}

// Where the window i, j begins, which may be in the frame.
static inline long long window_at(const Pooling* g, long long i, long long j) {
    return (i * g->down - g->top) * g->x.row + (j * g->right - g->left) * g->x.column;
}

// The taps of a window that lie inside the image: rows u to u_end, columns v to v_end.
typedef struct {
    long long u, u_end, v, v_end;
} Part;

static inline Part inside(const Pooling* g, long long i, long long j) {
    const long long top = g->top - i * g->down, left = g->left - j * g->right;
    return (Part){most(top, 0), least(g->kernel_rows, g->height + top), most(left, 0),
                  least(g->kernel_columns, g->width + left)};
}

// The windows of a row all of whose columns lie inside the image.
typedef struct {
    long long begin, end;
} Span;

static inline Span span_of(const Pooling* g) {
    const long long room = g->width + g->left - g->kernel_columns;
    const long long end = room < 0 ? 0 : least(room / g->right + 1, g->columns);
    return (Span){least((g->left + g->right - 1) / g->right, end), end};
}

// A number of a tap as wide as a pixel, so that both are compared and chosen side by side.
typedef __typeof__(_Generic((T)0, float: 0, default: 0ll)) Tap;

// The greatest pixel of a window and the number of its tap, or the mean if there are no taps: of equal values the first
// wins, a NaN stays, the frame never wins and counts as zeros.
static void pool_one(const Pooling* g, const T* x, Part in, T* y, unsigned char* t) {
    T best = t ? -(T)INFINITY : 0;
    Tap tap = 0;
    for (long long u = in.u; u < in.u_end; u++)
        for (long long v = in.v; v < in.v_end; v++) {
            const T pixel = x[u * g->x.row + v * g->x.column];
            if (t && pixel > best) tap = u * g->kernel_columns + v;
            if (!t) best += pixel;
            else if (pixel > best || pixel != pixel) best = pixel;
        }
    *y = t ? best : best / (g->kernel_rows * g->kernel_columns);
    if (t) *t = tap;
}

// What `max_pool` and `avg_pool` compute.
void pool_plainly(const Word* a, long long first, long long last, char* scratch) {
    const Pooling g = pooling_of(a);
    for (long long p = first; p < last; p++)
        for (long long i = 0; i < g.rows; i++)
            for (long long j = 0; j < g.columns; j++) {
                unsigned char* const t = g.taps ? g.taps + plane_at(&g, &g.t, p) + i * g.t.row + j * g.t.column : 0;
                T* const y = g.windows + plane_at(&g, &g.y, p) + i * g.y.row + j * g.y.column;
                pool_one(&g, g.image + plane_at(&g, &g.x, p) + window_at(&g, i, j), inside(&g, i, j), y, t);
            }
}

// The same for windows side by side, whose pixels are `step` apart. Two apart, the first tap is the first of a pair and
// any other the second of one, so that nothing beyond the windows is read.
#if defined(__clang__)
#define SHUFFLED(some, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(some, a, b, ...) __builtin_shuffle(a, b, (Taps##some){__VA_ARGS__})
#endif
#define EVEN_4 0, 2, 4, 6
#define EVEN_8 EVEN_4, 8, 10, 12, 14
#define EVEN_16 EVEN_8, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD_4 1, 3, 5, 7
#define ODD_8 ODD_4, 9, 11, 13, 15
#define ODD_16 ODD_8, 17, 19, 21, 23, 25, 27, 29, 31
#define POOL(some) \
    typedef T Pixels##some __attribute__((vector_size(some * sizeof(T)), aligned(sizeof(T)), may_alias)); \
    typedef Tap Taps##some __attribute__((vector_size(some * sizeof(T)))); \
    typedef unsigned char Bytes##some __attribute__((vector_size(some), aligned(1))); \
    static inline __attribute__((always_inline)) Pixels##some pick_##some(const T* x, long long step, bool first) { \
        if (step == 1) return *(const Pixels##some*)x; \
        Pixels##some picked; \
        if (step == 2) { \
            x -= !first; \
            const Pixels##some low = *(const Pixels##some*)x, high = *(const Pixels##some*)(x + some); \
            return first ? SHUFFLED(some, low, high, EVEN_##some) : SHUFFLED(some, low, high, ODD_##some); \
        } \
        for (int l = 0; l < some; l++) picked[l] = x[l * step]; \
        return picked; \
    } \
    static inline __attribute__((always_inline)) void pool_by_##some( \
        const Pooling* g, const T* x, Part in, T* y, unsigned char* t, const long long step, long long y_step, \
        long long t_step) { \
        Pixels##some best = (Pixels##some){} - (t ? (T)INFINITY : 0); \
        Taps##some tap = {}, nan = {}; \
        for (long long u = in.u; u < in.u_end; u++) \
            for (long long v = in.v; v < in.v_end; v++) { \
                const Pixels##some pixels = pick_##some(x + u * g->x.row + v * g->x.column, step, v == 0); \
                if (!t) { \
                    best += pixels; \
                    continue; \
                } \
                const Taps##some greater = pixels > best; \
                nan |= pixels != pixels; \
                tap = (greater & (Tap)(u * g->kernel_columns + v)) | (~greater & tap); \
                best = (Pixels##some)((greater & (Taps##some)pixels) | (~greater & (Taps##some)best)); \
            } \
        if (!t) best /= (T)(g->kernel_rows * g->kernel_columns); \
        const Bytes##some nans = __builtin_convertvector(nan, Bytes##some), none = {}; \
        if (memcmp(&nans, &none, some)) { \
            for (int l = 0; l < some; l++) pool_one(g, x + l * step, in, y + l * y_step, t + l * t_step); \
            return; \
        } \
        if (y_step == 1) *(Pixels##some*)y = best; \
        else for (int l = 0; l < some; l++) y[l * y_step] = best[l]; \
        if (t && t_step == 1) *(Bytes##some*)t = __builtin_convertvector(tap, Bytes##some); \
        else if (t) for (int l = 0; l < some; l++) t[l * t_step] = tap[l]; \
    }
POOL(16)
POOL(8)
POOL(4)

// `count` windows side by side; the last ones may be computed twice.
static inline __attribute__((always_inline)) void pool_many(
    const Pooling* g, const T* x, Part in, T* y, unsigned char* t, long long count, const long long step,
    long long y_step, long long t_step) {
#define BY(some) \
    if (some * sizeof(T) <= BYTES && count >= some) { \
        for (long long k = 0, at; at = least(k, count - some), k < count; k += some) \
            pool_by_##some(g, x + at * step, in, y + at * y_step, t ? t + at * t_step : 0, step, y_step, t_step); \
        return; \
    }
    BY(16) BY(8) BY(4)
    for (long long k = 0; k < count; k++) pool_one(g, x + k * step, in, y + k * y_step, t ? t + k * t_step : 0);
}

// Windows of a row of one plane.
static void pool_row(const Pooling* g, const T* x, Part in, T* y, unsigned char* t, long long count) {
    const long long step = g->right * g->x.column, y_step = g->y.column, t_step = g->t.column;
    if (step == 1) pool_many(g, x, in, y, t, count, 1, y_step, t_step);
    else if (step == 2 && g->kernel_columns > 1) pool_many(g, x, in, y, t, count, 2, y_step, t_step);
    else if (step > 2) pool_many(g, x, in, y, t, count, step, y_step, t_step);
    else for (long long k = 0; k < count; k++) pool_one(g, x + k * step, in, y + k * y_step, t ? t + k * t_step : 0);
}

// The greatest value of each window and its tap, or the mean where there is no room for taps.
static void pool(const Word* a, long long first, long long last) {
    const Pooling g = pooling_of(a);
    const Span span = span_of(&g);
    for (long long p = first, count; p < last; p += count) {
        count = planes_from(&g, p, last);
        const T* const x = g.image + plane_at(&g, &g.x, p);
        T* const plane = g.windows + plane_at(&g, &g.y, p);
        unsigned char* const taps = g.taps ? g.taps + plane_at(&g, &g.t, p) : 0;
        for (long long i = 0; i < g.rows; i++)
            for (long long j = 0; j < g.columns; j++) {
                const Part in = inside(&g, i, j);
                T* const y = plane + i * g.y.row + j * g.y.column;
                unsigned char* const t = taps ? taps + i * g.t.row + j * g.t.column : 0;
                if (g.together) pool_many(&g, x + window_at(&g, i, j), in, y, t, count, 1, g.y.plane, g.t.plane);
                else if (j == span.begin && j < span.end) {
                    pool_row(&g, x + window_at(&g, i, j), in, y, t, span.end - j);
                    j = span.end - 1;
                } else pool_one(&g, x + window_at(&g, i, j), in, y, t);
            }
    }
}

void max_pool(const Word* a, long long first, long long last, char* scratch) { pool(a, first, last); }
void avg_pool(const Word* a, long long first, long long last, char* scratch) { pool(a, first, last); }

// -- gradients --------------------------------------------------------------------------------------------------------

// Slopes are added to zeros, which are written a plane at a time or, if planes are neighbors, just before windows meet
// them.
static void clear_rows(const Pooling* g, T* x, long long row, long long end, long long planes) {
    const bool line = g->x.column == planes, all = line && g->x.row == g->width * planes;  // what lies together
    const long long rows = most(end - row, 0), pixels = line ? g->width : 1, count = (all ? rows : 1) * pixels * planes;
    for (long long r = 0; r < rows; r += all ? rows : 1)
        for (long long c = 0; c < g->width; c += pixels)
            memset(x + (row + r) * g->x.row + c * g->x.column, 0, count * sizeof(T));
}

// One window of neighboring planes, as slopes and taps are too.
static void add_planes(const Pooling* g, T* x, Part in, const T* y, const unsigned char* t, T share, long long planes) {
    for (long long u = in.u; u < in.u_end; u++)
        for (long long v = in.v; v < in.v_end; v++) {
            T* const pixels = x + u * g->x.row + v * g->x.column;
            const unsigned char tap = u * g->kernel_columns + v;
            if (t) EACH for (long long k = 0; k < planes; k++) pixels[k] += t[k] == tap ? y[k] : 0;
            else EACH for (long long k = 0; k < planes; k++) pixels[k] += y[k] * share;
        }
}

// Windows of a row, side by side, which are pairs of columns.
#define LOW_4 0, 4, 1, 5
#define HIGH_4 2, 6, 3, 7
#define LOW_8 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH_8 4, 12, 5, 13, 6, 14, 7, 15
#define LOW_16 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH_16 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define ADD_PAIRS(some) \
    static inline __attribute__((always_inline)) void add_pairs_##some( \
        const Pooling* g, T* x, Part in, const T* y, const unsigned char* t, T share) { \
        const Pixels##some slopes = *(const Pixels##some*)y; \
        Pixels##some left = slopes * share, right = left; \
        for (long long u = in.u; u < in.u_end; u++) { \
            if (t) { \
                const Taps##some taps = __builtin_convertvector(*(const Bytes##some*)t, Taps##some); \
                left = (Pixels##some)((taps == 2 * (Tap)u) & (Taps##some)slopes); \
                right = (Pixels##some)((taps == 2 * (Tap)u + 1) & (Taps##some)slopes); \
            } \
            T* const to = x + u * g->x.row; \
            *(Pixels##some*)to += SHUFFLED(some, left, right, LOW_##some); \
            *(Pixels##some*)(to + some) += SHUFFLED(some, left, right, HIGH_##some); \
        } \
    }
ADD_PAIRS(16)
ADD_PAIRS(8)
ADD_PAIRS(4)

// Windows of a row from the span's first on, if they are such; the first that is left. `x` is where window 0 begins.
static inline __attribute__((always_inline)) long long add_pairs(
    const Pooling* g, T* x, Part in, const T* y, const unsigned char* t, T share, Span span) {
    const bool near = g->x.column == 1 && g->y.column == 1 && g->t.column == 1;
    long long j = span.begin;
    if (!near || g->kernel_columns != 2 || g->right != 2) return j;
#define PAIRS(some) \
    if (some * sizeof(T) <= BYTES) \
        for (; j + some <= span.end; j += some) add_pairs_##some(g, x + 2 * j, in, y + j, t ? t + j : 0, share);
    PAIRS(16) PAIRS(8) PAIRS(4)
    return j;
}

// One slope, whose tap may lie in the frame.
static void add_one(const Pooling* g, T* x, long long i, long long j, T slope, long long tap) {
    const long long r = i * g->down - g->top + tap / g->kernel_columns;
    const long long c = j * g->right - g->left + tap % g->kernel_columns;
    if (r >= 0 && r < g->height && c >= 0 && c < g->width) x[r * g->x.row + c * g->x.column] += slope;
}

// A row of windows of one plane; `places` are those of taps from the first pixel of a window.
static inline __attribute__((always_inline)) void add_row(
    const Pooling* g, T* x, long long i, const T* y, const unsigned char* t, Span span, const long long* places) {
    const Part in = inside(g, i, 0);
    const bool whole = in.u == 0 && in.u_end == g->kernel_rows;
    const long long step = g->right * g->x.column;
    T* const line = x + window_at(g, i, 0);
    long long j = 0;
    for (; j < span.begin; j++) add_one(g, x, i, j, y[j * g->y.column], t[j * g->t.column]);
    j = add_pairs(g, line, in, y, t, 1, span);
    for (; whole && j < span.end; j++) line[j * step + places[t[j * g->t.column]]] += y[j * g->y.column];
    for (; j < g->columns; j++) add_one(g, x, i, j, y[j * g->y.column], t[j * g->t.column]);
}

static inline __attribute__((always_inline)) void spread(
    T* x, const T* y, T share, long long count, const long long step, const long long y_step) {
    EACH for (long long k = 0; k < count; k++) x[k * step] += y[k * y_step] * share;
}

// The same where there are no taps.
static void spread_row(const Pooling* g, T* x, long long i, const T* y, Span span, T share) {
    const long long step = g->right * g->x.column;
    const Part in = inside(g, i, 0);
    const long long done = span.begin == 0 ? add_pairs(g, x + window_at(g, i, 0), in, y, 0, share, span) : 0;
    for (long long j = done; done && j < g->columns; j++)
        add_planes(g, x + window_at(g, i, j), inside(g, i, j), y + j * g->y.column, 0, share, 1);
    for (long long u = in.u; u < in.u_end && !done; u++)
        for (long long v = 0; v < g->kernel_columns; v++) {
            const long long begin = most(0, (g->left - v + g->right - 1) / g->right), room = g->width - 1 + g->left - v;
            const long long count = room < 0 ? 0 : least(room / g->right + 1, g->columns) - begin;
            T* const to = x + window_at(g, i, begin) + u * g->x.row + v * g->x.column;
            const T* const from = y + begin * g->y.column;
            if (step == 1 && g->y.column == 1) spread(to, from, share, count, 1, 1);
            else if (step == 2 && g->y.column == 1) spread(to, from, share, count, 2, 1);
            else spread(to, from, share, count, step, g->y.column);
        }
}

// Each slope is added to the pixel that its tap names, or spread evenly over its window if there are no taps.
static void add_slopes(const Word* a, long long first, long long last) {
    const Pooling g = pooling_of(a);
    const Span span = span_of(&g);
    const T share = (T)1 / (g.kernel_rows * g.kernel_columns);
    long long places[256];
    for (int tap = 0; tap < 256; tap++)
        places[tap] = tap / g.kernel_columns * g.x.row + tap % g.kernel_columns * g.x.column;
    for (long long p = first, count; p < last; p += count) {
        count = planes_from(&g, p, last);
        T* const x = g.image + plane_at(&g, &g.x, p);
        const T* const plane = g.windows + plane_at(&g, &g.y, p);
        const unsigned char* const taps = g.taps ? g.taps + plane_at(&g, &g.t, p) : 0;
        long long clear = g.together ? 0 : g.height;
        clear_rows(&g, x, 0, clear, count);
        for (long long i = 0; i < g.rows; i++) {
            const T* const y = plane + i * g.y.row;
            const unsigned char* const t = taps ? taps + i * g.t.row : 0;
            if (!g.together) {
                taps ? add_row(&g, x, i, y, t, span, places) : spread_row(&g, x, i, y, span, share);
                continue;
            }
            const long long end = least(i * g.down - g.top + g.kernel_rows, g.height);
            clear_rows(&g, x, clear, end, count);
            clear = most(clear, end);
            for (long long j = 0; j < g.columns; j++) {
                const unsigned char* const tap = t ? t + j * g.t.column : 0;
                add_planes(&g, x + window_at(&g, i, j), inside(&g, i, j), y + j * g.y.column, tap, share, count);
            }
        }
        clear_rows(&g, x, clear, g.height, count);
    }
}

void max_pool_dx(const Word* a, long long first, long long last, char* scratch) { add_slopes(a, first, last); }
void avg_pool_dx(const Word* a, long long first, long long last, char* scratch) { add_slopes(a, first, last); }

// The pixel that each tap names, 0 in the frame.
void max_pool_pick(const Word* a, long long first, long long last, char* scratch) {
    const Pooling g = pooling_of(a);
    for (long long p = first; p < last; p++)
        for (long long i = 0; i < g.rows; i++)
            for (long long j = 0; j < g.columns; j++) {
                const long long tap = g.taps[plane_at(&g, &g.t, p) + i * g.t.row + j * g.t.column];
                const long long r = i * g.down - g.top + tap / g.kernel_columns;
                const long long c = j * g.right - g.left + tap % g.kernel_columns;
                const bool in = r >= 0 && r < g.height && c >= 0 && c < g.width;
                g.windows[plane_at(&g, &g.y, p) + i * g.y.row + j * g.y.column] =
                    in ? g.image[plane_at(&g, &g.x, p) + r * g.x.row + c * g.x.column] : 0;
            }
}

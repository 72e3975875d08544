// Pooling of images: windows slide over the rows and columns of planes, a plane per channel of each image.
//
// Jobs are planes. Where neighbors of a row lie side by side, a row of windows is computed tap by tap; where channels do,
// a window of many channels.

#define UNROLL _Pragma("GCC unroll 9")

typedef struct {
    long long channels, height, width, rows, columns;  // of the image, and of the windows
    long long image, plane, row, column;  // strides of the image
    long long kernel_rows, kernel_columns, down, right, top, left;
} Geometry;

static inline Geometry geometry_of(const Word* a) {
    return (Geometry){a[0].n, a[1].n, a[2].n, a[3].n, a[4].n, a[5].n, a[6].n, a[7].n,
                      a[8].n, a[9].n, a[10].n, a[11].n, a[12].n, a[13].n, a[14].n};
}

static inline long long least(long long a, long long b) { return a < b ? a : b; }

// The windows of a row that a column of taps meets inside the image, and the column where it meets the first.
typedef struct {
    long long begin, count, column;
} Span;

static void find_spans(const Geometry* g, Span* spans) {
    for (long long v = 0; v < g->kernel_columns; v++) {
        const long long start = v - g->left;  // what window 0 meets
        const long long begin = start < 0 ? least((g->right - 1 - start) / g->right, g->columns) : 0;
        const long long end = start >= g->width ? 0 : least((g->width - 1 - start) / g->right + 1, g->columns);
        spans[v] = (Span){begin, end > begin ? end - begin : 0, start + begin * g->right};
    }
}

// Where channels lie side by side, a group of them is computed at a time, whatever the kernel and the stride.
enum { GROUP = 16 };
typedef T Pixels __attribute__((vector_size(GROUP * sizeof(T)), aligned(sizeof(T))));

static inline bool is_group(const Geometry* g, long long plane, long long last) {
    return g->plane == 1 && plane % g->channels + GROUP <= g->channels && plane + GROUP <= last;
}

// The taps of a window that lie inside the image: rows u to u_end, columns v to v_end.
typedef struct {
    long long u, u_end, v, v_end;
} Part;

static inline Part inside(const Geometry* g, long long i, long long j) {
    const long long top = g->top - i * g->down, left = g->left - j * g->right;
    return (Part){top > 0 ? top : 0, least(g->kernel_rows, g->height + top), left > 0 ? left : 0,
                  least(g->kernel_columns, g->width + left)};
}

static inline const T* pixel_at(const Geometry* g, const T* from, long long i, long long j, long long u, long long v) {
    return from + (i * g->down + u - g->top) * g->row + (j * g->right + v - g->left) * g->column;
}

// -- maximum ----------------------------------------------------------------------------------------------------------

// A number of a tap as wide as a pixel, so that both are compared and chosen side by side.
typedef __typeof__(_Generic((T)0, float: 0, default: 0ll)) Tap;

// What a window means, tap by tap: of equal values the first wins, a NaN stays, the frame never wins.
static void max_window(const Geometry* g, const T* from, long long i, long long j, T* y, Tap* t) {
    *y = -INFINITY, *t = 0;
    for (long long u = 0; u < g->kernel_rows; u++)
        for (long long v = 0; v < g->kernel_columns; v++) {
            const long long r = i * g->down + u - g->top, c = j * g->right + v - g->left;
            if (r < 0 || r >= g->height || c < 0 || c >= g->width) continue;
            const T pixel = from[r * g->row + c * g->column];
            if (pixel > *y) *t = u * g->kernel_columns + v;
            if (pixel > *y || pixel != pixel) *y = pixel;
        }
}

// Forms for windows side by side know no NaN: they return a number that is not 0 where they may have met one.

// One tap of `count` neighbors.
static inline __attribute__((always_inline)) Tap max_tap(T* y, Tap* t, const T* x, long long count, long long step,
                                                         Tap tap) {
    Tap nans = 0;
    EACH for (long long j = 0; j < count; j++) {
        const T pixel = x[j * step], best = y[j];
        nans |= pixel != pixel;
        const Tap mine = pixel > best ? tap : 0;
        t[j] = mine > t[j] ? mine : t[j];  // taps come in rising order; so there is no store under a condition
        y[j] = pixel > best ? pixel : best;
    }
    return nans;
}

// A row of windows, tap by tap.
static Tap max_row(const Geometry* g, const Span* spans, const T* from, long long i, T* y, Tap* t) {
    const long long step = g->right * g->column;
    Tap nans = 0;
    for (long long j = 0; j < g->columns; j++) y[j] = -INFINITY, t[j] = 0;
    for (long long u = 0; u < g->kernel_rows; u++) {
        const long long r = i * g->down + u - g->top;
        if (r < 0 || r >= g->height) continue;
        for (long long v = 0; v < g->kernel_columns; v++) {
            const Span at = spans[v];
            const T* const x = from + r * g->row + at.column * g->column;
            const Tap tap = u * g->kernel_columns + v;
            if (step == 1) nans |= max_tap(y + at.begin, t + at.begin, x, at.count, 1, tap);
            else if (step == 2) nans |= max_tap(y + at.begin, t + at.begin, x, at.count, 2, tap);
            else nans |= max_tap(y + at.begin, t + at.begin, x, at.count, step, tap);
        }
    }
    return nans;
}

// `count` windows of a row that lie inside the image, with all taps in registers.
static inline __attribute__((always_inline)) Tap max_inside(T* y, Tap* t, const T* x, long long row, long long count,
                                                            const int kernel, const int right) {
    Tap nans = 0;
    EACH for (long long j = 0; j < count; j++) {
        T best = x[j * right], sum = best;
        Tap tap = 0;
        UNROLL for (int k = 1; k < kernel * kernel; k++) {
            const T pixel = x[k / kernel * row + k % kernel + j * right];
            tap = pixel > best ? k : tap;
            best = pixel > best ? pixel : best;
            sum += pixel;
        }
        y[j] = best;
        t[j] = tap;
        nans |= sum != sum;
    }
    return nans;
}

// The windows of row i that lie inside the image, if their kernel and stride are usual ones; which these are.
static Span usual(const Geometry* g, const Span* spans, const T* from, long long i, T* y, Tap* t, Tap* nans) {
    const Span first = spans[0], last = spans[g->kernel_columns - 1];
    const Span in = {first.begin, last.begin + last.count - first.begin, first.column};
    const long long r = i * g->down - g->top;
    const bool square = g->column == 1 && g->kernel_rows == g->kernel_columns;
    const bool fits = square && r >= 0 && r + g->kernel_rows <= g->height;
    const T* const x = from + r * g->row + in.column;
    const long long kind = fits && in.count > 0 ? 10 * g->kernel_rows + g->right : 0;
    y += in.begin, t += in.begin;
    if (kind == 21) *nans |= max_inside(y, t, x, g->row, in.count, 2, 1);
    else if (kind == 22) *nans |= max_inside(y, t, x, g->row, in.count, 2, 2);
    else if (kind == 31) *nans |= max_inside(y, t, x, g->row, in.count, 3, 1);
    else if (kind == 32) *nans |= max_inside(y, t, x, g->row, in.count, 3, 2);
    else if (kind == 33) *nans |= max_inside(y, t, x, g->row, in.count, 3, 3);
    else return (Span){0, 0, 0};
    return in;
}

typedef Tap Taps __attribute__((vector_size(GROUP * sizeof(Tap))));

static void max_group(const Geometry* g, const T* from, T* y, unsigned char* t) {
    const long long windows = g->rows * g->columns;
    for (long long k = 0; k < windows; k++) {
        const long long i = k / g->columns, j = k % g->columns;
        const Part part = inside(g, i, j);
        Pixels best = (Pixels){0} - (T)INFINITY;
        Taps tap = {0};
        for (long long u = part.u; u < part.u_end; u++)
            for (long long v = part.v; v < part.v_end; v++) {
                const Pixels pixels = *(const Pixels*)pixel_at(g, from, i, j, u, v);
                const Taps greater = pixels > best, wins = greater | (pixels != pixels);
                const Taps own = greater & (Tap)(u * g->kernel_columns + v);
                tap = own | (~greater & tap);
                best = (Pixels)((wins & (Taps)pixels) | (~wins & (Taps)best));
            }
        for (int c = 0; c < GROUP; c++) y[c * windows + k] = best[c], t[c * windows + k] = tap[c];
    }
}

// The greatest value of each window, and the number of the tap that it lies at. `scratch` holds spans, and the taps of
// a plane.
void max_pool(const Word* a, long long first, long long last, char* scratch) {
    const Geometry g = geometry_of(a + 3);
    const long long windows = g.rows * g.columns;
    Span* const spans = (Span*)scratch;
    Tap* const taps = (Tap*)(spans + g.kernel_columns);
    find_spans(&g, spans);
    for (long long p = first; p < last; p++) {
        const T* const from = (T*)a[2].p + p / g.channels * g.image + p % g.channels * g.plane;
        T* const best = (T*)a[0].p + p * windows;
        if (is_group(&g, p, last)) {
            max_group(&g, from, best, (unsigned char*)a[1].p + p * windows);
            p += GROUP - 1;
            continue;
        }
        Tap nans = 0;
        for (long long i = 0; i < g.rows; i++) {
            T* const y = best + i * g.columns;
            Tap* const t = taps + i * g.columns;
            const Span done = usual(&g, spans, from, i, y, t, &nans);
            if (!done.count) nans |= max_row(&g, spans, from, i, y, t);
            else
                for (long long j = 0; j < g.columns; j++)
                    if (j < done.begin || j >= done.begin + done.count) max_window(&g, from, i, j, y + j, t + j);
        }
        for (long long k = 0; nans && k < windows; k++)
            max_window(&g, from, k / g.columns, k % g.columns, best + k, taps + k);
        EACH for (long long k = 0; k < windows; k++) ((unsigned char*)a[1].p)[p * windows + k] = taps[k];
    }
}

// Where a tap of a window lies, as an offset from the first pixel of a plane; -1 in the frame.
static inline long long pixel_of(const Geometry* g, long long i, long long j, unsigned char tap) {
    const long long r = i * g->down - g->top + tap / g->kernel_columns;
    const long long c = j * g->right - g->left + tap % g->kernel_columns;
    return r < 0 || r >= g->height || c < 0 || c >= g->width ? -1 : r * g->row + c * g->column;
}

// Windows of 2 x 2 pixels that tile an image: all of it is written, nothing added.
static void tiles_dx(const Geometry* g, T* x, const T* slopes, const unsigned char* taps, Tap* wide) {
    for (long long k = 0; k < g->rows * g->columns; k++) wide[k] = taps[k];
    for (long long i = 0; i < g->rows; i++, slopes += g->columns, wide += g->columns)
        for (int u = 0; u < 2; u++, x += g->width)
            EACH for (long long j = 0; j < g->columns; j++) {
                x[2 * j] = wide[j] == 2 * u ? slopes[j] : 0;
                x[2 * j + 1] = wide[j] == 2 * u + 1 ? slopes[j] : 0;
            }
}

// Each slope is added to the pixel that its tap names; `scratch` holds the taps of a plane.
void max_pool_dx(const Word* a, long long first, long long last, char* scratch) {
    const Geometry g = geometry_of(a + 3);
    const long long windows = g.rows * g.columns, size = g.height * g.width;
    const bool tiles = g.kernel_rows == 2 && g.kernel_columns == 2 && g.down == 2 && g.right == 2 &&
                       2 * g.rows == g.height && 2 * g.columns == g.width && !g.top && !g.left;
    for (long long p = first; p < last; p++) {
        T* const x = (T*)a[0].p + p * size;
        const T* const slopes = (T*)a[1].p + p * windows;
        const unsigned char* const taps = (unsigned char*)a[2].p + p * windows;
        if (tiles) {
            tiles_dx(&g, x, slopes, taps, (Tap*)scratch);
            continue;
        }
        for (long long k = 0; k < size; k++) x[k] = 0;
        for (long long i = 0; i < g.rows; i++)
            for (long long j = 0; j < g.columns; j++) {
                const long long place = pixel_of(&g, i, j, taps[i * g.columns + j]);
                if (place >= 0) x[place] += slopes[i * g.columns + j];
            }
    }
}

// The pixel that each tap names, 0 in the frame.
void max_pool_pick(const Word* a, long long first, long long last, char* scratch) {
    const Geometry g = geometry_of(a + 3);
    const long long windows = g.rows * g.columns;
    for (long long p = first; p < last; p++)
        for (long long k = 0; k < windows; k++) {
            const unsigned char tap = ((unsigned char*)a[2].p)[p * windows + k];
            const long long place = pixel_of(&g, k / g.columns, k % g.columns, tap);
            const T* const x = (T*)a[1].p + p / g.channels * g.image + p % g.channels * g.plane;
            ((T*)a[0].p)[p * windows + k] = place < 0 ? 0 : x[place];
        }
}

// -- average ----------------------------------------------------------------------------------------------------------

static inline __attribute__((always_inline)) void add_tap(T* y, const T* x, long long count, long long step) {
    EACH for (long long j = 0; j < count; j++) y[j] += x[j * step];
}

static inline __attribute__((always_inline)) void spread_tap(T* x, const T* y, long long count, long long step) {
    EACH for (long long j = 0; j < count; j++) x[j * step] += y[j];
}

static void avg_group(const Geometry* g, const T* from, T* y) {
    const long long windows = g->rows * g->columns;
    const T taps = g->kernel_rows * g->kernel_columns;
    for (long long k = 0; k < windows; k++) {
        const long long i = k / g->columns, j = k % g->columns;
        const Part part = inside(g, i, j);
        Pixels sum = {0};
        for (long long u = part.u; u < part.u_end; u++)
            for (long long v = part.v; v < part.v_end; v++) sum += *(const Pixels*)pixel_at(g, from, i, j, u, v);
        sum /= taps;
        for (int c = 0; c < GROUP; c++) y[c * windows + k] = sum[c];
    }
}

// The mean of each window; the zeros of the frame count as values; `scratch` holds spans.
void avg_pool(const Word* a, long long first, long long last, char* scratch) {
    const Geometry g = geometry_of(a + 2);
    const T taps = g.kernel_rows * g.kernel_columns;
    const long long step = g.right * g.column;
    Span* const spans = (Span*)scratch;
    find_spans(&g, spans);
    for (long long p = first; p < last; p++) {
        const T* const from = (T*)a[1].p + p / g.channels * g.image + p % g.channels * g.plane;
        if (is_group(&g, p, last)) {
            avg_group(&g, from, (T*)a[0].p + p * g.rows * g.columns);
            p += GROUP - 1;
            continue;
        }
        for (long long i = 0; i < g.rows; i++) {
            T* const y = (T*)a[0].p + (p * g.rows + i) * g.columns;
            for (long long j = 0; j < g.columns; j++) y[j] = 0;
            for (long long u = 0; u < g.kernel_rows; u++) {
                const long long r = i * g.down + u - g.top;
                if (r < 0 || r >= g.height) continue;
                const T* const x = from + r * g.row;
                for (const Span* at = spans; at < spans + g.kernel_columns; at++) {
                    const T* const tap = x + at->column * g.column;
                    if (step == 1) add_tap(y + at->begin, tap, at->count, 1);
                    else if (step == 2) add_tap(y + at->begin, tap, at->count, 2);
                    else add_tap(y + at->begin, tap, at->count, step);
                }
            }
            for (long long j = 0; j < g.columns; j++) y[j] /= taps;
        }
    }
}

// Each slope is spread evenly over its window; `scratch` holds spans and a row of slopes.
void avg_pool_dx(const Word* a, long long first, long long last, char* scratch) {
    const Geometry g = geometry_of(a + 2);
    const T taps = g.kernel_rows * g.kernel_columns;
    Span* const spans = (Span*)scratch;
    T* const part = (T*)(spans + g.kernel_columns);
    find_spans(&g, spans);
    for (long long p = first; p < last; p++) {
        T* const x = (T*)a[0].p + p * g.height * g.width;
        for (long long k = 0; k < g.height * g.width; k++) x[k] = 0;
        for (long long i = 0; i < g.rows; i++) {
            const T* const slopes = (T*)a[1].p + (p * g.rows + i) * g.columns;
            for (long long j = 0; j < g.columns; j++) part[j] = slopes[j] / taps;
            for (long long u = 0; u < g.kernel_rows; u++) {
                const long long r = i * g.down + u - g.top;
                if (r < 0 || r >= g.height) continue;
                for (const Span* at = spans; at < spans + g.kernel_columns; at++) {
                    T* const to = x + r * g.width + at->column;
                    if (g.right == 1) spread_tap(to, part + at->begin, at->count, 1);
                    else if (g.right == 2) spread_tap(to, part + at->begin, at->count, 2);
                    else spread_tap(to, part + at->begin, at->count, g.right);
                }
            }
        }
    }
}

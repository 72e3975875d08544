// Convolution where every group has one input channel: plane by plane, columns side by side.
//
// A row of scratch has its columns sorted by their place within a step, so that the columns that a tap meets are
// neighbors. A tap is then an offset: a run of one.

#include "geometry.h"

static inline long long up(long long n) { return (n + LANES - 1) / LANES * LANES; }

// The rows of a plane that `rows` output rows from `start` on read, padded and sorted.
static void copy_plane(T* to, const Images* in, const Geometry* g, const T* plane, long long start, long long rows) {
    const long long each = (g->wide + g->right - 1) / g->right;  // columns at one place within a step
    for (long long r = 0; r < (rows - 1) * g->down + g->tall; r++, to += each * g->right) {
        const long long y = start * g->down + g->top + r;
        const T* const from = plane + y * in->row;
        memset(to, 0, each * g->right * sizeof(T));
        if (y < 0 || y >= g->height) continue;
        for (long long phase = 0; phase < g->right; phase++) {
            const long long x = g->left + phase, begin = x < 0 ? (g->right - 1 - x) / g->right : 0;
            const long long end = x >= g->width ? 0 : least((g->width - 1 - x) / g->right + 1, each);
            const T* const pixels = from + (x + begin * g->right) * in->column;
            const long long step = g->right * in->column;
            T* const line = to + phase * each + begin;
            if (step == 1) for (long long j = 0; j < end - begin; j++) line[j] = pixels[j];
            else if (step == 2) for (long long j = 0; j < end - begin; j++) line[j] = pixels[2 * j];
            else for (long long j = 0; j < end - begin; j++) line[j] = pixels[j * step];
        }
    }
}

// Four vectors of one row, with all taps.
static inline void four(T* sums, const T* pixels, const Run* taps, long long count, const T* weights) {
    Vector a = {}, b = {}, c = {}, d = {};
    for (long long t = 0; t < count; t++) {
        const Vector* const x = (const Vector*)(pixels + taps[t].offset);
        const T w = weights[t];
        a += w * x[0], b += w * x[1], c += w * x[2], d += w * x[3];
    }
    Vector* const to = (Vector*)sums;
    to[0] = a, to[1] = b, to[2] = c, to[3] = d;
}

static inline void one(T* sums, const T* pixels, const Run* taps, long long count, const T* weights) {
    Vector a = {};
    for (long long t = 0; t < count; t++) a += weights[t] * *(const Vector*)(pixels + taps[t].offset);
    *(Vector*)sums = a;
}

// Forward and transposed. The kernel is where it is: words after the images' tell its strides of outputs and groups, and
// the place of each tap's weight. Jobs are planes of the input.
void convolve_planes(const Word* a, long long first, long long last, char* scratch) {
    const Images out = images_of(a), in = images_of(a + 5);
    const Geometry g = geometry_of(a + 11);
    const long long line = (g.wide + g.right - 1) / g.right * g.right, each = up(g.columns);
    const long long* const places = a[32].p;
    T *const sums = (T*)scratch, *const weights = sums + each + 4 * LANES, *const pixels = weights + g.count;
    for (long long job = first; job < last; job++) {
        const long long n = job / g.groups, group = job % g.groups;
        for (long long start = 0; start < g.rows; start += g.band) {
            const long long rows = least(g.band, g.rows - start);
            copy_plane(pixels, &in, &g, in.image + n * in.number + group * in.channel, start, rows);
            for (long long o = 0; o < g.outputs; o++) {
                const T* const kernel = (T*)a[10].p + group * a[31].n + o * a[30].n;
                for (long long t = 0; t < g.count; t++) weights[t] = kernel[places[t]];
                for (long long i = 0; i < rows; i++) {
                    const T* const from = pixels + i * g.down * line;
                    long long j = 0;
                    for (; j + 2 * LANES < g.columns; j += 4 * LANES) four(sums + j, from + j, g.runs, g.count, weights);
                    for (; j < g.columns; j += LANES) one(sums + j, from + j, g.runs, g.count, weights);
                    const long long channel = group * g.outputs + o;
                    T* const to = out.image + n * out.number + channel * out.channel + (start + i) * out.row;
                    if (out.column == 1) memcpy(to, sums, g.columns * sizeof(T));
                    else
                        for (j = 0; j < g.columns; j++) to[j * out.column] = sums[j];
                }
            }
        }
    }
}

// -- the gradient of the kernel -----------------------------------------------------------------------------------------

#define TAPS(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8)
enum { SOME = 9 };

#define BEGIN(t) Vector s##t = {}; const long long o##t = offsets[t];
#define MEET(t) s##t += y * *(const Vector*)(pixels + j + o##t);
#define END(t) { T total = 0; for (int l = 0; l < LANES; l++) total += s##t[l]; sums[t] += total; }

// sums[t] += the products of slopes and what tap t meets, for a few taps over a band.
static __attribute__((noinline)) void add_taps(T* sums, const T* slopes, const T* pixels, const long long* offsets,
                                               long long rows, long long columns, long long line) {
    TAPS(BEGIN)
    for (long long i = 0; i < rows; i++, slopes += columns, pixels += line)
        for (long long j = 0; j < columns; j += LANES) {
            const Vector y = *(const Vector*)(slopes + j);
            TAPS(MEET)
        }
    TAPS(END)
}

// Slopes of the kernel, image by image; words are those of `convolve_planes`. Jobs are channels of the input.
void convolve_planes_slopes(const Word* a, long long first, long long last, char* scratch) {
    const Images out = images_of(a), in = images_of(a + 5);
    const Geometry g = geometry_of(a + 11);
    const long long line = (g.wide + g.right - 1) / g.right * g.right, each = up(g.columns), numbers = a[29].n;
    const long long* const places = a[32].p;
    T *const weights = (T*)scratch, *const slopes = weights + g.outputs * g.count, *const pixels = slopes + g.band * each;
    memset(pixels, 0, (((g.band - 1) * g.down + g.tall) * line + 4 * LANES) * sizeof(T));  // what lies behind is read too
    for (long long group = first; group < last; group++) {
        memset(weights, 0, g.outputs * g.count * sizeof(T));
        for (long long n = 0; n < numbers; n++)
            for (long long start = 0; start < g.rows; start += g.band) {
                const long long rows = least(g.band, g.rows - start);
                copy_plane(pixels, &in, &g, in.image + n * in.number + group * in.channel, start, rows);
                for (long long o = 0; o < g.outputs; o++) {
                    const T* const from = out.image + n * out.number + (group * g.outputs + o) * out.channel;
                    for (long long i = 0; i < rows; i++)
                        for (long long j = 0; j < each; j++)
                            slopes[i * each + j] =
                                j < g.columns ? from[(start + i) * out.row + j * out.column] : 0;
                    for (long long t = 0; t < g.count; t += SOME) {
                        long long offsets[SOME];
                        T sums[SOME] = {};
                        for (long long k = 0; k < SOME; k++) offsets[k] = g.runs[least(t + k, g.count - 1)].offset;
                        add_taps(sums, slopes, pixels, offsets, rows, each, g.down * line);
                        for (long long k = 0; k < least(SOME, g.count - t); k++) weights[o * g.count + t + k] += sums[k];
                    }
                }
            }
        for (long long k = 0; k < g.outputs * g.count; k++)
            ((T*)a[10].p)[group * a[31].n + k / g.count * a[30].n + places[k % g.count]] = weights[k];
    }
}

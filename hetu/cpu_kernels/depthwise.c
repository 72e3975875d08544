// Convolution of each channel by a kernel of its own, where the channels of a pixel lie side by side: a vector's worth of
// them goes together.
//
// As in `convolution.c`, an output pixel (i, j) reads input pixels (i down + dy, j right + dx) for a list of taps (dy,
// dx), and a transposed convolution is one of these for each phase of its output. A band of rows of these channels is
// copied into scratch, padded, as pixels that are far apart in memory share cache lines. Other layouts go by `planes.c`.

#include "geometry.h"

enum { ACROSS = 4, SIDE = 256 / sizeof(T) };  // pixels of a row that go together, and channels of a job

typedef struct {
    Images out, in;
    T* weights;
    long long channel;  // its stride in the weights
    const long long *places, *offsets;  // of a tap's weight, and of its pixel in a band
    long long count, height, width, rows, columns, channels, numbers, down, right;
    long long top, left, tall, wide;  // the least dy and dx, and the pixels that taps and columns span
    long long line, band, high;  // pixels of a row in scratch; rows of the output that go together, and of their pixels
} Depthwise;

static Depthwise depthwise_of(const Word* a) {
    return (Depthwise){images_of(a), images_of(a + 5), a[10].p, a[11].n, a[12].p, a[13].p, a[14].n, a[15].n, a[16].n,
                       a[17].n, a[18].n, a[19].n, a[20].n, a[21].n, a[22].n, a[23].n, a[24].n, a[25].n, a[26].n, a[27].n,
                       a[28].n, (a[28].n - 1) * a[21].n + a[25].n};
}

// What `depthwise` computes.
void depthwise_plainly(const Word* a, long long first, long long last, char* scratch) {
    const Depthwise d = depthwise_of(a);
    for (long long n = 0; n < d.numbers; n++)
        for (long long c = 0; c < d.channels; c++)
            for (long long i = 0; i < d.rows; i++)
                for (long long j = 0; j < d.columns; j++) {
                    T sum = 0;
                    for (long long t = 0; t < d.count; t++) {
                        const long long y = i * d.down + d.top + d.offsets[t] / d.line;
                        const long long x = j * d.right + d.left + d.offsets[t] % d.line;
                        if (y < 0 || y >= d.height || x < 0 || x >= d.width) continue;
                        sum += d.weights[c * d.channel + d.places[t]]
                            * d.in.image[n * d.in.number + c + y * d.in.row + x * d.in.column];
                    }
                    d.out.image[n * d.out.number + c + i * d.out.row + j * d.out.column] = sum;
                }
}

// -- bands of a vector's channels ---------------------------------------------------------------------------------------

// Where the vector of channel c begins: the last one ends with the last channel, even if it begins in another.
static inline long long start_of(const Depthwise* d, long long c) {
    return d->channels < LANES ? c : least(c, d->channels - LANES);
}

static inline Vector read(const Depthwise* d, const T* pixel, long long c) {
    if (d->channels >= LANES) return *(const Vector*)(pixel + start_of(d, c));
    Vector x = {};
    memcpy(&x, pixel, d->channels * sizeof(T));
    return x;
}

static inline void write(const Depthwise* d, T* pixel, long long c, Vector x) {
    if (d->channels >= LANES) *(Vector*)(pixel + start_of(d, c)) = x;
    else memcpy(pixel, &x, d->channels * sizeof(T));
}

// The pixels that output rows from `start` on read, of the channels from `begin` to `end`: [vector][row][column]. Columns
// beyond those that are read are zeros.
static void copy_pixels(Vector* to, const Depthwise* d, long long n, long long begin, long long end, long long start,
                        long long rows) {
    const T* const image = d->in.image + n * d->in.number;
    const Vector zero = {};
    for (long long r = 0; r < (rows - 1) * d->down + d->tall; r++, to += d->line) {
        const long long y = start * d->down + d->top + r;
        for (long long j = 0; j < d->line; j++) {
            const long long x = d->left + j;
            const bool inside = j < d->wide && y >= 0 && y < d->height && x >= 0 && x < d->width;
            const T* const pixel = image + y * d->in.row + x * d->in.column;
            for (long long c = begin; c < end; c += LANES)
                to[(c - begin) / LANES * d->high * d->line + j] = inside ? read(d, pixel, c) : zero;
        }
    }
}

// Weights of the channels from `begin` to `end` as [vector][tap], or back.
static void move_weights(Vector* weights, const Depthwise* d, long long begin, long long end, bool back) {
    for (long long c = begin; c < end; c += LANES)
        for (long long t = 0; t < d->count; t++, weights++)
            for (long long k = 0; k < least(LANES, d->channels); k++) {
                T* const weight = d->weights + (start_of(d, c) + k) * d->channel + d->places[t];
                if (back) *weight = ((T*)weights)[k];
                else ((T*)weights)[k] = *weight;
            }
}

// -- forward and transposed ---------------------------------------------------------------------------------------------

// A band of an image and the channels from `begin` to `end`; `right` again, which may be a constant.
static inline __attribute__((always_inline)) void one_band(const Depthwise* d, T* band, long long rows, long long begin,
                                                           long long end, const Vector* weights, const Vector* pixels,
                                                           long long right) {
    for (long long i = 0; i < rows; i++)
        for (long long j = 0; j < d->columns; j += ACROSS)
            for (long long c = begin; c < end; c += LANES) {
                const long long vector = (c - begin) / LANES;
                const Vector* const near = pixels + (vector * d->high + i * d->down) * d->line + j * right;
                const Vector* const w = weights + vector * d->count;
                Vector s[ACROSS] = {};
                for (long long t = 0; t < d->count; t++)
                    for (int k = 0; k < ACROSS; k++) s[k] += near[d->offsets[t] + k * right] * w[t];
                T* const to = band + i * d->out.row + j * d->out.column;
                for (int k = 0; k < least(ACROSS, d->columns - j); k++) write(d, to + k * d->out.column, c, s[k]);
            }
}

// Jobs are SIDE channels of an image.
void depthwise(const Word* a, long long first, long long last, char* scratch) {
    const Depthwise d = depthwise_of(a);
    Vector *const weights = (Vector*)scratch, *const pixels = weights + SIDE / LANES * d.count;
    const long long sides = (d.channels + SIDE - 1) / SIDE;
    for (long long job = first; job < last; job++) {
        const long long n = job / sides, begin = job % sides * SIDE, end = least(begin + SIDE, d.channels);
        move_weights(weights, &d, begin, end, false);
        for (long long start = 0; start < d.rows; start += d.band) {
            const long long rows = least(d.band, d.rows - start);
            T* const band = d.out.image + n * d.out.number + start * d.out.row;
            copy_pixels(pixels, &d, n, begin, end, start, rows);
            if (d.right == 1) one_band(&d, band, rows, begin, end, weights, pixels, 1);
            else one_band(&d, band, rows, begin, end, weights, pixels, d.right);
        }
    }
}

// -- the gradient of the weights ----------------------------------------------------------------------------------------

// Slopes of a band, as `copy_pixels` lays pixels.
static void copy_slopes(Vector* to, const Depthwise* d, long long n, long long begin, long long end, long long start,
                        long long rows, long long line) {
    const T* const from = d->out.image + n * d->out.number + start * d->out.row;
    const Vector zero = {};
    for (long long i = 0; i < rows; i++, to += line)
        for (long long j = 0; j < line; j++)
            for (long long c = begin; c < end; c += LANES)
                to[(c - begin) / LANES * d->band * line + j] =
                    j < d->columns ? read(d, from + i * d->out.row + j * d->out.column, c) : zero;
}

// Jobs are SIDE channels; `out` has the slopes, of which a band is copied too. Each band has sums of its own.
void depthwise_slopes(const Word* a, long long first, long long last, char* scratch) {
    const Depthwise d = depthwise_of(a);
    const long long line = (d.columns + ACROSS - 1) / ACROSS * ACROSS, vectors = SIDE / LANES;
    Vector *const total = (Vector*)scratch, *const slopes = total + vectors * d.count;
    Vector* const pixels = slopes + vectors * d.band * line;
    for (long long begin = first * SIDE; begin < least(last * SIDE, d.channels); begin += SIDE) {
        const long long end = least(begin + SIDE, d.channels);
        memset(total, 0, vectors * d.count * sizeof(Vector));
        for (long long n = 0; n < d.numbers; n++)
            for (long long start = 0; start < d.rows; start += d.band) {
                const long long rows = least(d.band, d.rows - start);
                copy_pixels(pixels, &d, n, begin, end, start, rows);
                copy_slopes(slopes, &d, n, begin, end, start, rows, line);
                for (long long v = 0; v * LANES < end - begin; v++)
                    for (long long t = 0; t < d.count; t++) {
                        const Vector* const x = pixels + v * d.high * d.line + d.offsets[t];
                        const Vector* const g = slopes + v * d.band * line;
                        Vector s[ACROSS] = {};
                        for (long long i = 0; i < rows; i++)
                            for (long long j = 0; j < line; j += ACROSS)
                                for (int k = 0; k < ACROSS; k++)
                                    s[k] += x[i * d.down * d.line + (j + k) * d.right] * g[i * line + j + k];
                        total[v * d.count + t] += (s[0] + s[1]) + (s[2] + s[3]);
                    }
            }
        move_weights(total, &d, begin, end, true);
    }
}

// Convolution with a kernel for each channel, of images whose channels lie side by side: vectors go along channels.
//
// An output pixel (i, j) reads input pixels (i down + dy, j right + dx) for a list of taps (dy, dx), as in `geometry.h`,
// so that transposed convolutions are some of these. Images are read in place: neighboring pixels of a row that meet
// the same taps inside the image are computed together, and those whose taps reach into the frame one by one.

#include "geometry.h"

enum { PIXELS = 8, TAPS = 9, BLOCK = 64 / sizeof(T) };  // of a tile; channels of a job

typedef struct {
    long long down, right, place;  // where a tap lies, and its weight in a kernel
} Tap;

typedef struct {
    Images out, in;
    T* kernel;
    long long apart;  // of the kernels of two channels
    long long channels, numbers, height, width, rows, columns, down, right;
    const Tap* taps;
    long long count;
} Depthwise;

static Depthwise depthwise_of(const Word* a) {
    return (Depthwise){images_of(a), images_of(a + 5), a[10].p, a[11].n, a[12].n, a[13].n, a[14].n,
                       a[15].n, a[16].n, a[17].n, a[18].n, a[19].n, a[20].p, a[21].n};
}

// What `convolve_channels` computes, number by number.
void convolve_channels_plainly(const Word* a, long long first, long long last, char* scratch) {
    const Depthwise d = depthwise_of(a);
    for (long long i = first; i < last; i++)
        for (long long j = 0; j < d.columns; j++)
            for (long long n = 0; n < d.numbers; n++)
                for (long long c = 0; c < d.channels; c++) {
                    T sum = 0;
                    for (const Tap* t = d.taps; t < d.taps + d.count; t++) {
                        const long long y = i * d.down + t->down, x = j * d.right + t->right;
                        if (y < 0 || y >= d.height || x < 0 || x >= d.width) continue;
                        sum += d.kernel[c * d.apart + t->place] *
                               d.in.image[n * d.in.number + c * d.in.channel + y * d.in.row + x * d.in.column];
                    }
                    d.out.image[n * d.out.number + c * d.out.channel + i * d.out.row + j * d.out.column] = sum;
                }
}

// -- pixels that meet the same taps ---------------------------------------------------------------------------------------

// A tap that lies inside the image: where, from the first image on, and its number.
typedef struct {
    long long offset, tap;
} Met;

typedef struct {
    long long begin, end;  // output columns
    long long count;  // of taps they meet
} Span;

// The span of row i that begins at column j; `met` tells what its first pixel meets.
static Span span_at(const Depthwise* d, long long i, long long j, Met* met) {
    long long left = 0, right = 0, count = 0;
    for (const Tap* t = d->taps; t < d->taps + d->count; t++) {
        const long long y = i * d->down + t->down, x = j * d->right + t->right;
        left = least(left, t->right), right = t->right > right ? t->right : right;
        if (y >= 0 && y < d->height && x >= 0 && x < d->width)
            met[count++] = (Met){y * d->in.row + x * d->in.column, t - d->taps};
    }
    const long long room = d->width - 1 - right, end = room < 0 ? 0 : least(room / d->right + 1, d->columns);
    return (Span){j, j * d->right + left >= 0 && j < end ? end : j + 1, count};
}

// -- forward and transposed -----------------------------------------------------------------------------------------------

// The first channel of each vector; the last vector may begin inside the one before.
#define EACH_VECTOR for (long long c = 0; c < channels; c += c + LANES < channels ? least(LANES, channels - LANES - c) : LANES)
#define EIGHT(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#define PLACE(r) const long long o##r = read[r];
#define ZERO(r) Vector s##r = {};
#define MEET(r) s##r += w * *(const Vector*)(pixel + o##r);
#define WRITE(r) *(Vector*)(to + written[r]) = s##r;

// Eight pixels, read and written at these places, in all channels; `weights` are (taps, channels).
static __attribute__((noinline)) void pixels(const T* from, const long long* read, const Met* met, long long count,
                                             const T* weights, long long channels, T* out, const long long* written) {
    EIGHT(PLACE)
    const Met* const last = met + count;
    EACH_VECTOR {
        EIGHT(ZERO)
        for (const Met* m = met; m < last; m++) {
            const T* pixel = from + m->offset + c;
            const Vector w = *(const Vector*)(weights + m->tap * channels + c);
            __asm__("" : "+r"(pixel));
            EIGHT(MEET)
        }
        T* const to = out + c;
        EIGHT(WRITE)
    }
}

// What neighbors read, the left one or the right one or both: then a number serves two taps.
typedef struct {
    long long offset, left, right;  // the taps, -1 for none
} Shared;

// All that neighbors read which meet these taps, those of a pixel in rising order; how many, or 0 if they share nothing.
static long long share(const Met* met, long long count, long long step, Shared* shared) {
    long long k = 0;
    for (const Met *m = met, *before = 0; m < met + count; before = m++) {
        const bool both = before && m->offset == before->offset + step;
        if (before && !both) shared[k++] = (Shared){before->offset + step, -1, before->tap};
        shared[k++] = (Shared){m->offset, m->tap, both ? before->tap : -1};
    }
    if (count) shared[k++] = (Shared){met[count - 1].offset + step, -1, met[count - 1].tap};
    return k < 2 * count ? k : 0;
}

#define FOUR(DO) DO(0) DO(1) DO(2) DO(3)
#define ZEROS(r) Vector s##r = {}, t##r = {};
#define READ(r) const Vector x##r = *(const Vector*)(pixel + o##r);
#define LEFT(r) s##r += w * x##r;
#define RIGHT(r) t##r += w * x##r;
#define WRITES(r) *(Vector*)(to + written[r]) = s##r, *(Vector*)(to + written[r] + next_column) = t##r;

// `pixels` for four pixels and their neighbors on the right.
static __attribute__((noinline)) void neighbors(const T* from, const long long* read, const Shared* shared,
                                                long long count, const T* weights, long long channels, T* out,
                                                const long long* written, long long next_column) {
    FOUR(PLACE)
    const Shared* const last = shared + count;
    EACH_VECTOR {
        FOUR(ZEROS)
        for (const Shared* m = shared; m < last; m++) {
            const T* pixel = from + m->offset + c;
            __asm__("" : "+r"(pixel));
            FOUR(READ)
            if (m->left >= 0) {
                const Vector w = *(const Vector*)(weights + m->left * channels + c);
                FOUR(LEFT)
            }
            if (m->right >= 0) {
                const Vector w = *(const Vector*)(weights + m->right * channels + c);
                FOUR(RIGHT)
            }
        }
        T* const to = out + c;
        FOUR(WRITES)
    }
}

// Where `count` pixels are read and written: from pixel k on, image by image, then every `apart`th column, the last one
// of `all` again where they end.
static void find_places(const Depthwise* d, long long k, long long all, long long apart, int count, long long* read,
                        long long* written) {
    for (int r = 0; r < count; r++) {
        const long long p = least(k + r, all - 1), j = p / d->numbers * apart, n = p % d->numbers;
        read[r] = n * d->in.number + j * d->right * d->in.column;
        written[r] = n * d->out.number + j * d->out.column;
    }
}

// Jobs are rows of all images. Words are the images, the kernel and the distance of its channels, sizes, steps, taps.
void convolve_channels(const Word* a, long long first, long long last, char* scratch) {
    const Depthwise d = depthwise_of(a);
    T* const weights = (T*)scratch;
    Met* const met = (Met*)(weights + (d.count * d.channels + BLOCK - 1) / BLOCK * BLOCK);
    Shared* const shared = (Shared*)(met + d.count);
    for (long long t = 0; t < d.count; t++)
        for (long long c = 0; c < d.channels; c++)
            weights[t * d.channels + c] = d.kernel[c * d.apart + d.taps[t].place];
    long long read[PIXELS], written[PIXELS];
    for (long long i = first; i < last; i++)
        for (Span span = {0, 0, 0}; span.end < d.columns;) {
            span = span_at(&d, i, span.end, met);
            const long long width = span.end - span.begin, some = share(met, span.count, d.right * d.in.column, shared);
            const long long even = some ? width / 2 * 2 : 0, rest = (width - even) * d.numbers;
            T* out = d.out.image + i * d.out.row + span.begin * d.out.column;
            for (long long k = 0, all = even / 2 * d.numbers; k < all; k += PIXELS / 2) {
                find_places(&d, k, all, 2, PIXELS / 2, read, written);
                neighbors(d.in.image, read, shared, some, weights, d.channels, out, written, d.out.column);
            }
            const T* const from = d.in.image + even * d.right * d.in.column;
            out += even * d.out.column;
            for (long long k = 0; k < rest; k += PIXELS) {
                find_places(&d, k, rest, 1, PIXELS, read, written);
                pixels(from, read, met, span.count, weights, d.channels, out, written);
            }
        }
}

// -- the gradient of the kernel -------------------------------------------------------------------------------------------

#define NINE(DO) EIGHT(DO) DO(8)
#define FIND_TAP(r) const long long o##r = met[least(r, count - 1)].offset;
#define MEET_TAP(r) s##r += w * *(const Vector*)(pixel + o##r);
#define SUM(r) if (r < count) *(Vector*)(total + met[r].tap * BLOCK) += s##r;

// Adds to `total` (taps, BLOCK) the sums over a span of what up to TAPS taps meet times the slopes.
static __attribute__((noinline)) void span_sums(const Depthwise* d, const Met* met, long long count, const T* from,
                                                const T* slopes, long long columns, T* total) {
    NINE(FIND_TAP)
    NINE(ZERO)
    const long long step = d->in.number, next = d->out.number, numbers = d->numbers;
    for (long long j = 0; j < columns; j++, from += d->right * d->in.column, slopes += d->out.column) {
        const T *pixel = from, *slope = slopes;
        for (long long n = 0; n < numbers; n++, pixel += step, slope += next) {
            const Vector w = *(const Vector*)slope;
            __asm__("" : "+r"(pixel));
            NINE(MEET_TAP)
        }
    }
    NINE(SUM)
}

// Words are those of `convolve_channels`, with slopes in the place of the output. Jobs are blocks of channels; the last
// one may begin inside the one before, whose numbers it leaves alone.
void convolve_channels_slopes(const Word* a, long long first, long long last, char* scratch) {
    const Depthwise d = depthwise_of(a);
    T* const total = (T*)scratch;
    Met* const met = (Met*)(total + d.count * BLOCK);
    for (long long job = first; job < last; job++) {
        const long long start = least(job * BLOCK, d.channels - BLOCK);
        memset(total, 0, d.count * BLOCK * sizeof(T));
        for (long long i = 0; i < d.rows; i++)
            for (Span span = {0, 0, 0}; span.end < d.columns;) {
                span = span_at(&d, i, span.end, met);
                const T* const slopes = d.out.image + start + i * d.out.row + span.begin * d.out.column;
                for (long long t = 0; t < span.count; t += TAPS)
                    for (long long c = 0; c < BLOCK; c += LANES)
                        span_sums(&d, met + t, least(TAPS, span.count - t), d.in.image + start + c, slopes + c,
                                  span.end - span.begin, total + c);
            }
        for (long long t = 0; t < d.count; t++)
            for (long long c = job * BLOCK - start; c < BLOCK; c++)
                d.kernel[(start + c) * d.apart + d.taps[t].place] = total[t * BLOCK + c];
    }
}

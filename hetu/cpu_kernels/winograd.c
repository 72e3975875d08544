// Convolution by 3 x 3 taps at stride 1 with less than half of the multiplications: Winograd's F(2 x 2, 3 x 3).
//
// A tile of 2 x 2 outputs reads 4 x 4 pixels d, and is A' [(G g G') (B' d B)] A with a product in each of 16 places; the
// sums over channels make them products of matrices, tiles x channels x outputs. The gradient of the kernel is what is
// adjoint to it. A. Lavin and S. Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016, section 4.1.
// The channels of a pixel lie side by side; images have any other strides.

#include "geometry.h"

enum { PLACES = 16, STRIP = 32 };  // outputs of a job: a whole number of panels

typedef struct {
    Images out, in;
    T* panels;  // of WIDE outputs: [place][channel][output]
    long long channels, height, width, rows, columns, outputs, numbers;
    long long top, left;  // the input pixel of an output pixel's first tap
    long long block, down, across;  // tiles of a job, of a column and of a row
    long long pitch, apart;  // numbers from tile to tile, and from place to place
} Winograd;

static Winograd winograd_of(const Word* a) {
    Winograd w = {images_of(a), images_of(a + 5), a[10].p, a[11].n, a[12].n, a[13].n, a[14].n, a[15].n, a[16].n, a[17].n,
                  a[18].n, a[19].n, a[20].n};
    w.down = (w.rows + 1) / 2, w.across = (w.columns + 1) / 2;
    w.pitch = (w.channels + 2 * LANES - 1) / LANES * LANES;  // never a large power of two, whose tiles share cache lines
    w.apart = w.block * w.pitch + LANES;
    return w;
}

// What `winograd` computes, from weights (outputs, channels, 9).
void winograd_plainly(const Word* a, long long first, long long last, char* scratch) {
    const Winograd w = winograd_of(a);
    for (long long n = 0; n < w.numbers; n++)
        for (long long o = 0; o < w.outputs; o++)
            for (long long i = 0; i < w.rows; i++)
                for (long long j = 0; j < w.columns; j++) {
                    T sum = 0;
                    for (long long c = 0; c < w.channels; c++)
                        for (int t = 0; t < 9; t++) {
                            const long long y = i + w.top + t / 3, x = j + w.left + t % 3;
                            if (y < 0 || y >= w.height || x < 0 || x >= w.width) continue;
                            sum += w.panels[(o * w.channels + c) * 9 + t]
                                * w.in.image[n * w.in.number + c + y * w.in.row + x * w.in.column];
                        }
                    w.out.image[n * w.out.number + o + i * w.out.row + j * w.out.column] = sum;
                }
}

// -- the three transforms and their adjoints ----------------------------------------------------------------------------

// Applies STEP to four numbers: first those of each row of 4 x 4, then those of each column.
#define BOTH_WAYS(STEP) \
    for (int i = 0; i < 4; i++) { STEP(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]) } \
    for (int j = 0; j < 4; j++) { STEP(d[j], d[4 + j], d[8 + j], d[12 + j]) }

#define PIXELS(a, b, c, e) const Vector f = c - b; a -= c, e = b - e, b += c, c = f;  // B'
#define SUMS(a, b, c, e) const Vector f = b - c; a += b + c, b = f - e;  // A', into the first two
#define SLOPES(a, b, c, e) e = -b, c = a - b, b += a;  // A, from the first two
#define WEIGHTS(a, b, c, e) const Vector f = (a + c) * (T)0.5, h = b * (T)0.5; e = c, b = f + h, c = f - h;  // G
#define TAPS(a, b, c, e) const Vector f = (b + c) * (T)0.5; b = (b - c) * (T)0.5, a += f, c = f + e;  // G'

// Where a tile's outputs begin. Images that lie pixel by pixel are neighbors, for else each pixel is in a page of its own.
static inline void find(const Winograd* w, long long tile, long long* n, long long* i, long long* j) {
    const long long of_image = w->down * w->across;
    const bool mixed = w->in.number < w->in.column;
    *n = mixed ? tile % w->numbers : tile / of_image;
    const long long place = mixed ? tile / w->numbers : tile % of_image;
    *i = place / w->across * 2, *j = place % w->across * 2;
}

// The addresses of a tile's 16 pixels, or null outside of the image.
static void find_pixels(const T** pixels, const Winograd* w, long long tile) {
    long long n, i, j;
    find(w, tile, &n, &i, &j);
    for (int k = 0; k < PLACES; k++) {
        const long long y = i + w->top + k / 4, x = j + w->left + k % 4;
        const bool inside = y >= 0 && y < w->height && x >= 0 && x < w->width;
        pixels[k] = inside ? w->in.image + n * w->in.number + y * w->in.row + x * w->in.column : 0;
    }
}

// The same for the 4 outputs of each of `count` tiles.
static void find_outputs(T** outputs, const Winograd* w, long long start, long long count) {
    for (long long p = 0; p < count; p++) {
        long long n, i, j;
        find(w, start + p, &n, &i, &j);
        T* const first = w->out.image + n * w->out.number + i * w->out.row + j * w->out.column;
        for (int k = 0; k < 4; k++, outputs++)
            *outputs = i + k / 2 < w->rows && j + k % 2 < w->columns ? first + k / 2 * w->out.row + k % 2 * w->out.column : 0;
    }
}

// The pixels of `count` tiles, transformed: [place][tile][channel].
static void transform_pixels(T* to, const Winograd* w, long long start, long long count) {
    static const T zeros[LANES];
    const T* pixels[PLACES];
    for (long long p = 0; p < count; p++, to += w->pitch) {
        find_pixels(pixels, w, start + p);
        for (long long c = 0; c < w->channels; c += LANES) {
            const long long some = least(LANES, w->channels - c);
            T rest[LANES] = {};
            Vector d[PLACES];
            for (int k = 0; k < PLACES; k++) {
                const T* from = pixels[k] ? pixels[k] + c : zeros;
                if (some < LANES) from = memcpy(rest, from, some * sizeof(T));
                d[k] = *(const Vector*)from;
            }
            BOTH_WAYS(PIXELS)
            for (int k = 0; k < PLACES; k++) *(Vector*)(to + k * w->apart + c) = d[k];
        }
    }
}

// -- forward ------------------------------------------------------------------------------------------------------------

// The kernel as panels. Words: panels, the kernel with its strides of outputs and channels, their numbers, and the
// places of 9 taps. Jobs are strips of outputs.
void transform_kernel(const Word* a, long long first, long long last, char* scratch) {
    const long long output = a[2].n, channel = a[3].n, outputs = a[4].n, channels = a[5].n, *const places = a[6].p;
    for (long long o = first * STRIP; o < least(last * STRIP, outputs); o += WIDE) {
        const long long count = least(WIDE, outputs - o);
        T* const to = (T*)a[0].p + o * PLACES * channels;
        const T* const from = (T*)a[1].p + o * output;
        T taken[9 * WIDE] __attribute__((aligned(64))) = {};
        for (long long c = 0; c < channels; c++) {
            for (long long k = 0; k < count; k++)
                for (int t = 0; t < 9; t++) taken[t * WIDE + k] = from[k * output + c * channel + places[t]];
            for (int half = 0; half < WIDE; half += LANES) {
                Vector d[PLACES] = {};
                for (int t = 0; t < 9; t++) d[t / 3 * 4 + t % 3] = *(Vector*)(taken + t * WIDE + half);
                BOTH_WAYS(WEIGHTS)
                for (int k = 0; k < PLACES; k++) *(Vector*)(to + (k * channels + c) * WIDE + half) = d[k];
            }
        }
    }
}

// Sums of `count` tiles, transformed into a panel's outputs: [place][tile][output].
static void store_outputs(T* const* outputs, const T* sums, const Winograd* w, long long count, long long o) {
    const long long most = least(WIDE, w->outputs - o), apart = (w->block + ROWS) * WIDE;
    for (long long p = 0; p < count; p++, outputs += 4)
        for (long long half = 0; half < most; half += LANES) {
            const long long some = least(LANES, most - half);
            Vector d[PLACES];
            for (int k = 0; k < PLACES; k++) d[k] = *(const Vector*)(sums + k * apart + p * WIDE + half);
            BOTH_WAYS(SUMS)
            for (int k = 0; k < 4; k++) {
                T* const to = outputs[k] ? outputs[k] + o + half : 0;
                if (to && some == LANES) *(Vector*)to = d[k / 2 * 4 + k % 2];
                else if (to) memcpy(to, &d[k / 2 * 4 + k % 2], some * sizeof(T));
            }
        }
}

// Jobs are strips of outputs of a block of tiles.
void winograd(const Word* a, long long first, long long last, char* scratch) {
    const Winograd w = winograd_of(a);
    const long long tiles = w.numbers * w.down * w.across, strips = (w.outputs + STRIP - 1) / STRIP;
    const Run run = {0, w.channels};
    T** const outputs = (T**)scratch;
    T *const pixels = (T*)(outputs + 4 * w.block), *const sums = pixels + PLACES * w.apart;
    for (long long begin = first, end; begin < last; begin = end) {  // strips of one block
        const long long block = begin / strips, start = block * w.block, count = least(w.block, tiles - start);
        end = least(last, (block + 1) * strips);
        find_outputs(outputs, &w, start, count);
        transform_pixels(pixels, &w, start, count);
        for (long long o = (begin - block * strips) * STRIP; o < least((end - block * strips) * STRIP, w.outputs); o += WIDE) {
            const T* const panel = w.panels + o * PLACES * w.channels;
            for (long long k = 0; k < PLACES; k++)
                for (long long p = 0; p < count; p += ROWS) {
                    long long offsets[ROWS];
                    for (long long r = 0; r < ROWS; r++) offsets[r] = k * w.apart + least(p + r, count - 1) * w.pitch;
                    tile(least(ROWS, count - p), WIDE, &run, 1, 1, pixels, offsets, panel + k * w.channels * WIDE,
                         sums + (k * (w.block + ROWS) + p) * WIDE);
                }
            store_outputs(outputs, sums, &w, count, o);
        }
    }
}

// -- the gradient of the kernel -----------------------------------------------------------------------------------------

// Slopes of `count` tiles for a panel of outputs, transformed: [place][tile][output].
static void transform_slopes(T* to, T* const* outputs, const Winograd* w, long long count, long long o) {
    const long long most = least(WIDE, w->outputs - o);
    for (long long p = 0; p < count; p++, outputs += 4, to += WIDE)
        for (long long half = 0; half < WIDE; half += LANES) {
            const long long some = least(LANES, most - half);
            Vector d[PLACES] = {};
            for (int k = 0; k < 4 && some > 0; k++) {
                const T* const from = outputs[k] ? outputs[k] + o + half : 0;
                if (from && some == LANES) d[k / 2 * 4 + k % 2] = *(const Vector*)from;
                else if (from) memcpy(&d[k / 2 * 4 + k % 2], from, some * sizeof(T));
            }
            BOTH_WAYS(SLOPES)
            for (int k = 0; k < PLACES; k++) *(Vector*)(to + k * w->block * WIDE + half) = d[k];
        }
}

// Adds what a block of tiles gives to a panel, or writes what the first one does.
static void add_block(T* total, const Winograd* w, const T* pixels, const T* slopes, long long count, bool begin) {
    const Run run = {0, count};
    T sums[ROWS * WIDE] __attribute__((aligned(64)));
    for (long long k = 0; k < PLACES; k++)
        for (long long c = 0; c < w->channels; c += ROWS) {
            const long long some = least(ROWS, w->channels - c);
            tile(some, WIDE, &run, 1, w->pitch, pixels + k * w->apart + c, 0, slopes + k * w->block * WIDE, sums);
            for (long long i = 0; i < some * WIDE; i++, total++) *total = (begin ? 0 : *total) + sums[i];
        }
}

// The gradient of the kernel as panels, summed block by block in parts that `gather_kernel` joins. Jobs are strips of
// outputs of a part; `out` has the slopes, and the last word is the number of parts.
void winograd_slopes(const Word* a, long long first, long long last, char* scratch) {
    const Winograd w = winograd_of(a);
    const long long tiles = w.numbers * w.down * w.across, strips = (w.outputs + STRIP - 1) / STRIP, parts = a[21].n;
    const long long blocks = (tiles + w.block - 1) / w.block;
    T** const outputs = (T**)scratch;
    T *const pixels = (T*)(outputs + 4 * w.block), *const slopes = pixels + PLACES * w.apart;
    for (long long begin = first, end; begin < last; begin = end) {  // strips of one part
        const long long part = begin / strips, begun = blocks * part / parts, done = blocks * (part + 1) / parts;
        end = least(last, (part + 1) * strips);
        for (long long block = begun; block < done; block++) {
            const long long start = block * w.block, count = least(w.block, tiles - start);
            find_outputs(outputs, &w, start, count);
            transform_pixels(pixels, &w, start, count);
            const long long stop = least((end - part * strips) * STRIP, w.outputs);
            for (long long o = (begin - part * strips) * STRIP; o < stop; o += WIDE) {
                T* const total = w.panels + (part * strips * STRIP + o) * PLACES * w.channels;
                transform_slopes(slopes, outputs, &w, count, o);
                add_block(total, &w, pixels, slopes, count, block == begun);
            }
        }
    }
}

// The adjoint of `transform_kernel`, of sums in parts.
void gather_kernel(const Word* a, long long first, long long last, char* scratch) {
    const long long output = a[2].n, channel = a[3].n, outputs = a[4].n, channels = a[5].n, *const places = a[6].p;
    const long long parts = a[9].n, size = (outputs + STRIP - 1) / STRIP * STRIP * PLACES * channels;
    for (long long o = first * STRIP; o < least(last * STRIP, outputs); o += WIDE) {
        const long long count = least(WIDE, outputs - o);
        T* const from = (T*)a[0].p + o * PLACES * channels;
        join_parts(from, PLACES * channels * WIDE, parts, size);
        T* const to = (T*)a[1].p + o * output;
        T made[9 * WIDE] __attribute__((aligned(64)));
        for (long long c = 0; c < channels; c++) {
            for (int half = 0; half < WIDE; half += LANES) {
                Vector d[PLACES];
                for (int k = 0; k < PLACES; k++) d[k] = *(const Vector*)(from + (k * channels + c) * WIDE + half);
                BOTH_WAYS(TAPS)
                for (int t = 0; t < 9; t++) *(Vector*)(made + t * WIDE + half) = d[t / 3 * 4 + t % 3];
            }
            for (long long k = 0; k < count; k++)
                for (int t = 0; t < 9; t++) to[k * output + c * channel + places[t]] = made[t * WIDE + k];
        }
    }
}

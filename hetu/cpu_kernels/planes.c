// Convolution of groups with few outputs, which would leave most of a panel empty: vectors go along pixels of planes.
//
// A band is (channels, planes, rows, columns), a plane for each pixel of the step, so that what a tap meets lies side
// by side, whatever the step. The pixels of a band are then one long row, where some at each row's end mean nothing.

#include "geometry.h"

// `count` neighbors, by moves of one size, of which the last may meet the one before: a call would cost more.
static inline void copy_row(T* to, const T* from, long long count) {
#define BY(some) \
    if (count >= some) { \
        for (long long k = 0; k + some < count; k += some) memcpy(to + k, from + k, some * sizeof(T)); \
        memcpy(to + count - some, from + count - some, some * sizeof(T)); \
        return; \
    }
    BY(LANES) BY(LANES / 2) BY(LANES / 4) BY(1)
}

// Numbers of `step` apart become neighbors.
static inline void copy_columns(T* to, const T* from, long long count, long long step) {
    if (step == 1) copy_row(to, from, count);
    else if (step == 2) EACH for (long long k = 0; k < count; k++) to[k] = from[2 * k];
    else for (long long k = 0; k < count; k++) to[k] = from[k * step];
}

enum { FLAT = 8 * LANES };  // the most pixels of a tile

typedef struct {
    Geometry g;
    long long output, group, channel;  // strides of the kernel
    const long long* places;  // of taps in the kernel
    long long pitch, size, all;  // of a row, a plane and a channel of a band
} Planes;

static Planes planes_of(const Word* a) {
    const Geometry g = geometry_of(a + 11);
    const long long pitch = (g.wide + g.right - 1) / g.right, high = g.band - 1 + (g.tall + g.down - 1) / g.down;
    // An odd number of vectors: channels then do not meet at one place of a cache.
    const long long all = (up(g.down * g.right * high * pitch, LANES) / LANES | 1) * LANES;
    return (Planes){g, a[30].n, a[31].n, a[32].n, a[33].p, pitch, high * pitch, all};
}

// The rows that `rows` output rows from `start` on read, in all channels of a group, padded. Rows of the image are read
// in their order, as memory wants it.
static void copy_planes(T* to, const Planes* p, const Images* in, long long n, long long group, long long start,
                        long long rows) {
    const Geometry* const g = &p->g;
    const long long right = g->right, down = g->down, step = right * in->column, size = p->size;
    const long long high = (rows - 1) * down + g->tall;
    long long begin[right], count[right];  // the columns of each plane that are in the image
    for (long long v = 0; v < right; v++) {
        const long long x = g->left + v;
        begin[v] = x < 0 ? (right - 1 - x) / right : 0;
        count[v] = (x >= g->width ? 0 : least((g->width - 1 - x) / right + 1, p->pitch)) - begin[v];
    }
    memset(to, 0, (g->channels * p->all + FLAT) * sizeof(T));
    for (long long c = 0, some; c < g->channels; c += some, to += some * p->all) {
        some = in->channel == 1 ? least(LANES, g->channels - c) : 1;  // channels that lie and are read together
        for (long long r = 0, i = 0, u = 0; r < high; r++) {
            const long long y = start * down + g->top + r;
            const T* const from = in->image + n * in->number + (group * g->channels + c) * in->channel + y * in->row;
            T* const line = to + u * right * size + i * p->pitch;
            for (long long v = 0; v < right && y >= 0 && y < g->height; v++)
                if (count[v] > 0) {
                    const T* const pixels = from + (g->left + v + begin[v] * right) * in->column;
                    T* const first = line + v * size + begin[v];
                    if (some == 1) copy_columns(first, pixels, count[v], step);
                    else
                        for (long long k = 0; k < count[v]; k++)
                            for (long long e = 0; e < some; e++) first[e * p->all + k] = pixels[k * step + e];
                }
            if (++u == down) u = 0, i++;
        }
    }
}

// Tiles of 1 to 4 outputs and some vectors of pixels, whose sums are names as in `tile.h`. The pointer passes through an
// empty `asm` after each vector, so that this is read once and not by each product.
#define OF_1(DO, v) DO(0, v)
#define OF_2(DO, v) DO(0, v) DO(1, v)
#define OF_3(DO, v) OF_2(DO, v) DO(2, v)
#define OF_4(DO, v) OF_3(DO, v) DO(3, v)
#define VECTORS_3(DO, OF) DO(OF, 0) DO(OF, 1) DO(OF, 2)
#define VECTORS_4(DO, OF) VECTORS_3(DO, OF) DO(OF, 3)
#define VECTORS_5(DO, OF) VECTORS_4(DO, OF) DO(OF, 4)
#define VECTORS_6(DO, OF) VECTORS_5(DO, OF) DO(OF, 5)
#define VECTORS_8(DO, OF) VECTORS_6(DO, OF) DO(OF, 6) DO(OF, 7)
#define VECTORS_9(DO, OF) VECTORS_8(DO, OF) DO(OF, 8)
#define ZERO(r, v) Vector s##r##_##v = {};
#define ZEROS(OF, v) OF(ZERO, v)
#define READ(r, _) const T w##r = kernel[r * weight];
#define MEET(r, v) s##r##_##v += w##r * x;
#define MEETS(OF, v) { const Vector x = *(const Vector*)(pixel + v * LANES); __asm__("" : "+r"(pixel)); OF(MEET, v) }
#define WRITE(r, v) *(Vector*)(out + r * pitch + v * LANES) = s##r##_##v;
#define WRITES(OF, v) OF(WRITE, v)
#define PLANES(name, OF, VECTORS) \
    static __attribute__((noinline)) void name( \
        const Planes* p, const T* from, const T* weights, T* out, long long pitch) { \
        const Run* const taps = p->g.runs; \
        const long long *const places = p->places, count = p->g.count, weight = p->output; \
        VECTORS(ZEROS, OF) \
        for (long long c = 0; c < p->g.channels; c++, from += p->all, weights += p->channel) \
            for (long long t = 0; t < count; t++) { \
                const T *pixel = from + taps[t].offset, *const kernel = weights + places[t]; \
                OF(READ, _) \
                VECTORS(MEETS, OF) \
            } \
        VECTORS(WRITES, OF) \
    }
PLANES(planes_1, OF_1, VECTORS_8)
PLANES(planes_1_short, OF_1, VECTORS_4)
PLANES(planes_3_short, OF_3, VECTORS_4)
#if defined(__AVX512F__)  // with as many more registers
enum { MOST = 4 };  // outputs of a tile
PLANES(planes_2, OF_2, VECTORS_8)
PLANES(planes_2_short, OF_2, VECTORS_4)
PLANES(planes_3, OF_3, VECTORS_8)
PLANES(planes_4, OF_4, VECTORS_6)
PLANES(planes_4_short, OF_4, VECTORS_3)
#else
enum { MOST = 3 };
PLANES(planes_2, OF_2, VECTORS_6)
PLANES(planes_2_short, OF_2, VECTORS_3)
#endif

typedef void PlaneTile(const Planes* p, const T* from, const T* weights, T* out, long long pitch);
static const struct {
    PlaneTile *tile, *short_tile;
    long long pixels, short_pixels;
} tiles[MOST] = {  // of 1, 2, ... outputs
    {planes_1, planes_1_short, 8 * LANES, 4 * LANES},
#if defined(__AVX512F__)
    {planes_2, planes_2_short, 8 * LANES, 4 * LANES},
    {planes_3, planes_3_short, 8 * LANES, 4 * LANES},
    {planes_4, planes_4_short, 6 * LANES, 3 * LANES},
#else
    {planes_2, planes_2_short, 6 * LANES, 3 * LANES},
    {planes_3_short, planes_3_short, 4 * LANES, 4 * LANES},
#endif
};

// How many of the outputs that are left the next tile takes, so that tiles are few and alike.
static inline long long outputs_of_tile(long long left) {
    const long long tiles = (left + MOST - 1) / MOST;
    return (left + tiles - 1) / tiles;
}

// Some outputs from output `o` on, over all pixels of a band; how many.
static long long some_outputs(const Planes* p, const T* band, const T* weights, long long o, long long pixels, T* sums,
                              long long pitch) {
    const long long some = outputs_of_tile(p->g.outputs - o);
    for (long long k = 0, done; k < pixels; k += done) {
        const bool few = pixels - k <= tiles[some - 1].short_pixels;
        done = few ? tiles[some - 1].short_pixels : tiles[some - 1].pixels;
        (few ? tiles[some - 1].short_tile : tiles[some - 1].tile)(
            p, band + k, weights + o * p->output, sums + k, pitch);
    }
    return some;
}

// Sums of all outputs to `rows` rows of an image, in the order of its memory.
static void store_planes(const Planes* p, const Images* out, T* to, const T* sums, long long rows, long long pitch) {
    const long long outputs = p->g.outputs, columns = p->g.columns, column = out->column;
    if (out->channel == 1 && outputs > 1)
        for (long long i = 0; i < rows; i++, to += out->row, sums += p->pitch)
            for (long long j = 0; j < columns; j++)
                for (long long o = 0; o < outputs; o++) to[j * column + o] = sums[o * pitch + j];
    else
        for (long long o = 0; o < outputs; o++)
            for (long long i = 0; i < rows; i++) {
                const T* const from = sums + o * pitch + i * p->pitch;
                T* const row = to + o * out->channel + i * out->row;
                if (column == 1) copy_row(row, from, columns);
                else EACH for (long long j = 0; j < columns; j++) row[j * column] = from[j];
            }
}

// Forward and transposed. The kernel is where it is: words after the images' tell its strides of outputs, groups and
// channels, and the place of each tap's weight. Jobs are bands of groups of images.
void convolve_planes(const Word* a, long long first, long long last, char* scratch) {
    const Images out = images_of(a), in = images_of(a + 5);
    const Planes p = planes_of(a);
    const long long bands = (p.g.rows + p.g.band - 1) / p.g.band, outputs = p.g.outputs;
    const long long pitch = up(p.g.band * p.pitch, LANES) + FLAT;
    T *const sums = (T*)scratch, *const band = sums + outputs * pitch;
    for (long long job = first; job < last; job++) {
        const long long n = job / bands / p.g.groups, group = job / bands % p.g.groups, start = job % bands * p.g.band;
        const long long rows = least(p.g.band, p.g.rows - start), at = group * outputs * out.channel + start * out.row;
        copy_planes(band, &p, &in, n, group, start, rows);
        for (long long o = 0; o < outputs;)
            o += some_outputs(&p, band, (T*)a[10].p + group * p.group, o, rows * p.pitch, sums + o * pitch, pitch);
        store_planes(&p, &out, out.image + n * out.number + at, sums, rows, pitch);
    }
}

// -- the gradient of the kernel -----------------------------------------------------------------------------------------

enum { SPREAD = 64 / sizeof(T) };  // lanes of a sum, of which narrow vectors make some at a time

// Sums over pixels of what taps meet times the slopes of outputs.
#define LANE(r, v) *(Vector*)(out + (r * pitch + v) * SPREAD) += s##r##_##v;
#define SUMS(OF, v) OF(LANE, v)
#define FIND_TAP(OF, v) const long long at##v = taps[v].offset;
#define SLOPE(r, _) const Vector w##r = *(const Vector*)(slopes + r * apart);
#define MEET_TAP(OF, v) { const Vector x = *(const Vector*)(from + at##v); __asm__("" : "+r"(from)); OF(MEET, v) }
#define PLANE_SUMS(name, OF, VECTORS) \
    static __attribute__((noinline)) void name( \
        const T* from, const T* slopes, long long apart, long long pixels, const Run* taps, T* out, long long pitch) { \
        VECTORS(FIND_TAP, OF) \
        for (int lane = 0; lane < SPREAD; lane += LANES, from += LANES - pixels, slopes += LANES - pixels, out += LANES) { \
            VECTORS(ZEROS, OF) \
            for (const T* const end = slopes + pixels; slopes < end; slopes += SPREAD, from += SPREAD) { \
                OF(SLOPE, _) \
                VECTORS(MEET_TAP, OF) \
            } \
            VECTORS(SUMS, OF) \
        } \
    }
PLANE_SUMS(plane_sums_1, OF_1, VECTORS_9)
PLANE_SUMS(plane_sums_2, OF_2, VECTORS_6)
#if defined(__AVX512F__)
PLANE_SUMS(plane_sums_3, OF_3, VECTORS_5)
PLANE_SUMS(plane_sums_4, OF_4, VECTORS_5)
#else
PLANE_SUMS(plane_sums_3, OF_3, VECTORS_3)
#endif

typedef void SumsTile(
    const T* from, const T* slopes, long long apart, long long pixels, const Run* taps, T* out, long long pitch);
static const struct {
    SumsTile* tile;
    long long taps;
} sums[MOST] = {  // of 1, 2, ... outputs
    {plane_sums_1, 9},
    {plane_sums_2, 6},
#if defined(__AVX512F__)
    {plane_sums_3, 5},
    {plane_sums_4, 5},
#else
    {plane_sums_3, 3},
#endif
};

// Slopes of a band as its planes' rows are, with zeros at their ends.
static void copy_slopes(T* to, const Planes* p, const Images* out, const T* from, long long rows, long long pitch) {
    memset(to, 0, p->g.outputs * pitch * sizeof(T));
    for (long long o = 0; o < p->g.outputs; o++)
        for (long long i = 0; i < rows; i++)
            copy_columns(
                to + o * pitch + i * p->pitch, from + o * out->channel + i * out->row, p->g.columns, out->column);
}

// Lanes of sums (parts, groups, outputs, channels, taps, SPREAD) over the images of each part, with room for a tile's
// taps after the last, which are there so far. Jobs are parts of groups.
void convolve_planes_slopes(const Word* a, long long first, long long last, char* scratch) {
    const Images out = images_of(a), in = images_of(a + 5);
    const Planes p = planes_of(a);
    const long long parts = a[28].n, numbers = a[29].n, outputs = p.g.outputs, room = a[35].n;
    const long long size = outputs * p.g.channels * room * SPREAD, pitch = up(p.g.band * p.pitch, SPREAD);
    T *const slopes = (T*)scratch, *const band = slopes + outputs * pitch;
    for (long long job = first; job < last; job++) {
        const long long part = job / p.g.groups, group = job % p.g.groups, at = group * outputs * out.channel;
        T* const total = (T*)a[10].p + job * size;
        memset(total, 0, size * sizeof(T));
        for (long long n = numbers * part / parts; n < numbers * (part + 1) / parts; n++)
            for (long long start = 0; start < p.g.rows; start += p.g.band) {
                const long long rows = least(p.g.band, p.g.rows - start), pixels = up(rows * p.pitch, SPREAD);
                copy_planes(band, &p, &in, n, group, start, rows);
                copy_slopes(slopes, &p, &out, out.image + n * out.number + at + start * out.row, rows, pitch);
                for (long long c = 0; c < p.g.channels; c++)
                    for (long long o = 0, some; o < outputs; o += some) {
                        some = outputs_of_tile(outputs - o);
                        for (long long t = 0; t < p.g.count; t += sums[some - 1].taps)
                            sums[some - 1].tile(
                                band + c * p.all, slopes + o * pitch, pitch, pixels, p.g.runs + t,
                                total + ((o * p.g.channels + c) * room + t) * SPREAD, p.g.channels * room);
                    }
            }
    }
}

// Adds lanes and parts of `convolve_planes_slopes` up, into a kernel; `from` is where the sums are. Jobs are groups.
void add_parts(const Word* a, long long first, long long last, char* scratch) {
    const Planes p = planes_of(a);
    const long long parts = a[28].n, room = a[35].n, channels = p.g.channels;
    const long long size = p.g.outputs * channels * room * SPREAD;
    for (long long group = first; group < last; group++)
        for (long long k = 0; k < p.g.outputs * channels * p.g.count; k++) {
            const long long o = k / p.g.count / channels, c = k / p.g.count % channels, t = k % p.g.count;
            const T* const from = (T*)a[10].p + group * size + ((o * channels + c) * room + t) * SPREAD;
            T sums[SPREAD] = {}, sum = 0;
            for (long long part = 0; part < parts; part++)
                for (int lane = 0; lane < SPREAD; lane++) sums[lane] += from[part * p.g.groups * size + lane];
            for (int lane = 0; lane < SPREAD; lane++) sum += sums[lane];
            ((T*)a[34].p)[group * p.group + o * p.output + c * p.channel + p.places[t]] = sum;
        }
}

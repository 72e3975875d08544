// Convolution of images by the register tile: forward, transposed, and the gradient of the kernel.
//
// One geometry serves all: an output pixel (i, j) reads input pixels (i down + dy, j right + dx) for a list of taps
// (dy, dx). A transposed convolution of stride s is s x s of these, one for each phase of its output, with the taps that
// meet it. A band of rows is copied into scratch, padded, with the channels of a pixel side by side; neighboring taps
// are then one run of memory. Images have any strides.

#include "geometry.h"

enum { STRIP = 32 };  // output channels of a job: a whole number of panels

// What `convolve` computes, number by number, from weights (outputs, depth) in the order of the taps.
void convolve_plainly(const Word* a, long long first, long long last, char* scratch) {
    const Images out = images_of(a), in = images_of(a + 5);
    const Geometry g = geometry_of(a + 11);
    const T* const weights = a[10].p;
    for (long long n = 0; n < last; n++)
        for (long long o = 0; o < g.outputs * g.groups; o++)
            for (long long i = 0; i < g.rows; i++)
                for (long long j = 0; j < g.columns; j++) {
                    T sum = 0;
                    const T* w = weights + o * g.depth;
                    for (const Run* run = g.runs; run < g.runs + g.count; run++)
                        for (long long k = 0; k < run->length; k++, w++) {
                            const long long place = run->offset + k, c = place % g.channels;
                            const long long y = i * g.down + g.top + place / g.channels / g.wide;
                            const long long x = j * g.right + g.left + place / g.channels % g.wide;
                            if (y < 0 || y >= g.height || x < 0 || x >= g.width) continue;
                            const long long channel = o / g.outputs * g.channels + c;
                            sum += *w * in.image[n * in.number + channel * in.channel + y * in.row + x * in.column];
                        }
                    out.image[n * out.number + o * out.channel + i * out.row + j * out.column] = sum;
                }
}

// -- bands of an image --------------------------------------------------------------------------------------------------

// Few numbers, without the call that `memcpy` is where their count is not known to the compiler.
static inline void copy_numbers(T* to, const T* from, long long count) {
    for (; count >= LANES; count -= LANES, to += LANES, from += LANES) *(Vector*)to = *(const Vector*)from;
    for (int some = LANES / 2; some; some /= 2)
        if (count & some) memcpy(to, from, some * sizeof(T)), to += some, from += some;
}

// `count` pixels of a row, channel beside channel, to places that lie a pitch apart.
static void copy_pixels(T* to, long long pitch, const T* from, long long count, long long channels, long long column,
                        long long channel) {
    if (channel == 1 && column == channels && pitch == channels) memcpy(to, from, count * channels * sizeof(T));
    else if (channel == 1)
        for (long long j = 0; j < count; j++) copy_numbers(to + j * pitch, from + j * column, channels);
    else
        for (long long c = 0; c < channels; c++)
            for (long long j = 0; j < count; j++) to[j * pitch + c] = from[c * channel + j * column];
}

// The rows of an input that `rows` output rows from `start` on read, padded.
static void copy_band(T* to, const Images* in, const Geometry* g, long long n, long long group, long long start,
                      long long rows) {
    const T* const image = in->image + n * in->number + group * g->channels * in->channel;
    const long long before = least(g->left < 0 ? -g->left : 0, g->wide);
    const long long inside = least(g->wide, g->width - g->left) - before, size = g->wide * g->channels;
    for (long long r = 0; r < (rows - 1) * g->down + g->tall; r++, to += size) {
        const long long y = start * g->down + g->top + r;
        if (y < 0 || y >= g->height || inside <= 0) {
            memset(to, 0, size * sizeof(T));
            continue;
        }
        const T* const from = image + y * in->row + (g->left + before) * in->column;
        memset(to, 0, before * g->channels * sizeof(T));
        copy_pixels(to + before * g->channels, g->channels, from, inside, g->channels, in->column, in->channel);
        memset(to + (before + inside) * g->channels, 0, (g->wide - before - inside) * g->channels * sizeof(T));
    }
}

// The place of each pixel of some images' bands; the last one again, up to a whole tile.
static void find_places(long long* places, const Geometry* g, long long images, long long rows, long long image,
                        long long row, long long column) {
    long long* to = places;
    for (long long n = 0; n < images; n++)
        for (long long i = 0; i < rows; i++)
            for (long long j = 0; j < g->columns; j++) *to++ = n * image + i * row + j * column;
    const long long last = to[-1];
    for (int r = 0; r < ROWS; r++) to[r] = last;
}

// -- forward and transposed ---------------------------------------------------------------------------------------------

// Kernels as panels: words are the panels, the kernel with its strides of outputs and channels, outputs of a group,
// groups, the channels, and for each tap the place of its weight. Jobs are strips of outputs.
void pack_kernel(const Word* a, long long first, long long last, char* scratch) {
    const long long output = a[2].n, channel = a[3].n, outputs = a[4].n, channels = a[5].n, taps = a[7].n;
    const long long *const places = a[6].p, strips = (outputs + STRIP - 1) / STRIP, depth = taps * channels;
    for (long long job = first; job < last; job++) {
        const long long group = job / strips, start = job % strips * STRIP, end = least(start + STRIP, outputs);
        for (long long o = start, width; o < end; o += width) {
            width = panel(outputs - o);
            T* to = (T*)a[0].p + (group * strips * STRIP + o) * depth;
            const T* const from = (T*)a[1].p + (group * a[8].n) + o * output;
            const long long count = least(width, outputs - o);
            for (long long c = 0; c < channels; c++, to += width)  // the taps of a channel are neighbors
                for (long long t = 0; t < taps; t++) {
                    const T* const taken = from + c * channel + places[t];
                    T* const row = to + t * channels * width;
                    for (long long k = 0; k < count; k++) row[k] = taken[k * output];
                    for (long long k = count; k < width; k++) row[k] = 0;
                }
        }
    }
}

// Numbers of a tile to channels of their pixels, whose `places` are known; neighbors in memory together.
static void store(const T* sums, const Images* out, const Geometry* g, T* band, const long long* places, long long rows,
                  long long o) {
    const long long count = least(panel(g->outputs - o), g->outputs - o);
    if (out->channel == 1)
        for (long long r = 0; r < rows; r++) copy_numbers(band + places[r] + o, sums + r * WIDE, count);
    else
        for (long long k = 0; k < count; k++)
            for (long long r = 0; r < rows; r++) band[places[r] + (o + k) * out->channel] = sums[r * WIDE + k];
}

// Jobs are bands of groups of an image, or of `many` small images, which then are whole.
void convolve(const Word* a, long long first, long long last, char* scratch) {
    const Images out = images_of(a), in = images_of(a + 5);
    const Geometry g = geometry_of(a + 11);
    const long long bands = (g.rows + g.band - 1) / g.band, strips = (g.outputs + STRIP - 1) / STRIP;
    const long long many = a[28].n, numbers = a[29].n, most = many * g.band * g.columns + ROWS;
    T sums[ROWS * WIDE] __attribute__((aligned(64)));
    long long *const read = (long long*)scratch, *const written = read + most;
    T* const copied = (T*)(written + most);
    // A single tap inside an image whose channels lie together needs no copy.
    const bool direct = in.channel == 1 && g.depth == g.channels && g.top >= 0 && g.left >= 0 &&
                        (g.rows - 1) * g.down + g.top < g.height && g.left + g.wide <= g.width;
    for (long long job = first; job < last; job++) {
        const long long group = job / bands % g.groups, start = job % bands * g.band, n = job / bands / g.groups * many;
        const long long rows = least(g.band, g.rows - start), images = least(many, numbers - n);
        const long long size = images * rows * g.columns, line = g.wide * g.channels;
        const long long tall = (rows - 1) * g.down + g.tall;
        const T* pixels = copied;
        if (direct) {
            pixels = in.image + n * in.number + group * g.channels + (start * g.down + g.top) * in.row + g.left * in.column;
            find_places(read, &g, images, rows, in.number, g.down * in.row, g.right * in.column);
        } else {
            for (long long k = 0; k < images; k++) copy_band(copied + k * tall * line, &in, &g, n + k, group, start, rows);
            find_places(read, &g, images, rows, tall * line, g.down * line, g.right * g.channels);
        }
        find_places(written, &g, images, rows, out.number, out.row, out.column);
        T* const band = out.image + n * out.number + group * g.outputs * out.channel + start * out.row;
        const T* const panels = (T*)a[10].p + group * strips * STRIP * g.depth;
        for (long long o = 0, width; o < g.outputs; o += width) {
            width = panel(g.outputs - o);
            for (long long q = 0; q < size; q += ROWS) {
                const long long some = least(ROWS, size - q);
                tile(some, width, g.runs, g.count, 1, pixels, read + q, panels + o * g.depth, sums);
                store(sums, &out, &g, band, written + q, some, o);
            }
        }
    }
}

// -- the gradient of the kernel -----------------------------------------------------------------------------------------

// Slopes of a band as a panel, pixel by pixel; where the next band's go.
static T* copy_slopes(T* to, const Images* in, const Geometry* g, const T* band, long long rows, long long o) {
    const long long width = panel(g->outputs - o), count = least(width, g->outputs - o), size = g->columns * width;
    if (count < width) memset(to, 0, rows * size * sizeof(T));
    for (long long i = 0; i < rows; i++, to += size)
        copy_pixels(to, width, band + i * in->row + o * in->channel, g->columns, count, in->column, in->channel);
    return to;
}

// Adds the sums of one panel and band, or writes the first ones: rows of the tile are numbers of the taps, at `offsets`,
// and depth is the band's pixels.
static void add_slopes(T* total, const Geometry* g, const T* pixels, const long long* offsets, const T* slopes,
                       const Run* rows, long long count, long long width, bool begin) {
    T sums[ROWS * WIDE] __attribute__((aligned(64)));
    for (long long e = 0; e < g->depth; e += ROWS) {
        const long long some = least(ROWS, g->depth - e), *const of_tile = offsets + e;
        const bool near = of_tile[ROWS - 1] == *of_tile + ROWS - 1;
        tile(some, width, rows, count, g->right * g->channels, near ? pixels + *of_tile : pixels, near ? 0 : of_tile, slopes,
             sums);
        for (long long r = 0; r < some; r++, total += width)
            for (long long k = 0; k < width; k++) total[k] = (begin ? 0 : total[k]) + sums[r * WIDE + k];
    }
}

// Slopes of the kernel as panels, summed band by band, `many` small images at a time. Bands are divided into parts, whose
// sums stay apart until `unpack_kernel` joins them, so that kernels of few outputs make several jobs too. Jobs are strips
// of outputs of a part of a group; words are those of `convolve` with slopes in the place of the output and panels in
// that of the weights, and the number of parts.
void convolve_slopes(const Word* a, long long first, long long last, char* scratch) {
    const Images out = images_of(a), in = images_of(a + 5);
    const Geometry g = geometry_of(a + 11);
    const long long strips = (g.outputs + STRIP - 1) / STRIP, many = a[28].n, numbers = a[29].n;
    const long long line = g.wide * g.channels, parts = a[30].n;
    const long long bands = (g.rows + g.band - 1) / g.band, blocks = (numbers + many - 1) / many * bands;
    T* const slopes = (T*)scratch;  // first, as whole vectors are read from it
    Run* const lines = (Run*)(slopes + many * g.band * g.columns * WIDE);
    long long *const offsets = (long long*)(lines + many * g.band), *offset = offsets;
    T* const pixels = (T*)(offsets + g.depth + ROWS);
    for (const Run* run = g.runs; run < g.runs + g.count; run++)
        for (long long k = 0; k < run->length; k++) *offset++ = run->offset + k;
    for (int r = 0; r < ROWS; r++, offset++) *offset = offset[-1] + 1;  // rows of the last tile that nobody wants
    for (long long begin = first, end; begin < last; begin = end) {  // strips of one part
        const long long kernel = begin / strips, group = kernel / parts, part = kernel % parts;
        const long long begun = blocks * part / parts, done = blocks * (part + 1) / parts;
        end = least(last, (kernel + 1) * strips);
        for (long long block = begun; block < done; block++) {
            const long long n = block / bands * many, start = block % bands * g.band;
            const long long rows = least(g.band, g.rows - start), images = least(many, numbers - n);
            const long long size = ((rows - 1) * g.down + g.tall) * line;
            const T* const band = out.image + n * out.number + group * g.outputs * out.channel + start * out.row;
            for (long long k = 0; k < images; k++) copy_band(pixels + k * size, &in, &g, n + k, group, start, rows);
            for (long long k = 0; k < images * rows; k++)
                lines[k] = (Run){k / rows * size + k % rows * g.down * line, g.columns};
            const long long stop = least((end - kernel * strips) * STRIP, g.outputs);
            for (long long o = (begin - kernel * strips) * STRIP; o < stop; o += panel(g.outputs - o)) {
                T* const total = (T*)a[10].p + (kernel * strips * STRIP + o) * g.depth;
                T* to = slopes;
                for (long long k = 0; k < images; k++) to = copy_slopes(to, &out, &g, band + k * out.number, rows, o);
                add_slopes(total, &g, pixels, offsets, slopes, lines, images * rows, panel(g.outputs - o), block == begun);
            }
        }
    }
}

// The inverse of `pack_kernel`, of sums in parts.
void unpack_kernel(const Word* a, long long first, long long last, char* scratch) {
    const long long output = a[2].n, channel = a[3].n, outputs = a[4].n, channels = a[5].n, taps = a[7].n;
    const long long *const places = a[6].p, strips = (outputs + STRIP - 1) / STRIP, depth = taps * channels;
    const long long parts = a[9].n, size = strips * STRIP * depth;
    for (long long job = first; job < last; job++) {
        const long long group = job / strips, start = job % strips * STRIP, end = least(start + STRIP, outputs);
        for (long long o = start, width; o < end; o += width) {
            width = panel(outputs - o);
            T* from = (T*)a[0].p + group * parts * size + o * depth;
            join_parts(from, depth * width, parts, size);
            T* const to = (T*)a[1].p + (group * a[8].n) + o * output;
            const long long count = least(width, outputs - o);
            for (long long c = 0; c < channels; c++, from += width)
                for (long long k = 0; k < count; k++)
                    for (long long t = 0; t < taps; t++)
                        to[k * output + c * channel + places[t]] = from[t * channels * width + k];
        }
    }
}

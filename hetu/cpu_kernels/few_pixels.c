// Convolution of few pixels by large kernels, where to pack the kernel would take as long as the products: it is read in
// place, its outputs as rows, and the panels hold pixels. What is meant is `convolve_plainly` of `convolution.c`.
//
// Words are those of `convolve` with panels of pixels in the place of those of weights, then the kernel, the stride of its
// outputs, and the rows and columns that its taps lie away, in the order in which they lie in memory.

#include "geometry.h"
#include "turn.h"

enum { OUTPUTS = 12 };  // of a job: whole tiles

// A pixel of a batch, counted row by row.
typedef struct {
    long long number, row, column;
} Pixel;

static inline Pixel pixel_of(const Geometry* g, long long k) {
    return (Pixel){k / g->columns / g->rows, k / g->columns % g->rows, k % g->columns};
}

// What `count` pixels read by a tap that lies `down` and `right`; zeros outside.
static void find_read(const T** from, const Images* in, const Geometry* g, long long first, long long count, long long end,
                      const long long* away, const T* zeros) {
    for (long long p = 0; p < count; p++) {
        const Pixel at = pixel_of(g, least(first + p, end - 1));
        const long long y = at.row * g->down + away[0], x = at.column * g->right + away[1];
        const bool inside = y >= 0 && y < g->height && x >= 0 && x < g->width;
        from[p] = inside ? in->image + at.number * in->number + y * in->row + x * in->column : zeros;
    }
}

// Four channels of four pixels.
static inline void square_at(T* to, const T* const from[4], long long c, long long step) {
    square(
        (const unsigned*[]){(void*)(from[0] + c), (void*)(from[1] + c), (void*)(from[2] + c), (void*)(from[3] + c)},
        (unsigned*[]){(void*)to, (void*)(to + step), (void*)(to + 2 * step), (void*)(to + 3 * step)});
}

// Pixels as panels: [number of the kernel, in the order of its memory][pixel]. Jobs are taps.
void gather_pixels(const Word* a, long long first, long long last, char* scratch) {
    const Images in = images_of(a + 5);
    const Geometry g = geometry_of(a + 11);
    const long long size = a[29].n * g.rows * g.columns, taps = g.depth / g.channels, *const away = a[33].p;
    const long long whole = sizeof(T) == sizeof(unsigned) && in.channel == 1 ? in_squares(g.channels, 1) : 0;
    T* const zeros = memset(scratch, 0, g.channels * sizeof(T));
    for (long long tap = first; tap < last; tap++)
        for (long long start = 0; start < size; start += WIDE) {
            const long long width = panel(size - start), step = taps * width;
            T* const to = (T*)a[10].p + start * g.depth + tap * width;
            const T* from[WIDE];
            find_read(from, &in, &g, start, width, size, away + 2 * tap, zeros);
            for (long long p = 0; p < width; p += 4)
                for (long long c = 0; c < whole; c += 4) square_at(to + c * step + p, from + p, c, step);
            for (long long c = whole; c < g.channels; c++)
                for (long long p = 0; p < width; p++) to[c * step + p] = from[p] == zeros ? 0 : from[p][c * in.channel];
        }
}

// The products of all pixels with some outputs, OUTPUTS to a job.
void convolve_few(const Word* a, long long first, long long last, char* scratch) {
    const Images out = images_of(a);
    const Geometry g = geometry_of(a + 11);
    const T *const panels = a[10].p, *const kernel = a[31].p;
    const long long size = a[29].n * g.rows * g.columns, pitch = a[32].n;
    const Run run = {0, g.depth};
    T sums[ROWS * WIDE] __attribute__((aligned(64)));
    for (long long o = first * OUTPUTS; o < least(last * OUTPUTS, g.outputs); o += ROWS) {
        const long long some = least(ROWS, g.outputs - o);
        long long offsets[ROWS];
        for (long long r = 0; r < ROWS; r++) offsets[r] = (o + least(r, some - 1)) * pitch;
        for (long long start = 0; start < size; start += WIDE) {
            tile(some, panel(size - start), &run, 1, 1, kernel, offsets, panels + start * g.depth, sums);
            for (long long p = 0; p < least(WIDE, size - start); p++) {
                const Pixel at = pixel_of(&g, start + p);
                T* const to = out.image + at.number * out.number + at.row * out.row + at.column * out.column;
                for (long long r = 0; r < some; r++) to[(o + r) * out.channel] = sums[r * WIDE + p];
            }
        }
    }
}

// How output pixels of a convolution read input pixels, for images of any strides: output (i, j) reads input pixels
// (i down + dy, j right + dx) for a list of taps (dy, dx), from a band of rows that is copied into scratch and padded.

#include "tile.h"

#include <string.h>

typedef struct {
    T* image;
    long long number, channel, row, column;  // strides
} Images;

typedef struct {
    long long channels, height, width;  // of the input, in a group
    long long rows, columns, outputs, groups;
    long long down, right, top, left;  // steps of a pixel, and the first tap
    long long band, wide, tall;  // output rows of a band; the columns of scratch, and the rows that all taps of a row span
    const Run* runs;
    long long count, depth;  // runs of taps, and their numbers in all
} Geometry;

static inline Images images_of(const Word* a) { return (Images){a[0].p, a[1].n, a[2].n, a[3].n, a[4].n}; }

static inline Geometry geometry_of(const Word* a) {
    return (Geometry){a[0].n, a[1].n, a[2].n, a[3].n, a[4].n, a[5].n, a[6].n, a[7].n, a[8].n, a[9].n,
                      a[10].n, a[11].n, a[12].n, a[13].n, a[14].p, a[15].n, a[16].n};
}

static inline long long least(long long a, long long b) { return a < b ? a : b; }

typedef T Narrow __attribute__((vector_size(BYTES / (LANES >= 8 ? 2 : 1)), aligned(sizeof(T)), may_alias));
enum { NARROW = sizeof(Narrow) / sizeof(T) };

#define APART(r) const long long o##r = offsets[r] - *offsets;  // from the first, whose place takes no register
#define START(r) Vector s##r = {}, t##r = {};
#define START_HALF(r) Vector s##r = {};
#define START_NARROW(r) Narrow s##r = {};
#define STORE_NARROW(r) *(Narrow*)(out + r * pitch) = s##r;
#define OF_TWO Vector, WIDE, START, BOTH, ADD, STORE
#define OF_ONE Vector, LANES, START_HALF, , ADD_HALF, STORE_HALF
#define OF_HALF Narrow, NARROW, START_NARROW, , ADD_HALF, STORE_NARROW
// Panels of two vectors, of one and of half of one, for rows that lie anywhere or side by side.
TILES(apart_two, APART, 1, OF_TWO)
TILES(apart_one, APART, 1, OF_ONE)
TILES(apart_half, APART, 1, OF_HALF)
TILES(far_two, APART, step, OF_TWO)
TILES(far_one, APART, step, OF_ONE)
TILES(far_half, APART, step, OF_HALF)
TILES(near_two, NEAR, step, OF_TWO)
TILES(near_one, NEAR, step, OF_ONE)
TILES(near_half, NEAR, step, OF_HALF)
#define TILE_OF(name) \
    (width == WIDE ? TILE_FOR(rows, name##_two) : width == LANES ? TILE_FOR(rows, name##_one) : TILE_FOR(rows, name##_half))

// The sums of up to ROWS rows at `offsets`, or side by side if these are null, and a panel of `width`.
static inline void tile(long long rows, long long width, const Run* runs, long long count, long long step, const T* from,
                        const long long* offsets, const T* b, T* sums) {
    if (!offsets) TILE_OF(near)(runs, count, step, from, 0, b, 0, 0, sums, WIDE);
    else if (step == 1) TILE_OF(apart)(runs, count, 1, from + *offsets, offsets, b, 0, 0, sums, WIDE);
    else TILE_OF(far)(runs, count, step, from + *offsets, offsets, b, 0, 0, sums, WIDE);
}

// A panel's sums in `parts` that lie so far `apart`, added to the first in order.
static inline void join_parts(T* sums, long long count, long long parts, long long apart) {
    for (const T* part = sums + apart; part < sums + parts * apart; part += apart)
        for (long long i = 0; i < count; i++) sums[i] += part[i];
}

// The width of the panel that begins where `left` columns are left.
static inline long long panel(long long left) { return left > LANES ? WIDE : left > NARROW ? LANES : NARROW; }

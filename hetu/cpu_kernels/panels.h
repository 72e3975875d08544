// Products of matrices by the register tile: the right side is packed into panels of WIDE columns, the numbers of a depth
// side by side.

#include "tile.h"

enum { MOST = ROWS, STRIP = 32 };  // rows of the largest tile; columns of a job

// Rows at a pitch, which stands in the place of offsets, or side by side, where a matrix lies turned.
TILES(at_pitch, AT_PITCH, 1, Vector, WIDE, START_FROM, BOTH, ADD, STORE)
TILES(turned, NEAR, step, Vector, WIDE, START_FROM, BOTH, ADD, STORE)

// out = from + a b for up to MOST rows and one panel, where `a` lies with its columns as rows if it is `turned`.
static inline void tile(
    bool turned, long long rows, long long depth, const T* a, long long pitch_a, const T* b, const T* from,
    long long pitch_from, T* out, long long pitch) {
    const Run run = {0, depth};
    if (turned) TILE_FOR(rows, turned)(&run, 1, pitch_a, a, 0, b, from, pitch_from, out, pitch);
    else TILE_FOR(rows, at_pitch)(&run, 1, 1, a, &pitch_a, b, from, pitch_from, out, pitch);
}

static const T zeros[WIDE];  // the rows of a product that begins with nothing

static inline long long less(long long n, long long m) { return n < m ? n : m; }

static inline void copy(T* to, const T* from, long long count, long long stride) {
    if (stride == 1) for (long long j = 0; j < count; j++) to[j] = from[j];
    else for (long long j = 0; j < count; j++) to[j] = from[j * stride];
}

// A panel of b is `count` columns of it and zeros after them.
static inline void copy_panel(T* to, const T* from, long long count, long long stride) {
    count = count < 0 ? 0 : less(count, WIDE);
    copy(to, from, count, stride);
    for (long long j = count; j < WIDE; j++) to[j] = 0;
}

// The register tile of convolutions and products: a few rows times a panel of columns, whose sums stay in registers while
// a product's depth goes by.
//
// Depth comes in runs of memory: neighboring taps of a convolution, a row of pixels or of a matrix. A row of the tile is
// an offset from a pointer that moves, so rows may lie anywhere. Each number is summed in order of depth, wherever its
// tile begins: its bits do not depend on the tile.

#include "vectors.h"

#pragma STDC FP_CONTRACT ON

#if defined(__AVX512F__)
#define FEW_ROWS(DO) DO(0) DO(1) DO(2) DO(3)
#define MORE_ROWS(DO) FEW_ROWS(DO) DO(4) DO(5) DO(6) DO(7)
#define ALL_ROWS(DO) MORE_ROWS(DO) DO(8) DO(9) DO(10) DO(11)
#else
#define FEW_ROWS(DO) DO(0) DO(1)
#define MORE_ROWS(DO) FEW_ROWS(DO) DO(2) DO(3)
#define ALL_ROWS(DO) MORE_ROWS(DO) DO(4) DO(5)
#endif

enum { WIDE = 2 * LANES, ROWS = BYTES == 64 ? 12 : 6, SOME = ROWS / 3 };

typedef struct {
    long long offset, length;
} Run;

#define ADD(r) { const T v = a[o##r]; s##r += v * x, t##r += v * y; }
#define STORE(r) *(Vector*)(out + r * pitch) = s##r, *(Vector*)(out + r * pitch + LANES) = t##r;
#define ADD_HALF(r) s##r += a[o##r] * x;
#define STORE_HALF(r) *(Vector*)(out + r * pitch) = s##r;

// out[r] = start + sum over k of from[place of row r + place of k] b[k], for `count` runs whose places are STEP apart: the
// argument `step`, or a number, which takes no register. PLACE names the place of a row, from `offsets`, and START its sums,
// which may start as `begin`. Accumulators are names, not an array, and the pointer passes through an empty `asm`: so
// compilers keep all of them in registers and do not make a pointer of each row.
#define TILE(name, FOR_ROWS, PLACE, STEP, VECTOR, WIDTH, START, SECOND, DO, END) \
    static __attribute__((noinline)) void name( \
        const Run* run, long long count, long long step, const T* from, const long long* offsets, const T* b, \
        const T* begin, long long pitch_begin, T* out, long long pitch) { \
        FOR_ROWS(PLACE) \
        FOR_ROWS(START) \
        for (const Run* const last = run + count; run < last; run++) { \
            const T* a = from + run->offset; \
            for (const T* const end = b + run->length * WIDTH; b < end; b += WIDTH, a += STEP) { \
                const VECTOR x = *(const VECTOR*)b; \
                SECOND \
                __asm__("" : "+r"(a)); \
                FOR_ROWS(DO) \
            } \
        } \
        FOR_ROWS(END) \
    }
#define AT_PITCH(r) const long long o##r = r * *offsets;
#define NEAR(r) enum { o##r = r };  // side by side
#define START_FROM(r) Vector s##r = *(const Vector*)(begin + r * pitch_begin), t##r = *(const Vector*)(begin + r * pitch_begin + LANES);
#define START_HALF_FROM(r) Vector s##r = *(const Vector*)(begin + r * pitch_begin);
#define BOTH const Vector y = *(const Vector*)(b + LANES);

// The tiles of one kind, and that for `rows` rows. All rows up to a multiple of SOME are there and computed.
#define TILES(name, ...) \
    TILE(few_##name, FEW_ROWS, __VA_ARGS__) \
    TILE(more_##name, MORE_ROWS, __VA_ARGS__) \
    TILE(all_##name, ALL_ROWS, __VA_ARGS__)
#define TILE_FOR(rows, name) (rows > 2 * SOME ? all_##name : rows > SOME ? more_##name : few_##name)

static inline long long up(long long n, long long unit) { return (n + unit - 1) / unit * unit; }

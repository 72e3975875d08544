// The register tile: a few rows times a panel of columns, whose sums stay in registers while a product's depth goes by.
//
// Depth comes in runs of memory: neighboring taps of a convolution, a row of pixels. A row of the tile is an offset from
// a pointer that moves, so rows may lie anywhere. Each number is summed in order of depth, wherever its tile begins.

#pragma STDC FP_CONTRACT ON

#if defined(__AVX512F__)
enum { BYTES = 64 };
#define FEW_ROWS(DO) DO(0) DO(1) DO(2) DO(3)
#define MORE_ROWS(DO) FEW_ROWS(DO) DO(4) DO(5) DO(6) DO(7)
#define ALL_ROWS(DO) MORE_ROWS(DO) DO(8) DO(9) DO(10) DO(11)
#else
enum { BYTES = 32 };
#define FEW_ROWS(DO) DO(0) DO(1)
#define MORE_ROWS(DO) FEW_ROWS(DO) DO(2) DO(3)
#define ALL_ROWS(DO) MORE_ROWS(DO) DO(4) DO(5)
#endif

typedef T Vector __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
enum { LANES = BYTES / sizeof(T), WIDE = 2 * LANES, ROWS = BYTES == 64 ? 12 : 6 };

typedef struct {
    long long offset, length;
} Run;

#define START(r) const long long o##r = offsets[r]; Vector s##r = {}, t##r = {};
#define ADD(r) { const T v = a[o##r]; s##r += v * x, t##r += v * y; }
#define STORE(r) ((Vector*)(out + r * WIDE))[0] = s##r, ((Vector*)(out + r * WIDE))[1] = t##r;
#define START_HALF(r) const long long o##r = offsets[r]; Vector s##r = {};
#define ADD_HALF(r) s##r += a[o##r] * x;
#define STORE_HALF(r) ((Vector*)(out + r * WIDE))[0] = s##r;

// out[r][0 ... WIDE - 1] = sum over k of from[offsets[r] + place of k] b[k], for `count` runs whose places are `step`
// apart. Accumulators are names, not an array, and the pointer passes through an empty `asm`: so compilers keep all of
// them in registers and do not make a pointer of each row.
#define TILE(name, FOR_ROWS, WIDTH, BEGIN, SECOND, DO, END) \
    static __attribute__((noinline)) void name(const Run* run, long long count, long long step, const T* from, \
                                               const long long* offsets, const T* b, T* out) { \
        FOR_ROWS(BEGIN) \
        for (const Run* const last = run + count; run < last; run++) { \
            const T* a = from + run->offset; \
            for (const T* const end = b + run->length * WIDTH; b < end; b += WIDTH, a += step) { \
                const Vector x = *(const Vector*)b; \
                SECOND \
                __asm__("" : "+r"(a)); \
                FOR_ROWS(DO) \
            } \
        } \
        FOR_ROWS(END) \
    }
#define BOTH const Vector y = *(const Vector*)(b + LANES);
TILE(few, FEW_ROWS, WIDE, START, BOTH, ADD, STORE)
TILE(more, MORE_ROWS, WIDE, START, BOTH, ADD, STORE)
TILE(all, ALL_ROWS, WIDE, START, BOTH, ADD, STORE)
TILE(few_half, FEW_ROWS, LANES, START_HALF, , ADD_HALF, STORE_HALF)
TILE(more_half, MORE_ROWS, LANES, START_HALF, , ADD_HALF, STORE_HALF)
TILE(all_half, ALL_ROWS, LANES, START_HALF, , ADD_HALF, STORE_HALF)

// The tile for `rows` rows, of which there are offsets up to a multiple of a third of ROWS, and a panel of `width`.
static inline void tile(long long rows, long long width, const Run* runs, long long count, long long step, const T* from,
                        const long long* offsets, const T* b, T* out) {
    const int third = ROWS / 3;
    if (width == WIDE) (rows > 2 * third ? all : rows > third ? more : few)(runs, count, step, from, offsets, b, out);
    else (rows > 2 * third ? all_half : rows > third ? more_half : few_half)(runs, count, step, from, offsets, b, out);
}

// The width of the panel that begins where `left` columns are left.
static inline long long panel(long long left) { return left > LANES ? WIDE : LANES; }

// The register tile of products of matrices, whose right side is packed into panels of WIDE columns, the numbers of a
// depth side by side. The sums of a few rows and a panel stay in registers, each summed in order of depth: a number's
// bits do not depend on its tile.

#pragma STDC FP_CONTRACT ON

#if defined(__AVX512F__)
enum { BYTES = 64, SOME = 4 };
#define SOME_ROWS(DO) DO(0) DO(1) DO(2) DO(3)
#define MORE_ROWS(DO) SOME_ROWS(DO) DO(4) DO(5) DO(6) DO(7)
#define MOST_ROWS(DO) MORE_ROWS(DO) DO(8) DO(9) DO(10) DO(11)
#else
enum { BYTES = 32, SOME = 2 };
#define SOME_ROWS(DO) DO(0) DO(1)
#define MORE_ROWS(DO) SOME_ROWS(DO) DO(2) DO(3)
#define MOST_ROWS(DO) MORE_ROWS(DO) DO(4) DO(5)
#endif

typedef T Vector __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
enum { LANES = BYTES / sizeof(T), WIDE = 2 * LANES, MOST = 3 * SOME, STRIP = 32 };  // columns of a job

#define START(r) \
    Vector s##r = *(const Vector*)(from + r * pitch_from), t##r = *(const Vector*)(from + r * pitch_from + LANES);
#define ADD(r) const T v##r = a[r * row]; s##r += v##r * x, t##r += v##r * y;
#define STORE(r) *(Vector*)(out + r * pitch) = s##r, *(Vector*)(out + r * pitch + LANES) = t##r;
#define TILE(name, FOR_ROWS, ROW, STEP) \
    static __attribute__((noinline)) void name( \
        long long depth, const T* a, long long pitch_a, const T* b, const T* from, long long pitch_from, T* out, \
        long long pitch) { \
        const long long row = ROW, step = STEP; \
        FOR_ROWS(START) \
        for (const T* const end = b + depth * WIDE; b < end; b += WIDE, a += step) { \
            const Vector x = *(const Vector*)b, y = *(const Vector*)(b + LANES); \
            __asm__("" : "+r"(a)); /* one address that moves */ \
            FOR_ROWS(ADD) \
        } \
        FOR_ROWS(STORE) \
    }
TILE(some, SOME_ROWS, pitch_a, 1)
TILE(more, MORE_ROWS, pitch_a, 1)
TILE(most, MOST_ROWS, pitch_a, 1)
TILE(some_turned, SOME_ROWS, 1, pitch_a)  // `a` lies with its columns as rows
TILE(more_turned, MORE_ROWS, 1, pitch_a)
TILE(most_turned, MOST_ROWS, 1, pitch_a)

// out = from + a b for up to MOST rows and one panel. All rows up to a multiple of SOME are there and computed.
static inline void tile(
    bool turned, long long rows, long long depth, const T* a, long long pitch_a, const T* b, const T* from,
    long long pitch_from, T* out, long long pitch) {
    if (turned)
        (rows > 2 * SOME ? most_turned : rows > SOME ? more_turned : some_turned)(
            depth, a, pitch_a, b, from, pitch_from, out, pitch);
    else (rows > 2 * SOME ? most : rows > SOME ? more : some)(depth, a, pitch_a, b, from, pitch_from, out, pitch);
}

static const T zeros[WIDE];  // the rows of a product that begins with nothing

static inline long long up(long long n, long long unit) { return (n + unit - 1) / unit * unit; }
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

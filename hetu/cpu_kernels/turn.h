// Blocks of AT_ONCE rows, turned: the numbers of a column lie side by side, so that a loop over rows computes many at once.
// Rows lie anywhere, each with its numbers `step` apart.

#ifndef TURN
#define TURN

enum { AT_ONCE = 32 };

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define MIXED __builtin_shufflevector
#endif
#endif

typedef unsigned Four __attribute__((vector_size(16), aligned(4)));

// Numbers of 4 bytes go in squares of four by four; how many columns do.
static inline long long in_squares(long long columns, long long step) {
#ifdef MIXED
    return step == 1 ? columns / 4 * 4 : 0;
#else
    return 0;
#endif
}

static inline void square(const unsigned* const from[4], unsigned* const to[4]) {
#ifdef MIXED
    const Four a = *(const Four*)from[0], b = *(const Four*)from[1], c = *(const Four*)from[2], d = *(const Four*)from[3];
    const Four p = MIXED(a, b, 0, 4, 1, 5), q = MIXED(c, d, 0, 4, 1, 5), r = MIXED(a, b, 2, 6, 3, 7), s = MIXED(c, d, 2, 6, 3, 7);
    *(Four*)to[0] = MIXED(p, q, 0, 1, 4, 5), *(Four*)to[1] = MIXED(p, q, 2, 3, 6, 7);
    *(Four*)to[2] = MIXED(r, s, 0, 1, 4, 5), *(Four*)to[3] = MIXED(r, s, 2, 3, 6, 7);
#endif
}

// `count` rows into a block and out of it, one number at a time.
#define ONE_BY_ONE(turn_in, turn_out, T) \
    static inline void turn_in(const T* const* rows, long long step, long long columns, int count, T* block) { \
        for (long long j = 0; j < columns; j++) \
            for (int l = 0; l < count; l++) block[j * AT_ONCE + l] = rows[l][j * step]; \
    } \
    static inline void turn_out(T* const* rows, long long step, long long columns, int count, const T* block) { \
        for (long long j = 0; j < columns; j++) \
            for (int l = 0; l < count; l++) rows[l][j * step] = block[j * AT_ONCE + l]; \
    }
ONE_BY_ONE(turn_in_1, turn_out_1, unsigned char)
ONE_BY_ONE(turn_in_8, turn_out_8, unsigned long long)

// The same in squares; into a block there are a multiple of four rows.
static inline void turn_in_4(
    const unsigned* const* rows, long long step, long long columns, int count, unsigned* block) {
    const long long most = in_squares(columns, step);
    for (int l = 0; l < count; l += 4)
        for (long long j = 0; j < most; j += 4) {
            unsigned* const t = block + j * AT_ONCE + l;
            square(
                (const unsigned*[]){rows[l] + j, rows[l + 1] + j, rows[l + 2] + j, rows[l + 3] + j},
                (unsigned*[]){t, t + AT_ONCE, t + 2 * AT_ONCE, t + 3 * AT_ONCE});
        }
    for (long long j = most; j < columns; j++)
        for (int l = 0; l < count; l++) block[j * AT_ONCE + l] = rows[l][j * step];
}

static inline void turn_out_4(
    unsigned* const* rows, long long step, long long columns, int count, const unsigned* block) {
    const long long most = in_squares(columns, step);
    const int whole = count / 4 * 4;
    for (int l = 0; l < whole; l += 4)
        for (long long j = 0; j < most; j += 4) {
            const unsigned* const t = block + j * AT_ONCE + l;
            square(
                (const unsigned*[]){t, t + AT_ONCE, t + 2 * AT_ONCE, t + 3 * AT_ONCE},
                (unsigned*[]){rows[l] + j, rows[l + 1] + j, rows[l + 2] + j, rows[l + 3] + j});
        }
    for (int l = whole; l < count; l++)
        for (long long j = 0; j < most; j++) rows[l][j * step] = block[j * AT_ONCE + l];
    for (long long j = most; j < columns; j++)
        for (int l = 0; l < count; l++) rows[l][j * step] = block[j * AT_ONCE + l];
}

#endif

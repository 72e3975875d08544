// The widest vectors that the CPU has, anywhere in memory. Compilers take longer ones apart, through memory.

#ifndef VECTORS_H
#define VECTORS_H

#if defined(__AVX512F__)
enum { BYTES = 64 };
#elif defined(__AVX2__)
enum { BYTES = 32 };
#else
enum { BYTES = 16 };
#endif

typedef T Vector __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
enum { LANES = BYTES / sizeof(T), MANY = 8 };  // vectors of sums that stay in registers

// DO(the first number of vectors, how many) for a row of `width` >= LANES numbers, MANY at a time: a number that the
// compiler knows, so that sums are registers. The last vector ends with the row, so it may begin in the one before.
#define FOR_VECTORS_OF(width, DO) \
    for (long long j = 0; j < width; j += MANY * LANES) \
        switch ((width - j + LANES - 1) / LANES) { \
            case 1: DO(j, 1); break; \
            case 2: DO(j, 2); break; \
            case 3: DO(j, 3); break; \
            case 4: DO(j, 4); break; \
            case 5: DO(j, 5); break; \
            case 6: DO(j, 6); break; \
            case 7: DO(j, 7); break; \
            default: DO(j, MANY); \
        }

#endif

// What follows from the numbers of an array (outer, size, inner) one after the other along its middle axis.
//
//     running_sum: y[k] = x[0] + ... + x[k], or x[k] + ... + x[size - 1]
//     best_place:  the first place of what no other number is BETTER than; a NaN is better than any number
//     best_few:    the best numbers, in order, and their places; of equal ones the first

#include <string.h>

#include "vectors.h"

static inline bool better(T a, T b) { return a BETTER b || (a != a && b == b); }

// -- what is computed -------------------------------------------------------------------------------------------------

void running_sum_plainly(const Word* a, long long first, long long last, char* scratch) {
    const T* const x = a[1].p;
    const long long size = a[2].n, inner = a[3].n, backward = a[4].n;
    for (long long k = first * size * inner; k < last * size * inner; k++) {
        const long long i = k % inner, row = k / inner % size, start = k / inner - row;
        T sum = 0;
        for (long long j = 0; j < size; j++)
            if (backward ? j >= row : j <= row) sum += x[(start + j) * inner + i];
        ((T*)a[0].p)[k] = sum;
    }
}

void best_place_plainly(const Word* a, long long first, long long last, char* scratch) {
    const T* const x = a[1].p;
    const long long size = a[2].n, inner = a[3].n;
    for (long long k = first * inner; k < last * inner; k++) {
        long long* const place = (long long*)a[0].p + k;
        *place = 0;
        for (long long j = 0; j < size; j++) {
            const T* const of = x + k / inner * size * inner + k % inner;
            if (better(of[j * inner], of[*place * inner])) *place = j;
        }
    }
}

void best_few_plainly(const Word* a, long long first, long long last, char* scratch) {
    const T* const x = a[2].p;
    const long long size = a[3].n, inner = a[4].n, few = a[5].n;
    for (long long k = first; k < last; k++)
        for (long long j = 0; j < size; j++) {
            const T* const of = x + k / inner * size * inner + k % inner;
            long long before = 0;
            for (long long i = 0; i < size; i++)
                before += better(of[i * inner], of[j * inner]) || (i < j && !better(of[j * inner], of[i * inner]));
            const long long to = (k / inner * few + before) * inner + k % inner;
            if (before < few) ((T*)a[0].p)[to] = of[j * inner], ((long long*)a[1].p)[to] = j;
        }
}

// -- the fast forms ---------------------------------------------------------------------------------------------------

// Jobs are outer.
void running_sum(const Word* a, long long first, long long last, char* scratch) {
    const long long size = a[2].n, inner = a[3].n, step = a[4].n ? -inner : inner;
    for (long long o = first; o < last; o++) {
        const long long start = (o * size + (a[4].n ? size - 1 : 0)) * inner;
        T* y = (T*)a[0].p + start;
        const T* x = (T*)a[1].p + start;
        memcpy(y, x, inner * sizeof(T));
        T sum = *x;
        for (long long k = 1; k < size; k++, y += step) {
            x += step;
            if (inner == 1) y[step] = sum += *x;
            else EACH for (long long i = 0; i < inner; i++) y[step + i] = y[i] + x[i];
        }
    }
}

#define SIZED(bytes, type, others) __builtin_choose_expr(sizeof(T) == bytes, (type)0, others)
typedef __typeof__(SIZED(8, long long, SIZED(4, int, SIZED(2, short, (signed char)0)))) Bits;
typedef Bits Mask __attribute__((vector_size(BYTES)));  // all bits of a number, or none
enum { BESIDE = 4 };  // vectors, so that none waits for the one before it

static inline Vector best_of(Vector a, Vector b) {
    const Mask a_is = a BETTER b;
    return (Vector)((a_is & (Mask)a) | (~a_is & (Mask)b));
}
static inline bool any(Mask mask) {
    long long words[sizeof mask / 8], all = 0;
    memcpy(words, &mask, sizeof mask);
    for (int w = 0; w < sizeof mask / 8; w++) all |= words[w];
    return all;
}

// The best of a row, in vectors of which the last may begin in the one before; then where it, or a NaN, first is.
static long long place_in_row(const T* x, long long size) {
    T best = *x;
    long long place = 0;
    if (size < LANES) {
        for (long long k = 1; k < size; k++)
            if (better(x[k], x[place])) place = k;
        return place;
    }
    Vector most[BESIDE], own;
    Mask odd = {}, here = {};
    for (int i = 0; i < BESIDE; i++) most[i] = *(const Vector*)x;
    long long k = 0;
    for (; k + BESIDE * LANES <= size; k += BESIDE * LANES)
        for (int i = 0; i < BESIDE; i++)
            own = *(const Vector*)(x + k + i * LANES), odd |= own != own, most[i] = best_of(own, most[i]);
    for (; k < size; k += LANES)
        own = *(const Vector*)(x + (k + LANES < size ? k : size - LANES)), odd |= own != own, *most = best_of(own, *most);
    for (int i = 1; i < BESIDE; i++) *most = best_of(most[i], *most);
    for (int l = 0; l < LANES; l++) best = (*most)[l] BETTER best ? (*most)[l] : best;
    const bool has_nan = any(odd);
    for (; place + BESIDE * LANES <= size; place += BESIDE * LANES) {
        for (int i = 0; i < BESIDE; i++)
            own = *(const Vector*)(x + place + i * LANES), here |= has_nan ? own != own : own == best;
        if (any(here)) break;
    }
    while (has_nan ? x[place] == x[place] : x[place] != best) place++;
    return place;
}

// Jobs are outer; scratch has the best of each column so far.
void best_place(const Word* a, long long first, long long last, char* scratch) {
    const long long size = a[2].n, inner = a[3].n;
    T* const best = (T*)scratch;
    for (long long o = first; o < last; o++) {
        long long* const place = (long long*)a[0].p + o * inner;
        const T* x = (T*)a[1].p + o * size * inner;
        if (inner == 1) {
            *place = place_in_row(x, size);
            continue;
        }
        memcpy(best, x, inner * sizeof(T));
        memset(place, 0, inner * sizeof *place);
        for (long long k = 1; k < size; k++) {
            x += inner;
            EACH for (long long i = 0; i < inner; i++) {
                const bool now = better(x[i], best[i]);
                best[i] = now ? x[i] : best[i], place[i] = now ? k : place[i];
            }
        }
    }
}

// Jobs are (outer, inner): each number that is better than the last of the few is moved up to its place among them.
void best_few(const Word* a, long long first, long long last, char* scratch) {
    const long long size = a[3].n, inner = a[4].n, few = a[5].n;
    for (long long job = first; job < last; job++) {
        const long long start = job / inner * few * inner + job % inner;
        T* const y = (T*)a[0].p + start;
        long long* const places = (long long*)a[1].p + start;
        const T* x = (T*)a[2].p + job / inner * size * inner + job % inner;
        for (long long k = 0; k < size; k++, x += inner) {
            if (k >= few && !better(*x, y[(few - 1) * inner])) continue;
            long long to = k < few ? k : few - 1;
            for (; to && better(*x, y[(to - 1) * inner]); to--)
                y[to * inner] = y[(to - 1) * inner], places[to * inner] = places[(to - 1) * inner];
            y[to * inner] = *x, places[to * inner] = k;
        }
    }
}

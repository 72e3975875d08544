// What follows from the numbers of an array (outer, size, inner) one after the other along its middle axis.
//
//     running_sum: y[k] = x[0] + ... + x[k], or x[k] + ... + x[size - 1]
//     best_place:  the first place of what no other number is BETTER than; a NaN is better than any number
//     best_few:    the best numbers, in order, and their places; of equal ones the first

#include <string.h>

enum { LANES = 32 };

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

// The best of numbers side by side, in lanes; then where it first is, block by block.
static long long place_in_row(const T* x, long long size) {
    T lanes[LANES], best = *x;
    long long k = 0, place = 0;
    for (int l = 0; l < LANES; l++) lanes[l] = best;
    for (; k + LANES <= size; k += LANES)
        EACH for (int l = 0; l < LANES; l++) lanes[l] = better(x[k + l], lanes[l]) ? x[k + l] : lanes[l];
    for (; k < size; k++) best = better(x[k], best) ? x[k] : best;
    for (int width = LANES / 2; width; width /= 2)
        EACH for (int l = 0; l < width; l++) lanes[l] = better(lanes[l + width], lanes[l]) ? lanes[l + width] : lanes[l];
    best = better(*lanes, best) ? *lanes : best;
    for (int found = 0; place + LANES <= size; place += LANES) {
        for (int l = 0; l < LANES; l++) found |= x[place + l] == best || x[place + l] != x[place + l];
        if (found) break;
    }
    while (x[place] != best && x[place] == x[place]) place++;
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

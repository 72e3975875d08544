// Sums of an array (before, middle, behind).
//
//     sum_around:  y[k] = sum of x[n, k, j] over n and j, as of a convolution's slopes for each channel
//     sum_between: y[n, j] = sum of x[n, k, j] over k, in its order, as of the tokens of a text

#include <string.h>

enum { LANES = 32, STRIP = 64 };

void sum_around_plainly(const Word* a, long long first, long long last, char* scratch) {
    T *const y = a[0].p, *const x = a[1].p;
    const long long before = a[2].n, kept = a[3].n, behind = a[4].n;
    for (long long k = 0; k < kept; k++) {
        y[k] = 0;
        for (long long n = 0; n < before; n++)
            for (long long j = 0; j < behind; j++) y[k] += x[(n * kept + k) * behind + j];
    }
}

void sum_between_plainly(const Word* a, long long first, long long last, char* scratch) {
    T *const y = a[0].p, *const x = a[1].p;
    const long long before = a[2].n, summed = a[3].n, behind = a[4].n;
    for (long long n = 0; n < before; n++)
        for (long long j = 0; j < behind; j++) {
            y[n * behind + j] = 0;
            for (long long k = 0; k < summed; k++) y[n * behind + j] += x[(n * summed + k) * behind + j];
        }
}

// A job is one sum: neighbors go to lanes in turn, block by block, and the lanes are added as a tree at the end.
void sum_around(const Word* a, long long first, long long last, char* scratch) {
    T* const y = a[0].p;
    const T* const x = a[1].p;
    const long long before = a[2].n, kept = a[3].n, behind = a[4].n;
    for (long long k = first; k < last; k++) {
        T lanes[LANES] = {};
        for (long long n = 0; n < before; n++) {
            const T* const row = x + (n * kept + k) * behind;
            long long start = 0;
            for (; start + LANES <= behind; start += LANES)
                EACH for (int l = 0; l < LANES; l++) lanes[l] += row[start + l];
            for (int l = 0; l < behind - start; l++) lanes[l] += row[start + l];
        }
        for (int width = LANES / 2; width; width /= 2)
            for (int l = 0; l < width; l++) lanes[l] += lanes[l + width];
        y[k] = lanes[0];
    }
}

// Jobs are the rows of y, a strip of which stays in registers.
void sum_between(const Word* a, long long first, long long last, char* scratch) {
    const long long summed = a[3].n, behind = a[4].n;
    for (long long n = first; n < last; n++) {
        T* const y = (T*)a[0].p + n * behind;
        const T* const x = (T*)a[1].p + n * summed * behind;
        long long j = 0;
        for (; j + STRIP <= behind; j += STRIP) {
            T sums[STRIP] = {};
            for (long long k = 0; k < summed; k++)
                EACH for (int l = 0; l < STRIP; l++) sums[l] += x[k * behind + j + l];
            memcpy(y + j, sums, sizeof sums);
        }
        if (j < behind) memset(y + j, 0, (behind - j) * sizeof(T));
        for (long long k = 0; k < summed; k++)
            EACH for (long long i = j; i < behind; i++) y[i] += x[k * behind + i];
    }
}

// Random numbers by counting, see `draws.h`. Jobs are blocks of 256 bits.

#include "draws.h"

#include <string.h>

// y = x scale where the 16 bits of an element reach the threshold, else 0; they are those from block a[8] on.
void dropout(const Word* a, long long first, long long last, char* scratch) {
    T* const y = a[0].p;
    const T* const x = a[1].p;
    const Bits *const state = a[2].p, threshold = a[4].n;
    const T scale = a[5].x;
    Bits words[SIDE_BY_SIDE][4];
    for (long long block = first; block < last; block += SIDE_BY_SIDE) {
        philox(state, a[3].n, a[8].n + block, words);
        const unsigned short* const bits = (const unsigned short*)words;
        const long long start = 16 * block, count = least(16 * least(last - block, SIDE_BY_SIDE), a[6].n - start);
        EACH for (long long k = 0; k < count; k++) y[start + k] = bits[k] >= threshold ? x[start + k] * scale : (T)0;
    }
}

// As `dropout`, with one decision for a[7] neighbors, a channel.
void dropout_channels(const Word* a, long long first, long long last, char* scratch) {
    T* const y = a[0].p;
    const T* const x = a[1].p;
    const Bits *const state = a[2].p, threshold = a[4].n;
    const T scale = a[5].x;
    const long long inner = a[7].n;
    Bits words[SIDE_BY_SIDE][4];
    for (long long block = first; block < last; block += SIDE_BY_SIDE) {
        philox(state, a[3].n, a[8].n + block, words);
        const unsigned short* const bits = (const unsigned short*)words;
        const long long start = 16 * block, end = least(start + 16 * least(last - block, SIDE_BY_SIDE), a[6].n / inner);
        for (long long channel = start; channel < end; channel++) {
            const bool stays = bits[channel - start] >= threshold;
            EACH for (long long k = channel * inner; k < (channel + 1) * inner; k++) y[k] = stays ? x[k] * scale : (T)0;
        }
    }
}

// 24 bits of each half of a word, the lower first, or 53 of a word, as a fraction of 1.
static inline float float_of(const Bits* words, long long k) { return (((unsigned*)words)[k] >> 8) * 0x1p-24f; }
static inline double double_of(const Bits* words, long long k) { return (words[k] >> 11) * 0x1p-53; }
#define FRACTION(words, k) _Generic((T)0, float: float_of, double: double_of)(words, k)

// y = fraction range + low
void uniform(const Word* a, long long first, long long last, char* scratch) {
    T* const y = a[0].p;
    const T range = a[3].x, low = a[4].x;
    const int each = 32 / sizeof(T);
    Bits words[SIDE_BY_SIDE][4];
    const Bits* const drawn = (Bits*)words;
    for (long long block = first; block < last; block += SIDE_BY_SIDE) {
        philox(a[1].p, a[2].n, block, words);
        const long long start = each * block, count = least(each * least(last - block, SIDE_BY_SIDE), a[5].n - start);
        EACH for (long long k = 0; k < count; k++) y[start + k] = FRACTION(drawn, k) * range + low;
    }
}

// -- normal numbers -----------------------------------------------------------------------------------------------------

typedef __typeof__(_Generic((T)0, float: 0, double: 0LL)) Integer;  // as wide as a number
typedef __typeof__(_Generic((T)0, float: 0u, double: 0ull)) Natural;
enum { BITS = 8 * sizeof(T), HALF = 16 / sizeof(T), PAIRS = SIDE_BY_SIDE * HALF, TERMS = sizeof(T) == 4 ? 4 : 8 };

// A pair of numbers from a radius and an angle, 0 ... 2 pi in all their bits: the nearest quarter turn, and series beside it.
static inline void pair(Natural radius, Natural angle, T* x, T* y) {
    const T unit = sizeof(T) == 4 ? 0x1p-32 : 0x1p-64;
    const T far = sqrt(-2 * log((T)(Integer)(radius >> 1) * (2 * unit) + unit));
    const Natural quarter = (angle + ((Natural)1 << (BITS - 3))) >> (BITS - 2);
    const T beside = (T)(Integer)(angle - (quarter << (BITS - 2))) * (T)(6.283185307179586 * unit), z = beside * beside;
    T odd = 1, even = 1;
    for (int n = TERMS; n; n--) odd = 1 - z * odd * (T)(1.0 / (2 * n * (2 * n + 1))), even = 1 - z * even * (T)(1.0 / (2 * n * (2 * n - 1)));
    odd *= beside;
    const T cosine = quarter & 1 ? odd : even, sine = quarter & 1 ? even : odd;
    *x = quarter + 1 & 2 ? -far * cosine : far * cosine;
    *y = quarter & 2 ? -far * sine : far * sine;
}

// y = normal std + mean, by Box and Muller: the first half of a block are radii, the second angles.
void normal(const Word* a, long long first, long long last, char* scratch) {
    T* const y = a[0].p;
    const T std = a[3].x, mean = a[4].x;
    Bits words[SIDE_BY_SIDE][4];
    Natural radii[PAIRS], angles[PAIRS];
    T cosines[PAIRS], sines[PAIRS], drawn[2 * PAIRS];
    for (long long block = first; block < last; block += SIDE_BY_SIDE) {
        philox(a[1].p, a[2].n, block, words);
        for (int b = 0; b < SIDE_BY_SIDE; b++)
            memcpy(radii + b * HALF, words[b], 16), memcpy(angles + b * HALF, words[b] + 2, 16);
        EACH for (int k = 0; k < PAIRS; k++) pair(radii[k], angles[k], cosines + k, sines + k);
        for (int b = 0; b < SIDE_BY_SIDE; b++) {
            memcpy(drawn + 2 * b * HALF, cosines + b * HALF, 16);
            memcpy(drawn + (2 * b + 1) * HALF, sines + b * HALF, 16);
        }
        const long long start = 2 * HALF * block, left = a[5].n - start, count = least(2 * HALF * (last - block), left);
        EACH for (long long k = 0; k < least(2 * PAIRS, count); k++) y[start + k] = drawn[k] * std + mean;
    }
}

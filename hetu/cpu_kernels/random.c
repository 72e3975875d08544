// Random numbers by counting, see `draws.h`. Jobs are blocks of 256 bits.

#include "draws.h"

// y = x scale where the 16 bits of an element reach the threshold, else 0.
void dropout(const Word* a, long long first, long long last, char* scratch) {
    T* const y = a[0].p;
    const T* const x = a[1].p;
    const Bits *const state = a[2].p, threshold = a[4].n;
    const T scale = a[5].x;
    Bits words[SIDE_BY_SIDE][4];
    for (long long block = first; block < last; block += SIDE_BY_SIDE) {
        philox(state, a[3].n, block, words);
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
        philox(state, a[3].n, block, words);
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

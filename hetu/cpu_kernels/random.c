// Random numbers by counting: Philox 4x64-10, whose block number `index` is a function of the seed, the step and the
// stream alone (J. K. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011). Jobs are blocks of 256 bits.

#include <stdint.h>

enum { SIDE_BY_SIDE = 4 };  // blocks whose multiplications do not wait for each other

static inline uint64_t high(uint64_t a, uint64_t b) { return (unsigned __int128)a * b >> 64; }

// The words of some blocks; NumPy counts before it draws, so block 0 has counter 1.
static inline void philox(const uint64_t* state, uint64_t stream, uint64_t index, uint64_t words[SIDE_BY_SIDE][4]) {
    uint64_t key0 = state[0], key1 = stream;
    for (int b = 0; b < SIDE_BY_SIDE; b++)
        words[b][0] = index + b + 1, words[b][1] = words[b][2] = 0, words[b][3] = state[1];
    for (int round = 0; round < 10; round++) {
        for (int b = 0; b < SIDE_BY_SIDE; b++) {
            uint64_t* const c = words[b];
            const uint64_t high0 = high(0xD2E7470EE14C6C93u, c[0]), low0 = 0xD2E7470EE14C6C93u * c[0];
            const uint64_t high1 = high(0xCA5A826395121157u, c[2]), low1 = 0xCA5A826395121157u * c[2];
            c[0] = high1 ^ c[1] ^ key0, c[1] = low1, c[2] = high0 ^ c[3] ^ key1, c[3] = low0;
        }
        key0 += 0x9E3779B97F4A7C15u, key1 += 0xBB67AE8584CAA73Bu;
    }
}

static inline long long least(long long a, long long b) { return a < b ? a : b; }

// y = x scale where the 16 bits of an element reach the threshold, else 0.
void dropout(const Word* a, long long first, long long last, char* scratch) {
    T* const y = a[0].p;
    const T* const x = a[1].p;
    const uint64_t *const state = a[2].p, threshold = a[4].n;
    const T scale = a[5].x;
    uint64_t words[SIDE_BY_SIDE][4];
    for (long long block = first; block < last; block += SIDE_BY_SIDE) {
        philox(state, a[3].n, block, words);
        const uint16_t* const bits = (const uint16_t*)words;
        const long long start = 16 * block, count = least(16 * least(last - block, SIDE_BY_SIDE), a[6].n - start);
        EACH for (long long k = 0; k < count; k++) y[start + k] = bits[k] >= threshold ? x[start + k] * scale : (T)0;
    }
}

// As `dropout`, with one decision for a[7] neighbors, a channel.
void dropout_channels(const Word* a, long long first, long long last, char* scratch) {
    T* const y = a[0].p;
    const T* const x = a[1].p;
    const uint64_t *const state = a[2].p, threshold = a[4].n;
    const T scale = a[5].x;
    const long long inner = a[7].n;
    uint64_t words[SIDE_BY_SIDE][4];
    for (long long block = first; block < last; block += SIDE_BY_SIDE) {
        philox(state, a[3].n, block, words);
        const uint16_t* const bits = (const uint16_t*)words;
        const long long start = 16 * block, end = least(start + 16 * least(last - block, SIDE_BY_SIDE), a[6].n / inner);
        for (long long channel = start; channel < end; channel++) {
            const bool stays = bits[channel - start] >= threshold;
            EACH for (long long k = channel * inner; k < (channel + 1) * inner; k++) y[k] = stays ? x[k] * scale : (T)0;
        }
    }
}

// 24 bits of each half of a word, the lower first, or 53 of a word, as a fraction of 1.
static inline float float_of(const uint64_t* words, long long k) { return (((uint32_t*)words)[k] >> 8) * 0x1p-24f; }
static inline double double_of(const uint64_t* words, long long k) { return (words[k] >> 11) * 0x1p-53; }
#define FRACTION(words, k) _Generic((T)0, float: float_of, double: double_of)(words, k)

// y = fraction range + low
void uniform(const Word* a, long long first, long long last, char* scratch) {
    T* const y = a[0].p;
    const T range = a[3].x, low = a[4].x;
    const int each = 32 / sizeof(T);
    uint64_t words[SIDE_BY_SIDE][4];
    const uint64_t* const drawn = (uint64_t*)words;
    for (long long block = first; block < last; block += SIDE_BY_SIDE) {
        philox(a[1].p, a[2].n, block, words);
        const long long start = each * block, count = least(each * least(last - block, SIDE_BY_SIDE), a[5].n - start);
        EACH for (long long k = 0; k < count; k++) y[start + k] = FRACTION(drawn, k) * range + low;
    }
}

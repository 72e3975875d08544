// Random numbers by counting: Philox 4x64-10, whose block number `index` is a function of the seed, the step and the
// stream alone (J. K. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011).

#ifndef DRAWS
#define DRAWS

typedef unsigned long long Bits;  // 64 of them

enum { SIDE_BY_SIDE = 4 };  // blocks whose multiplications do not wait for each other

static inline Bits upper(Bits a, Bits b) { return (unsigned __int128)a * b >> 64; }

// The words of some blocks; NumPy counts before it draws, so block 0 has counter 1.
static inline void philox(const Bits* state, Bits stream, Bits index, Bits words[SIDE_BY_SIDE][4]) {
    Bits key0 = state[0], key1 = stream;
    for (int b = 0; b < SIDE_BY_SIDE; b++)
        words[b][0] = index + b + 1, words[b][1] = words[b][2] = 0, words[b][3] = state[1];
    for (int round = 0; round < 10; round++) {
        for (int b = 0; b < SIDE_BY_SIDE; b++) {
            Bits* const c = words[b];
            const Bits high0 = upper(0xD2E7470EE14C6C93u, c[0]), low0 = 0xD2E7470EE14C6C93u * c[0];
            const Bits high1 = upper(0xCA5A826395121157u, c[2]), low1 = 0xCA5A826395121157u * c[2];
            c[0] = high1 ^ c[1] ^ key0, c[1] = low1, c[2] = high0 ^ c[3] ^ key1, c[3] = low0;
        }
        key0 += 0x9E3779B97F4A7C15u, key1 += 0xBB67AE8584CAA73Bu;
    }
}

static inline long long least(long long a, long long b) { return a < b ? a : b; }

// Whether each of `count` numbers, from number `first` on, is kept: its 16 bits reach the threshold.
static inline void draw(const Bits* state, Bits stream, unsigned short threshold, long long first, long long count,
                        int* kept) {
    enum { ALL = 16 * SIDE_BY_SIDE };
    Bits words[SIDE_BY_SIDE][4];
    const unsigned short* const bits = (const unsigned short*)words;
    for (long long start = first / 16 * 16 - first; start < count; start += ALL) {
        philox(state, stream, (first + start) / 16, words);
        if (start >= 0 && start + ALL <= count) {
            EACH for (int k = 0; k < ALL; k++) kept[start + k] = bits[k] >= threshold;
        } else {
            for (int k = 0; k < ALL; k++)
                if (start + k >= 0 && start + k < count) kept[start + k] = bits[k] >= threshold;
        }
    }
}

#endif

// Random numbers by counting, with `philox` of `prelude.cu`.

#define FOR_BLOCKS(count) \
    for (long long b = (long long)blockIdx.x * blockDim.x + threadIdx.x; b < (count); b += (long long)gridDim.x * blockDim.x)

// y = x scale where the 16 bits of its channel, `inner` neighbors, reach the threshold, else 0. One thread an element;
// each draws its block. Bytes: x and y once.
extern "C" __global__ void dropout_channels(const S* x, const Word* state, S* y, long long n, long long inner, Word stream,
                                            long long threshold, double scale) {
    FOR_BLOCKS(n) {
        const long long channel = b / inner;
        Word words[4];
        philox(state, stream, channel / 16, words);
        y[b] = kept(words, channel % 16, threshold) ? (T)x[b] * (T)scale : (T)0;
    }
}

__device__ inline float fraction(const Word* words, int place, float) {  // 24 bits of each half word, the lower first
    return (float)((unsigned int)(words[place / 2] >> place % 2 * 32) >> 8) * (1.f / 16777216.f);
}
__device__ inline double fraction(const Word* words, int place, double) { return (words[place] >> 11) * (1. / 9007199254740992.); }

// y = fraction range + low, 8 floats or 4 doubles a block. Bytes: y once.
extern "C" __global__ void uniform(const Word* state, S* y, long long n, Word stream, double range, double low) {
    const int each = 32 / sizeof(T);
    FOR_BLOCKS((n + each - 1) / each) {
        Word words[4];
        philox(state, stream, b, words);
#pragma unroll
        for (int j = 0; j < each; j++)
            if (b * each + j < n) y[b * each + j] = fraction(words, j, (T)0) * (T)range + (T)low;
    }
}

// y = fraction < p, drawn in float whatever the type of y.
extern "C" __global__ void bernoulli(const Word* state, S* y, long long n, Word stream, double p) {
    FOR_BLOCKS((n + 7) / 8) {
        Word words[4];
        philox(state, stream, b, words);
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (b * 8 + j < n) y[b * 8 + j] = (S)(fraction(words, j, 0.f) < (float)p);
    }
}

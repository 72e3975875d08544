// What every kernel may use: storage types of 16 bits, functions that keep to the precision of their argument, and
// reductions over the threads that share a row. `T` is the type in which the kernel computes.

#ifdef __CUDA_ARCH__  // one instruction each; the emulator brings its own
__device__ inline float half_to_float(unsigned short h) {
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(h));
    return v;
}
__device__ inline unsigned short float_to_half(float v) {
    unsigned short h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return h;
}
__device__ inline float power_of_two(float v) {  // to 22 bits
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
    return power;
}
#endif

struct half16 {  // IEEE half precision: one conversion on load, one rounding on store, arithmetic in float
    unsigned short bits;
    half16() = default;
    __device__ half16(float v) : bits(float_to_half(v)) {}
    __device__ operator float() const { return half_to_float(bits); }
};

struct bfloat16 {  // the upper half of a float, rounded to nearest even
    unsigned short bits;
    bfloat16() = default;
    __device__ bfloat16(float v) {
#if __CUDA_ARCH__ >= 800
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
#else
        unsigned int u = __float_as_uint(v);
        bits = v != v ? 0x7fc0 : (unsigned short)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
#endif
    }
    __device__ operator float() const { return __uint_as_float((unsigned int)bits << 16); }
};

template <class V, int N>
struct alignas(sizeof(V) * N) Pack {  // N neighbors; one instruction moves up to 16 bytes
    static const int count = N;
    V v[N];
};

template <int N, class V> __device__ inline Pack<V, N> load(const V* x) { return *(const Pack<V, N>*)x; }
template <int N, class V> __device__ inline void store(V* x, const Pack<V, N>& values) {
#ifdef __CUDA_ARCH__  // the compiler may store what it has put together itself element by element, so it is not asked
    if constexpr (sizeof(values) == 16) {
        const uint4 w = *(const uint4*)&values;
        asm("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
            :: "l"(__cvta_generic_to_global(x)), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w) : "memory");
        return;
    }
    if constexpr (sizeof(values) == 8) {
        const uint2 w = *(const uint2*)&values;
        asm("st.global.v2.u32 [%0], {%1, %2};" :: "l"(__cvta_generic_to_global(x)), "r"(w.x), "r"(w.y) : "memory");
        return;
    }
#endif
    *(Pack<V, N>*)x = values;
}

template <int N> struct Neighbors { static constexpr int count = N; };

// What a thread of a team has of a row from column `begin` to `end`, whose first lies at `place` of its array: calls
// visit(neighbors, column) for aligned packs, and one by one for the few elements before and behind these. The head of a
// row of few may reach beyond it, and its end then lies before `last`.
template <int PACK, class Place, class Visit>
__device__ inline void for_packs(Place place, Place begin, Place end, Visit visit) {
    const Place i = threadIdx.x, head = -place & (PACK - 1);
    const Place last = end - (end - begin - head) % PACK;
    if (i < head + end - last) visit(Neighbors<1>(), i < head ? begin + i : last + i - head);
    for (Place column = begin + head + i * PACK; column < last; column += blockDim.x * PACK)
        visit(Neighbors<PACK>(), column);
}

// A parameter of four axes (batch, rows, heads, features), the last without gaps; where the head of this block begins,
// and what number it has.
#define STRIDED(type, x) type* x, long long x##_batch, long long x##_row, long long x##_head
#define HEAD(x) (x + blockIdx.z * x##_batch + blockIdx.y * x##_head)
#define HEAD_NUMBER ((long long)blockIdx.z * gridDim.y + blockIdx.y)

// A loop of all threads of the grid over n elements e. `Index` has 32 bits where they suffice: a GPU divides those
// several times faster than 64, which for a kernel that only moves data would take longer than the memory does.
#define FOR_ELEMENTS(n)                                                          \
    for (Index e = (Index)blockIdx.x * blockDim.x + threadIdx.x; e < (Index)(n); \
         e += (Index)gridDim.x * blockDim.x)

// -- functions -----------------------------------------------------------------------------------------------------
// CUDA's own `exp(float)` and `exp(double)` overload, but a stray double constant would make half the work double.

#define ONE_ARGUMENT(name)                                              \
    __device__ inline float name(float x) { return ::name##f(x); }      \
    __device__ inline double name(double x) { return ::name(x); }
ONE_ARGUMENT(exp) ONE_ARGUMENT(expm1) ONE_ARGUMENT(log) ONE_ARGUMENT(log1p) ONE_ARGUMENT(sqrt) ONE_ARGUMENT(rsqrt)
ONE_ARGUMENT(sin) ONE_ARGUMENT(cos) ONE_ARGUMENT(tanh) ONE_ARGUMENT(erf) ONE_ARGUMENT(erfc) ONE_ARGUMENT(fabs)
ONE_ARGUMENT(floor) ONE_ARGUMENT(ceil) ONE_ARGUMENT(rint)

template <class N> __device__ inline N floor(N x) { return x; }  // integers are whole already
template <class N> __device__ inline N ceil(N x) { return x; }
template <class N> __device__ inline N rint(N x) { return x; }

template <class N> __device__ inline N of_integer(N x) { return x; }  // nvcc converts as it is written

template <class N> __device__ inline bool isnan(N x) { return x != x; }
template <class N> __device__ inline bool isfinite(N x) { return x - x == 0; }
template <class N> __device__ inline N fmax(N a, N b) { return a >= b || a != a ? a : b; }  // a NaN wins
template <class N> __device__ inline N fmin(N a, N b) { return a <= b || a != a ? a : b; }

template <class N> __device__ inline N gelu_slope(N x) {  // of the exact gelu: Phi(x) + x phi(x)
    return (N)0.5 * erfc(x * (N)-0.7071067811865476) + x * exp((N)-0.5 * x * x) * (N)0.3989422804014327;
}

__device__ inline float pow(float x, float y) { return ::powf(x, y); }
__device__ inline double pow(double x, double y) { return ::pow(x, y); }
template <class N> __device__ inline N pow(N x, N y) {  // integers, modulo the size of their type
    N result = 1;
    for (; y > 0; y /= 2, x = (N)(x * x))
        if (y % 2) result = (N)(result * x);
    return result;
}

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
#endif
__device__ inline double infinite() { return __longlong_as_double(0x7ff0000000000000LL); }

// -- the threads that share a row ------------------------------------------------------------------------------------
// A team is blockDim.x threads: 32 (then several teams, numbered by threadIdx.y, share a block) or a whole block.
// Every thread gets the result, which does not depend on timing.

template <class V, class Combine> __device__ inline V warp_fold(V v, Combine combine) {
    for (int step = 16; step; step /= 2) v = combine(v, __shfl_xor_sync(0xffffffffu, v, step));
    return v;
}

// `neutral` changes nothing that it is combined with.
template <class V, class Combine> __device__ inline V team_fold(V v, V neutral, Combine combine) {
    v = warp_fold(v, combine);
    if (blockDim.x == 32) return v;
    __shared__ V partial[32];
    __syncthreads();  // an earlier reduction may still be read
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_fold(threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : neutral, combine);
}

__device__ inline T plus(T a, T b) { return a + b; }
__device__ inline T warp_sum(T v) { return warp_fold(v, plus); }
__device__ inline T warp_max(T v) { return warp_fold(v, fmax<T>); }
__device__ inline T team_sum(T v) { return team_fold(v, (T)0, plus); }
__device__ inline T team_max(T v) { return team_fold(v, (T)-infinite(), fmax<T>); }

// -- random numbers ----------------------------------------------------------------------------------------------------
// By counting: NumPy's Philox4x64-10 generator with the key (seed, stream) and the counter (0, 0, 0, step), so that every
// element is the same as on a CPU. J. K. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011, section 3.
// `state` = (seed, step) lies on the device: a captured graph replays with new numbers.

typedef unsigned long long Word;

// The four words of block number `index`; NumPy counts before it draws, so block 0 has counter 1.
__device__ inline void philox(const Word* state, Word stream, Word index, Word* c) {
    Word key0 = state[0], key1 = stream;
    c[0] = index + 1, c[1] = 0, c[2] = 0, c[3] = state[1];
    for (int round = 0; round < 10; round++) {
        const Word high0 = __umul64hi(0xD2E7470EE14C6C93ull, c[0]), low0 = 0xD2E7470EE14C6C93ull * c[0];
        const Word high1 = __umul64hi(0xCA5A826395121157ull, c[2]), low1 = 0xCA5A826395121157ull * c[2];
        c[0] = high1 ^ c[1] ^ key0, c[1] = low1, c[2] = high0 ^ c[3] ^ key1, c[3] = low0;
        key0 += 0x9E3779B97F4A7C15ull, key1 += 0xBB67AE8584CAA73Bull;
    }
}

__device__ inline bool kept(const Word* words, int place, Word threshold) {  // chosen so that words stay in registers
    const Word low = place < 4 ? words[0] : words[1], high = place < 12 ? words[2] : words[3];
    return ((place < 8 ? low : high) >> place % 4 * 16 & 0xffff) >= threshold;
}

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
        unsigned int u = __float_as_uint(v);
        bits = v != v ? 0x7fc0 : (unsigned short)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
    }
    __device__ operator float() const { return __uint_as_float((unsigned int)bits << 16); }
};

template <class V, int N>
struct alignas(sizeof(V) * N) Pack {  // N neighbours that one instruction loads or stores
    V v[N];
};

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

template <class N> __device__ inline bool isnan(N x) { return x != x; }
template <class N> __device__ inline bool isfinite(N x) { return x - x == 0; }
template <class N> __device__ inline N fmax(N a, N b) { return a >= b || a != a ? a : b; }  // a NaN wins
template <class N> __device__ inline N fmin(N a, N b) { return a <= b || a != a ? a : b; }

__device__ inline float pow(float x, float y) { return ::powf(x, y); }
__device__ inline double pow(double x, double y) { return ::pow(x, y); }
template <class N> __device__ inline N pow(N x, N y) {  // integers, modulo the size of their type
    N result = 1;
    for (; y > 0; y /= 2, x = (N)(x * x))
        if (y % 2) result = (N)(result * x);
    return result;
}

__device__ inline double infinite() { return __longlong_as_double(0x7ff0000000000000LL); }

// -- the threads that share a row ------------------------------------------------------------------------------------
// A team is blockDim.x threads: 32 (then several teams, numbered by threadIdx.y, share a block) or a whole block.
// Every thread gets the result, which does not depend on timing.

__device__ inline T warp_sum(T v) {
    for (int step = 16; step; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}

__device__ inline T warp_max(T v) {
    for (int step = 16; step; step /= 2) v = fmax(v, __shfl_xor_sync(0xffffffffu, v, step));
    return v;
}

__device__ inline T team_sum(T v) {
    v = warp_sum(v);
    if (blockDim.x == 32) return v;
    __shared__ T partial[32];
    __syncthreads();  // an earlier reduction may still be read
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : (T)0);
}

__device__ inline T team_max(T v) {
    v = warp_max(v);
    if (blockDim.x == 32) return v;
    __shared__ T partial[32];
    __syncthreads();
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_max(partial[threadIdx.x % 32 < blockDim.x / 32 ? threadIdx.x % 32 : 0]);
}

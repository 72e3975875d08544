// The vocabulary of CUDA C for a C++ compiler: what the emulator puts in front of the text of a kernel.
//
// The compiler reports each access that the text makes to memory (its instrumentation for sanitizers, without their
// library), so every address is looked at before it is used. What stands here is not reported; what it does for a kernel
// says so itself, by `access`. `emulator.cpp` has the other side: threads, barriers, memory.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <utility>

struct dim3 {
    unsigned x, y, z;
};

#define UNSEEN __attribute__((no_sanitize_address, no_sanitize_undefined))
#ifdef EMULATOR_RUNTIME
#define HELD extern
#else
#define HELD  // in the text, which then reads them without a report
#endif

namespace emulator {

HELD dim3 grid, block, block_index, thread_index;
HELD size_t dynamic_bytes;  // of shared memory

struct Launch {  // as `emulator.py` passes it, 8 bytes each
    uint64_t shape[6], bytes, order, seed, blocks, synchronizes, reaches, parameters, arrays;
    uint64_t spans[];          // begin and end of each parameter's array, and of each that a table names
};

const char* launch(const Launch& launch, unsigned bounds, void (*body)(void**), void** arguments);
void* shared(const void* array, size_t size, size_t alignment);
void access(const void* place, size_t size, bool writes);
void barrier(int line);
void meet(unsigned mask, uint64_t value, int line);  // lends a value to the lanes of `mask`, when all of them do
uint64_t taken(unsigned lane);
unsigned lane();
[[noreturn]] void fail(const char* words, int line);

template <class To, class From> UNSEEN To same_bits(From from) {
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

template <class V> UNSEEN uint64_t widened(V value) {
    static_assert(sizeof(V) <= 8, "a warp operation moves at most 8 bytes");
    uint64_t wide = 0;
    std::memcpy(&wide, &value, sizeof(V));
    return wide;
}

template <class V> UNSEEN V shuffle(unsigned mask, V value, unsigned source, int line) {
    meet(mask, widened(value), line);
    if (source / 32) return value;  // beyond the warp: one's own value
    if (!(mask >> source & 1)) fail("a shuffle reads a lane that its mask does not name", line);
    uint64_t wide = taken(source);
    std::memcpy(&value, &wide, sizeof(V));
    return value;
}

inline UNSEEN unsigned ballot(unsigned mask, bool predicate, int line) {
    meet(mask, predicate, line);
    unsigned votes = 0;
    for (unsigned k = 0; k < 32; k++)
        if (mask >> k & 1 && taken(k)) votes |= 1u << k;
    return votes;
}

// -- entry points ----------------------------------------------------------------------------------------------------

// One CUDA thread: the kernel with the arguments that `a` points at.
template <class... A, size_t... I> UNSEEN void call(void (*kernel)(A...), void** a, std::index_sequence<I...>) {
    kernel(*(std::remove_cv_t<A>*)a[I]...);
}
template <class... A> UNSEEN void call(void (*kernel)(A...), void** a) {
    call(kernel, a, std::index_sequence_for<A...>());
}

// ", in float32, out int64, int64": what a kernel takes, for the checks on the Python side.
template <class A> UNSEEN int describe(char* to) {
    typedef std::remove_pointer_t<A> P;
    typedef std::remove_cv_t<P> V;
    if (std::is_pointer_v<P>) return sprintf(to, ", table uint64");
    const char* use = !std::is_pointer_v<A> ? "" : std::is_const_v<P> ? "in " : "out ";
    if (std::is_same_v<V, bool>) return sprintf(to, ", %sbool", use);
    const char* whole = std::is_signed_v<V> ? "int" : "uint";
    const char* kind = std::is_floating_point_v<V> ? "float" : std::is_integral_v<V> ? whole : "bits";  // half16, bfloat16
    return sprintf(to, ", %s%s%zu", use, kind, sizeof(V) * 8);
}

template <class... A> UNSEEN const char* signature(void (*)(A...)) {
    static char text[4096];
    char* end = text;
    ((end += describe<std::remove_cv_t<A>>(end)), ...);
    return text;
}

}  // namespace emulator

// `bounds` is what __launch_bounds__ says: the most threads of a block, or 0.
#define EXPORT extern "C" __attribute__((visibility("default"))) const char*
#define EMULATE(text, name, bounds)                                                                               \
    EXPORT emulate_##text##_##name(const emulator::Launch& launch, void** arguments) {                            \
        return emulator::launch(launch, bounds, [](void** a) UNSEEN { emulator::call(name, a); }, arguments);     \
    }                                                                                                             \
    EXPORT signature_##text##_##name() { return emulator::signature(name); }

// -- the vocabulary of CUDA C that the kernels use -------------------------------------------------------------------

#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define threadIdx (emulator::thread_index)
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block)
#define gridDim (emulator::grid)
#define __syncthreads() emulator::barrier(__LINE__)
#define __syncwarp() emulator::meet(0xffffffffu, 0, __LINE__)
#define __shfl_sync(mask, value, lane_) emulator::shuffle(mask, value, (lane_) % 32u, __LINE__)
#define __shfl_xor_sync(mask, value, bits) emulator::shuffle(mask, value, emulator::lane() ^ (bits), __LINE__)
#define __shfl_down_sync(mask, value, step) emulator::shuffle(mask, value, emulator::lane() + (step), __LINE__)
#define __shfl_up_sync(mask, value, step) emulator::shuffle(mask, value, emulator::lane() - (step), __LINE__)
#define __ballot_sync(mask, predicate) emulator::ballot(mask, predicate, __LINE__)
#define __any_sync(mask, predicate) (emulator::ballot(mask, predicate, __LINE__) != 0)
#define __all_sync(mask, predicate) (emulator::ballot(mask, predicate, __LINE__) == (mask))

// No fiber yields within one of these.
#define ATOMIC(name, result)                                                                       \
    template <class V> UNSEEN V name(V* place, std::common_type_t<V> value) {                      \
        emulator::access(place, sizeof(V), false);                                                 \
        const V old = *place;                                                                      \
        *place = result;                                                                           \
        return old;                                                                                \
    }
ATOMIC(atomicAdd, old + value)
ATOMIC(atomicMax, old > value ? old : value)
ATOMIC(atomicMin, old < value ? old : value)
ATOMIC(atomicExch, value)
template <class V> UNSEEN V atomicCAS(V* place, std::common_type_t<V> expected, std::common_type_t<V> value) {
    return atomicExch(place, *place == expected ? value : *place);
}
inline void __threadfence() {}

using emulator::same_bits;
inline UNSEEN unsigned __float_as_uint(float v) { return same_bits<unsigned>(v); }
inline UNSEEN float __uint_as_float(unsigned v) { return same_bits<float>(v); }
inline UNSEEN double __longlong_as_double(long long v) { return same_bits<double>(v); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline float rsqrtf(float v) { return 1 / sqrtf(v); }
inline double rsqrt(double v) { return 1 / sqrt(v); }
template <class V> V __ldg(const V* place) { return *place; }
inline float power_of_two(float v) { return exp2f(v); }
float half_to_float(unsigned short h);
unsigned short float_to_half(float v);

// A CUDA block on one CPU thread: what the emulator puts in front of the text of a kernel.
//
// Every CUDA thread is a fiber. A fiber runs until it meets a barrier or a warp operation; the scheduler resumes the
// runnable ones in the order under test and releases a rendezvous once all whom it names have arrived at the same line.
// In the shuffled order all warps go on side by side; in the others each runs as far ahead as barriers let it.
// Shared memory starts as 0xFF bytes (NaN) between guard zones. Asynchronous copies arrive at once in one order and as
// late as they may in the others. Ignored on purpose: races inside one statement, weak memory ordering, what limits a
// real device beyond 1024 threads and 227 KB of shared memory, and speed.

#include <setjmp.h>
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

struct dim3 {
    unsigned x, y, z;
};

namespace emulator {

enum State { READY, BARRIER, WARP, DONE };

struct Copy {  // into shared memory, on its way until the thread waits for it
    void* to;
    const void* from;
    size_t size;                   // 0: zeros arrive
    size_t room;
    unsigned group;
};

struct Fiber {
    ucontext_t context;            // how it starts; afterward jumps switch, which make no system call
    jmp_buf jump;
    bool started;
    std::unique_ptr<char[]> stack;
    dim3 index;
    unsigned number;               // x + y * width + z * width * height; 32 neighbors are a warp
    State state;
    int line;                      // of the barrier or warp operation it waits at
    unsigned mask;                 // lanes it waits for
    uint64_t given, taken[32];     // what it lends to a warp operation, and what the other lanes lent
    std::vector<Copy> copies;
    unsigned groups;               // of copies that have ended
};

struct Region {  // one shared array of the running block
    std::vector<char> bytes;
};

static const size_t GUARD = 256, STACK = 1 << 16;
static std::deque<Fiber> fibers;  // the first `threads` of them are the running block
static size_t threads;
static Fiber* self;
static jmp_buf scheduler;
static dim3 grid, block, block_index;
static std::map<std::pair<int, size_t>, Region> regions;
static size_t dynamic_bytes;
static void (*body)(void**);  // one thread of the kernel that runs
static void** body_arguments;
static bool copies_at_once;
static std::string failure;

inline void* shared(int id, size_t size) {
    Region& region = regions[{id, size}];
    if (region.bytes.empty()) region.bytes.assign(size + 2 * GUARD, (char)0xFF);
    return region.bytes.data() + GUARD;
}

inline bool guards_hold() {
    for (auto& [key, region] : regions)
        for (size_t i = 0; i < GUARD; i++)
            if (region.bytes[i] != (char)0xFF || region.bytes[region.bytes.size() - 1 - i] != (char)0xFF) return false;
    return true;
}

inline void wait(State state, int line) {
    self->state = state, self->line = line;
    if (!_setjmp(self->jump)) _longjmp(scheduler, 1);
}

inline void barrier(int line) { wait(BARRIER, line); }

// Lend `value` to the lanes of `mask` and wait until all of them have lent theirs.
template <class V> void meet(unsigned mask, V value, int line) {
    static_assert(sizeof(V) <= 8, "a warp operation moves at most 8 bytes");
    self->given = 0, self->mask = mask;
    std::memcpy(&self->given, &value, sizeof(V));
    wait(WARP, line);
}

template <class V> V taken(unsigned lane) {
    V value;
    std::memcpy(&value, &self->taken[lane % 32], sizeof(V));
    return value;
}

inline unsigned lane() { return self->number % 32; }

template <class V> V shuffle(unsigned mask, V value, unsigned source, int width, int line) {
    meet(mask, value, line);
    return source / width == lane() / width ? taken<V>(source) : value;  // out of the segment: one's own value
}

inline unsigned ballot(unsigned mask, bool predicate, int line) {
    meet(mask, (unsigned)predicate, line);
    unsigned votes = 0;
    for (unsigned k = 0; k < 32; k++)
        if (mask >> k & 1) votes |= taken<unsigned>(k) << k;
    return votes;
}

// Lets a warp go on when every lane that the waiting ones name has arrived. False: nobody could move.
inline bool release_warp(size_t first, size_t last) {
    for (size_t i = first; i < last; i++) {
        Fiber& waiting = fibers[i];
        if (waiting.state != WARP) continue;
        bool complete = true;
        for (unsigned k = 0; k < 32; k++) {
            if (!(waiting.mask >> k & 1)) continue;
            if (first + k >= last || fibers[first + k].state == DONE) {
                failure = "line " + std::to_string(waiting.line) + ": a warp operation names lane " + std::to_string(k)
                        + ", which " + (first + k >= last ? "does not exist" : "has ended");
                return false;
            }
            Fiber& other = fibers[first + k];
            complete &= other.state == WARP && other.line == waiting.line && other.mask == waiting.mask;
        }
        if (!complete) continue;
        uint64_t given[32];
        std::memset(given, 0xFF, sizeof given);
        for (unsigned k = 0; k < 32; k++)
            if (waiting.mask >> k & 1) given[k] = fibers[first + k].given;
        unsigned mask = waiting.mask;
        for (unsigned k = 0; k < 32; k++)
            if (mask >> k & 1) std::memcpy(fibers[first + k].taken, given, sizeof given), fibers[first + k].state = READY;
        return true;
    }
    return false;
}

// All who have not ended wait at one barrier: let them go. A mix of lines, or of barriers and warps, is an error.
inline void release_barrier() {
    int line = 0;
    for (size_t i = 0; i < threads; i++) {
        Fiber& f = fibers[i];
        if (f.state == DONE) continue;
        if (line == 0) line = f.line;
        if (f.state != BARRIER || f.line != line) {
            failure = "deadlock: divergent __syncthreads or warp operation; threads wait at lines "
                    + std::to_string(std::min(line, f.line)) + " and " + std::to_string(std::max(line, f.line));
            return;
        }
    }
    for (size_t i = 0; i < threads; i++)
        if (fibers[i].state == BARRIER) fibers[i].state = READY;
}

inline void enter() {
    body(body_arguments);
    self->state = DONE;
    _longjmp(scheduler, 1);
}

inline void resume(Fiber* fiber) {
    self = fiber;
    if (_setjmp(scheduler)) return;
    if (fiber->started) _longjmp(fiber->jump, 1);
    fiber->started = true;
    setcontext(&fiber->context);
}

inline void start_block() {
    regions.clear();
    for (size_t i = 0; i < threads; i++) {
        Fiber& f = fibers[i];
        unsigned n = (unsigned)i;
        f.index = {n % block.x, n / block.x % block.y, n / block.x / block.y};
        f.number = n, f.state = READY, f.started = false, f.copies.clear(), f.groups = 0;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.get(), f.context.uc_stack.ss_size = STACK;
        f.context.uc_link = nullptr;
        makecontext(&f.context, enter, 0);
    }
}

inline std::vector<size_t> sequence(size_t count, int order, std::mt19937& random) {
    std::vector<size_t> places(count);
    std::iota(places.begin(), places.end(), 0);
    if (order == 1) std::reverse(places.begin(), places.end());
    if (order > 1) std::shuffle(places.begin(), places.end(), random);
    return places;
}

// The fibers from `first` up to `last`, once each, as far as they get.
inline void resume_ready(size_t first, size_t last, int order, std::mt19937& random) {
    for (size_t i : sequence(last - first, order, random))
        if (fibers[first + i].state == READY) resume(&fibers[first + i]);
}

inline void run_block(int order, std::mt19937& random) {
    start_block();
    const size_t warps = (threads + 31) / 32;
    bool ended = false;
    while (failure.empty() && !ended) {
        bool moved = false;
        if (order > 1) resume_ready(0, threads, order, random);
        for (size_t warp : sequence(warps, order, random)) {
            size_t first = warp * 32, last = std::min(first + 32, threads);
            if (order <= 1) resume_ready(first, last, order, random);
            while (failure.empty() && release_warp(first, last)) {
                moved = true;
                if (order <= 1) resume_ready(first, last, order, random);  // a warp runs ahead of the others
            }
        }
        ended = true;
        for (size_t i = 0; i < threads; i++) ended &= fibers[i].state == DONE;
        if (!ended && !moved && failure.empty()) release_barrier();
    }
    if (failure.empty() && !guards_hold()) failure = "a write outside a shared array";
}

// A kernel without barriers and warp operations needs no fibers: its threads run one after the other.
inline void run_loop(int order, std::mt19937& random) {
    regions.clear();
    Fiber one{};
    self = &one;
    for (size_t i : sequence(threads, order, random)) {
        unsigned n = (unsigned)i;
        one.index = {n % block.x, n / block.x % block.y, n / block.x / block.y}, one.number = n;
        body(body_arguments);
    }
}

inline const char* launch(const unsigned* shape, size_t bytes, int order, int synchronizes, void** arguments) {
    grid = {shape[0], shape[1], shape[2]}, block = {shape[3], shape[4], shape[5]}, dynamic_bytes = bytes;
    body_arguments = arguments, copies_at_once = order == 1;
    failure.clear();
    std::mt19937 random(order);
    threads = (size_t)block.x * block.y * block.z;
    while (synchronizes && fibers.size() < threads) {  // they are kept for later launches
        fibers.emplace_back();
        fibers.back().stack.reset(new char[STACK]);
    }
    for (size_t i : sequence((size_t)grid.x * grid.y * grid.z, order, random)) {
        unsigned n = (unsigned)i;
        block_index = {n % grid.x, n / grid.x % grid.y, n / grid.x / grid.y};
        synchronizes ? run_block(order, random) : run_loop(order, random);
        if (!failure.empty()) break;
    }
    return failure.empty() ? nullptr : failure.c_str();
}

// One CUDA thread: the kernel with the arguments that `a` points at.
template <class... A, size_t... I> void call(void (*kernel)(A...), void** a, std::index_sequence<I...>) {
    kernel(*(std::remove_cv_t<A>*)a[I]...);
}
template <class... A> void call(void (*kernel)(A...), void** a) { call(kernel, a, std::index_sequence_for<A...>()); }

// "in float32, out int64, int64": what a kernel takes, for the checks on the Python side.
template <class V> std::string type_name() {
    std::string bits = std::to_string(sizeof(V) * 8);
    if (std::is_same_v<V, bool>) return "bool";
    if (std::is_floating_point_v<V>) return "float" + bits;
    if (std::is_integral_v<V>) return (std::is_signed_v<V> ? "int" : "uint") + bits;
    return "bits" + bits;  // half16 and bfloat16
}

template <class A> std::string parameter() {
    typedef std::remove_pointer_t<A> V;
    if (!std::is_pointer_v<A>) return type_name<A>();
    if (std::is_pointer_v<V>) return "table uint64";
    return (std::is_const_v<V> ? "in " : "out ") + type_name<std::remove_cv_t<V>>();
}

template <class... A> const char* signature(void (*)(A...)) {
    static std::string text;
    text.clear();
    ((text += (text.empty() ? "" : ", ") + parameter<std::remove_cv_t<A>>()), ...);
    return text.c_str();
}

}  // namespace emulator

#define EMULATE(text, name)                                                                                     \
    extern "C" const char* emulate_##text##_##name(const unsigned* shape, size_t bytes, int order, int sync, void** a) { \
        emulator::body = [](void** arguments) { emulator::call(name, arguments); };                             \
        return emulator::launch(shape, bytes, order, sync, a);                                                  \
    }                                                                                                           \
    extern "C" const char* signature_##text##_##name() { return emulator::signature(name); }

// -- the vocabulary of CUDA C that the kernels use -------------------------------------------------------------------

#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define threadIdx (emulator::self->index)
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block)
#define gridDim (emulator::grid)
#define __syncthreads() emulator::barrier(__LINE__)
#define __syncwarp() emulator::meet(0xffffffffu, 0, __LINE__)
#define __shfl_sync(mask, value, lane_) emulator::shuffle(mask, value, lane_, 32, __LINE__)
#define __shfl_xor_sync(mask, value, bits) emulator::shuffle(mask, value, emulator::lane() ^ (bits), 32, __LINE__)
#define __shfl_down_sync(mask, value, step) emulator::shuffle(mask, value, emulator::lane() + (step), 32, __LINE__)
#define __shfl_up_sync(mask, value, step) emulator::shuffle(mask, value, emulator::lane() - (step), 32, __LINE__)
#define __ballot_sync(mask, predicate) emulator::ballot(mask, predicate, __LINE__)
#define __any_sync(mask, predicate) (emulator::ballot(mask, predicate, __LINE__) != 0)
#define __all_sync(mask, predicate) (emulator::ballot(mask, predicate, __LINE__) == (mask))

template <class V> V atomicAdd(V* place, std::common_type_t<V> value) { V old = *place; *place += value; return old; }
template <class V> V atomicMax(V* place, std::common_type_t<V> value) { V old = *place; *place = std::max(old, value); return old; }
template <class V> V atomicMin(V* place, std::common_type_t<V> value) { V old = *place; *place = std::min(old, value); return old; }
template <class V> V atomicExch(V* place, std::common_type_t<V> value) { V old = *place; *place = value; return old; }
template <class V> V atomicCAS(V* place, std::common_type_t<V> expected, std::common_type_t<V> value) {
    V old = *place;
    if (old == expected) *place = value;
    return old;
}
inline void __threadfence() {}

template <class To, class From> To same_bits(From from) {
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}
inline unsigned __float_as_uint(float v) { return same_bits<unsigned>(v); }
inline float __uint_as_float(unsigned v) { return same_bits<float>(v); }
inline double __longlong_as_double(long long v) { return same_bits<double>(v); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline float rsqrtf(float v) { return 1 / sqrtf(v); }
inline double rsqrt(double v) { return 1 / sqrt(v); }
template <class V> V __ldg(const V* place) { return *place; }
template <class V> V* aligned(V* place) {
    static std::remove_const_t<V> nowhere;
    if ((uintptr_t)place % alignof(V) == 0) return place;
    emulator::failure = "a pack that does not lie at a multiple of its size";
    return &nowhere;
}
inline float power_of_two(float v) { return exp2f(v); }

// IEEE half precision without hardware: nearest even, with subnormal numbers, infinities and NaN.
inline float half_to_float(unsigned short h) {
    unsigned sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
    float v = std::ldexp((float)fraction, -24);
    return sign ? -v : v;
}
inline unsigned short float_to_half(float v) {
    unsigned sign = __float_as_uint(v) >> 16 & 0x8000u;
    if (v != v) return sign | 0x7fff;
    if (v == 0) return sign;
    float size = std::fabs(v);
    if (size >= 65520.f) return sign | 0x7c00;
    int exponent;
    std::frexp(size, &exponent);
    int shift = std::max(exponent - 11, -24);  // the weight of the last bit
    unsigned whole = (unsigned)std::nearbyint(std::ldexp(size, -shift));  // 11 bits; 2048 carries into the exponent
    return sign | (whole + ((unsigned)(shift + 24) << 10));
}

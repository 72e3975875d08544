// CUDA blocks on one CPU thread: what the words of `emulator.h` do, compiled once and linked to each text.
//
// Every CUDA thread is a fiber. A fiber runs until it meets a barrier or a warp operation; the scheduler resumes the
// runnable ones in the order under test and releases a rendezvous once all whom it names have arrived at the same line.
// In the shuffled order warps go on by a few steps each; in the others each runs as far ahead as barriers let it.
// Asynchronous copies arrive at once in one order and as late as they may in the others.
//
// Every access is looked at: it lies, aligned, in an array of the launch, in a shared array or on the thread's own stack.
// Of shared memory it is known who wrote what, so nobody reads what nobody wrote, and no two threads meet in one place
// without a barrier between them. Ignored on purpose: races in global memory that the results do not show, races of
// neighbors within 4 bytes, weak memory ordering, registers, and speed.

#define EMULATOR_RUNTIME
#include <setjmp.h>
#include <ucontext.h>
#include <algorithm>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

extern "C" __attribute__((visibility("hidden"))) char __ehdr_start, _end;  // constants of a text lie between

namespace emulator {

enum State { READY, BARRIER, WARP, DONE };

struct Copy {  // into shared memory, on its way until the thread waits for it
    void* to;
    const void* from;
    size_t size;
    bool exists;                   // else zeros arrive
    unsigned group;
};

struct Product {  // of a warpgroup
    float (*sum)[4];
    unsigned left[4];
    uintptr_t right;
    bool adds;
    int line;
};

struct Fiber {
    ucontext_t context;            // how it starts; afterward jumps switch, which make no system call
    jmp_buf jump;
    bool started;
    std::unique_ptr<char[]> stack;
    dim3 index;
    unsigned number;               // x + y * width + z * width * height; 32 neighbors are a warp
    State state;
    int line;                      // of the barrier or warp operation it waits at, or met last
    unsigned mask;                 // lanes it waits for
    uint64_t given, taken[32];     // what it lends to a warp operation, and what the other lanes lent
    unsigned met;                  // when it last met its warp
    std::vector<Copy> copies;
    unsigned groups;               // of copies that have ended
    std::vector<Product> products;
    bool begun;                    // so that there may be some
    unsigned shows;                // how often it has shown what it wrote to products
};

struct Span {
    uintptr_t begin, end;
    bool has(uintptr_t at, size_t size) const { return at >= begin && at + size <= end; }
};

struct Shared : Span {  // one shared array of the running block
    const void* array;
};

struct Touch {  // by a thread or, if `thread` is MANY, by several of a warp or, if `warp` is, of the block
    unsigned epoch, thread, warp, met;
};

struct Cell {  // 4 bytes of shared memory
    unsigned block, written;       // which bytes were
    Touch write, read;
    unsigned shows;                // of the last that wrote, until then
};

static const size_t GAP = 256, STACK = 1 << 16, MOST_STATIC = 48 << 10, MOST_SHARED = 227 << 10, ARENA = 1 << 19;
static const unsigned MANY = ~0u;
static std::deque<Fiber> fibers;  // the first `threads` of them are the running block
static size_t threads;
static Fiber* self;
static Span own_stack;
static jmp_buf scheduler;
static std::vector<Span> arrays;
static Span latest;               // of the arrays
static size_t parameters;         // of the kernel, whose arrays come first
static bool reaches;              // what a table names and nobody else
alignas(1024) static char arena[ARENA];
static Cell cells[ARENA / 4];
static std::vector<Shared> shared_arrays;
static size_t used, static_bytes;
static unsigned block_number, epoch, clock_;  // blocks, barriers and warp operations so far
static void (*body)(void**);  // one thread of the kernel that runs
static void** body_arguments;
static bool copies_at_once;
static std::string failure;

static std::string place(const dim3& d) {
    return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
}

// Ends the launch.
[[noreturn]] static void fail(const std::string& words) {
    failure = words + " (thread " + place(thread_index) + " of block " + place(block_index);
    failure += self->line ? ", after line " + std::to_string(self->line) + ")" : ")";
    _longjmp(scheduler, 1);
}

void fail(const char* words, int line) { fail("line " + std::to_string(line) + ": " + words); }

// -- memory ----------------------------------------------------------------------------------------------------------

static std::string distance(uintptr_t at, const Span& s, const std::string& name) {
    const bool before = at < s.begin;
    return std::to_string(before ? s.begin - at : at - s.end) + " bytes " + (before ? "before " : "behind ") + name;
}

// At an address that lies in nothing, unless it may be what a table names.
static void refuse(uintptr_t at, size_t size, bool writes) {
    auto far = [at](const Span& s) { return at < s.begin ? s.begin - at : at - std::min(at, s.end); };
    size_t best = 0;
    for (size_t k = 1; k < arrays.size(); k++)
        if (far(arrays[k]) < far(arrays[best])) best = k;
    if (reaches && far(arrays[best]) > GAP) return;
    const std::string name = best < parameters ? "argument " + std::to_string(best)
                                               : "what a table names, " + std::to_string(best - parameters);
    fail((writes ? "a write outside an array: " : "a read outside an array: ") + std::to_string(size) + " bytes, "
         + distance(at, arrays[best], name));
}

void* shared(const void* array, size_t size, size_t alignment) {
    for (const Shared& s : shared_arrays)
        if (s.array == array) return (void*)s.begin;
    // no more aligned than its type asks for
    const size_t begin = (used + GAP + 2 * alignment - 1) / (2 * alignment) * (2 * alignment) + alignment;
    (array == &dynamic_bytes ? dynamic_bytes : static_bytes) += array == &dynamic_bytes ? 0 : size;
    if (static_bytes > MOST_STATIC) fail("its shared arrays take more than 48 KB");
    if (static_bytes + dynamic_bytes > MOST_SHARED) fail("a block has 227 KB of shared memory");
    used = begin + size;
    shared_arrays.push_back({{(uintptr_t)arena + begin, (uintptr_t)arena + used}, array});
    std::memset(arena + begin, 0xFF, size);
    return arena + begin;
}

// Whether another thread has touched the place, and nothing was in between that both have waited for.
static bool unordered(const Touch& t) {
    return t.epoch == epoch && t.thread != self->number && !(t.warp == self->number / 32 && t.met < self->met);
}

static void touch_shared(uintptr_t at, size_t size, bool writes) {
    bool inside = false;
    for (const Shared& s : shared_arrays) inside |= s.has(at, size);
    if (!inside) fail(writes ? "a write outside a shared array" : "a read outside a shared array");
    const uintptr_t first = at - (uintptr_t)arena, last = first + size;
    for (uintptr_t k = first / 4; k * 4 < last; k++) {
        const unsigned low = k * 4 < first ? first % 4 : 0, high = k * 4 + 4 > last ? last % 4 : 4;
        const unsigned bytes = (1u << high) - (1u << low);
        Cell& cell = cells[k];
        if (cell.block != block_number) cell = {block_number};
        if (!writes && bytes & ~cell.written) fail("a read of shared memory that nobody has written");
        if (size >= 4 && (unordered(cell.write) || (writes && unordered(cell.read))))
            fail("two threads meet in one place of shared memory without a barrier");
        const Touch now{epoch, self->number, self->number / 32, self->met};
        Touch& before = writes ? cell.write : cell.read;
        if (writes || before.epoch != epoch) before = now;
        if (before.thread != now.thread) before.thread = MANY;
        if (before.warp != now.warp) before.warp = MANY;
        before.met = std::max(before.met, now.met);
        if (writes) cell.written |= bytes, cell.shows = self->shows;
    }
}

void access(const void* place, size_t size, bool writes) {
    const uintptr_t at = (uintptr_t)place;
    if (own_stack.has(at, size) || latest.has(at, size)) return;
    if (at - (uintptr_t)arena < ARENA) return touch_shared(at, size, writes);
    for (const Span& s : arrays)
        if (s.has(at, size)) return (void)(latest = s);
    if (!Span{(uintptr_t)&__ehdr_start, (uintptr_t)&_end}.has(at, size)) refuse(at, size, writes);
}

// -- barriers and warps ----------------------------------------------------------------------------------------------

static void wait(State state, int line) {
    self->state = state, self->line = line;
    if (!_setjmp(self->jump)) _longjmp(scheduler, 1);
}

void barrier(int line) { wait(BARRIER, line); }

unsigned lane() { return self->number % 32; }
uint64_t taken(unsigned lane) { return self->taken[lane]; }

void meet(unsigned mask, uint64_t value, int line) {
    if (!(mask >> lane() & 1)) fail("the mask of a warp operation does not name the lane itself", line);
    self->given = value, self->mask = mask;
    wait(WARP, line);
}

// Lets a warp go on when every lane that the waiting ones name has arrived. False: nobody could move.
static bool release_warp(size_t first, size_t last) {
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
        const unsigned mask = waiting.mask;
        uint64_t given[32] = {};
        for (unsigned k = 0; k < 32; k++)
            if (mask >> k & 1) given[k] = fibers[first + k].given;
        clock_++;
        for (unsigned k = 0; k < 32; k++) {
            if (!(mask >> k & 1)) continue;
            Fiber& f = fibers[first + k];
            std::memcpy(f.taken, given, sizeof given), f.met = clock_, f.state = READY;
        }
        return true;
    }
    return false;
}

// All who have not ended wait at one barrier: let them go. A mix of lines, or of barriers and warps, is an error.
static void release_barrier() {
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
    epoch++;
    for (size_t i = 0; i < threads; i++)
        if (fibers[i].state == BARRIER) fibers[i].state = READY;
}

// -- the scheduler ---------------------------------------------------------------------------------------------------

static void enter() {
    body(body_arguments);
    self->state = DONE;
    _longjmp(scheduler, 1);
}

static void resume(Fiber* fiber) {
    self = fiber, thread_index = fiber->index;
    own_stack = {(uintptr_t)fiber->stack.get(), (uintptr_t)fiber->stack.get() + STACK};
    if (_setjmp(scheduler)) return;
    if (fiber->started) _longjmp(fiber->jump, 1);
    fiber->started = true;
    setcontext(&fiber->context);
}

static void start_block() {
    shared_arrays.clear();
    used = static_bytes = 0, block_number++, epoch++;
}

static void place_thread(Fiber& f, unsigned n) {
    f.index = {n % block.x, n / block.x % block.y, n / block.x / block.y};
    f.number = n, f.line = 0, f.met = clock_, f.copies.clear(), f.groups = 0, f.products.clear(), f.begun = false, f.shows = 0;
}

static std::vector<size_t> sequence(size_t count, int order, std::mt19937& random) {
    std::vector<size_t> places(count);
    std::iota(places.begin(), places.end(), 0);
    if (order == 1) std::reverse(places.begin(), places.end());
    if (order > 1) std::shuffle(places.begin(), places.end(), random);
    return places;
}

static void run_block(int order, std::mt19937& random) {
    for (size_t i = 0; i < threads; i++) {
        Fiber& f = fibers[i];
        place_thread(f, i), f.state = READY, f.started = false;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.get(), f.context.uc_stack.ss_size = STACK;
        f.context.uc_link = nullptr;
        makecontext(&f.context, enter, 0);
    }
    bool ended = false;
    while (failure.empty() && !ended) {
        bool moved = false;
        for (size_t warp : sequence((threads + 31) / 32, order, random)) {
            const size_t first = warp * 32, last = std::min(first + 32, threads);
            do {
                for (size_t i : sequence(last - first, order, random))
                    if (failure.empty() && fibers[first + i].state == READY) resume(&fibers[first + i]);
            } while (failure.empty() && release_warp(first, last) && (moved = true) && (order <= 1 || random() % 2));
        }
        ended = true;
        for (size_t i = 0; i < threads; i++) ended &= fibers[i].state == DONE;
        if (!ended && !moved && failure.empty()) release_barrier();
    }
}

// A kernel without barriers and warp operations needs no fibers: its threads run one after the other.
static void run_loop(int order, std::mt19937& random) {
    Fiber one{};
    self = &one, own_stack = {(uintptr_t)&one - 16 * STACK, (uintptr_t)&one};
    const std::vector<size_t> places = sequence(threads, order, random);
    if (_setjmp(scheduler)) return;
    for (size_t i : places) {
        place_thread(one, i), thread_index = one.index;
        body(body_arguments);
    }
}

const char* launch(const Launch& l, unsigned bounds, void (*kernel)(void**), void** arguments) {
    grid = {(unsigned)l.shape[0], (unsigned)l.shape[1], (unsigned)l.shape[2]};
    block = {(unsigned)l.shape[3], (unsigned)l.shape[4], (unsigned)l.shape[5]};
    threads = (size_t)block.x * block.y * block.z, dynamic_bytes = l.bytes;
    if (bounds && threads > bounds) return "a block has more threads than its launch bounds allow";
    if (dynamic_bytes > MOST_SHARED) return "a block has 227 KB of shared memory";
    body = kernel, body_arguments = arguments, copies_at_once = l.order == 1, reaches = l.reaches;
    parameters = l.parameters;
    arrays.assign((const Span*)l.spans, (const Span*)l.spans + l.arrays), latest = {};
    failure.clear();
    while (l.synchronizes && fibers.size() < threads) {  // they are kept for later launches
        fibers.emplace_back();
        fibers.back().stack.reset(new char[STACK]);
    }
    std::mt19937 random(l.seed);
    const size_t all = l.shape[0] * l.shape[1] * l.shape[2], some = std::min<size_t>(l.blocks, all);
    for (size_t i : sequence(some, l.order, random)) {
        const size_t n = i < (some + 1) / 2 ? i : all - some + i;
        block_index = {unsigned(n % grid.x), unsigned(n / grid.x % grid.y), unsigned(n / grid.x / grid.y)};
        start_block();
        l.synchronizes ? run_block(l.order, random) : run_loop(l.order, random);
        if (!failure.empty()) break;
    }
    return failure.empty() ? nullptr : failure.c_str();
}

}  // namespace emulator

// What the compiler calls: before each access, and where an index or an address does not suit its type.
#define REPORTED(size)                                                                                 \
    extern "C" void __asan_load##size##_noabort(const void* p) { emulator::access(p, size, false); }   \
    extern "C" void __asan_store##size##_noabort(const void* p) { emulator::access(p, size, true); }
REPORTED(1) REPORTED(2) REPORTED(4) REPORTED(8) REPORTED(16)
extern "C" void __asan_loadN_noabort(const void* p, size_t size) { emulator::access(p, size, false); }
extern "C" void __asan_storeN_noabort(const void* p, size_t size) { emulator::access(p, size, true); }
extern "C" void __asan_handle_no_return() {}

struct Source {
    const char* file;
    unsigned line, column;
};
extern "C" void __ubsan_handle_type_mismatch_v1(const Source* at, const void*) {
    emulator::fail("an address that is not aligned as its type asks", at->line);
}
extern "C" void __ubsan_handle_out_of_bounds(const Source* at, const void*) {
    emulator::fail("an index outside an array", at->line);
}

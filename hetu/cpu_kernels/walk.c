// A step as a table: calls one after the other, the jobs of each divided among threads where that pays.
//
// Threads sleep between calls and are woken by the first that pays. To wake one takes as long as much of the work, so for
// a moment after each call they watch for the next, at last letting others have the core. The calling thread works too,
// so that a thread which the machine lends to others is waited for only while it holds a part. Which thread does a part
// changes no bit of it. Left out: threads on Windows.

#include <stdint.h>
#include <stdlib.h>
#ifndef _WIN32
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#endif

typedef void Function(const Word* a, long long first, long long last, char* scratch);

typedef struct {
    Function* function;
    const Word* words;
    long long jobs, grain;  // a part of fewer jobs than `grain` is not worth another thread
    const long long* doubt;  // the walk stops where this is not 0
} Row;

typedef int Threads(void);
typedef void SetThreads(int);

// How many threads there are to be, where BLAS has no functions for its own, such as Accelerate.
static int told = 1;

int get_threads(void) { return told; }

void set_threads(int threads) { told = threads; }

enum { NO_MEMORY = -1 };  // what a walk returns then

#ifdef _WIN32

long long walk(const Row* end, long long size, Threads* get, SetThreads* set, const Row* row) {
    char* const scratch = size ? _aligned_malloc(size, 64) : 0;
    if (size && !scratch) return NO_MEMORY;
    for (; row < end; row++) {
        row->function(row->words, 0, row->jobs, scratch);
        if (row->doubt && *row->doubt) break;
    }
    _aligned_free(scratch);
    return end - row;
}

#else

enum { MOST = 64, PARTS_PER_THREAD = 4, WATCH = 2000, YIELDS = 400, LOOKS = 2000 };

static struct {
    pthread_mutex_t use;  // held by the caller whose parts these are
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int threads, asleep;  // beside the caller; under `lock`
    int walks, allowed;  // under way, and the threads that BLAS has where there are none; under `lock`
    bool was_cut;  // whether a fork left the walks of others behind, while BLAS had one thread
    const Row* row;  // what is divided now
    long long parts, size;
    _Atomic long long helpers;  // threads beside the caller that may take parts; more are there if it once were more
    _Atomic long long left;  // parts that nobody has taken
    _Atomic long long running;  // parts that are not done
    _Atomic bool lacking;  // whether a part had no scratch
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER};

// -- scratch of a thread -----------------------------------------------------------------------------------------------

typedef struct {
    char* place;
    long long size;
} Scratch;

static pthread_key_t scratches;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void let_go(void* mine) {
    free(((Scratch*)mine)->place);
    free(mine);
}

static void hold(void) { pthread_mutex_lock(&pool.lock); }  // so that a fork finds counts that agree

static void go_on(void) { pthread_mutex_unlock(&pool.lock); }

static void forget(void) {  // no thread survives a fork but the one that makes it
    pthread_mutex_init(&pool.use, 0);
    pthread_mutex_init(&pool.lock, 0);
    pthread_cond_init(&pool.wake, 0);
    pool.was_cut = pool.was_cut || pool.walks;
    pool.threads = pool.asleep = pool.walks = 0;
    atomic_store(&pool.left, 0);
}

static void begin(void) {
    pthread_key_create(&scratches, let_go);
    pthread_atfork(hold, go_on, forget);
}

static char* scratch_of(long long size) {
    Scratch* mine = pthread_getspecific(scratches);
    if (!mine && (mine = calloc(1, sizeof *mine))) pthread_setspecific(scratches, mine);
    if (!mine) return 0;
    if (mine->size < size) {
        free(mine->place);
        mine->place = aligned_alloc(64, (size + 63) / 64 * 64);
        mine->size = mine->place ? size : 0;
    }
    return mine->place;
}

// -- parts -------------------------------------------------------------------------------------------------------------

static inline void rest(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Take a part of the division under way and do it; false if none is left.
static bool take(void) {
    long long left = atomic_load(&pool.left);
    do {
        if (!left) return false;
    } while (!atomic_compare_exchange_weak(&pool.left, &left, left - 1));
    const Row* const row = pool.row;  // stays as it is until all parts are done, this one too
    const long long first = row->jobs * (left - 1) / pool.parts, last = row->jobs * left / pool.parts;
    char* const scratch = scratch_of(pool.size);
    if (pool.size && !scratch) atomic_store(&pool.lacking, true);
    else row->function(row->words, first, last, scratch);
    atomic_fetch_sub(&pool.running, 1);
    return true;
}

static inline bool wanted(long long number) { return atomic_load(&pool.left) && number < atomic_load(&pool.helpers); }

static void* serve(void* number) {
    const long long mine = (intptr_t)number;
    while (true) {
        for (int k = 0; k < WATCH + YIELDS && !wanted(mine); k++)
            if (k < WATCH) rest();
            else sched_yield();
        if (wanted(mine) && take()) continue;
        pthread_mutex_lock(&pool.lock);
        pool.asleep++;
        while (!wanted(mine)) pthread_cond_wait(&pool.wake, &pool.lock);
        pool.asleep--;
        pthread_mutex_unlock(&pool.lock);
    }
    return 0;
}

// Have `threads` threads beside the caller; how many of them there are.
static int have(int threads) {
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    for (pthread_t made; pool.threads < threads; pool.threads++)
        if (pthread_create(&made, &detached, serve, (void*)(intptr_t)pool.threads)) break;
    pthread_attr_destroy(&detached);
    atomic_store(&pool.helpers, threads);
    return pool.threads;
}

// As many for each worker: with one more, all but one of them would wait for it.
static inline long long parts_of(long long worth, long long workers) {
    const long long parts = worth < workers * PARTS_PER_THREAD ? worth : workers * PARTS_PER_THREAD;
    return parts < workers ? parts : parts - parts % workers;
}

static void divide(const Row* row, long long parts, long long size) {
    pool.row = row, pool.parts = parts, pool.size = size;
    atomic_store(&pool.running, parts);
    atomic_store(&pool.left, parts);
    pthread_mutex_lock(&pool.lock);
    if (pool.asleep) pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    while (take()) {
    }
    for (int k = 0; atomic_load(&pool.running); k++)
        if (k < LOOKS) rest();
        else sched_yield();
}

// While anybody walks, BLAS itself has one thread: its own would go on spinning beside these, and divide products in
// another way. How many it has else.
static int enter(Threads* get, SetThreads* set) {
    pthread_mutex_lock(&pool.lock);
    if (!pool.walks++) {
        if (!pool.was_cut || get() > 1) pool.allowed = get();
        pool.was_cut = false;
        if (pool.allowed > 1) set(1);
    }
    const int allowed = pool.allowed;
    pthread_mutex_unlock(&pool.lock);
    return allowed;
}

static void leave(SetThreads* set) {
    pthread_mutex_lock(&pool.lock);
    if (!--pool.walks && pool.allowed > 1) set(pool.allowed);
    pthread_mutex_unlock(&pool.lock);
}

// Make the calls from `row` on, with as many threads as BLAS may use, each of which has `size` bytes of scratch. The
// result is 0, or the number of rows left where one has its doubts, itself among them, or NO_MEMORY.
long long walk(const Row* end, long long size, Threads* get, SetThreads* set, const Row* row) {
    pthread_once(&once, begin);
    const int threads = get ? enter(get, set) : 1;
    const bool several = threads > 1 && pthread_mutex_trylock(&pool.use) == 0;
    const long long workers = threads < MOST ? threads : MOST;
    char* const scratch = size ? scratch_of(size) : 0;
    bool lacking = size && !scratch;
    for (; row < end && !lacking; row++) {
        const long long worth = several ? row->jobs / row->grain : 1;
        if (worth > 1 && have(threads - 1)) {
            divide(row, parts_of(worth, workers), size);
            lacking = atomic_exchange(&pool.lacking, false);
        } else row->function(row->words, 0, row->jobs, scratch);
        if (row->doubt && *row->doubt) break;
    }
    if (several) pthread_mutex_unlock(&pool.use);
    if (get) leave(set);
    return lacking ? NO_MEMORY : end - row;
}

#endif

// Products of a sparse matrix, a list of entries (row, column, value), and a dense one. Entries are first put in order,
// row by row, those of a row as they came; one whose row or column is -1 is left out, and sampled as 0.

#pragma STDC FP_CONTRACT ON

#include <string.h>

#include "vectors.h"

enum { SUMS = 128 / BYTES };  // vectors of a sum: its lanes are the same for all of them
enum { AHEAD = 8 };  // entries: a dense row is asked for so much earlier, as it may lie anywhere in a large memory

// -- what is computed -------------------------------------------------------------------------------------------------

void order_entries_plainly(const Word* a, long long first, long long last, char* scratch) {
    long long *const starts = a[0].p, *const places = a[1].p, *const sorted = a[2].p, place = 0;
    const long long *const rows = a[3].p, *const columns = a[4].p, count = a[5].n, size = a[6].n;
    for (long long i = 0; i < size; i++) {
        starts[i] = place;
        for (long long k = 0; k < count; k++)
            if (rows[k] == i) places[place] = k, sorted[place++] = columns[k];
    }
    starts[size] = starts[size + 1] = place;
}

void sparse_matmul_plainly(const Word* a, long long first, long long last, char* scratch) {
    const long long *const starts = a[1].p, *const places = a[2].p, *const columns = a[3].p, width = a[6].n;
    T *const y = a[0].p, *const values = a[4].p, *const x = a[5].p;
    for (long long i = first; i < last; i++)
        for (long long j = 0; j < width; j++) {
            y[i * width + j] = 0;
            for (long long k = starts[i]; k < starts[i + 1]; k++)
                if (columns[k] >= 0) y[i * width + j] += values[places[k]] * x[columns[k] * width + j];
        }
}

void sampled_matmul_plainly(const Word* a, long long first, long long last, char* scratch) {
    const long long *const rows = a[1].p, *const columns = a[2].p, width = a[5].n;
    T *const y = a[0].p, *const left = a[3].p, *const right = a[4].p;
    for (long long k = first; k < last; k++) {
        y[k] = 0;
        for (long long j = 0; j < width && rows[k] >= 0 && columns[k] >= 0; j++)
            y[k] += left[rows[k] * width + j] * right[columns[k] * width + j];
    }
}

// -- the fast forms ---------------------------------------------------------------------------------------------------

// Where each row begins, and of each entry in order its place in the list and its column. One job.
void order_entries(const Word* a, long long first, long long last, char* scratch) {
    long long *const starts = a[0].p, *const places = a[1].p, *const sorted = a[2].p;
    const long long *const rows = a[3].p, *const columns = a[4].p, count = a[5].n, size = a[6].n;
    memset(starts, 0, (size + 2) * sizeof *starts);
    for (long long k = 0; k < count; k++) starts[rows[k] + 2] += rows[k] >= 0;
    for (long long i = 2; i < size + 2; i++) starts[i] += starts[i - 1];
    for (long long k = 0; k < count; k++) {
        if (rows[k] < 0) continue;
        const long long place = starts[rows[k] + 1]++;  // it runs from the beginning of the row to its end
        places[place] = k;
        sorted[place] = columns[k];
    }
}

// The entries of one row, the dense rows that they meet, and how many entries there are up to the end of the work.
typedef struct {
    const long long *places, *columns;
    const T *values, *x;
    long long count, left, width;
} Entries;

static inline T value_of(const Entries* e, long long k) { return e->values[e->places[k]]; }
static inline const T* met(const Entries* e, long long k, long long j) { return e->x + e->columns[k] * e->width + j; }
#define FOR_EACH_ENTRY for (long long k = 0; k < e->count; k++) if (e->columns[k] >= 0)

// `count` vectors of columns from j on.
static inline __attribute__((always_inline)) void columns(const Entries* e, T* y, long long j, const int count) {
    Vector sums[MANY] = {0};
    const long long over = j + count * LANES - e->width, back = over > 0 ? over : 0;
    FOR_EACH_ENTRY {
        const T value = value_of(e, k), *const x = met(e, k, j);
        for (int v = 0; v < count && k + AHEAD < e->left; v += 64 / BYTES)
            __builtin_prefetch(met(e, k + AHEAD, j) + v * LANES);
        for (int v = 0; v < count - 1; v++) sums[v] += value * *(const Vector*)(x + v * LANES);
        sums[count - 1] += value * *(const Vector*)(x + (count - 1) * LANES - back);
    }
    for (int v = 0; v < count; v++) *(Vector*)(y + j + v * LANES - (v == count - 1 ? back : 0)) = sums[v];
}

static inline void few_columns(const Entries* e, T* y) {
    for (long long j = 0; j < e->width; j++) y[j] = 0;
    FOR_EACH_ENTRY {
        const T value = value_of(e, k), *const x = met(e, k, 0);
        EACH for (long long j = 0; j < e->width; j++) y[j] += value * x[j];
    }
}

// Jobs are rows, the entries of which are added in their order.
void sparse_matmul(const Word* a, long long first, long long last, char* scratch) {
    const long long* const starts = a[1].p;
    Entries e = {.values = a[4].p, .x = a[5].p, .width = a[6].n};
    for (long long i = first; i < last; i++) {
        T* const y = (T*)a[0].p + i * e.width;
        e.places = (long long*)a[2].p + starts[i];
        e.columns = (long long*)a[3].p + starts[i];
        e.count = starts[i + 1] - starts[i];
        e.left = starts[last] - starts[i];
        if (e.width < LANES) few_columns(&e, y);
#define COLUMNS(j, count) columns(&e, y, j, count)
        else FOR_VECTORS_OF(e.width, COLUMNS)
    }
}

static inline T sum(const Vector* sums) {
    T lanes[SUMS * LANES];
    memcpy(lanes, sums, sizeof lanes);
    for (int half = SUMS * LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

// Jobs are entries. Number j of a sum goes to lane j mod SUMS LANES.
void sampled_matmul(const Word* a, long long first, long long last, char* scratch) {
    const long long *const rows = a[1].p, *const columns = a[2].p, width = a[5].n;
    for (long long k = first; k < last; k++) {
        if (rows[k] < 0 || columns[k] < 0) {
            ((T*)a[0].p)[k] = 0;
            continue;
        }
        const T* const left = (T*)a[3].p + rows[k] * width;
        const T* const right = (T*)a[4].p + columns[k] * width;
        Vector sums[SUMS] = {0};
        long long j = 0;
        for (; j + SUMS * LANES <= width; j += SUMS * LANES)
            for (int v = 0; v < SUMS; v++)
                sums[v] += *(const Vector*)(left + j + v * LANES) * *(const Vector*)(right + j + v * LANES);
        T last_few = 0;
        for (; j < width; j++) last_few += left[j] * right[j];
        ((T*)a[0].p)[k] = sum(sums) + last_few;
    }
}

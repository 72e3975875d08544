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
                if (columns[k] >= 0)
                    y[i * width + j] += (values ? values[places ? places[k] : k] : 1) * x[columns[k] * width + j];
        }
}

void spread_entries_plainly(const Word* a, long long first, long long last, char* scratch) {
    const long long *const starts = a[1].p, *const columns = a[3].p;
    const long long width = a[6].n, size = a[7].n, count = a[8].n, step = a[9].n;
    T *const y = a[0].p, *const values = a[4].p, *const x = a[5].p;
    for (long long n = first * size * width; n < last * size * width; n++) y[n] = 0;
    for (long long i = first * step; i < last * step && i < count; i++)
        for (long long k = starts[i]; k < starts[i + 1]; k++)
            for (long long j = 0; j < width && columns[k] >= 0 && columns[k] < size; j++)
                y[(i / step * size + columns[k]) * width + j] += (values ? values[k] : 1) * x[i * width + j];
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
// Entries without places lie in order, those without values have 1.
typedef struct {
    const long long *places, *columns;
    const T *values, *x;
    long long count, left, width;
} Entries;

static inline T value_of(const Entries* e, long long k) {
    return e->values ? e->values[e->places ? e->places[k] : k] : 1;
}
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

static inline T one_column(const Entries* e) {
    T sum = 0;
    FOR_EACH_ENTRY sum += value_of(e, k) * e->x[e->columns[k]];
    return sum;
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
    const T* const values = a[4].p;
    Entries e = {.values = values, .x = a[5].p, .width = a[6].n};
    for (long long i = first; i < last; i++) {
        T* const y = (T*)a[0].p + i * e.width;
        if (a[2].p) e.places = (long long*)a[2].p + starts[i];
        else if (values) e.values = values + starts[i];
        e.columns = (long long*)a[3].p + starts[i];
        e.count = starts[i + 1] - starts[i];
        e.left = starts[last] - starts[i];
        if (e.width == 1) *y = one_column(&e);
        else if (e.width < LANES) few_columns(&e, y);
#define COLUMNS(j, count) columns(&e, y, j, count)
        else FOR_VECTORS_OF(e.width, COLUMNS)
    }
}

// Some rows of a matrix in order, times as many of x, are added in columns of y, up to `count` vectors from j on.
static inline __attribute__((always_inline)) void spread_columns(
    const Word* a, T* y, long long i, long long end, long long j, const int count) {
    const long long *const starts = a[1].p, *const ids = a[3].p, width = a[6].n, size = a[7].n;
    const T *const values = a[4].p, *x = (T*)a[5].p + i * width + j;
    const int all = j + count * LANES <= width, full = count - !all;
    for (y += j; i < end; i++, x += width) {
        Vector own[MANY];
        for (int v = 0; v < count; v++)
            if (v < full) own[v] = *(const Vector*)(x + v * LANES);
        for (long long k = starts[i]; k < starts[i + 1]; k++) {
            if ((unsigned long long)ids[k] >= (unsigned long long)size) continue;
            const T value = values ? values[k] : 1;
            T* const to = y + ids[k] * width;
            for (int v = 0; v < count && k + AHEAD < starts[end]; v += 64 / BYTES)
                __builtin_prefetch(y + ids[k + AHEAD] * width + v * LANES, 1);
            for (int v = 0; v < count - 1; v++) *(Vector*)(to + v * LANES) += value * own[v];
            if (all) *(Vector*)(to + (count - 1) * LANES) += value * own[count - 1];
            else
                for (long long l = (count - 1) * LANES; l < width - j; l++) to[l] += value * x[l];
        }
    }
}

static inline void spread_one_column(const Word* a, T* y, long long i, long long end) {
    const long long *const starts = a[1].p, *const ids = a[3].p, size = a[7].n;
    const T *const values = a[4].p, *const x = a[5].p;
    for (; i < end; i++)
        for (long long k = starts[i]; k < starts[i + 1]; k++)
            if ((unsigned long long)ids[k] < (unsigned long long)size) y[ids[k]] += values ? values[k] * x[i] : x[i];
}

// The product with the transpose of a matrix in order. A job adds some of its rows in a y of its own.
void spread_entries(const Word* a, long long first, long long last, char* scratch) {
    const long long width = a[6].n, size = a[7].n, count = a[8].n, step = a[9].n;
    for (; first < last; first++) {
        T* const y = (T*)a[0].p + first * size * width;
        const long long i = first * step, end = i + step < count ? i + step : count;
        memset(y, 0, size * width * sizeof(T));
#define SPREAD(j, count) spread_columns(a, y, i, end, j, count)
        if (width == 1) spread_one_column(a, y, i, end);
        else FOR_VECTORS_OF(width, SPREAD)
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

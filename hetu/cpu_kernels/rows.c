// Rows of tables: taken by their ids, added where their ids say, and single elements along an axis likewise.
//
// An array is (outer, size, inner). Ids count along its middle axis from `low`, as a rank may have only a part of it:
// an id outside belongs to another rank. Zeros are taken there, and nothing is added.
//
// What is added to one place is added by one job, in the order of the ids, so that sums have one order.

#include <stdlib.h>
#include <string.h>

// -- what is computed -------------------------------------------------------------------------------------------------

void take_rows_plainly(const Word* a, long long first, long long last, char* scratch) {
    T *const y = a[0].p, *const x = a[1].p;
    const long long *const ids = a[2].p, count = a[3].n, size = a[4].n, inner = a[5].n, low = a[6].n;
    for (long long job = first; job < last; job++)  // (o, k)
        for (long long i = 0; i < inner; i++) {
            const long long id = ids[job % count] - low;
            y[job * inner + i] = id < 0 || id >= size ? 0 : x[(job / count * size + id) * inner + i];
        }
}

void take_along_plainly(const Word* a, long long first, long long last, char* scratch) {
    T *const y = a[0].p, *const x = a[1].p;
    const long long *const ids = a[2].p, count = a[3].n, size = a[4].n, inner = a[5].n, low = a[6].n;
    for (long long job = first; job < last; job++)  // (o, k)
        for (long long i = 0; i < inner; i++) {
            const long long id = ids[job * inner + i] - low;
            y[job * inner + i] = id < 0 || id >= size ? 0 : x[(job / count * size + id) * inner + i];
        }
}

void add_along_plainly(const Word* a, long long first, long long last, char* scratch) {
    T *const y = a[0].p, *const values = a[1].p;
    const long long *const ids = a[2].p, count = a[3].n, size = a[4].n, inner = a[5].n, low = a[6].n;
    for (long long job = first; job < last; job++) {  // (o, i)
        const long long o = job / inner, i = job % inner;
        for (long long k = 0; k < size; k++) y[(o * size + k) * inner + i] = 0;
        for (long long k = 0; k < count; k++) {
            const long long id = ids[(o * count + k) * inner + i] - low;
            if (id >= 0 && id < size) y[(o * size + id) * inner + i] += values[(o * count + k) * inner + i];
        }
    }
}

// The rows to add are (outer, count, inner) and may lie apart; with a rate, they are slopes to descend.
void add_rows_plainly(const Word* a, long long first, long long last, char* scratch) {
    T *const y = a[0].p, *const rows = a[2].p, *const given = a[9].p;
    const long long *const ids = a[1].p, outer = a[3].n, count = a[4].n;
    const long long far = a[5].n, near = a[6].n, inner = a[7].n, low = a[8].n;
    for (long long id = first; id < last; id++)
        for (long long i = 0; i < inner; i++) {
            if (a[10].n) y[id * inner + i] = 0;
            for (long long k = 0; k < outer * count; k++)
                if (ids[k] - low == id)
                    y[id * inner + i] += (given ? -*given : 1) * rows[k / count * far + k % count * near + i];
        }
}

void one_hot_plainly(const Word* a, long long first, long long last, char* scratch) {
    const long long *const ids = a[1].p, depth = a[2].n;
    for (long long k = first; k < last; k++)
        for (long long i = 0; i < depth; i++) ((T*)a[0].p)[k * depth + i] = ids[k] == i;
}

// The distinct ids of the size rows from `low` on, in the order in which they come, and the place of each id among them.
void touched_rows_plainly(const Word* a, long long first, long long last, char* scratch) {
    long long *const places = a[0].p, *const slots = a[1].p, *const ids = a[2].p, found = 0;
    const long long count = a[4].n, size = a[5].n, low = a[6].n, room = a[7].n;
    for (long long k = 0; k < count; k++) {
        const long long id = ids[k] - low;
        slots[k] = room;
        if (id < 0 || id >= size) continue;
        for (slots[k] = 0; slots[k] < found && places[slots[k]] != id;) slots[k]++;
        if (slots[k] == found) places[found++] = id;
    }
    while (found < room) places[found++] = size;
}

// The number of the bag that each of count entries is in; bags begin at rising starts.
void bag_ids_plainly(const Word* a, long long first, long long last, char* scratch) {
    long long *const ids = a[0].p, *const starts = a[1].p;
    const long long bags = a[2].n, count = a[3].n;
    for (long long k = 0; k < count; k++)
        for (long long i = 0; i < bags && starts[i] <= k; i++) ids[k] = i;
}

// -- the fast forms ---------------------------------------------------------------------------------------------------

// Jobs are the rows of y.
void take_rows(const Word* a, long long first, long long last, char* scratch) {
    const T* const x = a[1].p;
    const long long* const ids = a[2].p;
    const long long count = a[3].n, size = a[4].n, inner = a[5].n, low = a[6].n;
    long long outer = first / count, k = first % count;
    for (T* y = (T*)a[0].p + first * inner; first < last; first++, y += inner) {
        const long long id = ids[k] - low;
        if (id < 0 || id >= size) memset(y, 0, inner * sizeof(T));
        else if (inner == 1) *y = x[outer * size + id];
        else memcpy(y, x + (outer * size + id) * inner, inner * sizeof(T));
        if (++k == count) k = 0, outer++;
    }
}

// Jobs are the rows of y: each looks at all ids, and adds those rows that are its own. Looking is cheap beside adding.
static void add_times(const Word* a, T* y, T factor, long long first, long long last) {
    const T* const rows = a[2].p;
    const long long* ids = a[1].p;
    const long long outer = a[3].n, count = a[4].n, far = a[5].n, near = a[6].n, inner = a[7].n, low = a[8].n;
    for (long long o = 0; o < outer; o++)
        for (long long k = 0; k < count; k++) {
            const long long id = *ids++ - low;
            if (id < first || id >= last) continue;
            T* const to = y + id * inner;
            const T* const from = rows + o * far + k * near;
            EACH for (long long i = 0; i < inner; i++) to[i] += factor * from[i];
        }
}

// The rows of an id are summed before a rate beyond 1 can make some of them infinite, or two of them NaN, as happens where
// there is no memory for sums.
static void add_sums(const Word* a, T* y, T factor, long long first, long long last) {
    const long long *const ids = a[1].p, inner = a[7].n, low = a[8].n, size = (last - first) * inner;
    T* const sums = calloc(size * sizeof(T) + last - first, 1);  // pages that nobody touches take no memory
    char* const added = (char*)(sums + size);
    if (!sums) return add_times(a, y, factor, first, last);
    add_times(a, sums - first * inner, 1, first, last);
    for (long long k = 0; k < a[3].n * a[4].n; k++) {
        const long long id = ids[k] - low;
        if (id < first || id >= last || added[id - first]) continue;
        added[id - first] = 1;
        for (long long i = 0; i < inner; i++) y[id * inner + i] += factor * sums[(id - first) * inner + i];
    }
    free(sums);
}

void add_rows(const Word* a, long long first, long long last, char* scratch) {
    T* const y = a[0].p;
    const T *const rate = a[9].p, factor = rate ? -*rate : 1;
    if (a[10].n) memset(y + first * a[7].n, 0, (last - first) * a[7].n * sizeof(T));
    (factor >= -1 && factor <= 1 ? add_times : add_sums)(a, y, factor, first, last);  // by NaN, too, sums
}

// One job. The seat of a row is its place among those found, and is made only for rows that are touched.
void touched_rows(const Word* a, long long first, long long last, char* scratch) {
    long long *const places = a[0].p, *const slots = a[1].p, *const ids = a[2].p, found = 0;
    int* const seats = a[3].p;
    const long long count = a[4].n, size = a[5].n, low = a[6].n, room = a[7].n;
    for (long long k = 0; k < count; k++)
        if (ids[k] >= low && ids[k] < low + size) seats[ids[k] - low] = -1;
    for (long long k = 0; k < count; k++) {
        const long long id = ids[k] - low;
        slots[k] = room;
        if (id < 0 || id >= size) continue;
        if (seats[id] < 0) seats[id] = found, places[found++] = id;
        slots[k] = seats[id];
    }
    while (found < room) places[found++] = size;
}

// Jobs are the rows (o, k) of y.
void take_along(const Word* a, long long first, long long last, char* scratch) {
    T* const y = a[0].p;
    const T* const x = a[1].p;
    const long long* const ids = a[2].p;
    const long long count = a[3].n, size = a[4].n, inner = a[5].n, low = a[6].n;
    for (long long job = first; job < last; job++)
        for (long long i = 0; i < inner; i++) {
            const long long id = ids[job * inner + i] - low;
            const bool outside = id < 0 || id >= size;
            y[job * inner + i] = outside ? 0 : x[(job / count * size + id) * inner + i];
        }
}

// Jobs are the columns (o, i) of y.
void add_along(const Word* a, long long first, long long last, char* scratch) {
    const long long count = a[3].n, size = a[4].n, inner = a[5].n, low = a[6].n;
    for (long long o = first / inner; o * inner < last; o++) {
        T* const y = (T*)a[0].p + o * size * inner;
        const T* const values = (T*)a[1].p + o * count * inner;
        const long long* const ids = (long long*)a[2].p + o * count * inner;
        const long long begin = first > o * inner ? first - o * inner : 0;
        const long long end = last - o * inner < inner ? last - o * inner : inner;
        if (end - begin == inner) memset(y, 0, size * inner * sizeof(T));
        else
            for (long long k = 0; k < size; k++) memset(y + k * inner + begin, 0, (end - begin) * sizeof(T));
        for (long long k = 0; k < count; k++)
            for (long long i = begin; i < end; i++) {
                const long long id = ids[k * inner + i] - low;
                if (id >= 0 && id < size) y[id * inner + i] += values[k * inner + i];
            }
    }
}

// Jobs are the rows of y.
void one_hot(const Word* a, long long first, long long last, char* scratch) {
    const long long* const ids = a[1].p;
    const long long depth = a[2].n;
    for (long long k = first; k < last; k++) {
        T* const y = (T*)a[0].p + k * depth;
        memset(y, 0, depth * sizeof(T));
        if (ids[k] >= 0 && ids[k] < depth) y[ids[k]] = 1;
    }
}

// Jobs are bags.
void bag_ids(const Word* a, long long first, long long last, char* scratch) {
    const long long* const starts = a[1].p;
    for (long long i = first; i < last; i++)
        for (long long k = starts[i], end = i + 1 < a[2].n ? starts[i + 1] : a[3].n; k < end; k++)
            ((long long*)a[0].p)[k] = i;
}

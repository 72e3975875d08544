// Products of matrices by the register tile, a bias added for nothing: out = a b + bias.

#include "panels.h"

enum { HIGH = 192, DEEP = 2048 / sizeof(T), PITCH = DEEP + 1 };  // rows of a job; depth that is packed at once, and apart

// What `product` computes; rows are apart.
void product_plainly(const Word* a, long long first, long long last, char* scratch) {
    T* const out = a[0].p;
    const T *const x = a[1].p, *const y = a[2].p, *const bias = a[3].p;
    const long long n = a[5].n, k = a[6].n, pitch = a[7].n, x_row = a[8].n, x_column = a[9].n;
    const long long y_row = a[10].n, y_column = a[11].n;
    for (long long i = first; i < last; i++)
        for (long long j = 0; j < n; j++) {
            T sum = bias ? bias[j] : 0;
            for (long long l = 0; l < k; l++) sum += x[i * x_row + l * x_column] * y[l * y_row + j * y_column];
            out[i * pitch + j] = sum;
        }
}

// Columns of y as panels, one after the other. Where a column lies in one piece, some of its numbers are moved at once,
// so that a line of the cache is read once.
static void pack(T* panels, const T* y, long long k, long long columns, long long row, long long column) {
    for (long long j = 0; j < STRIP && j < columns; j += WIDE, panels += k * WIDE) {
        const T* const from = y + j * column;
        if (row != 1 || columns - j < WIDE)
            for (long long l = 0; l < k; l++) copy_panel(panels + l * WIDE, from + l * row, columns - j, column);
        else
            for (long long l = 0; l < k; l += LANES)
                for (long long c = 0; c < WIDE; c++)
                    for (long long i = l; i < less(k, l + LANES); i++) panels[i * WIDE + c] = from[c * column + i];
    }
}

// Rows of the left side, at some depth: in place up to `there`, then packed, as tiles read them.
typedef struct {
    const T *x, *packed;
    long long count, there, row, column, depth;
} Rows;

// What follows `there`: rows side by side, or, where a matrix lies turned, the numbers of a depth of each tile. There a
// vector is moved at once, and what it has too much is overwritten by the next.
static void pack_rows(T* to, const Rows* rows) {
    for (long long r = rows->there; r < rows->count && rows->column == 1; r++, to += PITCH)
        copy(to, rows->x + r * rows->row, rows->depth, 1);
    for (long long l = 0; l < rows->depth && rows->column != 1; l += 2)
        for (long long r = 0; r < rows->count; r += MOST)
            for (long long i = l; i < less(rows->depth, l + 2); i++)
                for (long long c = 0; c < MOST; c += LANES) {
                    const T* const from = rows->x + i * rows->column + r + c;
                    T* const place = to + r * PITCH + i * MOST + c;
                    if (r + c + LANES <= rows->count) *(Vector*)place = *(const Vector*)from;
                    else copy(place, from, rows->count - r - c, 1);
                }
}

// Some columns of out = from + rows times a panel, where out itself goes on if there is no `from`. What does not fill
// its tile is made in `sums`.
static void multiply(T* out, long long pitch, long long columns, const T* from, const Rows* rows, const T* panel,
                     T* sums) {
    const bool turned = rows->column != 1;
    for (long long r = 0; r < rows->count; r += MOST, out += MOST * pitch) {
        const long long count = less(MOST, rows->count - r);
        const bool there = r < rows->there, whole = columns == WIDE && (turned ? count == MOST : there);
        T* const made = whole ? out : sums;
        for (long long i = 0; i < count; i++)  // is written when the depth has gone by
            for (int lane = 0; lane < WIDE; lane += LANES) __builtin_prefetch(out + i * pitch + lane, 1);
        for (long long i = 0; i < count && !whole && !from; i++) copy(sums + i * WIDE, out + i * pitch, columns, 1);
        tile(
            turned, count, rows->depth, there ? rows->x + r * rows->row : rows->packed + (r - rows->there) * PITCH,
            there ? rows->row : turned ? MOST : PITCH, panel, from ? from : made, from ? 0 : whole ? pitch : WIDE, made,
            whole ? pitch : WIDE);
        for (long long i = 0; i < count && !whole; i++) copy(out + i * pitch, sums + i * WIDE, columns, 1);
    }
}

// One of the strides of x is 1. Jobs are strips of columns, those of a block of rows one after the other, so that rows
// stay in the cache; a strip is packed when it is first met, and sums go on from one part of the depth to the next. Rows
// are packed where they are turned, and the last ones, as a tile reads more of them than there are.
void product(const Word* a, long long first, long long last, char* scratch) {
    T* const out = a[0].p;
    const T *const x = a[1].p, *const y = a[2].p, *const bias = a[3].p;
    const long long m = a[4].n, n = a[5].n, k = a[6].n, pitch = a[7].n, x_row = a[8].n, x_column = a[9].n;
    const long long y_row = a[10].n, y_column = a[11].n, strips = (n + STRIP - 1) / STRIP;
    T *const all_panels = (T*)scratch, *const packed_rows = all_panels + strips * STRIP * k;
    T *const begins = packed_rows + (HIGH + MOST) * PITCH, *const sums = begins + WIDE;
    bool* const packed = (bool*)(sums + MOST * WIDE);
    for (long long strip = 0; strip < strips; strip++) packed[strip] = false;
    for (long long job = first, next; job < last; job = next) {
        const long long begin = job / strips * HIGH, count = less(HIGH, m - begin), strip = job % strips;
        const long long left = count % MOST, there = x_column != 1 ? 0 : left % SOME ? count - left : count;
        next = less(last, job - strip + strips);
        for (long long l = 0; l < k; l += DEEP) {
            const long long depth = less(DEEP, k - l);
            const Rows rows = {x + begin * x_row + l * x_column, packed_rows, count, there, x_row, x_column, depth};
            pack_rows(packed_rows, &rows);
            for (long long j = strip * STRIP; j < less(n, (strip + next - job) * STRIP); j += WIDE) {
                const long long at = j % STRIP;
                T *const panels = all_panels + (j - at) * k + l * STRIP, *const made = out + begin * pitch + j;
                if (!packed[j / STRIP] && !at) pack(panels, y + j * y_column + l * y_row, depth, n - j, y_row, y_column);
                copy_panel(begins, bias ? bias + j : zeros, n - j, 1);
                multiply(made, pitch, less(WIDE, n - j), l ? 0 : begins, &rows, panels + at * depth, sums);
            }
        }
        for (long long s = strip; s < strip + next - job; s++) packed[s] = true;
    }
}

// Products of matrices by the register tile, a bias added for nothing: out = a b + bias.

#include "panels.h"

enum { HIGH = 192 };  // rows of a job, at most

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

// One of the strides of x is 1. Jobs are strips of columns, those of a block of rows one after the other, so that rows
// stay in the cache; a strip is packed when it is first met. What does not fill its tile is made in `sums`, and the
// last rows are read in `rest`, as a tile reads more of them than there are.
void product(const Word* a, long long first, long long last, char* scratch) {
    T* const out = a[0].p;
    const T *const x = a[1].p, *const y = a[2].p, *const bias = a[3].p;
    const long long m = a[4].n, n = a[5].n, k = a[6].n, pitch = a[7].n, x_row = a[8].n, x_column = a[9].n;
    const long long y_row = a[10].n, y_column = a[11].n, high = a[12].n, strips = (n + STRIP - 1) / STRIP;
    const bool turned = x_column != 1;
    T *const all_panels = (T*)scratch, *const rest = all_panels + strips * STRIP * k, *const begins = rest + MOST * k;
    T* const sums = begins + WIDE;
    bool* const packed = (bool*)(sums + MOST * WIDE);
    for (long long strip = 0; strip < strips; strip++) packed[strip] = false;
    for (long long job = first; job < last; job++) {
        const long long strip = job % strips, begin = job / strips * high, end = less(m, begin + high);
        T* const panels = all_panels + strip * STRIP * k;
        if (!packed[strip]) pack(panels, y + strip * STRIP * y_column, k, n - strip * STRIP, y_row, y_column);
        packed[strip] = true;
        const long long left = (end - begin) % MOST, cut = left % SOME ? end - left : end;
        for (long long r = cut; r < end; r++) copy(rest + (r - cut) * k, x + r * x_row, k, x_column);
        for (long long j = strip * STRIP; j < less(n, (strip + 1) * STRIP); j += WIDE) {
            const long long columns = less(WIDE, n - j);
            const T* const panel = panels + j % STRIP * k;
            copy_panel(begins, bias ? bias + j : zeros, columns, 1);
            for (long long r = begin; r < end; r += MOST) {
                const long long rows = less(MOST, end - r);
                T *const to = out + r * pitch + j, *const made = r < cut && columns == WIDE ? to : sums;
                const bool there = r < cut;
                tile(
                    turned && there, rows, k, there ? x + r * x_row : rest, there ? turned ? x_column : x_row : k,
                    panel, begins, 0, made, made == to ? pitch : WIDE);
                for (long long i = 0; i < rows && made != to; i++) copy(to + i * pitch, sums + i * WIDE, columns, 1);
            }
        }
    }
}

// Products of matrices by the register tile, a bias added for nothing: out = a b + bias.

#include "panels.h"

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

// The last rows of x, of which there are fewer than a tile reads, and zeros after them.
static void copy_rows(T* to, const T* from, long long rows, long long k, long long row, long long column) {
    for (long long r = 0; r < MOST; r++)
        for (long long l = 0; l < k; l++) to[r * k + l] = r < rows ? from[r * row + l * column] : 0;
}

// One of the strides of x is 1. Jobs are blocks of rows, those of a strip of columns of y after the other, so that a
// strip is packed once.
void product(const Word* a, long long first, long long last, char* scratch) {
    T* const out = a[0].p;
    const T *const x = a[1].p, *const y = a[2].p, *const bias = a[3].p;
    const long long m = a[4].n, n = a[5].n, k = a[6].n, pitch = a[7].n, x_row = a[8].n, x_column = a[9].n;
    const long long y_row = a[10].n, y_column = a[11].n, high = a[12].n, blocks = (m + high - 1) / high;
    const bool turned = x_column != 1;
    T *const strip = (T*)scratch, *const rest = strip + STRIP * k, *const sums = rest + MOST * k, *const from = sums + MOST * WIDE;
    for (long long packed = -1, job = first; job < last; job++) {
        const long long end = less(m, (job % blocks + 1) * high);
        for (long long p = job / blocks * (STRIP / WIDE); p < (job / blocks + 1) * (STRIP / WIDE); p++) {
            T* const panel = strip + p % (STRIP / WIDE) * k * WIDE;
            const long long j = p * WIDE, columns = less(WIDE, n - j);
            if (columns <= 0) break;
            if (packed < p) {
                packed = p;
                for (long long l = 0; l < k; l++)
                    copy_panel(panel + l * WIDE, y + l * y_row + j * y_column, columns, y_column);
            }
            copy_panel(from, bias ? bias + j : zeros, columns, 1);
            for (long long r = job % blocks * high; r < end; r += MOST) {
                const long long rows = less(MOST, end - r);
                const bool copied = rows % SOME, whole = !copied && columns == WIDE;
                if (copied) copy_rows(rest, x + r * x_row, rows, k, x_row, x_column);
                T* const to = whole ? out + r * pitch + j : sums;
                const T* const read = copied ? rest : x + r * x_row;
                const long long pitch_x = copied ? k : turned ? x_column : x_row;
                tile(turned && !copied, rows, k, read, pitch_x, panel, from, 0, to, whole ? pitch : WIDE);
                for (long long i = 0; i < rows && !whole; i++) copy(out + (r + i) * pitch + j, sums + i * WIDE, columns, 1);
            }
        }
    }
}

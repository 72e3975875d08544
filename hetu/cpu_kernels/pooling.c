// Pooling of images: windows slide over the rows and columns of planes, a plane per channel of each image.

#include <stdint.h>

// What `max_pool` means, tap by tap: the first of equal values wins, a NaN wins over numbers, the frame never does.
// Jobs are planes.
void max_pool(const Word* a, long long first, long long last, char* scratch) {
    T* const best = a[0].p;
    unsigned char* const tap = a[1].p;
    const T* const x = a[2].p;
    const long long channels = a[3].n, height = a[4].n, width = a[5].n, rows = a[6].n, columns = a[7].n;
    const long long image = a[8].n, plane = a[9].n, row = a[10].n, column = a[11].n;  // strides
    const long long kernel_rows = a[12].n, kernel_columns = a[13].n, down = a[14].n, right = a[15].n;
    const long long top = a[16].n, left = a[17].n;
    for (long long p = first; p < last; p++) {
        const T* const from = x + p / channels * image + p % channels * plane;
        for (long long i = 0; i < rows; i++) {
            T* const y = best + (p * rows + i) * columns;
            unsigned char* const t = tap + (p * rows + i) * columns;
            for (long long j = 0; j < columns; j++) y[j] = -INFINITY, t[j] = 0;
            for (long long u = 0; u < kernel_rows; u++) {
                const long long r = i * down + u - top;
                if (r < 0 || r >= height) continue;
                for (long long v = 0; v < kernel_columns; v++) {
                    const unsigned char number = u * kernel_columns + v;
                    const long long start = v - left;  // of the column of window 0
                    const long long begin = start < 0 ? (-start + right - 1) / right : 0;
                    const long long end = start >= width ? 0 : (width - 1 - start) / right + 1;
                    const T* const pixels = from + r * row + start * column;
                    EACH for (long long j = begin; j < (end < columns ? end : columns); j++) {
                        const T pixel = pixels[j * right * column];
                        const bool wins = pixel > y[j] || (pixel != pixel && y[j] == y[j]);
                        t[j] = wins ? number : t[j];
                        y[j] = wins ? pixel : y[j];
                    }
                }
            }
        }
    }
}

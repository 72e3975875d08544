// The gradients of the weights of a recurrent layer, which are those of all its steps together. How the steps are computed
// stands in `recurrent.c`.

#include "panels.h"

enum { DEEP = 192 };  // rows of the batch at their steps that are summed in registers

// out = [x, 1]^T dz and its last row into `bias`: sums over the steps of one row of the batch after the other. With
// `start`, x is the states of the steps before, the first of which it is. Jobs are strips of columns.
void weights(const Word* a, long long first, long long last, char* scratch) {
    T *const out = a[0].p, *const bias = a[1].p, *const sums = a[2].p;
    const T *const x = a[3].p, *const start = a[4].p, *const dz = a[5].p;
    const long long batch = a[6].n, steps = a[7].n, features = a[8].n, columns = a[9].n;
    const long long x_row = a[10].n, x_step = a[11].n, x_column = a[12].n, start_row = a[13].n, start_column = a[14].n;
    const long long pitch_out = a[15].n, pitch_dz = a[16].n;
    const long long high = up(features + 1, SOME), pitch = high + LANES;
    T *const joined = (T*)scratch, *const panel = joined + DEEP * pitch;
    first *= STRIP / WIDE, last *= STRIP / WIDE;
    for (long long l = 0; l < DEEP * pitch; l++) joined[l] = 0;
    for (long long begin = 0; begin < batch * steps; begin += DEEP) {
        const long long depth = less(DEEP, batch * steps - begin);
        for (long long l = 0; l < depth; l++) {
            const long long row = (begin + l) / steps, t = (begin + l) % steps;
            T* const to = joined + l * pitch;
            if (start && !t) copy(to, start + row * start_row, features, start_column);
            else copy(to, x + row * x_row + (start ? t - 1 : t) * x_step, features, x_column);
            to[features] = 1;
        }
        for (long long p = first; p < last; p++) {
            for (long long l = 0; l < depth; l++)
                copy_panel(panel + l * WIDE, dz + (begin + l) * pitch_dz + p * WIDE, columns - p * WIDE, 1);
            const bool wide = columns - p * WIDE >= WIDE, end = begin + DEEP >= batch * steps;
            for (long long l = 0; l < high; l += MOST) {
                T* const sum = sums + (p * high + l) * WIDE;
                const bool there = end && wide && l + MOST <= features;  // the sums go where they belong
                tile(true, high - l, depth, joined + l, pitch, panel, begin ? sum : zeros, begin ? WIDE : 0,
                    there ? out + l * pitch_out + p * WIDE : sum, there ? pitch_out : WIDE);
            }
        }
    }
    for (long long p = first; p < last; p++)
        for (long long l = columns - p * WIDE >= WIDE ? features / MOST * MOST : 0; l <= features; l++)
            if (l < features || bias)
                copy((l < features ? out + l * pitch_out : bias) + p * WIDE, sums + (p * high + l) * WIDE,
                    less(WIDE, columns - p * WIDE), 1);
}

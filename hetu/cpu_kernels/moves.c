// Copies between arrays that lie in any way.
//
//     move: to[i] = from[i] at all places i of AXES axes; along an axis either may stay where it is
//
// The last axis is the one along which `to` lies closest, the one before it that along which `from` does, if that is
// another: then blocks are turned.

#include <string.h>

#include "turn.h"

enum { AXES = 6, BLOCK = 32, SIDE = 16, PIECE = 512 / sizeof(T) };

void move_plainly(const Word* a, long long first, long long last, char* scratch) {
    const Word *const size = a + 2, *const to_stride = size + AXES, *const from_stride = to_stride + AXES;
    long long count = 1;
    for (int axis = 0; axis < AXES; axis++) count *= size[axis].n;
    for (long long place = 0; place < count; place++) {
        T *to = a[0].p, *from = a[1].p;
        for (long long axis = AXES - 1, rest = place; axis >= 0; rest /= size[axis--].n) {
            to += rest % size[axis].n * to_stride[axis].n;
            from += rest % size[axis].n * from_stride[axis].n;
        }
        *to = *from;
    }
}

// The C library moves more than 2 KB by one instruction, for which a Zen 3 takes 13 times as long where the target lies
// up to 31 bytes behind the source, modulo 4 KB. Pieces were as fast at all sizes from 2 KB to 1 MB.
static inline void copy(T* to, const T* from, long long count) {
    for (long long j = 0; j < count; j += PIECE) {
        const long long some = count - j < PIECE ? count - j : PIECE;
        memcpy(to + j, from + j, some * sizeof(T));
    }
}

static inline void row(T* to, const T* from, long long count, long long to_step, long long from_step) {
    if (to_step == 1 && from_step == 1) copy(to, from, count);
    else if (to_step == 1 && from_step == 0) for (long long j = 0; j < count; j++) to[j] = *from;
    else if (to_step == 1) EACH for (long long j = 0; j < count; j++) to[j] = from[j * from_step];
    else EACH for (long long j = 0; j < count; j++) to[j * to_step] = from[j * from_step];
}

// A square of SIDE that lies turned, through memory of its own: whole lines of the cache are read and written, as lines
// 4 KB apart share a few places there, and would be gone before the next number of each is wanted.
static void turn(T* to, long long down, const T* from, long long right) {
    T block[SIDE * SIDE];
    for (int j = 0; j < SIDE; j += 4, from += 4 * right) {
        const T* const lines[4] = {from, from + right, from + 2 * right, from + 3 * right};
        for (int i = 0; i < SIDE; i += 4) {
            T* const t = block + i * SIDE + j;
            if (sizeof(T) == 4 && in_squares(4, 1))
                square(
                    (const unsigned*[]){(void*)(lines[0] + i), (void*)(lines[1] + i), (void*)(lines[2] + i), (void*)(lines[3] + i)},
                    (unsigned*[]){(void*)t, (void*)(t + SIDE), (void*)(t + 2 * SIDE), (void*)(t + 3 * SIDE)});
            else
                for (int n = 0; n < 16; n++) t[n / 4 * SIDE + n % 4] = lines[n % 4][i + n / 4];
        }
    }
    for (int i = 0; i < SIDE; i++) memcpy(to + i * down, block + i * SIDE, sizeof(T[SIDE]));
}

// Jobs are blocks of rows along the axis before the last.
void move(const Word* a, long long first, long long last, char* scratch) {
    const Word *const size = a + 2, *const to_stride = size + AXES, *const from_stride = to_stride + AXES;
    const long long rows = size[AXES - 2].n, columns = size[AXES - 1].n, blocks = (rows + BLOCK - 1) / BLOCK;
    const long long down = to_stride[AXES - 2].n, right = to_stride[AXES - 1].n;
    const long long from_down = from_stride[AXES - 2].n, from_right = from_stride[AXES - 1].n;
    const bool turned = from_down == 1 && from_right > 1;
    for (long long job = first; job < last; job++) {
        const long long start = job % blocks * BLOCK, end = start + BLOCK < rows ? start + BLOCK : rows;
        T *to = a[0].p, *from = a[1].p;
        for (long long axis = AXES - 3, rest = job / blocks; axis >= 0; rest /= size[axis--].n) {
            to += rest % size[axis].n * to_stride[axis].n;
            from += rest % size[axis].n * from_stride[axis].n;
        }
        const long long step = turned ? SIDE : columns;
        for (long long j = 0; j < columns; j += step) {
            long long i = start;
            for (; turned && right == 1 && j + SIDE <= columns && i + SIDE <= end; i += SIDE)
                turn(to + i * down + j, down, from + i + j * from_right, from_right);
            for (; i < end; i++)
                row(to + i * down + j * right, from + i * from_down + j * from_right,
                    step < columns - j ? step : columns - j, right, from_right);
        }
    }
}

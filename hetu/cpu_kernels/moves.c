// Copies between arrays that lie in any way.
//
//     move: to[i] = from[i] at all places i of AXES axes; along an axis either may stay where it is
//
// The last axis is the one along which `to` lies closest, the one before it that along which `from` does, if that is
// another: a block of both is read and written while it is in the cache.

#include <string.h>

enum { AXES = 6, BLOCK = 32, PIECE = 512 / sizeof(T) };

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
        const long long step = turned ? BLOCK : columns;
        for (long long j = 0; j < columns; j += step)
            for (long long i = start; i < end; i++)
                row(to + i * down + j * right, from + i * from_down + j * from_right,
                    step < columns - j ? step : columns - j, right, from_right);
    }
}

// Functions of BLAS as calls of a table. Their addresses are words, as the library is one that NumPy has loaded.
//
// INT is the integer of the library, T the number. The factors 1 and 0, which BLAS asks for, are words.

enum { PLAIN = 111, BLOCK = 24 };

#define FUNCTION(...) ((void (*)(__VA_ARGS__))a[0].p)

// out = x y; jobs are the rows of `out`, BLOCK to one, and the last has those that are left, fewer or more.
//
// BLAS computes a row in the same way in any product that begins at a multiple of BLOCK rows and has as many at least:
// so its bits do not depend on the division. That does not hold for columns.
void gemm(const Word* a, long long first, long long last, char* scratch) {
    const int order = a[1].n, left = a[2].n, right = a[3].n;
    const long long begin = first * BLOCK, end = last == a[15].n ? a[4].n : last * BLOCK;
    const long long pitch_x = a[9].n, pitch_y = a[11].n, pitch = a[14].n;
    const T* x = (const T*)a[8].p + (left == PLAIN ? begin * pitch_x : begin);
    T* out = (T*)a[13].p + begin * pitch;
    FUNCTION(int, int, int, INT, INT, INT, T, const T*, INT, const T*, INT, T, T*, INT)
    (order, left, right, end - begin, a[5].n, a[6].n, a[7].x, x, pitch_x, a[10].p, pitch_y, a[12].x, out, pitch);
}

// out = x y for each matrix of a batch of three axes, of which the words from 13 on give the sizes and strides of x, y
// and out; jobs are the matrices.
void gemms(const Word* a, long long first, long long last, char* scratch) {
    const T *x = a[7].p, *y = a[9].p;
    T* out = a[11].p;
    for (long long job = first; job < last; job++) {
        long long at_x = 0, at_y = 0, at = 0;
        for (long long axis = 2, rest = job; axis >= 0; rest /= a[13 + axis].n, axis--) {
            const long long i = rest % a[13 + axis].n;
            at_x += i * a[16 + axis].n, at_y += i * a[19 + axis].n, at += i * a[22 + axis].n;
        }
        FUNCTION(int, int, int, INT, INT, INT, T, const T*, INT, const T*, INT, T, T*, INT)
        (a[1].n, a[2].n, a[3].n, a[4].n, a[5].n, a[6].n, 1, x + at_x, a[8].n, y + at_y, a[10].n, 0, out + at, a[12].n);
    }
}

// out = m x
void gemv(const Word* a, long long first, long long last, char* scratch) {
    FUNCTION(int, int, INT, INT, T, const T*, INT, const T*, INT, T, T*, INT)
    (a[1].n, a[2].n, a[3].n, a[4].n, a[5].x, a[6].p, a[7].n, a[8].p, a[9].n, a[10].x, a[11].p, a[12].n);
}

// out += x y^T
void ger(const Word* a, long long first, long long last, char* scratch) {
    FUNCTION(int, INT, INT, T, const T*, INT, const T*, INT, T*, INT)
    (a[1].n, a[2].n, a[3].n, a[4].x, a[5].p, a[6].n, a[7].p, a[8].n, a[9].p, a[10].n);
}

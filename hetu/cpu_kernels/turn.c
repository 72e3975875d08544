// Copies between arrays whose neighbors lie along different axes, as those of a matrix and its transpose.
//
// What it computes: out[k, a, b] = x[k, a, b], where neighbors of x lie along a and those of `out` along b. Squares are
// turned in a buffer, so that all memory is read and written in whole lines, whatever the strides are.

enum { SIDE = 64 / sizeof(T), OUTER = 4 };

// Words: out, x; the sizes, strides in `out` and strides in x of OUTER axes, of a and of b. Jobs are strips along b.
void turn(const Word* w, long long first, long long last, char* scratch) {
    const Word *const size = w + 2, *const to = size + OUTER + 2, *const from = to + OUTER + 2;
    const long long along = size[OUTER].n, across = size[OUTER + 1].n, row = to[OUTER].n, step = from[OUTER + 1].n;
    long long outer = 1;
    for (int k = 0; k < OUTER; k++) outer *= size[k].n;
    T square[SIDE][SIDE];
    for (long long job = first; job < last; job++) {
        const long long b = job * SIDE, columns = across - b < SIDE ? across - b : SIDE;
        for (long long index = 0; index < outer; index++) {
            T* out = (T*)w[0].p + b;
            const T* x = (T*)w[1].p + b * step;
            for (long long k = OUTER - 1, rest = index; k >= 0; rest /= size[k--].n)
                out += rest % size[k].n * to[k].n, x += rest % size[k].n * from[k].n;
            for (long long a = 0; a < along; a += SIDE, out += SIDE * row, x += SIDE) {
                const long long rows = along - a < SIDE ? along - a : SIDE;
                if (rows == SIDE && columns == SIDE) {
                    for (int j = 0; j < SIDE; j++)
                        for (int i = 0; i < SIDE; i++) square[i][j] = x[j * step + i];
                    for (int i = 0; i < SIDE; i++)
                        for (int j = 0; j < SIDE; j++) out[i * row + j] = square[i][j];
                } else
                    for (long long i = 0; i < rows; i++)
                        for (long long j = 0; j < columns; j++) out[i * row + j] = x[j * step + i];
            }
        }
    }
}

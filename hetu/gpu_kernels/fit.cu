// Rows of another length: y (rows, columns) has x in its corner, as much of it as there is room for, and zeros around.
// x is (own_rows, own_columns), with `step` elements from row to row. A block writes 2048 neighbors of the row blockIdx.x;
// one of the two has rows that start anywhere, so elements go one by one, eight in flight. Bytes: what is read and y.
extern "C" __global__ void fit(const S* x, S* y, long long own_rows, long long own_columns, long long step,
                               long long columns) {
    const long long row = blockIdx.x, first = blockIdx.y * 2048LL + threadIdx.x;
    const long long inside = row >= own_rows ? 0 : own_columns < columns ? own_columns : columns;
    S own[8];
#pragma unroll
    for (int j = 0; j < 8; j++) own[j] = first + 256 * j < inside ? x[row * step + first + 256 * j] : S(0);
#pragma unroll
    for (int j = 0; j < 8; j++)
        if (first + 256 * j < columns) y[row * columns + first + 256 * j] = own[j];
}

// Products of tiles by single warps: of 16 bits, and of float32 before Hopper. A warp has WM x 32 results; its operands
// come from both tiles into registers, those of float32 are split there.

const int WM = BM + BN == 256 ? 64 : 32, WN = 32;
typedef float Sums[WM / 16][WN / 8][4];  // as `multiply_add` wants it
typedef unsigned Left[WM / 16][4], Right[WN / 8][2];

// Operands from half k of tiles whose rows run along the sum: rows of `left` from `row`, of `right` from `column`.
__device__ inline void load_along(Left& a, Right& b, Along left, Along right, int row, int column, int k) {
    const int lane = threadIdx.x % 32;
    for (int m = 0; m < WM / 16; m++) {
        const int r = row + m * 16 + lane % 16;
        load_matrices(a[m], &left[r][(k * 2 + lane / 16) ^ along(r)]);
    }
    for (int n = 0; n < WN / 16; n++) {
        const int r = column + n * 16 + lane / 16 * 8 + lane % 8;
        unsigned both[4];
        load_matrices(both, &right[r][(k * 2 + lane / 8 % 2) ^ along(r)]);
        for (int i = 0; i < 4; i++) b[2 * n + i / 2][i % 2] = both[i];
    }
}

// The same from tiles whose rows run across the sum: matrices of 16 bits are transposed on the way.
__device__ inline void load_across(Left& a, Right& b, AcrossLeft left, AcrossRight right, int row, int column, int k) {
    const int lane = threadIdx.x % 32;
    if (sizeof(S) == 2) {
        for (int m = 0; m < WM / 16; m++) {
            const int r = k * 16 + lane / 16 * 8 + lane % 8, chunk = (row + m * 16) / EACH + lane / 8 % 2;
            load_matrices_transposed(a[m], &left[r][chunk ^ across(r)]);
        }
        for (int n = 0; n < WN / 16; n++) {
            const int r = k * 16 + lane % 16, chunk = (column + n * 16) / EACH + lane / 16;
            unsigned both[4];
            load_matrices_transposed(both, &right[r][chunk ^ across(r)]);
            for (int i = 0; i < 4; i++) b[2 * n + i / 2][i % 2] = both[i];
        }
    } else {
        for (int m = 0; m < WM / 16; m++)
            for (int i = 0; i < 4; i++)
                a[m][i] = value_at(left, k * 8 + i / 2 * 4 + lane % 4, row + m * 16 + i % 2 * 8 + lane / 4);
        for (int n = 0; n < WN / 8; n++)
            for (int i = 0; i < 2; i++) b[n][i] = value_at(right, k * 8 + i * 4 + lane % 4, column + n * 8 + lane / 4);
    }
}

// sum += left right for the operands of a warp: rows of `left` by columns of `right`.
__device__ inline void multiply_all(Sums& sum, Left& left, Right& right) {
    if (sizeof(S) == 2) {
        for (int m = 0; m < WM / 16; m++)
            for (int n = 0; n < WN / 8; n++) multiply_add(sum[m][n], left[m], right[n], S());
    } else {
        Left left_rest;
        Right right_rest;
        for (int m = 0; m < WM / 16; m++)
            for (int i = 0; i < 4; i++) split(left[m][i], left_rest[m][i]);
        for (int n = 0; n < WN / 8; n++)
            for (int i = 0; i < 2; i++) split(right[n][i], right_rest[n][i]);
        for (int m = 0; m < WM / 16; m++)
            for (int n = 0; n < WN / 8; n++) {
                float part[4] = {};
                multiply_add(part, left_rest[m], right[n], S());
                multiply_add(part, left[m], right_rest[n], S());
                multiply_add(part, left[m], right[n], S());
                for (int i = 0; i < 4; i++) sum[m][n][i] += part[i];
            }
    }
}

// sum += left right, of which `load(a, b, k)` brings the operands of half k.
template <class Load> __device__ inline void multiply_halves(Sums& sum, Load load) {
    for (int k = 0; k < 2; k++) {
        Left a;
        Right b;
        load(a, b, k);
        multiply_all(sum, a, b);
    }
}

__device__ inline void multiply_along(Sums& sum, Along left, Along right, int row, int column) {
    multiply_halves(sum, [&](Left& a, Right& b, int k) { load_along(a, b, left, right, row, column, k); });
}

__device__ inline void multiply_across(Sums& sum, AcrossLeft left, AcrossRight right, int row, int column) {
    multiply_halves(sum, [&](Left& a, Right& b, int k) { load_across(a, b, left, right, row, column, k); });
}

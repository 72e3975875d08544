// What a program to take away needs of BLAS, as plain loops: it then depends on nothing. INT is the integer of the
// library that the step was bound for. A matrix lies by rows, or is the transpose of one that does.

#define PLAIN_BLAS(T, letter)                                                                                        \
    static void cblas_##letter##gemm(int order, int left, int right, INT m, INT n, INT k, T alpha, const T* x,       \
                                     INT pitch_x, const T* y, INT pitch_y, T beta, T* out, INT pitch) {              \
        for (INT i = 0; i < m; i++) {                                                                                \
            for (INT j = 0; j < n; j++) out[i * pitch + j] = beta == 0 ? 0 : beta * out[i * pitch + j];              \
            for (INT p = 0; p < k; p++) {                                                                            \
                const T factor = alpha * (left == 111 ? x[i * pitch_x + p] : x[p * pitch_x + i]);                    \
                const INT start = right == 111 ? p * pitch_y : p, step = right == 111 ? 1 : pitch_y;                 \
                for (INT j = 0; j < n; j++) out[i * pitch + j] += factor * y[start + j * step];                      \
            }                                                                                                        \
        }                                                                                                            \
    }                                                                                                                \
    static void cblas_##letter##gemv(int order, int trans, INT rows, INT columns, T alpha, const T* a, INT pitch,    \
                                     const T* x, INT step_x, T beta, T* out, INT step) {                             \
        const INT m = trans == 111 ? rows : columns, k = trans == 111 ? columns : rows;                              \
        for (INT i = 0; i < m; i++) {                                                                                \
            T total = 0;                                                                                             \
            for (INT p = 0; p < k; p++) total += (trans == 111 ? a[i * pitch + p] : a[p * pitch + i]) * x[p * step_x]; \
            out[i * step] = alpha * total + (beta == 0 ? 0 : beta * out[i * step]);                                  \
        }                                                                                                            \
    }                                                                                                                \
    static void cblas_##letter##ger(int order, INT m, INT n, T alpha, const T* x, INT step_x, const T* y, INT step_y, \
                                    T* out, INT pitch) {                                                             \
        for (INT i = 0; i < m; i++)                                                                                  \
            for (INT j = 0; j < n; j++) out[i * pitch + j] += alpha * x[i * step_x] * y[j * step_y];                 \
    }

PLAIN_BLAS(float, s)
PLAIN_BLAS(double, d)

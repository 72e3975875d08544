// Windows that slide over images (planes, height, width): the largest element of each.
//
// One thread an element of the result in a grid-stride loop. Gradients gather what belongs to a pixel instead of
// scattering, so no atomics and no dependence on timing. Bytes: each input and the result once, as the taps of
// neighboring threads meet in the cache; FLOP: one or two a tap.

#define WINDOW                                                                                                   \
    long long height_, long long width_, long long rows_, long long columns_, long long kh_, long long kw_,     \
        long long sh_, long long sw_, long long top_, long long left_
#define UNPACK                                                                                                   \
    const int height = height_, width = width_, rows = rows_, columns = columns_, kh = kh_, kw = kw_, sh = sh_, sw = sw_; \
    const int top = top_, left = left_;                                                                          \
    (void)height, (void)width, (void)rows, (void)columns, (void)kh, (void)kw, (void)sh, (void)sw, (void)top, (void)left;

// Pooling takes planes one after the other, or `side` of them side by side: element e is then place q of plane s.
#define PLACE                                                                                                    \
    const Index side = side_, q = side == 1 ? e : e / side, s = side == 1 ? 0 : e - q * side;

// Values and taps (their number in the window, row by row). Of equal values the first wins; a NaN stays.
extern "C" __global__ void max_pool2d(const S* x, S* y, unsigned char* taps, long long n, long long side_, WINDOW) {
    UNPACK
    FOR_ELEMENTS(n) {
        PLACE
        const int c = q % columns, r = q / columns % rows;
        const S* plane = x + q / columns / rows * height * width * side + s;
        T best = -infinite();
        int tap = 0;
        for (int i = 0; i < kh; i++)
            for (int j = 0; j < kw; j++) {
                const int h = r * sh + i - top, w = c * sw + j - left;
                const bool inside = h >= 0 && h < height && w >= 0 && w < width;
                const T v = inside ? (T)plane[((long long)h * width + w) * side] : (T)-infinite();
                tap = v > best && i + j > 0 ? i * kw + j : tap;
                best = i + j == 0 ? v : fmax(best, v);
            }
        y[e] = best, taps[e] = tap;
    }
}

// dx: a pixel collects g from the windows that chose it.
extern "C" __global__ void max_pool2d_dx(
    const S* g, const unsigned char* taps, S* dx, long long n, long long side_, WINDOW) {
    UNPACK
    FOR_ELEMENTS(n) {
        PLACE
        const int w = q % width + left, h = q / width % height + top;
        const long long plane = q / width / height * rows * columns;
        T sum = 0;
        for (int r = h < kh ? 0 : (h - kh) / sh + 1; r < rows && r * sh <= h; r++)
            for (int c = w < kw ? 0 : (w - kw) / sw + 1; c < columns && c * sw <= w; c++) {
                const long long place = (plane + (long long)r * columns + c) * side + s;
                if (taps[place] == (h - r * sh) * kw + w - c * sw) sum += (T)g[place];
            }
        dx[e] = sum;
    }
}

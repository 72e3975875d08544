// Convolution as a product of implicit matrices on tensor cores: S. Chetlur et al., "cuDNN: Efficient Primitives for
// Deep Learning", 2014, section 3.1: tiles of the matrix of patches are gathered when they are needed, and it never
// lies in memory.
//
// Images are (rows, columns, images, channels). A tap of a pixel is a run of channels, so every copy takes 16 bytes,
// and a block owns few pixels of many images: taps that lie outside of the image for all of them are left out (a third
// of the work on images of 4 x 4). BM x BN results belong to a block, WM x WN to a warp, see `tiles.cu`. Tiles are copied
// asynchronously, STAGES - 1 ahead. Bytes: images and results once from memory; for BM BN results a block reads BM + BN
// runs from the second-level cache, which takes longer than the products where results are few. FLOP: 2 channels taps a
// result. Block 32 (BM / WM) (BN / WN), shared memory 192 (BM + BN) bytes: 48 KB for 128 x 128; with warpgroups 128 BN
// more. Registers: at most 128, so that a multiprocessor has 512 threads. Sums are float32; nothing is added by atomics.

const int ACROSS = BN / WN, THREADS = 32 * (BM / WM) * ACROSS;
const int STAGES = 3;

struct Range {
    int begin, end;
    __device__ int size() const { return end > begin ? end - begin : 0; }
};
__device__ inline int least(int a, int b) { return a < b ? a : b; }
__device__ inline int most(int a, int b) { return a < b ? b : a; }

// Tiles are copied by `load(place)`, in order, and worked on by `multiply(place)` while later ones are on their way.
template <class Load, class Multiply> __device__ inline void pipelined(int tiles, Load load, Multiply multiply) {
    for (int k = 0; k < STAGES - 1; k++) {
        if (k < tiles) load(k);
        end_group();
    }
    for (int k = 0, now = 0, next = STAGES - 1; k < tiles; k++) {
        wait_for_groups<STAGES - 2>();
        __syncthreads();  // this tile is there for all threads, and nobody works on the one before it
        if (k + STAGES - 1 < tiles) load(next);
        end_group();
        multiply(now);
        now = now + 1 < STAGES ? now + 1 : 0, next = next + 1 < STAGES ? next + 1 : 0;
    }
}

// -- images -----------------------------------------------------------------------------------------------------------

// Along one axis position p reads pixel p step + first + t for tap t, whose weights are `next` after those of t - 1.
#define AXIS(a)                                                                                       \
    long long a##_size, long long a##_count, long long a##_step, long long a##_first, long long a##_taps, \
        long long a##_next

// The order of places: `side` neighbors of a row, of all images, then the next ones. Their taps overlap, so that much
// of what they read comes from the first-level cache; alone, a pixel leaves out more taps.
struct Places {
    int columns, images, side;
    __device__ int row(int p) const { return p / (columns * images); }
    __device__ int column(int p) const { return p / (images * side) % (columns / side) * side + p % side; }
    __device__ int image(int p) const { return p / side % images; }
};

// y = the sum of products of x (rows, columns, images, channels) and w (taps, results, channels). Position (u, v)
// becomes pixel u down + v across + origin of y: the gradient of a convolution with strides has a launch for each class
// of pixels that the same taps reach. Grid (places / BM, results / BN).
extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS) convolve(
    const S* x, const S* w, S* y, AXIS(row), AXIS(column), long long tap, long long down, long long across_,
    long long origin, long long images_, long long channels_, long long results_, long long side_) {
    __shared__ Chunk left[STAGES][BM][4];
    __shared__ Chunk right[STAGES][BN][4];
    const int images = images_, channels = channels_, results = results_, side = side_;
    const Places at{(int)column_count, images, side};
    const int places = row_count * at.columns * images, first = blockIdx.x * BM, last = least(first + BM, places) - 1;
    const int result = blockIdx.y * BN, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int chunk = threadIdx.x % 4, line = threadIdx.x / 4;

    auto met = [](int lowest, int highest, int size, int taps) {  // by some place of this block
        return Range{most(0, -highest), least(taps, size - lowest)};
    };
    const int row_a = at.row(first), row_b = at.row(last);
    const int column_a = row_a == row_b ? at.column(first) - first % side : 0;
    const int column_b = row_a == row_b ? at.column(last) - last % side + side - 1 : at.columns - 1;
    const Range down_taps = met(row_a * row_step + row_first, row_b * row_step + row_first, row_size, row_taps);
    const Range across_taps = met(column_a * column_step + column_first, column_b * column_step + column_first,
                                  column_size, column_taps);

    const int COPIES = BM * 4 / THREADS;
    int h[COPIES], v[COPIES];  // the pixel of tap 0, and where its channels are
    Index start[COPIES];
    for (int k = 0; k < COPIES; k++) {
        const int place = first + line + k * (THREADS / 4);
        h[k] = at.row(place) * row_step + row_first, v[k] = at.column(place) * column_step + column_first;
        start[k] = ((Index)(h[k] * (int)column_size + v[k]) * images + at.image(place)) * channels;
    }
    int i = down_taps.begin, j = across_taps.begin, c = chunk * EACH;
    const int RIGHT_COPIES = BN * 4 / THREADS;
    Index pixel[COPIES], weight[RIGHT_COPIES];  // where the chunks of this thread lie in x and w
    bool inside[COPIES];
    auto load = [&](int place) {
        if (c == chunk * EACH) {
            const Index shift = (Index)(i * (int)column_size + j) * images * channels + c;
            const Index first = (Index)(tap + i * row_next + j * column_next) * results + result + line;
            for (int k = 0; k < COPIES; k++) {
                inside[k] = (unsigned)(h[k] + i) < row_size && (unsigned)(v[k] + j) < column_size;
                pixel[k] = start[k] + shift;
            }
            for (int k = 0; k < RIGHT_COPIES; k++) weight[k] = (first + k * (THREADS / 4)) * channels + c;
        }
        for (int k = 0; k < COPIES; k++) {
            const int r = line + k * (THREADS / 4);
            copy_async(&left[place][r][chunk ^ along(r)], (const Chunk*)(x + pixel[k]), inside[k] && c < channels);
            pixel[k] += DEPTH;
        }
        for (int k = 0; k < RIGHT_COPIES; k++) {
            const int r = line + k * (THREADS / 4);
            const bool exists = result + r < results && c < channels;
            copy_async(&right[place][r][chunk ^ along(r)], (const Chunk*)(w + weight[k]), exists);
            weight[k] += DEPTH;
        }
        c += DEPTH;
        if (c - chunk * EACH >= channels) {
            c = chunk * EACH;
            if (++j == across_taps.end) j = across_taps.begin, i++;
        }
    };

    Sums sum = {};
    const int row = warp / ACROSS * WM, column = warp % ACROSS * WN;
    const int tiles = down_taps.size() * across_taps.size() * ((channels + DEPTH - 1) / DEPTH);
    pipelined(tiles, load, [&](int place) { multiply_along(sum, left[place], right[place], row, column); });
    for (int r = 0; r < WM / 8; r++) {
        const int place = first + row + r * 8 + lane / 4;
        if (place >= places) continue;
        const Index pixel = at.row(place) * down + at.column(place) * across_ + origin;
        S* target = y + (pixel * images + at.image(place)) * results;
        for (int n = 0; n < WN / 8; n++) {
            const int o = result + column + n * 8 + lane % 4 * 2;
            const Pack<S, 2> pair = {{(S)sum[r / 2][n][r % 2 * 2], (S)sum[r / 2][n][r % 2 * 2 + 1]}};
            if (o < results) store(target + o, pair);
        }
    }
}

// -- weights ----------------------------------------------------------------------------------------------------------

// parts[split][tap] (results, channels) = a part of the sum over positions of g^T (results) x (channels), both in tiles
// that run across the sum. A block has one tap, so all its positions lie inside of the image. BM >= BN. Grid (tiles of
// all taps, splits).
extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS) convolve_dw(
    const S* x, const S* g, float* parts, long long height, long long width, long long g_rows, long long g_columns,
    long long kh, long long kw, long long sh, long long sw, long long top, long long side, long long images_,
    long long channels_, long long results_) {
    __shared__ Chunk left[STAGES][DEPTH][BM / EACH];
    __shared__ Chunk right[STAGES][DEPTH][BN / EACH];
    const int images = images_, channels = channels_, results = results_;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int many = (channels + BN - 1) / BN, tiles = many * ((results + BM - 1) / BM), tap = blockIdx.x / tiles;
    const int result = blockIdx.x % tiles / many * BM, channel = blockIdx.x % many * BN;

    const int down = tap / (int)kw - (int)top, beside = tap % (int)kw - (int)side;  // from a position to its pixel
    auto inside = [](int shift, int step, int size, int count) {
        return Range{shift < 0 ? (step - 1 - shift) / step : 0, least(count, (size - shift + step - 1) / step)};
    };
    const Range rows = inside(down, sh, height, g_rows), sides = inside(beside, sw, width, g_columns);
    const int count = rows.size() * sides.size() * images;
    const int all = (count + DEPTH - 1) / DEPTH, each = (all + gridDim.y - 1) / gridDim.y, begin = blockIdx.y * each;

    const int CHUNKS = BM / EACH, LINES = THREADS / CHUNKS, COPIES = DEPTH / LINES;
    const int chunk = threadIdx.x % CHUNKS, line = threadIdx.x / CHUNKS;
    int at[COPIES], u[COPIES], v[COPIES], n[COPIES];
    Index slope[COPIES], source[COPIES];  // where the chunks of this thread lie in g and x
    auto find = [&](int k) {
        const int position = u[k] * (int)g_columns + v[k];
        const int pixel = (u[k] * (int)sh + down) * (int)width + v[k] * (int)sw + beside;
        slope[k] = ((Index)position * images + n[k]) * results + result + chunk * EACH;
        source[k] = ((Index)pixel * images + n[k]) * channels + channel + chunk * EACH;
    };
    for (int k = 0; k < COPIES; k++) {
        at[k] = begin * DEPTH + line + k * LINES, n[k] = at[k] % images;
        const int pixel = at[k] / images;
        u[k] = rows.begin + (count ? pixel / sides.size() : 0), v[k] = sides.begin + (count ? pixel % sides.size() : 0);
        find(k);
    }
    const bool has_slope = result + chunk * EACH < results;
    const bool has_pixel = channel + chunk * EACH < channels;
    auto load = [&](int place) {
        for (int k = 0; k < COPIES; k++) {
            const int r = line + k * LINES, to = chunk ^ across(r);
            copy_async(&left[place][r][to], (const Chunk*)(g + slope[k]), has_slope && at[k] < count);
            if (chunk < BN / EACH)
                copy_async(&right[place][r][to], (const Chunk*)(x + source[k]), has_pixel && at[k] < count);
            at[k] += DEPTH, n[k] += DEPTH;
            slope[k] += DEPTH * results, source[k] += DEPTH * channels;
            if (n[k] < images) continue;
            for (; n[k] >= images; n[k] -= images)
                if (++v[k] == sides.end) v[k] = sides.begin, u[k]++;
            find(k);
        }
    };

    Sums sum = {};
    const int row = warp / ACROSS * WM, column = warp % ACROSS * WN;
    pipelined(most(0, least(each, all - begin)), load,
              [&](int place) { multiply_across(sum, left[place], right[place], row, column); });
    float* part = parts + ((Index)blockIdx.y * (Index)(kh * kw) + tap) * results * channels;
    for (int r = 0; r < WM / 8; r++)
        for (int m = 0; m < WN / 8; m++) {
            const int o = result + row + r * 8 + lane / 4, c = channel + column + m * 8 + lane % 4 * 2;
            const Pack<float, 2> pair = {{sum[r / 2][m][r % 2 * 2], sum[r / 2][m][r % 2 * 2 + 1]}};
            if (o < results && c < channels) store(part + (Index)o * channels + c, pair);
        }
}

// dw (results, channels, taps) = the sum of parts (splits, taps, results, width >= channels), always in this order.
extern "C" __global__ void join_parts(const float* parts, S* dw, long long n, long long splits, long long taps_,
                                      long long channels_, long long width) {
    const Index taps = taps_, channels = channels_, plane = n / taps_;
    FOR_ELEMENTS(n) {
        const Index tap = e / plane, place = e - tap * plane, o = place / channels, c = place - o * channels;
        float sum = 0;
        for (long long k = 0; k < splits; k++) sum += parts[((k * taps + tap) * (plane / channels) + o) * width + c];
        dw[place * taps + tap] = sum;
    }
}

// -- what goes before -------------------------------------------------------------------------------------------------

// y (taps, o, c) or, turned, (taps, c, o) of w (o, c, taps): a row for each result, with its sum along it.
extern "C" __global__ void arrange(const S* w, S* y, long long n, long long columns_, long long taps, bool turned) {
    const Index columns = columns_, rows = n / columns_;
    FOR_ELEMENTS(n) {
        const S* source = w + (turned ? e % columns * rows + e / columns : e) * taps;
        for (long long tap = 0; tap < taps; tap++) y[tap * n + e] = source[tap];
    }
}

// y (positions, images, width) = the channels and taps of each position, in the order of the weights, and zeros after:
// for a few channels, which make no chunks, a matrix in memory after all.
extern "C" __global__ void patches(
    const S* x, S* y, long long n, long long x_row, long long x_column, long long x_image, long long x_channel,
    long long height_, long long width_, long long columns_, long long kh_, long long kw_, long long sh, long long sw,
    long long top, long long side, long long images_, long long channels, long long across_) {
    const Index images = images_, columns = columns_, taps = kh_ * kw_, kw = kw_, length = across_;
    FOR_ELEMENTS(n) {
        const Index place = e / length, pixel = place / images, channel = (e - place * length) / taps;
        const Index tap = e - place * length - channel * taps;
        const long long h = pixel / columns * sh + tap / kw - top, w = pixel % columns * sw + tap % kw - side;
        const bool exists = channel < channels && h >= 0 && h < height_ && w >= 0 && w < width_;
        y[e] = exists ? x[h * x_row + w * x_column + (place - pixel * images) * x_image + channel * x_channel] : (S)0;
    }
}

// Batch normalization of images whose channels are planes: numbers lie as (before, channels, after). Where channels come
// last it is a group. Jobs are channels; number j of a run goes to lane j mod LANES of a sum, whatever the vectors.

enum { LANES = 32 };

typedef struct {
    long long before, channels, after;
} Sizes;

// -- what is computed -------------------------------------------------------------------------------------------------

void batch_norm_plainly(const Word* a, long long first, long long last, char* scratch) {
    T *const y = a[0].p, *const mean = a[1].p, *const var = a[2].p;
    const T *const x = a[3].p, *const scale = a[4].p, *const bias = a[5].p;
    const long long before = a[6].n, channels = a[7].n, after = a[8].n, count = before * after;
#define EACH_PLACE(c) \
    for (long long n = 0, at; n < before; n++) for (long long j = 0; at = (n * channels + c) * after + j, j < after; j++)
    for (long long c = first; c < last; c++) {
        mean[c] = var[c] = 0;
        EACH_PLACE(c) mean[c] += x[at] / count;
        EACH_PLACE(c) var[c] += (x[at] - mean[c]) * (x[at] - mean[c]) / count;
        EACH_PLACE(c) y[at] = (x[at] - mean[c]) * scale[c] / sqrt(var[c] + (T)a[9].x) + bias[c];
    }
}

// -- the fast forms ---------------------------------------------------------------------------------------------------

static inline T halved(T* lanes) {
    for (int width = LANES / 2; width; width /= 2)
        for (int l = 0; l < width; l++) lanes[l] += lanes[l + width];
    return lanes[0];
}

// Everything that a channel has, run by run: BODY computes at place `at`.
#define EACH_RUN(s, c) \
    for (long long n = 0, run = (c) * (s).after; n < (s).before; n++, run += (s).channels * (s).after)
#define EACH_NUMBER(s, c, BODY) \
    EACH_RUN(s, c) EACH for (long long j = 0; j < (s).after; j++) { const long long at = run + j; BODY; }
#define ADD_LANES(s, c, BODY) \
    EACH_RUN(s, c) { \
        long long j = 0; \
        for (; j + LANES <= (s).after; j += LANES) \
            EACH for (int l = 0; l < LANES; l++) { const long long at = run + j + l; BODY; } \
        if (j < (s).after) \
            EACH for (int l = 0; l < LANES; l++) if (l < (s).after - j) { const long long at = run + j + l; BODY; } \
    }

void batch_norm(const Word* a, long long first, long long last, char* scratch) {
    T *const y = a[0].p, *const mean = a[1].p, *const var = a[2].p;
    const T *const x = a[3].p, *const scale = a[4].p, *const bias = a[5].p;
    const Sizes s = {a[6].n, a[7].n, a[8].n};
    const T epsilon = a[9].x, count = s.before * s.after;
    for (long long c = first; c < last; c++) {
        T sums[LANES] = {0}, squares[LANES] = {0};
        ADD_LANES(s, c, sums[l] += x[at])
        const T center = mean[c] = halved(sums) / count;
        ADD_LANES(s, c, const T d = x[at] - center; squares[l] += d * d)
        const T factor = scale[c] / sqrt((var[c] = halved(squares) / count) + epsilon), shift = bias[c];
        EACH_NUMBER(s, c, y[at] = (x[at] - center) * factor + shift)
    }
}

// The gradients of x, scale and bias.
void batch_norm_slopes(const Word* a, long long first, long long last, char* scratch) {
    T *const dx = a[0].p, *const dscale = a[1].p, *const dbias = a[2].p;
    const T *const g = a[3].p, *const x = a[4].p, *const scale = a[5].p, *const mean = a[6].p, *const var = a[7].p;
    const Sizes s = {a[8].n, a[9].n, a[10].n};
    const T epsilon = a[11].x, count = s.before * s.after;
    for (long long c = first; c < last; c++) {
        const T center = mean[c], inverse = 1 / sqrt(var[c] + epsilon), factor = scale[c] * inverse;
        T slopes[LANES] = {0}, products[LANES] = {0};
        ADD_LANES(s, c, slopes[l] += g[at]; products[l] += g[at] * ((x[at] - center) * inverse))
        const T shift = (dbias[c] = halved(slopes)) / count, along = (dscale[c] = halved(products)) / count;
        EACH_NUMBER(s, c, dx[at] = (g[at] - shift - (x[at] - center) * inverse * along) * factor)
    }
}

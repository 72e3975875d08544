// Batch normalization of (before, channels, after), by statistics over before and after: S. Ioffe, C. Szegedy, "Batch
// Normalization", 2015, algorithm 1 and section 3.
//
// Three launches each way: statistics of chunks of a channel, their union, and the elements. Block (256), grid (chunks,
// channels) for the first, a warp a channel for the second. Bytes: forward x twice and y once, backward g and x twice
// and dx once. FLOP: about 8 an element. With after = 1 neighbouring threads read `channels` elements apart.

#define CHUNK                                                                                 \
    const Index count = before_ * after_, after = after_, each = (count + gridDim.x - 1) / gridDim.x; \
    const Index begin = blockIdx.x * each, end = begin + each < count ? begin + each : count;
#define FOR_CHUNK for (Index e = begin + threadIdx.x; e < end; e += blockDim.x)
#define PLACE(e) (((e) / after * gridDim.y + blockIdx.y) * after + (e) % after)

// parts[channel][chunk] = (mean, sum of squared distances from it); two passes over a cached chunk keep it exact.
extern "C" __global__ void moments_of_chunks(const S* x, T* parts, long long before_, long long after_) {
    CHUNK
    T sum = 0, squares = 0;
    FOR_CHUNK sum += (T)x[PLACE(e)];
    const T mean = team_sum(sum) / (end - begin);
    FOR_CHUNK {
        const T d = (T)x[PLACE(e)] - mean;
        squares += d * d;
    }
    squares = team_sum(squares);
    T* part = parts + 2 * ((long long)blockIdx.y * gridDim.x + blockIdx.x);
    if (threadIdx.x == 0) part[0] = mean, part[1] = squares;
}

// mean and var of each channel from its chunks, all of `each` elements but the last: T. Chan et al., "Updating Formulae
// and a Pairwise Algorithm for Computing Sample Variances", 1979, eq. 2.1. One thread a channel.
extern "C" __global__ void join_moments(const T* parts, S* mean, S* var, T* exact, long long channels, long long chunks,
                                        long long count) {
    const long long c = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= channels) return;
    const long long each = (count + chunks - 1) / chunks;
    T center = 0, squares = 0;
    for (long long k = 0, seen = 0; k < chunks; k++) {
        const long long size = (k + 1) * each < count ? each : count - k * each;
        const T shift = parts[2 * (c * chunks + k)] - center;
        center += shift * size / (seen + size);
        squares += parts[2 * (c * chunks + k) + 1] + shift * shift * ((T)seen * size / (seen + size));
        seen += size;
    }
    mean[c] = center, var[c] = squares / count, exact[2 * c] = center, exact[2 * c + 1] = squares / count;
}

// y = (x - mean) scale / sqrt(var + epsilon) + bias. One thread an element.
extern "C" __global__ void normalize(const S* x, const T* exact, const S* scale, const S* bias, S* y, long long n,
                                     long long channels_, long long after_, double epsilon) {
    const Index channels = channels_, after = after_;
    FOR_ELEMENTS(n) {
        const Index c = e / after % channels;
        const T factor = (T)scale[c] / sqrt(exact[2 * c + 1] + (T)epsilon);
        y[e] = ((T)x[e] - exact[2 * c]) * factor + (T)bias[c];
    }
}

// parts[channel][chunk] = (sum of g normal, sum of g).
extern "C" __global__ void slopes_of_chunks(const S* g, const S* x, const S* mean, const S* var, T* parts,
                                            long long before_, long long after_, double epsilon) {
    CHUNK
    const T center = mean[blockIdx.y], inverse = 1 / sqrt((T)var[blockIdx.y] + (T)epsilon);
    T weighed = 0, plain = 0;
    FOR_CHUNK {
        const T v = g[PLACE(e)];
        weighed += v * ((T)x[PLACE(e)] - center) * inverse, plain += v;
    }
    weighed = team_sum(weighed), plain = team_sum(plain);
    T* part = parts + 2 * ((long long)blockIdx.y * gridDim.x + blockIdx.x);
    if (threadIdx.x == 0) part[0] = weighed, part[1] = plain;
}

extern "C" __global__ void join_slopes(const T* parts, S* dscale, S* dbias, T* exact, long long channels, long long chunks) {
    const long long c = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= channels) return;
    T weighed = 0, plain = 0;
    for (long long k = 0; k < chunks; k++) weighed += parts[2 * (c * chunks + k)], plain += parts[2 * (c * chunks + k) + 1];
    dscale[c] = weighed, dbias[c] = plain, exact[2 * c] = weighed, exact[2 * c + 1] = plain;
}

// dx = scale / sqrt(var + epsilon) (g - mean(g) - normal mean(g normal)). One thread an element.
extern "C" __global__ void normalize_dx(const S* g, const S* x, const S* scale, const S* mean, const S* var, const T* exact,
                                        S* dx, long long n, long long channels_, long long after_, double epsilon) {
    const Index channels = channels_, after = after_;
    const T share = (T)channels / n;
    FOR_ELEMENTS(n) {
        const Index c = e / after % channels;
        const T inverse = 1 / sqrt((T)var[c] + (T)epsilon), normal = ((T)x[e] - (T)mean[c]) * inverse;
        dx[e] = ((T)g[e] - exact[2 * c + 1] * share - normal * exact[2 * c] * share) * (T)scale[c] * inverse;
    }
}

// Batch normalization of (before, channels, after), by statistics over before and after: S. Ioffe, C. Szegedy, "Batch
// Normalization", 2015, algorithm 1 and section 3; with the relu behind it, and a sum between them.
//
// Images are of type S, vectors over channels of type V, statistics of type M. `channels.py` puts constants in front: PACK elements move at
// once, neighbors of one channel, or if LAST (after = 1) of as many channels. RELU: y = max(y + more, 0). MORE: there
// is one more array of images, which forward is what is added, and backward the y that tells where the relu let through;
// without it, that is computed from x again.
//
// Three launches each way: parts (block x, y sums up chunk x of channels y), their union, and the elements. Blocks of the
// first and last are (across, along): across channels, along what is summed up. Bytes: forward x twice, more and y once;
// backward g, x and more twice and dx once. FLOP: about 8 an element.

// The part of a thread: PACK elements at place(k) for each k from `begin`, of a channel or PACK of them.
struct Part {
    Index channels, after, channel, begin, end;
    __device__ Part(long long before, long long channels_, long long after_) : channels(channels_), after(after_) {
        const Index steps = LAST ? before : before * after_ / PACK, each = (steps + gridDim.x - 1) / gridDim.x;
        const Index last = (blockIdx.x + 1) * each;
        channel = (blockIdx.y * blockDim.x + threadIdx.x) * (LAST ? PACK : 1);
        begin = blockIdx.x * each + threadIdx.y, end = channel >= channels ? 0 : last < steps ? last : steps;
    }
    __device__ Index place(Index k) const {
        return LAST ? k * channels + channel : (k * PACK / after * channels + channel) * after + k * PACK % after;
    }
};
#define FOR_PLACES(e) for (Index k = part.begin, e; k < part.end && (e = part.place(k), true); k += blockDim.y)
typedef Pack<S, PACK> Images;
#define AT(x) load<PACK>(x + e)

// The number of its channel for each element of a pack, read up to 16 bytes at a time; 0 where a thread has no channels.
struct Line {
    T v[PACK];
    template <class N> __device__ Line(const N* x, const Part& part) {
        constexpr int width = !LAST ? 1 : PACK * sizeof(N) > 16 ? 16 / sizeof(N) : PACK;
        Pack<N, width> own = {};
        for (int j = 0; j < PACK; j++) {
            if (j % width == 0 && part.end) own = load<width>(x + part.channel + (LAST ? j : 0));
            v[j] = own.v[j % width];
        }
    }
};

// The sum of one A for each thread along the block, at its first thread; a tree, so that timing does not matter.
template <class A> __device__ inline A sum_along(A a) {
    __shared__ A parts[256];
    const int own = threadIdx.y * blockDim.x + threadIdx.x;
    parts[own] = a;
    __syncthreads();
    for (int step = blockDim.y / 2; step; step /= 2) {
        if (threadIdx.y < step) parts[own] = parts[own] + parts[own + step * blockDim.x];
        __syncthreads();
    }
    return parts[own];
}

// What a block has summed up, to parts[chunk][channel].
template <class A> __device__ inline void store(A* sums, A* parts, const Part& part) {
    for (int j = 1; j < PACK && !LAST; j++) sums[0] = sums[0] + sums[j];
    for (int j = 0; j < (LAST ? PACK : 1); j++) {
        const A sum = sum_along(sums[j]);
        if (threadIdx.y == 0 && part.end) parts[(long long)blockIdx.x * part.channels + part.channel + j] = sum;
    }
}

// The sum of parts[.][channel], for the first thread along a block of 256. Four readings wait for memory together.
template <class A> __device__ inline A sum_of_parts(const A* parts, long long channel, long long channels, long long chunks) {
    A sum = {}, own[4];
    for (long long first = threadIdx.y; first < chunks && channel < channels; first += 4 * blockDim.y) {
        for (int i = 0; i < 4; i++) {
            const long long k = first + i * blockDim.y;
            own[i] = k < chunks ? parts[k * channels + channel] : A{};
        }
        for (const A& a : own) sum = sum + a;
    }
    return sum_along(sum);
}

// -- forward ---------------------------------------------------------------------------------------------------------

// Mean and sum of squared distances from it. Unions are exact: T. Chan et al., "Updating Formulae and a Pairwise
// Algorithm for Computing Sample Variances", 1979, eq. 2.1; one more value is B. Welford's case of it, 1962.
struct Moments {
    T count, mean, squares;
    __device__ Moments operator+(const Moments& o) const {
        const T whole = count + o.count, share = o.count / fmax(whole, (T)1), shift = o.mean - mean;
        return {whole, mean + shift * share, squares + o.squares + shift * shift * count * share};
    }
};

extern "C" __global__ void moments_of_chunks(const S* x, T* parts, long long before, long long channels, long long after) {
    const Part part(before, channels, after);
    Moments sums[PACK] = {};
    T count = 0;
    FOR_PLACES(e) {
        const Images own = AT(x);
        const T share = 1 / ++count;
        for (int j = 0; j < PACK; j++) {
            const T v = own.v[j], shift = v - sums[j].mean;
            sums[j].mean += shift * share, sums[j].squares += shift * (v - sums[j].mean);
        }
    }
    for (Moments& m : sums) m.count = count;
    store(sums, (Moments*)parts, part);
}

// mean and var of each channel, and three lines: mean, scale / sqrt(var + epsilon), bias.
extern "C" __global__ void join_moments(const T* parts, const V* scale, const V* bias, M* mean, M* var, T* lines,
                                        long long channels, long long chunks, double epsilon) {
    const long long c = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const Moments all = sum_of_parts((const Moments*)parts, c, channels, chunks);
    if (threadIdx.y || c >= channels) return;
    const T variance = all.squares / all.count;
    mean[c] = all.mean, var[c] = variance;
    lines[c] = all.mean, lines[channels + c] = (T)scale[c] / sqrt(variance + (T)epsilon), lines[2 * channels + c] = bias[c];
}

extern "C" __global__ void normalize(const S* x, const S* more, const T* lines, S* y, long long before, long long channels,
                                     long long after) {
    const Part part(before, channels, after);
    const Line mean(lines, part), factor(lines + channels, part), bias(lines + 2 * channels, part);
    FOR_PLACES(e) {
        const Images own = AT(x), other = AT(more);
        Images made;
        for (int j = 0; j < PACK; j++) {
            T v = ((T)own.v[j] - mean.v[j]) * factor.v[j] + bias.v[j];
            if (MORE) v += (T)other.v[j];
            made.v[j] = RELU ? fmax(v, (T)0) : v;
        }
        store(y + e, made);
    }
}

// -- backward --------------------------------------------------------------------------------------------------------

struct Slopes {  // sums of g (x - mean), and of g
    T steep, plain;
    __device__ Slopes operator+(const Slopes& o) const { return {steep + o.steep, plain + o.plain}; }
};

// Whether the relu let through what is `distance` from the mean.
__device__ inline bool is_open(T distance, T factor, T bias, T more) {
    return !RELU || (MORE ? more : distance * factor + bias) > 0;
}

extern "C" __global__ void slopes_of_chunks(const S* g, const S* x, const S* more, const V* scale, const V* bias_,
                                            const M* mean_, const M* var, T* parts, long long before, long long channels,
                                            long long after, double epsilon) {
    const Part part(before, channels, after);
    const Line mean(mean_, part), bias(bias_, part), spread(var, part);
    Line factor(scale, part);
    for (int j = 0; j < PACK; j++) factor.v[j] /= sqrt(spread.v[j] + (T)epsilon);
    Slopes sums[PACK] = {};
    FOR_PLACES(e) {
        const Images slopes = AT(g), own = AT(x), other = AT(more);
        for (int j = 0; j < PACK; j++) {
            const T distance = (T)own.v[j] - mean.v[j];
            const T slope = is_open(distance, factor.v[j], bias.v[j], other.v[j]) ? (T)slopes.v[j] : (T)0;
            sums[j].steep += slope * distance, sums[j].plain += slope;
        }
    }
    store(sums, (Slopes*)parts, part);
}

// dscale and dbias, and three lines: dx = factor g - plain - steep (x - mean).
extern "C" __global__ void join_slopes(const T* parts, const V* scale, const M* var, V* dscale, V* dbias, T* lines,
                                       long long channels, long long chunks, long long count, double epsilon) {
    const long long c = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const Slopes all = sum_of_parts((const Slopes*)parts, c, channels, chunks);
    if (threadIdx.y || c >= channels) return;
    const T root = sqrt((T)var[c] + (T)epsilon), factor = (T)scale[c] / root, weighed = all.steep / root;
    dscale[c] = weighed, dbias[c] = all.plain;
    lines[c] = factor, lines[channels + c] = factor * all.plain / count;
    lines[2 * channels + c] = factor * weighed / root / count;
}

extern "C" __global__ void normalize_dx(const S* g, const S* x, const S* more, const T* lines, const V* bias_, const M* mean_,
                                        S* dx, long long before, long long channels, long long after) {
    const Part part(before, channels, after);
    const Line mean(mean_, part), bias(bias_, part), factor(lines, part), plain(lines + channels, part);
    const Line steep(lines + 2 * channels, part);
    FOR_PLACES(e) {
        const Images slopes = AT(g), own = AT(x), other = AT(more);
        Images made;
        for (int j = 0; j < PACK; j++) {
            const T distance = (T)own.v[j] - mean.v[j];
            const T slope = is_open(distance, factor.v[j], bias.v[j], other.v[j]) ? (T)slopes.v[j] : (T)0;
            made.v[j] = factor.v[j] * slope - plain.v[j] - steep.v[j] * distance;
        }
        store(dx + e, made);
    }
}

// LAMB for all parameters of a model in two launches, since its step needs the norms of whole parameters.
// Y. You et al., "Large Batch Optimization for Deep Learning", ICLR 2020, algorithm 2.
//
// Tables and conditions are those of `update_all` (update.cu); `update.py` puts the hyperparameters in front, as
// constants. Bytes: 24 an element of float32 in the first launch, 16 in the second; FLOP: about 25 an element.

__device__ inline T direction(T alpha, T eps, T p, T m, T v) { return alpha * m / (sqrt(v) + eps) + (T)weight_decay * p; }

// Rate and epsilon with both bias corrections folded in (D. Kingma, J. Ba, "Adam", end of section 2), without the rate.
__device__ inline void folded(double step, T& alpha, T& eps) {
    const double root = ::sqrt(1 - ::pow(beta2, step));
    alpha = root / (1 - ::pow(beta1, step)), eps = epsilon * root;
}

// New moments, and of each chunk the sums of squares of the parameter and of its direction: parts[chunk][2].
extern "C" __global__ void lamb_moments(TENSORS, const N* step, const bool* ok, const S* scale, T* parts) {
    CHUNK_OF(k, begin, end);
    const bool moves = *ok;
    const T divisor = *scale;
    S* const* row = table + (long long)k * 7;
    S *const new_m = row[1], *const new_v = row[2];
    const S *const p = row[3], *const old_m = row[4], *const old_v = row[5];
    T alpha, eps, length = 0, along = 0;
    folded((double)*step, alpha, eps);
    in_own_dtype(row[6], kinds[k], [&](auto* gradient) {
        each_pack(begin, end, [&](auto neighbors, long long i) {
            const int count = neighbors.count;
            const auto g = load<count>(gradient + i);
            const auto x = load<count>(p + i);
            auto m = load<count>(old_m + i), v = load<count>(old_v + i);
            for (int j = 0; j < count; j++) {
                const T slope = (T)g.v[j] / divisor, first = (T)beta1 * (T)m.v[j] + (T)(1 - beta1) * slope;
                const T second = (T)beta2 * (T)v.v[j] + (T)(1 - beta2) * (slope * slope);
                const T r = direction(alpha, eps, x.v[j], first, second);
                if (moves) m.v[j] = first, v.v[j] = second;
                length += (T)x.v[j] * (T)x.v[j], along += r * r;
            }
            store(new_m + i, m), store(new_v + i, v);
        });
    });
    length = team_sum(length), along = team_sum(along);
    if (threadIdx.x == 0) parts[2 * blockIdx.x] = length, parts[2 * blockIdx.x + 1] = along;
}

// The parameter moves along its direction by rate times its own length; tensor k has the chunks first[k]..first[k + 1].
extern "C" __global__ void lamb_step(TENSORS, const long long* first, const R* rate, const N* step, const bool* ok,
                                     const T* parts) {
    CHUNK_OF(k, begin, end);
    const bool moves = *ok;
    S* const* row = table + (long long)k * 7;
    T alpha, eps, length = 0, along = 0;
    folded((double)*step, alpha, eps);
    for (long long c = first[k] + threadIdx.x; c < first[k + 1]; c += blockDim.x)
        length += parts[2 * c], along += parts[2 * c + 1];
    length = sqrt(team_sum(length)), along = sqrt(team_sum(along));
    const T scale = (T)(double)*rate * (length > 0 && along > 0 ? length / along : (T)1);
    S* const to = row[0];
    const S *const from = row[3], *const moment = row[1], *const square = row[2];
    each_pack(begin, end, [&](auto neighbors, long long i) {
        const int count = neighbors.count;
        auto p = load<count>(from + i);
        const auto m = load<count>(moment + i), v = load<count>(square + i);
        if (moves)
            for (int j = 0; j < count; j++) p.v[j] = (T)p.v[j] - scale * direction(alpha, eps, p.v[j], m.v[j], v.v[j]);
        store(to + i, p);
    });
}

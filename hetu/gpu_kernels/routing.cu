// The layout transform of a mixture of experts: tokens (n, features) to slots and back, k choices a token, -1 for none.
// X. Nie et al., "HetuMoE", 2022. `routing.py` puts PACK in front, the neighbors that one thread moves at once.
//
// A warp a row, block (32, 8). Bytes: dispatch reads each chosen token and writes each slot once; combine reads each
// chosen slot and writes each token once; products reads both and writes n k numbers. FLOP: at most 2 an element moved.

// choice[slot] = which of the n k choices it belongs to. `choice` holds -1 before.
extern "C" __global__ void find_choices(const I* slots, long long* choice, long long n, long long count) {
    for (long long e = (long long)blockIdx.x * blockDim.x + threadIdx.x; e < n; e += (long long)gridDim.x * blockDim.x)
        if (slots[e] >= 0 && slots[e] < count) choice[slots[e]] = e;
}

// Gathers by slot instead of scattering by token, so that no slot has to be cleared first.
extern "C" __global__ void moe_dispatch(const S* x, const long long* choice, const S* weights, S* y, long long count,
                                        long long features, long long k) {
    const long long slot = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (slot >= count) return;
    const long long e = choice[slot];
    const T weight = e < 0 ? (T)0 : (T)weights[e];
    for (long long f = threadIdx.x * PACK; f < features; f += 32 * PACK) {
        Pack<S, PACK> v;
        if (e >= 0) v = load<PACK>(x + e / k * features + f);
        for (int j = 0; j < PACK; j++) v.v[j] = e < 0 ? (T)0 : weight * (T)v.v[j];
        store(y + slot * features + f, v);
    }
}

extern "C" __global__ void moe_combine(const S* y, const I* slots, const S* weights, S* out, long long n, long long k,
                                       long long count, long long features) {
    const long long token = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (token >= n) return;
    for (long long f = threadIdx.x * PACK; f < features; f += 32 * PACK) {
        T sum[PACK] = {};
        for (long long e = token * k; e < (token + 1) * k; e++) {
            const long long slot = slots[e];
            if (slot < 0 || slot >= count) continue;
            const auto v = load<PACK>(y + slot * features + f);
            for (int j = 0; j < PACK; j++) sum[j] += (T)weights[e] * (T)v.v[j];
        }
        Pack<S, PACK> row;
        for (int j = 0; j < PACK; j++) row.v[j] = sum[j];
        store(out + token * features + f, row);
    }
}

// A warp a choice; n choices in all.
extern "C" __global__ void moe_products(const S* x, const S* y, const I* slots, S* out, long long n, long long k,
                                        long long count, long long features) {
    const long long e = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (e >= n) return;
    const long long slot = slots[e];
    T sum = 0;
    if (slot >= 0 && slot < count)
        for (long long f = threadIdx.x * PACK; f < features; f += 32 * PACK) {
            const auto a = load<PACK>(x + e / k * features + f);
            const auto b = load<PACK>(y + slot * features + f);
            for (int j = 0; j < PACK; j++) sum += (T)a.v[j] * (T)b.v[j];
        }
    sum = warp_sum(sum);
    if (threadIdx.x == 0) out[e] = sum;
}

// Adding rows to a table: out[ids[i]] += rows[i], in two ways. Floating tables only.

// One thread an element and one atomic addition each: fastest, but the order of a sum, so its last digit, varies.
// Bytes: the rows once, the touched rows of the table twice.
extern "C" __global__ void scatter_atomic(const S* rows, const I* ids, T* out, long long n, long long length,
                                          long long inner) {
    for (long long e = (long long)blockIdx.x * blockDim.x + threadIdx.x; e < n; e += (long long)gridDim.x * blockDim.x) {
        const long long id = ids[e / inner];
        if (id >= 0 && id < length) atomicAdd(&out[id * inner + e % inner], (T)rows[e]);
    }
}

// `order` sorts the ids stably. The warp at the first place of each id sums its rows in that order and adds once:
// the same digits every time, no atomics, sums in T. Block (32, 8), 8 places a block. Slow for one very frequent id.
extern "C" __global__ void scatter_sorted(const S* rows, const I* ids, const long long* order, S* out, long long count,
                                          long long length, long long inner) {
    const long long place = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (place >= count) return;
    const I id = ids[order[place]];
    if ((place > 0 && ids[order[place - 1]] == id) || (long long)id < 0 || (long long)id >= length) return;
    for (long long k = threadIdx.x; k < inner; k += 32) {
        T sum = out[(long long)id * inner + k];
        for (long long p = place; p < count && ids[order[p]] == id; p++) sum += (T)rows[order[p] * inner + k];
        out[(long long)id * inner + k] = sum;
    }
}

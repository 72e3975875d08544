// Adding rows or elements to a table by their ids, in two ways each: by atomics, and without. Floating tables only.
//
// Bytes: what is added once, what it touches of the table twice. An id that names nothing adds to nothing.

// out[ids[i]] += rows[i]. One thread an element and one atomic addition each: fastest, but the order of a sum, so its last
// digit, varies.
extern "C" __global__ void scatter_atomic(const S* rows, const I* ids, T* out, long long n, long long length,
                                          long long inner_) {
    const Index inner = inner_;
    FOR_ELEMENTS(n) {
        const long long id = ids[e / inner];
        if (id >= 0 && id < length) atomicAdd(&out[id * inner + e % inner], (T)rows[e]);
    }
}

// `order` sorts the ids stably. The warp at the first place of each id sums its rows in that order and adds once:
// the same digits every time, no atomics, sums in T. Block (32, 8), 8 places a block. One very frequent id keeps its warp
// busy alone, 8 rows under way at a time.
extern "C" __global__ void scatter_sorted(const S* rows, const I* ids, const long long* order, S* out, long long count,
                                          long long length, long long inner) {
    const long long place = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (place >= count) return;
    const I id = ids[order[place]];
    if ((place > 0 && ids[order[place - 1]] == id) || (long long)id < 0 || (long long)id >= length) return;
    const long long end = end_of_run(ids, order, place, count);
    for (long long k = threadIdx.x; k < inner; k += 32) {
        T sum = out[(long long)id * inner + k];
#pragma unroll 8
        for (long long p = place; p < end; p++) sum += (T)rows[order[p] * inner + k];
        out[(long long)id * inner + k] = sum;
    }
}

// y[o, ids[o, i, k], k] += v[o, i, k], in the order of i: one thread for all i, so no two threads meet.
extern "C" __global__ void add_along(const S* v, const I* ids, S* y, long long n, long long count, long long length,
                                     long long inner_) {
    const Index inner = inner_;
    FOR_ELEMENTS(n) {
        const long long o = e / inner, k = e % inner;
        for (long long i = 0; i < count; i++) {
            const long long place = (o * count + i) * inner + k, id = ids[place];
            if (id < 0 || id >= length) continue;
            S& target = y[(o * length + id) * inner + k];
            target = (T)target + (T)v[place];
        }
    }
}

// The same by one thread an element and atomics, for long columns of which there are few.
extern "C" __global__ void add_along_atomic(const S* v, const I* ids, T* y, long long n, long long count_, long long length,
                                            long long inner_) {
    const Index each = count_ * inner_, inner = inner_;
    FOR_ELEMENTS(n) {
        const long long id = ids[e];
        if (id >= 0 && id < length) atomicAdd(&y[(e / each * length + id) * inner + e % inner], (T)v[e]);
    }
}

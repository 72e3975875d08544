// Adding rows or elements to a table by their ids, in an order that does not depend on timing. Floating tables only.
//
// Bytes: what is added once, what it touches of the table twice. An id that names nothing adds to nothing.

// out[ids[i]] += rows[i]: the threads at the first place of each id add the sum of its run, see `runs.cu`.
extern "C" __global__ void add_rows(const I* sorted, const S* rows, const long long* order, const T* parts, S* out,
                                    long long count, long long length, long long inner) {
    const long long place = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (place >= count || !begins_run(sorted, place, length)) return;
    const long long end = run_end(sorted, place, count);
    S* row = out + (long long)sorted[place] * inner;
    FOR_PACKS(k) {
        auto v = load<PACK>(row + k);
        const auto sum = sum_of_run(rows, order, parts, place, end, inner, k);
        for (int j = 0; j < PACK; j++) v.v[j] = (T)v.v[j] + sum.v[j];
        store(row + k, v);
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

// places[e] = where the element of y lies that ids[e] names along its axis, or -1.
extern "C" __global__ void places_along(const I* ids, long long* places, long long n, long long count_, long long length,
                                        long long inner_) {
    const Index each = count_ * inner_, inner = inner_;
    FOR_ELEMENTS(n) {
        const long long id = ids[e];
        places[e] = id >= 0 && id < length ? (e / each * length + id) * inner + e % inner : -1;
    }
}

// Adding rows or elements to a table by their ids, in an order that does not depend on timing. Floating tables only.
//
// Bytes: what is added once, what it touches of the table twice. An id that names nothing adds to nothing.

// out[ids[i]] += rows[i]: the warp at the first place of each id adds the sum of its run, see `runs.cu`. Block (32, 8).
extern "C" __global__ void add_rows(const I* ids, const S* rows, const long long* order, const T* parts, S* out,
                                    long long count, long long length, long long inner) {
    const long long place = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (place >= count || !begins_run(ids, order, place, length)) return;
    const Run run = run_from(ids, order, place, count);
    S* row = out + (long long)ids[order[place]] * inner;
    for (long long k = threadIdx.x; k < inner; k += 32)
        row[k] = (T)row[k] + sum_of_run(run, rows, order, parts, inner, k);
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

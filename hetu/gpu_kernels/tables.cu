// Rows and elements of tables by their ids.
//
// Ids are trusted here, as checking them would cost a synchronization; one that names nothing reads as 0. Bytes: what is
// gathered twice, the ids once; no arithmetic to speak of.

// y[o, i, k] = x[o, ids[i], k]. One thread an element; with inner >= 8 neighboring threads read neighbors.
extern "C" __global__ void gather(const S* x, const I* ids, S* y, long long n, long long count_, long long length,
                                  long long inner_) {
    const Index count = count_, inner = inner_;
    FOR_ELEMENTS(n) {
        const Index row = e / inner, k = e - row * inner, o = row / count;
        const long long id = ids[row - o * count];
        y[e] = id >= 0 && id < length ? x[(o * length + id) * inner + k] : (S)0;
    }
}

// y[o, i, k] = x[o, ids[o, i, k], k]. One thread an element.
extern "C" __global__ void gather_along(const S* x, const I* ids, S* y, long long n, long long count_, long long length,
                                        long long inner_) {
    const Index each = count_ * inner_, inner = inner_;
    FOR_ELEMENTS(n) {
        const long long id = ids[e];
        y[e] = id >= 0 && id < length ? x[(e / each * length + id) * inner + e % inner] : (S)0;
    }
}

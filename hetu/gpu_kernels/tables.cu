// Rows of tables: gathering, and adding rows that belong to given ids.
//
// Ids are trusted here, as checking them would cost a synchronization; one that names no row reads as 0 and adds to
// nothing. Bytes: the rows twice, the ids once; no arithmetic to speak of.

// y[o, i, k] = x[o, ids[i], k]. One thread an element; with inner >= 8 neighbouring threads read neighbours.
extern "C" __global__ void gather(const S* x, const I* ids, S* y, long long n, long long count, long long length,
                                  long long inner) {
    for (long long e = (long long)blockIdx.x * blockDim.x + threadIdx.x; e < n; e += (long long)gridDim.x * blockDim.x) {
        const long long k = e % inner, i = e / inner % count, o = e / inner / count;
        const long long id = ids[i];
        y[e] = id >= 0 && id < length ? x[(o * length + id) * inner + k] : (S)0;
    }
}

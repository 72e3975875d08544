// Casts of many tensors, and whether all of many are finite, in one launch each; see `tensors.cu`.

// All values in another dtype, D; a row of the table is (result, values). PACK neighbors are loaded together.
// Bytes: every value read once, every result written once.
extern "C" __global__ void cast_all(TENSORS) {
    CHUNK_OF(k, begin, end);
    D* to = (D*)table[2 * k];
    const S* from = table[2 * k + 1];
    const long long packed = end - (end - begin) % PACK;
    for (long long i = begin + (long long)threadIdx.x * PACK; i < packed; i += (long long)blockDim.x * PACK) {
        const Pack<S, PACK> values = *(const Pack<S, PACK>*)(from + i);
        Pack<D, PACK> results;
        for (int j = 0; j < PACK; j++) results.v[j] = (D)(T)values.v[j];
        *(Pack<D, PACK>*)(to + i) = results;
    }
    for (long long i = packed + threadIdx.x; i < end; i += blockDim.x) to[i] = (D)(T)from[i];
}

// Whether all values, divided by a scale, are finite: `*out` was set to true before, and all who write it write false.
// Bytes: every value read once.
extern "C" __global__ void all_finite(TENSORS, const S* scale, bool* out) {
    CHUNK_OF(k, begin, end);
    const T divisor = *scale;
    bool finite = true;
    for (long long i = begin + threadIdx.x; i < end; i += blockDim.x)
        finite = finite && isfinite(load(table[k], kinds[k], i) / divisor);
    if (!finite) *out = false;
}

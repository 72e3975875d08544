// Casts of many tensors, and whether all of many are finite, in one launch each; see `tensors.cu`.

// All values in another dtype, D; a row of the table is (result, values). PACK neighbors are loaded together.
// Bytes: every value read once, every result written once.
extern "C" __global__ void cast_all(TENSORS) {
    CHUNK_OF(k, begin, end);
    D* to = (D*)table[2 * k];
    const S* from = table[2 * k + 1];
    each_pack(begin, end, [&](auto neighbors, long long i) {
        const auto values = load<neighbors.count>(from + i);
        Pack<D, neighbors.count> results;
        for (int j = 0; j < values.count; j++) results.v[j] = (D)(T)values.v[j];
        store(to + i, results);
    });
}

// Whether all values, divided by a scale, are finite: `*out` was set to true before, and all who write it write false.
// Bytes: every value read once.
extern "C" __global__ void all_finite(TENSORS, const S* scale, bool* out) {
    CHUNK_OF(k, begin, end);
    const T divisor = *scale;
    bool finite = true;
    in_own_dtype(table[k], kinds[k], [&](auto* x) {
        each_pack(begin, end, [&](auto neighbors, long long i) {
            const auto values = load<neighbors.count>(x + i);
            for (int j = 0; j < values.count; j++) finite &= isfinite((T)values.v[j] / divisor);
        });
    });
    if (!finite) *out = false;
}

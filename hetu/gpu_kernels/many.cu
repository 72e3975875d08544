// Whether all of many tensors are finite, in one launch; see `tensors.cu`.

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
